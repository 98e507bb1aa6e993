"""How many owners each shard lost lately: what tells a poisonous shard from an unlucky one (DX-20).

Called by the coordinator. The count is stored with the shard. How recent it is only the leader's
own clock knows: a leader removes old counts from the store, and takes those that it finds for new.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from domicile.core.coordinator.commits import ForgetDeaths
from domicile.core.ids import Incarnation, ShardKey
from domicile.core.placement.model import Decision, PlanInput, RoleInput
from domicile.core.state.cluster_view import ClusterView
from domicile.core.state.keys import OwnerReport
from domicile.core.state.shardmap import Entry

NEVER = float("inf")


class OwnerDeaths:
    """One leadership's memory of when owners' deaths were seen."""

    def __init__(self, window_s: float) -> None:
        self._window_s = window_s
        self._seen: dict[tuple[str, int], tuple[int, float]] = {}
        """By role and shard number: the epoch that a death ended, and when that was seen."""
        self.at = NEVER
        """When the next of them will be long ago."""

    def added_to(self, part: RoleInput, view: ClusterView, role: str, now: float) -> RoleInput:
        """A role's input with what is known of its shards' deaths, first starts and clearances."""
        return replace(
            part,
            recent_deaths=self.lately(role, part.entries, now),
            begun=begun(view.started, role, part.entries),
            cleared=tuple(shard.shard for shard in view.clearances if shard.role == role),
        )

    def lately(self, role: str, entries: Sequence[Entry], now: float) -> dict[int, int]:
        """Deaths of owners by shard number, as far as the newest of them is recent."""
        recent: dict[int, int] = {}
        for number, entry in enumerate(entries):
            if not entry.deaths:
                continue
            epoch, at = self._seen.get((role, number), (0, now))
            if epoch != entry.epoch:
                self._seen[role, number] = (entry.epoch, now)
                at = now
            if now < at + self._window_s:
                recent[number] = entry.deaths
                self.at = min(self.at, at + self._window_s)
        return recent


def long_ago(view: PlanInput, decisions: Sequence[Decision]) -> list[ForgetDeaths]:
    """Shards in service whose stored deaths no longer count, and that nothing else is done to."""
    decided = {decision.shard: None for decision in decisions}
    return [
        ForgetDeaths(ShardKey(role, number))
        for role, part in view.roles.items()
        for number, entry in enumerate(part.entries)
        if entry.deaths
        and number not in part.recent_deaths
        and entry.state == "serving"
        and entry.owner in view.nodes
        and number not in part.released
        and (role, number) not in decided
    ]


def begun(words: Iterable[OwnerReport], role: str, entries: Sequence[Entry]) -> dict[int, int]:
    """Epochs in which the present or last owner of a shard noted that its entities start."""
    found: dict[int, int] = {}
    for word in words:
        number = word.shard.shard
        if word.shard.role == role and number < len(entries):
            entry = entries[number]
            if (entry.owner, entry.epoch) == (Incarnation(word.owner), word.epoch):
                found[number] = word.epoch
    return found
