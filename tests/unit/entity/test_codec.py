"""Bytes and back: arguments, replies, errors."""

from __future__ import annotations

import inspect
import os
import subprocess
import sys
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from enum import Enum
from traceback import format_exception
from typing import Annotated, Any, Literal
from uuid import UUID

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from domicile.core.wire import ReplyStatus
from domicile.entity.model.codec import (
    MsgspecCodec,
    Packing,
    decode_error,
    encode_error,
    encode_failure,
)
from domicile.errors import (
    CallCycle,
    CallTooDeep,
    ConfigError,
    DomicileError,
    Fenced,
    HandlerFailed,
    MaybeExecuted,
    NotExecuted,
    Overloaded,
    Rejection,
    Unavailable,
)


class Colour(Enum):
    RED = "red"


@dataclass(frozen=True)
class Line:
    sku: str
    price: Decimal = Decimal(1)


@dataclass
class Order:
    id: UUID
    at: datetime
    lines: tuple[Line, ...]
    tags: set[str] = field(default_factory=set)
    parent: Order | None = None


class Point(msgspec.Struct):
    x: int
    y: int | None = None


ORDER = Order(UUID(int=7), datetime(2024, 1, 1, tzinfo=UTC), (Line("tea"),), {"a", "b"})


async def rich(
    self: object,
    order: Order,
    colour: Colour,
    points: list[Point],
    pair: tuple[int, str],
    either: int | str | None,
    after: timedelta,
    names: frozenset[str],
    raw: bytes,
    limit: Annotated[int, msgspec.Meta(ge=0)],
    mode: Literal["a", "b"],
    table: dict[int, Line],
) -> Order | None: ...


async def simple(self: object, a: int, b: str = "b", *, c: float = 1.0) -> int: ...


async def positional(self: object, a: int, b: int = 2, /, c: int = 3, *, d: int) -> None: ...


async def untyped(self, a, b=None): ...  # type: ignore[no-untyped-def]


def packing(fn: Any) -> Packing:
    return Packing(fn.__name__, fn)


