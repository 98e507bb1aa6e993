"""From an entity to its shard: the wire contract, held still by golden vectors."""

from __future__ import annotations

from typing import Any

import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from domicile.core.hashing import (
    NAMED,
    by_message,
    java_hash,
    kafka_hash,
    murmur2,
    place_by,
    shard_of,
    shardcake,
    shardcake_number,
    xxh3,
)
from domicile.core.ids import EntityKey
from domicile.errors import NotExecuted

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


KAFKA = [
    # a key, its hash as Kafka's own tests hold it, its partition of 64 and 1,000
    ("21", -973932308, 44, 340),
    ("foobar", -790332482, 62, 166),
    ("a-little-bit-long-string", -985981536, 32, 112),
    ("a-little-bit-longer-string", -1486304829, 3, 819),
    ("lkjh234lh9fiuh90y23oiuhsafujhadof229phr9h19h89h8", -58897971, 13, 677),
    ("abc", 479470107, 27, 107),
    # held still from here on
    ("", 275646681, 25, 681),
    ("a", -1563381124, 60, 524),
    ("Größe", -255045697, 63, 951),
    ("购物车", -1603614642, 14, 6),
    ("🏠", -578926213, 59, 435),
]


@pytest.mark.parametrize(("key", "digest", "of_64", "of_1000"), KAFKA)
def test_murmur2_is_where_kafka_puts_a_key(key: str, digest: int, of_64: int, of_1000: int) -> None:
    assert kafka_hash(key.encode()) == digest
    assert murmur2(key, 64) == of_64
    assert murmur2(key, 1_000) == of_1000


JVM = [
    # a text, its String.hashCode, and abs(hash % n) + 1 for 300 and 7, all computed by a JVM
    ("", 0, 1, 1),
    ("hello", 99162322, 23, 1),
    ("Aa", 2112, 13, 6),
    ("BB", 2112, 13, 6),
    ("polygenelubricants", -2147483648, 249, 3),
    ("🏠", 1773348, 49, 4),
    ("Größe", 69209585, 186, 5),
    ("购物车", 35676170, 171, 6),
    ("e\u0301", 3900, 1, 2),
    ("a\0b", 93315, 16, 6),
    ("🏠-1", 1704188872, 173, 2),
]


@pytest.mark.parametrize(("text", "digest", "of_300", "of_7"), JVM)
def test_shardcake_counts_as_a_jvm_does(text: str, digest: int, of_300: int, of_7: int) -> None:
    assert java_hash(text) == digest
    assert (shardcake_number(text, 300), shardcake_number(text, 7)) == (of_300, of_7)
    assert (shardcake(text, 300), shardcake(text, 7)) == (of_300 - 1, of_7 - 1)


@given(st.text(), st.integers(1, 10_000))
def test_named_forms_stay_in_range(id: str, shards: int) -> None:
    for form in (murmur2, shardcake, xxh3):
        assert 0 <= form(id, shards) < shards
    assert 1 <= shardcake_number(id, shards) <= shards


@pytest.mark.parametrize(("kind", "id"), [row[:2] for row in GOLDEN])
def test_the_default_has_a_name_and_takes_the_type(kind: str, id: str) -> None:
    assert xxh3(id, 256, type=kind) == shard_of(EntityKey(kind, id), 256)
    assert place_by(xxh3, "xxh3") is shard_of, "senders pay nothing for the default"


def test_the_names_are_a_contract() -> None:
    assert {
        "message": by_message, "murmur2": murmur2, "shardcake": shardcake, "xxh3": xxh3,
    } == NAMED  # fmt: skip


@pytest.mark.parametrize("given", [-1, 8, 1.0, True, None, "3"])
def test_an_answer_that_is_no_shard_is_an_error_that_names_all(given: Any) -> None:
    place = place_by(lambda id, shards: given, "app:mine")
    with pytest.raises(NotExecuted) as caught:
        place(EntityKey("cart", "c1"), 8)
    for part in ("app:mine", "cart 'c1'", f"gave {given!r}", "from 0 to 7", "nothing was sent"):
        assert part in str(caught.value)


def test_a_function_that_raises_is_an_error_that_names_it() -> None:
    def broken(id: str, shards: int) -> int:
        raise KeyError(id)

    with pytest.raises(NotExecuted, match=r"app:broken failed for cart 'c1'.*KeyError: 'c1'"):
        place_by(broken, "app:broken")(EntityKey("cart", "c1"), 8)
    with pytest.raises(NotExecuted, match=r"region\(\.\.\., entity_id"):
        place_by(by_message, "message")(EntityKey("cart", "c1"), 8)


def test_an_answer_in_range_is_taken_as_it_is() -> None:
    place = place_by(lambda id, shards: len(id) % shards, "app:length")
    assert [place(EntityKey("cart", "x" * n), 4) for n in range(6)] == [0, 1, 2, 3, 0, 1]
