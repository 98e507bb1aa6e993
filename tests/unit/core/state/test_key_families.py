"""The table of key families, and the view as a leader reads it: blocks, notes, own commits."""

from __future__ import annotations

from random import Random
from typing import Any

import pytest

from domicile.core.coordinator.events import Changed, Listed, Resign
from domicile.core.coordinator.machine import Coordinator
from domicile.core.ids import EntityKey, Incarnation, ShardKey
from domicile.core.state.cluster_view import (
    BlockChanged,
    ClusterView,
    LeaderChanged,
    NodeUp,
    NoteChanged,
    StoredBlock,
    Unreadable,
)
from domicile.core.state.keys import (
    CONFIG_KEY,
    LEADER_KEY,
    REWOUND_KEY,
    TARGET_KEY,
    BlockKey,
    KeyFamily,
    OwnerReport,
    block_key,
    classify,
    clearance_key,
    encode_needs,
    needs_key,
    node_key,
    release_key,
    wish_key,
)
from domicile.core.state.records import (
    ConfigRecord,
    LeaderRecord,
    NodeRecord,
    encode_record,
)
from domicile.core.state.shardmap import Block, Entry, encode_block
from domicile.core.state.txn import At, Change, Changes, Delete, Item, Listing, Put
from domicile.settings import Settings

A, B = Incarnation("a" * 32), Incarnation("b" * 32)
SHARD = ShardKey("r", 7)
BLOCK = BlockKey("r", 0)
REPORT = OwnerReport(A, SHARD, 3)

NAMES: dict[KeyFamily, Any] = {
    KeyFamily.NODE: A,
    KeyFamily.CLIENT: A,
    KeyFamily.BLOCK: BlockKey("a/b", 12),
    KeyFamily.DRAIN: "web/1",
    KeyFamily.WISH: ShardKey("a/b", 7),
    KeyFamily.KICK: (SHARD, EntityKey("cart", "a/b c")),
    KeyFamily.RELEASE: OwnerReport(A, ShardKey("a/b@c", 7), 3),
    KeyFamily.NEEDS: ShardKey("a/b", 7),
    KeyFamily.OFFSET: ShardKey("a/b", 7),
    KeyFamily.TRIAL: A,
    KeyFamily.CLEARANCE: SHARD,
    KeyFamily.DEAD: A,
    KeyFamily.STUCK: A,
    KeyFamily.AUDIT: "2024-01-01",
}


def put(revision: int, *pairs: tuple[bytes, bytes], created: int = 0) -> Changes:
    items = [Item(key, value, created or revision, revision) for key, value in pairs]
    return Changes(revision, tuple(Change(item.key, item) for item in items))


def drop(revision: int, *keys: bytes) -> Changes:
    return Changes(revision, tuple(Change(key, None) for key in keys))


def block(*entries: Entry, txn: str = "t") -> bytes:
    return encode_block(Block(txn, entries))


def serving(owner: Incarnation, epoch: int = 1) -> Entry:
    return Entry(owner, epoch, "serving", change=epoch)


def record(incarnation: Incarnation) -> bytes:
    return encode_record(NodeRecord(f"n-{incarnation[0]}", incarnation, "x", ("r",), (), 6.0))


# the table


@pytest.mark.parametrize("family", KeyFamily)
def test_keys_of_every_family_are_made_found_and_read_back(family: KeyFamily) -> None:
    name = NAMES.get(family)
    key = family.key(name)
    assert classify(key) is family
    assert family.parse(key) == name
    assert (key == family.prefix) is (name is None)


def test_the_stored_bytes_stay_as_they_are() -> None:
    assert {family.name: family.prefix for family in KeyFamily} == {
        "NODE": b"nodes/", "CLIENT": b"clients/", "CONFIG": b"config", "LEADER": b"leader",
        "BLOCK": b"map/", "DRAIN": b"drain/", "WISH": b"wish/", "KICK": b"kick/",
        "RELEASE": b"release/", "NEEDS": b"needs/",
        "OFFSET": b"offset/", "TRIAL": b"trial/",
        "CLEARANCE": b"pardon/",
        "TARGET": b"target", "REWOUND": b"rewound", "MOVED": b"moved", "DEAD": b"dead/",
        "STUCK": b"stuck/", "AUDIT": b"audit/",
    }  # fmt: skip


def test_needs_are_lists_of_types_that_people_can_read() -> None:
    view = ClusterView()
    value = encode_needs(["room", "annex", "room"])
    assert value == b'["annex","room"]'
    view.apply(put(1, (needs_key(SHARD), value), (needs_key(ShardKey("r", 8)), b"annex")))
    assert view.needs == {SHARD: ("annex", "room")}, "what cannot be read is left out"
    view.apply(drop(2, needs_key(SHARD)))
    assert not view.needs


