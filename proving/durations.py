"""Seconds per test file, from pytest's own reports: what a tier of tests costs, and which files.

    make test ARGS=--junitxml=build/test.xml
    make test-kube ARGS=--junitxml=build/test-kube.xml
    python -m proving.durations build/test.xml build/test-kube.xml

The tables are kept in `tests/durations.md`, so that a file that becomes slow shows in a change. A
report is named after its target of make; a target without a new report keeps its old table. The sum
is of all workers: two of them on two cores take about half of it.
"""

from __future__ import annotations

import subprocess
import sys
import xml.etree.ElementTree as ET
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
KEPT = ROOT / "tests" / "durations.md"
TIERS = ("test", "test-real", "test-docs", "test-kube", "test-replica", "test-hosts")
"""Targets of make that run tests of their own, in the order of the tables."""

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


def table(report: Path, commit: str) -> str:
    """The table of one report, the slowest file first."""
    seconds, tests = by_file(report)
    lines = [f"Taken at `{commit}`.", "", "| file | tests | seconds |", "| --- | ---: | ---: |"]
    order = sorted(seconds, key=lambda file: (-seconds[file], file))
    shown = [file for file in order if seconds[file] >= FEWEST_S]
    lines += [f"| `{file}` | {tests[file]} | {seconds[file]:.1f} |" for file in shown]
    rest = [file for file in seconds if file not in shown]
    few_s, few = sum(seconds[file] for file in rest), sum(tests[file] for file in rest)
    lines += [f"| {len(rest)} others | {few} | {few_s:.1f} |"]
    lines += [f"| all | {tests.total()} | {sum(seconds.values()):.0f} |"]
    return "\n".join(lines)


def page(reports: Sequence[Path], kept: str, commit: str) -> str:
    """All tiers: new tables, the old ones of tiers without a new report, and which have none."""
    _, *sections = kept.split("\n## ")
    tables = {name: text.strip() for name, _, text in (one.partition("\n") for one in sections)}
    tables |= {report.stem: table(report, commit) for report in reports}
    told = (f"## {tier}\n\n{tables.get(tier, 'No report yet.')}\n" for tier in TIERS)
    return "\n".join(["# Seconds per test file\n", *told])


def main(arguments: Sequence[str] | None = None) -> int:
    """The command."""
    reports = [Path(one) for one in (sys.argv[1:] if arguments is None else arguments)]
    if not reports or any(report.stem not in TIERS for report in reports):
        print((__doc__ or "").strip(), file=sys.stderr)
        return 2
    git = ["git", "describe", "--always", "--dirty"]
    commit = subprocess.run(git, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    KEPT.write_text(page(reports, KEPT.read_text(encoding="utf-8"), commit.strip()), "utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
