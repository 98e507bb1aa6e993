"""What entities take along on a planned move: their annotated fields, as bytes, for a while.

`CarryBook` holds what a shard at home here has to give or to use,
`CarryShelf` what arrived for shards that are not at home here yet. All without I/O: `transfer`
sends and answers. Two homes must never use the same fields (I1): they leave a book only once its
epoch is over, and the shelf only for the very next epoch.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from domicile.core.ids import EntityKey, Incarnation, ShardKey
from domicile.core.state.shardmap import Entry
from domicile.core.wire import Carried, Carry

PART_BYTES = 256 * 1024
"""About how much one `Carry` holds, so that other messages get through between two of them."""

OVERHEAD_BYTES = 64
"""What an entity weighs beyond its names and fields."""


class Budget:
    """I6: bytes of all shards of a node together."""

    __slots__ = ("most_bytes", "used_bytes")

    def __init__(self, most_bytes: int) -> None:
        self.most_bytes = most_bytes
        self.used_bytes = 0


class Pile:
    """Entities' bytes within a limit of their own and a common one."""

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
        """Keep an entity's bytes no more."""
        body = self._bodies.pop(key, None)
        if body is not None:
            size = _size_bytes(key, body)
            self.used_bytes -= size
            self._budget.used_bytes -= size

    def empty(self) -> dict[EntityKey, bytes]:
        """Everything; none of it stays."""
        bodies, self._bodies = self._bodies, {}
        self._budget.used_bytes -= self.used_bytes
        self.used_bytes = 0
        return bodies

    def __len__(self) -> int:
        return len(self._bodies)


class CarryBook:
    """The owner's side of one shard: what its entities took along, or will.

    `keep` what a draining shard's stopped entity holds; `get` it for one that starts here, and
    `drop` it once that one runs. `hand_over` only when this home is over for good.
    """

    __slots__ = ("_awaited", "_pile")

    def __init__(self, budget: Budget, most_bytes: int) -> None:
        self._pile = Pile(budget, most_bytes)
        self._awaited: dict[int, None] = {}

    def keep(self, key: EntityKey, body: bytes) -> bool:
        """What a stopped entity held; False if there is no room, so that it will start fresh."""
        return self._pile.put(key, body)

    def get(self, key: EntityKey) -> bytes | None:
        """What an entity that starts here took along; it stays until that one runs."""
        return self._pile.get(key)

    def drop(self, key: EntityKey) -> None:
        """The entity runs here: from now on only it knows."""
        self._pile.drop(key)

    def fill(self, bodies: Iterable[tuple[EntityKey, bytes]]) -> int:
        """What came from the home before this one. How many had no room."""
        return sum(not self._pile.put(key, body) for key, body in bodies)

    def hand_over(self, shard: ShardKey, epoch: int, first_id: int) -> tuple[Carry, ...]:
        """All of it for the next home, in parts numbered from `first_id`; nothing stays here."""
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
        """The next home has that part; True if it was the last one that was missing."""
        return self._awaited.pop(id, id) is None and not self._awaited

    def give_up(self) -> int:
        """Wait for nothing any more. How many parts were missing."""
        missing = len(self._awaited)
        self._awaited = {}
        return missing

    def clear(self) -> int:
        """The home is lost: nothing here may be used. How many entities that were."""
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
        """Keep a part; how many of its entities had no room. None if it is of no use here.

        `known` is the newest entry of that shard: a part of another owner or of an epoch that has
        a successor already comes too late.
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
        """A newer entry: what belongs to nobody's next epoch goes. How many entities that were."""
        batch = self._batches.get(shard)
        if batch is None or entry.epoch < batch.epoch:
            return 0
        if entry.epoch == batch.epoch:
            return self._drop(shard) if entry.owner != batch.sender else 0
        if entry.epoch == batch.epoch + 1 and entry.owner == self._me:
            return 0
        return self._drop(shard)

    def take(self, shard: ShardKey, epoch: int) -> dict[EntityKey, bytes]:
        """The shard is at home here in that epoch: what its entities took along, once."""
        batch = self._batches.pop(shard, None)
        if batch is None:
            return {}
        bodies = batch.pile.empty()
        return bodies if epoch == batch.epoch + 1 else {}

    def expire(self, now: float) -> int:
        """Drop what nobody came for. How many entities that were."""
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
