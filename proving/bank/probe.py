"""What a process does at its journal, as another process sees it: batches on their way, refusals.

A node opens its journal by a URL with `probed-` in front. The journal behind it is the real one;
its calls are counted in a small mapped file, one per process, which stays when the process is
killed. The files lie beside the cluster's store. Nodes count, and the harness only reads.
"""

from __future__ import annotations

import asyncio
import mmap
import os
import struct
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, Protocol, cast

from domicile.backends import Backend, OpenOptions, register
from domicile.backends.registry import journal_backend, store_backend
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

FIGURES = (
    "in flight", "batches", "writes", "fenced writes", "fenced claims", "unknown", "settled",
)  # fmt: skip
"""What a file holds, in this order; all but the first are counts since the process began."""

_ONE = struct.Struct("=q")
_BYTES = _ONE.size * len(FIGURES)
PREFIX = "probed-"
GIVEN_UP = 4
"""One in so many batches is given up with its caller."""


class Figures:
    """The mapped file of one process."""

    def __init__(self, path: Path) -> None:
        file = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            if os.fstat(file).st_size < _BYTES:
                os.ftruncate(file, _BYTES)
            self._map = mmap.mmap(file, _BYTES)
        finally:
            os.close(file)

    def begin(self) -> None:
        """Nothing is on its way yet, whatever an earlier process with this id has left."""
        _ONE.pack_into(self._map, 0, 0)

    def add(self, name: str, by: int = 1) -> None:
        """Count."""
        at = _ONE.size * FIGURES.index(name)
        _ONE.pack_into(self._map, at, _ONE.unpack_from(self._map, at)[0] + by)

    def all(self) -> Counter[str]:
        """All figures."""
        values = (one for (one,) in _ONE.iter_unpack(self._map[:]))
        return Counter(dict(zip(FIGURES, values, strict=True)))


class _RealJournal(ComparableJournal, TellsOffsets, Protocol):
    """What nodes ask of the journals that are probed."""


class ProbedJournal:
    """A journal whose calls are counted. What it does not know, it leaves to the real one."""

    def __init__(self, journal: _RealJournal, figures: Figures) -> None:
        self._journal, self._figures = journal, figures

    def __getattr__(self, name: str) -> Any:
        return getattr(self._journal, name)

    async def claim(self, claims: Sequence[Claim], *, wait: bool = True) -> Sequence[ClaimAnswer]:
        """As `Journal.claim`."""
        answers = await self._journal.claim(claims, wait=wait)
        self._figures.add("fenced claims", sum(isinstance(one, int) for one in answers))
        return answers

    async def write(self, batch: Batch) -> Sequence[Written | WriteRefused]:
        """As `Journal.write`."""
        self._figures.add("batches")
        self._figures.add("in flight")
        call = asyncio.ensure_future(self._journal.write(batch))
        call.add_done_callback(self._over)
        try:
            return await asyncio.shield(call)
        except asyncio.CancelledError:
            # An owner that finds its lease over asks no more. Most of its last batches go on, so
            # that it is seen what becomes of them; the others are given up, as they would be.
            if batch.number % GIVEN_UP == 0:
                call.cancel()
            raise

    def _over(self, call: asyncio.Future[Sequence[Written | WriteRefused]]) -> None:
        figures = self._figures
        figures.add("in flight", -1)
        if call.cancelled():
            return
        error = call.exception()
        if error is not None:
            figures.add("unknown", isinstance(error, JournalUnknown))
            return
        answers = call.result()
        figures.add("writes", sum(isinstance(one, Written) for one in answers))
        figures.add("fenced writes", sum(_is_fenced(one) for one in answers))

    async def settle(self, batch: Batch) -> Sequence[Written | WriteRefused | None]:
        """As `Journal.settle`."""
        figures = self._figures
        figures.add("in flight")
        try:
            answers = await self._journal.settle(batch)
        finally:
            figures.add("in flight", -1)
        figures.add("settled", len(answers))
        figures.add("fenced writes", sum(_is_fenced(one) for one in answers))
        return answers

    # Said by name: from Python 3.12 on, isinstance() with a protocol asks no __getattr__;
    # a node would compare nothing (J11).

    async def scan(
        self, shard: ShardKey, after: int, limit: int, max_bytes: int = SCAN_BYTES
    ) -> EventPage:
        """As `Journal.scan`."""
        return await self._journal.scan(shard, after, limit, max_bytes)

    async def recover(self, wanted: Sequence[Wanted], max_bytes: int) -> Sequence[Recovered]:
        """As `Journal.recover`."""
        return await self._journal.recover(wanted, max_bytes)

    async def inbox(self, asked: Sequence[tuple[EntityKey, str]]) -> Sequence[StoredReply | None]:
        """As `Journal.inbox`."""
        return await self._journal.inbox(asked)

    async def remembered(
        self, shard: ShardKey, after: Remembered | None, limit: int
    ) -> Sequence[Remembered]:
        """As `Journal.remembered`."""
        return await self._journal.remembered(shard, after, limit)

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


class _Probed(Backend):
    """The journals of a backend, probed."""

    def open_journal(self, url: str, options: OpenOptions) -> Journal:
        inner = url.removeprefix(PREFIX)
        store = store_backend(options.store).sqlite_file(options.store)
        assert store is not None, "the figures lie beside a store that is a file"
        opened = journal_backend(inner).open_journal(inner, options)
        return ProbedJournal(cast(_RealJournal, opened), _mine(store.parent))


class _ProbedSqlite(_Probed):
    scheme = f"{PREFIX}sqlite"
    journals = f"{PREFIX}sqlite:///path/to/file (for the bank)"


class _ProbedPostgres(_Probed):
    scheme = f"{PREFIX}postgresql"
    journals = f"{PREFIX}postgresql://user@host/database (for the bank)"


_BACKENDS = (_ProbedSqlite(), _ProbedPostgres())


@cache
def _mine(directory: Path) -> Figures:
    """The figures of this process; its incarnations share them."""
    figures = Figures(figures_file(directory, os.getpid()))
    figures.begin()
    return figures


def install() -> None:
    """Make the probed journals known in this process."""
    for backend in _BACKENDS:
        register(backend)


def figures_file(directory: Path, pid: int) -> Path:
    """Where the figures of a process lie."""
    return directory / f"{pid}.figures"


def figures_of(directory: Path, pid: int) -> Counter[str]:
    """The figures of a process; none if it has not opened its journal."""
    path = figures_file(directory, pid)
    return Figures(path).all() if path.exists() else Counter()


def figures_of_all(directory: Path) -> Counter[str]:
    """The sum over all processes that there were."""
    found: Counter[str] = Counter()
    for path in directory.glob("*.figures"):
        found.update(Figures(path).all())
    return found


def _is_fenced(answer: object) -> bool:
    return isinstance(answer, WriteRefused) and answer.why == "fenced"
