"""What benchmarks of moves, recovery, crowds and soaks make of figures. None is measured here."""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any
from xml.etree import ElementTree

import pytest

ROOT = Path(__file__).resolve().parents[3]
MODULES = (
    *("command", "crowd", "crowd_verdict", "fleet", "openloop", "plot", "recovery", "report"),
    *("rolling", "soak", "soak_verdict"),
)


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


# soak


def samples(per_s: float, noise: float = 3.0, seconds: int = 600) -> list[tuple[float, float]]:
    random = Random(1)
    return [(float(at), 100 + per_s * at + random.gauss(0, noise)) for at in range(0, seconds, 4)]


def test_a_slope_is_the_median_of_slopes_and_a_leap_does_not_bend_it(bench: Any) -> None:
    rising, surely = bench.soak_verdict.slope(samples(0.05))
    assert rising == pytest.approx(0.05, abs=0.01)
    assert 0.03 < surely < rising
    wild = [*samples(0.0)[:-3], (592.0, 9_000.0), (596.0, 9_000.0), (600.0, 9_000.0)]
    assert bench.soak_verdict.slope(wild)[0] == pytest.approx(0.0, abs=0.01)
    assert bench.soak_verdict.slope(samples(0.0)[:2]) == (0.0, 0.0), "too little to say anything"


def judged(bench: Any, per_s: float, *, until: int = 600) -> list[dict[str, Any]]:
    series = bench.soak.Series()
    for at, value in samples(per_s, seconds=until):
        series.note("node-0.1", at, {"fds": value})
    wanted = bench.soak.Wanted(10.0, 1, 3.0, 200.0, 60.0)
    found: list[dict[str, Any]] = bench.soak.judged(series, wanted, 600.0)
    return found


def test_growth_beyond_the_allowance_is_told_and_noise_is_not(bench: Any) -> None:
    (grew,) = judged(bench, 0.05)
    assert (grew["process"], grew["figure"], grew["grew"]) == ("node-0.1", "fds", True)
    assert not judged(bench, 0.0)[0]["grew"]
    assert not judged(bench, -0.5)[0]["grew"]
    assert judged(bench, 0.05, until=200) == [], "it was not there for long enough"


@pytest.mark.parametrize(("per_s", "code"), [(0.05, 1), (0.0, 0)])
def test_growth_is_an_exit_code_and_a_row(
    bench: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str], per_s: float, code: int
) -> None:
    file = soaked(bench, tmp_path, per_s, ("node-1.1", "load", "store"))
    assert bench.soak.main(["--from", str(file)]) == code
    said = capsys.readouterr().out
    assert ("GREW" in said) == bool(code)
    assert ("met: nothing grew" in said) != bool(code)
    ElementTree.fromstring(bench.soak.draw(json.loads(file.read_text(encoding="utf-8"))))


def soaked(bench: Any, directory: Path, per_s: float, others: tuple[str, ...]) -> Path:
    """The report of a soak in which one process may have grown, and others have not."""
    points = {name: samples(per_s) for name in ("fds", "tasks", "rss_kb", "blocks")}
    flat = [{**row, "process": one} for one in others for row in judged(bench, 0.0)]
    found = {
        "wanted": {"seed": 1, "warm_s": 60.0, "minutes": 10.0, "rate": 2.0}, "seconds": 600.0,
        "faults": dict.fromkeys(bench.soak.KINDS, 3), "outcomes": {"ok": 1_200, "visit": 9},
        "rows": judged(bench, per_s) + flat, "series": {"node-0.1": points},
    }  # fmt: skip
    report = {"system": "Linux", "cpus": 2, "python": "3", "quick": False, "found": found}
    file = directory / "soak.json"
    file.write_text(json.dumps(report), encoding="utf-8")
    return file


