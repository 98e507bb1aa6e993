"""What this node has on trial: runs of entities in shards that lost owners (DX-20, DX-24).

One object per runtime; shard hosts call it before such a handler runs. The node has one record of
its trials in the store. It names what runs on trial now, as exactly as one commit's delay allows:
a handler runs only when the record names it, and its name leaves the record when it has ended.
Changes that come during one commit share the next one, so a takeover of many shards costs a few.
If the node dies, the record tells the leader what to blame. What an entity leaves behind, for
example a task or a thread, is not blamed once its handler has ended: another handler may run then.

A name says how its handler runs. An entity that may be put away is tried *alone*: it waits for its
place until the one before it has ended or is no longer new. While entities wait for long, there
are more places. Then the record names several, and none of them is put away. A handler that has
run for a while is *long*: it may be innocent and still run at every crash, so it says less. Beyond
`MOST_ENTITIES` the record names shards only.

First runs are always on trial, later ones only in a shard that lost several owners. A later run is
long from its beginning. If its entity may be put away, it *rests*: such runs of one shard wait for
each other, and in between the record does not name them for most of the time. So a crash that is
not their doing seldom finds one in the record.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Iterable
from functools import partial

from msgspec.structs import replace

from domicile.concurrency.task_set import TaskSet
from domicile.core.ids import EntityKey, ShardKey
from domicile.core.state.records import OnTrial, TrialRecord
from domicile.ports.clock import Clock, Timer

NEW_S = 0.25
"""Seconds for which a running handler is new. Then it gives its place to the next entity."""
GROW_S = 1.0
"""Seconds of waiting after which there are twice as many places."""
RETRY_S = 0.25
"""Seconds after which a record is stored again that the store did not take."""
MOST_PLACES = 64
MOST_ENTITIES = 64
"""I6: entities in the record, those that are tried alone aside. Others are named by their shard."""
MOST_NAMED = 1_024
"""I6: shards and entities in the record. Handlers beyond that are not named, and not blamed."""
MOST_ID_BYTES = 256
"""An entity with a longer id is named without it; then its whole shard is to blame."""

REST = 4
"""A run that rests is followed by a pause that is so many times as long as the run was named."""
LEAST_REST_S = 0.02
"""Seconds between two such runs at least: the name has to leave the record."""

NEVER = float("inf")


class Trial:
    """One handler that runs on trial, and its name in the record; None: it has none."""

    __slots__ = ("lane", "name", "new_until")

    def __init__(self, name: OnTrial | None, lane: _Lane | None = None) -> None:
        self.name = name
        self.lane = lane
        self.new_until = NEVER


class _Lane:
    """What one shard's runs that rest take turns in."""

    __slots__ = ("free_at", "since", "turn")

    def __init__(self) -> None:
        self.turn = asyncio.Lock()
        self.since = self.free_at = 0.0
        """When the present run began to be named, and when the next may."""

    def is_used(self, now: float) -> bool:
        """Whether a run holds it, or the rest after one is not over."""
        return self.turn.locked() or now < self.free_at

    def leave(self, now: float) -> None:
        """The run has ended, or is no longer new."""
        self.free_at = now + max(LEAST_REST_S, REST * (now - self.since))
        self.turn.release()


