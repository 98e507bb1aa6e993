"""Seconds per test file: a new report replaces its table, other tiers keep theirs or say so."""

from __future__ import annotations

import re
from pathlib import Path

from proving.durations import KEPT, ROOT, TIERS, page

REPORT = """<testsuites><testsuite>
<testcase classname="tests.kube.test_real_store.TestStore" name="a" time="2.5"/>
<testcase classname="tests.kube.test_real_store" name="b" time="1.5"/>
<testcase classname="tests.kube.test_quick" name="c" time="0.2"/>
</testsuite></testsuites>"""


def test_a_tier_with_a_report_has_a_new_table_and_others_keep_theirs(tmp_path: Path) -> None:
    report = tmp_path / "test-kube.xml"
    report.write_text(REPORT)
    kept = "# Seconds per test file\n\n## test\n\nold one\n\n## test-kube\n\nold two\n"
    told = page([report], kept, "abc1234")
    sections = dict(re.findall(r"^## (\S+)\n\n((?:(?!^## ).*\n?)+)", told, re.MULTILINE))
    assert sections["test"].strip() == "old one"
    assert sections["test-docs"].strip() == "No report yet."
    assert sections["test-kube"].strip().splitlines() == [
        "Taken at `abc1234`.", "",
        "| file | tests | seconds |", "| --- | ---: | ---: |",
        "| `tests/kube/test_real_store.py` | 2 | 4.0 |", "| 1 others | 1 | 0.2 |",
        "| all | 3 | 4 |",
    ]  # fmt: skip
    assert page([], told, "later") == told


def test_the_kept_page_has_all_tiers_and_each_is_a_target() -> None:
    kept = KEPT.read_text(encoding="utf-8")
    assert re.findall(r"^## (\S+)$", kept, re.MULTILINE) == list(TIERS)
    targets = (ROOT / "Makefile").read_text(encoding="utf-8")
    assert [tier for tier in TIERS if f"\n{tier}: setup" not in targets] == []
