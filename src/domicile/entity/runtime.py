"""One incarnation's message side: its senders, its shard hosts, and the way between them.

A node or client makes one per incarnation and throws it away with it (L5). Links and membership
report to it; refs send through it. A client's runtime has an empty catalogue. It decides nothing
about order or homes: the machines of `core.handoff` do.
"""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Iterator, Mapping
from random import Random
from typing import Any, TypeVar

from domicile.core.handoff.admission import UNIT_BYTES, Admission, Bounds
from domicile.core.handoff.pending import Home
from domicile.core.handoff.tables import Phase
from domicile.core.ids import Incarnation, LinkKey, ShardKey
from domicile.core.lease.lease import Lease
from domicile.core.state.cluster_view import ClusterView
from domicile.core.state.records import TrialRecord
from domicile.core.state.shardmap import Entry
from domicile.core.wire import (
    Begun,
    CallingTurn,
    Cancel,
    Carry,
    Flush,
    Flushed,
    Reply,
    Request,
    Return,
    ToOwner,
)
from domicile.entity.carry.transfer import CarryTransfer
from domicile.entity.hosting.cancellation import Cancellations
from domicile.entity.hosting.cell import Cell, Turn, current_turn
from domicile.entity.hosting.execution import NOT_HERE
from domicile.entity.hosting.remembering import Remembering
from domicile.entity.hosting.residents import Residents
from domicile.entity.hosting.shard_host import LimitedHost, ShardHost
from domicile.entity.hosting.stop_budget import StopBudget
from domicile.entity.hosting.trials import Trials
from domicile.entity.hosting.unreleased import UnreleasedShards
from domicile.entity.hosting.unserved import UnservedMessages
from domicile.entity.model.entity import Entity, EntityType, entity_type
from domicile.entity.model.ref import Call, Ref, Route
from domicile.entity.running.blocking import Blocking, blocking_threads
from domicile.entity.running.observer import Observer
from domicile.entity.running.workers import Worker, Workers
from domicile.entity.sending.backpressure import encode_crowded
from domicile.entity.sending.outbound import OutgoingCalls
from domicile.ports.clock import Clock, Timer
from domicile.ports.control import OwnerControl
from domicile.ports.meter import Meter, sampler, takes_events
from domicile.ports.threads import Threads
from domicile.ports.trace import Tracer
from domicile.ports.transport import AnswerTakers, Links, Peer, RequestTakers
from domicile.ports.work import Durability
from domicile.settings import Settings
from domicile.taglog import TaggedLog

E = TypeVar("E", bound=Entity)

log = TaggedLog()

AnswerMessage = Reply | Begun | Return | Flushed

