"""One resident entity, and one turn of it.

A cell is a small object: no task, queue or future exists for it while it is idle. It is also the
entity's context: `self.id`, `self.after` and the rest of `Entity` use it. A turn is one message
being run; it decides before every resumption whether the handler may go on (L3). Shard hosts make
both. Neither decides what starts.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Mapping
from contextvars import ContextVar
from datetime import datetime
from functools import partial
from random import Random
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from domicile.concurrency.single_flight import SingleFlight
from domicile.core.handoff.mailbox import Queued
from domicile.core.ids import EntityKey, LinkKey, ShardKey
from domicile.core.wire import CallingTurn, Request
from domicile.entity.model.entity import Entity, EntityType
from domicile.entity.model.handlers import Handler
from domicile.entity.model.ref import Ref
from domicile.errors import ConfigError
from domicile.ports.clock import Timer
from domicile.ports.work import OutputGate

if TYPE_CHECKING:
    from domicile.entity.hosting.shard_host import ShardHost

E = TypeVar("E", bound=Entity)
T = TypeVar("T")

current_turn: ContextVar[Turn | None] = ContextVar("domicile_turn", default=None)


MOST_TRIED = 64
"""I6: names of methods that one cell remembers as tried, beside those of direct handlers."""


class Incoming(Queued, kw_only=True):
    """A message that waits at its owner: its request, and until when it may start."""

    request: Request | Alarm
    expires_at: float = float("inf")


class Called(msgspec.Struct, gc=False):
    """A local ask that runs within its call: the part of a `Request` that a turn needs."""

    n: int
    epoch: int
    change: int
    method: str
    chain: tuple[CallingTurn, ...]
    ttl_s: float
    ask: bool = True
    key: str = ""
    trace: str = ""

    def as_sent(self, shard: ShardKey, entity: EntityKey) -> Request:
        """The request as it would travel, without its arguments."""
        return Request(
            *shard, self.n, self.epoch, self.change, *entity, self.method, b"", True, False,
            self.ttl_s, self.chain,
        )  # fmt: skip


class PendingTimer(msgspec.Struct, eq=False):
    """A timer of a resident entity that is not due yet."""

    fn: Callable[..., Any]
    """The method, not bound: the entity may be another object when the timer is due."""
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    due_at: float
    timer: Timer


class Alarm(msgspec.Struct):
    """A due `self.after`, queued like a message; an `on_stop` runs as one with number 0."""

    n: int
    epoch: int
    fn: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    change: int = 0
    chain: tuple[CallingTurn, ...] = ()
    ask: bool = False
    key: str = ""

    @property
    def method(self) -> str:
        """The name of the method that it calls."""
        return getattr(self.fn, "__name__", "?")


class Cell:
    """A resident entity. Implements the entity's `Context`."""

    __slots__ = (
        "alarms", "bucket", "direct", "entity", "epoch", "gate", "host", "key", "kind", "resident",
        "started", "starting", "tried", "used_at", "wants_stop",
    )  # fmt: skip

    def __init__(self, host: ShardHost, key: EntityKey, kind: EntityType, epoch: int) -> None:
        self.host = host
        self.key = key
        self.kind = kind
        self.epoch = epoch
        self.direct: dict[str, Handler] = kind.direct
        """Handlers that may begin without `_serve`."""
        self.tried: dict[str, None] | None = None
        """Handlers that ran since its start in a shard that lost owners (DX-20); None: it did not
        lose any."""
        self.entity: Entity | None = None
        self.gate: OutputGate | None = None
        """What holds back the entity's outputs; None unless it is durable (J5)."""
        self.starting: SingleFlight | None = None
        self.started = False
        self.resident = True
        """Whether its host still has it."""
        self.wants_stop = False
        self.used_at = 0.0
        self.bucket: dict[Any, None] | None = None
        """The bucket of the idle wheel that holds it."""
        self.alarms: dict[str, PendingTimer] | None = None
        """Its pending timers by the name of their method; others may be kept by its host."""

    def has_tried(self, method: str, ends: bool) -> None:
        """A handler ran for the first time, and this process lives. `ends`: it needs no more
        trial."""
        if self.tried is not None and (len(self.tried) < MOST_TRIED or method in self.kind.direct):
            self.tried[method] = None
            if ends and method in self.kind.direct:
                self.direct[method] = self.kind.direct[method]

    # the entity's context

    @property
    def id(self) -> str:
        """The entity's id."""
        return self.key.id

    @property
    def idle_s(self) -> float:
        """Seconds without a message after which it is passivated."""
        return self.kind.idle_s or self.host.runtime.settings.idle_s

    @property
    def awaits_timer(self) -> bool:
        """Whether a timer of it is pending, so that it is not idle (DX-25)."""
        return bool(self.alarms) or self.host.timers.has(self.key)

    @property
    def random(self) -> Random:
        """The node's random source; seeded in the simulator."""
        return self.host.runtime.random

    def ref(self, kind: type[E], id: str) -> Ref[E]:
        """A ref that sends from this node."""
        return self.host.runtime.ref(kind, id)

    def resource(self, kind: type[T]) -> T:
        """An injected dependency of the node."""
        try:
            return self.host.runtime.resources[kind]  # type: ignore[no-any-return]
        except KeyError:
            raise ConfigError(
                f"{self.kind.name} {self.key.id!r} asked for resource {kind.__name__}, but the "
                f"node was not given one: pass resources= a function whose context yields "
                f"{{{kind.__name__}: ...}}"
            ) from None

    def now(self) -> datetime:
        """Wall time in UTC."""
        return self.host.runtime.clock.wall()

    def after(self, delay_s: float, method: Callable[..., Any], args: Any, kwargs: Any) -> None:
        """Run a method later as a message of its own; this replaces an earlier timer for that
        method."""
        fn = getattr(method, "__func__", method)
        if not self.resident:
            self.host.timers.lose(self.key, fn, "its entity is no longer in memory")
            return
        alarms = self.alarms
        if alarms is None:
            alarms = self.alarms = {}
        name = getattr(fn, "__name__", repr(fn))
        earlier = alarms.pop(name, None)
        if earlier is not None:
            earlier.timer.cancel()
        if self.started:
            self.host.timers.replaced(self, fn)
        clock = self.host.runtime.clock
        due_at = clock.now() + delay_s
        timer = clock.call_at(due_at, partial(self._due, name))
        alarms[name] = PendingTimer(fn, args, kwargs, due_at, timer)

    def passivate(self) -> None:
        """Stop once the running handlers have ended; the next message starts the entity again."""
        self.wants_stop = True

    async def run_blocking(self, name: str, work: Callable[[], T], /) -> T:
        """Run a plain function in a thread; the turn that waits for it cannot be interrupted."""
        return await self.host.runtime.blocking.run(name, work, current_turn.get())

    # lifecycle

    def silence(self) -> list[PendingTimer]:
        """Cancel the timers: a stopped entity gets no alarm. Returns those that were pending."""
        pending = list((self.alarms or {}).values())
        for one in pending:
            one.timer.cancel()
        self.alarms = None
        return pending

    def _due(self, name: str) -> None:
        # The guard first: a fence counts the timers that are still pending.
        if self.host.runtime.guard() and self.alarms is not None:
            pending = self.alarms.pop(name)
            self.host.ring(self.key, pending.fn, pending.args, pending.kwargs)


