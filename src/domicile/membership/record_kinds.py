"""What a member must know about its own record, for each kind of record under a lease.

A `Member` gets one kind and asks it about everything that differs between records. The kinds of
nodes and clients are here; another holder of a lease brings its own. A kind must never call the
store, read a clock or keep state: the thread renewer calls it too.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from math import inf
from typing import Generic, TypeVar, cast

import msgspec

from domicile.core.ids import Incarnation
from domicile.core.state.cluster_view import ClusterView
from domicile.core.state.keys import client_key, node_key, node_lease
from domicile.core.state.records import ClientRecord, NodeRecord, decode_record, encode_record
from domicile.errors import ConfigError

R = TypeVar("R")

ProcessRecord = NodeRecord | ClientRecord
"""The own record of a node's or client's process."""


class RecordKind(ABC, Generic[R]):
    """One kind of record. The defaults fit a holder that has no shards."""

    hosts = False
    """Whether the holder may be home to shards. Its record then needs no lease if only proof of
    death frees shards (C9), and the holder may change the cluster's tokens (DX-07)."""

    @abstractmethod
    def incarnation(self, record: R) -> Incarnation:
        """The incarnation that holds the record."""

    @abstractmethod
    def key(self, incarnation: Incarnation) -> bytes:
        """The key of the record."""

    @abstractmethod
    def lease_id(self, incarnation: Incarnation) -> str:
        """The lease that the record is attached to."""

    @abstractmethod
    def encode(self, record: R) -> bytes:
        """The stored form."""

    @abstractmethod
    def decode(self, value: bytes) -> R:
        """A record from its stored form; raises `msgspec.MsgspecError` if it cannot be read."""

    def check(self, record: R, members: ClusterView) -> None:
        """Raise `ConfigError` if the holder does not fit into the cluster."""
        return

    def listening(self, record: R, address: str) -> R:
        """The record with the address at which its holder can be reached."""
        return record

    def granted(self, record: R, ttl_s: float) -> R:
        """The record as it is first stored: it may name the ttl that a leader waits for (C5)."""
        return record

    def longest_ttl_s(self, record: R) -> float:
        """The longest ttl that the holder may count with, whatever the store grants later (C5)."""
        return inf

    def evicted(self, record: R) -> str:
        """Why the holder must end although its record exists; empty if it need not end (L1)."""
        return ""

    def stalled(self, record: R, stalled: bool) -> R:
        """The record with the report whether the holder's event loop is blocked (DX-10)."""
        return record


class NodeKind(RecordKind[NodeRecord]):
    """A node's record."""

    hosts = True

    def incarnation(self, record: NodeRecord) -> Incarnation:
        """As `RecordKind.incarnation`."""
        return record.incarnation

    def key(self, incarnation: Incarnation) -> bytes:
        """As `RecordKind.key`."""
        return node_key(incarnation)

    def lease_id(self, incarnation: Incarnation) -> str:
        """As `RecordKind.lease_id`."""
        return node_lease(incarnation)

    def encode(self, record: NodeRecord) -> bytes:
        """As `RecordKind.encode`."""
        return encode_record(record)

    def decode(self, value: bytes) -> NodeRecord:
        """As `RecordKind.decode`."""
        return decode_record(value, NodeRecord)

    def check(self, record: NodeRecord, members: ClusterView) -> None:
        """SM-28: a process must not use the node id of a running node that serves other roles."""
        other = members.clash(record)
        if other is not None:
            raise ConfigError(
                f"node id {record.node!r} is registered with {_roles(other)} at {other.address}, "
                f"this process has {_roles(record)}: start it under another node_id, or stop the "
                "other one first (if it has died, its record goes soon or by `declare-dead`)"
            )

    def listening(self, record: NodeRecord, address: str) -> NodeRecord:
        """As `RecordKind.listening`."""
        return msgspec.structs.replace(record, address=address)

    def granted(self, record: NodeRecord, ttl_s: float) -> NodeRecord:
        """As `RecordKind.granted`: a leader waits for this ttl before it removes the record."""
        return msgspec.structs.replace(record, ttl_s=ttl_s)

    def longest_ttl_s(self, record: NodeRecord) -> float:
        """As `RecordKind.longest_ttl_s`: the ttl in the record."""
        return record.ttl_s

    def evicted(self, record: NodeRecord) -> str:
        """As `RecordKind.evicted`: the leader marks the record (C6)."""
        return "evicted by the leader" if record.status == "evicted" else ""

    def stalled(self, record: NodeRecord, stalled: bool) -> NodeRecord:
        """As `RecordKind.stalled`."""
        return msgspec.structs.replace(record, stalled=stalled)


class ClientKind(RecordKind[ClientRecord]):
    """A client's record. A client has no shards, and a dead client's record must not stay."""

    def incarnation(self, record: ClientRecord) -> Incarnation:
        """As `RecordKind.incarnation`."""
        return record.incarnation

    def key(self, incarnation: Incarnation) -> bytes:
        """As `RecordKind.key`."""
        return client_key(incarnation)

    def lease_id(self, incarnation: Incarnation) -> str:
        """As `RecordKind.lease_id`."""
        return f"client-{incarnation}"

    def encode(self, record: ClientRecord) -> bytes:
        """As `RecordKind.encode`."""
        return encode_record(record)

    def decode(self, value: bytes) -> ClientRecord:
        """As `RecordKind.decode`."""
        return decode_record(value, ClientRecord)


def kind_of(record: ProcessRecord) -> RecordKind[ProcessRecord]:
    """The kind of a node's or client's record."""
    kind = NodeKind() if isinstance(record, NodeRecord) else ClientKind()
    # A member gets its kind together with its record, and never changes to the other kind.
    return cast("RecordKind[ProcessRecord]", kind)


def marked_leaving(record: ProcessRecord) -> ProcessRecord:
    """The record of a node that announces that it leaves (H14)."""
    assert isinstance(record, NodeRecord), "a client's record has no status"
    return msgspec.structs.replace(record, status="leaving")


def placed_at(place: str, record: ProcessRecord) -> ProcessRecord:
    """The record of a node that says where it runs (C9)."""
    assert isinstance(record, NodeRecord), "a client's record has no place"
    return msgspec.structs.replace(record, place=place)


def _roles(record: NodeRecord) -> str:
    names = ", ".join(map(repr, record.roles))
    return f"role {names}" if len(record.roles) == 1 else f"roles {names}" if names else "no roles"
