"""The benchmarks run and report what they measured. Nothing here judges a speed."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parent.parent
SCRIPT = ROOT / "benchmarks" / "run.py"


@pytest.fixture(scope="module")
def bench() -> ModuleType:
    spec = importlib.util.spec_from_file_location("domicile_benchmarks", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def test_the_quick_form_measures_everything(tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    ran = subprocess.run(
        [sys.executable, str(SCRIPT), "--quick", "--json", str(report)],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTHONPATH": str(ROOT / "src")},
    )
    assert ran.returncode == 0, ran.stderr
    written = json.loads(report.read_text(encoding="utf-8"))
    assert written["quick"] is True
    names = [result["name"] for result in written["results"]]
    wanted = [
        *(f"local ask, {depth} in flight" for depth in ("1", "100", "1,000")),
        *(f"local tell, {depth} in flight" for depth in ("1", "100", "1,000")),
        *(f"ask between two nodes, {depth} in flight" for depth in ("1", "100", "1,000")),
        "activation by a first ask",
        "idle entity, of 500",
        "campaign seed, median of 1",
    ]
    assert names == wanted
    for result in written["results"]:
        assert result["runs"], result
        assert result["unit"] == "bytes" or result["median"] > 0, result
    rows = [line.split(" | ")[0] for line in ran.stdout.splitlines() if line.startswith("| ")]
    assert rows[2:] == [f"| {name}" for name in wanted]
    assert all(name in ran.stderr for name in wanted), "every figure has its line of progress"


def test_a_figure_is_the_median_of_its_runs(bench: ModuleType) -> None:
    figure = bench.Figure("asks", "/s", (30_000.0, 10_000.0, 20_004.0))
    assert figure.median == 20_004.0
    assert bench.table([figure]).splitlines()[-1] == "| asks | 20,000 /s | 100% |"


def test_small_figures_keep_their_digits(bench: ModuleType) -> None:
    assert bench.show(bench.Figure("seed", "CPU s", (0.256, 0.25, 0.3))) == "0.26 CPU s"


def test_the_real_form_takes_medians(bench: ModuleType) -> None:
    assert bench.Scale().runs >= 3
    assert bench.Scale().seeds >= 5
    assert bench.Scale().idle == 100_000
