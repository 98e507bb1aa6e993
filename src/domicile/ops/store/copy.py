"""Copy clusters from one store to another, while none of their processes runs.

Both stores are used through their port only, so any two kinds will do. A mark in each store keeps
processes away meanwhile, and from the source afterwards. Records of processes are never copied, nor
those of the agents of replica groups: they end with their leases first. An epoch never goes back at
the target, whatever it had before (I2). Everything may be repeated after a failure.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import msgspec
from msgspec import structs

from domicile.backends.registry import shown_url
from domicile.backends.wiring import WholeStore
from domicile.core.state.keys import MOVED_KEY, REWOUND_KEY, KeyFamily, classify
from domicile.core.state.records import MoveRecord, NodeRecord, decode_record, encode_record
from domicile.core.state.shardmap import FREE, Block, Entry, decode_block, encode_block
from domicile.core.state.txn import (
    MAX_COMMIT_BYTES,
    MAX_OPERATIONS,
    At,
    Committed,
    Condition,
    Conflict,
    Delete,
    Item,
    Put,
    Write,
)
from domicile.errors import StoreError
from domicile.failover.records import (
    GroupState,
    decode_group_record,
    parse_agent,
    parse_state_group,
)
from domicile.ops.operator import audit_key, who
from domicile.ops.operator_commits import AuditRecord
from domicile.ports.store import Store
from domicile.stores.namespace import Namespace

POLL_S = 0.2
TRIES = 10
RETRY_S = 0.2
SPARE_BYTES = 8 * 1024
"""Bytes of a commit that are left for its condition."""

PROCESSES = (KeyFamily.NODE, KeyFamily.CLIENT, KeyFamily.LEADER)
"""Records that stand while a process may act. Those of agents are of no family."""

STOP_AGENTS = (
    "an agent that stops closes its server, so the database is away until the agents run with the "
    "new store: stop those of the replicas first, that of the primary last. Pausing a group does "
    "not remove its agents"
)

LEFT_BEHIND = (
    *PROCESSES, KeyFamily.DEAD, KeyFamily.STUCK, KeyFamily.KICK, KeyFamily.REWOUND, KeyFamily.MOVED,
)  # fmt: skip
"""What belongs to processes of the source, or to its history, and is never copied."""


class CopyRefused(Exception):
    """The stores are not in a state in which a copy is safe. Nothing was copied, or not all."""


@dataclass(frozen=True, slots=True)
class CopyDone:
    """What was copied of one cluster."""

    cluster: str
    keys: int
    removed: int
    shards: int
    epoch: int
    """The highest epoch at the target."""


def clusters_in(items: Iterable[Item]) -> list[str]:
    """The clusters of a whole store, sorted."""
    return sorted({item.key.partition(b"/")[0].decode(errors="replace") for item in items})


def planned(source: Iterable[Item], target: Iterable[Item]) -> list[Write]:
    """What makes the target's cluster that of the source, with no epoch below either of them.

    Keys are without the cluster's prefix. Blocks of the target that the source lacks are kept:
    their epochs were used. So are audit records.
    """
    there = {item.key: item for item in target}
    writes: list[Write] = []
    for item in source:
        family = classify(item.key)
        before = there.pop(item.key, None)
        if family in LEFT_BEHIND or parse_agent(item.key) is not None:
            continue
        value = item.value
        if family is KeyFamily.BLOCK and before is not None:
            value = _risen(item.value, before.value)
        if before is None or before.value != value:
            writes.append(Put(item.key, value))
    for key in there:
        if classify(key) not in (KeyFamily.BLOCK, KeyFamily.AUDIT, KeyFamily.MOVED):
            writes.append(Delete(key))
    return writes


def _risen(value: bytes, before: bytes) -> bytes:
    """A block of the source, with the epochs of the target where they are higher."""
    new, old = decode_block(value), decode_block(before)
    entries: list[Entry] = []
    for index, entry in enumerate(new.entries):
        other = old.entries[index] if index < len(old.entries) else FREE
        epoch, change = max(entry.epoch, other.epoch), max(entry.change, other.change)
        risen = structs.replace(entry, epoch=epoch, change=change)
        # Where the two differ, greater than either: newer for everyone who knows one of them.
        entries.append(other if risen == other else structs.replace(risen, change=change + 1))
    entries += old.entries[len(new.entries) :]
    return before if tuple(entries) == old.entries else encode_block(Block(new.txn, tuple(entries)))


def groups_ahead(source: Iterable[Item], target: Iterable[Item]) -> list[str]:
    """The replica groups that went on in the target, for people.

    Their servers may have histories of epochs that the source does not know. A state with an
    earlier epoch would give an epoch a second history (F8).
    """
    there = _group_states(target)
    found: list[str] = []
    for group, state in _group_states(source).items():
        other = there.get(group)
        if other is not None and other.origin == state.origin and other.epoch > state.epoch:
            found.append(
                f"group {group!r} is there at epoch {other.epoch}, and here at epoch {state.epoch}"
            )
    return found


def _group_states(items: Iterable[Item]) -> dict[str, GroupState]:
    found: dict[str, GroupState] = {}
    for item in items:
        group = parse_state_group(item.key)
        if group is not None:
            try:
                found[group] = decode_group_record(item.value, GroupState)
            except ValueError as error:
                raise CopyRefused(
                    f"the state of group {group!r} can't be read ({error}): copy with the version "
                    "of Domicile that wrote it"
                ) from error
    return found


def batches(writes: Sequence[Write]) -> list[list[Write]]:
    """Writes in commits that every store takes (S7), with room for one condition."""
    found: list[list[Write]] = []
    size = MAX_COMMIT_BYTES
    for write in writes:
        more = len(write.key) + (len(write.value) if isinstance(write, Put) else 0)
        full = bool(found) and len(found[-1]) >= MAX_OPERATIONS - 1
        if full or size + more > MAX_COMMIT_BYTES - SPARE_BYTES:
            found.append([])
            size = 0
        found[-1].append(write)
        size += more
    return found


class ClusterCopy:
    """The copy of one cluster. `told` gets what is done now, and how much of it."""

    def __init__(
        self,
        source: WholeStore,
        target: WholeStore,
        cluster: str,
        *,
        replace: bool,
        wait_s: float,
        why: str,
        told: Callable[[str, int, int], None],
    ) -> None:
        self._from_url, self._to_url = shown_url(source.url), shown_url(target.url)
        self._source = Namespace(source.store, cluster)
        self._target = Namespace(target.store, cluster)
        self._cluster = cluster
        self._replace, self._wait_s, self._why, self._told = replace, wait_s, why, told
        self._id = secrets.token_hex(8)
        self._fresh = False
        """Whether the target has nothing of the cluster, or an unfinished copy from here."""

    async def run(self) -> CopyDone:
        """Copy and verify. `CopyRefused` says what is in the way; a `StoreError` that a store is
        away. In both cases the same command may be repeated."""
        for url, store in ((self._from_url, self._source), (self._to_url, self._target)):
            if store.one_key:
                raise CopyRefused(
                    f"a copy marks both stores with commits of several keys, and {url} commits one "
                    "key at a time: start the cluster anew in its new store, and keep its journal"
                )
        await self._alone(self._source, self._from_url)
        await self._alone(self._target, self._to_url)
        await self._check_target()
        sealed = await self._seal(self._source, "to", self._to_url)
        try:
            return await self._copied(sealed)
        except StoreError as error:
            raise type(error)(
                f"{error}. The cluster is closed now: repeat the command, or end the move with "
                f"`domicile store reopen {self._from_url}`"
            ) from error

    async def _copied(self, sealed: int) -> CopyDone:
        try:
            await self._check_other_store()
            items = await self._still_alone(self._source, self._from_url)
        except CopyRefused:
            await _committed(self._source, [At(MOVED_KEY, sealed)], [Delete(MOVED_KEY)])
            raise
        mark = await self._seal(self._target, "from", self._from_url)
        there = await self._still_alone(self._target, self._to_url)
        writes = planned(items, there)
        done = 0
        for batch in batches(writes):
            await _committed(self._target, [At(MOVED_KEY, mark)], batch)
            done += len(batch)
            self._told("copied", done, len(writes))
        found = await self._verify(items)
        await self._finish(mark, len(writes))
        removed = sum(isinstance(write, Delete) for write in writes)
        epochs = [entry.epoch for entry in found]
        return CopyDone(
            self._cluster, len(writes) - removed, removed, len(epochs), max(epochs, default=0)
        )

    async def _alone(self, store: Namespace, url: str) -> None:
        """Wait until no process is registered."""
        until = time.monotonic() + self._wait_s
        while True:
            items = (await store.list(b"")).items
            there = processes(items)
            if not there:
                return
            if time.monotonic() >= until:
                agents = any(parse_agent(item.key) is not None for item in items)
                raise CopyRefused(
                    f"{len(there)} processes of cluster {self._cluster!r} are registered in {url}: "
                    f"{_named(there)}. Stop them first; "
                    "records of processes that were killed vanish with their leases, or by "
                    f"`domicile declare-dead`{'. Beware: ' + STOP_AGENTS if agents else ''}"
                )
            self._told(
                f"waiting {self._wait_s:g} s at most for {_named(there)}: stop what runs; records "
                "of processes that were killed end by themselves",
                0, len(there),
            )  # fmt: skip
            # A store whose time stands still ends no lease (S4).
            if store.tick_s:
                await store.tick()
            await asyncio.sleep(min(POLL_S, store.tick_s or POLL_S))

    async def _still_alone(self, store: Namespace, url: str) -> tuple[Item, ...]:
        """What is stored under the mark. A process that came in between has seen it, or is seen."""
        items = (await store.list(b"")).items
        there = processes(items)
        if there:
            raise CopyRefused(
                f"{there[0]} joined cluster {self._cluster!r} in {url} meanwhile: stop it, then "
                "repeat the command"
            )
        return items

    async def _check_target(self) -> None:
        items = (await self._target.list(b"")).items
        mark = _mark(items)
        unfinished = mark is not None and mark.direction == "from" and mark.store == self._from_url
        self._fresh = not items or unfinished
        if self._fresh or self._replace:
            ahead = groups_ahead((await self._source.list(b"")).items, items)
            if ahead:
                raise CopyRefused(
                    f"{ahead[0]}: what is in {self._from_url} is the past of that replica group. "
                    f"Copy from {self._to_url} instead, or name another store"
                )
            return
        raise CopyRefused(
            f"{self._to_url} has a cluster {self._cluster!r} already, with {len(items)} keys: say "
            "--replace to put the copy in its place (epochs never go back), or name another store"
        )

    async def _check_other_store(self) -> None:
        mark = _mark((await self._target.list(b"")).items)
        if mark is not None and mark.id == self._id:
            raise CopyRefused(f"{self._from_url} and {self._to_url} are the same store")

    async def _seal(self, store: Namespace, direction: str, other: str) -> int:
        """Keep processes away; returns the revision of the mark."""
        mark = MoveRecord("to" if direction == "to" else "from", other, self._id)
        before = _mark((await store.list(MOVED_KEY)).items)
        if direction == "to" and before is not None and before.direction == "from":
            raise CopyRefused(
                f"{self._from_url} is itself an unfinished copy of {before.store}; finish that one"
            )
        if direction == "to" and before is not None and before.store != other:
            raise CopyRefused(
                f"cluster {self._cluster!r} was moved from {self._from_url} to {before.store} "
                "already: copy from there, or end that move with `domicile store reopen`"
            )
        if direction == "to" and before is not None and not self._fresh:
            raise CopyRefused(
                f"cluster {self._cluster!r} was copied to {other} already, and may have gone on "
                f"there: what is in {self._from_url} is the past. If it is not, end that move with "
                "`domicile store reopen`, then repeat the command"
            )
        key, at = audit_key()
        what = f"cluster copied {direction} {other}"
        record = AuditRecord(at, who(), "store copy", what, self._why)
        writes = [Put(MOVED_KEY, encode_record(mark)), Put(key, msgspec.json.encode(record))]
        return await _committed(store, [], writes)

    async def _verify(self, items: tuple[Item, ...]) -> list[Entry]:
        """Compare both stores; returns the entries of the target's map."""
        self._told("comparing", 0, 1)
        if await self._still_alone(self._source, self._from_url) != items:
            raise CopyRefused(f"{self._from_url} changed meanwhile; repeat the command")
        there = await self._still_alone(self._target, self._to_url)
        wrong = [write.key for write in planned(items, there)]
        entries: list[Entry] = []
        for item in there:
            if classify(item.key) is KeyFamily.BLOCK:
                entries += decode_block(item.value).entries
        if wrong:
            raise CopyRefused(
                f"{len(wrong)} keys of {self._to_url} are not as they must be, the first is "
                f"{wrong[0]!r}; repeat the command"
            )
        self._told("comparing", 1, 1)
        return entries

    async def _finish(self, mark: int, keys: int) -> None:
        """Let processes use the target. Its coordinator waits a ttl before it places anything: a
        process of the source that is stopped now has ended by then (S5)."""
        key, at = audit_key()
        what = f"{keys} keys copied from {self._from_url}"
        record = AuditRecord(at, who(), "store copy", what, self._why)
        await _committed(
            self._target,
            [At(MOVED_KEY, mark)],
            [
                Delete(MOVED_KEY),
                Put(REWOUND_KEY, self._id.encode()),
                Put(key, msgspec.json.encode(record)),
            ],
        )


