"""Which instance an object belongs to, against vectors of the controller sharding project."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from domicile.kube.hashring import BoundedRing, HashRing, hashed, object_key

NAMES = st.lists(st.text("abcdef-0123456789", min_size=1, max_size=8), unique=True, max_size=12)


@pytest.mark.scenario("KR-15", partial=True)
def test_the_vectors_of_the_wire() -> None:
    assert hashed("a0") == 0xF095E781A7125E70
    ring = HashRing(["c", "a", "b"])
    assert ring.owner(object_key("", "Secret", "default", "foo")) == "b"
    assert ring.owner(object_key("", "ConfigMap", "", "x")) == "a"
    assert object_key("", "Secret", "default", "foo") == "/Secret/default/foo"


def test_without_instances_nothing_has_an_owner() -> None:
    assert HashRing(()).owner("x") == ""
    assert BoundedRing(()).owner("x") == ""


@given(NAMES, st.text(max_size=20))
def test_order_does_not_matter(names: list[str], key: str) -> None:
    assert HashRing(names).owner(key) == HashRing(reversed(names)).owner(key)
    assert HashRing(names).owner(key) in (*names, "")


@given(NAMES.filter(lambda names: len(names) > 1), st.lists(st.text(max_size=8), max_size=20))
def test_only_the_objects_of_one_that_leaves_move(names: list[str], keys: list[str]) -> None:
    before, after = HashRing(names), HashRing(names[1:])
    for key in keys:
        if before.owner(key) != names[0]:
            assert after.owner(key) == before.owner(key)


@pytest.mark.parametrize("count", [1, 2, 3, 10, 50])
def test_a_bounded_ring_is_level(count: int) -> None:
    names = [f"web-{number}" for number in range(count)]
    load = BoundedRing(names).load()
    assert max(load.values()) * count / sum(load.values()) <= 1.06
    keys = [f"/Website/default/{number}" for number in range(3_000)]
    ring = BoundedRing(names)
    owners = [ring.owner(key) for key in keys]
    if count <= 3:
        assert max(owners.count(name) for name in names) * count / len(keys) <= 1.1


def test_a_bounded_ring_moves_little() -> None:
    names = [f"web-{number}" for number in range(10)]
    before, after = BoundedRing(names), BoundedRing(names[:-1])
    keys = [f"k{number}" for number in range(5_000)]
    moved = sum(
        before.owner(key) != after.owner(key) for key in keys if before.owner(key) != names[-1]
    )
    assert moved < 0.15 * len(keys)
