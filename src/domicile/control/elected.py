"""The elected control plane (C1): what one incarnation says to the leader, and hears from it.

Made by an incarnation through `control.planes`. Reports of this process go to the leader, which may
be this very process; a release that no leader hears goes into the store (H10). Everything else may
get lost, because the next leader asks again. Campaigning and leading are the `Candidate`'s. Nothing
here decides about shards.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Iterable

from domicile.concurrency.task_set import TaskSet
from domicile.control.candidate import Candidate
from domicile.control.peer_probe import PeerProbe
from domicile.control.strategy_runner import StrategyRunner
from domicile.core.coordinator.departures import must_stay
from domicile.core.coordinator.events import Heard, ProbeAnswered, ReleasedBy, RevertAsked
from domicile.core.ids import Incarnation, LinkKey, ShardKey
from domicile.core.placement.model import receives
from domicile.core.state.keys import release_key
from domicile.core.state.txn import Changes, Listing, Put
from domicile.core.wire import (
    AskRevert,
    Pong,
    Probe,
    Probed,
    Released,
    Suspect,
    Told,
    ToOwner,
)
from domicile.errors import StoreError
from domicile.membership.store_calls import StoreCalls
from domicile.ports.control import ControlWiring
from domicile.ports.transport import AnswerTakers, RequestTakers

LEARN = 256
"""Entries that a leader takes from itself in one turn of the loop: each may open a shard here."""

UNHEARD_S = 1.0
"""A release goes into the store if the leader was out of reach for so long."""


class Elected:
    """Implements `ControlPlane`: one incarnation's part in a cluster with an elected leader."""

    def __init__(self, wiring: ControlWiring) -> None:
        self._me, self._clock, self._meter = wiring.me, wiring.clock, wiring.meter
        self._settings, self._members = wiring.settings, wiring.members
        self._wiring = wiring
        self._calls = StoreCalls(wiring.store, wiring.settings.op_timeout_s)
        self._candidate = Candidate(
            store=wiring.store,
            clock=wiring.clock,
            meter=wiring.meter,
            settings=wiring.settings,
            random=wiring.random,
            me=wiring.me,
            node_id=wiring.node_id,
            view=wiring.members,
            guard=wiring.guard,
            send=self._send,
            candidate=wiring.candidate,
            strategy=_strategy(wiring),
        )
        self._probe = PeerProbe(wiring.me, wiring.clock, wiring.meter, self._send, self._tell)
        self._unheard: dict[ShardKey, tuple[int, float]] = {}
        """Epochs that were released, and since when no leader was in reach to hear it."""
        self._told: deque[Told] = deque()
        """What this process told itself and has not taken yet. Bounded: the map has no more."""
        self._tasks: TaskSet[None] = TaskSet("domicile-release")

    @property
    def requests(self) -> RequestTakers:
        """What the leader asks, and what others say to this process if it leads."""
        return {
            Probe: self._on_probe,
            Probed: lambda link, probed: self._on_probed(link.sender, probed),
            Suspect: lambda _, suspect: self._wiring.check_alive(suspect.node),
            Released: lambda link, released: self._on_released(link.sender, released),
            AskRevert: lambda link, asked: self._on_ask_revert(link.sender, asked),
        }

    @property
    def answers(self) -> AnswerTakers:
        """What a node answers to a ping of this process."""
        return {Pong: lambda peer, pong: self._probe.answered(peer, pong.id)}

    @property
    def leading(self) -> bool:
        """Whether this process is the acting coordinator now."""
        return self._candidate.leading

    @property
    def status(self) -> str:
        """What this process does as a coordinator now; "following" if another one may be."""
        return self._candidate.status

    @property
    def decides(self) -> bool:
        """Whether a leader is known."""
        return self._members.leader is not None

    @property
    def owed(self) -> Iterable[str]:
        """Leader leases that the store was not told are over."""
        return self._candidate.owed

    # what the store says

    def on_listing(self, listing: Listing) -> None:
        """For candidates: who could lead, and whether anyone does."""
        self._candidate.on_listing(listing)

    def on_changes(self, changes: Changes) -> None:
        """For candidates: who could lead, and whether anyone does."""
        self._candidate.on_changes(changes)

    # what this process reports as an owner

    def released(self, shard: ShardKey, epoch: int, floor: int) -> None:
        """H10: to the leader; into the store if no leader has been in reach for a second."""
        message = Released(*shard, epoch, floor)
        leader = self._members.leader
        if leader is not None and leader.incarnation == self._me:
            asyncio.get_running_loop().call_soon(self._on_released, self._me, message)
            return
        if leader is not None:
            self._send(leader.incarnation, message)
        now = self._clock.now()
        reached = leader is not None and self._wiring.connected(leader.incarnation)
        known, since = self._unheard.get(shard, (0, now))
        if known != epoch or reached:
            since = now
        self._unheard[shard] = (epoch, since)
        if now - since >= UNHEARD_S:
            self._tasks.spawn(self._leave_release(shard, epoch, floor))

    def ask_revert(self, shard: ShardKey, epoch: int) -> None:
        """To the leader, if one is known; the owner asks again."""
        message = AskRevert(*shard, epoch)
        leader = self._members.leader
        if leader is None:
            return
        if leader.incarnation == self._me:
            asyncio.get_running_loop().call_soon(self._on_ask_revert, self._me, message)
        else:
            self._send(leader.incarnation, message)

    def may_place(self, role: str) -> bool:
        """While a leader is known, or a node that can receive: the next leader places it there."""
        return self._members.leader is not None or any(
            receives(record, role) for record in self._members.nodes.values()
        )

    # what peers say

    def heard(self, peer: Incarnation) -> None:
        """If this process leads, it knows that the peer is there (C7)."""
        leadership = self._candidate.leadership
        if leadership is not None and leadership.check():
            leadership.feed(Heard(peer))

    def suspect(self, node: Incarnation) -> None:
        """The leader should ask whether it lives."""
        self._tell(Suspect(node))

    def speaks_for_map(self, peer: Incarnation) -> bool:
        """Whether a peer leads (C3). A leader that is newer than what is known here loses nothing
        but time: what it tells is stored, and the watch shows it."""
        leader = self._members.leader
        if leader is not None and leader.incarnation == peer:
            return True
        self._meter.count("leader.unknown")
        return False

    def _on_probe(self, link: LinkKey, probe: Probe) -> None:
        if self.speaks_for_map(link.sender) and probe.node in self._members.nodes:
            self._probe.probe(probe.node)

    def _on_probed(self, voter: Incarnation, probed: Probed) -> None:
        """A member says whether it reaches a node that this leader lost (C6)."""
        self._candidate.feed(ProbeAnswered(voter, probed.node, probed.reached))

    def _on_released(self, owner: Incarnation, released: Released) -> None:
        shard = ShardKey(released.role, released.shard)
        self._candidate.feed(ReleasedBy(owner, shard, released.epoch, released.floor))

    def _on_ask_revert(self, owner: Incarnation, asked: AskRevert) -> None:
        self._candidate.feed(RevertAsked(owner, ShardKey(asked.role, asked.shard), asked.epoch))

    # its time

    async def run(self) -> None:
        """Campaign and lead until cancelled, fenced, or done with campaigning."""
        await self._candidate.run()

    def stand_aside(self) -> None:
        """Lead on if this node does; try again only while no node stays that could lead."""
        self._candidate.stand_aside()

    def must_stay(self, since: float) -> bool:
        """Whether this node is the last that could lead and others leave with it."""
        role = self._settings.coordinator_role
        return must_stay(
            self._members, self._me, role, leads=self.leading, since=since, now=self._clock.now()
        )

    async def resign(self) -> None:
        """Stop leading and give the leader key back."""
        await self._candidate.resign()

    async def close(self) -> None:
        """End the probes and the releases that are under way."""
        self._probe.close()
        await self._tasks.close()

    # ways

    def _send(self, to: Incarnation, message: ToOwner) -> None:
        """To a node; to this process itself without a link, and not before the loop turns."""
        if to != self._me:
            self._wiring.send(to, message)
        elif isinstance(message, Told):
            if not self._told:
                asyncio.get_running_loop().call_soon(self._learn)
            self._told.append(message)
        else:
            self.heard(self._me)

    def _learn(self) -> None:
        """Take what this process as the leader told itself, in order; many shards in several turns
        of the loop."""
        for _ in range(min(LEARN, len(self._told))):
            told = self._told.popleft()
            self._wiring.learn(ShardKey(told.role, told.shard), (told.entry,))
        if self._told:
            asyncio.get_running_loop().call_soon(self._learn)

    def _tell(self, message: Probed | Suspect) -> None:
        """Tell the leader about another node; if none is known, the next one will ask."""
        leader = self._members.leader
        if leader is None:
            return
        if leader.incarnation != self._me:
            self._send(leader.incarnation, message)
        elif isinstance(message, Probed):
            self._on_probed(self._me, message)
        else:
            self._wiring.check_alive(message.node)

    async def _leave_release(self, shard: ShardKey, epoch: int, floor: int) -> None:
        key = release_key(self._me, shard, epoch)
        value = str(floor).encode() if floor else b""
        try:
            await self._calls.bounded(self._calls.store.commit((), (Put(key, value),)))
        except StoreError:
            self._meter.count("release.unwritten")


def _strategy(wiring: ControlWiring) -> str | StrategyRunner:
    strategy = wiring.strategy
    if isinstance(strategy, str):
        return strategy
    timeout_s = wiring.settings.strategy_timeout_s
    return StrategyRunner(strategy, timeout_s, wiring.meter, wiring.threads)
