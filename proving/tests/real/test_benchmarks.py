"""The benchmarks run and report what they measured. Nothing here judges a speed."""

from __future__ import annotations

import asyncio
import importlib
import importlib.util
import json
import os
import re
import shutil
import socket
import ssl
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple
from xml.etree import ElementTree

import pytest

ROOT = Path(__file__).resolve().parents[3]
HAS_UVLOOP = importlib.util.find_spec("uvloop") is not None
DEPTHS = (1, 100, 1_000)
MODULES = (
    *("bench", "caller", "certificates", "chart", "environments", "home", "idle", "processes"),
    *("profile", "report", "run"),
)
QUICK_PEERS = ("grpc", "aiohttp", "nats", "casty")
"""Those that start within a second."""


class Ran(NamedTuple):
    """What a command wrote."""

    code: int
    stdout: str
    stderr: str


def run_module(module: str, *arguments: str, scratch: Path) -> Ran:
    """A benchmark as its user runs it; it may leave nothing in the temporary directory."""
    scratch.mkdir(exist_ok=True)
    ran = subprocess.run(
        [sys.executable, "-m", f"proving.benchmarks.{module}", *arguments],
        capture_output=True,
        text=True,
        check=False,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT / "src"), "TMPDIR": str(scratch)},
    )
    assert list(scratch.iterdir()) == [], "nothing is left behind"
    return Ran(ran.returncode, ran.stdout, ran.stderr)


@pytest.fixture(scope="module")
def bench() -> Iterator[Any]:
    """The modules of the benchmarks."""
    sys.path.insert(0, str(ROOT))
    try:
        loaded = {name: importlib.import_module(f"proving.benchmarks.{name}") for name in MODULES}
        yield SimpleNamespace(**loaded)
    finally:
        sys.path.remove(str(ROOT))
        for name in [name for name in sys.modules if name.startswith("proving.benchmarks.")]:
            del sys.modules[name]


class Quick(NamedTuple):
    """A quick run without peers."""

    ran: Ran
    report: dict[str, Any]


@pytest.fixture(scope="module")
def quick(tmp_path_factory: pytest.TempPathFactory) -> Quick:
    place = tmp_path_factory.mktemp("bench")
    file = place / "report.json"
    ran = run_module(
        "run", "--quick", "--peers", "none", "--json", str(file), scratch=place / "scratch"
    )
    assert ran.code == 0, ran.stderr
    assert json.loads(file.read_text(encoding="utf-8"))["failed"] == []
    return Quick(ran, json.loads(file.read_text(encoding="utf-8")))


# the whole


def test_the_quick_form_measures_everything(quick: Quick) -> None:
    report = quick.report
    both = [(where, what, n) for where in ("remote", "local") for what in ("ask", "tell")
            for n in DEPTHS]  # fmt: skip
    whole = [*both, ("remote", "new", 100), ("local", "new", 100)]
    wanted = {"domicile": whole}
    if HAS_UVLOOP:
        wanted["domicile-asyncio"] = whole
    if "domicile-tls" in {one["key"] for one in report["systems"]}:
        wanted["domicile-tls"] = both[:6]
    found: dict[str, list[tuple[str, str, int]]] = {}
    for one in report["rows"]:
        found.setdefault(one["system"], []).append((one["where"], one["what"], one["in_flight"]))
        assert one["per_s"] > 0, one
        assert 0 < one["p50_s"] <= one["p99_s"] <= one["max_s"], one
        assert len(one["rounds"]) == report["rounds"], one
        assert sys.platform != "linux" or one["cpu_s"] > 0, one
    assert found == wanted
    assert [one["key"] for one in report["single"]] == [
        *("idle", "pause", "slowest", "quiet", "answered", "served", "seed"),
    ]


def test_tls_is_measured_or_the_reason_is_given(quick: Quick) -> None:
    systems = {one["key"] for one in quick.report["systems"]}
    assert ("domicile-tls" in systems) != ("with TLS" in quick.report["missing"])


def test_a_peer_that_is_absent_is_named_with_the_reason(quick: Quick) -> None:
    for title in ("grpc.aio unary", "grpc.aio stream", "aiohttp", "NATS", "casty", "Ray"):
        assert quick.report["missing"][title] == "left out by --peers"
        assert f"{title}: not measured: left out by --peers" in quick.ran.stdout


