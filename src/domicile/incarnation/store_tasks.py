"""Small store tasks of one incarnation: read a record again, keep its trials, end old leases.

Made by `RunningIncarnation`. Each task is one bounded call. A failed one is counted, and the caller
that wanted it tries again. `close` ends all of them and leaves no task behind.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from domicile.concurrency.task_set import TaskSet
from domicile.core.ids import Incarnation, ShardKey
from domicile.core.state.keys import (
    REWOUND_KEY,
    OffsetMark,
    block_key,
    encode_needs,
    encode_offset,
    needs_key,
    node_key,
    offset_key,
    trial_key,
)
from domicile.core.state.records import TrialRecord, encode_record
from domicile.core.state.shardmap import BLOCK_SIZE, Entry, decode_block
from domicile.core.state.txn import MAX_OPERATIONS, Committed, Conflict, Delete, Present, Put
from domicile.errors import StoreError, StoreUnavailable
from domicile.membership.store_calls import StoreCalls
from domicile.ports.meter import Meter
from domicile.ports.store import Store
from domicile.settings import Settings

TRIAL_TRIES = 3
OFFSET_TRIES = 3


class StoreTasks:
    """One incarnation's small tasks at the store."""

    def __init__(
        self,
        *,
        store: Store,
        meter: Meter,
        settings: Settings,
        me: Incarnation,
        learn: Callable[[ShardKey, tuple[Entry, ...]], None],
        needs: Mapping[ShardKey, tuple[str, ...]],
    ) -> None:
        self._calls = StoreCalls(store, settings.op_timeout_s)
        self._meter, self._me, self._learn = meter, me, learn
        self._known_needs = needs
        self._needs: dict[ShardKey, dict[str, None]] = {}
        self._noting = False
        self._marks: dict[ShardKey, OffsetMark] = {}
        self._marking = False
        self._reading: dict[bytes, None] = {}
        self._tasks: TaskSet[None] = TaskSet("domicile-store-task")

    def read_record(self, shard: ShardKey) -> None:
        """H7: a sender knows more than this owner; `learn` gets the first shard and its block."""
        key = block_key(shard.role, shard.shard // BLOCK_SIZE)
        if key not in self._reading:
            self._reading[key] = None
            self._tasks.spawn(self._read_block(key, shard))

    async def store_trials(self, record: TrialRecord) -> bool:
        """Store what this node has on trial (DX-20); True once it is stored.

        Only while the node is registered: nobody would delete what it stores later.
        """
        key = trial_key(self._me)
        write = Put(key, encode_record(record)) if record.trials else Delete(key)
        for _ in range(TRIAL_TRIES):
            try:
                commit = self._calls.store.commit((Present(node_key(self._me)),), (write,))
                outcome = await self._calls.bounded(commit)
                if isinstance(outcome, Committed | Conflict):
                    return isinstance(outcome, Committed)
            except StoreError:
                self._meter.count("trials.unwritten")
        return False

    def note_need(self, shard: ShardKey, kind: str) -> None:
        """DX-26: have it stored that a shard needs an entity type that this node lacks.

        May get lost; the caller repeats it until the store shows it.
        """
        self._needs.setdefault(shard, {})[kind] = None
        if not self._noting:
            self._noting = True
            self._tasks.spawn(self._write_needs())

    async def _write_needs(self) -> None:
        """Many shards at a time. Two owners in a row may write one key: a type that is overwritten
        is noted again, so the revision need not be a condition."""
        try:
            while self._needs:
                shards = list(self._needs)[: MAX_OPERATIONS - 1]
                writes = [
                    Put(
                        needs_key(shard),
                        encode_needs((*self._known_needs.get(shard, ()), *self._needs.pop(shard))),
                    )
                    for shard in shards
                ]
                await self._calls.commit_each((Present(node_key(self._me)),), writes)
        except StoreError:
            self._meter.count("needs.unwritten")
            self._needs.clear()
        finally:
            self._noting = False

    def note_offsets(self, marks: Mapping[ShardKey, OffsetMark]) -> None:
        """J11: have it stored how far shards are in the journal. May get lost."""
        self._marks |= marks
        if not self._marking:
            self._marking = True
            self._tasks.spawn(self._write_noted())

    async def _write_noted(self) -> None:
        try:
            while self._marks:
                marks, self._marks = self._marks, {}
                await self.store_offsets(marks)
        finally:
            self._marking = False

    async def store_offsets(self, marks: Mapping[ShardKey, OffsetMark]) -> None:
        """J11: store how far shards are in the journal. Failed tries are counted, then given up.

        A former owner's late note may replace a newer one. Then less is found until the next one.
        """
        shards = list(marks)
        for first in range(0, len(shards), MAX_OPERATIONS - 1):
            some = shards[first : first + MAX_OPERATIONS - 1]
            writes = [Put(offset_key(shard), encode_offset(marks[shard])) for shard in some]
            for _ in range(OFFSET_TRIES):
                try:
                    outcome = await self._calls.commit_each((Present(node_key(self._me)),), writes)
                    if isinstance(outcome, Committed | Conflict):
                        break
                except StoreError:
                    pass
                self._meter.count("offsets.unwritten")

    async def note_rewind(self) -> None:
        """S5: tell the coming leader that the store forgot commits, before this node registers."""
        commit = self._calls.store.commit((), (Put(REWOUND_KEY, self._me.encode()),))
        if not isinstance(await self._calls.bounded(commit), Committed):
            raise StoreUnavailable("the store did not take the note that it was rewound")

    async def revoke(self, leases: Iterable[str]) -> None:
        """L5: end what an earlier incarnation could not, so that nobody waits for its ttl."""
        for lease in leases:
            await self._calls.bounded(self._calls.store.revoke(lease))

    async def close(self) -> None:
        """End what is under way."""
        await self._tasks.close()

    async def _read_block(self, key: bytes, shard: ShardKey) -> None:
        try:
            item = await self._calls.bounded(self._calls.store.get(key))
        except StoreError:
            item = None
        finally:
            self._reading.pop(key, None)
        if item is not None:
            first = shard.shard // BLOCK_SIZE * BLOCK_SIZE
            self._learn(ShardKey(shard.role, first), decode_block(item.value).entries)
