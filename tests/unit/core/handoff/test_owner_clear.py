"""The short way into a shard is the long one: `clear` and `occupy` against `request` and `start`.

Two owners live through the same random history; one of them is asked whether a message is clear
to start before it is given one. After each step nobody can tell them apart.
"""

from __future__ import annotations

from typing import Any

from hypothesis import event, given, settings
from hypothesis import strategies as st

from domicile.core.handoff.mailbox import Queued
from domicile.core.handoff.owner import Accepted, FlushAsked, Owner, OwnerEffect, Wake
from domicile.core.handoff.tables import OwnerEvent
from domicile.core.ids import EntityKey, Incarnation, LinkKey, ShardKey
from domicile.core.state.shardmap import Entry

ME, OTHER = Incarnation("me"), Incarnation("other")
SENDERS = (Incarnation("s"), Incarnation("t"))
ENTITIES = (EntityKey("cart", "a"), EntityKey("cart", "b"))
ALARM = LinkKey(Incarnation(""), "alarm")
MAILBOX = 3

Running = tuple[EntityKey, bool]
Ahead = tuple[int, int]
"""How much newer a sender's epoch and entry are than the owner's."""

EVEN: Ahead = (0, 0)


class Pair:
    """`plain` knows the long way only, `quick` takes the short one wherever it may."""

    def __init__(self) -> None:
        shard = ShardKey("r", 0)
        self.plain = Owner(shard, ME, MAILBOX)
        self.quick = Owner(shard, ME, MAILBOX)
        self.running: list[Running] = []
        self.links = dict.fromkeys(SENDERS, 1)
        self.n = 0
        self.shortcuts = 0
        self.see(ME, 1, "serving")

    def source(self, sender: Incarnation) -> LinkKey:
        return LinkKey(sender, f"link-{self.links[sender]}")

    def queued(self, sender: Incarnation, entity: EntityKey, ahead: Ahead, **more: Any) -> Queued:
        self.n += 1
        epoch, change = self.plain.entry.epoch + ahead[0], self.plain.entry.change + ahead[1]
        more = {"finishing": False, "shared": False, **more}
        return Queued(self.source(sender), self.n, entity, epoch, change, **more)

    def both(self, effects: tuple[OwnerEffect, ...], others: tuple[OwnerEffect, ...]) -> None:
        assert effects == others

    # what can happen

    def see(self, owner: Incarnation, newer: int, state: Any) -> None:
        entry = Entry(
            owner, self.plain.entry.epoch + newer, state, change=self.plain.entry.change + 1
        )
        self.both(self.plain.see(entry), self.quick.see(entry))

    def message(
        self, sender: Incarnation, entity: EntityKey, ahead: Ahead, more: Any, suspends: bool
    ) -> None:
        queued = self.queued(sender, entity, ahead, **more)
        if not self.is_clear(queued):
            self.both(self.plain.request(queued), self.quick.request(queued))
            return
        self.begin_plain(queued)
        if suspends:
            self.quick.occupy(queued.source, queued.entity, queued.shared)
            self.running.append((queued.entity, queued.shared))
        else:
            assert not self.plain.finish(queued.entity, queued.shared)

    def nested(self, sender: Incarnation, entity: EntityKey, depth: int, suspend: int) -> None:
        """Shared handlers that ask each other within their first steps; the inner ones suspend."""
        messages = [self.queued(sender, entity, EVEN, shared=True) for _ in range(depth)]
        if not self.is_clear(messages[0]):
            return
        for queued in messages:
            assert self.quick.clear(queued.source, queued.entity, queued.epoch, queued.change)
            self.begin_plain(queued, first=queued is messages[0])
        for at, queued in enumerate(reversed(messages)):
            if at < suspend:
                # Whoever waits for one that suspends does so, too.
                self.quick.occupy(queued.source, queued.entity, True)
                self.running.append((queued.entity, True))
            else:
                self.plain.finish(queued.entity, True)

    def is_clear(self, queued: Queued) -> bool:
        before = image(self.quick)
        clear = self.quick.clear(queued.source, queued.entity, queued.epoch, queued.change)
        assert image(self.quick) == before, "looking changes nothing"
        self.shortcuts += clear
        return clear

    def begin_plain(self, queued: Queued, *, first: bool = True) -> None:
        effects = self.plain.request(queued)
        assert effects == (Accepted(queued, 1), Wake(queued.entity))
        assert self.plain.start(queued.entity) == queued
        self.plain.reached(queued.entity)
        assert not first or not any(entity == queued.entity for entity, _ in self.running)

    def start(self, entity: EntityKey) -> None:
        queued, other = self.plain.start(entity), self.quick.start(entity)
        assert queued == other
        if queued is not None:
            assert self.plain.reached(entity) == self.quick.reached(entity)
            self.running.append((entity, queued.shared))

    def finish(self, which: int) -> None:
        if self.running:
            entity, shared = self.running.pop(which % len(self.running))
            assert self.plain.finish(entity, shared) == self.quick.finish(entity, shared)

    def hold(self, entity: EntityKey) -> None:
        held = self.plain.hold(entity)
        assert held == self.quick.hold(entity)
        if held:
            self.running.append((entity, False))

    def timer(self, entity: EntityKey) -> None:
        self.n += 1
        queued = Queued(ALARM, -self.n, entity, self.plain.epoch, 0, False, False)
        assert self.plain.timer(queued) == self.quick.timer(queued)

    def flush(self, sender: Incarnation) -> None:
        asked = FlushAsked(self.source(sender), self.n)
        self.both(self.plain.flush(asked), self.quick.flush(asked))

    def relink(self, sender: Incarnation) -> None:
        """Its link's state is dropped before another one brings anything."""
        for owner in (self.plain, self.quick):
            owner.link_gone(self.source(sender))
        self.links[sender] += 1

    def happen(self, happening: OwnerEvent) -> None:
        if happening is OwnerEvent.EMPTY and (self.plain.mailboxes or self.quick.mailboxes):
            return
        self.both(self.plain.happen(happening), self.quick.happen(happening))


