"""How arguments, replies and errors become bytes and come back typed (msgpack by msgspec).

Used by definitions and refs on the sending side, by cells and durable entities on the receiving
side. Must never unpickle, and must never say "not executed" about a message that ran (I9).

A local call may hand over some values without copying them (`SHARED`). A value is shared only if it
is immutable, if its type is exactly the declared one, and if the codec would accept it. This is
asked before every local ask, so each answer is one small function.
"""

from __future__ import annotations

import inspect
import re
import sys
import typing
from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any, NoReturn

import msgspec

from domicile.core.wire import ReplyStatus
from domicile.errors import (
    CallCycle,
    CallTooDeep,
    ConfigError,
    DomicileError,
    HandlerFailed,
    MaybeExecuted,
    NotExecuted,
    Overloaded,
    Rejection,
    Unavailable,
)

MOST = 65_536
"""Longer values go through the codec, which knows the limit of a message."""

_LEAST_INT, _MOST_INT = -(1 << 63), (1 << 64) - 1

SHARED: dict[Any, Callable[[Any], bool]] = {
    int: lambda value: type(value) is int and _LEAST_INT <= value <= _MOST_INT,
    str: lambda value: type(value) is str and len(value) <= MOST and value.isascii(),
    bytes: lambda value: type(value) is bytes and len(value) <= MOST,
    float: lambda value: type(value) is float,
    bool: lambda value: type(value) is bool,
    type(None): lambda value: value is None,
}

_ONE: dict[Any, Callable[[tuple[Any, ...]], bool]] = {
    int: lambda a: len(a) == 1 and type(a[0]) is int and _LEAST_INT <= a[0] <= _MOST_INT,
    str: lambda a: len(a) == 1 and type(a[0]) is str and len(a[0]) <= MOST and a[0].isascii(),
    bytes: lambda a: len(a) == 1 and type(a[0]) is bytes and len(a[0]) <= MOST,
}


def nothing_shared(_values: Any) -> bool:
    """Nothing is shared: the codec copies."""
    return False


def sharing_of(kinds: Sequence[Any]) -> Callable[[tuple[Any, ...]], bool]:
    """Whether the arguments of one function may be shared, as a function of them."""
    if not kinds:
        return lambda args: not args
    if not all(isinstance(kind, type) and kind in SHARED for kind in kinds):
        return nothing_shared
    if len(kinds) == 1 and kinds[0] in _ONE:
        return _ONE[kinds[0]]
    fits = [SHARED[kind] for kind in kinds]
    count = len(fits)
    return lambda args: (
        len(args) == count and all(fit(value) for fit, value in zip(fits, args, strict=True))
    )


_MESSAGE_CHARS = 2_000
_TRACEBACK_FRAMES = 12
_TRACEBACK_CHARS = 4_000
_CAUSES = 3
_NO_ARGS = b"\x90"

_encode = msgspec.msgpack.Encoder().encode
_encode_sorted = msgspec.msgpack.Encoder(order="deterministic").encode


class MsgspecCodec:
    """The codec in use: msgpack, decoded into the declared kind."""

    __slots__ = ("_decoders",)

    def __init__(self) -> None:
        self._decoders: dict[Any, msgspec.msgpack.Decoder[Any]] = {}

    def encode(self, value: Any) -> bytes:
        """The bytes of a value; TypeError if it is of a kind that cannot travel."""
        return _encode(value)

    def decode(self, data: bytes, kind: Any) -> Any:
        """A value of the declared kind, or `msgspec.ValidationError` saying what does not fit."""
        decoder = self._decoders.get(kind)
        if decoder is None:
            decoder = self._decoders[kind] = msgspec.msgpack.Decoder(kind)
        return decoder.decode(data)


