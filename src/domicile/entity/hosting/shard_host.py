"""The host of one shard: carries out what `core.handoff.owner` decides and runs its entities.

Called by the runtime only. It starts the messages that the owner machine lets start, answers, stops
entities when the shard drains, and reports when nothing is left. It decides nothing about order or
phases. If residents are limited, the runtime makes a `LimitedHost`; so without a limit no message
pays for one.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterable, Iterator, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

from domicile.core.coordinator.departures import unfinished
from domicile.core.handoff.mailbox import Queued
from domicile.core.handoff.owner import (
    Accepted,
    AnswerFlush,
    CancelledMessages,
    Discard,
    FlushAsked,
    OwnerEffect,
    PhaseChanged,
    ReadRecord,
    Refuse,
    SendBack,
    Wake,
    cancel_unstarted,
)
from domicile.core.handoff.tables import DROPS, OwnerAction, OwnerEvent, Phase
from domicile.core.ids import EntityKey, LinkKey, ShardKey
from domicile.core.state.shardmap import Entry
from domicile.core.wire import Flush, Flushed, Return
from domicile.entity.hosting.activation import NotStarted, name_of
from domicile.entity.hosting.cell import Alarm, Cell, Incoming, Turn, current_turn
from domicile.entity.hosting.execution import ALARM, Execution
from domicile.entity.hosting.residents import StopReason
from domicile.entity.hosting.timers import RETRY_S, ShardTimers
from domicile.entity.model.codec import encode_error
from domicile.entity.model.entity import Entity
from domicile.entity.running.exits import exit_hint, is_ctrl_c
from domicile.entity.running.workers import Abandoned, Guarded
from domicile.errors import NotExecuted, Overloaded
from domicile.ports.clock import Timer
from domicile.taglog import TaggedLog

if TYPE_CHECKING:
    from domicile.entity.runtime import Runtime

log = TaggedLog()

SELF_DRAIN_S = 0.25


class ShardHost(Execution):
    """One shard at this node, whether the node is its home now or not."""

    def __init__(self, runtime: Runtime, shard: ShardKey) -> None:
        super().__init__(runtime, shard)
        self._host = self
        self.timers = ShardTimers(self)
        self._alarms = 0
        self._floor = 0
        self.open_writes = 0
        """Writes of its entities that the journal has not answered: the shard stays until it has
        (J5)."""
        self._stopping = 0
        self._hooks = 0
        self._settling = False
        self._drain: Timer | None = None

    # what the runtime reports

    def flush(self, source: LinkKey, flush: Flush) -> None:
        """A sender asks for its messages that have not started."""
        self._carry_out(self.owner.flush(FlushAsked(source, flush.id)))
        self.settle()

    def call_off(self, wanted: CancelledMessages) -> None:
        """Callers no longer wait: their messages that have not started are removed."""
        # No caller reads these answers, but they free the messages' places in the senders' windows.
        count = self.refuse(wanted, NotExecuted("its caller no longer waits"))
        if count:
            self.runtime.meter.count("request.called_off", count)
        self.settle()

    def refuse(self, wanted: CancelledMessages, why: NotExecuted) -> int:
        """Remove messages that have not started, and answer them; returns their number."""
        messages, ready = cancel_unstarted(self.owner, wanted)
        for queued in messages:
            self.note("dropped", queued, why=str(why))
            self._answer(queued, *encode_error(why))
        for entity in ready:
            self._wake(entity)
        return len(messages)

    def look_again(self, entities: Iterable[EntityKey]) -> None:
        """Whether messages of these entities wait for another node may have changed (DX-26)."""
        for entity in entities:
            self._wake(entity)

    def see(self, entry: Entry) -> None:
        """A newer map entry."""
        self._carry_out(self.owner.see(entry))
        self.runtime.unreleased.note(self.shard, self.owner)

    def outrun(self, epoch: int) -> None:
        """J1, J2: a journal has seen a newer claim than this home's, so the shard needs a newer
        epoch."""
        self._floor = max(epoch, self._floor)
        self._happen(OwnerEvent.OUTRUN)

    def link_gone(self, source: LinkKey) -> None:
        """An incoming link's state was dropped."""
        self.owner.link_gone(source)

    def fence(self) -> None:
        """The lease is lost: start and answer nothing; the runtime cancels what runs (L4)."""
        self.timers.lose_all("its node lost its lease")
        self.owner.happen(OwnerEvent.FENCED)
        self.runtime.unreleased.note(self.shard, self.owner)
        self._forget_cells("its node lost its lease")
        self._disarm()

    def ring(
        self,
        key: EntityKey,
        fn: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
    ) -> None:
        """A timer is due: run its method as a message. A shard that moves takes it along."""
        self._alarms += 1
        alarm = Alarm(-self._alarms, self.owner.epoch, fn, args, kwargs)
        queued = Incoming(ALARM, alarm.n, key, alarm.epoch, 0, False, False, request=alarm)
        if self.owner.timer(queued):
            self._wake(key)
        else:
            self.timers.put_back(key, alarm, self.runtime.clock.now())

    def _not_begun(self, turn: Turn, alarm: Alarm) -> None:
        # If the entity failed to start, its timer starts it when that may be tried again.
        until, _ = self._backoff.get(turn.entity, (0.0, 0.0))
        self.timers.put_back(turn.entity, alarm, max(until, self.runtime.clock.now() + RETRY_S))

    def passivate(self, cell: Cell, why: StopReason) -> bool:
        """Stop an entity that runs nothing and has no messages, unless its shard is moving anyway.

        Never call it within a handler: that handler's entity may not be marked as busy.
        """
        if self.owner.phase is not Phase.OPEN or cell.key in self.owner.mailboxes:
            return False
        return self._stop(cell, why)

    def wake_up(self, key: EntityKey, over: Callable[[bool], None]) -> None:
        """Start an entity without a message; then call `over` with whether it is resident."""
        if self.owner.phase is not Phase.OPEN or key in self.cells or not self.owner.hold(key):
            over(True)
            return
        self.runtime.workers.submit(lambda worker: worker.start(self._run_wake(key, over)))

    async def _run_wake(self, key: EntityKey, over: Callable[[bool], None]) -> None:
        alarm = Alarm(0, self.owner.epoch, _nothing, (), {})
        turn = Turn(self, ALARM, key, False, alarm, float("inf"))
        started = await self._run_aside(key, turn, partial(self._start_alone, turn), "a start", "")
        if self.owner.finish(key, False):
            self._wake(key)
        else:
            self.settle()
        over(started and key in self.cells)

    async def _start_alone(self, turn: Turn) -> None:
        trial = await self._begin_trial(turn) if self.owner.entry.deaths else None
        try:
            await self._started_cell(turn, waking=True)
        except NotStarted:
            # It is logged, and its next start backs off.
            pass
        finally:
            if trial is not None:
                self.runtime.trials.end(trial)

    def answer_early(self, turn: Turn) -> None:
        """Answer the caller of a cancelled handler that still has to wait for its thread."""
        if turn.began and not turn.answered:
            _, status, body = self._failure(turn, asyncio.CancelledError())
            self._answer(turn, status, body)
            turn.answered = True

    def repeat_released(self) -> None:
        """H10: tell the control plane again, until the record has a newer epoch."""
        owner = self.owner
        entry = owner.entry
        if self.runtime.carrier.handing_over(self.shard):
            return
        if owner.phase is Phase.RELEASED and entry.owner == owner.me and entry.epoch <= owner.epoch:
            self.runtime.control.released(self.shard, owner.epoch, self._floor)
            self.runtime.repeat_soon()

    @property
    def unsettled(self) -> bool:
        """Whether this node must not leave yet because of this shard (H14)."""
        owner, runtime = self.owner, self.runtime
        return unfinished(
            owner.entry, owner.me, owner.phase, owner.epoch,
            handing_over=runtime.carrier.handing_over(self.shard),
            may_place=partial(runtime.control.may_place, self.shard.role),
        )  # fmt: skip

    # effects

    def _happen(self, event: OwnerEvent) -> None:
        self._carry_out(self.owner.happen(event))
        self.runtime.unreleased.note(self.shard, self.owner)

    def _carry_out(self, effects: Iterable[OwnerEffect[Incoming]]) -> None:
        for effect in effects:
            match effect:
                case Wake(entity):
                    self._wake(entity)
                case Accepted(queued, depth):
                    self.note("accept", queued, depth=depth)
                    if queued.request.chain:
                        self.runtime.look_soon()
                case SendBack(source, messages):
                    self._send_back(source, messages)
                case AnswerFlush(source, id):
                    if self.runtime.tracing:
                        role, shard = self.shard
                        self.runtime.meter.event(
                            "flushed", inc=self.runtime.me, role=role, shard=shard,
                            sender=source.sender, id=id,
                        )  # fmt: skip
                    self._answer_flush(source, id)
                case Refuse(queued, by_node):
                    self.runtime.meter.count("mail.refused")
                    if by_node:
                        self._answer(queued, *self.runtime.crowded)
                        continue
                    full = Overloaded(f"the mailbox of {name_of(queued.entity)} is full; slow down")
                    self._answer(queued, *encode_error(full))
                case Discard(messages):
                    for queued in messages:
                        if isinstance(queued.request, Alarm):
                            now = self.runtime.clock.now()
                            self.timers.put_back(queued.entity, queued.request, now)
                            continue
                        self.runtime.meter.count("mail.dropped")
                        self.note("dropped", queued, why="its link is lost")
                case ReadRecord():
                    self.runtime.read_record(self.shard)
                case PhaseChanged():
                    self._phase_changed(effect)

    def _phase_changed(self, change: PhaseChanged) -> None:
        runtime = self.runtime
        if change.does in DROPS:
            runtime.cancel_turns(self.shard, "the shard has a new home")
            self._forget_cells("its shard has a new home")
        if change.does is not OwnerAction.REPEAT_RELEASED:
            log.debug("the shard is %s now", change.phase.value, extra=self.tags(change.epoch))
            runtime.phases_seen[change.phase] += 1
            runtime.meter.event(
                change.phase.value, inc=runtime.me, role=self.shard.role, shard=self.shard.shard,
                epoch=change.epoch,
            )  # fmt: skip
        match change.phase:
            case Phase.OPEN:
                self._disarm()
                if change.does is not OwnerAction.REVERT:
                    runtime.carrier.opened(self.shard, change.epoch, self.timers.book)
                # After a revert, too: some may have stopped already.
                runtime.remembering.opened(self)
                for entity in list(self.owner.mailboxes):
                    self._wake(entity)
                self.timers.arm()
            case Phase.DRAINING:
                clock = runtime.clock
                self._drain = clock.call_at(
                    clock.now() + runtime.settings.drain_deadline_s, self._overdue
                )
                self.settle()
            case Phase.RELEASED:
                self._disarm()
                # What is carried is sent first, then the leader is told of the release (DX-13).
                if change.does is OwnerAction.REPEAT_RELEASED or not runtime.carrier.release(
                    self.shard, change.epoch, self.owner.entry, self.repeat_released,
                    self.timers.book,
                ):  # fmt: skip
                    self.repeat_released()
            case Phase.CLOSED:
                self._disarm()
        if change.phase is not Phase.DRAINING:
            self.timers.tell()

    def _send_back(self, source: LinkKey, messages: tuple[Queued, ...]) -> None:
        for queued in messages:
            self.note("return", queued)
        ns = tuple(queued.n for queued in messages)
        self.runtime.answer(source, Return(*self.shard, ns, self.owner.entry, self.owner.released))

    def _answer_flush(self, source: LinkKey, id: int, *, late: bool = False) -> None:
        owner, clock = self.owner, self.runtime.clock
        if not late and owner.phase is Phase.DRAINING and owner.entry.state == "serving":
            # The shard drains on its own decision (J1), and no record says so. A sender that got
            # `Flushed` at once would write everything again at once.
            again = partial(self._answer_flush, source, id, late=True)
            clock.call_at(clock.now() + SELF_DRAIN_S, again)
        elif not late or self.runtime.guard():
            self.runtime.answer(source, Flushed(*self.shard, id, owner.entry, owner.released))

    # stops

    @property
    def _busy(self) -> bool:
        """Whether a message runs here, or waits here and can start, or the journal has yet to
        answer. A message whose type is unknown can't start."""
        if self.open_writes or self._hooks:
            return True
        mailboxes, catalogue = self.owner.mailboxes, self.runtime.catalogue
        return bool(mailboxes) and any(entity.type in catalogue for entity in mailboxes)

    def settle(self) -> None:
        """Draining: once nothing waits or runs, stop the residents; then the shard is empty
        (H10). Messages for types that this node lacks go back to their senders then (DX-26)."""
        if self.owner.phase is not Phase.DRAINING or self._busy or self._settling:
            return
        self._settling = True
        go_on = partial(self._settle, iter(list(self.cells.values())))
        if not go_on():
            self.runtime.stops.later(go_on)

    def _settle(self, cells: Iterator[Cell]) -> bool:
        """Stop as many as this turn of the event loop allows; True when all are stopped."""
        while self.owner.phase is Phase.DRAINING:
            if not self.runtime.stops.take():
                return False
            cell = next(cells, None)
            if cell is None:
                break
            if cell.resident:
                self._stop(cell, StopReason.MOVES)
        self._settling = False
        if self.owner.phase is Phase.DRAINING and not self._busy and not self._stopping:
            if self.cells:
                # Another message has started them meanwhile.
                self.settle()
            else:
                self._happen(OwnerEvent.EMPTY)
        return True

    def _stop(self, cell: Cell, why: StopReason = StopReason.ASKED) -> bool:
        """Stop an entity that runs nothing; False if something runs in it."""
        plain = cell.kind.cls.on_stop is Entity.on_stop
        if plain and cell.key not in self.owner.mailboxes:
            # The stop ends within this call, so no message has to be kept out.
            self._let_go(cell, why)
            if not self._settling:
                self.settle()
            return True
        if not self.owner.hold(cell.key):
            return False
        cell.wants_stop = False
        if why is StopReason.ASKED:
            self.timers.cancelled(cell)
        if plain:
            self._stopped(cell, why)
        else:
            self._stopping += 1
            self.runtime.workers.submit(lambda worker: worker.start(self._run_stop(cell, why)))
        return True

    async def _run_stop(self, cell: Cell, why: StopReason) -> None:
        alarm = Alarm(0, cell.epoch, _nothing, (), {})
        # What it tells waits for what the entity's last messages stored, too.
        turn = Turn(self, ALARM, cell.key, False, alarm, float("inf"), cell.gate)
        entity = cell.entity
        if entity is not None and await self._run_aside(
            cell.key, turn, partial(self._stop_hook, cell, entity), "on_stop", "entity.stop_failed"
        ):
            self.note("stopped", turn)
        self._stopping -= 1
        self._stopped(cell, why)

    async def _run_aside(
        self,
        key: EntityKey,
        turn: Turn,
        hook: Callable[[], Coroutine[Any, Any, Any]],
        what: str,
        metric: str,
    ) -> bool:
        """Run something of an entity that is no message: nobody waits for its answer. False if it
        did not come to its end, which a metric counts. Raises only what ends the worker."""
        current_turn.set(turn)
        guarded: Guarded | None = None
        try:
            if not self.runtime.guard():
                return False
            guarded = Guarded(hook(), turn)
            await guarded
        except asyncio.CancelledError:
            if self.runtime.fenced or (self.runtime.workers.closed and not turn.cancel_reason):
                raise
            log.warning(
                "%s of %s was cut short: %s", what, name_of(key),
                turn.cancel_reason or "it was cancelled", extra=self.tags(),
            )  # fmt: skip
            return False
        except Abandoned:
            if not turn.dropped or self.runtime.fenced:
                raise
            return False
        except BaseException as error:
            if (guarded is not None and guarded.closed) or is_ctrl_c(error):
                raise
            if metric:
                self.runtime.meter.count(metric)
            log.warning(
                "%s of %s failed%s", what, name_of(key), exit_hint(error), exc_info=error,
                extra=self.tags(),
            )  # fmt: skip
            return False
        finally:
            turn.end()
        return True

    async def _stop_hook(self, cell: Cell, entity: Entity) -> None:
        """Run `on_stop`. What it stores is committed before the entity's fields go along (J5)."""
        gate, stored = cell.gate, False
        try:
            await entity.on_stop()
            stored = True
        finally:
            if gate is not None and not stored:
                gate.abort()
        if gate is not None and gate.end(b""):
            await gate.flush(sends=False)

    def run_hook(self, cell: Cell, hook: Callable[[], Coroutine[Any, Any, Any]]) -> None:
        """Run what waited for a commit, beside the entity's messages and under the same limits."""
        if self.runtime.guard():
            self._hooks += 1
            self.runtime.workers.submit(lambda worker: worker.start(self._run_hook(cell, hook)))

    async def _run_hook(self, cell: Cell, hook: Callable[[], Coroutine[Any, Any, Any]]) -> None:
        alarm = Alarm(-1, cell.epoch, hook, (), {})
        turn = Turn(self, ALARM, cell.key, True, alarm, float("inf"), cell.gate)
        await self._run_aside(cell.key, turn, hook, "an after_commit hook", "handler.failed")
        self._hooks -= 1
        self.settle()

    def _stopped(self, cell: Cell, why: StopReason) -> None:
        if cell.resident:
            self._let_go(cell, why)
            if why is StopReason.MOVES and cell.kind.remember and self.owner.phase is Phase.OPEN:
                # The move was taken back while it stopped.
                self.runtime.remembering.opened(self)
        if self.owner.finish(cell.key, False):
            self._wake(cell.key)
        else:
            self.settle()

    def _let_go(self, cell: Cell, why: StopReason) -> None:
        """The entity has stopped; keep what it takes along."""
        if why is StopReason.ASKED:
            self.timers.cancelled(cell)
        else:
            self.timers.left(cell)
        self._leave(cell)
        if cell.kind.remember and why is not StopReason.MOVES:
            self.runtime.remembering.left(cell)
        fields = cell.kind.fields
        if fields is not None and cell.entity is not None:
            if why is StopReason.MOVES:
                self.runtime.carrier.stopped(self.shard, cell.key, fields, cell.entity)
            elif why is StopReason.EVICTED:
                self.runtime.meter.count("carry.dropped")
        # Refs keep cells, and must not keep the entity object alive.
        cell.entity = None

    def restart(self, cell: Cell) -> None:
        """Forget the entity object at once: its durable state is in doubt (J4)."""
        self.timers.lose_of(cell, "its entity starts again after a failure")
        if self.cells.get(cell.key) is cell:
            self._leave(cell)
            if cell.kind.remember and cell.gate is not None:
                self.runtime.remembering.left(cell)
                # No message may come that would start it again. What it sent may forget it.
                cell.gate.hold(lambda _: self._remember_again())

    def _remember_again(self) -> None:
        if self.owner.phase is Phase.OPEN:
            self.runtime.remembering.opened(self)

    def _leave(self, cell: Cell) -> None:
        """The entity is no longer resident."""
        del self.cells[cell.key]
        cell.resident = False
        if cell.started:
            self.runtime.residents.left(cell)

    def _overdue(self) -> None:
        """H10: the drain deadline passed. A balancing move asks for its revert; a leaving node
        cancels."""
        runtime = self.runtime
        self._drain = None
        if self.owner.phase is not Phase.DRAINING or not runtime.guard():
            return
        # The phase and the drain that has begun stay; the action of the table is carried out here.
        self.owner.happen(OwnerEvent.OVERDUE)
        runtime.meter.count("drain.overdue")
        if runtime.leaving:
            runtime.cancel_turns(self.shard, "its node is leaving and the drain deadline passed")
        else:
            runtime.control.ask_revert(self.shard, self.owner.epoch)
            clock = runtime.clock
            self._drain = clock.call_at(clock.now() + 1.0, self._overdue)

    # small things

    def tags(self, epoch: int | None = None) -> dict[str, object]:
        """What every log record about this shard carries."""
        shard = f"{self.shard.role}/{self.shard.shard}"
        epoch = self.owner.epoch if epoch is None else epoch
        return {"node": self.runtime.node_id, "shard": shard, "epoch": epoch}

    def _forget_cells(self, why: str) -> None:
        self.timers.lose_all(why)
        for cell in list(self.cells.values()):
            self._leave(cell)
        self._backoff.clear()
        self.runtime.carrier.lost(self.shard)

    def _disarm(self) -> None:
        if self._drain is not None:
            self._drain.cancel()
            self._drain = None


async def _nothing() -> None:
    """An alarm's method that does nothing."""


class LimitedHost(ShardHost):
    """As `ShardHost`; every use is reported to the policy that chooses which entity to stop."""

    _limited = True

    def _used(self, cell: Cell, now: float) -> None:
        super()._used(cell, now)
        if self.cells.get(cell.key) is cell:
            self.runtime.residents.touch(cell)
