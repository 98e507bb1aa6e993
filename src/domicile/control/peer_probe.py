"""A member's part in finding nodes that nobody reaches (C6).

Made by the elected control plane. Asked by the leader it pings a node once and tells the leader
whether an answer came. It draws no conclusion from that.
"""

from __future__ import annotations

from collections.abc import Callable

from domicile.core.ids import Incarnation
from domicile.core.wire import Ping, Probed, ToOwner
from domicile.ports.clock import Clock, Timer
from domicile.ports.meter import Meter

PING_TIMEOUT_S = 1.0
"""How long a pinged node may take to answer."""

PING_ID = -1
"""The id of pings sent here; the leader's own count up from one."""


class PeerProbe:
    """One incarnation's probes under way, one for each node at most."""

    def __init__(
        self,
        me: Incarnation,
        clock: Clock,
        meter: Meter,
        send: Callable[[Incarnation, ToOwner], None],
        tell_leader: Callable[[Probed], None],
    ) -> None:
        self._me, self._clock, self._meter = me, clock, meter
        self._send, self._tell_leader = send, tell_leader
        self._probes: dict[Incarnation, Timer] = {}

    def probe(self, node: Incarnation) -> None:
        """The leader asks whether this process reaches a node."""
        if node not in self._probes:
            at = self._clock.now() + PING_TIMEOUT_S
            self._probes[node] = self._clock.call_at(at, lambda: self._conclude(node, False))
            self._send(node, Ping(PING_ID))

    def answered(self, node: Incarnation, id: int) -> None:
        """A node answered a ping."""
        if id == PING_ID and node in self._probes:
            self._conclude(node, True)

    def close(self) -> None:
        """This incarnation is over."""
        for timer in self._probes.values():
            timer.cancel()
        self._probes.clear()

    def _conclude(self, node: Incarnation, reached: bool) -> None:
        self._probes.pop(node).cancel()
        self._meter.event("probed", inc=self._me, node=node, reached=reached)
        self._tell_leader(Probed(node, reached))
