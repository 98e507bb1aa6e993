"""The host of one shard: carries out what `core.owner` decides and runs its entities.

Called by the runtime only. It starts what the owner machine hands out, answers, stops entities
when the shard drains, and says when nothing is left. It decides nothing about order or phases.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable
from functools import partial
from typing import TYPE_CHECKING, Any

from domicile.core.handoff import OwnerEvent, Phase
from domicile.core.ids import EntityKey, Incarnation, ShardKey
from domicile.core.messages import (
    AskRevert,
    Flush,
    Flushed,
    Released,
    Reply,
    Request,
    Return,
    Status,
)
from domicile.core.owner import (
    Accepted,
    AnswerFlush,
    Discard,
    Effect,
    FlushAsked,
    Mail,
    Owner,
    PhaseChanged,
    ReadRecord,
    Refuse,
    SendBack,
    Source,
    Wake,
)
from domicile.core.shardmap import Entry
from domicile.entity.cell import Alarm, Cell, Incoming, Turn, current_turn
from domicile.entity.codec import encode_error, encode_failure
from domicile.entity.define import Entity, EntityType, make
from domicile.entity.marks import Marks
from domicile.entity.workers import Abandoned, Guarded
from domicile.errors import (
    Fenced,
    HandlerFailed,
    MaybeExecuted,
    NotExecuted,
    Overloaded,
    Unavailable,
)
from domicile.ports.clock import Timer

if TYPE_CHECKING:
    from domicile.entity.runtime import Runtime

log = logging.getLogger("domicile")

ALARM = Source(Incarnation(""), "alarm")
FIRST_BACKOFF_S = 0.1
MAX_BACKOFF_S = 10.0
SELF_DRAIN_S = 0.25


class NotStarted(Exception):
    """The message did not reach its handler; `reason` is for the caller."""

    def __init__(self, reason: NotExecuted) -> None:
        super().__init__(str(reason))
        self.reason = reason


class OutcomeUnknown(MaybeExecuted):
    """A durable write's outcome is unknown or it was fenced: the caller learns MaybeExecuted."""


