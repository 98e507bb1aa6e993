"""Shards that need entity types which not every node has (DX-26): where they may be."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from plan_lab import A, B, C, D, World, decide, move, moving, node, own, serving

from domicile.core.ids import NOBODY, Incarnation
from domicile.core.placement.strategies import NAMES as STRATEGIES
from domicile.core.state.shardmap import FREE
from domicile.settings import Settings

X, Y, XY = ("x",), ("y",), ("x", "y")
NAMES = [Incarnation(name) for name in "abcdef"]


# one plan


def test_a_shard_whose_owner_lacks_a_type_moves_to_the_least_loaded_node_that_has_it() -> None:
    entries = [serving(A), serving(A), serving(B), serving(B), serving(C)]
    nodes = (node(A), node(B, types=X), node(C, types=X), node(D))
    assert decide(entries, *nodes, needs={0: X}).moves == (move(0, C),)
    assert not decide(entries, *nodes, needs={2: X, 4: X}).decisions, "they are where they may be"


def test_several_shards_are_spread_and_no_limit_of_balancing_counts() -> None:
    entries = [serving(A)] * 40
    nodes = (node(A), node(B, types=X), node(C, types=X))
    moves = decide(entries, *nodes, needs=dict.fromkeys(range(40), X)).moves
    assert [one.shard.shard for one in moves] == [*range(40)]
    assert sum(one.to == B for one in moves) == sum(one.to == C for one in moves) == 20


def test_all_types_of_a_shard_count_together() -> None:
    entries = [serving(A), serving(A)]
    nodes = (node(A, types=X), node(B, types=Y), node(C, types=XY))
    assert decide(entries, *nodes, needs={1: XY}).moves == (move(1, C),)


def test_a_type_that_no_node_has_any_more_does_not_count_beside_one_that_a_node_has() -> None:
    nodes = (node(A), node(B, types=X))
    assert decide([serving(A)], *nodes, needs={0: XY}).moves == (move(0, B),)


def test_needs_that_no_node_meets_are_ignored() -> None:
    entries = [serving(A), FREE, serving(D)]
    nodes = (node(A, types=X), node(B, types=Y))
    plan = decide(entries, *nodes, needs=dict.fromkeys(range(3), XY))
    assert not plan.moves
    assert {one.shard.shard for one in plan.owns} == {1, 2}


@pytest.mark.parametrize("version", ["", "1"])
def test_versions_do_not_matter_as_much_as_types(version: str) -> None:
    """A new version without the type receives everything else."""
    entries = [serving(B), serving(B), FREE]
    nodes = (node(A, types=X, version=version), node(B, version="2"))
    plan = decide(entries, *nodes, needs={0: X, 2: X})
    assert plan.moves == (move(0, A),)
    assert plan.owns == (own(2, A),)
    both = (*nodes, node(C, types=X, version="2"))
    assert decide(entries, *both, needs={0: X}).moves == (move(0, C),)


def test_a_silent_node_gets_nothing_and_a_shard_without_a_home_does_not_wait_for_it() -> None:
    entries = [serving(A), FREE]
    nodes = (node(A), node(B, types=X))
    plan = decide(entries, *nodes, unheard=(B,), needs={0: X, 1: X})
    assert not plan.moves
    assert plan.owns == (own(1, A),)


def test_a_move_that_leads_to_a_node_without_the_type_ends_elsewhere() -> None:
    entries = [moving(A, B)]
    nodes = (node(A), node(B), node(C, types=X))
    assert decide(entries, *nodes, released={0: 1}, needs={0: X}).owns == (own(0, C),)


def test_the_last_node_with_a_type_may_leave_and_be_drained() -> None:
    nodes = (node(A, "leaving", types=X), node(B))
    assert decide([serving(A)], *nodes, needs={0: X}).moves == (move(0, B),)
    nodes = (node(A, types=X), node(B))
    assert decide([serving(A)], *nodes, drains=("node-a",), needs={0: X}).moves == (move(0, B),)
    assert not decide([serving(B)], *nodes, drains=("node-a",), needs={0: X}).decisions


def test_a_wish_for_a_node_without_the_type_does_not_count() -> None:
    nodes = (node(A), node(B, types=X), node(C, types=X))
    part = {"needs": {0: X}, "wishes": {0: "node-a"}}
    assert decide([serving(A)], *nodes, **part).moves == (move(0, B),)  # type: ignore[arg-type]
    assert not decide([serving(B)], *nodes, **part).decisions  # type: ignore[arg-type]
    assert not decide([moving(A, B)], *nodes, **part).reverts  # type: ignore[arg-type]
    part["wishes"] = {0: "node-c"}
    assert decide([serving(A)], *nodes, **part).moves == (move(0, C),)  # type: ignore[arg-type]


def test_a_shard_that_could_not_be_emptied_rests_first() -> None:
    nodes = (node(A), node(B, types=X))
    assert not decide([serving(A)], *nodes, needs={0: X}, resting_until={0: 101.0}).decisions


def test_a_user_function_is_followed_only_to_nodes_that_have_the_type() -> None:
    entries = [serving(A), serving(A), serving(B)]
    nodes = (node(A), node(B, types=X), node(C, types=X))
    advice = {0: "node-c", 1: "node-a", 2: "node-a"}
    plan = decide(entries, *nodes, needs=dict.fromkeys(range(3), X), advice=advice, balance=True)
    assert plan.moves == (move(0, C), move(1, B)), "the second to the least loaded of those"


# any membership


@st.composite
def worlds(draw: st.DrawFn) -> World:
    """Nodes with some of two types, shards anywhere, some of which need some types."""
    alive = draw(st.lists(st.sampled_from(NAMES), min_size=1, max_size=6, unique=True))
    types = st.sampled_from([(), X, Y, XY])
    version = st.sampled_from(draw(st.sampled_from([("",), ("1", "2")])))
    capacity = st.sampled_from([0.5, 1.0, 1.0, 2.0])
    nodes = [
        node(inc, capacity=draw(capacity), types=draw(types), version=draw(version))
        for inc in alive
    ]
    owners = draw(st.lists(st.sampled_from([NOBODY, *NAMES]), min_size=1, max_size=40))
    settings = Settings(
        balance_limit=draw(st.sampled_from([0.05, 1.0])),
        balance_receiver=draw(st.sampled_from([0.1, 1.0])),
    )
    entries = [serving(owner) if owner else FREE for owner in owners]
    world = World(entries, nodes, strategy=draw(st.sampled_from(STRATEGIES)), settings=settings)
    numbers = st.integers(0, len(entries) - 1)
    world.needs = draw(st.dictionaries(numbers, st.sampled_from([X, Y, XY])))
    world.wishes = draw(st.dictionaries(numbers, st.sampled_from([f"node-{n}" for n in NAMES])))
    drained = draw(st.lists(st.sampled_from(alive), max_size=2, unique=True))
    world.drains = tuple(f"node-{inc}" for inc in drained)
    return world


def eligible(world: World, shard: int) -> list[Incarnation]:
    """The nodes that have what a shard needs, and can receive it."""
    up = list(world.nodes.values())
    willing = [one for one in up if one.node not in world.drains] or up
    types = set(world.needs.get(shard, ())) & {kind for one in willing for kind in one.types}
    return [one.incarnation for one in willing if types and not types - set(one.types)]


@given(worlds())
def test_no_shard_goes_to_a_node_without_its_types_while_another_has_them(world: World) -> None:
    for _ in range(8):
        plan = world.plan()
        for one in (*plan.owns, *plan.moves):
            target = one.to if one in plan.moves else world.entries[one.shard.shard].owner  # type: ignore[union-attr]
            fit = eligible(world, one.shard.shard)
            assert not fit or target in fit
        world.release()


@given(worlds())
def test_every_shard_comes_to_a_node_that_has_its_types_and_then_rests(world: World) -> None:
    world.rest()
    willing = [one for one in world.nodes.values() if one.node not in world.drains]
    for shard, entry in enumerate(world.entries):
        fit = eligible(world, shard)
        assert entry.owner in world.nodes
        assert not willing or not fit or entry.owner in fit


@given(worlds())
def test_only_shards_that_need_it_move_and_each_of_them_once(world: World) -> None:
    """Starting from balance, without other reasons: the fewest moves."""
    world.wishes, world.drains = {}, ()
    wanted, world.needs = world.needs, {}
    world.rest()
    before = [entry.owner for entry in world.entries]
    world.moves = [0] * len(world.entries)
    world.needs = wanted
    for _ in range(4):
        world.plan(balance=False)
        world.release()
    world.plan(balance=False)
    for shard, owner in enumerate(before):
        fit = eligible(world, shard)
        lacks = bool(fit) and owner not in fit
        assert world.moves[shard] == lacks
        assert (world.entries[shard].owner != owner) == lacks
