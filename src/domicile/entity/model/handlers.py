"""The marks on an entity's methods that messages may invoke, and what a marked method becomes.

Users write `@handler` and `@blocking`; an entity type is made of `Handler`s. Nothing here sends,
schedules or runs anything. A mark does not change an `async def` method.
"""

from __future__ import annotations

import contextvars
import functools
import inspect
from collections.abc import AsyncIterator, Callable, Coroutine
from dataclasses import dataclass, replace
from types import FunctionType
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar, overload

from domicile.entity.model.codec import Packing
from domicile.errors import ConfigError

P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T")
B = TypeVar("B", bound="Blockable")
F = TypeVar("F", bound=Callable[..., Coroutine[Any, Any, Any] | AsyncIterator[Any]])

MARK = "__domicile_handler__"
"""The attribute in which a marked function keeps its options."""


class Blockable(Protocol):
    """An object that can run `@blocking` methods in threads: an entity."""

    async def __domicile_block__(self, name: str, work: Callable[[], T], /) -> T:
        """Run a blocking method."""
        ...


@dataclass(frozen=True, slots=True)
class HandlerOptions:
    """The options of `@handler`, and whether the method is `@blocking`."""

    shared: bool = False
    name: str | None = None
    timeout_s: float | None = None
    blocking: bool = False
    cancellable: bool = False


@overload
def handler(fn: F, /) -> F: ...
@overload
def handler(
    *,
    shared: bool = ...,
    name: str | None = ...,
    timeout_s: float | None = ...,
    cancellable: bool = ...,
) -> Callable[[F], F]: ...
def handler(
    fn: F | None = None,
    /,
    *,
    shared: bool = False,
    name: str | None = None,
    timeout_s: float | None = None,
    cancellable: bool = False,
) -> F | Callable[[F], F]:
    """Let messages invoke an `async def` method of an entity; the function stays as it is.

    `shared` handlers of an entity may run at the same time, all others run alone. `name` is the
    name on the wire, if it must outlive the method's. `timeout_s` bounds one run, instead of the
    node's setting. A `cancellable` handler is cancelled when its caller no longer waits; others run
    to their end.
    """
    if name == "":
        raise ConfigError("@handler(name=...) must not be empty; leave it out to use the method's")
    if timeout_s is not None and not timeout_s > 0:
        raise ConfigError(f"@handler(timeout_s=...) must be positive, it is {timeout_s!r}")
    options = HandlerOptions(shared, name, timeout_s, cancellable=cancellable)

    def mark(fn: F) -> F:
        given: Any = fn
        shown = getattr(given, "__qualname__", None) or repr(given)
        if inspect.isasyncgenfunction(given):
            raise TypeError(
                f"@handler {shown} is an async generator, and streams are not available; "
                "return a value instead of yielding"
            )
        if not inspect.iscoroutinefunction(given):
            raise TypeError(
                f"@handler {shown} must be an `async def` method; write `async def`, or @blocking "
                "instead of @handler to run a plain `def` in a thread"
            )
        known: HandlerOptions = fn.__dict__.get(MARK, options)
        if known.blocking and shared:
            raise ConfigError(
                f"@handler(shared=True) {shown} is @blocking, and threads of one entity run one at "
                "a time; leave shared out"
            )
        fn.__dict__[MARK] = replace(options, blocking=known.blocking)
        return fn

    return mark if fn is None else mark(fn)


def blocking(
    fn: Callable[Concatenate[B, P], R], /
) -> Callable[Concatenate[B, P], Coroutine[Any, Any, R]]:
    """Let messages invoke a plain `def` method, which runs in one of the node's threads.

    One at a time per entity, like every handler, and to its end: a thread cannot be cancelled, so
    after a timeout the entity stays busy until the method returns. Inside, use `id`, `epoch`,
    `now`, `random` and `resource` only. Put `@handler(name=..., timeout_s=...)` above it for more.
    """
    given: Any = fn
    shown = getattr(given, "__qualname__", None) or repr(given)
    if inspect.iscoroutinefunction(given) or inspect.isasyncgenfunction(given):
        raise TypeError(
            f"@blocking {shown} is `async def`, which runs on the event loop; write @handler, or a "
            "plain `def` if it calls what blocks"
        )
    if not isinstance(given, FunctionType) or inspect.isgeneratorfunction(given):
        raise TypeError(f"@blocking {shown} must be a plain `def` method that returns its value")

    @functools.wraps(fn)
    async def run(self: B, /, *args: P.args, **kwargs: P.kwargs) -> R:
        return await self.__domicile_block__(shown, functools.partial(fn, self, *args, **kwargs))

    run.__dict__[MARK] = HandlerOptions(blocking=True)
    return run


class Handler:
    """One handler of one entity type, with the coding of its arguments and its reply."""

    __slots__ = (
        "_packing",
        "blocking",
        "cancellable",
        "decode_args",
        "decode_reply",
        "encode_args",
        "encode_reply",
        "fn",
        "may_share",
        "may_share_reply",
        "name",
        "names",
        "shared",
        "timeout_s",
    )

    def __init__(
        self,
        name: str,
        options: HandlerOptions,
        fn: Callable[..., Any],
        label: str,
        names: dict[str, Any],
    ) -> None:
        packing = Packing(label, fn, names)
        self.name = name
        self.names = names
        """Names beyond the module's that its annotations may use."""
        self.shared = options.shared
        self.timeout_s = options.timeout_s
        self.blocking = options.blocking
        """Whether it needs a thread: if none is free, it is refused before it starts (I9)."""
        self.cancellable = options.cancellable
        """Whether it is cancelled when its caller no longer waits."""
        self.fn = fn
        self._packing = packing
        self.encode_args = packing.encode_args
        self.decode_args = packing.decode_args
        self.encode_reply = packing.encode_reply
        self.decode_reply = packing.decode_reply
        self.may_share = packing.shares_args
        self.may_share_reply = packing.shares_reply

    def check(self) -> None:
        """Resolve all types now, instead of at the first message."""
        packing = self._packing
        packing.resolve()
        self.may_share, self.may_share_reply = packing.shares_args, packing.shares_reply

    def __repr__(self) -> str:
        return f"<handler {self._packing.label}>"


in_thread: contextvars.ContextVar[bool] = contextvars.ContextVar("domicile_thread", default=False)
"""Whether this code runs in a blocking method's thread, where most of an entity must not be
used."""
