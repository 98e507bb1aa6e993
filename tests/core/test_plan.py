"""The planner's decisions, each from a hand-made view."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
from hypothesis import given
from hypothesis import strategies as st

from domicile.config import Settings
from domicile.core.ids import NOBODY, Incarnation, ShardKey
from domicile.core.plan import Move, Own, Plan, Revert, RoleView, View, plan
from domicile.core.records import NodeRecord
from domicile.core.shardmap import FREE, Entry

A, B, C, D = (Incarnation(name) for name in "abcd")
NOW = 100.0
SETTINGS = Settings()


def node(inc: Incarnation, status: str = "up", roles: tuple[str, ...] = ("r",)) -> NodeRecord:
    return NodeRecord(f"node-{inc}", inc, f"{inc}:1", roles, (), 6.0, status=status)


def serving(owner: Incarnation, epoch: int = 1) -> Entry:
    return Entry(owner, epoch, "serving", NOBODY, epoch, f"node-{owner}")


def moving(owner: Incarnation, to: Incarnation, epoch: int = 1) -> Entry:
    return Entry(owner, epoch, "moving", to, epoch + 1, f"node-{owner}")


def decide(
    entries: list[Entry],
    *nodes: NodeRecord,
    unheard: tuple[Incarnation, ...] = (),
    drains: tuple[str, ...] = (),
    balance: bool = False,
    settings: Settings = SETTINGS,
    **part: Mapping[int, int] | Mapping[int, str] | Mapping[int, float],
) -> Plan:
    records = {record.incarnation: record for record in nodes}
    heard_at = {inc: NOW - (2.5 if inc in unheard else 0.5) for inc in records}
    role = RoleView(tuple(entries), **part)  # type: ignore[arg-type]
    view = View(Incarnation("me"), records, heard_at, drains, {"r": role}, balance)
    return plan(view, NOW, settings)


def own(shard: int, owner: Incarnation, gone: bool = False) -> Own:
    return Own(ShardKey("r", shard), owner, gone)


def move(shard: int, to: Incarnation) -> Move:
    return Move(ShardKey("r", shard), to)


def revert(shard: int) -> Revert:
    return Revert(ShardKey("r", shard))


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


# properties

NAMES = tuple(Incarnation(name) for name in "abcdefgh")


def carry_out(entries: list[Entry], result: Plan) -> list[Entry]:
    """The map once a plan was committed and every move released and committed."""
    after = list(entries)
    for one in (*result.owns, *result.moves):
        to = one.owner if isinstance(one, Own) else one.to
        after[one.shard.shard] = serving(to, after[one.shard.shard].epoch + 1)
    return after


@given(
    st.lists(st.sampled_from([NOBODY, *NAMES]), min_size=1, max_size=60),
    st.lists(st.sampled_from(NAMES), min_size=1, max_size=8, unique=True),
)
def test_any_membership_converges_and_then_rests(
    owners: list[Incarnation], alive: list[Incarnation]
) -> None:
    entries = [serving(owner) if owner else FREE for owner in owners]
    nodes = [node(inc) for inc in alive]
    entries = carry_out(entries, decide(entries, *nodes))
    assert all(entry.owner in alive for entry in entries)
    placed = [entry.owner for entry in entries]
    counts = [placed.count(inc) for inc in alive]
    floor, extra = divmod(len(entries), len(alive))
    ceiling = floor + bool(extra)
    fewest = max(
        sum(max(0, count - ceiling) for count in counts),
        sum(max(0, floor - count) for count in counts),
    )
    moves = 0
    for _ in range(len(entries) + 1):
        result = decide(entries, *nodes, balance=True)
        assert len({one.shard: None for one in result.decisions}) == len(result.decisions)
        moves += len(result.moves)
        entries = carry_out(entries, result)
    assert decide(entries, *nodes, balance=True) == Plan()
    placed = [entry.owner for entry in entries]
    counts = [placed.count(inc) for inc in alive]
    assert max(counts) - min(counts) <= 1
    assert moves == fewest


@given(st.integers(0, 6), st.lists(st.booleans(), min_size=1, max_size=6))
def test_a_difference_of_one_moves_nothing(base: int, extras: list[bool]) -> None:
    nodes = [node(inc) for inc, _ in zip(NAMES, extras, strict=False)]
    entries = [
        serving(inc) for inc, extra in zip(NAMES, extras, strict=False) for _ in range(base + extra)
    ]
    assert decide(entries, *nodes, balance=True) == Plan()


ENTRY = st.builds(
    lambda owner, to, state, epoch: FREE if state == "free" else Entry(owner, epoch, state, to, 9),
    st.sampled_from(NAMES),
    st.sampled_from([NOBODY, *NAMES]),
    st.sampled_from(["free", "serving", "moving"]),
    st.integers(1, 3),
)


@given(
    st.lists(ENTRY, max_size=20),
    st.lists(
        st.tuples(st.sampled_from(NAMES), st.sampled_from(["up", "leaving", "evicted"])),
        max_size=6,
        unique_by=lambda pair: pair[0],
    ),
    st.lists(st.sampled_from([f"node-{inc}" for inc in NAMES]), max_size=3),
    st.dictionaries(st.integers(0, 25), st.sampled_from([f"node-{inc}" for inc in NAMES])),
    st.lists(st.integers(0, 19), max_size=5),
    st.lists(st.integers(0, 19), max_size=5),
    st.booleans(),
)
def test_every_situation_is_handled_and_obeys_c4(
    entries: list[Entry],
    standing: list[tuple[Incarnation, str]],
    drains: list[str],
    wishes: dict[int, str],
    releases: list[int],
    asks: list[int],
    balance: bool,
) -> None:
    owned = [number for number, entry in enumerate(entries) if entry.owner]
    released = {number: entries[number].epoch for number in releases if number in owned}
    asked = {number: entries[number].epoch for number in asks if number in owned}
    result = decide(
        entries,
        *(node(inc, status) for inc, status in standing),
        drains=tuple(drains),
        wishes=wishes,
        released=released,
        asked=asked,
        wished=asked,
        balance=balance,
    )
    up = [inc for inc, status in standing if status == "up"]
    willing = [inc for inc in up if f"node-{inc}" not in drains]
    known = [inc for inc, _ in standing]
    assert len({one.shard: None for one in result.decisions}) == len(result.decisions)
    for one in result.owns:
        entry = entries[one.shard.shard]
        assert one.owner in up
        assert one.shard.shard in released or entry.owner not in known
        assert one.gone == (entry.owner != NOBODY and one.shard.shard not in released)
    for one in result.moves:
        assert entries[one.shard.shard].state == "serving"
        owner = entries[one.shard.shard].owner
        alone = not willing and dict(standing)[owner] == "leaving"
        assert one.to in up or (one.to == NOBODY and alone)
        assert one.to != entries[one.shard.shard].owner
    for one in result.reverts:
        assert entries[one.shard.shard].state == "moving"
