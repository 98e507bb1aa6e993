"""A wall clock of one server's own, which is stepped while the server runs.

The library libfaketime answers for the system when the server asks for the time. It reads the
offset from a file at each call, so a step takes effect at once, as if somebody had set the clock of
the machine. Clocks that nobody can step stay as they are. Programs that do not ask the C library of
the system, as those in Go, keep the clock of the machine.
"""

from __future__ import annotations

from pathlib import Path

PLACES = ("/usr/lib/*/faketime/libfaketime.so.1", "/usr/lib/faketime/libfaketime.so.1")


class NoFaketime(Exception):
    """There is no libfaketime here; the text says what to do."""


def library() -> Path:
    """The library, or `NoFaketime`."""
    for place in PLACES:
        for found in sorted(Path("/").glob(place.lstrip("/"))):
            return found
    raise NoFaketime("no libfaketime: install the package libfaketime, as `make libfaketime` does")


class SteppedWall:
    """The wall clock of one server. `directory` is the server's own, and it may read there."""

    def __init__(self, directory: Path) -> None:
        self._library = library()
        self._file = directory / "wall"
        self.offset_s = 0.0
        """How far this clock is ahead of the machine's."""
        self.step(0.0)

    @property
    def command(self) -> tuple[str, ...]:
        """What starts a program with this clock, in front of its own command."""
        return (
            "env", f"LD_PRELOAD={self._library}", f"FAKETIME_TIMESTAMP_FILE={self._file}",
            "FAKETIME_NO_CACHE=1", "FAKETIME_DONT_FAKE_MONOTONIC=1", "FAKETIME_DISABLE_SHM=1",
        )  # fmt: skip

    def step(self, by_s: float) -> None:
        """Set the clock forward, or back."""
        self.offset_s += by_s
        # Renamed into its place: no reader ever finds half of it.
        new = self._file.with_suffix(".new")
        new.write_text(f"{self.offset_s:+f}\n", encoding="ascii")
        new.chmod(0o644)
        new.replace(self._file)