class Trials:
    """The trials of one node. `store` writes a record and returns True once it is stored."""

    def __init__(self, clock: Clock, store: Callable[[TrialRecord], Awaitable[bool]]) -> None:
        self._clock, self._store = clock, store
        self._open: dict[OnTrial, int] = {}
        """The names that the record should have, and how many handlers run under each."""
        self._entities = 0
        """How many of them name an entity."""
        self._places: dict[OnTrial, None] = {}
        """Those that are tried alone."""
        self._new: dict[Trial, None] = {}
        """Named entities whose handlers run and are new, the oldest first."""
        self._stored: dict[OnTrial, None] = {}
        """Names that are in the store, whatever the outcome of the commit under way is."""
        self._unsure = False
        """Whether the store may hold other names as well, because a commit did not succeed."""
        self._writer: asyncio.Task[None] | None = None
        self._idle: asyncio.Future[None] | None = None
        """What the writer waits for while the record is as it should be."""
        self._retry_at = NEVER
        self._unnamed: list[tuple[OnTrial, asyncio.Future[None]]] = []
        """Handlers that wait until the store names them."""
        self._waiting: deque[tuple[OnTrial, asyncio.Future[Trial]]] = deque()
        """Entities that wait for a place."""
        self._waiting_since = 0.0
        self._lanes: dict[ShardKey, _Lane] = {}
        self._tasks: TaskSet[None] = TaskSet("domicile-trials")
        self._timer: Timer | None = None
        self._armed_at = NEVER
        self._closed = False

    async def begin(
        self, shard: ShardKey, epoch: int, entity: EntityKey, alone: bool
    ) -> Trial | None:
        """A handler of an entity runs for the first time; `alone` if the entity may be put away.

        Returns once the store names it, None if the store did not take that. A trial must be given
        back to `end` when the handler has ended.
        """
        name = OnTrial(*shard, epoch, *named_as(entity), "alone" if alone else "")
        if alone and name not in self._open:
            trial = await self._place(name)
        else:
            trial = self._entered(name if alone else self._fitting(name))
        return await self._named(trial)

    async def begin_again(
        self, shard: ShardKey, epoch: int, entity: EntityKey, rests: bool, until: float
    ) -> Trial | None:
        """As `begin`, for a handler that has run well before. One that has to rest and comes too
        late for its caller is not named."""
        name = OnTrial(*shard, epoch, *named_as(entity), "long")
        if not rests:
            return await self._named(self._entered(self._fitting(name)))
        lane = self._lane(shard)
        await lane.turn.acquire()
        try:
            await self._sleep_until(min(lane.free_at, until))
        except asyncio.CancelledError:
            lane.turn.release()
            raise
        if self._clock.now() >= until:
            lane.turn.release()
            return Trial(None)
        lane.since = self._clock.now()
        trial = self._entered(name)
        trial.lane = lane
        return await self._named(trial)

    async def _named(self, trial: Trial) -> Trial | None:
        if trial.name is None:
            return trial
        stored = False
        try:
            stored = await self._is_named(trial.name)
        finally:
            if not stored:
                self.end(trial)
        if not stored:
            return None
        if trial.lane is not None or (trial.name.type and trial.name.manner != "long"):
            trial.new_until = self._clock.now() + NEW_S
            self._new[trial] = None
            self._arm()
        return trial

    def end(self, trial: Trial) -> None:
        """The handler of a trial ended, or never began. Its name leaves the record."""
        self._new.pop(trial, None)
        self._leave_lane(trial)
        if trial.name is not None:
            self._leave(trial.name)
            trial.name = None
            self._admit()
            self._update()

    async def close(self) -> None:
        """End what is under way. The leader deletes the record when this node is gone."""
        self._closed = True
        if self._timer is not None:
            self._timer.cancel()
        await self._tasks.close()
        _wake(self._unnamed)

    # names

    def _fitting(self, name: OnTrial) -> OnTrial | None:
        """The name under which a handler runs, if there is room for one."""
        if name not in self._open and self._entities >= MOST_ENTITIES:
            name = OnTrial(name.role, name.shard, name.epoch)
        return name if name in self._open or len(self._open) < MOST_NAMED else None

    def _entered(self, name: OnTrial | None) -> Trial:
        if name is not None:
            self._enter(name)
        return Trial(name)

    def _enter(self, name: OnTrial) -> None:
        known = self._open.get(name, 0)
        self._open[name] = known + 1
        if name.manner == "alone":
            self._places[name] = None
        if not known and name.type:
            self._entities += 1

    def _leave(self, name: OnTrial) -> None:
        left = self._open[name] - 1
        if left:
            self._open[name] = left
            return
        del self._open[name]
        self._places.pop(name, None)
        if name.type:
            self._entities -= 1

    # places

    async def _place(self, name: OnTrial) -> Trial:
        """Wait until an entity may be tried alone."""
        waiter: asyncio.Future[Trial] = asyncio.get_running_loop().create_future()
        if not self._waiting:
            self._waiting_since = self._clock.now()
        self._waiting.append((name, waiter))
        self._admit()
        self._arm()
        try:
            return await waiter
        except asyncio.CancelledError:
            if waiter.done() and not waiter.cancelled():
                self.end(waiter.result())
            raise

    def _admit(self) -> None:
        """Give places to waiting entities, in order."""
        while self._waiting:
            name, waiter = self._waiting[0]
            if not waiter.done():
                if name not in self._open and len(self._places) >= self._room():
                    return
                waiter.set_result(self._entered(name))
            self._waiting.popleft()

    def _room(self) -> int:
        return int(min(MOST_PLACES, 1 << min(self._doublings(), MOST_PLACES)))

    def _doublings(self) -> int:
        return int((self._clock.now() - self._waiting_since) / GROW_S)

    # lanes

    def _lane(self, shard: ShardKey) -> _Lane:
        lane = self._lanes.get(shard)
        if lane is None:
            now = self._clock.now()
            used = {of: one for of, one in self._lanes.items() if one.is_used(now)}
            self._lanes = used
            lane = used[shard] = _Lane()
        return lane

    def _leave_lane(self, trial: Trial) -> None:
        lane, trial.lane = trial.lane, None
        if lane is not None:
            lane.leave(self._clock.now())

    async def _sleep_until(self, at: float) -> None:
        if self._clock.now() >= at:
            return
        over: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        timer = self._clock.call_at(at, partial(_end_sleep, over))
        try:
            await over
        finally:
            timer.cancel()

    # the record

    async def _is_named(self, name: OnTrial) -> bool:
        """Have a name stored. The commit under way may have begun before the name was open."""
        if name not in self._stored and not self._closed:
            if self._writer is None or self._writer.done():
                self._writer = self._tasks.spawn(self._write())
            waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._unnamed.append((name, waiter))
            self._update()
            await waiter
        return name in self._stored

    def _is_behind(self) -> bool:
        return self._unsure or self._stored.keys() != self._open.keys()

    def _update(self) -> None:
        """The record may have to change. A coroutine that is closed may call this at any time, even
        outside of the node's event loop, so nothing begins here."""
        if self._idle is not None and not self._idle.done():
            self._idle.set_result(None)

    def _is_due(self) -> bool:
        return bool(self._unnamed) or (self._retry_at == NEVER and self._is_behind())

    async def _write(self) -> None:
        """Commit the record whenever it is not as it should be, one commit at a time."""
        try:
            while True:
                while not self._is_due():
                    self._idle = asyncio.get_running_loop().create_future()
                    await self._idle
                await self._write_once()
        finally:
            self._idle = None
            _wake(self._unnamed)

    async def _write_once(self) -> None:
        waiters, self._unnamed, self._retry_at = self._unnamed, [], NEVER
        names = dict.fromkeys(self._open)
        self._stored = {name: None for name in self._stored if name in names}
        self._unsure = True
        try:
            if await self._store(TrialRecord(tuple(names))):
                self._stored, self._unsure = names, False
        finally:
            _wake(waiters)
        later = self._unnamed
        self._unnamed = [one for one in later if one[0] not in self._stored]
        _wake(one for one in later if one[0] in self._stored)
        if self._unsure:
            self._retry_at = self._clock.now() + RETRY_S
            self._arm()

    # time

    def _arm(self) -> None:
        """Look again when the next handler is no longer new, places grow, or a retry is due."""
        if self._closed:
            return
        at = self._retry_at
        for trial in self._new:
            at = min(at, trial.new_until)
            break
        if self._waiting:
            at = min(at, self._waiting_since + (self._doublings() + 1) * GROW_S)
        if at < self._armed_at:
            if self._timer is not None:
                self._timer.cancel()
            self._armed_at, self._timer = at, self._clock.call_at(at, self._look)

    def _look(self) -> None:
        self._timer, self._armed_at = None, NEVER
        now = self._clock.now()
        if now >= self._retry_at:
            self._retry_at = NEVER
        for trial in [one for one in self._new if now >= one.new_until]:
            del self._new[trial]
            self._leave_lane(trial)
            if trial.name is not None and trial.name.manner != "long":
                self._leave(trial.name)
                trial.name = replace(trial.name, manner="long")
                self._enter(trial.name)
        self._admit()
        self._update()
        self._arm()


def _end_sleep(over: asyncio.Future[None]) -> None:
    if not over.done():
        over.set_result(None)


def _wake(waiters: Iterable[tuple[OnTrial, asyncio.Future[None]]]) -> None:
    for _, waiter in waiters:
        if not waiter.done():
            waiter.set_result(None)


def named_as(entity: EntityKey) -> EntityKey:
    """An entity as the record names it."""
    try:
        fits = len(entity.id.encode()) <= MOST_ID_BYTES
    except UnicodeEncodeError:
        fits = False
    return entity if fits else EntityKey(entity.type, "")
