"""Which shards keep a leaving node here (H14), and which releases the store does not show (H10).

Each `ShardHost` reports here after every step of its owner machine. So nobody has to look at all
shards: a node may have tens of thousands, and while it leaves it asks many times a second. This
module counts and repeats; what keeps a node here is said by `core.coordinator.departures`.
"""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import Callable
from itertools import islice
from typing import Protocol

from domicile.core.coordinator.departures import unfinished
from domicile.core.handoff.tables import Phase
from domicile.core.ids import Incarnation, ShardKey
from domicile.core.state.shardmap import Entry

REPEATS_PER_TURN = 1_024
"""Releases that are repeated within one turn of the event loop: 10 ms, or less."""

REPEATS_PER_ROUND = 4_096
"""Releases that are repeated when a second has passed: no leader stores many more in a second. The
others follow in the next rounds. A new leader is told all of them."""


class OwnerState(Protocol):
    """What of an owner machine is looked at here."""

    phase: Phase
    epoch: int
    entry: Entry
    me: Incarnation


class UnreleasedShards:
    """Kept up to date by the hosts of one incarnation."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        guard: Callable[[], bool],
        repeat: Callable[[ShardKey], None],
    ) -> None:
        self._loop, self._guard, self._repeat = loop, guard, repeat
        self._kept: dict[ShardKey, None] = {}
        """Shards that this node must still release."""
        self._unplaced: dict[ShardKey, None] = {}
        """Released shards with a next home that is not stored yet."""
        self._roles: Counter[str] = Counter()
        """How many of the unplaced shards each role has."""
        self._draining: dict[ShardKey, None] = {}
        self._unconfirmed: dict[ShardKey, None] = {}
        """Released shards that the store still gives to this node. The one that was repeated the
        longest ago is the first."""
        self._order: dict[ShardKey, int] = {}
        """Shards are repeated in the order in which they came here first."""
        self._due: deque[ShardKey] = deque()

    @property
    def draining(self) -> bool:
        """Whether some shard is being emptied, which ends by its deadline (H10)."""
        return bool(self._draining)

    def keeps(self, may_place: Callable[[str], bool]) -> bool:
        """Whether this node must not leave yet, but for shards that are handed over (H14)."""
        return bool(self._kept) or any(count and may_place(r) for r, count in self._roles.items())

    def note(self, shard: ShardKey, owner: OwnerState) -> None:
        """A shard's phase or entry may have changed."""
        self._order.setdefault(shard, len(self._order))
        entry, phase, epoch = owner.entry, owner.phase, owner.epoch
        mine = entry.owner == owner.me
        kept = mine and unfinished(
            entry, owner.me, phase, epoch, handing_over=False, may_place=_never
        )
        unplaced = mine and not kept and unfinished(
            entry, owner.me, phase, epoch, handing_over=False, may_place=_always
        )  # fmt: skip
        _mark(self._kept, shard, kept)
        self._roles[shard.role] += _mark(self._unplaced, shard, unplaced)
        _mark(self._draining, shard, phase is Phase.DRAINING)
        _mark(self._unconfirmed, shard, mine and phase is Phase.RELEASED and entry.epoch <= epoch)

    def repeat_all(self) -> None:
        """A new leader has to be told every release that the store does not show."""
        self._begin(len(self._unconfirmed))

    def repeat_some(self) -> None:
        """A second has passed: tell again what was told the longest ago."""
        self._begin(REPEATS_PER_ROUND)

    def _begin(self, most: int) -> None:
        goes_on = bool(self._due)
        longest_ago = islice(self._unconfirmed, most)
        self._due = deque(sorted(longest_ago, key=self._order.__getitem__))
        if not goes_on:
            self._go_on()

    def _go_on(self) -> None:
        if not self._guard():
            self._due.clear()
            return
        for _ in range(min(REPEATS_PER_TURN, len(self._due))):
            shard = self._due.popleft()
            if shard in self._unconfirmed:
                del self._unconfirmed[shard]
                self._unconfirmed[shard] = None
                self._repeat(shard)
        if self._due:
            self._loop.call_soon(self._go_on)


def _mark(among: dict[ShardKey, None], shard: ShardKey, is_one: bool) -> int:
    """Add a shard or take it away; returns by how much their number has grown."""
    before = len(among)
    if is_one:
        among.setdefault(shard)
    else:
        among.pop(shard, None)
    return len(among) - before


def _never() -> bool:
    return False


def _always() -> bool:
    return True
