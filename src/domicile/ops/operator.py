"""An operator's access to a store: reads a snapshot, makes one commit with its audit record.

Used by the commands of `ops.operate`. It asks no node. A commit is made at most once: after an
unknown outcome its audit record, whose key is unique, tells whether it happened (S1).
"""

from __future__ import annotations

import asyncio
import getpass
import os
import secrets
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime

from domicile.backends.registry import shown_url
from domicile.backends.wiring import WholeStore
from domicile.core.ids import EntityKey, Incarnation, ShardKey
from domicile.core.state.keys import KeyFamily, block_key, kick_key
from domicile.core.state.shardmap import decode_block
from domicile.core.state.txn import (
    Committed,
    Condition,
    Delete,
    Put,
    Unknown,
    Write,
    singly,
)
from domicile.diagnose.records import KICK_TTL_S, KickOutcome, KickRecord, decode_kick
from domicile.errors import StoreUnavailable
from domicile.ops.operator_commits import (
    AuditRecord,
    OperatorCommit,
    StoreSnapshot,
    audited,
    blocks,
    encode_audit,
    kick_commit,
    outdated_audits,
    raised_block,
)
from domicile.ops.status import existing, part, place_of
from domicile.ops.waiting import told_if_slow
from domicile.ports.health import Verdict
from domicile.ports.store import writes_one_key
from domicile.stores.namespace import Namespace

TRIES = 20
RETRY_S = 0.05
POLL_S = 0.05


@dataclass(frozen=True, slots=True)
class Kicking:
    """A kick that was prepared: `what` names it, `node` is the entity's home."""

    shard: ShardKey
    entity: EntityKey
    node: str
    what: str
    record: KickRecord


