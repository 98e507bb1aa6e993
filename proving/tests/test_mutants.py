"""The planted bugs still fit the source. Whether the checkers find them is a suite of its own."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from proving.chaos.tally import KINDS, NONE
from proving.mutants import run
from proving.mutants import symbol_patch as patches
from proving.profiles import MIXED, SPECS

ROOT = Path(__file__).resolve().parents[2]


PATCHES = sorted((ROOT / "proving" / "mutants").glob("*.patch"))
CHAOTIC = sorted((ROOT / "proving" / "mutants" / "chaos").glob("*.patch"))
SUITES = sorted((ROOT / "proving" / "mutants" / "suites").glob("*.patch"))

NAMED = (
    "owners-marker", "no-gate", "no-return", "no-prefix", "no-finishing-lane", "no-waves",
    "overtaking-flush", "late-flushed-believed", "released-not-final", "fence-without-lock",
    "timer-only-deadline", "assign-before-persist", "two-coordinators", "validity-from-answer",
    "evicted-unmarked",
)  # fmt: skip

FAMILIES = "LHNCSJ"
LEAST_OF_EACH = 3
HEAD = re.compile(
    r"Rule: (?P<rule>[A-Z]\d*)\nProfile: (?P<profile>\w+)\n"
    r"Chaos: (?P<chaos>yes|untried|no, (?!.*\btried\b).{10,})\n"
    r"(Chaos-Minutes: (?P<minutes>\d+)\n)?(Chaos-Only: (?P<only>.+)\n)?\n@@ "
)
SUITE_HEAD = re.compile(
    r"Rule: [A-Z]\d*\n"
    r"Suite: (?P<suite>(?P<file>tests/(unit|sim|real)/\S+\.py)(::(?P<test>\w+)\S*)?)\n\n@@ "
)


def head(patch: Path) -> re.Match[str]:
    found = HEAD.match(patch.read_text(encoding="utf-8"))
    assert found, f"{patch.name} must begin with Rule:, Profile: and Chaos:, then a hunk"
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
    assert head(patch)["profile"] in (MIXED, *SPECS)


@pytest.mark.parametrize("patch", SUITES, ids=lambda patch: patch.stem)
def test_a_patch_for_a_suite_names_its_tests(patch: Path) -> None:
    found = SUITE_HEAD.match(patch.read_text(encoding="utf-8"))
    assert found, f"{patch.name} must begin with Rule: and Suite:, then a hunk"
    assert run.head_of(patch).suite == found["suite"]
    text = (ROOT / found["file"]).read_text(encoding="utf-8")
    assert f"def {found['test'] or 'test_'}" in text or "(StoreContract)" in text
    assert patch in run.patches_of(chaotic=False)
    assert patch not in run.patches_of(chaotic=True)


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


def test_the_page_names_those_that_nobody_has_tried_under_chaos() -> None:
    page = (ROOT / "docs" / "explanation" / "testing.md").read_text(encoding="utf-8")
    told = re.search(
        r"^(\d+) of (\d+) mutants are untried under chaos: (.+?)\.$", page, re.M | re.S
    )
    assert told is not None
    untried = [patch.stem for patch in PATCHES if head(patch)["chaos"] == "untried"]
    assert re.findall(r"`([\w-]+)`", told[3]) == untried
    assert (int(told[1]), int(told[2])) == (len(untried), len(PATCHES))


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
    told = dict(
        re.findall(r"^\| `([\w-]+)` \| [^|]+ \| `([\w./:\[\]-]+)` \|", section, re.MULTILINE)
    )
    assert told == {patch.stem: run.head_of(patch).suite for patch in SUITES}


@pytest.fixture(scope="module")
def source() -> dict[str, str]:
    """The modules of the package by their paths."""
    return {
        str(path.relative_to(ROOT / "src")): path.read_text(encoding="utf-8")
        for path in sorted((ROOT / "src" / "domicile").rglob("*.py"))
    }


def copied(source: dict[str, str], tree: Path) -> Path:
    for name, text in source.items():
        (tree / name).parent.mkdir(parents=True, exist_ok=True)
        (tree / name).write_text(text, encoding="utf-8")
    return tree / "domicile"


def test_every_patch_applies_and_blinds_no_judge(source: dict[str, str], tmp_path: Path) -> None:
    package = copied(source, tmp_path)
    for patch in [*PATCHES, *CHAOTIC, *SUITES]:
        try:
            changed = patches.apply(patch.read_text(encoding="utf-8"), package)
        except patches.DoesNotApply as why:
            pytest.fail(f"{patch.name}: {why}\nmake the patch anew against today's source")
        for path in changed:
            name = str(path.relative_to(tmp_path))
            assert not name.startswith("domicile/testing/"), patch.name
            assert path.read_text() != source[name], f"{patch.name} changes nothing"
            compile(path.read_text(), name, "exec")
            path.write_text(source[name], encoding="utf-8")


def test_a_patch_follows_a_module_that_moves(tmp_path: Path) -> None:
    text = "class A:\n    def f(self):\n        return 1\n\n    def g(self):\n        return 1\n"
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "new.py").write_text(f"X = 1\n\n\n{text}")
    patches.apply("Rule: I1\n\n@@ A.g\n-        return 1\n+        return 2\n", tmp_path)
    after = (tmp_path / "elsewhere" / "new.py").read_text()
    assert after == f"X = 1\n\n\n{text}"[: -len("1\n")] + "2\n"


@pytest.mark.parametrize(
    ("hunk", "why"),
    [
        ("@@ B.g\n-    return 1\n+    return 2\n", "nothing in the source is called B.g"),
        ("@@ f\n-    return 3\n+    return 2\n", "contains the old lines nowhere"),
        ("@@ f\n-    return 1\n+    return 2\n", "contains the old lines in 2 places"),
    ],
)
def test_a_patch_without_exactly_one_place_is_refused(hunk: str, why: str, tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / f"{name}.py").write_text("def f():\n    return 1\n")
    with pytest.raises(patches.DoesNotApply, match=why):
        patches.apply(hunk, tmp_path)


@pytest.mark.parametrize("name", ["evicted-is-gone", "two-coordinators", "owners-marker"])
def test_a_patch_is_made_again_from_what_git_says_of_it(
    name: str, source: dict[str, str], tmp_path: Path
) -> None:
    package = copied(source, tmp_path / "src")
    git = ["git", "-c", "user.name=x", "-c", "user.email=x@x", "-C", str(tmp_path)]
    subprocess.run([*git, "init", "-q"], check=True)
    subprocess.run([*git, "add", "-A"], check=True)
    subprocess.run([*git, "commit", "-qm", "before"], check=True)
    first = patches.apply((PATCHES[0].parent / f"{name}.patch").read_text(), package)
    after = {path: path.read_text() for path in first}
    diff = subprocess.run([*git, "diff"], check=True, capture_output=True, text=True).stdout
    hunks = patches.as_text(patches.from_diff(diff, tmp_path))
    subprocess.run([*git, "checkout", "-q", "."], check=True)
    patches.apply(hunks, package)
    assert {path: path.read_text() for path in first} == after
