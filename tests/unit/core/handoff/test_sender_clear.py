"""The short way out is the long one: `clear` and `post` against `submit`.

Two senders live through the same random history; one of them is asked for a clear home before it
is given a message. After each step nobody can tell them apart.
"""

from __future__ import annotations

from typing import Any

from hypothesis import event, example, given, settings
from hypothesis import strategies as st

from domicile.core.handoff.pending import GiveUp, HoldLimits, Pending, SenderEffect, WriteRequest
from domicile.core.handoff.sender import Sender
from domicile.core.ids import EntityKey, Incarnation, ShardKey
from domicile.core.state.shardmap import Entry

A, B = Incarnation("a"), Incarnation("b")
SHARD, ELSEWHERE = ShardKey("r", 0), ShardKey("r", 1)
ENTITIES = (EntityKey("cart", "a"), EntityKey("cart", "b"))
LIMITS = HoldLimits(buffer=100, hold_bytes=10_000, window=3, hold_timeout_s=1.0)
SIZE_BYTES = 10


class Pair:
    """`plain` knows the long way only, `quick` takes the short one wherever it may."""

    def __init__(self) -> None:
        self.moving: dict[ShardKey, None] = {}
        self.up: dict[Incarnation, None] = {A: None, B: None}
        self.plain, self.quick = (
            Sender(SHARD, LIMITS, self.moving.__contains__, self.up.__contains__) for _ in range(2)
        )
        self.now = 0.0
        self.shortcuts = 0
        self.see(A, 1, "serving")
        self.message(ENTITIES[0], True, (), started=False)

    def both(self, effects: tuple[SenderEffect, ...], others: tuple[SenderEffect, ...]) -> None:
        assert list(map(shown, effects)) == list(map(shown, others))

    def each(self, verb: str, *args: Any) -> None:
        self.both(getattr(self.plain, verb)(*args), getattr(self.quick, verb)(*args))

    def numbers(self) -> list[int]:
        return sorted(self.plain.written)

    # what can happen

    def message(
        self, entity: EntityKey, ask: bool, chain: tuple[ShardKey, ...], *, started: bool
    ) -> None:
        """A new one; a local ask may have started by the time that it is noted."""
        numbers = self.plain.number(), self.quick.number()
        assert numbers[0] == numbers[1]
        pending, other = (
            Pending(n, entity, ask, chain if ask else (), SIZE_BYTES) for n in numbers
        )
        before = image(self.quick)
        home = self.quick.clear()
        assert image(self.quick) == before, "looking changes nothing"
        effects = self.plain.submit(pending, self.now)
        if home is None:
            self.both(effects, self.quick.submit(other, self.now))
            return
        self.shortcuts += 1
        change = self.quick.entry.change
        finishing = self.quick.finishing(other)
        opened = self.quick.open + 1
        assert effects == (
            WriteRequest(pending, home.owner, home.epoch, change, finishing, opened),
        )
        other.to = home.owner
        if started and ask:
            assert self.plain.begun(home.owner, pending.n, self.now) == ()
            other.started = True
        self.quick.post(other)

    def see(self, owner: Incarnation, newer: int, state: Any) -> None:
        known = self.plain.entry
        self.each(
            "see", Entry(owner, known.epoch + newer, state, change=known.change + 1), self.now
        )

    def begun(self, which: int) -> None:
        for n in self.numbers()[which : which + 1]:
            self.each("begun", self.plain.written[n].to, n, self.now)

    def answered(self, which: int) -> None:
        for n in self.numbers()[which : which + 1]:
            peer = self.plain.written[n].to
            assert peer is not None
            pending, effects = self.plain.answered(peer, n, self.now)
            other, others = self.quick.answered(peer, n, self.now)
            assert (pending is None) == (other is None)
            self.both(effects, others)

    def returned(self, first: int, released: bool) -> None:
        """The owner sends back what has not started, from some message on."""
        ns = [n for n in self.numbers()[first:] if not self.plain.written[n].started]
        peer = self.plain.written[ns[0]].to if ns else self.plain.entry.owner
        self.each("returned", peer, ns, self.plain.entry, released, self.now)

    def flushed(self, late: bool, released: bool) -> None:
        if self.plain.key is not None:
            peer, id = self.plain.key.owner, self.plain.flush_id + late
            self.each("flushed", peer, id, self.plain.entry, released, self.now)

    def withdraw(self, which: int, queued: bool) -> None:
        """A caller waits no more."""
        pairs = [
            (pending, other)
            for pending, other in (
                zip(self.plain.queue, self.quick.queue, strict=True)
                if queued
                else [(self.plain.written[n], self.quick.written[n]) for n in self.numbers()]
            )
            if not pending.resolved
        ]
        for pending, other in pairs[which : which + 1]:
            unwritten, effects = self.plain.withdraw(pending, self.now)
            also, others = self.quick.withdraw(other, self.now)
            assert unwritten == also
            self.both(effects, others)

    def link_lost(self, peer: Incarnation) -> None:
        self.each("link_lost", peer, (), self.now)

    def departing(self, peer: Incarnation) -> None:
        self.each("departing", peer, self.now)

    def tick(self, later_s: float) -> None:
        self.now += later_s
        self.each("tick", self.now)

    def toggle_up(self, peer: Incarnation) -> None:
        if self.up.pop(peer, self) is self:
            self.up[peer] = None
        self.each("look", self.now)

    def toggle_moving(self) -> None:
        if self.moving.pop(ELSEWHERE, self) is self:
            self.moving[ELSEWHERE] = None
        self.each("look", self.now)


