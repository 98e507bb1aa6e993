"""One round of a chaos run: its calm, what fails of the harness, and what a bad one leaves."""

from __future__ import annotations

import asyncio
import gzip
import os
import re
import shlex
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from domicile.testing.checkers import CHECKERS, Violation
from domicile.testing.history import Event, History
from domicile.testing.processes.cluster import Processes
from domicile.testing.processes.history import RealHistory
from domicile.testing.sim.loop import World
from proving.chaos import __main__ as command
from proving.chaos import bundle
from proving.chaos import round as rounds
from proving.chaos.round import CALM_S, CALMS, LONG_S, RoundPlan, judged_for_liveness, play
from proving.chaos.tally import Tally


def plan(directory: Path, length_s: float = 120.0) -> RoundPlan:
    return RoundPlan(
        seed=1,
        number=1,
        nodes=3,
        length_s=length_s,
        rate=60.0,
        network="loopback",
        directory=directory,
    )


# the calm


def calm(length_s: float, starved_at: Sequence[float], stop_at: float = 1e9) -> tuple[float, bool]:
    """How long the calm of a round is in which the machine starves, and whether it is judged."""
    world, tally, stop = World(0), Tally(), asyncio.Event()
    one = rounds._Round(plan(Path("unused"), length_s), tally, stop)
    one.cluster._now = world.clock
    began = world.now

    def starve() -> None:
        one.starved(world.now - 0.7, world.now)

    for at in starved_at:
        world.call_at(began + at, starve)
    world.call_at(began + stop_at, stop.set)
    try:
        one._be_quiet()
        world.run(one.calm(), world.process("chaos"))
    finally:
        world.close()
    one.cluster.note_fault("shutdown")
    history = RealHistory(one.cluster._events, Counter())
    return world.now - began, judged_for_liveness(history)


def test_a_calm_is_as_long_as_it_takes_to_judge_liveness() -> None:
    assert calm(LONG_S, []) == (pytest.approx(CALM_S), True)


def test_a_machine_that_starves_in_the_calm_prolongs_it() -> None:
    assert calm(LONG_S, [20.0]) == (pytest.approx(20.0 + CALM_S), True)
    assert calm(LONG_S, [5.0, 20.0, 40.0]) == (pytest.approx(40.0 + CALM_S), True)


def test_a_machine_that_starves_all_the_time_is_not_waited_for_forever() -> None:
    assert calm(LONG_S, range(5, 500, 5)) == (pytest.approx(CALMS * CALM_S), False)


def test_a_short_round_has_its_short_calm_and_who_is_interrupted_none() -> None:
    length_s = LONG_S - 1
    short_s = plan(Path("unused"), length_s).calm_s
    assert calm(length_s, [1.0]) == (pytest.approx(short_s), False)
    assert calm(LONG_S, [20.0], stop_at=25.0) == (pytest.approx(25.0), False)


def test_a_grace_alone_is_no_judgement() -> None:
    """Whatever got stuck after it would not have had the time to show (L)."""
    quiet, end = Event(0.0, "quiet", {}), {"fault": "shutdown", "node": None, "inc": None}

    def judged(until: float) -> bool:
        events = [quiet, Event(until, "fault", end), Event(until + 60.0, "gone", {})]
        return judged_for_liveness(RealHistory(events, Counter()))

    assert judged(CALM_S)
    assert not judged(CALM_S - rounds.STUCK_S)
    assert not judged_for_liveness(RealHistory([Event(90.0, "gone", {})], Counter()))


# a harness that fails


async def nothing(self: object) -> None:
    """Instead of a cluster."""


def raises(*_: object) -> list[Violation]:
    raise ZeroDivisionError("a bug of the harness")


EVENTS = [
    Event(1.0, "life", {"inc": "a", "node": "node-0", "hosts": True, "limits": {}}),
    Event(9.0, "fault", {"fault": "partition", "node": None, "inc": None}),
]


