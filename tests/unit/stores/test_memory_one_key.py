"""A memory store that commits one key at a time (S8): what it refuses, and what it looks up."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from functools import wraps
from typing import ParamSpec

import pytest

from domicile.core.state.txn import (
    Absent,
    At,
    Committed,
    Conflict,
    Delete,
    Present,
    Put,
    singly,
)
from domicile.membership.clock import SystemClock
from domicile.membership.store_calls import StoreCalls
from domicile.ports.store import writes_one_key
from domicile.stores.memory.store import MemoryStore
from domicile.stores.namespace import Namespace

P = ParamSpec("P")


def on_a_loop(test: Callable[P, Coroutine[None, None, None]]) -> Callable[P, None]:
    @wraps(test)
    def run(*args: P.args, **kwargs: P.kwargs) -> None:
        asyncio.run(test(*args, **kwargs))

    return run


@on_a_loop
async def test_a_store_says_that_it_commits_one_key() -> None:
    single = MemoryStore(SystemClock(), one_key=True).client("a")
    several = MemoryStore(SystemClock()).client("a")
    assert [writes_one_key(store) for store in (single, several)] == [True, False]
    assert [Namespace(store, "c").one_key for store in (single, several)] == [True, False]


@on_a_loop
async def test_a_commit_of_two_keys_is_refused() -> None:
    store = MemoryStore(SystemClock(), one_key=True).client("a")
    with pytest.raises(ValueError, match="make one commit for each"):
        await store.commit([], [Put(b"a", b""), Delete(b"b")])
    with pytest.raises(ValueError, match="compares that of the written key only"):
        await store.commit([At(b"a", 1)], [Put(b"b", b"")])
    assert (await store.list(b"")).items == ()


@on_a_loop
async def test_other_keys_are_looked_up_before_the_write() -> None:
    """What was found may be over when the write lands: it proves only what is final."""

    async def meanwhile() -> None:
        await other.commit([], [Delete(b"node")])

    whole = MemoryStore(SystemClock(), one_key=True, between=meanwhile)
    store, other = whole.client("a"), whole.client("b")
    assert await store.commit([Present(b"node")], [Put(b"k", b"")]) == Conflict(b"node")
    await other.commit([], [Put(b"node", b"")])
    assert isinstance(await store.commit([Present(b"node")], [Put(b"k", b"")]), Committed)
    assert await store.get(b"node") is None


@on_a_loop
async def test_the_written_key_is_compared_with_the_write() -> None:
    async def meanwhile() -> None:
        await other.commit([], [Put(b"k", b"theirs")])

    whole = MemoryStore(SystemClock(), one_key=True, between=meanwhile)
    store, other = whole.client("a"), whole.client("b")
    outcome = await store.commit([Absent(b"x"), Absent(b"k")], [Put(b"k", b"mine")])
    assert outcome == Conflict(b"k")


def test_a_commit_of_several_keys_becomes_one_for_each() -> None:
    conditions = (Present(b"n"), At(b"l", 3), Absent(b"w"))
    assert singly(conditions, (Delete(b"n"), Put(b"d", b""), Delete(b"l"))) == [
        ((Present(b"n"), Absent(b"w")), (Delete(b"n"),)),
        ((Absent(b"w"),), (Put(b"d", b""),)),
        ((At(b"l", 3), Absent(b"w")), (Delete(b"l"),)),
    ]


@pytest.mark.parametrize(("one_key", "written"), [(True, [b"a"]), (False, [])])
@on_a_loop
async def test_a_refused_write_stops_those_behind_it(one_key: bool, written: list[bytes]) -> None:
    store = MemoryStore(SystemClock(), one_key=one_key).client("a")
    writes = [Put(b"a", b""), Put(b"b", b""), Put(b"c", b"")]
    assert await StoreCalls(store, 5.0).commit_each([Present(b"b")], writes) == Conflict(b"b")
    assert [item.key for item in (await store.list(b"")).items] == written
