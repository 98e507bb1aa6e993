"""What is due in a simulated world, and when: the queue under `World` and its `SimLoop`s.

Only `domicile.testing.sim.loop` calls this. The order must depend only on time and on the order of
scheduling.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from contextvars import Context
from heapq import heapify, heappop
from itertools import count
from math import inf
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from domicile.testing.sim.loop import SimLoop

START_S = 1000.0
_SWEEP_MIN = 256


class Handle:
    """A callback due on a loop: what `call_soon`, `call_at` and `World.call_at` return."""

    __slots__ = ("args", "callback", "context", "due_at", "loop", "queued")

    def __init__(
        self, loop: SimLoop, callback: Callable[..., object], args: Any, context: Context
    ) -> None:
        self.loop = loop
        self.callback: Callable[..., object] | None = callback
        self.args: Any = args
        self.context = context
        self.due_at = 0.0
        self.queued = False

    def cancel(self) -> None:
        """Prevent the callback."""
        if self.callback is not None:
            self.callback = None
            self.args = ()
            if self.queued:
                self.loop.agenda.timer_cancelled()

    def failed(self, callback: Callable[..., object], error: BaseException) -> None:
        """The callback raised: its loop reports that."""
        message = f"Exception in callback {callback!r}"
        self.loop.call_exception_handler({"message": message, "exception": error, "handle": self})

    def cancelled(self) -> bool:
        """Whether it was cancelled."""
        return self.callback is None

    def when(self) -> float:
        """The virtual time at which a timer is due."""
        return self.due_at

    def get_loop(self) -> SimLoop:
        """The loop it is due on."""
        return self.loop

    def get_context(self) -> Context:
        """The context it runs in."""
        return self.context

    def __repr__(self) -> str:
        what = getattr(self.callback, "__qualname__", repr(self.callback))
        return f"<Handle {what if self.callback else 'cancelled'} on {self.loop.name!r}>"


Entry = tuple[float, int, Handle]


class Agenda:
    """What is due in a world, and when. Only the world and its loops use it."""

    def __init__(self) -> None:
        self.now = START_S
        self.running = False
        self.closed = False
        self.current: SimLoop | None = None
        self.errors: list[tuple[str, dict[str, Any]]] = []
        self.ready: deque[Handle] = deque()
        self.timers: list[Entry] = []
        self.next_sequence = count().__next__
        self.next_task = count(1).__next__
        self._stale = 0

    def collect_due(self, outside: SimLoop) -> None:
        """Make ready what is due by now; the timers of frozen processes wait for the thaw.

        Callbacks outside of all processes run here at once.
        """
        timers, now = self.timers, self.now
        while timers and timers[0][0] <= now:
            entry = heappop(timers)
            handle = entry[2]
            callback = handle.callback
            if callback is None:
                self._stale -= 1
                continue
            handle.queued = False
            loop = handle.loop
            if loop is outside:
                try:
                    handle.context.run(callback, *handle.args)
                except (KeyboardInterrupt, SystemExit):
                    raise
                except BaseException as error:
                    handle.failed(callback, error)
            elif loop.frozen:
                loop.late.append(entry)
            else:
                self.ready.append(handle)

    def next_due(self) -> float:
        """The time of the next timer; infinite if there is none."""
        timers = self.timers
        while timers and timers[0][2].callback is None:
            heappop(timers)
            self._stale -= 1
        return timers[0][0] if timers else inf

    def timer_cancelled(self) -> None:
        """Count a cancelled timer; once most are cancelled, remove them (I6)."""
        self._stale += 1
        if self._stale > _SWEEP_MIN and self._stale * 2 > len(self.timers):
            self._keep([entry for entry in self.timers if entry[2].callback is not None])

    def take_ready(self, loop: SimLoop) -> list[Handle]:
        """Remove and return what one process has ready."""
        taken = [handle for handle in self.ready if handle.loop is loop]
        rest = [handle for handle in self.ready if handle.loop is not loop]
        self.ready.clear()
        self.ready.extend(rest)
        return taken

    def take_timers(self, loop: SimLoop) -> list[Handle]:
        """Remove and return the timers of one process."""
        taken = [entry[2] for entry in self.timers if entry[2].loop is loop]
        for handle in taken:
            handle.queued = False
        self._keep([entry for entry in self.timers if entry[2].loop is not loop])
        return taken

    def _keep(self, entries: list[Entry]) -> None:
        # In place: the scheduler and every loop refer to this list.
        self.timers[:] = entries
        heapify(self.timers)
        self._stale = sum(entry[2].callback is None for entry in entries)
