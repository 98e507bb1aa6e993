"""Where shards should be: even, with the fewest moves, never for a difference of one."""

from __future__ import annotations

from collections.abc import Iterator
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from domicile.core.placement.balance import (
    intake,
    least_shards,
    place,
    receiver_limit,
    round_limit,
)

COUNTS = st.lists(st.integers(0, 40), min_size=1, max_size=8)


def named(counts: list[int]) -> dict[str, int]:
    return {f"n{index}": count for index, count in enumerate(counts)}


def units(owned: dict[str, int]) -> dict[str, float]:
    return dict.fromkeys(owned, 1.0)


def unlimited(
    owned: dict[str, int], capacity: dict[str, float] | None = None
) -> tuple[tuple[str, str], ...]:
    return least_shards(
        owned,
        capacity or units(owned),
        limit=10_000,
        room=dict.fromkeys(owned, 10_000),
        movable=owned,
    )


def after(owned: dict[str, int], moves: tuple[tuple[str, str], ...]) -> dict[str, int]:
    result = dict(owned)
    for giver, receiver in moves:
        result[giver] -= 1
        result[receiver] += 1
    return result


def fewest(counts: list[int]) -> int:
    """The least number of moves to a spread of at most one."""
    floor, extra = divmod(sum(counts), len(counts))
    ceiling = floor + 1 if extra else floor
    return max(sum(max(0, n - ceiling) for n in counts), sum(max(0, floor - n) for n in counts))


@given(COUNTS)
def test_balancing_ends_even_with_the_fewest_moves(counts: list[int]) -> None:
    owned = named(counts)
    moves = unlimited(owned)
    ended = after(owned, moves)
    assert max(ended.values()) - min(ended.values()) <= 1
    assert len(moves) == fewest(counts)
    assert unlimited(ended) == ()


@given(COUNTS, st.integers(1, 5), st.integers(1, 3))
def test_rounds_under_limits_add_no_moves(counts: list[int], limit: int, room: int) -> None:
    owned, total = named(counts), 0
    while True:
        moves = least_shards(
            owned, units(owned), limit=limit, room=dict.fromkeys(owned, room), movable=owned
        )
        assert len(moves) <= limit
        assert all(sum(to == node for _, to in moves) <= room for node in owned), (
            "a receiver was swamped"
        )
        if not moves:
            break
        owned, total = after(owned, moves), total + len(moves)
    assert total == fewest(counts)


@given(st.integers(0, 50), st.lists(st.integers(0, 1), min_size=1, max_size=8))
def test_no_move_for_a_difference_of_one(base: int, extras: list[int]) -> None:
    assert unlimited(named([base + extra for extra in extras])) == ()


def test_a_move_for_a_difference_of_two() -> None:
    assert unlimited({"a": 4, "b": 2}) == (("a", "b"),)


@given(COUNTS, st.lists(st.sampled_from([0.5, 1.0, 1.5, 2.0, 3.0]), min_size=8, max_size=8))
def test_capacities_converge(counts: list[int], capacities: list[float]) -> None:
    owned = named(counts)
    capacity = dict(zip(owned, capacities, strict=False))
    ended = after(owned, unlimited(owned, capacity))
    assert unlimited(ended, capacity) == ()
    for giver in ended:
        for receiver in ended:
            if giver != receiver:
                gain = (ended[receiver] + 1) / capacity[receiver] < ended[giver] / capacity[giver]
                assert (
                    not gain
                    or abs(
                        (ended[receiver] + 1) / capacity[receiver] - ended[giver] / capacity[giver]
                    )
                    < 1e-6
                )


def test_a_node_of_twice_the_capacity_gets_twice_the_shards() -> None:
    moves = unlimited({"a": 30, "b": 0}, {"a": 1.0, "b": 2.0})
    assert after({"a": 30, "b": 0}, moves) == {"a": 10, "b": 20}


def test_scale_out_takes_the_minimum_and_the_rounds_of_the_limit() -> None:
    owned = named([15] * 20 + [0] * 5)
    limit = round_limit(300, 0.1, 1_000)
    rounds = 0
    total = 0
    while moves := least_shards(
        owned,
        units(owned),
        limit=limit,
        room=dict.fromkeys(owned, receiver_limit(limit, 0.5)),
        movable=owned,
    ):
        owned, rounds, total = after(owned, moves), rounds + 1, total + len(moves)
    assert (rounds, total) == (2, 60)
    assert sorted(owned.values()) == [12] * 25


@given(COUNTS, st.integers(0, 60))
def test_placing_levels_the_least_loaded(counts: list[int], free: int) -> None:
    owned = named(counts)
    placed = place(range(free), owned, units(owned))
    ended = dict(owned)
    for node in placed.values():
        ended[node] += 1
    assert list(placed) == list(range(free))
    receivers = [node for node in owned if ended[node] > owned[node]]
    for node in receivers:
        assert ended[node] <= min(ended.values()) + 1


