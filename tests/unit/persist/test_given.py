"""The testing kit for durable entities: given a past, when a message comes, then."""

from __future__ import annotations

import random
from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from domicile import (
    Durable,
    Entity,
    EventSourced,
    Forgettable,
    HandlerFailed,
    Rejection,
    handler,
    upcast,
)
from domicile.testing import given


@dataclass(frozen=True)
class Added:
    sku: str
    qty: int


@dataclass(frozen=True)
class CheckedOut:
    total: int


@dataclass(frozen=True)
class State:
    items: dict[str, int] = field(default_factory=dict[str, int])
    closed: bool = False


class CartClosed(Rejection, name="given.CartClosed"):
    """Its id is the argument."""


class Prices(Entity, name="prices"):
    @handler
    async def of(self, sku: str) -> int:
        return len(sku)


class Cart(EventSourced[State, Added | CheckedOut], name="cart", snapshot_every=2):
    @staticmethod
    def initial(id: str, /) -> State:
        return State()

    @staticmethod
    def apply(state: State, event: Added | CheckedOut, /) -> State:
        match event:
            case Added(sku, qty):
                return replace(state, items={**state.items, sku: state.items.get(sku, 0) + qty})
            case CheckedOut():
                return replace(state, closed=True)

    @upcast("Put")
    @staticmethod
    def _put(old: dict[str, Any], /) -> Added:
        return Added(old["article"], 1)

    @handler
    async def add(self, sku: str, qty: int = 1) -> int:
        state = await self.state()
        if state.closed:
            raise CartClosed(self.id)
        state = await self.persist(Added(sku, qty))
        return sum(state.items.values())

    @handler
    async def check_out(self) -> int:
        prices, total = self.ref(Prices, "all"), 0
        for sku, qty in (await self.state()).items.items():
            total += qty * await prices.ask(Prices.of, sku)
        await self.persist(CheckedOut(total))
        self.after_commit(self._thank)
        return total

    async def _thank(self) -> None:
        self.resource(list).append(f"thank you, {self.id}")

    @handler
    async def begin_anew(self, sku: str) -> None:
        await self.delete()
        await self.persist(Added(sku, 1))

    @handler
    async def break_down(self) -> None:
        await self.persist(Added("lost", 1))
        raise KeyError("in the handler")


def test_given_when_then() -> None:
    (
        given(Cart, "c1", Added("tea", 1))
        .when(Cart.add, "tea", 2)
        .then(events=[Added("tea", 2)], reply=3, state=State({"tea": 3}))
    )


def test_a_rejection_and_a_failure_store_nothing() -> None:
    given(Cart, "c1", CheckedOut(1)).when(Cart.add, "tea").rejects(CartClosed, "c1")
    failed = given(Cart, "c1").when(Cart.break_down).fails("in the handler")
    assert failed.events == []
    with pytest.raises(HandlerFailed, match="in the handler"):
        failed.then(reply=None)
    with pytest.raises(HandlerFailed, match="in the handler"):
        assert failed.reply is None


def test_one_message_after_another() -> None:
    mails: list[str] = []
    done = (
        given(Cart, "c1", resources={list: mails}, beside=[Prices])
        .when(Cart.add, "tea")
        .then(reply=1)
        .when(Cart.add, "milk", 2)
        .then(reply=3)
        .when(Cart.check_out)
        .then(events=[CheckedOut(11)], reply=11)
        .when(Cart.add, "late")
        .rejects(CartClosed)
    )
    assert done.state.closed
    assert mails == ["thank you, c1"]


def test_a_past_that_goes() -> None:
    """What follows a deletion or an erasure is told apart from the past, and comes after it."""
    left = given(Cart, "c1", Added("tea", 1), Added("tea", 1)).when(Cart.begin_anew, "milk")
    left.then(events=[Added("milk", 1)], state=State({"milk": 1})).when(Cart.add, "tea").then(
        reply=2
    )


