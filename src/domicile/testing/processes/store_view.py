"""A view of the store, kept up to date by a watch, for reading only.

Used by `domicile.testing.processes.cluster`. It writes nothing.
"""

from __future__ import annotations

import asyncio

from domicile.core.state.cluster_view import ClusterView
from domicile.errors import StoreError
from domicile.ports.store import Store

RETRY_S = 0.05


class StoreView:
    """`members` is the last known state of the store; it may be a moment old."""

    def __init__(self, store: Store) -> None:
        self._store = store
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
            try:
                async for changes in self._store.watch(b"", self.members.revision):
                    self.members.apply(changes)
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
