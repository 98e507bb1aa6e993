"""The embedded store for the thread renewer: it keeps a lease while the event loop is blocked.

Only `domicile.stores.sqlite.store` makes it. It gives jobs to the store's two threads. It must
never touch the event loop, so that it works while the loop is blocked. It belongs to the history
that was known when it was made: after a rewind every call is refused, even if a blocked loop has
not noticed the rewind yet (S5).
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from concurrent.futures import CancelledError, Future
from functools import partial
from typing import TypeVar

from domicile.core.state.txn import (
    At,
    Committed,
    Conflict,
    Item,
    Outcome,
    Put,
    Unknown,
    check_limits,
)
from domicile.errors import DomicileError, StoreUnavailable
from domicile.ports.store import Kept
from domicile.stores.sqlite.file import CommitUnknown
from domicile.stores.sqlite.jobs import CommitJob, Result, StoreReader, StoreWriter
from domicile.stores.sqlite.schema import packed
from domicile.stores.sqlite.threads import JobThread

log = logging.getLogger("domicile")

T = TypeVar("T")
R = TypeVar("R")


class SqliteThreadedStore:
    """Implements `domicile.ports.store.ThreadedStore`."""

    def __init__(
        self,
        desks: tuple[JobThread, JobThread],
        writer: StoreWriter,
        reader: StoreReader,
        prefix: bytes,
        generation: int,
        op_timeout_s: float,
    ) -> None:
        self._writing, self._reading = desks
        self._writer, self._reader = writer, reader
        self._prefix = prefix
        self._generation = generation
        self._op_timeout_s = op_timeout_s

    def keep(self, lease: str, key: bytes) -> Future[Kept]:
        """As `ThreadedStore.keep`. The renewal ends expired leases (S3), so the read sees that."""
        deadline = time.monotonic() + self._op_timeout_s
        kept: Future[Kept] = Future()

        def renewed(result: Result) -> None:
            if result.ttl_s is None:
                kept.set_result(Kept(None, None))
                return
            read = partial(self._reader.get, self._prefix + key, self._generation, deadline)
            self._do(self._reading, read, kept, partial(found, result.ttl_s))

        def found(ttl_s: float, read: tuple[bool, Item | None]) -> None:
            _, item = read
            if item is not None:
                item = Item(key, item.value, item.created, item.revision)
            kept.set_result(Kept(ttl_s, item))

        self._do(self._writing, self._write("renew", deadline, lease=lease), kept, renewed)
        return kept

    def rewrite(self, key: bytes, revision: int, value: bytes, lease: str) -> Future[Outcome]:
        """As `ThreadedStore.rewrite`."""
        deadline = time.monotonic() + self._op_timeout_s
        conditions = [At(self._prefix + key, revision)] if revision else []
        writes = [Put(self._prefix + key, value, lease)]
        check_limits(conditions, writes)
        commit = CommitJob(*packed(conditions, writes), self._generation, deadline)
        outcome: Future[Outcome] = Future()

        def written(result: Result) -> None:
            conflict = result.conflict is not None
            outcome.set_result(Conflict(key) if conflict else Committed(result.revision))
            self._reading.nudge()

        def failed(error: BaseException) -> None:
            if isinstance(error, DomicileError):
                outcome.set_exception(error)
                return
            if not isinstance(error, CommitUnknown):
                log.error("a write of the thread that renews failed unexpectedly", exc_info=error)
            outcome.set_result(Unknown())

        def job() -> Result:
            return self._writer.commit([commit])[0]

        self._do(self._writing, job, outcome, written, failed)
        return outcome

    def _write(self, name: str, deadline: float, **fields: object) -> Callable[[], Result]:
        return partial(self._writer.run, name, fields, self._generation, deadline)

    def _do(
        self,
        desk: JobThread,
        job: Callable[[], T],
        result: Future[R],
        then: Callable[[T], None],
        failed: Callable[[BaseException], None] | None = None,
    ) -> None:
        """Give a job to a thread; call `then` in that thread, or fail `result`."""
        fail = failed or partial(_fail, result)

        def done(future: Future[T]) -> None:
            try:
                value = future.result()
            except (Exception, CancelledError) as error:
                fail(error)
            else:
                then(value)

        try:
            future = desk.submit(job)
        except StoreUnavailable as error:
            fail(error)
        else:
            future.add_done_callback(done)


def _fail(result: Future[R], error: BaseException) -> None:
    known = isinstance(error, DomicileError)
    result.set_exception(error if known else StoreUnavailable(str(error)))
