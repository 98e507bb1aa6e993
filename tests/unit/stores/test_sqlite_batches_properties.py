"""Commits and leases that are asked for at once: the SQLite store does as the memory store does."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Sequence
from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st
from sqlite_lab import SqliteStores, held, lab

from domicile.core.state.txn import (
    Absent,
    At,
    Change,
    Condition,
    Delete,
    Listing,
    Outcome,
    Present,
    Put,
)
from domicile.ports.store import Store
from domicile.stores.memory.store import MemoryStore
from domicile.stores.sqlite.store import commits
from domicile.testing.sim.clock import ManualClock

KEYS = [b"a", b"", b"a/1", b"\xff", b"c\0"]
TTL_S = {"short": 2.0, 'lo"ng\\ ü': 1e6}
"""One that runs out and one that does not: which of two ends first need not be the same."""

keys, leases = st.sampled_from(KEYS), st.sampled_from(list(TTL_S))
conditions = st.lists(
    st.tuples(
        keys,
        st.sampled_from(["absent", "present", "as listed", "later"]),
        st.integers(0, 5),
    ),
    max_size=2,
)
writes = st.lists(
    st.one_of(
        st.builds(Put, keys, st.binary(max_size=3), st.sampled_from(["short", None, *TTL_S])),
        keys.map(Delete),
    ),
    max_size=3,
    unique_by=lambda write: write.key,
)
commit = st.tuples(st.just("commit"), conditions, writes)
call = st.one_of(
    commit, commit, commit, st.tuples(st.sampled_from(["grant", "renew", "revoke"]), leases)
)
rounds = st.lists(
    st.tuples(st.sampled_from([2, 0, 1, 3]), st.lists(call, min_size=1, max_size=12)),
    min_size=1,
    max_size=6,
)

Call = tuple[object, ...]
Round = tuple[int, list[Call]]


def condition(key: bytes, kind: str, more: int, listing: Listing) -> Condition:
    """As of the listing before a round, or such that an earlier commit of the round fulfils it."""
    listed = {item.key: item.revision for item in listing.items}
    match kind:
        case "absent":
            return Absent(key)
        case "present":
            return Present(key)
        case "as listed":
            return At(key, listed.get(key, 9))
        case _:
            return At(key, listing.revision + more)


async def do(store: Store, what: Call, listing: Listing) -> Outcome | float | None:
    match what:
        case ("commit", conditions, writes):
            held_to = [condition(*each, listing) for each in conditions]  # type: ignore[attr-defined]
            return await store.commit(held_to, writes)  # type: ignore[arg-type]
        case ("grant", str(lease)):
            return await store.grant(lease, TTL_S[lease])
        case ("renew", str(lease)):
            return await store.renew(lease)
        case (_, str(lease)):
            return await store.revoke(lease)
        case _:
            raise AssertionError(what)


async def history(store: Store, prefix: bytes, upto: int) -> list[tuple[int, list[Change]]]:
    """What a watch tells of it. Its end is marked, by a commit."""
    await store.commit([], [Put(prefix + b"end", b"")])
    found: list[tuple[int, list[Change]]] = []
    async for changes in store.watch(prefix, 0):
        found.append((changes.revision, sorted(changes.changes, key=lambda each: each.key)))
        if changes.revision > upto:
            break
    return found


async def play(stores: SqliteStores, played: Sequence[Round]) -> None:
    clock = ManualClock()
    memory = MemoryStore(clock).client("a")
    store, other = stores.client("a"), stores.client("b")
    for each in (store, memory):
        for lease, ttl_s in TTL_S.items():
            await each.grant(lease, ttl_s)
    for seconds, calls in played:
        listing = await memory.list(b"")
        with held(store):
            tasks = [asyncio.ensure_future(do(store, each, listing)) for each in calls]
            await asyncio.sleep(0)
            # What runs out meanwhile ends with the first of them (S3).
            await stores.advance(seconds)
        found = await asyncio.gather(*tasks)
        clock.advance(seconds)
        assert found == [await do(memory, each, listing) for each in calls]
        assert await other.list(b"") == await memory.list(b"")
    upto = (await memory.list(b"")).revision
    log = commits(stores.path)
    assert [each.revision for each in log] == list(range(1, upto + 1))
    for prefix in (b"a", b""):
        assert await history(store, prefix, upto) == await history(memory, prefix, upto)


@settings(max_examples=60)
@given(played=rounds)
def test_at_once_is_as_one_after_the_other(played: list[Round]) -> None:
    async def main() -> None:
        with tempfile.TemporaryDirectory() as directory:
            async with asyncio.timeout(60), lab(Path(directory) / "store.db") as stores:
                await play(stores, played)

    asyncio.run(main())
