"""The sending half of one incarnation: carries out what `core.handoff.sender` decides.

Every ask and tell of this process goes through here, local ones included. It turns outcomes
into results and errors (I9), and counts what is lost (I6).
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Any

from msgspec.structs import replace

from domicile.concurrency.waiting_line import WaitingLine
from domicile.core.handoff.admission import Outflow
from domicile.core.handoff.pending import (
    GiveUp,
    HoldLimits,
    Home,
    SenderEffect,
    SendFlush,
    WriteRequest,
)
from domicile.core.handoff.sender import Sender
from domicile.core.ids import EntityKey, Incarnation, ShardKey
from domicile.core.machines import Arm
from domicile.core.state.shardmap import Entry
from domicile.core.wire import (
    CallingTurn,
    Cancel,
    Flush,
    Flushed,
    Reply,
    ReplyStatus,
    Request,
    Return,
    ToOwner,
    weight_bytes,
)
from domicile.entity.hosting.cancellation import time_left_s
from domicile.entity.hosting.cell import Called, Turn, current_turn
from domicile.entity.hosting.execution import NOT_HERE
from domicile.entity.model.codec import decode_error
from domicile.entity.model.ref import Call, Route
from domicile.entity.sending.ask_timeouts import AskTimeouts
from domicile.entity.sending.backpressure import Pauses
from domicile.entity.sending.call_errors import (
    expired,
    no_node,
    overloaded,
    quarantined,
    too_large,
    too_many_wait,
)
from domicile.entity.sending.outgoing_call import CallSender, OutgoingCall
from domicile.entity.sending.routing import NoNodeUp, Routing
from domicile.errors import (
    CallCycle,
    CallTooDeep,
    DomicileError,
    MaybeExecuted,
    NotExecuted,
    Overloaded,
    Unavailable,
)
from domicile.ports.clock import Timer

if TYPE_CHECKING:
    from domicile.entity.runtime import Runtime

_OUTCOMES = {
    ReplyStatus.OK: "ok",
    ReplyStatus.REJECTED: "rejected",
    ReplyStatus.MAYBE_EXECUTED: "maybe_executed",
}
_OK = ReplyStatus.OK

WEIGHT_BYTES = 192
"""Estimated bytes of a message without its body and its ids."""

NESTED = 16
"""Depth of local asks that may run within each other; deeper ones are sent, to spare the stack."""


def _is_the_callers(raised: Any) -> bool:
    """Pytest asks this of a traceback: an error for the caller is shown at the caller's line."""
    return isinstance(raised.value, DomicileError)


__tracebackhide__ = _is_the_callers

SWEEP_S = 0.5
"""Seconds between two searches for tells that waited longer than their timeout."""


class _Arrivals:
    """Calls that wait for the first node of a role."""

    __slots__ = ("line", "node_up", "why")

    def __init__(self) -> None:
        self.line = WaitingLine()
        self.node_up = asyncio.Event()
        self.why = ""
        """Why none of them can be sent any more."""