def test_the_report_says_what_it_depends_on(quick: Quick) -> None:
    report = quick.report
    assert report["quick"] is True
    assert report["payload_bytes"] == 100
    assert report["cpus"] == os.cpu_count()
    for name in ("domicile", "python", "system", "entities", "round_s", "took_s"):
        assert report[name], name
    assert "smoke test" in quick.ran.stdout


def test_an_earlier_report_gives_the_same_tables(quick: Quick, bench: Any, tmp_path: Path) -> None:
    assert bench.report.page(quick.report) == quick.ran.stdout


def test_the_real_form_is_what_the_page_says(bench: Any) -> None:
    scale = bench.bench.Scale()
    assert scale.rounds >= 5
    assert (scale.seconds, scale.warm_s) == (2.0, 0.5)
    assert scale.entities == 1_000
    assert scale.idle == 1_000_000


@pytest.mark.parametrize("option", ["--peers", "--only", "--peer-loops"])
def test_an_unknown_name_is_refused(
    bench: Any, option: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        bench.run.arguments([option, "nonsense"])
    assert "'nonsense' is no" in capsys.readouterr().err


# how it is measured


def test_a_closed_loop_never_has_more_in_flight(bench: Any) -> None:
    flying, most = 0, 0

    async def one(number: int) -> None:
        nonlocal flying, most
        flying += 1
        most = max(most, flying)
        await asyncio.sleep(0)
        flying -= 1

    told = asyncio.run(bench.caller.closed_loop(one, 7, 0.01))
    assert most == 7
    assert told["count"] >= 7
    assert asyncio.run(bench.caller.closed_loop(one, 3, 0.0))["count"] == 3


@pytest.mark.parametrize("depth", [1, 2, 100])
def test_tells_that_are_not_confirmed_fit_the_window(bench: Any, depth: int) -> None:
    class Slow(bench.caller.Caller):  # type: ignore[misc, name-defined]
        sent = confirmed = most = 0

        async def ask(self, number: int) -> None:
            raise AssertionError("nobody asks")

        async def begin(self, part: int) -> int:
            return 1_000

        async def send(self, first: int, count: int) -> None:
            assert first == self.sent
            self.sent += count
            self.most = max(self.most, self.sent - self.confirmed)

        async def confirm(self, total: int) -> None:
            for _ in range(3):
                await asyncio.sleep(0)
            self.confirmed = max(self.confirmed, total - 1_000)

    caller = Slow()
    told = asyncio.run(caller.tells(depth, 0.01))
    assert caller.most == depth
    assert told["count"] == caller.sent == caller.confirmed


def test_arrivals_wake_who_waits(bench: Any) -> None:
    async def scene() -> list[int]:
        arrivals, woken = bench.caller.Arrivals(), []

        async def wait(wanted: int) -> None:
            await arrivals.reach(wanted)
            woken.append(arrivals.count)

        waiting = [asyncio.create_task(wait(wanted)) for wanted in (2, 3)]
        await asyncio.sleep(0)
        for _ in range(3):
            arrivals.note()
            await asyncio.sleep(0)
            await asyncio.sleep(0)
        async with asyncio.timeout(10.0):
            await asyncio.gather(*waiting)
            await arrivals.reach(1)
        return woken

    assert asyncio.run(scene()) == [2, 3]


def test_latencies_are_taken_from_all_of_them(bench: Any) -> None:
    told = bench.caller.summary(200, 2.0, [n / 1_000 for n in range(100, 0, -1)])
    assert (told["p50_s"], told["p99_s"], told["max_s"]) == (0.051, 0.1, 0.1)


# processes and environments


def system(bench: Any, module: str, python: str = sys.executable) -> Any:
    return bench.bench.System(
        "lab", python, module, "asyncio", "1", "3", (("lab", "lab", "The lab"),)
    )  # fmt: skip


def test_a_part_that_ends_early_says_why(bench: Any, tmp_path: Path) -> None:
    part = bench.processes.Part(sys.executable, "proving.benchmarks.home", "nobody", {}, tmp_path)
    try:
        with pytest.raises(bench.processes.PartFailed, match="home nobody ended early: KeyError"):
            part.ready()
    finally:
        part.close()


def test_a_system_that_fails_is_listed_with_the_reason(bench: Any) -> None:
    made = bench.bench.Bench(bench.bench.QUICK, lambda line: None)
    made.systems = [system(bench, "proving.benchmarks.not_there")]
    made.messages()
    assert made.systems == []
    assert "No module named 'proving.benchmarks.not_there'" in made.missing["The lab"]


def test_a_stage_that_fails_leaves_the_others_and_is_named(bench: Any) -> None:
    class Broken(bench.bench.Bench):  # type: ignore[misc, name-defined]
        def pause(self) -> None:
            raise ValueError("no shard moves\nnot even one")

    made = Broken(bench.bench.QUICK, lambda line: None)
    made.attempt("pause")
    assert made.missing == {"pause": "ValueError: no shard moves"}
    assert made.failed == ["pause"]


def test_what_fails_of_our_own_is_a_failure(bench: Any) -> None:
    made = bench.bench.Bench(bench.bench.QUICK, lambda line: None)
    lab = system(bench, "proving.benchmarks.not_there")
    made.systems = [
        bench.bench.replace(lab, shown=(("domicile", "domicile-tls", "with TLS"),)),
        lab,
    ]
    made.messages()
    assert made.failed == ["with TLS"]


def test_a_smoke_test_is_not_written_into_the_docs(
    bench: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        bench.run.arguments(["--quick", "--write-docs"])
    assert "figures that mean something" in capsys.readouterr().err


def test_an_environment_that_cannot_be_made_is_a_reason(
    bench: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("UV_OFFLINE", "1")
    monkeypatch.setenv("UV_CACHE_DIR", str(tmp_path / "empty"))
    missing: dict[str, str] = {}
    grpc = bench.environments.PEERS[0]
    found = list(bench.bench.peers([grpc], ["uvloop"], tmp_path / "cache", missing, lambda _: None))
    assert found == []
    assert list(missing) == ["grpc.aio unary", "grpc.aio stream"]
    assert all(why.startswith("its environment can't be made: ") for why in missing.values())


def test_a_python_that_is_not_there_is_a_reason(bench: Any) -> None:
    with pytest.raises(bench.environments.Missing, match=r"needs Python 9\.9 or newer"):
        bench.environments.interpreter((9, 9))
    assert bench.environments.interpreter((3, 11))[0] == sys.executable


def test_every_peer_is_locked_with_hashes_and_names_no_host(bench: Any) -> None:
    for peer in bench.environments.PEERS:
        text = peer.requirements.read_text(encoding="utf-8")
        pins = [line for line in text.splitlines() if re.match(r"[a-z]", line)]
        assert any(line.startswith(f"{peer.package}==") for line in pins), peer.name
        assert all("==" in line and line.endswith("\\") for line in pins), peer.name
        assert "://" not in text, peer.name
        assert peer.requirements.with_suffix(".in").exists(), peer.name


@pytest.mark.parametrize("name", QUICK_PEERS)
def test_a_peer_is_measured(bench: Any, name: str) -> None:
    peer = next(one for one in bench.environments.PEERS if one.name == name)
    cache = bench.environments.CACHE
    if not any(cache.glob(f"{name}-*/.ready")):
        pytest.skip(f"`make bench` has not made the environment of {name}")
    missing: dict[str, str] = {}
    found = list(bench.bench.peers([peer], ["uvloop"], cache, missing, lambda line: None))
    made = bench.bench.Bench(bench.bench.QUICK, lambda line: None, found)
    made.messages()
    assert made.missing == missing == {}
    for key in peer.systems:
        for what in ("ask", "tell"):
            for depth in DEPTHS:
                assert made.found["remote", what, depth, key][0]["per_s"] > 0
    assert (("local", "new", 100, name) in made.found) == peer.local


def test_plain_text_is_never_taken_for_tls(bench: Any, tmp_path: Path) -> None:
    if shutil.which("openssl") is None:
        pytest.skip("openssl makes the certificates")
    place = bench.certificates.make(tmp_path / "tls")
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def answer() -> None:
            caller, _ = listening.accept()
            with caller:
                caller.recv(1_024)
                caller.sendall(b"what did you say?\n")

        thread = threading.Thread(target=answer)
        thread.start()
        try:
            with pytest.raises(ssl.SSLError):
                bench.home.check_tls({"tls": str(place), "port": listening.getsockname()[1]})
        finally:
            thread.join()


def test_what_a_part_started_counts_and_ends_with_it(bench: Any) -> None:
    if sys.platform != "linux":
        pytest.skip("processes are found in /proc")
    code = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'input()'])"
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE) as process:
        while len(found := bench.processes.descendants(process.pid)) < 2:
            assert process.poll() is None
        assert found[0] == process.pid
        assert bench.processes.cpu_s(process.pid) > 0
        process.communicate(b"\n")


