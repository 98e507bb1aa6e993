"""What should change in the shard map, given what is known: owners, moves and reverts.

Called by the coordinator. A plan is only a wish: what may be committed, and under which
conditions, is the coordinator's matter (C4). Never looks at the store, never remembers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from domicile.config import Settings
from domicile.core.allocate import least_shards, place, receiver_limit, round_limit
from domicile.core.ids import NOBODY, Incarnation, ShardKey
from domicile.core.records import NodeRecord
from domicile.core.shardmap import Entry


@dataclass(frozen=True, slots=True)
class RoleView:
    """One role's shards. Mappings are by shard number."""

    entries: tuple[Entry, ...]
    wishes: Mapping[int, str] = field(default_factory=dict[int, str])
    """Operators' wishes: node ids."""
    released: Mapping[int, int] = field(default_factory=dict[int, int])
    """Epochs that their owners released (H10), for the current owner and epoch only."""
    asked: Mapping[int, int] = field(default_factory=dict[int, int])
    """Epochs for which the owner asked to take a move back (H10)."""
    wished: Mapping[int, int] = field(default_factory=dict[int, int])
    """Epochs of moves under way whose reason is a wish."""
    resting_until: Mapping[int, float] = field(default_factory=dict[int, float])
    """Shards that could not be emptied in time: not to be tried again before."""
    struck: Mapping[int, int] = field(default_factory=dict[int, int])
    """How many owners a shard lost lately, before the present one."""
    begun: Mapping[int, int] = field(default_factory=dict[int, int])
    """Epochs in which the owner noted that entities of a suspected shard start."""
    pardoned: tuple[int, ...] = ()
    """Quarantined shards that an operator set free."""
    advice: Mapping[int, str] | None = None
    """Where a user's function wants shards: node ids. None: the named strategy decides."""
    undecided: bool = False
    """A user's function is still at it: nothing is placed or balanced for the moment."""


@dataclass(frozen=True, slots=True)
class View:
    """All that a plan depends on."""

    me: Incarnation
    nodes: Mapping[Incarnation, NodeRecord]
    """Every registered node, the oldest record first."""
    heard_at: Mapping[Incarnation, float]
    drains: tuple[str, ...]
    roles: Mapping[str, RoleView]
    balance: bool = False
    strategy: str = "least_shards"
    target: str = ""
    """The version that operators want; empty: the newest that is there."""


@dataclass(frozen=True, slots=True)
class Own:
    """A shard without a home gets an owner; `gone`: because the old one's record is gone (X)."""

    shard: ShardKey
    owner: Incarnation
    gone: bool
    strikes: int = 0


@dataclass(frozen=True, slots=True)
class Move:
    """A shard's owner shall empty it for another."""

    shard: ShardKey
    to: Incarnation


@dataclass(frozen=True, slots=True)
class Revert:
    """A move is taken back."""

    shard: ShardKey


@dataclass(frozen=True, slots=True)
class Quarantine:
    """A shard that lost too many owners gets no home before an operator says so (DX-20)."""

    shard: ShardKey
    strikes: int


Decision = Own | Move | Revert | Quarantine


@dataclass(frozen=True, slots=True)
class Plan:
    """Decisions, each shard in at most one of them."""

    owns: tuple[Own, ...] = ()
    moves: tuple[Move, ...] = ()
    reverts: tuple[Revert, ...] = ()
    quarantines: tuple[Quarantine, ...] = ()

    @property
    def decisions(self) -> tuple[Decision, ...]:
        """Everything, the most urgent first."""
        return (*self.quarantines, *self.owns, *self.moves, *self.reverts)


def heard(view: View, node: Incarnation, now: float, heard_s: float) -> bool:
    """Whether a node was heard lately (C7); this process always hears itself."""
    return node == view.me or now - view.heard_at.get(node, float("-inf")) <= heard_s


def plan(view: View, now: float, settings: Settings) -> Plan:
    """The changes that are wanted now."""
    parts = [_Round(view, role, now, settings).decide() for role in view.roles]
    return Plan(
        tuple(own for part in parts for own in part.owns),
        tuple(move for part in parts for move in part.moves),
        tuple(revert for part in parts for revert in part.reverts),
    )


