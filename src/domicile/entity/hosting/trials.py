"""What this node has on trial: entities that start in shards that lost owners (DX-20, DX-24).

One object per runtime; shard hosts call it before such an entity starts. The node has one record of
its trials in the store. Starts and ends that come at the same time share one commit, so a takeover
of many shards costs a few. If the node dies, the record tells the leader which shards to blame.

A shard is named for a second after the latest start in it. A shard on the brink names the entity
instead, and such entities start one at a time: each waits for its place until the handler before it
has ended, or has run for a while. While entities wait for long, there are more places. Then the
record names several, and blames nobody.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable

from domicile.concurrency.single_flight import SingleFlight
from domicile.concurrency.task_set import TaskSet
from domicile.core.ids import EntityKey, ShardKey
from domicile.core.state.records import OnTrial, TrialRecord
from domicile.ports.clock import Clock, Timer

SHARD_S = 1.0
"""Seconds after a start for which its shard is named."""
ENTITY_S = 0.1
"""Seconds after the end of its first handler for which an entity is named, if none waits."""
PLACE_S = 0.25
"""Seconds after which a running handler gives its place to the next entity."""
GROW_S = 1.0
"""Seconds of waiting after which there are twice as many places."""
MOST_PLACES = 64
MOST_NAMED = 1_024
"""I6: shards and entities in the record. Starts beyond that are not named, and nobody is blamed."""
MOST_ID_BYTES = 256
"""An entity with a longer id is named without it; then its whole shard is to blame."""
LOOK_S = 0.25


class Trial:
    """One name in the record, and the handlers that began under it."""

    __slots__ = ("name", "over_at", "place_until", "running")

    def __init__(self, name: OnTrial, now: float) -> None:
        self.name = name
        self.running = 0
        self.over_at = now
        self.place_until = float("inf")
        """When it gives its place to the next, although its handler runs. First it is stored."""


class Trials:
    """The trials of one node. `store` writes a record and returns True once it is stored."""

    def __init__(self, clock: Clock, store: Callable[[TrialRecord], Awaitable[bool]]) -> None:
        self._clock, self._store = clock, store
        self._open: dict[OnTrial, Trial] = {}
        self._stored: dict[OnTrial, None] = {}
        """Names that are in the store, whatever the outcome of the commit under way is."""
        self._unsure = False
        """Whether the store may hold other names as well, because a commit did not succeed."""
        self._flight = SingleFlight()
        self._waiting: deque[tuple[OnTrial, asyncio.Future[Trial]]] = deque()
        self._waiting_since = 0.0
        self._tasks: TaskSet[None] = TaskSet("domicile-trials")
        self._timer: Timer | None = None
        self._closed = False

    async def begin(self, shard: ShardKey, epoch: int, alone: EntityKey | None) -> Trial | None:
        """An entity is about to start; `alone` if its shard is on the brink.

        Returns once the store names it, None if the store did not take that. A trial must be given
        back to `end` when the first handler has ended.
        """
        name = OnTrial(*shard, epoch, *(() if alone is None else _named(alone)))
        if alone is not None and name not in self._open:
            trial = await self._place(name)
        elif name not in self._open and len(self._open) >= MOST_NAMED:
            return self._begun(Trial(name, self._clock.now()))
        else:
            trial = self._begun(self._open.get(name) or Trial(name, self._clock.now()))
            self._open[name] = trial
        self._look_later()
        stored = False
        try:
            stored = await self._name(name)
        finally:
            if not stored:
                self.end(trial)
        trial.place_until = min(trial.place_until, self._clock.now() + PLACE_S)
        return trial if stored else None

    def end(self, trial: Trial) -> None:
        """The first handler of a trial ended, or never began."""
        trial.running -= 1
        if trial.name.type:
            trial.over_at = self._clock.now() + ENTITY_S
            self._admit()

    async def close(self) -> None:
        """End what is under way. The leader deletes the record when this node is gone."""
        self._closed = True
        if self._timer is not None:
            self._timer.cancel()
        await self._tasks.close()

    def _begun(self, trial: Trial) -> Trial:
        trial.running += 1
        trial.over_at = self._clock.now() + SHARD_S
        return trial

    # places

    async def _place(self, name: OnTrial) -> Trial:
        """Wait until an entity may be tried."""
        waiter: asyncio.Future[Trial] = asyncio.get_running_loop().create_future()
        if not self._waiting:
            self._waiting_since = self._clock.now()
        self._waiting.append((name, waiter))
        self._look_later()
        self._admit()
        try:
            return await waiter
        except asyncio.CancelledError:
            if waiter.done() and not waiter.cancelled():
                self.end(waiter.result())
            raise

    def _admit(self) -> None:
        """Give places to waiting entities, in order."""
        now = self._clock.now()
        while self._waiting:
            name, waiter = self._waiting[0]
            if not waiter.done():
                if name not in self._open and not self._has_room(now):
                    return
                waiter.set_result(self._begun(self._open.setdefault(name, Trial(name, now))))
            self._waiting.popleft()

    def _has_room(self, now: float) -> bool:
        held = [trial for trial in self._open.values() if trial.name.type]
        doublings = int((now - self._waiting_since) / GROW_S)
        if len(held) < min(MOST_PLACES, 1 << min(doublings, MOST_PLACES)):
            return True
        for trial in held:
            if not trial.running or now >= trial.place_until:
                del self._open[trial.name]
                if trial.running:
                    # It may still be the one to blame: the record goes on to name its shard.
                    trial.name = OnTrial(trial.name.role, trial.name.shard, trial.name.epoch)
                    self._open.setdefault(trial.name, trial)
                return True
        return False

    # the record

    async def _name(self, name: OnTrial) -> bool:
        """Have a name stored. The commit under way may have begun before the name was open."""
        for _ in range(2):
            if name in self._stored:
                return True
            landing = self._flight.join()
            if landing is not None:
                await landing
            else:
                await self._write()
                break
        return name in self._stored

    async def _write(self) -> None:
        names = dict.fromkeys(self._open)
        self._stored = {name: None for name in self._stored if name in names}
        self._unsure = True
        try:
            if await self._store(TrialRecord(tuple(names))):
                self._stored, self._unsure = names, False
        finally:
            self._flight.land()

    async def _remove(self) -> None:
        """Store the record without the names that are over."""
        if self._flight.join() is None:
            await self._write()

    def _look_later(self) -> None:
        if self._timer is None and not self._closed:
            self._timer = self._clock.call_at(self._clock.now() + LOOK_S, self._look)

    def _look(self) -> None:
        self._timer = None
        now = self._clock.now()
        for trial in [one for one in self._open.values() if not one.running]:
            if now >= trial.over_at:
                del self._open[trial.name]
        self._admit()
        if self._unsure or any(name not in self._open for name in self._stored):
            self._tasks.spawn(self._remove())
        if self._open or self._stored or self._unsure:
            self._look_later()


def _named(entity: EntityKey) -> EntityKey:
    try:
        fits = len(entity.id.encode()) <= MOST_ID_BYTES
    except UnicodeEncodeError:
        fits = False
    return entity if fits else EntityKey(entity.type, "")
