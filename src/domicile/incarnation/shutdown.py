"""What a process that leaves waits for, in the order in which `life` asks for it (H14).

Made by `life` only. When it may go is said by the runtime, by `core.coordinator.departures` and by
the links; here are only the deadlines, so that no wait is without one.

How an incarnation ends: one step after the other, none of them left out.

Called by `Life` alone. What was not stopped before the lease is given back would run beside its
successor (I1), so no step may depend on the success of another.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from domicile.control.elected import Elected
from domicile.core.coordinator.departures import late_s, may_overstay, must_stay
from domicile.core.ids import Incarnation, LinkKey
from domicile.core.state.cluster_view import ClusterView
from domicile.core.wire import Goodbye
from domicile.entity.runtime import Runtime
from domicile.links.layer import LinkLayer
from domicile.ports.clock import Clock
from domicile.ports.watchdog import Watchdog
from domicile.settings import Settings

POLL_S = 0.02
"""How often a leaving node looks whether it is done."""


class Shutdown:
    """One departure, which began when this was made."""

    def __init__(
        self,
        *,
        me: Incarnation,
        clock: Clock,
        settings: Settings,
        members: ClusterView,
        over: asyncio.Event,
        goodbyes: dict[Incarnation, None],
    ) -> None:
        self._me, self._clock, self._settings = me, clock, settings
        self._members, self._over, self._goodbyes = members, over, goodbyes
        self._told: dict[LinkKey, None] = {}
        self._since = clock.now()
        self._until = self._since + settings.drain_deadline_s + late_s(settings)

    def said(self) -> None:
        """From now on others can know of it."""
        self._since = self._clock.now()

    async def settle(self, runtime: Runtime) -> None:
        """Until everything is released and nothing sent is open, or its time is over."""
        await self.until(runtime.settled, self._settings.drain_deadline_s)
        decides = self._members.leader is not None
        if may_overstay(draining=runtime.draining, unreleased=runtime.unreleased, decides=decides):
            await self.until(runtime.settled, late_s(self._settings))

    async def see_off(self, elected: Elected) -> None:
        """The last that could lead stays for those who leave with it."""
        clock, role = self._clock, self._settings.coordinator_role

        def seen_off() -> bool:
            return not must_stay(
                self._members, self._me, role,
                leads=elected.leading, since=self._since, now=clock.now(),
            )  # fmt: skip

        await self.until(seen_off, self._until - clock.now())

    def linger(self) -> None:
        """From now on there is as much time again as it may linger."""
        self._until = self._clock.now() + self._settings.linger_s

    async def part(self, links: LinkLayer) -> None:
        """Say goodbye to whoever has dialled this process, also to those that have sent nothing
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


async def stop_leading(elected: Elected, *, rewound: bool) -> None:
    """Give the leader's lease back: nobody could lead before it has run out.

    After a rewind it runs out: whoever lived before that may still speak of what the store forgot,
    and its word must not meet new entries that bear the same numbers (S5).
    """
    if not rewound:
        await elected.resign()
