"""What was committed to a store on an API server, for the checkers: who, when, in which order.

The order and the contents come from the etcd below, which keeps every revision. Who wrote a key
stands in its annotation. When the API server was asked comes from its audit log; a line that a kill
cut off is replaced by the one that says that the request had come.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import datetime
from math import inf
from pathlib import Path
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


UNCLEAR = 499
"""From this status on nobody knows whether the request was carried out."""


@dataclass(frozen=True, slots=True)
class _Key:
    key: bytes
    uid: str
    lease: str


@dataclass(frozen=True, slots=True)
class Untimed:
    """A commit, and by what the audit log knows it: the text of its write, or what it deleted."""

    commit: QueuedCommit
    mark: str
    name: str


@dataclass(frozen=True, slots=True)
class _Asked:
    came: float
    done: float


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
        self._untimed: list[Untimed] = []
        self._audit = AuditLog(server.audit)

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

    def _seen(self, event: Any) -> Iterator[Untimed]:
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
                commit = replace(commit, deletes=[known.key], expiry=expiry)
                yield Untimed(commit, known.uid, name.decode())
            return
        found = _object(kv, ConfigMap)
        item, metadata = read_item(found), found.metadata
        if item is None or metadata.label(STORE_LABEL) != self._store:
            return
        lease = metadata.label(LEASE_LABEL)
        self._keys[name] = _Key(item.key, metadata.uid, lease)
        write = metadata.annotation(WRITE)
        put = (item.key, item.value, self._leases.get(lease, lease) or None)
        commit = replace(commit, by=write.rpartition(" ")[0], puts=[put])
        yield Untimed(commit, write, name.decode())

    def _saw_lease(self, kv: Any, gone: bool) -> None:
        name = kv.key[len(self._leases_at) :].decode()
        if gone:
            self._leases.pop(name, None)
            return
        lease = read_lease(_object(kv, KubeLease))
        if lease is not None:
            self._leases[name] = lease.id

    def _timed(self) -> list[QueuedCommit]:
        if not self._untimed:
            return []
        until = time.monotonic() + LATE_S
        self._audit.read()
        while not all(map(self._audit.answered, self._untimed)) and time.monotonic() < until:
            time.sleep(0.05)
            self._audit.read()
        # The wall clock of this machine is the one that the API server stamps with.
        ahead_s = time.time() - self._now()
        found: list[QueuedCommit] = []
        at, before = 0.0, inf
        left = len(self._untimed)
        for number, one in reversed(list(enumerate(self._untimed))):
            asked = self._audit.answered(one)
            came = self._audit.came(one, before) if asked is None else asked.came
            if asked is not None:
                before = min(before, asked.done)
            if came is not None:
                at = came - ahead_s
            if at:
                left = left if found else number + 1
                found.append(replace(one.commit, at=at, guessed=came is None))
        del self._untimed[: left if found else 0]
        return found[::-1]


class AuditLog:
    """When the API server got which request."""

    def __init__(self, path: Path) -> None:
        self._path, self._offset = path, 0
        self._answered: dict[str, _Asked] = {}
        self._doubtful: dict[str, dict[str, float]] = {}
        """By name: when requests came that have no answer, or one that says nothing."""

    def read(self) -> None:
        """What was written since the last look."""
        with self._path.open("rb") as file:
            file.seek(self._offset)
            for line in file:
                if not line.endswith(b"\n"):
                    break
                self._offset += len(line)
                with suppress(json.JSONDecodeError):  # cut off by a kill
                    self._take(json.loads(line))

    def answered(self, one: Untimed) -> _Asked | None:
        """The request that made a commit, if it was answered."""
        return self._answered.get(one.mark)

    def came(self, one: Untimed, before: float) -> float | None:
        """When the request came that must have made a commit: the last that may have done it."""
        found = [at for at in self._doubtful.get(one.name, {}).values() if at <= before]
        return max(found, default=None)

    def _take(self, entry: Mapping[str, Any]) -> None:
        at = _time(entry["requestReceivedTimestamp"])
        asked: Any = entry.get("requestObject") or {}
        answer: Any = entry.get("responseObject") or {}
        name = str(entry["objectRef"].get("name") or asked.get("metadata", {}).get("name", ""))
        if entry["stage"] == "RequestReceived":
            self._doubtful.setdefault(name, {})[entry["auditID"]] = at
            return
        code = entry.get("responseStatus", {}).get("code", 500)
        if entry["verb"] == "delete":
            # The answer is a Status that names what was deleted.
            mark = str(answer.get("details", {}).get("uid", ""))
        else:
            # Of a request whose client did not wait for the answer, too.
            mark = str(asked.get("metadata", {}).get("annotations", {}).get(WRITE, ""))
        self._doubtful.get(name, {}).pop(entry["auditID"], None)
        self._doubtful.get("", {}).pop(entry["auditID"], None)
        if code < 300 or (code >= UNCLEAR and mark):
            self._answered[mark] = _Asked(at, _time(entry["stageTimestamp"]))
        elif code >= UNCLEAR:
            self._doubtful.setdefault(name, {})[entry["auditID"]] = at


def _time(text: str) -> float:
    return datetime.fromisoformat(text).timestamp()


def _object(kv: Any, kind: type[Any]) -> Any:
    """An object of etcd, with the resourceVersion that it has in the API server."""
    found = json.loads(kv.value)
    found["metadata"]["resourceVersion"] = str(kv.mod_revision)
    return msgspec.convert(found, kind)