def test_a_soak_that_ended_before_it_could_judge_is_not_met(
    bench: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = soaked(bench, tmp_path, 0.0, ("load", "store"))
    assert bench.soak.main(["--from", str(file)]) == 1
    said = capsys.readouterr().out
    assert "not seen for long enough to be judged: node-1.1" in said
    assert "met" not in said


def test_a_killed_process_leaves_its_lock_and_one_that_wakes_up_late_does_not(bench: Any) -> None:
    wanted = bench.soak.Wanted(10.0, 1, 3.0, 200.0, 60.0)
    mischief = bench.soak.Mischief(None, wanted)
    mischief.done.update(kill=3, coma=5, stop=2)
    assert mischief.deaths == 3


# moves


def test_moves_are_counted_by_epochs(bench: Any) -> None:
    assert bench.fleet.moves([1, 1, 5], [1, 2, 7]) == {0: 1, 1: 1, 2: 1}


def moved(
    failed: dict[str, int], moves: dict[int, int], added_p99_s: float = 0.02
) -> dict[str, Any]:
    phase = {
        "name": "rolling", "seconds": 2.0, "asks": 10, "failed": 0, "p50_s": 0.001, "p99_s": 0.01,
        "p999_s": 0.02, "max_s": 0.03, "sent_late_p99_s": 0.001, "load_cpu_share": 0.1,
        "since": 0.0, "until": 2.0,
    }  # fmt: skip
    return {
        "name": "rolling update", "what": "2 nodes", "asks": 10, "failed": failed, "moves": moves,
        "most_moves": 1, "added_p99_s": added_p99_s, "expected_moves": 9,
        "capacity": 1_000.0, "rate": 250.0,
        "phases": [phase], "curve": [(0.0, 0.001, 0.01), (0.5, 0.001, 0.02)],
    }  # fmt: skip


@pytest.mark.parametrize(
    ("failed", "moves", "added_p99_s", "met"),
    [
        ({}, {1: 9}, 0.02, True),
        ({"Overloaded: full": 1}, {1: 9}, 0.02, False),
        ({}, {1: 8, 2: 1}, 0.02, False),
        ({}, {1: 10}, 0.02, False),
        ({}, {1: 9}, 0.12, False),
    ],
)
def test_a_failed_ask_a_move_too_many_or_a_long_wait_is_a_miss(
    bench: Any, failed: dict[str, int], moves: dict[int, int], added_p99_s: float, met: bool
) -> None:
    found = moved(failed, moves, added_p99_s)
    assert bench.rolling.verdict(found)[0] is met
    report = {
        "system": "Linux", "cpus": 2, "python": "3", "load": 0.1, "quick": False, "work_s": 0.001,
        "loop": "asyncio", "found": [found],
    }  # fmt: skip
    assert ("MISSED" in bench.rolling.page(report)) is not met
    ElementTree.fromstring(bench.rolling.draw(report))


# recovery


def test_runs_of_several_reports_become_one_page(bench: Any, tmp_path: Path) -> None:
    def report(fault: str, ttl_s: float | None, values: list[float]) -> Path:
        one = {"fault": fault, "title": fault, "ttl_s": ttl_s, "answered": values, "served": []}
        file = tmp_path / f"{fault}.json"
        whole = {"system": "L", "cpus": 2, "python": "3", "quick": False, "missing": {}}
        file.write_text(json.dumps({**whole, "found": [one]}), encoding="utf-8")
        return file

    files = [report("frozen", 2.0, [1.9, 2.0]), report("killed", 6.0, [0.03, 0.02, 0.05])]
    merged = bench.recovery.merged(files)
    assert [one["fault"] for one in merged["found"]] == ["killed", "frozen"]
    assert "| killed | 6 s | answered | 3 | 0.020 | 0.030 | 0.050 | 0.050 |" in bench.recovery.page(
        merged
    )
    drawn = ElementTree.fromstring(bench.recovery.draw(merged))
    assert len(drawn.findall(".//{*}circle")) == 5 + len(bench.recovery.NOTED)


# crowds


def test_peaks_and_totals_are_read_off_looks(bench: Any) -> None:
    looks = [(0.0, 0), (0.5, 2), (1.0, 9), (1.5, 10), (9.0, 10)]
    assert bench.crowd.peak(looks, 0.0, 2.0) == 9
    assert bench.crowd.peak(looks, 1.2, 9.0) == 0
    assert bench.crowd.between(looks, 0.6, 9.0) == 8


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({}, ""),
        ({"balanced": False}, "not spread evenly"),
        ({"remaining": 1}, "left in the store"),
        ({"codes": [0, 1]}, "exit codes"),
        ({"codes": [0, None]}, "did not leave in time"),
        ({"visitors": [{"errors": {"Unavailable: away": 2}}]}, "2 visits failed"),
        ({"complaints": [("ERROR:domicile:ouch", 1)]}, "ouch"),
        ({"herd": 500}, "a herd"),
    ],
)
def test_what_a_crowd_must_not_do_is_a_miss(bench: Any, change: dict[str, Any], said: str) -> None:
    herd = change.get("herd", 5)
    quiet = [
        {"requests": 9, "leads": 1.0, "peak_per_s": 3},
        {"requests": 13, "leads": 0.0, "peak_per_s": 2},
    ]
    rates = [{**quiet[0], "requests": 20}, {**quiet[1], "requests": herd}]
    found = {
        "visitors": [{"errors": {}}], "balanced": True, "loads": [5, 5], "remaining": 0,
        "codes": [0, 0], "complaints": [("WARNING:domicile:slow", 1)], "idle_s": 10.0,
        "visits_s": 10.0, "rates": {"in": rates, "out": rates, "idle": quiet, "clients": quiet},
        **change,
    }  # fmt: skip
    met, wrong = bench.crowd.verdict(found)
    assert met is not bool(said)
    assert said in " ".join(wrong)