@pytest.fixture
def without_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rounds in which nothing happens, and that are judged all the same."""
    monkeypatch.setattr(rounds._Round, "play", nothing)
    monkeypatch.setattr(Processes, "history", lambda self: RealHistory([*EVENTS], Counter()))
    monkeypatch.setattr(Processes, "recorded", property(lambda self: EVENTS[::-1]))


def played(directory: Path) -> tuple[Tally, rounds.Result]:
    tally = Tally()
    return tally, asyncio.run(play(plan(directory), tally, asyncio.Event()))


@pytest.mark.usefixtures("without_cluster")
def test_a_checker_that_fails_is_a_violation_and_the_others_are_heard(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(CHECKERS, "I1a", raises)
    monkeypatch.setitem(CHECKERS, "L3", lambda history: [Violation("L3", 5.0, "late")])
    tally, result = played(tmp_path)
    assert [one.rule for one in result.violations] == ["harness", "L3"]
    assert "the checker of I1a: Traceback" in result.violations[0].message
    assert "a bug of the harness" in result.violations[0].message
    assert result.violations[0].at == EVENTS[-1].at, "where a timeline has room for it"
    assert (tally.rounds, tally.long, tally.events) == (1, 1, 2)
    assert tally.rules == {"harness": 1, "L3": 1}


@pytest.mark.usefixtures("without_cluster")
def test_without_a_whole_history_there_is_what_was_recorded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Processes, "history", raises)
    _, result = played(tmp_path)
    assert [one.rule for one in result.violations] == ["harness"], "a part can't be judged"
    assert result.history.events == EVENTS


@pytest.mark.usefixtures("without_cluster")
def test_without_anything_recorded_there_is_a_verdict(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Processes, "history", raises)
    monkeypatch.setattr(Processes, "recorded", property(raises))
    tally, result = played(tmp_path)
    assert tally.rules == {"harness": 2}
    assert result.history.events == []


@pytest.mark.usefixtures("without_cluster")
def test_a_directory_that_can_not_be_made_is_a_verdict_too(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    tally, _ = played(tmp_path / "file")
    assert (tally.rounds, tally.rules) == (1, {"harness": 1})


@pytest.mark.usefixtures("without_cluster")
def test_rounds_around_a_broken_one_keep_their_report(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    begun: list[RoundPlan] = []

    def second_only(history: History) -> list[Violation]:
        begun.append(plan(tmp_path))
        return raises() if len(begun) == 2 else []

    monkeypatch.setitem(CHECKERS, "L", second_only)
    assert command.main(["--minutes", "6", "--out", str(tmp_path)]) == 1
    said = capsys.readouterr().out
    assert "rounds                        3\n" in said
    assert "violations                    1\n  harness" in said
    assert [path.name for path in tmp_path.iterdir()] == ["seed-1-round-2"]
    assert "timeline.svg" in [path.name for path in (tmp_path / "seed-1-round-2").iterdir()]


def test_a_timeline_that_can_not_be_drawn_costs_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bundle, "draw", raises)
    history = RealHistory([*EVENTS], Counter())
    [missing] = bundle.leave(tmp_path / "x", history, [], "again", "title")
    assert missing.startswith("no timeline in the bundle: Traceback")
    there = sorted(path.name for path in (tmp_path / "x").iterdir())
    assert there == ["command.txt", "history.jsonl.gz", "timeline.txt", "violations.txt"]


# the whole


def objects(history: History) -> list[Violation]:
    """Has something against every cluster, and shows it by a message that ran."""
    start = next(history.of("start"))
    return [Violation("I5", start.at, "a planted violation", (start,))]


def typed(line: str) -> Callable[..., subprocess.CompletedProcess[str]]:
    """A command, typed into a shell that knows no Python by name."""

    def run(more: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            ["/bin/sh", "-c", f"{line} {more}"], capture_output=True, text=True, check=False,
            env={"PATH": "/nowhere", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        )  # fmt: skip

    return run


def test_a_failing_run_leaves_a_bundle_and_a_command_that_repeats_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(CHECKERS, "I5", objects)
    arguments = ["--minutes", "0.0312345678", "--seed", "5", "--nodes", "3", "--rate", "33.3333333"]
    arguments += ["--network", "loopback", "--only", "clock step", "--out", str(tmp_path)]
    assert command.main(arguments) == 1
    said = capsys.readouterr().out
    directory = tmp_path / "seed-5-round-1"
    assert f"bundle: {directory}\n" in said
    assert "failed: 1 violations\n" in said
    assert said.count("I5 broken at ") == 2, "when it is found, and in the end"

    names = [path.name for path in directory.iterdir()]
    assert {"harness.log", "client.events", "store.db"} <= {*names}
    assert all(any(name.startswith(f"node-{node}.") for name in names) for node in range(3))
    assert "a planted violation" in (directory / "violations.txt").read_text("utf-8")
    assert "a planted violation" in (directory / "timeline.txt").read_text("utf-8")
    picture = (directory / "timeline.svg").read_text("utf-8")
    assert picture.startswith("<svg")
    assert "node-2" in picture
    with gzip.open(directory / "history.jsonl.gz", "rt", encoding="utf-8") as file:
        kinds = Counter(line.split(",")[1] for line in file)
    assert min(kinds['"start"'], kinds['"commit"'], kinds['"stepped"']) > 0

    found = re.search(r"^repeat with: (.*)$", said, re.MULTILINE)
    assert found is not None
    assert (directory / "command.txt").read_text("utf-8") == f"{found[1]}\n"
    again = command.parse(shlex.split(found[1])[3:])
    [repeated] = command.plans(again, tmp_path)
    assert [repeated] == command.plans(command.parse(arguments), tmp_path)
    assert rounds.strikes(repeated) == rounds.strikes(
        command.plans(command.parse(arguments), tmp_path)[0]
    )
    helped = typed(found[1])("--help")
    assert helped.returncode == 0, helped.stderr
    assert "without faults" in helped.stdout
