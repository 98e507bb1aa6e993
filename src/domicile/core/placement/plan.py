"""What should change in the shard map, given what is known: owners, moves, reverts, quarantines.

The coordinator calls this module. A plan is a proposal: the coordinator decides what may be
committed, and under which conditions (C4). A plan never reads the store and remembers nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import fsum

from domicile.core.ids import NOBODY, Incarnation, ShardKey
from domicile.core.placement import model, strategies, versions
from domicile.core.placement.balance import (
    intake,
    least_shards,
    place,
    preferred,
    receiver_limit,
    round_limit,
)
from domicile.core.placement.model import (
    Move,
    Own,
    Plan,
    PlanInput,
    Quarantine,
    Revert,
    heard,
)
from domicile.core.placement.slices import PAUSE, Slices, at_once
from domicile.core.placement.strategies import Seat, Situation
from domicile.core.placement.suspicion import judge
from domicile.core.state.records import NodeRecord
from domicile.core.state.shardmap import Entry, Suspicion
from domicile.settings import Settings

SUSPICIOUS = 2
"""Owner deaths after which a shard is suspect and is placed apart from other suspects; at most
`poison_deaths - 1`."""

MOST_CAPACITY = 1e6
"""I6: a record's capacity counts up to this, so that no sum of capacities overflows."""


def plan(view: PlanInput, now: float, settings: Settings) -> Plan:
    """The changes that are wanted now."""
    return at_once(plan_in_slices(view, now, settings))


def plan_in_slices(view: PlanInput, now: float, settings: Settings) -> Slices[Plan]:
    """As `plan`, with pauses: at 65,536 shards a plan takes 40 to 400 ms of CPU time, and other
    work must not wait for it (I8). The input must not change meanwhile."""
    parts: list[Plan] = []
    for role in view.roles:
        one = _Round(view, role, now, settings)
        yield len(view.roles[role].entries)
        parts.append((yield from one.decide()))
    return Plan(
        tuple(own for part in parts for own in part.owns),
        tuple(move for part in parts for move in part.moves),
        tuple(revert for part in parts for revert in part.reverts),
        tuple(one for part in parts for one in part.quarantines),
    )


def situation(view: PlanInput, role: str, now: float, settings: Settings) -> Situation:
    """The argument of a user's function: where shards are or go, and which nodes may receive."""
    return _Round(view, role, now, settings).situation()


