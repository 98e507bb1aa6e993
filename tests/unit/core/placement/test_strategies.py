"""Places by name: the ring and ranges, and names that are refused."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import groupby
from math import ceil
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from domicile.core.placement.slices import PAUSE, at_once
from domicile.core.placement.strategies import (
    MOST_POINTS,
    NAMES,
    POINTS,
    Situation,
    check_strategy,
    wanted,
)
from domicile.errors import ConfigError
from domicile.testing import Sim

NODES = st.lists(st.sampled_from([f"n{index}" for index in range(12)]), min_size=1, unique=True)
CAPACITIES = st.lists(st.sampled_from([0.5, 1.0, 2.0, 3.5]), min_size=12, max_size=12)
Seats = tuple[tuple[str, float], ...]


def seats(names: Sequence[str], capacities: Sequence[float] = (1.0,) * 1_000) -> Seats:
    return tuple(zip(names, capacities, strict=False))


def places(name: str, shards: int, given: Seats) -> tuple[str, ...]:
    found = at_once(wanted(name, "r", shards, given))
    assert found is not None
    assert len(found) == shards
    return found


def numbered(count: int) -> list[str]:
    return [f"node-{index}" for index in range(count)]


# the ring


def test_the_ring_is_a_contract() -> None:
    """These must never change: a coordinator of another version would move nearly everything."""
    ring = places("consistent_ring", 16, (("a", 1.0), ("b", 1.0), ("c", 2.0)))
    assert "".join(ring) == "ccbbaccaaaccccac"
    other = at_once(wanted("consistent_ring", "other", 16, (("a", 1.0), ("b", 1.0), ("c", 2.0))))
    assert other is not None
    assert "".join(other) == "cbcabbbbccbcbbaa"


@given(NODES, CAPACITIES, st.integers(1, 500))
def test_on_the_ring_no_node_has_much_more_than_its_share(
    names: list[str], capacities: list[float], shards: int
) -> None:
    given = seats(names, capacities)
    counts = Counter(places("consistent_ring", shards, given))
    units = sum(capacity for _, capacity in given)
    assert counts.total() == shards
    for node, capacity in given:
        share = shards * capacity / units
        assert counts[node] <= max(1.25 * share + 1e-6, ceil(share - 1e-6) + 4)


@pytest.mark.parametrize("per_node", [4, 10, 20, 30, 100])
@pytest.mark.parametrize("nodes", [2, 3, 4, 5, 8, 12, 20, 35, 50])
def test_a_node_that_joins_the_ring_moves_few_shards(nodes: int, per_node: int) -> None:
    """On average over many clusters, at most 1.5 / (n + 1) of the shards."""
    shards, moved = nodes * per_node, 0
    clusters = max(4, 40 // nodes)
    for number in range(clusters):
        ids = [f"{number}-{one}" for one in range(nodes + 1)]
        old = places("consistent_ring", shards, seats(ids[:-1]))
        new = places("consistent_ring", shards, seats(ids))
        assert max(Counter(old).values()) <= max(1.25 * per_node, per_node + 4)
        moved += sum(was != now for was, now in zip(old, new, strict=True))
    assert moved / clusters <= 1.5 * shards / (nodes + 1)


@given(NODES, CAPACITIES, st.randoms())
def test_the_ring_does_not_depend_on_the_order_of_seats(
    names: list[str], capacities: list[float], random: Random
) -> None:
    given = list(seats(names, capacities))
    shuffled = random.sample(given, len(given))
    assert places("consistent_ring", 100, tuple(given)) == places(
        "consistent_ring", 100, tuple(shuffled)
    )


@pytest.mark.parametrize("nodes", [1, 2, 5, 20, 100])
def test_a_join_moves_about_its_share_of_the_ring(nodes: int) -> None:
    shards = 20_000
    old = places("consistent_ring", shards, seats(numbered(nodes)))
    new = places("consistent_ring", shards, seats(numbered(nodes + 1)))
    moved = sum(was != now for was, now in zip(old, new, strict=True))
    assert 0.7 < moved / (shards / (nodes + 1)) < 1.3


def test_capacity_weighs_on_the_ring() -> None:
    found = places("consistent_ring", 20_000, (("a", 1.0), ("b", 3.0)))
    assert 0.7 < found.count("b") / 15_000 < 1.3


def test_more_capacity_takes_from_the_others() -> None:
    old = places("consistent_ring", 500, (("a", 1.0), ("b", 1.0), ("c", 1.0)))
    new = places("consistent_ring", 500, (("a", 1.0), ("b", 1.5), ("c", 1.0)))
    assert old != new
    assert all(now in (was, "b") for was, now in zip(old, new, strict=True))


def test_points_are_bounded_both_ways() -> None:
    """I6: neither a huge nor a tiny capacity breaks the ring."""
    found = places("consistent_ring", 2_000, (("huge", 1e6), ("one", 1.0), ("tiny", 1e-6)))
    assert found.count("huge") > 1_900
    assert MOST_POINTS < 1e6


# ranges


def test_ranges_by_vector() -> None:
    assert "".join(places("ranges", 10, seats("abc"))) == "aaabbbbccc"
    assert "".join(places("ranges", 8, (("a", 1.0), ("b", 2.0), ("c", 1.0)))) == "aabbbbcc"
    assert "".join(places("ranges", 2, seats("abcd"))) == "ac"
    assert "".join(places("ranges", 3, seats("a"))) == "aaa"


@given(NODES, CAPACITIES, st.integers(1, 300))
def test_ranges_are_whole_and_sized_by_capacity(
    names: list[str], capacities: list[float], shards: int
) -> None:
    given = seats(names, capacities)
    found = places("ranges", shards, given)
    runs = [node for node, _ in groupby(found)]
    assert runs == sorted(runs)
    assert len(runs) == len(dict.fromkeys(runs)), "one range each"
    units = sum(capacity for _, capacity in given)
    for node, capacity in given:
        assert abs(found.count(node) - shards * capacity / units) < 1 + 1e-6


def test_equal_ranges_differ_by_at_most_one() -> None:
    for nodes in range(1, 30):
        found = places("ranges", 256, seats(numbered(nodes)))
        counts = [found.count(node) for node in numbered(nodes)]
        assert max(counts) - min(counts) <= 1


def test_a_node_that_restarts_finds_its_range_again() -> None:
    assert places("ranges", 100, seats("abcd")) == places("ranges", 100, seats("acdb"))


# names


def test_the_default_has_no_places_of_its_own() -> None:
    assert at_once(wanted("least_shards", "r", 10, seats("ab"))) is None
    assert at_once(wanted("custom", "r", 10, seats("ab"))) is None
    assert at_once(wanted("ranges", "r", 10, ())) is None


@pytest.mark.parametrize("strategy", [*NAMES, lambda situation: {}])
def test_names_and_functions_are_strategies(strategy: object) -> None:
    check_strategy(strategy)


@pytest.mark.parametrize(
    ("strategy", "complaint"),
    [
        ("least_shard", "did you mean 'least_shards'"),
        ("ring", "'least_shards', 'consistent_ring', 'ranges', or a function"),
        ("", "strategy='' must be one of"),
        (None, "strategy=None must be one of"),
        (7, "strategy=7 must be one of"),
        (["ranges"], "must be one of"),
        (Situation("r", (), ()), "must be one of"),
    ],
)
def test_anything_else_is_refused(strategy: object, complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        check_strategy(strategy)


@pytest.mark.parametrize("name", ["consistent_ring", "ranges"])
def test_places_of_many_shards_are_found_in_slices(name: str) -> None:
    nodes = tuple((f"node-{number}", 1.0) for number in range(200))
    slices = list(wanted(name, "slices", 10_000, nodes))
    if name == "consistent_ring":
        assert len(slices) >= (10_000 + 200 * POINTS) // (2 * PAUSE)
        done = 10_000 + 2 * 200 * POINTS
        assert sum(slices) >= done - 3 * PAUSE, "points are made, sorted, and looked up"
    assert all(handled <= 2 * PAUSE for handled in slices)
    assert list(wanted(name, "slices", 10_000, nodes)) == [], "the answer is kept"


def test_a_simulation_begins_without_answers_of_earlier_ones() -> None:
    """Else a seed would have other pauses in a process that ran another one before."""
    nodes = tuple((f"node-{number}", 1.0) for number in range(200))
    at_once(wanted("consistent_ring", "slices", 10_000, nodes))
    Sim(1, entities=[], nodes=0)
    assert list(wanted("consistent_ring", "slices", 10_000, nodes))
