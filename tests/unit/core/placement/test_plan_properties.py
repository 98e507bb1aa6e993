"""What holds of every plan: C4, the fewest moves, rest, and that nothing moves twice."""

from __future__ import annotations

from random import Random
from unittest.mock import patch

from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace
from plan_lab import World, decide, node, serving

from domicile.core.ids import NOBODY, Incarnation
from domicile.core.placement import plan, versions
from domicile.core.placement.balance import round_limit
from domicile.core.placement.model import Own, Plan
from domicile.core.placement.slices import at_once
from domicile.core.placement.strategies import NAMES as STRATEGIES
from domicile.core.placement.strategies import wanted
from domicile.core.state.shardmap import FREE, Entry
from domicile.settings import Settings

NAMES = tuple(Incarnation(name) for name in "abcdefgh")


def carry_out(entries: list[Entry], result: Plan) -> list[Entry]:
    """The map once a plan was committed and every move released and committed."""
    after = list(entries)
    for one in (*result.owns, *result.moves):
        to = one.owner if isinstance(one, Own) else one.to
        after[one.shard.shard] = serving(to, after[one.shard.shard].epoch + 1)
    return after


@given(
    st.lists(st.sampled_from([NOBODY, *NAMES]), min_size=1, max_size=60),
    st.lists(st.sampled_from(NAMES), min_size=1, max_size=8, unique=True),
)
def test_any_membership_converges_and_then_rests(
    owners: list[Incarnation], alive: list[Incarnation]
) -> None:
    entries = [serving(owner) if owner else FREE for owner in owners]
    nodes = [node(inc) for inc in alive]
    entries = carry_out(entries, decide(entries, *nodes))
    assert all(entry.owner in alive for entry in entries)
    placed = [entry.owner for entry in entries]
    counts = [placed.count(inc) for inc in alive]
    floor, extra = divmod(len(entries), len(alive))
    ceiling = floor + bool(extra)
    fewest = max(
        sum(max(0, count - ceiling) for count in counts),
        sum(max(0, floor - count) for count in counts),
    )
    moves = 0
    for _ in range(len(entries) + 1):
        result = decide(entries, *nodes, balance=True)
        assert len({one.shard: None for one in result.decisions}) == len(result.decisions)
        moves += len(result.moves)
        entries = carry_out(entries, result)
    assert decide(entries, *nodes, balance=True) == Plan()
    placed = [entry.owner for entry in entries]
    counts = [placed.count(inc) for inc in alive]
    assert max(counts) - min(counts) <= 1
    assert moves == fewest


@given(st.integers(0, 6), st.lists(st.booleans(), min_size=1, max_size=6))
def test_a_difference_of_one_moves_nothing(base: int, extras: list[bool]) -> None:
    nodes = [node(inc) for inc, _ in zip(NAMES, extras, strict=False)]
    entries = [
        serving(inc) for inc, extra in zip(NAMES, extras, strict=False) for _ in range(base + extra)
    ]
    assert decide(entries, *nodes, balance=True) == Plan()


ENTRY = st.builds(
    lambda owner, to, state, epoch, previous: (
        FREE
        if state == "free"
        else Entry(owner, epoch, state, to if state == "moving" else NOBODY, 9, previous)
    ),
    st.sampled_from(NAMES),
    st.sampled_from([NOBODY, *NAMES]),
    st.sampled_from(["free", "serving", "moving"]),
    st.integers(1, 3),
    st.sampled_from(["", *(f"node-{inc}" for inc in NAMES)]),
)


