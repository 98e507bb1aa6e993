"""The thread side of a store on a server: a second client on an event loop of its own.

A store that is asked over a network makes a `LoopThreadedStore` for `OffersThreads.beside`. It
shares nothing with the client on the main loop, so a blocked loop does not delay a renewal (L1).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import Future
from typing import Any, Protocol, TypeVar

from domicile.core.state.txn import At, Condition, Conflict, Item, Outcome, Put, Unknown, Write
from domicile.errors import StoreUnavailable
from domicile.ports.store import Kept
from domicile.stores.loop_thread import LoopThread

T = TypeVar("T")


class LeaseClient(Protocol):
    """What a second client must be able to do. It is made and used on the thread's loop only.

    It belongs to the history that was known when it was made: after a rewind every call raises
    `StoreRewound` (S5). Every call ends within the time that the store gives to a call.
    """

    async def keep(self, lease: str, key: bytes) -> Kept:
        """Renew a lease and, after that, read a key (L1)."""
        ...

    async def commit(self, conditions: Sequence[Condition], writes: Sequence[Write]) -> Outcome:
        """As `Store.commit`."""
        ...

    async def close(self) -> None:
        """Close the connections."""
        ...


class LoopThreadedStore:
    """Implements `ThreadedStore` for the keys under a prefix. The store that made it closes it."""

    def __init__(self, make: Callable[[], LeaseClient], prefix: bytes, name: str) -> None:
        self._make, self._prefix = make, prefix
        self._thread = LoopThread(name)
        self._client: LeaseClient | None = None
        self._closed = False
        """Whether this ends what runs: then its callers are told as by any lost connection."""

    def keep(self, lease: str, key: bytes) -> Future[Kept]:
        """As `ThreadedStore.keep`."""

        async def kept() -> Kept:
            try:
                found = await self._opened().keep(lease, self._prefix + key)
            except asyncio.CancelledError:
                if self._closed:
                    raise self._away() from None
                raise
            if found.item is None:
                return found
            item = found.item
            return Kept(found.ttl_s, Item(key, item.value, item.created, item.revision))

        return self._submit(kept)

    def rewrite(self, key: bytes, revision: int, value: bytes, lease: str) -> Future[Outcome]:
        """As `ThreadedStore.rewrite`."""
        inner = self._prefix + key
        conditions = [At(inner, revision)] if revision else []

        async def written() -> Outcome:
            try:
                outcome = await self._opened().commit(conditions, [Put(inner, value, lease)])
            except asyncio.CancelledError:
                if self._closed:
                    return Unknown()
                raise
            return Conflict(key) if isinstance(outcome, Conflict) else outcome

        return self._submit(written)

    def close(self) -> None:
        """Close the second client and end the thread. Returns at once."""
        self._closed = True
        self._thread.close(self._close_client)

    async def _close_client(self) -> None:
        client, self._client = self._client, None
        if client is not None:
            await client.close()

    def _opened(self) -> LeaseClient:
        if self._client is None:
            self._client = self._make()
        return self._client

    def _submit(self, work: Callable[[], Coroutine[Any, Any, T]]) -> Future[T]:
        try:
            return self._thread.submit(work)
        except RuntimeError:
            refused: Future[T] = Future()
            refused.set_exception(self._away())
            return refused

    def _away(self) -> StoreUnavailable:
        return StoreUnavailable("the store's client is closed")