@pytest.mark.parametrize("key", [b"", b"/", b"nodes", b"configs", b"config/x", b"other/x", b"x"])
def test_what_nobody_writes_has_no_family(key: bytes) -> None:
    assert classify(key) is None


@pytest.mark.parametrize(
    "key",
    [
        b"pardon/r/07", b"pardon/r/x", b"pardon/r", b"wish/r/ 7", b"map/r/0", b"map/r/000000",
        b"release/a/r/7", b"release/a/r/7@03", b"nodes/\xff", b"kick/r/7/cart", b"kick/r/7/c/%61",
    ],
)  # fmt: skip
def test_a_key_that_its_name_would_not_write_is_unreadable(key: bytes) -> None:
    """What is deleted by its name must be the key that was seen, else it is deleted for ever."""
    view = ClusterView(follow_entries=False)
    (fact,) = view.apply(put(1, (key, b"")))
    assert isinstance(fact, Unreadable)
    assert fact.key == key
    assert not view.clearances
    assert not view.releases
    assert not view.blocks


# nodes


def test_nodes_are_in_the_order_of_their_creation_and_the_dict_stays() -> None:
    view = ClusterView()
    nodes = view.nodes
    view.apply(put(1, (node_key(B), record(B))))
    items = [Item(node_key(A), record(A), 4, 4), Item(node_key(B), record(B), 1, 1)]
    assert [type(fact) for fact in view.load(Listing(5, tuple(items)))] == [NodeUp]
    assert list(view.nodes) == [B, A]
    fresh = ClusterView()
    fresh.load(Listing(5, tuple(items)))
    assert list(fresh.nodes) == [B, A]
    assert view.nodes is nodes, "senders ask this very dict who is up"


def test_older_news_says_nothing() -> None:
    """C2: the watch may bring what the listing had."""
    view = ClusterView()
    view.load(Listing(5, ()))
    assert view.apply(put(5, (node_key(A), record(A)))) == []
    assert view.load(Listing(4, (Item(node_key(A), record(A), 4, 4),))) == []
    assert view.nodes == {}
    assert view.revision == 5


# the map as a leader sees it


def test_a_leader_is_told_of_blocks_and_a_process_of_entries() -> None:
    changes = put(2, (BLOCK.key, block(serving(A))))
    leader, process = ClusterView(follow_entries=False), ClusterView()
    assert leader.apply(changes) == [BlockChanged(BLOCK)]
    assert [type(fact).__name__ for fact in process.apply(changes)] == ["EntryChanged"]
    assert leader.blocks == process.blocks == {BLOCK: StoredBlock(2, "t", (serving(A),))}
    assert leader.entry(ShardKey("r", 0)) == process.map.get(ShardKey("r", 0)) == serving(A)
    assert not list(leader.map)


def test_an_own_commit_is_known_before_the_watch_brings_it() -> None:
    """I3, S1."""
    view = ClusterView(follow_entries=False)
    view.apply(put(2, (release_key(*REPORT), b"")))
    mine = StoredBlock(9, "mine", (serving(B, 2),))
    value = block(serving(B, 2), txn="mine")
    view.take_own(BLOCK, mine, (Put(BLOCK.key, value), Delete(release_key(*REPORT))))
    assert not view.releases
    assert view.revision == 2
    assert view.apply(put(8, (BLOCK.key, block(serving(A))))) == [], "it is older"
    view.load(Listing(8, (Item(BLOCK.key, block(serving(A)), 1, 8),)))
    assert view.blocks[BLOCK] == mine, "so is the listing"
    assert view.apply(put(9, (BLOCK.key, value))) == []
    assert view.satisfies(At(BLOCK.key, 9))


def test_a_listing_is_believed_about_blocks_whatever_was_seen_before() -> None:
    """S5: revisions of a store that went back may stand for something else now."""
    view = ClusterView(follow_entries=False)
    view.apply(put(5, (BLOCK.key, block(serving(A), txn="lost"))))
    view.load(Listing(7, (Item(BLOCK.key, block(serving(B), txn="kept"), 1, 5),)))
    assert view.blocks[BLOCK] == StoredBlock(5, "kept", (serving(B),))
    view.load(Listing(8, (Item(BLOCK.key, block(serving(A), txn="older"), 1, 3),)))
    assert view.blocks[BLOCK] == StoredBlock(3, "older", (serving(A),))


