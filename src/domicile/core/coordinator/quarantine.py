"""When owner deaths stop to count, and when a quarantine has lasted long enough (DX-20, DX-24).

The coordinator calls this module. Counts are stored with the shard, their age is not: only the
leader's own clock measures that. A leader removes old counts from the store, and treats what it
finds there as new. Nothing here decides to quarantine: `placement.suspicion` does.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from domicile.core.coordinator.commits import Reconsider, put_away
from domicile.core.ids import EntityKey, Incarnation, ShardKey
from domicile.core.placement.model import Decision, PlanInput, RoleInput, ShardTrials
from domicile.core.placement.suspicion import faded, pause_s, tried_again
from domicile.core.state.cluster_view import ClusterView
from domicile.core.state.records import OnTrial, TrialRecord
from domicile.core.state.shardmap import INNOCENT, Entry, Suspicion
from domicile.settings import Settings

NEVER = float("inf")


class OwnerDeaths:
    """When this leadership saw the owner deaths of each shard, and its quarantines."""

    def __init__(self, settings: Settings) -> None:
        self._window_s, self._most = settings.poison_window_s, settings.poison_deaths
        self._deaths: _FirstSeen = {}
        self._pauses: _FirstSeen = {}
        self.at = NEVER
        """When the next owner death becomes too old to count, or the next pause ends."""

    def added_to(self, part: RoleInput, view: ClusterView, role: str, now: float) -> RoleInput:
        """A role's input, completed by what speaks against its shards."""
        recent: dict[int, int] = {}
        due: list[int] = []
        for number, entry in enumerate(part.entries):
            if not (entry.deaths or entry.barred):
                continue
            shard = ShardKey(role, number)
            died_at = _since(self._deaths, shard, (entry.epoch, entry.suspicion), now)
            if entry.deaths and self._within(died_at + self._window_s, now):
                recent[number] = entry.deaths
            if put_away(entry):
                away_at = _since(self._pauses, shard, (entry.tries, entry.barred), now)
                if not self._within(away_at + pause_s(entry.tries), now):
                    due.append(number)
        return replace(
            part,
            recent_deaths=recent,
            named=named(view.trials, role, part.entries),
            cleared=tuple(shard.shard for shard in view.clearances if shard.role == role),
            due=tuple(due),
        )

    def reconsidered(self, view: PlanInput, decisions: Sequence[Decision]) -> list[Reconsider]:
        """Serving shards without another decision whose suspicion changes by time or by a
        clearance."""
        decided = {decision.shard: None for decision in decisions}
        found: list[Reconsider] = []
        for role, part in view.roles.items():
            for number, entry in enumerate(part.entries):
                if (
                    (entry.deaths or entry.barred)
                    and entry.state == "serving"
                    and entry.owner in view.nodes
                    and number not in part.released
                    and (role, number) not in decided
                ):
                    suspicion = self._now_of(part, number, entry.suspicion)
                    if suspicion != entry.suspicion:
                        found.append(Reconsider(ShardKey(role, number), suspicion))
        return found

    def _now_of(self, part: RoleInput, number: int, known: Suspicion) -> Suspicion:
        if not known.barred:
            return faded(known, part.recent_deaths.get(number, 0))
        if number in part.cleared:
            return INNOCENT
        # The deaths of a shard with entities that are put away are shown, so they are kept.
        return tried_again(known, self._most) if number in part.due else known

    def _within(self, end: float, now: float) -> bool:
        if now < end:
            self.at = min(self.at, end)
        return now < end


_FirstSeen = dict[ShardKey, tuple[object, float]]
"""By shard: something, and when this leadership first saw it."""


def _since(seen: _FirstSeen, shard: ShardKey, what: object, now: float) -> float:
    known = seen.get(shard)
    if known is None or known[0] != what:
        seen[shard] = known = (what, now)
    return known[1]


def named(
    trials: Mapping[Incarnation, TrialRecord], role: str, entries: Sequence[Entry]
) -> dict[int, ShardTrials]:
    """What the present or last owner of a shard has on trial in it, in its epoch."""
    found: dict[int, ShardTrials] = {}
    for owner, record in trials.items():
        alone = sum(one.manner == "alone" for one in record.trials) == 1
        for one in record.trials:
            if one.role == role and 0 <= one.shard < len(entries):
                entry = entries[one.shard]
                if (entry.owner, entry.epoch) == (owner, one.epoch):
                    known = found.get(one.shard, ShardTrials())
                    found[one.shard] = _with(known, one, alone)
    return found


def _with(known: ShardTrials, one: OnTrial, alone: bool) -> ShardTrials:
    """The trials of a shard and one more, which may be the only one that is tried alone."""
    if not one.type:
        return known._replace(crowd=True)
    entity = EntityKey(one.type, one.id)
    if one.manner == "long":
        return known._replace(long=(*known.long, entity))
    if one.manner == "alone" and alone:
        known = known._replace(alone=entity)
    return known if entity in known.new else known._replace(new=(*known.new, entity))
