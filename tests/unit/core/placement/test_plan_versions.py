"""Versions, targets and rollbacks (SM-13, SM-14), and shards that kill their owners (DX-20)."""

from __future__ import annotations

import pytest
from msgspec.structs import replace
from plan_lab import NOW, SETTINGS, A, B, C, D, World, decide, move, moving, node, own, serving

from domicile.core.ids import NOBODY, EntityKey, Incarnation, ShardKey
from domicile.core.placement.model import Own, Plan, Quarantine, ShardTrials
from domicile.core.state.records import NodeRecord
from domicile.core.state.shardmap import FREE, Entry, Suspicion
from domicile.settings import Settings

# versions


def test_while_versions_are_mixed_the_newest_receive_and_nothing_is_balanced() -> None:
    old, new = node(A, version="1.0"), node(B, version="1.1")
    entries = [serving(A)] * 10
    assert decide(entries, old, new, balance=True) == Plan()
    assert decide([*entries, FREE], old, new).owns == (own(10, B),)
    third = node(C, "leaving", version="1.0")
    leaving = decide([*entries, serving(C)], old, new, third)
    assert leaving.moves == (move(10, B),)


def test_equal_versions_are_balanced_however_they_are_written() -> None:
    entries = [serving(A)] * 10
    result = decide(entries, node(A, version="1.0"), node(B, version="1.0.0"), balance=True)
    assert len(result.moves) == 1


def test_a_leaving_node_does_not_make_versions_mixed() -> None:
    entries = [serving(A)] * 10
    nodes = (node(A, version="2"), node(B, version="2"), node(C, "leaving", version="1"))
    assert len(decide(entries, *nodes, balance=True).moves) == 1


def test_a_target_version_receives_though_there_is_a_newer_one() -> None:
    nodes = (node(A, version="1.0"), node(B, version="1.1"))
    entries = [serving(A), serving(A), FREE]
    assert decide(entries, *nodes, target="1.0").owns == (own(2, A),)
    assert decide(entries, *nodes, target="1.1").owns == (own(2, B),)
    assert decide(entries, *nodes, target="9").owns == (own(2, B),), "nobody has it: least loaded"


def test_a_target_alone_forbids_nothing() -> None:
    entries = [serving(A)] * 10
    nodes = (node(A, version="1.0"), node(B, version="1.0"))
    assert len(decide(entries, *nodes, target="2.0", balance=True).moves) == 1


def test_versions_without_an_order_have_no_preference() -> None:
    nodes = (node(A, version="blue"), node(B, version="green"), node(C, version="1.0"))
    entries = [FREE] * 3
    assert [one.owner for one in decide(entries, *nodes).owns] == [A, B, C]
    assert decide([serving(A)] * 10, *nodes, balance=True) == Plan()
    assert [one.owner for one in decide(entries, *nodes, target="green").owns] == [B, B, A]


def test_a_shard_has_a_home_though_the_target_version_is_silent() -> None:
    nodes = (node(A, version="1.0"), node(B, version="1.1"))
    assert decide([FREE], *nodes, unheard=(B,)).owns == (own(0, A),)


def test_a_departing_node_waits_a_moment_for_a_newcomer_of_the_newest_version() -> None:
    """SM-14: not heard yet, for it has just registered; an old node would be a move too many."""
    nodes = (node(A, "leaving", version="1"), node(B, version="1"), node(C, version="2"))
    entries = [serving(A), FREE]
    asked = {A: NOW - 0.1}
    lately = decide(
        entries, *nodes, unheard=(C,), known_since={C: NOW - 0.1}, departing_since=asked
    )
    assert lately == Plan(owns=(own(1, B),)), "what has no home at all does not wait"
    for known_since in ({C: NOW - 60.0}, {}):
        late = decide(entries, *nodes, unheard=(C,), known_since=known_since, departing_since=asked)
        assert late.moves == (move(0, B),)
    heard = decide(entries, *nodes, known_since={C: NOW - 0.1}, departing_since=asked)
    assert heard.moves == (move(0, C),)


