"""The coordinator, step by step."""

from __future__ import annotations

from collections import Counter
from random import Random

import pytest
from tiny_store import BLOCK, TinyStore

from domicile.core.coordinator.custom_strategy import CUSTOM
from domicile.core.coordinator.events import (
    AskProbe,
    AskStrategy,
    Changed,
    Commit,
    CommitDone,
    CoordinatorEffect,
    CoordinatorEvent,
    Heard,
    Listed,
    ProbeAnswered,
    ReadBack,
    ReleasedBy,
    Reread,
    Resign,
    RevertAsked,
    StrategyAnswered,
    Tell,
    Tick,
)
from domicile.core.coordinator.machine import DRAFT, SLICE, Coordinator
from domicile.core.ids import NOBODY, Incarnation, ShardKey
from domicile.core.machines import Arm
from domicile.core.placement.model import Plan, PlanInput
from domicile.core.placement.plan import Slices, plan_in_slices
from domicile.core.state.keys import (
    LEADER_KEY,
    RELEASE,
    REWOUND_KEY,
    drain_key,
    encode_needs,
    needs_key,
    node_key,
    node_lease,
    release_key,
    wish_key,
)
from domicile.core.state.shardmap import Entry, decode_block
from domicile.core.state.txn import (
    MAX_OPERATIONS,
    Absent,
    At,
    Conflict,
    Delete,
    Present,
    Put,
    Unknown,
)
from domicile.settings import Settings

A, B, C = (Incarnation(name) for name in "abc")
SETTINGS = Settings()


class Rig:
    """One coordinator on one store, its commits under the test's control."""

    def __init__(self, store: TinyStore, limits: Settings = SETTINGS) -> None:
        self.store, self.now, self.seen = store, 100.0, 0
        self.revision = store.lead(A)
        self.machine = Coordinator(A, self.revision, limits, Random(1))

    def step(self, event: CoordinatorEvent) -> list[CoordinatorEffect]:
        return list(self.machine.step(event, self.now))

    def start(self, *heard: Incarnation) -> list[CoordinatorEffect]:
        for node in heard:
            self.step(Heard(node))
        self.seen = self.store.revision
        return self.step(Listed(self.store.listing()))

    def watch(self) -> list[CoordinatorEffect]:
        effects: list[CoordinatorEffect] = []
        for changes in self.store.log:
            if changes.revision > self.seen:
                self.seen = changes.revision
                effects += self.step(Changed(changes))
        return effects

    def tick(self, seconds: float) -> list[CoordinatorEffect]:
        self.now += seconds
        return self.step(Tick())

    def land(self, effects: list[CoordinatorEffect]) -> list[CoordinatorEffect]:
        (commit,) = commits(effects)
        outcome = self.store.commit(commit.conditions, commit.writes)
        return self.step(CommitDone(commit.txn, outcome))


def commits(effects: list[CoordinatorEffect]) -> list[Commit]:
    return [effect for effect in effects if isinstance(effect, Commit)]


def block_entries(commit: Commit) -> tuple[Entry, ...]:
    (put,) = (write for write in commit.writes if isinstance(write, Put))
    return decode_block(put.value).entries


def told(effects: list[CoordinatorEffect]) -> list[tuple[Incarnation, int, str, int]]:
    return [
        (effect.to, effect.shard.shard, effect.entry.state, effect.entry.epoch)
        for effect in effects
        if isinstance(effect, Tell)
    ]


def serving(owner: Incarnation, epoch: int = 1, change: int = 1) -> Entry:
    return Entry(owner, epoch, "serving", NOBODY, change, f"node-{owner}")


def moving(owner: Incarnation, to: Incarnation, epoch: int = 1) -> Entry:
    return Entry(owner, epoch, "moving", to, 2, f"node-{owner}")


def running(*entries: Entry, nodes: tuple[Incarnation, ...] = (A, B)) -> Rig:
    store = TinyStore(len(entries))
    for inc in nodes:
        store.join(inc)
    store.write(*entries)
    rig = Rig(store)
    assert commits(rig.start(*nodes)) == []
    return rig


