"""How an entity becomes resident: its cell, its object, `on_start`, and what follows a failure.

The base of `Execution`. An entity starts for a message or a timer, never by itself. If owners of
its shard died, the store names it as on trial first (DX-20, I3). An entity that is put away
does not start.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any

from domicile.concurrency.single_flight import SingleFlight
from domicile.core.handoff.owner import Owner
from domicile.core.ids import EntityKey, ShardKey
from domicile.core.placement.suspicion import (
    always_on_trial,
    on_the_brink,
    rests_between_runs,
)
from domicile.entity.hosting.cell import Cell, Incoming, Turn
from domicile.entity.hosting.trials import Trial, named_as
from domicile.entity.model.entity import Entity, make
from domicile.entity.running.exits import exit_hint, is_ctrl_c
from domicile.errors import NotExecuted, Unavailable
from domicile.taglog import TaggedLog

if TYPE_CHECKING:
    from domicile.entity.hosting.shard_host import ShardHost
    from domicile.entity.runtime import Runtime

log = TaggedLog()

FIRST_BACKOFF_S = 0.1
MAX_BACKOFF_S = 10.0


class NotStarted(Exception):
    """The message did not reach its handler; `reason` is for the caller."""

    def __init__(self, reason: NotExecuted) -> None:
        super().__init__(str(reason))
        self.reason = reason


class Activation(ABC):
    """The residents of one shard."""

    _host: ShardHost
    """This object, as its cells and turns refer to it."""

    def __init__(self, runtime: Runtime, shard: ShardKey) -> None:
        self.runtime = runtime
        self.shard = shard
        self.owner: Owner[Incoming] = Owner(
            shard, runtime.me, runtime.settings.mailbox, runtime.admission
        )
        self.cells: dict[EntityKey, Cell] = {}
        self._backoff: dict[EntityKey, tuple[float, float]] = {}

    @abstractmethod
    def tags(self, epoch: int | None = None) -> dict[str, object]:
        """The tags of every log record about this shard."""

    @abstractmethod
    def note(self, kind: str, what: Turn, **more: Any) -> None:
        """A history event about one message."""

    async def _started_cell(self, turn: Turn, waking: bool) -> Cell:
        key = turn.entity
        now = self.runtime.clock.now()
        if now >= turn.expires_at:
            raise NotStarted(Unavailable(f"its time ran out before {name_of(key)} could start it"))
        cell = self.cells.get(key)
        if not waking and (cell is None or not cell.started):
            self.note("waking", turn)
        if cell is None:
            kind = self.runtime.catalogue.get(key.type)
            if kind is None:
                raise NotStarted(
                    Unavailable(
                        f"{name_of(key)} did not run: node {self.runtime.node_id} is its home but "
                        "lacks that type, and no other node can take the shard that has all types "
                        "which the shard needs; start nodes with entities=[...] listing the type"
                    )
                )
            until, _ = self._backoff.get(key, (0.0, 0.0))
            if now < until:
                raise NotStarted(Unavailable(f"{name_of(key)} failed to start; next try soon"))
            self._check_barred(key)
            cell = self.cells[key] = Cell(self._host, key, kind, self.owner.epoch)
            cell.gate = kind.cls.__domicile_gate__(cell)
            if self.owner.entry.deaths:
                cell.tried, cell.direct = {}, {}
        if not cell.started:
            await self._start(cell)
        return cell

    async def _begin_trial(self, turn: Turn) -> Trial | None:
        """DX-20: if the entity, or this handler of it, runs for the first time at this owner, have
        the store name it as on trial. In a shard that lost several owners, each time it runs."""
        key, entry, cell = turn.entity, self.owner.entry, self.cells.get(turn.entity)
        most, again = self.runtime.settings.poison_deaths, False
        if cell is None:
            self._check_barred(key)
        elif cell.tried is None:
            return None
        elif turn.request.method in cell.tried:
            if not always_on_trial(entry, most):
                return None
            again = True
        # H9: the message has left its mailbox, so it is no longer returned if its shard drains.
        self.note("waking", turn)
        trials, epoch, named = self.runtime.trials, self.owner.epoch, named_as(key)
        if again:
            rests = rests_between_runs(entry, named, most)
            trial = await trials.begin_again(self.shard, epoch, key, rests, turn.expires_at)
        else:
            trial = await trials.begin(self.shard, epoch, key, on_the_brink(entry, named, most))
        if trial is None:
            raise NotStarted(
                Unavailable(
                    f"{name_of(key)} did not run: owners of its shard died, and the store did not "
                    "take the note that it runs again; try again"
                )
            )
        return trial

    def _check_barred(self, key: EntityKey) -> None:
        if key in self.owner.entry.barred:
            shard = f"{self.shard.role}/{self.shard.shard}"
            raise NotStarted(
                Unavailable(
                    f"{name_of(key)} is quarantined: the last owners of its shard {shard} died "
                    "while it ran; it is tried again by itself. See what it does, then run "
                    f"`domicile unquarantine {shard}`"
                )
            )

    async def _start(self, cell: Cell) -> None:
        flight = cell.starting
        if flight is None:
            flight = cell.starting = SingleFlight()
        landing = flight.join()
        if landing is not None:
            await landing
            if not cell.started:
                raise NotStarted(Unavailable(f"{name_of(cell.key)} failed to start"))
            return
        carrier = self.runtime.carrier
        try:
            cell.entity = carrier.make(self.shard, cell.key, cell.kind, cell)
            if cell.kind.cls.on_start is not Entity.on_start:
                await cell.entity.on_start()
            if cell.gate is not None:
                # What `on_start` stored is its own, not part of the message that woke the entity.
                cell.gate.end(b"")
            cell.started = True
            self._backoff.pop(cell.key, None)
            if self.cells.get(cell.key) is cell:
                carrier.started(self.shard, cell.key)
                self._host.timers.started(cell)
                self.runtime.residents.arrived(cell, self.runtime.clock.now())
        except (asyncio.CancelledError, GeneratorExit):
            # The caller knows whether the coroutine was closed or the hook raised this.
            raise
        except BaseException as error:
            if is_ctrl_c(error):
                raise
            raise NotStarted(self._not_started(cell.key, error)) from error
        finally:
            cell.starting = None
            flight.land()
            if not cell.started:
                if cell.gate is not None:
                    cell.gate.abort()
                if self.cells.get(cell.key) is cell:
                    del self.cells[cell.key]
                    cell.resident = False
                    cell.silence()

    def _not_started(self, key: EntityKey, error: BaseException) -> Unavailable:
        """Note that an entity failed to start, so that it is not tried again at once."""
        _, delay_s = self._backoff.get(key, (0.0, FIRST_BACKOFF_S / 2))
        delay_s = min(delay_s * 2, MAX_BACKOFF_S)
        self._backoff[key] = (self.runtime.clock.now() + delay_s, delay_s)
        self.runtime.meter.count("entity.start_failed")
        where = name_of(key)
        log.warning(
            "%s failed to start%s", where, exit_hint(error), exc_info=error, extra=self.tags()
        )
        return Unavailable(f"{where} failed to start: {type(error).__name__}: {error}")

    def _start_now(self, key: EntityKey, now: float) -> Cell | None:
        """A new cell if its start is only making the object; otherwise None, and `_start` must do
        it."""
        kind = self.runtime.catalogue.get(key.type)
        if (
            kind is None
            or key in self.cells
            or kind.cls.on_start is not Entity.on_start
            or kind.fields is not None
            or key in self._backoff
            or self.owner.entry.deaths
            or self.owner.entry.barred
        ):
            return None
        cell = Cell(self._host, key, kind, self.owner.epoch)
        cell.gate = kind.cls.__domicile_gate__(cell)
        try:
            cell.entity = make(kind, cell)
        except BaseException as error:
            if is_ctrl_c(error):
                raise
            # `_start` makes it again, where failures to start are handled.
            cell.silence()
            return None
        cell.started = True
        self.cells[key] = cell
        self._host.timers.started(cell)
        self.runtime.residents.arrived(cell, now)
        return cell


def name_of(key: EntityKey) -> str:
    """An entity's name in log and error texts."""
    return f"{key.type} {key.id!r}"
