"""Until when callers wait for their asks: one timer for all that wait equally long.

Used by `outbound` alone. An ask that is answered in time costs no timer of its own. Whoever waits
takes itself out of the book it was put in.
"""

from __future__ import annotations

from collections.abc import Callable
from math import floor

from domicile.entity.sending.outgoing_call import OutgoingCall
from domicile.ports.clock import Clock, Timer

MOST_BOOKS = 64
"""Different timeouts that are kept to the instant; any further one ends up to a slot later."""

SLOT_S = 0.01

Book = dict[OutgoingCall, None]


class AskTimeouts:
    """Open asks by how long they may take; the oldest of each kind come first."""

    def __init__(self, clock: Clock, expire: Callable[[OutgoingCall], None]) -> None:
        self._clock = clock
        self._expire = expire
        self._books: dict[float, Book] = {}
        self._slots: dict[int, Book] = {}
        self._timers: dict[tuple[str, float], Timer] = {}

    def add(self, pending: OutgoingCall, timeout_s: float) -> Book:
        """From now on, for so long, or until it is taken out of the book that this returns."""
        book = self._books.get(timeout_s)
        if book is not None:
            book[pending] = None
            return book
        if len(self._books) >= MOST_BOOKS:
            return self._slot(pending)
        book = self._books[timeout_s] = {pending: None}
        self._arm(timeout_s, pending)
        return book

    def close(self) -> None:
        """Nobody waits for anything."""
        for timer in self._timers.values():
            timer.cancel()
        self._timers.clear()
        self._books.clear()
        self._slots.clear()

    def _arm(self, timeout_s: float, oldest: OutgoingCall) -> None:
        when = oldest.expires_at
        self._timers["book", timeout_s] = self._clock.call_at(when, lambda: self._look(timeout_s))

    def _look(self, timeout_s: float) -> None:
        book = self._books[timeout_s]
        now = self._clock.now()
        late: list[OutgoingCall] = []
        for pending in book:
            if pending.expires_at > now:
                self._arm(timeout_s, pending)
                break
            late.append(pending)
        else:
            del self._books[timeout_s], self._timers["book", timeout_s]
        self._end(book, late)

    def _slot(self, pending: OutgoingCall) -> Book:
        """Many different timeouts: those that end at about the same time share a timer."""
        number = floor(pending.expires_at / SLOT_S) + 1
        slot = self._slots.get(number)
        if slot is None:
            slot = self._slots[number] = {}
            due = self._clock.call_at(number * SLOT_S, lambda: self._look_slot(number))
            self._timers["slot", number] = due
        slot[pending] = None
        return slot

    def _look_slot(self, number: int) -> None:
        del self._timers["slot", number]
        slot = self._slots.pop(number)
        self._end(slot, list(slot))

    def _end(self, book: Book, late: list[OutgoingCall]) -> None:
        for pending in late:
            book.pop(pending, None)
            self._expire(pending)
