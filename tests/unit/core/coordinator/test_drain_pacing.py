"""Shards of departing nodes move in stages: few at a time, all of them in the end, slow or not; and
not before others that depart with them have said so.
"""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from plan_lab import NOW, SETTINGS, A, B, C, decide, move, moving, node, seen, serving
from tiny_store import TinyStore

from domicile.core.coordinator.departures import (
    GATHER_S,
    NEVER,
    STAGE,
    STAGE_S,
    STAGES,
    DrainPacing,
    late_s,
)
from domicile.core.coordinator.events import Changed, Commit, CoordinatorEvent, Heard, Listed, Tick
from domicile.core.coordinator.machine import Coordinator
from domicile.core.ids import NOBODY, Incarnation
from domicile.core.machines import Arm
from domicile.core.placement.model import Move, PlanInput
from domicile.core.placement.plan import plan
from domicile.core.state.keys import block_key
from domicile.core.state.shardmap import BLOCK_SIZE, Block, Entry, encode_block

NODES = (node(A, "leaving"), node(B), node(C))


def moves(view: PlanInput, stages: DrainPacing, now: float) -> list[Move]:
    # All are heard all the time.
    paced = stages.pace(view, plan(view, NOW, SETTINGS).decisions, now)
    return [decision for decision in paced if isinstance(decision, Move)]


def under_way(entries: list[Entry], decisions: list[Move]) -> list[Entry]:
    found = list(entries)
    for decision in decisions:
        number = decision.shard.shard
        found[number] = moving(found[number].owner, decision.to)
    return found