class _Round:
    """One role's plan while it is made. `_load`: shards that each node has after the plan."""

    def __init__(self, view: PlanInput, role: str, now: float, settings: Settings) -> None:
        self._view, self._role, self._now, self._settings = view, role, now, settings
        self._part = view.roles[role]
        self._departing = model.departing(view.nodes, view.drains)
        up = {node: record for node, record in view.nodes.items() if model.receives(record, role)}
        self._willing = model.willing(view.nodes, role, view.drains)
        # A drained node is better than no home, but only if no other node exists: a node that is
        # only silent will be heard soon or lose its record.
        pool = self._willing or up
        self._open = {
            node: _capacity(record)
            for node, record in pool.items()
            if heard(view, node, now, settings.heard_s)
        }
        self._targets = self._open
        self._mixed = versions.mixed(record.version for record in up.values())
        if self._mixed:
            allowed = versions.target_versions(
                (record.version for record in pool.values()), view.target
            )
            of_target = {
                node: one for node, one in self._open.items() if pool[node].version in allowed
            }
            self._targets = of_target or self._open
        self._units = fsum(map(_capacity, up.values()))
        self._eligible = self._find_eligible(pool)
        self._receivers = self._targets if self._willing else {}
        self._open_ids = {pool[node].node: node for node in self._open}
        self._target_ids = {pool[node].node: node for node in self._targets}
        self._last = max(1, settings.poison_deaths - 1)
        self._suspicious = min(SUSPICIOUS, self._last)
        self._load: dict[Incarnation, int] = {}
        self._homeless: list[int] = []
        self._serving: list[int] = []
        self._moving: list[int] = []
        self._sort()
        self._most = (
            intake(len(self._part.entries), self._targets, self._units)
            if len(self._targets) < len(self._open)
            else None
        )
        self._places: Sequence[str] | None = None
        """The ids of the nodes where a named strategy wants the shards."""

    def decide(self) -> Slices[Plan]:
        yield from self._ask_strategy()
        suspicions, away = yield from judge(self._part, self._homeless, self._settings)
        quarantines = [Quarantine(ShardKey(self._role, shard), one) for shard, one in away.items()]
        yield len(self._homeless)
        owns = yield from self._place(suspicions)
        moves = [*(yield from self._empty()), *self._fulfil()]
        if self._eligible and self._receivers:
            moves += self._suit({move.shard.shard: None for move in moves})
        reverts = self._take_back()
        if self._view.balance and not (self._homeless or self._mixed or self._part.undecided):
            yield len(self._part.entries)
            moves += yield from self._balance({move.shard.shard: None for move in moves})
        return Plan(tuple(owns), tuple(moves), tuple(reverts), tuple(quarantines))

    def situation(self) -> Situation:
        nodes, seated = self._view.nodes, self._target_ids.values()
        homes: list[str] = []
        homeless = dict.fromkeys(self._homeless)
        for shard, entry in enumerate(self._part.entries):
            goes = entry.to if entry.state == "moving" else NOBODY
            home = NOBODY if shard in homeless else entry.owner
            if goes in (self._targets if shard in homeless else nodes):
                home = goes
            homes.append(nodes[home].node if home in nodes else "")
        seats = (Seat(nodes[n].node, self._targets[n], nodes[n].version) for n in seated)
        return Situation(self._role, tuple(homes), tuple(seats))

    def _sort(self) -> None:
        nodes, released, load = self._view.nodes, self._part.released, self._load
        for shard, entry in enumerate(self._part.entries):
            owner, state = entry.owner, entry.state
            if state == "quarantined":
                if shard in self._part.cleared or shard in self._part.due:
                    self._homeless.append(shard)
                continue
            if owner not in nodes or shard in released:
                self._homeless.append(shard)
                continue
            if state == "moving":
                self._moving.append(shard)
                owner = entry.to if entry.to in self._willing else owner
            else:
                self._serving.append(shard)
            load[owner] = load.get(owner, 0) + 1

    def _find_eligible(
        self, pool: Mapping[Incarnation, NodeRecord]
    ) -> dict[int, Mapping[Incarnation, None]]:
        """By shard with needs: the nodes that have all types that it needs (DX-26).

        Needs that no node can meet do not count: the shard's other types must have a home.
        """
        needs = self._part.needs
        found = {types: model.fitting(pool, types) for types in needs.values()}
        return {shard: found[types] for shard, types in needs.items() if found[types]}

    def _fits(self, shard: int, node: Incarnation) -> bool:
        """Whether a node has the types that a shard needs, or no node has them."""
        eligible = self._eligible.get(shard)
        return eligible is None or node in eligible

    def _add(self, node: Incarnation, count: int) -> None:
        self._load[node] = self._load.get(node, 0) + count

    def _ask_strategy(self) -> Slices[None]:
        """Named strategies count silent nodes too: a pause of two seconds must not shift ranges.

        While versions are mixed, places change with each new node: only the load counts (SM-14).
        """
        if not (self._part.undecided or self._mixed) and self._part.advice is None:
            seats = {record.node: _capacity(record) for record in self._willing.values()}
            self._places = yield from strategies.wanted(
                self._view.strategy, self._role, len(self._part.entries), tuple(seats.items())
            )

    def _wanted(self, shard: int) -> Incarnation | None:
        """Where a shard belongs, if that node may receive it now; None: on the least loaded
        node."""
        if self._places is not None:
            id = self._places[shard]
        elif self._part.advice is not None and not self._part.undecided:
            id = self._part.advice.get(shard, "")
        else:
            return None
        node = self._target_ids.get(id)
        return node if node is not None and self._fits(shard, node) else None

    def _wish(self, shard: int) -> Incarnation | None:
        """The node that an operator wants, if it can receive the shard, whatever its version is."""
        if not self._willing:
            return None
        node = self._open_ids.get(self._part.wishes.get(shard, ""))
        return node if node is not None and self._fits(shard, node) else None

    def _resting(self, shard: int) -> bool:
        return self._now < self._part.resting_until.get(shard, float("-inf"))

    def _at_wish(self, shard: int) -> bool:
        owner = self._part.entries[shard].owner
        at_wish = self._part.wishes.get(shard) == self._view.nodes[owner].node
        return at_wish and self._fits(shard, owner)

    def _place(self, suspicions: Mapping[int, Suspicion]) -> Slices[list[Own]]:
        """Homes for shards that have none: by wish, by the move under way, by the strategy, by the
        last owner (C8). Suspect shards go apart from each other, most blamed first (DX-20)."""
        chosen: dict[int, Incarnation] = {}
        prefer: dict[int, Incarnation] = {}
        rest: list[int] = []
        suspects: list[int] = []
        for done, (shard, suspicion) in enumerate(suspicions.items(), 1):
            if not done % PAUSE:
                yield PAUSE
            entry = self._part.entries[shard]
            wish = self._wish(shard)
            if wish is not None:
                self._take(chosen, shard, wish)
            elif suspicion.deaths >= self._suspicious:
                suspects.append(shard)
            elif (
                entry.state == "moving"
                and entry.to in self._targets
                and self._fits(shard, entry.to)
            ):
                self._take(chosen, shard, entry.to)
            elif not self._take_wanted(chosen, shard):
                rest.append(shard)
                if entry.owner not in self._view.nodes and entry.previous in self._target_ids:
                    prefer[shard] = self._target_ids[entry.previous]
        if not self._part.undecided:
            suspects.sort(key=lambda one: (-suspicions[one].blamed, -suspicions[one].deaths))
            chosen |= yield from self._spread(suspects, marked=self._suspects())
            chosen |= yield from self._spread(rest, prefer)
        owns: list[Own] = []
        for shard, suspicion in suspicions.items():
            if shard in chosen:
                owns.append(self._own(shard, chosen[shard], suspicion))
                if not len(owns) % PAUSE:
                    yield PAUSE
        return owns

    def _take(self, chosen: dict[int, Incarnation], shard: int, node: Incarnation) -> None:
        chosen[shard] = node
        self._add(node, 1)

    def _take_wanted(self, chosen: dict[int, Incarnation], shard: int) -> bool:
        """Choose the node that the strategy wants for a shard, if there is one and it has room."""
        node = self._wanted(shard)
        if node is None or (self._most and self._load.get(node, 0) >= self._most[node]):
            return False
        self._take(chosen, shard, node)
        return True

    def _spread(
        self,
        shards: Sequence[int],
        prefer: Mapping[int, Incarnation] | None = None,
        marked: Mapping[Incarnation, int] | None = None,
    ) -> Slices[dict[int, Incarnation]]:
        """Choose the least loaded nodes. Shards beyond the intake of the target version go to
        nodes of other versions."""
        chosen: dict[int, Incarnation] = {}
        rest: list[int] = []
        for shard in shards:
            fit = self._fit(shard) if shard in self._eligible else None
            if fit:
                node = place((shard,), self._load, fit, prefer, marked=marked)[shard]
                self._take(chosen, shard, node)
            else:
                rest.append(shard)
        placed = yield from self._by_load(rest, prefer, marked)
        if len(placed) < len(rest):
            others = {n: one for n, one in self._open.items() if n not in self._targets}
            placed |= place([shard for shard in rest if shard not in placed], self._load, others)
        for node in placed.values():
            self._add(node, 1)
        return chosen | placed

    def _fit(self, shard: int) -> dict[Incarnation, float]:
        """The heard nodes that have the types that a shard needs; of the target version, if any."""
        fit = {n: one for n, one in self._open.items() if n in self._eligible[shard]}
        return {n: one for n, one in fit.items() if n in self._targets} or fit

    def _by_load(
        self,
        shards: Sequence[int],
        prefer: Mapping[int, Incarnation] | None,
        marked: Mapping[Incarnation, int] | None,
    ) -> Slices[dict[int, Incarnation]]:
        """As `place`, with pauses. Marked shards are few and placed at once."""
        targets, most = self._targets, self._most
        if marked is not None or len(shards) <= PAUSE:
            return place(shards, self._load, targets, prefer, most=most, marked=marked)
        load = {node: self._load.get(node, 0) for node in targets}
        placed = preferred(shards, load, targets, prefer, most) if prefer else {}
        rest = [shard for shard in shards if shard not in placed]
        yield len(shards)
        for start in range(0, len(rest), PAUSE):
            found = place(rest[start : start + PAUSE], load, targets, most=most)
            for node in found.values():
                load[node] += 1
            placed |= found
            yield PAUSE
        return placed

    def _suspects(self) -> dict[Incarnation, int]:
        """How many suspect shards each node has."""
        counts: dict[Incarnation, int] = {}
        for shard, count in self._part.recent_deaths.items():
            if count >= self._suspicious and shard < len(self._part.entries):
                owner = self._part.entries[shard].owner
                counts[owner] = counts.get(owner, 0) + 1
        return counts

    def _own(self, shard: int, node: Incarnation, suspicion: Suspicion) -> Own:
        entry = self._part.entries[shard]
        released = shard in self._part.released
        gone = not released and entry.owner != NOBODY
        assert released or entry.owner not in self._view.nodes, "C4: neither released nor gone"
        return Own(ShardKey(self._role, shard), node, gone, suspicion)

    def _empty(self) -> Slices[list[Move]]:
        """Leaving and drained nodes give everything away."""
        departing = model.emptying(
            self._view, self._role, self._departing, self._willing, self._now, self._settings
        )
        chosen: dict[int, Incarnation] = {}
        rest: list[int] = []
        for done, shard in enumerate(self._serving if departing else (), 1):
            if not done % PAUSE:
                yield PAUSE
            owner = self._part.entries[shard].owner
            if owner not in departing or self._view.nodes[owner].status == "evicted":
                continue
            leaves = self._view.nodes[owner].status == "leaving"
            if not leaves and (self._part.undecided or self._resting(shard)):
                continue
            wish = self._wish(shard)
            if wish is not None:
                self._take(chosen, shard, wish)
            elif not (self._receivers and self._take_wanted(chosen, shard)):
                rest.append(shard)
        if self._receivers:
            chosen |= yield from self._spread(rest)
        for shard in () if self._willing else rest:
            # No node can receive the shard: it is drained anyway before its owner leaves (H14).
            if self._view.nodes[self._part.entries[shard].owner].status == "leaving":
                chosen[shard] = NOBODY
        chosen |= dict.fromkeys(model.stranded(self._view, self._role), NOBODY)
        return [Move(ShardKey(self._role, shard), node) for shard, node in chosen.items()]

    def _fulfil(self) -> list[Move]:
        """Shards that an operator wants elsewhere."""
        moves: list[Move] = []
        serving = self._serving if self._part.wishes else ()
        for shard in [one for one in serving if one in self._part.wishes]:
            owner = self._part.entries[shard].owner
            record = self._view.nodes[owner]
            if record.status != "up" or owner in self._departing or self._resting(shard):
                continue
            wish = self._wish(shard)
            if wish is not None and not self._at_wish(shard):
                moves.append(Move(ShardKey(self._role, shard), wish))
                self._add(owner, -1)
                self._add(wish, 1)
        return moves

    def _suit(self, decided: Mapping[int, None]) -> list[Move]:
        """Shards whose owner lacks a type that they need, also while versions are mixed (DX-26).

        Their messages wait, so the limits of balancing do not count: the coordinator paces them.
        """
        chosen: dict[int, Incarnation] = {}
        for shard in [one for one in self._serving if one in self._eligible]:
            owner = self._part.entries[shard].owner
            if self._fits(shard, owner) or shard in decided or self._resting(shard):
                continue
            fit = self._fit(shard)
            if fit and self._view.nodes[owner].status == "up":
                node = self._wanted(shard) or place((shard,), self._load, fit)[shard]
                self._add(owner, -1)
                self._take(chosen, shard, node)
        return [Move(ShardKey(self._role, shard), node) for shard, node in chosen.items()]

    def _take_back(self) -> list[Revert]:
        """Reverts of moves whose owner asked for it, or whose reason is gone while the owner
        stays."""
        reverts: list[Revert] = []
        for shard in self._moving:
            entry = self._part.entries[shard]
            if self._view.nodes[entry.owner].status != "up":
                continue
            if self._part.asked.get(shard) == entry.epoch or self._pointless(shard, entry):
                reverts.append(Revert(ShardKey(self._role, shard)))
        return reverts

    def _pointless(self, shard: int, entry: Entry) -> bool:
        if entry.owner in self._departing:
            return False
        if self._at_wish(shard):
            return True
        if self._wish(shard) is not None:
            return False
        unwished = self._part.wished.get(shard) == entry.epoch and shard not in self._part.wishes
        return unwished or entry.to not in self._willing

    def _balance(self, decided: Mapping[int, None]) -> Slices[list[Move]]:
        """A limited number of moves towards balance, between heard nodes only."""
        entries, settings = self._part.entries, self._settings
        limit = round_limit(len(entries), settings.balance_limit, settings.balance_shards)
        room = dict.fromkeys(self._receivers, receiver_limit(limit, settings.balance_receiver))
        for shard in (*self._moving, *decided):
            if entries[shard].owner not in self._departing:
                limit -= 1
                if entries[shard].to in room:
                    room[entries[shard].to] -= 1
        spare: dict[Incarnation, list[int]] = {node: [] for node in self._receivers}
        for done, shard in enumerate(self._serving, 1):
            if not done % PAUSE:
                yield PAUSE
            owner = entries[shard].owner
            if owner in spare and shard not in decided and not self._fixed(shard):
                spare[owner].append(shard)
        if self._part.advice is None and self._view.strategy not in strategies.PLACES:
            return self._level(spare, room, limit)
        moves: list[Move] = []
        done = 0
        for owner, shards in spare.items():
            for shard in shards:
                done += 1
                if not done % PAUSE:
                    yield PAUSE
                to = self._wanted(shard)
                if to is not None and to != owner and room[to] > 0 and limit > 0:
                    room[to], limit = room[to] - 1, limit - 1
                    moves.append(Move(ShardKey(self._role, shard), to))
        return moves

    def _level(
        self, spare: dict[Incarnation, list[int]], room: dict[Incarnation, int], limit: int
    ) -> list[Move]:
        """Moves by `least_shards`: shards without needs among all nodes, then shards with needs
        among the nodes that have the types (DX-26)."""
        groups: dict[tuple[Incarnation, ...], dict[Incarnation, list[int]]] = {(): spare}
        if self._eligible:
            groups[()] = {}
            for node, shards in spare.items():
                for shard in shards:
                    group = groups.setdefault(tuple(self._eligible.get(shard, ())), {})
                    group.setdefault(node, []).append(shard)
        moves: list[Move] = []
        for nodes, givers in groups.items():
            among = {n: one for n, one in self._receivers.items() if not nodes or n in nodes}
            movable = {node: len(shards) for node, shards in givers.items()}
            pairs = least_shards(self._load, among, limit=limit, room=room, movable=movable)
            next_of = {node: iter(shards) for node, shards in givers.items()}
            for giver, to in pairs:
                moves.append(Move(ShardKey(self._role, next(next_of[giver])), to))
                self._add(giver, -1)
                self._add(to, 1)
                room[to] -= 1
            limit -= len(pairs)
        return moves

    def _fixed(self, shard: int) -> bool:
        """Whether balancing must not move a shard: it rests after a revert, an operator wants it
        where it is, or it is one death from quarantine."""
        part = self._part
        return bool(
            (part.resting_until and self._resting(shard))
            or (part.wishes and self._at_wish(shard))
            or (part.recent_deaths and part.recent_deaths.get(shard, 0) >= self._last)
        )


def _capacity(record: NodeRecord) -> float:
    return min(record.capacity, MOST_CAPACITY)
