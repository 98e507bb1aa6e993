"""The benchmarks run and report what they measured. Nothing here judges a speed."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import pytest

ROOT = Path(__file__).parent.parent
SCRIPT = ROOT / "benchmarks" / "run.py"
DEPTHS = (1, 100, 1_000)
LOOPS = ["asyncio", *(["uvloop"] if importlib.util.find_spec("uvloop") else [])]
PEERS = ["unary", "stream"] if importlib.util.find_spec("grpc") else []


class Ran(NamedTuple):
    """What a quick run wrote."""

    stdout: str
    stderr: str
    report: dict[str, Any]


@pytest.fixture(scope="module")
def bench() -> Iterator[ModuleType]:
    spec = importlib.util.spec_from_file_location("domicile_benchmarks", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.path.insert(0, str(SCRIPT.parent))
    sys.modules[spec.name] = module
    try:
        spec.loader.exec_module(module)
        yield module
    finally:
        sys.path.remove(str(SCRIPT.parent))
        for name in (spec.name, "parts", "single"):
            sys.modules.pop(name, None)


@pytest.fixture(scope="module")
def quick(tmp_path_factory: pytest.TempPathFactory) -> Ran:
    place = tmp_path_factory.mktemp("bench")
    report, scratch = place / "report.json", place / "scratch"
    scratch.mkdir()
    ran = subprocess.run(
        [sys.executable, str(SCRIPT), "--quick", "--json", str(report)],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTHONPATH": str(ROOT / "src"), "TMPDIR": str(scratch)},
    )
    assert ran.returncode == 0, ran.stderr
    assert list(scratch.iterdir()) == [], "nothing is left behind"
    return Ran(ran.stdout, ran.stderr, json.loads(report.read_text(encoding="utf-8")))


def test_the_quick_form_measures_everything(quick: Ran) -> None:
    wanted = [
        (loop, where, what, depth, system)
        for loop in LOOPS
        for where, systems in (("remote", ["domicile", *PEERS]), ("local", ["domicile"]))
        for what in ("ask", "tell")
        for depth in DEPTHS
        for system in systems
    ]
    names = ("loop", "where", "what", "in_flight", "system")
    assert [tuple(one[name] for name in names) for one in quick.report["messages"]] == wanted
    for one in quick.report["messages"]:
        assert one["per_s"] > 0, one
        assert one["cpu_s"] > 0, one
        assert len(one["rounds"]) == quick.report["rounds"], one
        timed = one["what"] == "ask" and one["in_flight"] in (1, 100)
        assert (one["p50_s"] is not None) == (one["p99_s"] is not None) == timed, one
        assert not timed or 0 < one["p50_s"] <= one["p99_s"], one
    assert [one["unit"] for one in quick.report["single"]] == ["/s", "bytes", "CPU s"]


def test_the_report_says_what_it_depends_on(quick: Ran) -> None:
    report = quick.report
    assert report["quick"] is True
    assert report["payload_bytes"] == 100
    assert report["cpus"] == os.cpu_count()
    for name in ("domicile", "python", "system", "entities", "round_s"):
        assert report[name], name
    assert (report["uvloop"] is not None) == ("uvloop" in LOOPS)
    assert (report["grpcio"] is not None) == bool(PEERS)


def test_the_tables_have_a_row_for_each_kind_and_depth(quick: Ran) -> None:
    wanted = [
        [f"{where} {what}", f"{depth:,}"]
        for where in ("remote", "local")
        for what in ("ask", "tell")
        for depth in DEPTHS
    ]
    for loop in LOOPS:
        for title, columns in (
            ("per second", 3 + 2 * len(PEERS)),
            ("CPU µs per message", 3 + len(PEERS)),
        ):
            rows = rows_of(quick.stdout, f"{loop}: {title}")
            assert [row[:2] for row in rows] == wanted
            for row in rows:
                assert len(row) == columns
                assert all(row) == (row[0].startswith("remote") or not PEERS), row


def rows_of(text: str, title: str) -> list[list[str]]:
    """The rows of the table with that title."""
    lines = text.partition(f"| {title} |")[2].partition("\n\n")[0].splitlines()[2:]
    return [[cell.strip() for cell in line[1:-1].split("|")] for line in lines]


def test_every_round_has_its_line_of_progress(quick: Ran) -> None:
    lines = [line for line in quick.stderr.splitlines() if "round 1 of 1" in line]
    assert lines[0].endswith(f"asks and tells on {', '.join(LOOPS)}")
    assert len(lines) == 1 + len(quick.report["single"])


def test_a_figure_is_the_median_of_its_rounds(bench: ModuleType) -> None:
    rounds = [{"rate": rate, "p50_s": 0.002, "p99_s": 0.004} for rate in (30e3, 10e3, 20_004.0)]
    ours = bench.Figure("asyncio", "remote", "ask", 1, "domicile", rounds)
    theirs = bench.Figure("asyncio", "remote", "ask", 1, "unary", [{"rate": 5_001.0}])
    assert ours.report()["per_s"] == 20_004.0
    assert bench.rates([ours, theirs], "asyncio").splitlines() == [
        "| asyncio: per second | in flight | Domicile | grpc.aio unary | to grpc.aio unary |",
        "| --- | ---: | ---: | ---: | ---: |",
        "| remote ask | 1 | 20,000 | 5,000 | 4× |",
    ]
    assert bench.latencies([ours], "asyncio").splitlines()[-1] == "| remote ask | 1 | 2.00 / 4.00 |"


def test_small_figures_keep_their_digits(bench: ModuleType) -> None:
    assert bench.number(0.256) == "0.26"
    assert bench.number(20_004.0) == "20,000"


def test_the_real_form_takes_medians(bench: ModuleType) -> None:
    scale = bench.Scale()
    assert scale.rounds >= 3
    assert scale.entities == 1_000
    assert scale.idle == 100_000


def test_a_part_that_ends_early_is_an_error(bench: ModuleType, tmp_path: Path) -> None:
    part = bench.Part("client", "asyncio", "nowhere", 1, tmp_path)
    try:
        with pytest.raises(RuntimeError, match="client ended early"):
            part.ready()
    finally:
        part.close()


def test_the_planners_benchmark_reports_every_strategy_and_case(tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    ran = subprocess.run(
        [
            sys.executable,
            str(SCRIPT.with_name("planner.py")),
            *("--quick", "--json", str(report)),
        ],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTHONPATH": str(ROOT / "src")},
    )
    assert ran.returncode == 0, ran.stderr
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