def stage_of(homes: int) -> int:
    return max(STAGE, homes // STAGES)


def test_so_many_move_at_a_time_and_others_follow_as_those_are_released() -> None:
    stages, entries = DrainPacing(), [serving(A)] * 300
    first = moves(seen(entries, *NODES), stages, NOW)
    assert len(first) == stage_of(300) < 300
    assert stages.at == NOW + STAGE_S, "somebody has to look again"
    entries = under_way(entries, first)
    assert moves(seen(entries, *NODES), stages, NOW + 0.01) == []
    released = {first[0].shard.shard: 1, first[5].shard.shard: 1}
    again = moves(seen(entries, *NODES, released=released), stages, NOW + 0.02)
    assert len(again) == 2
    assert stages.at == NOW + STAGE_S


def test_those_that_are_slow_hold_up_nobody() -> None:
    stages, entries = DrainPacing(), [serving(A)] * 300
    entries = under_way(entries, moves(seen(entries, *NODES), stages, NOW))
    moves(seen(entries, *NODES), stages, NOW)
    later = NOW + STAGE_S
    assert len(moves(seen(entries, *NODES), stages, later)) == stage_of(300)
    assert stages.at == later + STAGE_S


def test_shards_whose_owner_lacks_a_type_move_in_stages_too() -> None:
    """DX-26: their messages wait, and a slow one must not hold up the others."""
    nodes, needs = (node(A), node(B, types=("x",))), dict.fromkeys(range(300), ("x",))
    stages, entries = DrainPacing(), [serving(A)] * 300
    first = moves(seen(entries, *nodes, needs=needs), stages, NOW)
    assert len(first) == stage_of(300) < 300
    assert stages.at == NOW + STAGE_S
    entries = under_way(entries, first)
    assert moves(seen(entries, *nodes, needs=needs), stages, NOW + 0.01) == []
    released = {first[0].shard.shard: 1}
    again = moves(seen(entries, *nodes, needs=needs, released=released), stages, NOW + 0.02)
    assert len(again) == 1
    later = NOW + STAGE_S
    assert len(moves(seen(entries, *nodes, needs=needs), stages, later)) >= STAGE, "slow or not"


def test_few_shards_move_at_once_and_nobody_has_to_look_again() -> None:
    stages, entries = DrainPacing(), [serving(A)] * STAGE
    assert len(moves(seen(entries, *NODES), stages, NOW)) == STAGE
    assert stages.at == NEVER


def test_of_very_many_a_part_moves_at_a_time() -> None:
    many = 2 * STAGE * STAGES
    assert len(moves(seen([serving(A)] * many, *NODES), DrainPacing(), NOW)) == many // STAGES


def test_stages_shrink_with_what_is_left_but_not_by_much() -> None:
    """So that the last of very many begin in time, however slow each is."""
    many = 4 * STAGE * STAGES
    stages, entries = DrainPacing(), [serving(A)] * many
    moves(seen(entries, *NODES), stages, NOW)
    few = [serving(B)] * (many - 3 * STAGE) + [serving(A)] * 3 * STAGE
    assert len(moves(seen(few, *NODES), stages, NOW + 1)) == 2 * STAGE
    moves(seen([serving(B)] * many, *NODES), stages, NOW + 2)
    assert len(moves(seen(few, *NODES), stages, NOW + 3)) == STAGE, "another departure"


@given(st.integers(1, 3_000), st.floats(0.0, 0.5))
def test_all_begin_in_time_however_long_each_takes(count: int, takes_s: float) -> None:
    stages, entries, now = DrainPacing(), [serving(A)] * count, NOW
    began: dict[int, float] = {}
    while len(began) < count:
        for number, at in began.items():
            if at + takes_s <= now:
                entries[number] = serving(B, epoch=2)
        found = moves(seen(entries, *NODES), stages, now)
        began |= {one.shard.shard: now for one in found}
        entries = under_way(entries, found)
        now = min(stages.at, *[at + takes_s for at in began.values() if at + takes_s > now], NEVER)
    assert max(began.values()) - NOW < 2 * STAGES * STAGE_S


def test_nodes_that_leave_or_are_drained_share_their_stages() -> None:
    entries = [serving(A), serving(B)] * 100
    nodes = (node(A), node(B, "leaving"), node(C))
    found = moves(seen(entries, *nodes, drains=("node-a",)), DrainPacing(), NOW)
    assert len(found) == stage_of(200)
    assert {entries[one.shard.shard].owner for one in found} == {A, B}


def test_who_departs_keeps_its_shards_for_a_moment() -> None:
    """It serves on meanwhile, so that nobody waits for anything."""
    stages, view = DrainPacing(), seen([serving(A)] * 9, *NODES, departing_since={A: NOW})
    for now in (NOW, NOW + 0.9 * GATHER_S):
        assert moves(view, stages, now) == []
        assert stages.at == NOW + GATHER_S, "somebody has to look again"
    assert len(moves(view, stages, NOW + GATHER_S)) == 9
    assert stages.at == NEVER


def test_what_the_first_that_departs_has_does_not_go_to_the_second() -> None:
    stages, entries = DrainPacing(), [serving(A)] * 9 + [serving(B)] * 9
    alone = seen(entries, *NODES, departing_since={A: NOW})
    assert moves(alone, stages, NOW) == []
    nodes = (node(A, "leaving"), node(B, "leaving"), node(C))
    since = {A: NOW, B: NOW + 0.5 * GATHER_S}
    found = moves(seen(entries, *nodes, departing_since=since), stages, NOW + GATHER_S)
    assert [(one.shard.shard, one.to) for one in found] == [(number, C) for number in range(9)]
    assert stages.at == pytest.approx(NOW + 1.5 * GATHER_S), "each has a moment of its own"


def test_a_moment_that_ends_sooner_than_a_stage_is_looked_at_first() -> None:
    stages, entries = DrainPacing(), [serving(A)] * 200 + [serving(B)] * 9
    nodes = (node(A, "leaving"), node(B, "leaving"), node(C))
    since = {A: NOW - 1.0, B: NOW - 0.5 * GATHER_S}
    found = moves(seen(entries, *nodes, departing_since=since), stages, NOW)
    assert len(found) == stage_of(209)
    assert stages.at == pytest.approx(NOW + 0.5 * GATHER_S)


def test_who_ends_late_has_time_for_the_moment_and_for_all_stages() -> None:
    assert late_s(SETTINGS) > SETTINGS.heard_s + GATHER_S + 2 * STAGES * STAGE_S


def test_what_gets_no_home_is_not_paced() -> None:
    """Nobody waits for it, and whoever paces may be among those that leave."""
    stages, leaving = DrainPacing(), (node(A, "leaving"), node(B, "leaving"))
    since = {A: NOW, B: NOW}
    found = moves(seen([serving(A)] * 300, *leaving, departing_since=since), stages, NOW)
    assert [one.to for one in found] == [NOBODY] * 300
    assert stages.at == NEVER


def test_who_stays_is_not_paced_and_what_has_no_home_gets_one() -> None:
    stages = DrainPacing()
    wished = dict.fromkeys(range(200), "node-c")
    found = stages.pace(seen([serving(B)] * 200, *NODES, wishes=wished),
                       [move(number, C) for number in range(200)], NOW)  # fmt: skip
    assert len(found) == 200
    gone = (node(B), node(C, "leaving"))
    owns = decide([serving(A)] * 300, *gone).owns
    assert stages.pace(seen([serving(A)] * 300, *gone), owns, NOW) == owns


@given(
    st.lists(st.sampled_from([A, B]), min_size=1, max_size=700),
    st.lists(st.tuples(st.floats(0.0, 0.06), st.integers(0, 80)), min_size=1, max_size=20),
)
def test_all_have_left_in_the_end_and_never_many_swift_ones_at_a_time(
    owners: list[Incarnation], steps: list[tuple[float, int]]
) -> None:
    """Releases come as they like, and time passes as the machine itself asks for."""
    stages, entries, now = DrainPacing(), [serving(owner) for owner in owners], NOW
    nodes = (node(A, "leaving"), node(B, "leaving"), node(C))
    since: dict[int, float] = {}
    turn = 0
    while any(entry.owner != C for entry in entries):
        pause_s, releases = steps[turn % len(steps)]
        turn += 1
        assert turn < 2_000, "it comes to an end"
        found = moves(seen(entries, *nodes), stages, now)
        since |= {one.shard.shard: now for one in found}
        entries = under_way(entries, found)
        swift = [at for number, at in since.items() if entries[number].owner != C]
        assert sum(now < at + STAGE_S for at in swift) <= stage_of(len(owners))
        for number in [n for n, entry in enumerate(entries) if entry.state == "moving"][:releases]:
            entries[number] = serving(C, epoch=2)
        held = any(entry.owner != C and entry.state == "serving" for entry in entries)
        assert not held or stages.at <= now + STAGE_S
        now = min(now + pause_s, stages.at) if releases else stages.at if held else now + pause_s
        if not held and not releases:
            break


def test_a_coordinator_that_only_listens_does_not_look_again_and_again() -> None:
    """Found by seed 754: a stage was over while nothing may be placed, and the time stood still."""
    store, new = TinyStore(2 * BLOCK_SIZE), Incarnation("new")
    for one in (A, B):
        store.join(one)
    for block in (0, 1):
        store.put(block_key("r", block), encode_block(Block("", (serving(A),) * BLOCK_SIZE)))
    machine = Coordinator(B, store.lead(B), SETTINGS, Random(1))
    machine.step(Heard(A), NOW)
    machine.step(Listed(store.listing()), NOW)
    settled = NOW + 1.0
    armed: list[float] = []

    def step(event: CoordinatorEvent, now: float) -> None:
        armed.extend(effect.at for effect in machine.step(event, now) if isinstance(effect, Arm))

    store.join(A, "leaving")
    step(Changed(store.log[-1]), NOW)
    store.join(new)
    step(Changed(store.log[-1]), NOW + 0.01)
    now = NOW
    for _ in range(100):
        if now > settled:
            break
        assert armed, "somebody has to look again"
        assert armed[-1] > now, "but not in this very moment"
        now = armed[-1]
        step(Tick(), now)
    assert now > settled


def test_one_commit_that_is_not_answered_holds_up_no_other_block() -> None:
    """Each of four blocks belongs to somebody who leaves, and one answer does not come."""
    store = TinyStore(4 * BLOCK_SIZE)
    for one in (A, B, C):
        store.join(one)
    for block in range(4):
        owner = A if block < 2 else B
        store.put(block_key("r", block), encode_block(Block("", (serving(owner),) * BLOCK_SIZE)))
    machine = Coordinator(C, store.lead(C), SETTINGS, Random(1))
    armed: list[float] = []
    touched: dict[bytes, None] = {}

    def step(event: CoordinatorEvent, now: float) -> None:
        for effect in machine.step(event, now):
            if isinstance(effect, Arm):
                armed.append(effect.at)
            elif isinstance(effect, Commit):
                touched.update(dict.fromkeys(write.key for write in effect.writes))

    step(Listed(store.listing()), NOW)
    now = NOW + 1.0
    for one in (A, B):
        store.join(one, "leaving")
        step(Changed(store.log[-1]), now)
    while len(touched) < 4:
        now = max(now, armed[-1])
        assert now < NOW + 2.0, f"only {list(touched)}"
        for one in (A, B, C):
            step(Heard(one), now)
        step(Tick(), now)
