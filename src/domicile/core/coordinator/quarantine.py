"""How many owners each shard lost recently: the sign of a poisonous shard (DX-20).

The coordinator calls this module. The count is stored with the shard, its age is not: only the
leader's own clock measures that. A leader removes old counts from the store, and treats the counts
that it finds there as new. Nothing here decides to quarantine a shard: the planner does.
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
    """When this leadership saw the owner deaths of each shard."""

    def __init__(self, window_s: float) -> None:
        self._window_s = window_s
        self._seen: dict[tuple[str, int], tuple[int, float]] = {}
        """By role and shard number: the epoch of the entry with the death, and when it was seen."""
        self.at = NEVER
        """When the next owner death becomes too old to count."""

    def added_to(self, part: RoleInput, view: ClusterView, role: str, now: float) -> RoleInput:
        """A role's input, completed by its shards' owner deaths, first starts and clearances."""
        return replace(
            part,
            recent_deaths=self.lately(role, part.entries, now),
            begun=begun(view.started, role, part.entries),
            cleared=tuple(shard.shard for shard in view.clearances if shard.role == role),
        )

    def lately(self, role: str, entries: Sequence[Entry], now: float) -> dict[int, int]:
        """Owner deaths by shard number, of the shards whose newest death is recent."""
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
    """Serving shards whose stored deaths no longer count and that have no other decision."""
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
    """Epochs in which the present or last owner of a shard reported that its entities start."""
    found: dict[int, int] = {}
    for word in words:
        number = word.shard.shard
        if word.shard.role == role and number < len(entries):
            entry = entries[number]
            if (entry.owner, entry.epoch) == (Incarnation(word.owner), word.epoch):
                found[number] = word.epoch
    return found
