"""What an idle cluster costs: `python -m proving.benchmarks.idle [--nodes N] [--seconds S]`.

Starts real nodes on one embedded store, sends nothing, and says what each asks of the store and
how much of a core it uses, at 16 to 65,536 shards: overhead must not grow with them (I8). Node
0 is the only candidate, so it coordinates. Requests are counted where a node calls its store; a
watch is one when it is opened. What the embedded store's watches do to notice changes of the file,
many times a second, is no request but shows as CPU time.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from concurrent.futures import Future
from contextlib import ExitStack, asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from domicile import Node, Settings
from domicile.backends.wiring import open_backends
from domicile.core.state.txn import Changes, Condition, Item, Listing, Outcome, Write
from domicile.incarnation.context import Backends
from domicile.observe import Metrics
from domicile.ports.store import Kept, OffersThreads, Store, ThreadedStore
from proving.benchmarks.home import Echo
from proving.benchmarks.part import Options
from proving.benchmarks.part import Part as PartOf
from proving.benchmarks.processes import ROOT, Part, cpu_of_all_s
from proving.benchmarks.report import fill, grid

SHARDS = (16, 256, 4_096, 65_536)
NODES = 3
CALM_S = 1.0
"""A cluster is calm once no follower has asked for more than this time's fair share."""

SETTLE_S = 120.0
REQUESTS_PER_S = 2.0
CPU_SHARE = 0.005
FLAT = 1.5
"""How many times as much the largest cluster may cost and still be called flat."""

NOISE_SHARE = 0.0005
PAGE = ROOT / "docs" / "explanation" / "performance.md"


class Counting:
    """A store that counts what is asked of it."""

    def __init__(self, store: Store, counts: Counter[str]) -> None:
        self._store, self._counts = store, counts

    async def get(self, key: bytes) -> Item | None:
        """As `Store.get`."""
        self._counts["get"] += 1
        return await self._store.get(key)

    async def list(self, prefix: bytes) -> Listing:
        """As `Store.list`."""
        self._counts["list"] += 1
        return await self._store.list(prefix)

    async def commit(self, conditions: Sequence[Condition], writes: Sequence[Write]) -> Outcome:
        """As `Store.commit`."""
        self._counts["commit"] += 1
        return await self._store.commit(conditions, writes)

    async def grant(self, lease: str, ttl_s: float) -> float:
        """As `Store.grant`."""
        self._counts["grant"] += 1
        return await self._store.grant(lease, ttl_s)

    async def renew(self, lease: str) -> float | None:
        """As `Store.renew`."""
        self._counts["renew"] += 1
        return await self._store.renew(lease)

    async def revoke(self, lease: str) -> None:
        """As `Store.revoke`."""
        self._counts["revoke"] += 1
        await self._store.revoke(lease)

    def watch(self, prefix: bytes, from_revision: int) -> AsyncIterator[Changes]:
        """As `Store.watch`."""
        self._counts["watch"] += 1
        return self._store.watch(prefix, from_revision)

    async def close(self) -> None:
        """As `Store.close`."""
        await self._store.close()

    def beside(self, prefix: bytes = b"") -> ThreadedStore | None:
        """As `OffersThreads.beside`."""
        made = self._store.beside(prefix) if isinstance(self._store, OffersThreads) else None
        return None if made is None else CountingBeside(made, self._counts)


class CountingBeside:
    """The same for what a thread asks beside the event loop."""

    def __init__(self, beside: ThreadedStore, counts: Counter[str]) -> None:
        self._beside, self._counts = beside, counts

    def keep(self, lease: str, key: bytes) -> Future[Kept]:
        """As `ThreadedStore.keep`: two requests in one call."""
        self._counts["renew"] += 1
        self._counts["get"] += 1
        return self._beside.keep(lease, key)

    def rewrite(self, key: bytes, revision: int, value: bytes, lease: str) -> Future[Outcome]:
        """As `ThreadedStore.rewrite`."""
        self._counts["commit"] += 1
        return self._beside.rewrite(key, revision, value, lease)


class Counted:
    """Tells how much was asked so far."""

    def __init__(self, counts: Counter[str]) -> None:
        self._counts = counts

    async def run(self, wanted: dict[str, Any]) -> dict[str, Any]:
        """All kinds of requests."""
        return dict(self._counts)


@asynccontextmanager
async def node(options: Options) -> AsyncGenerator[tuple[str, dict[str, Any]]]:
    """A node that does nothing."""
    counts: Counter[str] = Counter()
    settings = Settings(shards=options["shards"], balance_limit=1.0, balance_shards=10_000)

    def wired() -> Backends:
        made = open_backends(
            options["where"], cluster="domicile", settings=settings, by=options["id"],
            meter=Metrics(),
        )  # fmt: skip
        return replace(made, store=Counting(made.store, counts))

    async with Node(
        options["where"], entities=[Echo], node_id=options["id"], settings=settings,
        candidate=options["candidate"], backends=wired,
    ):  # fmt: skip
        yield options["where"], {"idle": Counted(counts)}


PARTS: dict[str, PartOf] = {"node": node}


