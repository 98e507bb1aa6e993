"""What entities take along on a planned move: their annotated fields and pending timers, as bytes.

`CarryBook` holds the fields that a shard at home here has to hand over or to use. `CarryShelf`
holds fields and timers that arrived for shards that are not at home here yet. Nothing here does
I/O: `transfer` sends and answers. Two homes must never use the same fields or timers (I1): they
leave a book only once its epoch is over, and the shelf only for the very next epoch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from domicile.core.ids import NOBODY, EntityKey, Incarnation, ShardKey
from domicile.core.state.shardmap import Entry
from domicile.core.wire import Carried, CarriedTimer, Carry
from domicile.entity.carry.budget import Budget
from domicile.entity.carry.timers import TimerBook, TimerLosses

PART_BYTES = 256 * 1024
"""About how many bytes one `Carry` holds, so that other messages get through between two of
them."""

OVERHEAD_BYTES = 64
"""Bytes counted for an entity besides its names and fields."""

NO_ROOM = "what its shard keeps exceeds carry_bytes"
"""Why a timer is lost if a limit is reached (I6)."""


class Pile:
    """Entities' bytes, within a limit of their own and a common one."""

    __slots__ = ("_bodies", "_budget", "_most_bytes", "used_bytes")

    def __init__(self, budget: Budget, most_bytes: int) -> None:
        self._budget = budget
        self._most_bytes = most_bytes
        self._bodies: dict[EntityKey, bytes] = {}
        self.used_bytes = 0

    def put(self, key: EntityKey, body: bytes) -> bool:
        """Keep an entity's bytes in place of earlier ones; False if there is no room for them."""
        self.drop(key)
        size = _size_bytes(key, body)
        budget = self._budget
        if self.used_bytes + size > self._most_bytes:
            return False
        if budget.used_bytes + size > budget.most_bytes:
            return False
        self._bodies[key] = body
        self.used_bytes += size
        budget.used_bytes += size
        return True

    def get(self, key: EntityKey) -> bytes | None:
        """An entity's bytes; they stay."""
        return self._bodies.get(key)

    def drop(self, key: EntityKey) -> None:
        """Drop an entity's bytes."""
        body = self._bodies.pop(key, None)
        if body is not None:
            size = _size_bytes(key, body)
            self.used_bytes -= size
            self._budget.used_bytes -= size

    def empty(self) -> dict[EntityKey, bytes]:
        """Return all bytes and keep none."""
        bodies, self._bodies = self._bodies, {}
        self._budget.used_bytes -= self.used_bytes
        self.used_bytes = 0
        return bodies

    def __len__(self) -> int:
        return len(self._bodies)


class CarryBook:
    """The owner's side of one shard: the fields that its entities brought, or will take along.

    `keep` stores the fields of a stopped entity of a draining shard. `get` reads them for an entity
    that starts here, and `drop` removes them once it runs. `hand_over` only when this epoch is
    over.
    """

    __slots__ = ("_awaited", "_pile")

    def __init__(self, budget: Budget, most_bytes: int) -> None:
        self._pile = Pile(budget, most_bytes)
        self._awaited: dict[int, int] = {}
        """The parts that the next home has not confirmed, each with the number of its timers."""

    def keep(self, key: EntityKey, body: bytes) -> bool:
        """Keep a stopped entity's fields; False if there is no room, so that it will start
        fresh."""
        return self._pile.put(key, body)

    def get(self, key: EntityKey) -> bytes | None:
        """The fields of an entity that starts here; they stay until it runs."""
        return self._pile.get(key)

    def drop(self, key: EntityKey) -> None:
        """The entity runs here: from now on only the entity holds its fields."""
        self._pile.drop(key)

    def fill(self, bodies: Iterable[tuple[EntityKey, bytes]]) -> int:
        """Take the fields that came from the previous home. How many had no room."""
        return sum(not self._pile.put(key, body) for key, body in bodies)

    def hand_over(
        self, shard: ShardKey, epoch: int, first_id: int, timers: Iterable[CarriedTimer] = ()
    ) -> tuple[Carry, ...]:
        """All fields and these timers for the next home, in parts numbered from `first_id`; no
        fields stay here."""
        parts: list[tuple[list[Carried], list[CarriedTimer]]] = []
        size = PART_BYTES

        def part(more_bytes: int) -> tuple[list[Carried], list[CarriedTimer]]:
            nonlocal size
            if size >= PART_BYTES:
                parts.append(([], []))
                size = 0
            size += more_bytes
            return parts[-1]

        for key, body in self._pile.empty().items():
            part(_size_bytes(key, body))[0].append(Carried(key.type, key.id, body))
        for timer in timers:
            key = EntityKey(timer.type, timer.id)
            part(len(timer.method) + _size_bytes(key, timer.body))[1].append(timer)
        made = tuple(
            Carry(*shard, epoch, first_id + at, tuple(entities), tuple(pending))
            for at, (entities, pending) in enumerate(parts)
        )
        self._awaited = {carry.id: len(carry.timers) for carry in made}
        return made

    def taken(self, id: int) -> bool:
        """The next home has that part; True if no other part is missing."""
        return self._awaited.pop(id, None) is not None and not self._awaited

    @property
    def unconfirmed_timers(self) -> int:
        """How many timers are in parts that the next home has not confirmed."""
        return sum(self._awaited.values())

    def give_up(self) -> int:
        """Stop waiting for the next home. How many parts were missing."""
        missing = len(self._awaited)
        self._awaited = {}
        return missing

    def clear(self) -> int:
        """The home is lost: drop all fields. How many entities had some."""
        self.give_up()
        return len(self._pile.empty())

    def __len__(self) -> int:
        return len(self._pile)


