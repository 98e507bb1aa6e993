"""The chaos command: its plan comes from the seed, its verdict from the checkers."""

from __future__ import annotations

import asyncio
import gzip
import io
import os
import shlex
import signal
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import cast

import pytest

from domicile.testing.checkers import Violation
from domicile.testing.history import Event
from domicile.testing.processes.history import RealHistory
from proving.chaos import __main__ as command
from proving.chaos.bundle import leave
from proving.chaos.round import LONG_S, RoundPlan, strikes
from proving.chaos.server import EMBEDDED, ServedStore, StoreServer, server_faults
from proving.chaos.tally import CALLS, KINDS, NONE, SERVED, Tally
from proving.chaos.targeted import FAULTS

ROOT = Path(__file__).resolve().parents[3]
PATCHES = sorted((ROOT / "proving" / "mutants" / "chaos").glob("*.patch"))
SOME_SERVER = cast(StoreServer, object())
"""A plan asks only whether there is one."""


def plan(
    length_s: float = 120.0, seed: int = 1, number: int = 1, server: StoreServer | None = None
) -> RoundPlan:
    return RoundPlan(
        seed=seed,
        number=number,
        nodes=5,
        length_s=length_s,
        rate=60.0,
        network="loopback",
        directory=Path("unused"),
        server=server,
    )


# the plan


def test_every_kind_of_fault_has_a_verb() -> None:
    served = server_faults(cast(ServedStore, None))
    assert (*FAULTS, *served) == KINDS
    assert tuple(served) == SERVED


@pytest.mark.parametrize("length_s", [25.0, 60.0, 120.0])
@pytest.mark.parametrize("server", [None, SOME_SERVER], ids=["embedded", "served"])
def test_a_round_of_any_length_strikes_with_every_kind_that_its_store_has(
    length_s: float, server: StoreServer | None
) -> None:
    lacking = SERVED if server is None else EMBEDDED
    for seed in range(20):
        struck = strikes(plan(length_s, seed, server=server))
        assert {kind for _, kind in struck} == {*KINDS} - {*lacking}
        assert all(0 < at < plan(length_s).faulty_s for at, _ in struck)
        assert [at for at, _ in struck] == sorted(at for at, _ in struck)


def test_seed_and_round_decide_what_strikes_when() -> None:
    assert strikes(plan()) == strikes(plan())
    assert strikes(plan(seed=2)) != strikes(plan())
    assert strikes(plan(number=2)) != strikes(plan())
    assert plan().stream("a").random() != plan().stream("b").random()


def test_a_run_may_be_of_a_few_kinds_of_faults(tmp_path: Path) -> None:
    options = command.parse(["--only", "contest", "--only", "slow move", "--eager"])
    [one] = command.plans(options, tmp_path)
    assert {kind for _, kind in strikes(one)} == {"contest", "slow move"}
    assert one.eager
    assert command.repeat(options, one).endswith("--eager --only contest --only 'slow move'")


def test_a_run_may_be_without_faults(tmp_path: Path) -> None:
    options = command.parse(["--only", NONE, "--minutes", "4"])
    one, other = command.plans(options, tmp_path)
    assert strikes(one) == strikes(other) == []


def test_a_run_of_many_rounds_has_some_without_faults(tmp_path: Path) -> None:
    """So that something is judged without any excuse, whatever strikes elsewhere."""

    def faultless(*arguments: str) -> list[int]:
        found = command.plans(command.parse(arguments), tmp_path)
        assert all(strikes(one) == [] for one in found if NONE in one.only)
        return [one.number for one in found if NONE in one.only]

    assert faultless("--minutes", "20") == [3, 8]
    assert faultless("--minutes", "10") == [3]
    assert faultless("--minutes", "8") == faultless("--minutes", "2") == []
    assert faultless("--minutes", "20", "--only", "kill") == [], "who names kinds means them"
    assert faultless("--minutes", "20", "--round", "8") == [8]
    assert faultless("--minutes", "20", "--round", "7") == []
    assert "rounds without faults         2\n" in Tally(faultless=2).report()