class Cost:
    """What one node asked and used in a while."""

    def __init__(self, part: Part) -> None:
        self._part = part
        self._at = time.monotonic()
        self._counts = self.counts()
        self._cpu_s = cpu_of_all_s(part)

    def counts(self) -> Counter[str]:
        """All requests so far."""
        return Counter(self._part.run(system="idle", what="counts"))

    def since(self) -> dict[str, Any]:
        """Per second, since this was made."""
        took_s, cpu_s = time.monotonic() - self._at, cpu_of_all_s(self._part)
        asked = self.counts() - self._counts
        share = None if cpu_s is None or self._cpu_s is None else (cpu_s - self._cpu_s) / took_s
        return {
            "requests_per_s": sum(asked.values()) / took_s,
            "kinds": dict(asked),
            "cpu_share": share,
        }


def measure(shards: int, nodes: int, seconds: float, loop: str) -> list[dict[str, Any]]:
    """What each node costs, the coordinator first."""
    with ExitStack() as stack:
        place = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="domicile-idle-")))
        parts: list[Part] = []
        for number in range(nodes):
            options = {
                "where": "sqlite:///idle.db", "shards": shards, "id": f"node-{number}",
                "candidate": number == 0, "loop": loop,
            }  # fmt: skip
            part = Part(sys.executable, "proving.benchmarks.idle", "node", options, place)
            stack.callback(part.close)
            parts.append(part)
        for part in parts:
            part.ready()
        _calm(parts)
        costs = [Cost(part) for part in parts]
        time.sleep(seconds)
        return [cost.since() for cost in costs]


def _calm(parts: Sequence[Part]) -> None:
    """Return once the shards have found their homes: nobody commits or asks for much any more."""
    deadline = time.monotonic() + SETTLE_S
    calm = 0
    while calm < 3:
        if time.monotonic() > deadline:
            raise RuntimeError(f"the nodes did not come to rest within {SETTLE_S:g} s")
        costs = [Cost(part) for part in parts]
        time.sleep(CALM_S)
        asked = [cost.since() for cost in costs]
        busy = any(one["requests_per_s"] > 2 * REQUESTS_PER_S for one in asked[1:])
        busy = busy or any("commit" in one["kinds"] for one in asked)
        calm = 0 if busy else calm + 1


def verdict(found: dict[int, list[dict[str, Any]]]) -> tuple[bool, str]:
    """Whether followers are quiet, cheap and flat."""
    most = max(one["requests_per_s"] for costs in found.values() for one in costs[1:])
    shares = {
        shards: max(one["cpu_share"] or 0.0 for one in costs[1:]) for shards, costs in found.items()
    }
    smallest, largest = shares[min(shares)], shares[max(shares)]
    flat = largest <= FLAT * smallest + NOISE_SHARE
    met = most <= REQUESTS_PER_S and max(shares.values()) < CPU_SHARE and flat
    return met, (
        f"{'met' if met else 'missed'}: at most {most:.2f} requests/s of a node that does not "
        f"coordinate (wanted {REQUESTS_PER_S:g}), at most {100 * max(shares.values()):.2f} % of a "
        f"core (wanted under {100 * CPU_SHARE:g}), {'flat' if flat else 'not flat'} from "
        f"{min(shares):,} to {max(shares):,} shards (I8)"
    )


def table(found: dict[int, list[dict[str, Any]]]) -> str:
    """A row per number of shards and node."""
    rows: list[list[str]] = []
    for shards, costs in found.items():
        for number, one in enumerate(costs):
            name = "coordinator" if number == 0 else f"node {number}"
            kinds = ", ".join(f"{kind} {count}" for kind, count in sorted(one["kinds"].items()))
            share = "" if one["cpu_share"] is None else f"{100 * one['cpu_share']:.2f} %"
            rows.append(
                [name, f"{shards:,}", f"{one['requests_per_s']:.2f}", share, kinds or "none"]
            )
    return grid(["idle", "shards", "requests/s", "of a core", "requests"], rows)


def main(given: Sequence[str] | None = None) -> int:
    """Measure and print; 1 if the cost is too high."""
    parser = argparse.ArgumentParser(
        prog="python -m proving.benchmarks.idle", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("--nodes", type=int, default=NODES)
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--shards", type=_numbers, default=SHARDS, metavar="A,B")
    parser.add_argument("--loop", choices=["asyncio", "uvloop"], default="asyncio")
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--write-docs", action="store_true")
    options = parser.parse_args(given)
    if options.nodes < 2:
        parser.error("--nodes must be at least 2: the first one coordinates")
    found: dict[int, list[dict[str, Any]]] = {}
    for shards in options.shards:
        print(f"{options.nodes} idle nodes, {shards:,} shards", file=sys.stderr, flush=True)
        found[shards] = measure(shards, options.nodes, options.seconds, options.loop)
    met, said = verdict(found)
    text = f"{table(found)}\n\n{said}\n"
    print(text, end="")
    if options.json is not None:
        options.json.write_text(json.dumps({"met": met, "found": found}, indent=2), "utf-8")
    if options.write_docs:
        PAGE.write_text(fill(PAGE.read_text(encoding="utf-8"), "idle", text), encoding="utf-8")
    return 0 if met else 1


def _numbers(text: str) -> list[int]:
    return [int(one) for one in text.split(",")]


if __name__ == "__main__":
    sys.exit(main())
