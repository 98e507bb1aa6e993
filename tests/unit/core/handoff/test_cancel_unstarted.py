"""Messages that nobody waits for any more, and the time that is left to those that are asked for
somebody else: order, at most once, and one fate for each message (I5, I6)."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from domicile.core.handoff.mailbox import Queued
from domicile.core.handoff.owner import (
    Accepted,
    Discard,
    FlushAsked,
    Owner,
    OwnerEffect,
    ReadRecord,
    Refuse,
    SendBack,
    cancel_unstarted,
)
from domicile.core.handoff.pending import SLACK, nested_timeout_s
from domicile.core.ids import EntityKey, Incarnation, LinkKey, ShardKey
from domicile.core.state.shardmap import Entry

ME, OTHER = Incarnation("me"), Incarnation("other")
ANN, BEN = LinkKey(Incarnation("ann"), "l1"), LinkKey(Incarnation("ben"), "l1")
CART, DOOR = EntityKey("cart", "c"), EntityKey("door", "d")
SERVING = Entry(ME, 1, "serving", change=1)


def queued(n: int, source: LinkKey = ANN, entity: EntityKey = CART, **more: Any) -> Queued:
    given = {"epoch": 1, "change": 1, "finishing": False, "shared": False, **more}
    return Queued(source, n, entity, **given)


def opened(*messages: Queued) -> Owner:
    owner = Owner(ShardKey("r", 0), ME, 10)
    owner.see(SERVING)
    for one in messages:
        owner.request(one)
    return owner


def numbers(messages: list[Queued]) -> list[int]:
    return [one.n for one in messages]


def test_an_unstarted_message_is_taken_away_and_the_others_keep_their_order() -> None:
    owner = opened(queued(1), queued(2), queued(3), queued(4))
    owner.start(CART)
    found, ready = cancel_unstarted(owner, {(ANN, 2): None, (ANN, 4): None})
    assert (numbers(found), ready) == ([2, 4], [])
    assert owner.finish(CART, False)
    started = owner.start(CART)
    assert started is not None
    assert started.n == 3


def test_a_started_message_is_left_alone() -> None:
    owner = opened(queued(1))
    owner.start(CART)
    assert cancel_unstarted(owner, {(ANN, 1): None}) == ([], [])
    assert CART in owner.mailboxes


def test_the_same_number_of_another_sender_or_link_is_another_message() -> None:
    owner = opened(queued(1), queued(1, BEN, DOOR))
    again = LinkKey(ANN.sender, "l2")
    assert cancel_unstarted(owner, {(BEN, 2): None, (again, 1): None}) == ([], [])
    found, _ = cancel_unstarted(owner, {(BEN, 1): None})
    assert [one.source for one in found] == [BEN]
    assert CART in owner.mailboxes
    assert DOOR not in owner.mailboxes, "an empty mailbox is none"


def test_what_stood_behind_a_writer_may_start_once_that_is_called_off() -> None:
    owner = opened(queued(1, shared=True), queued(2), queued(3, shared=True))
    owner.start(CART)
    owner.reached(CART)
    assert owner.start(CART) is None, "a writer waits for the readers"
    found, ready = cancel_unstarted(owner, {(ANN, 2): None})
    assert (numbers(found), ready) == ([2], [CART])
    started = owner.start(CART)
    assert started is not None
    assert started.n == 3


def test_mail_that_waits_for_a_record_is_called_off_as_well() -> None:
    owner = opened()
    assert ReadRecord() in owner.request(queued(1, epoch=2, change=2))
    owner.request(queued(2, epoch=2, change=2))
    found, _ = cancel_unstarted(owner, {(ANN, 1): None})
    assert numbers(found) == [1]
    assert [one.n for one in owner.parked[ANN]] == [2]
    owner = opened()
    owner.request(queued(1, epoch=2, change=2))
    cancel_unstarted(owner, {(ANN, 1): None})
    assert owner.parked == {}
    effects = owner.request(queued(2))
    assert isinstance(effects[0], Accepted)


# walks

_SOURCE, _ENTITY = st.sampled_from([ANN, BEN]), st.sampled_from([CART, DOOR])
_STEP = st.one_of(
    st.tuples(st.just("request"), _SOURCE, _ENTITY, st.integers(0, 1), st.booleans()),
    st.tuples(st.just("start"), _ENTITY),
    st.tuples(st.just("finish"), st.integers(0, 3)),
    st.tuples(st.just("call off"), st.lists(st.integers(1, 30), max_size=4)),
    st.tuples(st.just("flush"), _SOURCE),
    st.tuples(st.just("entry"), st.sampled_from(["serve", "move", "elsewhere"])),
)


class Walk:
    """Steps an owner and knows of each message where it is."""

    def __init__(self) -> None:
        self.owner = opened()
        self.place: dict[int, str] = {}
        self.queued: dict[int, Queued] = {}
        self.running: list[Queued] = []
        self.last: dict[tuple[LinkKey, EntityKey], int] = {}

    def take(self, step: tuple[Any, ...]) -> None:
        owner = self.owner
        match step:
            case ("request", source, entity, ahead, shared):
                one = queued(
                    len(self.queued) + 1, source, entity, epoch=max(1, owner.epoch + ahead),
                    change=owner.entry.change, shared=shared,
                )  # fmt: skip
                self.queued[one.n], self.place[one.n] = one, "in"
                self.judge(owner.request(one))
            case ("start", entity):
                started = owner.start(entity)
                if started is not None:
                    self.started(started)
                    owner.reached(entity)
            case ("finish", index) if index < len(self.running):
                done = self.running.pop(index)
                owner.finish(done.entity, done.shared)
            case ("call off", wanted):
                known = {(self.queued[n].source, n): None for n in wanted if n in self.queued}
                self.called_off(known)
            case ("flush", source):
                self.judge(owner.flush(FlushAsked(source, 1)))
            case ("entry", what):
                now = owner.entry
                epoch = now.epoch + (now.owner != ME)
                states = {"serve": (ME, epoch, "serving"), "move": (ME, epoch, "moving")}
                found = states.get(what, (OTHER, now.epoch + 1, "serving"))
                self.judge(owner.see(Entry(*found, change=now.change + 1)))  # type: ignore[arg-type]
            case _:
                pass
        self.check_places()

    def started(self, one: Queued) -> None:
        assert self.place[one.n] == "in", "started although it was called off or went back"
        self.place[one.n] = "started"
        self.running.append(one)
        lane = (one.source, one.entity)
        assert self.last.get(lane, 0) < one.n, "out of order"
        self.last[lane] = one.n

    def called_off(self, wanted: dict[tuple[LinkKey, int], None]) -> None:
        before = {n for n, place in self.place.items() if place == "in"}
        found, ready = cancel_unstarted(self.owner, wanted)
        assert sorted(numbers(found)) == sorted(n for _, n in wanted if n in before)
        for one in found:
            self.place[one.n] = "called off"
        for entity in ready:
            assert self.owner.mailboxes[entity].ready()
        for entity, mailbox in self.owner.mailboxes.items():
            touched = any(one.entity == entity for one in found)
            assert not (touched and mailbox.ready()) or entity in ready, "nobody would start it"

    def judge(self, effects: tuple[OwnerEffect, ...]) -> None:
        for effect in effects:
            gone: tuple[Queued, ...] = ()
            if isinstance(effect, SendBack | Discard):
                gone = effect.messages
            elif isinstance(effect, Refuse):
                gone = (effect.queued,)
            for one in gone:
                assert self.place[one.n] == "in", "went back although it was called off"
                self.place[one.n] = "out"

    def check_places(self) -> None:
        held = [one.n for mailbox in self.owner.mailboxes.values() for one in mailbox.queue]
        for waiting in self.owner.parked.values():
            assert waiting
            held += [one.n for one in waiting if isinstance(one, Queued)]
        assert sorted(held) == [n for n, place in self.place.items() if place == "in"]
        assert not any(mailbox.idle() for mailbox in self.owner.mailboxes.values())


@given(st.lists(_STEP, max_size=60))
def test_each_message_has_one_fate_and_what_runs_runs_in_order(
    steps: list[tuple[Any, ...]],
) -> None:
    walk = Walk()
    for step in steps:
        walk.take(step)


# time that is left


@pytest.mark.parametrize(
    ("timeout_s", "left_s", "given_s"),
    [(10.0, 60.0, 10.0), (10.0, 10.0, 10.0), (10.0, 9.99, 9.5), (10.0, 1.0, 0.96875),
     (10.0, 0.0, 0.0), (10.0, -1.0, 0.0), (0.5, 0.3, 0.2890625)],
)  # fmt: skip
def test_a_nested_ask_gets_what_its_caller_has_left(
    timeout_s: float, left_s: float, given_s: float
) -> None:
    assert nested_timeout_s(timeout_s, left_s) == given_s


@given(st.floats(1e-6, 1e6), st.floats(-10.0, 1e6))
def test_it_is_never_more_than_either_and_little_less(timeout_s: float, left_s: float) -> None:
    given_s = nested_timeout_s(timeout_s, left_s)
    assert 0.0 <= given_s <= timeout_s
    assert given_s <= max(0.0, left_s)
    if 0 < left_s < timeout_s:
        assert left_s * (1 - 2.1 * SLACK) <= given_s <= left_s * (1 - SLACK)


def test_asks_of_about_the_same_time_share_it() -> None:
    distinct = {nested_timeout_s(10.0, 8.0 + number / 1_000) for number in range(2_000)}
    assert len(distinct) <= 16
