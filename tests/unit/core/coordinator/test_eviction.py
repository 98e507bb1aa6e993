"""Who is evicted, who is buried, and which leader gives up (C5, C6)."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from domicile.core.coordinator.eviction import Eviction
from domicile.core.ids import Incarnation
from domicile.core.state.records import NodeRecord
from domicile.settings import Settings

SETTINGS = Settings()
NAMES = [Incarnation(name) for name in "abcdefg"]
A, B, C, D, E = NAMES[:5]


def records(
    *names: Incarnation, evicted: tuple[Incarnation, ...] = ()
) -> dict[Incarnation, NodeRecord]:
    return {
        name: NodeRecord(
            f"node-{name}", name, "", ("default",), (), 6.0,
            status="evicted" if name in evicted else "up",
        )
        for name in names
    }  # fmt: skip


def heard(now: float, *names: Incarnation) -> dict[Incarnation, float]:
    return dict.fromkeys(names, now)


def test_a_silent_node_is_probed_by_the_others_first_and_never_evicted_on_silence_alone() -> None:
    reach, nodes = Eviction(A, SETTINGS), records(A, B, C, D)
    assert reach.look(nodes, {}, 0.0).probes == ()
    due = reach.look(nodes, heard(3.0, B, C), 3.0)
    assert due.probes == ((B, D), (C, D))
    assert due.evict == ()
    later = heard(100.0, B, C)
    assert reach.look(nodes, later, 100.0).evict == (), "nobody said that it is unreachable"


def test_half_of_the_others_are_enough_and_fewer_are_not() -> None:
    reach, nodes = Eviction(A, SETTINGS), records(A, B, C, D, E)
    reach.look(nodes, {}, 0.0)
    reach.voted(B, E, False, 6.0)
    reach.voted(C, E, True, 6.0)
    assert reach.look(nodes, heard(6.0, B, C, D), 6.0).evict == ()
    reach.voted(D, E, False, 6.5)
    assert reach.look(nodes, heard(6.5, B, C, D), 6.5).evict == (E,)


def test_old_votes_do_not_count() -> None:
    reach, nodes = Eviction(A, SETTINGS), records(A, B, C)
    reach.look(nodes, {}, 0.0)
    reach.voted(B, C, False, 1.0)
    assert reach.look(nodes, heard(6.0, B), 6.0).evict == ()


def test_of_two_nodes_the_leader_may_evict_the_other() -> None:
    reach, nodes = Eviction(A, SETTINGS), records(A, B)
    reach.look(nodes, {}, 0.0)
    assert reach.look(nodes, {}, 5.9).evict == ()
    assert reach.look(nodes, {}, 6.0).evict == (B,)


def test_a_record_is_removed_only_ttl_after_this_leader_saw_the_eviction() -> None:
    nodes = records(A, B, C, evicted=(C,))
    reach = Eviction(A, SETTINGS)
    assert reach.look(nodes, heard(50.0, B), 50.0).remove == ()
    assert reach.look(nodes, heard(56.0, B), 56.0).remove == (), "clock rates differ (A1)"
    assert reach.look(nodes, heard(56.01, B), 56.01).remove == (C,)
    assert Eviction(A, SETTINGS).look(nodes, heard(56.01, B), 56.01).remove == (), "waits afresh"


def test_a_leader_that_reaches_under_half_resigns_and_evicts_nobody() -> None:
    reach, nodes = Eviction(A, SETTINGS), records(A, B, C, D, E)
    for second in range(9):
        now = float(second)
        for node in (B, C, D, E):
            reach.voted(node, B, False, now)
        due = reach.look(nodes, heard(now, C), now)
        assert not due.resign
    assert reach.look(nodes, heard(12.0, C), 12.0).resign


def test_half_is_enough_to_stay() -> None:
    reach, nodes = Eviction(A, SETTINGS), records(A, B, C, D)
    for second in range(60):
        assert not reach.look(nodes, heard(float(second), B), float(second)).resign


def test_under_health_nobody_is_evicted() -> None:
    reach, nodes = Eviction(A, Settings(fencing="health")), records(A, B)
    reach.look(nodes, {}, 0.0)
    assert reach.look(nodes, {}, 60.0).evict == ()


@given(
    count=st.integers(2, 7),
    ups=st.lists(st.booleans(), min_size=7, max_size=7),
    votes=st.lists(st.tuples(st.integers(0, 6), st.integers(0, 6), st.booleans()), max_size=30),
)
def test_no_minority_evicts(
    count: int, ups: list[bool], votes: list[tuple[int, int, bool]]
) -> None:
    """An evicted node was silent to the leader and to at least half of the others."""
    nodes = records(*NAMES[:count])
    reach = Eviction(A, SETTINGS)
    reach.look(nodes, {}, 0.0)
    words: dict[tuple[Incarnation, Incarnation], bool] = {}
    for voter, node, reached in votes:
        reach.voted(NAMES[voter], NAMES[node], reached, 6.0)
        words[NAMES[voter], NAMES[node]] = reached
    answered = [name for name, up in zip(NAMES[1:count], ups, strict=False) if up]
    due = reach.look(nodes, heard(6.0, *answered), 6.0)
    for node in due.evict:
        assert node not in answered
        others = [name for name in nodes if name not in (A, node)]
        against = [name for name in others if words.get((name, node)) is False]
        assert 2 * len(against) >= len(others)


@pytest.mark.parametrize("evict_after_s", [0.5, 6.0, 17.0, 120.0])
def test_votes_are_still_fresh_at_the_look_that_counts_them(evict_after_s: float) -> None:
    """Voters take a second to say that a node is out of reach, however long its lease is."""
    reach = Eviction(A, Settings(evict_after_s=evict_after_s))
    nodes, now, votes = records(A, B, C, D), 0.0, list[tuple[float, Incarnation]]()
    while now < 2 * evict_after_s + 10.0:
        for at, voter in votes:
            if at <= now:
                reach.voted(voter, D, False, at)
        votes = [(at, voter) for at, voter in votes if at > now]
        due = reach.look(nodes, heard(now, B, C), now)
        if due.evict:
            assert due.evict == (D,)
            return
        votes += [(now + 1.0, voter) for voter, _ in due.probes]
        now += reach.pace_s
    raise AssertionError("it was never evicted")
