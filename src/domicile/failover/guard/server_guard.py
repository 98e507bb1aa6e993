"""The guard of one server: it holds the deadline, opens and closes (F2), and keeps the server up.

It must never need the store, and never take a decision about the group. It runs in the main thread
of its own process, because the server is that thread's child.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Awaitable, Callable
from contextlib import suppress
from functools import partial
from math import inf
from pathlib import Path

import msgspec

from domicile.concurrency.task_set import TaskSet
from domicile.failover.driver import ServerGate, ServerProcess
from domicile.failover.guard.kernel_timer import DeadlineTimer
from domicile.failover.guard.messages import (
    MOST_BYTES,
    ExtendDeadline,
    GuardAnswer,
    GuardOrder,
    OpenServer,
    ShutServer,
    decode_order,
    encode_line,
)
from domicile.ports.clock import Clock

log = logging.getLogger("domicile")

GUARD_S = 0.05
"""After the machine or this process wakes, the deadline is compared within this time."""

LOCK_S = 1.0
"""A server that an agent wants closed, and that does not answer within this time, is killed."""

RETRY_S = 0.05

LOOK_S = 0.1
"""How often it is looked whether the server's process lives."""

LONGEST_PAUSE_S = 5.0
"""The longest pause between two tries to start a server that fails at once."""

SAY_AGAIN_S = 60.0
"""How often it is said that a server fails to start in the same way."""


