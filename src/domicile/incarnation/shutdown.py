"""What a process that leaves waits for (H14), and how an incarnation ends.

Called by `RunningIncarnation` only. When a process may go is said by the runtime, by the control
plane, by `core.coordinator.departures` and by the links. Here are the deadlines, so that no wait is
without one.

An incarnation ends one step after the other, and no step is left out. What was not stopped before
the lease is given back would run beside its successor (I1), so no step may depend on the success of
another.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from domicile.core.coordinator.departures import late_s, may_overstay
from domicile.core.ids import Incarnation, LinkKey
from domicile.core.wire import Goodbye
from domicile.entity.runtime import Runtime
from domicile.links.layer import LinkLayer
from domicile.ports.clock import Clock
from domicile.ports.control import ControlPlane
from domicile.ports.watchdog import Watchdog
from domicile.settings import Settings

POLL_S = 0.02
"""How often a leaving node looks whether it is done."""


class Shutdown:
    """One departure, which began when this was made."""

    def __init__(
        self,
        *,
        clock: Clock,
        settings: Settings,
        control: ControlPlane,
        over: asyncio.Event,
        goodbyes: dict[Incarnation, None],
    ) -> None:
        self._clock, self._settings, self._control = clock, settings, control
        self._over, self._goodbyes = over, goodbyes
        self._told: dict[LinkKey, None] = {}
        self._since = clock.now()
        self._until = self._since + settings.drain_deadline_s + late_s(settings)

    def said(self) -> None:
        """From now on others can know of it."""
        self._since = self._clock.now()

    async def settle(self, runtime: Runtime) -> None:
        """Until everything is released and nothing sent is open, or its time is over."""
        await self.until(runtime.settled, self._settings.drain_deadline_s)
        decides = self._control.decides
        if may_overstay(
            draining=runtime.unreleased.draining, unreleased=runtime.must_release, decides=decides
        ):
            await self.until(runtime.settled, late_s(self._settings))

    async def see_off(self) -> None:
        """Until the control plane does not need this node for those that leave with it."""

        def seen_off() -> bool:
            return not self._control.must_stay(self._since)

        await self.until(seen_off, self._until - self._clock.now())

    def linger(self) -> None:
        """From now on there is as much time again as it may linger."""
        self._until = self._clock.now() + self._settings.linger_s

    async def part(self, links: LinkLayer) -> None:
        """Say goodbye to every process that dialled this one, also to those that have sent nothing
        yet, until all have heard it and all that was sent is acknowledged."""

        def parted() -> bool:
            for link in links.incoming:
                if link not in self._told:
                    self._told[link] = self._goodbyes[link.sender] = None
                    links.answer(link, Goodbye())
            return not self._goodbyes and not links.pending()

        await self.until(parted, self._until - self._clock.now())

    async def until(self, condition: Callable[[], bool], limit_s: float) -> None:
        """Wait for a condition, for a while, unless this incarnation ends first."""
        clock, deadline = self._clock, self._clock.now() + limit_s
        # Several conditions without a common event, looked at rarely and only while leaving.
        while not condition() and clock.now() < deadline and not self._over.is_set():  # noqa: ASYNC110
            await asyncio.sleep(POLL_S)


async def in_turn(*steps: Callable[[], Awaitable[object]]) -> None:
    """Take each step, also when one before it failed or was cancelled."""
    if steps:
        try:
            await steps[0]()
        finally:
            await in_turn(*steps[1:])


async def stop_handlers(runtime: Runtime, watchdog: Watchdog | None) -> None:
    """Leave nothing running; what ignores that is the watchdog's business (L4)."""
    stuck = await runtime.close()
    if watchdog is not None:
        if stuck:
            watchdog.stuck(stuck)
        watchdog.rest()


async def stop_leading(control: ControlPlane, *, rewound: bool) -> None:
    """Give back what the control plane holds: nobody could lead before its lease has run out.

    After a rewind it runs out: a process from before that may still speak of what the store forgot,
    and its word must not meet new entries that bear the same numbers (S5).
    """
    if not rewound:
        await control.resign()
