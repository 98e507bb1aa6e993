"""Limits for peers that are unknown or break the rules: little memory, few log lines.

Called by the link layer and by transports. `BoundedGuests` bounds how many of them are kept,
`Complaints` how much is logged about them. Nothing here may do I/O except logging, or keep what a
peer sent.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Generic, TypeVar

log = logging.getLogger("domicile")

MOST_STRANGERS = 256
"""I6: connections without a hello yet."""

MOST_OF_ONE_HOST = 64
"""The same, of one host: many processes may share it, and all of them dial at once after a
restart."""

MOST_UNREGISTERED = 256
"""I6: incarnations with links to this process whose record was never seen; it may still come."""

WARNINGS = 10
WARNING_EVERY_S = 6.0
"""This many warnings may be written at once, and one more after each such period. A hostile peer
must not fill a disk; the other warnings are counted."""

_REASON_CHARS = 300

K = TypeVar("K")


class BoundedGuests(Generic[K]):
    """A bounded number of guests, in total and of each host; the oldest has to leave first."""

    __slots__ = ("_by_host", "_guests", "_most", "_most_of_one_host")

    def __init__(self, most: int, most_of_one_host: int | None = None) -> None:
        self._most = most
        self._most_of_one_host = most if most_of_one_host is None else most_of_one_host
        self._guests: dict[K, str] = {}
        self._by_host: dict[str, dict[K, None]] = {}

    def __len__(self) -> int:
        return len(self._guests)

    def enter(self, guest: K, host: str = "") -> K | None:
        """Let a guest in; returns the guest that has to leave for it, if there is no room. Without
        a host only the total counts."""
        goes: K | None = None
        neighbours = self._by_host.setdefault(host, {}) if host else {}
        if len(neighbours) >= self._most_of_one_host:
            goes = next(iter(neighbours))
        elif len(self._guests) >= self._most:
            goes = next(iter(self._guests))
        if goes is not None:
            self.leave(goes)
        self._guests[guest] = host
        if host:
            self._by_host.setdefault(host, {})[guest] = None
        return goes

    def leave(self, guest: K) -> None:
        """A guest has left, or is known now. Harmless if it never entered."""
        host = self._guests.pop(guest, "")
        neighbours = self._by_host.get(host)
        if neighbours is not None:
            neighbours.pop(guest, None)
            if not neighbours:
                del self._by_host[host]


class Complaints:
    """Warnings about peers, at a limited rate."""

    __slots__ = ("_allowed", "_at", "_now", "_untold")

    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now
        self._allowed = float(WARNINGS)
        self._at = now()
        self._untold = 0

    def about(self, peer: str, reason: str) -> None:
        """Log why the connection with a peer was closed, or count that it was not logged."""
        now = self._now()
        self._allowed = min(WARNINGS, self._allowed + (now - self._at) / WARNING_EVERY_S)
        self._at = now
        if self._allowed < 1.0:
            self._untold += 1
            return
        self._allowed -= 1.0
        more = f" ({self._untold} such warnings were left out)" if self._untold else ""
        self._untold = 0
        log.warning(
            "closed the connection with %s: %s%s", plain(peer or "a peer"), plain(reason), more
        )


def plain(text: str) -> str:
    """A text that a peer may have chosen, as one short line."""
    short = text if len(text) <= _REASON_CHARS else f"{text[:_REASON_CHARS]}…"
    if short.isprintable():
        return short
    return "".join(letter if letter.isprintable() else "�" for letter in short)


def host_of(connection: object) -> str:
    """The host at the other end of a connection, as far as its transport can tell."""
    return peer_of(connection).rpartition(":")[0]


def peer_of(connection: object) -> str:
    """The address at the other end of a connection, as far as its transport can tell."""
    peer = getattr(connection, "peer", "")
    return peer if isinstance(peer, str) else ""
