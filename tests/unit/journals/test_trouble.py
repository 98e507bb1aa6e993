"""What the log of a node says while its journal does not answer."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass
from pathlib import Path

import pytest
from forgetful_disk import ForgetfulDisk, forgetful_disk

from domicile import EventSourced, MaybeExecuted, Node, Settings, handler
from domicile.journals import trouble
from domicile.journals.sqlite.journal import SqliteJournal
from domicile.journals.trouble import JournalTrouble
from domicile.ports.journal import JournalUnknown
from domicile.testing.suites.journal import ENTITY, OLD, batch, write


@dataclass(frozen=True)
class Noted:
    text: str


class Notebook(EventSourced[tuple[str, ...], Noted], name="trouble.notebook"):
    @staticmethod
    def initial(id: str, /) -> tuple[str, ...]:
        return ()

    @staticmethod
    def apply(state: tuple[str, ...], event: Noted, /) -> tuple[str, ...]:
        return (*state, event.text)

    @handler
    async def note(self, text: str) -> int:
        return len(await self.persist(Noted(text)))


def told(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


def test_a_line_says_why_and_one_that_it_is_over(caplog: pytest.LogCaptureFixture) -> None:
    now = 100.0
    one = JournalTrouble("here", is_told=True, now=lambda: now)
    one.came(JournalUnknown("the disk is full"))
    now += trouble.PAUSE_S / 2
    one.came(JournalUnknown("the disk is full"))
    now += trouble.PAUSE_S / 2
    one.came(JournalUnknown("the disk is gone"))
    assert one.is_open
    one.went()
    assert not one.is_open
    one.came(JournalUnknown("so soon"))
    assert told(caplog) == [
        "durable entities wait until their journal answers: the disk is full",
        "durable entities wait until their journal answers: the disk is gone",
        "the journal here answers again, after 10.0 s",
    ]


def test_a_tool_tells_its_user_itself(caplog: pytest.LogCaptureFixture) -> None:
    one = JournalTrouble("here", is_told=False)
    one.came(JournalUnknown("the disk is full"))
    assert not one.is_open
    assert told(caplog) == []


def test_a_full_disk_is_told_in_the_log_of_the_node(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def scenario(disk: ForgetfulDisk) -> None:
        journal = SqliteJournal(tmp_path / "x.journal", "c", serves=True)
        await journal.claim([OLD])
        disk.room_bytes = 0
        one = batch(1, OLD, write(ENTITY, 0, b"1"))
        for _ in range(3):
            with pytest.raises(JournalUnknown):
                await journal.write(one)
        assert len(await journal.inbox([(ENTITY, "k")])) == 1, "what is there can be read"
        disk.room_bytes = None
        assert await journal.settle(one) == [None]
        await journal.close()

    with forgetful_disk() as disk:
        asyncio.run(scenario(disk))
    first, last = told(caplog)
    assert first.endswith("x.journal is full; make room on it")
    assert "answers again" in last


def test_callers_are_sent_to_the_log_and_the_log_says_why(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "x.journal"

    async def scenario() -> None:
        node = Node(
            "memory://trouble", entities=[Notebook], journal=f"sqlite:///{file}",
            settings=Settings(shards=4),
        )  # fmt: skip
        async with node:
            notebook = node.ref(Notebook, "n")
            assert await notebook.ask(Notebook.note, "a") == 1
            file.rename(tmp_path / "y.journal")
            with pytest.raises(MaybeExecuted, match="the log of its node says why"):
                await notebook.ask(Notebook.note, "b")
            assert [text for text in told(caplog) if "deleted or replaced" in text]

    asyncio.run(scenario())
