"""The campaign of replica groups: seeds are clean, repeat, and are told."""

from __future__ import annotations

import pytest

from proving.groups import GroupResult, main, run_group_seed, told


@pytest.mark.parametrize("seed", [0, 1])
def test_a_seed_is_clean_and_repeats(seed: int) -> None:
    first = run_group_seed(seed)
    assert first.ok, "\n".join(told(first))
    assert first.epochs > 1
    assert first.writes > 500
    again = run_group_seed(seed)
    assert (again.writes, again.epochs, again.faults) == (first.writes, first.epochs, first.faults)


def test_a_bad_seed_is_one_line_to_repeat() -> None:
    bad = GroupResult(17, "async", violations=["F1 broken"], faults=["   1.000 s  agent s1 killed"])
    assert not bad.ok
    assert told(bad)[-1] == "repeat it with: python -m proving.groups --seed 17"


def test_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--seed", "2"]) == 0
    assert capsys.readouterr().out.startswith("1 seeds, 0 bad; ")
