"""What an incarnation says to the coordinator of its cluster, which may be in this very process.

Made by `life` only. A release that no coordinator hears goes into the store (H10); everything else
may get lost, for the next coordinator asks again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from domicile.control.elected import Elected
from domicile.core.ids import Incarnation, ShardKey
from domicile.core.state.cluster_view import ClusterView
from domicile.core.wire import AskRevert, Probed, Released, Suspect, ToOwner
from domicile.incarnation.store_tasks import StoreTasks
from domicile.ports.clock import Clock

UNHEARD_S = 1.0
"""A release goes into the store if the coordinator was out of reach for so long."""


class ToLeader:
    """Speaks to whoever leads at the moment."""

    def __init__(
        self,
        *,
        me: Incarnation,
        clock: Clock,
        members: ClusterView,
        elected: Elected,
        errands: StoreTasks,
        send: Callable[[Incarnation, ToOwner], None],
        connected: Callable[[Incarnation], bool],
        suspected: Callable[[Incarnation], None],
    ) -> None:
        self._me, self._clock, self._members = me, clock, members
        self._elected, self._errands = elected, errands
        self._send, self._connected, self._suspected = send, connected, suspected
        self._unheard: dict[ShardKey, tuple[int, float]] = {}

    def tell(self, message: Released | AskRevert) -> None:
        """H10: of an own shard; into the store if no leader has been in reach for a second."""
        leader = self._members.leader
        if leader is not None and leader.incarnation == self._me:
            asyncio.get_running_loop().call_soon(self._tell_myself, message)
            return
        if leader is not None:
            self._send(leader.incarnation, message)
        if isinstance(message, AskRevert):
            return
        shard, now = ShardKey(message.role, message.shard), self._clock.now()
        reached = leader is not None and self._connected(leader.incarnation)
        epoch, since = self._unheard.get(shard, (0, now))
        if epoch != message.epoch or reached:
            since = now
        self._unheard[shard] = (message.epoch, since)
        if now - since >= UNHEARD_S:
            self._errands.leave_release(shard, message.epoch, message.floor)

    def _tell_myself(self, message: Released | AskRevert) -> None:
        if isinstance(message, Released):
            self._elected.on_released(self._me, message)
        else:
            self._elected.on_ask_revert(self._me, message)

    def tell_of_another(self, message: Probed | Suspect) -> None:
        """About another node; if no leader is known, the next one will ask."""
        leader = self._members.leader
        if leader is None:
            return
        if leader.incarnation != self._me:
            self._send(leader.incarnation, message)
        elif isinstance(message, Probed):
            self._elected.on_probed(self._me, message)
        else:
            self._suspected(message.node)