class ShardHost:
    """One shard at this node, whether it is home here now or not."""

    def __init__(self, runtime: Runtime, shard: ShardKey) -> None:
        self.runtime = runtime
        self.shard = shard
        self.owner = Owner(shard, runtime.me, runtime.settings.mailbox)
        self.cells: dict[EntityKey, Cell] = {}
        self.fence_claim: object | None = None
        """J1: the claim of the current epoch, made and kept by the first durable use."""
        self._alarms = 0
        self._floor = 0
        self._backoff: dict[EntityKey, tuple[float, float]] = {}
        self._marks = Marks(runtime.settings.poison_deaths, partial(runtime.mark_started, shard))
        self._stopping = 0
        self._settling = False
        self._drain: Timer | None = None

    # what the runtime reports

    def request(self, source: Source, request: Request) -> None:
        """A message for this shard."""
        now = self.runtime.clock.now()
        kind = self.runtime.catalogue.get(request.type)
        handler = None if kind is None else kind.handlers.get(request.method)
        mail = Mail(
            source,
            request.n,
            EntityKey(request.type, request.id),
            request.epoch,
            request.change,
            request.finishing,
            handler is not None and handler.shared,
            Incoming(request, now + request.ttl_s),
        )
        self._carry_out(self.owner.request(mail))

    def flush(self, source: Source, flush: Flush) -> None:
        """A sender wants its unstarted mail back."""
        self._carry_out(self.owner.flush(FlushAsked(source, flush.id)))

    def see(self, entry: Entry) -> None:
        """A newer map entry."""
        self._carry_out(self.owner.see(entry))

    def outrun(self, epoch: int) -> None:
        """J1: a journal has seen a newer epoch than this home's; it must be given a newer one."""
        self._floor = max(epoch, self._floor)
        self._carry_out(self.owner.happen(OwnerEvent.OUTRUN))

    def link_gone(self, source: Source) -> None:
        """An incoming link's state was dropped."""
        self.owner.link_gone(source)

    def fence(self) -> None:
        """The lease is lost: no start, no answer; the runtime cancels what runs (L4)."""
        self.owner.happen(OwnerEvent.FENCED)
        self._forget_cells()
        self._disarm()

    def alarm(self, cell: Cell, alarm: Alarm) -> None:
        """A due `after` of a resident entity."""
        if not self.runtime.guard() or self.cells.get(cell.key) is not cell:
            return
        self._alarms += 1
        mail = Mail(ALARM, -self._alarms, cell.key, self.owner.epoch, 0, False, False, alarm)
        if self.owner.timer(mail):
            self._wake(cell.key)

    def sweep(self, now: float) -> None:
        """Passivate what has been idle for long enough."""
        if self.owner.phase is not Phase.OPEN:
            return
        for key, cell in list(self.cells.items()):
            idle_s = cell.kind.idle_s or self.runtime.settings.idle_s
            if key not in self.owner.boxes and now - cell.used_at >= idle_s:
                self._stop(cell)

    def repeat_released(self) -> None:
        """H10: until the record's epoch is newer, the leader hears it again."""
        owner = self.owner
        entry = owner.entry
        if owner.phase is Phase.RELEASED and entry.owner == owner.me and entry.epoch <= owner.epoch:
            self.runtime.tell_leader(Released(*self.shard, owner.epoch, self._floor))
            self.runtime.repeat_soon()

    @property
    def unsettled(self) -> bool:
        """Whether the store still says that this node has something to release (H14)."""
        entry = self.owner.entry
        return entry.owner == self.owner.me and (
            self.owner.phase in (Phase.OPEN, Phase.DRAINING) or entry.epoch > self.owner.epoch
        )

    # effects

    def _carry_out(self, effects: Iterable[Effect]) -> None:
        for effect in effects:
            match effect:
                case Wake(entity):
                    self._wake(entity)
                case Accepted(mail, depth):
                    self.note("accept", mail, depth=depth)
                    if mail.load.request.chain:
                        self.runtime.look_soon()
                case SendBack(source, mails):
                    self._send_back(source, mails)
                case AnswerFlush(source, id):
                    self._answer_flush(source, id)
                case Refuse(mail):
                    full = Overloaded(f"the mailbox of {_name(mail.entity)} is full; slow down")
                    self._answer(mail, *encode_error(full))
                case Discard(mails):
                    for mail in mails:
                        self.runtime.meter.count("mail.dropped")
                        self.note("dropped", mail, why="its link is lost")
                case ReadRecord():
                    self.runtime.read_record(self.shard)
                case PhaseChanged():
                    self._phase_changed(effect)

    def _phase_changed(self, change: PhaseChanged) -> None:
        runtime = self.runtime
        if "drop" in change.does or change.does == "reopen":
            runtime.cancel_turns(self.shard, "the shard has a new home")
            self._forget_cells()
        if change.does != "repeat Released":
            log.debug("%s", change.phase.value, extra=self.tags(change.epoch))
            runtime.meter.event(
                change.phase.value, inc=runtime.me, role=self.shard.role, shard=self.shard.shard,
                epoch=change.epoch,
            )  # fmt: skip
        match change.phase:
            case Phase.OPEN:
                self._disarm()
                if change.does != "revert":
                    self.fence_claim = None
                for entity in list(self.owner.boxes):
                    self._wake(entity)
            case Phase.DRAINING:
                clock = runtime.clock
                self._drain = clock.call_at(
                    clock.now() + runtime.settings.drain_deadline_s, self._overdue
                )
                self.settle()
            case Phase.RELEASED:
                self._disarm()
                self.repeat_released()
            case Phase.CLOSED:
                self._disarm()

    def _send_back(self, source: Source, mails: tuple[Mail, ...]) -> None:
        for mail in mails:
            self.note("return", mail)
        ns = tuple(mail.n for mail in mails)
        self.runtime.answer(source, Return(*self.shard, ns, self.owner.entry, self.owner.released))

    def _answer_flush(self, source: Source, id: int, *, late: bool = False) -> None:
        owner, clock = self.owner, self.runtime.clock
        if not late and owner.phase is Phase.DRAINING and owner.entry.state == "serving":
            # It drains by itself (J1) and no record says so: whoever hears at once that all is
            # back would write it all again at once.
            again = partial(self._answer_flush, source, id, late=True)
            clock.call_at(clock.now() + SELF_DRAIN_S, again)
        elif not late or self.runtime.guard():
            self.runtime.answer(source, Flushed(*self.shard, id, owner.entry, owner.released))

    def _answer(self, mail: Mail, status: Status, body: bytes) -> None:
        if mail.source is not ALARM:
            self.runtime.reply(mail.source, Reply(*self.shard, mail.n, status, body))

    def _wake(self, entity: EntityKey) -> None:
        self.runtime.workers.submit(partial(self._turn, entity))

    # turns

    async def _turn(self, entity: EntityKey) -> None:
        """Start the next message of an entity, if one may start now."""
        if not self.runtime.guard():
            return
        mail = self.owner.start(entity)
        if mail is None:
            return
        box = self.owner.boxes.get(entity)
        if box is not None and box.ready():
            self._wake(entity)
        turn = Turn(self, mail)
        token = current_turn.set(turn)
        try:
            await self._serve(turn, mail)
        finally:
            current_turn.reset(token)
            turn.end()
        self._finished(entity, mail)

    async def _serve(self, turn: Turn, mail: Mail) -> None:
        """Run one message under guard and answer it. Raises only what ends the worker."""
        how = "ok"
        status, body = Status.OK, b""
        try:
            body = await Guarded(self._run(turn, mail), turn)
        except NotStarted as refusal:
            self._answer(mail, *encode_error(refusal.reason))
            return
        except asyncio.CancelledError as error:
            task = asyncio.current_task()
            if self.runtime.fenced or (task and task.cancelling() and not turn.cancel_reason):
                if turn.began:
                    self.note("finish", mail, how="cancelled")
                raise
            if not turn.began:
                # I9: it was `on_start` that was cut short, so the message never ran.
                why = turn.cancel_reason or "it was cancelled"
                late = Unavailable(f"{_name(mail.entity)} did not start ({why})")
                self._answer(mail, *encode_error(late))
                return
            how = "cancelled"
            if not turn.cancel_reason:
                status, body = encode_failure(error)
            elif turn.cancel_reason == "timeout":
                limit = HandlerFailed(f"the handler ran for more than {self.timeout_s(mail):g} s")
                status, body = encode_failure(limit)
            else:
                status, body = encode_error(MaybeExecuted(turn.cancel_reason))
        except (OutcomeUnknown, Fenced) as unknown:
            how = "failed"
            status, body = encode_error(MaybeExecuted(str(unknown)))
        except (KeyboardInterrupt, SystemExit, GeneratorExit, Abandoned):
            raise
        except BaseException as error:
            # Whatever else it raised: the worker lives on, or this entity would stay busy for good.
            status, body = encode_failure(error)
            how = "rejected" if status is Status.REJECTED else "failed"
            if how == "failed":
                self.runtime.meter.count("handler.failed")
                log.warning(
                    "%s failed on %s", _method(mail), _name(mail.entity), exc_info=error,
                    extra=self.tags(mail.epoch),
                )  # fmt: skip
        if len(body) > self.runtime.settings.message_bytes:
            most = self.runtime.settings.message_bytes
            status, body = encode_failure(
                HandlerFailed(f"the reply has {len(body):,} bytes; the limit is {most:,}")
            )
        self.note("finish", mail, how=how)
        if status is not Status.OK or _is_ask(mail):
            self._answer(mail, status, body)

    async def _run(self, turn: Turn, mail: Mail) -> bytes:
        """Everything between a started message and its encoded reply."""
        load = mail.load
        cell = await self._started_cell(mail)
        entity = cell.entity
        assert entity is not None
        if isinstance(load, Alarm):
            self._begin(turn, mail)
            await load.method(*load.args, **load.kwargs)
            return b""
        request: Request = load.request
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
        except NotExecuted as unfit:
            raise NotStarted(unfit) from unfit
        except Exception as error:
            raise NotStarted(NotExecuted(f"the arguments do not fit: {error}")) from error

        async def call() -> bytes:
            value = await handler.fn(entity, *args, **kwargs)
            return handler.encode_reply(value) if request.ask else b""

        self._begin(turn, mail)
        if request.key:
            return await entity.__domicile_keyed__(request.key, call)  # type: ignore[attr-defined, no-any-return]
        return await call()

    async def _started_cell(self, mail: Mail) -> Cell:
        key = mail.entity
        now = self.runtime.clock.now()
        if isinstance(mail.load, Incoming) and now >= mail.load.expires_at:
            raise NotStarted(Unavailable(f"its time ran out before {_name(key)} could start it"))
        cell = self.cells.get(key)
        if cell is None:
            kind = self.runtime.catalogue.get(key.type)
            if kind is None:
                raise NotStarted(
                    Unavailable(
                        f"node {self.runtime.node_id} is home to {_name(key)} but does not know "
                        f"that type; start it with entities=[...] listing it"
                    )
                )
            until, _ = self._backoff.get(key, (0.0, 0.0))
            if now < until:
                raise NotStarted(Unavailable(f"{_name(key)} failed to start; next try soon"))
            if self._marks.due(self.owner.entry.strikes, self.owner.epoch):
                if not await self._marks.make(self.owner.epoch):
                    raise NotStarted(
                        Unavailable(
                            f"{_name(key)} can't start: owners of its shard died, and the store "
                            "did not take the note that it starts again; try again"
                        )
                    )
                # Another message may have made it meanwhile.
                cell = self.cells.get(key)
            if cell is None:
                cell = self.cells[key] = Cell(self, key, kind, self.owner.epoch)
        if not cell.started:
            await self._start(cell)
        return cell

    async def _start(self, cell: Cell) -> None:
        if cell.starting is not None:
            waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            cell.starting.append(waiter)
            await waiter
            if not cell.started:
                raise NotStarted(Unavailable(f"{_name(cell.key)} failed to start"))
            return
        cell.starting = []
        try:
            cell.entity = make(cell.kind, cell)
            if cell.kind.cls.on_start is not Entity.on_start:
                await cell.entity.on_start()
            cell.started = True
            self._backoff.pop(cell.key, None)
        except (asyncio.CancelledError, KeyboardInterrupt, SystemExit, GeneratorExit):
            raise
        except BaseException as error:
            _, delay_s = self._backoff.get(cell.key, (0.0, FIRST_BACKOFF_S / 2))
            delay_s = min(delay_s * 2, MAX_BACKOFF_S)
            self._backoff[cell.key] = (self.runtime.clock.now() + delay_s, delay_s)
            self.runtime.meter.count("entity.start_failed")
            log.warning("%s failed to start", _name(cell.key), exc_info=error, extra=self.tags())
            raise NotStarted(
                Unavailable(f"{_name(cell.key)} failed to start: {type(error).__name__}: {error}")
            ) from error
        finally:
            waiters, cell.starting = cell.starting, None
            for other in waiters:
                if not other.done():
                    other.set_result(None)
            if not cell.started and self.cells.get(cell.key) is cell:
                del self.cells[cell.key]

    def _begin(self, turn: Turn, mail: Mail) -> None:
        """The message starts now, in the eyes of its sender and of every invariant."""
        turn.began = True
        self.note("start", mail, method=_method(mail), shared=mail.shared)
        if mail.source is not ALARM:
            self.runtime.begun(mail.source, self.shard, mail.n)

    def _finished(self, entity: EntityKey, mail: Mail) -> None:
        cell = self.cells.get(entity)
        if cell is not None:
            cell.used_at = self.runtime.clock.now()
        more = self.owner.finish(entity, mail.shared)
        if cell is not None and cell.wants_stop and self._stop(cell):
            return
        if more:
            self._wake(entity)
        elif self.owner.phase is Phase.DRAINING:
            self.settle()

    # stops

    def settle(self) -> None:
        """Draining: once nothing waits or runs, stop what is resident; then it is over (H10)."""
        if self.owner.phase is not Phase.DRAINING or self.owner.boxes or self._settling:
            return
        self._settling = True
        for cell in list(self.cells.values()):
            self._stop(cell)
        self._settling = False
        if not self.owner.boxes and not self.cells and not self._stopping:
            self._carry_out(self.owner.happen(OwnerEvent.EMPTY))

    def _stop(self, cell: Cell) -> bool:
        """Stop an entity that runs nothing; False if something runs in it."""
        if not self.owner.hold(cell.key):
            return False
        cell.wants_stop = False
        cell.silence()
        if cell.kind.cls.on_stop is Entity.on_stop:
            self._stopped(cell)
        else:
            self._stopping += 1
            self.runtime.workers.submit(partial(self._run_stop, cell))
        return True

    async def _run_stop(self, cell: Cell) -> None:
        mail = Mail(ALARM, 0, cell.key, cell.epoch, 0, False, False, Alarm(_nothing, (), {}))
        turn = Turn(self, mail)
        token = current_turn.set(turn)
        try:
            if self.runtime.guard() and cell.entity is not None:
                await Guarded(cell.entity.on_stop(), turn)
                self.note("stopped", mail)
        except asyncio.CancelledError:
            if turn.task is None or not turn.cancel_reason:
                raise
            log.warning(
                "on_stop of %s was cut short: %s", _name(cell.key), turn.cancel_reason,
                extra=self.tags(),
            )  # fmt: skip
        except (KeyboardInterrupt, SystemExit, GeneratorExit, Abandoned):
            raise
        except BaseException as error:
            self.runtime.meter.count("entity.stop_failed")
            log.warning("on_stop of %s failed", _name(cell.key), exc_info=error, extra=self.tags())
        finally:
            current_turn.reset(token)
            turn.end()
        self._stopping -= 1
        self._stopped(cell)

    def _stopped(self, cell: Cell) -> None:
        if self.cells.get(cell.key) is cell:
            del self.cells[cell.key]
        if self.owner.finish(cell.key, False):
            self._wake(cell.key)
        elif self.owner.phase is Phase.DRAINING and not self.owner.boxes:
            self.settle()

    def restart(self, cell: Cell) -> None:
        """Forget an entity's memory at once: its durable state is in doubt (J4)."""
        cell.silence()
        if self.cells.get(cell.key) is cell:
            del self.cells[cell.key]

    def _overdue(self) -> None:
        """H10: a balancing move asks for its revert; a leaving node cancels."""
        runtime = self.runtime
        self._drain = None
        if self.owner.phase is not Phase.DRAINING or not runtime.guard():
            return
        # The phase stays, and with it the drain that has begun: what the table asks for is here.
        self.owner.happen(OwnerEvent.OVERDUE)
        runtime.meter.count("drain.overdue")
        if runtime.leaving:
            runtime.cancel_turns(self.shard, "its node is leaving and the drain deadline passed")
        else:
            runtime.tell_leader(AskRevert(*self.shard, self.owner.epoch))
            clock = runtime.clock
            self._drain = clock.call_at(clock.now() + 1.0, self._overdue)

    # small things

    def timeout_s(self, mail: Mail) -> float:
        """How long this message's handler may run."""
        settings = self.runtime.settings
        if mail.n == 0:
            return settings.stop_timeout_s
        kind: EntityType | None = self.runtime.catalogue.get(mail.entity.type)
        if kind is not None and isinstance(mail.load, Incoming):
            handler = kind.handlers.get(mail.load.request.method)
            if handler is not None and handler.timeout_s is not None:
                return handler.timeout_s
        return settings.handler_timeout_s

    def tags(self, epoch: int | None = None) -> dict[str, object]:
        """What every log record about this shard carries."""
        shard = f"{self.shard.role}/{self.shard.shard}"
        epoch = self.owner.epoch if epoch is None else epoch
        return {"node": self.runtime.node_id, "shard": shard, "epoch": epoch}

    def note(self, kind: str, mail: Mail, **more: Any) -> None:
        """A history event about one message."""
        if self.runtime.tracing:
            self.runtime.meter.event(
                kind, inc=self.runtime.me, role=self.shard.role, shard=self.shard.shard,
                epoch=mail.epoch, sender=mail.source.sender, n=mail.n,
                type=mail.entity.type, id=mail.entity.id, **more,
            )  # fmt: skip

    def _forget_cells(self) -> None:
        for cell in self.cells.values():
            cell.silence()
        self.cells.clear()
        self._backoff.clear()

    def _disarm(self) -> None:
        if self._drain is not None:
            self._drain.cancel()
            self._drain = None


async def _nothing() -> None:
    """An alarm's method that does nothing."""


def _is_ask(mail: Mail) -> bool:
    return isinstance(mail.load, Incoming) and mail.load.request.ask


def _method(mail: Mail) -> str:
    if isinstance(mail.load, Incoming):
        return mail.load.request.method
    return getattr(mail.load.method, "__name__", "?")


def _name(key: EntityKey) -> str:
    return f"{key.type} {key.id!r}"