def image(owner: Owner) -> dict[str, Any]:
    """All that an owner is. Whose link is the newest counts only for what waits of it."""
    mailboxes = {
        entity: (list(mailbox.queue), mailbox.readers, mailbox.writer)
        for entity, mailbox in owner.mailboxes.items()
    }
    waiting = [queued for messages, _, _ in mailboxes.values() for queued in messages]
    return {
        "phase": owner.phase,
        "epoch": owner.epoch,
        "entry": owner.entry,
        "refused_links": sorted(owner.refused_links),
        "mailboxes": sorted(mailboxes.items()),
        "parked": sorted((source, list(messages)) for source, messages in owner.parked.items()),
        "current": [owner.latest.get(m.source.sender) == m.source.link for m in waiting],
    }


senders, entities = st.sampled_from(SENDERS), st.sampled_from(ENTITIES)
uneven = st.sampled_from(((0, 1), (0, -1), (1, 1), (-1, -1)))
more = st.fixed_dictionaries({"finishing": st.booleans(), "shared": st.booleans()})

steps = st.one_of(
    st.tuples(st.just("message"), senders, entities, uneven, more, st.booleans()),
    st.tuples(st.just("message"), senders, entities, st.just(EVEN), more, st.booleans()),
    st.tuples(st.just("nested"), senders, entities, st.integers(2, 4), st.integers(0, 4)),
    st.tuples(st.just("start"), entities),
    st.tuples(st.just("finish"), st.integers(0, 9)),
    st.tuples(st.just("finish"), st.integers(0, 9)),
    st.tuples(st.just("hold"), entities),
    st.tuples(st.just("timer"), entities),
    st.tuples(st.just("flush"), senders),
    st.tuples(st.just("relink"), senders),
    st.tuples(
        st.just("see"),
        st.sampled_from((ME, ME, ME, OTHER)),
        st.integers(0, 1),
        st.sampled_from(("serving", "serving", "moving")),
    ),
    st.tuples(st.just("happen"), st.sampled_from((OwnerEvent.EMPTY, OwnerEvent.OVERDUE))),
)


@settings(max_examples=400)
@given(st.lists(steps, max_size=40))
def test_the_short_way_is_the_long_one(story: list[tuple[Any, ...]]) -> None:
    pair = Pair()
    for verb, *args in story:
        getattr(pair, verb)(*args)
        assert image(pair.plain) == image(pair.quick)
    event("some were clear" if pair.shortcuts else "none was clear")


def test_shared_handlers_that_suspend_within_each_other_are_all_counted() -> None:
    pair = Pair()
    pair.nested(SENDERS[0], ENTITIES[0], 3, 3)
    mailbox = pair.quick.mailboxes[ENTITIES[0]]
    assert (mailbox.readers, mailbox.writer) == (3, False)
    for _ in range(3):
        pair.finish(0)
    assert not pair.quick.mailboxes
