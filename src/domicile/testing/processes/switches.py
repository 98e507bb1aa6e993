"""What a test changes inside running member processes: the wall clock, a full disk, and a store
that is out of reach or seen late.

The harness and every member of its cluster map one small file. The harness sets switches, members
read them; no message is needed, so that even a blocked loop is affected. Members `install` it
before anything else. It must never be installed in a process that is not a member of a test.
"""

from __future__ import annotations

import mmap
import os
import struct
import sys
import time
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path

import apsw

from domicile.membership.clock import SystemClock
from domicile.stores.sqlite.file import Database, Row
from domicile.stores.sqlite.schema import LOG

_WALL = struct.Struct("=d")
_FULL = _WALL.size
_CUT = _FULL + 1
PLACES = 1_024
"""The largest number of members of a cluster."""

_LAG = _CUT + PLACES
_SIZE = _LAG + PLACES
_LAG_UNIT_S = 0.01
_CHANGES = LOG.partition("{below}")[0]
_REVISION = 6
"""The column with the revision in a row of changes; None if there is none."""


class Levers:
    """The mapped file. A missing one is created, with every switch off."""

    def __init__(self, path: Path) -> None:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | getattr(os, "O_CLOEXEC", 0), 0o644)
        try:
            if os.fstat(descriptor).st_size < _SIZE:
                os.ftruncate(descriptor, _SIZE)
            self._map = mmap.mmap(descriptor, _SIZE)
        finally:
            os.close(descriptor)

    @property
    def wall_s(self) -> float:
        """Seconds by which the wall clock was stepped."""
        return float(_WALL.unpack_from(self._map)[0])

    @property
    def full(self) -> bool:
        """Whether the store's disk has no room."""
        return bool(self._map[_FULL])

    def is_cut(self, place: int) -> bool:
        """Whether a member is cut off the store."""
        return bool(self._map[_CUT + place])

    def step_wall(self, by_s: float) -> None:
        """Step the wall clock of all members."""
        _WALL.pack_into(self._map, 0, self.wall_s + by_s)

    def fill(self, full: bool) -> None:
        """Let every write to the store fail, or no longer."""
        self._map[_FULL] = int(full)

    def cut(self, place: int, cut: bool) -> None:
        """Cut a member off the store, or no longer."""
        self._map[_CUT + place] = int(cut)

    def lag_s(self, place: int) -> float:
        """Seconds by which a member's watches see others' commits late."""
        return self._map[_LAG + place] * _LAG_UNIT_S

    def lag(self, place: int, seconds: float) -> None:
        """Delay everything that a member's watches see by so many seconds, up to 2.5."""
        self._map[_LAG + place] = min(round(seconds / _LAG_UNIT_S), 255)

    def close(self) -> None:
        """Close the file."""
        self._map.close()


def install(levers: Levers, place: int) -> None:
    """Make this process obey the switches, as the member at a place.

    The wall clock is what `time.time`, `time.time_ns` and an entity's `now()` return. As with a
    real step of the machine's clock, the clocks that count from its boot, which leases and the
    embedded store use (S4), do not move. A full disk is SQLite's answer "full" to each write of the
    store. A store out of reach answers only "can't open". A lagging member gets every change late.
    """
    time_s, time_ns, run, rows = time.time, time.time_ns, Database.run, Database.rows

    def wall(self: SystemClock) -> datetime:
        return datetime.fromtimestamp(time_s() + levers.wall_s, UTC)

    def writes(
        self: Database, sql: str, values: Sequence[object] | Mapping[str, object] = ()
    ) -> None:
        if levers.full and sql.startswith("INSERT INTO"):
            raise apsw.FullError("FullError: database or disk is full")
        if levers.is_cut(place):
            raise apsw.CantOpenError("CantOpenError: unable to open database file")
        run(self, sql, values)

    def reads(
        self: Database,
        sql: str,
        values: Sequence[object] = (),
        *,
        most: int = sys.maxsize,
        same: int = 0,
    ) -> list[Row]:
        if levers.is_cut(place):
            raise apsw.CantOpenError("CantOpenError: unable to open database file")
        found = rows(self, sql, values, most=most, same=same)
        lag_s = levers.lag_s(place)
        if lag_s and sql.startswith(_CHANGES) and found[0][_REVISION] is not None:
            time.sleep(lag_s)
        return found

    setattr(time, "time", lambda: time_s() + levers.wall_s)  # noqa: B010
    setattr(time, "time_ns", lambda: time_ns() + int(levers.wall_s * 1e9))  # noqa: B010
    setattr(SystemClock, "wall", wall)  # noqa: B010
    setattr(Database, "run", writes)  # noqa: B010
    setattr(Database, "rows", reads)  # noqa: B010
