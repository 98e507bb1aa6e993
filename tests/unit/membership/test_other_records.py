"""A member with a record that is neither a node's nor a client's: made up here."""

from __future__ import annotations

import asyncio

import msgspec
import pytest
from member_lab import SETTINGS, Lab, Process, Tampered, done

from domicile.core.ids import Incarnation
from domicile.core.lease.lease import LeaseState
from domicile.core.state.cluster_view import ViewChange
from domicile.core.state.txn import Changes, Item, Listing, Put
from domicile.membership.member import Member
from domicile.membership.record_kinds import RecordKind
from domicile.testing.sim.clock import SimClock

AGENTS = b"agents/"


class AgentRecord(msgspec.Struct, frozen=True):
    """An agent beside a server that has a position in some history."""

    name: str
    incarnation: Incarnation
    position: int = 0
    retired: bool = False


class AgentKind(RecordKind[AgentRecord]):
    def incarnation(self, record: AgentRecord) -> Incarnation:
        return record.incarnation

    def key(self, incarnation: Incarnation) -> bytes:
        return AGENTS + incarnation.encode()

    def lease_id(self, incarnation: Incarnation) -> str:
        return f"agent-{incarnation}"

    def encode(self, record: AgentRecord) -> bytes:
        return msgspec.json.encode(record)

    def decode(self, value: bytes) -> AgentRecord:
        return msgspec.json.decode(value, type=AgentRecord)

    def evicted(self, record: AgentRecord) -> str:
        return "retired by its operator" if record.retired else ""


class Agent:
    """A process with such a member."""

    def __init__(self, lab: Lab, name: str) -> None:
        self.loop = lab.world.process(name)
        self.clock = SimClock(lab.world, self.loop)
        self.faults = lab.servers.faults(name)
        self.store = Tampered(lab.servers.remote_store(self.loop, name, self.faults))
        self.incarnation = Incarnation(name * 4)
        self.key = AGENTS + self.incarnation.encode()
        self.fenced: list[tuple[float, str]] = []
        self.member = Member(
            store=self.store,
            clock=self.clock,
            meter=lab.history,
            settings=SETTINGS,
            random=lab.world.stream(name),
            record=AgentRecord(name, self.incarnation),
            kind=AgentKind(),
            shards={},
            events=self,
        )

    def on_fact(self, fact: ViewChange) -> None: ...

    def on_listing(self, listing: Listing) -> None: ...

    def on_changes(self, changes: Changes) -> None: ...

    def on_renewed(self) -> None: ...

    def on_fenced(self, reason: str) -> None:
        self.fenced.append((self.clock.now(), reason))

    async def live(self) -> None:
        if await self.member.join():
            await self.member.run()

    def start(self) -> asyncio.Task[None]:
        return self.loop.create_task(self.live())


def sightings(process: Process, key: bytes) -> list[AgentRecord | None]:
    """What a member of the cluster saw of a key: records, and None when it was gone."""
    return [
        None if change.item is None else AgentKind().decode(change.item.value)
        for changes in process.changes
        for change in changes.changes
        if change.key == key
    ]


async def stored(lab: Lab, agent: Agent) -> Item:
    item = await lab.backend.get(agent.key)
    assert item is not None
    return item


@pytest.fixture
def lab() -> Lab:
    return Lab()


@pytest.fixture
def node(lab: Lab) -> Process:
    return Process(lab, "n1")


@pytest.fixture
def agent(lab: Lab) -> Agent:
    return Agent(lab, "a1")


def test_it_registers_renews_and_leaves(lab: Lab, node: Process, agent: Agent) -> None:
    async def main() -> None:
        node.start()
        await asyncio.sleep(1)
        task = agent.start()
        await asyncio.sleep(10 * SETTINGS.ttl_s)
        assert agent.member.guard()
        sent_at = [
            event.fields["sent_at"]
            for event in lab.history.of("renewed")
            if event.fields["inc"] == agent.incarnation
        ]
        assert len(sent_at) > 10
        until = sent_at[-1] + SETTINGS.ttl_s - SETTINGS.margin_s
        assert agent.member.lease.valid_until == pytest.approx(until)
        assert await done(agent.loop.create_task(agent.member.leave()))
        await done(task)
        await asyncio.sleep(1)
        assert sightings(node, agent.key) == [AgentRecord("a1", agent.incarnation), None]
        assert agent.member.lease.state is LeaseState.ENDED
        assert not agent.fenced

    lab.run(main())


def test_it_rewrites_its_record_under_the_same_lease(lab: Lab, node: Process, agent: Agent) -> None:
    async def main() -> None:
        node.start()
        agent.start()
        await asyncio.sleep(1)

        def moved(record: AgentRecord) -> AgentRecord:
            return msgspec.structs.replace(record, position=7)

        assert await done(agent.loop.create_task(agent.member.rewrite(moved)))
        assert agent.member.record.position == 7
        before = await stored(lab, agent)
        assert await done(agent.loop.create_task(agent.member.rewrite(moved)))
        assert await stored(lab, agent) == before, "nothing was to be changed"
        await done(agent.loop.create_task(agent.member.leave()))
        assert await lab.backend.get(agent.key) is None

    lab.run(main())


def test_without_a_store_it_is_fenced_and_then_seen_gone(
    lab: Lab, node: Process, agent: Agent
) -> None:
    async def main() -> None:
        node.start()
        task = agent.start()
        await asyncio.sleep(10)
        agent.faults.cut = True
        await done(task)
        ((at, reason),) = agent.fenced
        assert reason == "deadline passed"
        assert not agent.member.guard()
        assert await lab.backend.get(agent.key) is not None, "others must not act before it stops"
        assert sightings(node, agent.key)[-1] is not None
        await asyncio.sleep(at + 2 * SETTINGS.margin_s - lab.world.now)
        assert sightings(node, agent.key)[-1] is None

    lab.run(main())


def test_its_own_kind_says_what_ends_it(lab: Lab, agent: Agent) -> None:
    async def main() -> None:
        task = agent.start()
        await asyncio.sleep(1)
        retired = msgspec.structs.replace(agent.member.record, retired=True)
        await lab.backend.commit([], [Put(agent.key, AgentKind().encode(retired))])
        await done(task)
        assert [reason for _, reason in agent.fenced] == ["retired by its operator"]

    lab.run(main())


@pytest.mark.parametrize("value", [b"", b"{}", b"\xff"])
def test_a_record_that_it_cannot_read_ends_it(lab: Lab, agent: Agent, value: bytes) -> None:
    async def main() -> None:
        task = agent.start()
        await asyncio.sleep(1)
        await lab.backend.commit([], [Put(agent.key, value)])
        await done(task)
        ((_, reason),) = agent.fenced
        assert "cannot be read" in reason

    lab.run(main())
