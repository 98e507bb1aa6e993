"""The newest commits of the embedded store, as the reading thread found them.

A watch that has seen all earlier commits takes new ones from here. Otherwise each process of a
machine would read each commit twice: once to find out which watches it concerns (I8), once for
them. Only `domicile.stores.sqlite.store` uses it, on the event loop. Nothing here reads the file.
"""

from __future__ import annotations

from collections import deque

from domicile.core.state.txn import Change, Changes
from domicile.stores.sqlite.jobs import News, WatchedChanges

KEPT = 256
KEPT_BYTES = 4 * 1024 * 1024
"""I6: most commits that are kept here, and most bytes of them; older commits are in the file."""


class Recent:
    """All commits of one history between two revisions, without those that the file has deleted."""

    def __init__(self, kept: int = KEPT, kept_bytes: int = KEPT_BYTES) -> None:
        self._kept, self._kept_bytes = kept, kept_bytes
        self._bytes = 0
        self._since, self._upto = 0, -1
        self._generation = 0
        self._commits: deque[Changes] = deque()

    def add(self, news: News) -> None:
        """Take what the reading thread's next look found."""
        if news.changes is None or (news.since, news.generation) != (self._upto, self._generation):
            self._commits.clear()
            self._bytes = 0
            self._since = news.upto if news.changes is None else news.since
            self._generation = news.generation
        for commit in news.changes or ():
            self._commits.append(commit)
            self._bytes += _size_bytes(commit)
        self._upto = news.upto
        self._since = max(self._since, news.trimmed)
        while self._commits and (self._full or self._commits[0].revision <= self._since):
            oldest = self._commits.popleft()
            self._bytes -= _size_bytes(oldest)
            self._since = max(self._since, oldest.revision)

    @property
    def _full(self) -> bool:
        return len(self._commits) > self._kept or self._bytes > self._kept_bytes

    def after(self, prefix: bytes, seen: int, generation: int) -> WatchedChanges | None:
        """All changes under a prefix after a revision; None if they are not all kept here."""
        if generation != self._generation or not self._since <= seen <= self._upto:
            return None
        found: list[Changes] = []
        for commit in self._commits:
            if commit.revision > seen and (changes := _under(prefix, commit.changes)):
                found.append(Changes(commit.revision, changes))
        return WatchedChanges(found, self._upto)


def _size_bytes(commit: Changes) -> int:
    return sum(
        len(change.key) + (0 if change.item is None else len(change.item.value))
        for change in commit.changes
    )


def _under(prefix: bytes, changes: tuple[Change, ...]) -> tuple[Change, ...]:
    return tuple([change for change in changes if change.key.startswith(prefix)])
