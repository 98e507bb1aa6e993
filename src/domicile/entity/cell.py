"""One resident entity, and one turn of it.

A cell is a small object: no task, queue or future exists for it while it is idle. It is also
the entity's context: what `self.id`, `self.after` and the rest of `Entity` reach. A turn is one
message being run; it judges every resumption of the handler (L3).
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from contextvars import ContextVar
from datetime import datetime
from random import Random
from typing import TYPE_CHECKING, Any, TypeVar

from domicile.core.ids import EntityKey
from domicile.core.messages import Caller, Request
from domicile.core.owner import Mail
from domicile.entity.define import Entity, EntityType
from domicile.entity.ref import Ref
from domicile.errors import ConfigError
from domicile.ports.clock import Timer

if TYPE_CHECKING:
    from domicile.entity.shard import ShardHost

E = TypeVar("E", bound=Entity)
T = TypeVar("T")

current_turn: ContextVar[Turn | None] = ContextVar("domicile_turn", default=None)


class Incoming:
    """A request at its owner, with the time until which it may start."""

    __slots__ = ("expires_at", "request")

    def __init__(self, request: Request, expires_at: float) -> None:
        self.request = request
        self.expires_at = expires_at


class Alarm:
    """A due `self.after`, queued like a message."""

    __slots__ = ("args", "kwargs", "method")

    def __init__(self, method: Callable[..., Any], args: Any, kwargs: Any) -> None:
        self.method = method
        self.args = args
        self.kwargs = kwargs


class Cell:
    """A resident entity. Implements the entity's `Context`."""

    __slots__ = (
        "alarms", "entity", "epoch", "host", "key", "kind", "started", "starting", "used_at",
        "wants_stop",
    )  # fmt: skip

    def __init__(self, host: ShardHost, key: EntityKey, kind: EntityType, epoch: int) -> None:
        self.host = host
        self.key = key
        self.kind = kind
        self.epoch = epoch
        self.entity: Entity | None = None
        self.starting: list[asyncio.Future[None]] | None = None
        self.started = False
        self.wants_stop = False
        self.used_at = 0.0
        self.alarms: dict[str, Timer] | None = None

    # the entity's context

    @property
    def id(self) -> str:
        """The entity's id."""
        return self.key.id

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
        """Run a method later as a message of its own; replaces an earlier one of that method."""
        alarms = self.alarms
        if alarms is None:
            alarms = self.alarms = {}
        name = getattr(method, "__name__", repr(method))
        earlier = alarms.pop(name, None)
        if earlier is not None:
            earlier.cancel()
        clock = self.host.runtime.clock

        def due() -> None:
            alarms.pop(name, None)
            self.host.alarm(self, Alarm(method, args, kwargs))

        alarms[name] = clock.call_at(clock.now() + delay_s, due)

    def passivate(self) -> None:
        """Stop once the running handlers ended; the next message starts it anew."""
        self.wants_stop = True

    # lifecycle

    def silence(self) -> None:
        """Drop the alarms: a stopped entity hears none."""
        if self.alarms:
            for timer in self.alarms.values():
                timer.cancel()
        self.alarms = None


class Turn:
    """One message being run on a cell: the `Watcher` of its coroutine."""

    __slots__ = (
        "active",
        "began",
        "cancel_reason",
        "chain",
        "host",
        "key",
        "mail",
        "store_first",
        "task",
        "timer",
    )

    def __init__(self, host: ShardHost, mail: Mail) -> None:
        self.host = host
        self.mail = mail
        load = mail.load
        self.key = load.request.key if isinstance(load, Incoming) else ""
        inherited = load.request.chain if isinstance(load, Incoming) else ()
        role, shard = host.shard
        me = Caller(role, shard, mail.entity.type, mail.entity.id, mail.shared)
        self.chain: tuple[Caller, ...] = (*inherited, me)
        self.store_first: Callable[[], Awaitable[None]] | None = None
        """Set while a keyed handler has events that are not committed yet."""
        self.active = True
        self.began = False
        self.cancel_reason = ""
        self.task: asyncio.Task[Any] | None = None
        self.timer: Timer | None = None

    def suspended(self) -> None:
        """First suspension: free the worker's place, start the handler's clock."""
        runtime = self.host.runtime
        self.task = asyncio.current_task()
        runtime.workers.left_running()
        runtime.suspended[self] = None
        due = runtime.clock.now() + self.host.timeout_s(self.mail)
        self.timer = runtime.clock.call_at(due, self._overdue)

    def may_resume(self) -> bool:
        """L3: compare before every resumption."""
        runtime = self.host.runtime
        if not runtime.guard():
            return False
        if runtime.tracing and self.began:
            self.host.note("resume", self.mail)
        return True

    def may_clean_up(self) -> bool:
        """L4: a cancelled handler may clean up until the hard deadline."""
        return self.host.runtime.may_clean_up()

    def abandon(self, coroutine: Coroutine[Any, Any, Any]) -> None:
        """L4: never resumed; kept so that it isn't closed by the garbage collector."""
        self.host.runtime.graveyard.append(coroutine)
        self.host.note("finish", self.mail, how="abandoned")

    def cancel(self, reason: str) -> None:
        """Interrupt the handler; its caller learns `reason`."""
        if self.task is not None and self.active and not self.cancel_reason:
            self.cancel_reason = reason
            self.task.cancel()

    def end(self) -> None:
        """The coroutine is over: its chain is no longer waited for."""
        self.active = False
        if self.cancel_reason and self.task is not None:
            # Also if the handler swallowed it: the worker goes on with other messages.
            self.task.uncancel()
        if self.timer is not None:
            self.timer.cancel()
        self.host.runtime.suspended.pop(self, None)

    def _overdue(self) -> None:
        self.cancel("timeout")