def through(fn: Any, *args: Any, **kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    return packing(fn).decode_args(packing(fn).encode_args(args, kwargs))


def test_rich_values_arrive_as_themselves() -> None:
    args = (
        Order(UUID(int=1), datetime(2024, 5, 1, tzinfo=UTC), (), set(), ORDER),
        Colour.RED,
        [Point(1), Point(2, 3)],
        (1, "x"),
        None,
        timedelta(seconds=1.5),
        frozenset({"x"}),
        b"\x00\xff",
        3,
        "a",
        {1: Line("pot", Decimal("2.50"))},
    )
    assert through(rich, *args) == (args, {})
    found = packing(rich)
    assert found.decode_reply(found.encode_reply(ORDER)) == ORDER
    assert found.decode_reply(found.encode_reply(None)) is None


def call(fn: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """What the parameters hold once the function runs."""
    bound = inspect.signature(fn).bind(None, *args, **kwargs)
    bound.apply_defaults()
    return dict(bound.arguments)


numbers = st.integers(-(2**63), 2**64 - 1)


@given(st.lists(numbers, max_size=4), st.dictionaries(st.sampled_from("abcde"), numbers))
def test_a_call_that_python_accepts_arrives_and_another_is_refused(
    args: list[int], kwargs: dict[str, int]
) -> None:
    try:
        expected = call(positional, tuple(args), kwargs)
    except TypeError:
        with pytest.raises(TypeError, match="positional"):
            through(positional, *args, **kwargs)
    else:
        assert call(positional, *through(positional, *args, **kwargs)) == expected


def test_what_is_left_out_takes_the_default_of_the_receiver() -> None:
    async def newer(self: object, a: int, b: str = "new", *, c: float = 2.0) -> int: ...

    for args, kwargs in [((1,), {}), ((1,), {"c": 5.0}), ((), {"a": 1})]:
        body = packing(simple).encode_args(args, kwargs)
        arrived = call(newer, *packing(newer).decode_args(body))
        assert arrived["b"] == "new"
        assert arrived["c"] == kwargs.get("c", 2.0)


def test_more_than_fifteen_parameters() -> None:
    names = [f"p{n}" for n in range(20)]
    scope: dict[str, Any] = {}
    exec(f"async def many(self, {', '.join(names)}): ...", scope)
    assert through(scope["many"], *range(20)) == (tuple(range(20)), {})


def test_a_missing_annotation_means_anything() -> None:
    assert through(untyped, {"a": [1, "x"]}, b=2) == (({"a": [1, "x"]}, 2), {})


def test_values_that_cannot_travel_are_refused_by_name() -> None:
    for wrong in (object(), 2**70, lambda: 0, "\ud800"):
        with pytest.raises(TypeError, match="untyped: an argument cannot travel"):
            through(untyped, wrong)
    with pytest.raises(TypeError, match="simple ran, but its reply cannot travel"):
        packing(simple).encode_reply(object())


@pytest.mark.parametrize(
    ("body", "text"),
    [
        (["x"], r"parameter 'a'"),
        ([1, 2], r"parameter 'b'"),
        ([], "0 of at least 1"),
        ([1, "b", 1.0, 4], "number"),
        ({"b": "x"}, "'a' is missing"),
        ({"a": 1, "z": 2}, "unknown field `z`"),
        ("text", "Expected"),
        (7, "Expected"),
    ],
)
def test_arguments_that_do_not_fit_were_not_executed(body: Any, text: str) -> None:
    with pytest.raises(NotExecuted, match=text) as caught:
        packing(simple).decode_args(msgspec.msgpack.encode(body))
    assert "simple(a, b='b', *, c=1.0) did not run" in str(caught.value)


@given(st.binary(max_size=20))
def test_garbage_is_decoded_or_refused_but_never_breaks(body: bytes) -> None:
    try:
        args, kwargs = packing(simple).decode_args(body)
    except NotExecuted:
        return
    assert call(simple, args, kwargs)


def test_a_required_keyword_cannot_be_cut_off() -> None:
    with pytest.raises(NotExecuted, match="3 of at least 4"):
        packing(positional).decode_args(msgspec.msgpack.encode([1, 2, 3]))
    assert packing(positional).decode_args(b"\x94\x01\x02\x03\x04") == ((1, 2, 3), {"d": 4})


def test_a_reply_that_does_not_fit_ran() -> None:
    with pytest.raises(HandlerFailed, match="simple ran, but its reply does not fit"):
        packing(simple).decode_reply(b"\xa1x")


def test_sets_have_the_same_bytes_in_every_run() -> None:
    program = (
        "from domicile.entity.model.codec import Packing\n"
        "async def go(self, names: set[str]) -> None: ...\n"
        "print(Packing('go', go).encode_args(({'a', 'b', 'c', 'd', 'e', 'f'},), {}).hex())\n"
    )
    outputs = [
        subprocess.run(
            [sys.executable, "-c", program],
            env={
                **os.environ,
                "PYTHONHASHSEED": seed,
                "PYTHONPATH": os.pathsep.join(sys.path),
            },
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("1", "2", "3")
    ]
    assert outputs[0] == outputs[1] == outputs[2] != ""


def test_sets_that_cannot_be_sorted_travel_and_dicts_keep_their_order() -> None:
    async def go(self: object, lines: set[Line], mixed: frozenset[int | str]) -> None: ...

    args = ({Line("a"), Line("b")}, frozenset({1, "x"}))
    assert through(go, *args) == (args, {})

    async def table(self: object, names: set[str], by_name: dict[str, int]) -> None: ...

    ((_, by_name), _) = through(table, {"x"}, {"b": 1, "a": 2})
    assert list(by_name) == ["b", "a"]


def test_the_codec_port() -> None:
    codec = MsgspecCodec()
    assert codec.decode(codec.encode(ORDER), Order) == ORDER
    assert codec.decode(codec.encode((1, "a")), tuple[int, str]) == (1, "a")
    with pytest.raises(msgspec.ValidationError, match="Expected `int`"):
        codec.decode(codec.encode("x"), int)
    with pytest.raises(TypeError):
        codec.encode(object())


def test_star_parameters_cannot_be_packed() -> None:
    async def star(self: object, *rest: int) -> None: ...

    with pytest.raises(ConfigError, match=r"star takes \*rest"):
        packing(star)


# -- errors


class Broke(Rejection):
    """Made from its arguments as they are."""


class Short(Rejection, name="too-short"):
    def __init__(self, missing: Decimal, at: datetime) -> None:
        super().__init__(missing, at)
        self.missing = missing


class Lossy(Rejection):
    def __init__(self, missing: int) -> None:
        super().__init__(f"{missing} are missing")


def back(encoded: tuple[ReplyStatus, bytes]) -> DomicileError:
    return decode_error(*encoded)


def test_rejections_cross_as_themselves() -> None:
    for error in (Broke("alice", 5), Broke(), Rejection("no"), Rejection()):
        encoded = encode_failure(error)
        assert encoded[0] is ReplyStatus.REJECTED
        assert encoded == encode_error(error)
        assert type(back(encoded)) is type(error)
        assert back(encoded).args == error.args


def test_rejections_with_a_typed_constructor_keep_the_types() -> None:
    error = back(encode_failure(Short(Decimal("1.50"), datetime(2024, 1, 1, tzinfo=UTC))))
    assert isinstance(error, Short)
    assert error.missing == Decimal("1.50")
    assert error.args == (Decimal("1.50"), datetime(2024, 1, 1, tzinfo=UTC))


def test_an_unknown_rejection_is_a_failure_with_its_name() -> None:
    error = decode_error(ReplyStatus.REJECTED, msgspec.msgpack.encode(("Elsewhere", (1, "x"))))
    assert type(error) is HandlerFailed
    assert "'Elsewhere' (1, 'x')" in str(error)


def test_a_rejection_that_cannot_be_made_again_is_a_failure_that_says_how() -> None:
    error = back(encode_failure(Lossy(5)))
    assert type(error) is HandlerFailed
    assert "Lossy" in str(error)
    assert "constructible from its `args`" in str(error)


def test_a_rejection_whose_arguments_cannot_travel_is_a_failure() -> None:
    status, body = encode_failure(Broke(object()))
    assert status is ReplyStatus.FAILED
    error = decode_error(status, body)
    assert type(error) is HandlerFailed
    assert "Broke" in str(error)
    assert "cannot travel" in str(error)


def raised(error: Exception) -> Exception:
    try:
        raise error
    except Exception as caught:
        return caught


def test_other_exceptions_are_failures_with_type_message_and_place() -> None:
    error = back(encode_failure(raised(KeyError("colour"))))
    assert type(error) is HandlerFailed
    assert "KeyError: 'colour'" in str(error)
    assert "\n" not in str(error), "one line, as any error"
    assert error.remote_traceback.startswith("test_codec:")
    assert error.remote_traceback.endswith(" in raised")
    assert os.sep not in error.remote_traceback
    assert error.remote_traceback in "".join(format_exception(error)), "shown with it"


def test_what_caused_a_failure_is_told_with_it() -> None:
    def blame(number: int) -> None:
        try:
            if number:
                blame(number - 1)
            raise KeyError(number)
        except (KeyError, LookupError) as error:
            raise LookupError(f"level {number}") from error

    try:
        blame(5)
    except LookupError as error:
        answer = encode_failure(error)
    told = back(answer)
    assert isinstance(told, HandlerFailed)
    assert str(told) == "LookupError: level 5"
    causes = [line for line in told.remote_traceback.splitlines() if line.startswith("because of")]
    assert causes[0] == "because of LookupError: level 4"
    assert len(causes) == 3


def test_a_failure_further_down_keeps_its_own_place() -> None:
    below = back(encode_failure(raised(KeyError("colour"))))
    above = back(encode_failure(raised(below)))
    assert isinstance(below, HandlerFailed)
    assert isinstance(above, HandlerFailed)
    assert str(above) == str(below)
    assert above.remote_traceback.endswith(
        f"at the home of what it asked:\n{below.remote_traceback}"
    )  # fmt: skip


def test_a_cycle_of_causes_and_endless_recursion_end() -> None:
    first, second = ValueError("first"), ValueError("second")
    first.__cause__, second.__cause__ = second, first
    assert "second" in encode_failure(first)[1].decode("utf-8", "replace")

    def forever(number: int) -> None:
        forever(number + 1)

    try:
        forever(0)
    except RecursionError as error:
        _, body = encode_failure(error)
    assert len(body) < 10_000


def test_a_failure_is_bounded_and_survives_any_text() -> None:
    class Mute(Exception):
        def __str__(self) -> str:
            raise RuntimeError

    _, body = encode_failure(ValueError("x" * 100_000))
    assert len(body) < 5_000
    assert "its text raises RuntimeError" in str(back(encode_failure(Mute())))
    assert "ValueError: ?" in str(back(encode_failure(ValueError("\ud800"))))
    assert str(back(encode_failure(HandlerFailed("ran out of time")))) == "ran out of time"


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (NotExecuted("x"), ReplyStatus.NOT_EXECUTED),
        (Unavailable("x"), ReplyStatus.NOT_EXECUTED),
        (CallTooDeep("x"), ReplyStatus.NOT_EXECUTED),
        (Overloaded("x"), ReplyStatus.OVERLOADED),
        (CallCycle("x"), ReplyStatus.CYCLE),
        (MaybeExecuted("x"), ReplyStatus.MAYBE_EXECUTED),
    ],
)
def test_the_runtime_s_own_answers_keep_their_class(
    error: DomicileError, status: ReplyStatus
) -> None:
    encoded = encode_error(error)
    assert encoded[0] is status
    assert type(back(encoded)) is type(error)
    assert str(back(encoded)) == "x"


def test_a_class_derived_from_not_executed_is_its_nearest_known_one() -> None:
    class Busy(Overloaded):
        pass

    assert type(back(encode_error(Busy("x")))) is Overloaded


@pytest.mark.parametrize(
    "error", [NotExecuted("x"), Unavailable("x"), CallCycle("x"), MaybeExecuted("x"), Fenced("x")]
)
def test_what_escapes_from_a_handler_never_claims_that_it_did_not_run(error: Exception) -> None:
    answer = back(encode_failure(error))
    assert type(answer) is HandlerFailed
    assert f"{type(error).__name__}: x" in str(answer)


@pytest.mark.parametrize(
    "status", [status for status in ReplyStatus if status is not ReplyStatus.OK]
)
@pytest.mark.parametrize("body", [b"", b"plain words", b"\xff\xfe", b"\x92\x01\x02"])
def test_an_unreadable_error_still_tells_whether_it_ran(status: ReplyStatus, body: bytes) -> None:
    expected = {
        ReplyStatus.FAILED: HandlerFailed,
        ReplyStatus.REJECTED: HandlerFailed,
        ReplyStatus.NOT_EXECUTED: NotExecuted,
        ReplyStatus.OVERLOADED: Overloaded,
        ReplyStatus.MAYBE_EXECUTED: MaybeExecuted,
        ReplyStatus.CYCLE: CallCycle,
    }
    error = decode_error(status, body)
    assert type(error) is expected[status]
    assert str(error)


def test_a_body_cannot_change_what_the_status_says() -> None:
    body = msgspec.msgpack.encode(("Unavailable", "x"))
    assert type(decode_error(ReplyStatus.OVERLOADED, body)) is Overloaded
    assert type(decode_error(ReplyStatus.MAYBE_EXECUTED, body)) is MaybeExecuted


def test_ok_is_not_an_error() -> None:
    with pytest.raises(ValueError, match="OK"):
        decode_error(ReplyStatus.OK, b"\xc0")
