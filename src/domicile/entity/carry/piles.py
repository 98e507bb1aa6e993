"""What entities take along on a planned move: their annotated fields, as bytes, for a short time.

`CarryBook` holds the fields that a shard at home here has to hand over or to use. `CarryShelf`
holds fields that arrived for shards that are not at home here yet. Nothing here does I/O:
`transfer` sends and answers. Two homes must never use the same fields (I1): they leave a book only
once its epoch is over, and the shelf only for the very next epoch.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from domicile.core.ids import EntityKey, Incarnation, ShardKey
from domicile.core.state.shardmap import Entry
from domicile.core.wire import Carried, Carry

PART_BYTES = 256 * 1024
"""About how many bytes one `Carry` holds, so that other messages get through between two of
them."""

OVERHEAD_BYTES = 64
"""Bytes counted for an entity besides its names and fields."""


class Budget:
    """I6: a limit on the bytes of all shards of a node together."""

    __slots__ = ("most_bytes", "used_bytes")

    def __init__(self, most_bytes: int) -> None:
        self.most_bytes = most_bytes
        self.used_bytes = 0


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
        self._awaited: dict[int, None] = {}

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

    def hand_over(self, shard: ShardKey, epoch: int, first_id: int) -> tuple[Carry, ...]:
        """All fields for the next home, in parts numbered from `first_id`; none stay here."""
        parts: list[list[Carried]] = []
        size = PART_BYTES
        for key, body in self._pile.empty().items():
            if size >= PART_BYTES:
                parts.append([])
                size = 0
            parts[-1].append(Carried(key.type, key.id, body))
            size += _size_bytes(key, body)
        made = tuple(
            Carry(*shard, epoch, first_id + at, tuple(part)) for at, part in enumerate(parts)
        )
        self._awaited = {carry.id: None for carry in made}
        return made

    def taken(self, id: int) -> bool:
        """The next home has that part; True if no other part is missing."""
        return self._awaited.pop(id, id) is None and not self._awaited

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
    ids: dict[int, None] = field(default_factory=dict[int, None])


class CarryShelf:
    """The receiver's side: fields that arrived for shards which are not at home here yet."""

    __slots__ = ("_batches", "_budget", "_keep_s", "_me", "_most_bytes")

    def __init__(self, me: Incarnation, budget: Budget, most_bytes: int, keep_s: float) -> None:
        self._me = me
        self._budget = budget
        self._most_bytes = most_bytes
        self._keep_s = keep_s
        self._batches: dict[ShardKey, _Batch] = {}

    def put(self, sender: Incarnation, carry: Carry, known: Entry, now: float) -> int | None:
        """Keep a part; returns how many of its entities had no room, or None if it is of no use
        here.

        `known` is the newest entry of that shard. A part is too late if another owner sent it, or
        if its epoch already has a successor.
        """
        epoch = carry.epoch
        if known.epoch > epoch or (known.epoch == epoch and known.owner != sender):
            return None
        shard = ShardKey(carry.role, carry.shard)
        batch = self._batches.get(shard)
        if batch is not None and (batch.epoch, batch.sender) != (epoch, sender):
            if batch.epoch >= epoch:
                return None
            self._drop(shard)
            batch = None
        if batch is None:
            pile = Pile(self._budget, self._most_bytes)
            batch = self._batches[shard] = _Batch(sender, epoch, now, pile)
        batch.until = now + self._keep_s
        if carry.id in batch.ids:
            return 0
        batch.ids[carry.id] = None
        return sum(
            not batch.pile.put(EntityKey(one.type, one.id), one.body) for one in carry.entities
        )

    def see(self, shard: ShardKey, entry: Entry) -> int:
        """A newer entry: drop fields that the next epoch here cannot use. How many entities had
        some."""
        batch = self._batches.get(shard)
        if batch is None or entry.epoch < batch.epoch:
            return 0
        if entry.epoch == batch.epoch:
            return self._drop(shard) if entry.owner != batch.sender else 0
        if entry.epoch == batch.epoch + 1 and entry.owner == self._me:
            return 0
        return self._drop(shard)

    def take(self, shard: ShardKey, epoch: int) -> dict[EntityKey, bytes]:
        """The shard is at home here in that epoch: the fields of its entities, once."""
        batch = self._batches.pop(shard, None)
        if batch is None:
            return {}
        bodies = batch.pile.empty()
        return bodies if epoch == batch.epoch + 1 else {}

    def expire(self, now: float) -> int:
        """Drop the fields of shards that did not come here in time. How many entities had some."""
        late = [shard for shard, batch in self._batches.items() if now >= batch.until]
        return sum(self._drop(shard) for shard in late)

    def clear(self) -> None:
        """This incarnation is over."""
        for shard in list(self._batches):
            self._drop(shard)

    def __len__(self) -> int:
        return len(self._batches)

    def _drop(self, shard: ShardKey) -> int:
        return len(self._batches.pop(shard).pile.empty())


def _size_bytes(key: EntityKey, body: bytes) -> int:
    return len(key.type) + len(key.id) + len(body) + OVERHEAD_BYTES