async def reopen(whole: WholeStore, cluster: str, why: str) -> MoveRecord:
    """Remove the mark of a copy; returns what it said. `CopyRefused`: there is none, or a half."""
    store = Namespace(whole.store, cluster)
    item = await store.get(MOVED_KEY)
    mark = None if item is None else _mark((item,))
    url = shown_url(whole.url)
    if item is None or mark is None:
        raise CopyRefused(f"cluster {cluster!r} in {url} was not moved: nothing to do")
    if mark.direction == "from":
        raise CopyRefused(
            f"cluster {cluster!r} in {url} is an unfinished copy of {mark.store}: run `domicile "
            "store copy` again, or name another store"
        )
    key, at = audit_key()
    record = AuditRecord(at, who(), "store reopen", f"no longer moved to {mark.store}", why)
    await _committed(
        store,
        [At(MOVED_KEY, item.revision)],
        [Delete(MOVED_KEY), Put(key, msgspec.json.encode(record))],
    )
    return mark


def processes(items: Iterable[Item]) -> list[str]:
    """The processes that are registered, for people."""
    found: list[str] = []
    for item in items:
        family = classify(item.key)
        if family is KeyFamily.NODE:
            try:
                found.append(f"node {decode_record(item.value, NodeRecord).node}")
            except msgspec.MsgspecError:
                found.append(f"node {item.key.decode(errors='replace')}")
        elif family is KeyFamily.CLIENT:
            found.append("a client")
        elif family is KeyFamily.LEADER:
            found.append("a coordinator")
        elif (agent := parse_agent(item.key)) is not None:
            group, server = agent
            found.append(f"the agent of server {server!r} of group {group!r}")
    return found


