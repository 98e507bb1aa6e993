"""What operators' commands commit, decided from a listing alone."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from domicile.core.ids import NOBODY, EntityKey, Incarnation, ShardKey
from domicile.core.state.keys import (
    AUDIT,
    CONFIG_KEY,
    LEADER_KEY,
    block_key,
    client_key,
    dead_key,
    drain_key,
    node_key,
)
from domicile.core.state.records import (
    ClientRecord,
    ConfigRecord,
    LeaderRecord,
    NodeRecord,
    encode_record,
)
from domicile.core.state.shardmap import Block, Entry, decode_block, encode_block
from domicile.core.state.txn import (
    MAX_OPERATIONS,
    Absent,
    At,
    Delete,
    Item,
    Listing,
    Present,
    Put,
    check_limits,
)
from domicile.errors import ConfigError
from domicile.ops.operator_commits import (
    KEPT_AUDITS,
    Ambiguous,
    AuditRecord,
    OperatorCommit,
    StoreSnapshot,
    audited,
    blocks,
    check_version,
    death_commit,
    drain_commit,
    find_node_record,
    free_commit,
    parse_shard,
    put_away_shards,
    raised_block,
    target_commit,
    unquarantine_commit,
)

A, B, C, GONE = (Incarnation(sign * 32) for sign in "abcf")
ROLE = "default"


def node(incarnation: Incarnation, name: str, roles: tuple[str, ...] = (ROLE,)) -> bytes:
    return encode_record(NodeRecord(name, incarnation, "here:1", roles, ("room",), 6.0))


def serving(owner: Incarnation, epoch: int) -> Entry:
    return Entry(owner, epoch, "serving", change=epoch * 2, previous="before")


def picture(*entries: Entry, shards: int | None = None, **more: bytes) -> StoreSnapshot:
    """Nodes a and b (which leads), a client c; everything at revision 7."""
    values = {
        CONFIG_KEY: encode_record(ConfigRecord({ROLE: shards or max(1, len(entries))})),
        node_key(A): node(A, "node-a"),
        node_key(B): node(B, "node-b"),
        client_key(C): encode_record(ClientRecord(C)),
        LEADER_KEY: encode_record(LeaderRecord(B, "node-b")),
    }
    if entries:
        values[block_key(ROLE, 0)] = encode_block(Block("t", entries))
    values |= {key.replace("_", "/", 1).encode(): value for key, value in more.items()}
    items = (Item(key, value, 3, 7) for key, value in sorted(values.items()) if value)
    return StoreSnapshot(Listing(9, tuple(items)))


def test_shards_are_written_with_role_and_number() -> None:
    assert parse_shard("default/7") == ShardKey("default", 7)
    assert parse_shard("eu/west/0") == ShardKey("eu/west", 0)
    for wrong in ("7", "default", "default/", "/7", "default/x", "default/-1", "default/²"):
        with pytest.raises(ConfigError, match="as in default/7"):
            parse_shard(wrong)


def test_names_and_beginnings_of_incarnations_are_found() -> None:
    seen = picture()
    assert find_node_record(seen, "node-a") == A
    assert find_node_record(seen, B) == B
    assert find_node_record(seen, "cccccc") == C
    for unknown in ("node-x", "aaaaa", ""):
        with pytest.raises(LookupError, match=r"registered: node-a \(aaaaaaaa\), node-b"):
            find_node_record(seen, unknown)


def test_a_name_with_two_incarnations_is_asked_about() -> None:
    twice = picture(**{"nodes_" + GONE: node(GONE, "node-a")})
    with pytest.raises(Ambiguous, match=f"{A}.*or {GONE}"):
        find_node_record(twice, "node-a")
    assert find_node_record(twice, GONE) == GONE


def test_a_declared_death_removes_the_record_and_keeps_the_word() -> None:
    deed = death_commit(picture(), A, "declared dead by eva")
    assert deed.conditions == (Present(node_key(A)),)
    assert deed.writes == (Delete(node_key(A)), Put(dead_key(A), b"declared dead by eva"))
    assert "node-a" in deed.what
    assert A in deed.what


def test_a_dead_leaders_key_goes_with_it() -> None:
    deed = death_commit(picture(), B, "word")
    assert At(LEADER_KEY, 7) in deed.conditions
    assert Delete(LEADER_KEY) in deed.writes


def test_clients_can_be_declared_dead_too() -> None:
    assert Delete(client_key(C)) in death_commit(picture(), C, "word").writes


def test_a_shard_is_freed_in_its_owners_name_for_the_present_epoch_only() -> None:
    deed = free_commit(picture(serving(A, 4), serving(B, 9)), ShardKey(ROLE, 1))
    assert deed.conditions == (At(block_key(ROLE, 0), 7), Present(node_key(B)))
    assert deed.writes == (Put(f"release/{B}/default/1@9".encode(), b""),)
    assert deed.what == "default/1@9 from node-b (bbbbbbbb)"


@pytest.mark.parametrize(
    ("entry", "why"),
    [
        (Entry(), "has no owner"),
        (serving(GONE, 2), "record of its owner .ffffffff. is gone"),
        (Entry(NOBODY, 3, "quarantined", change=3, deaths=3), "domicile unquarantine"),
    ],
)
def test_only_a_shard_with_a_registered_owner_is_freed(entry: Entry, why: str) -> None:
    with pytest.raises(LookupError, match=why):
        free_commit(picture(entry), ShardKey(ROLE, 0))


def test_shards_that_do_not_exist_are_told() -> None:
    with pytest.raises(LookupError, match="they are 0 to 1"):
        free_commit(picture(serving(A, 1), serving(A, 1)), ShardKey(ROLE, 2))
    with pytest.raises(LookupError, match="known ones: default"):
        unquarantine_commit(picture(serving(A, 1)), [ShardKey("other", 0)])


def test_only_a_quarantined_shard_is_cleared() -> None:
    seen = picture(serving(A, 1), Entry(NOBODY, 3, "quarantined", change=3, deaths=3))
    assert unquarantine_commit(seen, [ShardKey(ROLE, 1)]).writes == (Put(b"pardon/default/1", b""),)
    with pytest.raises(LookupError, match="is not quarantined; it is serving"):
        unquarantine_commit(seen, [ShardKey(ROLE, 0)])
    barred = msgspec.structs.replace(serving(A, 1), barred=(EntityKey("cart", "x"),))
    seen = picture(barred, serving(A, 1))
    assert unquarantine_commit(seen, put_away_shards(seen)).what == "default/0"
    with pytest.raises(LookupError, match="nothing is quarantined"):
        put_away_shards(picture(serving(A, 1)))


def test_the_target_is_plain_text() -> None:
    assert target_commit("2.1").writes == (Put(b"target", b"2.1"),)
    assert target_commit(None).writes == (Delete(b"target"),)
    for wrong in ("", "  ", "a\nb"):
        with pytest.raises(ConfigError):
            target_commit(wrong)


@pytest.mark.parametrize("version", ["1", "17", "2.1.0", "1!2.0rc1", "2026-01-02", "20260102T03Z"])
def test_every_kind_of_version_is_one(version: str) -> None:
    check_version(version, ())


@pytest.mark.parametrize("version", ["abc!!", "blue", "", "2.1.x", "sqlite"])
def test_another_text_is_a_version_only_if_a_node_has_it(version: str) -> None:
    with pytest.raises(ConfigError, match=r"is no version: .*--force"):
        check_version(version, ("2.1", "green"))
    check_version(version, ("2.1", version))
    assert picture(target=b"2.1").target == "2.1"
    assert picture().target == ""


def test_only_nodes_with_roles_are_drained() -> None:
    manager = node(GONE, "boss", ())
    seen = picture(**{"nodes_" + GONE: manager, "drain_node-b": b"x"})
    assert drain_commit(seen, "node-a", undo=False).writes == (Put(drain_key("node-a"), b""),)
    assert drain_commit(seen, "node-b", undo=True).writes == (Delete(drain_key("node-b")),)
    for unknown in ("node-x", "boss"):
        with pytest.raises(LookupError, match="registered: node-a, node-b"):
            drain_commit(seen, unknown, undo=False)
    with pytest.raises(LookupError, match="nodes that are: node-b"):
        drain_commit(seen, "node-a", undo=True)


def raised(deed: OperatorCommit) -> Block:
    (put,) = deed.writes
    assert isinstance(put, Put)
    return decode_block(put.value)


def test_epochs_are_raised_and_owners_that_are_gone_are_forgotten() -> None:
    poisoned = Entry(NOBODY, 5, "quarantined", change=4, deaths=3)
    seen = picture(serving(A, 4), serving(GONE, 9), Entry(), poisoned)
    deed = raised_block(seen, ROLE, 0, 1000, "txn")
    assert deed.conditions == (At(block_key(ROLE, 0), 7),)
    block = raised(deed)
    assert block.txn == "txn"
    assert block.entries == (
        Entry(A, 1004, "serving", change=1008, previous="before"),
        Entry(NOBODY, 1009, "free", change=1018, previous="before"),
        Entry(NOBODY, 1000, "free", change=1000),
        Entry(NOBODY, 1005, "quarantined", change=1004, deaths=3),
    )


def test_blocks_that_the_store_lost_are_raised_as_well() -> None:
    seen = picture(serving(A, 1), shards=130)
    assert blocks(seen) == [(ROLE, 0), (ROLE, 1), (ROLE, 2)]
    assert len(raised(raised_block(seen, ROLE, 0, 10, "t")).entries) == 64
    last = raised_block(seen, ROLE, 2, 10, "t")
    assert last.conditions == (Absent(block_key(ROLE, 2)),)
    assert raised(last).entries == (Entry(epoch=10, change=10),) * 2


@given(
    st.lists(
        st.tuples(st.sampled_from([A, B, GONE]), st.integers(1, 99), st.integers(1, 99)),
        min_size=1,
        max_size=64,
    ),
    st.integers(1, 10**9),
)
def test_no_raised_epoch_or_change_was_ever_used_below_the_gap(
    owned: list[tuple[Incarnation, int, int]], gap: int
) -> None:
    entries = tuple(Entry(owner, epoch, "serving", change=n) for owner, epoch, n in owned)
    for old, new in zip(
        entries, raised(raised_block(picture(*entries), ROLE, 0, gap, "t")).entries, strict=True
    ):
        assert (new.epoch - old.epoch, new.change - old.change) == (gap, gap)
        assert new.owner == (NOBODY if old.owner == GONE else old.owner)


RECORD = AuditRecord("2026-01-02T03:04:05.678Z", "eva@desk", "free", "x")


def test_an_audit_record_is_in_the_same_commit() -> None:
    deed = audited(
        OperatorCommit("x", (Present(b"a"),), (Put(b"b", b""),)), AUDIT + b"1", RECORD, []
    )
    assert deed.conditions == (Present(b"a"),)
    assert deed.writes[0] == Put(b"b", b"")
    put = deed.writes[1]
    assert isinstance(put, Put)
    assert msgspec.json.decode(put.value, type=AuditRecord) == RECORD


@given(st.integers(0, 300))
def test_old_audit_records_go_within_the_limits_of_a_commit(count: int) -> None:
    kept = [AUDIT + f"{number:05d}".encode() for number in range(count)]
    deed = audited(death_commit(picture(), B, "word"), AUDIT + b"x", RECORD, kept[::-1])
    check_limits(deed.conditions, deed.writes)
    deleted = [one.key for one in deed.writes if isinstance(one, Delete) and one.key in kept]
    assert deleted == kept[: len(deleted)]
    room = MAX_OPERATIONS - 7
    assert len(deleted) <= max(0, count + 1 - KEPT_AUDITS)
    assert count - len(deleted) + 1 <= KEPT_AUDITS or len(deleted) >= room


def test_the_newest_readable_audit_record_is_the_last() -> None:
    def stored(by: str) -> bytes:
        return msgspec.json.encode(msgspec.structs.replace(RECORD, by=by))

    seen = picture(audit_1=stored("adam"), audit_2=stored("eva"), audit_3=b"garbage")
    last = seen.last_audit()
    assert last is not None
    assert last.by == "eva"
    assert picture().last_audit() is None