class ServerGuard:
    """One server's guard. `run` it until it is cancelled; then the server is closed and stopped."""

    def __init__(
        self,
        gate: ServerGate,
        process: ServerProcess | None,
        *,
        socket: Path,
        clock: Clock,
        stop_budget_s: float,
        timer: DeadlineTimer,
    ) -> None:
        self._gate, self._process = gate, process
        self._socket, self._clock, self._timer = socket, clock, timer
        self._stop_budget_s = stop_budget_s
        self._until = 0.0
        self._force_at = inf
        """When a server that is open yet must be killed: before the timer kills this process."""
        self._closed = False
        """Whether the server is known to refuse writes."""
        self._said_open = 0
        """The epoch of which the log says that the server accepts writes."""
        self._changed = asyncio.Event()
        self._turn = asyncio.Lock()
        self._work: asyncio.Task[str] | None = None
        self._orders: TaskSet[str] | None = None
        self._agent: asyncio.StreamWriter | None = None

    async def run(self) -> None:
        """Guard until cancelled."""
        self._socket.unlink(missing_ok=True)
        mask = os.umask(0o177)
        try:
            server = await asyncio.start_unix_server(self._attend, self._socket, limit=MOST_BYTES)
        finally:
            os.umask(mask)
        try:
            async with asyncio.TaskGroup() as group:
                self._orders = TaskSet("order", group)
                # F3: whatever the server was before, and whoever started it.
                self._begin(partial(self._close, LOCK_S))
                group.create_task(self._keep_the_deadline(), name="deadline")
                if self._process is not None:
                    group.create_task(self._keep_running(self._process), name="server")
                try:
                    await asyncio.get_running_loop().create_future()
                finally:
                    self._orders = None
        finally:
            server.close()
            if self._agent is not None:
                self._agent.close()
            self._socket.unlink(missing_ok=True)
            await self._end()

    async def _end(self) -> None:
        await self._close(LOCK_S)
        if self._process is not None:
            await self._process.stop(immediate=False)

    # the agent

    async def _attend(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One agent, until its connection ends; a newer one takes its place."""
        if self._agent is not None:
            log.warning("another agent came; the one before it is dropped")
            self._agent.close()
        self._agent = writer
        self._until = 0.0
        self._begin(partial(self._close, LOCK_S))
        try:
            while line := await reader.readline():
                if self._agent is not writer:
                    return
                self._take(decode_order(line), writer)
        except (OSError, ValueError, msgspec.MsgspecError) as error:
            log.warning("the agent's connection is closed: %s", error)
        finally:
            if self._agent is writer:
                self._agent = None
                log.warning("the agent is gone: the server is closed")
                self._until = 0.0
                self._begin(partial(self._close, LOCK_S))
            writer.close()

    def _take(self, order: GuardOrder, writer: asyncio.StreamWriter) -> None:
        match order:
            case ExtendDeadline(until):
                if self._clock.now() < self._until < until:
                    self._until = until
                    self._arm()
            case OpenServer():
                self._until = max(self._until, order.until)
                self._begin(partial(self._open, order), partial(_answer, writer, order.number))
            case ShutServer(number):
                self._until = 0.0
                self._begin(partial(self._close, LOCK_S), partial(_answer, writer, number))

    # one piece of work at a time

    def _begin(
        self, work: Callable[[], Awaitable[None]], answer: Callable[[str], None] | None = None
    ) -> None:
        """Do this next; what is under way is given up."""
        if self._orders is None:
            return
        if self._work is not None:
            self._work.cancel()
        self._work = self._orders.spawn(self._do(work))
        if answer is not None:
            self._work.add_done_callback(partial(_tell, answer))

    async def _do(self, work: Callable[[], Awaitable[None]]) -> str:
        """What went wrong; empty if nothing did."""
        async with self._turn:
            try:
                await work()
            except (OSError, TimeoutError) as error:
                what = str(error) or type(error).__name__
                log.warning("an order was not carried out: %s", what)
                return what
        return ""

    async def _open(self, order: OpenServer) -> None:
        if self._process is not None:
            why = self._process.outlives(await self._gate.process_id(order.run))
            if why:
                raise ConnectionError(f"the server is not opened: {why}")
        if self._clock.now() >= self._until:
            raise ConnectionError("the deadline has passed")
        self._closed = False
        # Armed before it is opened: what stops this process from here on must not leave it open.
        self._arm()
        await self._gate.unlock(order.epoch, order.run, order.quorum)
        if self._said_open != order.epoch:
            log.info("the server accepts writes in epoch %d", order.epoch)
        elif order.quorum is not None:
            log.info("commits wait for %s", order.quorum)
        self._said_open = order.epoch

    async def _close(self, patience_s: float) -> None:
        """Close the server, by force if need be. Returns when it is closed, never before."""
        begun = self._clock.now()
        while True:
            until = min(begun + patience_s, self._force_at)
            try:
                # At least a moment each time: a server that was killed must be seen to be gone.
                async with asyncio.timeout(max(until - self._clock.now(), RETRY_S)):
                    await self._gate.lock()
                break
            except (OSError, TimeoutError) as error:
                what = str(error) or "it does not answer"
            forced = self._clock.now() >= until
            if forced and self._process is not None:
                running = await self._process.running()
                if running:
                    log.error("the server does not close and is killed: %s", what)
                self._process.kill()
                # Its processes may be late to go, on a busy machine: this one need not die of it.
                self._disarm()
                if running:
                    await self._process.stop(immediate=True)
                    continue
            if forced:
                log.error("the server does not close, which is tried again: %s", what)
            await asyncio.sleep(RETRY_S)
        if not self._closed:
            log.info("the server refuses writes")
        self._closed, self._said_open = True, 0
        self._disarm()

    # the deadline

    def _arm(self) -> None:
        if not self._closed:
            self._timer.arm(self._until + self._stop_budget_s)
            self._force_at = self._until + self._stop_budget_s / 2
        self._changed.set()

    def _disarm(self) -> None:
        self._timer.disarm()
        self._force_at = inf

    async def _keep_the_deadline(self) -> None:
        while True:
            left_s = self._until - self._clock.now()
            if self._until and left_s <= 0:
                self._until = 0.0
                log.error("the agent's lease ended: the server is closed")
                self._begin(partial(self._close, self._stop_budget_s / 2))
            self._changed.clear()
            with suppress(TimeoutError):
                # Not one long sleep: the loop's clock stops while the machine is suspended.
                async with asyncio.timeout(min(left_s, GUARD_S) if self._until else None):
                    await self._changed.wait()

    # the server's process

    async def _keep_running(self, process: ServerProcess) -> None:
        pause_s, said, said_at = LOOK_S, "", 0.0
        while True:
            try:
                if not await process.running():
                    # Does nothing while the server must stay down, as during a repair.
                    await process.start()
                    if await process.running():
                        log.info("the server is started")
                pause_s, said = LOOK_S, ""
            except (OSError, TimeoutError) as error:
                # In its first line the same failure is the same; what follows is of its own log.
                what, now = str(error).partition("\n")[0], self._clock.now()
                if what != said or now >= said_at + SAY_AGAIN_S:
                    log.error("the server does not start, which is tried again: %s", error)
                    said, said_at = what, now
                pause_s = min(2 * pause_s, LONGEST_PAUSE_S)
            await asyncio.sleep(pause_s)


def _tell(answer: Callable[[str], None], done: asyncio.Task[str]) -> None:
    if done.cancelled():
        answer("a newer order came")
    elif done.exception() is None:
        answer(done.result())


def _answer(writer: asyncio.StreamWriter, number: int, error: str) -> None:
    if not writer.is_closing():
        writer.write(encode_line(GuardAnswer(number, error)))
