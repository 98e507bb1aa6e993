"""One cluster's part of a store that several clusters share: its keys begin with the cluster name.

The backends wrap every store in a `Namespace`. Callers never see the prefix.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence

from domicile.core.state.txn import (
    Absent,
    At,
    Change,
    Changes,
    Condition,
    Conflict,
    Delete,
    Item,
    Listing,
    Outcome,
    Present,
    Put,
    Write,
)
from domicile.errors import ConfigError
from domicile.ports.store import (
    NeedsTicks,
    OffersThreads,
    Store,
    ThreadedStore,
    writes_one_key,
)


def check_cluster(name: str) -> None:
    """Raise `ConfigError` for an invalid cluster name: keys of a store begin with it and `/`."""
    if not name or "/" in name or not name.isprintable():
        raise ConfigError(
            f"cluster={name!r} is no name for a cluster: write at least one character and no /, "
            "as in cluster='blue'"
        )


class Namespace:
    """Implements `Store` on another store. Revisions and leases are those of the whole store."""

    def __init__(self, store: Store, name: str) -> None:
        self._store = store
        self._prefix = name.encode() + b"/"

    async def get(self, key: bytes) -> Item | None:
        """As `Store.get`."""
        item = await self._store.get(self._prefix + key)
        return None if item is None else self._inner(item)

    async def list(self, prefix: bytes) -> Listing:
        """As `Store.list`."""
        listing = await self._store.list(self._prefix + prefix)
        return Listing(listing.revision, tuple(map(self._inner, listing.items)))

    async def commit(self, conditions: Sequence[Condition], writes: Sequence[Write]) -> Outcome:
        """As `Store.commit`."""
        outcome = await self._store.commit(
            [self._condition(one) for one in conditions], [self._write(one) for one in writes]
        )
        if isinstance(outcome, Conflict):
            return Conflict(self._strip(outcome.key))
        return outcome

    async def grant(self, lease: str, ttl_s: float) -> float:
        """As `Store.grant`."""
        return await self._store.grant(lease, ttl_s)

    async def renew(self, lease: str) -> float | None:
        """As `Store.renew`."""
        return await self._store.renew(lease)

    async def revoke(self, lease: str) -> None:
        """As `Store.revoke`."""
        await self._store.revoke(lease)

    async def watch(self, prefix: bytes, from_revision: int) -> AsyncIterator[Changes]:
        """As `Store.watch`."""
        async for changes in self._store.watch(self._prefix + prefix, from_revision):
            yield Changes(
                changes.revision,
                tuple(
                    Change(
                        self._strip(one.key), None if one.item is None else self._inner(one.item)
                    )
                    for one in changes.changes
                ),
            )

    def beside(self, prefix: bytes = b"") -> ThreadedStore | None:
        """As `OffersThreads.beside`, if the whole store offers it."""
        store = self._store
        return store.beside(self._prefix + prefix) if isinstance(store, OffersThreads) else None

    @property
    def one_key(self) -> bool:
        """As `MayWriteOneKey.one_key`."""
        return writes_one_key(self._store)

    @property
    def tick_s(self) -> float:
        """As `NeedsTicks.tick_s`: 0 if the whole store needs no ticks."""
        return self._store.tick_s if isinstance(self._store, NeedsTicks) else 0.0

    async def tick(self) -> None:
        """As `NeedsTicks.tick`, for the whole store."""
        if isinstance(self._store, NeedsTicks):
            await self._store.tick()

    async def close(self) -> None:
        """As `Store.close`, of the whole store."""
        await self._store.close()

    def _strip(self, key: bytes) -> bytes:
        return key[len(self._prefix) :]

    def _inner(self, item: Item) -> Item:
        return Item(self._strip(item.key), item.value, item.created, item.revision)

    def _condition(self, condition: Condition) -> Condition:
        key = self._prefix + condition.key
        if isinstance(condition, At):
            return At(key, condition.revision)
        return Absent(key) if isinstance(condition, Absent) else Present(key)

    def _write(self, write: Write) -> Write:
        key = self._prefix + write.key
        return Put(key, write.value, write.lease) if isinstance(write, Put) else Delete(key)
