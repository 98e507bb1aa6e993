"""A shopping cart whose state is a sequence of events, and a node that is home to carts."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from domicile import EventSourced, Node, Rejection, handler

STORE = "sqlite:///.domicile/carts.db"


@dataclass(frozen=True)
class Put:
    """So many of an article went in."""

    article: str
    count: int


@dataclass(frozen=True)
class TakenOut:
    """So many of an article came out."""

    article: str
    count: int


@dataclass(frozen=True)
class Ordered:
    """The cart went to the till under this number."""

    number: str


Event = Put | TakenOut | Ordered


@dataclass(frozen=True)
class Contents:
    """What the events add up to."""

    articles: dict[str, int] = field(default_factory=dict[str, int])
    order: str | None = None


class AlreadyOrdered(Rejection):
    """The order's number is the argument."""


class NotThatMany(Rejection):
    """The number of those in the cart is the argument."""


class Cart(EventSourced[Contents, Event], name="shop.cart"):
    """One customer's cart."""

    @staticmethod
    def initial(id: str, /) -> Contents:
        """Before the first event."""
        return Contents()

    @staticmethod
    def apply(contents: Contents, event: Event, /) -> Contents:
        """Pure: it runs again at every new home."""
        match event:
            case Put(article, count):
                return replace(contents, articles=_changed(contents, article, count))
            case TakenOut(article, count):
                return replace(contents, articles=_changed(contents, article, -count))
            case Ordered(number):
                return replace(contents, order=number)

    @handler
    async def put(self, article: str, count: int = 1) -> int:
        """Put some in; says how many of them the cart holds now."""
        await self._open()
        contents = await self.persist(Put(article, count))
        return contents.articles[article]

    @handler
    async def take_out(self, article: str, count: int = 1) -> int:
        """Take some out; says how many are left."""
        held = (await self._open()).articles.get(article, 0)
        if held < count:
            raise NotThatMany(held)
        contents = await self.persist(TakenOut(article, count))
        return contents.articles.get(article, 0)

    @handler
    async def order(self, number: str) -> dict[str, int]:
        """Close the cart; says what was ordered."""
        await self._open()
        return (await self.persist(Ordered(number))).articles

    @handler(shared=True)
    async def articles(self) -> dict[str, int]:
        """What the cart holds. Shared handlers run beside each other: they change nothing."""
        return (await self.state()).articles

    async def _open(self) -> Contents:
        contents = await self.state()
        if contents.order is not None:
            raise AlreadyOrdered(contents.order)
        return contents


def _changed(contents: Contents, article: str, by: int) -> dict[str, int]:
    articles = {**contents.articles, article: contents.articles.get(article, 0) + by}
    return {name: count for name, count in articles.items() if count}


node = Node(STORE, entities=[Cart])
