"""A view of the store, kept up to date by a watch, for reading only.

Used by `domicile.testing.processes.cluster`. It writes nothing.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from domicile.core.state.cluster_view import ClusterView
from domicile.errors import StoreError
from domicile.ports.store import Store

RETRY_S = 0.05
CATCHING_UP_S = 1.0
"""What a watch says in its first second may have happened before it began."""


class StoreView:
    """`members` is the last known state of the store; it may be a moment old.

    `seen` has the revisions whose change came as it happened, each with the time by `now`.
    """

    def __init__(self, store: Store, now: Callable[[], float]) -> None:
        self._store, self._now = store, now
        self.seen: dict[int, float] = {}
        self._task: asyncio.Task[None] | None = None
        self.members = ClusterView()

    async def start(self) -> None:
        """Read everything once, then follow the changes."""
        self.members.load(await self._store.list(b""))
        self._task = asyncio.get_running_loop().create_task(self._follow(), name="store-view")

    async def close(self) -> None:
        """Stop following."""
        task, self._task = self._task, None
        if task is not None:
            task.cancel()
            await asyncio.wait([task])

    async def _follow(self) -> None:
        while True:
            began = self._now()
            try:
                async for changes in self._store.watch(b"", self.members.revision):
                    self.members.apply(changes)
                    at = self._now()
                    if at - began > CATCHING_UP_S:
                        self.seen[changes.revision] = at
            except StoreError:
                await asyncio.sleep(RETRY_S)
                await self._again()

    async def _again(self) -> None:
        """After a gap, or a store that went back: drop everything and list again."""
        try:
            listing = await self._store.list(b"")
        except StoreError:
            return
        fresh = ClusterView()
        fresh.load(listing)
        self.members = fresh
