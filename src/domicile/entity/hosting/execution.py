"""The turns of one shard: a started message from its cell's start to its answer.

The base of `ShardHost`. It decides nothing: `core.handoff.owner` says what may start. Every handler
begins in `begin`. The usual message (a resident entity, a handler that does not suspend) is served
by `request` or `call_here` alone; everything else goes through `_serve`.
"""

from __future__ import annotations

import asyncio
from abc import abstractmethod
from collections.abc import Iterable, Mapping
from enum import Enum
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from domicile.core.handoff.mailbox import Queued
from domicile.core.handoff.owner import OwnerEffect
from domicile.core.handoff.pending import Home
from domicile.core.handoff.tables import Phase
from domicile.core.ids import EntityKey, Incarnation, LinkKey, ShardKey
from domicile.core.placement.suspicion import always_on_trial
from domicile.core.wire import CallingTurn, Reply, ReplyStatus, Request
from domicile.entity.hosting.activation import Activation, NotStarted, name_of
from domicile.entity.hosting.cell import Alarm, Called, Cell, Incoming, Turn, current_turn
from domicile.entity.model.codec import decode_error, encode_error, encode_failure
from domicile.entity.model.handlers import Handler
from domicile.entity.model.ref import Call, Route
from domicile.entity.running.exits import exit_hint, is_ctrl_c
from domicile.entity.running.workers import Abandoned, Guarded, Handed, Worker
from domicile.errors import (
    DomicileError,
    Fenced,
    HandlerFailed,
    MaybeExecuted,
    NotExecuted,
    Unavailable,
)
from domicile.ports.work import OutputGate
from domicile.taglog import TaggedLog

if TYPE_CHECKING:
    from domicile.entity.runtime import Runtime

log = TaggedLog()

ALARM = LinkKey(Incarnation(""), "alarm")

WEIGHT_BYTES = 1_024
"""Estimated bytes of memory of a waiting message, without its body and its ids."""

NOT_HERE: Final = object()
"""A local ask did not begin within its call: nothing has happened yet."""

_OK = ReplyStatus.OK


class FirstStep(Enum):
    """How far a handler came before it first returned control to the event loop."""

    ENDED = "ended"
    FAILED = "failed"
    SUSPENDED = "suspended"


_ENDED, _FAILED, _SUSPENDED = FirstStep.ENDED, FirstStep.FAILED, FirstStep.SUSPENDED


class OutcomeUnknown(MaybeExecuted):
    """The outcome of a durable write is unknown, or it was fenced: the caller gets
    MaybeExecuted."""