def test_a_long_run_is_made_of_rounds_that_can_be_repeated_one_by_one(tmp_path: Path) -> None:
    options = command.parse(["--minutes", "20", "--seed", "7"])
    rounds = command.plans(options, tmp_path)
    assert [one.number for one in rounds] == list(range(1, 11))
    assert sum(one.length_s for one in rounds) == pytest.approx(1_200.0)
    assert all(one.length_s > LONG_S for one in rounds), "so that liveness is judged"
    for one in rounds:
        again = command.parse(shlex.split(command.repeat(options, one))[3:])
        assert command.plans(again, tmp_path) == [one]


def test_a_plan_is_repeated_to_its_last_digit(tmp_path: Path) -> None:
    options = command.parse(["--minutes", "10.123456789", "--rate", "61.23456789"])
    one = command.plans(options, tmp_path)[3]
    again = command.parse(shlex.split(command.repeat(options, one))[3:])
    assert command.plans(again, tmp_path) == [one]


def test_a_command_names_the_python_that_has_the_package() -> None:
    project = Path("/a project")
    named = command.interpreter
    assert named("/a project/.venv/bin/python", project) == ".venv/bin/python"
    assert named("/a project/python", project) == "./python", "a shell would look elsewhere for it"
    assert named("/a venv/bin/python", project) == "/a venv/bin/python"
    assert named("", project) == "python", "where nobody knows"
    line = command.repeat(command.parse([]), plan())
    assert command.interpreter(sys.executable, Path.cwd()) == shlex.split(line)[0]
    assert (Path.cwd() / shlex.split(line)[0]).samefile(sys.executable)


@pytest.mark.parametrize(
    "wrong",
    [
        ["--minutes", "0"], ["--minutes", "nan"], ["--minutes", "inf"], ["--nodes", "2"],
        ["--rate", "-1"], ["--every", "0"], ["--managers", "-1"], ["--round", "0"],
        ["--minutes", "20", "--round", "11"], ["--only", "bad luck"],
        ["--only", "server kill"], ["--only", "full disk", "--store", "etcd"],
    ],
)  # fmt: skip
def test_nonsense_is_a_mistake_of_usage(wrong: list[str]) -> None:
    with pytest.raises(SystemExit) as told:
        command.parse(wrong)
    assert told.value.code == 2


def test_a_place_for_bundles_that_is_none_is_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    assert command.main(["--out", str(tmp_path / "file")]) == 2
    assert "name another by --out" in capsys.readouterr().out


