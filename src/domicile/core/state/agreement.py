"""What the members of a cluster must agree on, and what to tell a process that does not fit.

A member calls these rules before it registers, a link when it is opened. A rule returns why a
process cannot join, as a text, or raises `ConfigError`, or returns what all agree on from now on.
No rule reads or writes the store.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping
from typing import NamedTuple

from domicile.core.ids import ShardKey
from domicile.core.state.records import ConfigRecord, NodeRecord, TypeRecord
from domicile.errors import ConfigError

NO_JOURNALS: Mapping[str, str] = {}


def common_protocol(one: tuple[int, int], other: tuple[int, int]) -> int:
    """The newest protocol in both ranges (oldest, newest); 0 if there is none."""
    newest = min(one[1], other[1])
    return newest if newest >= max(one[0], other[0]) else 0


def no_common_protocol(here: tuple[int, int], there: tuple[int, int]) -> str:
    """What to tell a process that shares no wire protocol with this one."""
    return (
        f"wire protocols {here[0]} to {here[1]} are spoken here and {there[0]} to {there[1]} by "
        "the other end: none is common. Neighbouring versions understand each other, so update "
        "the older one version by version"
    )


def mismatch(name: str, known: TypeRecord, own: TypeRecord) -> str:
    """Why a process cannot join with its definition of a type; empty if it can (RG-24)."""
    if known.role != own.role:
        return (
            f"entity type {name!r} belongs to role {known.role!r} in this cluster, to {own.role!r} "
            f"in this process; write role={known.role!r} in its class here, give the type another "
            "name=, or use another cluster"
        )
    if known.shard_id != own.shard_id:
        return (
            f"the cluster finds shards of entity type {name!r} by {known.shard_id!r}, this process "
            f"by {own.shard_id!r}; use the same shard_id= in its class here, give the type another "
            "name=, or use another cluster"
        )
    return ""


class TypeGap(NamedTuple):
    """An entity type that some nodes of its role lack (DX-26). Node ids, sorted."""

    role: str
    kind: str
    present_at: tuple[str, ...]
    missing_at: tuple[str, ...]


def type_gaps(
    types: Mapping[str, TypeRecord], nodes: Iterable[NodeRecord], needed: Container[str] = ()
) -> list[TypeGap]:
    """The types in which nodes of one role differ. Types that no node has count only if they are
    `needed`. Nodes that leave do not count."""
    up = [record for record in nodes if record.status == "up"]
    gaps: list[TypeGap] = []
    for kind, known in sorted(types.items()):
        members = sorted((one.node, kind in one.types) for one in up if known.role in one.roles)
        present = tuple(node for node, has in members if has)
        missing = tuple(node for node, has in members if not has)
        if missing and (present or kind in needed):
            gaps.append(TypeGap(known.role, kind, present, missing))
    return gaps


def agreed_tokens(known: tuple[str, ...], own: tuple[str, ...]) -> tuple[str, ...]:
    """The fingerprints to store when a node joins that has one of the `known` ones, or the first.

    A node with several tokens is part of a change: its tokens are stored. A node with only the
    newest token ends the change. A node with only an old token changes nothing.
    """
    return own if not known or len(own) > 1 or own == known[:1] else known


def foreign_token(known: tuple[str, ...], own: tuple[str, ...], *, inhabited: bool) -> str:
    """Why a process cannot join with its token; empty if it can (DX-07).

    `inhabited`: nodes are registered now. A cluster without nodes takes the first token it gets.
    """
    if known and not own:
        return (
            "this cluster has a token, this process has none: give it the cluster's, by token= or "
            "DOMICILE_TOKEN"
        )
    if known and not any(one in known for one in own):
        return (
            "the token of this process is not the cluster's: give it the same, by token= or "
            "DOMICILE_TOKEN. To change the token of a cluster, restart its processes one by one "
            "with 'new,old', then one by one with 'new'"
        )
    if own and not known and inhabited:
        return (
            "this process has a token, the nodes of this cluster run without: stop all of them, "
            "then start all with the same token= or DOMICILE_TOKEN (records of nodes that died go "
            "by themselves, soon)"
        )
    return ""


def foreign_journal(role: str, known: str, own: str) -> str:
    """What to tell a process whose journal is not the one of a role (J11)."""
    return (
        f"this journal is not the one in which role {role!r} of this cluster keeps its events: the "
        f"store knows history {known}, this journal has {own}. Nothing was changed. Name the right "
        "journal, by journal=, or put its file back. If this one shall take its place, as after a "
        "restore, stop all nodes and run `domicile journal accept`"
    )


def older_journal(shard: ShardKey, known: int, offset: int) -> str:
    """What to tell a process whose journal has lost events (J11)."""
    return (
        f"this journal is older than the store knows: shard {shard.role}/{shard.shard} ends at "
        f"offset {offset}, and was at {known} before. A backup was put in its place, or its "
        "database lost commits. Nothing was changed. Put the newer journal back. If it is gone for "
        "good, stop all nodes and run `domicile journal accept`, which says what is lost"
    )


def agreed_config(
    config: ConfigRecord | None,
    shards: Mapping[str, int],
    types: Mapping[str, TypeRecord],
    tokens: tuple[str, ...],
    journals: Mapping[str, str] = NO_JOURNALS,
) -> ConfigRecord | None:
    """What `config` must be so that this member can join; `ConfigError` if it cannot."""
    if config is None:
        config = ConfigRecord({})
        if not shards and not types and not tokens and not journals:
            return None
    own_hash = ConfigRecord({}).hash
    if config.hash != own_hash:
        raise ConfigError(
            f"the cluster picks shards by {config.hash!r}, this process by {own_hash!r}; run the "
            "version the cluster runs, or use another cluster"
        )
    for role, count in shards.items():
        known = config.shards.get(role, count)
        if known != count:
            raise ConfigError(
                f"role {role!r} has {known} shards in this cluster, this process is set to "
                f"{count}; set shards={known} here, or use another cluster"
            )
    for name, own in types.items():
        why = mismatch(name, config.types.get(name, own), own)
        if why:
            raise ConfigError(why)
    for role, history in journals.items():
        agreed = config.journals.get(role, history)
        if agreed != history:
            raise ConfigError(foreign_journal(role, agreed, history))
    return ConfigRecord(
        dict(sorted({**config.shards, **shards}.items())),
        config.hash,
        dict(sorted({**config.types, **types}.items())),
        tokens,
        dict(sorted({**config.journals, **journals}.items())),
    )
