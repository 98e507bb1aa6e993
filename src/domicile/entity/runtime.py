"""One incarnation's message side: its senders, its shard hosts, and the lanes between them.

Made by a node or client for one incarnation and thrown away with it (L5). It takes what links
and the membership report, and hands out refs. A client's runtime has an empty catalogue.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from random import Random
from typing import Any, TypeVar

from domicile.config import Settings
from domicile.core.ids import Incarnation, ShardKey
from domicile.core.members import Members
from domicile.core.messages import (
    AskRevert,
    Flush,
    Flushed,
    Released,
    Reply,
    Request,
    Return,
    Started,
    ToOwner,
    ToSender,
)
from domicile.core.owner import Source
from domicile.core.shardmap import Entry
from domicile.entity.cell import Turn
from domicile.entity.define import Entity, EntityType, entity_type
from domicile.entity.ref import Ref
from domicile.entity.sending import Sending
from domicile.entity.shard import ShardHost
from domicile.entity.workers import Workers
from domicile.ports.clock import Clock, Timer
from domicile.ports.journal import Journal
from domicile.ports.meter import Meter, NoMeter
from domicile.ports.transport import LinkKey, Links, Peer

E = TypeVar("E", bound=Entity)

log = logging.getLogger("domicile")

LOCAL = "local"
SWEEP_S = 5.0
REPEAT_S = 1.0


class Runtime:
    """Routes and hosts for one incarnation."""

    def __init__(
        self,
        *,
        me: Incarnation,
        node_id: str,
        clock: Clock,
        meter: Meter,
        settings: Settings,
        random: Random,
        members: Members,
        guard: Callable[[], bool],
        may_clean_up: Callable[[], bool],
        tell_leader: Callable[[Released | AskRevert], None],
        read_record: Callable[[ShardKey], None],
        mark_started: Callable[[ShardKey, int], Awaitable[bool]],
        catalogue: Mapping[str, EntityType],
        shards: Mapping[str, int] | None = None,
        resources: Mapping[type[Any], Any],
        journal: Journal | None,
    ) -> None:
        self.me = me
        self.node_id = node_id
        self.clock = clock
        self.meter = meter
        self.settings = settings
        self.random = random
        self.members = members
        self.guard = guard
        self.may_clean_up = may_clean_up
        self.tell_leader = tell_leader
        self.read_record = read_record
        self.mark_started = mark_started
        self.catalogue = catalogue
        self.shards: Mapping[str, int] = {} if shards is None else shards
        """How many shards the roles have that this process can be home to."""
        self.resources = resources
        self.journal = journal
        self.tracing = not isinstance(meter, NoMeter)
        self.links: Links | None = None
        self.workers = Workers()
        self.sending = Sending(self)
        self.hosts: dict[ShardKey, ShardHost] = {}
        self.suspended: dict[Turn, None] = {}
        self.graveyard: list[Coroutine[Any, Any, Any]] = []
        self.leaving = False
        self.fenced = False
        self._here: deque[ToOwner | tuple[ToSender]] = deque()
        self._begun: dict[tuple[Source, ShardKey], list[int]] = {}
        self._turn_ends = False
        self._look = False
        self._sweeper: Timer | None = None
        self._repeater: Timer | None = None

    def start(self, links: Links) -> None:
        """Links stand; messages may flow."""
        self.links = links
        self._sweeper = self.clock.call_at(self.clock.now() + SWEEP_S, self._sweep)

    def ref(self, kind: type[E], id: str) -> Ref[E]:
        """A ref that sends from this incarnation."""
        return Ref(entity_type(kind), id, self.sending)

    # from the membership

    def learn(self, shard: ShardKey, entry: Entry) -> None:
        """An entry from a leader, an owner or a read record (C3): merged if newer."""
        if self.members.map.merge(shard, entry):
            self.on_entry(shard, entry)

    def on_entry(self, shard: ShardKey, entry: Entry) -> None:
        """The map has a newer entry."""
        host = self.hosts.get(shard)
        if host is None and entry.owner == self.me:
            host = self._host(shard)
        if host is not None:
            host.see(entry)
        self.sending.see(shard, entry)

    def look_soon(self) -> None:
        """Someone waits in line here now: what must finish first may go on (N3)."""
        self._look = True
        self._end_turn_soon()

    def on_map_changed(self) -> None:
        """After a batch of entries or nodes: other shards' queues may go on (N3)."""
        self.sending.look()

    def _host(self, shard: ShardKey) -> ShardHost:
        host = self.hosts.get(shard)
        if host is None:
            host = self.hosts[shard] = ShardHost(self, shard)
            host.see(self.members.map.get(shard))
        return host

    # from and to links

    def on_request(self, source: Source, message: Request | Flush) -> None:
        """A message that a peer, or this process itself, wrote to this owner."""
        config = self.members.config
        if config is None or not 0 <= message.shard < config.shards.get(message.role, 0):
            self.meter.count("request.stray")
            return
        host = self._host(ShardKey(message.role, message.shard))
        if isinstance(message, Request):
            host.request(source, message)
        else:
            host.flush(source, message)

    def on_answer(self, peer: Incarnation, message: Reply | Started | Return | Flushed) -> None:
        """What an owner says of this sender's messages."""
        if isinstance(message, Return | Flushed):
            self.learn(ShardKey(message.role, message.shard), message.entry)
        self.sending.on_answer(peer, message)

    def on_link_gone(self, source: Source) -> None:
        """An incoming link's state was dropped."""
        for host in self.hosts.values():
            host.link_gone(source)

    def send(self, to: Incarnation, message: Request | Flush) -> None:
        """Write to an owner, in order."""
        if to == self.me:
            self._here.append(message)
            self._end_turn_soon()
            return
        assert self.links is not None
        node = self.members.nodes.get(to)
        self.links.send(Peer(to, node.address if node is not None else ""), message)

    def reply(self, source: Source, reply: Reply) -> None:
        """The outcome of a message; says that it started, too."""
        begun = self._begun.get((source, ShardKey(reply.role, reply.shard)))
        if begun and begun[-1] == reply.n:
            begun.pop()
        self.answer(source, reply)

    def answer(self, source: Source, message: Reply | Return | Flushed | Started) -> None:
        """Say something to a sender, in order."""
        if isinstance(message, Flushed):
            self._tell_begun(source, ShardKey(message.role, message.shard))
        if source.sender == self.me:
            self._here.append((message,))
            self._end_turn_soon()
        else:
            assert self.links is not None
            self.links.answer(LinkKey(*source), message)

    def begun(self, source: Source, shard: ShardKey, n: int) -> None:
        """A message started; its sender learns it at the end of this turn."""
        self._begun.setdefault((source, shard), []).append(n)
        self._end_turn_soon()

    def _tell_begun(self, source: Source, shard: ShardKey) -> None:
        ns = self._begun.pop((source, shard), None)
        if ns:
            self.answer(source, Started(*shard, tuple(ns)))

    def _end_turn_soon(self) -> None:
        if not self._turn_ends:
            self._turn_ends = True
            asyncio.get_running_loop().call_soon(self._end_turn)

    def _end_turn(self) -> None:
        """Batch of one loop turn: local mail, and what has started."""
        self._turn_ends = False
        if not self.guard():
            return
        if self._look:
            self._look = False
            self.sending.look()
        for source, shard in list(self._begun):
            self._tell_begun(source, shard)
        for _ in range(len(self._here)):
            message = self._here.popleft()
            if isinstance(message, tuple):
                self.on_answer(self.me, message[0])  # type: ignore[arg-type]
            else:
                self.on_request(Source(self.me, LOCAL), message)  # type: ignore[arg-type]

    # ends

    def cancel_turns(self, shard: ShardKey, reason: str) -> None:
        """Interrupt the suspended handlers of a shard."""
        for turn in list(self.suspended):
            if turn.host.shard == shard:
                turn.cancel(reason)

    def settled(self) -> bool:
        """H14: nothing left to release, nothing sent that is still open."""
        released = not any(host.unsettled for host in self.hosts.values())
        return released and not self.sending.waiting() and not self._here

    def repeat_released(self) -> None:
        """H10: on each leader change, and every second while the store lags behind."""
        for host in self.hosts.values():
            host.repeat_released()

    def repeat_soon(self) -> None:
        """Something was released: say so again until the store shows it."""
        if self._repeater is None:
            self._repeater = self.clock.call_at(self.clock.now() + REPEAT_S, self._repeat)

    def fence(self, reason: str) -> None:
        """L4: admit nothing, cancel; what this process sent is told to its callers."""
        if self.fenced:
            return
        self.fenced = True
        self._cancel_timers()
        for host in self.hosts.values():
            host.fence()
        self.workers.cancel_all()
        self.sending.fail_all(f"this process lost its lease ({reason})")

    async def close(self) -> int:
        """The incarnation is over, by its own will or fenced: no task of it is left.

        How many handlers ignored their cancellation (L4); they are never resumed.
        """
        self._cancel_timers()
        self.sending.fail_all("this process left the cluster")
        stuck = await self.workers.close(self.settings.stop_budget_s)
        if stuck:
            self.meter.count("handler.stuck", stuck)
            log.error(
                "%d handlers of node %s ignore their cancellation; they are never resumed, but "
                "what they hold stays held until this process ends", stuck, self.node_id,
            )  # fmt: skip
        return stuck

    def _cancel_timers(self) -> None:
        for timer in (self._sweeper, self._repeater):
            if timer is not None:
                timer.cancel()

    def _sweep(self) -> None:
        if self.guard():
            now = self.clock.now()
            for host in self.hosts.values():
                host.sweep(now)
            self._sweeper = self.clock.call_at(now + SWEEP_S, self._sweep)

    def _repeat(self) -> None:
        self._repeater = None
        if self.guard():
            self.repeat_released()
