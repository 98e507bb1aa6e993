"""Definitions: what is accepted, what is refused and when, and what an instance can do."""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from importlib.machinery import ModuleSpec
from random import Random
from typing import Any, Generic, TypeVar

import pytest

from domicile.core.hashing import by_message, murmur2, shard_of, shardcake, xxh3
from domicile.core.ids import EntityKey
from domicile.core.state.records import TypeRecord
from domicile.entity.model.entity import Context, Entity, catalogue, entity_type, make
from domicile.entity.model.handlers import HandlerOptions, handler
from domicile.entity.model.ref import Ref
from domicile.errors import ConfigError

T = TypeVar("T")
NOON = datetime(2024, 1, 1, 12, tzinfo=UTC)


class Account(Entity, name="account", role="bank", idle_s=60):
    @handler
    async def deposit(self, amount: int, note: str = "") -> int:
        return amount

    @handler(shared=True, name="who", timeout_s=2.0)
    async def owner(self) -> str:
        return "o"

    async def audit(self) -> None: ...


class Savings(Account, name="savings"):
    @handler
    async def deposit(self, amount: int, note: str = "") -> int:
        return 2 * amount


def by_length(entity_id: str, shards: int) -> int:
    return len(entity_id) % shards


class ByLength(Entity, shard_id=by_length):
    pass


class FakeContext:
    def __init__(self) -> None:
        self.id, self.epoch, self.random = "alice", 7, Random(1)
        self.calls: list[tuple[Any, ...]] = []

    def ref(self, kind: type[Any], id: str, /) -> Ref[Any]:
        self.calls.append(("ref", kind, id))
        return Ref(entity_type(kind), id, None)  # type: ignore[arg-type]

    def resource(self, kind: type[T], /) -> T:
        return kind()

    def now(self) -> datetime:
        return NOON

    def after(
        self,
        delay_s: float,
        method: Callable[..., Coroutine[Any, Any, Any]],
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
    ) -> None:
        self.calls.append(("after", delay_s, method.__name__, args, dict(kwargs)))

    def passivate(self) -> None:
        self.calls.append(("passivate",))


# -- @handler


def test_handler_returns_the_function_itself_with_its_options() -> None:
    async def fn(self: Entity) -> None: ...

    assert handler(fn) is fn
    assert vars(fn)["__domicile_handler__"] == HandlerOptions()
    assert handler(shared=True, name="n", timeout_s=1)(fn) is fn
    assert vars(fn)["__domicile_handler__"] == HandlerOptions(True, "n", 1)


def test_handler_refuses_a_plain_function_naming_it() -> None:
    def fn(self: Entity) -> int:
        return 0

    with pytest.raises(TypeError, match=r"locals>\.fn must be an `async def`"):
        handler(fn)  # type: ignore[type-var]


def test_handler_refuses_an_async_generator_and_what_is_no_function() -> None:
    async def fn(self: Entity) -> AsyncIterator[int]:
        yield 0

    with pytest.raises(TypeError, match="streams are not available"):
        handler(fn)
    with pytest.raises(TypeError, match="async def"):
        handler(shared=True)(staticmethod(fn))  # type: ignore[type-var]