@given(
    st.lists(ENTRY, max_size=20),
    st.lists(
        st.tuples(st.sampled_from(NAMES), st.sampled_from(["up", "leaving", "evicted"])),
        max_size=6,
        unique_by=lambda pair: pair[0],
    ),
    st.lists(st.sampled_from([f"node-{inc}" for inc in NAMES]), max_size=3),
    st.dictionaries(st.integers(0, 25), st.sampled_from([f"node-{inc}" for inc in NAMES])),
    st.lists(st.integers(0, 19), max_size=5),
    st.lists(st.integers(0, 19), max_size=5),
    st.booleans(),
)
def test_every_situation_is_handled_and_obeys_c4(
    entries: list[Entry],
    standing: list[tuple[Incarnation, str]],
    drains: list[str],
    wishes: dict[int, str],
    releases: list[int],
    asks: list[int],
    balance: bool,
) -> None:
    owned = [number for number, entry in enumerate(entries) if entry.owner]
    released = {number: entries[number].epoch for number in releases if number in owned}
    asked = {number: entries[number].epoch for number in asks if number in owned}

    def result_with(pause: int) -> Plan:
        with patch.object(plan, "PAUSE", pause):
            return decide(
                entries,
                *(node(inc, status) for inc, status in standing),
                drains=tuple(drains),
                wishes=wishes,
                released=released,
                asked=asked,
                wished=asked,
                balance=balance,
            )

    result = result_with(plan.PAUSE)
    assert result_with(2) == result, "pauses change nothing"
    up = [inc for inc, status in standing if status == "up"]
    willing = [inc for inc in up if f"node-{inc}" not in drains]
    known = [inc for inc, _ in standing]
    assert len({one.shard: None for one in result.decisions}) == len(result.decisions)
    for one in result.owns:
        entry = entries[one.shard.shard]
        assert one.owner in up
        assert one.shard.shard in released or entry.owner not in known
        assert one.gone == (entry.owner != NOBODY and one.shard.shard not in released)
    for one in result.moves:
        owner = entries[one.shard.shard].owner
        alone = not willing and dict(standing)[owner] == "leaving"
        stranded = alone and not up and one.to == NOBODY != entries[one.shard.shard].to
        assert entries[one.shard.shard].state == ("moving" if stranded else "serving")
        assert one.to in up or (one.to == NOBODY and alone)
        assert one.to != entries[one.shard.shard].owner
    for one in result.reverts:
        assert entries[one.shard.shard].state == "moving"


# ten rounds


@st.composite
def worlds(draw: st.DrawFn, *strategies: str) -> World:
    """Some membership with shards anywhere: owned by the living, by the dead, or by nobody."""
    alive = draw(st.lists(st.sampled_from(NAMES), min_size=1, max_size=8, unique=True))
    capacity = st.sampled_from([0.5, 1.0, 1.0, 2.0, 3.0])
    nodes = [node(inc, capacity=draw(capacity)) for inc in alive]
    owners = draw(st.lists(st.sampled_from([NOBODY, *NAMES]), min_size=1, max_size=60))
    entries = [serving(owner) if owner else FREE for owner in owners]
    settings = Settings(
        balance_limit=draw(st.sampled_from([0.05, 0.2, 1.0])),
        balance_shards=draw(st.sampled_from([1, 3, 1_000])),
        balance_receiver=draw(st.sampled_from([0.1, 0.5, 1.0])),
    )
    world = World(entries, nodes, strategy=draw(st.sampled_from(strategies)), settings=settings)
    world.silent = tuple(draw(st.lists(st.sampled_from(alive), max_size=3, unique=True)))
    drained = draw(st.lists(st.sampled_from(alive), max_size=2, unique=True))
    world.drains = tuple(f"node-{inc}" for inc in drained)
    return world


@given(worlds(*STRATEGIES), st.randoms(use_true_random=False))
def test_at_constant_input_no_shard_moves_twice_in_ten_rounds(world: World, random: Random) -> None:
    """Though releases come late, in any order, and some not at all."""
    for _ in range(10):
        drained = [inc for inc, one in world.nodes.items() if one.node in world.drains]
        under_way = sum(
            entry.state == "moving" and entry.owner not in drained and shard not in world.released
            for shard, entry in enumerate(world.entries)
        )
        result = world.plan()
        balancing = [
            one for one in result.moves if world.entries[one.shard.shard].owner not in drained
        ]
        limit = round_limit(
            len(world.entries), world.settings.balance_limit, world.settings.balance_shards
        )
        assert not balancing or len(balancing) + under_way <= limit
        moving = [n for n, entry in enumerate(world.entries) if entry.state == "moving"]
        chosen = random.sample(moving, random.randint(0, len(moving)))
        if chosen:
            world.release(*chosen)
    assert max(world.moves) <= 1


