"""The log of commits of a Redis store, for checkers and tools that run beside its server."""

from __future__ import annotations

import time
from collections.abc import Callable

from domicile.errors import StoreUnavailable, WatchCompacted
from domicile.stores.commit_log import QueuedCommit
from domicile.stores.loop_thread import LoopThread
from domicile.stores.redis.calls import LogEntry, ScriptCalls
from domicile.stores.redis.server import RedisAddress, RedisServer

READ_S = 30.0
PIECE = 256
"""Commits that are read at once."""


def redis_commits(
    address: RedisAddress, after: int, now: Callable[[], float]
) -> list[QueuedCommit]:
    """The commits after a revision that the store still keeps, the oldest first.

    Blocks, whether or not the caller has an event loop. The times are those of the clock `now` of
    this machine, if the server is on it, too.
    """
    thread = LoopThread("domicile-store-log")
    try:
        entries = thread.submit(lambda: _read(address, after)).result(READ_S)
    except TimeoutError as error:
        raise StoreUnavailable(
            f"the log of the store {address.shown} can't be read: no answer within {READ_S:g} s; "
            "look at the server and the network"
        ) from error
    finally:
        thread.close()
    ahead_s = time.time() - now()
    return [_commit(entry, ahead_s) for entry in entries]


async def _read(address: RedisAddress, seen: int) -> list[LogEntry]:
    server = RedisServer(address, READ_S)
    calls = ScriptCalls(server, address.keys, by="log", reads_only=True)
    found: list[LogEntry] = []
    try:
        while True:
            try:
                entries, upto = await calls.entries_after(seen, PIECE)
            except WatchCompacted:
                # What is forgotten is left out.
                state = await calls.sure("state")
                seen = int(state.results[3])
                continue
            found += entries
            if len(entries) < PIECE:
                return found
            seen = upto
    finally:
        await server.close()


def _commit(entry: LogEntry, ahead_s: float) -> QueuedCommit:
    at = entry.wall_s - ahead_s
    found = QueuedCommit(entry.changes.revision, at, entry.by, [], [], entry.expiry)
    for change, lease in zip(entry.changes.changes, entry.leases, strict=True):
        if change.item is None:
            found.deletes.append(change.key)
        else:
            found.puts.append((change.key, change.item.value, lease))
    return found