class Execution(Activation):
    """Runs the messages that its shard's owner machine lets start."""

    _limited = False
    """Whether `_used` is overridden, so that it must be called for every message."""

    def __init__(self, runtime: Runtime, shard: ShardKey) -> None:
        super().__init__(runtime, shard)
        self._woken: dict[EntityKey, None] = {}
        """Entities for which `_next` is already submitted."""

    @abstractmethod
    def settle(self) -> None:
        """A turn or a stop ended while draining: check whether it was the last."""

    @abstractmethod
    def _stop(self, cell: Cell) -> bool:
        """Stop an entity that runs nothing."""

    @abstractmethod
    def _not_begun(self, turn: Turn, alarm: Alarm) -> None:
        """A due timer was taken from its mailbox and did not reach its method."""

    @abstractmethod
    def restart(self, cell: Cell) -> None:
        """Forget the entity object at once."""

    @abstractmethod
    def _carry_out(self, effects: Iterable[OwnerEffect[Incoming]]) -> None:
        """Carry out the owner machine's effects."""

    # every handler begins here

    def begin(
        self,
        turn: Turn,
        cell: Cell,
        handler: Handler,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
    ) -> tuple[FirstStep, Any]:
        """Run a handler until it ends or first suspends.

        Returns how far it came, with the value that it returned, with the error that it raised, or
        with its coroutine and what that waits for. The caller notes the start before this call;
        after it the caller answers, and continues a suspended handler.
        """
        runtime = self.runtime
        current_turn.set(turn)
        outer, runtime.running = runtime.running, turn
        observer = runtime.observer
        observer.left -= 1
        try:
            work = (
                handler.fn(cell.entity, *args, **kwargs)
                if kwargs
                else handler.fn(cell.entity, *args)
            )
            if observer.left < 0:
                request = turn.request
                trace = request.trace if isinstance(request, Request) else ""
                work = observer.look_at(work, cell.kind.name, handler.name, trace)
            waits_for = work.send(None)
        except StopIteration as stop:
            runtime.running = outer
            return _ENDED, stop.value
        except BaseException as error:
            runtime.running = outer
            if is_ctrl_c(error):
                turn.active = False
                raise
            return _FAILED, error
        runtime.running = outer
        return _SUSPENDED, (work, waits_for)

    def _go_on(
        self, worker: Worker, turn: Turn, handler: Handler, suspended: tuple[Any, Any]
    ) -> None:
        """Give a suspended handler to a worker, which answers when the handler ends."""
        work, waits_for = suspended
        guarded = Guarded(work, turn, begun=True, waits_for=waits_for)
        worker.start(self._see_through(turn, guarded, handler))

    # the usual way

    def request(
        self, worker: Worker, source: LinkKey, request: Request, now: float, late: bool
    ) -> None:
        """A message for this shard. It begins in the worker's name if nothing is in its way and
        this turn of the event loop has not taken too long."""
        cell = self.cells.get((request.type, request.id))  # type: ignore[call-overload]
        entity = EntityKey(request.type, request.id) if cell is None else cell.key
        if (
            not late
            and request.ttl_s > 0
            and self.owner.clear(source, entity, request.epoch, request.change)
        ):
            if cell is None:
                cell = self._start_now(entity, now)
            handler = None if cell is None else cell.direct.get(request.method)
            if cell is not None and handler is not None and _may_begin(cell, request.key):
                try:
                    args, kwargs = handler.decode_args(request.body)
                except NotExecuted:
                    # `_request` below refuses it, in order.
                    pass
                else:
                    expires_at = now + request.ttl_s
                    turn = Turn(self._host, source, entity, handler.shared, request, expires_at)
                    self._begin_now(worker, turn, cell, handler, args, kwargs, now, False)
                    return
        self._request(source, request, now)

    def _request(self, source: LinkKey, request: Request, now: float) -> None:
        """Queue a message that must wait, or that needs more than its handler."""
        kind = self.runtime.catalogue.get(request.type)
        handler = None if kind is None else kind.handlers.get(request.method)
        queued = Incoming(
            source,
            request.n,
            EntityKey(request.type, request.id),
            request.epoch,
            request.change,
            request.finishing,
            handler is not None and handler.shared,
            len(request.body) + 4 * (len(request.id) + len(request.key)) + WEIGHT_BYTES,
            request.ttl_s,
            bool(request.chain),
            request=request,
            expires_at=now + request.ttl_s,
        )
        if request.key and not queued.shared:
            cell = self.cells.get(queued.entity)
            if cell is not None and cell.gate is not None:
                cell.gate.foresee(request.key)
        self._carry_out(self.owner.request(queued))

    def _begin_now(
        self,
        worker: Worker,
        turn: Turn,
        cell: Cell,
        handler: Handler,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        now: float,
        waited: bool,
    ) -> None:
        """Run a message until it ends or first suspends: one that is clear to start, or one that
        `waited`.

        If it did not wait, its entity is marked as busy only when it suspends. Until then nothing
        else can start, except what it asks itself and what runs within that call. Those know by the
        chain that it waits (N2).
        """
        runtime, request = self.runtime, turn.request
        if runtime.tracing:
            if not waited:
                self.note("accept", turn, depth=1)
            self.note("start", turn, method=request.method, shared=turn.shared)
        turn.began = True
        if waited:
            self._reach(turn)
        gate = turn.gate = cell.gate
        if gate is not None and not turn.shared:
            gate.begin(request.key)
        step, outcome = self.begin(turn, cell, handler, args, kwargs)
        if step is _ENDED:
            if gate is not None:
                held = self._conclude(turn, *self._reply_of(turn, handler, outcome))
                if held or not request.ask:
                    runtime.begun(self.shard, turn.source, request.n)
            elif request.ask:
                try:
                    body = handler.encode_reply(outcome)
                except TypeError as error:
                    self._conclude(turn, *self._failure(turn, error))
                else:
                    if runtime.tracing or len(body) > runtime.small_bytes:
                        self._conclude(turn, "ok", _OK, body)
                    else:
                        role, shard = self.shard
                        runtime.answer(turn.source, Reply(role, shard, request.n, _OK, body))
            else:
                if runtime.tracing:
                    self.note("finish", turn, how="ok")
                runtime.begun(self.shard, turn.source, request.n)
        elif step is _FAILED:
            if self._conclude(turn, *self._failure(turn, outcome)):
                runtime.begun(self.shard, turn.source, request.n)
        else:
            if not waited:
                self.owner.occupy(turn.source, turn.entity, turn.shared)
            runtime.begun(self.shard, turn.source, request.n)
            self._go_on(worker, turn, handler, outcome)
            return
        turn.active = False
        if waited:
            current_turn.set(None)
            self._finished(turn)
            return
        if self._limited:
            self._used(cell, now)
        else:
            cell.used_at = now
        if cell.wants_stop:
            self._stop(cell)

    def call_here(
        self,
        worker: Worker,
        call: Call,
        route: Route,
        home: Home,
        chain: tuple[CallingTurn, ...],
        now: float,
        timeout_s: float,
    ) -> Any:
        """Run a local ask within the call that makes it, and return the handler's value.

        Returns `NOT_HERE` if it cannot begin so, or an `OutgoingCall` if it has begun and
        suspended. It takes the same place in the order as a message that travels: nothing else of
        its sender waits here.
        """
        runtime, entity, sender = self.runtime, call.entity, route.sender
        change = sender.entry.change
        if not self.owner.clear(runtime.source, entity, home.epoch, change):
            return NOT_HERE
        cell = route.cell
        if cell is None or not cell.resident or cell.host is not self:
            cell = route.cell = self.cells.get(entity) or self._start_now(entity, now)
        handler = None if cell is None else cell.direct.get(call.handler.name)
        if cell is None or handler is None or not _may_begin(cell, ""):
            return NOT_HERE
        args, kwargs = call.args, call.kwargs
        shares = runtime.shares and handler is call.handler and not kwargs
        if not (shares and handler.may_share(args)):
            body = call.encoded()
            if len(body) + route.weight_bytes > runtime.settings.message_bytes:
                return NOT_HERE
            try:
                args, kwargs = handler.decode_args(body)
            except NotExecuted:
                return NOT_HERE
        called = Called(sender.number(), home.epoch, change, handler.name, chain, timeout_s)
        turn = Turn(self._host, runtime.source, cell.key, handler.shared, called, now + timeout_s)
        tracing = runtime.tracing
        if tracing:
            runtime.sending.note_here(call, sender, home, called)
            self.note("accept", turn, depth=1)
            self.note("start", turn, method=called.method, shared=turn.shared)
        turn.began = True
        gate = turn.gate = cell.gate
        if gate is not None and not turn.shared:
            gate.begin("")
        step, outcome = self.begin(turn, cell, handler, args, kwargs)
        how, status, encoded = "ok", _OK, b""
        if step is _ENDED:
            shares = shares and handler.may_share_reply(outcome)
            if not shares or gate is not None:
                how, status, encoded = self._reply_of(turn, handler, outcome)
        elif step is _FAILED:
            how, status, encoded = self._failure(turn, outcome)
        else:
            self.owner.occupy(turn.source, cell.key, turn.shared)
            pending = runtime.sending.began_here(call, sender, home, turn)
            self._go_on(worker, turn, handler, outcome)
            return pending
        held: Any = None
        if gate is not None and self._leaves_later(turn, gate, status, encoded):
            # The answer comes as a message, once it may leave the entity (J5).
            held = runtime.sending.began_here(call, sender, home, turn)
        elif runtime.clock.now() >= runtime.lease.valid_until and not runtime.guard():
            # L3: an answer after the deadline does not count, and its caller must not go on.
            shares, lost = False, MaybeExecuted(f"{name_of(entity)} ran past its node's deadline")
            status, encoded = encode_error(lost)
        if tracing:
            self.note("finish", turn, how=how)
            if held is None:
                runtime.sending.note_outcome_here(sender, called.n, status)
        turn.active = False
        if self._limited:
            self._used(cell, now)
        else:
            cell.used_at = now
        if cell.wants_stop and not _waits(chain, entity):
            self._stop(cell)
        if held is not None and gate is not None:
            gate.hold(partial(self._answer_held, turn, status, encoded))
            return held
        if status is not _OK:
            raise decode_error(status, encoded)
        return outcome if shares else call.handler.decode_reply(encoded)

    def _wake(self, entity: EntityKey) -> None:
        """Submit an entity's next message, once: an entity has one job in line, however many
        messages wait."""
        if entity not in self._woken:
            self._woken[entity] = None
            self.runtime.workers.submit(partial(self._next, entity))

    def _next(self, entity: EntityKey, worker: Worker) -> None:
        """Start the next waiting message of an entity, if one may start now."""
        del self._woken[entity]
        if not self.runtime.guard():
            return
        cell = self.cells.get(entity)
        if (
            cell is None
            and entity.type not in self.runtime.catalogue
            and entity in self.owner.mailboxes
            and self.runtime.unserved.keeps(self._host, entity)
        ):
            return
        queued = self.owner.start(entity)
        if queued is None:
            return
        turn, now = self.turn_of(queued), self.runtime.clock.now()
        request = turn.request
        if isinstance(request, Request) and cell is not None and _may_begin(cell, request.key):
            handler = cell.direct.get(request.method)
            if handler is not None and now < turn.expires_at:
                try:
                    args, kwargs = handler.decode_args(request.body)
                except NotExecuted:
                    # `_serve` refuses it.
                    worker.start(self._serve(turn))
                else:
                    self._begin_now(worker, turn, cell, handler, args, kwargs, now, True)
                return
        worker.start(self._serve(turn))

    def turn_of(self, queued: Incoming) -> Turn:
        """The turn of a message that has waited."""
        return Turn(
            self._host, queued.source, queued.entity, queued.shared, queued.request,
            queued.expires_at, waking=queued.shared,
        )  # fmt: skip

    # the whole way

    async def _serve(self, turn: Turn) -> None:
        """Run a message that needs more than its handler: a start, a key, or a refusal."""
        current_turn.set(turn)
        if self.owner.entry.deaths:
            work = self._run_on_trial(turn)
        else:
            cell = self.cells.get(turn.entity)
            if cell is not None and cell.tried is not None:
                cell.tried, cell.direct = None, cell.kind.direct
            work = self._run(turn)
        await self._see_through(turn, Guarded(work, turn), None)

    async def _see_through(self, turn: Turn, guarded: Guarded, handler: Handler | None) -> None:
        """Await a message's coroutine, and answer. Raises only what ends the worker."""
        try:
            body = await guarded
            if handler is not None:
                body = handler.encode_reply(body) if turn.request.ask else b""
            self._conclude(turn, "ok", _OK, body)
        except NotStarted as refusal:
            self._answer(turn, *encode_error(refusal.reason))
        except asyncio.CancelledError as error:
            # A cancellation of a worker's task is meant for the handler, unless the pool or the
            # lease ends.
            if self.runtime.fenced or (self.runtime.workers.closed and not turn.cancel_reason):
                if turn.began:
                    self.note("finish", turn, how="cancelled")
                raise
            if turn.began:
                self._conclude(turn, *self._failure(turn, error))
            else:
                # I9: `on_start` was interrupted, so the message never ran.
                why = turn.cancel_reason or "it was cancelled"
                late = Unavailable(f"{name_of(turn.entity)} did not start ({why})")
                self._answer(turn, *encode_error(late))
        except Abandoned:
            if not turn.dropped or self.runtime.fenced:
                raise
            self._given_up(turn)
        except BaseException as error:
            if guarded.closed or is_ctrl_c(error):
                raise
            # Any other error: the worker must go on, or this entity would stay busy forever.
            if turn.began:
                self._conclude(turn, *self._failure(turn, error))
            else:
                unstarted = self._not_started(turn.entity, error)
                self._answer(turn, *encode_error(unstarted))
        finally:
            turn.end()
            if not turn.began and isinstance(turn.request, Alarm):
                self._not_begun(turn, turn.request)
            # The worker now waits for other messages and must not keep this turn in memory.
            current_turn.set(None)
        self._finished(turn)

    async def _run_on_trial(self, turn: Turn) -> bytes:
        """As `_run`, in a shard that lost owners."""
        trial = await self._begin_trial(turn)
        if trial is None:
            return await self._run(turn)
        try:
            return await self._run(turn, waking=True)
        finally:
            self.runtime.trials.end(trial)
            cell = self.cells.get(turn.entity)
            if cell is not None:
                most = self.runtime.settings.poison_deaths
                ends = not always_on_trial(self.owner.entry, most)
                cell.has_tried(turn.request.method, ends)

    async def _run(self, turn: Turn, waking: bool = False) -> bytes:
        """Everything between a started message and its encoded reply."""
        request = turn.request
        cell = await self._started_cell(turn, waking)
        entity = cell.entity
        assert entity is not None
        gate = cell.gate
        if isinstance(request, Alarm):
            self._note_begun(turn)
            if gate is not None:
                await gate.prepare("")
                turn.gate = gate
                gate.begin("")
            await request.fn(entity, *request.args, **request.kwargs)
            return b""
        assert isinstance(request, Request)
        handler = cell.kind.handlers.get(request.method)
        if handler is None:
            raise NotStarted(
                Unavailable(
                    f"{cell.kind.name!r} has no handler {request.method!r} at node "
                    f"{self.runtime.node_id}; is a rolling update under way?"
                )
            )
        try:
            args, kwargs = handler.decode_args(request.body)
            if handler.blocking:
                self.runtime.blocking.check(f"{cell.kind.name}.{request.method}")
        except NotExecuted as unfit:
            raise NotStarted(unfit) from unfit
        except Exception as error:
            raise NotStarted(NotExecuted(f"the arguments do not fit: {error}")) from error

        if request.key and not cell.kind.durable:
            raise NotStarted(
                NotExecuted(
                    f"{cell.kind.name!r} keeps no journal at node {self.runtime.node_id}, so a key "
                    "can't make a call repeat-safe; leave it out, or make the type event-sourced"
                )
            )

        async def call() -> bytes:
            step, outcome = self.begin(turn, cell, handler, args, kwargs)
            if step is _FAILED:
                raise outcome
            if step is _SUSPENDED:
                # `_serve` already guards all of this coroutine.
                outcome = await Handed(*outcome)
            return handler.encode_reply(outcome) if request.ask else b""

        self._note_begun(turn)
        if gate is None:
            self._reach(turn)
            return await call()
        # The key of a shared handler changes nothing: it stores nothing.
        key = "" if turn.shared else request.key
        if handler.blocking:
            # Its thread may show what it sees to anybody.
            await gate.flush(sends=True)
        reply = await gate.prepare(key)
        turn.gate = gate
        if reply is not None:
            return reply
        if not turn.shared:
            gate.begin(key)
        self._reach(turn)
        return await call()

    def _reach(self, turn: Turn) -> None:
        """The message reaches its handler: the shared ones behind it may begin too."""
        if turn.waking:
            turn.waking = False
            if self.owner.reached(turn.entity):
                self._wake(turn.entity)

    def _note_begun(self, turn: Turn) -> None:
        """The message starts now, for its sender and for every invariant."""
        turn.began = True
        self.note("start", turn, method=turn.request.method, shared=turn.shared)
        if turn.source is not ALARM:
            self.runtime.begun(self.shard, turn.source, turn.n)

    def _finished(self, turn: Turn) -> None:
        entity = turn.entity
        cell = self.cells.get(entity)
        if cell is not None:
            self._used(cell, self.runtime.clock.now())
        more = self.owner.finish(entity, turn.shared, not turn.waking)
        if cell is not None and cell.wants_stop and self._stop(cell):
            return
        if more:
            self._wake(entity)
        elif self.owner.phase is Phase.DRAINING:
            self.settle()

    def _used(self, cell: Cell, now: float) -> None:
        """A message of the entity ended."""
        cell.used_at = now

    # outcomes

    def _given_up(self, turn: Turn) -> None:
        """A handler ignored its cancellation and is never resumed: the entity starts again (DX-09).

        The handler may have left the object half changed, so no other message may see it.
        """
        if turn.gate is not None:
            turn.gate.abort()
        cell = self.cells.get(turn.entity)
        if cell is not None:
            self.restart(cell)
        name, why = name_of(turn.entity), turn.cancel_reason
        error: NotExecuted | MaybeExecuted = MaybeExecuted(f"{name}: {turn.request.method!r} {why}")
        if not turn.began:
            error = Unavailable(f"{name} did not start ({why})")
        self._answer(turn, *encode_error(error))

    def _failure(self, turn: Turn, error: BaseException) -> tuple[str, ReplyStatus, bytes]:
        """The outcome of a message that ran and raised."""
        if isinstance(error, asyncio.CancelledError):
            if not turn.cancel_reason:
                return "cancelled", *encode_failure(error)
            if turn.cancel_reason == "timeout":
                limit = HandlerFailed(f"the handler ran for more than {self.timeout_s(turn):g} s")
                return "cancelled", *encode_failure(limit)
            return "cancelled", *encode_error(MaybeExecuted(turn.cancel_reason))
        if isinstance(error, OutcomeUnknown | Fenced):
            return "failed", *encode_error(MaybeExecuted(str(error)))
        status, body = encode_failure(error)
        if status is ReplyStatus.REJECTED:
            return "rejected", status, body
        self.runtime.meter.count("handler.failed")
        self._log_failure(turn, error)
        return "failed", status, body

    def _log_failure(self, turn: Turn, error: BaseException) -> None:
        method, name, tags = turn.request.method, name_of(turn.entity), self.tags(turn.epoch)
        if isinstance(error, HandlerFailed) and error.remote_traceback:
            # The home of the entity where it began has logged it: one traceback for a whole chain.
            cause = str(error).partition("\n")[0]
            text = "%s failed on %s because what it called failed: %s"
            log.warning(text, method, name, cause, extra=tags)
        else:
            hint = exit_hint(error)
            log.warning("%s failed on %s%s", method, name, hint, exc_info=error, extra=tags)

    def _reply_of(self, turn: Turn, handler: Handler, value: Any) -> tuple[str, ReplyStatus, bytes]:
        """The value that a handler returned, encoded for its caller."""
        if not turn.request.ask:
            return "ok", _OK, b""
        try:
            body = handler.encode_reply(value)
        except TypeError as error:
            return self._failure(turn, error)
        return "ok", *self._fitting(_OK, body)

    def _fitting(self, status: ReplyStatus, body: bytes) -> tuple[ReplyStatus, bytes]:
        most = self.runtime.settings.message_bytes
        if len(body) <= most:
            return status, body
        return encode_failure(
            HandlerFailed(f"the reply has {len(body):,} bytes; the limit is {most:,}")
        )

    def _conclude(self, turn: Turn, how: str, status: ReplyStatus, body: bytes) -> bool:
        """Answer a message that ran, now or once its answer may leave the entity (J5).

        Returns True if the answer waits.
        """
        if len(body) > self.runtime.small_bytes:
            status, body = self._fitting(status, body)
        gate = turn.gate
        held = gate is not None and self._leaves_later(turn, gate, status, body)
        if self.runtime.tracing:
            self.note("finish", turn, how=how)
        if gate is not None and held:
            gate.hold(partial(self._answer_held, turn, status, body))
            return True
        if (status is not _OK or turn.request.ask) and not turn.answered:
            self._answer(turn, status, body)
        return False

    def _leaves_later(self, turn: Turn, gate: OutputGate, status: ReplyStatus, body: bytes) -> bool:
        """A turn of a durable entity has ended: whether its answer must wait at the gate."""
        if turn.shared:
            return gate.read()
        return gate.end(body) if status is _OK else gate.abort()

    def _answer_held(
        self, turn: Turn, status: ReplyStatus, body: bytes, error: DomicileError | None
    ) -> None:
        """What an answer waited for has committed, or it has not: tell the caller which."""
        if not self.runtime.guard():
            # L3: the deadline counts for answers that waited, too.
            return
        if error is not None:
            self.note("withheld", turn, why="fenced" if isinstance(error, Fenced) else "unknown")
            status, body = encode_error(MaybeExecuted(str(error)))
        if (status is not _OK or turn.request.ask) and not turn.answered:
            self._answer(turn, status, body)

    def _answer(self, to: Turn | Queued, status: ReplyStatus, body: bytes) -> None:
        if to.source is not ALARM:
            role, shard = self.shard
            self.runtime.answer(to.source, Reply(role, shard, to.n, status, body))

    def timeout_s(self, turn: Turn) -> float:
        """How long this message's handler may run."""
        settings = self.runtime.settings
        if isinstance(turn.request, Alarm):
            return settings.handler_timeout_s if turn.n else settings.stop_timeout_s
        kind = self.runtime.catalogue.get(turn.entity.type)
        handler = None if kind is None else kind.handlers.get(turn.request.method)
        if handler is not None and handler.timeout_s is not None:
            return handler.timeout_s
        return settings.handler_timeout_s

    def note(self, kind: str, what: Turn | Queued, **more: Any) -> None:
        """A history event about one message."""
        if self.runtime.tracing:
            self.runtime.meter.event(
                kind, inc=self.runtime.me, role=self.shard.role, shard=self.shard.shard,
                epoch=what.epoch, sender=what.source.sender, n=what.n,
                type=what.entity.type, id=what.entity.id, **more,
            )  # fmt: skip


def _may_begin(cell: Cell, key: str) -> bool:
    """Whether a message may begin without `_serve`, as far as its entity is concerned."""
    gate = cell.gate
    return cell.started and (not key if gate is None else gate.may_begin(key))


def _waits(chain: tuple[CallingTurn, ...], entity: EntityKey) -> bool:
    """Whether a handler of the entity is in the chain; it may not be marked as busy yet."""
    return any((caller.type, caller.id) == entity for caller in chain)
