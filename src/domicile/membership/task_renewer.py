"""Renews a lease from a task of the event loop: a member's or a leadership's (L1).

Members and leaderships run it as a task. The lease holder says what an answer means, and must
refuse to renew after its end. For a node whose store can be called from any thread,
`membership.thread_renewer` renews instead (DX-10).
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
    """Renew while `stands` is true.

    `renew` asks the store once; its argument is the time of the call. Before it returns, it extends
    the validity or ends the holder.
    """
    while stands():
        await asyncio.sleep(max(0.0, keeper.due - clock.now()))
        sent_at = clock.now()
        renewal = await renew(sent_at)
        if renewal is Renewal.REFUSED:
            return
        keeper.ended(renewal, sent_at, clock.now())