def test_the_epochs_of_a_removed_block_go_on() -> None:
    """I1: an epoch is never used twice, whatever becomes of its block."""
    for gone in (
        lambda view: view.apply(drop(3, BLOCK.key)),
        lambda view: view.load(Listing(3, ())),
    ):
        view = ClusterView(follow_entries=False)
        view.apply(put(2, (BLOCK.key, block(serving(A, 4)))))
        gone(view)
        assert view.blocks[BLOCK] == StoredBlock(0, "t", (serving(A, 4),))
        assert view.entry(ShardKey("r", 0)).epoch == 4
        assert not view.satisfies(At(BLOCK.key, 2))


def test_a_block_that_was_read_is_taken_if_it_is_newer() -> None:
    """S1."""
    view = ClusterView(follow_entries=False)
    view.apply(put(5, (BLOCK.key, block(serving(A)))))
    read = view.take_block(Item(BLOCK.key, block(serving(B), txn="mine"), 1, 4))
    assert read == StoredBlock(4, "mine", (serving(B),))
    assert view.blocks[BLOCK].revision == 5
    assert view.take_block(Item(BLOCK.key, b"nonsense", 1, 6)) is None


# notes


def test_notes_come_and_go() -> None:
    view = ClusterView()
    pairs = (
        (wish_key(SHARD), b"n-a"), (release_key(*REPORT), b"9"),
        (clearance_key(SHARD), b""), (TARGET_KEY, b"2.0"), (REWOUND_KEY, b""),
    )  # fmt: skip
    assert view.apply(put(2, *pairs)) == [
        NoteChanged(KeyFamily.WISH, SHARD, "n-a"),
        NoteChanged(KeyFamily.RELEASE, REPORT, 9),
        NoteChanged(KeyFamily.CLEARANCE, SHARD, True),
        NoteChanged(KeyFamily.TARGET, None, "2.0"),
        NoteChanged(KeyFamily.REWOUND, None, True),
    ]
    assert view.wishes == {SHARD: "n-a"}
    assert view.releases == {REPORT: 9}
    assert view.floors == {SHARD: 9}
    assert list(view.clearances) == [SHARD]
    assert view.target == "2.0"
    assert view.rewound
    items = tuple(Item(key, value, 2, 2) for key, value in pairs)
    assert view.load(Listing(3, items)) == []
    assert len(view.load(Listing(4, ()))) == len(pairs)
    assert not any((view.wishes, view.releases, view.floors, view.clearances))
    assert view.target == ""
    assert not view.rewound


def test_what_a_journal_has_seen_outlives_the_release_that_says_so() -> None:
    """J1: the leader may need it after the key was removed."""
    view = ClusterView()
    view.apply(put(2, (release_key(*REPORT), b"9")))
    view.apply(drop(3, release_key(*REPORT)))
    assert not view.releases
    assert view.floors == {SHARD: 9}


def test_a_repeated_wish_is_heard_again() -> None:
    view = ClusterView()
    view.apply(put(2, (wish_key(SHARD), b"n-a")))
    again = put(3, (wish_key(SHARD), b"n-a"), created=2)
    assert view.apply(again) == [NoteChanged(KeyFamily.WISH, SHARD, "n-a")]


# what deposes a leader


@pytest.mark.parametrize("value", [encode_record(LeaderRecord(B, "n-b")), b"{", b"\xff"])
def test_another_leader_deposes_even_if_its_record_is_unreadable(value: bytes) -> None:
    """C1: the revision of the key counts, not what it says."""
    leader = Coordinator(A, 3, Settings(), Random(0))
    items = (
        Item(CONFIG_KEY, encode_record(ConfigRecord({"r": 1})), 1, 1),
        Item(LEADER_KEY, encode_record(LeaderRecord(A, "n-a")), 3, 3),
        Item(node_key(A), record(A), 2, 2),
    )
    assert Resign("deposed") not in leader.step(Listed(Listing(4, items)), 1.0)
    assert leader.step(Changed(put(5, (LEADER_KEY, value))), 1.1) == (Resign("deposed"),)


def test_a_leader_whose_record_is_unreadable_is_there_all_the_same() -> None:
    view = ClusterView()
    view.apply(put(1, (LEADER_KEY, encode_record(LeaderRecord(A, "n-a")))))
    facts = view.apply(put(2, (LEADER_KEY, b"{")))
    assert [type(fact) for fact in facts] == [LeaderChanged, Unreadable]
    assert view.leader is None, "the revision is not that leader's"
    assert view.leader_revision == 2, "nobody campaigns while the key is there"
    view.load(Listing(3, ()))
    assert view.leader_revision == 0


def test_block_keys_of_the_table_and_of_blocks_are_the_same() -> None:
    assert BLOCK.key == block_key("r", 0) == KeyFamily.BLOCK.key(BLOCK)
