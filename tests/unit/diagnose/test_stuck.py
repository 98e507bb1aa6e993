"""What is stored of handlers that run for too long: bounded, and written only if it is news."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from domicile.core.ids import EntityKey, Incarnation, ShardKey
from domicile.core.state.cluster_view import ClusterView, KickWished
from domicile.core.state.keys import CONFIG_KEY, KeyFamily, block_key, kick_key, node_key
from domicile.core.state.records import ConfigRecord, NodeRecord, encode_record
from domicile.core.state.shardmap import Block, Entry, encode_block
from domicile.core.state.txn import MAX_VALUE_BYTES, Absent, Change, Changes, Item, Listing, Put
from domicile.diagnose.records import (
    LEAST_LOOK_S,
    MOST_CHARS,
    MOST_LINES,
    MOST_TURNS,
    REFRESH_S,
    Bulletin,
    KickOutcome,
    KickRecord,
    Publish,
    StuckRecord,
    StuckTurn,
    Withdraw,
    bounded_stack,
    bounded_text,
    decode_kick,
    decode_stuck,
    encode_kick,
    encode_stuck,
)
from domicile.errors import ConfigError
from domicile.ops.operator_commits import MOST_KICKS, StoreSnapshot, kick_commit

STUCK_S = 2.0
SHARD, CART = ShardKey("default", 7), EntityKey("cart", "c1")
ME = Incarnation("a" * 32)
WISH = KickRecord("eva@desk", "kick-1")


def turn(since_s: float, id: str = "c1", queue: int = 0) -> StuckTurn:
    return StuckTurn("default", 7, "cart", id, "pay", since_s, "waits", queue, ("a.py:1 pay",))


def said(bulletin: Bulletin, *turns: StuckTurn, now_s: float) -> bool:
    """Let it decide, and have the store take whatever it wants."""
    wanted = bulletin.decide(turns, 0, 0, now_s)
    if wanted is not None:
        bulletin.written(wanted)
    return wanted is not None


def test_the_same_set_is_written_once_and_then_refreshed_now_and_then() -> None:
    bulletin = Bulletin(STUCK_S)
    assert said(bulletin, turn(1), now_s=3)
    assert not said(bulletin, turn(1, queue=9), now_s=4)
    assert not said(bulletin, turn(1), now_s=3 + REFRESH_S - 0.1)
    assert said(bulletin, turn(1), now_s=3 + REFRESH_S)
    assert not said(bulletin, turn(1), now_s=4 + REFRESH_S)
    assert said(bulletin, turn(1), turn(2, "c2"), now_s=5 + REFRESH_S)
    assert said(bulletin, turn(2, "c2"), now_s=5 + REFRESH_S)


def test_nothing_is_written_as_long_as_nothing_is_late() -> None:
    bulletin = Bulletin(STUCK_S)
    assert bulletin.decide((), 0, 0, 100.0) is None
    assert not bulletin.stands


def test_the_record_goes_when_nothing_is_late_any_more() -> None:
    bulletin = Bulletin(STUCK_S)
    said(bulletin, turn(1), now_s=3)
    assert bulletin.stands
    assert bulletin.decide((), 0, 0, 4.0) == Withdraw()
    bulletin.written(Withdraw())
    assert not bulletin.stands
    assert bulletin.decide((), 0, 0, 5.0) is None


def test_a_write_that_may_have_happened_is_repeated_and_taken_back() -> None:
    bulletin = Bulletin(STUCK_S)
    wanted = bulletin.decide((turn(1),), 0, 0, 3.0)
    assert isinstance(wanted, Publish)
    bulletin.unsure(wanted)
    assert isinstance(bulletin.decide((turn(1),), 0, 0, 3.5), Publish)
    assert bulletin.decide((), 0, 0, 3.5) == Withdraw()


def test_a_withdrawal_that_failed_is_tried_again() -> None:
    bulletin = Bulletin(STUCK_S)
    said(bulletin, turn(1), now_s=3)
    bulletin.unsure(Withdraw())
    assert bulletin.decide((), 0, 0, 4.0) == Withdraw()


def test_looks_end_when_nothing_waits_and_nothing_is_stored() -> None:
    bulletin = Bulletin(STUCK_S)
    assert bulletin.next_look(None, 10.0) is None
    assert bulletin.next_look(9.5, 10.0) == 9.5 + STUCK_S
    assert bulletin.next_look(8.1, 10.0) == 10.0 + LEAST_LOOK_S
    assert bulletin.next_look(1.0, 10.0) == 10.0 + LEAST_LOOK_S
    said(bulletin, turn(1), now_s=10)
    assert bulletin.next_look(None, 10.0) == 10.0 + LEAST_LOOK_S


@given(st.lists(st.text(), max_size=40), st.text(max_size=1_000))
def test_whatever_the_names_a_record_is_bounded_and_readable(lines: list[str], id: str) -> None:
    stack = bounded_stack(lines)
    assert len(stack) <= MOST_LINES
    assert len(lines) > MOST_LINES or len(stack) == len(lines)
    assert not lines or stack[-1] == bounded_text(lines[-1])
    one = StuckTurn("default", 7, "cart", bounded_text(id), "pay", 1.0, "waits", 0, stack)
    record = StuckRecord(2.0, (one,) * MOST_TURNS)
    assert len(encode_stuck(record)) < MAX_VALUE_BYTES
    assert decode_stuck(encode_stuck(record)) == record


def test_texts_are_cut_in_the_middle_and_lone_surrogates_replaced() -> None:
    assert bounded_text("x" * MOST_CHARS) == "x" * MOST_CHARS
    cut = bounded_text("a" * 1_000 + "z" * 1_000)
    assert len(cut) == MOST_CHARS
    assert cut.startswith("aaa")
    assert cut.endswith("zzz")
    assert bounded_text("\ud800") == "?"


def test_an_age_is_that_of_now_if_now_is_known() -> None:
    record = StuckRecord(10.0, (turn(7.0),))
    assert record.age_s(record.turns[0]) == 3.0
    assert record.age_s(record.turns[0], 12.5) == 5.5
    # Another boot's clock, or one that runs behind: the age is at least what was written.
    assert record.age_s(record.turns[0], 1.0) == 3.0


# kicks


def pictured(entry: Entry, *more: Item, owners: bool = True) -> StoreSnapshot:
    record = NodeRecord("node-a", ME, "127.0.0.1:1", ("default",), ("cart",), 6.0)
    items = [
        Item(CONFIG_KEY, encode_record(ConfigRecord({"default": 8})), 1, 1),
        Item(block_key("default", 0), encode_block(Block("t", (entry,) * 8)), 1, 1),
    ]
    if owners:
        items.append(Item(node_key(ME), encode_record(record), 1, 1))
    return StoreSnapshot(Listing(9, (*items, *more)))


SERVING = Entry(ME, 1, "serving", change=1)


@given(
    st.text(min_size=1), st.integers(0, 10_000), st.text(min_size=1), st.text(min_size=1)
)  # fmt: skip
def test_any_entity_has_a_key_that_names_it(role: str, shard: int, kind: str, id: str) -> None:
    role, kind, id = (text.encode("utf-8", "replace").decode() for text in (role, kind, id))
    wanted = ShardKey(role, shard), EntityKey(kind, id)
    assert KeyFamily.KICK.parse(kick_key(*wanted)) == wanted


def test_a_kick_is_one_leased_key_that_nobody_else_has_written() -> None:
    deed = kick_commit(pictured(SERVING), SHARD, CART, WISH)
    assert deed.what == "cart 'c1' in default/7 at node-a"
    assert Absent(kick_key(SHARD, CART)) in deed.conditions
    (put,) = deed.writes
    assert isinstance(put, Put)
    assert put.lease == WISH.lease
    assert decode_kick(put.value) == WISH


def test_a_kick_that_nobody_could_carry_out_is_refused() -> None:
    with pytest.raises(LookupError, match="no owner"):
        kick_commit(pictured(SERVING, owners=False), SHARD, CART, WISH)
    with pytest.raises(LookupError, match="no shard 8"):
        kick_commit(pictured(SERVING), ShardKey("default", 8), CART, WISH)
    with pytest.raises(ConfigError, match="too long"):
        kick_commit(pictured(SERVING), SHARD, EntityKey("cart", "x" * 5_000), WISH)


def test_one_kick_of_an_entity_at_a_time_and_not_too_many_in_all() -> None:
    pending = Item(kick_key(SHARD, CART), encode_kick(WISH), 5, 5)
    with pytest.raises(LookupError, match="somebody else"):
        kick_commit(pictured(SERVING, pending), SHARD, CART, WISH)
    many = [
        Item(kick_key(SHARD, EntityKey("cart", str(number))), encode_kick(WISH), 5, 5)
        for number in range(MOST_KICKS)
    ]
    with pytest.raises(LookupError, match="64 other kicks"):
        kick_commit(pictured(SERVING, *many), SHARD, CART, WISH)


def test_members_pass_each_wish_on_once_however_they_hear_of_it() -> None:
    members, key = ClusterView(), kick_key(SHARD, CART)
    item = Item(key, encode_kick(WISH), 5, 5)
    assert members.apply(Changes(5, (Change(key, item),))) == [KickWished(SHARD, CART, item)]
    assert members.load(Listing(6, (item,))) == []
    assert members.load(Listing(7, ())) == []
    assert members.kicks == {}
    again = Item(key, encode_kick(WISH), 8, 8)
    assert members.load(Listing(8, (again,))) == [KickWished(SHARD, CART, again)]
    assert members.apply(Changes(9, (Change(key, None),))) == []
    assert members.kicks == {}


def test_a_kick_key_that_makes_no_sense_changes_nothing() -> None:
    members = ClusterView()
    (fact,) = members.apply(Changes(5, (Change(b"kick/x", Item(b"kick/x", b"", 5, 5)),)))
    assert not isinstance(fact, KickWished)
    assert members.kicks == {}


def test_an_outcome_travels_with_its_wish() -> None:
    done = msgspec.structs.replace(WISH, outcome=KickOutcome(ended=1, waiting=3))
    assert decode_kick(encode_kick(done)) == done
    assert KickOutcome(waiting=3).ran is False
    assert KickOutcome(blocking=1).ran is True
