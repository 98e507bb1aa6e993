"""One seed of a campaign: a cluster under load, moves and faults, then a calm while, then judged.

Moves are wishes for hot shards, half of them withdrawn at once, with bursts of mail around them;
faults strike at random times and, in ambush, at chosen steps of a hand-off. After `quiet` no
fault is active, so from then on everything must succeed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Coroutine
from contextlib import suppress
from functools import partial
from random import Random
from typing import Any

from domicile.core.ids import ShardKey
from domicile.entity.model.client import Client
from domicile.errors import DomicileError
from domicile.testing.history import Event
from domicile.testing.sim.cluster import Sim
from proving.desks import note_kept
from proving.fault_plan import Mischief
from proving.profiles import SPECS, links, nodes
from proving.seed_result import CALM_S, FAULTY_S, LEAST_MESSAGES, NODES, ROOMS, Tally, seen
from proving.workload import ENTITIES, Clerk, Ledger, Notebook, Room, clerk_of, rooms_by_shard

RUSHED = [f"l{number}" for number in range(36)]
"""Ledgers that are written at once: more of them at one home than batches may be on their way."""

TOP_UP_S = 60.0
LEAST_RELEASES = 20
"""Not every release ends in a completed move: the new owner may be gone by then."""


class Profile:
    """Drives one simulated cluster. `skip` names strikes, by number, that are left out."""

    def __init__(self, seed: int, name: str = "standard", skip: Collection[int] = ()) -> None:
        self.name = name
        spec = SPECS[name]
        # Sometimes all are on one machine, where a kernel's locks prove a death at once (L6).
        locks = Random(f"locks {seed}").random() < spec.locks
        notebook = Notebook()
        self.sim = Sim(
            seed, entities=(*ENTITIES, *spec.entities), nodes=NODES, settings=spec.settings,
            locks=locks, resources=notebook.resources, one_key=spec.one_key,
        )  # fmt: skip
        notebook.history = self.sim.history
        self.tally = Tally()
        self.hot = rooms_by_shard(
            self.sim.world.stream("rooms"), spec.settings.shards, hot=6, each=ROOMS
        )
        # Rooms ask upwards in this order only: else two of them could wait for each other.
        self.rooms = [ids[rank] for rank in range(ROOMS) for ids in self.hot.values()]
        self.clerks = {shard: clerk_of(shard, spec.settings.shards) for shard in self.hot}
        self.began_at = self.sim.world.now
        self._values = self._tokens = 0
        self._released = 0
        self.sim.history.subscribe(self._count, "submit", "released")
        self.mischief = Mischief(
            self, spec.faults, pace_s=spec.pace_s, ambush=spec.ambush, skip=skip, filler=links.cut,
            in_turn={nodes.freeze: nodes.freeze_node},
        )  # fmt: skip
        if spec.prepare is not None:
            spec.prepare(self)
        weather = self.sim.world.stream("weather")
        self.sim.network.jitter_s = weather.choice((0.0, 0.0, 0.005, 0.02))
        self.sim.network.skew_s = weather.choice((0.0, 0.03, 0.08))
        self._watch_delay_s = weather.choice((0.0, 0.0, 0.01, 0.05))
        if weather.random() < 0.15:
            self.mischief.begin_early(weather, nodes.crash)

    @property
    def strikes(self) -> tuple[int, ...]:
        """The numbers of the strikes that are planned and not left out."""
        return self.mischief.numbers

    async def run(self) -> None:
        """The whole minute."""
        sim, load = self.sim, SPECS[self.name].load
        start = sim.world.now
        for process in sim.nodes:
            if process.store is not None:
                process.store.watch_delay_s = (0.0, self._watch_delay_s * process.index / NODES)
        async with asyncio.TaskGroup() as group:
            for sender in range(-1, NODES):
                group.create_task(self._talk(sender, start + FAULTY_S + CALM_S - 3))
            group.create_task(self._move(start + FAULTY_S + CALM_S - 4))
            group.create_task(self._rush(start + FAULTY_S + CALM_S - 3))
            group.create_task(self._count_on(start + FAULTY_S + CALM_S - 3))
            group.create_task(self.mischief.harm(start, group))
            if load is not None:
                group.create_task(load(self))
        await asyncio.sleep(max(0.0, start + FAULTY_S + CALM_S - sim.world.now))
        for id in (*self.rooms, *RUSHED):
            values = [event.what for event in sim.events(Ledger, id)]
            sim.history.event("kept", type="ledger", id=id, values=values)
        if load is not None:
            note_kept(self)

    def finish(self) -> Tally:
        """Count what the history shows."""
        history = self.sim.history
        self.tally.digest = history.digest()
        released = {
            (event.fields["role"], event.fields["shard"], event.fields["epoch"])
            for event in history.of("released")
        }
        self.tally.moves = sum(
            (event.fields["role"], event.fields["shard"], event.fields["epoch"] - 1) in released
            for event in history.of("open")
        )
        return self.tally

    def _count(self, event: Event) -> None:
        if event.kind == "submit":
            self.tally.messages += 1
        else:
            self._released += 1

    # mail

    async def _talk(self, sender: int, until: float) -> None:
        """Bursts from one process: -1 is the test's client, the others are nodes."""
        random = self.sim.world.stream(f"talk {sender}")
        while True:
            pause_s = random.uniform(2, 40)
            if self.sim.world.now + pause_s >= until:
                return
            await asyncio.sleep(pause_s)
            self._burst(sender, random, random.sample(random.choice(list(self.hot.values())), 2))

    def _burst(self, sender: int, random: Random, ids: list[str]) -> None:
        """Several messages in a row, from one process to one or two rooms."""
        count = random.randint(8, 11)
        self.inside(sender, lambda client: self._send(client, random, ids, count))

    async def _send(self, client: Client, random: Random, ids: list[str], count: int) -> None:
        """One burst, written one after the other without waiting in between."""
        async with asyncio.TaskGroup() as group:
            for _ in range(count):
                id = random.choice(ids)
                if random.random() < 0.45:
                    await self.row(client, id, 0.0, 1)
                else:
                    group.create_task(self._ask(client, random, id))
                if random.random() < 0.3:
                    await asyncio.sleep(random.uniform(0, 0.004))

    async def _ask(self, client: Client, random: Random, id: str) -> None:
        room = client.ref(Room, id)
        dice = random.uniform(0.45, 1.0)
        try:
            if dice < 0.7:
                await room.ask(Room.note, 2)
            elif dice < 0.78:
                await room.ask(Room.think, random.uniform(0.001, 0.03))
            elif dice < 0.83:
                await room.ask(Room.peek, random.uniform(0.001, 0.01))
            elif dice < 0.93:
                path = self._path(random, id)
                await room.ask(Room.relay, random.uniform(0.001, 0.02), path)
            else:
                key = f"k{random.randrange(6)}" if random.random() < 0.4 else ""
                await self.note_down(client, id, key, refused=random.random() < 0.05)
        except DomicileError:
            pass

    def new_value(self) -> int:
        """A value that nobody else has, so that its place in a journal can be told."""
        self._values += 1
        return self._values

    async def note_down(self, client: Client, id: str, key: str, *, refused: bool) -> None:
        """Have a ledger note a value that no other ask has."""
        unique = self.new_value()
        value = -1 if refused else unique
        ledger = client.ref(Ledger, id)
        seq = await (ledger.options(key=key) if key else ledger).ask(Ledger.note, value)
        self.sim.history.event("acked", type="ledger", id=id, seq=seq, value=None if key else value)

    async def _count_on(self, until: float) -> None:
        """Clerks count, and have themselves called back, wherever they are."""
        random = self.sim.world.stream("clerks")
        while True:
            pause_s = random.uniform(0.2, 1.6)
            if self.sim.world.now + pause_s >= until:
                return
            await asyncio.sleep(pause_s)
            self._visit(random.randrange(-1, NODES), random, random.choice(list(self.hot)))

    def _visit(self, sender: int, random: Random, shard: ShardKey) -> None:
        delay_s = random.choice((0.0, random.uniform(0.0, 0.05), random.uniform(0.05, 5.0)))
        self.inside(sender, partial(self._count_one, self.clerks[shard], delay_s))

    async def _count_one(self, id: str, delay_s: float, client: Client) -> None:
        clerk = client.ref(Clerk, id)
        with suppress(DomicileError):
            await clerk.ask(Clerk.add)
            if delay_s:
                self._tokens += 1
                await clerk.tell(Clerk.remind, delay_s, self._tokens)

    async def _rush(self, until: float) -> None:
        """Many ledgers are written at once, so that their homes write them together (J3)."""
        random = self.sim.world.stream("rush")
        while True:
            pause_s = random.uniform(4, 16)
            if self.sim.world.now + pause_s >= until:
                return
            await asyncio.sleep(pause_s)
            ids = random.sample(RUSHED, random.randint(len(RUSHED) // 2, len(RUSHED)))
            self.inside(random.randrange(-1, NODES), partial(self._write_all, random, ids))

    async def _write_all(self, random: Random, ids: list[str], client: Client) -> None:
        async with asyncio.TaskGroup() as group:
            for id in ids:
                key = f"k{random.randrange(6)}" if random.random() < 0.3 else ""
                group.create_task(self._write_one(client, id, key))

    async def _write_one(self, client: Client, id: str, key: str) -> None:
        with suppress(DomicileError):
            await self.note_down(client, id, key, refused=False)

    def _path(self, random: Random, start: str) -> list[str]:
        above = range(self.rooms.index(start) + 1, len(self.rooms))
        chosen = sorted(random.sample(above, min(len(above), random.randint(1, 4))))
        path = [self.rooms[index] for index in chosen]
        # N2: a path that leads back is refused at its last step instead of waiting for itself.
        return [*path, start] if random.random() < 0.1 else path

    # moves

    async def _move(self, until: float) -> None:
        """Wishes, half of them withdrawn while the move is under way, with mail around them."""
        random = self.sim.world.stream("moves")
        while self.sim.world.now < until:
            await asyncio.sleep(random.uniform(6.0, 10.0))
            if random.random() < 0.5:
                await self.trap(random, random.choice(list(self.hot)))
                continue
            shards = random.sample(list(self.hot), random.randint(1, 2))
            sender = random.randrange(-1, NODES)
            # Often the same process to the same rooms throughout: there the order matters.
            senders = [sender] * 3 if random.random() < 0.7 else [sender, -1, 0]
            pairs = {shard: random.sample(self.hot[shard], 2) for shard in shards}
            for shard in shards:
                if random.random() < 0.35:
                    self._entangle(shard, random)
                self._burst(senders[0], random, pairs[shard])
            await asyncio.sleep(random.uniform(0, 0.02))
            for shard in shards:
                await self.sim.wish(shard, random.randrange(NODES))
                self._burst(senders[1], random, pairs[shard])
                if random.random() < 0.15:
                    # On at once: who takes it may hear only that it moves again (H9).
                    await asyncio.sleep(random.uniform(0.003, 0.03))
                    await self.sim.wish(shard, random.randrange(NODES))
            for shard in shards:
                if random.random() < 0.4:
                    await asyncio.sleep(random.uniform(0, 0.012))
                    await self.sim.wish(shard, None)
                else:
                    await asyncio.sleep(random.uniform(0.002, 0.03))
                self._burst(senders[2], random, pairs[shard])
        while self.tally.messages < LEAST_MESSAGES or self._released < LEAST_RELEASES:
            if self.sim.world.now > until + TOP_UP_S:
                return  # I6: nobody takes mail any more, and the checkers will say why
            shard = random.choice(list(self.hot))
            self._burst(-1, random, random.sample(self.hot[shard], 2))
            if self._released < LEAST_RELEASES:
                await self.sim.wish(shard, random.randrange(NODES))
                await asyncio.sleep(0.5)
            await asyncio.sleep(0.15)

    async def trap(self, random: Random, shard: ShardKey) -> None:
        """Mail waits behind a running handler when its shard is wished away, and more follows."""
        room = random.choice(self.hot[shard])
        sender = random.randrange(-1, NODES)
        pause = random.uniform(0.003, 0.02)
        if random.random() < 0.5:
            self._visit(sender, random, shard)
        self.inside(sender, lambda client: self.row(client, room, pause, 10))
        await asyncio.sleep(random.uniform(0, 0.01))
        await self.sim.wish(shard, random.randrange(NODES))
        withdrawn = random.choice((0, 1, 2, 3, 3))
        for turn in range(3):
            await asyncio.sleep(random.uniform(0.001, 0.012))
            if turn == withdrawn:
                await self.sim.wish(shard, None)
            self.inside(sender, lambda client: self.row(client, room, 0.0, 9))

    async def row(self, client: Client, id: str, pause: float, count: int) -> None:
        """A thought, if any, and tells behind it."""
        room = client.ref(Room, id)
        with suppress(DomicileError):
            if pause:
                await room.tell(Room.think, pause)
            for _ in range(count):
                await room.tell(Room.note, 1)

    def inside(self, sender: int, work: Callable[[Client], Coroutine[Any, Any, None]]) -> None:
        """Run something in a process: -1 is the test's client, the others are nodes."""

        def start(client: Client) -> None:
            task = asyncio.get_running_loop().create_task(work(client))
            task.add_done_callback(seen)

        if sender < 0:
            self.sim.loop.post(partial(start, self.sim))
            return
        process = self.sim.nodes[sender]
        if process.up and process.incarnation and process.loop and process.node:
            process.loop.post(partial(start, process.node))

    def _entangle(self, shard: ShardKey, random: Random) -> None:
        """Chains that wait across mailboxes: x0 → y1, while y1's running handler → x2."""
        other = random.choice([key for key in self.hot if key != shard])
        here, there = self.hot[shard], self.hot[other]
        pause = random.uniform(0.01, 0.04)
        third = self.hot[random.choice([key for key in self.hot if key not in (shard, other)])]
        for start, path in (
            (there[1], [third[2], here[3]]),
            (there[1], [here[2]]),
            (here[0], [there[1]]),
            (here[1], [there[2]]),
            (there[2], [here[3]]),
            (here[0], [here[1]]),
        ):
            if random.random() < 0.7:
                task = asyncio.get_running_loop().create_task(
                    self._relay(self.sim, start, pause, path)
                )
                task.add_done_callback(seen)

    async def _relay(self, client: Client, start: str, pause: float, path: list[str]) -> None:
        with suppress(DomicileError):
            await client.ref(Room, start).ask(Room.relay, pause, path)
