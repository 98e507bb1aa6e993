"""Machines that break one rule each. A search that does not find them would prove nothing."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

from domicile.core.coordinator.events import (
    Commit,
    CommitDone,
    CoordinatorEffect,
    CoordinatorEvent,
    Listed,
    Reread,
    Tell,
)
from domicile.core.coordinator.machine import Coordinator
from domicile.core.handoff.mailbox import Queued
from domicile.core.handoff.owner import AnswerFlush, FlushAsked, Owner, OwnerEffect, PhaseChanged
from domicile.core.handoff.pending import Home, Pending, SenderEffect, SendFlush
from domicile.core.handoff.sender import Sender
from domicile.core.handoff.tables import OwnerAction, OwnerEvent, Phase, SenderEvent, SenderState
from domicile.core.ids import NOBODY, Incarnation, LinkKey, ShardKey
from domicile.core.state.keys import LEADER_KEY, MAP, NODES
from domicile.core.state.shardmap import Entry, decode_block
from domicile.core.state.txn import Absent, Committed, Put


class NoGate(Owner):
    """H7: a link from which mail was refused is not refused further."""

    __slots__ = ()

    def _admit(self, queued: Queued, out: list[OwnerEffect]) -> None:
        self.refused_links.clear()
        super()._admit(queued, out)


class NoReturnOnFlush(Owner):
    """H8: `Flushed` without returning the unstarted mail."""

    __slots__ = ()

    def flush(self, asked: FlushAsked) -> tuple[OwnerEffect, ...]:
        self.refused_links.pop(asked.source, None)
        return (AnswerFlush(asked.source, asked.id),)


class ReleasedReopens(Owner):
    """H10: Released is not final."""

    __slots__ = ()

    def happen(self, happening: OwnerEvent, epoch: int = 0) -> tuple[OwnerEffect, ...]:
        if self.phase is Phase.RELEASED and happening is OwnerEvent.SERVING_SAME:
            self.phase = Phase.OPEN
            return (PhaseChanged(self.phase, self.epoch, OwnerAction.OPEN),)
        return super().happen(happening, epoch)


class MovingIgnoredWhileClosed(Owner):
    """H9: a move of an epoch that was never opened is nobody's to release."""

    __slots__ = ()

    def happen(self, happening: OwnerEvent, epoch: int = 0) -> tuple[OwnerEffect, ...]:
        if happening is OwnerEvent.MOVING_NEWER:
            return ()
        return super().happen(happening, epoch)


class MarkerAtTheCut(Owner):
    """H5: the owner ends its mail with a marker, instead of answering each sender's flush."""

    __slots__ = ()

    def _cut(self, out: list[OwnerEffect]) -> None:
        out += [AnswerFlush(LinkKey(sender, link), 0) for sender, link in self.latest.items()]
        super()._cut(out)


class MarkerBelieved(Sender):
    """The other half of it: nothing is flushed, the marker ends the wait."""

    __slots__ = ()

    def flushed(
        self, peer: Incarnation, id: int, entry: Entry, released: bool, now: float
    ) -> tuple[SenderEffect, ...]:
        return super().flushed(peer, self.flush_id, entry, released, now)

    def _take(self, happening: SenderEvent, now: float, out: list[SenderEffect]) -> None:
        super()._take(happening, now, out)
        out[:] = [effect for effect in out if not isinstance(effect, SendFlush)]


class NoFlush(Sender):
    """H4: write to the new home as soon as the map names it."""

    __slots__ = ()

    def _take(self, happening: SenderEvent, now: float, out: list[SenderEffect]) -> None:
        if self.state is SenderState.BOUND and happening in (
            SenderEvent.MISMATCH,
            SenderEvent.MOVING,
            SenderEvent.RETURN,
        ):
            self.state, self.key = SenderState.UNBOUND, None
        super()._take(happening, now, out)


class LateFlushedBelieved(Sender):
    """H5: the answer to an older flush counts."""

    __slots__ = ()

    def flushed(
        self, peer: Incarnation, id: int, entry: Entry, released: bool, now: float
    ) -> tuple[SenderEffect, ...]:
        return super().flushed(peer, self.flush_id, entry, released, now)


