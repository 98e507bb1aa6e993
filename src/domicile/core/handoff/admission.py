"""How many messages may wait: at one node for their turn, and on their way to one home (I6).

`core.handoff.owner` asks `Admission` about messages that cannot start at once; a node has one for
all its shards. `core.handoff.sender` asks `Outflow`; an incarnation has one for all shards that it
writes to. Both only count and compare. A queue is bounded in messages, in bytes and in time, and
stays first in, first out. A message that does not fit is refused before it has any effect. Neither
class reads a clock.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from domicile.core.ids import Incarnation

FEW = 64
"""Messages that may wait at a node however slow it is; below this the wait is not estimated."""

PATIENCE = 4
"""Refuse a message whose expected wait exceeds timeout / `PATIENCE`. Later messages to idle
entities may overtake it and double its wait; the margin allows for that."""

NESTED = 2
"""Messages that a running handler waits for may use `NESTED` times the limits: each of them lets a
handler end, which frees more than it uses."""


class Bounds(NamedTuple):
    """How much may wait for its turn at one node, in messages, bytes and seconds."""

    messages: int
    size_bytes: int
    sender_bytes: int
    """Of one sender."""
    wait_s: float


class Share:
    """How much of one sender waits at a node."""

    __slots__ = ("count", "size_bytes")

    def __init__(self) -> None:
        self.count = 0
        self.size_bytes = 0


UNBOUNDED = Bounds(1 << 60, 1 << 60, 1 << 60, float("inf"))


class Admission:
    """Counts the unstarted messages of one node, and says whether one more may wait."""

    __slots__ = ("bounds", "count", "is_full", "job_s", "ready", "shares", "size_bytes")

    def __init__(self, bounds: Bounds = UNBOUNDED) -> None:
        self.bounds = bounds
        self.count = 0
        self.size_bytes = 0
        self.shares: dict[Incarnation, Share] = {}
        """By sender; only senders that have a message waiting."""
        self.ready = 0
        self.job_s = 0.0
        """`ready`: entities that could start a message. The shell sets it, and owners add to it.
        `job_s`: seconds from one start to the next, as the shell measures it."""
        self.is_full = False
        """Whether as many handlers run as may run. The shell sets it."""

    def refuses(
        self, sender: Incarnation, size_bytes: int, depth: int, nested: bool, ttl_s: float
    ) -> bool:
        """Whether a message must not wait here, behind `depth` others of its entity.

        Over the limits, only senders with at least an equal share of the waiting messages are
        refused: many messages of one sender do not shut out the others. Over `NESTED` times the
        limits, every sender is refused.
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
        """Expected wait, in seconds, of one more message behind `depth` others of its entity.

        `(depth + 1) * ready * job_s`, since ready entities take turns; at most the time that all
        waiting messages take together.
        """
        return min((depth + 1) * self.ready, self.count + 1) * self.job_s

    def too_heavy(self, sender: Incarnation, size_bytes: int) -> bool:
        """Whether too many bytes would wait, of this sender or of all senders together."""
        if self.size_bytes + size_bytes > NESTED * self.bounds.size_bytes:
            return True
        share = self.shares.get(sender)
        return share is not None and share.size_bytes + size_bytes > self.bounds.sender_bytes

    def enter(self, sender: Incarnation, size_bytes: int) -> None:
        """A message begins to wait."""
        self.count += 1
        self.size_bytes += size_bytes
        share = self.shares.get(sender)
        if share is None:
            share = self.shares[sender] = Share()
        share.count += 1
        share.size_bytes += size_bytes

    def leave(self, sender: Incarnation, size_bytes: int) -> None:
        """A waiting message started, was returned or was dropped."""
        self.count -= 1
        self.size_bytes -= size_bytes
        share = self.shares[sender]
        share.count -= 1
        share.size_bytes -= size_bytes
        if not share.count:
            del self.shares[sender]


UNIT_BYTES = 4_096
"""Units of one message on its way: 1 + size in bytes // `UNIT_BYTES`."""


MOST_HOMES = 1_024
"""Homes that are remembered. Above this, homes without a message on its way are forgotten. A home
whose record is gone is forgotten at once."""


@dataclass(slots=True)
class Flow:
    """What one incarnation has written to one home and not yet heard to have started."""

    most: int
    limit: int
    """Units that may be on their way: `most`, or 0 while the home is overloaded."""
    open: int = 0

    @property
    def paused(self) -> bool:
        """Whether the home has said that too many messages wait there."""
        return not self.limit

    def pause(self) -> bool:
        """Write no new message for now; False if it was paused already."""
        if self.paused:
            return False
        self.limit = 0
        return True

    def go_on(self) -> None:
        """Write new messages again."""
        self.limit = self.most


@dataclass(slots=True)
class Outflow:
    """All messages that one incarnation has sent and that have not started."""

    most: int = 1 << 60
    """Most units on their way to one home, or held for all shards that have no home now."""
    homes: dict[Incarnation, Flow] = field(default_factory=dict[Incarnation, Flow])
    held_bytes: int = 0

    def to(self, home: Incarnation) -> Flow:
        """The flow to one home."""
        flow = self.homes.get(home)
        if flow is None:
            if len(self.homes) >= MOST_HOMES:
                # A sender that is bound to a forgotten home then counts alone: a looser bound.
                self.homes = {name: other for name, other in self.homes.items() if other.open}
            flow = self.homes[home] = Flow(self.most, self.most)
        return flow

    def forget(self, home: Incarnation) -> None:
        """The home is gone: no more messages go there. Messages on their way no longer count."""
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
        # One message alone may always go, however large it is.
        return flow is None or not flow.open or flow.open + size_bytes // UNIT_BYTES < most