# tables, verdicts, chart


def made_up(**rates: float) -> dict[str, Any]:
    """A report with one round of all remote asks at 100 in flight."""
    return {
        "systems": [
            {"key": key, "title": key.title(), "loop": "uvloop", "version": "1", "python": "3"}
            for key in rates
        ],
        "missing": {"Absent": "it is <gone>"}, "failed": [],
        "rows": [
            {
                "where": "remote", "what": "ask", "in_flight": 100, "system": key, "per_s": rate,
                "p50_s": 0.001, "p99_s": 0.002, "max_s": 0.0125, "cpu_s": 1e-5, "rounds": [{}],
            }
            for key, rate in rates.items()
        ],
        "single": [
            {"key": "idle", "name": "idle", "unit": "bytes", "median": 1_001.0, "rounds": [1_001.0]}
        ],
        "system": "Lab", "cpus": 2, "load": 0.0, "payload_bytes": 100, "entities": 5, "rounds": 1,
        "round_s": 1.0, "warm_s": 0.0, "took_s": 1.0, "quick": False,
    }  # fmt: skip


def test_the_ratio_is_that_to_the_best_peer(bench: Any) -> None:
    report = made_up(**{"domicile": 120_004.0, "domicile-tls": 90e3, "slow": 10e3, "fast": 40e3})
    assert bench.report.rates(report).splitlines()[-1] == (
        "| remote ask | 100 | 120,000 | 90,000 | 10,000 | 40,000 | 3.0× |"
    )
    assert bench.report.latencies(report).splitlines()[-1].startswith(
        "| remote ask | 100 | 1.00 / 2.00 / 12 |"
    )  # fmt: skip
    assert "Domicile is 3.0× Fast" in bench.report.lowest(report)
    assert "Absent: not measured: it is <gone>" in bench.report.page(report)


