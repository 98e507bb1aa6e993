"""How an incarnation ends: one step after the other, none of them left out.

Called by `Life` alone. What was not stopped before the lease is given back would run beside its
successor (I1), so no step may depend on the success of another.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from domicile.control.elected import Elected
from domicile.entity.runtime import Runtime
from domicile.ports.watchdog import Watchdog


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
