"""The view of the cluster: what listings and changes make of it, in which order it says so."""

from __future__ import annotations

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from domicile.core.ids import Incarnation, ShardKey
from domicile.core.state.cluster_view import (
    ClientGone,
    ClientUp,
    ClusterView,
    ConfigSeen,
    EntryChanged,
    LeaderChanged,
    NodeChanged,
    NodeGone,
    NodeUp,
    NoteChanged,
    Unreadable,
    ViewChange,
)
from domicile.core.state.keys import (
    CONFIG_KEY,
    LEADER_KEY,
    KeyFamily,
    block_key,
    client_key,
    drain_key,
    node_key,
    wish_key,
)
from domicile.core.state.records import (
    ClientRecord,
    ConfigRecord,
    LeaderRecord,
    NodeRecord,
    encode_record,
)
from domicile.core.state.shardmap import Block, Entry, encode_block
from domicile.core.state.txn import Change, Changes, Item, Listing

A, B, C = Incarnation("a" * 32), Incarnation("b" * 32), Incarnation("c" * 32)


def node(
    incarnation: Incarnation,
    *,
    status: str = "up",
    roles: tuple[str, ...] = ("default",),
    types: tuple[str, ...] = ("cart",),
) -> NodeRecord:
    return NodeRecord(
        f"n-{incarnation[0]}", incarnation, "host:1", roles, types, 6.0, status=status
    )


def node_item(record: NodeRecord, created: int = 1, revision: int = 1) -> Item:
    return Item(node_key(record.incarnation), encode_record(record), created, revision)


def client_item(incarnation: Incarnation, revision: int = 1) -> Item:
    value = encode_record(ClientRecord(incarnation))
    return Item(client_key(incarnation), value, revision, revision)


def leader_item(incarnation: Incarnation, revision: int) -> Item:
    value = encode_record(LeaderRecord(incarnation, "n"))
    return Item(LEADER_KEY, value, revision, revision)


def config_item(shards: dict[str, int], revision: int) -> Item:
    return Item(CONFIG_KEY, encode_record(ConfigRecord(shards)), 1, revision)


def block_item(*entries: Entry, number: int = 0, revision: int = 1) -> Item:
    value = encode_block(Block("txn", entries))
    return Item(block_key("default", number), value, 1, revision)


def listing(revision: int, *items: Item) -> Listing:
    return Listing(revision, tuple(sorted(items, key=lambda item: item.key)))


def put(revision: int, *items: Item) -> Changes:
    return Changes(revision, tuple(Change(item.key, item) for item in items))


def drop(revision: int, *keys: bytes) -> Changes:
    return Changes(revision, tuple(Change(key, None) for key in keys))


def test_a_listing_tells_of_members_before_the_entries_that_name_them() -> None:
    members = ClusterView()
    entry = Entry(A, 1, "serving", change=1)
    facts = members.load(
        listing(
            9,
            node_item(node(A), created=4),
            client_item(C),
            leader_item(A, 5),
            config_item({"default": 64}, 2),
            block_item(entry),
            Item(drain_key("n-b"), b"", 6, 6),
            Item(wish_key(ShardKey("default", 3)), b"n-a", 7, 7),
        )
    )
    assert facts == [
        NodeUp(node(A)),
        ClientUp(C),
        ConfigSeen(ConfigRecord({"default": 64})),
        LeaderChanged(LeaderRecord(A, "n")),
        EntryChanged(ShardKey("default", 0), entry),
        NoteChanged(KeyFamily.DRAIN, "n-b", True),
        NoteChanged(KeyFamily.WISH, ShardKey("default", 3), "n-a"),
    ]
    assert members.revision == 9
    assert members.created == {A: 4}
    assert members.leader_revision == 5
    assert members.config_revision == 2
    assert list(members.drains) == ["n-b"]
    assert members.wishes == {ShardKey("default", 3): "n-a"}
    assert members.map.get(ShardKey("default", 0)) == entry