def test_the_last_of_the_old_nodes_waits_for_the_last_of_the_new_ones() -> None:
    """SM-14: all that stay are of one version, and yet what they got would move once more."""
    nodes = (node(A, "leaving", version="1"), node(B, version="2"), node(C, version="2"))
    since = {"known_since": {C: NOW - 0.1}, "departing_since": {A: NOW - 0.1}}
    assert decide([serving(A)], *nodes, unheard=(C,), **since) == Plan()
    assert decide([serving(A)], *nodes, **since).moves == (move(0, B),), "it was heard"
    same = (node(A, "leaving", version="2"), *nodes[1:])
    assert decide([serving(A)], *same, unheard=(C,), **since).moves == (move(0, B),)


def test_a_departing_node_waits_for_newcomers_only_so_long_in_all() -> None:
    """Whoever crashes and registers anew, again and again, must not keep it from leaving."""
    nodes = (node(A, "leaving", version="1"), node(B, version="1"), node(C, version="2"))
    for asked in ({A: NOW - SETTINGS.heard_s}, {A: NOW - 60.0}, {}):
        result = decide(
            [serving(A)], *nodes, unheard=(C,), known_since={C: NOW - 0.1}, departing_since=asked
        )
        assert result.moves == (move(0, B),)


def test_a_drained_newest_version_is_not_waited_for() -> None:
    nodes = (node(A, version="1.0"), node(B, version="1.1"))
    result = decide([serving(B)], *nodes, drains=("node-b",))
    assert result.moves == (move(0, A),)


def test_the_intake_of_the_newest_is_bounded() -> None:
    """SM-14: three nodes up, so its fair share of 12 is 4; the rest goes to the least loaded."""
    nodes = (node(A, version="1"), node(B, version="1"), node(C, version="2"))
    entries = [serving(A), *[FREE] * 11]
    owners = [one.owner for one in decide(entries, *nodes).owns]
    assert (owners.count(C), owners.count(A), owners.count(B)) == (8, 1, 2)
    leaving = node(D, "leaving", version="2")
    moves = decide([serving(A), *[serving(D)] * 11], *nodes, leaving).moves
    assert [one.to for one in moves].count(C) == 8


def test_the_only_ones_that_are_heard_take_everything() -> None:
    nodes = (node(A, version="1"), node(B, version="2"))
    owners = [one.owner for one in decide([FREE] * 9, *nodes, unheard=(A,)).owns]
    assert owners == [B] * 9


def test_a_wish_is_above_versions() -> None:
    nodes = (node(A, version="1"), node(B, version="2"))
    assert decide([FREE], *nodes, wishes={0: "node-a"}).owns == (own(0, A),)
    assert decide([serving(B)], *nodes, wishes={0: "node-a"}).moves == (move(0, A),)


def test_a_released_shard_does_not_go_on_to_an_old_version() -> None:
    nodes = (node(A, version="1"), node(B, version="1"), node(C, version="2"))
    assert decide([moving(A, B)], *nodes, released={0: 1}).owns == (own(0, C),)


@pytest.mark.parametrize("strategy", ["consistent_ring", "ranges"])
def test_places_wait_until_versions_are_equal(strategy: str) -> None:
    nodes = (node(A, version="1"), node(B, version="2"), node(C, version="2"))
    owners = [one.owner for one in decide([FREE] * 6, *nodes, strategy=strategy).owns]
    assert owners == [B, C, B, C, B, C]


# whole updates


def versioned(name: str, version: str) -> NodeRecord:
    return node(Incarnation(name), version=version)


def update(world: World, count: int, version: str, *, crash: bool = False) -> None:
    """Surge style: a new node starts, an old one stops, one after the other."""
    old = list(world.nodes)
    for index in range(count):
        new = versioned(f"{version}-{index}", version)
        world.nodes[new.incarnation] = new
        world.rest()
        if crash:
            del world.nodes[old[index]]
            world.rest()
        else:
            world.stop(old[index])


def cluster(count: int, version: str, strategy: str = "least_shards", shards: int = 256) -> World:
    nodes = [versioned(f"{version}-{index}", version) for index in range(count)]
    world = World([FREE] * shards, nodes, strategy=strategy)
    world.rest()
    world.changes, world.moves, world.peak = [0] * shards, [0] * shards, {}
    return world


