"""`domicile journal accept`: let a restored or new journal take the place of the one before (J11).

Decides from the store and the journal what is lost and what has to be written. The order of writes
matters: first the fences rise, so that a process which still holds a shard of the old journal can't
write to this one; then the journal gets a history of its own, and the store's epochs rise above
those that were used; the store learns the history last. Until then nodes refuse to start, and the
command can be repeated after any interruption.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from random import SystemRandom
from typing import Protocol

import msgspec

from domicile.core.ids import ShardKey, new_incarnation
from domicile.core.state.keys import CONFIG_KEY, OffsetMark, encode_offset, offset_key
from domicile.core.state.records import encode_record
from domicile.core.state.txn import At, Put
from domicile.errors import ConfigError
from domicile.ops.operator import Operator
from domicile.ops.operator_commits import AuditRecord, OperatorCommit, StoreSnapshot, blocks
from domicile.ports.journal import (
    Claim,
    ComparableJournal,
    FenceSeen,
    InspectableJournal,
)

CLAIMS = 256
"""Fences that are raised in one call."""

MARKS = 32
"""Offsets that are stored in one commit."""


class AcceptableJournal(ComparableJournal, InspectableJournal, Protocol):
    """A journal that can take the place of another one."""


@dataclass(frozen=True, slots=True)
class Acceptance:
    """What would be done, and what is missing."""

    roles: tuple[str, ...]
    known: Mapping[str, str]
    """The history that the store knows for each role; a role that has none yet is left out."""
    history: str
    fences: tuple[FenceSeen, ...]
    missing: Mapping[ShardKey, int]
    """How many offsets of a shard are not in this journal, as far as the store knows."""

    @property
    def is_needed(self) -> bool:
        """Whether a node would refuse this journal now."""
        return bool(self.missing) or any(self.known.get(r) != self.history for r in self.roles)

    @property
    def what(self) -> str:
        """What is agreed to; another journal or another state of it is another text."""
        return f"journal {self.history} for roles {', '.join(self.roles)}"


async def look_at_journal(
    picture: StoreSnapshot, journal: AcceptableJournal, wanted: Sequence[str]
) -> Acceptance:
    """What accepting a journal means for these roles, or for those that the store names."""
    config = picture.members.config
    if config is None or not config.shards:
        raise LookupError("the cluster has no roles yet: its first node takes any journal")
    unknown = [role for role in wanted if role not in config.shards]
    if unknown:
        raise ConfigError(
            f"there is no role {unknown[0]!r}; known ones: {', '.join(sorted(config.shards))}"
        )
    if not wanted and len(set(config.journals.values())) > 1:
        shown = ", ".join(f"{role} ({one})" for role, one in config.journals.items())
        raise ConfigError(
            f"the roles of this cluster have different journals: {shown}. Say with --role which of "
            "them this journal is for"
        )
    roles = tuple(sorted(wanted or config.journals or config.shards))
    history = await journal.history()
    shares = [role for role, one in config.journals.items() if one == history and role not in roles]
    if shares:
        # The journal gets a new history, so all of its roles have to learn it.
        raise ConfigError(
            f"role {shares[0]!r} keeps its events in this journal, too: say --role {shares[0]} as "
            "well"
        )
    fences = tuple(one for one in await journal.fences() if one.role in roles and not one.layout)
    offsets = {ShardKey(one.role, one.shard): one.offset for one in fences}
    missing = {
        shard: mark.offset - offsets.get(shard, 0)
        for shard, mark in sorted(picture.members.offsets.items())
        if shard.role in roles
        and mark.history == config.journals.get(shard.role, mark.history)
        and mark.offset > offsets.get(shard, 0)
    }
    known = {role: config.journals[role] for role in roles if role in config.journals}
    return Acceptance(roles, known, history, fences, missing)


async def accept_journal(
    operator: Operator,
    journal: AcceptableJournal,
    agreed: Acceptance,
    why: str,
    told: Callable[[int, int], None],
) -> tuple[bytes, AuditRecord]:
    """Do it; returns the audit record, which is written first."""
    picture = await operator.look()
    found = await look_at_journal(picture, journal, agreed.roles)
    key, record = await operator.do(
        "journal accept", lambda _: OperatorCommit(found.what, (), ()), agreed.what, why
    )
    gap = await _raise_fences(picture, journal, found)
    history = secrets.token_hex(16)
    await journal.renew(history)
    wanted = [block for block in blocks(picture) if block[0] in found.roles]
    await operator.raise_blocks(wanted, gap, key, told)
    marks = [
        (ShardKey(one.role, one.shard), OffsetMark(history, one.offset))
        for one in await journal.fences()
        if one.role in found.roles and not one.layout and one.offset
    ]
    for first in range(0, len(marks), MARKS):
        some = marks[first : first + MARKS]
        puts = tuple(Put(offset_key(shard), encode_offset(mark)) for shard, mark in some)
        deed = OperatorCommit(f"offsets of history {history}", (), puts)
        await operator.change(lambda _, deed=deed: deed)  # type: ignore[misc]
    await operator.change(lambda now: _agreed_history(now, found.roles, history))
    return key, record


async def _raise_fences(
    picture: StoreSnapshot, journal: AcceptableJournal, found: Acceptance
) -> int:
    """Raise every fence above the store's epoch and its own; by how much those of the store rise.

    The claims are those of an incarnation that nobody is: no owner before can write any more (I2).
    """
    fences = {ShardKey(one.role, one.shard): one.epoch for one in found.fences}
    shards = [
        ShardKey(role, shard) for role in found.roles for shard in range(picture.shards(role))
    ]
    epochs = {shard: picture.entry(shard).epoch for shard in shards}
    gap = 1 + max(max(0, fences.get(shard, 0) - epochs[shard]) for shard in shards)
    nobody = new_incarnation(SystemRandom())
    for first in range(0, len(shards), CLAIMS):
        some = shards[first : first + CLAIMS]
        claims = [Claim(shard, 0, epochs[shard] + gap, nobody) for shard in some]
        for claim, newest in zip(claims, await journal.claim(claims), strict=True):
            if newest is not None:
                assert newest != "busy", "it was asked to wait"
                raise LookupError(
                    f"shard {claim.shard.role}/{claim.shard.shard} was claimed under epoch "
                    f"{newest} meanwhile: a node uses this journal. Stop all nodes, then repeat "
                    "the command"
                )
    return gap


def _agreed_history(picture: StoreSnapshot, roles: Sequence[str], history: str) -> OperatorCommit:
    config, revision = picture.members.config, picture.members.config_revision
    assert config is not None, "a config is never removed"
    journals = dict(sorted({**config.journals, **dict.fromkeys(roles, history)}.items()))
    changed = msgspec.structs.replace(config, journals=journals)
    put = Put(CONFIG_KEY, encode_record(changed))
    return OperatorCommit(f"history {history}", (At(CONFIG_KEY, revision),), (put,))
