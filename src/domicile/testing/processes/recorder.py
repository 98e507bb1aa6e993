"""A meter that writes to a file, so that a killed process leaves everything up to its last event.

Used by the processes of `domicile.testing.processes.cluster`, and by any other process whose events
should be part of the same history. Each event is one record, appended by one write without a
buffer. Counters are kept as running totals and written rarely, except those that tests wait for. It
must never raise: a record that can't be written ends the recording.
"""

from __future__ import annotations

import os
import struct
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec

from domicile.membership.clock import SystemClock
from domicile.testing.history import Event

COUNTS = "counts"
"""The kind of the records that hold all counters of a process, as totals so far."""

COUNTS_S = 0.2
"""Seconds after which the next event or count writes the totals again."""

AT_ONCE = ("guard.refused", "lease.fenced", "tcp.withheld_bytes")
"""Counters whose every change is written immediately: they announce that a process is about to
end."""

_HEADER = struct.Struct(">I")


class FileRecorder:
    """Implements `domicile.ports.meter.Meter`. May be called from several threads."""

    def __init__(self, path: Path, *, now: Callable[[], float] | None = None) -> None:
        self._now = SystemClock().now if now is None else now
        self._encoder = msgspec.msgpack.Encoder(enc_hook=repr)
        self._lock = threading.Lock()
        self._counts: Counter[str] = Counter()
        self._changed = False
        self._written_at = 0.0
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | getattr(os, "O_CLOEXEC", 0)
        self._file: int | None = os.open(path, flags, 0o644)

    def count(self, name: str, value: int = 1) -> None:
        """Add to a counter."""
        with self._lock:
            self._counts[name] += value
            self._changed = True
            now = self._now()
            if name in AT_ONCE or now - self._written_at >= COUNTS_S:
                self._write_counts(now)

    def event(self, kind: str, /, **fields: Any) -> None:
        """Append an event with the time of the machine's clock that runs through suspension."""
        now = self._now()
        with self._lock:
            self._write(now, kind, fields)
            if self._changed and now - self._written_at >= COUNTS_S:
                self._write_counts(now)

    def flush(self) -> None:
        """Write the totals now, if they changed."""
        with self._lock:
            if self._changed:
                self._write_counts(self._now())

    def close(self) -> None:
        """Write the totals and close the file; later events are dropped."""
        self.flush()
        with self._lock:
            self._close()

    def _write_counts(self, now: float) -> None:
        self._changed = False
        self._written_at = now
        self._write(now, COUNTS, dict(self._counts))

    def _write(self, at: float, kind: str, fields: dict[str, Any]) -> None:
        if self._file is None:
            return
        body = self._encoder.encode((at, kind, fields))
        record = _HEADER.pack(len(body)) + body
        try:
            whole = os.write(self._file, record) == len(record)
        except OSError:
            whole = False
        if not whole:
            # After half a record nothing could be read, so this record is the last one.
            self._close()

    def _close(self) -> None:
        if self._file is not None:
            os.close(self._file)
            self._file = None


class RecordReader:
    """Reads a file of records while it grows."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.counts: Counter[str] = Counter()
        """The newest totals read so far."""
        self._offset = 0
        self._decoder = msgspec.msgpack.Decoder(tuple[float, str, dict[str, Any]])

    def more(self) -> list[Event]:
        """The events that were added since the last call; half a record at the end is left for
        later."""
        try:
            with self.path.open("rb") as file:
                file.seek(self._offset)
                data = file.read()
        except FileNotFoundError:
            return []
        events: list[Event] = []
        start = 0
        while start + _HEADER.size <= len(data):
            (size,) = _HEADER.unpack_from(data, start)
            end = start + _HEADER.size + size
            if end > len(data):
                break
            at, kind, fields = self._decoder.decode(data[start + _HEADER.size : end])
            start = end
            if kind == COUNTS:
                self.counts = Counter(fields)
            else:
                events.append(Event(at, kind, fields))
        self._offset += start
        return events


def read_records(path: Path) -> Iterator[Event]:
    """The events in a file, oldest first. A torn record at the end is left out."""
    yield from RecordReader(path).more()