@pytest.mark.parametrize("count", [2, 5, 20])
@pytest.mark.parametrize("crash", [False, True], ids=["leave", "crash"])
def test_a_rolling_update_moves_each_shard_once(count: int, crash: bool) -> None:
    world = cluster(count, "1.0")
    update(world, count, "1.1", crash=crash)
    assert world.changes == [1] * 256
    loads = world.loads().values()
    assert max(loads) - min(loads) <= 1
    assert max(world.peak.values()) <= 2 * 256 / count + 1


@pytest.mark.parametrize("strategy", ["consistent_ring", "ranges"])
@pytest.mark.parametrize("count", [5, 20])
def test_places_are_taken_once_an_update_is_over(strategy: str, count: int) -> None:
    world = cluster(count, "1.0", strategy)
    old = list(world.nodes)
    update(world, count - 1, "1.1")
    moved = [entry.owner not in old for entry in world.entries]
    assert [bool(changes) for changes in world.changes] == moved
    assert max(world.changes) == 1, "nobody is shifted while versions are mixed"
    new = versioned("last", "1.1")
    world.nodes[new.incarnation] = new
    world.stop(old[-1])
    assert max(world.changes) <= 2
    again = World([FREE] * 256, list(world.nodes.values()), strategy=strategy)
    again.rest()
    assert [one.owner for one in again.entries] == [one.owner for one in world.entries]


@pytest.mark.parametrize("count", [5, 20])
def test_a_rollback_by_target_moves_each_shard_once(count: int) -> None:
    world = cluster(count, "1.1")
    world.target = "1.0"
    update(world, count, "1.0")
    assert world.changes == [1] * 256
    loads = world.loads().values()
    assert max(loads) - min(loads) <= 1


@pytest.mark.parametrize("count", [5, 20])
def test_a_rollback_without_a_target_piles_nothing_up(count: int) -> None:
    world = cluster(count, "1.1")
    update(world, count, "1.0")
    assert max(world.peak.values()) <= 2 * 256 / count + 1
    loads = world.loads().values()
    assert max(loads) - min(loads) <= 1


def test_an_update_that_turns_back_halfway_by_its_target() -> None:
    world = cluster(6, "1.0")
    old = list(world.nodes)
    update(world, 3, "1.1")
    stayed = [shard for shard, entry in enumerate(world.entries) if entry.owner in old]
    world.target = "1.0"
    for index in range(3):
        back = versioned(f"back-{index}", "1.0")
        world.nodes[back.incarnation] = back
        world.rest()
        world.stop(Incarnation(f"1.1-{index}"))
    assert stayed
    assert all(world.changes[shard] == 0 for shard in stayed)
    assert max(world.changes) == 2, "there and back"


# quarantine


def quarantined(deaths: int = 3) -> Entry:
    return Entry(NOBODY, 5, "quarantined", NOBODY, 9, "node-b", deaths)


def test_a_death_counts_and_a_release_does_not() -> None:
    entries = [serving(D), serving(D), serving(A), FREE]
    result = decide(entries, node(A), node(B), recent_deaths={1: 1, 2: 1}, released={2: 1})
    assert [(one.shard.shard, one.suspicion.deaths) for one in result.owns] == [
        (0, 1),
        (1, 2),
        (2, 1),
        (3, 0),
    ]


def test_a_quarantine_needs_no_receiver_and_no_advice() -> None:
    nameless = EntityKey("t", "")
    entry = replace(serving(D), deaths=2, blamed=1, suspects=(nameless,))
    args = {"recent_deaths": {0: 2}, "named": {0: ShardTrials((nameless,), alone=nameless)}}
    away = Suspicion(3, 0, 1, suspects=(nameless,))
    expected = Plan(quarantines=(Quarantine(ShardKey("r", 0), away),))
    assert decide([entry], **args) == expected  # type: ignore[arg-type]
    assert decide([entry], node(A), undecided=True, **args) == expected  # type: ignore[arg-type]


def test_a_planned_release_never_ends_in_quarantine() -> None:
    entity = EntityKey("t", "x")
    entry = replace(serving(A), deaths=2, blamed=1, suspects=(entity,))
    named = {0: ShardTrials((entity,), alone=entity)}
    result = decide([entry], node(A), node(B), recent_deaths={0: 2}, named=named, released={0: 1})
    assert result.quarantines == ()
    assert result.owns[0].suspicion == Suspicion(2, 1, suspects=(entity,))


