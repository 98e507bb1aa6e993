"""The cached map: blocks as stored, and entries that only ever get newer (C3)."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from domicile.core.ids import Incarnation, ShardKey
from domicile.core.shardmap import (
    BLOCK_SIZE,
    FREE,
    Block,
    Entry,
    ShardMap,
    block_count,
    block_key,
    decode_block,
    encode_block,
    parse_block_key,
)
from domicile.core.txn import MAX_VALUE_BYTES

ENTRIES = st.builds(
    Entry,
    owner=st.text("abc", max_size=3).map(Incarnation),
    epoch=st.integers(0, 2**50),
    state=st.sampled_from(("free", "serving", "moving")),
    to=st.text("abc", max_size=3).map(Incarnation),
    change=st.integers(0, 2**50),
    previous=st.text(max_size=5),
)
SHARD = ShardKey("r", 0)


def at(change: int, owner: str = "a") -> Entry:
    return Entry(Incarnation(owner), change, "serving", change=change)


@given(st.text(max_size=10), st.lists(ENTRIES, max_size=BLOCK_SIZE))
def test_blocks_are_read_back(txn: str, entries: list[Entry]) -> None:
    block = Block(txn, tuple(entries))
    assert decode_block(encode_block(block)) == block


def test_a_full_block_is_far_below_the_stores_limit() -> None:
    """S7."""
    long = Incarnation("f" * 32)
    entry = Entry(long, 2**60, "moving", long, 2**60, "n" * 250)
    assert len(encode_block(Block("t" * 32, (entry,) * BLOCK_SIZE))) < MAX_VALUE_BYTES / 10


def test_garbage_is_not_a_block() -> None:
    for value in (
        b"",
        b"\xc1",
        b"\x93\x01\x02\x03",
        msgspec.msgpack.encode(["t", [["a", -1, "odd"]]]),
    ):
        with pytest.raises(msgspec.DecodeError):
            decode_block(value)


@pytest.mark.parametrize(
    ("shards", "blocks"), [(1, 1), (63, 1), (64, 1), (65, 2), (256, 4), (1_000, 16)]
)
def test_block_count(shards: int, blocks: int) -> None:
    assert block_count(shards) == blocks


@given(st.text(min_size=1).filter(lambda role: "/" not in role), st.integers(0, 99_999))
def test_block_keys_are_read_back(role: str, number: int) -> None:
    assert parse_block_key(block_key(role, number)) == (role, number)


def test_block_keys_sort_by_number() -> None:
    keys = [block_key("r", number) for number in range(0, 2_000, 7)]
    assert keys == sorted(keys)


def test_an_unknown_shard_is_free() -> None:
    assert ShardMap().get(SHARD) is FREE
    assert list(ShardMap()) == []


def test_only_a_newer_entry_is_taken() -> None:
    known = ShardMap()
    assert known.merge(SHARD, at(2))
    assert not known.merge(SHARD, at(1, "b"))
    assert not known.merge(SHARD, at(2, "b")), "no two entries share a number"
    assert known.get(SHARD) == at(2)
    assert known.merge(SHARD, at(3, "b"))
    assert known.get(SHARD) == at(3, "b")


def test_an_untouched_entry_of_a_block_is_no_news() -> None:
    assert not ShardMap().merge(SHARD, Entry())


def test_a_block_reports_what_changed_in_shard_order() -> None:
    known = ShardMap()
    known.merge(ShardKey("r", 65), at(5))
    entries = (at(1), at(4), FREE, at(2))
    changed = known.merge_block("r", 1, Block("t", entries))
    assert changed == [(ShardKey("r", 64), at(1)), (ShardKey("r", 67), at(2))]
    assert known.get(ShardKey("r", 65)) == at(5)
    assert known.merge_block("r", 1, Block("t", entries)) == []


@given(st.permutations(range(1, 8)), st.lists(st.integers(1, 7), max_size=10))
def test_entries_in_any_order_and_repeated_lead_to_the_newest(
    order: list[int], repeats: list[int]
) -> None:
    known = ShardMap()
    newest = 0
    for change in [*order, *repeats]:
        assert known.merge(SHARD, at(change)) is (change > newest)
        newest = max(newest, change)
        assert known.get(SHARD).change == newest
