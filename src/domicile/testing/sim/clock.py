"""A simulated process's clock: the world's virtual time, which never stops for one process.

Given to every part that needs a `Clock` inside a simulation. Timers belong to the process, so they
are late after a freeze, as real ones are (L3).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from math import inf, nextafter
from typing import Any

from domicile.ports.clock import Clock, Timer
from domicile.ports.meter import Meter
from domicile.testing.sim.loop import SimLoop, World

EPOCH = datetime(2026, 1, 1, tzinfo=UTC)
"""The time of day at virtual second 0."""


@dataclass
class Machine:
    """The clocks of the machine that a process runs on; they outlive the process.

    The clock of leases started `boot_s` before the world's and runs at `rate` (A1); it never jumps
    (A2). The wall clock is `wall_s` ahead of the world's, and may be stepped at any time.
    """

    boot_s: float = 0.0
    rate: float = 1.0
    wall_s: float = 0.0

    @property
    def true(self) -> bool:
        """Whether its elapsed time equals the world's."""
        return self.rate == 1.0 and self.boot_s == 0.0

    def read(self, world_s: float) -> float:
        """The time of its clock at a time of the world."""
        return self.boot_s + world_s * self.rate

    def reached(self, own_s: float) -> float:
        """The first time of the world at which its clock shows this time."""
        world_s = (own_s - self.boot_s) / self.rate
        # Exact, or a timer could come early by a rounding error and find nothing due, forever.
        while self.read(world_s) >= own_s:
            world_s = nextafter(world_s, -inf)
        while self.read(world_s) < own_s:
            world_s = nextafter(world_s, inf)
        return world_s

    def clock(self, world: World, loop: SimLoop) -> Clock:
        """The clock of a process on this machine."""
        return SimClock(world, loop, self) if self.true else SkewedClock(world, loop, self)

    def meter(self, meter: Meter, drain_s: float) -> Meter:
        """A meter that reports the times of a process, and its drain deadline, as the world's."""
        return meter if self.true else SkewedMeter(meter, self, drain_s)


class SimClock:
    """Implements `Clock` for one process of a world, at the world's own rate."""

    def __init__(self, world: World, loop: SimLoop, machine: Machine | None = None) -> None:
        self._world = world
        self._loop = loop
        self._machine = Machine() if machine is None else machine

    def now(self) -> float:
        """Virtual seconds."""
        return self._loop.agenda.now

    def wall(self) -> datetime:
        """The virtual time of day."""
        return EPOCH + timedelta(seconds=self._world.now + self._machine.wall_s)

    def call_at(self, when: float, callback: Callable[[], None]) -> Timer:
        """Call back in this process; never while it is frozen, never once it is dead."""
        return self._loop.call_at(when, callback)


class SkewedClock:
    """Implements `Clock` for a process whose machine has its own clock (A1)."""

    def __init__(self, world: World, loop: SimLoop, machine: Machine) -> None:
        self._world = world
        self._loop = loop
        self._machine = machine

    def now(self) -> float:
        """Seconds on the machine's clock."""
        return self._machine.read(self._loop.agenda.now)

    def wall(self) -> datetime:
        """The time of day on this machine."""
        return EPOCH + timedelta(seconds=self._world.now + self._machine.wall_s)

    def call_at(self, when: float, callback: Callable[[], None]) -> Timer:
        """As `SimClock.call_at`, once this clock has reached `when`."""
        return self._loop.call_at(self._machine.reached(when), callback)


class SkewedMeter:
    """Translates the few times and durations of events, so that checkers judge one common clock."""

    def __init__(self, meter: Meter, machine: Machine, drain_s: float) -> None:
        self._meter = meter
        self._machine = machine
        self._drain_s = drain_s
        self.count = meter.count

    def event(self, kind: str, /, **fields: Any) -> None:
        """As `Meter.event`, in the world's time."""
        if kind == "renewed":
            self._renewed(fields)
        elif kind == "submit" and fields["timeout"] is not None:
            fields["timeout"] /= self._machine.rate
        elif kind == "life":
            limits: dict[str, Any] = fields["limits"]
            own = {"drain": self._drain_s / self._machine.rate}
            if "stop" in limits:
                own["stop"] = limits["stop"] / self._machine.rate
            fields["limits"] = {**limits, **own}
        self._meter.event(kind, **fields)

    def _renewed(self, fields: dict[str, Any]) -> None:
        sent_at, until = fields["sent_at"], fields["sent_at"] + fields["ttl"] - fields["margin"]
        fields["sent_at"] = self._machine.reached(sent_at)
        if until < inf:
            # Their sum must be exactly the time at which the guard begins to fail (L3).
            fields["ttl"] = self._machine.reached(until) - fields["sent_at"]
            fields["margin"] = 0.0


class ManualClock:
    """Implements `Clock` for tests without a world: time stands still until `advance`."""

    def __init__(self, now: float = 1000.0) -> None:
        self._now = now
        self._timers: list[_ManualTimer] = []

    def now(self) -> float:
        """Seconds, as advanced."""
        return self._now

    def wall(self) -> datetime:
        """The time of day, as advanced."""
        return EPOCH + timedelta(seconds=self._now)

    def call_at(self, when: float, callback: Callable[[], None]) -> Timer:
        """Call back from within the `advance` that reaches `when`."""
        timer = _ManualTimer(when, callback)
        self._timers.append(timer)
        return timer

    def advance(self, seconds: float, *, timers: bool = True) -> None:
        """Advance time and run what is due; `timers=False` leaves timers late, as a freeze does."""
        end = self._now + seconds
        while timers and (due := [timer for timer in self._timers if timer.when <= end]):
            timer = min(due, key=lambda timer: timer.when)
            self._timers.remove(timer)
            self._now = max(self._now, timer.when)
            if not timer.cancelled:
                timer.callback()
        self._now = end


class _ManualTimer:
    def __init__(self, when: float, callback: Callable[[], None]) -> None:
        self.when = when
        self.callback = callback
        self.cancelled = False

    def cancel(self) -> None:
        self.cancelled = True
