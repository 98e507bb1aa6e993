"""One incarnation's carried fields and timers on their way: from a released shard here to its next
home.

Made by the runtime. Shard hosts report what stops, starts and is released; the dispatcher brings
what peers sent. It decides nothing about homes. It delays the report of a release until the next
home has everything, but at most `WAIT_S` (DX-13). It gives fields and timers to a home only in the
epoch after the one in which they were taken.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, NamedTuple, Protocol

import msgspec

from domicile.core.ids import NOBODY, EntityKey, Incarnation, ShardKey
from domicile.core.state.shardmap import Entry
from domicile.core.wire import CarriedTimer, Carry
from domicile.entity.carry.budget import Budget
from domicile.entity.carry.piles import CarryBook, CarryShelf
from domicile.entity.carry.timers import TimerBook, TimerLosses
from domicile.entity.model.entity import Context, Entity, EntityType, make
from domicile.entity.model.fields import Fields
from domicile.ports.clock import Clock, Timer
from domicile.ports.meter import Meter
from domicile.settings import Settings

log = logging.getLogger("domicile")

WAIT_S = 1.0
"""Seconds for which a release may wait until the next home has everything."""

LOOK_S = 0.05
"""Seconds between two looks whether the record of the next home is known."""

TOTAL = 16
"""I6: a node keeps at most this many times `carry_bytes` of fields, and as much of timers, for all
its shards together."""

MOST_LEFT_S = 1e300
"""Seconds that a timer's remaining time may have on the wire."""

PROTOCOL = 1
"""The first wire protocol with `Carry`."""


class Post(Protocol):
    """Sends to other nodes."""

    def speaks(self, node: Incarnation) -> int:
        """The newest wire protocol of a node; 0 if it is not known."""
        ...

    def carry(self, to: Incarnation, carry: Carry) -> None:
        """Send a part."""
        ...


class _Release(NamedTuple):
    """What a home gives away, and until when it looks for the record of the next one."""

    shard: ShardKey
    epoch: int
    then: Callable[[], None]
    timers: TimerBook
    until: float


