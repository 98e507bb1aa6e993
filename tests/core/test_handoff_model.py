"""The owner and sender machines together, through every interleaving of a small cluster.

Breadth first where the space is small, random walks to the end where it is not. Each broken
machine below breaks one rule of the hand-off, and the same exploration finds it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import pytest
from handoff_lab import Msg, Scenario, explore, walk
from handoff_machines import Violation

from domicile.core.handoff import Bond, OwnerEvent, Phase, SenderEvent
from domicile.core.ids import Incarnation
from domicile.core.owner import AnswerFlush, FlushAsked, Mail, Owner, PhaseChanged
from domicile.core.owner import Effect as OwnerEffect
from domicile.core.sender import Effect as SenderEffect
from domicile.core.sender import Home, Letter, Sender
from domicile.core.shardmap import Entry

X, Y, Z = 0, 1, 2

FLAT = Scenario(tuple(Msg(0, by=2) for _ in range(3)))
"""One entity, one sender with three messages, two moves, one of them reverted."""

TWO_SENDERS = Scenario(tuple(Msg(0, by=2 + number % 2) for number in range(4)), clients=2)

FROM_OWNER = Scenario((Msg(0, by=0), Msg(0, by=0), Msg(0, by=1)), clients=0)
"""Both homes also send, to each other and to themselves."""

TWO_ENTITIES = Scenario(
    (Msg(0, by=2), Msg(1, by=2), Msg(0, by=2), Msg(1, by=2)), entities=(0, 0)
)  # fmt: skip

NESTED = Scenario((), clients=0, reverts=0)

ASKS_CROSS = replace(
    NESTED,
    messages=(
        Msg(0, by=0, ask=True),
        Msg(3, by=1, ask=True),
        Msg(2, parent=0, ask=True),
        Msg(1, parent=1, ask=True),
    ),
    entities=(X, X, Y, Y),
    homes=(0, 1),
    moving=(X, Y),
    running=(0, 1),
)
"""Two shards change places while a handler of each asks into the other."""

TELLS_CROSS = replace(
    ASKS_CROSS,
    messages=(
        Msg(0, by=0, ask=True),
        Msg(3, by=1, ask=True),
        Msg(2, parent=0),
        Msg(2, parent=0, ask=True),
        Msg(1, parent=1),
        Msg(1, parent=1, ask=True),
    ),
)
"""The same, each ask behind a tell to the same entity."""

DEEP_CHAIN = replace(
    ASKS_CROSS,
    messages=(
        Msg(0, by=0, ask=True),
        Msg(3, by=1, ask=True),
        Msg(2, parent=0, ask=True),
        Msg(1, parent=2, ask=True),
        Msg(1, parent=1, ask=True),
    ),
)

THROUGH_A_THIRD = replace(
    NESTED,
    messages=(
        Msg(0, by=0, ask=True),
        Msg(3, by=1, ask=True),
        Msg(4, parent=0, ask=True),
        Msg(2, parent=2, ask=True),
        Msg(1, parent=1, ask=True),
    ),
    entities=(X, X, Y, Y, Z),
    homes=(0, 1, 2),
    moving=(X, Y),
    nodes=3,
    running=(0, 1),
)

BEHIND_A_ROOT = replace(
    NESTED,
    messages=(
        Msg(0, by=0, ask=True),
        Msg(2, by=1, ask=True),
        Msg(2, parent=0, ask=True),
        Msg(1, parent=1, ask=True),
    ),
    entities=(X, X, Y),
    homes=(0, 1),
    moving=(X,),
    moves=1,
    running=(0, 1),
)
"""X drains; its handler waits behind a root of Y that asks back into X."""

BEHIND_A_CHAIN = replace(
    NESTED,
    messages=(
        Msg(0, by=0, ask=True),
        Msg(2, by=1, ask=True),
        Msg(2, parent=0, ask=True),
        Msg(3, parent=1, ask=True),
        Msg(1, parent=3, ask=True),
    ),
    entities=(X, X, Y, Z),
    homes=(0, 1, 2),
    moving=(X,),
    nodes=3,
    moves=1,
    running=(0, 1),
)


def test_every_interleaving_of_a_reverted_move_keeps_order_and_loses_nothing() -> None:
    """I5, I1, H2–H11: exhaustive."""
    two = replace(FLAT, messages=FLAT.messages[:2], moves=1)
    explored = explore(two, 60_000)
    assert explored.complete
    assert explored.states > 20_000
    assert explored.ends > 10


def test_every_interleaving_of_nested_asks_ends() -> None:
    """N1–N5: exhaustive; a state without a step in which something waits would be found."""
    explored = explore(BEHIND_A_ROOT, 60_000)
    assert explored.complete
    assert explored.ends > 0


@pytest.mark.parametrize(
    ("scenario", "runs"),
    [
        pytest.param(FLAT, 800, id="one sender"),
        pytest.param(replace(FLAT, window=1), 300, id="window of one"),
        pytest.param(TWO_SENDERS, 400, id="two senders"),
        pytest.param(FROM_OWNER, 400, id="owners send"),
        pytest.param(TWO_ENTITIES, 300, id="two entities"),
        pytest.param(replace(FLAT, losses=1), 500, id="a link is lost"),
        pytest.param(replace(TWO_SENDERS, losses=2, moves=3), 300, id="two links are lost"),
        pytest.param(replace(FLAT, holds=1), 500, id="Flushed is overdue"),
        pytest.param(replace(FLAT, holds=1, losses=1), 300, id="overdue and lost"),
        pytest.param(
            replace(FLAT, messages=(Msg(0, by=2, ask=True),) * 3, withdrawals=2),
            300,
            id="callers give up",
        ),
        pytest.param(replace(ASKS_CROSS, reverts=1), 200, id="asks cross"),
        pytest.param(replace(TELLS_CROSS, reverts=1), 200, id="tells and asks cross"),
        pytest.param(replace(DEEP_CHAIN, reverts=1), 200, id="deep chain"),
        pytest.param(THROUGH_A_THIRD, 200, id="through a third shard"),
        pytest.param(replace(BEHIND_A_CHAIN, reverts=1), 200, id="behind a chain"),
    ],
)  # fmt: skip
def test_random_runs_to_the_end(scenario: Scenario, runs: int) -> None:
    """I1, I5, I6 and that every run ends, on sizes that cannot be enumerated."""
    explored = walk(scenario, range(runs))
    assert explored.states > 10 * runs


# machines that break one rule each


class NoGate(Owner):
    """H7: a link from which mail was refused is not refused further."""

    __slots__ = ()

    def _admit(self, mail: Mail, out: list[OwnerEffect]) -> None:
        self.gates.clear()
        super()._admit(mail, out)


class NoReturnOnFlush(Owner):
    """H8: `Flushed` without returning the unstarted mail."""

    __slots__ = ()

    def _flush(self, asked: FlushAsked, out: list[OwnerEffect]) -> None:
        self.gates.pop(asked.source, None)
        out.append(AnswerFlush(asked.source, asked.id))


class ReleasedReopens(Owner):
    """H10: Released is not final."""

    __slots__ = ()

    def happen(self, happening: OwnerEvent, epoch: int = 0) -> tuple[OwnerEffect, ...]:
        if self.phase is Phase.RELEASED and happening is OwnerEvent.SERVING_SAME:
            self.phase = Phase.OPEN
            return (PhaseChanged(self.phase, self.epoch, "open"),)
        return super().happen(happening, epoch)


class NoFlush(Sender):
    """H4: write to the new home as soon as the map names it."""

    __slots__ = ()

    def _take(self, happening: SenderEvent, now: float, out: list[SenderEffect]) -> None:
        if self.bond is Bond.BOUND and happening in (
            SenderEvent.MISMATCH,
            SenderEvent.MOVING,
            SenderEvent.RETURN,
        ):
            self.bond, self.key = Bond.UNBOUND, None
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

    def finishing(self, letter: Letter) -> bool:
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
        wanted: Callable[[Letter], bool],
        finishing: bool,
        now: float,
        out: list[SenderEffect],
    ) -> None:
        for letter in [letter for letter in self.queue if wanted(letter)]:
            self.queue.remove(letter)
            self._write(letter, home, finishing, now, out)


@pytest.mark.parametrize(
    ("scenario", "verdict"),
    [
        pytest.param(replace(FLAT, owner=NoGate), "reordered", id="no gate"),
        pytest.param(replace(FLAT, owner=NoReturnOnFlush), "reordered", id="no return on flush"),
        pytest.param(replace(FLAT, flush_overtakes=True), "stuck|reordered", id="flush overtakes"),
        pytest.param(replace(FLAT, sender=NoFlush), "reordered", id="no flush"),
        pytest.param(
            replace(FLAT, sender=LateFlushedBelieved, holds=1), "reordered", id="late Flushed"
        ),
        pytest.param(
            replace(FLAT, owner=ReleasedReopens), "runs under|two homes", id="released reopens"
        ),
        pytest.param(replace(ASKS_CROSS, sender=NoFinishingLane), "stuck", id="no finishing lane"),
        pytest.param(replace(BEHIND_A_ROOT, sender=NoWaves), "stuck", id="no waves"),
        pytest.param(replace(TELLS_CROSS, sender=NoPrefix), "reordered", id="no prefix"),
    ],
)
def test_a_broken_rule_is_found(scenario: Scenario, verdict: str) -> None:
    with pytest.raises(Violation, match=verdict):
        walk(scenario, range(2_000))
