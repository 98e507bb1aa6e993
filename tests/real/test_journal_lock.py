"""A process that stands still in the middle of a write to the SQLite journal (J3, DX-29)."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from domicile.core.ids import Incarnation
from domicile.journals.sqlite.journal import SqliteJournal
from domicile.ports.journal import Claim, JournalUnknown, Written
from domicile.testing.suites.journal import BOB, ENTITY, OLD, OTHER, B, batch, events_of, write

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="only Linux names the holder")

HELD_UP = """
import asyncio, signal, sys, threading
from pathlib import Path
from domicile.journals.sqlite.journal import SqliteJournal
from domicile.testing.suites.journal import ENTITY, OLD, batch, write

def stand_still() -> None:
    print("stands still", flush=True)
    # To this thread: a signal to the process may be taken by another one, and this one runs on.
    signal.pthread_kill(threading.get_ident(), signal.SIGSTOP)

async def main() -> None:
    journal = SqliteJournal(Path(sys.argv[1]), "c", pause=stand_still)
    await journal.claim([OLD])
    await journal.write(batch(1, OLD, write(ENTITY, 0, b"never")))

asyncio.run(main())
"""


@contextmanager
def a_stopped_writer(path: Path) -> Iterator[subprocess.Popen[str]]:
    """A process that has stopped itself between the checks of a batch and its writes."""
    process = subprocess.Popen(
        [sys.executable, "-c", HELD_UP, str(path)], stdout=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "stands still\n"
        os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WNOWAIT)
        yield process
    finally:
        process.kill()
        process.wait()
        if process.stdout is not None:
            process.stdout.close()


def written_beside(path: Path, gone: bool) -> tuple[list[Incarnation], object]:
    """What another process is asked about records, and what becomes of its own write."""
    asked: list[Incarnation] = []

    async def lives(incarnation: Incarnation) -> bool:
        asked.append(incarnation)
        return not gone

    async def scenario() -> object:
        journal = SqliteJournal(path, "c", wait_s=0.2, lives=lives)
        claim = Claim(OTHER, 0, 1, B)
        try:
            await journal.claim([claim])
            [outcome] = await journal.write(batch(1, claim, write(BOB, 0, b"mine", shard=OTHER)))
            assert await events_of(journal, ENTITY) == ()
            return outcome
        except JournalUnknown as error:
            return error
        finally:
            await journal.close()

    return asked, asyncio.run(scenario())


@pytest.mark.scenario("DX-29", partial=True)
def test_a_stopped_writer_whose_record_is_gone_is_ended_and_others_write_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with a_stopped_writer(tmp_path / "x.journal") as process:
        asked, outcome = written_beside(tmp_path / "x.journal", gone=True)
        assert outcome == Written(1, 1)
        assert asked == [OLD.owner]
        assert process.wait(60) == -signal.SIGKILL
    assert f"process {process.pid} stood still while it wrote" in caplog.text


def test_a_stopped_writer_with_a_record_is_left_alone(tmp_path: Path) -> None:
    with a_stopped_writer(tmp_path / "x.journal") as process:
        asked, outcome = written_beside(tmp_path / "x.journal", gone=False)
        assert isinstance(outcome, JournalUnknown)
        assert "stayed locked" in str(outcome)
        assert asked
        assert process.poll() is None
