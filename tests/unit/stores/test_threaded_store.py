"""The thread side of a store on a server: what its callers are told when it closes."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence

import pytest

from domicile.core.state.txn import Condition, Outcome, Unknown, Write
from domicile.errors import StoreUnavailable
from domicile.ports.store import Kept
from domicile.stores.threaded import LoopThreadedStore

LIMIT_S = 60.0


class Silent:
    """A client whose server never answers."""

    def __init__(self) -> None:
        self.begun = threading.Semaphore(0)

    async def keep(self, lease: str, key: bytes) -> Kept:
        self.begun.release()
        return await asyncio.get_running_loop().create_future()  # type: ignore[no-any-return]

    async def commit(self, conditions: Sequence[Condition], writes: Sequence[Write]) -> Outcome:
        self.begun.release()
        return await asyncio.get_running_loop().create_future()  # type: ignore[no-any-return]

    async def close(self) -> None: ...


def test_calls_under_way_end_with_the_errors_of_a_store() -> None:
    """The thread that renews must not meet a cancellation that nobody there asked for."""
    client = Silent()
    store = LoopThreadedStore(lambda: client, b"", "thread side")
    kept, written = store.keep("l", b"k"), store.rewrite(b"k", 1, b"", "l")
    for _ in range(2):
        assert client.begun.acquire(timeout=LIMIT_S)
    store.close()
    with pytest.raises(StoreUnavailable, match="closed"):
        kept.result(LIMIT_S)
    assert written.result(LIMIT_S) == Unknown()
    with pytest.raises(StoreUnavailable, match="closed"):
        store.keep("l", b"k").result(LIMIT_S)