class Operator:
    """One operator at one cluster. Close it afterwards."""

    def __init__(self, whole: WholeStore, cluster: str) -> None:
        self.url, self.cluster = shown_url(whole.url), cluster
        self._whole = whole
        self._store = Namespace(whole.store, cluster)

    async def look(self) -> StoreSnapshot:
        """The cluster as stored now; raises `NoCluster`."""
        existing(self._whole.backend, self._whole.url)
        with told_if_slow(self.url):
            listing = await self._whole.store.list(b"")
        return StoreSnapshot(part(listing, self.url, self.cluster))

    async def do(
        self, command: str, make: Callable[[StoreSnapshot], OperatorCommit], agreed: str, why: str
    ) -> tuple[bytes, AuditRecord]:
        """Make a commit if it still is what the operator agreed to; returns its audit record."""
        if writes_one_key(self._store):
            return await self._do_singly(command, make, agreed, why)
        key, at = audit_key()
        for _ in range(TRIES):
            picture = await self.look()
            deed = _agreed(make(picture), agreed)
            record = AuditRecord(at, who(), command, deed.what, why)
            wanted = audited(deed, key, record, picture.audits)
            outcome = await self._store.commit(wanted.conditions, wanted.writes)
            if isinstance(outcome, Committed):
                return key, record
            if isinstance(outcome, Unknown) and await self._store.get(key) is not None:
                return key, record
            await asyncio.sleep(RETRY_S)
        raise StoreUnavailable(
            f"{command} was refused or unanswered {TRIES} times; see whether the store answers "
            "(domicile status), then repeat the command"
        )

    async def _do_singly(
        self, command: str, make: Callable[[StoreSnapshot], OperatorCommit], agreed: str, why: str
    ) -> tuple[bytes, AuditRecord]:
        """The same in a store that writes one key at a time (S8): the audit record comes first, so
        that an interrupted command leaves a trace. Every write may be made again."""
        key, at = audit_key()
        record = AuditRecord(at, who(), command, agreed, why)
        logged = begun = False
        for _ in range(TRIES):
            try:
                picture = await self.look()
                deed = _agreed(make(picture), agreed)
            except LookupError:
                if logged and not begun:
                    await self._write_one((), Delete(key))
                raise
            logged = logged or await self._write_one((), Put(key, encode_audit(record)))
            if logged:
                stored = await self._write_all(deed)
                if stored == len(deed.writes):
                    for old in outdated_audits(picture.audits):
                        await self._write_one((), Delete(old))
                    return key, record
                begun = begun or stored > 0
            await asyncio.sleep(RETRY_S)
        raise StoreUnavailable(
            f"{command} was refused or unanswered {TRIES} times; see whether the store answers "
            "(domicile status), then repeat the command"
        )

    async def _write_all(self, deed: OperatorCommit) -> int:
        """One write after the other; how many are stored. It stops at the first that is not."""
        # The last first: a dead process's record goes after everything else of it.
        commits = reversed(singly(deed.conditions, deed.writes))
        for done, (conditions, (write,)) in enumerate(commits):
            if not await self._write_one(conditions, write):
                return done
        return len(deed.writes)

    async def _write_one(self, conditions: Sequence[Condition], write: Write) -> bool:
        """One write; True if it is known to be stored."""
        outcome = await self._store.commit(conditions, (write,))
        if isinstance(outcome, Unknown):
            item = await self._store.get(write.key)
            return (None if item is None else item.value) == getattr(write, "value", None)
        return isinstance(outcome, Committed)

    async def raise_epochs(
        self, gap: int, agreed: str, why: str, told: Callable[[int, int], None]
    ) -> tuple[bytes, AuditRecord]:
        """S5: raise the epochs of all blocks, one after the other; `told` gets how many of how many
        are done."""

        def first(picture: StoreSnapshot) -> OperatorCommit:
            # The audit record comes first, so that an interrupted command leaves a trace, too.
            return OperatorCommit(agreed, (), ())

        key, record = await self.do("reset-history", first, agreed, why)
        await self.raise_blocks(blocks(await self.look()), gap, key, told)
        return key, record

    async def raise_blocks(
        self,
        wanted: Sequence[tuple[str, int]],
        gap: int,
        logged: bytes,
        told: Callable[[int, int], None],
    ) -> None:
        """Raise the epochs of these blocks, under the audit record of the command."""
        txn = f"reset-{KeyFamily.AUDIT.parse(logged)}"
        for number, block in enumerate(wanted):
            await self._raise_block(*block, gap, txn)
            told(number + 1, len(wanted))

    async def change(self, make: Callable[[StoreSnapshot], OperatorCommit]) -> None:
        """A commit that belongs to a command with an audit record; may be repeated."""
        what = ""
        for _ in range(TRIES):
            deed = make(await self.look())
            what = deed.what
            if writes_one_key(self._store):
                if await self._write_all(deed) == len(deed.writes):
                    return
            elif isinstance(await self._store.commit(deed.conditions, deed.writes), Committed):
                return
            await asyncio.sleep(RETRY_S)
        raise StoreUnavailable(
            f"the store did not take this in {TRIES} tries: {what}; see whether it answers "
            "(domicile status), then repeat the command"
        )

    async def _raise_block(self, role: str, number: int, gap: int, txn: str) -> None:
        for _ in range(TRIES):
            picture = await self.look()
            item = picture.item(block_key(role, number))
            if item is not None and decode_block(item.value).txn == txn:
                return
            deed = raised_block(picture, role, number, gap, txn)
            if isinstance(await self._store.commit(deed.conditions, deed.writes), Committed):
                return
            await asyncio.sleep(RETRY_S)
        raise StoreUnavailable(
            f"the epochs of {role}, block {number}, could not be raised in {TRIES} tries: some "
            "process still writes the map, or the store is away. Stop all nodes and repeat "
            "the command; blocks that were raised are raised once more, which does no harm"
        )

    async def prepare_kick(self, entity: EntityKey, role: str | None) -> Kicking:
        """Find an entity's home; raises `LookupError` if nothing of it can run."""
        picture = await self.look()
        place = place_of(picture.members, entity, role, self._dead)
        if place.node is None or place.state not in ("serving", "moving"):
            state = "at a node that is gone" if place.state == "lost" else place.state
            raise LookupError(
                f"nothing of {entity.type} {entity.id!r} runs: its shard "
                f"{place.role}/{place.shard} is {state}"
            )
        shard = ShardKey(place.role, place.shard)
        record = KickRecord(who(), f"kick-{secrets.token_hex(8)}")
        return Kicking(
            shard, entity, place.node, kick_commit(picture, shard, entity, record).what, record
        )

    async def kick(
        self, kicking: Kicking, why: str, wait_s: float, told: Callable[[str, float], None]
    ) -> tuple[tuple[bytes, AuditRecord], KickOutcome | None]:
        """Store the request and wait for the outcome; None if the home did not answer. No request
        is left.

        `told` gets the node and the seconds waited so far.
        """
        shard, entity, record = kicking.shard, kicking.entity, kicking.record
        await self._store.grant(record.lease, KICK_TTL_S)
        try:
            logged = await self.do(
                "kick", lambda now: kick_commit(now, shard, entity, record), kicking.what, why
            )
            began = time.monotonic()
            outcome: KickOutcome | None = None
            while outcome is None and time.monotonic() - began < wait_s:
                item = await self._store.get(kick_key(shard, entity))
                if item is None:
                    break
                outcome = decode_kick(item.value).outcome
                if outcome is None:
                    told(kicking.node, time.monotonic() - began)
                    await asyncio.sleep(POLL_S)
            return logged, outcome
        finally:
            await self._store.revoke(record.lease)

    def _dead(self, incarnation: Incarnation) -> bool:
        return self.verdict(incarnation) is Verdict.DEAD

    def verdict(self, incarnation: Incarnation) -> Verdict:
        """The verdict of the backend's health port on an incarnation (L6)."""
        health = self._whole.health
        return Verdict.UNKNOWN if health is None else health.verdict(incarnation)

    async def close(self) -> None:
        """Close the store."""
        await self._store.close()


def _agreed(deed: OperatorCommit, agreed: str) -> OperatorCommit:
    if deed.what != agreed:
        raise LookupError(
            f"the cluster moved on meanwhile: it was {agreed}, now it would be {deed.what}; "
            "nothing was done, repeat the command if you still want it"
        )
    return deed


def audit_key() -> tuple[bytes, str]:
    """A key for a new audit record, in the order of time, and that time."""
    at = datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
    return KeyFamily.AUDIT.key(f"{at}-{secrets.token_hex(2)}"), at


def who() -> str:
    """The operator, as `user@host`."""
    try:
        user = getpass.getuser()
    except (KeyError, OSError):
        user = str(os.getuid()) if hasattr(os, "getuid") else "unknown"
    return f"{user}@{socket.gethostname()}"
