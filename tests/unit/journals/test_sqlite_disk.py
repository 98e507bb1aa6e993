"""The SQLite journal on a disk that loses power, is full or read-only: nothing is lost."""

from __future__ import annotations

import asyncio
from pathlib import Path
from random import Random
from typing import NamedTuple

import pytest
from forgetful_disk import ForgetfulDisk, forgetful_disk

from domicile.journals.sqlite import file
from domicile.journals.sqlite.journal import SqliteJournal
from domicile.ports.journal import (
    Batch,
    JournalUnknown,
    JournalWrite,
    Recovered,
    StoredReply,
    Written,
)
from domicile.testing.suites.journal import (
    BESIDE,
    BOB,
    CAROL,
    ENTITY,
    OLD,
    OTHER,
    SHARD,
    batch,
    events_of,
    recovered,
    remembered_ids,
    scanned,
    write,
)

BATCHES = 9


def nth(number: int) -> Batch:
    """Batch by batch: events of two shards with a key, a state, and in the middle a deletion."""
    alice = JournalWrite(
        SHARD, ENTITY, number - 1, (b"%d" % number,), ((f"k{number}", b"r"),), remember=True
    )
    bob = JournalWrite(SHARD, BOB, number - 1, state=b"%d" % number, delete=number == 4)
    if number > 4:
        bob = JournalWrite(SHARD, BOB, number, state=b"%d" % number)
    carol = write(CAROL, number - 1, b"c%d" % number, shard=OTHER)
    return batch(number, (OLD, BESIDE), alice, bob, carol)


class Cut(NamedTuple):
    """A moment without power: what the disk held, how much was acknowledged, what was asked."""

    files: dict[str, bytes]
    acknowledged: int
    asked: int
    claimed: bool


