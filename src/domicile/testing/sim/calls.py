"""The way from a simulated process to a server and back, and what can go wrong on it.

Built by the simulator's servers. A call travels to the server, runs there as a task of the
server's process, and its answer travels back: a caller that crashes, freezes or gives up does not
stop what it asked for.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from functools import partial
from random import Random
from typing import Any, Protocol, TypeVar

from domicile.testing.sim.loop import SimLoop, World
from domicile.testing.sim.sandbox import SimulationError

T = TypeVar("T")

OP_TIMEOUT_S = 1.5


class Silenced(Protocol):
    """A watch, as the network sees it."""

    def silence(self) -> None:
        """Nothing arrives any more; the caller notices after a while."""
        ...

    def break_off(self, why: str) -> None:
        """Nothing arrives any more, and the caller learns it now."""
        ...


class Faults:
    """What the network between one process and one server does now. Change it at any time.

    `delay_s` is the range of each way's delay, `slow` multiplies it, `watch_delay_s` is a range
    added for watches. `lost_request`, `lost_reply` and `late_request` are probabilities of each
    call; a late request arrives after its caller has given it up.
    """

    def __init__(self, random: Random) -> None:
        self._random = random
        self._cut = False
        self._away = False
        self._watches: dict[Silenced, None] = {}
        self.delay_s = (0.0002, 0.001)
        self.watch_delay_s = (0.0, 0.0)
        self.slow = 1.0
        self.lost_request = 0.0
        self.lost_reply = 0.0
        self.late_request = 0.0

    @property
    def cut(self) -> bool:
        """Nothing passes either way. Watches that stand when it begins never recover."""
        return self._cut or self._away

    @cut.setter
    def cut(self, cut: bool) -> None:
        self._cut = cut
        if cut:
            self._silence()

    @property
    def away(self) -> bool:
        """The server itself is out of everybody's reach: as `cut`, but no `heal` ends it."""
        return self._away

    @away.setter
    def away(self, away: bool) -> None:
        self._away = away
        if away:
            self._silence()

    def _silence(self) -> None:
        for watch in tuple(self._watches):
            watch.silence()

    def break_watch(self) -> None:
        """Every watch raises `StoreUnavailable` now; what was under way to it is dropped."""
        for watch in tuple(self._watches):
            watch.break_off("its connection was reset")

    def delay(self) -> float:
        """A delay for one way of a call."""
        low, high = self.delay_s
        return (low + (high - low) * self._random.random()) * self.slow

    def request_delay(self) -> float:
        """A delay for a call's way to the server; sometimes longer than its caller waits (S1)."""
        if self.late_request > 0 and self._random.random() < self.late_request:
            return self.delay() + OP_TIMEOUT_S * (1 + self._random.random())
        return self.delay()

    def watch_delay(self) -> float:
        """A delay for one batch of a watch."""
        low, high = self.watch_delay_s
        return self.delay() + (low + (high - low) * self._random.random()) * self.slow

    def loses_request(self) -> bool:
        """Whether a request that is sent now gets lost."""
        return self.cut or (self.lost_request > 0 and self._random.random() < self.lost_request)

    def loses_reply(self) -> bool:
        """Whether a reply that is sent now gets lost."""
        return self.cut or (self.lost_reply > 0 and self._random.random() < self.lost_reply)

    def opened(self, watch: Silenced) -> None:
        """A watch stands from now on."""
        self._watches[watch] = None

    def closed(self, watch: Silenced) -> None:
        """A watch ended."""
        self._watches.pop(watch, None)


class Wire:
    """The way from one process to one server and back."""

    def __init__(
        self,
        world: World,
        loop: SimLoop,
        server: SimLoop,
        faults: Faults,
        op_timeout_s: float,
        may_wait: bool = True,
    ) -> None:
        self.may_wait = may_wait
        self.world = world
        self.loop = loop
        self.server = server
        self.faults = faults
        self.op_timeout_s = op_timeout_s

    async def call(self, start: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """What the server answers; `TimeoutError` if nothing came back in time."""
        answer: asyncio.Future[T] = self.loop.create_future()
        timer = self.loop.call_later(self.op_timeout_s, fail, answer, TimeoutError())
        self.request(partial(self._run, start, answer))
        try:
            return await answer
        finally:
            timer.cancel()

    def request(self, arrive: Callable[[], object]) -> bool:
        """Have the server's process do something, if the network lets it through."""
        if self.faults.loses_request():
            return False
        at = self.world.now + self.faults.request_delay()
        self.world.call_at(at, partial(self._deliver, arrive))
        return True

    def _deliver(self, arrive: Callable[[], object]) -> None:
        if self.faults.cut:
            return
        if self.may_wait:
            self.server.post(arrive)
        else:
            arrive()

    def _run(self, start: Callable[[], Coroutine[Any, Any, T]], answer: asyncio.Future[T]) -> None:
        if not self.may_wait:
            self._run_at_once(start(), answer)
            return
        task = self.server.create_task(start())
        task.add_done_callback(partial(self._done, answer))

    def _run_at_once(self, work: Coroutine[Any, Any, T], answer: asyncio.Future[T]) -> None:
        """Without a task: the work of this server never waits for anything."""
        try:
            work.send(None)
        except StopIteration as stop:
            self._reply(partial(settle, answer, stop.value))
        except Exception as error:
            self._reply(partial(fail, answer, error))
        else:
            work.close()
            raise SimulationError("a call of this server waited; say may_wait=True")

    def _done(self, answer: asyncio.Future[T], task: asyncio.Task[T]) -> None:
        if task.cancelled():
            return
        error = task.exception()
        if error is None:
            self._reply(partial(settle, answer, task.result()))
        else:
            self._reply(partial(fail, answer, error))

    def _reply(self, settle: Callable[[], object]) -> None:
        if not self.faults.loses_reply():
            self.world.call_at(self.world.now + self.faults.delay(), partial(self._return, settle))

    def _return(self, settle: Callable[[], object]) -> None:
        if not self.faults.cut:
            self.loop.post(settle)


def settle(answer: asyncio.Future[T], value: T) -> None:
    """Answer a call, unless it was answered or given up."""
    if not answer.done():
        answer.set_result(value)


def fail(answer: asyncio.Future[Any], error: BaseException) -> None:
    """Fail a call, unless it was answered or given up."""
    if not answer.done():
        answer.set_exception(error)