def _named(there: Sequence[str]) -> str:
    return f"{', '.join(there[:5])}{', …' if len(there) > 5 else ''}"


def _mark(items: Iterable[Item]) -> MoveRecord | None:
    for item in items:
        if item.key == MOVED_KEY:
            try:
                return decode_record(item.value, MoveRecord)
            except msgspec.MsgspecError as error:
                raise CopyRefused(f"the mark of an earlier copy can't be read ({error})") from error
    return None


async def _committed(store: Store, conditions: Sequence[Condition], writes: Sequence[Write]) -> int:
    """Make a commit that may be made twice; returns its revision."""
    unsure = False
    for _ in range(TRIES):
        outcome = await store.commit(conditions, writes)
        if isinstance(outcome, Committed):
            return outcome.revision
        if isinstance(outcome, Conflict):
            if unsure and (found := await _landed(store, writes)):
                return found
            raise CopyRefused(
                "another copy or reopening of this cluster came in between; repeat the command"
            )
        unsure = True
        await asyncio.sleep(RETRY_S)
    raise StoreError("the store left open what became of a commit; repeat the command")


async def _landed(store: Store, writes: Sequence[Write]) -> int:
    """The revision of a commit of unknown outcome, if it happened; otherwise 0."""
    revision = 0
    for write in writes:
        item = await store.get(write.key)
        if isinstance(write, Put) and (item is None or item.value != write.value):
            return 0
        revision = max(revision, 0 if item is None else item.revision)
    return revision
