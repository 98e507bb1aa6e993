"""A simulated guard: it opens its server, holds the deadline, and closes the server by itself (F2).

It runs on the machine's clock. As the server's parent it takes the server along when it is killed.
A guard that is frozen alone is killed by its own timer in the kernel soon after the deadline.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial

from domicile.failover.records import WriteQuorum
from domicile.testing.groups.servers import SimDatabase, SimReplicaDriver
from domicile.testing.sim.loop import World

GUARD_S = 0.05
"""After waking, a guard runs within this time."""

KILLED_AFTER_S = 0.1
"""So long after the deadline the kernel kills a guard that has not closed its server."""


class SimGuard:
    """The guard's own state. It outlives agents."""

    def __init__(
        self,
        world: World,
        database: SimDatabase,
        killed: Callable[[], None],
        *,
        attached: bool = False,
    ) -> None:
        self._world, self._database, self._killed = world, database, killed
        self._attached = attached
        self.until = 0.0
        self.frozen = False
        self.gone = False
        """Whether it was killed, and an attached server runs without it."""
        self.slow_s = 0.0
        """How long an order to open takes; an order to close that comes meanwhile ends it."""
        self._orders = 0

    @property
    def absent(self) -> bool:
        """Whether it does nothing now."""
        return self.frozen or self.gone

    def open_later(self, epoch: int, run: str, until: float, quorum: WriteQuorum | None) -> None:
        """As `open`, as slowly as this guard is."""
        self._orders += 1
        order = self._orders

        def now() -> None:
            if order == self._orders:
                self.open(epoch, run, until, quorum)

        self._world.call_at(self._world.now + self.slow_s, now)

    def open(self, epoch: int, run: str, until: float, quorum: WriteQuorum | None) -> None:
        """Open the server if it still may be; also to change the quorum."""
        self.until = max(self.until, until)
        if self._world.now < self.until and self._database.run == run:
            self._database.open(epoch, quorum)
            self._watch()

    def extend(self, until: float) -> None:
        """The deadline moves along, unless it has passed."""
        if self._world.now < self.until:
            self.until = max(self.until, until)

    def shut(self) -> None:
        """Close the server now."""
        self._orders += 1
        self.until = 0.0
        self._database.refuse()

    def put_down(self) -> None:
        """Kill a server that does not answer, and end the sessions of one that is gone.

        `TimeoutError` if the server is not its child.
        """
        self.until = 0.0
        if not self._database.up:
            self._database.refuse()
        elif self._attached:
            raise TimeoutError("the server does not close")
        else:
            self._killed()

    def run_late(self) -> None:
        """The machine has woken: the guard runs, or the timer of a guard that can't has fired."""
        if self.frozen:
            self._kernel()
        else:
            self._check()

    def _watch(self) -> None:
        self._world.call_at(self.until, self._check)
        self._world.call_at(self.until + KILLED_AFTER_S, self._kernel)

    def _check(self) -> None:
        if self.absent or self._database.frozen or not self._database.open_epoch:
            return
        if self._world.now >= self.until:
            self.shut()
        else:
            self._world.call_at(self.until, self._check)

    def _kernel(self) -> None:
        """The timer that the guard has set for itself: it runs while the guard is frozen."""
        database = self._database
        if not database.open_epoch:
            return
        if self._world.now < self.until + KILLED_AFTER_S:
            self._world.call_at(self.until + KILLED_AFTER_S, self._kernel)
        elif self.frozen:
            self._killed()


class SimGuardLine:
    """Implements `Guard` for one agent: its calls reach the guard in their order."""

    def __init__(self, guard: SimGuard, driver: SimReplicaDriver) -> None:
        self._guard, self._driver = guard, driver
        self._tasks: list[asyncio.Task[None]] = []

    async def open(self, epoch: int, run: str, until: float, quorum: WriteQuorum | None) -> None:
        """As `Guard.open`."""
        if not self._guard.slow_s:
            await self._call(partial(self._guard.open, epoch, run, until, quorum))
            return
        await self._call(partial(self._guard.open_later, epoch, run, until, quorum))
        await asyncio.sleep(self._guard.slow_s)

    def extend(self, until: float) -> None:
        """As `Guard.extend`. Sent on, not waited for."""
        loop = asyncio.get_running_loop()
        self._tasks = [task for task in self._tasks if not task.done()]
        self._tasks.append(loop.create_task(self._try(partial(self._guard.extend, until))))

    async def shut(self) -> None:
        """As `Guard.shut`. A server that does not let itself be closed in time is killed."""
        try:
            await self._call(self._guard.shut)
        except (OSError, TimeoutError):
            if self._guard.absent:
                raise
            self._guard.put_down()

    async def _try(self, do: Callable[[], None]) -> None:
        try:
            await self._call(do)
        except (OSError, TimeoutError):
            return

    async def _call(self, do: Callable[[], None]) -> None:
        if self._guard.absent:
            await asyncio.sleep(0.2)
            raise TimeoutError("the guard does not answer")
        await self._driver.call(do)
