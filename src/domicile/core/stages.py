"""How many shards of a departing node move at a time, so that none waits for all others.

Asked by the coordinator about what the planner wants, before anything of it is committed. Once the
store says that a shard moves its senders hold their messages, until it has its next home: if all
shards of a node were to move at once, each of them would be away for as long as all of them take.
A shard that takes long to empty does not count for long, so that slow ones hold up nobody. Shards
that get no home, since everybody leaves, go all at once: nobody waits for them, and whoever could
tell them later may be gone by then.
"""

from __future__ import annotations

from collections.abc import Iterable

from domicile.config import Settings
from domicile.core.ids import NOBODY, Incarnation, ShardKey
from domicile.core.planning import Decision, Move, View, departing

STAGE = 64
"""So many shards of one node may be on the move at a time, and more only of those that are slow."""

STAGES = 8
"""A node that has very many gives away this part of them at a time: it leaves within so many times
`STAGE_S`, if all of them are slow."""

STAGE_S = 0.1
"""Who has not released a shard after this time is slow."""

NEVER = float("inf")


def late_s(settings: Settings) -> float:
    """How much later than its node began to leave a shard may have ended (H10, H14).

    Its stage comes late, perhaps after a wait for a newcomer (SM-14), and has its whole deadline
    from there on; as much time as all stages take is for what it does at its end.
    """
    return settings.heard_s + 2 * STAGES * STAGE_S


class Stages:
    """What moves away from departing nodes, and since when."""

    def __init__(self) -> None:
        self._since: dict[ShardKey, float] = {}
        self.at = NEVER
        """When more may move although nothing happened; never if nothing was held back."""

    def pace(self, view: View, decisions: Iterable[Decision], now: float) -> tuple[Decision, ...]:
        """Those decisions that may be carried out now."""
        self.at = NEVER
        leaving = departing(view.nodes, view.drains)
        before, self._since = self._since, {}
        if not leaving:
            return tuple(decisions)
        homes = dict.fromkeys(leaving, 0)
        swift: dict[Incarnation, list[float]] = {node: [] for node in leaving}
        for role, part in view.roles.items():
            for number, entry in enumerate(part.entries):
                if entry.owner not in leaving:
                    continue
                homes[entry.owner] += 1
                if entry.state == "moving" and number not in part.released:
                    shard = ShardKey(role, number)
                    since = self._since[shard] = before.get(shard, now)
                    if now < since + STAGE_S:
                        swift[entry.owner].append(since)
        paced: list[Decision] = []
        full: dict[Incarnation, None] = {}
        for decision in decisions:
            if isinstance(decision, Move) and decision.to != NOBODY:
                role, number = decision.shard
                owner = view.roles[role].entries[number].owner
                if owner in leaving:
                    under_way = swift[owner]
                    if len(under_way) >= max(STAGE, homes[owner] // STAGES):
                        full[owner] = None
                        continue
                    under_way.append(now)
                    self._since[decision.shard] = now
            paced.append(decision)
        self.at = min((min(swift[owner]) + STAGE_S for owner in full), default=NEVER)
        return tuple(paced)
