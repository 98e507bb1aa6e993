"""The planted bugs still fit the source. Whether the checkers find them is a suite of its own."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from domicile.testing.chaos.tally import KINDS, NONE
from domicile.testing.profiles import MIXED, PROFILES

ROOT = Path(__file__).resolve().parents[1]


def _runner() -> ModuleType:
    """The command beside the patches, which is in no package."""
    spec = importlib.util.spec_from_file_location("mutants_run", ROOT / "tests/mutants/run.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


run = _runner()
PATCHES = sorted((ROOT / "tests" / "mutants").glob("*.patch"))
CHAOTIC = sorted((ROOT / "tests" / "mutants" / "chaos").glob("*.patch"))

NAMED = (
    "owners-marker", "no-gate", "no-return", "no-prefix", "no-finishing-lane", "no-waves",
    "overtaking-flush", "late-flushed-believed", "released-not-final", "fence-without-lock",
    "timer-only-deadline", "assign-before-persist", "two-coordinators", "validity-from-answer",
    "evicted-unmarked",
)  # fmt: skip

FAMILIES = "LHNCSJ"
LEAST_OF_EACH = 3
HEAD = re.compile(
    r"Rule: (?P<rule>[A-Z]\d*)\nProfile: (?P<profile>\w+)\nChaos: (?P<chaos>yes|no, .{10,})\n"
    r"(Chaos-Minutes: (?P<minutes>\d+)\n)?(Chaos-Only: (?P<only>.+)\n)?diff "
)


def head(patch: Path) -> re.Match[str]:
    found = HEAD.match(patch.read_text(encoding="utf-8"))
    assert found, f"{patch.name} must begin with Rule:, Profile: and Chaos:, then the difference"
    return found


def test_the_broken_versions_of_the_protocol_are_all_there() -> None:
    names = [patch.stem for patch in PATCHES]
    assert [name for name in NAMED if name not in names] == []


def test_each_family_of_rules_has_its_mutants() -> None:
    rules = [head(patch)["rule"] for patch in PATCHES]
    counts = {family: sum(rule[0] == family for rule in rules) for family in FAMILIES}
    assert {family: n for family, n in counts.items() if n < LEAST_OF_EACH} == {}


@pytest.mark.parametrize("patch", PATCHES, ids=lambda patch: patch.stem)
def test_a_patch_names_a_profile_of_the_campaign(patch: Path) -> None:
    assert head(patch)["profile"] in (MIXED, *PROFILES)


@pytest.mark.parametrize("patch", [*PATCHES, *CHAOTIC], ids=lambda patch: patch.stem)
def test_a_patch_says_whether_chaos_can_find_it(patch: Path) -> None:
    told = run.head_of(patch)
    assert told.chaos == head(patch)["chaos"]
    assert told.chaotic == told.chaos.startswith("yes")
    assert told.chaotic or patch not in CHAOTIC, "what no other suite tries must be found there"
    assert told.chaos_minutes == float(head(patch)["minutes"] or run.CHAOS_MINUTES)
    assert ", ".join(told.chaos_only) == (head(patch)["only"] or "")
    assert {*told.chaos_only} <= {*KINDS, NONE}
    assert (patch in run.patches_of(chaotic=True)) == told.chaotic


def test_the_page_says_how_chaos_found_those_that_it_can() -> None:
    page = (ROOT / "docs" / "explanation" / "testing.md").read_text(encoding="utf-8")
    section = page.partition("## Mutants under chaos")[2].partition("\n## ")[0]
    told = re.findall(r"^\| `([\w-]+)` \| \d* ?\| \d+ \| \w+ \|", section, re.MULTILINE)
    assert told == [patch.stem for patch in run.patches_of(chaotic=True)]


def test_a_table_tells_of_each_mutant() -> None:
    tried = [
        run.Tried("one", True, 2, 31.4, "found with seed 2: I5 broken at 7.0: a message ran twice"),
        run.Tried("other", False, None, 240.0, "seed 3: no checker objected, but exit broken at 1"),
    ]
    assert run.table(tried).splitlines()[2:] == [
        "| `one` | 2 | 31 | I5 |",
        "| `other` |  | 240 | survived |",
    ]


def test_the_page_says_of_each_mutant_what_the_patch_says() -> None:
    page = (ROOT / "docs" / "explanation" / "testing.md").read_text(encoding="utf-8")
    section = page.partition("## Mutants")[2].partition("\n## ")[0]
    told = dict(re.findall(r"^\| `([\w-]+)` \| [^|]+ \| (\w+) \|", section, re.MULTILINE))
    assert told == {patch.stem: head(patch)["profile"] for patch in PATCHES}


@pytest.mark.parametrize("patch", [*PATCHES, *CHAOTIC], ids=lambda patch: patch.stem)
def test_a_patch_applies_and_touches_only_the_source(patch: Path, tmp_path: Path) -> None:
    touched = [line[6:] for line in patch.read_text().splitlines() if line.startswith("+++ b/")]
    assert touched
    for name in touched:
        assert name.startswith("src/domicile/")
        assert not name.startswith("src/domicile/testing/"), "a mutant must not blind its judges"
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text((ROOT / name).read_text())
    applied = subprocess.run(
        ["git", "apply", "--check", str(patch)],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "GIT_CEILING_DIRECTORIES": str(tmp_path.parent)},
    )
    assert applied.returncode == 0, f"{applied.stderr}\nmake the patch anew against today's source"