def test_every_floor_is_met_missed_or_not_measured(bench: Any) -> None:
    said = {
        one.name: one.said
        for one in bench.report.verdicts(made_up(domicile=121e3, fast=40e3))
    }  # fmt: skip
    assert said["remote ask, 100 in flight"] == "met"
    assert said["its p99"] == "met"
    assert said["bytes per idle entity"] == "missed"
    assert said["to the best peer: remote ask, 100 in flight"] == "met"
    assert said["goal: to the best peer"] == "missed"
    assert said["local ask, 100 in flight"] == "not measured"
    slow = {one.name: one.said for one in bench.report.verdicts(made_up(domicile=119e3))}
    assert slow["remote ask, 100 in flight"] == "missed"
    assert slow["to the best peer: remote ask, 100 in flight"] == "not measured"


def test_the_chart_is_well_formed_and_knows_the_dark(bench: Any) -> None:
    report = made_up(**{"domicile": 100e3, "domicile-tls": 50e3, "a<b": 25e3})
    drawn = bench.chart.draw(report)
    picture = ElementTree.fromstring(drawn)
    paper, *bars = [one for one in picture if one.tag.endswith("rect")]
    assert paper.attrib["class"] == "paper", "a page may be dark where its reader is not"
    widths = [float(bar.attrib["width"]) for bar in bars]
    assert widths == sorted(widths, reverse=True)
    assert widths[1] == pytest.approx(widths[0] / 2, abs=0.1)
    assert [bar.attrib["class"] for bar in bars] == ["ours", "kin", "peer"]
    assert "prefers-color-scheme: dark" in drawn
    assert max(float(bar.attrib["x"]) + width for bar, width in zip(bars, widths, strict=True)) < (
        bench.chart.WIDTH
    )


def test_filling_replaces_what_is_between_the_marks(bench: Any) -> None:
    page = "a\n<!-- measured:x -->\nold\n<!-- /measured:x -->\nb\n"
    filled = bench.report.fill(page, "x", "new\n")
    assert filled == "a\n<!-- measured:x -->\nnew\n<!-- /measured:x -->\nb\n"
    with pytest.raises(ValueError, match="no place for y"):
        bench.report.fill(page, "y", "new\n")


def test_the_page_has_a_place_for_each_measurement(bench: Any) -> None:
    text = bench.run.PAGE.read_text(encoding="utf-8")
    for name in ("bench", "budget", "idle"):
        assert bench.report.fill(text, name, "here it is\n").count("here it is") == 1


