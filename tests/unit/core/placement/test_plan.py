"""The planner's decisions, each from a hand-made view."""

from __future__ import annotations

import pytest
from plan_lab import (
    NOW,
    SETTINGS,
    A,
    B,
    C,
    D,
    decide,
    move,
    moving,
    node,
    own,
    revert,
    seen,
    serving,
)

from domicile.core.ids import NOBODY, Incarnation
from domicile.core.placement import strategies
from domicile.core.placement.model import Plan
from domicile.core.placement.plan import plan_in_slices, situation
from domicile.core.placement.slices import PAUSE
from domicile.core.placement.strategies import Seat, Situation
from domicile.core.state.records import NodeRecord
from domicile.core.state.shardmap import FREE, Entry
from domicile.settings import Settings


@pytest.mark.parametrize("strategy", ["least_shards", "consistent_ring"])
def test_many_shards_are_balanced_in_slices(strategy: str) -> None:
    def pauses(balance: bool) -> int:
        view = seen([serving(A)] * 20_000, node(A), node(B), balance=balance, strategy=strategy)
        strategies.forget()
        return len(list(plan_in_slices(view, NOW, SETTINGS)))

    passes = 1 if strategy == "least_shards" else 2
    assert pauses(True) - pauses(False) >= passes * (20_000 // PAUSE)


# owners


def test_the_first_node_gets_every_shard() -> None:
    assert decide([FREE] * 3, node(A)).owns == (own(0, A), own(1, A), own(2, A))


def test_free_shards_go_to_the_least_loaded() -> None:
    result = decide([serving(A), serving(A), FREE, FREE], node(A), node(B))
    assert result.owns == (own(2, B), own(3, B))


def test_a_dead_owners_shards_are_taken_over_at_once() -> None:
    result = decide([serving(D), serving(A)], node(A), node(B))
    assert result == Plan(owns=(own(0, B, gone=True),))


def test_a_dead_owners_shards_return_to_its_node_id() -> None:
    back = NodeRecord("node-d", B, "b:2", ("r",), (), 6.0)
    result = decide([serving(D), serving(D), serving(A), serving(A)], node(A), back)
    assert result.owns == (own(0, B, gone=True), own(1, B, gone=True))


def test_a_released_shard_goes_where_it_was_moving() -> None:
    entries = [moving(A, C), serving(B)]
    assert decide(entries, node(A), node(B), node(C), released={0: 1}).owns == (own(0, C),)


def test_a_released_shard_avoids_a_target_that_left() -> None:
    entries = [moving(A, C), serving(A)]
    result = decide(entries, node(A), node(B), node(C, "leaving"), released={0: 1})
    assert result == Plan(owns=(own(0, B),))


def test_a_release_counts_while_the_record_says_serving() -> None:
    assert decide([serving(A)], node(A, "leaving"), node(B), released={0: 1}).owns == (own(0, B),)


def test_a_released_shard_may_return_to_the_only_node() -> None:
    assert decide([serving(A)], node(A), released={0: 1}).owns == (own(0, A),)


def test_nothing_is_placed_on_silent_nodes() -> None:
    assert decide([FREE, FREE], node(A), node(B), unheard=(B,)).owns == (own(0, A), own(1, A))
    assert decide([FREE], node(A), unheard=(A,)) == Plan()


def test_this_process_always_hears_itself() -> None:
    me = node(Incarnation("me"))
    assert decide([FREE], me, unheard=(Incarnation("me"),)).owns == (own(0, me.incarnation),)


def test_only_nodes_of_the_role_receive() -> None:
    assert decide([FREE], node(A, roles=("other",)), node(B)).owns == (own(0, B),)
    assert decide([FREE], node(A, roles=("other",))) == Plan()


@pytest.mark.parametrize("status", ["leaving", "evicted"])
def test_leaving_and_evicted_nodes_never_receive(status: str) -> None:
    assert decide([FREE], node(A, status)) == Plan()


def test_a_drained_node_receives_only_if_there_is_no_other() -> None:
    assert decide([FREE], node(A), node(B), drains=("node-a",)).owns == (own(0, B),)
    assert decide([FREE], node(A), drains=("node-a",)).owns == (own(0, A),)
    assert decide([FREE], node(A), node(B), drains=("node-a",), unheard=(B,)) == Plan()


def test_a_wish_decides_the_placement() -> None:
    result = decide([FREE, serving(D)], node(A), node(B), wishes={0: "node-b", 1: "node-b"})
    assert result.owns == (own(0, B), own(1, B, gone=True))


# moves


@pytest.mark.parametrize("how", ["leaving", "drained"])
def test_a_departing_node_gives_everything_away_without_a_limit(how: str) -> None:
    leaving = node(A, "leaving" if how == "leaving" else "up")
    drains = ("node-a",) if how == "drained" else ()
    result = decide([serving(A)] * 20, leaving, node(B), node(C), drains=drains)
    assert len(result.moves) == 20
    assert sum(one.to == B for one in result.moves) == 10


def test_nobody_to_go_to_means_no_move() -> None:
    assert decide([serving(A)], node(A), drains=("node-a",)) == Plan()
    assert decide([serving(A)], node(A, "leaving"), node(B), unheard=(B,)) == Plan()


def test_the_last_node_is_drained_before_it_leaves() -> None:
    assert decide([serving(A)], node(A, "leaving")).moves == (move(0, NOBODY),)


def test_a_wish_moves_a_shard() -> None:
    assert decide([serving(A)], node(A), node(B), wishes={0: "node-b"}).moves == (move(0, B),)


def test_a_wish_for_where_it_is_or_for_nobody_moves_nothing() -> None:
    assert decide([serving(A)], node(A), node(B), wishes={0: "node-a"}) == Plan()
    assert decide([serving(A)], node(A), node(B), wishes={0: "node-x"}) == Plan()
    assert decide([serving(A)], node(A), node(B, "leaving"), wishes={0: "node-b"}) == Plan()


def test_a_shard_that_could_not_be_emptied_rests() -> None:
    rest = {0: NOW + 5}
    args = {"wishes": {0: "node-b"}}
    assert decide([serving(A)], node(A), node(B), resting_until=rest, **args) == Plan()
    assert decide([serving(A)], node(A), node(B), resting_until={0: NOW}, **args).moves
    assert decide([serving(A)], node(A, "leaving"), node(B), resting_until=rest).moves


def test_an_evicted_owner_is_not_asked_to_move() -> None:
    assert decide([serving(A)], node(A, "evicted"), node(B), drains=("node-a",)) == Plan()


def test_a_moving_shard_is_not_moved_again() -> None:
    assert decide([moving(A, B)], node(A, "leaving"), node(B), node(C)) == Plan()


# balance


def test_balancing_waits_for_its_time() -> None:
    entries = [serving(A)] * 10
    assert decide(entries, node(A), node(B)) == Plan()
    assert decide(entries, node(A), node(B), balance=True).moves == (move(0, B),)


def test_balancing_counts_moves_under_way() -> None:
    entries = [moving(A, B), *[serving(A)] * 9]
    assert decide(entries, node(A), node(B), balance=True) == Plan()


def test_drains_do_not_use_up_the_balance_limit() -> None:
    entries = [moving(C, B), *[serving(A)] * 9]
    result = decide(entries, node(A), node(B), node(C), drains=("node-c",), balance=True)
    assert len(result.moves) == 1


def test_no_balancing_while_a_shard_is_homeless() -> None:
    entries = [FREE, *[serving(A)] * 9]
    assert decide(entries, node(A), node(B), balance=True).moves == ()


def test_balancing_only_between_heard_nodes() -> None:
    entries = [serving(A)] * 10
    assert decide(entries, node(A), node(B), balance=True, unheard=(A,)) == Plan()
    assert decide(entries, node(A), node(B), balance=True, unheard=(B,)) == Plan()


def test_balancing_leaves_pinned_shards_alone() -> None:
    entries = [serving(A)] * 3
    wishes = {0: "node-a", 1: "node-a"}
    assert decide(entries, node(A), node(B), balance=True, wishes=wishes).moves == (move(2, B),)


# reverts


def test_an_owner_that_asks_keeps_its_shard() -> None:
    assert decide([moving(A, B, 3)], node(A), node(B), asked={0: 3}) == Plan(reverts=(revert(0),))
    assert decide([moving(A, B, 3)], node(A), node(B), asked={0: 2}) == Plan()


def test_a_release_is_final_even_if_the_owner_asked() -> None:
    result = decide([moving(A, B)], node(A), node(B), asked={0: 1}, released={0: 1})
    assert result == Plan(owns=(own(0, B),))


@pytest.mark.parametrize("how", ["gone", "leaving", "drained"])
def test_a_move_whose_target_vanished_is_taken_back(how: str) -> None:
    others = {"gone": (), "leaving": (node(B, "leaving"),), "drained": (node(B),)}[how]
    drains = ("node-b",) if how == "drained" else ()
    result = decide([moving(A, B)], node(A), node(C), *others, drains=drains)
    assert result == Plan(reverts=(revert(0),))


def test_a_departing_owner_goes_on_emptying() -> None:
    assert decide([moving(A, B)], node(A, "leaving"), node(C)) == Plan()
    assert decide([moving(A, B)], node(A), node(C), drains=("node-a",)) == Plan()


def test_a_removed_wish_takes_its_move_back() -> None:
    assert decide([moving(A, B)], node(A), node(B), wished={0: 1}).reverts == (revert(0),)
    kept = decide([moving(A, B)], node(A), node(B), wished={0: 1}, wishes={0: "node-b"})
    assert kept == Plan()
    assert decide([moving(A, B)], node(A), node(B)) == Plan()


def test_a_changed_wish_redirects_and_one_for_the_owner_takes_back() -> None:
    nodes = (node(A), node(B), node(C))
    assert decide([moving(A, B)], *nodes, wished={0: 1}, wishes={0: "node-c"}) == Plan()
    released = decide([moving(A, B)], *nodes, wishes={0: "node-c"}, released={0: 1})
    assert released.owns == (own(0, C),)
    assert decide([moving(A, B)], *nodes, wishes={0: "node-a"}).reverts == (revert(0),)


# limits


def test_the_absolute_limit_holds_below_the_relative_one() -> None:
    entries = [serving(A)] * 40
    nodes = (node(A), node(B), node(C))
    settings = Settings(balance_limit=0.5, balance_shards=3, balance_receiver=1.0)
    assert len(decide(entries, *nodes, balance=True, settings=settings).moves) == 3
    settings = Settings(balance_limit=0.1, balance_shards=1_000, balance_receiver=1.0)
    assert len(decide(entries, *nodes, balance=True, settings=settings).moves) == 4


def test_a_receiver_gets_its_part_of_a_round_only() -> None:
    entries = [serving(A)] * 40
    settings = Settings(balance_limit=0.2, balance_receiver=0.25)
    result = decide(entries, node(A), node(B), balance=True, settings=settings)
    assert result.moves == (move(0, B), move(1, B))
    entries[0] = moving(A, B)
    result = decide(entries, node(A), node(B), balance=True, settings=settings)
    assert result.moves == (move(1, B),), "what is under way to it counts"


@pytest.mark.parametrize("strategy", ["consistent_ring", "ranges"])
def test_limits_hold_for_strategies_with_places(strategy: str) -> None:
    entries = [serving(A)] * 40
    settings = Settings(balance_limit=0.2, balance_receiver=0.25)
    nodes = (node(A), node(B), node(C))
    args = {"balance": True, "strategy": strategy, "settings": settings}
    moves = decide(entries, *nodes, **args).moves  # type: ignore[arg-type]
    assert [one.to for one in moves].count(B) == 2
    assert [one.to for one in moves].count(C) == 2


def test_capacities_weigh() -> None:
    result = decide([FREE] * 8, node(A), node(B, capacity=3.0))
    assert [one.owner for one in result.owns].count(B) == 6


@pytest.mark.parametrize("capacity", [0.0, -1.0, float("nan")])
def test_a_node_without_capacity_receives_nothing(capacity: float) -> None:
    assert decide([FREE], node(A, capacity=capacity), node(B)).owns == (own(0, B),)
    assert decide([FREE], node(A, capacity=capacity)) == Plan()


@pytest.mark.parametrize("strategy", ["least_shards", "consistent_ring", "ranges"])
@pytest.mark.parametrize("capacity", [float("inf"), 1e308, 1e-300])
def test_an_absurd_capacity_breaks_nothing(strategy: str, capacity: float) -> None:
    nodes = (node(A, capacity=capacity, version="2"), node(B, capacity=capacity), node(C))
    for version in ("", "2"):
        mixed = (nodes[0], nodes[1], node(C, version=version))
        result = decide([FREE, serving(D), serving(B)], *mixed, strategy=strategy)
        assert len(result.owns) == 2


# strategies with places


def test_the_homeless_go_to_their_places() -> None:
    result = decide([FREE] * 4, node(A), node(B), strategy="ranges")
    assert [one.owner for one in result.owns] == [A, A, B, B]


def test_a_place_that_is_silent_is_taken_by_the_least_loaded_for_now() -> None:
    result = decide([FREE] * 6, node(A), node(B), node(C), unheard=(A,), strategy="ranges")
    assert [one.owner for one in result.owns] == [B, C, B, B, C, C], "no place is shifted"


def test_a_silent_node_shifts_nobodys_range() -> None:
    entries = [serving(A)] * 2 + [serving(B)] * 2 + [serving(C)] * 2
    nodes = (node(A), node(B), node(C))
    assert decide(entries, *nodes, unheard=(B,), balance=True, strategy="ranges") == Plan()


def test_a_drained_nodes_shards_go_to_their_places() -> None:
    entries = [serving(A)] * 2 + [serving(B)] * 2 + [serving(C)] * 2
    nodes = (node(A), node(B), node(C))
    result = decide(entries, *nodes, drains=("node-b",), strategy="ranges")
    assert result.moves == (move(2, A), move(3, C))


def test_balancing_goes_to_places_and_leaves_wishes_alone() -> None:
    entries = [serving(B), serving(B), serving(A), serving(B)]
    args = {"balance": True, "strategy": "ranges", "settings": Settings(balance_limit=1.0)}
    result = decide(entries, node(A), node(B), **args)  # type: ignore[arg-type]
    assert result.moves == (move(2, B), move(0, A), move(1, A))
    pinned = decide(entries, node(A), node(B), wishes={0: "node-b"}, **args)  # type: ignore[arg-type]
    assert pinned.moves == (move(2, B), move(1, A))


def test_two_runs_of_one_node_id_have_one_place() -> None:
    again = NodeRecord("node-a", C, "c:1", ("r",), (), 6.0)
    entries = [serving(A), serving(A), serving(B), serving(B)]
    args = {"balance": True, "strategy": "ranges", "settings": Settings(balance_limit=1.0)}
    result = decide(entries, node(A), node(B), again, **args)  # type: ignore[arg-type]
    assert result.moves == (move(0, C), move(1, C)), "the newest run is the node"


# a user's function


def test_advice_places_and_balances() -> None:
    entries = [FREE, serving(A), serving(A), serving(A)]
    advice = {0: "node-b", 1: "node-b"}
    assert decide(entries, node(A), node(B), advice=advice).owns == (own(0, B),)
    entries[0] = serving(B)
    settings = Settings(balance_limit=1.0)
    result = decide(entries, node(A), node(B), advice=advice, balance=True, settings=settings)
    assert result.moves == (move(1, B),), "what it leaves out stays"


@pytest.mark.parametrize("nowhere", ["", "node-x", "node-c", "node-d"])
def test_advice_that_leads_nowhere_is_none(nowhere: str) -> None:
    others = (node(C, "leaving"), node(D))
    entries = [serving(A), serving(A), serving(A), FREE]
    result = decide(
        entries, node(A), node(B), *others, unheard=(D,), advice=dict.fromkeys(range(4), nowhere)
    )
    assert result == Plan(owns=(own(3, B),)), "the homeless go to the least loaded"
    entries[3] = serving(A)
    advice = dict.fromkeys(range(4), nowhere)
    nodes = (node(A), node(B), *others)
    assert decide(entries, *nodes, unheard=(D,), advice=advice, balance=True) == Plan()


def test_no_advice_at_all_keeps_everything_where_it_is() -> None:
    entries = [serving(A)] * 10
    assert decide(entries, node(A), node(B), advice={}, balance=True) == Plan()


def test_advice_overrides_the_named_strategy() -> None:
    result = decide([FREE] * 2, node(A), node(B), advice={0: "node-b"}, strategy="ranges")
    assert result.owns == (own(0, B), own(1, A))


def test_a_leaving_nodes_shards_go_where_advised() -> None:
    entries = [serving(A), serving(A), serving(B)]
    result = decide(entries, node(A, "leaving"), node(B), node(C), advice={0: "node-b"})
    assert result.moves == (move(0, B), move(1, C))


def test_while_undecided_nothing_is_placed_or_balanced() -> None:
    entries = [FREE, serving(D), *[serving(A)] * 10]
    assert decide(entries, node(A), node(B), undecided=True) == Plan()
    assert decide(entries[2:], node(A), node(B), undecided=True, balance=True) == Plan()
    drained = decide(entries[2:], node(A), node(B), undecided=True, drains=("node-a",))
    assert drained == Plan()


def test_while_undecided_what_was_decided_goes_on() -> None:
    nodes = (node(A), node(B), node(C))
    released = decide([moving(A, B)], *nodes, undecided=True, released={0: 1})
    assert released.owns == (own(0, B),), "the function is not asked where a move ends"
    assert decide([FREE], *nodes, undecided=True, wishes={0: "node-c"}).owns == (own(0, C),)
    assert decide([serving(A)], *nodes, undecided=True, wishes={0: "node-c"}).moves == (move(0, C),)
    leaving = decide([serving(A), serving(B)], node(A, "leaving"), node(B), node(C), undecided=True)
    assert leaving.moves == (move(0, C),)
    lost = decide([moving(A, D)], *nodes, undecided=True)
    assert lost.reverts == (revert(0),)


def test_the_situation_that_a_function_is_asked_with() -> None:
    entries = [
        serving(A),
        moving(A, B),
        moving(A, D),
        FREE,
        serving(D),
        moving(A, B),
        serving(A),
        Entry(NOBODY, 3, "quarantined", NOBODY, 4, "node-a", 3),
        moving(A, C),
    ]
    nodes = (node(A, capacity=2.0, version="1"), node(B), node(C))
    view = seen(entries, *nodes, unheard=(C,), released={5: 1, 6: 1, 8: 1})
    assert situation(view, "r", NOW, SETTINGS) == Situation(
        "r",
        ("node-a", "node-b", "node-a", "", "", "node-b", "", "", ""),
        (Seat("node-a", 2.0, "1"), Seat("node-b")),
    )


def test_the_seats_are_those_of_the_target_version() -> None:
    nodes = (node(A, version="1"), node(B, version="2"), node(C, version="2"))
    seats = situation(seen([FREE], *nodes), "r", NOW, SETTINGS).seats
    assert seats == (Seat("node-b", 1.0, "2"), Seat("node-c", 1.0, "2"))
    seats = situation(seen([FREE], *nodes, target="1"), "r", NOW, SETTINGS).seats
    assert seats == (Seat("node-a", 1.0, "1"),)


# who is to blame


def test_a_shard_that_was_emptied_for_nobody_lost_its_owner_to_no_death() -> None:
    left = decide([moving(C, NOBODY), moving(C, A)], node(A), node(B))
    assert [one.suspicion.deaths for one in left.owns] == [0, 1]


def test_what_was_on_its_way_to_somebody_who_leaves_too_goes_to_nobody_if_nobody_stays() -> None:
    """H14, DX-20: its owner empties it and goes, which is no death then."""
    entries = [moving(A, B), moving(A, NOBODY), serving(A)]
    leaving = (node(A, "leaving"), node(B, "leaving"))
    found = decide(entries, *leaving, released={0: 1})
    assert sorted(found.moves, key=lambda one: one.shard) == [move(0, NOBODY), move(2, NOBODY)]
    for stays in (node(C), node(C, roles=("other", "r"))):
        assert move(0, NOBODY) not in decide(entries, *leaving, stays, released={0: 1}).moves
    elsewhere = node(C, roles=("other",))
    assert move(0, NOBODY) in decide(entries, *leaving, elsewhere, released={0: 1}).moves
    stays = (node(A), node(B, "leaving"))
    assert move(0, NOBODY) not in decide(entries, *stays).moves, "it is taken back"
