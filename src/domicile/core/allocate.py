"""How many shards each node should have: pure arithmetic over counts and capacities.

Called by the planner only. Knows nothing of epochs, leases or the store, and never decides when
something may happen, only where it should go. Ties go to whoever comes first in the given order.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import ceil, fsum
from typing import TypeVar

N = TypeVar("N", bound=str)


def round_limit(shards: int, fraction: float) -> int:
    """How many balancing moves may be under way at once: a share of the shards, at least one."""
    return max(1, int(shards * fraction))


def receiver_limit(limit: int) -> int:
    """How many of them one node may be receiving: half, so that a newcomer is not swamped."""
    return max(1, ceil(limit / 2))


def place(
    shards: Sequence[int],
    owned: Mapping[N, int],
    capacity: Mapping[N, float],
    prefer: Mapping[int, N] | None = None,
) -> dict[int, N]:
    """A node for each shard: the least loaded per unit of capacity after receiving it.

    `capacity` names the receivers in order. A preferred receiver is taken while it stays within
    its fair share (C8), so that a node which once held everything does not get it all back.
    """
    if not capacity:
        return {}
    load = {node: owned.get(node, 0) for node in capacity}
    total, units = sum(load.values()) + len(shards), fsum(capacity.values())
    chosen: dict[int, N] = {}
    for shard in shards:
        node = (prefer or {}).get(shard)
        if node is not None and node in load:
            share = ceil(total * capacity[node] / units - 1e-9)
            if load[node] < share:
                chosen[shard] = node
                load[node] += 1
    for shard in shards:
        if shard not in chosen:
            node = min(load, key=lambda candidate: (load[candidate] + 1) / capacity[candidate])
            chosen[shard] = node
            load[node] += 1
    return {shard: chosen[shard] for shard in shards}


def least_shards(
    owned: Mapping[N, int],
    capacity: Mapping[N, float],
    *,
    limit: int,
    room: Mapping[N, int],
    movable: Mapping[N, int],
) -> tuple[tuple[N, N], ...]:
    """Balancing moves as (giver, receiver), the fewest that even out shards per unit of capacity.

    A shard moves only if its receiver then has less than its giver had, so never for a
    difference of one. The whole way to balance is computed first and `limit` and `room` (per
    receiver) choose a part of it: any part leaves no more to do than the rest.
    """
    load = {node: owned.get(node, 0) for node in capacity}
    left = {node: movable.get(node, 0) for node in capacity}
    spare = dict(room)
    moves: list[tuple[N, N]] = []
    while len(moves) < limit:
        givers = [node for node in load if left[node] > 0]
        if not givers:
            break
        giver = max(givers, key=lambda node: load[node] / capacity[node])
        receiver = min(load, key=lambda node: (load[node] + 1) / capacity[node])
        # Compared as products: a quotient's last digit must not make a difference of one a move.
        after, before = (load[receiver] + 1) * capacity[giver], load[giver] * capacity[receiver]
        if giver == receiver or after >= before * (1 - 1e-9):
            break
        load[giver] -= 1
        load[receiver] += 1
        left[giver] -= 1
        if spare.get(receiver, 0) > 0:
            spare[receiver] -= 1
            moves.append((giver, receiver))
    return tuple(moves)
