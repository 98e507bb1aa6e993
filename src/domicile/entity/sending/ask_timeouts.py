"""Until when callers wait for their asks: one timer for all asks with the same timeout.

Used by `outbound` alone. An ask that is answered in time costs no timer of its own. An ask that
ends must take itself out of the book into which `add` put it.
"""

from __future__ import annotations

from collections.abc import Callable
from math import floor

from domicile.entity.sending.outgoing_call import OutgoingCall
from domicile.ports.clock import Clock, Timer

MOST_BOOKS = 64
"""Number of different timeouts that are kept exactly; any other one ends up to `SLOT_S` later."""

SLOT_S = 0.01

Book = dict[OutgoingCall, None]


class AskTimeouts:
    """Open asks by their timeout; within one timeout the oldest comes first."""

    def __init__(self, clock: Clock, expire: Callable[[OutgoingCall], None]) -> None:
        self._clock = clock
        self._expire = expire
        self._books: dict[float, Book] = {}
        self._slots: dict[int, Book] = {}
        self._timers: dict[tuple[str, float], Timer] = {}

    def add(self, pending: OutgoingCall, timeout_s: float) -> Book:
        """Wait for an ask for `timeout_s` from now, or until it is taken out of the returned
        book."""
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
        """Forget all asks and cancel all timers."""
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
