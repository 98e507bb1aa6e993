"""Kept timers: a bounded book in the order of time, losses in one line, arguments that travel."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from carry_lab import SHARD, A, B, C, key
from hypothesis import given
from hypothesis import strategies as st

from domicile import Entity, NotExecuted, blocking, handler
from domicile.core.ids import NOBODY
from domicile.core.state.shardmap import Entry
from domicile.core.wire import CarriedTimer, Carry
from domicile.entity.carry.budget import Budget
from domicile.entity.carry.piles import PART_BYTES, CarryBook, CarryShelf
from domicile.entity.carry.timers import OVERHEAD_BYTES, KeptTimer, TimerBook, TimerLosses
from domicile.entity.model.entity import entity_type
from domicile.ports.meter import NoMeter

MOVING = Entry(A, 7, "moving", B, 3)


class Meter(NoMeter):
    def __init__(self) -> None:
        self.lost = 0

    def count(self, name: str, value: int = 1) -> None:
        assert name == "timer.lost"
        self.lost += value


def names(timers: list[KeptTimer]) -> list[tuple[str, str]]:
    return [(one.key.id, one.method) for one in timers]


# the book


def test_a_book_gives_what_is_due_in_the_order_of_time() -> None:
    book = TimerBook(Budget(10_000), 10_000)
    for due_at, id in ((3.0, "c"), (1.0, "a"), (2.0, "b"), (1.0, "d")):
        assert book.keep(key(id), "ring", due_at, b"")
    assert book.next_at == 1.0
    assert book.due(0.9, 9) == []
    assert names(book.due(2.5, 2)) == [("a", "ring"), ("d", "ring")], "at most so many"
    assert names(book.due(2.5, 2)) == [("b", "ring")]
    assert book.next_at == 3.0
    assert names(book.due(9.0, 9)) == [("c", "ring")]
    assert (len(book), book.next_at) == (0, float("inf"))


def test_a_newer_timer_of_a_method_replaces_the_older_one() -> None:
    book = TimerBook(Budget(10_000), 10_000)
    book.keep(key("a"), "ring", 1.0, b"old")
    book.keep(key("a"), "chime", 1.0, b"")
    book.keep(key("a"), "ring", 5.0, b"new")
    assert names(book.due(2.0, 9)) == [("a", "chime")]
    [ring] = book.due(6.0, 9)
    assert ring.body == b"new"
    assert not book.has(key("a"))


def test_dropped_timers_do_not_pile_up() -> None:
    book = TimerBook(Budget(10_000), 10_000)
    for number in range(10_000):
        assert book.keep(key("a"), "ring", float(number), b"")
    assert len(book._heap) < 200
    book.forget(key("a"))
    assert len(book) == book.used_bytes == 0


def test_a_book_is_bounded_alone_and_with_others() -> None:
    one = len("cart") + len("a") + len("ring") + OVERHEAD_BYTES
    budget = Budget(3 * one)
    book, other = TimerBook(budget, 2 * one), TimerBook(budget, 2 * one)
    assert [book.keep(key(id), "ring", 1.0, b"") for id in "abc"] == [True, True, False]
    assert [other.keep(key(id), "ring", 1.0, b"") for id in "abc"] == [True, False, False]
    third = TimerBook(budget, 2 * one)
    third.adopt(book)
    assert (len(book), book.used_bytes, len(third), budget.used_bytes) == (0, 0, 2, 3 * one)
    assert names(third.empty()) == [("a", "ring"), ("b", "ring")]
    assert budget.used_bytes == one
    assert book.keep(key("d"), "ring", 1.0, b"")


steps = st.tuples(
    st.sampled_from(("keep", "drop", "forget", "due", "empty", "adopt")),
    st.sampled_from("abc"),
    st.sampled_from(("ring", "chime")),
    st.integers(0, 20),
)


@given(script=st.lists(steps, max_size=80))
def test_a_book_is_a_bounded_map_in_the_order_of_time(
    script: list[tuple[str, str, str, int]],
) -> None:
    budget, limit = Budget(900), 700
    book = TimerBook(budget, limit)
    model: dict[tuple[str, str], tuple[float, bytes]] = {}

    def size(id: str, method: str, body: bytes) -> int:
        return len("cart") + len(id) + len(method) + len(body) + OVERHEAD_BYTES

    for step, id, method, number in script:
        if step == "keep":
            model.pop((id, method), None)
            body = b"x" * number
            used = sum(size(*one, held) for one, (_, held) in model.items())
            fits = used + size(id, method, body) <= limit
            assert book.keep(key(id), method, float(number), body) is fits
            if fits:
                model[id, method] = (float(number), body)
        elif step == "drop":
            book.drop(key(id), method)
            model.pop((id, method), None)
        elif step == "forget":
            book.forget(key(id))
            model = {one: held for one, held in model.items() if one[0] != id}
        elif step == "due":
            found = book.due(float(number), 2)
            wanted = sorted(due_at for due_at, _ in model.values() if due_at <= number)[:2]
            assert [one.due_at for one in found] == wanted
            for one in found:
                assert model.pop((one.key.id, one.method)) == (one.due_at, one.body)
        elif step == "empty":
            assert sorted(names(book.empty())) == sorted(model)
            model.clear()
        else:
            book, before = TimerBook(budget, limit), book
            book.adopt(before)
        assert len(book) == len(model)
        assert book.has(key(id)) is any(one[0] == id for one in model)
        assert book.next_at <= min((due_at for due_at, _ in model.values()), default=float("inf"))
        assert budget.used_bytes == book.used_bytes
        assert book.used_bytes == sum(size(*one, body) for one, (_, body) in model.items())


# losses


def test_losses_are_counted_one_by_one_and_logged_together(
    caplog: pytest.LogCaptureFixture,
) -> None:
    meter = Meter()
    losses = TimerLosses(meter)
    with caplog.at_level(logging.WARNING, "domicile"):
        losses.add(SHARD, key("a"), "ring", "for this reason")
        losses.add(SHARD, key("b"), "ring", "for another")
        assert caplog.messages == []
        losses.tell(*losses.shards())
        losses.tell(SHARD)
    assert meter.lost == 2
    assert caplog.messages == [
        "2 timers of shard default/3 are lost and will not fire, for example 'ring' of cart 'a': "
        "for this reason"
    ]


# the way


def pending(id: str, left_s: float = 1.0, body: bytes = b"") -> CarriedTimer:
    return CarriedTimer("cart", id, "ring", left_s, body)


def test_timers_travel_behind_the_fields_in_parts() -> None:
    book = CarryBook(Budget(10 * PART_BYTES), 10 * PART_BYTES)
    book.keep(key("f"), b"x" * (PART_BYTES // 2))
    timers = [pending(id, body=b"x" * (PART_BYTES // 2)) for id in "abc"]
    parts = book.hand_over(SHARD, 7, 1, timers)
    assert [(len(one.entities), len(one.timers)) for one in parts] == [(1, 1), (0, 2)]
    assert [timer for one in parts for timer in one.timers] == timers
    assert book.unconfirmed_timers == 3
    assert [book.taken(1), book.unconfirmed_timers, book.taken(2)] == [False, 2, True]


def test_a_part_without_timers_from_an_older_version_is_read() -> None:
    old = msgspec.msgpack.encode(["ca", "default", 3, 7, 1, [["cart", "a", b"x"]]])
    assert msgspec.msgpack.decode(old, type=Carry).timers == ()


def shelf(meter: Meter) -> CarryShelf:
    budget = Budget(100_000)
    return CarryShelf(B, budget, 1_000, 10.0, lambda: TimerBook(budget, 1_000), TimerLosses(meter))


def test_a_shelf_counts_the_time_from_the_arrival_and_gives_once() -> None:
    kept, book = shelf(Meter()), TimerBook(Budget(9_999), 9_999)
    carry = Carry(*SHARD, 7, 1, (), (pending("a", 4.0), pending("b", 0.0)))
    assert kept.put(A, carry, MOVING, 100.0) == 0
    assert kept.put(A, carry, MOVING, 103.0) == 0, "a repeated part"
    assert kept.take(SHARD, 8, book) == {}
    assert [(one.key.id, one.due_at) for one in book.empty()] == [("a", 104.0), ("b", 100.0)]
    kept.take(SHARD, 8, book)
    assert len(book) == 0


LATE = Entry(B, 8, "serving", NOBODY, 4)
BACK = Entry(A, 8, "serving", NOBODY, 4)


@pytest.mark.parametrize(
    ("do", "lost"),
    [
        (lambda kept: kept.put(A, Carry(*SHARD, 7, 2, (), (pending("b"),)), LATE, 1.0), 1),
        (lambda kept: kept.put(A, Carry(*SHARD, 7, 2, (), (pending("b"),)), BACK, 1.0), 0),
        (lambda kept: kept.see(SHARD, Entry(C, 8, "serving", NOBODY, 4)), 1),
        (lambda kept: kept.see(SHARD, BACK), 0),
        (lambda kept: kept.take(SHARD, 9, TimerBook(Budget(99), 99)), 1),
        (lambda kept: kept.expire(10.0), 1),
        (lambda kept: kept.clear(), 1),
        (lambda kept: kept.see(SHARD, LATE), 0),
        (
            lambda kept: kept.put(
                A, Carry(*SHARD, 7, 2, (), (pending("b", body=b"x" * 990),)), MOVING, 1.0
            ),
            1,
        ),
    ],
)
def test_what_a_shelf_drops_is_counted(do: Callable[[CarryShelf], Any], lost: int) -> None:
    meter = Meter()
    kept = shelf(meter)
    kept.put(A, Carry(*SHARD, 7, 1, (), (pending("a"),)), MOVING, 0.0)
    do(kept)
    assert meter.lost == lost


# methods


class Sum(msgspec.Struct):
    value: int


class Clock(Entity, name="timers-clock"):
    @handler(name="wire-name")
    async def add(self, sum: Sum, times: int = 1) -> None: ...

    @blocking
    def block(self, sum: Sum) -> None: ...

    async def untyped(self, first, *rest, **more): ...  # type: ignore[no-untyped-def]

    async def unresolved(self, first: Nowhere) -> None: ...  # type: ignore[name-defined]  # noqa: F821

    async def __private(self) -> None: ...

    @classmethod
    async def shared(cls) -> None: ...

    def plain(self) -> None: ...

    @property
    def private(self) -> Callable[..., Any]:
        return self.__private


class Later(Clock, name="timers-later"):
    async def untyped(self, first, *rest, **more): ...  # type: ignore[no-untyped-def]


TIMED = entity_type(Clock).timed


@pytest.mark.parametrize(
    ("fn", "args", "kwargs"),
    [
        (Clock.add, (Sum(3),), {}),
        (Clock.add, (Sum(3), 4), {}),
        (Clock.block, (Sum(3),), {}),
        (Clock.untyped, (1, "two"), {"three": [3.0]}),
        (Clock.unresolved, (1,), {}),
    ],
)
def test_arguments_travel_as_declared(
    fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    method = TIMED.of(fn)
    assert method is not None
    assert method.fn is fn
    assert TIMED.named(method.name) is method
    assert method.decode(method.encode(args, kwargs)) == (args, kwargs)


def test_a_method_is_found_by_the_name_that_its_class_has_for_it() -> None:
    private = TIMED.of(Clock().private.__func__)  # type: ignore[attr-defined]
    assert private is not None
    assert private.name == "_Clock__private"
    assert TIMED.of(functools.partial(Clock.add)) is None
    assert entity_type(Later).timed.of(Clock.untyped) is None, "overridden: super() has no name"
    inherited = entity_type(Later).timed.of(Clock.add)
    assert inherited is not None
    assert inherited.name == "add"
    for name in ("nothing", "shared", "plain", "private", "id"):
        assert TIMED.named(name) is None


def test_versions_may_differ_in_what_they_declare() -> None:
    add, untyped = TIMED.of(Clock.add), TIMED.of(Clock.untyped)
    assert add is not None
    assert untyped is not None
    assert untyped.decode(add.encode((Sum(3),), {})) == (({"value": 3},), {})
    assert add.decode(untyped.encode((1,), {"a": 2})) == ((1,), {"a": 2})
    with pytest.raises(NotExecuted, match="do not fit"):
        add.decode(msgspec.msgpack.encode(["no sum"]))
    for method in (add, untyped):
        with pytest.raises(TypeError, match="cannot travel"):
            method.encode((object(),), {})
