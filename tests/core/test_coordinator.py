"""The coordinator: single steps, and whole leaderships against a store that loses answers."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from domicile.config import Settings
from domicile.core.coordinator import (
    Arm,
    Changed,
    Commit,
    CommitDone,
    Coordinator,
    Effect,
    Event,
    Heard,
    Listed,
    ReadBack,
    ReleasedBy,
    Reread,
    Resign,
    RevertAsked,
    Tell,
    Tick,
)
from domicile.core.ids import (
    CONFIG_KEY,
    LEADER_KEY,
    NOBODY,
    Incarnation,
    ShardKey,
    drain_key,
    node_key,
    release_key,
    wish_key,
)
from domicile.core.records import ConfigRecord, LeaderRecord, NodeRecord, encode_record
from domicile.core.shardmap import Block, Entry, block_key, decode_block, encode_block
from domicile.core.txn import (
    MAX_OPERATIONS,
    Absent,
    At,
    Change,
    Changes,
    Committed,
    Condition,
    Conflict,
    Delete,
    Item,
    Listing,
    Outcome,
    Present,
    Put,
    Unknown,
    Write,
)

A, B, C = (Incarnation(name) for name in "abc")
SETTINGS = Settings()
BLOCK = block_key("r", 0)


class TinyStore:
    """Conditional commits and a log, nothing else."""

    def __init__(self, shards: int) -> None:
        self.revision = 0
        self.items: dict[bytes, Item] = {}
        self.log: list[Changes] = []
        self.put(CONFIG_KEY, encode_record(ConfigRecord({"r": shards})))

    def holds(self, condition: Condition) -> bool:
        item = self.items.get(condition.key)
        match condition:
            case At(_, revision):
                return item is not None and item.revision == revision
            case Absent():
                return item is None
            case Present():
                return item is not None

    def commit(self, conditions: Iterable[Condition], writes: Iterable[Write]) -> Outcome:
        for condition in conditions:
            if not self.holds(condition):
                return Conflict(condition.key)
        self.revision += 1
        changes: list[Change] = []
        for write in writes:
            old = self.items.pop(write.key, None)
            if isinstance(write, Put):
                created = old.created if old else self.revision
                item = Item(write.key, write.value, created, self.revision)
                self.items[write.key] = item
                changes.append(Change(write.key, item))
            elif old is not None:
                changes.append(Change(write.key, None))
        self.log.append(Changes(self.revision, tuple(changes)))
        return Committed(self.revision)

    def put(self, key: bytes, value: bytes) -> int:
        self.commit((), (Put(key, value),))
        return self.revision

    def delete(self, key: bytes) -> None:
        self.commit((), (Delete(key),))

    def join(self, inc: Incarnation, status: str = "up", node: str = "") -> None:
        record = NodeRecord(node or f"node-{inc}", inc, "x", ("r",), (), 6.0, status=status)
        self.put(node_key(inc), encode_record(record))

    def lead(self, inc: Incarnation) -> int:
        return self.put(LEADER_KEY, encode_record(LeaderRecord(inc, f"node-{inc}")))

    def listing(self) -> Listing:
        return Listing(self.revision, tuple(self.items[key] for key in sorted(self.items)))

    def entry(self, shard: int) -> Entry:
        item = self.items.get(block_key("r", shard // 64))
        return decode_block(item.value).entries[shard % 64] if item else Entry()

    def write(self, *entries: Entry) -> None:
        self.put(BLOCK, encode_block(Block("seed", entries)))


class Rig:
    """One coordinator on one store, its commits under the test's control."""

    def __init__(self, store: TinyStore, limits: Settings = SETTINGS) -> None:
        self.store, self.now, self.seen = store, 100.0, 0
        self.revision = store.lead(A)
        self.machine = Coordinator(A, self.revision, limits, Random(1))

    def step(self, event: Event) -> list[Effect]:
        return list(self.machine.step(event, self.now))

    def start(self, *heard: Incarnation) -> list[Effect]:
        for node in heard:
            self.step(Heard(node))
        self.seen = self.store.revision
        return self.step(Listed(self.store.listing()))

    def watch(self) -> list[Effect]:
        effects: list[Effect] = []
        for changes in self.store.log:
            if changes.revision > self.seen:
                self.seen = changes.revision
                effects += self.step(Changed(changes))
        return effects

    def tick(self, seconds: float) -> list[Effect]:
        self.now += seconds
        return self.step(Tick())

    def land(self, effects: list[Effect]) -> list[Effect]:
        (commit,) = commits(effects)
        outcome = self.store.commit(commit.conditions, commit.writes)
        return self.step(CommitDone(commit.txn, outcome))