S0 = ShardKey("r", 0)


def test_nothing_happens_before_the_listing() -> None:
    rig = Rig(TinyStore(2))
    for event in (Tick(), Heard(B), ReleasedBy(B, S0, 1), RevertAsked(B, S0, 1), Reread("x", None)):
        assert rig.step(event) == []
    assert rig.step(CommitDone("x", Unknown())) == []


def test_the_first_allocation_waits_until_registrations_are_quiet() -> None:
    store = TinyStore(4)
    store.join(A)
    rig = Rig(store)
    effects = rig.start()
    assert commits(effects) == []
    assert effects[-1] == Arm(100.5)
    rig.now += 0.3
    store.join(B)
    rig.watch()
    rig.step(Heard(B))
    assert commits(rig.tick(0.3)) == []
    effects = rig.tick(0.3)
    (commit,) = commits(effects)
    assert commit.conditions[:2] == (At(LEADER_KEY, rig.revision), Absent(BLOCK))
    assert set(commit.conditions[2:]) == {Present(node_key(A)), Present(node_key(B))}
    assert sorted(told(rig.land(effects))) == [
        (A, 0, "serving", 1),
        (A, 2, "serving", 1),
        (B, 1, "serving", 1),
        (B, 3, "serving", 1),
    ]
    assert store.entry(0) == serving(A)


def test_the_first_allocation_waits_no_longer_than_its_limit_but_for_enough_nodes() -> None:
    store = TinyStore(1)
    rig = Rig(store, Settings(min_nodes=30))
    rig.start()
    for number in range(20):
        store.join(Incarnation(f"n{number}"))
        rig.watch()
        rig.step(Heard(Incarnation(f"n{number}")))
        assert commits(rig.tick(0.25)) == []
    for number in range(20, 30):
        store.join(Incarnation(f"n{number}"))
    assert commits(rig.watch()) == []
    for number in range(30):
        effects = rig.step(Heard(Incarnation(f"n{number}")))
    assert len(commits(effects)) == 1


def test_a_new_leader_listens_before_it_places() -> None:
    store = TinyStore(2)
    store.join(A)
    store.join(B)
    store.write(serving(C), serving(A))
    rig = Rig(store)
    assert commits(rig.start()) == []
    assert [type(one) for one in rig.step(Heard(B))] == [Commit, Arm]


def test_what_clients_say_costs_no_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    """I8: the control plane's cost never grows with messages."""
    rig = running(serving(A), serving(B))
    planned: list[float] = []

    def count(view: PlanInput, now: float, settings: Settings) -> Slices[Plan]:
        planned.append(now)
        return plan_in_slices(view, now, settings)

    monkeypatch.setattr("domicile.core.coordinator.machine.plan_in_slices", count)
    for _ in range(5):
        rig.now += 1.0
        assert rig.step(Heard(Incarnation("client"))) == []
    assert planned == []
    rig.now += SETTINGS.heard_s
    rig.step(Heard(B))
    assert len(planned) == 1


