"""What makes benchmarks of soaks, crowds, recovery and moves miss. None is measured here."""

from __future__ import annotations

import asyncio
import importlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from domicile.core.state.keys import block_key
from domicile.core.state.shardmap import decode_block
from domicile.stores.namespace import Namespace
from domicile.stores.sqlite.store import KEPT_COMMITS, SqliteStore

ROOT = Path(__file__).resolve().parents[2]
MODULES = (
    "crowd", "crowd_verdict", "recovery", "recovery_peer", "rolling", "soak", "soak_verdict",
)  # fmt: skip
ABOUT = {"system": "Linux", "cpus": 2, "python": "3", "quick": False}


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


def written(directory: Path, report: dict[str, Any]) -> str:
    """A report as a file."""
    file = directory / "report.json"
    file.write_text(json.dumps(report), encoding="utf-8")
    return str(file)


# soaks

HONEST = {"ok": 1_416_000, "MaybeExecuted": 17_000, "HandlerFailed": 4_600}


def row(process: str, figure: str = "fds") -> dict[str, Any]:
    """A figure that was flat, of a store with the allowance of before."""
    return {
        "process": process, "figure": figure, "level": 7_209.0, "first": 6_944.0, "last": 7_537.0,
        "per_hour": 452.0, "surely": 622.0, "allowed": 1_081.0, "grew": False,
    }  # fmt: skip


def soaked(bench: Any, **change: Any) -> dict[str, Any]:
    """The report of two hours, as it was written before it knew `wide` and `early`."""
    found = {
        "wanted": {"minutes": 120.0, "seed": 2, "every_s": 3.0, "rate": 200.0, "warm_s": 600.0},
        "seconds": 7_197.0, "faults": dict.fromkeys(bench.soak.KINDS, 200),
        "outcomes": {**HONEST, "visit": 9_134, "visit: MaybeExecuted": 1},
        "rows": [*map(row, ("node-0.1", "node-1.1", "load")), row("store", "store_kb")],
        "series": {}, **change,
    }  # fmt: skip
    return {**ABOUT, "found": found}


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({}, "met: nothing grew"),
        ({"wide": True, "early": False}, "met: nothing grew"),
        ({"outcomes": {"Unavailable": 1_440_000, "visit": 9}}, "only 0.0 % of the messages"),
        ({"outcomes": {}}, "only 0.0 % of the messages"),
        ({"outcomes": {**HONEST, "held back": 200_000, "visit": 9}}, "only 86.5 % of the messages"),
        ({"outcomes": {"ok": 70_000, "visit": 9}}, "only 4.9 % of the messages"),
        ({"outcomes": {**HONEST, "visit: Unavailable": 9}}, "only 0.0 % of the visits"),
        ({"faults": {"kill": 3, "stop": 1, "nap": 2, "coma": 2, "drain": 0}},
         "never happened: drain, wish"),
        ({"seconds": 1_830.0}, "ended early after 30.5 of 120 minutes"),
        ({"early": True}, "ended early after 119.9 of 120 minutes"),
    ],
)  # fmt: skip
def test_a_soak_is_met_by_answers_by_faults_and_by_its_hours(
    bench: Any,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    change: dict[str, Any],
    said: str,
) -> None:
    met = said.startswith("met")
    file = written(tmp_path, soaked(bench, **change))
    assert bench.soak.main(["--from", file]) == (0 if met else 1)
    told = capsys.readouterr().out
    assert said in told
    assert ("met: " in told) is met
    assert ("MISSED: " in told) is not met


def test_messages_of_unknown_outcome_are_answers_of_a_fault_and_no_miss(bench: Any) -> None:
    found = soaked(bench)["found"]
    assert bench.soak_verdict.misses(found) == []
    messages, visits = bench.soak_verdict.answered(found)
    assert messages == pytest.approx(0.983, abs=0.001)
    assert visits == pytest.approx(0.9999, abs=0.0001)


