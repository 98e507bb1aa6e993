"""The reference store: everything in one process's memory; nothing survives the process.

Simulations, tests and single-process programs share one `MemoryStore` and give each process a
`client` of it. It must never answer in a way that a store over a network could not.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Sequence

from domicile.core.state.txn import (
    Change,
    Changes,
    Condition,
    Conflict,
    Item,
    Listing,
    Outcome,
    Write,
    check_one_key,
)
from domicile.errors import StoreRewound, StoreUnavailable
from domicile.ports.clock import Clock
from domicile.ports.meter import Meter, NoMeter
from domicile.ports.store import Store
from domicile.stores.memory.data import Data, Snapshot
from domicile.stores.memory.log import MemoryLog, under

KEPT_COMMITS = 10_000


class MemoryStore:
    """A store that processes share. `client(by)` is one process's interface to it.

    A watch may start at any of the last `kept_commits` commits; older commits are compacted. With a
    `wall` clock in seconds, leases run on store time made from it (S4); `clock` only gives ticks.

    With `one_key` a commit writes one key, as in a store without transactions (S8): what it demands
    of other keys is looked up first. `between` may then take time, or do something, before the
    write.
    """

    def __init__(
        self,
        clock: Clock,
        meter: Meter | None = None,
        *,
        kept_commits: int = KEPT_COMMITS,
        wall: Callable[[], float] | None = None,
        one_key: bool = False,
        between: Callable[[], Awaitable[None]] | None = None,
    ) -> None:
        if kept_commits < 1:
            raise ValueError(f"kept_commits is {kept_commits}; keep at least one commit")
        self._log = MemoryLog(kept_commits)
        self._data = Data(clock, NoMeter() if meter is None else meter, self._log, wall)
        self._one_key, self._between = one_key, between

    def client(self, by: str) -> Store:
        """An interface to this store for one process; `commit` events name the process `by`.

        It belongs to the present history: after a `rewind` every call raises `StoreRewound`, and
        the process needs another client.
        """
        if self._one_key:
            return _OneKeyClient(self._data, self._log, by, self._between)
        return _Client(self._data, self._log, by)

    def peek(self, key: bytes) -> Item | None:
        """The item of a key now, for tests and tools in the same process."""
        return self._data.get(key)

    @property
    def revision(self) -> int:
        """The revision of the newest commit; 0 before the first."""
        return self._log.revision

    def compact(self, revision: int) -> None:
        """Forget the changes up to a revision: a watch from before it must list again."""
        self._log.compact(revision)

    def snapshot(self) -> Snapshot:
        """A backup of everything that is stored now."""
        return self._data.snapshot()

    def rewind(self, snapshot: Snapshot) -> None:
        """Lose every commit since a backup was made, and begin another history (S5)."""
        self._data.restore(snapshot)

    def halt(self) -> None:
        """Stop as if the server were down: store time stops and no lease expires."""
        self._data.halt()

    def go_on(self) -> None:
        """End a `halt`."""
        self._data.go_on()


class _Watch:
    """An iterator without a task: commits that it has not seen yet stay in the store's log."""

    def __init__(self, client: _Client, prefix: bytes, seen: int) -> None:
        self.owner = client
        self._prefix = prefix
        self._seen = seen
        self._waits = False

    def __aiter__(self) -> AsyncIterator[Changes]:
        return self

    async def __anext__(self) -> Changes:
        if self._waits:
            raise RuntimeError("this watch is already being read; start a second watch instead")
        while True:
            self.owner.use().expire_due()
            found = self.owner.log.after(self._seen, self._prefix)
            if isinstance(found, Changes):
                self._seen = found.revision
                return found
            self._seen = found
            self._waits = True
            try:
                await self.owner.log.wait(self)
            finally:
                self._waits = False

    def skips(self, changes: Sequence[Change], revision: int) -> bool:
        """Whether a commit does not concern this watch: it then counts as seen."""
        if self._seen != revision - 1 or under(self._prefix, changes):
            return False
        self._seen = revision
        return True


class _Client:
    """One process's interface to a `MemoryStore`. Implements `Store`."""

    def __init__(self, data: Data, log: MemoryLog, by: str) -> None:
        self.log = log
        self._data = data
        self._by = by
        self._history = log.history
        self._closed = False

    def use(self) -> Data:
        """The data, unless this client is closed or of another history."""
        if self._closed:
            raise StoreUnavailable(f"the store client of {self._by} is closed; make another one")
        if self._history != self.log.history:
            raise StoreRewound(
                f"the store went back to revision {self.log.revision} or before and began "
                f"history {self.log.history}, {self._by} knows history {self._history}; drop "
                "what was learned from it, make another client and list again"
            )
        return self._data

    async def get(self, key: bytes) -> Item | None:
        return self.use().get(key)

    async def list(self, prefix: bytes) -> Listing:
        return self.use().scan(prefix)

    async def commit(self, conditions: Sequence[Condition], writes: Sequence[Write]) -> Outcome:
        return self.use().commit(self._by, conditions, writes)

    async def grant(self, lease: str, ttl_s: float) -> float:
        return self.use().grant(lease, ttl_s)

    async def renew(self, lease: str) -> float | None:
        return self.use().renew(lease)

    async def revoke(self, lease: str) -> None:
        self.use().revoke(lease)

    def watch(self, prefix: bytes, from_revision: int) -> AsyncIterator[Changes]:
        return _Watch(self, prefix, from_revision)

    async def close(self) -> None:
        self._closed = True
        self.log.wake(self)


class _OneKeyClient(_Client):
    """The same without transactions. Implements `MayWriteOneKey`."""

    one_key = True

    def __init__(
        self, data: Data, log: MemoryLog, by: str, between: Callable[[], Awaitable[None]] | None
    ) -> None:
        super().__init__(data, log, by)
        self._between = between

    async def commit(self, conditions: Sequence[Condition], writes: Sequence[Write]) -> Outcome:
        check_one_key(conditions, writes)
        keys = {write.key: None for write in writes}
        data = self.use()
        data.expire_due()
        looked_up = [one for one in conditions if one.key not in keys]
        conflict = data.conflict(looked_up)
        if conflict is not None:
            return Conflict(conflict)
        if looked_up and self._between is not None:
            await self._between()
        compared = [one for one in conditions if one.key in keys]
        return self.use().commit(self._by, compared, writes)