class Turn(msgspec.Struct, eq=False):
    """One message being run on a cell: the `Watcher` of its coroutine."""

    host: ShardHost
    source: LinkKey
    entity: EntityKey
    shared: bool
    request: Request | Called | Alarm
    expires_at: float
    """Until when its caller waits for it."""
    gate: OutputGate | None = None
    """What holds back its outputs, if its entity is durable (J5)."""
    active: bool = True
    began: bool = False
    waking: bool = False
    """Whether the shared messages behind it wait until it reaches its handler (I5)."""
    cancel_reason: str = ""
    task: asyncio.Task[Any] | None = None
    """The worker's task that continues it, once it has suspended."""
    timer: Timer | None = None
    thread: int | None = None
    """The thread that runs its function, while one does."""
    threads: int = 0
    """Number of blocking methods it waits for; it cannot end before they do, cancelled or not."""
    answered: bool = False
    """Whether its caller was told of a cancellation that still waits for a thread."""
    dropped: bool = False
    """Whether it was given up and is never resumed, although its node goes on (DX-09)."""

    @property
    def n(self) -> int:
        """The number its sender gave it."""
        return self.request.n

    @property
    def epoch(self) -> int:
        """The epoch that its sender stamped on it."""
        return self.request.epoch

    @property
    def key(self) -> str:
        """The key of a keyed ask."""
        return self.request.key

    @property
    def chain(self) -> tuple[CallingTurn, ...]:
        """The turns that wait for what this turn asks, itself last (N1)."""
        role, shard = self.host.shard
        me = CallingTurn(role, shard, self.entity.type, self.entity.id, self.shared)
        return (*self.request.chain, me)

    @property
    def is_beside(self) -> bool:
        """Whether it runs beside other turns of its entity: an `after_commit` hook."""
        return self.shared and isinstance(self.request, Alarm)

    @property
    def seen(self) -> int | None:
        """For histories: the last event that it may have seen, if its entity goes on beside it.

        None: it has the entity to itself, and has seen all that the entity shows.
        """
        if self.gate is None or (self.active and not self.is_beside):
            return None
        return self.gate.newest

    async def before_output(self) -> None:
        """Something is about to leave the entity: wait until its gate lets it (J5)."""
        if self.gate is not None:
            if asyncio.get_running_loop() is not self.host.runtime.loop:
                if self.gate.is_open:
                    raise RuntimeError(
                        "a handler of a durable entity calls through a client of another event "
                        "loop while its events are not committed; await self.committed() before"
                    )
                return
            # A shared turn, too: it may have started the entity, or run for one that waits for it.
            beside = self.active and self.is_beside
            await self.gate.flush(sends=self.active and not beside, beside=beside)

    def suspended(self) -> None:
        """The handler suspends for the first time: start its timeout."""
        runtime = self.host.runtime
        self.task = asyncio.current_task()
        now = runtime.suspended[self] = runtime.clock.now()
        runtime.on_suspended()
        due = now + self.host.timeout_s(self)
        self.timer = runtime.clock.call_at(due, self._overdue)

    def may_resume(self) -> bool:
        """L3: check the lease before every resumption."""
        runtime = self.host.runtime
        if not runtime.guard():
            return False
        if runtime.tracing and self.began:
            self.host.note("resume", self)
        runtime.running = self
        return True

    def rests(self) -> None:
        """The handler has returned control to the event loop."""
        self.host.runtime.running = None

    def may_clean_up(self) -> bool:
        """L4: a cancelled handler may clean up until the hard deadline, or until it is given up."""
        # Another worker continues it if its own was cancelled before it first ran.
        self.task = asyncio.current_task()
        runtime = self.host.runtime
        if self.dropped or not runtime.may_clean_up():
            return False
        if runtime.tracing and self.began:
            self.host.note("unwind", self)
        return True

    def abandon(self, coroutine: Coroutine[Any, Any, Any]) -> None:
        """L4: never resume it. It is kept, so that the garbage collector does not close it."""
        self.host.runtime.graveyard.append(coroutine)
        if self.began:
            self.host.note("finish", self, how="abandoned")

    def cancel(self, reason: str, *, anew: bool = False) -> None:
        """Interrupt the handler; its caller gets `reason`. Only once, unless `anew`."""
        if self.task is not None and self.active and (anew or not self.cancel_reason):
            if self.cancel_reason:
                self.task.uncancel()
            self.cancel_reason = reason
            self.task.cancel()
            if self.threads:
                self.host.answer_early(self)

    def drop(self) -> None:
        """Never resume the handler, although its node goes on: it ignored its cancellation.

        Its worker ends too, because something the handler left behind, such as a timeout, may still
        cancel that task.
        """
        if self.task is not None and self.active and not self.threads:
            self.dropped = True
            self.task.cancel()

    def end(self) -> None:
        """The coroutine has ended: its chain no longer waits."""
        self.active = False
        if self.task is None:
            return
        if self.cancel_reason and not self.dropped:
            # Also if the handler swallowed the cancellation: the worker goes on with other
            # messages.
            self.task.uncancel()
        if self.timer is not None:
            self.timer.cancel()
        self.host.runtime.suspended.pop(self, None)

    def _overdue(self) -> None:
        self.cancel("timeout")