def test_the_help_names_every_kind_of_fault(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        command.parse(["--help"])
    said = " ".join(capsys.readouterr().out.split())
    assert all(kind in said for kind in KINDS)
    assert "a run of 5 rounds or more has some without faults" in said


# the live line


def test_on_a_terminal_the_live_line_fits_into_one(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = io.StringIO()
    monkeypatch.setattr(terminal, "isatty", lambda: True)
    monkeypatch.setattr(sys, "stdout", terminal)
    monkeypatch.setenv("COLUMNS", "80")

    async def scenario() -> None:
        showing = asyncio.create_task(command._live(whole(), Tally(), "round 10/10", 0.001))
        async with asyncio.timeout(30):
            while terminal.getvalue().count("\r") < 3:  # noqa: ASYNC110
                await asyncio.sleep(0)
        showing.cancel()

    asyncio.run(scenario())
    _, *lines = terminal.getvalue().split("\r")
    for line in lines:
        shown = line.removesuffix("\x1b[K")
        assert shown.startswith("round 10/10   0 s | violations 0 | messages 0 moves 0 faults 27 |")
        assert len(shown) < 80


# the report


def whole() -> Tally:
    return Tally(faults=Counter(KINDS), calls=Counter(CALLS))


def test_tallies_add_up_and_tell_everything() -> None:
    tally = replace(whole(), messages=5, moves=2, long=1, faultless=1)
    total = Tally()
    total.add(tally)
    total.add(tally)
    assert (total.messages, total.faults["roll"], total.missing()) == (10, 2, [])
    assert (total.long, total.faultless) == (2, 2)
    total.rules["I1c"] += 3
    report, line = total.report(), total.line("round 1")
    for kind in KINDS:
        assert f"  {kind:<20}        2" in report
        assert f"{kind.replace(' ', '-')} 2" in line
    assert "I1c" in report
    assert line.startswith("round 1 | violations 3 | messages 10 moves 4 faults 54 | ")


def test_a_bundle_holds_the_history_the_timeline_and_the_command(tmp_path: Path) -> None:
    life = {"inc": "a", "node": "node-0", "hosts": True, "limits": {}}
    fault = {"fault": "partition", "node": None, "inc": None}
    events = [Event(1.0, "life", life), Event(2.0, "fault", fault), Event(3.0, "quiet", {})]
    put = {"by": "a", "revision": 1, "puts": [(b"k", b"v", None)], "deletes": []}
    history = RealHistory([*events, Event(4.0, "commit", put)], Counter())
    violation = Violation("I5", 2.5, "a message ran twice")
    leave(tmp_path / "x", history, [violation], "python -m proving.chaos", "seed 1")
    assert (tmp_path / "x" / "command.txt").read_text("utf-8").startswith("python -m proving.chaos")
    assert "a message ran twice" in (tmp_path / "x" / "violations.txt").read_text("utf-8")
    assert "partition" in (tmp_path / "x" / "timeline.txt").read_text("utf-8")
    assert (tmp_path / "x" / "timeline.svg").read_text("utf-8").startswith("<svg")
    with gzip.open(tmp_path / "x" / "history.jsonl.gz") as file:
        assert len(file.readlines()) == 4


# the whole


def start(*arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "proving.chaos", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
    )


def test_an_interrupted_run_reports_and_leaves_nothing(tmp_path: Path) -> None:
    ran = start(
        *("--minutes", "2", "--seed", "3", "--nodes", "3"),
        *("--every", "0.2", "--out", str(tmp_path)),
    )
    try:
        assert ran.stdout is not None
        # Until a cluster is under load and the first faults have struck.
        line = "roll 0"
        while "roll 0" in line or "| messages" not in line:
            line = ran.stdout.readline()
            assert line, "it ended before it began"
        ran.send_signal(signal.SIGINT)
        said, _ = ran.communicate(timeout=90)
    finally:
        ran.kill()
        ran.wait()
    assert "violations                    0" in said
    assert "never happened:" in said, "not every kind of fault can have struck by then"
    assert "interrupted: no verdict on the run; of its 1 rounds 1 were begun" in said
    assert ran.returncode == 130
    assert [*tmp_path.iterdir()] == []


def test_who_is_interrupted_twice_ends_at_once(tmp_path: Path) -> None:
    ran = start("--seed", "3", "--nodes", "3", "--every", "0.2", "--out", str(tmp_path))
    try:
        assert ran.stdout is not None
        line = ""
        while "| messages" not in line or "messages 0 " in line:
            line = ran.stdout.readline()
            assert ran.poll() is None, "it ended before it began"
        ran.send_signal(signal.SIGINT)
        while "asked once more" not in line:
            line = ran.stdout.readline()
            assert line, "it ended before it was asked again"
        ran.send_signal(signal.SIGINT)
        said, _ = ran.communicate(timeout=90)
    finally:
        ran.kill()
        ran.wait()
    assert f"what there is of it is in {tmp_path}" in said
    assert "Traceback" not in said
    assert ran.returncode == 130
    assert [path.name for path in tmp_path.iterdir()] == ["seed-3-round-1"]


def test_there_are_bugs_for_chaos() -> None:
    assert PATCHES


@pytest.mark.parametrize("patch", PATCHES, ids=lambda patch: patch.stem)
def test_a_bug_for_chaos_says_what_it_breaks(patch: Path) -> None:
    text = patch.read_text(encoding="utf-8")
    assert text.startswith("Rule: ")
    assert "\nProfile: chaos\n" in text