@dataclass(slots=True)
class _Batch:
    sender: Incarnation
    epoch: int
    until: float
    pile: Pile
    timers: TimerBook
    to: Incarnation = NOBODY
    """Of a copy: the node that the parts were sent to. Nobody once it is told that it has not
    confirmed them."""
    ids: dict[int, None] = field(default_factory=dict[int, None])


class CarryShelf:
    """The receiver's side: fields and timers that arrived for shards which are not at home here
    yet.

    A home also puts a copy of what it has sent here: if the coordinator changes its mind after the
    release, the next epoch may be at the same home again.
    """

    __slots__ = ("_batches", "_budget", "_keep_s", "_losses", "_me", "_most_bytes", "_new_timers")

    def __init__(
        self,
        me: Incarnation,
        budget: Budget,
        most_bytes: int,
        keep_s: float,
        new_timers: Callable[[], TimerBook],
        losses: TimerLosses,
    ) -> None:
        self._me = me
        self._budget = budget
        self._most_bytes = most_bytes
        self._keep_s = keep_s
        self._new_timers = new_timers
        self._losses = losses
        self._batches: dict[ShardKey, _Batch] = {}

    def put(self, sender: Incarnation, carry: Carry, known: Entry, now: float) -> int | None:
        """Keep a part; returns how many of its entities had no room, or None if it is of no use
        here.

        `known` is the newest entry of that shard. A part is too late if another owner sent it, or
        if its epoch already has a successor.
        """
        shard = ShardKey(carry.role, carry.shard)
        batch = self._batch(shard, sender, carry.epoch, known, now)
        if batch is None:
            if known.epoch == carry.epoch + 1 and known.owner == sender:
                return None  # The sender has it back, and uses its copy.
            for timer in carry.timers:
                key = EntityKey(timer.type, timer.id)
                self._losses.add(shard, key, timer.method, "it came after its shard had moved on")
            return None
        batch.until = now + self._keep_s
        if carry.id in batch.ids:
            return 0
        batch.ids[carry.id] = None
        for timer in carry.timers:
            key = EntityKey(timer.type, timer.id)
            if not batch.timers.keep(key, timer.method, now + timer.left_s, timer.body):
                self._losses.add(shard, key, timer.method, NO_ROOM)
        return sum(
            not batch.pile.put(EntityKey(one.type, one.id), one.body) for one in carry.entities
        )

    def _batch(
        self, shard: ShardKey, sender: Incarnation, epoch: int, known: Entry, now: float
    ) -> _Batch | None:
        if known.epoch > epoch or (known.epoch == epoch and known.owner != sender):
            return None
        batch = self._batches.get(shard)
        if batch is not None and (batch.epoch, batch.sender) != (epoch, sender):
            if batch.epoch >= epoch:
                return None
            self._drop(shard)
            batch = None
        if batch is None:
            pile = Pile(self._budget, self._most_bytes)
            to = known.to if sender == self._me else NOBODY
            batch = _Batch(sender, epoch, now, pile, self._new_timers(), to)
            self._batches[shard] = batch
        return batch

    def strayed(self, shard: ShardKey, entry: Entry) -> int:
        """How many timers, of which a copy is here, went to a node that did not become the home:
        another one has the next epoch. If that node is dead, nobody else counts them."""
        batch = self._batches.get(shard)
        if batch is None or batch.to == NOBODY or entry.epoch != batch.epoch + 1:
            return 0
        return 0 if entry.owner in (self._me, batch.to) else len(batch.timers)

    def unconfirmed(self, shard: ShardKey) -> None:
        """It is told already that the next home did not confirm what was sent."""
        batch = self._batches.get(shard)
        if batch is not None:
            batch.to = NOBODY

    def see(self, shard: ShardKey, entry: Entry) -> int:
        """A newer entry: drop what the next epoch here cannot use. How many entities had fields."""
        batch = self._batches.get(shard)
        if batch is None or entry.epoch < batch.epoch:
            return 0
        if entry.epoch == batch.epoch:
            return self._drop(shard) if entry.owner != batch.sender else 0
        if entry.epoch == batch.epoch + 1 and entry.owner == self._me:
            return 0
        # The sender has it back, and its copy is the one that counts.
        back = entry.epoch == batch.epoch + 1 and entry.owner == batch.sender
        return self._drop(shard, is_copy=back)

    def take(self, shard: ShardKey, epoch: int, timers: TimerBook) -> dict[EntityKey, bytes]:
        """The shard is at home here in that epoch: the fields of its entities, once. Their timers
        go into `timers`."""
        batch = self._batches.get(shard)
        if batch is None:
            return {}
        if epoch != batch.epoch + 1:
            self._drop(shard)
            return {}
        del self._batches[shard]
        timers.adopt(batch.timers)
        return batch.pile.empty()

    def expire(self, now: float) -> int:
        """Drop what is kept for shards that did not come here in time. How many entities had
        fields."""
        late = [shard for shard, batch in self._batches.items() if now >= batch.until]
        return sum(self._drop(shard) for shard in late)

    def clear(self) -> None:
        """This incarnation is over."""
        for shard in list(self._batches):
            self._drop(shard)

    def __len__(self) -> int:
        return len(self._batches)

    def _drop(self, shard: ShardKey, *, is_copy: bool = False) -> int:
        batch = self._batches.pop(shard)
        entities = len(batch.pile.empty())
        if is_copy or batch.sender == self._me:
            batch.timers.empty()
            return 0
        self._losses.clear(shard, batch.timers, "its shard did not come to the node that has it")
        return entities


def _size_bytes(key: EntityKey, body: bytes) -> int:
    return len(key.type) + len(key.id) + len(body) + OVERHEAD_BYTES