def test_a_soak_says_if_its_store_began_with_short_numbers(bench: Any) -> None:
    assert "short numbers" in bench.soak.page(soaked(bench))
    assert "short numbers" not in bench.soak.page(soaked(bench, wide=True))


def test_a_store_that_got_as_much_larger_as_before_has_grown_now(bench: Any) -> None:
    series = bench.soak.Series()
    for at in range(0, 7_200, 60):
        series.note("store", float(at), {"store_kb": 6_944 + 600 * at / 7_200})
    wanted = bench.soak.Wanted(120.0, 1, 3.0, 200.0, 600.0)
    (found,) = bench.soak.judged(series, wanted, 7_200.0)
    assert found["grew"]


def test_the_old_map_takes_as_much_room_as_a_much_older_one(bench: Any) -> None:
    assert len(bench.soak.old_map(bench.soak.AGED)) == len(bench.soak.old_map(60_000))
    assert bench.soak.OLD - KEPT_COMMITS >= 2**15, "no revision that is kept gets longer"


def test_a_soak_begins_with_a_map_that_its_nodes_may_take(bench: Any, tmp_path: Path) -> None:
    async def filled() -> tuple[list[bytes], bytes, int]:
        await bench.soak.fill_log(tmp_path / "store.db", commits=200)
        store = Namespace(SqliteStore(tmp_path / "store.db", by="test"), "domicile")
        try:
            listing = await store.list(b"")
        finally:
            await store.close()
        return [item.key for item in listing.items], listing.items[0].value, listing.revision

    keys, value, revision = asyncio.run(filled())
    assert keys == [block_key("default", 0)], "clients and nodes that came have gone"
    assert revision == 200
    entries = decode_block(value).entries
    assert len(entries) == bench.soak.SHARDS
    # Emptied for nobody: whoever starts gets them, and no death is held against them.
    assert {(one.state, one.to, one.epoch) for one in entries} == {("moving", "", bench.soak.AGED)}


# crowds


def crowd(bench: Any, phase: str, change: dict[str, float], leads: bool) -> dict[str, Any]:
    """As 50 nodes were seen, but for what one of them did in a phase."""
    seen = {"in": (5, 15, 6), "out": (6, 25, 0), "idle": (13, 18, 3), "clients": (61, 90, 3)}
    rates: dict[str, list[dict[str, float]]] = {
        name: [
            {"requests": coordinator if not node else each, "leads": float(not node),
             "peak_per_s": most, "worked_s": 0.04}
            for node in range(50)
        ]
        for name, (each, coordinator, most) in seen.items()
    }  # fmt: skip
    if phase:
        rates[phase][0 if leads else 7].update(change)
    return {
        "visitors": [{"errors": {}, "asks": 4_000, "p50_s": 0.002, "p99_s": 0.035, "kinds": {}}],
        "balanced": True, "loads": [5], "remaining": 0, "codes": [0], "complaints": [],
        "nodes": 50, "clients": 200, "visits": 1, "per_s": 5.0, "ready_s": 13.9, "served_s": 14.6,
        "balanced_s": 14.6, "idle_s": 10.0, "visits_s": 45.7, "left_s": 5.5, "rates": rates,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("phase", "change", "leads", "said"),
    [
        ("", {}, False, ""),
        ("in", {"requests": 50}, False, "a node asked 50 things to get in (at most 20)"),
        ("in", {"requests": 100}, True, "the coordinator asked 100 things to get in (at most 70)"),
        ("in", {"peak_per_s": 30}, True, "within a second a node asked 30 things to get in"),
        ("out", {"requests": 50}, False, "a node asked 50 things to get out (at most 20)"),
        ("out", {"requests": 100}, True, "the coordinator asked 100 things to get out"),
        ("idle", {"requests": 25}, False, "a node asked 25 things while nothing happens"),
        ("idle", {"requests": 40}, True, "the coordinator asked 40 things while nothing happens"),
        ("idle", {"peak_per_s": 30}, False, "within a second a node asked 30 things while"),
        ("clients", {"requests": 200}, False, "a node asked 200 things while clients come and go"),
        ("clients", {"requests": 300}, True, "the coordinator asked 300 things while clients"),
    ],
)
def test_a_herd_is_one_whoever_it_is_and_whenever(
    bench: Any, phase: str, change: dict[str, float], leads: bool, said: str
) -> None:
    met, wrong = bench.crowd.verdict(crowd(bench, phase, change, leads))
    assert met is (not said)
    assert len(wrong) == bool(said)
    assert said in "".join(wrong)


