"""`python -m proving.simulate`: one seed with its timeline, many seeds, bad ones, and Ctrl-C."""

from __future__ import annotations

import os
import signal
import time
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest
from run_lab import running
from typer.testing import CliRunner, Result

from domicile.testing import History, Violation
from proving.simulate import app


def simulate(*arguments: str) -> Result:
    return CliRunner().invoke(app, arguments)


def test_a_seed_is_shown_as_a_timeline_and_a_picture(tmp_path: Path) -> None:
    picture = tmp_path / "deep" / "seed.svg"
    result = simulate("--seed", "1", "--profile", "standard", "--trace", "--svg", str(picture))
    assert result.exit_code == 0, result.output
    assert result.stdout.startswith("seed 1 of standard: zero violations\nlanes: 0 node-0, ")
    assert " leads (leader revision " in result.stdout
    assert result.stdout.endswith("\nseed 1 of standard: zero violations\n")
    assert ET.parse(picture).getroot().tag.endswith("svg")
    assert result.stderr == f"drawn into {picture}\n"


def test_only_the_strikes_that_are_kept_strike() -> None:
    whole = simulate("--seed", "1", "--profile", "standard")
    strikes = [line.split()[3].rstrip(":") for line in whole.stdout.splitlines()[1:]]
    kept = strikes[0]
    part = simulate("--seed", "1", "--profile", "standard", "--keep", kept)
    assert part.exit_code == 0
    assert {line.split()[3].rstrip(":") for line in part.stdout.splitlines()[1:]} == {kept}
    none = simulate("--seed", "1", "--profile", "standard", "--keep", "none")
    assert none.stdout == "seed 1 of standard: zero violations\n"


def test_a_bad_seed_is_told_with_the_command_that_repeats_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def planted(history: History) -> list[Violation]:
        event = next(history.of("leading"))
        return [Violation("I1a", event.at, "planted", (event,))]

    monkeypatch.setattr("proving.campaign.check", planted)
    monkeypatch.setattr("domicile.testing.checkers.check", planted)
    result = simulate("--seed", "2", "--profile", "standard", "--trace")
    assert result.exit_code == 1
    assert "! I1a broken: planted" in result.stdout
    assert "seed 2 of standard is bad" in result.stdout
    assert "repeat it with: python -m proving.simulate --seed 2 --profile standard" in result.stdout


def test_many_seeds_are_reported_and_the_exit_code_is_their_verdict() -> None:
    result = simulate("--seeds", "0:3", "--profile", "standard", "--jobs", "2")
    assert result.exit_code == 0, result.output
    assert result.stdout.startswith("3 seeds in ")
    assert result.stdout.endswith("\nzero violations\n")


def test_a_picture_that_cannot_be_written_is_told_before_the_run(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    result = simulate("--seed", "1", "--svg", str(tmp_path / "file" / "x.svg"))
    assert result.exit_code == 2
    assert "can't be written" in result.stderr


def children(pid: int) -> list[int]:
    found = Path(f"/proc/{pid}/task/{pid}/children")
    return [int(one) for one in found.read_text().split()] if found.exists() else []


def runs(pid: int) -> bool:
    """Whether a process is there and no zombie."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="ascii")
    except (FileNotFoundError, ProcessLookupError):
        return False
    return stat.rpartition(")")[2].split()[0] != "Z"


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="needs Linux's /proc")
def test_interrupted_it_ends_at_once_and_leaves_nothing_running(tmp_path: Path) -> None:
    with running(tmp_path, "--seeds", "0:9999", "--jobs", "1", module="proving.simulate") as many:
        many.hear("seeds, ")
        workers = children(many.process.pid)
        # A terminal's Ctrl-C goes to every process of the group.
        for pid in workers:
            os.kill(pid, signal.SIGINT)
        many.signal(signal.SIGINT)
        assert many.ended() == 130
        assert many.said[-1].strip() == "error: interrupted"
        assert "Traceback" not in "".join(many.said)
    assert workers
    deadline = time.monotonic() + 30
    while any(map(runs, workers)):
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.mark.parametrize(
    "arguments",
    [
        ("--profile", "nonsense"),
        ("--seed", "1", "--seeds", "1:2"),
        ("--seeds", "2:1"),
        ("--seeds", "0:10", "--trace"),
        ("--seed", "1", "--keep", "x"),
        ("--seed", "1", "--keep", "999"),
    ],
)
def test_a_wrong_usage_ends_with_2_and_says_what_is_wrong(arguments: tuple[str, ...]) -> None:
    result = simulate(*arguments)
    assert result.exit_code == 2
    assert result.stderr.strip()