class _Round:
    """One role's plan in the making. `_load` is what nodes will have once all is done."""

    def __init__(self, view: View, role: str, now: float, settings: Settings) -> None:
        self._view, self._role, self._now, self._settings = view, role, now, settings
        self._part = view.roles[role]
        up = {
            node: record
            for node, record in view.nodes.items()
            if role in record.roles and record.status == "up" and record.capacity > 0
        }
        self._willing = {
            node: record for node, record in up.items() if record.node not in view.drains
        }
        # A drained node is better than no home at all, but only where nobody else exists:
        # one that is merely silent will be heard soon or lose its record.
        self._targets = self._heard(self._willing or up)
        self._receivers = self._targets if self._willing else {}
        self._by_node_id = {up[node].node: node for node in self._targets}
        self._load: dict[Incarnation, int] = {}
        self._homeless: list[int] = []
        self._serving: list[int] = []
        self._moving: list[int] = []

    def decide(self) -> Plan:
        self._sort()
        owns = self._place()
        moves = [*self._empty(), *self._fulfil()]
        reverts = self._take_back()
        if self._view.balance and not self._homeless:
            moves += self._balance({move.shard.shard: None for move in moves})
        return Plan(tuple(owns), tuple(moves), tuple(reverts))

    def _heard(self, nodes: Mapping[Incarnation, NodeRecord]) -> dict[Incarnation, float]:
        heard_s = self._settings.heard_s
        return {
            node: record.capacity
            for node, record in nodes.items()
            if heard(self._view, node, self._now, heard_s)
        }

    def _sort(self) -> None:
        nodes, released, load = self._view.nodes, self._part.released, self._load
        for shard, entry in enumerate(self._part.entries):
            owner = entry.owner
            if owner not in nodes or shard in released:
                self._homeless.append(shard)
                continue
            if entry.state == "moving":
                self._moving.append(shard)
                owner = entry.to if entry.to in self._willing else owner
            else:
                self._serving.append(shard)
            load[owner] = load.get(owner, 0) + 1

    def _add(self, node: Incarnation, count: int) -> None:
        self._load[node] = self._load.get(node, 0) + count

    def _wish(self, shard: int) -> Incarnation | None:
        """The node that an operator wants, if it can receive."""
        node = self._by_node_id.get(self._part.wishes.get(shard, ""))
        return node if node is not None and node in self._receivers else None

    def _departing(self, node: Incarnation) -> bool:
        record = self._view.nodes[node]
        return record.status == "leaving" or record.node in self._view.drains

    def _resting(self, shard: int) -> bool:
        return self._now < self._part.resting_until.get(shard, float("-inf"))

    def _at_wish(self, shard: int) -> bool:
        owner = self._view.nodes[self._part.entries[shard].owner]
        return self._part.wishes.get(shard) == owner.node

    def _place(self) -> list[Own]:
        """Homes for the homeless: where wished, where the move was going, where it was (C8)."""
        chosen: dict[int, Incarnation] = {}
        prefer: dict[int, Incarnation] = {}
        rest: list[int] = []
        for shard in self._homeless:
            entry = self._part.entries[shard]
            wish = self._wish(shard)
            if wish is not None:
                chosen[shard] = wish
            elif entry.state == "moving" and entry.to in self._targets:
                chosen[shard] = entry.to
            else:
                rest.append(shard)
                if entry.owner not in self._view.nodes and entry.previous in self._by_node_id:
                    prefer[shard] = self._by_node_id[entry.previous]
        for node in chosen.values():
            self._add(node, 1)
        placed = place(rest, self._load, self._targets, prefer)
        for node in placed.values():
            self._add(node, 1)
        chosen.update(placed)
        return [self._own(shard, chosen[shard]) for shard in self._homeless if shard in chosen]

    def _own(self, shard: int, node: Incarnation) -> Own:
        entry = self._part.entries[shard]
        released = shard in self._part.released
        gone = not released and entry.owner != NOBODY
        assert released or entry.owner not in self._view.nodes, "C4: neither released nor gone"
        return Own(ShardKey(self._role, shard), node, gone)

    def _empty(self) -> list[Move]:
        """Leaving and drained nodes give everything away, without a limit."""
        if not any(map(self._departing, self._view.nodes)):
            return []
        chosen: dict[int, Incarnation] = {}
        rest: list[int] = []
        for shard in self._serving:
            owner = self._part.entries[shard].owner
            record = self._view.nodes[owner]
            if record.status == "evicted" or not self._departing(owner):
                continue
            if self._resting(shard) and record.status != "leaving":
                continue
            wish = self._wish(shard)
            if wish is not None:
                chosen[shard] = wish
                self._add(wish, 1)
            else:
                rest.append(shard)
        placed = place(rest, self._load, self._receivers)
        for node in placed.values():
            self._add(node, 1)
        chosen.update(placed)
        for shard in () if self._willing else rest:
            # Nobody to give it to: it is drained all the same before its owner goes (H14).
            if self._leaves(self._part.entries[shard].owner):
                chosen[shard] = NOBODY
        return [Move(ShardKey(self._role, shard), node) for shard, node in chosen.items()]

    def _leaves(self, node: Incarnation) -> bool:
        return self._view.nodes[node].status == "leaving"

    def _fulfil(self) -> list[Move]:
        """Shards that an operator wants elsewhere."""
        moves: list[Move] = []
        if not self._part.wishes:
            return moves
        for shard in self._serving:
            if shard not in self._part.wishes:
                continue
            owner = self._part.entries[shard].owner
            record = self._view.nodes[owner]
            if record.status != "up" or self._departing(owner) or self._resting(shard):
                continue
            wish = self._wish(shard)
            if wish is not None and not self._at_wish(shard):
                moves.append(Move(ShardKey(self._role, shard), wish))
                self._add(owner, -1)
                self._add(wish, 1)
        return moves

    def _take_back(self) -> list[Revert]:
        """Moves whose owner gave up, or whose reason is gone while the owner stays."""
        reverts: list[Revert] = []
        for shard in self._moving:
            entry = self._part.entries[shard]
            if self._view.nodes[entry.owner].status != "up":
                continue
            if self._part.asked.get(shard) == entry.epoch or self._pointless(shard, entry):
                reverts.append(Revert(ShardKey(self._role, shard)))
        return reverts

    def _pointless(self, shard: int, entry: Entry) -> bool:
        if self._departing(entry.owner):
            return False
        if self._at_wish(shard):
            return True
        if self._wish(shard) is not None:
            return False
        unwished = self._part.wished.get(shard) == entry.epoch and shard not in self._part.wishes
        return unwished or entry.to not in self._willing

    def _balance(self, decided: Mapping[int, None]) -> list[Move]:
        """A limited step towards equal shards per unit of capacity, between heard nodes only."""
        under_way = sum(
            not self._departing(self._part.entries[shard].owner) for shard in self._moving
        ) + sum(not self._departing(self._part.entries[shard].owner) for shard in decided)
        limit = round_limit(len(self._part.entries), self._settings.balance_limit)
        room = dict.fromkeys(self._receivers, receiver_limit(limit))
        for shard in self._moving:
            to = self._part.entries[shard].to
            if to in room and not self._departing(self._part.entries[shard].owner):
                room[to] -= 1
        resting, wished = bool(self._part.resting_until), bool(self._part.wishes)
        spare: dict[Incarnation, list[int]] = {node: [] for node in self._receivers}
        for shard in self._serving:
            owner = self._part.entries[shard].owner
            if owner not in spare or shard in decided:
                continue
            if (resting and self._resting(shard)) or (wished and self._at_wish(shard)):
                continue
            spare[owner].append(shard)
        movable = {node: len(shards) for node, shards in spare.items()}
        pairs = least_shards(
            self._load, self._receivers, limit=limit - under_way, room=room, movable=movable
        )
        return [Move(ShardKey(self._role, spare[giver].pop(0)), to) for giver, to in pairs]
