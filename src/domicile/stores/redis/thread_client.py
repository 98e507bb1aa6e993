"""The second client of a store, on the loop of the thread that renews leases (L1, DX-10).

Only `domicile.stores.redis.store` makes it. It has a connection of its own and the history that
was known when it was made: after a rewind every call raises `StoreRewound` (S5). It tells the store
how old store time is and of a rewind, so that the store need not ask as often.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from domicile.core.state.txn import Condition, Outcome, Write
from domicile.errors import StoreRewound
from domicile.ports.store import Kept
from domicile.stores.redis.calls import ScriptAnswer, ScriptCalls, item_of, ttl_s
from domicile.stores.redis.server import RedisAddress, RedisServer


class RedisLeaseClient:
    """Implements `domicile.stores.threaded.LeaseClient`."""

    def __init__(
        self,
        address: RedisAddress,
        by: str,
        op_timeout_s: float,
        known: tuple[str, int, str],
        *,
        seen: Callable[[ScriptAnswer], None],
        rewound: Callable[[StoreRewound], None],
    ) -> None:
        self._server = RedisServer(address, op_timeout_s, tells=False)
        self._calls = ScriptCalls(self._server, address.keys, by=by, seen=seen, rewound=rewound)
        self._calls.adopt(known)

    async def keep(self, lease: str, key: bytes) -> Kept:
        """Renew a lease and read a key, in one round trip."""
        answer = await self._calls.sure("keep", lease, key, generation=0)
        if answer.status == "gone":
            return Kept(None, None)
        ttl, raw = answer.results
        return Kept(ttl_s(ttl), None if raw is None else item_of(key, raw))

    async def commit(self, conditions: Sequence[Condition], writes: Sequence[Write]) -> Outcome:
        """As `Store.commit`."""
        return await self._calls.commit(conditions, writes, generation=0)

    async def close(self) -> None:
        """Close the connections."""
        await self._server.close()
