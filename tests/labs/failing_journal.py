"""A real journal whose calls get no answer when a test wants it, in the processes of its nodes.

A node opens it by a URL with `failing-` in front. What shall fail stands in a file, whose name
travels in the environment; so does what has failed. Nodes read, and only the test changes the wish.
"""

from __future__ import annotations

import os
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, TypeVar, cast

import msgspec
import pytest
from lines_lab import whole_lines

from domicile.backends import Backend, OpenOptions, register
from domicile.backends.registry import journal_backend
from domicile.core.ids import EntityKey, ShardKey
from domicile.ports.journal import (
    SCAN_BYTES,
    Batch,
    Claim,
    ClaimAnswer,
    ComparableJournal,
    EventPage,
    Journal,
    JournalMarks,
    JournalUnknown,
    Recovered,
    Remembered,
    StoredReply,
    TellsOffsets,
    Wanted,
    WriteRefused,
    Written,
)

PREFIX = "failing-"
FAULTS = "DOMICILE_TEST_JOURNAL_FAULTS"
CALLS = ("claim", "write", "settle", "recover", "inbox", "remembered")

T = TypeVar("T")


class Wish(msgspec.Struct, frozen=True):
    """Which calls fail, how often in each process, and whether the journal does them anyway."""

    number: int = 0
    times: Mapping[str, int] = {}
    is_done: bool = False


class Faults:
    """The two files, as the test sees them."""

    def __init__(self, directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self._wish = directory / "wish"
        self._felt = _felt(self._wish)
        self._number = 0
        self._felt.touch()
        self.want({})
        monkeypatch.setenv(FAULTS, str(self._wish))

    def want(self, times: Mapping[str, int], *, is_done: bool = False) -> None:
        """From now on these calls fail, so often in each process."""
        self._number += 1
        new = self._wish.with_suffix(".new")
        new.write_bytes(msgspec.json.encode(Wish(self._number, times, is_done)))
        new.replace(self._wish)

    def felt(self) -> set[str]:
        """Calls that failed since the last `want`."""
        lines = [line.split() for line in whole_lines(self._felt)]
        return {call for number, call in lines if int(number) == self._number}


class _RealJournal(ComparableJournal, TellsOffsets, Protocol):
    """What nodes ask of the journals that fail here."""


class FailingJournal:
    """What it does not know, it leaves to the real journal."""

    def __init__(self, journal: _RealJournal, wish: Path) -> None:
        self._journal, self._path = journal, wish
        self._wish = Wish()
        self._left: dict[str, int] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._journal, name)

    async def claim(self, claims: Sequence[Claim], *, wait: bool = True) -> Sequence[ClaimAnswer]:
        """As `Journal.claim`."""
        return await self._done("claim", lambda: self._journal.claim(claims, wait=wait))

    async def write(self, batch: Batch) -> Sequence[Written | WriteRefused]:
        """As `Journal.write`."""
        return await self._done("write", lambda: self._journal.write(batch))

    async def settle(self, batch: Batch) -> Sequence[Written | WriteRefused | None]:
        """As `Journal.settle`."""
        return await self._done("settle", lambda: self._journal.settle(batch))

    async def recover(self, wanted: Sequence[Wanted], max_bytes: int) -> Sequence[Recovered]:
        """As `Journal.recover`."""
        return await self._done("recover", lambda: self._journal.recover(wanted, max_bytes))

    async def inbox(self, asked: Sequence[tuple[EntityKey, str]]) -> Sequence[StoredReply | None]:
        """As `Journal.inbox`."""
        return await self._done("inbox", lambda: self._journal.inbox(asked))

    async def remembered(
        self, shard: ShardKey, after: Remembered | None, limit: int
    ) -> Sequence[Remembered]:
        """As `Journal.remembered`."""
        return await self._done("remembered", lambda: self._journal.remembered(shard, after, limit))

    # Said by name: from Python 3.12 on, isinstance() with a protocol asks no __getattr__;
    # a node would compare nothing (J11).

    async def scan(
        self, shard: ShardKey, after: int, limit: int, max_bytes: int = SCAN_BYTES
    ) -> EventPage:
        """As `Journal.scan`."""
        return await self._journal.scan(shard, after, limit, max_bytes)

    async def history(self) -> str:
        """As `Journal.history`."""
        return await self._journal.history()

    async def close(self) -> None:
        """As `Journal.close`."""
        await self._journal.close()

    async def marks(self, shards: Sequence[ShardKey]) -> JournalMarks:
        """As `ComparableJournal.marks`."""
        return await self._journal.marks(shards)

    async def renew(self, history: str) -> None:
        """As `ComparableJournal.renew`."""
        await self._journal.renew(history)

    async def offsets(self, role: str) -> Mapping[int, int]:
        """As `TellsOffsets.offsets`."""
        return await self._journal.offsets(role)

    async def _done(self, name: str, call: Callable[[], Awaitable[T]]) -> T:
        if not self._fails(name):
            return await call()
        if self._wish.is_done:
            await call()
        raise JournalUnknown(f"{name} got no answer: a test wants it so")

    def _fails(self, call: str) -> bool:
        wish = msgspec.json.decode(self._path.read_bytes(), type=Wish)
        if wish.number != self._wish.number:
            self._wish, self._left = wish, dict(wish.times)
        if not self._left.get(call):
            return False
        self._left[call] -= 1
        file = os.open(_felt(self._path), os.O_WRONLY | os.O_APPEND)
        try:
            os.write(file, f"{wish.number} {call}\n".encode())
        finally:
            os.close(file)
        return True


class _Failing(Backend):
    def open_journal(self, url: str, options: OpenOptions) -> Journal:
        inner = url.removeprefix(PREFIX)
        opened = journal_backend(inner).open_journal(inner, options)
        return FailingJournal(cast(_RealJournal, opened), Path(os.environ[FAULTS]))


class _FailingSqlite(_Failing):
    scheme = f"{PREFIX}sqlite"
    journals = f"{PREFIX}sqlite:///path/to/file (for tests)"


class _FailingPostgres(_Failing):
    scheme = f"{PREFIX}postgresql"
    journals = f"{PREFIX}postgresql://user@host/database (for tests)"


def install() -> None:
    """Make these journals known in this process."""
    for backend in (_FailingSqlite(), _FailingPostgres()):
        register(backend)


def _felt(wish: Path) -> Path:
    return wish.with_suffix(".felt")
