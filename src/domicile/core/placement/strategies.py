"""Where shards should be: strategies by name, and the types of a user's own function.

The planner calls the named strategies; `control` calls a user's function. A strategy is pure: it
says where shards belong, never when they may move there (C4) or how many at once.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from itertools import accumulate
from math import ceil, floor, fsum

import xxhash

from domicile.core.placement.balance import ULP
from domicile.core.placement.slices import PAUSE, Slices
from domicile.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Seat:
    """A node that may receive shards."""

    node: str
    capacity: float = 1.0
    version: str = ""


@dataclass(frozen=True, slots=True)
class Situation:
    """One role as a strategy sees it."""

    role: str
    homes: tuple[str, ...]
    """Node ids by shard number: the home of each shard, or where it moves to; "" if none."""
    seats: tuple[Seat, ...]
    """Nodes that may receive, the oldest first."""


WantedHomes = Mapping[int, str]
"""Node ids by shard number; shards left out stay, or go where the default strategy says."""

Strategy = Callable[[Situation], WantedHomes | Awaitable[WantedHomes]]
"""A user's own function, plain or async."""

PLACES = ("consistent_ring", "ranges")
"""Strategies that compute each shard's place from the nodes alone."""

NAMES = ("least_shards", *PLACES)

POINTS = 128
"""Points on the ring for one unit of capacity."""

FULL = 1.25
SPARE = 4
"""A node on the ring takes at most `FULL` times its fair share of the shards, or `SPARE` more than
it. A lower bound would make many shards move when a node joins and shares are small."""

MOST_POINTS = 16_384
"""I6: points of one node, whatever capacity it claims."""

Seats = tuple[tuple[str, float], ...]

SORT_BITS = 8
"""The points of a ring are sorted in two to the power of so many parts."""

KEPT = 8
"""I6: answers of named strategies that are kept."""

_kept: dict[tuple[str, str, int, Seats], tuple[str, ...]] = {}
"""Answers by their question, the one asked for last at the end."""


def check_strategy(strategy: object) -> None:
    """Raise `ConfigError` unless this is the name of a strategy or a function."""
    if callable(strategy) or strategy in NAMES:
        return
    close = get_close_matches(strategy, NAMES, n=1) if isinstance(strategy, str) else []
    hint = f"; did you mean {close[0]!r}?" if close else ""
    raise ConfigError(
        f"strategy={strategy!r} must be one of {', '.join(map(repr, NAMES))}, or a function from "
        f"a Situation to node ids by shard number{hint}"
    )


def wanted(name: str, role: str, shards: int, seats: Seats) -> Slices[tuple[str, ...] | None]:
    """The node id of each shard's place, by number; None if the strategy names no places.

    `seats` are node ids, none twice, with capacities. Results are kept: membership changes rarely,
    and every plan asks the same question.
    """
    if name not in PLACES or not seats:
        return None
    question = (name, role, shards, seats)
    found = _kept.pop(question, None)
    if found is None:
        if name == "ranges":
            found = _ranges(shards, seats)
        else:
            found = yield from _ring(role, shards, seats)
    _kept[question] = found
    while len(_kept) > KEPT:
        del _kept[next(iter(_kept))]
    return found


def forget() -> None:
    """Drop the answers that are kept: for what must not depend on earlier questions."""
    _kept.clear()


def _ring(role: str, shards: int, seats: Seats) -> Slices[tuple[str, ...]]:
    """Each shard belongs to the next point clockwise whose node has room, in the order of numbers.

    A node's points depend on its own id and capacity alone. A node is full at `FULL` times its fair
    share. So a node that joins takes shards, and few others move: those that no longer fit where
    they were. Hashes are a contract between versions of coordinators: a change would move nearly
    every shard.
    """
    units = fsum(capacity for _, capacity in seats)
    room = {node: _room(shards * capacity / units) for node, capacity in seats}
    digest = xxhash.xxh3_64_intdigest
    owner: dict[int, str] = {}
    # By their first bits, so that they are sorted in parts, with pauses.
    parts: list[list[int]] = [[] for _ in range(1 << SORT_BITS)]
    new = 0
    for node, capacity in sorted(seats):
        count = max(1, min(MOST_POINTS, round(capacity * POINTS)))
        prefix = b"node\x00%b\x00" % node.encode()
        for number in range(count):
            point = digest(prefix + b"%d" % number)
            if point not in owner:
                owner[point] = node
                parts[point >> (64 - SORT_BITS)].append(point)
        new += count
        if new >= PAUSE:
            yield new
            new = 0
    points: list[int] = []
    sorted_before = 0
    for part in parts:
        points += sorted(part)
        if len(points) - sorted_before >= PAUSE:
            yield len(points) - sorted_before
            sorted_before = len(points)
    last, prefix = len(points), b"shard\x00%b\x00" % role.encode()
    found: list[str] = []
    for shard in range(shards):
        index = bisect_left(points, digest(prefix + b"%d" % shard)) % last
        node = owner[points[index]]
        while not room[node]:
            index = (index + 1) % last
            node = owner[points[index]]
        room[node] -= 1
        found.append(node)
        if not (shard + 1) % PAUSE:
            yield PAUSE
    return tuple(found)


def _room(share: float) -> int:
    """How many shards a node takes whose fair share is `share`: together, nodes take all."""
    return max(floor(share * FULL + ULP), ceil(share - ULP) + SPARE)


def _ranges(shards: int, seats: Seats) -> tuple[str, ...]:
    """One range of shard numbers per node, by capacity, in the order of node ids.

    Not in the order of age: a node that restarts under its id gets its range again. With the order
    of age it would be last, and all ranges would shift.
    """
    ordered = sorted(seats)
    sums = list(accumulate(capacity for _, capacity in ordered))
    found: list[str] = []
    for (node, _), reached in zip(ordered, sums, strict=True):
        end = int(shards * reached / sums[-1] + 0.5)
        found += [node] * (end - len(found))
    return tuple(found)
