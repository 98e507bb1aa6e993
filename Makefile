# Every target installs what it needs into .venv first. Needed beforehand: make and a Python
# of at least 3.11 on PATH, with its venv module.

SHELL := /bin/sh
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:

VENV := .venv
PY := $(VENV)/bin/python
UV := $(VENV)/bin/uv
STAMP := $(VENV)/.ready
PEERS := grpc aiohttp nats patroni ray
PYTEST := $(PY) -m pytest --numprocesses
COMPILE := $(UV) pip compile --quiet --universal --generate-hashes --no-header --no-annotate \
	--no-emit-index-url --python-version

SEEDS ?= 0:3000
PROFILE ?= mixed
UNTIL ?= 100000
JOBS ?= 2
WORKERS ?= $(shell n=$$(getconf _NPROCESSORS_ONLN || echo 2); [ $$n -lt 8 ] || n=8; echo $$n)
# Real processes mostly wait: for leases, deadlines, each other.
REAL_WORKERS ?= $(shell echo $$(($(WORKERS) * 2)))
MINUTES ?= 20
SEED ?= 1
JOURNAL ?= sqlite
STORE ?= sqlite
HOURS ?= 2

ifneq ($(shell test -w "$$HOME" && echo yes),yes)
export UV_CACHE_DIR ?= $(CURDIR)/$(VENV)/.cache/uv
endif

# Trust what the system trusts, as pip does: some networks have an authority of their own.
ifneq ($(wildcard /etc/ssl/certs/ca-certificates.crt),)
export UV_SYSTEM_CERTS ?= 1
endif

.PHONY: help setup check format test test-real test-stores test-hosts test-kube kube-apiserver libfaketime test-docs prove golden sim sim-groups sim-rings sim-long chaos chaos-bank full-size search mutant mutants chaos-mutants demo bench bench-durable bench-stores compare planner idle overload recovery recovery-stores rolling crowd soak docs etcd-rpc lock clean test-replica bench-failover bench-rings

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-13s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup: $(STAMP) ## make .venv with the locked tools and this package

$(STAMP): requirements/uv.txt requirements/dev.txt pyproject.toml
	@$(PY) -c 'import pip, sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || { \
		for python in $(PYTHON) python3 python3.13 python3.12 python3.11 python; do \
			"$$python" -c 'import ensurepip, sys, venv; sys.exit(sys.version_info < (3, 11))' \
				2>/dev/null || continue; \
			echo "making $(VENV) with $$python"; \
			exec "$$python" -m venv --clear $(VENV); \
		done; \
		echo "No Python of at least 3.11 with the venv module is on PATH." >&2; \
		echo "Install one, or name it: make setup PYTHON=/path/to/python3" >&2; \
		exit 1; }
	$(PY) -m pip install --quiet --disable-pip-version-check --require-hashes -r requirements/uv.txt
	$(UV) pip install --quiet --python $(PY) --require-hashes -r requirements/dev.txt
	$(UV) pip install --quiet --python $(PY) --no-deps --no-build-isolation --editable .
	@touch $@

check: setup ## format, lint, layers and types
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/ruff check .
	$(VENV)/bin/lint-imports --no-cache
	$(VENV)/bin/mypy
	$(VENV)/bin/pyright

format: setup ## let ruff rewrite what it can
	$(VENV)/bin/ruff format .
	$(VENV)/bin/ruff check --fix .

test: setup ## pure and virtual-time tests, a smoke test per backend (ARGS="-k lease", WORKERS=0)
	$(PYTEST) $(WORKERS) --dist worksteal tests/unit tests/sim tests/types tests/smoke proving/tests \
		--ignore proving/tests/real $(ARGS)

test-real: setup ## tests of real processes, sockets, threads and files
	$(PYTEST) $(REAL_WORKERS) --dist worksteal tests/real $(ARGS)

test-stores: setup ## what depends on the store, on every server of a store, in all variants
	DOMICILE_TEST_STORES=all $(PYTEST) 0 tests/real/test_real_stores.py \
		tests/real/test_resumed_too_late.py tests/unit/stores $(ARGS)

