"""Seconds per test file, from pytest's own reports: what a tier of tests costs, and which files.

    make test ARGS=--junitxml=build/test.xml
    python -m proving.durations build/test.xml build/test-real.xml > tests/durations.md

The table is kept in `tests/durations.md`, so that a file that becomes slow shows in a change. The
sum is of all workers: two of them on two cores take about half of it.
"""

from __future__ import annotations

import sys
import xml.etree.ElementTree as ET
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

FEWEST_S = 1.0
"""Files below this are added up in the last row."""


def by_file(report: Path) -> tuple[dict[str, float], Counter[str]]:
    """Seconds and numbers of tests of each file of a report."""
    seconds: dict[str, float] = {}
    tests: Counter[str] = Counter()
    for case in ET.parse(report).iter("testcase"):
        parts = (case.get("classname") or "").split(".")
        # A class of tests is no file: its name begins with a capital.
        file = "/".join(part for part in parts if not part[:1].isupper()) + ".py"
        seconds[file] = seconds.get(file, 0.0) + float(case.get("time") or 0.0)
        tests[file] += 1
    return seconds, tests


def table(reports: Sequence[Path]) -> str:
    """One table for each report, the slowest file first."""
    lines = ["# Seconds per test file", ""]
    for report in reports:
        seconds, tests = by_file(report)
        lines += [f"## {report.stem}", "", "| file | tests | seconds |", "| --- | ---: | ---: |"]
        order = sorted(seconds, key=lambda file: (-seconds[file], file))
        shown = [file for file in order if seconds[file] >= FEWEST_S]
        lines += [f"| `{file}` | {tests[file]} | {seconds[file]:.1f} |" for file in shown]
        rest = [file for file in seconds if file not in shown]
        few_s, few = sum(seconds[file] for file in rest), sum(tests[file] for file in rest)
        lines += [f"| {len(rest)} others | {few} | {few_s:.1f} |"]
        lines += [f"| all | {tests.total()} | {sum(seconds.values()):.0f} |", ""]
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    """The command."""
    reports = [Path(one) for one in (sys.argv[1:] if arguments is None else arguments)]
    if not reports:
        print((__doc__ or "").strip(), file=sys.stderr)
        return 2
    print(table(reports), end="")
    return 0


if __name__ == "__main__":
    sys.exit(main())