def test_a_quarantined_shard_is_left_alone_and_weighs_nothing() -> None:
    assert decide([quarantined()], node(A)) == Plan()
    entries = [quarantined(), quarantined(), serving(A), serving(B)]
    assert decide(entries, node(A), node(B), balance=True, wishes={0: "node-a"}) == Plan()
    entries = [quarantined(), *[serving(A)] * 3, serving(B)]
    assert len(decide(entries, node(A), node(B), balance=True).moves) == 1


def test_a_cleared_shard_gets_a_home_and_a_clean_record() -> None:
    entries = [quarantined(), quarantined(), serving(A)]
    result = decide(entries, node(A), node(B), cleared=(1,), recent_deaths={0: 3, 1: 3})
    assert result == Plan(owns=(own(1, B, deaths=0),))
    assert decide([serving(A)], node(A), cleared=(0,)) == Plan(), "it was not quarantined"


def test_a_shard_whose_quarantine_lasted_long_enough_gets_a_home_on_the_brink() -> None:
    entries = [replace(quarantined(), tries=4), quarantined()]
    (found,) = decide(entries, node(A), due=(0,)).owns
    assert found == Own(ShardKey("r", 0), A, False, Suspicion(3, 1, 4))


def test_suspects_are_placed_apart_the_worst_first() -> None:
    entries = [*[serving(A)] * 9, *[serving(B)] * 9, *[serving(D)] * 4, FREE]
    recent = {18: 1, 19: 2, 20: 3, 21: 0, 0: 2}
    settings = Settings(poison_deaths=5)
    result = decide(entries, node(A), node(B), node(C), recent_deaths=recent, settings=settings)
    owners = {one.shard.shard: one.owner for one in result.owns}
    assert owners[20] == C, "the worst goes where no suspect is, and the load is least"
    assert owners[19] == B, "C is empty, but has one now, and A has one already"
    assert owners[18] == C
    assert owners[21] == owners[22] == C


def test_a_suspect_does_not_return_to_the_node_that_died_with_it() -> None:
    """The same node id, restarted: everything else returns, the suspects are spread."""
    back = NodeRecord("node-d", B, "b:2", ("r",), (), 6.0)
    entries = [serving(D), serving(D), serving(D), serving(D)]
    result = decide(entries, node(A), back, recent_deaths={0: 1, 1: 1})
    owners = [one.owner for one in result.owns]
    assert sorted(owners[:2]) == [A, B]


def test_suspects_are_not_balanced() -> None:
    settings = Settings(balance_limit=1.0)
    args = {"balance": True, "settings": settings}
    entries = [serving(A)] * 4
    nodes = (node(A), node(B))
    result = decide(entries, *nodes, recent_deaths={0: 2, 1: 1}, **args)  # type: ignore[arg-type]
    assert result.moves == (move(1, B), move(2, B))
    result = decide(entries, *nodes, recent_deaths={0: 2}, strategy="ranges", **args)  # type: ignore[arg-type]
    assert result.moves == (move(2, B), move(3, B))


def test_shards_far_from_quarantine_are_balanced_as_usual() -> None:
    """Only the last death before a quarantine ties a shard to its home."""
    nodes, entries = (node(A), node(B)), [serving(A)] * 4
    for deaths, recent, moved in (
        (1_000, {0: 2, 1: 998}, (0, 1)),
        (1_000, {0: 999, 1: 1_500}, (2, 3)),
        (4, {0: 2, 1: 3}, (0, 2)),
        (2, {0: 1}, (1, 2)),
        (1, {0: 1}, (1, 2)),
    ):
        settings = Settings(balance_limit=1.0, poison_deaths=deaths)
        result = decide(entries, *nodes, recent_deaths=recent, balance=True, settings=settings)
        assert result.moves == tuple(move(shard, B) for shard in moved), deaths
    settings = Settings(balance_limit=1.0, poison_deaths=4)
    result = decide(
        entries,
        *nodes,
        recent_deaths={2: 2, 3: 3},
        strategy="ranges",
        balance=True,
        settings=settings,
    )
    assert result.moves == (move(2, B),)