test-kube: setup ## controller rings on a real kube-apiserver, built once (8 CPU minutes)
	@# 3: there is neither the server nor a Go to build it. The tests are skipped, and say why.
	proving/servers/build_kube_apiserver.sh || test $$? -eq 3
	$(PY) -m pytest -rs tests/kube $(ARGS)

kube-apiserver: ## build the API server that test-kube starts, if it is not in the cache
	proving/servers/build_kube_apiserver.sh

test-replica: setup ## replica groups under faults, on real servers (root: also in network namespaces)
	$(PYTEST) $(WORKERS) --dist worksteal tests/replica $(ARGS)

libfaketime: ## install what tests step a server's clock with, if it is not there (root, Debian)
	proving/servers/install_libfaketime.sh

test-docs: setup ## every example and console session of the pages, and the examples
	$(PYTEST) $(WORKERS) --dist worksteal tests/docs $(ARGS)

test-hosts: setup ## hosts that lose their store, on every server of one, for a minute (root, 15 minutes)
	DOMICILE_TEST_STORES=all $(PYTEST) 0 tests/hosts tests/real/test_real_names.py $(ARGS)

prove: setup ## what takes long: tests of the harness, search, mutants, seeds, chaos
	$(PYTEST) $(WORKERS) --dist loadfile proving/tests/real $(ARGS)
	$(MAKE) search
	$(MAKE) mutants
	$(MAKE) sim
	$(MAKE) sim PROFILE=one-key SEEDS=0:300
	$(MAKE) sim-groups
	$(MAKE) chaos MINUTES=4

golden: setup ## rewrite the golden digests after an intended change of runs
	$(PY) -m proving.golden.update

sim: setup ## 3,000 simulated seeds (SEEDS=A:B, PROFILE=NAME, JOBS=N)
	$(PY) -m proving.campaign --seeds $(SEEDS) --profile $(PROFILE) --jobs $(JOBS)

sim-groups: setup ## 3,000 simulated seeds of replica groups (SEEDS=A:B, JOBS=N)
	$(PY) -m proving.groups --seeds $(SEEDS) --jobs $(JOBS)

sim-rings: setup ## 300 simulated seeds of controller rings (SEEDS=A:B, WORKERS=N)
	DOMICILE_RING_SEEDS=$(if $(filter file,$(origin SEEDS)),0:300,$(SEEDS)) $(PYTEST) $(WORKERS) \
		tests/sim/test_rings.py -k comes_to_rest $(ARGS)

sim-long: setup ## 100,000 of them, with stops: the same command goes on (UNTIL=N, JOBS=N, ARGS=...)
	$(PY) -m proving.long --until $(UNTIL) --jobs $(JOBS) $(ARGS)

chaos: setup ## random faults on real processes (MINUTES=20 SEED=1 STORE=postgresql, ARGS="--round 3")
	$(PY) -m proving.chaos --minutes $(MINUTES) --seed $(SEED) --store $(STORE) $(ARGS)

chaos-bank: setup ## durable accounts under faults, judged by a ledger (MINUTES=20 SEED=1 JOURNAL=postgresql)
	$(PY) -m proving.bank --minutes $(MINUTES) --seed $(SEED) --journal $(JOURNAL) $(ARGS)

full-size: setup ## RG-05 in full: a million numbered messages while shards move (ARGS="--numbers 20")
	$(PY) -m proving.full_size $(ARGS)

search: setup ## every order of events of small clusters, on the real machines
	$(PY) -m proving.search $(ARGS)

mutant: setup ## plant a bug and see it found: PATCH=proving/mutants/name.patch
	@test -n "$(PATCH)" || { echo "usage: make mutant PATCH=proving/mutants/name.patch" >&2; exit 2; }
	$(PY) -m proving.mutants.run $(PATCH)

mutants: setup ## all planted bugs, one after the other
	$(PY) -m proving.mutants.run --all

chaos-mutants: setup ## the planted bugs that real processes can show, each under chaos until found
	$(PY) -m proving.mutants.run --chaos --all $(ARGS)

demo: setup ## a bank on real processes: kill one, freeze one, see that no coin is lost (STORE=etcd)
	$(PY) -m proving.demo --store $(STORE) $(ARGS)

