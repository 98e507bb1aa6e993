"""One connection to the store's server, and the jobs that wait for it.

Only `domicile.stores.postgres` uses it. A task of its own runs the jobs, one after the other; so a
caller that gives up disturbs nothing. A job that takes too long ends with its connection. It is
never cancelled at the server: PostgreSQL counts a write as committed that is cancelled while it
waits for a standby. After a failure the next job opens another connection.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import asyncpg

from domicile.core.state.txn import Unknown
from domicile.errors import DomicileError, StoreError, StoreUnavailable
from domicile.postgres.sessions import FAILURES
from domicile.stores.postgres.schema import Operations

if TYPE_CHECKING:
    from domicile.postgres.sessions import RawConnection

log = logging.getLogger("domicile")

MOST_JOBS = 1_024
"""I6: most jobs that wait for one connection."""

MOST_COMMITS = 32
MOST_BYTES = 1024 * 1024
"""Most commits and bytes that go to the server together: others wait for its lock meanwhile."""

ENDING_S = 1.0
"""Seconds for a statement to end whose connection was taken away."""

_TOO_LATE = (
    "this call did not begin: those before it took all of its time; look at the load of the "
    "store's server, then try again"
)

_UNSURE = ("08", "57")
"""Classes of SQLSTATE after which a statement may have committed: its session was ended."""


@dataclass(slots=True, eq=False)
class LineJob:
    """Something to be done with the connection. Commits that wait side by side go together."""

    run: Callable[[RawConnection, Sequence[LineJob]], Awaitable[Sequence[object]]]
    """Does jobs in order; returns one result for each."""
    deadline: float
    """By `time.monotonic`."""
    generation: int
    part: Operations | None = None
    """The operations of a commit."""
    loud: bool = True
    unknown: Unknown | None = None
    """The result if nobody knows whether it was done; None: then it is `StoreUnavailable`."""
    future: asyncio.Future[Any] = field(
        default_factory=lambda: asyncio.get_running_loop().create_future()
    )

    def joins(self, others: Sequence[LineJob]) -> bool:
        """Whether this commit may go together with those before it."""
        if self.part is None or others[0].part is None or len(others) >= MOST_COMMITS:
            return False
        sizes = [job.part.size_bytes for job in (*others, self) if job.part is not None]
        return self.generation == others[0].generation and sum(sizes) <= MOST_BYTES


class ConnectionLine:
    """The connection and its jobs. `open` makes a connection; `explained` says what errors mean.

    `lost` is called each time a connection that was open is gone.
    """

    def __init__(
        self,
        open: Callable[[float], Awaitable[RawConnection]],
        explained: Callable[[Exception], Exception],
        lost: Callable[[], None],
        name: str,
    ) -> None:
        self._open, self._explained, self._lost = open, explained, lost
        self._name = name
        self._jobs: deque[LineJob] = deque()
        self._wake = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._connection: RawConnection | None = None
        self._closed = False

    @property
    def connected(self) -> bool:
        """Whether there is a connection that works, as far as is known."""
        return self._connection is not None and not self._connection.is_closed()

    async def do(self, job: LineJob) -> Any:
        """Queue a job and await its result."""
        if self._closed:
            raise StoreUnavailable("the store's client is closed; make another one")
        if len(self._jobs) >= MOST_JOBS:
            self._jobs = deque([job for job in self._jobs if not job.future.done()])
        if len(self._jobs) >= MOST_JOBS:
            raise StoreUnavailable(
                f"this call did not begin: {MOST_JOBS} others wait for the store's server already; "
                "look at its load, then try again"
            )
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._work(), name=self._name)
        self._jobs.append(job)
        self._wake.set()
        return await job.future

    async def close(self) -> None:
        """Refuse what waits and close the connection. A job that runs is given up."""
        self._closed = True
        task, self._task = self._task, None
        if task is not None:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        error = StoreUnavailable("the store's client was closed before it came to this")
        _fail(self._jobs, error)
        self._jobs.clear()
        self._drop()

    async def _work(self) -> None:
        while True:
            while not self._jobs:
                self._wake.clear()
                await self._wake.wait()
            jobs = self._take()
            if not jobs:
                continue
            try:
                await self._do(jobs)
            except BaseException:
                # Only a bug, or the end of this task, comes here; nobody may wait for ever.
                _fail(jobs, StoreUnavailable("the store's client was closed during this call"))
                raise

    def _take(self) -> list[LineJob]:
        taken: list[LineJob] = []
        while self._jobs:
            job = self._jobs[0]
            if job.future.done():
                self._jobs.popleft()
            elif job.deadline <= time.monotonic():
                _fail((self._jobs.popleft(),), StoreUnavailable(_TOO_LATE))
            elif not taken or job.joins(taken):
                taken.append(self._jobs.popleft())
            else:
                break
        return taken

    async def _do(self, jobs: Sequence[LineJob]) -> None:
        deadline = max(job.deadline for job in jobs)
        begun = False

        def late(job: LineJob) -> None:
            # The others still have time.
            self._settle((job,), self._explained(TimeoutError()), unsure=begun)

        now, call_later = time.monotonic(), asyncio.get_running_loop().call_later
        timers = [
            call_later(job.deadline - now, late, job) for job in jobs if job.deadline < deadline
        ]
        try:
            connection = await self._connected(deadline)
            begun = True
            results = await self._bounded(jobs[0].run(connection, jobs), connection, deadline)
        except (DomicileError, *FAILURES, OSError, TimeoutError) as error:
            self._failed(jobs, error, begun)
        except Exception as error:
            log.exception("the store met something unexpected")
            self._failed(jobs, error, begun)
        except asyncio.CancelledError:
            closed = StoreUnavailable("the store's client was closed during this call")
            self._settle(jobs, closed, unsure=begun)
            raise
        else:
            for job, result in zip(jobs, results, strict=True):
                if not job.future.done():
                    job.future.set_result(result)
        finally:
            for timer in timers:
                timer.cancel()

    async def _connected(self, deadline: float) -> RawConnection:
        if not self.connected:
            self._drop()
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                raise TimeoutError
            async with asyncio.timeout(left_s):
                self._connection = await self._open(left_s)
        assert self._connection is not None
        return self._connection

    async def _bounded(
        self,
        work: Awaitable[Sequence[object]],
        connection: RawConnection,
        deadline: float,
    ) -> Sequence[object]:
        """Await work, or take its connection away at the deadline."""
        task = asyncio.ensure_future(work)
        try:
            await asyncio.wait({task}, timeout=max(0.0, deadline - time.monotonic()))
            if task.done():
                return task.result()
            connection.terminate()
            await asyncio.wait({task}, timeout=ENDING_S)
            raise TimeoutError
        finally:
            if not task.done():
                connection.terminate()
                task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    def _failed(self, jobs: Sequence[LineJob], error: Exception, begun: bool) -> None:
        refused = isinstance(error, asyncpg.PostgresError) and not _is_unsure(error)
        if not (isinstance(error, DomicileError) or refused):
            self._drop()
        said = error if isinstance(error, StoreError) else self._explained(error)
        unsure = begun and not refused and not isinstance(error, DomicileError)
        self._settle(jobs, said, unsure=unsure)

    def _settle(self, jobs: Sequence[LineJob], said: Exception, *, unsure: bool) -> None:
        """Tell those that still wait what became of their jobs. `unsure`: they may have run."""
        for job in jobs:
            if unsure and job.unknown is not None:
                if not job.future.done():
                    log.warning("whether a commit happened is unknown: %s", said)
                    job.future.set_result(job.unknown)
            else:
                _fail((job,), said)

    def _drop(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.terminate()
            self._lost()


def _is_unsure(error: asyncpg.PostgresError) -> bool:
    state = str(getattr(error, "sqlstate", "") or "")
    return state[:2] in _UNSURE or state == "40003"


def _fail(jobs: Sequence[LineJob] | deque[LineJob], error: Exception) -> None:
    for job in jobs:
        if not job.future.done():
            # A new object each time: raising one twice would chain its tracebacks.
            job.future.set_exception(type(error)(*error.args))