def test_the_same_listing_again_says_nothing() -> None:
    members = ClusterView()
    same = listing(5, node_item(node(A)), client_item(C), leader_item(A, 2), config_item({}, 1))
    assert members.load(same)
    assert members.load(same) == []


def test_a_listing_reports_what_vanished_first() -> None:
    members = ClusterView()
    members.load(
        listing(
            5,
            node_item(node(B)),
            client_item(C),
            leader_item(B, 2),
            Item(drain_key("n-b"), b"", 3, 3),
            Item(wish_key(ShardKey("default", 3)), b"n-a", 4, 4),
        )
    )
    assert members.load(listing(9, node_item(node(A), created=7))) == [
        NodeGone(B, node(B)),
        ClientGone(C),
        LeaderChanged(None),
        NoteChanged(KeyFamily.DRAIN, "n-b", None),
        NoteChanged(KeyFamily.WISH, ShardKey("default", 3), None),
        NodeUp(node(A)),
    ]
    assert members.nodes == {A: node(A)}
    assert members.created == {A: 7}
    assert members.leader is None
    assert members.leader_revision == 0
    assert not members.clients
    assert not members.drains
    assert not members.wishes


def test_a_leader_replaced_during_a_gap_is_one_change() -> None:
    members = ClusterView()
    members.load(listing(5, leader_item(A, 2)))
    assert members.load(listing(9, leader_item(B, 8))) == [LeaderChanged(LeaderRecord(B, "n"))]


def test_a_record_made_anew_during_a_gap_was_gone() -> None:
    members = ClusterView()
    members.load(listing(5, node_item(node(A), created=2)))
    facts = members.load(listing(9, node_item(node(A), created=8, revision=8)))
    assert facts == [NodeGone(A, node(A)), NodeUp(node(A))]


def test_changes_carry_it_forward() -> None:
    members = ClusterView()
    assert members.apply(put(2, node_item(node(A), 2, 2))) == [NodeUp(node(A))]
    leaving = node(A, status="leaving")
    assert members.apply(put(3, node_item(leaving, 2, 3))) == [NodeChanged(leaving)]
    assert members.apply(put(4, leader_item(A, 4))) == [LeaderChanged(LeaderRecord(A, "n"))]
    assert members.apply(drop(5, LEADER_KEY)) == [LeaderChanged(None)]
    assert members.apply(drop(6, node_key(A))) == [NodeGone(A, leaving)]
    assert members.apply(drop(7, node_key(A))) == []
    assert members.revision == 7


def test_config_is_seen_again_when_it_grows() -> None:
    members = ClusterView()
    members.apply(put(1, config_item({"a": 8}, 1)))
    grown = config_item({"a": 8, "b": 16}, 2)
    assert members.apply(put(2, grown)) == [ConfigSeen(ConfigRecord({"a": 8, "b": 16}))]
    assert members.config_revision == 2


def test_entries_only_get_newer() -> None:
    members = ClusterView()
    newer = Entry(B, 2, "serving", change=3)
    members.map.merge(ShardKey("default", 64), newer)
    older = Entry(A, 1, "serving", change=1)
    facts = members.apply(put(2, block_item(older, older, number=1)))
    assert facts == [EntryChanged(ShardKey("default", 65), older)]
    assert members.map.get(ShardKey("default", 64)) == newer
    members.load(listing(3))
    assert members.map.get(ShardKey("default", 64)) == newer


def test_types_are_those_of_registered_nodes_of_the_role() -> None:
    members = ClusterView()
    assert not members.knows_type("default", "cart")
    members.apply(put(1, node_item(node(A, types=("user", "cart")))))
    members.apply(put(2, node_item(node(B, roles=("gpu",), types=("job",)))))
    assert members.types("default") == ("cart", "user")
    assert members.knows_type("gpu", "job")
    assert not members.knows_type("default", "job")
    members.apply(drop(3, node_key(B)))
    assert not members.knows_type("gpu", "job")