bench: setup ## the benchmarks, with peers in the same run (ARGS=--quick, ARGS="--peers none")
	$(PY) -m proving.benchmarks.run $(ARGS)

bench-durable: setup ## durable entities on both journals, with peers (ARGS="--only lone", ARGS=--quick)
	$(PY) -m proving.benchmarks.durable $(ARGS)

bench-stores: setup ## what each store costs: idle requests, commits, watches (ARGS=--next, ARGS="--only etcd")
	$(PY) -m proving.benchmarks.stores $(ARGS)

bench-failover: setup ## time without a primary, beside Sentinel and Patroni (ARGS=--next, ARGS="--only valkey-")
	$(PY) -m proving.benchmarks.failover $(ARGS)

bench-rings: setup kube-apiserver ## what a ring of controllers costs (ARGS=--next, ARGS="--only objects")
	$(PY) -m proving.benchmarks.rings $(ARGS)

compare: setup ## CPU per message of another checkout and of this one, interleaved: OLD=path
	@test -n "$(OLD)" || { echo "usage: make compare OLD=path/to/checkout" >&2; exit 2; }
	$(PY) -m proving.benchmarks.compare $(OLD) . $(ARGS)

planner: setup ## what a plan costs at 10,000 and 100,000 shards
	$(PY) -m proving.benchmarks.planner $(ARGS)

idle: setup ## what an idle cluster asks of its store and of the machine (I8)
	$(PY) -m proving.benchmarks.idle $(ARGS)

overload: setup ## what a node does at half, once and three times its capacity
	$(PY) -m proving.benchmarks.overload $(ARGS)

recovery: setup ## how long shards are without a home when nodes are lost (DX-04; ARGS="--runs N --peer")
	$(PY) -m proving.benchmarks.recovery $(ARGS)

recovery-stores: setup ## the same on each store that has a server, run by run (ARGS=--next)
	$(PY) -m proving.benchmarks.recovery_stores $(ARGS)

rolling: setup ## what callers feel of rolling updates, drains and scaling (RG-27, SM-14; STORE=etcd)
	$(PY) -m proving.benchmarks.rolling --store $(STORE) $(ARGS)

crowd: setup ## 50 nodes start and stop at once, 200 clients come and go
	$(PY) -m proving.benchmarks.crowd $(ARGS)

soak: setup ## hours of load with a fault every few seconds: nothing may grow (HOURS=2)
	$(PY) -m proving.benchmarks.soak --hours $(HOURS) $(ARGS)

docs: setup ## redraw the diagrams of the transition tables and the timeline of a seed
	PYTHONPATH=. $(PY) docs/generate.py

etcd-rpc: setup ## generate the messages of etcd's API from rpc.proto
	cd src && ../$(PY) -m grpc_tools.protoc -I. --pyi_out=. \
		--descriptor_set_out=domicile/stores/etcd/rpc.binpb domicile/stores/etcd/rpc.proto

lock: setup ## compile the requirement files anew
	$(COMPILE) 3.11 requirements/uv.in -o requirements/uv.txt
	$(COMPILE) 3.11 requirements/base.in -o requirements/base.txt
	$(COMPILE) 3.11 requirements/cli.in -o requirements/cli.txt
	for extra in etcd kopf kubernetes postgres redis; do \
		$(COMPILE) 3.11 requirements/$$extra.in -o requirements/$$extra.txt || exit 1; \
	done
	$(COMPILE) 3.11 requirements/dev.in -o requirements/dev.txt
	for peer in $(PEERS); do \
		$(COMPILE) 3.11 proving/benchmarks/requirements-$$peer.in -o proving/benchmarks/requirements-$$peer.txt \
			|| exit 1; \
	done
	$(COMPILE) 3.12 proving/benchmarks/requirements-casty.in -o proving/benchmarks/requirements-casty.txt

clean: ## remove everything that can be made again
	rm -rf $(VENV) build dist .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
	rm -rf .coverage .venvs .bench
	find src tests docs proving examples -type d -name __pycache__ -prune -exec rm -rf {} +
