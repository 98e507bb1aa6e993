"""How keys and leases look in Kubernetes: a ConfigMap for each key, a Lease for each lease. Pure.

The name of an object is made from its key and a hash; the key itself stands in an annotation. A
revision is the object's resourceVersion, which etcd counts over all objects. The revision at which
a key was created is the resourceVersion of an object that was never replaced; whoever replaces it
notes it. Every write carries a text of its own, after its writer's name: the API server drops a
write that changes nothing, and would not raise the revision.
"""

from __future__ import annotations

import base64
import binascii
import re
from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

from domicile.core.state.txn import Item
from domicile.kubeapi.objects import ConfigMap, KubeLease, PartialObject

STORE_LABEL = "domicile.dev/store"
"""On every object: the name of the store that it belongs to."""
PART_LABEL = "domicile.dev/part"
"""On a ConfigMap: the hash of the first part of its key, which is the name of its cluster."""
LEASE_LABEL = "domicile.dev/lease"
"""On a ConfigMap: the name of the Lease with which it disappears."""

KEY = "domicile.dev/key"
CREATED = "domicile.dev/created"
WRITE = "domicile.dev/write"
"""On every object: who wrote it last, and a text that no other write has."""
LEASE_ID = "domicile.dev/lease-id"
TTL = "domicile.dev/ttl"

TEXT, BINARY = "value", "base64"
"""Where a ConfigMap has its value: as text if it is one, so that people can read it."""

_READABLE = 120
_NOT_IN_NAMES = re.compile(r"[^a-z0-9]+")


def _hash(data: bytes, size: int = 16) -> str:
    return blake2b(data, digest_size=size).hexdigest()


def key_name(store: str, key: bytes) -> str:
    """The name of the ConfigMap of a key."""
    text = _NOT_IN_NAMES.sub("-", key.decode("utf-8", "replace").lower())[:_READABLE].strip("-")
    return f"{store}.{text}.{_hash(key)}" if text else f"{store}.{_hash(key)}"


def lease_name(store: str, lease: str) -> str:
    """The name of the Lease of a lease. It is a label too, so it has at most 63 characters."""
    return f"{store[:24]}-{_hash(lease.encode())}"


def part_of(key: bytes) -> str:
    """The label of the first part of a key."""
    return _hash(key.partition(b"/")[0], 8)


def key_labels(store: str, prefix: bytes) -> str:
    """A selector for all ConfigMaps whose keys have a prefix, and for others."""
    narrowed = f",{PART_LABEL}={part_of(prefix)}" if b"/" in prefix else ""
    return f"{STORE_LABEL}={store}{narrowed}"


def leases_labels(store: str) -> str:
    """A selector for all Leases of a store."""
    return f"{STORE_LABEL}={store}"


def leased_labels(store: str, name: str = "") -> str:
    """A selector for the keys under a Lease, or under any."""
    wanted = f"{LEASE_LABEL}={name}" if name else LEASE_LABEL
    return f"{STORE_LABEL}={store},{wanted}"


def key_object(
    store: str, key: bytes, value: bytes, lease: str | None, created: int, base: int, write: str
) -> dict[str, Any]:
    """The ConfigMap of a key. `base`: the resourceVersion that it replaces; 0: it is new."""
    labels = {STORE_LABEL: store, PART_LABEL: part_of(key)}
    if lease is not None:
        labels[LEASE_LABEL] = lease_name(store, lease)
    annotations = {KEY: _quoted(key), WRITE: write}
    metadata: dict[str, Any] = {"name": key_name(store, key), "labels": labels}
    if base:
        annotations[CREATED] = str(created)
        metadata["resourceVersion"] = str(base)
    metadata["annotations"] = annotations
    try:
        data = {TEXT: value.decode()}
        if not data[TEXT].isprintable():
            raise ValueError("people can't read it")
    except ValueError:
        data = {BINARY: base64.b64encode(value).decode()}
    return {"metadata": metadata, "data": data}


def read_key(found: PartialObject) -> bytes | None:
    """The key of a ConfigMap; None if it has none that can be read."""
    text = found.metadata.annotation(KEY)
    try:
        key = _unquoted(text)
    except (ValueError, binascii.Error):
        return None
    return key if text else None


def read_item(found: ConfigMap) -> Item | None:
    """What a ConfigMap holds; None if people have changed it so that it can't be read."""
    key, revision = read_key(found), revision_of(found)
    data: Mapping[str, str] = found.data or {}
    try:
        created = int(found.metadata.annotation(CREATED) or revision)
        if BINARY in data:
            value = base64.b64decode(data[BINARY], validate=True)
        else:
            value = data[TEXT].encode()
    except (KeyError, ValueError):
        return None
    return None if key is None else Item(key, value, created, revision)


def revision_of(found: PartialObject) -> int:
    """The resourceVersion as a number, which it is since API servers keep objects in etcd."""
    return int(found.metadata.resource_version or 0)


@dataclass(frozen=True, slots=True)
class GrantedLease:
    """A Lease as stored."""

    name: str
    id: str
    ttl_s: float
    version: str


def lease_object(
    store: str, lease: str, ttl_s: float, now: str, write: str, by: str
) -> dict[str, Any]:
    """A Lease. Its times are for people: no process compares them (S8)."""
    metadata: dict[str, Any] = {
        "name": lease_name(store, lease),
        "labels": {STORE_LABEL: store},
        "annotations": {LEASE_ID: lease, TTL: repr(ttl_s), WRITE: write},
    }
    spec = {
        "holderIdentity": by or lease,
        "leaseDurationSeconds": max(1, round(ttl_s + 0.5)),
        "renewTime": now,
    }
    return {"metadata": metadata, "spec": spec}


def read_lease(found: KubeLease) -> GrantedLease | None:
    """A Lease; None if it has no ttl that can be read: then nothing here may end it."""
    metadata = found.metadata
    try:
        ttl_s = float(metadata.annotation(TTL))
    except ValueError:
        return None
    return GrantedLease(
        metadata.name, metadata.annotation(LEASE_ID), ttl_s, metadata.resource_version
    )


def _quoted(key: bytes) -> str:
    """A key as people can read it, if it is text."""
    try:
        text = key.decode()
        if text.isprintable() and not text.startswith("base64:"):
            return text
    except UnicodeDecodeError:
        pass
    return "base64:" + base64.b64encode(key).decode()


def _unquoted(text: str) -> bytes:
    if text.startswith("base64:"):
        return base64.b64decode(text.removeprefix("base64:"), validate=True)
    return text.encode()
