"""How a node says that too many messages wait at it, so that senders pause writing to it.

Both halves of it: the host of a shard refuses with it, `outbound` recognises it. On the wire it is
a refusal like any other, under a name that older peers do not know and read as `Overloaded`.
"""

from __future__ import annotations

import msgspec

from domicile.core.handoff.admission import Outflow
from domicile.core.ids import Incarnation
from domicile.core.wire import Reply, ReplyStatus
from domicile.ports.clock import Clock

PAUSE_S = 0.05
"""Seconds for which a sender writes nothing new to such a node: less than its waiting messages
take."""

_NAME = "Crowded"
_encode = msgspec.msgpack.encode
_MARK = _encode((_NAME, ""))[:-1]


def encode_crowded(node_id: str) -> tuple[ReplyStatus, bytes]:
    """The refusal of a node at which too many messages wait."""
    text = f"too much waits at node {node_id}; slow down and retry"
    return ReplyStatus.OVERLOADED, _encode((_NAME, text))


def is_crowded(reply: Reply) -> bool:
    """Whether a refusal is about the whole node, not one entity."""
    return reply.status is ReplyStatus.OVERLOADED and reply.body.startswith(_MARK)


class Pauses:
    """The homes to which this incarnation writes nothing new at the moment."""

    def __init__(self, clock: Clock, outflow: Outflow) -> None:
        self._clock = clock
        self._outflow = outflow

    def hear(self, home: Incarnation, reply: Reply) -> None:
        """A home refused a message: pause the flow to that home if it says that the whole node is
        full."""
        if is_crowded(reply):
            flow = self._outflow.to(home)
            if flow.pause():
                self._clock.call_at(self._clock.now() + PAUSE_S, flow.go_on)
