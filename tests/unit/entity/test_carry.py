"""Carried fields: which they are, what is kept of them and for whom, and how they travel."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import msgspec
import pytest
from carry_lab import MOVING, OTHER, SHARD, A, B, C, Cart, Line, fields_of, key, made, part
from hypothesis import given
from hypothesis import strategies as st

from domicile import ConfigError, Entity, EventSourced
from domicile.core.ids import NOBODY, Incarnation, ShardKey
from domicile.core.state.shardmap import Entry
from domicile.core.wire import Carried, Carry
from domicile.entity.carry.budget import Budget
from domicile.entity.carry.piles import OVERHEAD_BYTES, PART_BYTES, CarryBook, CarryShelf
from domicile.entity.carry.timers import TimerBook, TimerLosses
from domicile.entity.model.entity import catalogue, entity_type
from domicile.ports.meter import NoMeter

if TYPE_CHECKING:
    from fractions import Fraction

# fields


class Wide(Cart, name="carry-wide", carry=True):
    limit: int = 3  # type: ignore[misc]
    total: ClassVar[float] = 1.0  # type: ignore[misc]
    later: list[Later] = []  # noqa: RUF012


@dataclass
class Later:
    word: str


class Plain(Cart, name="carry-plain"):
    pass


class Slim(Entity, name="carry-slim", carry=True):
    __slots__ = ("count",)
    count: int


def test_annotated_fields_are_carried_and_nothing_else() -> None:
    fields = fields_of(Cart)
    assert fields.names == ("total", "lines", "_seen", "at")
    cart, other = made(Cart), made(Cart)
    cart.__init__()
    other.__init__()
    cart.lines.append(Line("tea", 2))
    cart._seen = {"x", "y"}
    cart.total = 7.5
    fields.restore(other, fields.encode(cart))
    assert (other.total, other.lines, other._seen) == (7.5, [Line("tea", 2)], {"x", "y"})
    assert other.lock is not cart.lock
    assert "at" not in other.__dict__, "what was not set stays the class's"


def test_carrying_is_not_inherited_but_fields_are() -> None:
    assert entity_type(Plain).fields is None
    assert fields_of(Wide).names == ("lines", "_seen", "at", "limit", "later")


def test_slots_are_carried() -> None:
    slim, other = made(Slim), made(Slim)
    fields = fields_of(Slim)
    assert fields.encode(slim) == msgspec.msgpack.encode({})
    slim.count = 3
    fields.restore(other, fields.encode(slim))
    assert other.count == 3


def test_versions_may_differ_by_fields_but_not_by_types() -> None:
    class Old(Entity, name="versioned", carry=True):
        gone: int = 0
        same: int = 0
        text: int = 0

    class New(Entity, name="versioned", carry=True):
        same: int = 0
        fresh: str = "new"
        text: int = 0

    class Wrong(Entity, name="versioned", carry=True):
        text: str = ""
        same: int = 0

    old, new, wrong = made(Old), made(New), made(Wrong)
    old.gone, old.same, old.text = 1, 2, 3
    body = fields_of(Old).encode(old)
    fields_of(New).restore(new, body)
    assert (new.same, new.fresh, new.text) == (2, "new", 3)
    with pytest.raises(msgspec.ValidationError):
        fields_of(Wrong).restore(wrong, body)
    assert wrong.__dict__ == {}, "nothing of it was set"


def test_what_cannot_travel_is_refused_where_the_class_is_written() -> None:
    with pytest.raises(ConfigError, match=r"the field 'lock' cannot travel.*ClassVar"):

        class Locked(Entity, carry=True):
            lock: threading.Lock

    with pytest.raises(ConfigError, match="the field 'call' cannot travel"):

        class Calling(Entity, carry=True):
            call: Callable[[], None]

    with pytest.raises(ConfigError, match="carry=True, but no field is annotated"):

        class Bare(Entity, carry=True):
            count = 0

    with pytest.raises(ConfigError, match="the field 'count' has no usable type"):

        class Broken(Entity, carry=True):
            count: int[  # type: ignore[valid-type]
                3
            ]


def test_a_name_that_nobody_knows_is_refused_before_a_node_has_it() -> None:
    class Unknown(Entity, name="carry-unknown", carry=True):
        part: Fraction

    with pytest.raises(ConfigError, match=r"a field cannot be resolved.*Fraction"):
        catalogue([Unknown])


def test_types_of_the_function_around_the_class_are_known() -> None:
    @dataclass
    class Inner:
        number: int

    class Local(Entity, name="carry-local", carry=True):
        inner: Inner | None = None

    local, other = made(Local), made(Local)
    local.inner = Inner(3)
    fields_of(Local).restore(other, fields_of(Local).encode(local))
    assert other.inner == Inner(3)


def test_a_value_that_cannot_travel_says_so() -> None:
    cart = made(Cart)
    cart.__init__()
    cart.lines.append(object())
    with pytest.raises(TypeError, match="Cart: a field cannot travel"):
        fields_of(Cart).encode(cart)


def test_event_sourced_entities_carry_their_own_fields_only() -> None:
    @dataclass
    class Added:
        amount: int

    class Sum(EventSourced[int, Added], name="carry-sum", carry=True):
        hits: int = 0

    assert fields_of(Sum).names == ("hits",)


# the book


def size(id: str, body: bytes) -> int:
    return len("cart") + len(id) + len(body) + OVERHEAD_BYTES


def test_a_book_keeps_until_it_is_used_or_handed_over() -> None:
    budget = Budget(10_000)
    book = CarryBook(budget, 1_000)
    assert book.keep(key("a"), b"1")
    assert book.keep(key("a"), b"22")
    assert book.keep(key("b"), b"3")
    assert book.get(key("a")) == b"22"
    book.drop(key("b"))
    book.drop(key("b"))
    assert book.get(key("b")) is None
    assert budget.used_bytes == size("a", b"22")
    [carry] = book.hand_over(SHARD, 7, 5)
    assert carry == Carry(*SHARD, 7, 5, (Carried("cart", "a", b"22"),))
    assert len(book) == budget.used_bytes == 0
    assert book.hand_over(SHARD, 7, 6) == ()
    assert not book.taken(5), "that one is not waited for any more"


def test_a_book_waits_for_all_its_parts_once() -> None:
    book = CarryBook(Budget(10 * PART_BYTES), 10 * PART_BYTES)
    for id in "abcde":
        book.keep(key(id), b"x" * (PART_BYTES // 2))
    parts = book.hand_over(SHARD, 1, 10)
    assert [len(part.entities) for part in parts] == [2, 2, 1]
    assert [part.id for part in parts] == [10, 11, 12]
    assert [book.taken(id) for id in (12, 12, 99, 10, 11, 11)] == [
        False, False, False, False, True, False,
    ]  # fmt: skip
    book.keep(key("a"), b"")
    book.hand_over(SHARD, 2, 20)
    assert book.give_up() == 1
    assert not book.taken(20)


def test_who_does_not_fit_is_left_out_and_the_others_are_not() -> None:
    budget = Budget(600)
    book = CarryBook(budget, 500)
    assert book.keep(key("small"), b"x" * 50)
    assert not book.keep(key("large"), b"x" * 400)
    assert book.keep(key("more"), b"x" * 50)
    assert not CarryBook(budget, 500).keep(key("next"), b"x" * 300), "all books together"
    assert book.fill([(key("one"), b"x" * 20), (key("two"), b"x" * 400)]) == 1
    assert book.clear() == 3
    assert budget.used_bytes == 0


@given(
    script=st.lists(
        st.tuples(
            st.sampled_from(("keep", "drop", "hand over", "clear")),
            st.sampled_from("abcd"),
            st.binary(max_size=300),
        )
    )
)
def test_a_book_is_a_bounded_map(script: list[tuple[str, str, bytes]]) -> None:
    budget, limit = Budget(900), 700
    book, neighbour = CarryBook(budget, limit), CarryBook(budget, limit)
    neighbour.keep(key("n"), b"x" * 100)
    fixed = budget.used_bytes
    model: dict[str, bytes] = {}
    for step, id, body in script:
        if step == "keep":
            model.pop(id, None)
            used = sum(size(one, held) for one, held in model.items()) + size(id, body)
            fits = used <= limit and used + fixed <= 900
            assert book.keep(key(id), body) is fits
            if fits:
                model[id] = body
        elif step == "drop":
            book.drop(key(id))
            model.pop(id, None)
        elif step == "clear":
            assert book.clear() == len(model)
            model.clear()
        else:
            parts = book.hand_over(SHARD, 1, 1)
            sent = {one.id: one.body for part in parts for one in part.entities}
            assert sent == model
            model.clear()
        assert {id: book.get(key(id)) for id in "abcd"} == {id: model.get(id) for id in "abcd"}
        assert budget.used_bytes == fixed + sum(size(id, body) for id, body in model.items())


# the shelf


def timers() -> TimerBook:
    return TimerBook(Budget(10_000), 10_000)


def shelf(limit: int = 10_000, budget: Budget | None = None) -> CarryShelf:
    budget = Budget(limit) if budget is None else budget
    return CarryShelf(B, budget, limit, 10.0, timers, TimerLosses(NoMeter()))


def test_a_shelf_gives_once_and_only_to_the_next_epoch() -> None:
    kept = shelf()
    assert kept.put(A, part(7, 1, "a", "b"), MOVING, 0.0) == 0
    assert kept.put(A, part(7, 2, "c"), MOVING, 0.0) == 0
    assert kept.put(A, part(7, 2, "c"), MOVING, 0.0) == 0, "a repeated part"
    assert kept.take(OTHER, 8, timers()) == {}
    assert sorted(one.id for one in kept.take(SHARD, 8, timers())) == ["a", "b", "c"]
    assert kept.take(SHARD, 8, timers()) == {}
    kept.put(A, part(7, 3, "a"), MOVING, 0.0)
    assert kept.take(SHARD, 9, timers()) == {}, "someone was at home there in between"
    assert kept.take(SHARD, 8, timers()) == {}


@pytest.mark.parametrize(
    ("known", "kept"),
    [
        (Entry(), True),
        (Entry(A, 7, "serving", NOBODY, 2), True),
        (MOVING, True),
        (Entry(C, 6, "serving", NOBODY, 2), True),
        (Entry(C, 7, "moving", B, 3), False),
        (Entry(B, 8, "serving", NOBODY, 4), False),
        (Entry(C, 8, "serving", NOBODY, 4), False),
    ],
)
def test_a_shelf_takes_only_what_may_still_come(known: Entry, kept: bool) -> None:
    assert (shelf().put(A, part(7, 1, "a"), known, 0.0) is not None) is kept


@pytest.mark.parametrize(
    ("entry", "stays"),
    [
        (Entry(A, 7, "moving", B, 4), True),
        (Entry(C, 6, "serving", NOBODY, 1), True),
        (Entry(B, 8, "serving", NOBODY, 4), True),
        (Entry(B, 8, "moving", C, 5), True),
        (Entry(C, 8, "serving", NOBODY, 4), False),
        (Entry(B, 9, "serving", NOBODY, 4), False),
        (Entry(C, 7, "serving", NOBODY, 4), False),
    ],
)
def test_a_shelf_drops_what_is_no_one_s_next_epoch(entry: Entry, stays: bool) -> None:
    kept = shelf()
    kept.put(A, part(7, 1, "a"), MOVING, 0.0)
    assert kept.see(OTHER, entry) == 0
    assert kept.see(SHARD, entry) == (0 if stays else 1)
    assert bool(kept.take(SHARD, 8, timers())) is stays


def test_an_older_batch_gives_way_and_a_newer_one_does_not() -> None:
    kept = shelf()
    kept.put(A, part(7, 1, "old"), MOVING, 0.0)
    assert kept.put(C, part(9, 1, "new"), MOVING, 0.0) == 0
    assert kept.put(A, part(7, 2, "late"), MOVING, 0.0) is None
    assert kept.put(A, part(9, 2, "forged"), MOVING, 0.0) is None
    assert [one.id for one in kept.take(SHARD, 10, timers())] == ["new"]


def test_a_shelf_forgets_after_a_while_and_is_bounded() -> None:
    budget = Budget(500)
    kept = shelf(300, budget)
    assert kept.put(A, part(7, 1, "a", "b", body=b"x" * 100), MOVING, 0.0) == 1
    assert kept.put(A, part(7, 1, "a", body=b"x" * 100, shard=OTHER), MOVING, 5.0) == 0
    assert kept.put(A, part(7, 1, "a", body=b"x" * 200, shard=ShardKey("r", 1)), MOVING, 5.0) == 1
    assert kept.expire(9.9) == 0
    assert kept.expire(10.0) == 1
    assert len(kept) == 2
    kept.clear()
    assert budget.used_bytes == len(kept) == 0


owners = st.sampled_from((A, B, C))


@given(
    script=st.lists(
        st.one_of(
            st.tuples(st.just("put"), owners, st.integers(1, 6)),
            st.tuples(st.just("see"), owners, st.integers(1, 6)),
            st.tuples(st.just("expire"), owners, st.integers(1, 6)),
        ),
        max_size=12,
    )
)
def test_nothing_is_used_twice_nor_by_any_but_the_next_home(
    script: list[tuple[str, Incarnation, int]],
) -> None:
    """I1: whatever the order, what B gets in an epoch was sent in the one before, by its owner."""
    kept, known, now, id = shelf(), Entry(), 0.0, 0
    used: list[tuple[int, str]] = []
    for step, who, epoch in script:
        now += 3.0
        if step == "put":
            id += 1
            kept.put(who, part(epoch, id, f"{who[0]}{epoch}.{id}"), known, now)
        elif step == "expire":
            kept.expire(now)
        elif epoch > known.epoch:
            before, known = known, Entry(who, epoch, "serving", NOBODY, epoch)
            if who == B:
                for one in kept.take(SHARD, epoch, timers()):
                    used.append((epoch, one.id))
                    sender, sent = one.id[0], int(one.id[1:].split(".")[0])
                    assert sent == epoch - 1
                    assert before.epoch != sent or before.owner[0] == sender
            kept.see(SHARD, known)
    assert len(used) == len(set(used))
