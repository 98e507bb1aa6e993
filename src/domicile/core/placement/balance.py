"""How many shards each node should have: pure arithmetic over counts and capacities.

Only the planner calls this module. It knows nothing about epochs, leases or the store. It never
decides when a shard may move, only where it should go. In a tie the first node in the given order
wins. Every function costs about (nodes + shards handled) x log(nodes).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from heapq import heapify, heappop, heappush, heapreplace
from math import ceil, fsum
from typing import TypeVar

N = TypeVar("N", bound=str)

ULP = 1e-9
"""Capacities are fractions: values that differ by less than this count as equal."""

INTAKE = 2.0
"""While versions are mixed a node takes up to this many times its fair share (SM-14)."""


def round_limit(shards: int, relative: float, absolute: int) -> int:
    """Balancing moves that may be under way at once: `min(shards * relative, absolute)`, at least
    one."""
    return max(1, min(int(shards * relative + ULP), absolute))


def receiver_limit(limit: int, share: float) -> int:
    """How many of those moves one node may receive, so that a new node is not overloaded."""
    return max(1, ceil(limit * share - ULP))


def intake(shards: int, capacity: Mapping[N, float], units: float) -> dict[N, int]:
    """How many shards each node may have while versions are mixed; `units` is all capacity."""
    return {
        node: max(1, int(INTAKE * shards * one / units + ULP)) for node, one in capacity.items()
    }


def place(
    shards: Sequence[int],
    owned: Mapping[N, int],
    capacity: Mapping[N, float],
    prefer: Mapping[int, N] | None = None,
    *,
    most: Mapping[N, int] | None = None,
    marked: Mapping[N, int] | None = None,
) -> dict[int, N]:
    """A node for each shard: the least loaded per unit of capacity after receiving it.

    `capacity` names the receivers in order. A preferred receiver is chosen while it stays within
    its fair share (C8): a node which once held all shards must not get all of them back.
    `most` limits how many shards a node may have in the end; shards beyond that are left out.
    `marked` counts suspect shards on each node: the given shards go where the fewest are, whatever
    the load.
    """
    if not capacity:
        return {}
    load = {node: owned.get(node, 0) for node in capacity}
    limit = most if most is not None else dict.fromkeys(capacity, len(shards) + max(load.values()))
    chosen = preferred(shards, load, capacity, prefer, most) if prefer else {}
    step = 0 if marked is None else 1
    heap = [
        (marked.get(node, 0) if marked else 0, (load[node] + 1) / capacity[node], order, node)
        for order, node in enumerate(capacity)
        if load[node] < limit[node]
    ]
    heapify(heap)
    for shard in shards:
        if shard in chosen:
            continue
        if not heap:
            break
        mark, _, order, node = heap[0]
        chosen[shard] = node
        load[node] += 1
        if load[node] < limit[node]:
            heapreplace(heap, (mark + step, (load[node] + 1) / capacity[node], order, node))
        else:
            heappop(heap)
    return {shard: chosen[shard] for shard in shards if shard in chosen} if prefer else chosen


def preferred(
    shards: Sequence[int],
    load: dict[N, int],
    capacity: Mapping[N, float],
    prefer: Mapping[int, N],
    most: Mapping[N, int] | None,
) -> dict[int, N]:
    """Shards that go to their preferred node, within fair shares; `load` is updated."""
    total, units = sum(load.values()) + len(shards), fsum(capacity.values())
    share = {node: ceil(total * one / units - ULP) for node, one in capacity.items()}
    if most is not None:
        share = {node: min(most[node], one) for node, one in share.items()}
    chosen: dict[int, N] = {}
    for shard in shards:
        node = prefer.get(shard)
        if node is not None and node in load and load[node] < share[node]:
            chosen[shard] = node
            load[node] += 1
    return chosen


def least_shards(
    owned: Mapping[N, int],
    capacity: Mapping[N, float],
    *,
    limit: int,
    room: Mapping[N, int],
    movable: Mapping[N, int],
) -> tuple[tuple[N, N], ...]:
    """Balancing moves as (giver, receiver): the fewest that make shards per unit of capacity even.

    A shard moves only if the receiver then has less than the giver had, so never for a difference
    of one. All moves to full balance are computed first; `limit` and `room` (per receiver) select a
    part of them. After any part, the remaining moves are still enough.
    """
    load = {node: owned.get(node, 0) for node in capacity}
    left = {node: movable.get(node, 0) for node in capacity}
    spare = dict(room)
    moves: list[tuple[N, N]] = []
    # An item of a heap is valid only while its load equals the node's load.
    givers = [
        (-load[node] / capacity[node], order, load[node], node)
        for order, node in enumerate(capacity)
        if left[node] > 0
    ]
    takers = [
        ((load[node] + 1) / capacity[node], order, load[node], node)
        for order, node in enumerate(capacity)
    ]
    heapify(givers)
    heapify(takers)
    while len(moves) < limit:
        while givers and (givers[0][2] != load[givers[0][3]] or left[givers[0][3]] <= 0):
            heappop(givers)
        while takers and takers[0][2] != load[takers[0][3]]:
            heappop(takers)
        if not givers or not takers:
            break
        (_, given, _, giver), (_, taken, _, receiver) = givers[0], takers[0]
        # Products, not quotients: a rounding error must not cause a move for a difference of one.
        after, before = (load[receiver] + 1) * capacity[giver], load[giver] * capacity[receiver]
        if giver == receiver or after >= before * (1 - ULP):
            break
        load[giver] -= 1
        load[receiver] += 1
        left[giver] -= 1
        for order, node in ((given, giver), (taken, receiver)):
            heappush(takers, ((load[node] + 1) / capacity[node], order, load[node], node))
            if left[node] > 0:
                heappush(givers, (-load[node] / capacity[node], order, load[node], node))
        if spare.get(receiver, 0) > 0:
            spare[receiver] -= 1
            moves.append((giver, receiver))
    return tuple(moves)