# the others


def test_the_idle_benchmark_gives_a_verdict(tmp_path: Path) -> None:
    file = tmp_path / "idle.json"
    ran = run_module(
        "idle", "--nodes", "2", "--shards", "16", "--seconds", "0.2", "--json", str(file),
        scratch=tmp_path / "scratch",
    )  # fmt: skip
    assert ran.code in (0, 1), ran.stderr
    found = json.loads(file.read_text(encoding="utf-8"))
    assert ran.code == (0 if found["met"] else 1)
    assert [sorted(one) for one in found["found"]["16"]] == [
        ["cpu_share", "kinds", "requests_per_s"]
    ] * 2
    assert ran.stdout.splitlines()[-1].startswith(("met: ", "missed: "))


def test_idleness_is_judged_by_followers_and_by_flatness(bench: Any) -> None:
    def costs(requests_per_s: float, cpu_share: float) -> list[dict[str, Any]]:
        leader = {"requests_per_s": 9.0, "cpu_share": 0.1, "kinds": {}}
        return [leader, {"requests_per_s": requests_per_s, "cpu_share": cpu_share, "kinds": {}}]

    verdict = bench.idle.verdict
    assert verdict({16: costs(1.0, 0.003), 4_096: costs(1.9, 0.004)})[0]
    assert not verdict({16: costs(1.0, 0.003), 4_096: costs(2.1, 0.003)})[0]
    assert not verdict({16: costs(1.0, 0.006), 4_096: costs(1.0, 0.006)})[0]
    met, said = verdict({16: costs(1.0, 0.001), 4_096: costs(1.0, 0.0045)})
    assert not met
    assert "not flat" in said


def test_the_profile_divides_the_time_of_a_message(tmp_path: Path) -> None:
    file = tmp_path / "profile.json"
    ran = run_module(
        "profile", "--seconds", "0.3", "--entities", "20", "--depth", "10", "--calls",
        "--loop", "asyncio", "--json", str(file), scratch=tmp_path / "scratch",
    )  # fmt: skip
    assert ran.code == 0, ran.stderr
    sides = json.loads(file.read_text(encoding="utf-8"))["sides"]
    assert list(sides) == ["caller", "home"]
    for side in sides.values():
        assert side["samples"] > 0
        assert sum(side["shares"].values()) == pytest.approx(1.0)
        assert side["functions"]
    assert "not measured" not in ran.stdout, "a function that is timed alone has moved"


def test_every_module_on_the_way_has_a_stage(bench: Any) -> None:
    source = ROOT / "src" / "domicile"
    for folder, stages in (
        ("transports", {"frame", "link", "socket"}),
        ("entity", {"codec", "route", "dispatch"}),
    ):
        for path in (source / folder).glob("*.py"):
            assert bench.profile.stage_of(str(path), "f") in stages, path
    assert bench.profile.stage_of("/x/domicile/entity/model/codec.py", "f") == "codec"
    assert bench.profile.stage_of("/x/domicile/core/handoff/owner.py", "f") == "dispatch"
    assert bench.profile.stage_of("/x/benchmarks/home.py", "Echo.echo") == "handler"
    assert bench.profile.stage_of("/x/benchmarks/home.py", "Domicile.ask") == "caller"
    assert bench.profile.stage_of("/x/lib/asyncio/events.py", "Handle._run") == "loop"


def test_the_planners_benchmark_reports_every_strategy_and_case(tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    ran = run_module("planner", "--quick", "--json", str(report), scratch=tmp_path / "scratch")
    assert ran.code == 0, ran.stderr
    found = json.loads(report.read_text(encoding="utf-8"))
    assert len(found["plans"]) == 3 * 5 * 2
    for one in found["plans"]:
        assert one["peak_bytes"] > 0, one
        assert (one["decisions"] > 0) == (one["case"] != "at rest"), one
    for one in found["ways"]:
        assert one["moved"] >= one["fewest"], one
        assert one["strategy"] != "least_shards" or one["moved"] == one["fewest"], one
    for one in found["wire"]:
        assert one["block_bytes"] < one["plain_bytes"], one
    tables = ran.stdout.split("\n\n")[1:]
    assert [len(table.splitlines()) - 2 for table in tables] == [3 * 5, 3 * 2, 3]
