"""Is the journal the one that the store knows, and does it have all that it had before (J11)?

An incarnation asks before it registers, `JournalWriter` before each claim. The store keeps one
history for each role, and for shards how far they are known to have been. Each claim and each
orderly stop leaves that there. A journal that lost events after the last of these notes is not
found. Nothing here may change the journal: a wrong one stays as it is.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence

from domicile.core.ids import ShardKey
from domicile.core.state.agreement import NO_JOURNALS, foreign_journal, older_journal
from domicile.core.state.cluster_view import ClusterView
from domicile.core.state.keys import OffsetMark
from domicile.entity.hosting.execution import OutcomeUnknown
from domicile.errors import ConfigError
from domicile.ports.journal import ComparableJournal, Journal, JournalUnknown, is_comparable

log = logging.getLogger("domicile")

Note = Callable[[Mapping[ShardKey, OffsetMark]], None]


class JournalCheck:
    """Compares one incarnation's journal with the store. `note` has marks stored, some time."""

    def __init__(
        self, journal: ComparableJournal, roles: Sequence[str], note: Note, timeout_s: float
    ) -> None:
        self._journal, self._roles = journal, tuple(roles)
        self._note, self._timeout_s = note, timeout_s
        self._members = ClusterView()
        self._claimed: dict[ShardKey, None] = {}
        self._told: dict[ShardKey, str] = {}

    async def on_join(self, members: ClusterView) -> dict[str, str]:
        """The history of each role's journal; `ConfigError` if the journal is older than it was.

        Nothing, if the journal does not answer now: then the first claim of a shard compares.
        `members` is what the incarnation knows of the store, now and later.
        """
        self._members = members
        known = [shard for shard in sorted(members.offsets) if shard.role in self._roles]
        try:
            async with asyncio.timeout(self._timeout_s):
                found = await self._journal.marks(known)
        except (JournalUnknown, TimeoutError):
            return {}
        for shard in known:
            mark, offset = members.offsets[shard], found.offsets.get(shard, 0)
            if mark.history == found.history and offset < mark.offset:
                raise ConfigError(older_journal(shard, mark.offset, offset))
        return dict.fromkeys(self._roles, found.history)

    async def marks(self, shards: Sequence[ShardKey]) -> list[OffsetMark]:
        """How far shards are in the journal now."""
        found = await self._journal.marks(shards)
        return [OffsetMark(found.history, found.offsets.get(shard, 0)) for shard in shards]

    def admit(self, shard: ShardKey, mark: OffsetMark) -> None:
        """A shard is about to be claimed. `OutcomeUnknown` if the journal must not be used."""
        why = self._why_not(shard, mark)
        if why:
            if self._told.get(shard) != why:
                self._told[shard] = why
                log.error("shard %s/%d is not served: %s", shard.role, shard.shard, why)
            raise OutcomeUnknown(f"nothing was stored: {why}")
        self._told.pop(shard, None)
        self._claimed[shard] = None
        self._leave({shard: mark})

    async def leave(self) -> dict[ShardKey, OffsetMark]:
        """What an orderly stop has to store: how far the shards are that were claimed here."""
        claimed = list(self._claimed)
        try:
            async with asyncio.timeout(self._timeout_s):
                found = dict(zip(claimed, await self.marks(claimed), strict=True))
        except (JournalUnknown, ConfigError, TimeoutError):
            return {}
        return {
            shard: mark
            for shard, mark in found.items()
            if not self._why_not(shard, mark) and self._is_news(shard, mark)
        }

    def _why_not(self, shard: ShardKey, mark: OffsetMark) -> str:
        known, config = self._members.offsets.get(shard), self._members.config
        agreed = None if config is None else config.journals.get(shard.role)
        if agreed is None and known is not None:
            agreed = known.history
        if agreed is not None and mark.history != agreed:
            return foreign_journal(shard.role, agreed, mark.history)
        if known is not None and mark.history == known.history and mark.offset < known.offset:
            return older_journal(shard, known.offset, mark.offset)
        return ""

    def _leave(self, marks: Mapping[ShardKey, OffsetMark]) -> None:
        news = {shard: mark for shard, mark in marks.items() if self._is_news(shard, mark)}
        if news:
            self._note(news)

    def _is_news(self, shard: ShardKey, mark: OffsetMark) -> bool:
        return mark.offset > 0 and self._members.offsets.get(shard) != mark


def check_of(
    journal: Journal | None, roles: Sequence[str], note: Note, timeout_s: float
) -> JournalCheck | None:
    """The check of a journal; None if it can't be compared, or nothing is kept in it."""
    if journal is None or not roles or not is_comparable(journal):
        return None
    return JournalCheck(journal, roles, note, timeout_s)


async def compare_on_join(
    check: JournalCheck | None, roles: Sequence[str], members: ClusterView
) -> Mapping[str, str]:
    """As `JournalCheck.on_join`. A journal that can't be compared is refused where the store knows
    one."""
    if check is not None:
        return await check.on_join(members)
    known = {} if members.config is None else members.config.journals
    for role in roles:
        if role in known:
            raise ConfigError(
                f"role {role!r} of this cluster keeps its events in a journal with history "
                f"{known[role]}; the journal of this process ends with it. Name the cluster's "
                'journal, by journal=; journal="memory://" needs another cluster='
            )
    return NO_JOURNALS
