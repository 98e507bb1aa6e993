"""How a member's record is kept in the store: under a lease, or without one (C9).

Only `domicile.membership.member` uses it. A record under a lease disappears when renewals stop. A
record without a lease stays until its holder removes it, or another node proves that the holder can
never run again. So a holder that stops must remove its record. It must never report the record as
removed while a write of the record may still reach the store.
"""

from __future__ import annotations

from typing import Protocol

from domicile.core.lease.lease import FOREVER_S, RECORD_FOREVER_S
from domicile.core.state.txn import At, Committed, Delete
from domicile.errors import StoreRewound, StoreUnavailable
from domicile.membership.store_calls import MemberStoreCalls

REMOVE_TRIES = 3


class Registration(Protocol):
    """What keeps a record in the store. Each call is a single try unless it says otherwise."""

    @property
    def lease(self) -> str | None:
        """The lease to which the record is attached."""
        ...

    async def take(self) -> float:
        """Called before the record is written; returns the ttl that the store grants."""
        ...

    async def keep(self) -> float | None:
        """Renew; the ttl, or None if the store refuses."""
        ...

    def recorded(self, ttl_s: float) -> float:
        """The ttl to write into the record (C5)."""
        ...

    async def remove(self, key: bytes, revision: int, unsure: bool) -> bool:
        """Remove the record, in a few tries; True if it is gone and cannot come back.

        `revision`: of the record when last seen (0: never). `unsure`: a write may be under way.
        """
        ...


class Leased:
    """A record that disappears with its lease."""

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
        """As `Registration.recorded`: the granted ttl."""
        return ttl_s

    async def remove(self, key: bytes, revision: int, unsure: bool) -> bool:
        """As `Registration.remove`: a later write fails, because its lease is gone."""
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
    """A record that stays until it is removed. Its holder does not renew; it only reads it (L1)."""

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
        """As `Registration.recorded`: so long that no leader removes the record by time alone."""
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
                # The store in its present state may hold the record too: read it again.
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
