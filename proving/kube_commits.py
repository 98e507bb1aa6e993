"""What was committed to a store on an API server, for the checkers: who, when, in which order.

The order and the contents come from the etcd below, which keeps every revision. Who wrote a key
stands in its annotation. When the API server was asked comes from its audit log; a line that a kill
cut off is replaced by the one that says that the request had come.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any

import msgspec

from domicile.kubeapi.objects import ConfigMap, KubeLease
from domicile.stores.commit_log import QueuedCommit
from domicile.stores.etcd.address import parse_etcd_url
from domicile.stores.etcd.commits import read_events
from domicile.stores.kubernetes.address import parse_kubernetes_url
from domicile.stores.kubernetes.objects import (
    LEASE_LABEL,
    STORE_LABEL,
    WRITE,
    read_item,
    read_lease,
)
from domicile.stores.loop_thread import LoopThread
from proving.kube_server import KubernetesServer

READ_S = 60.0
LATE_S = 2.0
"""The API server may write down what it has done so much later than one sees it in etcd."""


@dataclass(frozen=True, slots=True)
class _Key:
    key: bytes
    uid: str
    lease: str


class KubernetesCommits:
    """The commits of one store; each call reads on from where the last one ended.

    `now` is the clock of this machine by which commits are stamped.
    """

    def __init__(self, server: KubernetesServer, url: str, now: Callable[[], float]) -> None:
        self._server, self._now = server, now
        self._store = parse_kubernetes_url(url).store
        self._etcd = parse_etcd_url(server.etcd.url("log"))
        space = parse_kubernetes_url(url).namespace
        self._keys_at = f"/registry/configmaps/{space}/".encode()
        self._leases_at = f"/registry/leases/{space}/".encode()
        self._keys: dict[bytes, _Key] = {}
        self._leases: dict[str, str] = {}
        self._read = 0
        self._untimed: list[tuple[QueuedCommit, str, bytes]] = []
        self._audit = _AuditLog(server)

    def __call__(self) -> list[QueuedCommit]:
        """The commits that are new since the last call; those without a time come later."""
        thread = LoopThread("kube-commits")
        try:
            address, after = self._etcd, self._read
            events = thread.submit(lambda: read_events(address, after)).result(READ_S)
        finally:
            thread.close()
        for event in events:
            self._read = event.kv.mod_revision
            self._untimed += self._seen(event)
        return self._timed()

    def _seen(self, event: Any) -> Iterator[tuple[QueuedCommit, str, bytes]]:
        kv, gone = event.kv, event.type == event.DELETE
        if kv.key.startswith(self._leases_at):
            self._saw_lease(kv, gone)
        if not kv.key.startswith(self._keys_at):
            return
        name, revision = kv.key[len(self._keys_at) :], kv.mod_revision
        commit = QueuedCommit(revision, 0.0, "", [], [], expiry=False)
        if gone:
            known = self._keys.pop(name, None)
            if known is not None:
                expiry = bool(known.lease) and known.lease not in self._leases
                yield replace(commit, deletes=[known.key], expiry=expiry), known.uid, name
            return
        found = _object(kv, ConfigMap)
        item, metadata = read_item(found), found.metadata
        if item is None or metadata.label(STORE_LABEL) != self._store:
            return
        lease = metadata.label(LEASE_LABEL)
        self._keys[name] = _Key(item.key, metadata.uid, lease)
        by = metadata.annotation(WRITE).rpartition(" ")[0]
        put = (item.key, item.value, self._leases.get(lease, lease) or None)
        yield replace(commit, by=by, puts=[put]), "", name

    def _saw_lease(self, kv: Any, gone: bool) -> None:
        name = kv.key[len(self._leases_at) :].decode()
        if gone:
            self._leases.pop(name, None)
            return
        lease = read_lease(_object(kv, KubeLease))
        if lease is not None:
            self._leases[name] = lease.id

    def _timed(self) -> list[QueuedCommit]:
        until = time.monotonic() + LATE_S
        while self._untimed:
            self._audit.read()
            times = [self._audit.time_of(*one) for one in self._untimed]
            if None not in times or time.monotonic() > until:
                break
            time.sleep(0.05)
        else:
            return []
        # The wall clock of this machine is the one that the API server stamps with.
        ahead_s = time.time() - self._now()
        found: list[QueuedCommit] = []
        at = 0.0
        last = max((n for n, one in enumerate(times) if one is not None), default=-1)
        for (commit, _, _), asked in reversed(list(zip(self._untimed, times, strict=True))):
            guessed = asked is None
            at = at if asked is None else asked - ahead_s
            if at:
                found.append(replace(commit, at=at, guessed=guessed))
        del self._untimed[: last + 1]
        return found[::-1]


class _AuditLog:
    """When the API server got which request."""

    def __init__(self, server: KubernetesServer) -> None:
        self._path, self._offset = server.audit, 0
        self._puts: dict[int, float] = {}
        self._deletes: dict[str, float] = {}
        self._open: dict[str, dict[str, float]] = {}
        """By name: requests that came and of whose end nothing was noted."""

    def read(self) -> None:
        """What was written since the last look."""
        with self._path.open("rb") as file:
            file.seek(self._offset)
            for line in file:
                if not line.endswith(b"\n"):
                    break
                self._offset += len(line)
                self._take(json.loads(line))

    def time_of(self, commit: QueuedCommit, uid: str, name: bytes) -> float | None:
        """When the request for that commit came, by the wall clock; None if nothing tells."""
        known = self._deletes.get(uid) if uid else self._puts.get(commit.revision)
        if known is not None:
            return known
        waiting = self._open.get(name.decode(), {})
        # Creations have no name yet when they come.
        return max(waiting.values(), default=None)

    def _take(self, entry: Mapping[str, Any]) -> None:
        at = datetime.fromisoformat(entry["requestReceivedTimestamp"]).timestamp()
        name, number = entry["objectRef"].get("name", ""), entry["auditID"]
        if entry["stage"] == "RequestReceived":
            self._open.setdefault(name, {})[number] = at
            return
        self._open.get(name, {}).pop(number, None)
        self._open.get("", {}).pop(number, None)
        if entry.get("responseStatus", {}).get("code", 500) >= 300:
            return
        answer: Any = entry.get("responseObject")
        if answer is None:
            return
        if entry["verb"] == "delete":
            # The answer is a Status that names what was deleted.
            self._deletes.setdefault(str(answer["details"]["uid"]), at)
        else:
            self._puts.setdefault(int(answer["metadata"]["resourceVersion"]), at)


def _object(kv: Any, kind: type[Any]) -> Any:
    """An object of etcd, with the resourceVersion that it has in the API server."""
    found = json.loads(kv.value)
    found["metadata"]["resourceVersion"] = str(kv.mod_revision)
    return msgspec.convert(found, kind)