def test_ties_go_in_the_given_order() -> None:
    assert place([5, 6, 7], {}, {"b": 1.0, "a": 1.0}) == {5: "b", 6: "a", 7: "b"}


def test_nobody_to_place_on() -> None:
    assert place([1], {}, {}) == {}


def test_a_preferred_node_gets_its_own_back_up_to_its_share() -> None:
    prefer = dict.fromkeys(range(8), "b")
    placed = place(range(8), {}, {"a": 1.0, "b": 1.0}, prefer)
    assert [shard for shard, node in placed.items() if node == "b"] == [0, 1, 2, 3]
    assert place([0], {}, {"a": 1.0}, {0: "gone"}) == {0: "a"}


# limits


def test_the_lower_limit_holds_and_one_move_is_always_allowed() -> None:
    assert round_limit(4, 0.1, 1_000) == 1
    assert round_limit(256, 0.1, 1_000) == 25
    assert round_limit(256, 0.1, 3) == 3
    assert round_limit(100_000, 0.1, 1_000) == 1_000
    assert round_limit(100, 0.29, 1_000) == 29, "not 28 by the last digit of a product"
    assert round_limit(0, 0.1, 1_000) == 1
    assert receiver_limit(1, 0.5) == 1
    assert receiver_limit(25, 0.5) == 13
    assert receiver_limit(10, 0.1) == 1
    assert receiver_limit(10, 0.3) == 3
    assert receiver_limit(10, 0.001) == 1


VECTORS = [
    # shards per node, relative, absolute, rounds of (giver, receiver)
    ([1, 1, 1], 1.0, 10, []),
    ([2, 1, 2], 1.0, 10, []),
    ([3, 1, 2], 1.0, 10, ["ab"]),
    ([10, 0, 0], 1.0, 100, ["ab ac ab ac ab ac"]),
    ([10, 0, 0], 0.2, 100, ["ab ac"] * 3),
    ([10, 0, 0], 0.1, 100, ["ab", "ac"] * 3),
    ([10, 0, 0], 0.05, 100, ["ab", "ac"] * 3),
    ([10, 0, 0], 1.0, 4, ["ab ac ab ac", "ab ac"]),
    ([10, 0, 0], 0.4, 3, ["ab ac ab", "ac ab ac"]),
    ([10, 10, 1], 1.0, 100, ["ac bc ac bc ac bc"]),
    ([10, 10, 1], 1.0, 4, ["ac bc ac bc", "ac bc"]),
    ([9, 9, 9, 0], 1.0, 100, ["ad bd cd ad bd cd"]),
    ([5, 5, 5, 5, 0, 0], 1.0, 100, ["ae bf ce df ae bf"]),
]


@pytest.mark.parametrize(("counts", "relative", "absolute", "rounds"), VECTORS)
def test_rounds_by_vector(
    counts: list[int], relative: float, absolute: int, rounds: list[str]
) -> None:
    """RG-13: what each round moves, under absolute and relative limits, until nothing does."""
    owned = dict(zip("abcdef", counts, strict=False))
    limit = round_limit(sum(counts), relative, absolute)
    found: list[str] = []
    while moves := least_shards(
        owned, units(owned), limit=limit, room=dict.fromkeys(owned, limit), movable=owned
    ):
        found.append(" ".join(giver + receiver for giver, receiver in moves))
        owned = after(owned, moves)
    assert found == rounds


def test_a_full_receiver_leaves_the_round_to_others() -> None:
    owned = {"a": 10, "b": 0, "c": 0}
    moves = least_shards(owned, units(owned), limit=4, room={"b": 1, "c": 9}, movable=owned)
    assert moves == (("a", "b"), ("a", "c"), ("a", "c"), ("a", "c"))


def test_what_may_not_move_stays() -> None:
    owned = {"a": 6, "b": 4, "c": 0}
    moves = least_shards(
        owned, units(owned), limit=9, room=dict.fromkeys(owned, 9), movable={"a": 1, "b": 9}
    )
    assert moves == (("a", "c"), ("b", "c"))


def test_the_intake_of_mixed_versions() -> None:
    assert intake(100, {"a": 1.0, "b": 3.0}, 10.0) == {"a": 20, "b": 60}
    assert intake(3, {"a": 1.0}, 10.0) == {"a": 1}
    placed = place(range(10), {"a": 1}, {"a": 1.0, "b": 1.0}, most={"a": 3, "b": 4})
    assert list(placed.values()) == ["b", "a", "b", "a", "b", "b"]
    assert list(placed) == [0, 1, 2, 3, 4, 5], "the rest is left out"


