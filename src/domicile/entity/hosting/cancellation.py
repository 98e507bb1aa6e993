"""What happens to messages whose callers no longer wait, and to what handlers ask for such callers.

Made by the runtime. Messages that have not started are removed. Running handlers are cancelled only
if they are declared `cancellable`: a caller's timeout must not interrupt other work.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from domicile.core.handoff.pending import nested_timeout_s
from domicile.core.ids import LinkKey, ShardKey
from domicile.core.wire import Cancel
from domicile.entity.hosting.cell import Turn
from domicile.errors import Unavailable
from domicile.ports.clock import Timer

if TYPE_CHECKING:
    from domicile.entity.runtime import Runtime

LOOK_S = 0.05
"""Seconds until such messages are searched for, together with others."""

MOST = 4_096
"""I6: messages of one shard that are searched for at a time; further cancellations are ignored."""

IMPATIENT = "its caller no longer waits"


class Cancellations:
    """The messages of one incarnation's shards whose callers no longer wait."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._wanted: dict[ShardKey, dict[tuple[LinkKey, int], None]] = {}
        self._timer: Timer | None = None
        self._cancellable = any(
            handler.cancellable
            for kind in runtime.catalogue.values()
            for handler in kind.handlers.values()
        )

    def take(self, source: LinkKey, message: Cancel) -> None:
        """The caller of a message no longer waits."""
        shard = ShardKey(message.role, message.shard)
        if shard not in self._runtime.hosts:
            return
        wanted = self._wanted.setdefault(shard, {})
        if len(wanted) >= MOST:
            self._runtime.meter.count("cancel.ignored")
            return
        wanted[source, message.n] = None
        if self._timer is None:
            clock = self._runtime.clock
            self._timer = clock.call_at(clock.now() + LOOK_S, self._look)

    def close(self) -> None:
        """The incarnation is over."""
        self._wanted.clear()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _look(self) -> None:
        self._timer = None
        wanted, self._wanted = self._wanted, {}
        if not self._runtime.guard():
            return
        for shard, messages in wanted.items():
            self._runtime.hosts[shard].call_off(messages)
        if self._cancellable:
            for turn in list(self._runtime.suspended):
                messages = wanted.get(turn.host.shard, {})
                if (turn.source, turn.n) in messages and _is_cancellable(turn):
                    turn.cancel(IMPATIENT)


def time_left_s(turn: Turn, timeout_s: float) -> float:
    """How long an ask within a handler may take; `Unavailable` if the handler's caller no longer
    waits."""
    if not turn.request.ask:
        return timeout_s
    clock = turn.host.runtime.clock
    timeout_s = nested_timeout_s(timeout_s, turn.expires_at - clock.now())
    if timeout_s <= 0.0:
        name = f"{turn.entity.type} {turn.entity.id!r}"
        raise Unavailable(
            f"the caller of {turn.request.method!r} at {name} no longer waits, so nothing is asked "
            "on its behalf; use tell for what must happen in any case"
        )
    return timeout_s


def _is_cancellable(turn: Turn) -> bool:
    kind = turn.host.runtime.catalogue.get(turn.entity.type)
    handler = None if kind is None else kind.handlers.get(turn.request.method)
    return turn.began and turn.request.ask and handler is not None and handler.cancellable