@pytest.mark.parametrize("options", [{"timeout_s": 0}, {"timeout_s": -1.0}, {"name": ""}])
def test_handler_refuses_bad_options(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        handler(**options)


# -- entity types


def test_a_type_has_the_keywords_of_its_class_and_is_made_once() -> None:
    kind = entity_type(Account)
    assert (kind.name, kind.role, kind.idle_s, kind.cls) == ("account", "bank", 60, Account)
    assert not kind.durable
    assert entity_type(Account) is kind
    assert entity_type(Savings) is not kind
    assert list(kind.handlers) == ["deposit", "who"]
    assert kind.handlers["who"].shared
    assert kind.handlers["who"].timeout_s == 2.0
    assert not kind.handlers["deposit"].shared


def test_the_keywords_have_defaults_and_are_not_inherited() -> None:
    class Plain(Account):
        pass

    class Still(ByLength):
        pass

    kind = entity_type(Plain)
    assert (kind.name, kind.role, kind.idle_s) == ("Plain", "default", None)
    assert entity_type(Still).shard_id == "xxh3"


def test_a_type_finds_shards_by_the_function_of_its_class() -> None:
    kind = entity_type(ByLength)
    assert kind.shard_id == f"{__name__}:by_length"
    assert kind.place(EntityKey("ByLength", "four"), 64) == 4
    assert kind.record == TypeRecord("default", f"{__name__}:by_length")
    assert entity_type(Account).place is shard_of
    assert entity_type(Account).record == TypeRecord("bank", "xxh3")


@pytest.mark.parametrize(
    ("function", "name"),
    [(xxh3, "xxh3"), (murmur2, "murmur2"), (shardcake, "shardcake"), (by_message, "message")],
)
def test_the_named_forms_have_their_own_names(function: Any, name: str) -> None:
    kind = entity_type(type("Named", (Entity,), {}, shard_id=function))
    assert kind.shard_id == name
    if name != "message":
        assert 0 <= kind.place(EntityKey("Named", "x"), 8) < 8


def test_a_function_of_a_script_is_named_as_others_import_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def local(entity_id: str, shards: int) -> int:
        return 0

    monkeypatch.setattr(local, "__module__", "__main__")
    main = sys.modules["__main__"]
    monkeypatch.setattr(main, "__spec__", None)
    monkeypatch.setattr(main, "__file__", "/some/where/app.py", raising=False)
    kind = entity_type(type("Scripted", (Entity,), {}, shard_id=local))
    assert kind.shard_id == f"app:{local.__qualname__}"
    monkeypatch.setattr(main, "__spec__", ModuleSpec("package.app", None))
    kind = entity_type(type("Scripted", (Entity,), {}, shard_id=local))
    assert kind.shard_id == f"package.app:{local.__qualname__}"


async def suspends(entity_id: str, shards: int) -> int:
    return 0


@pytest.mark.parametrize(
    ("function", "why"),
    [
        (7, "plain function"),
        (None, "plain function"),
        (int, "plain function"),
        (partial(by_length, shards=3), "plain function"),
        (suspends, "plain function"),
        (lambda entity_id: 0, "must take an entity id and the number of shards"),
        (lambda entity_id, shards, more: 0, "must take an entity id and the number of shards"),
    ],
)
def test_what_is_no_shard_function_is_refused_at_definition(function: Any, why: str) -> None:
    with pytest.raises(ConfigError, match=f"Bad: .*{why}"):
        type("Bad", (Entity,), {}, shard_id=function)


@pytest.mark.parametrize(
    "keywords", [{"name": ""}, {"name": "a\0b"}, {"role": ""}, {"role": "a/b"}, {"idle_s": 0}]
)
def test_bad_class_keywords_are_refused_at_definition(keywords: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="Bad"):
        type("Bad", (Entity,), {}, **keywords)


def test_what_is_not_an_entity_has_no_type() -> None:
    for wrong in (int, Entity, "account", None, Account.__new__(Account)):
        with pytest.raises(TypeError, match="derive a class from Entity"):
            entity_type(wrong)  # type: ignore[arg-type]


def test_find_resolves_functions_to_the_override() -> None:
    kind = entity_type(Savings)
    assert kind.find(Account.deposit) is kind.find(Savings.deposit) is kind.handlers["deposit"]
    assert kind.find(Account.deposit).fn is Savings.deposit
    assert kind.find(Account.owner).name == "who"


def test_find_follows_an_override_to_its_new_wire_name() -> None:
    class Renamed(Account):
        @handler(name="put")
        async def deposit(self, amount: int, note: str = "") -> int:
            return 0

    assert entity_type(Renamed).find(Account.deposit).name == "put"


def test_find_takes_handlers_of_an_interface_that_is_no_entity() -> None:
    class Openable(ABC):
        @handler
        @abstractmethod
        async def open(self) -> bool: ...

    class Door(Openable, Entity):
        @handler
        async def open(self) -> bool:
            return True

    assert entity_type(Door).find(Openable.open).fn is Door.open


def test_find_says_what_is_wrong() -> None:
    class Silent(Account):
        async def deposit(self, amount: int, note: str = "") -> int:
            return 0

    account = entity_type(Account)
    with pytest.raises(TypeError, match=r"Account\.audit is not marked with @handler"):
        account.find(Account.audit)
    with pytest.raises(TypeError, match=r"Savings\.deposit is not a method of Account"):
        account.find(Savings.deposit)
    with pytest.raises(TypeError, match=r"overrides the handler .* without @handler"):
        entity_type(Silent).find(Account.deposit)
    with pytest.raises(TypeError, match=r"pass the function Account\.deposit"):
        account.find(Account().deposit)
    for wrong in ("deposit", None, [], print):
        with pytest.raises(TypeError, match="is not a handler of Account"):
            account.find(wrong)  # type: ignore[arg-type]


def test_two_handlers_cannot_share_a_wire_name_but_an_alias_is_one_handler() -> None:
    class Twice(Entity):
        @handler(name="x")
        async def a(self) -> None: ...

        @handler(name="x")
        async def b(self) -> None: ...

    class Alias(Entity):
        @handler
        async def a(self) -> None: ...

        b = a

    with pytest.raises(ConfigError, match="both called 'x'"):
        entity_type(Twice)
    assert list(entity_type(Alias).handlers) == ["a"]
    assert entity_type(Alias).find(Alias.b).name == "a"


# -- types of parameters


def test_names_local_to_the_defining_function_are_resolved() -> None:
    @dataclass
    class Point:
        x: int

    class Local(Entity):
        class Inner(str): ...

        @handler
        async def move(self, to: list[Point]) -> dict[str, Point]:
            return {}

        @handler
        async def nested(self, at: Point | None = None) -> None: ...

    found = entity_type(Local).find(Local.move)
    assert found.decode_args(found.encode_args(([Point(1)],), {})) == (([Point(1)],), {})
    assert found.decode_reply(found.encode_reply({"a": Point(2)})) == {"a": Point(2)}
    nested = entity_type(Local).find(Local.nested)
    assert nested.decode_args(nested.encode_args((), {})) == ((), {})
    assert nested.decode_args(nested.encode_args((Point(3),), {})) == ((Point(3),), {})


def test_a_local_base_class_keeps_its_own_locals() -> None:
    def base() -> type[Entity]:
        @dataclass
        class Hidden:
            x: int

        class Base(Entity):
            @handler
            async def hide(self, what: Hidden) -> int:
                return what.x

        return Base

    Derived = type("Derived", (base(),), {})  # noqa: N806
    found = entity_type(Derived).handlers["hide"]
    ((value,), _) = found.decode_args(found.encode_args(({"x": 4},), {}))
    assert value.x == 4


def test_a_name_that_cannot_be_resolved_is_refused_with_its_place() -> None:
    class Lost(Entity):
        @handler
        async def go(self, ok: int, where: Nowhere) -> None: ...  # type: ignore[name-defined]  # noqa: F821

    with pytest.raises(ConfigError, match=r"Lost\.go: the parameter 'where' .*Nowhere.* module"):
        catalogue([Lost])
    with pytest.raises(ConfigError, match="Nowhere"):
        entity_type(Lost).handlers["go"].encode_args((1, 2), {})


class Thing: ...


def test_types_that_cannot_travel_are_refused_wherever_they_hide() -> None:
    @dataclass
    class Holder:
        things: dict[str, list[Thing]]

    class Takes(Entity):
        @handler
        async def go(self, x: int, thing: Thing) -> None: ...

    class Gives(Entity):
        @handler
        async def go(self) -> Thing: ...

    class Nested(Entity):
        @handler
        async def go(self, holder: Holder) -> None: ...

    class Calls(Entity):
        @handler
        async def go(self, fn: Callable[[], int]) -> None: ...

    with pytest.raises(ConfigError, match=r"Takes\.go: the parameter 'thing' Thing cannot travel"):
        catalogue([Takes])
    with pytest.raises(ConfigError, match=r"Gives\.go: the return type Thing cannot travel"):
        catalogue([Gives])
    with pytest.raises(ConfigError, match=r"Nested\.go: the parameter 'holder'.* about Thing"):
        catalogue([Nested])
    with pytest.raises(ConfigError, match=r"Calls\.go: the parameter 'fn'"):
        catalogue([Calls])


def test_star_parameters_are_refused() -> None:
    class Star(Entity):
        @handler
        async def go(self, *args: int) -> None: ...

    class Stars(Entity):
        @handler
        async def go(self, **kwargs: int) -> None: ...

    with pytest.raises(ConfigError, match=r"Star\.go takes \*args"):
        entity_type(Star)
    with pytest.raises(ConfigError, match=r"Stars\.go takes \*\*kwargs"):
        entity_type(Stars)


def test_generic_and_intermediate_classes_are_allowed() -> None:
    class Box(Entity, Generic[T]):
        @handler
        async def put(self, item: T) -> T:
            return item

    class IntBox(Box[int], name="int-box"):
        pass

    found = catalogue([IntBox])["int-box"].find(IntBox.put)
    assert found.decode_args(found.encode_args((5,), {})) == ((5,), {})


# -- catalogue


def test_catalogue_gives_types_by_name() -> None:
    assert catalogue([Account, Savings]) == {
        "account": entity_type(Account),
        "savings": entity_type(Savings),
    }
    assert catalogue([]) == {}


def test_catalogue_refuses_duplicates_naming_both() -> None:
    class Other(Entity, name="account"):
        pass

    with pytest.raises(ConfigError, match=r"test_entity_types\.Account and .*Other are both named"):
        catalogue([Account, Other])
    with pytest.raises(ConfigError, match="list a class once"):
        catalogue([Account, Account])


def test_catalogue_refuses_what_no_home_could_make() -> None:
    class Needy(Entity):
        def __init__(self, db: object) -> None: ...

    class Abstract(Entity, ABC):
        @handler
        @abstractmethod
        async def go(self) -> None: ...

    with pytest.raises(ConfigError, match="not an entity class"):
        catalogue([int])  # type: ignore[list-item]
    with pytest.raises(ConfigError, match="'db'"):
        catalogue([Needy])
    with pytest.raises(ConfigError, match="abstract"):
        catalogue([Abstract])


# -- instances


class Ticker(Entity):
    def __init__(self) -> None:
        self.born = (self.id, self.now())

    @handler
    async def tick(self, n: int = 0, *, loud: bool = False) -> None: ...

    async def unmarked(self) -> None: ...

    def plain(self) -> None: ...


def test_make_gives_the_context_before_init() -> None:
    context = FakeContext()
    ticker = make(entity_type(Ticker), context)
    assert isinstance(ticker, Ticker)
    assert ticker.born == ("alice", NOON)
    assert (ticker.id, ticker.epoch, ticker.random) == ("alice", 7, context.random)
    assert ticker.resource(dict) == {}
    assert ticker.ref(Account, "bob") == Ref(entity_type(Account), "bob", None)  # type: ignore[arg-type]
    ticker.passivate()
    assert context.calls == [("ref", Account, "bob"), ("passivate",)]
    assert vars(ticker) == {"born": ("alice", NOON)}


def test_after_takes_any_coroutine_method_of_the_entity_itself() -> None:
    context = FakeContext()
    ticker = make(entity_type(Ticker), context)
    assert isinstance(ticker, Ticker)
    ticker.after(1.5, ticker.tick, 5, loud=True)
    ticker.after(0, ticker.unmarked)
    assert context.calls == [
        ("after", 1.5, "tick", (5,), {"loud": True}),
        ("after", 0, "unmarked", (), {}),
    ]


def test_after_refuses_everything_else() -> None:
    context = FakeContext()
    ticker, other = (make(entity_type(Ticker), context) for _ in range(2))
    assert isinstance(ticker, Ticker)
    assert isinstance(other, Ticker)

    async def free() -> None: ...

    wrongs: list[Any] = [ticker.plain, other.tick, Ticker.tick, free, "tick", None]
    for wrong in wrongs:
        with pytest.raises(TypeError, match=r"Ticker\.after needs"):
            ticker.after(1, wrong)
    for delay_s in (-1, float("nan"), float("inf")):
        with pytest.raises(ValueError, match="delay"):
            ticker.after(delay_s, ticker.tick)
    assert context.calls == []


def test_an_entity_made_by_hand_says_that_it_has_no_home() -> None:
    account = Account()
    uses: list[Callable[[], Any]] = [
        lambda: account.id,
        lambda: account.epoch,
        lambda: account.random,
        account.now,
        account.passivate,
        lambda: account.ref(Account, "x"),
        lambda: account.resource(dict),
        lambda: account.after(1, account.audit),
    ]
    for use in uses:
        with pytest.raises(RuntimeError, match="this Account has no home"):
            use()


def test_the_fake_is_a_context() -> None:
    context: Context = FakeContext()
    assert context.id == "alice"
