"""What a checker returns: violations, readable and few.

Used by every checker. Nothing here judges.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from domicile.testing.history import Event

LIMIT = 20
"""The most violations one checker returns: the first ones explain the rest."""


@dataclass(frozen=True, slots=True)
class Violation:
    """One broken rule, when it broke, and the events that show it."""

    rule: str
    at: float
    message: str
    events: tuple[Event, ...] = ()

    def __str__(self) -> str:
        lines = [f"{self.rule} broken at {self.at:.6f}: {self.message}"]
        lines += [f"    {_describe(event)}" for event in self.events]
        return "\n".join(lines)


class Findings:
    """The violations of one rule, at most `LIMIT`."""

    __slots__ = ("rule", "violations")

    def __init__(self, rule: str) -> None:
        self.rule = rule
        self.violations: list[Violation] = []

    def add(self, at: float, message: str, *events: Event | None) -> None:
        """Note a violation, unless there are enough already."""
        if len(self.violations) < LIMIT:
            shown = tuple(event for event in events if event is not None)
            self.violations.append(Violation(self.rule, at, message, shown))


def _describe(event: Event) -> str:
    fields = " ".join(f"{name}={_short(value)}" for name, value in event.fields.items())
    return f"{event.at:.6f} {event.kind} {fields}"


def _short(value: Any) -> str:
    if isinstance(value, list | tuple):
        return "[" + ", ".join(_short(item) for item in value) + "]"  # pyright: ignore[reportUnknownVariableType]
    if isinstance(value, bytes):
        return value.decode("ascii") if _is_key(value) else f"<{len(value)} bytes>"
    text = str(value)
    return text if len(text) <= 40 else text[:37] + "..."


def _is_key(value: bytes) -> bool:
    return len(value) <= 80 and value.isascii() and value.decode("ascii").isprintable()
