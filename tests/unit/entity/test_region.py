"""Regions: which entity, handler and shard a message gets, and what is refused before sending."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Any, Self

import msgspec
import pytest

from domicile.core.hashing import by_message, murmur2, shard_of
from domicile.core.ids import EntityKey
from domicile.entity.model.client import Client
from domicile.entity.model.entity import Entity, entity_type
from domicile.entity.model.handlers import handler
from domicile.entity.model.ref import Call, Outbound
from domicile.entity.model.region import Region, message_types
from domicile.errors import ConfigError, NotExecuted


@dataclass
class Add:
    cart_id: str | None
    item: str = ""


class Remove(msgspec.Struct, tag=True):
    cart_id: str
    item: str = ""


class Priced(msgspec.Struct, tag=True):
    cart_id: str


class Emptied(Priced):
    pass


class Cart(Entity, name="cart", role="shop", shard_id=murmur2):
    @handler
    async def add(self, message: Add) -> int:
        return 7

    @handler(shared=True, name="change")
    async def on_change(self, message: Remove | Priced | None, /) -> str:
        return ""

    @handler
    async def two(self, message: Add, more: int) -> None: ...

    @handler
    async def named(self, *, message: Emptied) -> None: ...

    @handler
    async def rename(self, name: str) -> None: ...

    @handler
    async def tag(self, name: str) -> None: ...

    @handler
    async def clear(self) -> None: ...


class Parcel(Entity, name="parcel", shard_id=by_message):
    @handler
    async def add(self, message: Add) -> int:
        return 7


class Recorder:
    """Takes calls and gives one prepared reply."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, Call]] = []

    async def ask(self, call: Call) -> Any:
        call.encoded()
        self.calls.append(("ask", call))
        return call.handler.decode_reply(b"\x07")

    async def tell(self, call: Call) -> None:
        call.encoded()
        self.calls.append(("tell", call))


class RecordingClient(Client):
    def __init__(self) -> None:
        self.recorder = Recorder()

    def _outbound(self) -> Outbound:
        return self.recorder

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc: object) -> None: ...


def carts(entity_id: Any = lambda message: message.cart_id) -> tuple[Region[Cart], Recorder]:
    client = RecordingClient()
    return client.region(Cart, entity_id=entity_id), client.recorder


def test_ask_finds_entity_and_handler_in_the_message() -> None:
    region, out = carts()
    assert asyncio.run(region.ask(Add("c1", "tea"))) == 7
    kind = entity_type(Cart)
    ((how, call),) = out.calls
    assert (how, call.entity, call.kind) == ("ask", EntityKey("cart", "c1"), kind)
    assert (call.handler, call.place) == (kind.find(Cart.add), kind.place)
    assert call.handler.decode_args(call.encoded()) == ((Add("c1", "tea"),), {})


def test_send_is_a_tell_and_unions_count_for_each_of_their_types() -> None:
    region, out = carts()
    asyncio.run(region.send(Remove("c1")))
    asyncio.run(region.send(Priced("c2")))
    assert [(how, call.entity.id, call.handler.name) for how, call in out.calls] == [
        ("tell", "c1", "change"),
        ("tell", "c2", "change"),
    ]


def test_message_types_are_those_of_an_only_parameter() -> None:
    handlers = entity_type(Cart).handlers
    assert message_types(handlers["add"]) == (Add,)
    assert message_types(handlers["change"]) == (Remove, Priced)
    assert message_types(handlers["rename"]) == (str,)
    for name in ("two", "named", "clear"):
        assert message_types(handlers[name]) == ()


@pytest.mark.parametrize(
    ("message", "why"),
    [
        (7, r"no handler of Cart takes a int.*they take: Add, Priced, Remove, str"),
        (Emptied("c1"), "no handler of Cart takes a Emptied"),
        ("text", r"Cart\.rename and Cart\.tag all take a str.*ref\(Cart, id\)"),
        (Add(None), r"a Add names no 'cart': entity_id gave None"),
        (Add(""), r"a Add names no 'cart': entity_id gave ''"),
        (Add(7), r"a Add names no 'cart': entity_id gave 7"),  # type: ignore[arg-type]
    ],
)
def test_a_message_for_nobody_is_not_executed(message: object, why: str) -> None:
    region, out = carts()
    with pytest.raises(NotExecuted, match=why):
        asyncio.run(region.send(message))
    with pytest.raises(NotExecuted, match=why):
        asyncio.run(region.ask(message))
    assert out.calls == []


def test_an_entity_id_that_raises_is_not_executed_and_keeps_the_cause() -> None:
    region, out = carts(lambda message: message.basket)
    with pytest.raises(NotExecuted, match="entity_id failed for a Add to 'cart'") as caught:
        asyncio.run(region.send(Add("c1")))
    assert isinstance(caught.value.__cause__, AttributeError)
    assert out.calls == []


def test_an_argument_that_cannot_travel_is_a_type_error_as_for_refs() -> None:
    region, out = carts()
    with pytest.raises(TypeError, match="cannot travel"):
        asyncio.run(region.send(Add("c1", object())))  # type: ignore[arg-type]
    assert out.calls == []


def test_shards_of_messages() -> None:
    client = RecordingClient()
    seen: list[tuple[str, int]] = []

    def shard(message: Add, shards: int) -> int:
        seen.append((message.item, shards))
        return int(message.item)

    region = client.region(Parcel, entity_id=lambda m: m.cart_id, shard_id=shard)
    for item in ("3", "8", "-1", "x"):
        asyncio.run(region.send(Add("c1", item)))
    places = [call.place for _, call in client.recorder.calls]
    key = EntityKey("parcel", "c1")
    assert places[0](key, 8) == 3
    assert seen == [("3", 8)]
    for place, why in (
        (places[1], r"shard of a Add gave 8 for parcel 'c1'.*from 0 to 7"),
        (places[2], r"gave -1"),
        (places[3], r"shard of a Add failed for parcel 'c1'.*ValueError"),
    ):
        with pytest.raises(NotExecuted, match=why):
            place(key, 8)
    assert {call.kind.shard_id for _, call in client.recorder.calls} == {"message"}


def test_one_entity_is_never_found_in_two_ways() -> None:
    client = RecordingClient()
    with pytest.raises(ConfigError, match=r"two homes.*shard_id=by_message"):
        client.region(Cart, entity_id=lambda m: m.cart_id, shard_id=lambda m, n: 0)
    with pytest.raises(ConfigError, match=r"say which shard a message belongs to"):
        client.region(Parcel, entity_id=lambda m: m.cart_id)
    asyncio.run(client.ref(Parcel, "c1").tell(Parcel.add, Add("c1")))
    with pytest.raises(NotExecuted, match=r"send through region"):
        client.recorder.calls[0][1].place(EntityKey("parcel", "c1"), 8)


def test_names_defined_around_a_class_are_known() -> None:
    @dataclass
    class Here:
        id: str

    class Local(Entity):
        @handler
        async def take(self, message: Here) -> None: ...

    client = RecordingClient()
    asyncio.run(client.region(Local, entity_id=lambda m: m.id).send(Here("x")))
    (_, call) = client.recorder.calls[0]
    assert (call.handler.name, call.entity.id, call.place) == ("take", "x", shard_of)
    assert repr(client.region(Local, entity_id=str)) == f"Region({Local.__qualname__})"


def test_an_id_that_has_no_bytes_is_not_sent() -> None:
    client = RecordingClient()
    region = client.region(Cart, entity_id=lambda message: message.cart_id)
    with pytest.raises(NotExecuted, match="can't travel"):
        asyncio.run(region.ask(Add("\ud800")))