class CarryTransfer:
    """The books of the shards at home here, and the shelf for shards that may come."""

    def __init__(
        self, me: Incarnation, clock: Clock, meter: Meter, settings: Settings, post: Post
    ) -> None:
        self._me, self._clock, self._meter, self._post = me, clock, meter, post
        self._most_bytes = settings.carry_bytes
        self._most_body_bytes = min(settings.carry_bytes, settings.message_bytes)
        self._budget = Budget(TOTAL * settings.carry_bytes)
        self._timer_budget = Budget(TOTAL * settings.carry_bytes)
        self.timer_losses = TimerLosses(meter)
        self._shelf = CarryShelf(
            me, self._budget, settings.carry_bytes, settings.hold_timeout_s, self.timer_book,
            self.timer_losses,
        )  # fmt: skip
        self._books: dict[ShardKey, CarryBook] = {}
        self._awaited: dict[int, ShardKey] = {}
        self._releases: dict[ShardKey, tuple[Callable[[], None], Timer]] = {}
        self._next_id = 1

    # at home here

    def timer_book(self) -> TimerBook:
        """A new book, for the timers of one shard."""
        return TimerBook(self._timer_budget, self._most_bytes)

    def stopped(self, shard: ShardKey, key: EntityKey, fields: Fields, entity: Any) -> None:
        """An entity stopped because its shard is about to move: keep its fields."""
        try:
            body = fields.encode(entity)
        except TypeError as error:
            log.warning("%s %r starts fresh at its next home: %s", key.type, key.id, error)
            self._meter.count("carry.dropped")
            return
        if len(body) > self._most_body_bytes or not self._book(shard).keep(key, body):
            self._meter.count("carry.dropped")

    def make(self, shard: ShardKey, key: EntityKey, kind: EntityType, context: Context) -> Entity:
        """A new entity with the fields that it took along, if any."""
        entity = make(kind, context)
        if kind.fields is None or self.restore(shard, key, kind.fields, entity):
            return entity
        return make(kind, context)

    def restore(self, shard: ShardKey, key: EntityKey, fields: Fields, entity: Any) -> bool:
        """Set the fields that a new entity took along, if any. False if they did not fit: make
        another."""
        book = self._books.get(shard)
        body = None if book is None else book.get(key)
        if body is None:
            return True
        try:
            fields.restore(entity, body)
        except (msgspec.DecodeError, AttributeError, TypeError, ValueError) as error:
            log.warning("%s %r starts fresh: what it took along fails: %s", key.type, key.id, error)
            self._meter.count("carry.dropped")
            self.started(shard, key)
            return False
        return True

    def started(self, shard: ShardKey, key: EntityKey) -> None:
        """An entity runs here: it holds its fields itself now, and the kept bytes are never used
        again."""
        book = self._books.get(shard)
        if book is not None:
            book.drop(key)

    def opened(self, shard: ShardKey, epoch: int, timers: TimerBook) -> None:
        """The shard is at home here, in an epoch that is new here. `timers` is its empty book."""
        self.lost(shard)
        self._unpack(shard, epoch, timers)

    def release(
        self,
        shard: ShardKey,
        epoch: int,
        entry: Entry,
        then: Callable[[], None],
        timers: TimerBook,
    ) -> bool:
        """This epoch of the shard is over here. True if `then` is called later, when that may be
        told.

        Fields and timers are sent only now: nothing of this epoch starts here again (H10).
        """
        if shard in self._releases:
            self.lost(shard)
        # A home that was over before it opened passes on what came for it.
        self._unpack(shard, epoch, timers)
        if not len(self._books.get(shard, ())) and not len(timers):
            return False
        if entry.state != "moving" or entry.to in (NOBODY, self._me):
            self.lost(shard)
            self.timer_losses.clear(shard, timers, "its shard has no next home")
            return False
        self._book(shard)
        until = self._clock.now() + WAIT_S
        self._send_to(entry, _Release(shard, epoch, then, timers, until))
        return True

    def _send_to(self, entry: Entry, release: _Release) -> None:
        """Send everything, as soon as the record of the next home is known."""
        shard, now, to = release.shard, self._clock.now(), entry.to
        if self._post.speaks(to) < PROTOCOL:
            if now >= release.until:
                self.lost(shard)
                why = "the old home does not know its next home"
                self.timer_losses.clear(shard, release.timers, why)
                self.timer_losses.tell(shard)
                release.then()
                return
            # The leader's word may be faster than the watch of this node.
            again = partial(self._send_to, entry, release)
            look = self._clock.call_at(min(now + LOOK_S, release.until), again)
            self._releases[shard] = (release.then, look)
            return
        pending = [
            CarriedTimer(
                *one.key, one.method, min(max(one.due_at - now, 0.0), MOST_LEFT_S), one.body
            )
            for one in release.timers.empty()
        ]
        book = self._book(shard)
        count = len(book)
        parts = book.hand_over(shard, release.epoch, self._next_id, pending)
        self._next_id += len(parts)
        timer = self._clock.call_at(now + WAIT_S, partial(self._give_up, shard))
        self._releases[shard] = (release.then, timer)
        for part in parts:
            self._awaited[part.id] = shard
            self._shelf.put(self._me, part, entry, now)
            self._post.carry(to, part)
        self._count("carry.sent", count)
        self._count("timer.sent", len(pending))

    def handing_over(self, shard: ShardKey) -> bool:
        """Whether the release of a shard waits for its next home."""
        return shard in self._releases

    def handed_over(self) -> Iterable[ShardKey]:
        """The shards whose releases wait for their next homes."""
        return self._releases

    def lost(self, shard: ShardKey) -> None:
        """The shard is no longer at home here, or in a new epoch: drop everything kept for it."""
        book = self._books.pop(shard, None)
        if book is not None:
            self._unconfirmed(shard, book)
            self._drop(book.clear())
        waiting = self._releases.pop(shard, None)
        if waiting is not None:
            waiting[1].cancel()

    # from others

    def on_carry(self, sender: Incarnation, carry: Carry, known: Entry) -> bool:
        """A part from the previous home; True if it may be answered by `CarryTaken`."""
        dropped = self._shelf.put(sender, carry, known, self._clock.now())
        self._drop(len(carry.entities) if dropped is None else dropped)
        self.timer_losses.tell(ShardKey(carry.role, carry.shard))
        return dropped is not None

    def on_taken(self, id: int) -> None:
        """The next home has a part."""
        shard = self._awaited.pop(id, None)
        book = None if shard is None else self._books.get(shard)
        if shard is not None and book is not None and book.taken(id):
            self._tell(shard)

    def see(self, shard: ShardKey, entry: Entry) -> None:
        """A newer entry of any shard, after its host saw it."""
        if len(self._shelf):
            self._may_be_lost(
                shard, self._shelf.strayed(shard, entry), "another node became its home"
            )
            self._drop(self._shelf.see(shard, entry))
            self.timer_losses.tell(shard)

    # in time

    def sweep(self, now: float) -> None:
        """Drop the fields of shards that did not come here in time."""
        if len(self._shelf):
            self._drop(self._shelf.expire(now))

    def close(self) -> None:
        """This incarnation is over: nothing more is told (L5)."""
        for shard in list(self._books):
            self.lost(shard)
        self._shelf.clear()
        self._awaited.clear()

    def _unpack(self, shard: ShardKey, epoch: int, timers: TimerBook) -> None:
        had = len(timers)
        bodies = self._shelf.take(shard, epoch, timers)
        if bodies:
            dropped = self._book(shard).fill(bodies.items())
            self._drop(dropped)
            self._meter.count("carry.taken", len(bodies) - dropped)
        self._count("timer.taken", len(timers) - had)

    def _book(self, shard: ShardKey) -> CarryBook:
        book = self._books.get(shard)
        if book is None:
            book = self._books[shard] = CarryBook(self._budget, self._most_bytes)
        return book

    def _give_up(self, shard: ShardKey) -> None:
        book = self._books.get(shard)
        if book is not None:
            self._unconfirmed(shard, book)
            self._meter.count("carry.unconfirmed", book.give_up())
        self._tell(shard)

    def _tell(self, shard: ShardKey) -> None:
        self._awaited = {id: of for id, of in self._awaited.items() if of != shard}
        self._books.pop(shard, None)
        waiting = self._releases.pop(shard, None)
        if waiting is not None:
            then, timer = waiting
            timer.cancel()
            then()

    def _unconfirmed(self, shard: ShardKey, book: CarryBook) -> None:
        timers = book.unconfirmed_timers
        if timers:
            self._may_be_lost(shard, timers, "the next home did not confirm them")
            self._shelf.unconfirmed(shard)

    def _may_be_lost(self, shard: ShardKey, timers: int, why: str) -> None:
        if timers:
            self._meter.count("timer.unconfirmed", timers)
            log.warning("%d timers of shard %s/%d may be lost: %s", timers, *shard, why)

    def _drop(self, entities: int) -> None:
        self._count("carry.dropped", entities)

    def _count(self, name: str, value: int) -> None:
        if value:
            self._meter.count(name, value)
