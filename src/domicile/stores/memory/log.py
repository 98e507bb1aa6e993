"""The newest commits of a memory store, and the watches that wait for the next one.

Only `domicile.stores.memory.store` and its data call this module. A history has a number. Commits
that a rewind removes no longer belong to any history, and clients of the old history get
`StoreRewound` (S5). Nothing here knows items or leases.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence
from typing import Protocol

from domicile.core.state.txn import Change, Changes
from domicile.errors import StoreRewound, WatchCompacted


class Waiting(Protocol):
    """A watch that has seen all commits so far."""

    @property
    def owner(self) -> object:
        """The client of the watch."""
        ...

    def skips(self, changes: Sequence[Change], revision: int) -> bool:
        """Whether a commit does not concern the watch."""
        ...


class MemoryLog:
    """One commit for each of the last revisions up to `revision`."""

    def __init__(self, kept_commits: int) -> None:
        self.revision = 0
        self.history = 1
        """The number of this history; each rewind adds one."""
        self._kept_commits = kept_commits
        self._commits: deque[Changes] = deque()
        self._waiting: dict[Waiting, asyncio.Future[None]] = {}

    def publish(self, changes: Sequence[Change]) -> None:
        """Make changes the next revision."""
        self.revision += 1
        self._commits.append(Changes(self.revision, tuple(changes)))
        if len(self._commits) > self._kept_commits:
            self._commits.popleft()
        for watch, waiter in self._waiting.items():
            if not watch.skips(changes, self.revision) and not waiter.done():
                waiter.set_result(None)

    def compact(self, revision: int) -> None:
        """Forget up to a revision."""
        while self._commits and self._commits[0].revision <= revision:
            self._commits.popleft()

    def rewind(self, revision: int) -> None:
        """Begin another history, which shares the commits up to a revision with this one."""
        while self._commits and self._commits[-1].revision > revision:
            self._commits.pop()
        self.revision = revision
        self.history += 1
        for waiter in self._waiting.values():
            if not waiter.done():
                waiter.set_result(None)

    def after(self, seen: int, prefix: bytes) -> Changes | int:
        """The first changes under a prefix after revision `seen`; if none, the newest revision."""
        if seen > self.revision:
            raise StoreRewound(
                f"a watch from revision {seen} is ahead of the store at {self.revision}: "
                "its history went back; drop what was learned from it and list again"
            )
        first = self.revision - len(self._commits)
        if seen < first:
            raise WatchCompacted(
                f"changes after revision {seen} are kept only from {first + 1} on; "
                "list again and watch from the listing's revision"
            )
        for index in range(seen - first, len(self._commits)):
            commit = self._commits[index]
            inside = under(prefix, commit.changes)
            if inside:
                return Changes(commit.revision, inside)
        return self.revision

    async def wait(self, watch: Waiting) -> None:
        """Wait until a commit concerns the watch, or until `wake`."""
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting[watch] = waiter
        try:
            await waiter
        finally:
            del self._waiting[watch]

    def wake(self, owner: object) -> None:
        """Make the watches of a client look again."""
        for watch, waiter in self._waiting.items():
            if watch.owner is owner and not waiter.done():
                waiter.set_result(None)


def under(prefix: bytes, changes: Sequence[Change]) -> tuple[Change, ...]:
    """The changes whose keys have a prefix."""
    return tuple([change for change in changes if change.key.startswith(prefix)])