def test_what_is_not_as_expected_says_so() -> None:
    outcome = given(Cart, "c1").when(Cart.add, "tea", 2)
    with pytest.raises(AssertionError, match=r"reply: expected 3, got 2"):
        outcome.then(reply=3)
    with pytest.raises(AssertionError, match=r"events: expected \[\], got \[Added"):
        outcome.then(events=[])
    with pytest.raises(AssertionError, match=r"state: expected State"):
        outcome.then(state=State())
    with pytest.raises(AssertionError, match=r"expected CartClosed, got the reply 2"):
        outcome.rejects(CartClosed)
    with pytest.raises(AssertionError, match=r"expected a failure with 'x', got the reply 2"):
        outcome.fails("x")
    refused = given(Cart, "c1", CheckedOut(1)).when(Cart.add, "tea")
    with pytest.raises(CartClosed):
        refused.then(reply=1)
    with pytest.raises(AssertionError, match=r"arguments of CartClosed"):
        refused.rejects(CartClosed, "c2")


@dataclass(frozen=True)
class Odd:
    what: object


@dataclass(frozen=True)
class Rolled:
    by: tuple[int, ...]


class Dice(EventSourced[Any, Odd | Rolled], name="dice"):
    @staticmethod
    def initial(id: str, /) -> Any:
        return 0

    @staticmethod
    def apply(state: Any, event: Odd | Rolled, /) -> Any:
        return random.random() if isinstance(event, Rolled) else event.what

    @handler
    async def roll(self) -> None:
        await self.persist(Rolled((1, 2)))

    @handler
    async def keep(self, numbers: tuple[int, ...]) -> None:
        await self.persist(Odd(numbers))

    @handler
    async def keep_code(self) -> None:
        await self.persist(Odd(len))


def test_what_does_not_survive_storing_fails() -> None:
    with pytest.raises(AssertionError, match=r"Odd.*does not come back.*\(1, 2\).*\[1, 2\]"):
        given(Dice, "d", Odd((1, 2))).when(Dice.roll)
    with pytest.raises(AssertionError, match=r"state of Dice does not come back"):
        given(Dice, "d").when(Dice.keep, (1, 2))
    with pytest.raises(AssertionError, match=r"make apply\(\) pure"):
        given(Dice, "d").when(Dice.roll)
    given(Dice, "d").when(Dice.keep_code).fails("unsupported")
    with pytest.raises(TypeError, match="unsupported"):
        given(Dice, "d", Odd(len)).when(Dice.roll)


@dataclass(frozen=True)
class Settings:
    language: str = "en"
    name: Forgettable[str] | None = None


class Preferences(Durable[Settings], name="preferences"):
    @staticmethod
    def initial(id: str, /) -> Settings:
        return Settings()

    @handler
    async def choose(self, language: str) -> str:
        before = await self.state()
        await self.save(replace(before, language=language))
        return before.language

    @handler
    async def forget_me(self) -> int:
        return (await self.erase()).values


def test_a_whole_state() -> None:
    ada = Forgettable("Ada")
    (
        given(Preferences, "p", state=Settings("sv", ada))
        .when(Preferences.choose, "fi")
        .then(reply="sv", state=Settings("fi", ada))
        .when(Preferences.forget_me)
        .then(reply=1, state=Settings("fi", Forgettable.erased()))
    )
    given(Preferences, "p").when(Preferences.choose, "fi").then(reply="en")


def test_what_cannot_be_given() -> None:
    loose: Any = given
    with pytest.raises(TypeError, match="EventSourced or Durable class"):
        loose(Prices, "x")
    with pytest.raises(TypeError, match="has no events"):
        loose(Preferences, "x", Added("tea", 1))
    with pytest.raises(TypeError, match="events that lead to the state"):
        loose(Cart, "x", state=State())
    with pytest.raises(TypeError, match="not one of this entity's events"):
        loose(Cart, "x", Settings()).when(Cart.check_out)
