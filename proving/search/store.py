"""The store as a search sees it: what it holds at one revision, never changed in place."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass

from domicile.core.state.keys import block_key
from domicile.core.state.shardmap import FREE, Entry, decode_block
from domicile.core.state.txn import (
    Absent,
    At,
    Change,
    Changes,
    Committed,
    Condition,
    Conflict,
    Item,
    Listing,
    Outcome,
    Present,
    Put,
    Write,
)
from proving.search.scenario import ROLE

BLOCK = block_key(ROLE, 0)


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Everything stored, at one revision."""

    revision: int
    items: Mapping[bytes, Item]

    def key(self) -> Hashable:
        """What tells two snapshots apart."""
        return self.revision, tuple(self.items[key] for key in sorted(self.items))

    def holds(self, condition: Condition) -> bool:
        """Whether a condition holds."""
        item = self.items.get(condition.key)
        match condition:
            case At(_, revision):
                return item is not None and item.revision == revision
            case Absent():
                return item is None
            case Present():
                return item is not None

    def commit(
        self, conditions: Iterable[Condition], writes: Iterable[Write]
    ) -> tuple[Snapshot, Outcome, Changes]:
        """The store after a commit, what became of it, and what a watch will say."""
        for condition in conditions:
            if not self.holds(condition):
                return self, Conflict(condition.key), Changes(self.revision, ())
        revision = self.revision + 1
        items = dict(self.items)
        changes: list[Change] = []
        for write in writes:
            old = items.pop(write.key, None)
            if isinstance(write, Put):
                created = old.created if old else revision
                item = items[write.key] = Item(write.key, write.value, created, revision)
                changes.append(Change(write.key, item))
            elif old is not None:
                changes.append(Change(write.key, None))
        return Snapshot(revision, items), Committed(revision), Changes(revision, tuple(changes))

    def listing(self) -> Listing:
        """Everything at this revision (C2)."""
        return Listing(self.revision, tuple(self.items[key] for key in sorted(self.items)))

    def entries(self, shards: int) -> tuple[Entry, ...]:
        """The map, as many shards as there are."""
        item = self.items.get(BLOCK)
        stored = decode_block(item.value).entries if item is not None else ()
        return (*stored, *(FREE,) * (shards - len(stored)))
