"""Where shards should be: even, with the fewest moves, never for a difference of one."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from domicile.core.allocate import least_shards, place, receiver_limit, round_limit

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
    limit = round_limit(300, 0.1)
    rounds = 0
    total = 0
    while moves := least_shards(
        owned,
        units(owned),
        limit=limit,
        room=dict.fromkeys(owned, receiver_limit(limit)),
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


def test_limits_are_at_least_one() -> None:
    assert round_limit(4, 0.1) == 1
    assert round_limit(256, 0.1) == 25
    assert receiver_limit(1) == 1
    assert receiver_limit(25) == 13