class Packing:
    """The arguments and the reply of one function as bytes.

    Arguments that fill the first parameters without a gap travel as an array, others as a map by
    name. So an argument that the caller left out takes the default of the function that runs. The
    types are resolved at the first use, when names defined further down in a module exist.
    """

    __slots__ = (
        "_by_count",
        "_by_name",
        "_encode",
        "_fn",
        "_least",
        "_namespace",
        "_parameters",
        "_plain",
        "_reply",
        "_signature",
        "label",
        "shares_args",
        "shares_reply",
    )

    def __init__(
        self, label: str, fn: Callable[..., Any], namespace: Mapping[str, Any] | None = None
    ) -> None:
        self.label = label
        self._fn = fn
        self._namespace = dict(namespace or {})
        signature = inspect.signature(fn)
        parameters = tuple(signature.parameters.values())[1:]
        for parameter in parameters:
            if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
                raise ConfigError(
                    f"{label} takes {str(parameter).split(':')[0]}, but every argument of a "
                    "message needs a name and a type; list the parameters one by one"
                )
        self._parameters = parameters
        self._signature = signature.replace(parameters=parameters)
        self._plain = sum(p.kind is not p.KEYWORD_ONLY for p in parameters)
        # An array must reach the last parameter without a default. If that one is keyword-only, its
        # position is beyond what positions can fill, and the quick path is never taken.
        needed = [n for n, p in enumerate(parameters, 1) if p.default is p.empty]
        self._least = max(needed, default=0)
        self._encode = _encode
        self.shares_args: Callable[[tuple[Any, ...]], bool] = nothing_shared
        self.shares_reply: Callable[[Any], bool] = nothing_shared
        """Whether values may be handed over within a process without being copied."""
        self._by_count: list[msgspec.msgpack.Decoder[tuple[Any, ...]]] | None = None
        self._by_name: msgspec.msgpack.Decoder[Any]
        self._reply: msgspec.msgpack.Decoder[Any]

    def encode_args(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bytes:
        """The bytes of a call's arguments; TypeError if the function cannot be called so."""
        if self._by_count is None:
            self.resolve()
        values: Any = args
        if kwargs or not self._least <= len(args) <= self._plain:
            values = self._bind(args, kwargs)
        try:
            return self._encode(values)
        except Exception as error:
            raise TypeError(f"{self.label}: an argument cannot travel: {error}") from error

    def decode_args(self, body: bytes) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments as the function declares them; `NotExecuted` if they do not fit."""
        decoders = self._by_count
        if decoders is None:
            decoders = self.resolve()
        try:
            first = body[0]
            if 0x90 <= first <= 0x9F:
                count = first & 0x0F
            elif first == 0xDC:
                count = int.from_bytes(body[1:3], "big")
            else:
                return self._from_names(self._by_name.decode(body))
            values = decoders[count].decode(body)
        except IndexError:
            self._refuse(TypeError("their number is not one it takes"))
        except NotExecuted:
            raise
        except Exception as error:
            # Also an error from an argument's `__post_init__`, or an argument nested too deep: it
            # must fail this one message, not the frame in which it came (I6).
            self._refuse(error)
        if count < self._least:
            self._refuse(TypeError(f"{count} of at least {self._least} arguments were sent"))
        if count <= self._plain:
            return values, {}
        rest = zip(self._parameters[self._plain :], values[self._plain :], strict=False)
        return values[: self._plain], {p.name: value for p, value in rest}

    def encode_reply(self, value: Any) -> bytes:
        """The bytes of what the function returned; TypeError if it cannot travel."""
        if self._by_count is None:
            self.resolve()
        try:
            return self._encode(value)
        except Exception as error:
            raise TypeError(f"{self.label} ran, but its reply cannot travel: {error}") from error

    def decode_reply(self, body: bytes) -> Any:
        """The reply as the function declares it; `HandlerFailed` if it does not fit (it ran)."""
        if self._by_count is None:
            self.resolve()
        try:
            return self._reply.decode(body)
        except Exception as error:
            raise HandlerFailed(
                f"{self.label} ran, but its reply does not fit the declared return type: {error}. "
                "Return what the annotation says, and run the same version on both sides."
            ) from error

    def resolve(self) -> list[msgspec.msgpack.Decoder[tuple[Any, ...]]]:
        """Resolve and check all types now; `ConfigError` names the parameter that cannot travel."""
        kinds = [self._kind(f"parameter {p.name!r}", p.annotation) for p in self._parameters]
        reply = self._kind("return type", self._signature.return_annotation)
        optional = [
            (parameter.name, typing.Union[kind, msgspec.UnsetType], msgspec.UNSET)  # noqa: UP007
            for parameter, kind in zip(self._parameters, kinds, strict=True)
        ]
        names = msgspec.defstruct("Arguments", optional, kw_only=True, forbid_unknown_fields=True)
        self._by_name = msgspec.msgpack.Decoder(names)
        self._reply = msgspec.msgpack.Decoder(reply)
        if self._plain == len(kinds):
            self.shares_args = sharing_of(kinds)
        self.shares_reply = (
            SHARED.get(reply, nothing_shared) if isinstance(reply, type) else nothing_shared
        )
        self._encode = _encode_sets if _only_sets([*kinds, reply]) else _encode
        self._by_count = [
            msgspec.msgpack.Decoder(tuple.__class_getitem__(tuple(kinds[:count])))
            for count in range(len(kinds) + 1)
        ]
        return self._by_count

    def __str__(self) -> str:
        bare = [p.replace(annotation=p.empty) for p in self._parameters]
        return f"{self.label}{inspect.Signature(bare)}"

    def _bind(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        try:
            given = self._signature.bind(*args, **kwargs).arguments
        except TypeError as error:
            raise TypeError(f"{self}: {error}") from None
        first = self._parameters[: len(given)]
        if all(parameter.name in given for parameter in first):
            return tuple(given[parameter.name] for parameter in first)
        return given

    def _from_names(self, given: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        args: list[Any] = []
        kwargs: dict[str, Any] = {}
        for parameter in self._parameters:
            value = getattr(given, parameter.name)
            if value is msgspec.UNSET:
                if parameter.default is parameter.empty:
                    self._refuse(TypeError(f"{parameter.name!r} is missing"))
            elif parameter.kind is parameter.POSITIONAL_ONLY:
                args.append(value)
            else:
                kwargs[parameter.name] = value
        return tuple(args), kwargs

    def _refuse(self, error: Exception) -> NoReturn:
        text = _message(error)
        if not isinstance(error, msgspec.DecodeError | TypeError):
            text = f"{type(error).__name__}: {text}"
        at = re.search(r"\$\[(\d+)\]", text)
        if at and int(at[1]) < len(self._parameters):
            text = f"{text} (parameter {self._parameters[int(at[1])].name!r})"
        raise NotExecuted(
            f"{self} did not run, the arguments do not fit: {text}. "
            "Pass what the handler declares, and run the same version on both sides."
        ) from error

    def _kind(self, what: str, annotation: Any) -> Any:
        if annotation is inspect.Parameter.empty:
            return Any
        holder = SimpleNamespace(__annotations__={"it": annotation})
        unwrapped = inspect.unwrap(self._fn)
        try:
            kind = typing.get_type_hints(
                holder, unwrapped.__globals__, self._namespace, include_extras=True
            )["it"]
        except (NameError, AttributeError, SyntaxError, TypeError) as error:
            raise ConfigError(
                f"{self.label}: the {what} {annotation!r} cannot be resolved: {error}. Define or "
                "import that name at module level, outside `if TYPE_CHECKING`."
            ) from error
        try:
            for part in parts_of(kind):
                if isinstance(part, msgspec.inspect.CustomType):
                    raise TypeError(f"nothing is known about {_show(part.cls)}")
            msgspec.msgpack.Decoder(kind)
        except (NameError, AttributeError, TypeError, ValueError, RuntimeError) as error:
            shown = annotation if isinstance(annotation, str) else _show(kind)
            raise ConfigError(
                f"{self.label}: the {what} {shown} cannot travel: {error}. Use built-in types, "
                "dataclasses, enums or msgspec Structs, and define them at module level."
            ) from error
        return kind


def _show(kind: Any) -> str:
    return kind.__qualname__ if isinstance(kind, type) else repr(kind)


def parts_of(kind: Any) -> list[Any]:
    """All types that a kind is made of, itself included."""
    parts: dict[int, Any] = {}
    pending: list[Any] = [msgspec.inspect.type_info(kind)]
    while pending:
        node = pending.pop()
        if id(node) in parts:
            continue
        parts[id(node)] = node
        for name in node.__struct_fields__:
            part = getattr(node, name)
            if isinstance(part, msgspec.inspect.Type | msgspec.inspect.Field):
                pending.append(part)
            elif name in ("fields", "types", "item_types"):
                pending.extend(part)
    return list(parts.values())


def _only_sets(kinds: list[Any]) -> bool:
    """Whether there are sets to sort, and no type whose own order sorting would destroy."""
    found = [part for kind in kinds for part in parts_of(kind)]
    ordered = msgspec.inspect.DictType | msgspec.inspect.TypedDictType | msgspec.inspect.AnyType
    sets = msgspec.inspect.SetType | msgspec.inspect.FrozenSetType
    return any(isinstance(part, sets) for part in found) and not any(
        isinstance(part, ordered) for part in found
    )


def _encode_sets(value: Any) -> bytes:
    """Encode sets sorted: a set of strings iterates differently in every run, and one seed must
    give one history."""
    try:
        return _encode_sorted(value)
    except TypeError:
        return _encode(value)


_NOT_EXECUTED: dict[str, type[NotExecuted]] = {
    kind.__name__: kind for kind in (NotExecuted, Unavailable, Overloaded, CallCycle, CallTooDeep)
}
_STATUS: dict[type[NotExecuted], ReplyStatus] = {
    Overloaded: ReplyStatus.OVERLOADED,
    CallCycle: ReplyStatus.CYCLE,
}
_BY_STATUS: dict[ReplyStatus, type[DomicileError]] = {
    ReplyStatus.FAILED: HandlerFailed,
    ReplyStatus.REJECTED: HandlerFailed,
    ReplyStatus.NOT_EXECUTED: NotExecuted,
    ReplyStatus.OVERLOADED: Overloaded,
    ReplyStatus.MAYBE_EXECUTED: MaybeExecuted,
    ReplyStatus.CYCLE: CallCycle,
}

_plain_error = msgspec.msgpack.Decoder(tuple[str, str])
_failure = msgspec.msgpack.Decoder(tuple[str, str, str])
_rejection = msgspec.msgpack.Decoder(tuple[str, msgspec.Raw])
_rejection_packings: dict[type[Rejection], Packing] = {}


def encode_error(error: BaseException) -> tuple[ReplyStatus, bytes]:
    """The runtime's answer to a message that failed.

    Never for what escaped from a handler: a `NotExecuted` of a nested ask would claim that the
    outer message did not run (I9). Use `encode_failure` for that.
    """
    if isinstance(error, NotExecuted):
        for kind in type(error).__mro__:
            if kind.__name__ in _NOT_EXECUTED:
                kept = _NOT_EXECUTED[kind.__name__]
                status = _STATUS.get(kept, ReplyStatus.NOT_EXECUTED)
                return status, _encode((kept.__name__, _message(error)))
    if isinstance(error, MaybeExecuted):
        return ReplyStatus.MAYBE_EXECUTED, _encode((MaybeExecuted.__name__, _message(error)))
    return encode_failure(error)


def encode_failure(error: BaseException) -> tuple[ReplyStatus, bytes]:
    """The answer of a handler that ran and raised: its `Rejection` as such, everything else as a
    failure."""
    if isinstance(error, Rejection):
        try:
            return ReplyStatus.REJECTED, _encode((error.wire_name, error.args))
        except Exception as unfit:
            text = f"{_message(error)} (its arguments cannot travel: {unfit})"
            return ReplyStatus.FAILED, _encode((error.wire_name, text, _traceback(error)))
    name = "" if type(error) is HandlerFailed else type(error).__qualname__
    return ReplyStatus.FAILED, _encode((name, _message(error), _traceback(error)))


def decode_error(status: ReplyStatus, body: bytes) -> DomicileError:
    """The error to raise at the caller. An unreadable body still tells whether it ran (I9)."""
    if status is ReplyStatus.OK:
        raise ValueError("a reply with status OK carries a value, not an error")
    try:
        if status is ReplyStatus.REJECTED:
            return _decode_rejection(*_rejection.decode(body))
        if status is ReplyStatus.FAILED:
            return _decode_failure(*_failure.decode(body))
        name, message = _plain_error.decode(body)
    except msgspec.DecodeError:
        text = body.decode("utf-8", "replace")
        return _BY_STATUS[status](text or f"no reason was given ({status.name.lower()})")
    if status is ReplyStatus.MAYBE_EXECUTED:
        return MaybeExecuted(message)
    kind = _NOT_EXECUTED.get(name, NotExecuted)
    fallback = _BY_STATUS[status]
    return kind(message) if issubclass(kind, fallback) else fallback(message)


def _decode_failure(name: str, message: str, traceback: str) -> HandlerFailed:
    error = HandlerFailed(f"{name}: {message}" if name and message else name or message)
    if traceback:
        error.remote_traceback = traceback
        indented = traceback.replace("\n", "\n  ")
        error.add_note(f"Raised at the home of the entity (most recent call last):\n  {indented}")
    return error


def _decode_rejection(name: str, raw: msgspec.Raw) -> DomicileError:
    args: Any = msgspec.msgpack.decode(raw)
    kind = Rejection if name == Rejection.wire_name else Rejection.registry.get(name)
    if kind is None:
        return HandlerFailed(
            f"the handler said no with the rejection {name!r} {tuple(args)!r}, which this process "
            "does not know; import the module that defines it"
        )
    try:
        return _construct(kind, bytes(raw), args)
    except Exception as error:
        return HandlerFailed(
            f"the handler said no with the rejection {name!r} {tuple(args)!r}, which cannot be "
            f"made from these arguments ({error}); a Rejection must be constructible from its "
            "`args`: pass all of them on to `super().__init__`"
        )


def _construct(kind: type[Rejection], raw: bytes, args: Any) -> Rejection:
    packing = _rejection_packings.get(kind)
    if packing is None:
        init = inspect.getattr_static(kind, "__init__")
        if not inspect.isfunction(init):
            return kind(*args)
        try:
            packing = Packing(kind.__qualname__, init)
            packing.resolve()
        except ConfigError:
            return kind(*args)
        _rejection_packings[kind] = packing
    if raw == _NO_ARGS:
        return kind()
    typed, named = packing.decode_args(raw)
    return kind(*typed, **named)


def _message(error: BaseException) -> str:
    try:
        text = str(error)
    except Exception as unprintable:
        text = f"its text raises {type(unprintable).__name__}"
    # A lone surrogate cannot be encoded; without this the caller would get no answer.
    return text[:_MESSAGE_CHARS].encode("utf-8", "replace").decode()


def _traceback(error: BaseException) -> str:
    """The user's own frames, innermost last, and those of the causes: no paths, nothing that
    depends on the machine."""
    lines = _frames(error)
    told = [error]
    for _ in range(_CAUSES):
        why = told[-1].__cause__
        if why is None and not told[-1].__suppress_context__:
            why = told[-1].__context__
        if why is None or any(why is one for one in told):
            break
        told.append(why)
        lines += [f"because of {type(why).__qualname__}: {_message(why)[:200]}", *_frames(why)]
    return _cut("\n".join(lines))


def _frames(error: BaseException) -> list[str]:
    frames: list[str] = []
    step = error.__traceback__
    while step is not None:
        module = str(step.tb_frame.f_globals.get("__name__", ""))
        root = module.partition(".")[0]
        if root != "domicile" and root not in sys.stdlib_module_names:
            code = step.tb_frame.f_code
            frames.append(f"{module}:{step.tb_lineno} in {code.co_qualname}")
        step = step.tb_next
    frames = frames[-_TRACEBACK_FRAMES:]
    if isinstance(error, HandlerFailed) and error.remote_traceback:
        # The handler asked another entity, whose handler failed: the reader must look there.
        frames += ["at the home of what it asked:", *error.remote_traceback.splitlines()]
    return frames


def _cut(text: str) -> str:
    """A text cut to its two ends if it is too long to travel with every failure."""
    if len(text) > _TRACEBACK_CHARS:
        half = _TRACEBACK_CHARS // 2
        text = f"{text[:half]} … {text[-half:]}"
    return text.encode("utf-8", "replace").decode()
