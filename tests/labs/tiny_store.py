"""A store for tests of the coordinator: conditional commits and a log, nothing else."""

from __future__ import annotations

from collections.abc import Iterable

from domicile.core.ids import Incarnation
from domicile.core.state.keys import CONFIG_KEY, LEADER_KEY, block_key, node_key
from domicile.core.state.records import ConfigRecord, LeaderRecord, NodeRecord, encode_record
from domicile.core.state.shardmap import Block, Entry, decode_block, encode_block
from domicile.core.state.txn import (
    Absent,
    At,
    Change,
    Changes,
    Committed,
    Condition,
    Conflict,
    Delete,
    Item,
    Listing,
    Outcome,
    Present,
    Put,
    Write,
)

BLOCK = block_key("r", 0)


class TinyStore:
    """Conditional commits and a log, nothing else."""

    def __init__(self, shards: int) -> None:
        self.revision = 0
        self.items: dict[bytes, Item] = {}
        self.log: list[Changes] = []
        self.put(CONFIG_KEY, encode_record(ConfigRecord({"r": shards})))

    def holds(self, condition: Condition) -> bool:
        item = self.items.get(condition.key)
        match condition:
            case At(_, revision):
                return item is not None and item.revision == revision
            case Absent():
                return item is None
            case Present():
                return item is not None

    def commit(self, conditions: Iterable[Condition], writes: Iterable[Write]) -> Outcome:
        for condition in conditions:
            if not self.holds(condition):
                return Conflict(condition.key)
        self.revision += 1
        changes: list[Change] = []
        for write in writes:
            old = self.items.pop(write.key, None)
            if isinstance(write, Put):
                created = old.created if old else self.revision
                item = Item(write.key, write.value, created, self.revision)
                self.items[write.key] = item
                changes.append(Change(write.key, item))
            elif old is not None:
                changes.append(Change(write.key, None))
        self.log.append(Changes(self.revision, tuple(changes)))
        return Committed(self.revision)

    def put(self, key: bytes, value: bytes) -> int:
        self.commit((), (Put(key, value),))
        return self.revision

    def delete(self, key: bytes) -> None:
        self.commit((), (Delete(key),))

    def join(
        self,
        inc: Incarnation,
        status: str = "up",
        node: str = "",
        version: str = "",
        types: tuple[str, ...] = (),
    ) -> None:
        node = node or f"node-{inc}"
        record = NodeRecord(node, inc, "x", ("r",), types, 6.0, version=version, status=status)
        self.put(node_key(inc), encode_record(record))

    def lead(self, inc: Incarnation) -> int:
        return self.put(LEADER_KEY, encode_record(LeaderRecord(inc, f"node-{inc}")))

    def listing(self) -> Listing:
        return Listing(self.revision, tuple(self.items[key] for key in sorted(self.items)))

    def entry(self, shard: int) -> Entry:
        item = self.items.get(block_key("r", shard // 64))
        return decode_block(item.value).entries[shard % 64] if item else Entry()

    def write(self, *entries: Entry) -> None:
        self.put(BLOCK, encode_block(Block("seed", entries)))
