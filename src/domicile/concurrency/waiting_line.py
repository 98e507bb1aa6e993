"""Tasks that wait, and go on in the order in which they came.

Calls that wait for a first node and the outputs of durable entities use it (I5). It is not enough
to wake tasks in order: a task runs one or two turns of the event loop after it is woken. Without a
line, one that comes meanwhile and need not wait would overtake it.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Awaitable
from typing import TypeVar

T = TypeVar("T")

TURNS = 3
"""Turns of the event loop after which a task that is woken has run, unless it never will (L4)."""


class WaitingLine:
    """The task that comes first goes on first.

    After `wait` a task does what must keep the order before it awaits anything else.
    """

    __slots__ = ("_places",)

    def __init__(self) -> None:
        self._places: OrderedDict[object, None] = OrderedDict()
        """Not a plain dict: that one looks at all that were taken off before it finds the first."""

    def __len__(self) -> int:
        return len(self._places)

    async def wait(self, until: Awaitable[T]) -> T:
        """The outcome of `until`, once all that came before have gone on.

        If `until` is over for one task, it must be over for all that came before.
        """
        place = object()
        self._places[place] = None
        try:
            outcome = await until
            await self._come_first(place)
        finally:
            self._places.pop(place, None)
        return outcome

    async def _come_first(self, place: object) -> None:
        places, head, turns = self._places, place, 0
        while place in places and (first := next(iter(places))) is not place:
            if first is not head:
                head, turns = first, 0
            if turns == TURNS:
                del places[first]
                continue
            await asyncio.sleep(0)
            turns += 1
