"""The campaign of replica groups: seeds are clean, repeat, and are told."""

from __future__ import annotations

import logging
import shutil
from pathlib import Path

import pytest

from proving.groups import GroupResult, main, run_group_seed, told
from proving.mutants import symbol_patch
from proving.mutants.run import head_of, patches_of

ROOT = Path(__file__).resolve().parents[2]
PATCHES = sorted((ROOT / "proving" / "mutants" / "groups").glob("*.patch"))


@pytest.mark.parametrize("seed", [0, 1])
def test_a_seed_is_clean_and_repeats(seed: int) -> None:
    level = logging.getLogger("domicile").level
    first = run_group_seed(seed)
    assert logging.getLogger("domicile").level == level, "later tests read the log"
    assert first.ok, "\n".join(told(first))
    assert first.epochs > 1
    assert first.writes > 500
    again = run_group_seed(seed)
    assert (again.writes, again.epochs, again.faults) == (first.writes, first.epochs, first.faults)


@pytest.mark.parametrize("seed", [489, 594, 787])
def test_a_seed_that_was_bad_is_clean(seed: int) -> None:
    """489: a follower took over the history of a server that saved its loss. 594 and 787: sessions
    of a machine that stood still went on when its server was killed, in the simulator alone."""
    found = run_group_seed(seed)
    assert found.ok, "\n".join(told(found))


def test_a_bad_seed_is_one_line_to_repeat() -> None:
    bad = GroupResult(17, "async", violations=["F1 broken"], faults=["   1.000 s  agent s1 killed"])
    assert not bad.ok
    assert told(bad)[-1] == "repeat it with: python -m proving.groups --seed 17"


def test_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--seed", "2"]) == 0
    assert capsys.readouterr().out.startswith("1 seeds, 0 bad; ")


@pytest.mark.parametrize("patch", PATCHES, ids=lambda patch: patch.stem)
def test_a_mutant_applies_and_is_told_on_the_page(patch: Path, tmp_path: Path) -> None:
    head = head_of(patch)
    assert (head.profile, head.chaotic) == ("groups", False)
    assert patch in patches_of(chaotic=False), "`make mutants` tries it"
    shutil.copytree(ROOT / "src" / "domicile" / "failover", tmp_path / "failover")
    symbol_patch.apply(patch.read_text(encoding="utf-8"), tmp_path)
    page = (ROOT / "docs" / "explanation" / "replica-groups.md").read_text(encoding="utf-8")
    assert f"| `{patch.stem}` |" in page
