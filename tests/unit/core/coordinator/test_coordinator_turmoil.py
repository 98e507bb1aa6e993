"""Whole leaderships at once against a store that answers late, wrongly or never (I1, I3, C4)."""

from __future__ import annotations

from dataclasses import dataclass, field
from random import Random
from unittest.mock import patch

from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_store import TinyStore

from domicile.core.coordinator import machine
from domicile.core.coordinator.events import (
    Changed,
    Commit,
    CommitDone,
    CoordinatorEvent,
    Heard,
    Listed,
    ReadBack,
    ReleasedBy,
    Reread,
    Resign,
    RevertAsked,
    StoreReturned,
    Tell,
    Tick,
)
from domicile.core.coordinator.machine import Coordinator
from domicile.core.ids import Incarnation, ShardKey
from domicile.core.machines import Arm
from domicile.core.placement import plan
from domicile.core.state.keys import drain_key, node_key, release_key, wish_key
from domicile.core.state.shardmap import Entry
from domicile.core.state.txn import MAX_OPERATIONS, Committed, Item, Outcome, Unknown
from domicile.settings import Settings

SETTINGS = Settings()


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


class Restless(Coordinator):
    """Plans from scratch at each balancing round, whether anything has changed or not."""

    def _rests(self, now: float) -> bool:
        return False


@dataclass
class Leader:
    machine: Coordinator
    restless: Coordinator
    """Gets the same events, and must decide the same at the same time (I8)."""
    inc: Incarnation
    seen: int
    waiting: list[Commit] = field(default_factory=list[Commit])
    reading: list[ReadBack] = field(default_factory=list[ReadBack])
    tick_at: float = float("inf")
    over: bool = False


class Turmoil:
    """Several leaderships at once, a store that answers late or never, owners that come and go."""

    limits = SETTINGS
    compares = True
    """Whether restless machines go along; not with tiny slices, as they pause at other times."""

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

    def feed(self, leader: Leader, event: CoordinatorEvent) -> None:
        if leader.over:
            assert leader.machine.step(event, self.now) == ()
            return
        effects = leader.machine.step(event, self.now)
        if self.compares:
            assert effects == leader.restless.step(event, self.now)
        for effect in effects:
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
        revision, seed = self.store.lead(inc), self.random.random()
        planner, restless = (
            kind(inc, revision, self.limits, Random(seed)) for kind in (Coordinator, Restless)
        )
        leader = Leader(planner, restless, inc, self.store.revision)
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


class Quiet(Turmoil):
    """One leadership and long times in which little happens; nodes are silent now and then."""

    limits = Settings(drain_deadline_s=2.0, poison_window_s=5.0, settle_max_s=3.0)

    def join(self) -> None:
        self.names += 1
        inc = Incarnation(f"i{self.names:03}")
        self.owners[inc] = Owner()
        version = self.random.choice(["1", "1", "2"])
        self.store.join(inc, node=f"node-{self.names % 5}", version=version)

    def step(self) -> None:
        leader = self.leaders[-1]
        roll = self.random.random()
        if roll < 0.6:
            self.now += self.random.choice([0.2, 1.0, 1.0, 2.1])
            self.feed(leader, Tick())
        elif roll < 0.8:
            for inc in self.owners:
                if self.random.random() < 0.8:
                    self.feed(leader, Heard(inc))
        elif roll < 0.9:
            for inc, owner in self.owners.items():
                self.node(inc, owner)
        elif roll < 0.93:
            self.operate()
        elif roll < 0.95 and len(self.owners) < 5:
            self.join()
        elif roll < 0.96 and len(self.owners) > 2:
            inc = self.random.choice([inc for inc in self.owners if inc != leader.inc])
            self.store.delete(node_key(inc))
            del self.owners[inc]
        elif roll < 0.97:
            self.feed(leader, StoreReturned())
        while leader.waiting or leader.reading or leader.seen < self.store.revision:
            self.answer(leader, self.random.choice(["", "", "", "lost"]))
            self.read(leader)
            self.watch(leader)
        for inc in [inc for inc in self.owners if node_key(inc) not in self.store.items]:
            del self.owners[inc]
        if not self.owners:
            self.join()


@settings(max_examples=100, deadline=None)
@given(st.integers(0, 2**32))
def test_a_leader_that_rests_decides_as_one_that_plans_again_and_again(seed: int) -> None:
    quiet = Quiet(seed, 8)
    for _ in range(200):
        quiet.step()
        if quiet.leaders[-1].over:
            quiet.elect()


SLICES = st.sampled_from([1, machine.SLICE])
"""With 1 a round pauses wherever it can, and anything may happen meanwhile."""


@settings(max_examples=100, deadline=None)
@given(st.integers(0, 2**32), st.sampled_from([3, 10, 70]), SLICES)
def test_no_epoch_has_two_owners_whatever_happens(seed: int, shards: int, of: int) -> None:
    turmoil = Turmoil(seed, shards)
    turmoil.compares = of > 1
    with patch.object(machine, "SLICE", of), patch.object(plan, "PAUSE", of):
        for _ in range(400):
            turmoil.step()


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 2**32), SLICES)
def test_after_turmoil_every_shard_is_at_home_and_even(seed: int, of: int) -> None:
    turmoil = Turmoil(seed, 12)
    turmoil.compares = of > 1
    with patch.object(machine, "SLICE", of), patch.object(plan, "PAUSE", of):
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