@pytest.mark.parametrize("phase", ["in", "out"])
def test_a_herd_is_one_if_each_node_keeps_to_its_bound(bench: Any, phase: str) -> None:
    found = crowd(bench, "", {}, False)
    for one in found["rates"][phase][1:]:
        one["requests"] = 15
    (wrong,) = bench.crowd.verdict(found)[1]
    assert wrong.startswith("a herd: all nodes asked 7")
    assert wrong.endswith("(at most 570)")


def test_what_a_crowd_logs_is_told_without_the_places_of_files(bench: Any) -> None:
    complaint = "it was slow at /opt/some/python3.11/socket.py:503 in close, 5/10 of sqlite:///x.db"
    found = {**crowd(bench, "", {}, False), "complaints": [(complaint, 2)]}
    told = bench.crowd.page({**ABOUT, "found": found})
    assert "Logged 2×: it was slow at socket.py:503 in close, 5/10 of sqlite:///x.db" in told


def test_clients_may_all_come_at_once(bench: Any) -> None:
    assert bench.crowd.Wanted(clients=200, per_s=5.0).spread_s == 40.0
    assert bench.crowd.Wanted(clients=200, per_s=0.0).spread_s == 0.0
    found = {**crowd(bench, "", {}, False), "per_s": 0.0}
    found["visitors"][0]["errors"] = {"Unavailable: away": 3}
    told = bench.crowd.page({**ABOUT, "found": found})
    assert "All came at once" in told
    assert "4,000 asks in 200 visits, of which 3 failed; p50 2 ms, p99 35 ms" in told