def commits(effects: list[Effect]) -> list[Commit]:
    return [effect for effect in effects if isinstance(effect, Commit)]


def told(effects: list[Effect]) -> list[tuple[Incarnation, int, str, int]]:
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
    rig.step(Heard(Incarnation("n29")))
    assert len(commits(rig.watch())) == 1


def test_a_new_leader_listens_before_it_places() -> None:
    store = TinyStore(2)
    store.join(A)
    store.join(B)
    store.write(serving(C), serving(A))
    rig = Rig(store)
    assert commits(rig.start()) == []
    assert [type(one) for one in rig.step(Heard(B))] == [Commit, Arm]


def test_a_silent_node_delays_a_new_leader_only_briefly() -> None:
    store = TinyStore(2)
    store.join(A)
    store.join(B)
    store.write(serving(C), serving(A))
    rig = Rig(store)
    assert rig.start()[-1] == Arm(100.5)
    rig.land(rig.tick(0.5))
    assert store.entry(0) == Entry(A, 2, "serving", NOBODY, 2, "node-a")


def test_takeover_is_one_commit_conditional_on_the_absence() -> None:
    rig = running(serving(B), serving(B), serving(A))
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
    rig.land(rig.watch())
    assert rig.store.entry(0).owner == B
    assert key not in rig.store.items


def test_obsolete_release_keys_are_removed_once() -> None:
    rig = running(serving(A, 3))
    keys = [release_key(A, S0, 2), release_key(B, S0, 1)]
    for key in keys:
        rig.store.put(key, b"")
    effects = rig.watch()
    (commit,) = commits(effects)
    assert commit.conditions == (At(LEADER_KEY, rig.revision),)
    rig.land(effects)
    rig.tick(1.0)
    assert commits(rig.tick(1.0)) == []
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


# whole leaderships


@dataclass
class Owner:
    """A node's shards as in H9-H11: phase (open, draining, released) and epoch of each."""

    phases: dict[int, tuple[str, int]] = field(default_factory=dict[int, tuple[str, int]])
    seen: dict[int, int] = field(default_factory=dict[int, int])

    def see(self, me: Incarnation, shard: int, entry: Entry) -> None:
        if entry.change <= self.seen.get(shard, 0):
            return
        self.seen[shard] = entry.change
        phase, epoch = self.phases.get(shard, ("closed", 0))
        if entry.owner != me:
            if phase != "released":
                self.phases.pop(shard, None)
        elif entry.state == "moving":
            if phase == "open" and epoch == entry.epoch:
                self.phases[shard] = ("draining", epoch)
            elif entry.epoch > epoch:
                self.phases[shard] = ("released", entry.epoch)
        elif entry.epoch > epoch or (entry.epoch == epoch and phase == "draining"):
            self.phases[shard] = ("open", entry.epoch)


@dataclass
class Leader:
    machine: Coordinator
    seen: int
    waiting: list[Commit] = field(default_factory=list[Commit])
    reading: list[ReadBack] = field(default_factory=list[ReadBack])
    tick_at: float = float("inf")
    over: bool = False


