"""Renews a lease from a task of the event loop: a member's or a leadership's (L1).

The holder says what an answer means, and must refuse to renew once it is over. A node on a store
that can be asked from any thread is renewed by `membership.thread_renewer` instead (DX-10).
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from domicile.core.lease.keeper import LeaseKeeper, Renewal
from domicile.ports.clock import Clock


async def keep_renewing(
    keeper: LeaseKeeper,
    clock: Clock,
    *,
    stands: Callable[[], bool],
    renew: Callable[[float], Awaitable[Renewal]],
) -> None:
    """Renew while the holder stands.

    `renew` asks the store once, given the time of the call. It extends the validity, or ends the
    holder, before it returns.
    """
    while stands():
        await asyncio.sleep(max(0.0, keeper.due - clock.now()))
        sent_at = clock.now()
        renewal = await renew(sent_at)
        if renewal is Renewal.REFUSED:
            return
        keeper.ended(renewal, sent_at, clock.now())