class OutgoingCalls:
    """All shards this incarnation sends to."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        settings = runtime.settings
        self._me, self._lease, self._now = runtime.me, runtime.lease, runtime.clock.now
        self._loop = runtime.loop
        self._ask_timeout_s = settings.ask_timeout_s
        self._message_bytes = settings.message_bytes
        self._limits = HoldLimits(
            settings.buffer, settings.hold_bytes, settings.window, settings.hold_timeout_s
        )
        # One shard alone may use its whole window.
        self._outflow = Outflow(max(settings.node_mail, settings.window))
        self._pauses = Pauses(runtime.clock, self._outflow)
        self.senders: dict[ShardKey, CallSender] = {}
        self._by_role: dict[str, dict[int, CallSender]] = {}
        self._waits = AskTimeouts(runtime.clock, self._expired)
        self._timers: dict[ShardKey, tuple[float, Timer]] = {}
        self._asks = 0
        self._sweep: Timer | None = None
        self._places = Routing(runtime)
        self._arrivals: dict[str, _Arrivals] = {}
        """By role: calls that wait for its first node."""
        self._made = 0
        """For histories: number of calls that were made and may have waited."""

    # calls

    async def ask(self, call: Call) -> Any:
        """Send and wait for the outcome."""
        turn = current_turn.get()
        if turn is not None and turn.gate is not None:
            self._note_made(call, turn)
            # What a durable entity knows is committed before another one learns of it (I4, J5).
            await turn.before_output()
        timeout_s = call.timeout_s
        if timeout_s is None:
            timeout_s = self._ask_timeout_s
        try:
            now, route = self._address(call, turn)
        except NoNodeUp:
            now, route, timeout_s = await self._address_later(call, turn, timeout_s)
        except Unavailable:
            # A caller that repeats at once must not keep the loop from joining again.
            await asyncio.sleep(0)
            raise
        chain: tuple[CallingTurn, ...] = ()
        if turn is not None and turn.active:
            timeout_s = time_left_s(turn, timeout_s)
            chain = self._chain(call, turn)
        sender: CallSender = route.sender
        home = sender.clear()
        pending: OutgoingCall | None = None
        if (
            home is not None
            and home.owner == self._me
            and not (sender.open or call.key)
            and len(chain) <= NESTED
        ):
            outcome = self._runtime.run_here(call, route, home, turn, chain, now, timeout_s)
            if type(outcome) is OutgoingCall:
                pending = outcome
            elif outcome is not NOT_HERE:
                return outcome
        if pending is None:
            awaited: asyncio.Future[bytes] = self._loop.create_future()
            try:
                pending = self._submit(call, route, home, chain, now, timeout_s, awaited)
            except Overloaded:
                # Nor from sending what fills the queue.
                await asyncio.sleep(0)
                raise
        book = self._waits.add(pending, timeout_s)
        self._asks += 1
        future = pending.future
        assert future is not None, "somebody waits for every ask"
        try:
            return call.handler.decode_reply(await future)
        finally:
            self._asks -= 1
            book.pop(pending, None)
            if not pending.resolved:
                self._abandon(sender, pending)

    async def tell(self, call: Call) -> None:
        """Queue and return."""
        turn = current_turn.get()
        if turn is not None and turn.gate is not None:
            self._note_made(call, turn)
            await turn.before_output()
        timeout_s = call.timeout_s
        if timeout_s is None:
            timeout_s = self._ask_timeout_s
        try:
            now, route = self._address(call, turn)
        except NoNodeUp:
            now, route, timeout_s = await self._address_later(call, turn, timeout_s)
        except Unavailable:
            # A caller that repeats at once must not keep the loop from joining again.
            await asyncio.sleep(0)
            raise
        try:
            self._submit(call, route, route.sender.clear(), (), now, timeout_s, None)
        except Overloaded:
            await asyncio.sleep(0)
            raise

    async def _address_later(
        self, call: Call, turn: Turn | None, timeout_s: float
    ) -> tuple[float, Route, float]:
        """As `_address`, once a node of the call's role is up (DX-27); also the seconds left then.

        Calls go on in the order in which they were made (I5): a later call lines up behind those
        that still wait.
        """
        if turn is not None and turn.active:
            timeout_s = time_left_s(turn, timeout_s)
        until = self._now() + timeout_s
        self._note_made(call, turn)
        role = call.kind.role
        arrivals = self._arrivals.get(role)
        if arrivals is None:
            arrivals = self._arrivals[role] = _Arrivals()
        line = arrivals.line
        if len(line) >= self._limits.buffer:
            self._runtime.meter.count("message.overloaded")
            refusal = too_many_wait(call, len(line))
            await asyncio.sleep(0)
            raise refusal
        self._asks += 1
        try:
            async with asyncio.timeout(timeout_s):
                now, route = await line.wait(self._arrive(arrivals, call, turn))
        except TimeoutError:
            raise self._no_node(call.kind.name, role) from None
        finally:
            self._asks -= 1
            if not line:
                self._arrivals.pop(role, None)
        return now, route, until - now

    async def _arrive(
        self, arrivals: _Arrivals, call: Call, turn: Turn | None
    ) -> tuple[float, Route]:
        """As `_address`, once a node of the call's role is up."""
        while not self._places.has_node(call.kind.role):
            arrivals.node_up.clear()
            await arrivals.node_up.wait()
            if arrivals.why:
                raise Unavailable(arrivals.why)
        return self._address(call, turn, waited=True)

    def _welcome(self) -> None:
        """Let the calls go on whose role has a node now."""
        for role, arrivals in self._arrivals.items():
            if self._places.has_node(role):
                arrivals.node_up.set()

    def _no_node(self, kind: str, role: str) -> Unavailable:
        return no_node(kind, role, alone=not self._runtime.members.nodes)

    def _address(
        self, call: Call, turn: Turn | None, *, waited: bool = False
    ) -> tuple[float, Route]:
        """Check that this process may send now, and find the shard. Returns the time and the route.

        Raises `NoNodeUp` if the call must wait first, or behind others of its role.
        """
        runtime = self._runtime
        now = self._now()
        if now >= self._lease.valid_until and not runtime.guard():
            raise Unavailable("this process lost its lease and is rejoining; retry soon")
        if (
            runtime.leaving
            and not waited
            and (turn is None or not turn.active or turn.host.runtime is not runtime)
        ):
            raise Unavailable("this node is leaving the cluster; send from another one")
        if self._arrivals and not waited and call.kind.role in self._arrivals:
            raise NoNodeUp
        route = call.route
        if route is None:
            route = Route()
        if route.sending is not self:
            shard = self._places.shard_of(call)
            route.lead(self, self.senders.get(shard) or self._sender(shard), _weight(call))
        return now, route

    def _submit(
        self,
        call: Call,
        route: Route,
        home: Home | None,
        callers: tuple[CallingTurn, ...],
        now: float,
        timeout_s: float,
        future: asyncio.Future[bytes] | None,
    ) -> OutgoingCall:
        """Number a message and send it, or hold it until its shard has a home (H1, H2).

        Raises `TypeError` or `NotExecuted` if it can't travel.
        """
        runtime, sender = self._runtime, route.sender
        handler = call.handler
        body = handler.encode_args(call.args, call.kwargs)
        size = len(body) + route.weight_bytes
        chain: tuple[ShardKey, ...] = ()
        behind = None
        if callers:
            size += weight_bytes(b"", *[caller.id for caller in callers])
            chain = tuple([ShardKey(caller.role, caller.shard) for caller in callers])
            behind = partial(self._behind, callers)
        if size > self._message_bytes:
            raise too_large(call, size, self._message_bytes)
        ask = future is not None
        tracer = runtime.observer.tracer
        n, entity = sender.number(), call.entity
        role, shard = sender.shard
        kind, id = entity
        request = Request(
            role, shard, n, 0 if home is None else home.epoch, sender.entry.change, kind, id,
            handler.name, body, ask, False, timeout_s, callers, call.key,
            "" if tracer is None else tracer.inject(),
        )  # fmt: skip
        owner = None if home is None else home.owner
        pending = OutgoingCall(
            n, entity, ask, chain, size, behind, False, False, owner,
            request=request, sender=sender, expires_at=now + timeout_s, future=future,
        )  # fmt: skip
        if home is None or owner is None:
            self._hold(call, sender, pending, now, timeout_s)
            return pending
        sender.post(pending)
        if chain and sender.finishing(pending):
            request = replace(request, finishing=True)
        if runtime.tracing:
            self.note_submit(call, pending, 0, timeout_s)
            self.note_write(pending, home, finishing=request.finishing, open=sender.open)
        links = runtime.links
        # No other ask is open, so there is nothing to batch this one with.
        if links is None or not links.post(owner, request, at_once=ask and not self._asks):
            runtime.send(owner, request)
        return pending

    def began_here(self, call: Call, sender: CallSender, home: Home, turn: Turn) -> OutgoingCall:
        """A local ask began within its call and has suspended: its reply comes as any other."""
        future: asyncio.Future[bytes] = self._loop.create_future()
        assert isinstance(turn.request, Called)
        pending = OutgoingCall(
            turn.n, call.entity, True,
            tuple([ShardKey(caller.role, caller.shard) for caller in turn.request.chain]), 0,
            to=home.owner, started=True, request=turn.request.as_sent(sender.shard, call.entity),
            sender=sender, expires_at=turn.expires_at, future=future,
        )  # fmt: skip
        sender.post(pending)
        return pending

    def note_here(self, call: Call, sender: CallSender, home: Home, called: Called) -> None:
        """For histories: a local ask begins within its call."""
        pending = OutgoingCall(
            called.n, call.entity, True, (), 0, request=called.as_sent(sender.shard, call.entity),
            sender=sender, expires_at=0.0, future=None,
        )  # fmt: skip
        self.note_submit(call, pending, 0, called.ttl_s, here=True)
        self.note_write(pending, home, finishing=False, open=1)

    def note_outcome_here(self, sender: CallSender, n: int, status: ReplyStatus) -> None:
        """For histories: it has ended within its call."""
        outcome = _OUTCOMES.get(status, "failed")
        self._outcome(sender.shard, n, outcome)

    def _hold(
        self, call: Call, sender: CallSender, pending: OutgoingCall, now: float, timeout_s: float
    ) -> None:
        """Submit a message that cannot be written now: other messages, or a home, must come
        first."""
        runtime = self._runtime
        refusal = self._refusal(sender, pending)
        effects = sender.submit(pending, now) if refusal is None else ()
        if runtime.tracing:
            self.note_submit(call, pending, len(sender.queue), timeout_s)
        if refusal is not None:
            pending.resolved = True
            self._outcome(sender.shard, pending.n, "not_executed")
            raise refusal
        self._carry_out(sender, effects)
        if not pending.ask and pending.to is None and self._sweep is None:
            self._sweep = runtime.clock.call_at(now + SWEEP_S, self._sweep_tells)

    def _note_made(self, call: Call, turn: Turn | None) -> None:
        """For histories: a call was made, and may have to wait before it gets its number."""
        runtime = self._runtime
        if not runtime.tracing or call.made is not None:
            return
        gate = None if turn is None else turn.gate
        if turn is not None:
            call.seen = turn.seen
        self._made += 1
        call.made = self._made
        runtime.meter.event(
            "made", inc=runtime.me, call=call.made, type=call.entity.type, id=call.entity.id,
            gate=None if gate is None else gate.number,
            hook=turn is not None and turn.active and turn.is_beside,
        )  # fmt: skip

    def note_submit(
        self, call: Call, pending: OutgoingCall, held: int, timeout_s: float, *, here: bool = False
    ) -> None:
        """For histories: a call was made; `here` if its handler runs within the call."""
        request = pending.request
        by = (request.chain[-1].type, request.chain[-1].id) if request.chain else None
        turn = None if here else current_turn.get()
        if by is None and turn is not None:
            # A tell, or a task that outlived its handler.
            by = (turn.entity.type, turn.entity.id)
        self._runtime.meter.event(
            "submit", inc=self._runtime.me, role=request.role, shard=request.shard, n=pending.n,
            type=request.type, id=request.id, method=request.method, ask=pending.ask,
            chain=[(caller.type, caller.id) for caller in request.chain], held=held,
            timeout=timeout_s, by=by, seen=call.seen, call=call.made,
        )  # fmt: skip

    def note_write(self, pending: OutgoingCall, home: Home, *, finishing: bool, open: int) -> None:
        """For histories: a message went to its home."""
        role, shard = pending.sender.shard
        self._runtime.meter.event(
            "write", inc=self._runtime.me, role=role, shard=shard, n=pending.n, to=home.owner,
            epoch=home.epoch, finishing=finishing, open=open, beyond=pending.beyond,
        )  # fmt: skip

    def _refusal(self, sender: CallSender, pending: OutgoingCall) -> NotExecuted | None:
        """Why a message may not wait for its shard (I6), or None."""
        if sender.entry.state == "quarantined":
            return quarantined(sender, self._runtime.settings.poison_window_s)
        if sender.room(pending.size_bytes, bool(pending.chain)):
            return None
        self._runtime.meter.count("message.overloaded")
        return overloaded(sender, pending.entity)

    def _behind(self, chain: tuple[CallingTurn, ...]) -> Iterator[ShardKey]:
        """The shards of the callers that wait behind a chain's handlers, as far as those run on
        this node.

        A handler in a draining shard may wait for a message that is queued behind another one. That
        other message may ask back into the draining shard. Then both must finish before it is
        empty.
        """
        for caller in chain:
            host = self._runtime.hosts.get(ShardKey(caller.role, caller.shard))
            mailbox = (
                None
                if host is None
                else host.owner.mailboxes.get(EntityKey(caller.type, caller.id))
            )
            if mailbox is not None:
                for queued in mailbox.queue:
                    for waiting in queued.request.chain:
                        yield ShardKey(waiting.role, waiting.shard)

    def _chain(self, call: Call, turn: Turn) -> tuple[CallingTurn, ...]:
        """N1, N2: the turns that wait for this ask; `CallCycle` or `CallTooDeep` if it must not be
        made."""
        runtime = self._runtime
        if turn.host.runtime is not runtime:
            return ()
        chain = turn.chain
        if len(chain) > runtime.settings.chain:
            raise CallTooDeep(
                f"{len(chain)} handlers already wait on each other before "
                f"{call.entity.type} {call.entity.id!r}; the limit is {runtime.settings.chain}"
            )
        for caller in chain:
            if (caller.type, caller.id) == call.entity and not (
                call.handler.shared and caller.shared
            ):
                path = " → ".join(f"{link.type} {link.id!r}" for link in chain)
                raise CallCycle(
                    f"{call.entity.type} {call.entity.id!r} already waits for this call "
                    f"({path} → itself); use tell, or mark both handlers shared"
                )
        return chain

    def _sender(self, shard: ShardKey) -> CallSender:
        sender = self.senders.get(shard)
        if sender is None:
            members = self._runtime.members
            sender = self.senders[shard] = Sender(
                shard,
                self._limits,
                lambda other: members.map.get(other).state == "moving",
                members.nodes.__contains__,
                self._outflow,
            )
            self._by_role.setdefault(shard.role, {})[shard.shard] = sender
            sender.see(members.map.get(shard), self._runtime.clock.now())
        return sender

    # what the runtime reports

    def see(self, shard: ShardKey, entry: Entry) -> None:
        """A newer map entry."""
        sender = self.senders.get(shard)
        if sender is not None:
            self._carry_out(sender, sender.see(entry, self._now()))

    def look(self) -> None:
        """The map or the nodes changed: what is finishing or reachable may have changed (N3)."""
        now = self._now()
        if self._arrivals:
            self._welcome()
        for sender in list(self.senders.values()):
            if sender.queue:
                self._carry_out(sender, sender.look(now))

    def forget(self, peer: Incarnation) -> None:
        """The peer is gone: forget how fast it took messages."""
        self._outflow.forget(peer)

    def link_lost(self, peer: Incarnation, unsent: Iterable[ToOwner]) -> None:
        """H6: the link to a peer is lost, for every shard. `unsent` was never written."""
        now = self._now()
        numbers: dict[ShardKey, list[int]] = {}
        for message in unsent:
            if isinstance(message, Request):
                numbers.setdefault(ShardKey(message.role, message.shard), []).append(message.n)
        for shard, sender in list(self.senders.items()):
            self._carry_out(sender, sender.link_lost(peer, numbers.get(shard, ()), now))

    def departing(self, peer: Incarnation) -> None:
        """H14: a peer said goodbye."""
        now = self._now()
        for sender in list(self.senders.values()):
            self._carry_out(sender, sender.departing(peer, now))

    def on_reply(self, peer: Incarnation, reply: Reply) -> None:
        """The outcome of one message came back from an owner."""
        senders = self._by_role.get(reply.role)
        sender = None if senders is None else senders.get(reply.shard)
        if sender is None:
            return
        pending, effects = sender.answered(peer, reply.n, self._now())
        if pending is not None:
            if reply.status is not _OK:
                self._pauses.hear(peer, reply)
                error = decode_error(reply.status, reply.body)
                self._fail(sender.shard, pending, error, reply.status)
            else:
                if self._runtime.tracing:
                    self._outcome(sender.shard, pending.n, "ok")
                future = pending.future
                if future is not None and not future.done():
                    future.set_result(reply.body)
        if effects:
            self._carry_out(sender, effects)

    def on_begun(self, peer: Incarnation, role: str, begun: Iterable[tuple[int, int]]) -> None:
        """These messages have started, each of its shard."""
        senders = self._by_role.get(role, {})
        now = self._now()
        for shard, n in begun:
            sender = senders.get(shard)
            if sender is not None:
                effects = sender.begun(peer, n, now)
                if effects:
                    self._carry_out(sender, effects)

    def on_answer(self, peer: Incarnation, message: Return | Flushed) -> None:
        """An owner returned messages, or answered a flush."""
        sender = self.senders.get(ShardKey(message.role, message.shard))
        if sender is None:
            return
        now = self._now()
        match message:
            case Return(ns=ns, entry=entry, released=released):
                effects = sender.returned(peer, ns, entry, released, now)
            case Flushed(id=id, entry=entry, released=released):
                effects = sender.flushed(peer, id, entry, released, now)
        self._carry_out(sender, effects)

    @property
    def open_asks(self) -> int:
        """Asks without an answer."""
        return self._asks

    def waiting(self) -> bool:
        """H14: whether the own sender side is not empty yet."""
        return self._asks > 0 or any(sender.waiting() for sender in self.senders.values())

    def awaits(self, shard: ShardKey) -> bool:
        """Whether a handler of this shard waits for an ask of this process."""
        return any(
            shard in pending.chain
            for sender in self.senders.values()
            for pending in (*sender.queue, *sender.written.values())
        )

    def fail_all(self, why: str) -> None:
        """The incarnation ends: every call without an outcome gets one (I6)."""
        for arrivals in self._arrivals.values():
            arrivals.why = why
            arrivals.node_up.set()
        for sender in self.senders.values():
            for pending in [*sender.queue, *sender.written.values()]:
                if pending.resolved:
                    continue
                if pending.to is None and pending.ask:
                    pending.resolved = True
                    self._fail(sender.shard, pending, Unavailable(why))
                elif pending.ask or not pending.started:
                    self._give_up(sender.shard, pending, why)
            # Pending messages refer to their sender, and the garbage collector does not look into
            # them.
            sender.queue.clear()
            sender.written.clear()
        self.senders.clear()
        self._by_role.clear()
        self._waits.close()
        for _, timer in self._timers.values():
            timer.cancel()
        if self._sweep is not None:
            self._sweep.cancel()

    # effects

    def _carry_out(self, sender: CallSender, effects: Iterable[SenderEffect[OutgoingCall]]) -> None:
        runtime = self._runtime
        for effect in effects:
            match effect:
                case WriteRequest():
                    self._write(effect)
                case SendFlush(to, id):
                    if runtime.tracing:
                        role, shard = sender.shard
                        runtime.meter.event(
                            "flush", inc=runtime.me, role=role, shard=shard, to=to, id=id
                        )
                    runtime.send(to, Flush(*sender.shard, id))
                case GiveUp(pending):
                    self._give_up(sender.shard, pending, "the link to its home was lost")
                case Arm(at):
                    self._arm(sender, at)
        for pending in sender.refused():
            self._fail(
                sender.shard, pending, quarantined(sender, self._runtime.settings.poison_window_s)
            )

    def _write(self, write: WriteRequest[OutgoingCall]) -> None:
        pending, to, epoch = write.pending, write.to, write.epoch
        if self._runtime.tracing:
            self.note_write(pending, Home(to, epoch), finishing=write.finishing, open=write.open)
        request = replace(
            pending.request, epoch=epoch, change=write.change, finishing=write.finishing,
            ttl_s=max(0.0, pending.expires_at - self._now()),
        )  # fmt: skip
        self._runtime.send(to, request)

    def _arm(self, sender: CallSender, at: float) -> None:
        armed = self._timers.get(sender.shard)
        if armed is not None:
            if armed[0] <= at:
                return
            armed[1].cancel()

        def due() -> None:
            self._timers.pop(sender.shard, None)
            if self._runtime.guard():
                self._carry_out(sender, sender.tick(self._now()))

        self._timers[sender.shard] = (at, self._runtime.clock.call_at(at, due))

    # outcomes

    def _fail(
        self,
        shard: ShardKey,
        pending: OutgoingCall,
        error: DomicileError,
        status: ReplyStatus | None = None,
    ) -> None:
        if status is ReplyStatus.REJECTED:
            outcome = "rejected"
        elif isinstance(error, NotExecuted):
            outcome = "not_executed"
        elif isinstance(error, MaybeExecuted):
            outcome = "maybe_executed"
        else:
            outcome = "failed"
        future = pending.future
        if future is None and outcome in ("rejected", "failed"):
            return
        self._outcome(shard, pending.n, outcome)
        if future is None:
            self._runtime.meter.count("tell.refused")
        elif not future.done():
            future.set_exception(error)

    def _give_up(self, shard: ShardKey, pending: OutgoingCall, why: str) -> None:
        pending.resolved = True
        if pending.ask:
            request = pending.request
            ran = f"{request.type} {request.id!r} may have run {request.method!r}"
            self._fail(shard, pending, MaybeExecuted(f"{ran}: {why}"))
        else:
            self._lost(shard, pending)

    def _lost(self, shard: ShardKey, pending: OutgoingCall) -> None:
        self._runtime.meter.count("tell.lost")
        self._runtime.meter.event(
            "lost", inc=self._runtime.me, role=shard.role, shard=shard.shard, n=pending.n
        )

    def _outcome(self, shard: ShardKey, n: int, outcome: str, cancelled: bool = False) -> None:
        if self._runtime.tracing:
            self._runtime.meter.event(
                "outcome", inc=self._runtime.me, role=shard.role, shard=shard.shard, n=n,
                outcome=outcome, cancelled=cancelled,
            )  # fmt: skip

    def _expired(self, pending: OutgoingCall) -> None:
        """The caller's time is up."""
        if pending.resolved:
            return
        sender, request = pending.sender, pending.request
        trouble = self._trouble(pending)
        unwritten, effects = self._withdraw(pending)
        if unwritten and not self._places.has_node(request.role):
            self._fail(sender.shard, pending, self._no_node(request.type, request.role))
        else:
            self._fail(sender.shard, pending, expired(request, unwritten, trouble))
        self._carry_out(sender, effects)
        self._take_back(pending)

    def _abandon(self, sender: CallSender, pending: OutgoingCall) -> None:
        """The caller was cancelled: its call no longer needs an outcome."""
        unwritten, effects = self._withdraw(pending)
        outcome = "not_executed" if unwritten else "maybe_executed"
        self._outcome(sender.shard, pending.n, outcome, cancelled=True)
        self._carry_out(sender, effects)
        self._take_back(pending)

    def _withdraw(
        self, pending: OutgoingCall
    ) -> tuple[bool, tuple[SenderEffect[OutgoingCall], ...]]:
        """Its caller no longer waits; True if it certainly never runs."""
        to, links = pending.to, self._runtime.links
        recalled = (
            to is not None
            and links is not None
            and not pending.started
            and links.recall(to, pending.request)
        )
        return pending.sender.withdraw(pending, self._now(), recalled=recalled)

    def _trouble(self, pending: OutgoingCall) -> str:
        """Why the home of a message cannot be reached, as far as this process knows."""
        links = self._runtime.links
        return "" if links is None else links.trouble(pending.to or pending.sender.entry.owner)

    def _take_back(self, pending: OutgoingCall) -> None:
        """Tell the owner that the caller no longer waits: it need not start the message, and may
        cancel a `cancellable` handler."""
        if pending.to is not None and self._runtime.guard():
            self._runtime.take_back(pending.to, Cancel(*pending.sender.shard, pending.n))

    def _sweep_tells(self) -> None:
        """Give up tells that waited longer than their timeout; they count as lost (I6)."""
        self._sweep = None
        now = self._now()
        held = False
        for sender in list(self.senders.values()):
            for pending in [one for one in sender.queue if not one.ask]:
                held = True
                if now >= pending.expires_at:
                    _, effects = sender.withdraw(pending, now)
                    self._lost(sender.shard, pending)
                    self._carry_out(sender, effects)
        if held:
            self._sweep = self._runtime.clock.call_at(now + SWEEP_S, self._sweep_tells)


def _weight(call: Call) -> int:
    """Estimated bytes of every message to that entity, without the body."""
    id, key = call.entity.id, call.key
    if id.isascii() and not key:
        return len(id) + WEIGHT_BYTES
    return weight_bytes(b"", id, key) + WEIGHT_BYTES
