"""Whether an event loop turns, and a thread that finds which handler blocks it.

An incarnation makes one of them, for real time only: never in the simulator. The thread renewer
(`membership.thread_renewer`) learns from `turned_at` that a loop is blocked. A client has a
`LoopPulse`. A node has a `LoopWatch`: a thread that asks the loop to call back, rarely while
nothing runs, and reads without a lock which handler runs. The log names a handler that blocks the
loop for longer than `slow_s`. The thread must never change anything, nor wait for the loop.

It needs the GIL like any thread: a C function that keeps the GIL for long delays this thread too.
"""

from __future__ import annotations

import asyncio
import os
import selectors
import sys
import threading
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import datetime
from types import FrameType
from typing import NamedTuple

from domicile.core.lease.blocked_loop import beat_s
from domicile.ports.clock import Clock
from domicile.ports.meter import Meter
from domicile.settings import Settings
from domicile.taglog import TaggedLog

log = TaggedLog()

KEPT = 16
"""Reports that are kept for people to read."""

QUIET_S = 10.0
"""Seconds between two reports about the same handler."""

SAY_S = 1.0
"""Seconds after which a report is made although the loop is still blocked."""

IDLE = 2
"""Seconds between two looks while nothing runs: `IDLE * slow_s`; each look costs a wake-up. A block
longer than `(IDLE + 1) * slow_s` is always seen, a shorter one not every time."""

LATE = 4
"""A look is late if it comes more than `LATE * slow_s` after the last one: then this thread itself
did not run."""

STOP_S = 1.0

_OURS = (
    os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), ""),
    os.path.join(os.path.dirname(asyncio.__file__), ""),
)


class RunningHandler(NamedTuple):
    """A handler of an entity that runs now."""

    type: str
    id: str
    handler: str


NO_HANDLER = RunningHandler("", "", "")
"""Something that is not a handler of this node: a hook, or a task of the application."""

UNNAMED = RunningHandler("?", "?", "?")

STARVED = RunningHandler("", "", "nothing")
"""Nothing holds the loop: it waits in its selector, was woken, and its thread does not run."""

_LOOP_WAITS = (
    (selectors.__file__, ("select",)),
    (asyncio.base_events.__file__, ("run_forever", "run_until_complete", "_run_once")),
    (asyncio.runners.__file__, ("run",)),
)
"""Where the innermost frame of a loop is that runs no callback. A loop written in C, as uvloop's,
has no frames of its own."""


@dataclass(frozen=True, slots=True)
class Held:
    """The loop was blocked, or still is."""

    at: datetime
    handler: RunningHandler
    held_s: float
    where: str
    """File, line and name of the function in which the handler was at that time."""
    over: bool
    """Whether the loop turns again. If not, the block lasts longer than `held_s`."""


