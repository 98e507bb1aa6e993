"""The newest commits of the embedded store, as the reading thread's looks found them.

A watch that has seen all that came before takes them from here: without that, each of a machine's
processes would read each commit twice, once to see whom it concerns (I8). Used by
`domicile.stores.sqlite` alone, on the event loop.
"""

from __future__ import annotations

from collections import deque

from domicile.core.txn import Change, Changes
from domicile.stores.sqlite_jobs import Log, News

KEPT = 256
"""I6: how many commits are kept here; older ones are in the file."""


class Recent:
    """All commits after one revision, up to another, of one history; none that the file forgot."""

    def __init__(self, kept: int = KEPT) -> None:
        self._kept = kept
        self._since, self._upto = 0, -1
        self._generation = 0
        self._commits: deque[Changes] = deque()

    def add(self, news: News) -> None:
        """What the next look found."""
        if news.changes is None or (news.since, news.generation) != (self._upto, self._generation):
            self._commits.clear()
            self._since = news.upto if news.changes is None else news.since
            self._generation = news.generation
        self._commits.extend(news.changes or ())
        self._upto = news.upto
        self._since = max(self._since, news.trimmed)
        commits = self._commits
        while commits and (len(commits) > self._kept or commits[0].revision <= self._since):
            self._since = max(self._since, commits.popleft().revision)

    def after(self, prefix: bytes, seen: int, generation: int) -> Log | None:
        """All changes under a prefix since a revision; None if this is not known here."""
        if generation != self._generation or not self._since <= seen <= self._upto:
            return None
        found: list[Changes] = []
        for commit in self._commits:
            if commit.revision > seen and (changes := _under(prefix, commit.changes)):
                found.append(Changes(commit.revision, changes))
        return Log(found, self._upto)


def _under(prefix: bytes, changes: tuple[Change, ...]) -> tuple[Change, ...]:
    return tuple([change for change in changes if change.key.startswith(prefix)])
