"""Who becomes primary, and what that loses (F7, F8).

Pure functions. The orchestrator of an election calls `choose` whenever something changed; the
status of a group calls `loss_ahead` at any time. A choice must never be made from positions that
are not final, and never compares offsets of different histories.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum

from domicile.core.ids import Incarnation
from domicile.failover.chains import BEFORE_THE_GROUP, Position, common_offset
from domicile.failover.records import (
    GroupConfig,
    GroupPhase,
    GroupState,
    Ranked,
    ServerRecord,
    ranked,
)
from domicile.failover.sync_set import unmet


class Obstacle(Enum):
    """Why nobody can be chosen yet. The values are texts for people."""

    FREEZING = "live members have not published their final positions yet"
    NOBODY = "no live member is fit to become primary"
    QUORUM = "too few members of a write quorum have answered: an acknowledged write might be lost"
    LAST_EPOCH = "no live member has an entry of the last served epoch"
    ORIGINS = "the members bring different data, and the group has none yet"


FORCIBLE = (Obstacle.QUORUM, Obstacle.LAST_EPOCH)
"""What a person may override, who accepts the loss (F7, F8)."""


@dataclass(frozen=True, slots=True)
class Choice:
    """A candidate, and all final positions that were compared."""

    server: str
    incarnation: Incarnation
    position: Position
    positions: tuple[Ranked, ...]
    loss: str
    """What is known beforehand about acknowledged writes that this loses; empty if none are."""


@dataclass(frozen=True, slots=True)
class NoChoice:
    """Nobody can be chosen: the state waits, and nothing changes (FO-13)."""

    obstacle: Obstacle
    details: str
    """Which servers or quorums it is about, for people."""

    def __str__(self) -> str:
        return f"{self.obstacle.value} ({self.details})" if self.details else self.obstacle.value


def foreign(record: ServerRecord, state: GroupState) -> bool:
    """Whether a server has data that this group's state never chose (F8).

    An epoch of a group is promoted for once. So whatever has this group's data, and no entry of a
    later epoch than the last one chosen, went through epochs that this state chose.
    """
    if record.origin != state.origin:
        return state.served != BEFORE_THE_GROUP
    chosen = state.epoch - 1 if state.phase is GroupPhase.ELECTING else state.epoch
    return record.position.epoch > chosen


def choose(
    state: GroupState,
    config: GroupConfig,
    members: Mapping[Incarnation, ServerRecord],
    *,
    patient: bool,
) -> Choice | NoChoice:
    """The candidate for an electing state; `patient` while live members may still answer (F7).

    Members that are not fit, or whose data is foreign, neither become primary nor count as read: a
    position that cannot be chosen must not let a lesser one pass for the greatest.
    """
    able = sorted(
        (
            one
            for one in members.values()
            if one.final == state.epoch and one.fit and not foreign(one, state)
        ),
        key=lambda one: one.server,
    )
    # What a server has beyond the write quorums was never acknowledged: its start is not awaited.
    read = bool(config.sync and state.quorums) and not unmet(
        state.quorums, [one.server for one in able]
    )
    waited = [
        one.server
        for one in members.values()
        if one.final != state.epoch and not (read and one.role == "down")
    ]
    if patient and waited:
        return NoChoice(Obstacle.FREEZING, _names(waited))
    if not able:
        return NoChoice(Obstacle.NOBODY, _excuses(state, members))
    losses: list[str] = []
    for obstacle, details in _obstacles(state, config, able):
        if obstacle not in FORCIBLE or not state.force:
            return NoChoice(obstacle, details)
        losses.append(details)
    # The greatest position; of equal ones the lowest server id, as everybody would choose (FO-04).
    best = able[0]
    for one in able[1:]:
        if one.position > best.position:
            best = one
    seen = tuple(ranked(one.server, one.position) for one in able)
    return Choice(best.server, best.incarnation, best.position, seen, "; ".join(losses))


def _obstacles(
    state: GroupState, config: GroupConfig, able: Sequence[ServerRecord]
) -> list[tuple[Obstacle, str]]:
    found: list[tuple[Obstacle, str]] = []
    if state.served == BEFORE_THE_GROUP:
        origins = dict.fromkeys(one.origin for one in able if one.origin)
        if len(origins) > 1:
            owners = [one.server for one in able if one.origin]
            found.append((Obstacle.ORIGINS, _names(owners)))
        return found
    missing = unmet(state.quorums, [one.server for one in able])
    if missing:
        found.append((Obstacle.QUORUM, "; ".join(map(str, missing))))
    if not config.sync:
        newest = max(one.position.epoch for one in able)
        if newest < state.served:
            what = f"epoch {state.served} was served, the newest entry is of epoch {newest}"
            found.append((Obstacle.LAST_EPOCH, what))
    return found


def _excuses(state: GroupState, members: Mapping[Incarnation, ServerRecord]) -> str:
    said: list[str] = []
    for one in members.values():
        if one.final != state.epoch:
            said.append(f"{one.server} has not answered")
        elif not one.fit:
            said.append(f"{one.server}: {one.why or 'not fit'}")
        elif foreign(one, state):
            said.append(f"{one.server} has data that is not of this group")
    return "; ".join(said)


def _names(servers: Sequence[str]) -> str:
    return ", ".join(sorted(dict.fromkeys(servers)))


@dataclass(frozen=True, slots=True)
class LossAhead:
    """What failing over at this moment would lose, as far as the records tell (FO-19)."""

    server: str
    """Who would be chosen; empty if nobody could be."""
    offset: int
    """The bytes that the primary has and this server has not, by their last reports."""
    excluded: bool
    """Whether no acknowledged write can be among them: the mode is synchronous."""


def loss_ahead(
    state: GroupState, config: GroupConfig, members: Mapping[Incarnation, ServerRecord]
) -> LossAhead:
    """Compare the primary's last report with the most advanced replica's.

    Writes since the last report are not in it, so in asynchronous mode it is an estimate.
    """
    primary = members.get(state.primary)
    others = sorted(
        (
            one
            for one in members.values()
            if one.incarnation != state.primary and one.fit and not foreign(one, state)
        ),
        key=lambda one: one.server,
    )
    if primary is None or not others:
        return LossAhead("", 0, config.sync)
    best = max(others, key=lambda one: one.position)
    kept = common_offset(best.chain, best.offset, primary.chain)
    return LossAhead(best.server, max(0, primary.offset - kept), config.sync)
