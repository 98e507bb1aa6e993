"""How much mail may wait: at one node for its turn, and at one home for one sender (I6).

`Admission` is asked by `core.handoff.owner` about mail that cannot start at once; one for all
shards of a node. `Outflow` is asked by `core.handoff.sender`; one for all shards that an
incarnation writes to. Both count and compare, no more: a queue is bounded in messages, in bytes and
in time, stays first in, first out, and what does not fit is refused before it has any effect.
Neither knows a clock.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from domicile.core.ids import Incarnation

FEW = 64
"""So many messages may wait at a node however slow it is: no estimate is made of less."""

PATIENCE = 4
"""A message may be expected to wait for this part of its time: who comes later to idle entities may
pass it, and then it waits for twice as long."""

NESTED = 2
"""What a running handler waits for may use so many times the limits: it frees more than that."""


class Bounds(NamedTuple):
    """What may wait for its turn at one node, in messages, bytes and seconds."""

    messages: int
    size_bytes: int
    sender_bytes: int
    """Of one sender."""
    wait_s: float


class Share:
    """What one sender has waiting at a node."""

    __slots__ = ("count", "size_bytes")

    def __init__(self) -> None:
        self.count = 0
        self.size_bytes = 0


UNBOUNDED = Bounds(1 << 60, 1 << 60, 1 << 60, float("inf"))


class Admission:
    """The unstarted mail of one node, and whether there may be more of it."""

    __slots__ = ("bounds", "count", "is_full", "job_s", "ready", "shares", "size_bytes")

    def __init__(self, bounds: Bounds = UNBOUNDED) -> None:
        self.bounds = bounds
        self.count = 0
        self.size_bytes = 0
        self.shares: dict[Incarnation, Share] = {}
        """By sender, of those that have anything waiting."""
        self.ready = 0
        self.job_s = 0.0
        """Entities that could start a message, as the shell saw it last and owners count on since;
        and the time from one start to the next, as far as the shell knows it."""
        self.is_full = False
        """Whether as many handlers run as may; the shell's."""

    def refuses(
        self, sender: Incarnation, size_bytes: int, depth: int, nested: bool, ttl_s: float
    ) -> bool:
        """Whether a message must not wait here, behind `depth` others of its entity.

        Over the limits only those are refused who have at least their share of what waits, so that
        one sender's flood does not shut out the others; over twice the limits everybody is.
        """
        bounds, size = self.bounds, self.size_bytes + size_bytes
        if self.count >= NESTED * bounds.messages or size > NESTED * bounds.size_bytes:
            return True
        if nested:
            return False
        if self.is_full or self.too_heavy(sender, size_bytes):
            return True
        if self.count < bounds.messages and size <= bounds.size_bytes:
            wait_s = min(bounds.wait_s, ttl_s / PATIENCE)
            if self.count < FEW or self._wait_s(depth) <= wait_s:
                return False
        share, senders = self.shares.get(sender), len(self.shares)
        if share is None:
            return False
        return (
            share.count * senders >= self.count
            or (share.size_bytes + size_bytes) * senders >= size > bounds.size_bytes
        )

    def _wait_s(self, depth: int) -> float:
        """How long one more message behind `depth` others will wait if all goes on like this.

        Who is ready gets turns in rounds, and nobody waits for longer than all that waits takes.
        """
        return min((depth + 1) * self.ready, self.count + 1) * self.job_s

    def too_heavy(self, sender: Incarnation, size_bytes: int) -> bool:
        """Whether a sender's mail would have too many bytes, of its own or with all others'."""
        if self.size_bytes + size_bytes > NESTED * self.bounds.size_bytes:
            return True
        share = self.shares.get(sender)
        return share is not None and share.size_bytes + size_bytes > self.bounds.sender_bytes

    def enter(self, sender: Incarnation, size_bytes: int) -> None:
        """A message waits from here on."""
        self.count += 1
        self.size_bytes += size_bytes
        share = self.shares.get(sender)
        if share is None:
            share = self.shares[sender] = Share()
        share.count += 1
        share.size_bytes += size_bytes

    def leave(self, sender: Incarnation, size_bytes: int) -> None:
        """It has started, went back, or is dropped."""
        self.count -= 1
        self.size_bytes -= size_bytes
        share = self.shares[sender]
        share.count -= 1
        share.size_bytes -= size_bytes
        if not share.count:
            del self.shares[sender]


UNIT_BYTES = 4_096
"""A message on its way counts as one, and once more for every so many bytes of it."""


MOST_HOMES = 1_024
"""Homes that are remembered; with more, those that nothing is on its way to are forgotten. Those
whose record is gone are, at once."""


@dataclass(slots=True)
class Flow:
    """What one incarnation has written to one home and has not heard to have started."""

    most: int
    limit: int
    """So much may be on its way: `most`, and nothing new while the home is crowded."""
    open: int = 0

    @property
    def paused(self) -> bool:
        """Whether the home has said that it has too much mail."""
        return not self.limit

    def pause(self) -> bool:
        """Write nothing new for now; False if that is so already."""
        if self.paused:
            return False
        self.limit = 0
        return True

    def go_on(self) -> None:
        """Try again."""
        self.limit = self.most


@dataclass(slots=True)
class Outflow:
    """All that one incarnation has sent and that has not started."""

    most: int = 1 << 60
    """Units on their way to one home, or held for all shards that have none at the moment."""
    homes: dict[Incarnation, Flow] = field(default_factory=dict[Incarnation, Flow])
    held_bytes: int = 0

    def to(self, home: Incarnation) -> Flow:
        """The flow to one home."""
        flow = self.homes.get(home)
        if flow is None:
            if len(self.homes) >= MOST_HOMES:
                # A sender that is bound to one of them counts apart from here on: a looser bound.
                self.homes = {name: other for name, other in self.homes.items() if other.open}
            flow = self.homes[home] = Flow(self.most, self.most)
        return flow

    def forget(self, home: Incarnation) -> None:
        """It is gone, and nothing goes there any more; what is on its way counts for itself."""
        self.homes.pop(home, None)

    def takes(self, home: Incarnation, size_bytes: int, nested: bool) -> bool:
        """Whether one more message may be on its way to a home, or wait for one."""
        flow = self.homes.get(home)
        if nested:
            most = NESTED * self.most
        elif flow is not None and flow.paused:
            return False
        else:
            most = self.most
        if (self.held_bytes + size_bytes) // UNIT_BYTES > most:
            return False
        # However large, one alone may always go.
        return flow is None or not flow.open or flow.open + size_bytes // UNIT_BYTES < most
