"""The carrier: a release that waits for its next home, and fields that are used once."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

import msgspec
import pytest
from carry_lab import MOVING, OTHER, SHARD, A, B, C, Cart, Line, fields_of, key, made, part

from domicile import Settings
from domicile.core.ids import NOBODY, Incarnation, ShardKey
from domicile.core.state.shardmap import Entry
from domicile.core.wire import Carry
from domicile.entity.carry.transfer import LOOK_S, TOTAL, WAIT_S, CarryTransfer
from domicile.ports.meter import NoMeter


class Timer:
    def __init__(self, when: float, callback: Callable[[], None]) -> None:
        self.when, self.callback = when, callback
        self.cancelled = False

    def cancel(self) -> None:
        self.cancelled = True


@dataclass
class Desk(NoMeter):
    """Clock, meter and post in one."""

    time: float = 0.0
    protocol: int = 3
    timers: list[Timer] = field(default_factory=list[Timer])
    sent: list[tuple[Incarnation, Carry]] = field(default_factory=list[tuple[Incarnation, Carry]])
    counts: dict[str, int] = field(default_factory=dict[str, int])

    def now(self) -> float:
        return self.time

    def wall(self) -> datetime:
        raise NotImplementedError

    def call_at(self, when: float, callback: Callable[[], None]) -> Timer:
        self.timers.append(Timer(when, callback))
        return self.timers[-1]

    def advance(self, seconds: float) -> None:
        self.time += seconds
        for timer in [one for one in self.timers if one.when <= self.time]:
            self.timers.remove(timer)
            if not timer.cancelled:
                timer.callback()

    def count(self, name: str, value: int = 1) -> None:
        self.counts[name] = self.counts.get(name, 0) + value

    def speaks(self, node: Incarnation) -> int:
        return self.protocol

    def carry(self, to: Incarnation, carry: Carry) -> None:
        self.sent.append((to, carry))


def carrier(desk: Desk, me: Incarnation = A, **limits: int) -> CarryTransfer:
    return CarryTransfer(me, desk, desk, Settings(**limits), desk)


def cart(total: float = 1.0) -> Any:
    entity = made(Cart)
    entity.__init__()
    entity.total = total
    return entity


FIELDS = fields_of(Cart)


def test_a_release_waits_for_the_next_home_and_not_longer() -> None:
    desk, told = Desk(), list[str]()
    here = carrier(desk)
    here.stopped(SHARD, key("a"), FIELDS, cart())
    assert here.release(SHARD, 7, MOVING, lambda: told.append("released"), here.timer_book())
    assert here.handing_over(SHARD)
    [(to, sent)] = desk.sent
    assert (to, sent.epoch) == (B, 7)
    here.on_taken(99)
    assert told == []
    here.on_taken(sent.id)
    here.on_taken(sent.id)
    assert told == ["released"]
    assert not here.handing_over(SHARD)
    desk.advance(2 * WAIT_S)
    assert told == ["released"]

    here.stopped(SHARD, key("a"), FIELDS, cart())
    assert here.release(SHARD, 9, MOVING, lambda: told.append("given up"), here.timer_book())
    desk.advance(WAIT_S)
    assert told == ["released", "given up"]
    here.on_taken(desk.sent[-1][1].id)
    assert told == ["released", "given up"]
    assert desk.counts == {"carry.sent": 2, "carry.unconfirmed": 1}


@pytest.mark.parametrize(
    "entry",
    [
        Entry(A, 7, "serving", NOBODY, 3),
        Entry(A, 7, "moving", NOBODY, 3),
        Entry(A, 7, "moving", A, 3),
    ],
)
def test_without_a_next_home_nothing_is_kept_or_waited_for(entry: Entry) -> None:
    desk = Desk()
    here = carrier(desk)
    assert not here.release(SHARD, 7, entry, lambda: None, here.timer_book()), "nothing to carry"
    here.stopped(SHARD, key("a"), FIELDS, cart())
    assert not here.release(SHARD, 7, entry, lambda: None, here.timer_book())
    assert desk.sent == []
    assert desk.counts == {"carry.dropped": 1}
    assert here.restore(SHARD, key("a"), FIELDS, cart())


def test_a_release_waits_a_moment_for_the_record_of_the_next_home() -> None:
    """What the leader tells may be faster than the watch that shows a node that has just joined."""
    desk, told = Desk(protocol=0), list[str]()
    here = carrier(desk)
    here.stopped(SHARD, key("a"), FIELDS, cart())
    timers = here.timer_book()
    timers.keep(key("a"), "ring", 3.0, b"x")
    assert here.release(SHARD, 7, MOVING, lambda: told.append("released"), timers)
    assert here.handing_over(SHARD)
    desk.advance(WAIT_S / 2)
    assert (desk.sent, told) == ([], [])
    desk.protocol = 1
    desk.advance(LOOK_S)
    [(to, sent)] = desk.sent
    assert (to, len(sent.entities), len(sent.timers)) == (B, 1, 1)
    here.on_taken(sent.id)
    assert told == ["released"]
    assert desk.counts == {"carry.sent": 1, "timer.sent": 1}


def test_a_next_home_whose_record_does_not_come_is_sent_nothing(
    caplog: pytest.LogCaptureFixture,
) -> None:
    desk, told = Desk(protocol=0), list[str]()
    here = carrier(desk)
    here.stopped(SHARD, key("a"), FIELDS, cart())
    timers = here.timer_book()
    timers.keep(key("a"), "ring", 3.0, b"x")
    assert here.release(SHARD, 7, MOVING, lambda: told.append("released"), timers)
    for _ in range(100):
        desk.advance(WAIT_S / 50)
    assert (desk.sent, told) == ([], ["released"])
    assert not here.handing_over(SHARD)
    assert desk.counts == {"carry.dropped": 1, "timer.lost": 1}
    assert "does not know its next home" in caplog.text


@pytest.mark.parametrize("end", ["another epoch", "closed"])
def test_a_home_that_is_over_waits_for_no_record(end: str) -> None:
    desk, told = Desk(protocol=0), list[str]()
    here = carrier(desk)
    timers = here.timer_book()
    timers.keep(key("a"), "ring", 3.0, b"x")
    assert here.release(SHARD, 7, MOVING, lambda: told.append("released"), timers)
    if end == "closed":
        here.close()
    else:
        here.opened(SHARD, 8, here.timer_book())
    desk.protocol = 1
    desk.advance(2 * WAIT_S)
    assert (desk.sent, told) == ([], [])
    assert not here.handing_over(SHARD)


def test_what_arrives_is_set_once_and_carried_on_if_it_is_not() -> None:
    desk_a, desk_b = Desk(), Desk()
    a, b = carrier(desk_a), carrier(desk_b, B)
    for id, total in (("x", 3.0), ("y", 4.0)):
        a.stopped(SHARD, key(id), FIELDS, cart(total))
    a.release(SHARD, 7, MOVING, lambda: None, a.timer_book())
    [(_, sent)] = desk_a.sent
    assert b.on_carry(A, sent, MOVING)
    b.opened(SHARD, 8, b.timer_book())
    fresh = cart(0.0)
    for _ in range(2):
        assert b.restore(SHARD, key("x"), FIELDS, fresh), "also again, if it failed to start"
        assert fresh.total == 3.0
    b.started(SHARD, key("x"))
    again = cart(0.0)
    assert b.restore(SHARD, key("x"), FIELDS, again)
    assert again.total == 0.0, "what ran once is never set again"
    b.release(SHARD, 8, Entry(B, 8, "moving", C, 5), lambda: None, b.timer_book())
    [(to, onwards)] = desk_b.sent
    assert (to, onwards.epoch, [one.id for one in onwards.entities]) == (C, 8, ["y"])
    assert desk_b.counts == {"carry.taken": 2, "carry.sent": 1}


def test_a_home_that_never_opened_passes_it_on() -> None:
    desk = Desk()
    b = carrier(desk, B)
    b.on_carry(A, part(7, 1, "x"), MOVING)
    assert b.release(SHARD, 8, Entry(B, 8, "moving", C, 5), lambda: None, b.timer_book())
    [(to, onwards)] = desk.sent
    assert (to, onwards.epoch, [one.id for one in onwards.entities]) == (C, 8, ["x"])


def test_a_lost_home_uses_nothing() -> None:
    desk = Desk()
    b = carrier(desk, B)
    b.on_carry(A, part(7, 1, "x"), MOVING)
    b.opened(SHARD, 8, b.timer_book())
    b.lost(SHARD)
    assert b.restore(SHARD, key("x"), FIELDS, fresh := cart(0.0))
    assert fresh.total == 0.0
    assert not b.on_carry(A, part(7, 2, "x"), Entry(B, 8, "serving", NOBODY, 4))
    b.on_carry(A, part(7, 1, "x", shard=OTHER), MOVING)
    b.see(OTHER, Entry(C, 8, "serving", NOBODY, 4))
    b.opened(OTHER, 8, b.timer_book())
    assert desk.counts == {"carry.taken": 1, "carry.dropped": 3}


def test_what_does_not_fit_this_version_starts_fresh_and_is_counted() -> None:
    desk = Desk()
    b = carrier(desk, B)
    b.on_carry(A, part(7, 1, "x", body=msgspec.msgpack.encode({"total": "many"})), MOVING)
    b.on_carry(A, part(7, 2, "y", body=b"\xc1"), MOVING)
    b.opened(SHARD, 8, b.timer_book())
    assert not b.restore(SHARD, key("x"), FIELDS, cart())
    assert not b.restore(SHARD, key("y"), FIELDS, cart())
    assert b.restore(SHARD, key("x"), FIELDS, cart()), "the second try has nothing to restore"
    assert desk.counts == {"carry.taken": 2, "carry.dropped": 2}


def test_what_cannot_travel_or_is_too_large_starts_fresh_and_is_counted() -> None:
    desk = Desk()
    here = carrier(desk, carry_bytes=1_000)
    broken, large = cart(), cart()
    broken.lines.append(object())
    large.lines = [Line("x" * 2_000)]
    for id, entity in (("broken", broken), ("large", large), ("fine", cart())):
        here.stopped(SHARD, key(id), FIELDS, entity)
    here.release(SHARD, 7, MOVING, lambda: None, here.timer_book())
    [(_, sent)] = desk.sent
    assert [one.id for one in sent.entities] == ["fine"]
    assert desk.counts == {"carry.dropped": 2, "carry.sent": 1}


def test_a_node_keeps_so_much_and_no_more() -> None:
    desk = Desk()
    b = carrier(desk, B, carry_bytes=1_000)
    for number in range(3 * TOTAL):
        shard = ShardKey("default", number)
        b.on_carry(A, part(7, number, "x", body=b"x" * 800, shard=shard), MOVING)
    assert desk.counts["carry.dropped"] >= TOTAL
    desk.advance(60.0)
    b.sweep(desk.time)
    assert desk.counts["carry.dropped"] == 3 * TOTAL


def test_a_new_move_ends_the_wait_for_an_older_one() -> None:
    desk, told = Desk(), list[int]()
    here = carrier(desk)
    here.stopped(SHARD, key("a"), FIELDS, cart())
    here.release(SHARD, 7, MOVING, lambda: told.append(7), here.timer_book())
    assert not here.release(
        SHARD, 9, Entry(A, 9, "moving", C, 9), lambda: told.append(9), here.timer_book()
    )
    desk.advance(2 * WAIT_S)
    assert told == []
    assert not here.handing_over(SHARD)


def test_a_closed_carrier_tells_nothing() -> None:
    desk, told = Desk(), list[int]()
    here = carrier(desk)
    here.stopped(SHARD, key("a"), FIELDS, cart())
    here.release(SHARD, 7, MOVING, lambda: told.append(7), here.timer_book())
    here.close()
    desk.advance(2 * WAIT_S)
    here.on_taken(desk.sent[0][1].id)
    assert told == []


# timers (DX-25)


def test_timers_go_along_without_fields_and_are_told_of_when_nobody_confirms() -> None:
    desk, told = Desk(time=100.0), list[str]()
    here = carrier(desk)
    timers = here.timer_book()
    timers.keep(key("a"), "ring", 103.0, b"x")
    timers.keep(key("b"), "ring", 99.0, b"")
    assert here.release(SHARD, 7, MOVING, lambda: told.append("released"), timers)
    assert len(timers) == 0
    [(to, sent)] = desk.sent
    assert (to, sent.entities) == (B, ())
    assert [(one.id, one.method, one.left_s) for one in sent.timers] == [
        ("a", "ring", 3.0), ("b", "ring", 0.0),
    ]  # fmt: skip
    desk.advance(WAIT_S)
    assert told == ["released"]
    assert desk.counts == {"timer.sent": 2, "timer.unconfirmed": 2, "carry.unconfirmed": 1}


def test_timers_arrive_once_and_are_passed_on_by_a_home_that_never_opened() -> None:
    desk_a, desk_b, desk_c = Desk(), Desk(time=50.0), Desk(time=900.0)
    a, b, c = carrier(desk_a), carrier(desk_b, B), carrier(desk_c, C)
    timers = a.timer_book()
    timers.keep(key("x"), "ring", 4.0, b"")
    a.release(SHARD, 7, MOVING, lambda: None, timers)
    assert b.on_carry(A, desk_a.sent[0][1], MOVING)
    desk_b.time += 1.0
    onwards = Entry(B, 8, "moving", C, 5)
    assert b.release(SHARD, 8, onwards, lambda: None, b.timer_book())
    assert c.on_carry(B, desk_b.sent[0][1], onwards)
    here = c.timer_book()
    c.opened(SHARD, 9, here)
    assert [(one.key, one.due_at) for one in here.empty()] == [(key("x"), 903.0)]
    c.opened(SHARD, 9, here)
    assert len(here) == 0
    assert desk_c.counts == {"timer.taken": 1}


@pytest.mark.parametrize("entry", [Entry(A, 7, "moving", NOBODY, 3), Entry(A, 7, "serving", A, 3)])
def test_timers_without_a_next_home_are_lost(entry: Entry) -> None:
    desk = Desk()
    here = carrier(desk)
    timers = here.timer_book()
    timers.keep(key("a"), "ring", 3.0, b"x")
    assert not here.release(SHARD, 7, entry, lambda: None, timers)
    assert len(timers) == 0
    assert desk.counts == {"timer.lost": 1}
    assert here.timer_losses.shards() == [SHARD]


def test_timers_on_their_way_when_their_home_is_over_may_be_lost() -> None:
    desk = Desk()
    here = carrier(desk)
    timers = here.timer_book()
    timers.keep(key("a"), "ring", 3.0, b"x")
    here.release(SHARD, 7, MOVING, lambda: None, timers)
    here.close()
    assert desk.counts == {"timer.sent": 1, "timer.unconfirmed": 1}


@pytest.mark.parametrize("confirmed", [True, False])
def test_a_shard_that_comes_back_in_the_next_epoch_has_everything_once(confirmed: bool) -> None:
    """The coordinator changed its mind after the release: only one of the two homes uses it."""
    desk_a, desk_b = Desk(), Desk()
    a, b = carrier(desk_a), carrier(desk_b, B)
    a.stopped(SHARD, key("x"), FIELDS, cart(3.0))
    timers = a.timer_book()
    timers.keep(key("x"), "ring", 4.0, b"")
    a.release(SHARD, 7, MOVING, lambda: None, timers)
    [(_, sent)] = desk_a.sent
    b.on_carry(A, sent, MOVING)
    if confirmed:
        a.on_taken(sent.id)
    else:
        desk_a.advance(WAIT_S)
    back = Entry(A, 8, "serving", NOBODY, 4)
    for one in (a, b):
        one.see(SHARD, back)
    a.opened(SHARD, 8, timers)
    assert [one.key for one in timers.empty()] == [key("x")]
    assert a.restore(SHARD, key("x"), FIELDS, fresh := cart(0.0))
    assert fresh.total == 3.0
    a.opened(SHARD, 9, timers)
    b.opened(SHARD, 9, other := b.timer_book())
    assert len(timers) == len(other) == 0
    assert desk_b.counts == {}, "nothing is lost"
    assert "timer.lost" not in desk_a.counts


@pytest.mark.parametrize("confirmed", [True, False])
def test_timers_that_went_to_a_node_that_never_became_the_home_may_be_lost(
    confirmed: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """It was killed after it confirmed them, so it counts nothing itself. They are told once."""
    desk = Desk()
    here = carrier(desk)
    timers = here.timer_book()
    timers.keep(key("x"), "ring", 4.0, b"")
    here.release(SHARD, 7, MOVING, lambda: None, timers)
    if confirmed:
        here.on_taken(desk.sent[0][1].id)
    else:
        desk.advance(WAIT_S)
    for _ in range(2):
        here.see(SHARD, Entry(C, 8, "serving", NOBODY, 4))
    assert desk.counts["timer.unconfirmed"] == 1
    assert caplog.text.count("1 timers of shard default/3 may be lost") == 1
    assert ("another node became its home" in caplog.text) == confirmed


@pytest.mark.parametrize("end", ["elsewhere", "expired", "closed"])
def test_the_copy_of_what_was_sent_is_dropped_without_a_word(end: str) -> None:
    desk = Desk()
    here = carrier(desk)
    here.stopped(SHARD, key("x"), FIELDS, cart(3.0))
    timers = here.timer_book()
    timers.keep(key("x"), "ring", 4.0, b"")
    here.release(SHARD, 7, MOVING, lambda: None, timers)
    here.on_taken(desk.sent[0][1].id)
    if end == "elsewhere":
        here.see(SHARD, Entry(B, 8, "serving", NOBODY, 4))
    elif end == "expired":
        here.sweep(60.0)
    else:
        here.close()
    here.opened(SHARD, 8, timers)
    assert len(timers) == 0
    assert desk.counts == {"carry.sent": 1, "timer.sent": 1}
