"""What `domicile run` sets in a process that is its own."""

from __future__ import annotations

import subprocess
import sys

import pytest

SHOW = "import gc; from domicile.ops.serve import collect_rarely; {}; collect_rarely(); print({})"


@pytest.mark.parametrize(
    ("before", "shown", "after"),
    [
        ("pass", "(gc.get_threshold()[0], gc.get_freeze_count() > 0)", "(20000, True)"),
        ("gc.set_threshold(90_000)", "gc.get_threshold()[0]", "90000"),
        ("gc.set_threshold(0)", "gc.get_threshold()[0]", "0"),
        ("gc.disable()", "gc.isenabled()", "False"),
    ],
)
def test_the_collector_looks_rarely_unless_the_program_chose(
    before: str, shown: str, after: str
) -> None:
    done = subprocess.run(
        [sys.executable, "-c", SHOW.format(before, shown)],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert done.stdout.strip() == after