class Run:
    """A run of batches, with a cut at every sync and after every answer."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.cuts: list[Cut] = []
        self._acknowledged = self._asked = 0
        self._claimed = False

    async def go(self, disk: ForgetfulDisk) -> None:
        disk.cut = lambda: self._cut(disk)
        journal = SqliteJournal(self._path / "x.journal", "c")
        assert await journal.claim([OLD, BESIDE]) == [None, None]
        self._claimed = True
        for number in range(1, BATCHES + 1):
            self._asked = number
            done = await journal.write(nth(number))
            assert all(isinstance(one, Written) for one in done)
            self._acknowledged = number
            self._cut(disk)
            if number == 6:
                await journal.close()
                journal = SqliteJournal(self._path / "x.journal", "c")
        await journal.close()
        disk.cut = lambda: None

    def _cut(self, disk: ForgetfulDisk) -> None:
        whole = (self._acknowledged, self._asked, self._claimed)
        self.cuts.append(Cut(disk.left(), *whole))
        self.cuts.append(Cut(disk.left(Random(len(self.cuts))), *whole))


async def go_on(path: Path, cut: Cut) -> None:
    """After the power is back: what was acknowledged is there, the rest is settled and sent."""
    for name, content in cut.files.items():
        (path / name).write_bytes(content)
    journal = SqliteJournal(path / "x.journal", "c")
    try:
        if not cut.claimed:
            await journal.claim([OLD, BESIDE])
        number, sent = BATCHES, cut.acknowledged + 1
        if cut.asked > cut.acknowledged:
            # The numbers stand for what was written: the batch is whole, or it never was.
            first = list(await journal.settle(nth(cut.asked)))
            assert list(await journal.settle(nth(cut.asked))) == first
            if first != [None] * 3:
                assert all(isinstance(one, Written) for one in first)
                sent = cut.asked + 1
        stored = sent - 1
        assert await events_of(journal) == tuple(b"%d" % n for n in range(1, stored + 1))
        for n in range(sent, BATCHES + 1):
            number += 1
            again = Batch(number, (OLD, BESIDE), nth(n).writes)
            assert all(isinstance(one, Written) for one in await journal.write(again))
        await check_whole(journal)
    finally:
        await journal.close()


async def check_whole(journal: SqliteJournal) -> None:
    """Everything once, in order."""
    numbers = range(1, BATCHES + 1)
    assert await events_of(journal) == tuple(b"%d" % n for n in numbers)
    assert await events_of(journal, CAROL) == tuple(b"c%d" % n for n in numbers)
    state = await recovered(journal, BOB)
    assert state == Recovered((), BATCHES + 1, False, state=b"%d" % BATCHES, keys=())
    found = [one.offset for one in await scanned(journal)]
    assert found == list(range(1, BATCHES + 2))
    assert [one.offset for one in await scanned(journal, OTHER)] == list(numbers)
    stored = await journal.inbox([(ENTITY, f"k{n}") for n in numbers])
    assert list(stored) == [StoredReply(b"r")] * BATCHES
    assert await remembered_ids(journal) == ["alice"]


@pytest.fixture(autouse=True)
def _checkpoints(monkeypatch: pytest.MonkeyPatch) -> None:
    # Often, so that a run of a few batches has some.
    monkeypatch.setattr(file, "WAL_PAGES", 40)


def test_a_power_cut_at_any_sync_loses_nothing_acknowledged_and_doubles_nothing(
    tmp_path: Path,
) -> None:
    run = Run(tmp_path)
    with forgetful_disk() as disk:
        asyncio.run(run.go(disk))
    assert {cut.acknowledged for cut in run.cuts} == set(range(BATCHES + 1))
    for number, cut in enumerate(run.cuts):
        place = tmp_path / f"{number}"
        place.mkdir()
        asyncio.run(go_on(place, cut))


def test_a_full_disk_takes_nothing_and_goes_on_when_there_is_room(tmp_path: Path) -> None:
    async def scenario(disk: ForgetfulDisk) -> None:
        journal = SqliteJournal(tmp_path / "x.journal", "c")
        await journal.claim([OLD, BESIDE])
        await journal.write(nth(1))
        disk.room_bytes = 0
        for _ in range(2):
            with pytest.raises(JournalUnknown, match="is full; make room"):
                await journal.write(nth(2))
            with pytest.raises(JournalUnknown, match="is full; make room"):
                await journal.settle(nth(2))
        assert await events_of(journal) == (b"1",), "what is there can be read"
        disk.room_bytes = None
        assert list(await journal.settle(nth(2))) == [None] * 3
        for number in range(2, BATCHES + 1):
            done = await journal.write(Batch(number + 1, (OLD, BESIDE), nth(number).writes))
            assert all(isinstance(one, Written) for one in done)
        await check_whole(journal)
        await journal.close()

    with forgetful_disk() as disk:
        asyncio.run(scenario(disk))


def test_a_file_that_may_grow_no_further_takes_nothing_more(tmp_path: Path) -> None:
    """A quota of pages is reached in the middle of a statement, not at its commit."""

    async def scenario() -> None:
        journal = SqliteJournal(tmp_path / "x.journal", "c")
        await journal.claim([OLD])
        await journal.write(batch(1, OLD, write(ENTITY, 0, b"1")))
        connection = journal._writing._use()
        connection.pragma("max_page_count", connection.pragma("page_count"))
        large = batch(2, OLD, write(ENTITY, 1, bytes(100_000)))
        with pytest.raises(JournalUnknown, match="is full; make room"):
            await journal.write(large)
        # The next use opens the file anew, without the quota.
        assert await journal.settle(large) == [None]
        assert await events_of(journal) == (b"1",)
        assert await journal.write(batch(3, OLD, write(ENTITY, 1, b"2"))) == [Written(2, 2)]
        await journal.close()

    asyncio.run(scenario())


def test_a_file_that_may_only_be_read_says_so(tmp_path: Path) -> None:
    async def scenario(disk: ForgetfulDisk) -> None:
        journal = SqliteJournal(tmp_path / "x.journal", "c")
        await journal.claim([OLD, BESIDE])
        await journal.write(nth(1))
        await journal.close()
        disk.is_read_only = True
        journal = SqliteJournal(tmp_path / "x.journal", "c")
        with pytest.raises(JournalUnknown, match="read-only; make them writable"):
            await journal.write(nth(2))
        disk.is_read_only = False
        assert list(await journal.settle(nth(2))) == [None] * 3
        assert await events_of(journal) == (b"1",)
        await journal.close()

    with forgetful_disk() as disk:
        asyncio.run(scenario(disk))