LOCAL = "local"
TURN_S = 0.02
"""Seconds that one batch of messages may take; the rest of it waits for the next turn of the
loop."""
TURN_CALLS = 1_000
"""Local asks that may run within their calls during one turn of the loop, while a run is
recorded."""
_NEVER = -1.0
BEGUN_MESSAGES = 256
BEGUN_S = 0.005
"""An owner tells a sender what has started after this many messages, or after this many seconds."""
BUSY_S = 0.05
"""Seconds that all batches of one turn of the loop may take. After that messages are read but not
begun: they wait here, where they are counted and may be refused, not in the network."""
SLOW_S = 0.0002
"""Seconds of a mean turn from which on waiting in line costs little in comparison."""
SWEEP_S = 1.0
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
        members: ClusterView,
        guard: Callable[[], bool],
        lease: Lease,
        may_clean_up: Callable[[], bool],
        control: OwnerControl,
        read_record: Callable[[ShardKey], None],
        note_need: Callable[[ShardKey, str], None],
        store_trials: Callable[[TrialRecord], Awaitable[bool]],
        catalogue: Mapping[str, EntityType],
        shards: Mapping[str, int] | None = None,
        resources: Mapping[type[Any], Any],
        durability: Durability | None,
        threads: Threads | None = None,
        tracer: Tracer | None = None,
    ) -> None:
        self.loop = asyncio.get_running_loop()
        """Kept, because finding the running loop costs a system call on some versions of Python."""
        self.me = me
        self.node_id = node_id
        self.clock = clock
        self.meter = meter
        self.settings = settings
        self.random = random
        self.members = members
        self.guard = guard
        self.lease = lease
        """Compared before each message; `guard` is asked only after its deadline (L3)."""
        self.may_clean_up = may_clean_up
        self.control = control
        self.read_record = read_record
        self.catalogue = catalogue
        self.shards: Mapping[str, int] = {} if shards is None else shards
        """The number of shards of each role that this process can be home to."""
        self.resources = resources
        self.durability = durability
        self.tracing = takes_events(meter)
        self.small_bytes = min(settings.message_bytes, 1_024)
        """Bodies up to this size need not be compared with the limit of a message."""
        self.shares = not settings.serialize_local
        """Whether a local ask may hand over immutable values without copying them (SM-27)."""
        self.observer = Observer(tracer, sampler(meter))
        self.links: Links | None = None
        self.workers = Workers(clock.now, lambda: self.observer.turns)
        self.admission = Admission(
            Bounds(
                settings.node_mail, settings.node_mail * UNIT_BYTES, settings.hold_bytes,
                settings.node_wait_s,
            )
        )  # fmt: skip
        self.blocking = Blocking(
            blocking_threads(settings) if threads is None else threads, meter, guard,
            most=settings.blocking_threads, most_waiting=settings.blocking_queue,
        )  # fmt: skip
        self.residents: Residents[Cell] = Residents(
            lambda cell, why: cell.host.passivate(cell, why), self._trim_soon, meter, clock.now(),
            limit=settings.residents, by=settings.residents_policy,
        )  # fmt: skip
        self.stops = StopBudget(self.loop, guard)
        self.trials = Trials(clock, store_trials)
        self.carrier = CarryTransfer(me, clock, meter, settings, self)
        self.sending = OutgoingCalls(self)
        self.unserved = UnservedMessages(self, note_need)
        self.remembering = Remembering(self)
        self.hosts: dict[ShardKey, ShardHost] = {}
        self.unreleased = UnreleasedShards(
            self.loop, guard, lambda shard: self.hosts[shard].repeat_released()
        )
        self._by_role: dict[str, dict[int, ShardHost]] = {}
        self.running: Turn | None = None
        """The turn that holds the event loop now; other threads may read this."""
        self.suspended: dict[Turn, float] = {}
        """Suspended turns, each with the time of its first suspension; the oldest first."""
        self.on_suspended: Callable[[], None] = _nobody
        """Called whenever a handler first suspends (DX-09)."""
        self.graveyard: list[Coroutine[Any, Any, Any]] = []
        self.crowded = encode_crowded(node_id)
        self._turn_until = 0.0
        self.leaving = False
        self.fenced = False
        self._here: deque[Request | Flush | Cancel | tuple[AnswerMessage]] = deque()
        self.source = LinkKey(me, LOCAL)
        self._begun: dict[LinkKey, list[tuple[ShardKey, int]]] = {}
        self._begun_of: LinkKey | None = None
        self._begun_last: list[tuple[ShardKey, int]] = []
        """The source of the last message that began, and its list: mostly the next message has the
        same."""
        self._telling: Timer | None = None
        self._here_until = 0.0
        self._here_left = 0
        self._turn_ends = False
        self._look = False
        self._sweeper: Timer | None = None
        self._repeater: Timer | None = None
        self.phases_seen: Counter[Phase] = Counter()
        """How many shards came into a phase since that was last logged."""
        self.call_offs = Cancellations(self)
        self.requests: RequestTakers = {Flush: self._on_flush, Cancel: self.call_offs.take}
        """By message type: what handles a message to this owner that is no request, local ones
        included."""
        self.answers: AnswerTakers = {
            Reply: self.sending.on_reply,
            Begun: self._on_begun,
            Return: self._on_moved,
            Flushed: self._on_moved,
        }
        """By message type: what handles an owner's answer about this sender's messages."""

    def start(self, links: Links) -> None:
        """The links are up: messages may be sent and received."""
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
        self.carrier.see(shard, entry)
        self.sending.see(shard, entry)

    def exists(self, role: str, shard: int) -> bool:
        """Whether the cluster has this shard: a message that names another must leave no state here
        (I6)."""
        config = self.members.config
        return config is not None and 0 <= shard < config.shards.get(role, 0)

    def look_soon(self) -> None:
        """A message now waits in a mailbox here: senders check again which messages are finishing
        (N3)."""
        self._look = True
        self._end_turn_soon()

    def on_gone(self, peer: Incarnation) -> None:
        """The record of an incarnation is gone, so the incarnation is over."""
        self.sending.forget(peer)
        self.unserved.look()

    def on_map_changed(self) -> None:
        """A batch of entries or nodes was merged: the queues of other shards may be able to go on
        (N3)."""
        self.sending.look()

    def _host(self, shard: ShardKey) -> ShardHost:
        host = self.hosts.get(shard)
        if host is None:
            made = LimitedHost if self.residents.limited else ShardHost
            host = self.hosts[shard] = made(self, shard)
            self._by_role.setdefault(shard.role, {})[shard.shard] = host
            host.see(self.members.map.get(shard))
        return host

    def _host_of(self, message: Request | Flush) -> ShardHost | None:
        """The host of a shard that exists."""
        if not self.exists(message.role, message.shard):
            self.meter.count("request.stray")
            return None
        return self._host(ShardKey(message.role, message.shard))

    # from and to links

    def on_requests(
        self, source: LinkKey, messages: Iterable[ToOwner], takers: RequestTakers
    ) -> None:
        """Messages that a peer, or this process itself, wrote to this owner, in order.

        `takers` handle every message that is no request.
        """
        left = iter(messages)
        until = self._busy_until(self.clock.now())
        admission = self.admission
        ready, job_s = admission.ready, admission.job_s = self.workers.line
        admission.is_full = len(self.suspended) >= self.settings.node_turns
        if admission.is_full or (job_s > SLOW_S and ready * job_s > TURN_S):
            # A message that begins now would overtake those that already wait for their turn.
            until = 0.0
        for message in left:
            item: ToOwner | None = message
            while type(item) is Request and not self.workers.closed:
                item = self.workers.lend(self._serve_some, source, item, left, until)
            if item is not None and type(item) is not Request:
                takers[type(item)](source, item)

    def _on_flush(self, source: LinkKey, flush: Flush) -> None:
        host = self._host_of(flush)
        if host is not None:
            host.flush(source, flush)

    def _busy_until(self, now: float) -> float:
        """Until when messages may begin on arrival; later ones wait for the next turn of the
        loop."""
        if not self._turn_until:
            self._turn_until = now + BUSY_S
            self.loop.call_soon(self._turned)
        return min(self._turn_until, now + TURN_S)

    def _turned(self) -> None:
        self._turn_until = 0.0

    def _serve_some(
        self, worker: Worker, source: LinkKey, item: ToOwner, left: Iterator[ToOwner], until: float
    ) -> ToOwner | None:
        """Serve requests until one suspends or a message of another type comes.

        Returns that message, or the next request, or None.
        """
        clock, lease, by_role = self.clock.now, self.lease, self._by_role
        message: ToOwner | None = item
        while type(message) is Request:
            now = clock()
            if now >= lease.valid_until and not self.guard():
                return None
            hosts = by_role.get(message.role)
            host = None if hosts is None else hosts.get(message.shard)
            if host is None:
                host = self._host_of(message)
            if host is not None:
                host.request(worker, source, message, now, now > until)
            message = next(left, None)
            if worker.job is not None or not worker.clean():
                return message
        current_turn.set(None)
        return message

    def _on_begun(self, peer: Incarnation, begun: Begun) -> None:
        self.sending.on_begun(peer, begun.role, zip(begun.shards, begun.ns, strict=False))

    def _on_moved(self, peer: Incarnation, message: Return | Flushed) -> None:
        if not self.exists(message.role, message.shard):
            self.meter.count("answer.stray")
            return
        self.learn(ShardKey(message.role, message.shard), message.entry)
        self.sending.on_answer(peer, message)

    def on_link_gone(self, source: LinkKey) -> None:
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
        if not self.links.post(to, message):
            node = self.members.nodes.get(to)
            self.links.send(Peer(to, node.address if node is not None else ""), message)

    def take_back(self, to: Incarnation, message: Cancel) -> None:
        """Tell an owner, behind the request, that its caller no longer waits, if the owner is
        known."""
        if to == self.me:
            self._here.append(message)
            self._end_turn_soon()
            return
        node = self.members.nodes.get(to)
        if node is not None and self.links is not None:
            self.links.send(Peer(to, node.address), message)

    def speaks(self, node: Incarnation) -> int:
        """The newest wire protocol of a node; 0 if it is not known."""
        record = self.members.nodes.get(node)
        return 0 if record is None else record.protocols[1]

    def carry(self, to: Incarnation, carry: Carry) -> None:
        """Send fields to the next home of a shard."""
        node = self.members.nodes.get(to)
        if node is not None and self.links is not None:
            self.links.send(Peer(to, node.address), carry, control=True)

    def on_carry(self, sender: Incarnation, carry: Carry) -> bool:
        """Fields from the last home of a shard that may come here; True if they are kept."""
        if not self.exists(carry.role, carry.shard):
            return False
        known = self.members.map.get(ShardKey(carry.role, carry.shard))
        return self.carrier.on_carry(sender, carry, known)

    def run_here(
        self,
        call: Call,
        route: Route,
        home: Home,
        caller: Turn | None,
        chain: tuple[CallingTurn, ...],
        now: float,
        timeout_s: float,
    ) -> Any:
        """As `Execution.call_here`, if a local ask may run within its call; otherwise `NOT_HERE`.

        It may if nothing local waits and such calls have not taken too much of this turn of the
        loop. It may not while tracing: the trace context travels in requests. Code that runs in a
        handler's first step must ask in that handler's name: only the chain says that its entity is
        busy.
        """
        running = self.running
        if (
            self._here
            or (running is not None and running is not caller)
            or self.observer.tracer is not None
            or len(self.suspended) >= self.settings.node_turns
        ):
            return NOT_HERE
        if not self._here_until:
            self._here_until, self._here_left = now + TURN_S, TURN_CALLS
            self.loop.call_soon(self._next_turn)
        if self.tracing:
            # Virtual time may not advance while they run, so they are counted instead.
            self._here_left -= 1
            if self._here_left < 0:
                return NOT_HERE
        if now >= self._here_until:
            return NOT_HERE
        host = route.host
        if host is None:
            host = route.host = self.hosts.get(route.sender.shard)
            if host is None:
                return NOT_HERE
        return self.workers.lend(host.call_here, call, route, home, chain, now, timeout_s)

    def _next_turn(self) -> None:
        self._here_until = _NEVER if self.workers.closed else 0.0

    def answer(self, source: LinkKey, message: AnswerMessage) -> None:
        """Answer a sender, in order."""
        if type(message) is Flushed:
            self._tell_begun(source)
        links = self.links
        if source is self.source or links is None:
            self._here.append((message,))
            self._end_turn_soon()
        else:
            links.answer(source, message)

    def begun(self, shard: ShardKey, source: LinkKey, n: int) -> None:
        """A message started; its sender is told soon, in one `Begun` with others."""
        begun = self._begun_last if source is self._begun_of else self._begun_by(source)
        begun.append((shard, n))
        if len(begun) >= BEGUN_MESSAGES:
            self._tell_begun(source)

    def _begun_by(self, source: LinkKey) -> list[tuple[ShardKey, int]]:
        begun = self._begun.get(source)
        if begun is None:
            begun = self._begun[source] = []
            if self._telling is None:
                self._telling = self.clock.call_at(self.clock.now() + BEGUN_S, self._tell_all_begun)
        self._begun_of, self._begun_last = source, begun
        return begun

    def _tell_begun(self, source: LinkKey) -> None:
        self._begun_of = None
        begun = self._begun.pop(source, None)
        if not begun:
            return
        roles: dict[str, tuple[list[int], list[int]]] = {}
        for (role, shard), n in begun:
            shards, ns = roles.setdefault(role, ([], []))
            shards.append(shard)
            ns.append(n)
        for role, (shards, ns) in roles.items():
            self.answer(source, Begun(role, tuple(shards), tuple(ns)))

    def _tell_all_begun(self) -> None:
        self._telling = None
        if self.guard():
            for source in list(self._begun):
                self._tell_begun(source)

    def _end_turn_soon(self) -> None:
        if not self._turn_ends:
            self._turn_ends = True
            self.loop.call_soon(self._end_turn)

    def _end_turn(self) -> None:
        """Handle what this process wrote to itself during one turn of the loop, in order."""
        self._turn_ends = False
        if not self.guard():
            return
        if self._look:
            self._look = False
            self.sending.look()
        here, self._here = self._here, deque()
        requests: list[Request | Flush | Cancel] = []
        for message in here:
            if not isinstance(message, tuple):
                requests.append(message)
                continue
            if requests:
                self.on_requests(self.source, requests, self.requests)
                requests = []
            self.answers[type(message[0])](self.me, message[0])
        if requests:
            self.on_requests(self.source, requests, self.requests)

    # ends

    def cancel_turns(self, shard: ShardKey, reason: str) -> None:
        """Interrupt the suspended handlers of a shard."""
        for turn in list(self.suspended):
            if turn.host.shard == shard:
                turn.cancel(reason)

    def settled(self) -> bool:
        """H14: nothing is left to release, and nothing that was sent is still open."""
        return not self.must_release and not self.sending.waiting() and not self._here

    @property
    def must_release(self) -> bool:
        """H14: whether a shard is still to be released, or the store does not name its next home
        yet."""
        return self.unreleased.keeps(self.control.may_place) or any(
            self.hosts[shard].unsettled for shard in self.carrier.handed_over()
        )

    def repeat_soon(self) -> None:
        """A shard was released: repeat that until the store shows it."""
        if self._repeater is None:
            self._repeater = self.clock.call_at(self.clock.now() + REPEAT_S, self._repeat)

    def fence(self, reason: str) -> None:
        """L4: admit nothing and cancel all handlers; the callers of what this process sent are
        told."""
        if self.fenced:
            return
        self.fenced = True
        self._cancel_timers()
        for host in self.hosts.values():
            host.fence()
        self.carrier.close()
        losses = self.carrier.timer_losses
        losses.tell(*losses.shards())
        self.remembering.stop()
        self.blocking.shut()
        self.workers.cancel_all()
        if self.durability is not None:
            self.durability.fence()
        self.sending.fail_all(f"this process lost its lease ({reason})")

    async def close(self) -> int:
        """The incarnation left or was fenced: end all its tasks.

        Returns the number of handlers that ignored their cancellation (L4); they are never resumed.
        """
        self._log_phases()
        self._cancel_timers()
        self._here_until = _NEVER
        self.sending.fail_all("this process left the cluster")
        self._lose_timers()
        self.carrier.close()
        await self.remembering.close()
        self.blocking.shut()
        # Called here, not in a task that may be cancelled before it runs.
        self.workers.cancel_all()
        stuck, threads = await asyncio.gather(
            self.workers.close(self.settings.stop_budget_s),
            self.blocking.close(self.settings.stop_budget_s),
        )
        stuck += threads
        # Handlers that were cancelled may have set more.
        self._lose_timers()
        losses = self.carrier.timer_losses
        losses.tell(*losses.shards())
        await self.trials.close()
        if self.durability is not None:
            await self.durability.close()
        if stuck:
            self.meter.count("handler.stuck", stuck)
            log.error(
                "%d handlers of node %s ignore their cancellation; they are never resumed, but "
                "what they hold stays held until this process ends", stuck, self.node_id,
            )  # fmt: skip
        return stuck

    def _cancel_timers(self) -> None:
        self.call_offs.close()
        for timer in (self._sweeper, self._repeater, self._telling):
            if timer is not None:
                timer.cancel()

    def _sweep(self) -> None:
        if self.guard():
            now = self.clock.now()
            self._log_phases()
            self.carrier.sweep(now)
            self.unserved.sweep(now)
            self._tell_lost_timers()
            more = self.residents.sweep(now)
            self._sweeper = self.clock.call_at(now + (0.0 if more else SWEEP_S), self._sweep)

    def _log_phases(self) -> None:
        """One line for all shards that came or went lately: a node may have thousands."""
        seen, self.phases_seen = self.phases_seen, Counter()
        told = [(seen[Phase.OPEN], "opened"), (seen[Phase.RELEASED], "released")]
        parts = [f"{verb} {count} shard{'s' if count > 1 else ''}" for count, verb in told if count]
        if parts:
            serving = sum(host.owner.phase is Phase.OPEN for host in self.hosts.values())
            text = "%s; this node is home to %d now"
            log.info(text, " and ".join(parts), serving, extra={"node": self.node_id})

    def _lose_timers(self) -> None:
        for host in self.hosts.values():
            host.timers.lose_all("its node left before its shard was released")

    def _tell_lost_timers(self) -> None:
        # A draining shard tells once, when it is released.
        for shard in self.carrier.timer_losses.shards():
            host = self.hosts.get(shard)
            if host is None or host.owner.phase is not Phase.DRAINING:
                self.carrier.timer_losses.tell(shard)

    def _trim_soon(self) -> None:
        self.loop.call_soon(self._trim)

    def _trim(self) -> None:
        if self.guard():
            self.residents.trim()

    def _repeat(self) -> None:
        self._repeater = None
        self.unreleased.repeat_some()


def _nobody() -> None:
    """The default of `on_suspended`: does nothing."""
