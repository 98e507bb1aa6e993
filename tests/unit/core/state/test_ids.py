"""Names and their keys in the store: distinct, readable back, in their own folders."""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from domicile.core.ids import EntityKey, Incarnation, ShardKey, new_incarnation
from domicile.core.state.keys import (
    CLIENTS,
    DRAIN,
    NODES,
    RELEASE,
    WISH,
    KeyFamily,
    client_key,
    drain_key,
    node_key,
    release_key,
    wish_key,
)

ROLES = st.text(min_size=1).filter(lambda role: "/" not in role)
SHARDS = st.builds(ShardKey, ROLES, st.integers(0, 100_000))
INCARNATIONS = st.integers(0, 2**128 - 1).map(lambda bits: Incarnation(f"{bits:032x}"))


def test_an_incarnation_is_128_random_bits_from_the_given_source() -> None:
    random = Random(7)
    first, second = new_incarnation(random), new_incarnation(random)
    assert first != second
    assert first == new_incarnation(Random(7))
    for incarnation in (first, second):
        assert len(incarnation) == 32
        assert int(incarnation, 16) >= 0


def test_small_numbers_keep_their_leading_zeros() -> None:
    class Zeros(Random):
        def getrandbits(self, k: int, /) -> int:
            return 1

    assert new_incarnation(Zeros()) == "0" * 31 + "1"


@pytest.mark.parametrize(
    ("key", "expected"),
    [
        (node_key(Incarnation("ab")), b"nodes/ab"),
        (client_key(Incarnation("ab")), b"clients/ab"),
        (drain_key("web-1"), b"drain/web-1"),
        (wish_key(ShardKey("default", 17)), b"wish/default/17"),
        (release_key(Incarnation("ab"), ShardKey("default", 3), 9), b"release/ab/default/3@9"),
    ],
)
def test_keys_as_stored(key: bytes, expected: bytes) -> None:
    assert key == expected


def test_no_folder_contains_another() -> None:
    folders = [NODES, CLIENTS, DRAIN, WISH, RELEASE]
    for one in folders:
        assert one.endswith(b"/")
        assert not any(one.startswith(other) for other in folders if other is not one)


@given(SHARDS)
def test_wish_keys_are_read_back(shard: ShardKey) -> None:
    assert KeyFamily.WISH.parse(wish_key(shard)) == shard


@given(INCARNATIONS, SHARDS, st.integers(0, 2**40))
def test_release_keys_are_read_back(incarnation: Incarnation, shard: ShardKey, epoch: int) -> None:
    assert KeyFamily.RELEASE.parse(release_key(incarnation, shard, epoch)) == (
        incarnation,
        shard,
        epoch,
    )


def test_keys_are_values() -> None:
    assert EntityKey("cart", "1") == EntityKey("cart", "1")
    assert sorted([ShardKey("b", 1), ShardKey("a", 10), ShardKey("a", 9)]) == [
        ShardKey("a", 9), ShardKey("a", 10), ShardKey("b", 1),
    ]  # fmt: skip
