"""Durable entities that do all that an output gate must hold back, and callers that repeat keys.

The load of the profiles that disturb journals. Whether the desks were served right is read off the
history alone (J5).
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from functools import partial
from random import Random
from typing import TYPE_CHECKING

from domicile.core.hashing import shard_of
from domicile.core.ids import EntityKey
from domicile.entity.model.client import Client
from domicile.entity.model.handlers import handler
from domicile.errors import DomicileError, HandlerFailed
from domicile.persist.eventsourced import EventSourced
from proving.seed_result import CALM_S, FAULTY_S, NODES
from proving.workload import Enough, Notebook, Noted

if TYPE_CHECKING:
    from proving.profile import Profile

DESKS = 12
"""Several in most of the shards that move most."""

TRIES = 8
"""How often a caller sends one key."""


class Desk(EventSourced[list[int], Noted], name="desk"):
    """Durable numbers, which it takes, shows, refuses and passes on."""

    @staticmethod
    def initial(id: str, /) -> list[int]:
        """Nothing noted."""
        return []

    @staticmethod
    def apply(state: list[int], event: Noted, /) -> list[int]:
        """One more."""
        return [*state, event.what]

    @handler
    async def note(self, what: int) -> int:
        """Persist, then answer with the place."""
        return len(await self.persist(Noted(what)))

    @handler
    async def add(self, what: int) -> None:
        """Append without reading."""
        await self.append(Noted(what))

    @handler(shared=True)
    async def total(self) -> int:
        """How many there are."""
        return len(await self.state())

    @handler
    async def refuse(self) -> None:
        """Refuse because of what there is."""
        raise Enough(len(await self.state()))

    @handler
    async def take_back(self, what: int) -> None:
        """Persist, then refuse after all."""
        raise Enough(len(await self.persist(Noted(what))))

    @handler
    async def waver(self, what: int, seconds: float) -> None:
        """Persist, think about it beside the hooks, and refuse after all."""
        count = len(await self.persist(Noted(what)))
        await asyncio.sleep(seconds)
        raise Enough(count)

    @handler
    async def rest(self, what: int) -> int:
        """Persist, and leave memory while that is on its way."""
        self.passivate()
        return len(await self.persist(Noted(what)))

    @handler
    async def confirm(self, what: int) -> int:
        """Persist, wait for the journal, and persist again."""
        await self.persist(Noted(what))
        await self.committed()
        return len(await self.persist(Noted(-what)))

    @handler
    async def send_on(self, what: int, to: str) -> None:
        """Persist, then tell another desk."""
        await self.persist(Noted(what))
        await self.ref(Desk, to).tell(Desk.add, what)

    @handler
    async def show_later(self, what: int, to: str) -> None:
        """Persist, and once that is stored, tell another desk the last number that is there."""

        async def show() -> None:
            numbers = await self.state()
            await self.ref(Desk, to).tell(Desk.hear, self.id, len(numbers), numbers[-1])

        self.after_commit(show)
        await self.persist(Noted(what))

    @handler
    async def hear(self, of: str, seq: int, value: int) -> None:
        """Note what another desk says that it holds."""
        self.resource(Notebook).heard("desk", of, seq, value)

    @handler
    async def ask_on(self, what: int, to: str) -> int:
        """Persist, then ask another desk, and persist again."""
        await self.persist(Noted(what))
        place = await self.ref(Desk, to).ask(Desk.note, what)
        await self.persist(Noted(-what))
        return place


def desks_of(load: Profile) -> list[str]:
    """The ids of the desks, all at home in the shards that move most."""
    hot = {shard.shard for shard in load.hot}
    ids: list[str] = []
    number = 0
    while len(ids) < DESKS:
        id = f"d{number}"
        number += 1
        if shard_of(EntityKey("desk", id), load.sim.settings.shards) in hot:
            ids.append(id)
    return ids


def note_kept(load: Profile) -> None:
    """What the journal holds of the desks, for the checkers."""
    for id in desks_of(load):
        values = [event.what for event in load.sim.events(Desk, id)]
        load.sim.history.event("kept", type="desk", id=id, values=values)


async def serve(load: Profile) -> None:
    """Bursts of all that desks do, until shortly before the end."""
    random = load.sim.world.stream("desks")
    desks = desks_of(load)
    until = load.sim.world.now + FAULTY_S + CALM_S - 4
    while True:
        pause_s = random.uniform(0.1, 0.9)
        if load.sim.world.now + pause_s >= until:
            return
        await asyncio.sleep(pause_s)
        # Together, so that a batch has parts of several shards (J3).
        ids = random.sample(desks, random.randint(1, 4))
        burst(load, random, random.randrange(-1, NODES), ids)


def burst(load: Profile, random: Random, sender: int, ids: list[str]) -> None:
    """Several calls to some desks at once, from one process."""
    for id in ids:
        for _ in range(random.randint(1, 3)):
            load.inside(sender, partial(_call, load, random.randrange(1 << 30), id))


async def _call(load: Profile, seed: int, id: str, client: Client) -> None:
    random = Random(seed)
    desk = client.ref(Desk, id)
    dice = random.random()
    value = load.new_value()
    above = sorted(other for other in desks_of(load) if other > id)
    with suppress(DomicileError):
        if dice < 0.3:
            await _note(load, random, client, id, value)
        elif dice < 0.45:
            await desk.ask(Desk.add, value)
            load.sim.history.event("acked", type="desk", id=id, seq=None, value=value)
        elif dice < 0.54:
            await desk.ask(Desk.total)
        elif dice < 0.6:
            await desk.ask(Desk.refuse)
        elif dice < 0.66:
            await desk.ask(Desk.waver, value, random.uniform(0.0, 0.2))
        elif dice < 0.7:
            await desk.ask(Desk.take_back, value)
        elif dice < 0.75:
            seq = await desk.ask(Desk.rest, value)
            load.sim.history.event("acked", type="desk", id=id, seq=seq, value=value)
        elif dice < 0.8:
            await desk.ask(Desk.confirm, value)
        elif above and dice < 0.86:
            await desk.ask(Desk.show_later, value, random.choice(above))
        elif above and dice < 0.93:
            await desk.ask(Desk.send_on, value, random.choice(above))
        elif above:
            # Only to desks above: two could wait for each other else.
            await desk.ask(Desk.ask_on, value, random.choice(above))


async def _note(load: Profile, random: Random, client: Client, id: str, value: int) -> None:
    """One key until it is answered, at times twice at once."""
    key = f"v{value}"
    twins = 2 if random.random() < 0.4 else 1
    async with asyncio.TaskGroup() as group:
        for _ in range(twins):
            pauses_s = [random.uniform(0.05, 2.5) for _ in range(TRIES)]
            group.create_task(_insist(load, client, id, key, value, pauses_s))


async def _insist(
    load: Profile, client: Client, id: str, key: str, value: int, pauses_s: list[float]
) -> None:
    desk = client.ref(Desk, id).options(key=key)
    history = load.sim.history
    for pause_s in pauses_s:
        try:
            seq = await desk.ask(Desk.note, value)
        except HandlerFailed as error:
            if "was interrupted" in str(error):
                history.event("unanswered", type="desk", id=id, key=key)
            return
        except DomicileError:
            await asyncio.sleep(pause_s)
        else:
            history.event("acked", type="desk", id=id, seq=seq, value=value)
            return