class Turmoil:
    """Several leaderships at once, a store that answers late or never, owners that come and go."""

    def __init__(self, seed: int, shards: int) -> None:
        self.random, self.shards, self.now = Random(seed), shards, 100.0
        self.store = TinyStore(shards)
        self.owners: dict[Incarnation, Owner] = {}
        self.leaders: list[Leader] = []
        self.zombies: list[Commit] = []
        self.released: dict[tuple[int, Incarnation, int], None] = {}
        self.ever: dict[tuple[int, int], Incarnation] = {}
        self.history: dict[int, list[Entry]] = {shard: [] for shard in range(shards)}
        self.names = 0
        self.join()
        self.elect()

    # checks

    def apply(self, commit: Commit) -> Outcome:
        before = [self.store.entry(shard) for shard in range(self.shards)]
        there = dict(self.store.items)
        outcome = self.store.commit(commit.conditions, commit.writes)
        if isinstance(outcome, Committed):
            for shard, old in enumerate(before):
                new = self.store.entry(shard)
                if new != old:
                    self.judge(shard, old, new, there)
        return outcome

    def judge(self, shard: int, old: Entry, new: Entry, there: dict[bytes, Item]) -> None:
        assert new.change == old.change + 1
        self.history[shard].append(new)
        if (new.owner, new.epoch) == (old.owner, old.epoch):
            return
        assert new.epoch == old.epoch + 1
        assert self.ever.setdefault((shard, new.epoch), new.owner) == new.owner
        assert node_key(new.owner) in there
        released = (shard, old.owner, old.epoch) in self.released
        gone = node_key(old.owner) not in there
        assert released or gone, f"C4: {old} became {new}"

    def one_home(self) -> None:
        for shard in range(self.shards):
            homes = [
                inc
                for inc, owner in self.owners.items()
                if owner.phases.get(shard, ("",))[0] in ("open", "draining")
            ]
            assert len(homes) <= 1, f"I1: shard {shard} is open at {homes}"

    # verbs

    def feed(self, leader: Leader, event: Event) -> None:
        if leader.over:
            assert leader.machine.step(event, self.now) == ()
            return
        for effect in leader.machine.step(event, self.now):
            match effect:
                case Commit():
                    assert len(effect.conditions) + len(effect.writes) <= MAX_OPERATIONS
                    leader.waiting.append(effect)
                    keys = [one.writes[0].key for one in leader.waiting if one.conditions[1:]]
                    assert len(dict.fromkeys(keys)) == len(keys), "H12: two commits on a block"
                case ReadBack():
                    leader.reading.append(effect)
                case Tell():
                    assert effect.entry in self.history[effect.shard.shard], "I3"
                    if effect.to in self.owners and self.random.random() < 0.7:
                        self.owners[effect.to].see(effect.to, effect.shard.shard, effect.entry)
                case Arm(at):
                    leader.tick_at = at
                case Resign():
                    leader.over = True

    def join(self) -> None:
        self.names += 1
        inc = Incarnation(f"i{self.names:03}")
        self.owners[inc] = Owner()
        self.store.join(inc, node=f"node-{self.names % 5}")

    def elect(self) -> None:
        inc = self.random.choice(list(self.owners))
        leader = Leader(
            Coordinator(inc, self.store.lead(inc), SETTINGS, self.random), self.store.revision
        )
        self.leaders = [*self.leaders[-1:], leader]
        self.feed(leader, Listed(self.store.listing()))

    def answer(self, leader: Leader, fault: str) -> None:
        if leader.waiting:
            commit = leader.waiting.pop(self.random.randrange(len(leader.waiting)))
            outcome: Outcome = Unknown()
            if fault == "zombie":
                self.zombies.append(commit)
            elif fault != "lost":
                outcome = self.apply(commit)
            self.feed(leader, CommitDone(commit.txn, Unknown() if fault else outcome))

    def read(self, leader: Leader) -> None:
        if leader.reading:
            read = leader.reading.pop(0)
            self.feed(leader, Reread(read.txn, self.store.items.get(read.key)))

    def watch(self, leader: Leader) -> None:
        if leader.seen < self.store.revision:
            changes = next(one for one in self.store.log if one.revision > leader.seen)
            leader.seen = changes.revision
            self.feed(leader, Changed(changes))

    def node(self, inc: Incarnation, owner: Owner) -> None:
        """A node looks at one shard, and says what it has to say."""
        shard = self.random.randrange(self.shards)
        owner.see(inc, shard, self.store.entry(shard))
        phase, epoch = owner.phases.get(shard, ("closed", 0))
        key = ShardKey("r", shard)
        if phase == "draining":
            if self.random.random() < 0.2:
                self.feed(self.random.choice(self.leaders), RevertAsked(inc, key, epoch))
                return
            owner.phases[shard] = ("released", epoch)
            self.released[shard, inc, epoch] = None
        elif phase == "released":
            self.released[shard, inc, epoch] = None
            if self.store.entry(shard).epoch > epoch:
                del owner.phases[shard]
            elif self.random.random() < 0.1:
                self.store.put(release_key(inc, key, epoch), b"")
            for leader in self.leaders:
                self.feed(leader, ReleasedBy(inc, key, epoch))

    def operate(self) -> None:
        shard = ShardKey("r", self.random.randrange(self.shards))
        node = f"node-{self.random.randrange(5)}"
        match self.random.randrange(5):
            case 0:
                self.store.put(wish_key(shard), node.encode())
            case 1:
                self.store.delete(wish_key(shard))
            case 2:
                self.store.put(drain_key(node), b"")
            case 3:
                self.store.delete(drain_key(node))
            case _:
                inc = self.random.choice(list(self.owners))
                record = self.store.items[node_key(inc)].value.replace(b'"up"', b'"leaving"')
                if b"status" not in record and len(self.owners) > 2:
                    record = record[:-1] + b',"status":"leaving"}'
                self.store.put(node_key(inc), record)

    def step(self) -> None:
        leader = self.random.choice(self.leaders)
        inc = self.random.choice(list(self.owners))
        roll = self.random.random()
        if roll < 0.25:
            self.watch(leader)
        elif roll < 0.45:
            fault = self.random.choice(["", "", "", "lost", "answer", "zombie"])
            self.answer(leader, fault)
        elif roll < 0.5:
            self.read(leader)
        elif roll < 0.75:
            self.node(inc, self.owners[inc])
        elif roll < 0.85:
            self.now += self.random.choice([0.001, 0.005, 0.1, 1.0])
            for one in self.leaders:
                if self.now >= one.tick_at:
                    self.feed(one, Tick())
        elif roll < 0.92:
            for heard in self.owners:
                self.feed(leader, Heard(heard))
        elif roll < 0.94 and self.zombies:
            self.apply(self.zombies.pop(0))
        elif roll < 0.96:
            self.operate()
        elif roll < 0.97 and len(self.owners) < 6:
            self.join()
        elif roll < 0.98 and len(self.owners) > 1:
            self.store.delete(node_key(inc))
            del self.owners[inc]
        elif roll < 0.99:
            self.elect()
        self.one_home()

    def calm(self) -> None:
        """No more faults: every wish to be elsewhere is removed and time passes."""
        for key in [key for key in self.store.items if key.startswith((b"wish/", b"drain/"))]:
            self.store.delete(key)
        self.join()
        self.elect()
        leader = self.leaders[-1]
        self.leaders = [leader]
        for _ in range(400):
            for inc, owner in self.owners.items():
                self.feed(leader, Heard(inc))
                for _ in range(self.shards):
                    self.node(inc, owner)
            while leader.waiting or leader.reading or leader.seen < self.store.revision:
                self.answer(leader, "")
                self.read(leader)
                self.watch(leader)
            self.now = max(self.now + 0.01, min(leader.tick_at, self.now + 1.0))
            if self.now >= leader.tick_at:
                self.feed(leader, Tick())
            self.one_home()


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32), st.sampled_from([3, 10, 70]))
def test_no_epoch_has_two_owners_whatever_happens(seed: int, shards: int) -> None:
    turmoil = Turmoil(seed, shards)
    for _ in range(400):
        turmoil.step()


@settings(max_examples=15, deadline=None)
@given(st.integers(0, 2**32))
def test_after_turmoil_every_shard_is_at_home_and_even(seed: int) -> None:
    turmoil = Turmoil(seed, 12)
    for _ in range(300):
        turmoil.step()
    turmoil.calm()
    records = {inc: turmoil.store.items[node_key(inc)].value for inc in turmoil.owners}
    counts = {inc: 0 for inc, value in records.items() if b"leaving" not in value}
    for shard in range(turmoil.shards):
        entry = turmoil.store.entry(shard)
        assert entry.state == "serving"
        assert turmoil.owners[entry.owner].phases[shard] == ("open", entry.epoch)
        counts[entry.owner] += 1
    assert max(counts.values()) - min(counts.values()) <= 1
    assert not [key for key in turmoil.store.items if key.startswith(b"release/")]