def test_a_node_id_in_use_clashes_only_if_the_roles_differ() -> None:
    """SM-28."""
    members = ClusterView()
    members.load(listing(1, node_item(node(A, roles=("default", "sessions")))))
    mine = msgspec.structs.replace(node(B), node="n-a")
    assert members.clash(mine) == node(A, roles=("default", "sessions"))
    assert members.clash(msgspec.structs.replace(mine, roles=("sessions", "default"))) is None
    assert members.clash(node(B)) is None, "another node id"
    assert members.clash(msgspec.structs.replace(mine, incarnation=A)) is None, "its own record"
    members.apply(put(2, node_item(node(A, status="leaving"), revision=2)))
    assert members.clash(mine) is None
    members.apply(drop(3, node_key(A)))
    assert members.clash(mine) is None


def test_what_makes_no_sense_changes_nothing() -> None:
    members = ClusterView()
    members.apply(put(1, node_item(node(A))))
    broken = put(
        2,
        Item(node_key(A), b"{", 1, 2),
        Item(b"wish/default/three", b"n-a", 2, 2),
        Item(b"other", b"", 2, 2),
    )
    facts = members.apply(broken)
    assert [fact.key for fact in facts if isinstance(fact, Unreadable)] == [
        node_key(A),
        b"wish/default/three",
    ]
    assert len(facts) == 2
    assert members.nodes == {A: node(A)}
    assert not members.wishes


def replay(facts: list[ViewChange], nodes: dict[Incarnation, NodeRecord]) -> None:
    for fact in facts:
        if isinstance(fact, NodeUp):
            assert fact.record.incarnation not in nodes
            nodes[fact.record.incarnation] = fact.record
        elif isinstance(fact, NodeChanged):
            assert fact.record.incarnation in nodes
            nodes[fact.record.incarnation] = fact.record
        elif isinstance(fact, NodeGone):
            assert nodes.pop(fact.incarnation) == fact.record


writes = st.lists(
    st.tuples(st.sampled_from([A, B, C]), st.sampled_from(["up", "leaving", None])), max_size=30
)


@given(writes, st.data())
def test_watching_and_listing_lead_to_the_same_view(
    writes: list[tuple[Incarnation, str | None]], data: st.DataObject
) -> None:
    watched, gapped = ClusterView(), ClusterView()
    heard_watching: dict[Incarnation, NodeRecord] = {}
    heard_gapped: dict[Incarnation, NodeRecord] = {}
    items: dict[bytes, Item] = {}
    for revision, (incarnation, status) in enumerate(writes, start=1):
        key = node_key(incarnation)
        if status is None:
            items.pop(key, None)
            changes = drop(revision, key)
        else:
            created = items[key].created if key in items else revision
            items[key] = node_item(node(incarnation, status=status), created, revision)
            changes = put(revision, items[key])
        replay(watched.apply(changes), heard_watching)
        if data.draw(st.booleans()):
            replay(gapped.load(listing(revision, *items.values())), heard_gapped)
    replay(gapped.load(listing(len(writes), *items.values())), heard_gapped)
    assert watched.nodes == gapped.nodes == heard_watching == heard_gapped
    assert watched.created == gapped.created


def test_a_listing_behind_the_map_is_a_contradiction() -> None:
    """S5: what is known of the map was stored, so no listing can lack it."""

    def listing(entry: Entry) -> Listing:
        value = encode_block(Block("t", (entry,)))
        return Listing(9, (Item(block_key("r", 0), value, 1, 9),))

    shard = ShardKey("r", 0)
    known = {shard: Entry(Incarnation("a"), 3, "serving", change=5)}
    assert ClusterView.contradiction(listing(known[shard]), {}) == ""
    assert ClusterView.contradiction(listing(known[shard]), known) == ""
    newer = Entry(Incarnation("b"), 4, "serving", change=6)
    assert ClusterView.contradiction(listing(newer), known) == ""
    older = Entry(Incarnation("a"), 3, "serving", change=4)
    assert "lists change 4 of shard r/0" in ClusterView.contradiction(listing(older), known)
    other = Entry(Incarnation("b"), 3, "serving", change=5)
    assert "another change 5" in ClusterView.contradiction(listing(other), known)
