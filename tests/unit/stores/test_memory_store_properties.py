"""The memory store against a model: plain snapshots of the whole state after every commit."""

from __future__ import annotations

import asyncio

from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from domicile.core.state.txn import (
    Absent,
    At,
    Changes,
    Committed,
    Condition,
    Conflict,
    Delete,
    Present,
    Put,
    Write,
)
from domicile.stores.memory.store import MemoryStore
from domicile.testing.sim.clock import ManualClock

KEYS = [b"a", b"b", b"n/1", b"n/2", b"n/3"]
LEASES = ["l", "m"]

keys = st.sampled_from(KEYS)
leases = st.sampled_from(LEASES)
conditions = st.lists(
    st.one_of(keys.map(Absent), keys.map(Present), st.builds(At, keys, st.integers(1, 30))),
    max_size=2,
)
writes = st.lists(
    st.one_of(
        st.builds(Put, keys, st.binary(max_size=2), st.one_of(st.none(), leases)),
        keys.map(Delete),
    ),
    max_size=3,
    unique_by=lambda write: write.key,
)

# key -> (value, created, revision, lease)
State = dict[bytes, tuple[bytes, int, int, str | None]]


def now(coroutine):
    """The result of a coroutine that never waits."""
    try:
        coroutine.send(None)
    except StopIteration as done:
        return done.value
    raise AssertionError("a memory store answers at once")


class StoreMachine(RuleBasedStateMachine):
    @initialize(late=st.booleans())
    def start(self, late: bool) -> None:
        self.timers = not late
        self.clock = ManualClock()
        self.memory = MemoryStore(self.clock)
        self.store = self.memory.client("a")
        self.state: State = {}
        self.past: list[State] = [{}]
        self.deadlines: dict[str, tuple[float, float]] = {}
        self.watch = self.store.watch(b"n/", 0)
        self.seen: State = {}
        self.seen_revision = 0

    def record(self, state: State) -> None:
        if state != self.state:
            self.state = state
            self.past.append(state)

    def end(self, lease: str) -> None:
        self.deadlines.pop(lease, None)
        self.record({k: v for k, v in self.state.items() if v[3] != lease})

    @rule(lease=leases, ttl_s=st.integers(1, 4))
    def grant(self, lease: str, ttl_s: int) -> None:
        assert now(self.store.grant(lease, float(ttl_s))) == ttl_s
        self.deadlines[lease] = (self.clock.now() + ttl_s, float(ttl_s))

    @rule(lease=leases)
    def renew(self, lease: str) -> None:
        ttl_s = now(self.store.renew(lease))
        if lease in self.deadlines:
            assert ttl_s == self.deadlines[lease][1]
            self.deadlines[lease] = (self.clock.now() + ttl_s, ttl_s)
        else:
            assert ttl_s is None

    @rule(lease=leases)
    def revoke(self, lease: str) -> None:
        now(self.store.revoke(lease))
        self.end(lease)

    @rule(seconds=st.integers(1, 3))
    def advance(self, seconds: int) -> None:
        self.clock.advance(float(seconds), timers=self.timers)
        due = [lease for lease, (at, _) in self.deadlines.items() if at <= self.clock.now()]
        for lease in sorted(due, key=lambda lease: self.deadlines[lease][0]):
            self.end(lease)

    @rule(conditions=conditions, writes=writes)
    def commit(self, conditions: list[Condition], writes: list[Write]) -> None:
        wrong: bytes | None = None
        for condition in conditions:
            held = self.state.get(condition.key)
            match condition:
                case Absent():
                    holds = held is None
                case Present():
                    holds = held is not None
                case At():
                    holds = held is not None and held[2] == condition.revision
            if not holds:
                wrong = condition.key
                break
        if wrong is None:
            dead = [w.key for w in writes if isinstance(w, Put) and self.dead(w.lease)]
            wrong = dead[0] if dead else None
        outcome = now(self.store.commit(conditions, writes))
        if wrong is not None:
            assert outcome == Conflict(wrong)
            return
        revision = len(self.past)
        state = dict(self.state)
        for write in writes:
            if isinstance(write, Put):
                created = state[write.key][1] if write.key in state else revision
                state[write.key] = (write.value, created, revision, write.lease)
            else:
                state.pop(write.key, None)
        self.record(state)
        assert outcome == Committed(len(self.past) - 1)

    def dead(self, lease: str | None) -> bool:
        return lease is not None and lease not in self.deadlines

    @rule()
    @precondition(lambda self: self.changed())
    def follow(self) -> None:
        changes = now(anext(self.watch))
        self.apply(changes)
        assert self.seen == self.part(self.past[changes.revision])
        between = self.past[self.seen_revision : changes.revision]
        assert all(self.part(state) == self.part(between[0]) for state in between)
        self.seen_revision = changes.revision

    def apply(self, changes: Changes) -> None:
        assert changes.revision > self.seen_revision
        for change in changes.changes:
            if change.item is None:
                del self.seen[change.key]
            else:
                item = change.item
                lease = self.past[changes.revision][change.key][3]
                self.seen[change.key] = (item.value, item.created, item.revision, lease)

    def part(self, state: State) -> State:
        return {key: held for key, held in state.items() if key.startswith(b"n/")}

    def changed(self) -> bool:
        return self.part(self.state) != self.seen

    @invariant()
    def the_listing_is_the_state(self) -> None:
        listing = now(self.store.list(b""))
        assert listing.revision == len(self.past) - 1
        found = [(i.key, i.value, i.created, i.revision) for i in listing.items]
        assert found == [(k, v[0], v[1], v[2]) for k, v in sorted(self.state.items())]


TestStoreMachine = StoreMachine.TestCase
TestStoreMachine.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)


@settings(max_examples=50, deadline=None)
@given(
    writes=st.lists(st.tuples(keys, st.booleans()), max_size=25),
    turns=st.lists(st.integers(0, 2), max_size=25),
    breaks=st.lists(st.integers(0, 24), max_size=3),
)
def test_readers_of_any_speed_see_every_change(
    writes: list[tuple[bytes, bool]], turns: list[int], breaks: list[int]
) -> None:
    """Followers that are cancelled and resume where they were miss nothing and repeat nothing."""

    async def scenario() -> None:
        memory = MemoryStore(ManualClock())
        store = memory.client("a")
        seen: list[int] = []

        async def follow() -> None:
            async for changes in store.watch(b"", seen[-1] if seen else 0):
                seen.append(changes.revision)

        follower = asyncio.create_task(follow())
        for index, (key, delete) in enumerate(writes):
            await store.commit([], [Delete(key) if delete else Put(key, b"")])
            for _ in range(turns[index] if index < len(turns) else 0):
                await asyncio.sleep(0)
            if index in breaks:
                follower.cancel()
                await asyncio.sleep(0)
                follower = asyncio.create_task(follow())
        for _ in range(3):
            await asyncio.sleep(0)
        assert seen == list(range(1, memory.revision + 1))
        follower.cancel()

    asyncio.run(scenario())
