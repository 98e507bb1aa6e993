"""Refs: what they send, what they refuse before sending, and that they are values."""

from __future__ import annotations

import asyncio
from typing import Any, ClassVar, Self

import pytest

from domicile.core.ids import EntityKey
from domicile.entity.model.client import Client
from domicile.entity.model.entity import Entity, entity_type
from domicile.entity.model.handlers import handler
from domicile.entity.model.ref import Call, Outbound, Ref
from domicile.errors import ConfigError, HandlerFailed


class Account(Entity, name="account", role="bank"):
    @handler
    async def deposit(self, amount: int, *, note: str = "") -> int:
        return amount

    @handler(shared=True, name="who", timeout_s=3)
    async def owner(self) -> str:
        return ""

    async def audit(self) -> None: ...


class Ledger(Account, name="ledger"):
    __domicile_durable__: ClassVar[bool] = True


class Door(Entity):
    @handler
    async def open(self) -> bool:
        return True


class Recorder:
    """Takes calls and gives one prepared reply."""

    def __init__(self, reply: bytes = b"\x07") -> None:
        self.reply = reply
        self.calls: list[tuple[str, Call]] = []

    async def ask(self, call: Call) -> Any:
        call.encoded()
        self.calls.append(("ask", call))
        return call.handler.decode_reply(self.reply)

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


def refs() -> tuple[Ref[Account], Ref[Ledger], Recorder]:
    client = RecordingClient()
    return client.ref(Account, "alice"), client.ref(Ledger, "l1"), client.recorder


def test_ask_sends_a_call_and_decodes_the_reply() -> None:
    account, _, out = refs()
    assert asyncio.run(account.ask(Account.deposit, 5)) == 7
    ((how, call),) = out.calls
    kind = entity_type(Account)
    assert (how, call.entity, call.kind) == ("ask", EntityKey("account", "alice"), kind)
    assert call.handler is kind.find(Account.deposit)
    assert call.encoded() == call.handler.encode_args((5,), {})
    assert (call.timeout_s, call.key, call.place) == (None, "", kind.place)


def test_tell_sends_a_call_and_options_travel_with_it() -> None:
    _, ledger, out = refs()
    asyncio.run(ledger.options(timeout_s=0.5).options(key="r1").tell(Ledger.owner))
    ((how, call),) = out.calls
    assert (how, call.entity) == ("tell", EntityKey("ledger", "l1"))
    assert (call.handler.name, call.encoded()) == ("who", b"\x90")
    assert (call.timeout_s, call.key) == (0.5, "r1")


def test_options_leave_the_ref_they_came_from_alone() -> None:
    _, ledger, out = refs()
    other = ledger.options(timeout_s=1, key="a")
    assert other == ledger
    asyncio.run(ledger.tell(Ledger.owner))
    assert (out.calls[0][1].timeout_s, out.calls[0][1].key) == (None, "")


@pytest.mark.parametrize(
    ("method", "args", "kwargs"),
    [
        (Account.audit, (), {}),
        (Door.open, (), {}),
        (Ledger.__init__, (), {}),
        (Account.deposit, (), {}),
        (Account.deposit, (1, "note"), {}),
        (Account.deposit, (1,), {"memo": "x"}),
        (Account.deposit, (object(),), {}),
        ("deposit", (1,), {}),
    ],
)
def test_misuse_is_a_type_error_before_anything_is_sent(
    method: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    account, _, out = refs()
    with pytest.raises(TypeError):
        asyncio.run(account.ask(method, *args, **kwargs))
    with pytest.raises(TypeError):
        asyncio.run(account.tell(method, *args, **kwargs))
    assert out.calls == []


def test_nothing_is_sent_before_the_first_await() -> None:
    account, _, out = refs()

    async def main() -> None:
        first = account.ask(Account.deposit, 1)
        second = account.tell(Account.deposit, 2)
        assert out.calls == []
        await second
        await first

    asyncio.run(main())
    assert [how for how, _ in out.calls] == ["tell", "ask"]


def test_a_reply_of_the_wrong_type_says_that_it_ran() -> None:
    account, _, out = refs()
    out.reply = b"\xa1x"
    with pytest.raises(HandlerFailed, match=r"Account\.deposit ran"):
        asyncio.run(account.ask(Account.deposit, 5))


def test_a_key_needs_a_durable_entity() -> None:
    account, ledger, _ = refs()
    with pytest.raises(ConfigError, match="needs an EventSourced entity"):
        account.options(key="r1")
    ledger.options(key="r1")


def test_options_are_validated_at_once() -> None:
    _, ledger, _ = refs()
    for timeout_s in (0, -1.0, float("nan"), float("inf"), None, "3", True):
        with pytest.raises(ConfigError, match="leave it out for that of the settings"):
            ledger.options(timeout_s=timeout_s)
    wrong: Any
    for wrong in ("", 7, None):
        with pytest.raises(ConfigError, match="key"):
            ledger.options(key=wrong)
    with pytest.raises(TypeError):
        ledger.options(at=1)  # type: ignore[call-arg]


def test_refs_are_values() -> None:
    one, two = RecordingClient(), RecordingClient()
    ref = one.ref(Account, "alice")
    assert ref == two.ref(Account, "alice")
    assert hash(ref) == hash(two.ref(Account, "alice"))
    assert ref != one.ref(Account, "bob")
    assert ref != one.ref(Ledger, "alice")
    assert ref != "alice"
    assert ref.id == "alice"
    assert repr(ref) == "Ref(Account, 'alice')"
    with pytest.raises(AttributeError):
        ref.other = 1  # type: ignore[attr-defined]


def test_a_ref_needs_an_entity_class_and_a_text_id() -> None:
    client = RecordingClient()
    with pytest.raises(TypeError, match="derive a class from Entity"):
        client.ref(int, "x")  # type: ignore[type-var]
    with pytest.raises(TypeError, match="must be text"):
        client.ref(Account, 7)  # type: ignore[arg-type]


@pytest.mark.parametrize("id", ["\ud800", "a\udcff"])
def test_an_id_that_has_no_bytes_is_refused_before_anything_is_sent(id: str) -> None:
    with pytest.raises(ConfigError, match=r"the id of a 'account' can't travel.* nothing was sent"):
        RecordingClient().ref(Account, id)
    assert RecordingClient().ref(Account, "grüße, 世界 🌍").id == "grüße, 世界 🌍"
