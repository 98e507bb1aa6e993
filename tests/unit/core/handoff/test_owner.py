"""The owner machine: its table, who may enter, what goes back, and its bounds (H7–H11)."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from domicile.core.handoff.mailbox import Queued
from domicile.core.handoff.owner import (
    Accepted,
    AnswerFlush,
    Discard,
    FlushAsked,
    Owner,
    OwnerEffect,
    PhaseChanged,
    ReadRecord,
    Refuse,
    SendBack,
    Wake,
)
from domicile.core.handoff.tables import OWNER_TRANSITIONS, OwnerAction, OwnerEvent, Phase
from domicile.core.ids import EntityKey, Incarnation, LinkKey, ShardKey
from domicile.core.state.shardmap import Entry

ME, OTHER = Incarnation("me"), Incarnation("other")
ANN, BEN = LinkKey(Incarnation("ann"), "l1"), LinkKey(Incarnation("ben"), "l1")
CART, DOOR = EntityKey("cart", "c"), EntityKey("door", "d")
SHARD = ShardKey("r", 0)


def entry(owner: Incarnation, epoch: int, state: Any, change: int) -> Entry:
    return Entry(owner, epoch, state, change=change)


SERVING = entry(ME, 1, "serving", 1)
MOVING = entry(ME, 1, "moving", 2)


def queued(
    n: int,
    source: LinkKey = ANN,
    entity: EntityKey = CART,
    *,
    epoch: int = 1,
    change: int = 1,
    finishing: bool = False,
    shared: bool = False,
) -> Queued:
    return Queued(source, n, entity, epoch, change, finishing, shared)


def opened(mailbox_limit: int = 10) -> Owner:
    owner = Owner(SHARD, ME, mailbox_limit)
    owner.see(SERVING)
    return owner


def in_phase(phase: Phase) -> Owner:
    owner = Owner(SHARD, ME, 10)
    if phase is not Phase.CLOSED:
        owner.see(SERVING)
    if phase in (Phase.DRAINING, Phase.RELEASED):
        owner.see(MOVING)
    if phase is Phase.RELEASED:
        owner.happen(OwnerEvent.EMPTY)
    assert owner.phase is phase
    return owner


def test_what_could_never_start_goes_back_when_the_shard_is_released() -> None:
    """DX-26: the shell reports the shard as empty although messages for an unknown type wait."""
    owner = opened()
    owner.request(queued(1, finishing=True))
    owner.request(queued(2, BEN, DOOR, finishing=True))
    owner.see(MOVING)
    assert sorted(owner.mailboxes) == [CART, DOOR], "both are finishing, so the cut keeps them"
    first, second, last = owner.happen(OwnerEvent.EMPTY)
    assert first == SendBack(ANN, (queued(1, finishing=True),))
    assert second == SendBack(BEN, (queued(2, BEN, DOOR, finishing=True),))
    assert last == PhaseChanged(Phase.RELEASED, 1, OwnerAction.RELEASE)
    assert owner.released, "which `Return` says too, so that the senders hold them (H3)"
    assert not owner.mailboxes
    assert owner.admission.count == 0


def sent_back(effects: tuple[OwnerEffect, ...]) -> dict[LinkKey, list[int]]:
    found: dict[LinkKey, list[int]] = {}
    for effect in effects:
        if isinstance(effect, SendBack):
            found.setdefault(effect.source, []).extend(m.n for m in effect.messages)
    return found


# the table


def test_every_phase_handles_every_event() -> None:
    assert set(OWNER_TRANSITIONS) == set(product(Phase, OwnerEvent))


@pytest.mark.parametrize("phase", Phase)
@pytest.mark.parametrize("event", OwnerEvent)
def test_the_machine_goes_where_the_table_says(phase: Phase, event: OwnerEvent) -> None:
    owner = in_phase(phase)
    before = owner.epoch
    effects = owner.happen(event, before + 1)
    transition = OWNER_TRANSITIONS[phase, event]
    assert owner.phase in transition.to
    newer = event in (OwnerEvent.SERVING_NEWER, OwnerEvent.MOVING_NEWER)
    assert owner.epoch == (before + 1 if newer else before)
    changes = [effect for effect in effects if isinstance(effect, PhaseChanged)]
    expected = PhaseChanged(owner.phase, owner.epoch, transition.does)
    assert changes == ([] if transition.does is OwnerAction.NOTHING else [expected])


def test_only_a_newer_epoch_opens_and_only_it_leaves_released() -> None:
    """H10, H11: released(e) is final."""
    for (phase, event), transition in OWNER_TRANSITIONS.items():
        if transition.to == (Phase.OPEN,) and phase in (Phase.CLOSED, Phase.RELEASED):
            assert event is OwnerEvent.SERVING_NEWER
        if phase is Phase.RELEASED and transition.to != (Phase.RELEASED,):
            assert event in (OwnerEvent.SERVING_NEWER, OwnerEvent.FENCED)


# entries


@pytest.mark.parametrize(
    ("phase", "seen", "leads_to"),
    [
        (Phase.CLOSED, entry(ME, 1, "serving", 1), Phase.OPEN),
        (Phase.CLOSED, entry(ME, 1, "moving", 1), Phase.RELEASED),
        (Phase.CLOSED, entry(OTHER, 1, "serving", 1), Phase.CLOSED),
        (Phase.OPEN, entry(ME, 1, "moving", 2), Phase.DRAINING),
        (Phase.OPEN, entry(ME, 2, "moving", 2), Phase.RELEASED),
        (Phase.OPEN, entry(OTHER, 2, "serving", 2), Phase.CLOSED),
        (Phase.DRAINING, entry(ME, 1, "serving", 3), Phase.OPEN),
        (Phase.DRAINING, entry(OTHER, 2, "serving", 3), Phase.CLOSED),
        (Phase.RELEASED, entry(ME, 1, "serving", 3), Phase.RELEASED),
        (Phase.RELEASED, entry(OTHER, 2, "serving", 3), Phase.RELEASED),
        (Phase.RELEASED, entry(ME, 3, "serving", 4), Phase.OPEN),
        (Phase.RELEASED, entry(ME, 3, "moving", 4), Phase.RELEASED),
    ],
)
def test_an_entry_is_judged_by_owner_epoch_and_state(
    phase: Phase, seen: Entry, leads_to: Phase
) -> None:
    owner = in_phase(phase)
    owner.see(seen)
    assert owner.phase is leads_to
    assert owner.released is (leads_to is Phase.RELEASED)


def test_an_entry_that_is_not_newer_changes_nothing() -> None:
    """C3: a deposed leader can only repeat history."""
    owner = in_phase(Phase.DRAINING)
    assert owner.see(SERVING) == ()
    assert owner.see(MOVING) == ()
    assert owner.phase is Phase.DRAINING


def test_a_release_that_the_leader_has_not_taken_is_repeated() -> None:
    owner = in_phase(Phase.RELEASED)
    effects = owner.see(entry(ME, 1, "serving", 3))
    assert effects == (PhaseChanged(Phase.RELEASED, 1, OwnerAction.REPEAT_RELEASED),)


# H7


def test_mail_of_the_right_epoch_is_accepted_and_wakes_its_entity() -> None:
    owner = opened()
    first, second = queued(1), queued(2)
    assert owner.request(first) == (Accepted(first, 1), Wake(CART))
    assert owner.request(second) == (Accepted(second, 2), Wake(CART))


@pytest.mark.parametrize("phase", [Phase.CLOSED, Phase.DRAINING, Phase.RELEASED])
def test_no_other_phase_takes_new_roots(phase: Phase) -> None:
    owner = in_phase(phase)
    owner.entry = MOVING
    message = queued(1, change=2)
    assert owner.request(message) == (SendBack(ANN, (message,)),)


def test_mail_of_another_epoch_goes_back() -> None:
    """A→B→A: leftovers of an earlier ownership never run in a later one."""
    owner = Owner(SHARD, ME, 10)
    owner.see(entry(ME, 3, "serving", 5))
    old = queued(1, epoch=1)
    assert owner.request(old) == (SendBack(ANN, (old,)),)


def test_after_a_refusal_the_link_is_refused_until_it_flushes() -> None:
    owner = in_phase(Phase.DRAINING)
    owner.request(queued(1))
    owner.see(entry(ME, 1, "serving", 3))
    assert sent_back(owner.request(queued(2))) == {ANN: [2]}
    assert owner.request(queued(1, BEN))[0] == Accepted(queued(1, BEN), 1)
    assert owner.flush(FlushAsked(ANN, 1))[-1] == AnswerFlush(ANN, 1)
    assert owner.request(queued(3))[0] == Accepted(queued(3), 2)


def test_a_draining_shard_takes_finishing_mail_only() -> None:
    owner = in_phase(Phase.DRAINING)
    wanted = queued(1, BEN, change=2, finishing=True)
    assert owner.request(wanted) == (Accepted(wanted, 1), Wake(CART))
    assert owner.start(CART) is wanted
    assert sent_back(owner.request(queued(1, change=2))) == {ANN: [1]}


@pytest.mark.parametrize("ahead", [{"epoch": 2}, {"change": 2}])
def test_mail_of_a_sender_that_knows_more_is_parked_until_the_record_is_read(
    ahead: dict[str, int],
) -> None:
    owner = opened()
    first, second = queued(1, **ahead), queued(2)
    assert owner.request(first) == (ReadRecord(),)
    assert owner.request(second) == (), "it must not overtake parked mail"
    assert owner.request(queued(1, BEN))[0] == Accepted(queued(1, BEN), 1)
    effects = owner.see(entry(OTHER, 2, "serving", 3))
    assert owner.phase is Phase.CLOSED
    assert sent_back(effects) == {BEN: [1], ANN: [1, 2]}
    assert not owner.parked


def test_a_flush_does_not_wait_for_the_record_that_parked_mail_waits_for() -> None:
    """Seed 2619 of the clocks: with its store away the owner read nothing for seconds, and senders
    that knew of the next move gave up what it could have returned."""
    owner = opened()
    owner.request(queued(1))
    owner.request(queued(2, change=2))
    owner.request(queued(3, change=2))
    owner.request(queued(1, BEN, change=2))
    effects = owner.flush(FlushAsked(ANN, 7))
    assert sent_back(effects) == {ANN: [1, 2, 3]}
    assert effects[-1] == AnswerFlush(ANN, 7), "Flushed never overtakes a Return"
    assert list(owner.parked) == [BEN], "another link waits on"
    assert owner.admission.count == 1


def test_parked_mail_enters_when_the_record_says_that_this_is_its_home() -> None:
    owner = Owner(SHARD, ME, 10)
    assert owner.request(queued(1)) == (ReadRecord(),)
    effects = owner.see(SERVING)
    assert Accepted(queued(1), 1) in effects
    assert owner.start(CART) == queued(1)


def test_mail_still_ahead_after_a_read_asks_for_another() -> None:
    owner = opened()
    owner.request(queued(1, epoch=3, change=5))
    assert owner.see(entry(OTHER, 2, "serving", 3))[-1] == ReadRecord()
    assert sent_back(owner.see(entry(OTHER, 3, "serving", 5))) == {ANN: [1]}


# H8, H9


def test_a_flush_returns_what_that_sender_has_unstarted_in_order() -> None:
    owner = opened()
    for message in (queued(1), queued(2, entity=DOOR), queued(1, BEN), queued(3)):
        owner.request(message)
    owner.start(CART)
    effects = owner.flush(FlushAsked(ANN, 4))
    assert sent_back(effects) == {ANN: [2, 3]}
    assert effects[-1] == AnswerFlush(ANN, 4), "Flushed never overtakes a Return"
    assert ANN not in owner.refused_links
    owner.finish(CART, False)
    assert owner.start(CART) == queued(1, BEN)


def test_a_flush_wakes_what_stood_behind_the_returned_mail() -> None:
    owner = opened()
    owner.request(queued(1))
    owner.request(queued(1, BEN))
    assert Wake(CART) in owner.flush(FlushAsked(ANN, 1))


def test_mail_of_a_lost_link_is_discarded_not_returned() -> None:
    owner = opened()
    newer = LinkKey(ANN.sender, "l2")
    owner.request(queued(1))
    owner.request(queued(2, newer))
    effects = owner.flush(FlushAsked(newer, 1))
    assert sent_back(effects) == {newer: [2]}
    assert Discard((queued(1),)) in effects


def test_a_lost_link_takes_its_gate_and_its_parked_mail_along() -> None:
    owner = in_phase(Phase.DRAINING)
    owner.request(queued(1))
    owner.request(queued(1, BEN, epoch=9))
    assert owner.refused_links
    assert owner.parked
    owner.link_gone(ANN)
    owner.link_gone(BEN)
    assert not owner.refused_links
    assert not owner.parked
    assert not owner.latest


def test_the_cut_keeps_each_mailbox_up_to_its_last_finishing_message() -> None:
    owner = opened()
    owner.request(queued(1))
    owner.request(queued(2, finishing=True))
    owner.request(queued(3))
    owner.request(queued(1, BEN))
    owner.request(queued(4, entity=DOOR))
    effects = owner.see(MOVING)
    assert sent_back(effects) == {ANN: [3, 4], BEN: [1]}
    assert effects[-1] == PhaseChanged(Phase.DRAINING, 1, OwnerAction.CUT)
    assert list(owner.refused_links) == [ANN, BEN]
    assert [owner.start(CART), owner.finish(CART, False), owner.start(CART)] == [
        queued(1), True, queued(2, finishing=True),
    ]  # fmt: skip


def test_losing_the_shard_sends_everything_unstarted_back() -> None:
    owner = opened()
    owner.request(queued(1, finishing=True))
    owner.request(queued(2))
    owner.start(CART)
    assert sent_back(owner.see(entry(OTHER, 2, "serving", 2))) == {ANN: [2]}
    assert owner.start(CART) is None
    assert owner.finish(CART, False) is False
    assert not owner.mailboxes


# running


def test_readers_run_beside_each_other_and_a_writer_alone_in_order() -> None:
    owner = opened()
    for message in (
        queued(1, shared=True),
        queued(2, shared=True),
        queued(3),
        queued(4, shared=True),
    ):
        owner.request(message)
    assert owner.start(CART) == queued(1, shared=True)
    assert owner.reached(CART) is True
    assert owner.start(CART) == queued(2, shared=True)
    assert owner.reached(CART) is False
    assert owner.start(CART) is None, "the writer waits for the readers"
    assert owner.finish(CART, True) is False
    assert owner.finish(CART, True) is True
    assert owner.start(CART) == queued(3)
    assert owner.start(CART) is None, "no reader beside a writer"
    assert owner.finish(CART, False) is True
    assert owner.start(CART) == queued(4, shared=True)
    assert owner.finish(CART, True) is False
    assert not owner.mailboxes, "an idle entity keeps nothing here"


def test_a_reader_waits_until_the_one_before_it_reaches_its_handler() -> None:
    """I5: between a start and its handler an entity may be recovered, made, or put on trial."""
    owner = opened()
    for n in (1, 2, 3):
        owner.request(queued(n, shared=True))
    assert owner.start(CART) == queued(1, shared=True)
    assert owner.start(CART) is None
    assert owner.reached(CART) is True
    assert owner.start(CART) == queued(2, shared=True)
    assert owner.finish(CART, True) is False, "the first one's end lets nobody pass the second"
    assert owner.finish(CART, True, reached=False) is True, "the second failed to start"
    assert owner.start(CART) == queued(3, shared=True)
    assert owner.reached(CART) is False
    assert owner.finish(CART, True) is False
    assert not owner.mailboxes


def test_hold_keeps_an_idle_entity_from_starting() -> None:
    owner = opened()
    assert owner.hold(CART)
    owner.request(queued(1))
    assert owner.start(CART) is None
    assert owner.finish(CART, False) is True
    assert owner.start(CART) == queued(1)
    assert not owner.hold(CART), "something runs in it"


def test_a_timer_is_taken_only_while_open() -> None:
    for phase in Phase:
        owner = in_phase(phase)
        assert owner.timer(queued(-1)) is (phase is Phase.OPEN)
        assert (CART in owner.mailboxes) is (phase is Phase.OPEN)


def test_a_full_mailbox_refuses_and_later_mail_of_the_link_still_enters() -> None:
    """I6."""
    owner = opened(mailbox_limit=2)
    owner.request(queued(1))
    owner.request(queued(2))
    assert owner.request(queued(3)) == (Refuse(queued(3)),)
    assert owner.request(queued(4, entity=DOOR))[0] == Accepted(queued(4, entity=DOOR), 1)
    owner.start(CART)
    assert owner.request(queued(5))[0] == Accepted(queued(5), 2)


# properties

_SOURCES = (ANN, LinkKey(ANN.sender, "l2"), BEN)
_STEP = st.one_of(
    st.tuples(
        st.just("request"),
        st.sampled_from(_SOURCES),
        st.sampled_from((CART, DOOR)),
        st.integers(-1, 1),
        st.booleans(),
        st.booleans(),
    ),
    st.tuples(st.just("flush"), st.sampled_from(_SOURCES)),
    st.tuples(st.just("entry"), st.sampled_from(("serve", "move", "leave"))),
    st.tuples(st.just("start"), st.sampled_from((CART, DOOR))),
    st.tuples(st.just("reach"), st.sampled_from((CART, DOOR))),
    st.tuples(st.just("finish"), st.integers(0, 3)),
    st.tuples(st.just("empty")),
    st.tuples(st.just("gone"), st.sampled_from(_SOURCES)),
)


class Walk:
    """Drives an owner and knows where each message must be."""

    def __init__(self) -> None:
        self.owner = Owner(SHARD, ME, 3)
        self.owner.see(SERVING)
        self.numbers = 0
        self.place: dict[int, str] = {}
        self.running: list[Queued] = []
        self.waking: dict[EntityKey, Queued] = {}

    def take(self, step: tuple[Any, ...]) -> None:
        owner, before = self.owner, self.owner.phase
        happened: list[OwnerEffect] = []
        match step:
            case ("request", source, entity, ahead, finishing, shared):
                self.numbers += 1
                message = Queued(
                    source, self.numbers, entity, max(1, owner.epoch + ahead), owner.entry.change,
                    finishing, shared,
                )  # fmt: skip
                self.place[message.n] = "in"
                happened += owner.request(message)
            case ("flush", source):
                happened += owner.flush(FlushAsked(source, 1))
                assert source not in owner.refused_links
                assert source not in owner.parked
            case ("entry", what):
                now = owner.entry
                change = now.change + 1
                if what == "serve":
                    seen = entry(ME, now.epoch + (now.owner != ME), "serving", change)
                elif what == "move":
                    seen = entry(ME, now.epoch + (now.owner != ME), "moving", change)
                else:
                    seen = entry(OTHER, now.epoch + 1, "serving", change)
                happened += owner.see(seen)
            case ("start", entity):
                started = owner.start(entity)
                assert started is None or before in (Phase.OPEN, Phase.DRAINING)
                if started is not None:
                    assert self.place[started.n] == "in", "started after it went back"
                    self.place[started.n] = "started"
                    self.running.append(started)
                    self.check_alone(started)
                    assert started.entity not in self.waking
                    if started.shared:
                        self.waking[started.entity] = started
            case ("reach", entity) if entity in self.waking:
                del self.waking[entity]
                owner.reached(entity)
            case ("finish", index) if index < len(self.running):
                done = self.running.pop(index)
                reached = self.waking.get(done.entity) is not done
                if not reached:
                    del self.waking[done.entity]
                owner.finish(done.entity, done.shared, reached)
            case ("empty",) if not owner.mailboxes:
                happened += owner.happen(OwnerEvent.EMPTY)
            case ("gone", source):
                for waiting in owner.parked.get(source, ()):
                    self.place[waiting.n] = "out"
                owner.link_gone(source)
            case _:
                pass
        for effect in happened:
            self.judge(effect)
        self.check_places()

    def check_alone(self, started: Queued) -> None:
        beside = [m for m in self.running if m.entity == started.entity and m is not started]
        assert not beside or (started.shared and all(m.shared for m in beside))

    def judge(self, effect: OwnerEffect) -> None:
        match effect:
            case SendBack(source, messages):
                numbers = [m.n for m in messages]
                assert numbers == sorted(numbers)
                assert all(m.source == source for m in messages)
                for n in numbers:
                    assert self.place[n] == "in", "returned what had started"
                    self.place[n] = "out"
            case Discard(messages):
                for message in messages:
                    assert self.place[message.n] == "in"
                    self.place[message.n] = "out"
            case Refuse(message):
                self.place[message.n] = "out"
            case Accepted(message, depth):
                assert depth <= self.owner.mailbox_limit
                assert message.epoch == self.owner.epoch
            case _:
                pass

    def check_places(self) -> None:
        held = [m.n for mailbox in self.owner.mailboxes.values() for m in mailbox.queue]
        for waiting in self.owner.parked.values():
            held += [m.n for m in waiting]
        assert sorted(held) == [n for n, place in self.place.items() if place == "in"]
        for mailbox in self.owner.mailboxes.values():
            assert not mailbox.idle()
        if not self.owner.admits:
            assert not any(mailbox.queue for mailbox in self.owner.mailboxes.values())


@given(st.lists(_STEP, max_size=60))
def test_every_message_is_in_one_place_and_phases_follow_the_table(
    steps: list[tuple[Any, ...]],
) -> None:
    """I6: nothing vanishes. H7–H11: nothing that went back starts, nothing is in a closed one."""
    run = Walk()
    reachable = {
        phase: {to for (at, _), t in OWNER_TRANSITIONS.items() if at is phase for to in t.to}
        for phase in Phase
    }
    for step in steps:
        before = run.owner.phase
        run.take(step)
        assert run.owner.phase in reachable[before] | {before}