def test_an_error_is_told_however_many_warnings_there_are(bench: Any) -> None:
    warnings = [f"WARNING:domicile:{n}" for n in range(9) for _ in range(3)]
    told = bench.crowd.told_first([*warnings, "ERROR:domicile:ouch"])
    assert told[0] == ("ERROR:domicile:ouch", 1)
    assert len(told) == bench.crowd_verdict.TOLD


@pytest.mark.parametrize(
    ("clients", "shares"), [(200, [25] * 8), (3, [1] * 3), (10, [2, 2, *[1] * 6])]
)
def test_every_client_of_a_crowd_has_a_process(bench: Any, clients: int, shares: list[int]) -> None:
    assert bench.crowd.Wanted(clients=clients).shares() == shares


# the load


def test_quantiles_of_few_values(bench: Any) -> None:
    assert bench.openloop.quantile([1.0], 0.99) == 1.0
    assert bench.openloop.quantile([float(n) for n in range(100)], 0.5) == 50.0


# the commands


@pytest.mark.parametrize(
    ("module", "wrong"),
    [
        ("soak", ["--minutes", "0"]), ("soak", ["--every-s", "-1"]),
        ("soak", ["--from", "nowhere"]),
        ("crowd", ["--nodes", "0"]), ("crowd", ["--clients", "0"]), ("crowd", ["--rate", "0"]),
        ("rolling", ["--work-us", "-1"]), ("rolling", ["--from", "nowhere"]),
        ("recovery", ["--runs", "0"]), ("recovery", ["--ttl", "0.1"]),
        ("recovery", ["--from", "nowhere"]),
    ],
)  # fmt: skip
def test_nonsense_is_refused_before_anything_starts(
    bench: Any, capsys: pytest.CaptureFixture[str], module: str, wrong: list[str]
) -> None:
    with pytest.raises(SystemExit) as told:
        getattr(bench, module).main(wrong)
    assert told.value.code == 2
    assert wrong[0] in capsys.readouterr().err


def test_who_interrupts_a_benchmark_gets_no_traceback(
    bench: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    def main() -> int:
        raise KeyboardInterrupt

    with pytest.raises(SystemExit) as told:
        bench.command.run(main)
    assert told.value.code == 130
    assert capsys.readouterr().err == "interrupted: nothing is reported\n"
