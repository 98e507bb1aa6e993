"""What a local call hands over without a copy, and what the codec copies (SM-27)."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from domicile import Entity, HandlerFailed, Node, Settings, handler
from domicile.entity.model.entity import entity_type


@dataclass
class Box:
    items: list[str]


class Shelf(Entity, name="shelf"):
    def __init__(self) -> None:
        self.kept = Box([])

    @handler
    async def keep(self, box: Box) -> Box:
        self.kept = box
        return box

    @handler
    async def look(self) -> list[str]:
        return self.kept.items

    @handler
    async def text(self, value: str) -> str:
        return value

    @handler
    async def number(self, value: int) -> int:
        return value

    @handler
    async def two(self, first: bytes, second: bool) -> bytes:
        return first + b"!" * second

    @handler
    async def wrong(self) -> int:
        return "no number"  # type: ignore[return-value]


def shared(name: str, *args: Any) -> bool:
    found = entity_type(Shelf).handlers[name]
    found.check()
    return found.may_share(args)


@pytest.mark.parametrize(
    ("name", "args", "whether"),
    [
        ("text", ("plain",), True),
        ("text", ("ä",), False),
        ("text", ("x" * 65_537,), False),
        ("text", (b"x",), False),
        ("text", (), False),
        ("number", (5,), True),
        ("number", (True,), False),
        ("number", (1 << 64,), False),
        ("two", (b"", True), True),
        ("two", (b"", 1), False),
        ("two", (bytearray(), True), False),
        ("two", (b"",), False),
        ("keep", (Box([]),), False),
        ("look", (), True),
    ],
)
def test_only_values_that_nobody_can_change_are_shared(
    name: str, args: tuple[Any, ...], whether: bool
) -> None:
    assert shared(name, *args) is whether


@given(st.one_of(st.integers(), st.text(), st.binary(), st.floats(), st.booleans(), st.none()))
def test_what_is_shared_could_have_travelled(value: Any) -> None:
    """Within a process nothing is accepted that another process would refuse."""
    for name in ("text", "number"):
        found = entity_type(Shelf).handlers[name]
        found.check()
        if found.may_share((value,)):
            body = found.encode_args((value,), {})
            assert found.decode_args(body) == ((value,), {})
        if found.may_share_reply(value):
            assert found.decode_reply(found.encode_reply(value)) == value


@pytest.mark.scenario("SM-27")
@pytest.mark.parametrize("serialize_local", [False, True])
def test_a_local_call_never_shares_what_can_be_changed(serialize_local: bool) -> None:
    settings = Settings(shards=4, settle_s=0.05, serialize_local=serialize_local)

    async def main() -> None:
        async with Node(
            f"memory://shelf-{serialize_local}", entities=[Shelf], settings=settings
        ) as node:
            shelf = node.ref(Shelf, "s")
            given = Box(["a"])
            for _ in range(2):  # the first one starts it, the second runs within its call
                back = await shelf.ask(Shelf.keep, given)
                given.items.append("b")
                back.items.append("c")
                assert await shelf.ask(Shelf.look) == ["a"]
                (await shelf.ask(Shelf.look)).append("d")
                assert await shelf.ask(Shelf.look) == ["a"]
                given.items.clear()
                given.items.append("a")

    asyncio.run(main())


@pytest.mark.scenario("SM-27")
@pytest.mark.parametrize(("serialize_local", "times"), [(False, 0), (True, 3)])
def test_with_serialize_local_all_sends_are_coded_as_if_remote(
    serialize_local: bool, times: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    coded: list[str] = []
    found = entity_type(Shelf).handlers["text"]
    encode, decode = found.encode_args, found.decode_args

    def encoding(args: Any, kwargs: Any) -> bytes:
        coded.append("encoded")
        return encode(args, kwargs)

    def decoding(body: bytes) -> Any:
        coded.append("decoded")
        return decode(body)

    async def main() -> None:
        settings = Settings(shards=4, settle_s=0.05, serialize_local=serialize_local)
        name = f"memory://coded-{serialize_local}"
        async with Node(name, entities=[Shelf], settings=settings) as node:
            shelf = node.ref(Shelf, "x")
            assert await shelf.ask(Shelf.look) is not None
            monkeypatch.setattr(found, "encode_args", encoding)
            monkeypatch.setattr(found, "decode_args", decoding)
            for _ in range(3):
                assert await shelf.ask(Shelf.text, "plain") == "plain"

    asyncio.run(main())
    assert coded == ["encoded", "decoded"] * times


def test_a_local_reply_of_the_wrong_type_fails_as_a_remote_one_does() -> None:
    async def main() -> None:
        settings = Settings(shards=4, settle_s=0.05)
        async with Node("memory://wrong", entities=[Shelf], settings=settings) as node:
            for _ in range(2):
                with pytest.raises(HandlerFailed, match="declared return type"):
                    await node.ref(Shelf, "x").ask(Shelf.wrong)

    asyncio.run(main())
