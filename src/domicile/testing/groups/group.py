"""A whole replica group in virtual time, with verbs for its faults.

Agents are the product's, with the simulator's store; servers and guards are simulated. Each server
has a machine: server, guard and agent, which may be frozen together or one by one.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial

from domicile.core.state.txn import At, Item, Put
from domicile.failover.agent import Agent
from domicile.failover.choice import FORCIBLE
from domicile.failover.machine import forced, switching
from domicile.failover.records import (
    GroupConfig,
    GroupPhase,
    GroupState,
    ServerRecord,
    decode_group_record,
    encode_group_record,
    servers_prefix,
    state_key,
)
from domicile.settings import Settings
from domicile.testing.groups.guards import GUARD_S, SimGuard, SimGuardLine
from domicile.testing.groups.servers import GroupLog, SimDatabase, SimNoteBook, SimReplicaDriver
from domicile.testing.history import History
from domicile.testing.sim.clock import SimClock
from domicile.testing.sim.loop import SimLoop, World
from domicile.testing.sim.servers import Servers

GUARD_BACK_S = 0.3
"""How soon a guard that was killed is started again."""

INSISTS_S = 0.002
"""How often a client that insists sends a write."""

AGAIN_S = 0.2
"""How soon an agent whose incarnation is over begins anew."""


class GroupMachineHost:
    """One machine: a server, its guard, its agent, and what is on its disk."""

    def __init__(self, group: SimGroup, name: str) -> None:
        self.group, self.name = group, name
        world = group.world
        self.database = SimDatabase(
            world, name, group.databases, group.record, cascades=group.cascades
        )
        self.guard = SimGuard(
            world, self.database, partial(group.kill_guard, self), attached=group.attached
        )
        self.notes = SimNoteBook(name)
        self.faults = group.servers.store_faults(name)
        self.loop: SimLoop | None = None
        self.agent: Agent | None = None
        self.starts = 0

    def start_agent(self) -> None:
        """Start an agent, if none runs."""
        if self.loop is not None:
            return
        self.starts += 1
        self.loop = self.group.world.process(f"{self.name}-agent-{self.starts}")
        self.loop.post(self._begin)

    def _begin(self) -> None:
        assert self.loop is not None
        self.loop.create_task(self._live(self.loop))

    async def _live(self, loop: SimLoop) -> None:
        group = self.group
        clock = SimClock(group.world, loop)
        driver = SimReplicaDriver(group.world, loop, self.database, group.record)
        number = 0
        while True:
            number += 1
            store = group.servers.remote_store(loop, self.name, self.faults)
            self.agent = Agent(
                "g",
                group.config,
                address=self.name,
                store=store,
                driver=driver,
                guard=SimGuardLine(self.guard, driver),
                notes=self.notes,
                clock=clock,
                meter=group.history,
                settings=group.settings,
                random=group.world.stream(f"{loop.name} {number}"),
            )
            await self.agent.run()
            await store.close()
            await asyncio.sleep(AGAIN_S)

    def kill_agent(self) -> None:
        """SIGKILL of the agent. The guard notices that its connection is gone."""
        if self.loop is None:
            return
        self.loop.kill()
        self.loop = self.agent = None
        world = self.group.world
        world.call_at(world.now + 0.01, self._unattended)

    def _unattended(self) -> None:
        if self.loop is None and not self.guard.absent:
            self.database.soon(self.guard.shut)


class SimGroup:
    """Servers, agents, guards, a store, and clients that number their writes."""

    def __init__(
        self,
        seed: int,
        config: GroupConfig,
        *,
        servers: int = 3,
        settings: Settings | None = None,
        cascades: bool | None = None,
        attached: bool = False,
    ) -> None:
        """`cascades`: the kind of the servers; synchronous ones always do, asynchronous ones do
        not unless told. `attached`: servers are no children of their guards, and outlive them."""
        self.world = World(seed)
        self.config = config
        self.cascades = config.sync if cascades is None else cascades
        self.attached = attached
        self.settings = Settings(ttl_s=3.0) if settings is None else settings
        self.history = History(lambda: self.world.now)
        self.servers = Servers(self.world, self.history)
        self.backend = self.servers.store.client("operator")
        self.record = GroupLog()
        self.databases: dict[str, SimDatabase] = {}
        self.machines = [GroupMachineHost(self, f"s{n}") for n in range(1, servers + 1)]
        for machine in self.machines:
            self.databases[machine.name] = machine.database
        self._random = self.world.stream("group")
        self.writes = 0
        self.faults: list[tuple[float, str]] = []
        self.forced = 0

    def note(self, what: str) -> None:
        """Remember a fault, to be told if the seed is bad."""
        self.faults.append((self.world.now, what))

    def start(self) -> None:
        """Start all agents."""
        for machine in self.machines:
            machine.start_agent()

    # faults

    def kill_agent(self, machine: GroupMachineHost, back_s: float) -> None:
        """SIGKILL of an agent, which is started again."""
        self.note(f"agent {machine.name} killed for {back_s:.1f} s")
        machine.kill_agent()
        self.after(back_s, machine.start_agent)

    def freeze_agent(self, machine: GroupMachineHost, seconds: float) -> None:
        """SIGSTOP of an agent."""
        loop = machine.loop
        if loop is not None:
            self.note(f"agent {machine.name} frozen for {seconds:.1f} s")
            loop.freeze()
            self.after(seconds, loop.thaw)

    def freeze_guard(self, machine: GroupMachineHost, seconds: float) -> None:
        """SIGSTOP of a guard alone."""
        self.note(f"guard {machine.name} frozen for {seconds:.1f} s")
        machine.guard.frozen = True
        self.after(seconds, partial(self._thaw_guard, machine))

    def _thaw_guard(self, machine: GroupMachineHost) -> None:
        machine.guard.frozen = False
        machine.guard.run_late()

    def freeze_machine(self, machine: GroupMachineHost, seconds: float) -> None:
        """All of a machine stands still: server, guard and agent (F2)."""
        self.note(f"machine {machine.name} frozen for {seconds:.1f} s")
        machine.database.freeze()
        loop = machine.loop
        if loop is not None:
            loop.freeze()
        self.after(seconds, partial(self._thaw_machine, machine, loop))

    def _thaw_machine(self, machine: GroupMachineHost, loop: SimLoop | None) -> None:
        machine.database.thaw(GUARD_S)
        self.after(GUARD_S * 0.9, machine.guard.run_late)
        if loop is not None:
            # The processes of a machine that wakes run in any order.
            self.after(self._random.choice((0.0, GUARD_S)), loop.thaw)

    async def wake_in_election(self, machine: GroupMachineHost, longest_s: float = 6.0) -> None:
        """A machine stands still, and wakes when the others have just begun to elect (F2, F6)."""
        self.note(f"machine {machine.name} frozen until an election begins")
        machine.database.freeze()
        loop = machine.loop
        if loop is not None:
            loop.freeze()
        until = self.world.now + longest_s
        while self.world.now < until:
            state, _ = await self.state()
            if state is not None and state.phase is GroupPhase.ELECTING:
                break
            await asyncio.sleep(0.003)
        self._thaw_machine(machine, loop)

    def freeze_server(self, machine: GroupMachineHost, seconds: float) -> None:
        """SIGSTOP of the server alone."""
        self.note(f"server {machine.name} frozen for {seconds:.1f} s")
        machine.database.freeze()
        self.after(seconds, partial(self._thaw_server, machine))

    def _thaw_server(self, machine: GroupMachineHost) -> None:
        machine.database.thaw(GUARD_S)
        self.after(GUARD_S * 0.9, machine.guard.run_late)

    def crash_server(
        self, machine: GroupMachineHost, back_s: float, lost: int, *, orphans: bool = False
    ) -> None:
        """SIGKILL of the server; in asynchronous mode it may lose its newest entries.

        `orphans`: its sessions outlive it, as backends of PostgreSQL do for a while.
        """
        lost = 0 if self.config.sync else lost
        left = ", its sessions live on" if orphans else ""
        self.note(f"server {machine.name} crashed for {back_s:.1f} s{left}")
        machine.database.crash(lost, orphans=orphans)
        self.after(back_s, machine.database.start)

    def kill_guard(self, machine: GroupMachineHost) -> None:
        """SIGKILL of the guard, which takes its server along; both are started again.

        An attached server lives on, and may be open. The agent's incarnation ends with its guard.
        """
        machine.guard.frozen = False
        if self.attached:
            self.note(f"guard {machine.name} killed, its server lives on")
            machine.guard.gone = True
            machine.kill_agent()
            self.after(GUARD_BACK_S, partial(self._guard_back, machine))
            return
        self.note(f"guard {machine.name} killed, and its server with it")
        machine.guard.until = 0.0
        machine.database.refuse()
        machine.database.crash(0)
        self.after(GUARD_BACK_S, machine.database.start)

    def _guard_back(self, machine: GroupMachineHost) -> None:
        """F3: a guard closes its server first of all."""
        machine.guard.gone = False
        machine.database.soon(machine.guard.shut)
        machine.start_agent()

    def lose_machine(self, machine: GroupMachineHost, back_s: float) -> None:
        """Power goes, and comes back."""
        self.note(f"machine {machine.name} without power for {back_s:.1f} s")
        machine.kill_agent()
        machine.database.crash(0)
        self.after(back_s, machine.database.start)
        self.after(back_s, machine.start_agent)

    def cut_store(self, machine: GroupMachineHost, seconds: float) -> None:
        """An agent can't reach the store; its server's clients still reach the server."""
        self.note(f"{machine.name} cut from the store for {seconds:.1f} s")
        machine.faults.cut = True
        self.after(seconds, partial(setattr, machine.faults, "cut", False))

    def deafen_store(self, machine: GroupMachineHost, seconds: float) -> None:
        """What an agent asks of the store gets lost; what it watches still arrives."""
        self.note(f"requests of {machine.name} to the store lost for {seconds:.1f} s")
        machine.faults.lost_request = 1.0
        self.after(seconds, partial(setattr, machine.faults, "lost_request", 0.0))

    def slow_store(self, machine: GroupMachineHost, factor: float, seconds: float) -> None:
        """What an agent asks of the store takes long, and so does what it is told (FO-18)."""
        self.note(f"the store is {factor:.0f} times slower for {machine.name} for {seconds:.1f} s")
        machine.faults.slow = factor
        self.after(seconds, partial(setattr, machine.faults, "slow", 1.0))

    def late_news(self, machine: GroupMachineHost, late_s: float, seconds: float) -> None:
        """What an agent watches in the store arrives late; what it asks is answered at once."""
        self.note(f"news of the store {late_s:.1f} s late at {machine.name} for {seconds:.1f} s")
        machine.faults.watch_delay_s = (late_s, late_s)
        self.after(seconds, partial(setattr, machine.faults, "watch_delay_s", (0.0, 0.0)))

    def outage(self, seconds: float) -> None:
        """Nobody reaches the store."""
        self.note(f"store away for {seconds:.1f} s")
        self.servers.outage(running=True)
        self.after(seconds, self.servers.back)

    def partition(self, one: GroupMachineHost, other: GroupMachineHost, seconds: float) -> None:
        """Two servers can't reach each other."""
        self.note(f"{one.name} and {other.name} cut for {seconds:.1f} s")
        one.database.blocked[other.name] = None
        self.after(seconds, partial(one.database.blocked.pop, other.name, None))

    def slow(self, machine: GroupMachineHost, factor: float, seconds: float) -> None:
        """A server replicates slowly."""
        self.note(f"{machine.name} {factor:.0f} times slower for {seconds:.1f} s")
        machine.database.slow = factor
        self.after(seconds, partial(setattr, machine.database, "slow", 1.0))

    def uncertain(self, machine: GroupMachineHost, seconds: float) -> None:
        """An agent's calls to the store get lost, answers too, or arrive late (S1)."""
        self.note(f"{machine.name} has an uncertain store for {seconds:.1f} s")
        faults = machine.faults
        faults.lost_reply, faults.late_request, faults.lost_request = 0.2, 0.2, 0.1
        self.after(seconds, partial(self._certain, machine))

    def _certain(self, machine: GroupMachineHost) -> None:
        faults = machine.faults
        faults.lost_reply = faults.late_request = faults.lost_request = 0.0

    def after(self, seconds: float, do: Callable[[], object]) -> None:
        """Do something later, whatever is frozen then."""
        self.world.call_at(self.world.now + seconds, do)

    # what people do

    async def state(self) -> tuple[GroupState | None, int]:
        """The stored state and its revision."""
        item: Item | None = await self.backend.get(state_key("g"))
        if item is None:
            return None, 0
        return decode_group_record(item.value, GroupState), item.revision

    async def members(self) -> dict[str, ServerRecord]:
        """The live members by server id."""
        listing = await self.backend.list(servers_prefix("g"))
        records = [decode_group_record(item.value, ServerRecord) for item in listing.items]
        return {record.server: record for record in records}

    async def switch_over(self, to: str) -> bool:
        """Ask for a switchover; whether it began."""
        state, revision = await self.state()
        records = {one.incarnation: one for one in (await self.members()).values()}
        if state is None:
            return False
        try:
            wanted = switching(state, records, to)
        except ValueError:
            return False
        self.note(f"switchover to {to}")
        await self.backend.commit(
            [At(state_key("g"), revision)], [Put(state_key("g"), encode_group_record(wanted))]
        )
        return True

    async def force(self) -> None:
        """Accept what an election says that it loses, if it waits for that."""
        state, revision = await self.state()
        waits = [machine.agent.machine.waits for machine in self.machines if machine.agent]
        if state is None or not any(one and one.obstacle in FORCIBLE for one in waits):
            return
        self.note("forced")
        self.forced += 1
        wanted = encode_group_record(forced(state))
        await self.backend.commit([At(state_key("g"), revision)], [Put(state_key("g"), wanted)])

    # clients

    def burst(self, machine: GroupMachineHost, writes: int) -> None:
        """One client sends many writes at once, without waiting for answers."""
        self.note(f"{writes} writes at once to {machine.name}")
        for _ in range(writes):
            self.writes += 1
            if machine.database.answers:
                machine.database.soon(partial(machine.database.write, self.writes, _unheard))

    def insist(self, machine: GroupMachineHost, seconds: float) -> None:
        """One client sends writes to one server again and again, whoever is primary."""
        self.note(f"a client insists on {machine.name} for {seconds:.1f} s")
        for number in range(int(seconds / INSISTS_S)):
            self.after(number * INSISTS_S, partial(self._insist, machine.database))

    def _insist(self, database: SimDatabase) -> None:
        self.writes += 1
        if database.answers:
            database.soon(partial(database.write, self.writes, _unheard))

    async def keep_writing(self, name: str, until: float) -> None:
        """Write numbered entries to whatever accepts them; also on sessions that are old."""
        random = self.world.stream(f"client {name}")
        target = self.machines[0].database
        while self.world.now < until:
            self.writes += 1
            answer: asyncio.Future[bool] = asyncio.get_running_loop().create_future()

            def answered(ok: bool, answer: asyncio.Future[bool] = answer) -> None:
                if not answer.done():
                    answer.set_result(ok)

            number = self.writes
            if target.answers:
                target.soon(partial(target.write, number, answered))
            try:
                async with asyncio.timeout(0.3):
                    taken = await answer
            except TimeoutError:
                taken = False
            if not taken or random.random() < 0.02:
                target = random.choice(self.machines).database
            await asyncio.sleep(random.uniform(0.005, 0.03))

    # the end

    async def settled(self) -> str:
        """What is missing until the group is whole again; empty if nothing is."""
        state, _ = await self.state()
        if state is None or state.phase is not GroupPhase.SERVING:
            return f"the group is {'without state' if state is None else state.phase.value}"
        primary = self.databases[state.primary_server]
        if not primary.open_epoch:
            return f"primary {primary.name} is not open"
        for database in self.databases.values():
            if database is not primary and (
                database.follows != primary.name or len(database.log) < len(primary.log)
            ):
                return f"{database.name} does not follow {primary.name}"
        return ""

    def told(self) -> list[str]:
        """Each machine in one line, for people."""
        lines: list[str] = []
        for machine in self.machines:
            database, agent = machine.database, machine.agent
            line = (
                f"{machine.name}: {database.history} {len(database.log)} entries, follows "
                f"{database.follows or 'nobody'}, open {database.open_epoch}, "
                f"{machine.notes.load()}"
            )
            if agent is not None:
                want, seen = agent.machine.want, agent.machine.seen
                line += f", {agent.machine.doing}, {agent.machine.waits or ''}, {want}, {seen}"
            lines.append(line)
        return lines


def _unheard(taken: bool) -> None:
    """An answer that nobody waits for."""