def shown(effect: SenderEffect) -> Any:
    """An effect, with its message as a number: both senders have objects of their own."""
    if isinstance(effect, WriteRequest):
        return ("write", effect.pending.n, effect.to, effect.epoch, effect.finishing, effect.open)
    if isinstance(effect, GiveUp):
        return ("give up", effect.pending.n)
    return effect


def image(sender: Sender) -> dict[str, Any]:
    """All that a sender is."""
    seen: dict[str, Any] = {name: getattr(sender, name) for name in sender.__slots__}
    del seen["is_moving"], seen["is_up"], seen["limits"]
    seen["queue"] = [shown_pending(pending) for pending in sender.queue]
    seen["written"] = [shown_pending(sender.written[n]) for n in sorted(sender.written)]
    return seen


def shown_pending(pending: Pending) -> tuple[Any, ...]:
    return (
        pending.n,
        pending.entity,
        pending.to,
        pending.started,
        pending.resolved,
        pending.urgent,
    )


entities, peers, some = st.sampled_from(ENTITIES), st.sampled_from((A, B)), st.integers(0, 4)
chains = st.sampled_from(((), (), (SHARD,), (ELSEWHERE,)))
started = st.fixed_dictionaries({"started": st.booleans()})

steps = st.one_of(
    st.tuples(st.just("message"), entities, st.booleans(), chains, started),
    st.tuples(st.just("message"), entities, st.booleans(), chains, started),
    st.tuples(st.just("begun"), some),
    st.tuples(st.just("answered"), some),
    st.tuples(st.just("answered"), some),
    st.tuples(st.just("returned"), some, st.booleans()),
    st.tuples(st.just("flushed"), st.booleans(), st.booleans()),
    st.tuples(st.just("flushed"), st.just(False), st.booleans()),
    st.tuples(st.just("withdraw"), some, st.booleans()),
    st.tuples(st.just("link_lost"), peers),
    st.tuples(st.just("departing"), peers),
    st.tuples(st.just("tick"), st.sampled_from((0.1, 0.5, 1.5))),
    st.tuples(st.just("toggle_up"), peers),
    st.tuples(st.just("toggle_moving")),
    st.tuples(
        st.just("see"),
        peers,
        st.integers(0, 1),
        st.sampled_from(("serving", "serving", "serving", "moving", "free", "quarantined")),
    ),
)


NEXT = ("message", ENTITIES[0], True, (), {"started": False})


@example([("returned", 0, False), ("withdraw", 0, True), NEXT])
@settings(max_examples=400)
@given(st.lists(steps, max_size=40))
def test_the_short_way_is_the_long_one(story: list[tuple[Any, ...]]) -> None:
    pair = Pair()
    for verb, *args in story:
        named = args.pop() if args and isinstance(args[-1], dict) else {}
        getattr(pair, verb)(*args, **named)
        assert image(pair.plain) == image(pair.quick)
    event("some were clear" if pair.shortcuts else "none was clear")