class LoopPulse:
    """When the running event loop last turned, for a client: it has no handlers to watch.

    It needs no thread of its own. `turned_at` is called by the thread that renews the lease, and
    asks the loop each time to note a turn.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock, self._loop = clock, asyncio.get_running_loop()
        self._turned_at = clock.now()
        self._asked = False

    def turned_at(self) -> float:
        """When the loop last showed that it turns."""
        if not self._asked:
            self._asked = True
            with suppress(RuntimeError):  # the loop is closed
                self._loop.call_soon_threadsafe(self._turned)
        return self._turned_at

    def _turned(self) -> None:
        self._turned_at = self._clock.now()
        self._asked = False


class LoopWatch:
    """Watches the loop on which it is started. `running` returns what runs now, or None.

    `stuck` is called for what has blocked the loop for `stuck_s`: its arguments are the running
    object, the start time and the loop's thread (DX-09). The watching thread calls all functions
    while the loop runs; they must only read.
    """

    def __init__(
        self,
        *,
        clock: Clock,
        meter: Meter,
        settings: Settings,
        running: Callable[[], object | None],
        describe: Callable[[object], RunningHandler],
        tags: Mapping[str, str],
        stuck: Callable[[object, float, int], None] | None = None,
    ) -> None:
        self._clock, self._meter = clock, meter
        self._running, self._describe = running, describe
        self._tags = dict(tags)
        self._stuck, self._stuck_s = stuck, settings.stuck_s
        self._told_stuck = False
        self._slow_s = settings.slow_s
        self._beat_s = beat_s(settings.evict_after_s, settings.stall_limit_s)
        self.reports: deque[Held] = deque(maxlen=KEPT)
        """The latest reports, the newest last."""
        self.lag_s = 0.0
        """Seconds the loop took for its last callback."""
        self._turned_at = clock.now()
        self._asked_at: float | None = None
        """Set by the thread when it asks the loop to call back, cleared by the loop."""
        self._looked_at = self._turned_at
        self._suspect: object | None = None
        self._since = 0.0
        self._caught: Held | None = None
        self._said = False
        self._said_at: dict[tuple[str, str], float] = {}
        self._failed = False
        self._loop: asyncio.AbstractEventLoop | None = None
        self._home = 0
        # A lock that `stop` releases: waiting for it costs half as much as for an event.
        self._over = threading.Lock()
        self._over.acquire()
        self._thread = threading.Thread(target=self._run, name="domicile-loop-watch", daemon=True)

    def turned_at(self) -> float:
        """When the loop last showed that it turns; recent while the loop is healthy."""
        return self._turned_at

    def start(self) -> None:
        """Watch the running loop from now on."""
        self._loop, self._home = asyncio.get_running_loop(), threading.get_ident()
        self._turned_at = self._looked_at = self._clock.now()
        self._thread.start()

    def stop(self) -> None:
        """End the thread; it has ended when this returns."""
        if self._over.locked():
            self._over.release()
        if self._thread.is_alive():
            self._thread.join(STOP_S)

    def _run(self) -> None:
        while not self._over.acquire(timeout=self._pause_s()):
            try:
                self._look()
            except Exception:
                if self._loop is None or self._loop.is_closed():
                    return
                # Log once: every look may fail. If no look shows that the loop turns, the loop
                # counts as blocked and the lease expires; otherwise it might never expire.
                if not self._failed:
                    log.exception("a look at the event loop failed", extra=self._tags)
                self._failed = True
        self._over.release()

    def _pause_s(self) -> float:
        busy = self._suspect is not None and self._asked_at is not None
        return self._slow_s if busy else IDLE * self._slow_s

    def _look(self) -> None:
        now, asked_at, running = self._clock.now(), self._asked_at, self._running()
        # If this thread itself is late, the whole process was stopped or had no CPU.
        late = now - self._looked_at > LATE * self._slow_s
        self._looked_at = now
        if asked_at is None:
            if self._caught is not None:
                self._released(self._turned_at)
            if running is not None or now - self._turned_at >= self._beat_s:
                self._suspect, self._since = running, now
                self._asked_at = now
                self._post(self._turned)
        elif late or running is not self._suspect:
            # In one turn of a busy loop many handlers run, and none of them blocks it alone.
            self._released(now)
            self._suspect, self._since = running, now
        elif now - self._since >= self._slow_s:
            self._hold(now, asked_at)

    def _turned(self) -> None:
        """Called on the loop: it turns."""
        now, asked_at = self._clock.now(), self._asked_at
        self.lag_s = 0.0 if asked_at is None else now - asked_at
        self._turned_at = now
        self._asked_at = None

    def _hold(self, now: float, asked_at: float) -> None:
        if self._caught is None or self._caught.handler == STARVED:
            suspect = self._suspect
            handler = self._name(suspect)
            frame = sys._current_frames().get(self._home)  # pyright: ignore[reportPrivateUsage]
            starved, where = waits_for_events(frame), where_in(frame)
            if self._asked_at != asked_at or self._running() is not suspect:
                return  # the loop turned meanwhile, so the stack may belong to other code
            if self._caught is None:
                handler, where = (STARVED, "") if starved else (handler, where)
                held_s = now - self._since
                self._caught = Held(self._clock.wall(), handler, held_s, where, over=False)
                if not starved:
                    self._post(self._count)
            elif not starved:
                # It got processor time at last: what runs now is not to blame for the wait.
                self._released(now)
                self._since = now
                return
        if now - self._since >= SAY_S and not self._said:
            self._caught = replace(self._caught, held_s=now - self._since)
            self._said = True
            self._report(self._caught, now)
        if self._stuck is not None and now - self._since >= self._stuck_s and not self._told_stuck:
            self._told_stuck = True
            if self._suspect is not None:
                self._tell_stuck(self._stuck, self._suspect)

    def _tell_stuck(self, stuck: Callable[[object, float, int], None], suspect: object) -> None:
        try:
            stuck(suspect, self._since, self._home)
        except Exception:
            # As in `_name`: an error here must not end this thread, on which the lease depends.
            log.exception("what holds the event loop can't be told", extra=self._tags)

    def _name(self, suspect: object | None) -> RunningHandler:
        if suspect is None:
            return NO_HANDLER
        try:
            return self._describe(suspect)
        except Exception:
            # The loop runs while this reads, so it may fail. The lease depends on this thread, so
            # the error must not end it.
            log.debug("what holds the event loop can't be named", exc_info=True)
            return UNNAMED

    def _released(self, at: float) -> None:
        """The handler that was found no longer blocks the loop."""
        caught, said = self._caught, self._said
        self._caught, self._said, self._told_stuck = None, False, False
        if caught is None:
            return
        ended = replace(caught, held_s=max(caught.held_s, at - self._since), over=True)
        if not said:
            self._report(ended, at)
        elif self.reports and self.reports[-1] == caught:
            self.reports[-1] = ended
            log.warning("%s", _text(ended), extra=self._tags)

    def _report(self, held: Held, now: float) -> None:
        name = held.handler.type, held.handler.handler
        if now - self._said_at.get(name, -QUIET_S) < QUIET_S:
            return
        self._said_at[name] = now
        self.reports.append(held)
        log.warning("%s", _text(held), extra=self._tags)

    def _count(self) -> None:
        self._meter.count("loop.held")

    def _post(self, callback: Callable[[], None]) -> None:
        assert self._loop is not None
        self._loop.call_soon_threadsafe(callback)


def _text(held: Held) -> str:
    if held.handler == STARVED:
        verb = "did not turn" if held.over else "has not turned"
        return (
            f"the event loop {verb} for {held.held_s:.2f} s, and nothing in it held it up: this "
            "process got no processor time. Give it more, or run fewer processes on this machine"
        )
    kind, id, handler = held.handler
    who = f"{handler} of {kind} {id!r}"
    if held.handler == NO_HANDLER:
        who = "something that is not a handler"
    if not held.over:
        return (
            f"{who} holds the event loop, for {held.held_s:.1f} s so far, at {held.where}: nothing "
            "else runs here meanwhile. Let blocking work run in a thread"
        )
    return (
        f"{who} held the event loop for {held.held_s:.2f} s, at {held.where}: nothing else ran "
        "here meanwhile. Let blocking work run in a thread, or split long work up"
    )


def waits_for_events(frame: FrameType | None) -> bool:
    """Whether the innermost frame of an event loop's thread is where the loop waits for events."""
    if frame is None:
        return False
    code = frame.f_code
    return any(code.co_filename == file and code.co_name in names for file, names in _LOOP_WAITS)


def where_in(frame: FrameType | None) -> str:
    """The place in the user's code of a stack: the function that the library called.

    The functions that it called in turn (a driver, the standard library) say less.
    """
    if frame is None:
        return "?"
    place, found = frame, False
    look: FrameType | None = frame
    while look is not None:
        ours = look.f_code.co_filename.startswith(_OURS)
        if ours and found:
            break
        if not ours:
            place, found = look, True
        look = look.f_back
    code = place.f_code
    return f"{code.co_filename}:{place.f_lineno} in {code.co_name}"
