"""How a member's record stands in the store: under a lease, or without one (C9).

Only `domicile.membership.member` uses it. Under a lease the record goes when renewals stay away.
Without one it stays until its holder removes it or somebody proves that the holder can never run
again; so whoever stops must remove it, and must never claim to have done so while a write of the
record may still arrive.
"""

from __future__ import annotations

from typing import Protocol

from domicile.core.lease.lease import FOREVER_S, RECORD_FOREVER_S
from domicile.core.state.txn import At, Committed, Delete
from domicile.errors import StoreRewound, StoreUnavailable
from domicile.membership.store_calls import MemberStoreCalls

REMOVE_TRIES = 3


class Registration(Protocol):
    """The right by which a record stands. Calls are single tries unless they say otherwise."""

    @property
    def lease(self) -> str | None:
        """What the record is attached to."""
        ...

    async def take(self) -> float:
        """Before the record is written: the ttl that the store gives."""
        ...

    async def keep(self) -> float | None:
        """Renew; the ttl, or None if the store refuses."""
        ...

    def recorded(self, ttl_s: float) -> float:
        """The ttl that the record shall name (C5)."""
        ...

    async def remove(self, key: bytes, revision: int, unsure: bool) -> bool:
        """Have the record gone, in a few tries; True once it is and can't come back.

        `revision` is where it was last seen (0: never); `unsure`: a write of it may be under way.
        """
        ...


class Leased:
    """A record that goes when its lease does."""

    def __init__(self, calls: MemberStoreCalls, lease: str, ttl_s: float) -> None:
        self._calls, self._ttl_s = calls, ttl_s
        self.lease: str | None = lease
        self._lease = lease

    async def take(self) -> float:
        """As `Registration.take`."""
        return await self._calls.bounded(self._calls.store.grant(self._lease, self._ttl_s))

    async def keep(self) -> float | None:
        """As `Registration.keep`."""
        return await self._calls.bounded(self._calls.store.renew(self._lease))

    def recorded(self, ttl_s: float) -> float:
        """As `Registration.recorded`: what was granted."""
        return ttl_s

    async def remove(self, key: bytes, revision: int, unsure: bool) -> bool:
        """As `Registration.remove`: a write that comes later finds its lease gone."""
        for attempt in range(1, REMOVE_TRIES + 1):
            try:
                await self._calls.bounded(self._calls.store.revoke(self._lease))
            except StoreRewound:
                return False
            except StoreUnavailable:
                if attempt < REMOVE_TRIES:
                    await self._calls.pause(attempt)
            else:
                return True
        return False


class Unleased:
    """A record that stays until it is removed. To hold it costs nothing but looking at it (L1)."""

    def __init__(self, calls: MemberStoreCalls) -> None:
        self._calls = calls
        self.lease: str | None = None

    async def take(self) -> float:
        """As `Registration.take`."""
        return FOREVER_S

    async def keep(self) -> float | None:
        """As `Registration.keep`."""
        return FOREVER_S

    def recorded(self, ttl_s: float) -> float:
        """As `Registration.recorded`: no leader's patience may outlast this node."""
        return RECORD_FOREVER_S

    async def remove(self, key: bytes, revision: int, unsure: bool) -> bool:
        """As `Registration.remove`."""
        if not revision and not unsure:
            return True
        for attempt in range(1, REMOVE_TRIES + 1):
            try:
                if revision and await self._delete(key, revision):
                    return not unsure
                item = await self._calls.bounded(self._calls.store.get(key))
            except StoreRewound:
                # The store that is there now may hold the record, too: look again.
                revision = 0
            except StoreUnavailable:
                if attempt < REMOVE_TRIES:
                    await self._calls.pause(attempt)
            else:
                if item is None:
                    return not unsure
                revision = item.revision
        return False

    async def _delete(self, key: bytes, revision: int) -> bool:
        commit = self._calls.store.commit([At(key, revision)], [Delete(key)])
        return isinstance(await self._calls.bounded(commit), Committed)
