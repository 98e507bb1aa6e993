"""How a node says that it has too much mail, so that senders stop writing to it for a while.

Both halves of it: the host of a shard refuses with it, `outbound` recognises it. On the wire it is
a refusal as any other, under a name that older peers do not know and take for `Overloaded`.
"""

from __future__ import annotations

import msgspec

from domicile.core.handoff.admission import Outflow
from domicile.core.ids import Incarnation
from domicile.core.wire import Reply, ReplyStatus
from domicile.ports.clock import Clock

PAUSE_S = 0.05
"""For how long a sender writes nothing new to a node that said so: less than what waits takes."""

_NAME = "Crowded"
_encode = msgspec.msgpack.encode
_MARK = _encode((_NAME, ""))[:-1]


def encode_crowded(node_id: str) -> tuple[ReplyStatus, bytes]:
    """The refusal of a node that has too much mail."""
    text = f"too much waits at node {node_id}; slow down and retry"
    return ReplyStatus.OVERLOADED, _encode((_NAME, text))


def is_crowded(reply: Reply) -> bool:
    """Whether a refusal is about the whole node, not one entity."""
    return reply.status is ReplyStatus.OVERLOADED and reply.body.startswith(_MARK)


class Pauses:
    """The homes that this incarnation writes nothing new to at the moment."""

    def __init__(self, clock: Clock, outflow: Outflow) -> None:
        self._clock = clock
        self._outflow = outflow

    def hear(self, home: Incarnation, reply: Reply) -> None:
        """A refusal of a home: it may be about all that is sent there."""
        if is_crowded(reply):
            flow = self._outflow.to(home)
            if flow.pause():
                self._clock.call_at(self._clock.now() + PAUSE_S, flow.go_on)