@given(worlds("least_shards"))
def test_at_rest_nobody_has_a_shard_too_many_for_its_capacity(world: World) -> None:
    world.rest()
    loads = world.loads()
    receiving = {
        inc: one.capacity
        for inc, one in world.nodes.items()
        if inc not in world.silent and one.node not in world.drains
    }
    for giver, much in receiving.items():
        for taker, little in receiving.items():
            if giver != taker:
                assert loads[giver] / much - loads[taker] / little <= 1 / little + 1e-9


@given(worlds("consistent_ring", "ranges"))
def test_at_rest_everything_that_can_be_is_in_its_place(world: World) -> None:
    world.rest()
    willing = {one.node: one for one in world.nodes.values() if one.node not in world.drains}
    if not willing:
        return
    seats = tuple((name, one.capacity) for name, one in willing.items())
    places = at_once(wanted(world.strategy, "r", len(world.entries), seats))
    assert places is not None
    for entry, place in zip(world.entries, places, strict=True):
        reachable = willing[place].incarnation not in world.silent
        if reachable and entry.owner in world.nodes and entry.owner not in world.silent:
            assert world.nodes[entry.owner].node == place


@given(worlds("least_shards"), st.data())
def test_a_newcomer_takes_and_nobody_else_moves(world: World, data: st.DataObject) -> None:
    """Of the default; on the ring a few others move, and ranges shift."""
    world.silent, world.drains = (), ()
    world.rest()
    before = [entry.owner for entry in world.entries]
    capacity = data.draw(st.sampled_from([0.5, 1.0, 2.0]))
    newcomer = node(Incarnation("new"), capacity=capacity)
    world.nodes[newcomer.incarnation] = newcomer
    world.rest()
    for was, entry in zip(before, world.entries, strict=True):
        assert entry.owner in (was, newcomer.incarnation)


# versions

VERSIONS = st.sampled_from(["", "1.0", "1.0.0", "1.1", "2.0rc1", "blue"])


@given(worlds(*STRATEGIES), st.lists(VERSIONS, min_size=8, max_size=8), VERSIONS, st.booleans())
def test_while_versions_are_mixed_only_the_target_receives_and_nothing_is_balanced(
    world: World, given: list[str], target: str, balance: bool
) -> None:
    for (inc, record), version in zip(tuple(world.nodes.items()), given, strict=False):
        world.nodes[inc] = replace(record, version=version)
    world.target = target
    before = list(world.entries)
    result = world.plan(balance=balance)
    up = list(world.nodes.values())
    if not versions.mixed(one.version for one in up):
        return
    for one in result.moves:
        assert world.nodes[before[one.shard.shard].owner].node in world.drains, "only drains"
    pool = [one for one in up if one.node not in world.drains] or up
    heard = [one for one in pool if one.incarnation not in world.silent]
    allowed = versions.target_versions((one.version for one in pool), target)
    chosen = [one.incarnation for one in heard if one.version in allowed]
    units = sum(one.capacity for one in up)
    goes = [one.owner for one in result.owns] + [one.to for one in result.moves]
    loads = dict.fromkeys(world.nodes, 0)
    for entry in world.entries:
        owner = entry.to if entry.state == "moving" else entry.owner
        loads[owner] = loads.get(owner, 0) + 1
    others = [inc for inc in goes if chosen and inc not in chosen]
    if others:
        for inc in chosen:
            fair = len(before) * world.nodes[inc].capacity / units
            assert loads[inc] >= max(1, int(2 * fair + 1e-9)), "others only when these are full"
    if len(chosen) < len(heard):
        for inc in chosen:
            fair = len(before) * world.nodes[inc].capacity / units
            assert inc not in goes or loads[inc] <= max(1, 2 * fair + 1e-9)
