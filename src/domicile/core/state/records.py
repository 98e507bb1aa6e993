"""The records that processes keep in the store: node, client, leader, config and trials.

Every package may import it. Data only: the rules about records are in `agreement`.
"""

from __future__ import annotations

from typing import Literal, TypeVar

import msgspec

from domicile.core.ids import Incarnation


class NodeRecord(msgspec.Struct, frozen=True, omit_defaults=True):
    """A node, under its own lease. Only the leader sets `status` to "evicted" (C6)."""

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
    """The oldest and the newest wire protocol that the node speaks (DX-19)."""
    place: str = ""
    """Where the process runs, in the words of its health port, which alone reads them (C9)."""
    stalled: bool = False
    """The node reports that its event loop is blocked; it renews for a limited time (DX-10)."""
    process: str = ""
    """The process of the node, in the words of its journal, which alone reads them (J3)."""


class ClientRecord(msgspec.Struct, frozen=True, omit_defaults=True):
    """A client, under its own lease, so that the loss of a link is defined for clients too."""

    incarnation: Incarnation


class LeaderRecord(msgspec.Struct, frozen=True, omit_defaults=True):
    """The acting coordinator. All its commits are conditional on the revision of this key (C1)."""

    incarnation: Incarnation
    node: str


class TypeRecord(msgspec.Struct, frozen=True, omit_defaults=True):
    """An entity type: the role whose shards hold its entities, and how their shard is found."""

    role: str
    shard_id: str = "xxh3"


class ConfigRecord(msgspec.Struct, frozen=True, omit_defaults=True):
    """What every member must agree on: shards per role, and the shards of each entity type."""

    shards: dict[str, int]
    hash: str = "xxh3"
    types: dict[str, TypeRecord] = {}
    tokens: tuple[str, ...] = ()
    """Fingerprints of the secrets that are valid in this cluster, the newest first (DX-07)."""
    journals: dict[str, str] = {}
    """The history of the journal in which each role keeps its events (J11)."""


class OnTrial(msgspec.Struct, frozen=True, array_like=True):
    """An entity whose handler runs in a shard that lost owners: for the first time at this owner,
    or each time if the shard lost several.

    `type` and `id` are empty if too many run to name them all (DX-20).
    """

    role: str
    shard: int
    epoch: int
    type: str = ""
    id: str = ""
    manner: Literal["", "alone", "long"] = ""
    """Alone: it may be put away, so no other such entity is tried beside it. Long: it has run for
    a while, or has run well before."""


class TrialRecord(msgspec.Struct, frozen=True):
    """What an owner has on trial. It stays after its owner is gone: then it names who is blamed."""

    trials: tuple[OnTrial, ...] = ()


class MoveRecord(msgspec.Struct, frozen=True, omit_defaults=True):
    """Why no process may use the cluster in this store: it is copied to another, or from one."""

    direction: Literal["to", "from"]
    """"to": what is here is the past. "from": what is here is not whole yet."""
    store: str
    """The other store's URL, without user and password."""
    id: str
    """Names one copy, so that it knows its own mark."""


Record = TypeVar(
    "Record", NodeRecord, ClientRecord, LeaderRecord, ConfigRecord, TrialRecord, MoveRecord
)


def encode_record(
    record: NodeRecord | ClientRecord | LeaderRecord | ConfigRecord | TrialRecord | MoveRecord,
) -> bytes:
    """The stored form: JSON, so that people can read it in any store's own tools."""
    return msgspec.json.encode(record)


def decode_record(value: bytes, kind: type[Record]) -> Record:
    """A record from its stored form."""
    return msgspec.json.decode(value, type=kind)
