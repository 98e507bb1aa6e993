"""What a chaos run comes to: it passes only if all of it happened, was judged, and was right."""

from __future__ import annotations

import shlex
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from proving.chaos import __main__ as command
from proving.chaos.round import LONG_S, RoundPlan
from proving.chaos.tally import AIMED, CALLS, KINDS, NONE, WORK, Tally
from proving.chaos.verdict import FAILED, FINE, INTERRUPTED, Verdict, conclude


def plans(*arguments: str) -> list[RoundPlan]:
    return command.plans(command.parse(arguments), Path("unused"))


SHORT, LONG = plans("--minutes", "2"), plans("--minutes", "20")


def whole(rounds: int = 10, calm: int = 10) -> Tally:
    """A run in which everything happened."""
    return Tally(
        rounds=rounds, long=rounds, calm=calm, messages=9, moves=9,
        faults=Counter(KINDS), calls=Counter(CALLS),
    )  # fmt: skip


def test_a_run_is_good_only_if_everything_happened_and_nobody_objected() -> None:
    assert conclude(whole(), LONG) == Verdict()
    only = plans("--minutes", "20", "--only", "roll")
    for kind in LONG[0].kinds:
        tally = whole()
        del tally.faults[kind]
        assert tally.missing() == [kind]
        assert conclude(tally, LONG) == Verdict(FAILED, [f"never happened: {kind}"], [kind])
        assert conclude(tally, SHORT).code == (FINE if kind in AIMED else FAILED)
        assert conclude(tally, only).code == (FAILED if kind == "roll" else FINE)
    tally = whole()
    tally.rules["I5"] += 1
    assert conclude(tally, SHORT) == Verdict(FAILED, ["failed: 1 violations"])


@pytest.mark.parametrize("what", [*CALLS, *WORK])
def test_a_run_without_calls_messages_or_moves_has_tried_nothing(what: str) -> None:
    tally = replace(whole(), **{what: 0}) if what in WORK else whole()
    del tally.calls[what]
    for rounds in (SHORT, LONG, plans("--only", NONE)):
        assert conclude(tally, rounds) == Verdict(FAILED, [f"never happened: {what}"], [what])


def test_a_run_without_faults_needs_none() -> None:
    tally = replace(whole(), faults=Counter())
    assert conclude(tally, plans("--only", NONE, "--minutes", "20")) == Verdict()
    assert conclude(tally, plans("--minutes", "20", "--round", "3")) == Verdict()
    assert conclude(tally, LONG).code == FAILED


def test_a_round_alone_is_no_long_run() -> None:
    tally = replace(whole(1, 1), faults=Counter(set(KINDS) - {*AIMED}))
    assert conclude(tally, plans("--minutes", "20", "--round", "4")).code == FINE
    assert conclude(tally, LONG).code == FAILED


# liveness


def test_a_run_that_was_never_judged_for_liveness_fails() -> None:
    [said] = conclude(whole(1, 0), SHORT).said
    assert said == "not judged for liveness: 1 of 1 rounds"
    assert conclude(whole(1, 0), SHORT).code == FAILED
    assert conclude(whole(4, 1), plans("--minutes", "8")) == Verdict()


def test_of_a_long_run_at_least_half_of_the_rounds_are_judged() -> None:
    assert conclude(whole(10, 5), LONG) == Verdict()
    starved = replace(whole(10, 4), starved=70)
    verdict = conclude(starved, LONG)
    assert verdict.code == FAILED
    assert verdict.said[0].startswith("not judged for liveness: 6 of 10 rounds; 70 times the mach")


def test_rounds_that_are_too_short_for_it_say_so() -> None:
    few = plans("--minutes", "0.2")
    verdict = conclude(replace(whole(1, 0), long=0), few)
    assert verdict == Verdict(
        FINE, [f"rounds of less than {LONG_S:g} s are not judged for liveness"]
    )


# interrupted


def test_who_is_interrupted_is_neither_right_nor_wrong() -> None:
    begun = Tally(rounds=2, long=2, calm=1, messages=1, moves=1)
    verdict = conclude(begun, LONG, interrupted=True)
    assert verdict.code == INTERRUPTED
    assert verdict.said[0] == (
        "interrupted: no verdict on the run; of its 10 rounds 2 were begun, and 1 judged for "
        "liveness"
    )
    assert conclude(whole(3, 3), LONG, interrupted=True).code == INTERRUPTED


def test_who_is_interrupted_may_have_found_a_violation() -> None:
    tally = whole(1, 0)
    tally.rules["I1c"] += 1
    verdict = conclude(tally, LONG, interrupted=True)
    assert verdict.code == FAILED
    assert [line.split(":")[0] for line in verdict.said] == ["failed", "interrupted"]


# what to do


def test_for_what_never_happened_there_is_a_command_that_shows_it(tmp_path: Path) -> None:
    options = command.parse(["--minutes", "20", "--seed", "7", "--fencing", "health"])
    advice = command._advice(options, Verdict(FAILED, [], ["slow move", "tell", "moves"]))
    assert len(advice) == 3, "calls and moves are shown by the same"
    for line, kind in zip(advice[1:], ["slow move", NONE], strict=True):
        [plan] = command.plans(command.parse(command_words(line)), tmp_path)
        assert (plan.only, plan.seed, plan.fencing) == ((kind,), 7, "health")
    assert command._advice(options, Verdict(FAILED, ["failed: 1 violations"])) == []
    assert command._advice(options, Verdict(INTERRUPTED, [], ["slow move"])) == []


def command_words(line: str) -> list[str]:
    """The arguments of a command as a shell would split it."""
    _, option, module, *arguments = shlex.split(line)
    assert (option, module) == ("-m", "proving.chaos")
    return arguments


def test_namespaces_with_a_server_as_store_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        command.parse(["--store", "etcd", "--network", "namespaces"])
    assert "loopback address" in capsys.readouterr().err
    assert command.parse(["--store", "etcd"]).network == "auto"
