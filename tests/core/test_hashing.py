"""From an entity to its shard: the wire contract, held still by golden vectors."""

from __future__ import annotations

import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from domicile.core.hashing import shard_of
from domicile.core.ids import EntityKey

GOLDEN = [
    # type, id, the hash, its shard of 256, 64 and 1,000
    ("account", "alice", 0x7D0C2FCC2C2F41A7, 167, 39, 231),
    ("account", "bob", 0x8501AB5803DF4FA0, 160, 32, 448),
    ("account", "", 0x507131AFDBBE5FCC, 204, 12, 500),
    ("a", "ccount", 0x126C154AF73BFBDF, 223, 31, 351),
    ("ac", "count", 0xC19CE7F55D8A3FB4, 180, 52, 124),
    ("cart", "c1", 0x3B16FC0231D5701E, 30, 30, 254),
    ("cart", "Größe", 0x4F72F559D94D7A0D, 13, 13, 581),
    ("корзина", "заказ-17", 0xF3C3E3C476635531, 49, 49, 897),
    ("购物车", "编号七", 0x38302968455F06BB, 187, 59, 51),
    ("emoji", "🏠", 0x58D260C0DB08DA9A, 154, 26, 10),
    ("cart", "e\u0301", 0xECD6377BCCB9CF05, 5, 5, 589),
    ("cart", "\u00e9", 0x3378D19B525F13CD, 205, 13, 221),
    ("long", "x" * 1000, 0x04678A3B980AC830, 48, 48, 304),
    ("nul", "a\x00b", 0xA50EE2420C5BEBE8, 232, 40, 296),
]


@pytest.mark.parametrize(("kind", "id", "digest", "of_256", "of_64", "of_1000"), GOLDEN)
def test_golden_vectors(
    kind: str, id: str, digest: int, of_256: int, of_64: int, of_1000: int
) -> None:
    entity = EntityKey(kind, id)
    assert shard_of(entity, 256) == of_256
    assert shard_of(entity, 64) == of_64
    assert shard_of(entity, 1_000) == of_1000
    assert shard_of(entity, 2**64) == digest, "the whole hash, not only its lower bits"


def test_the_contract_in_other_words() -> None:
    data = b"cart\x00" + "Größe".encode()
    assert shard_of(EntityKey("cart", "Größe"), 997) == xxhash.xxh3_64(data).intdigest() % 997


@given(st.text(), st.text(), st.integers(1, 10_000), st.integers(1, 16))
def test_shards_are_in_range_and_a_multiple_of_the_count_only_splits(
    kind: str, id: str, shards: int, factor: int
) -> None:
    entity = EntityKey(kind, id)
    shard = shard_of(entity, shards)
    assert 0 <= shard < shards
    assert shard_of(entity, shards * factor) % shards == shard


def test_ids_spread_evenly() -> None:
    counts = [0] * 64
    for number in range(6_400):
        counts[shard_of(EntityKey("account", f"user-{number}"), 64)] += 1
    assert min(counts) > 60
    assert max(counts) < 145
