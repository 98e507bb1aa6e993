"""Random ways to the end through scenarios that are too large to be searched whole."""

from __future__ import annotations

from dataclasses import replace

import pytest

from proving.search import Msg, Scenario, walk
from proving.search.scenarios import (
    AWAY_AND_KEPT,
    CHANGE_PLACES,
    NESTED,
    THERE_AND_BACK,
    swift,
    tells,
)

X, Y, Z = 0, 1, 2
RESTLESS = (*AWAY_AND_KEPT, (X, 1), (X, 0))

FLAT = swift(Scenario("one sender", tells(4), wishes=RESTLESS, reverts=1))
TWO_SENDERS = swift(
    Scenario(
        "two senders",
        tuple(Msg(0, by=2 + number % 2) for number in range(6)),
        clients=2,
        wishes=RESTLESS,
        reverts=1,
    )
)
FROM_OWNERS = replace(
    FLAT,
    name="owners send",
    messages=(Msg(0, by=0), Msg(0, by=0), Msg(0, by=1), Msg(0, by=1)),
    clients=0,
    leader=2,
)
TWO_ENTITIES = replace(
    FLAT,
    name="two entities",
    messages=(Msg(0, by=2), Msg(1, by=2), Msg(0, by=2), Msg(1, by=2)),
    entities=(X, X),
)
NESTED_SWIFT = swift(replace(NESTED, wishes=CHANGE_PLACES, running=(0, 1)))
ASKS_CROSS = replace(
    NESTED_SWIFT,
    name="asks cross",
    messages=(
        Msg(0, by=0, ask=True),
        Msg(3, by=1, ask=True),
        Msg(2, parent=0, ask=True),
        Msg(1, parent=1, ask=True),
    ),
    entities=(X, X, Y, Y),
)
TELLS_CROSS = replace(
    ASKS_CROSS,
    name="tells and asks cross",
    messages=(
        Msg(0, by=0, ask=True),
        Msg(3, by=1, ask=True),
        Msg(2, parent=0),
        Msg(2, parent=0, ask=True),
        Msg(1, parent=1),
        Msg(1, parent=1, ask=True),
    ),
)
DEEP_CHAIN = replace(
    ASKS_CROSS,
    name="a deep chain",
    messages=(
        Msg(0, by=0, ask=True),
        Msg(3, by=1, ask=True),
        Msg(2, parent=0, ask=True),
        Msg(1, parent=2, ask=True),
        Msg(1, parent=1, ask=True),
    ),
)
THROUGH_A_THIRD = replace(
    NESTED_SWIFT,
    name="through a third shard",
    messages=(
        Msg(0, by=0, ask=True),
        Msg(3, by=1, ask=True),
        Msg(4, parent=0, ask=True),
        Msg(2, parent=2, ask=True),
        Msg(1, parent=1, ask=True),
    ),
    entities=(X, X, Y, Y, Z),
    homes=(0, 1, 2),
    nodes=3,
    leader=3,
)
BEHIND_A_CHAIN = replace(
    NESTED_SWIFT,
    name="behind a chain",
    messages=(
        Msg(0, by=0, ask=True),
        Msg(2, by=1, ask=True),
        Msg(2, parent=0, ask=True),
        Msg(3, parent=1, ask=True),
        Msg(1, parent=3, ask=True),
    ),
    entities=(X, X, Y, Z),
    homes=(0, 1, 2),
    nodes=3,
    leader=3,
    wishes=((X, 1),),
)
WHOLE = Scenario("everything", tells(3), wishes=THERE_AND_BACK, reverts=1, notes=1)


@pytest.mark.parametrize(
    ("scenario", "runs"),
    [
        pytest.param(FLAT, 150, id="one sender"),
        pytest.param(replace(FLAT, window=1), 100, id="window of one"),
        pytest.param(TWO_SENDERS, 60, id="two senders"),
        pytest.param(FROM_OWNERS, 100, id="owners send"),
        pytest.param(TWO_ENTITIES, 100, id="two entities"),
        pytest.param(replace(FLAT, faults=("link lost",)), 150, id="a link is lost"),
        pytest.param(
            replace(TWO_SENDERS, faults=("link lost",), most_faults=2), 100, id="two are lost"
        ),
        pytest.param(replace(FLAT, faults=("overdue Flushed",)), 150, id="Flushed is overdue"),
        pytest.param(
            replace(FLAT, faults=("overdue Flushed", "link lost"), most_faults=2),
            100,
            id="overdue and lost",
        ),
        pytest.param(
            replace(FLAT, messages=(Msg(0, by=2, ask=True),) * 4, withdrawals=2),
            100,
            id="callers give up",
        ),
        pytest.param(replace(FLAT, starts_travel=True), 100, id="Started travels"),
        pytest.param(ASKS_CROSS, 100, id="asks cross"),
        pytest.param(replace(ASKS_CROSS, reverts=1), 100, id="asks cross, reverted"),
        pytest.param(TELLS_CROSS, 100, id="tells and asks cross"),
        pytest.param(replace(DEEP_CHAIN, reverts=1), 100, id="deep chain"),
        pytest.param(THROUGH_A_THIRD, 100, id="through a third shard"),
        pytest.param(BEHIND_A_CHAIN, 100, id="behind a chain"),
        pytest.param(replace(WHOLE, faults=("crash", "link lost")), 100, id="a node crashes"),
        pytest.param(
            replace(WHOLE, faults=("leader dies", "leader deposed", "watch broken"), most_faults=3),
            100,
            id="leaders come and go",
        ),
    ],
)
def test_random_ways_lead_to_a_good_end(scenario: Scenario, runs: int) -> None:
    """I1, I5, I6, and that each of them ends."""
    explored = walk(scenario, range(runs))
    assert explored.ends == runs
    assert explored.states > 10 * runs
