"""What processes say of themselves in the store: node, client, leader and config records."""

from __future__ import annotations

from typing import TypeVar

import msgspec

from domicile.core.ids import Incarnation


class NodeRecord(msgspec.Struct, frozen=True, omit_defaults=True):
    """A node, under its own lease. `status` is "evicted" only by the leader's hand (C6)."""

    node: str
    incarnation: Incarnation
    address: str
    roles: tuple[str, ...]
    types: tuple[str, ...]
    ttl_s: float
    candidate: bool = True
    capacity: float = 1.0
    version: str = ""
    status: str = "up"
    """"up", "leaving" (wants to be emptied, receives nothing) or "evicted"."""
    protocols: tuple[int, int] = (1, 1)
    """The oldest and newest wire protocol that it speaks (DX-19)."""
    stalled: bool = False
    """It says of itself that its event loop is blocked, and renews on for a while (DX-10)."""


class ClientRecord(msgspec.Struct, frozen=True, omit_defaults=True):
    """A client, under its own lease, so that the loss of a link to it is defined too."""

    incarnation: Incarnation


class LeaderRecord(msgspec.Struct, frozen=True, omit_defaults=True):
    """The acting coordinator. The revision of this key guards all that it writes (C1)."""

    incarnation: Incarnation
    node: str


class TypeRecord(msgspec.Struct, frozen=True, omit_defaults=True):
    """An entity type: the role whose shards it lives in, and how its shard is found."""

    role: str
    shard_id: str = "xxh3"


class ConfigRecord(msgspec.Struct, frozen=True, omit_defaults=True):
    """What every member must agree on: shards per role, and where the entities of a type are."""

    shards: dict[str, int]
    hash: str = "xxh3"
    types: dict[str, TypeRecord] = {}
    tokens: tuple[str, ...] = ()
    """Fingerprints of the secrets that are good in this cluster, the newest first (DX-07)."""


def common_protocol(one: tuple[int, int], other: tuple[int, int]) -> int:
    """The newest protocol in both ranges (oldest, newest); 0 if there is none."""
    newest = min(one[1], other[1])
    return newest if newest >= max(one[0], other[0]) else 0


def no_common_protocol(here: tuple[int, int], there: tuple[int, int]) -> str:
    """What to tell a process that nobody here can talk to."""
    return (
        f"wire protocols {here[0]} to {here[1]} are spoken here and {there[0]} to {there[1]} by "
        "the other end: none is common. Neighbouring versions understand each other, so update "
        "the older one version by version"
    )


def mismatch(name: str, known: TypeRecord, own: TypeRecord) -> str:
    """Why a process cannot take part with its definition of a type; empty if it can (RG-24)."""
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


def agreed_tokens(known: tuple[str, ...], own: tuple[str, ...]) -> tuple[str, ...]:
    """The fingerprints to keep when a node joins that has one of the `known`, if there are any.

    A node with several is in the middle of a change and says what all may have; one with the
    newest alone ends that change; one that has not heard of it changes nothing.
    """
    return own if not known or len(own) > 1 or own == known[:1] else known


def foreign_token(known: tuple[str, ...], own: tuple[str, ...], *, inhabited: bool) -> str:
    """Why a process cannot take part with its token; empty if it can (DX-07).

    `inhabited`: nodes are there now. A cluster without any takes on the first token it gets.
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


Record = TypeVar("Record", NodeRecord, ClientRecord, LeaderRecord, ConfigRecord)


def encode_record(record: NodeRecord | ClientRecord | LeaderRecord | ConfigRecord) -> bytes:
    """The stored form: JSON, so that people can read it in any store's own tools."""
    return msgspec.json.encode(record)


def decode_record(value: bytes, kind: type[Record]) -> Record:
    """A record from its stored form."""
    return msgspec.json.decode(value, type=kind)