def test_a_balanced_cluster_in_which_nothing_changes_costs_no_plan(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """I8: an idle leader's cost does not grow with shards."""
    rig = running(serving(A), serving(B))
    planned: list[float] = []

    def count(view: PlanInput, now: float, settings: Settings) -> Slices[Plan]:
        planned.append(now)
        return plan_in_slices(view, now, settings)

    def live(seconds: int) -> int:
        before = len(planned)
        for _ in range(seconds):
            rig.step(Heard(B))
            assert commits(rig.tick(1.0)) == []
        return len(planned) - before

    monkeypatch.setattr("domicile.core.coordinator.machine.plan_in_slices", count)
    assert live(10) == 2, "the first round finds nothing, and the nodes are no longer new later"
    assert live(10) == 0
    rig.tick(1.0)
    rig.tick(1.1)
    assert len(planned) == 3, "a node became silent"
    assert live(10) == 2, "it is heard again, and one round balances"
    assert live(10) == 0
    rig.store.put(wish_key(S0), b"node-none")
    rig.watch()
    assert live(10) == 1
    assert len(planned) == 7


def test_a_silent_node_delays_a_new_leader_only_briefly() -> None:
    store = TinyStore(2)
    store.join(A)
    store.join(B)
    store.write(serving(C), serving(A))
    rig = Rig(store)
    assert rig.start()[-1] == Arm(100.5)
    rig.land(rig.tick(0.5))
    assert store.entry(0) == Entry(A, 2, "serving", NOBODY, 2, "node-a", 1)


def test_takeover_is_one_commit_conditional_on_the_absence() -> None:
    rig = running(serving(B), serving(B), serving(A), serving(A))
    rig.store.delete(node_key(B))
    effects = rig.watch()
    (commit,) = commits(effects)
    assert Absent(node_key(B)) in commit.conditions
    assert Present(node_key(A)) in commit.conditions
    assert told(rig.land(effects)) == [(A, 0, "serving", 2), (A, 1, "serving", 2)]


def test_a_move_is_two_commits_and_each_is_told_only_when_stored() -> None:
    rig = running(serving(A))
    rig.store.put(wish_key(S0), b"node-b")
    effects = rig.watch()
    assert told(effects) == []
    assert told(rig.land(effects)) == [(A, 0, "moving", 1)]
    assert rig.store.entry(0) == moving(A, B)
    assert rig.step(ReleasedBy(A, S0, 1)) == [Arm(rig.now + 0.005)]
    effects = rig.tick(0.005)
    (commit,) = commits(effects)
    assert Absent(node_key(A)) not in commit.conditions
    assert told(rig.land(effects)) == [(B, 0, "serving", 2), (A, 0, "serving", 2)]
    assert rig.store.entry(0) == Entry(B, 2, "serving", NOBODY, 3, "node-b")


def test_releases_within_the_batch_share_a_commit() -> None:
    rig = running(moving(A, B), moving(A, B), moving(A, B))
    rig.step(ReleasedBy(A, S0, 1))
    rig.now += 0.004
    assert rig.step(ReleasedBy(A, ShardKey("r", 1), 1)) == []
    rig.land(rig.tick(0.001))
    assert [rig.store.entry(shard).owner for shard in range(3)] == [B, B, A]


def test_one_commit_in_flight_per_block() -> None:
    rig = running(moving(A, B), moving(A, B))
    rig.step(ReleasedBy(A, S0, 1))
    first = rig.tick(0.005)
    rig.step(ReleasedBy(A, ShardKey("r", 1), 1))
    assert commits(rig.tick(0.005)) == []
    rig.land(rig.land(first))
    assert [rig.store.entry(shard).owner for shard in range(2)] == [B, B]


def test_a_release_left_in_the_store_counts_and_is_removed() -> None:
    rig = running(moving(A, B))
    key = release_key(A, S0, 1)
    rig.store.put(key, b"")
    assert commits(rig.watch()) == [], "others may follow (H12)"
    rig.land(rig.tick(0.005))
    assert rig.store.entry(0).owner == B
    assert key not in rig.store.items


def test_releases_left_in_the_store_in_a_crowd_make_one_plan() -> None:
    rig = running(*[moving(A, B)] * 8)
    for shard in range(8):
        rig.store.put(release_key(A, ShardKey("r", shard), 1), b"")
    assert commits(rig.watch()) == []
    rig.land(rig.tick(0.005))
    assert [rig.store.entry(shard).owner for shard in range(8)] == [B] * 8
    assert commits(rig.watch()) == [], "keys that were heeded and removed are no news"
    assert not [key for key in rig.store.items if key.startswith(RELEASE)]


def test_obsolete_release_keys_are_removed_once() -> None:
    rig = running(serving(A, 3))
    keys = [release_key(A, S0, 2), release_key(B, S0, 1)]
    for key in keys:
        rig.store.put(key, b"")
    rig.watch()
    effects = rig.tick(0.005)
    (commit,) = commits(effects)
    assert commit.conditions == (At(LEADER_KEY, rig.revision),)
    rig.land(effects)
    rig.tick(1.0)
    assert commits(rig.tick(1.0)) == []
    assert commits(rig.watch()) == []


def test_obsolete_keys_are_removed_again_until_they_are_gone() -> None:
    rig = running(serving(A, 3), nodes=(A,))
    rig.store.put(release_key(A, S0, 2), b"")
    rig.watch()
    effects = rig.tick(0.005)
    for _ in range(3):
        (commit,) = commits(effects)
        rig.step(CommitDone(commit.txn, Unknown()))
        effects = rig.tick(1.0)
    rig.land(effects)
    rig.watch()
    assert commits(rig.tick(1.0)) == []


# DX-26: shards that need a type which their owner lacks


@pytest.mark.parametrize("new_leader", [False, True])
def test_a_shard_that_needs_a_type_moves_and_a_new_leader_knows_of_it(new_leader: bool) -> None:
    rig = running(serving(A), serving(A))
    rig.store.join(B, types=("x",))
    rig.watch()
    rig.tick(0.01)
    rig.store.put(needs_key(S0), encode_needs(["x"]))
    if new_leader:
        rig = Rig(rig.store)
        rig.land(rig.start(A, B))
    else:
        assert commits(rig.watch()) == [], "others may follow (H12)"
        rig.land(rig.tick(0.005))
    assert rig.store.entry(0).to == B
    assert rig.store.entry(1).state == "serving"
    assert needs_key(S0) in rig.store.items, "it stays as long as nodes differ"


@pytest.mark.parametrize("how", ["all have it", "the node without it leaves", "nobody has it"])
def test_needs_are_removed_once_they_make_no_difference(how: str) -> None:
    rig = running(serving(B), serving(B))
    rig.store.join(B, types=("x",))
    rig.store.put(needs_key(S0), encode_needs(["x"]))
    rig.watch()
    assert commits(rig.tick(0.5)) == []
    if how == "all have it":
        rig.store.join(A, types=("x", "y"))
    elif how == "the node without it leaves":
        rig.store.join(A, "leaving")
    else:
        rig.store.join(B)
    effects = rig.watch()
    (commit,) = commits(effects)
    assert commit.writes == (Delete(needs_key(S0)),)
    rig.land(effects)
    assert needs_key(S0) not in rig.store.items
    assert commits(rig.watch()) == []


@pytest.mark.parametrize(("owner", "epoch"), [(A, 1), (B, 2)])
def test_a_stale_release_is_answered_with_the_stored_entry(owner: Incarnation, epoch: int) -> None:
    rig = running(serving(A, 2))
    assert told(rig.step(ReleasedBy(owner, S0, epoch))) == [(owner, 0, "serving", 2)]
    assert commits(rig.tick(0.005)) == []


def test_an_owner_that_asks_gets_its_shard_back_and_rest() -> None:
    rig = running(serving(A))
    rig.store.put(wish_key(S0), b"node-b")
    rig.land(rig.watch())
    rig.watch()
    assert told(rig.land(rig.step(RevertAsked(A, S0, 1)))) == [(A, 0, "serving", 1)]
    assert rig.store.entry(0) == serving(A, 1, 3)
    assert told(rig.step(RevertAsked(A, S0, 1))) == [(A, 0, "serving", 1)]
    assert commits(rig.tick(1.0)) == []
    rig.now += SETTINGS.drain_deadline_s
    assert commits(rig.step(Heard(B))), "after the rest it is tried again"


def test_removing_a_wish_mid_move_takes_it_back() -> None:
    rig = running(serving(A))
    rig.store.put(wish_key(S0), b"node-b")
    rig.land(rig.watch())
    rig.watch()
    rig.store.delete(wish_key(S0))
    rig.land(rig.watch())
    assert rig.store.entry(0) == serving(A, 1, 3)


def test_removing_a_wish_while_its_commit_is_under_way() -> None:
    rig = running(serving(A))
    rig.store.put(wish_key(S0), b"node-b")
    first = rig.watch()
    rig.store.delete(wish_key(S0))
    assert commits(rig.watch()) == []
    rig.land(rig.land(first))
    assert rig.store.entry(0) == serving(A, 1, 3)


def test_unknown_is_read_back_and_found() -> None:
    rig = running(moving(A, B))
    rig.step(ReleasedBy(A, S0, 1))
    (commit,) = commits(rig.tick(0.005))
    assert rig.step(CommitDone(commit.txn, Unknown())) == [ReadBack(commit.txn, BLOCK)]
    assert commits(rig.tick(0.1)) == []
    rig.store.commit(commit.conditions, commit.writes)
    found = rig.step(Reread(commit.txn, rig.store.items[BLOCK]))
    assert told(found) == [(B, 0, "serving", 2), (A, 0, "serving", 2)]


def test_unknown_and_not_found_is_tried_again_under_the_same_guard() -> None:
    rig = running(moving(A, B))
    rig.step(ReleasedBy(A, S0, 1))
    (first,) = commits(rig.tick(0.005))
    rig.step(CommitDone(first.txn, Unknown()))
    again = rig.step(Reread(first.txn, rig.store.items[BLOCK]))
    (second,) = commits(again)
    assert second.txn != first.txn
    rig.store.commit(first.conditions, first.writes)
    assert isinstance(rig.store.commit(second.conditions, second.writes), Conflict)


def test_the_watch_may_bring_an_own_commit_before_its_answer() -> None:
    rig = running(moving(A, B))
    rig.step(ReleasedBy(A, S0, 1))
    (commit,) = commits(rig.tick(0.005))
    outcome = rig.store.commit(commit.conditions, commit.writes)
    assert told(rig.watch()) == [(B, 0, "serving", 2), (A, 0, "serving", 2)]
    assert rig.step(CommitDone(commit.txn, outcome)) == []


def test_a_conflict_on_a_node_waits_for_the_watch_then_plans_again() -> None:
    rig = running(moving(A, B), nodes=(A, B, C))
    rig.step(ReleasedBy(A, S0, 1))
    effects = rig.tick(0.005)
    rig.store.delete(node_key(B))
    assert commits(rig.land(effects)) == []
    rig.land(rig.watch())
    assert rig.store.entry(0).owner in (A, C)


def test_a_conflict_without_news_is_tried_again_later() -> None:
    rig = running(moving(A, B))
    rig.step(ReleasedBy(A, S0, 1))
    (commit,) = commits(rig.tick(0.005))
    effects = rig.step(CommitDone(commit.txn, Conflict(BLOCK)))
    assert commits(effects) == []
    assert len(commits(rig.tick(0.4))) == 1


@pytest.mark.parametrize("how", ["conflict", "watch", "deleted", "listing"])
def test_a_deposed_leader_forgets_everything(how: str) -> None:
    rig = running(moving(A, B))
    rig.step(ReleasedBy(A, S0, 1))
    effects = rig.tick(0.005)
    if how == "deleted":
        rig.store.delete(LEADER_KEY)
    else:
        rig.store.lead(B)
    if how == "conflict":
        result = rig.land(effects)
    elif how == "listing":
        result = rig.step(Listed(rig.store.listing()))
    else:
        result = rig.watch()
    assert result == [Resign("deposed")]
    assert rig.tick(5) == []
    assert rig.step(ReleasedBy(A, S0, 1)) == []


def test_balancing_runs_on_its_interval() -> None:
    rig = running(*[serving(A)] * 4)
    assert commits(rig.tick(0.9)) == []
    assert told(rig.land(rig.tick(0.1))) == [(A, 0, "moving", 1)]


def test_a_commit_never_exceeds_the_stores_limit() -> None:
    store = TinyStore(64)
    nodes = [Incarnation(f"n{number:02}") for number in range(80)]
    for inc in nodes:
        store.join(inc)
    rig = Rig(store)
    rig.start(*nodes)
    effects = rig.tick(0.5)
    while found := commits(effects):
        assert len(found[0].conditions) + len(found[0].writes) <= MAX_OPERATIONS
        effects = rig.land(effects)
    assert all(store.entry(shard).state == "serving" for shard in range(64))


def test_many_shards_are_placed_in_slices_and_all_of_them() -> None:
    shards = 4 * SLICE
    store = TinyStore(shards)
    store.join(A)
    store.join(B)
    rig = Rig(store)
    rig.start(A, B)
    rig.now += 0.5
    waiting: list[Commit] = []
    steps = 0
    while rig.machine.doing != "idle":
        found = commits(rig.step(Tick()))
        assert len(found) <= SLICE // DRAFT
        waiting += found
        for commit in waiting[:2]:
            rig.step(CommitDone(commit.txn, store.commit(commit.conditions, commit.writes)))
        waiting = waiting[2:]
        steps += 1
    assert steps > shards / SLICE
    counts = Counter(store.entry(shard).owner for shard in range(shards))
    assert counts == {A: shards // 2, B: shards // 2}


def test_a_decision_whose_node_left_while_the_round_paused_is_not_committed() -> None:
    store = TinyStore(4 * SLICE)
    for inc in (A, B, C):
        store.join(inc)
    rig = Rig(store)
    rig.start(A, B, C)
    rig.now += 0.5
    before = commits(rig.step(Tick()))
    while not before:
        before = commits(rig.step(Tick()))
    store.delete(node_key(C))
    store.put(drain_key(f"node-{B}"), b"")
    rig.watch()
    after = commits(rig.step(Tick()))
    while len(after) < 20:
        after += commits(rig.step(Tick()))
    owners = {entry.owner for commit in after for entry in block_entries(commit)}
    assert owners <= {A, NOBODY}


def test_a_block_that_changed_while_the_round_paused_is_planned_again() -> None:
    """S1: a commit that was not found is stored after all, while the next round plans."""
    store = TinyStore(4 * SLICE)
    store.join(A)
    store.join(B)
    store.write(moving(B, A))
    rig = Rig(store)
    rig.start(A, B)
    rig.step(ReleasedBy(B, S0, 1))
    rig.now += 0.5

    def next_commits() -> list[Commit]:
        found = commits(rig.step(Tick()))
        for commit in found:
            if commit.writes[0].key != BLOCK:
                rig.step(CommitDone(commit.txn, store.commit(commit.conditions, commit.writes)))
        return found

    found = next_commits()
    while not found:
        found = next_commits()
    (late,) = (commit for commit in found if commit.writes[0].key == BLOCK)
    rig.step(CommitDone(late.txn, Unknown()))
    rig.step(Reread(late.txn, store.items[BLOCK]))
    while next_commits():
        pass
    assert next_commits() == []
    assert rig.machine.doing == "planning", "the next round has begun"
    store.commit(late.conditions, late.writes)
    rig.watch()
    assert store.entry(0) == Entry(A, 2, "serving", NOBODY, 3, "node-a")
    while rig.machine.doing != "idle":
        rig.now += 0.001
        assert all(commit.writes[0].key != BLOCK for commit in next_commits())
        rig.watch()


def test_garbage_in_the_store_is_left_out() -> None:
    rig = running(serving(A))
    for key in (b"map/r", b"map/r/x", b"nodes/z", b"wish/r", b"release/x", b"drain/\xff", b"zzz"):
        rig.store.put(key, b"\xff")
        rig.store.delete(key)
    rig.store.put(b"nodes/y", b"{}")
    assert not commits(rig.watch())


def test_a_map_block_that_vanished_keeps_its_epochs() -> None:
    rig = running(serving(B, 7))
    rig.store.delete(BLOCK)
    rig.watch()
    rig.store.delete(node_key(B))
    rig.watch()
    rig.land(rig.tick(0.5))
    assert rig.store.entry(0).epoch == 8


def test_an_older_listing_is_ignored_and_a_newer_one_replaces() -> None:
    rig = running(serving(A), serving(B))
    old = rig.store.listing()
    rig.store.delete(node_key(B))
    effects = rig.watch()
    assert rig.step(Listed(old)) == []
    rig.land(effects)
    rig.store.join(C)
    assert commits(rig.step(Listed(rig.store.listing()))) == []
    assert rig.store.entry(1) == Entry(A, 2, "serving", NOBODY, 2, "node-a", 1)


# C6: nodes that nobody reaches


def test_a_lost_node_is_probed_evicted_and_buried_by_conditional_commits() -> None:
    rig = running(serving(A), serving(B), nodes=(A, B, C))
    probes: list[CoordinatorEffect] = []
    commit: Commit | None = None
    while commit is None:
        rig.now += 0.5
        rig.step(Heard(C))
        effects = rig.step(Tick())
        probes += [effect for effect in effects if isinstance(effect, AskProbe)]
        rig.step(ProbeAnswered(C, B, False))
        commit = next((one for one in commits(effects) if one.writes[0].key == node_key(B)), None)
        assert rig.now < 110, "it should have been evicted after evict_after_s"
    assert rig.now >= 106
    assert probes
    assert all(probe == AskProbe(C, B) for probe in probes)
    item = rig.store.items[node_key(B)]
    assert commit.conditions == (At(LEADER_KEY, rig.revision), At(node_key(B), item.revision))
    (write,) = commit.writes
    assert isinstance(write, Put)
    assert write.lease == node_lease(B)
    rig.step(CommitDone(commit.txn, rig.store.commit(commit.conditions, commit.writes)))
    rig.watch()
    seen_at = rig.now
    buried: Commit | None = None
    while buried is None:
        rig.now += 0.5
        rig.step(Heard(C))
        effects = rig.step(Tick())
        buried = next(
            (one for one in commits(effects) if one.writes == (Delete(node_key(B)),)), None
        )
        assert rig.now < seen_at + 10
    assert rig.now - seen_at >= 6.0 * 1.001
    rig.step(CommitDone(buried.txn, rig.store.commit(buried.conditions, buried.writes)))
    (takeover,) = [one for one in commits(rig.watch()) if Absent(node_key(B)) in one.conditions]
    assert Present(node_key(B)) not in takeover.conditions


def test_a_leader_that_hears_nobody_resigns() -> None:
    rig = running(serving(A), serving(B), serving(C), nodes=(A, B, C))
    for _ in range(30):
        effects = rig.tick(0.5)
        assert not [one for one in commits(effects) if one.writes[0].key.startswith(b"nodes/")]
        if any(isinstance(effect, Resign) for effect in effects):
            break
    else:
        raise AssertionError("it should have resigned")
    assert rig.now >= 108


# J1, S5, DX-20


def test_the_next_epoch_is_newer_than_what_a_journal_has_seen() -> None:
    rig = running(serving(A))
    rig.store.put(wish_key(S0), b"node-b")
    rig.land(rig.watch())
    rig.step(ReleasedBy(A, S0, 1, floor=7))
    rig.land(rig.tick(0.005))
    assert rig.store.entry(0).epoch == 8


def unlisted(*entries: Entry) -> Rig:
    """A leader that has not listed the store yet."""
    store = TinyStore(len(entries))
    for inc in (A, B):
        store.join(inc)
    store.write(*entries)
    return Rig(store)


def test_what_a_journal_has_seen_counts_if_the_listing_comes_after_it() -> None:
    rig = unlisted(serving(A))
    rig.step(ReleasedBy(A, S0, 1, floor=7))
    rig.land(rig.start(A, B))
    assert rig.store.entry(0).epoch == 8


@pytest.mark.parametrize(("stranger", "epoch"), [(B, 1), (B, 9), (A, 2), (C, 1)])
def test_a_stranger_raises_no_epoch_of_a_leader_without_a_listing(
    stranger: Incarnation, epoch: int
) -> None:
    rig = unlisted(serving(A), serving(B))
    rig.store.put(wish_key(S0), b"node-b")
    rig.step(ReleasedBy(stranger, S0, epoch, floor=7))
    rig.land(rig.start(A, B))
    assert rig.store.entry(0).state == "moving", "nobody has released it"
    rig.step(ReleasedBy(A, S0, 1))
    rig.land(rig.tick(0.005))
    assert rig.store.entry(0).epoch == 2


def test_what_a_journal_has_seen_counts_before_the_leader_knows_of_its_own_commit() -> None:
    rig = running(serving(A))
    rig.store.put(wish_key(S0), b"node-b")
    rig.land(rig.watch())
    rig.step(ReleasedBy(A, S0, 1))
    (commit,) = commits(rig.tick(0.005))
    outcome = rig.store.commit(commit.conditions, commit.writes)
    # The new owner knows the entry from its watch, and its journal has refused its claim.
    rig.step(ReleasedBy(B, S0, 2, floor=7))
    rig.land(rig.step(CommitDone(commit.txn, outcome)))
    assert rig.store.entry(0).epoch == 8


def test_after_a_rewind_nothing_is_taken_over_for_a_ttl_and_then_the_note_goes() -> None:
    rig = running(serving(B), serving(A))
    rig.store.put(REWOUND_KEY, b"x")
    rig.watch()
    rig.store.delete(node_key(B))
    assert commits(rig.watch()) == []
    effects: list[CoordinatorEffect] = []
    while not commits(effects):
        effects = rig.tick(0.5)
    assert rig.now >= 106.006
    writes = [write for commit in commits(effects) for write in commit.writes]
    assert Delete(REWOUND_KEY) in writes
    assert any(write.key == BLOCK for write in writes)


def test_a_users_function_is_asked_waited_for_and_obeyed() -> None:
    rig = running(serving(A), serving(A))
    rig.machine = Coordinator(A, rig.revision, SETTINGS, Random(1), CUSTOM)
    rig.start(A, B)
    effects = rig.tick(1.0)
    (asked,) = [effect for effect in effects if isinstance(effect, AskStrategy)]
    assert asked.situation.homes == ("node-a", "node-a")
    assert [seat.node for seat in asked.situation.seats] == ["node-a", "node-b"]
    assert commits(effects) == []
    rig.land(rig.step(StrategyAnswered(asked.situation, {0: "node-b"})))
    assert rig.store.entry(0).to == B
    assert rig.store.entry(1).state == "serving"


def test_a_users_function_that_fails_leaves_the_homeless_to_the_default() -> None:
    rig = running(serving(A), serving(A), nodes=(A, B))
    rig.store.write(serving(C, 2, 2), serving(A))
    rig.machine = Coordinator(A, rig.revision, SETTINGS, Random(1), CUSTOM)
    effects = rig.start(A, B)
    (asked,) = [effect for effect in effects if isinstance(effect, AskStrategy)]
    rig.land(rig.step(StrategyAnswered(asked.situation, None)))
    assert rig.store.entry(0).owner == B


def test_deaths_are_removed_from_the_store_once_they_are_long_ago() -> None:
    rig = running(serving(A), serving(A), serving(B), serving(B))
    rig.store.delete(node_key(B))
    rig.land(rig.watch())
    assert rig.store.entry(2).deaths == 1
    rig.watch()
    effects: list[CoordinatorEffect] = []
    while not commits(effects):
        effects = rig.tick(1.0)
        assert rig.now < 170
    assert rig.now >= 160
    rig.land(effects)
    entry = rig.store.entry(2)
    assert (entry.deaths, entry.owner, entry.epoch, entry.state) == (0, A, 2, "serving")
