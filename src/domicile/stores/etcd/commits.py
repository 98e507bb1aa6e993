"""The log of commits of an etcd store, for checkers and tools that run beside its server.

etcd keeps what was written until it is compacted, but not who wrote it, nor when. With `?log=true`
in its URL a store adds that to each commit, under one key. A revision without it is a lease that
begins or ends, or belongs to another root.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import groupby
from typing import Any

import grpc.aio
import msgspec

from domicile.errors import StoreUnavailable
from domicile.stores.commit_log import QueuedCommit
from domicile.stores.etcd import rpc_pb2 as pb
from domicile.stores.etcd.address import EtcdAddress
from domicile.stores.etcd.client import LogLine
from domicile.stores.etcd.connection import WATCH
from domicile.stores.etcd.store import EtcdStore
from domicile.stores.loop_thread import LoopThread

READ_S = 30.0
_ALL = b"\0"


def etcd_commits(address: EtcdAddress, after: int, now: Callable[[], float]) -> list[QueuedCommit]:
    """All commits after a revision, the oldest first; those of other roots are empty.

    Blocks, whether or not the caller has an event loop. The user must be allowed to read all keys.
    The times are those of the clock `now` of this machine, if all writers are on it, too.
    """
    thread = LoopThread("domicile-store-log")
    try:
        events = thread.submit(lambda: read_events(address, after)).result(READ_S)
    except (grpc.aio.AioRpcError, TimeoutError) as error:
        raise StoreUnavailable(f"the log of {address.shown} can't be read: {error}") from error
    finally:
        thread.close()
    ahead_s = time.monotonic() - now()
    # etcd begins with revision 1, which is no commit of anybody.
    found = [] if after else [QueuedCommit(1, 0.0, "", [], [], expiry=False)]
    leases: dict[int, str] = {}
    for revision, group in groupby(events, lambda event: event.kv.mod_revision):
        found.append(_commit(address, revision, list(group), leases, ahead_s))
    return list(reversed(list(_timed(found))))


def _timed(commits: list[QueuedCommit]) -> Iterator[QueuedCommit]:
    """From the newest to the oldest, each with a time.

    What has none is taken to have happened when the next that has one was sent. If there is no next
    one yet, it is left out: it comes with a later read. The times are too early for commits that
    wait, as for a server that stands still.
    """
    at = 0.0
    for commit in reversed(commits):
        at = commit.at or at
        if at:
            yield replace(commit, at=at)


def _commit(
    address: EtcdAddress, revision: int, events: list[pb.Event], leases: dict[int, str],
    ahead_s: float,
) -> QueuedCommit:  # fmt: skip
    found = QueuedCommit(revision, 0.0, "", [], [], expiry=True)
    by, at, ends = "", 0.0, True
    for event in events:
        kv = event.kv
        gone = event.type == pb.Event.DELETE
        if kv.key == address.log and not gone:
            line = msgspec.json.decode(kv.value, type=LogLine)
            by, at, ends = line.by, line.at - ahead_s, False
        elif kv.key.startswith(address.leases) and not gone:
            leases[kv.lease] = kv.value.decode()
            ends = False
        elif kv.key.startswith(address.data):
            key = kv.key[len(address.data) :]
            if gone:
                found.deletes.append(key)
            else:
                lease = leases.get(kv.lease, f"{kv.lease:016x}") if kv.lease else None
                found.puts.append((key, kv.value, lease))
    expiry = ends and bool(found.deletes)
    return QueuedCommit(revision, at, by, found.puts, found.deletes, expiry, guessed=not at)


async def read_events(address: EtcdAddress, after: int) -> list[pb.Event]:
    """What was written and deleted after a revision, whoever did it."""
    store = EtcdStore(address, by="log", op_timeout_s=READ_S)
    try:
        until = store.client.connections.deadline()
        newest = await store.client.newest(until)
        events: list[pb.Event] = []
        if newest <= max(after, 1):
            return events
        session = await store.client.connections.session(until)
        stream = store.client.connections.stream(session, WATCH)(
            metadata=store.client.connections.metadata()
        )
        request = pb.WatchCreateRequest(
            key=_ALL, range_end=_ALL, start_revision=after + 1, fragment=True
        )
        await stream.write(pb.WatchRequest(create_request=request))
        while not events or events[-1].kv.mod_revision < newest:
            events.extend(_events(await stream.read(), address))
        stream.cancel()
        return events
    finally:
        await store.close()


def _events(reply: Any, address: EtcdAddress) -> Iterator[pb.Event]:
    if reply is grpc.aio.EOF or reply.canceled:
        raise StoreUnavailable(f"the log of {address.shown} is not complete; it was compacted")
    yield from reply.events
