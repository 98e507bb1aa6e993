"""The cached map: blocks as stored, and entries that only ever get newer (C3)."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from domicile.core.ids import EntityKey, Incarnation, ShardKey
from domicile.core.state.keys import block_key, parse_block_key
from domicile.core.state.records import (
    ClientRecord,
    ConfigRecord,
    LeaderRecord,
    NodeRecord,
    OnTrial,
    TrialRecord,
    decode_record,
    encode_record,
)
from domicile.core.state.shardmap import (
    BLOCK_SIZE,
    FREE,
    MOST_BARRED,
    MOST_SUSPECTS,
    Block,
    Entry,
    ShardMap,
    ShardState,
    block_count,
    decode_block,
    encode_block,
)
from domicile.core.state.txn import MAX_VALUE_BYTES

DIGITS = st.integers(0, 2**128 - 1).map("{:032x}".format)
ODD = st.sampled_from(("F" * 32, "0" * 31 + " ", "é" * 32, "0" * 31, "0" * 33))
INCARNATIONS = st.one_of(st.text("abc", max_size=3), DIGITS, ODD).map(Incarnation)
ENTRIES = st.one_of(
    st.just(FREE),
    st.builds(
        Entry,
        owner=INCARNATIONS,
        epoch=st.integers(0, 2**50),
        state=st.sampled_from(("free", "serving", "moving", "quarantined")),
        to=INCARNATIONS,
        change=st.integers(0, 2**50),
        previous=st.one_of(st.text(max_size=5), DIGITS, ODD),
        deaths=st.integers(0, 5),
        blamed=st.integers(0, 2),
        tries=st.integers(0, 2),
        barred=st.lists(
            st.builds(EntityKey, st.text(max_size=3), st.text(max_size=3)), max_size=MOST_BARRED
        ).map(tuple),
        suspects=st.lists(
            st.builds(EntityKey, st.text(max_size=3), st.text(max_size=3)), max_size=MOST_SUSPECTS
        ).map(tuple),
    ),
)
RECORDS = st.one_of(
    st.builds(
        NodeRecord,
        node=st.text(max_size=5),
        incarnation=INCARNATIONS,
        address=st.text(max_size=5),
        roles=st.lists(st.text(max_size=3), max_size=3).map(tuple),
        types=st.lists(st.text(max_size=3), max_size=3).map(tuple),
        ttl_s=st.floats(0.1, 100.0),
        candidate=st.booleans(),
        capacity=st.floats(0.0, 1e300),
        version=st.text(max_size=5),
        status=st.sampled_from(("up", "leaving", "evicted")),
    ),
    st.builds(ClientRecord, incarnation=INCARNATIONS),
    st.builds(LeaderRecord, incarnation=INCARNATIONS, node=st.text(max_size=5)),
    st.builds(
        ConfigRecord,
        shards=st.dictionaries(st.text(max_size=3), st.integers(1, 2**40), max_size=3),
        hash=st.text(max_size=5),
    ),
    st.builds(
        TrialRecord,
        st.lists(
            st.builds(
                OnTrial,
                st.text(max_size=3),
                st.integers(0, 2**40),
                st.integers(0, 2**40),
                st.text(max_size=3),
                st.text(max_size=3),
            ),
            max_size=4,
        ).map(tuple),
    ),
)
SHARD = ShardKey("r", 0)


def at(change: int, owner: str = "a") -> Entry:
    return Entry(Incarnation(owner), change, "serving", change=change)


@given(st.text(max_size=10), st.lists(ENTRIES, max_size=BLOCK_SIZE))
def test_blocks_are_read_back(txn: str, entries: list[Entry]) -> None:
    block = Block(txn, tuple(entries))
    assert decode_block(encode_block(block)) == block


@given(RECORDS)
def test_records_are_read_back(
    record: NodeRecord | ClientRecord | LeaderRecord | ConfigRecord | TrialRecord,
) -> None:
    assert decode_record(encode_record(record), type(record)) == record


@pytest.mark.parametrize("state", ["free", "serving", "moving", "quarantined"])
def test_an_entry_of_nothing_but_a_state_is_read_back(state: ShardState) -> None:
    block = Block("", (Entry(state=state), FREE, Entry(state=state, deaths=1)))
    assert decode_block(encode_block(block)) == block


def test_a_name_is_stored_once_and_an_incarnation_as_its_bytes() -> None:
    one, other = Incarnation("0123456789abcdef" * 2), Incarnation("f" * 32)
    entries = [Entry(one, 3, "serving", change=5, previous="node-1")] * BLOCK_SIZE
    same = encode_block(Block("t", tuple(entries)))
    assert same.count(b"node-1") == 1
    assert same.count(bytes.fromhex(one)) == 1
    assert len(same) < BLOCK_SIZE * 5 + 40
    moving = Entry(one, 3, "moving", other, 6, "node-1")
    grown = encode_block(Block("t", (moving, *entries[1:])))
    assert len(grown) - len(same) == 18, "16 bytes of a new name, a state and its number"


def test_a_full_block_is_far_below_the_stores_limit() -> None:
    """S7."""
    long = Incarnation("f" * 32)
    entries = [
        Entry(long, 2**60, "moving", long, 2**60, f"{index}" + "n" * 250, 2**20)
        for index in range(BLOCK_SIZE)
    ]
    assert len(encode_block(Block("t" * 32, tuple(entries)))) < MAX_VALUE_BYTES / 10


def test_a_block_full_of_barred_entities_and_suspects_is_below_the_stores_limit() -> None:
    """S7."""
    named = [EntityKey("t" * 60, f"{number}" + "x" * 255) for number in range(MOST_SUSPECTS)]
    barred, suspects = tuple(named[:MOST_BARRED]), tuple(named)
    entries = [Entry(epoch=2**60, change=2**60, barred=barred, suspects=suspects)] * BLOCK_SIZE
    assert len(encode_block(Block("t" * 32, tuple(entries)))) < MAX_VALUE_BYTES * 2 / 3


def packed(rows: list[list[object]], *more: object) -> bytes:
    return msgspec.msgpack.encode(["t", b"", [], rows, *more])


def test_what_speaks_against_a_shard_is_beside_the_rows_that_earlier_versions_read() -> None:
    entry = Entry(epoch=1, state="quarantined", change=1, deaths=3)
    without = encode_block(Block("t", (FREE, entry)))
    barred = (EntityKey("t", "x"),)
    suspect = msgspec.structs.replace(entry, blamed=1, tries=2, barred=barred)
    known = msgspec.msgpack.decode(encode_block(Block("t", (FREE, suspect))))
    assert msgspec.msgpack.decode(without) == known[:4]
    assert known[4:] == [[[1, 1, 2, [["t", "x"]]]]]
    many = [["t", str(number)] for number in range(MOST_BARRED + 1)]
    for wrong in ([[1, 0, 1, []]], [[0, -1, 0, []]], [[0, 0, 1, many]]):
        with pytest.raises(msgspec.ValidationError):
            decode_block(packed([[0]], wrong))
    accused = msgspec.structs.replace(entry, suspects=barred)
    known = msgspec.msgpack.decode(encode_block(Block("t", (FREE, accused))))
    assert msgspec.msgpack.decode(without) == known[:4]
    assert known[4:] == [[], [[1, [["t", "x"]]]]]
    many = [["t", str(number)] for number in range(MOST_SUSPECTS + 1)]
    for wrong in ([[1, []]], [[-1, []]], [[0, many]]):
        with pytest.raises(msgspec.ValidationError):
            decode_block(packed([[0]], [], wrong))


def test_rows_as_stored_are_read() -> None:
    rows: list[list[object]] = [[], [0], [0, 1, 1, 0, 3, 0, 2]]
    assert decode_block(packed(rows)).entries == (
        FREE,
        Entry(state="serving"),
        Entry(epoch=1, state="quarantined", change=1, deaths=2),
    )


def test_garbage_is_not_a_block() -> None:
    for value in (
        b"",
        b"\xc1",
        b"\x93\x01\x02\x03",
        msgspec.msgpack.encode(["t", [["a", -1, "odd"]]]),
        packed([[1]]),
        packed([[0, 1, 1, 9]]),
        packed([[0, 1, 1, 0, 4]]),
        packed([[0, 1, 1, 0, 0, 7]]),
        packed([[0, -1]]),
        packed([[0, 1, 1, 0, 0, 0, 1, 1]]),
        packed([["a"]]),
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
    changed = known.merge_block("r", 1, entries)
    assert changed == [(ShardKey("r", 64), at(1)), (ShardKey("r", 67), at(2))]
    assert known.get(ShardKey("r", 65)) == at(5)
    assert known.merge_block("r", 1, entries) == []


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
