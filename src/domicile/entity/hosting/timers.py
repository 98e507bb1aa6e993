"""The timers of one shard whose entities are not in memory: kept, rung when due, or told as lost.

A resident entity holds its own timers (`Cell.alarms`). Here are the others: timers of entities that
were stopped because there were too many, and timers that came from the previous home. When one is
due, it starts its entity. The host says when an entity leaves memory and hands the book over when
the shard moves (DX-25).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from domicile.core.handoff.tables import Phase
from domicile.core.ids import EntityKey
from domicile.entity.carry.piles import NO_ROOM
from domicile.entity.carry.timers import KeptTimer
from domicile.entity.hosting.cell import Alarm, Cell
from domicile.ports.clock import Timer

if TYPE_CHECKING:
    from domicile.entity.hosting.shard_host import ShardHost

SLICE = 100
"""I6: how many due timers are rung before the event loop gets a turn."""

RETRY_S = 1.0
"""Seconds after which a due timer is rung again, at the earliest, if its entity did not start."""


class ShardTimers:
    """The kept timers of one shard at this node, and the losses of all its timers."""

    def __init__(self, host: ShardHost) -> None:
        carrier = host.runtime.carrier
        self._host = host
        self._losses = carrier.timer_losses
        self._timer: Timer | None = None
        self._armed_at = 0.0
        self.book = carrier.timer_book()

    def has(self, key: EntityKey) -> bool:
        """Whether a timer of that entity is kept here."""
        return self.book.has(key)

    # what residents do

    def left(self, cell: Cell) -> None:
        """An entity leaves memory: keep its timers."""
        for one in cell.silence():
            self._keep(cell.key, one.fn, one.args, one.kwargs, one.due_at)

    def started(self, cell: Cell) -> None:
        """An entity has started: what it set meanwhile replaces what was kept for it."""
        for one in (cell.alarms or {}).values():
            self.replaced(cell, one.fn)

    def replaced(self, cell: Cell, fn: Callable[..., Any]) -> None:
        """A resident entity has set a timer anew."""
        if self.book.has(cell.key):
            method = cell.kind.timed.of(fn)
            if method is not None:
                self.book.drop(cell.key, method.name)

    def cancelled(self, cell: Cell) -> None:
        """An entity ended by its own wish: its timers end with it."""
        cell.silence()
        self.book.forget(cell.key)

    def put_back(self, key: EntityKey, alarm: Alarm, due_at: float) -> None:
        """A due timer did not begin, because its shard moves or its entity does not start."""
        if alarm.epoch != self._host.owner.epoch:
            self.lose(key, alarm.fn, "its shard has a new home")
            return
        cell = self._host.cells.get(key)
        if cell is None or not cell.alarms or alarm.method not in cell.alarms:
            self._keep(key, alarm.fn, alarm.args, alarm.kwargs, due_at)

    # losses

    def lose(self, key: EntityKey, fn: Callable[..., Any], why: str) -> None:
        """A timer will never fire."""
        self._losses.add(self._host.shard, key, getattr(fn, "__name__", "?"), why)

    def lose_of(self, cell: Cell, why: str) -> None:
        """The timers of an entity's object are lost with it."""
        for one in cell.silence():
            self.lose(cell.key, one.fn, why)

    def lose_all(self, why: str) -> None:
        """All timers of the shard are lost: pending, kept, or due and not begun."""
        host = self._host
        for key, mailbox in host.owner.mailboxes.items():
            for queued in mailbox.queue:
                if isinstance(queued.request, Alarm):
                    self.lose(key, queued.request.fn, why)
        for cell in host.cells.values():
            self.lose_of(cell, why)
        self._losses.clear(host.shard, self.book, why)
        self._disarm()

    def tell(self) -> None:
        """Log what this shard has lost since the last time."""
        self._losses.tell(self._host.shard)

    # in time

    def arm(self) -> None:
        """Have the next kept timer rung when it is due. Only while the shard is open."""
        next_at = self.book.next_at
        if self._timer is not None and self._armed_at <= next_at:
            return
        self._disarm()
        if next_at != float("inf"):
            self._armed_at = next_at
            self._timer = self._host.runtime.clock.call_at(next_at, self._ring)

    def _disarm(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _ring(self) -> None:
        self._timer = None
        host, clock = self._host, self._host.runtime.clock
        if host.owner.phase is not Phase.OPEN or not host.runtime.guard():
            return
        for kept in self.book.due(clock.now(), SLICE):
            self._ring_one(kept)
        self.arm()

    def _ring_one(self, kept: KeptTimer) -> None:
        host, key = self._host, kept.key
        kind = host.runtime.catalogue.get(key.type)
        method = None if kind is None else kind.timed.named(kept.method)
        if method is None:
            what = "type" if kind is None else "method"
            why = f"node {host.runtime.node_id} does not know that {what}"
            self._losses.add(host.shard, key, kept.method, why)
            return
        try:
            args, kwargs = method.decode(kept.body)
        except Exception as error:
            self._losses.add(host.shard, key, kept.method, f"its arguments do not fit: {error}")
            return
        host.ring(key, method.fn, args, kwargs)

    def _keep(
        self,
        key: EntityKey,
        fn: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        due_at: float,
    ) -> None:
        host = self._host
        kind = host.runtime.catalogue.get(key.type)
        method = None if kind is None else kind.timed.of(fn)
        if not host.owner.admits or host.runtime.workers.closed:
            self.lose(key, fn, "its shard is no longer at home here")
            return
        if method is None:
            self.lose(key, fn, "its class has no such method")
            return
        try:
            body = method.encode(args, kwargs)
        except TypeError as error:
            self.lose(key, fn, str(error))
            return
        too_long = len(body) > host.runtime.settings.message_bytes
        if too_long or not self.book.keep(key, method.name, due_at, body):
            self.lose(key, fn, "its arguments exceed message_bytes" if too_long else NO_ROOM)
        elif host.owner.phase is Phase.OPEN:
            self.arm()