def test_who_wants_all_clients_at_once_gets_them(
    bench: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    wanted: list[Any] = []

    async def measure(given: Any) -> dict[str, Any]:
        wanted.append(given)
        return crowd(bench, "", {}, False)

    monkeypatch.setattr(bench.crowd, "measure", measure)
    assert bench.crowd.main(["--at-once", "--clients", "40"]) == 0
    assert bench.crowd.main(["--at-once", "--quick"]) == 0
    assert [(one.clients, one.spread_s) for one in wanted] == [(40, 0.0), (8, 0.0)]
    assert "met" in capsys.readouterr().out


# recovery


def lost(fault: str, ttl_s: float | None, slowest_s: float, quick: bool = False) -> dict[str, Any]:
    """A report in which one run of three took longest until all was served."""
    one = {
        "fault": fault, "title": fault, "ttl_s": ttl_s, "answered": [0.01, 0.02, 0.01],
        "served": [0.01, slowest_s, 0.01],
    }  # fmt: skip
    return {**ABOUT, "quick": quick, "missing": {}, "found": [one]}


@pytest.mark.parametrize(
    ("fault", "ttl_s", "slowest_s", "said"),
    [
        ("killed", 2.0, 0.99, "met: at most 0.990 s (under the 1 s of DX-04)"),
        ("killed", 60.0, 1.0, "MISSED: at most 1.000 s (not under the 1 s of DX-04)"),
        ("coordinator", 6.0, 1.2, "MISSED"),
        ("two", 6.0, 1.2, "MISSED"),
        ("frozen", 2.0, 2.99, "met: at most 2.990 s (under the 3 s of DX-04)"),
        ("frozen", 2.0, 3.0, "MISSED"),
        ("frozen", 6.0, 9.9, "met: at most 9.900 s (under the 10 s of DX-04)"),
        ("frozen", 6.0, 10.0, "MISSED"),
        ("frozen", 4.0, 99.0, "not judged: nothing is promised of this ttl"),
        ("cut", 2.0, 4.9, "met: at most 4.900 s (under the 5 s of C5 and C6)"),
        ("cut", 2.0, 5.1, "MISSED"),
        ("cut", 6.0, 13.1, "MISSED: at most 13.100 s (not under the 13 s of C5 and C6)"),
    ],
)
def test_one_run_that_breaks_a_promise_is_a_miss(
    bench: Any,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    fault: str,
    ttl_s: float,
    slowest_s: float,
    said: str,
) -> None:
    file = written(tmp_path, lost(fault, ttl_s, slowest_s))
    assert bench.recovery.main(["--from", file]) == (1 if said.startswith("MISSED") else 0)
    assert f"- {fault}, ttl {ttl_s:g} s: {said}" in capsys.readouterr().out


def test_a_fault_without_a_run_is_a_miss_and_a_smoke_test_is_not(
    bench: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    nothing = lost("killed", 2.0, 0.1)
    nothing["found"][0].update(answered=[], served=[])
    assert not bench.recovery.verdict(nothing["found"][0])[0]
    quick = lost("killed", 2.0, 9.0, quick=True)
    assert bench.recovery.main(["--from", written(tmp_path, quick)]) == 0
    assert "MISSED" in capsys.readouterr().out


def test_a_peer_is_not_judged_and_what_it_lacks_is_explained(
    bench: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    peer = lost("peer-killed", None, 99.0)
    assert bench.recovery.main(["--from", written(tmp_path, peer)]) == 0
    told = capsys.readouterr().out
    assert bench.recovery_peer.ABSENT in told
    assert "MISSED" not in told
    assert bench.recovery_peer.ABSENT not in bench.recovery.page(lost("killed", 2.0, 0.1))


# moves


def scaled(out: dict[str, int], back: dict[str, int], decoys_s: float | None) -> dict[str, Any]:
    """Three nodes to six and back, read from a report."""
    p99_s = {"before": 0.004, "decoys": decoys_s, "3 to 6": 0.012, "6 to 3": 0.043}
    phases = [{"name": name, "p99_s": value} for name, value in p99_s.items() if value is not None]
    calm_s = max(0.004, decoys_s or 0.0)
    return {
        "name": "scale", "asks": 9, "failed": {}, "moves": {"0": 150, "2": 150}, "most_moves": 2,
        "expected_moves": 300, "moves_out": out, "moves_back": back, "phases": phases,
        "added_p99_s": 0.043 - calm_s,
    }  # fmt: skip


ONCE = {"0": 150, "1": 150}


@pytest.mark.parametrize(
    ("out", "back", "said"),
    [
        (ONCE, ONCE, "300 moves (150 shards 2×);"),
        ({"0": 299, "2": 1}, ONCE, "; 1 shards moved 2× out (at most 1));"),
        (ONCE, {"0": 298, "2": 2}, "; 2 shards moved 2× back (at most 1));"),
    ],
)
def test_a_shard_moves_once_on_each_way(
    bench: Any, out: dict[str, int], back: dict[str, int], said: str
) -> None:
    met, told = bench.rolling.verdict(scaled(out, back, 0.005))
    assert met is (out is back)
    assert said in told


@pytest.mark.parametrize(
    ("decoys_s", "said"),
    [
        (0.010, "added p99 33 ms to that of the decoys (under the goal of 100 ms), "
                "39 ms to that of the quiet phase"),
        (0.003, "added p99 39 ms to that of the quiet phase (under the goal of 100 ms)"),
        (None, "added p99 39 ms to that of the quiet phase (under the goal of 100 ms)"),
    ],
)  # fmt: skip
def test_it_is_told_to_which_phase_something_was_added(
    bench: Any, decoys_s: float | None, said: str
) -> None:
    assert bench.rolling.verdict(scaled(ONCE, ONCE, decoys_s))[1].endswith(said)