class NoFinishingLane(Sender):
    """N3: nothing is finishing."""

    __slots__ = ()

    def finishing(self, pending: Pending) -> bool:
        return False


class NoWaves(Sender):
    """N5: what N3 does not cover waits for the shard to serve."""

    __slots__ = ()

    def _next_wave(self, now: float) -> float:
        return math.inf


class NoPrefix(Sender):
    """N4: a finishing message overtakes what is queued before it."""

    __slots__ = ()

    def _write_lane(
        self,
        home: Home,
        wanted: Callable[[Pending], bool],
        finishing: bool,
        now: float,
        out: list[SenderEffect],
    ) -> None:
        for pending in [pending for pending in self.queue if wanted(pending)]:
            self.queue.remove(pending)
            self._write(pending, home, finishing, now, out)


class ToldBeforeStored(Coordinator):
    """I3: a new owner hears of its shard when the commit is asked for, not when it is known."""

    def step(self, event: CoordinatorEvent, now: float) -> tuple[CoordinatorEffect, ...]:
        effects = super().step(event, now)
        early: list[SenderEffect] = []
        for commit in effects:
            if isinstance(commit, Commit):
                for write in commit.writes:
                    if isinstance(write, Put) and write.key.startswith(MAP):
                        for shard, entry in enumerate(decode_block(write.value).entries):
                            if entry.owner != NOBODY:
                                early.append(Tell(entry.owner, ShardKey("r", shard), entry))
        return (*early, *effects)


class UnknownTakenForStored(Coordinator):
    """S1: an unknown outcome is taken for a commit."""

    def step(self, event: CoordinatorEvent, now: float) -> tuple[CoordinatorEffect, ...]:
        if isinstance(event, Reread):
            event = CommitDone(event.txn, Committed(event.item.revision if event.item else 0))
        return super().step(event, now)


class NoLeaderCondition(Coordinator):
    """C4: what it writes does not depend on being the leader."""

    def step(self, event: CoordinatorEvent, now: float) -> tuple[CoordinatorEffect, ...]:
        return tuple(
            replace(effect, conditions=tuple(c for c in effect.conditions if c.key != LEADER_KEY))
            if isinstance(effect, Commit)
            else effect
            for effect in super().step(event, now)
        )


class NoBlockCondition(Coordinator):
    """C4: what it writes does not depend on what it has seen of the map."""

    def step(self, event: CoordinatorEvent, now: float) -> tuple[CoordinatorEffect, ...]:
        return tuple(
            replace(
                effect, conditions=tuple(c for c in effect.conditions if not _is_block(c.key))
            )
            if isinstance(effect, Commit)
            else effect
            for effect in super().step(event, now)
        )  # fmt: skip


class FormerLeaderTakenForDead(Coordinator):
    """C4: who leads anew takes the former leader's node for gone, whatever its record says.

    With the condition that the record is absent, the store refuses what follows from that.
    """

    def step(self, event: CoordinatorEvent, now: float) -> tuple[CoordinatorEffect, ...]:
        if isinstance(event, Listed) and self._me != "p0":
            items = tuple(i for i in event.listing.items if i.key != NODES + b"p0")
            event = Listed(replace(event.listing, items=items))
        return super().step(event, now)


class NoAbsenceCondition(FormerLeaderTakenForDead):
    """The same without that condition."""

    def step(self, event: CoordinatorEvent, now: float) -> tuple[CoordinatorEffect, ...]:
        return tuple(
            replace(
                effect, conditions=tuple(c for c in effect.conditions if not _is_absence(c))
            )
            if isinstance(effect, Commit)
            else effect
            for effect in super().step(event, now)
        )  # fmt: skip


def _is_absence(condition: object) -> bool:
    return isinstance(condition, Absent) and condition.key.startswith(NODES)


def _is_block(key: bytes) -> bool:
    return key.startswith(MAP)
