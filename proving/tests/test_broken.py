"""Every broken rule is found by the same search that finds nothing in the real machines."""

from __future__ import annotations

from dataclasses import replace

import pytest
from broken_machines import (
    FormerLeaderTakenForDead,
    LateFlushedBelieved,
    MarkerAtTheCut,
    MarkerBelieved,
    MovingIgnoredWhileClosed,
    NoAbsenceCondition,
    NoBlockCondition,
    NoFinishingLane,
    NoFlush,
    NoGate,
    NoLeaderCondition,
    NoPrefix,
    NoReturnOnFlush,
    NoWaves,
    ReleasedReopens,
    ToldBeforeStored,
    UnknownTakenForStored,
)

from proving.search import Scenario, Violation, explore
from proving.search.scenarios import (
    BEHIND_A_ROOT,
    OWN_SHARD,
    TELL_THEN_ASK,
    THERE_AND_BACK,
    UNKNOWN,
    swift,
    tells,
)

MOVE = swift(Scenario("a move", tells(2)))
REVERTED = replace(MOVE, reverts=1)
OVERDUE = swift(Scenario("overdue", tells(2, 1), clients=0, reverts=1, faults=("overdue Flushed",)))
DEPOSED = Scenario("deposed", (), clients=0, candidates=(1,), faults=("leader deposed",))


@pytest.mark.parametrize(
    ("scenario", "verdict"),
    [
        pytest.param(
            replace(MOVE, owner=MarkerAtTheCut, sender=MarkerBelieved),
            "I5: reordered|stuck",
            id="owner's marker",
        ),
        pytest.param(replace(MOVE, sender=NoFlush), "I5: reordered", id="no flush"),
        pytest.param(replace(MOVE, flush_overtakes=True), "I5: reordered", id="flush overtakes"),
        pytest.param(replace(MOVE, owner=NoReturnOnFlush), "I5: reordered", id="no return"),
        pytest.param(replace(REVERTED, owner=NoGate), "I5: reordered", id="no gate"),
        pytest.param(
            replace(OVERDUE, sender=LateFlushedBelieved), "I5: reordered", id="late Flushed"
        ),
        pytest.param(replace(REVERTED, owner=ReleasedReopens), "I1", id="released reopens"),
        pytest.param(
            Scenario(
                "skipped",
                (),
                wishes=THERE_AND_BACK,
                faults=("watch broken",),
                owner=MovingIgnoredWhileClosed,
            ),
            "stuck: shard 0 is moving",
            id="moving unseen",
        ),
        pytest.param(replace(OWN_SHARD, sender=NoFinishingLane), "stuck", id="no finishing lane"),
        pytest.param(replace(BEHIND_A_ROOT, sender=NoWaves), "stuck", id="no waves"),
        pytest.param(replace(TELL_THEN_ASK, sender=NoPrefix), "I5: reordered", id="no prefix"),
        pytest.param(
            Scenario("told", (), coordinator=ToldBeforeStored), "I3", id="told before stored"
        ),
        pytest.param(
            Scenario("unknown", (), faults=UNKNOWN, coordinator=UnknownTakenForStored),
            "I3",
            id="unknown is no commit",
        ),
        pytest.param(
            Scenario("unknown", (), faults=UNKNOWN, coordinator=NoBlockCondition),
            "I1|C4|I3",
            id="no block condition",
        ),
        pytest.param(
            replace(DEPOSED, coordinator=NoLeaderCondition), "C1", id="no leader condition"
        ),
        pytest.param(
            replace(DEPOSED, coordinator=NoAbsenceCondition), "C4", id="no absence condition"
        ),
    ],
)
def test_a_broken_rule_is_found(scenario: Scenario, verdict: str) -> None:
    """The way that leads there comes with the verdict."""
    with pytest.raises(Violation, match=verdict) as found:
        explore(scenario)
    assert "\n  operate\n" in str(found.value) or "\n  deposed\n" in str(found.value)


def test_it_is_the_absence_condition_that_saves_a_misled_leader() -> None:
    """C4: the same mistake with the condition in place is refused by the store."""
    misled = replace(DEPOSED, coordinator=FormerLeaderTakenForDead)
    assert explore(misled, limit=5_000).states == 5_000