def test_a_preference_stays_within_the_intake() -> None:
    prefer = dict.fromkeys(range(8), "b")
    placed = place(range(8), {}, {"a": 1.0, "b": 1.0}, prefer, most={"a": 8, "b": 2})
    assert [shard for shard, node in placed.items() if node == "b"] == [0, 1]
    assert list(placed) == list(range(8))


def test_marked_shards_go_where_the_fewest_are_whatever_the_load() -> None:
    owned = {"a": 0, "b": 50, "c": 50}
    placed = place([1, 2, 3, 4], owned, units(owned), marked={"b": 1})
    assert placed == {1: "a", 2: "c", 3: "a", 4: "b"}


# the brute-force twin

CAPACITY = st.sampled_from([0.5, 1.0, 1.5, 2.0, 3.0])
SMALL = st.lists(st.tuples(st.integers(0, 5), CAPACITY), min_size=1, max_size=4)


def splits(total: int, parts: int) -> Iterator[tuple[int, ...]]:
    """Every way to write a number as that many counts."""
    if parts == 1:
        yield (total,)
        return
    for first in range(total + 1):
        for rest in splits(total - first, parts - 1):
            yield (first, *rest)


def unevenness(counts: tuple[int, ...], capacities: list[float]) -> Fraction:
    """Each node's shards cost 1, 2, 3 ... per unit of capacity: least where they are most even."""
    return sum(
        (
            Fraction(count * (count + 1)) / Fraction(capacity)
            for count, capacity in zip(counts, capacities, strict=True)
        ),
        Fraction(0),
    )


def distance(before: list[int], counts: tuple[int, ...]) -> int:
    return sum(max(0, was - now) for was, now in zip(before, counts, strict=True))


@given(SMALL)
def test_no_other_way_is_more_even_or_as_even_with_fewer_moves(
    nodes: list[tuple[int, float]],
) -> None:
    counts, capacities = [count for count, _ in nodes], [one for _, one in nodes]
    owned = named(counts)
    moves = unlimited(owned, dict(zip(owned, capacities, strict=True)))
    ended = tuple(after(owned, moves).values())
    ways = list(splits(sum(counts), len(counts)))
    best = min(unevenness(way, capacities) for way in ways)
    assert unevenness(ended, capacities) == best
    fewest = min(distance(counts, way) for way in ways if unevenness(way, capacities) == best)
    assert len(moves) == distance(counts, ended) == fewest


@given(SMALL, st.integers(0, 5))
def test_no_other_placement_is_more_even(nodes: list[tuple[int, float]], free: int) -> None:
    counts, capacities = [count for count, _ in nodes], [one for _, one in nodes]
    owned = named(counts)
    ended = dict(owned)
    for node in place(range(free), owned, dict(zip(owned, capacities, strict=True))).values():
        ended[node] += 1
    ways = [
        tuple(count + more for count, more in zip(counts, extra, strict=True))
        for extra in splits(free, len(counts))
    ]
    best = min(unevenness(way, capacities) for way in ways)
    assert unevenness(tuple(ended.values()), capacities) == best


@given(st.lists(st.tuples(st.integers(0, 30), CAPACITY), min_size=1, max_size=8), st.data())
def test_any_part_of_a_round_leaves_no_more_than_the_rest(
    nodes: list[tuple[int, float]], data: st.DataObject
) -> None:
    owned = named([count for count, _ in nodes])
    capacity = dict(zip(owned, (one for _, one in nodes), strict=True))
    moves = unlimited(owned, capacity)
    part = tuple(move for move in moves if data.draw(st.booleans()))
    rest = unlimited(after(owned, part), capacity)
    assert len(part) + len(rest) == len(moves)


@given(
    st.lists(st.tuples(st.integers(0, 30), CAPACITY), min_size=1, max_size=8),
    st.integers(1, 6),
    st.integers(1, 3),
)
def test_at_rest_no_node_has_a_shard_too_many_for_its_capacity(
    nodes: list[tuple[int, float]], limit: int, room: int
) -> None:
    owned = named([count for count, _ in nodes])
    capacity = dict(zip(owned, (one for _, one in nodes), strict=True))
    fewest, total = len(unlimited(owned, capacity)), 0
    while moves := least_shards(
        owned, capacity, limit=limit, room=dict.fromkeys(owned, room), movable=owned
    ):
        owned, total = after(owned, moves), total + len(moves)
    assert total == fewest
    for giver in owned:
        for taker in owned:
            if giver != taker:
                gap = owned[giver] / capacity[giver] - owned[taker] / capacity[taker]
                assert gap <= 1 / capacity[taker] + 1e-9
