"""Candidates and their leaderships with real members and the reference store, in virtual time."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Coroutine, Iterator
from typing import Any

import pytest

from domicile.control.candidate import Candidate
from domicile.core.coordinator.events import Heard, ReleasedBy, RevertAsked
from domicile.core.ids import Incarnation, ShardKey, new_incarnation
from domicile.core.state.cluster_view import ViewChange
from domicile.core.state.keys import LEADER_KEY, drain_key, parse_block_key
from domicile.core.state.records import NodeRecord
from domicile.core.state.shardmap import Entry, ShardMap, decode_block
from domicile.core.state.txn import Changes, Delete, Listing, Put
from domicile.core.wire import Ping, Told, ToOwner
from domicile.errors import StoreUnavailable
from domicile.membership.member import Member
from domicile.membership.record_kinds import ProcessRecord, kind_of, marked_leaving
from domicile.settings import Settings
from domicile.stores.namespace import Namespace
from domicile.testing.history import History
from domicile.testing.sim.clock import SimClock
from domicile.testing.sim.loop import World
from domicile.testing.sim.servers import Servers

SETTINGS = Settings(ttl_s=2.0)
SHARDS = 40


class Lab:
    """A world with a store, a driver process, and nodes that hear each other after a moment."""

    def __init__(self, seed: int) -> None:
        self.world = World(seed)
        self.history = History(lambda: self.world.now)
        self.servers = Servers(self.world, self.history)
        self.driver = self.world.process("driver")
        self.store = self.servers.store.client("driver")
        self.nodes: dict[Incarnation, Node] = {}

    def run(self, main: Coroutine[Any, Any, None]) -> None:
        self.world.run(main, self.driver)
        assert self.world.errors == []
        for node in self.nodes.values():
            if node.task.done() and not node.task.cancelled():
                node.task.result()

    async def until(self, condition: Callable[[], bool], within_s: float = 20.0) -> float:
        start = self.world.now
        while not condition():
            assert self.world.now - start < within_s, "it did not come about in time"
            await asyncio.sleep(0.01)
        return self.world.now - start

    def post(self, to: Incarnation, action: Callable[[Node], None]) -> None:
        node = self.nodes.get(to)
        if node is not None:
            self.world.call_at(self.world.now + 0.001, lambda: node.loop.post(lambda: action(node)))

    def leaders(self) -> list[Node]:
        return [node for node in self.alive() if node.candidate.leading]

    def alive(self) -> list[Node]:
        return [node for node in self.nodes.values() if not node.loop.dead]

    def open(self) -> Counter[Incarnation]:
        """How many shards each living node has open, if each is open exactly once."""
        homes: Counter[int] = Counter()
        counts: Counter[Incarnation] = Counter()
        for node in self.alive():
            for shard, (phase, _) in node.phases.items():
                if phase == "open":
                    homes[shard] += 1
                    counts[node.me] += 1
        assert max(homes.values(), default=0) <= 1
        return counts

    def even(self) -> bool:
        counts = [self.open()[node.me] for node in self.alive()]
        return sum(counts) == SHARDS and max(counts) - min(counts) <= 1


class Node:
    """A member with its part in the coordination, and shards that are emptied at once."""

    def __init__(self, lab: Lab, name: str, candidate: bool = True) -> None:
        self.lab, self.name = lab, name
        self.loop = lab.world.process(name)
        self.clock = SimClock(lab.world, self.loop)
        self.faults = lab.servers.faults(name)
        random = lab.world.stream(name)
        self.me = new_incarnation(random)
        lab.nodes[self.me] = self
        store = lab.servers.remote_store(self.loop, self.me, self.faults)
        record: ProcessRecord = NodeRecord(
            name, self.me, name, ("r",), (), SETTINGS.ttl_s, candidate=candidate
        )
        self.member = Member(
            store=store,
            clock=self.clock,
            meter=lab.history,
            settings=SETTINGS,
            random=random,
            record=record,
            kind=kind_of(record),
            shards={"r": SHARDS},
            events=self,
        )
        self.candidate = Candidate(
            store=store,
            clock=self.clock,
            meter=lab.history,
            settings=SETTINGS,
            random=random,
            me=self.me,
            node_id=name,
            view=self.member.members,
            guard=self.member.guard,
            send=self.send,
            candidate=candidate,
        )
        self.map = ShardMap()
        self.phases: dict[int, tuple[str, int]] = {}
        self.stubborn = False
        self.fenced = ""
        self.task = self.loop.create_task(self.run())

    async def run(self) -> None:
        await self.member.join()
        async with asyncio.TaskGroup() as group:
            group.create_task(self.member.run())
            group.create_task(self.candidate.run())
            group.create_task(self.repeat())

    async def repeat(self) -> None:
        while not self.fenced:
            for shard, (phase, epoch) in tuple(self.phases.items()):
                if phase == "released":
                    self.say(shard, epoch)
            await asyncio.sleep(1.0)

    def send(self, to: Incarnation, message: ToOwner) -> None:
        def take(node: Node) -> None:
            if isinstance(message, Ping):
                self.lab.post(self.me, lambda me: me.candidate.feed(Heard(to)))
            elif isinstance(message, Told):
                node.see(ShardKey(message.role, message.shard), message.entry)

        self.lab.post(to, take)

    def say(self, shard: int, epoch: int) -> None:
        leader = self.member.members.leader
        if leader is not None:
            self.lab.post(
                leader.incarnation,
                lambda node: node.candidate.feed(ReleasedBy(self.me, ShardKey("r", shard), epoch)),
            )

    def see(self, shard: ShardKey, entry: Entry) -> None:
        """H9-H11 with nothing running."""
        if self.fenced or not self.map.merge(shard, entry):
            return
        phase, epoch = self.phases.get(shard.shard, ("closed", 0))
        if entry.owner != self.me:
            self.phases.pop(shard.shard, None)
        elif entry.state == "moving":
            if self.stubborn:
                self.phases[shard.shard] = ("draining", entry.epoch)
                return
            self.phases[shard.shard] = ("released", entry.epoch)
            self.say(shard.shard, entry.epoch)
        elif entry.epoch > epoch or phase == "draining":
            self.phases[shard.shard] = ("open", entry.epoch)

    def on_fact(self, fact: ViewChange) -> None:
        pass

    def on_listing(self, listing: Listing) -> None:
        self.candidate.on_listing(listing)

    def on_changes(self, changes: Changes) -> None:
        for change in changes.changes:
            if change.item is not None and change.key.startswith(b"map/"):
                role, number = parse_block_key(change.key)
                for index, entry in enumerate(decode_block(change.item.value).entries):
                    self.see(ShardKey(role, number * 64 + index), entry)
        self.candidate.on_changes(changes)

    def on_renewed(self) -> None:
        pass

    def on_fenced(self, reason: str) -> None:
        self.fenced = reason
        self.phases.clear()


@pytest.fixture(params=range(3))
def lab(request: pytest.FixtureRequest) -> Iterator[Lab]:
    lab = Lab(request.param)
    yield lab
    lab.world.close()


def told_after_stored(history: History) -> int:
    """I3 over a history: how many entries were told, each of them stored before."""
    stored: dict[tuple[str, int, int], Entry] = {}
    told = 0
    for event in history.of("commit", "told"):
        fields = event.fields
        if event.kind == "commit":
            for key, value, _ in fields["puts"]:
                if key.startswith(b"map/"):
                    role, number = parse_block_key(key)
                    for index, entry in enumerate(decode_block(value).entries):
                        stored[role, number * 64 + index, entry.change] = entry
        else:
            entry = stored[fields["role"], fields["shard"], fields["change"]]
            assert (entry.owner, entry.epoch, entry.state) == (
                fields["owner"],
                fields["epoch"],
                fields["state"],
            )
            told += 1
    return told


def test_the_first_node_leads_and_gets_every_shard(lab: Lab) -> None:
    async def main() -> None:
        node = Node(lab, "n1")
        await lab.until(lambda: lab.open()[node.me] == SHARDS, within_s=2.0)
        assert lab.leaders() == [node]

    lab.run(main())
    (leading,) = lab.history.of("leading")
    (item,) = [
        event
        for event in lab.history.of("commit")
        if any(key == LEADER_KEY for key, _, _ in event.fields["puts"])
    ]
    assert leading.fields["revision"] == item.fields["revision"]
    assert told_after_stored(lab.history) == SHARDS


def test_newcomers_get_their_share_and_the_leader_stays(lab: Lab) -> None:
    async def main() -> None:
        first = Node(lab, "n1")
        await lab.until(lambda: lab.open()[first.me] == SHARDS)
        for number in range(2, 6):
            Node(lab, f"n{number}")
        await lab.until(lab.even, within_s=15.0)
        assert lab.leaders() == [first]
        before = lab.servers.store.revision
        await asyncio.sleep(5.0)
        assert lab.servers.store.revision == before, "at rest nothing is written"

    lab.run(main())
    assert told_after_stored(lab.history) > SHARDS


def test_a_killed_leader_is_replaced_by_the_oldest_and_its_shards_are_taken_over(lab: Lab) -> None:
    async def main() -> None:
        nodes: list[Node] = []
        for number in range(4):
            nodes.append(Node(lab, f"n{number}"))
            await asyncio.sleep(0.3)
        await lab.until(lab.even)
        nodes[0].loop.kill()
        took_s = await lab.until(lambda: sum(lab.open().values()) == SHARDS)
        assert took_s < SETTINGS.ttl_s + 1.5
        assert lab.leaders() == [nodes[1]]
        await lab.until(lab.even)

    lab.run(main())
    told_after_stored(lab.history)


def test_resigning_hands_over_at_once(lab: Lab) -> None:
    async def main() -> None:
        first, second = Node(lab, "n1"), Node(lab, "n2")
        await lab.until(lab.even)
        (leader,) = lab.leaders()
        other = second if leader is first else first
        resigned = leader.loop.create_task(leader.candidate.resign())
        await lab.until(resigned.done)
        assert not leader.candidate.leading
        assert await lab.store.get(LEADER_KEY) is None or other.candidate.leading
        assert await lab.until(lambda: other.candidate.leading) < 1.0
        await asyncio.sleep(3.0)
        assert lab.leaders() == [other]

    lab.run(main())


def test_a_node_that_stops_campaigning_leads_on_but_never_again(lab: Lab) -> None:
    async def main() -> None:
        node = Node(lab, "n1")
        await lab.until(lambda: node.candidate.leading)
        node.candidate.stop_campaigning()
        await asyncio.sleep(3.0)
        assert node.candidate.leading
        await lab.store.commit((), (Put(LEADER_KEY, b"{}"),))
        await lab.until(lambda: not node.candidate.leading)
        await lab.store.commit((), (Delete(LEADER_KEY),))
        await asyncio.sleep(3.0)
        assert not node.candidate.leading

    lab.run(main())


def test_who_is_no_candidate_never_leads(lab: Lab) -> None:
    async def main() -> None:
        Node(lab, "n1", candidate=False)
        await asyncio.sleep(5.0)
        assert await lab.store.get(LEADER_KEY) is None
        second = Node(lab, "n2")
        await lab.until(lambda: second.candidate.leading)

    lab.run(main())


def test_a_frozen_leader_says_nothing_more(lab: Lab) -> None:
    async def main() -> None:
        nodes = [Node(lab, f"n{number}") for number in range(3)]
        await lab.until(lab.even)
        (leader,) = lab.leaders()
        leader.loop.freeze()
        await lab.until(lambda: any(node.candidate.leading for node in nodes if node is not leader))
        await asyncio.sleep(2.0)
        leader.loop.thaw()
        thawed_at = lab.world.now
        await asyncio.sleep(1.0)
        assert not leader.candidate.leading
        late = [
            event
            for event in lab.history.of("told", "leading")
            if event.fields["inc"] == leader.me and event.at >= thawed_at
        ]
        assert late == []

    lab.run(main())
    assert len(list(lab.history.of("deposed"))) == 1


def test_a_leader_without_a_store_stops_before_its_key_can_expire(lab: Lab) -> None:
    async def main() -> None:
        first, second = Node(lab, "n1"), Node(lab, "n2")
        await lab.until(lab.even)
        (leader,) = lab.leaders()
        leader.faults.cut = True
        cut_at = lab.world.now
        await lab.until(lambda: not leader.candidate.leading)
        assert lab.world.now - cut_at <= SETTINGS.ttl_s - SETTINGS.margin_s
        assert not [node for node in (first, second) if node.candidate.leading]
        await lab.until(lambda: len(lab.leaders()) == 1, within_s=3.0)

    lab.run(main())


def test_lost_answers_never_make_two_homes(lab: Lab) -> None:
    async def main() -> None:
        started = 0
        for _ in range(1500):
            for node in lab.alive():
                if node.fenced:
                    node.loop.kill()
            while len(lab.alive()) < 4:
                node = Node(lab, f"n{started}")
                node.faults.lost_reply = node.faults.lost_request = 0.08
                started += 1
            await asyncio.sleep(0.01)
            lab.open()
        assert started > 4, "nobody was fenced: the faults are too mild to prove anything"
        for node in lab.alive():
            node.faults.lost_reply = node.faults.lost_request = 0.0
        await lab.until(lab.even)

    lab.run(main())
    told_after_stored(lab.history)
    owners: dict[tuple[int, int], Incarnation] = {}
    for event in lab.history.of("commit"):
        for key, value, _ in event.fields["puts"]:
            if key.startswith(b"map/"):
                for index, entry in enumerate(decode_block(value).entries):
                    assert owners.setdefault((index, entry.epoch), entry.owner) == entry.owner


def test_a_drained_node_is_emptied_and_stays_empty(lab: Lab) -> None:
    async def main() -> None:
        nodes = [Node(lab, f"n{number}") for number in range(3)]
        await lab.until(lab.even)
        await lab.store.commit((), (Put(drain_key("n1"), b""),))
        took_s = await lab.until(lambda: lab.open()[nodes[1].me] == 0)
        assert took_s < 1.0
        await lab.until(lambda: sum(lab.open().values()) == SHARDS)
        await asyncio.sleep(3.0)
        assert lab.open()[nodes[1].me] == 0

    lab.run(main())


def test_a_leaving_leader_gives_its_shards_away(lab: Lab) -> None:
    async def main() -> None:
        first, second = Node(lab, "n1"), Node(lab, "n2")
        await lab.until(lab.even)
        (leader,) = lab.leaders()
        other = second if leader is first else first
        leader.candidate.stop_campaigning()
        leader.loop.create_task(leader.member.rewrite(marked_leaving))
        await lab.until(lambda: lab.open()[other.me] == SHARDS, within_s=1.0)
        assert lab.leaders() == [leader]

    lab.run(main())


def test_an_owner_that_cannot_empty_a_shard_gets_it_back(lab: Lab) -> None:
    async def main() -> None:
        first = Node(lab, "n1")
        await lab.until(lambda: lab.open()[first.me] == SHARDS)
        first.stubborn = True
        Node(lab, "n2")
        await lab.until(lambda: any(phase == "draining" for phase, _ in first.phases.values()))
        shard, (_, epoch) = next(
            (shard, held) for shard, held in first.phases.items() if held[0] == "draining"
        )
        lab.post(
            first.me,
            lambda node: node.candidate.feed(RevertAsked(node.me, ShardKey("r", shard), epoch)),
        )
        await lab.until(lambda: first.phases[shard] == ("open", epoch), within_s=0.1)

    lab.run(main())


def test_cancelling_the_task_ends_the_leadership(lab: Lab) -> None:
    async def main() -> None:
        node = Node(lab, "n1")
        await lab.until(lambda: node.candidate.leading)
        node.loop.call_soon(node.task.cancel)
        await lab.until(node.task.done)
        assert not node.candidate.leading

    lab.run(main())
    assert len(list(lab.history.of("deposed"))) == 1


class Ticked:
    """A store that is told who ticks it, takes its time, and loses every third tick."""

    tick_s = 0.23

    def __init__(self, node: Node, ticks: Counter[str]) -> None:
        self._store, self._node, self._ticks = node.candidate._calls.store, node, ticks

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    async def tick(self) -> None:
        self._ticks[self._node.name] += 1
        await asyncio.sleep(0.1)
        if self._ticks[self._node.name] % 3 == 0:
            raise StoreUnavailable("as the test wants it")


def test_the_leader_ticks_a_store_that_needs_it(lab: Lab) -> None:
    async def main() -> None:
        ticks: Counter[str] = Counter()
        for name in ("one", "two"):
            node = Node(lab, name)
            node.candidate._calls.store = Namespace(Ticked(node, ticks), "c")  # type: ignore[assignment]
            node.candidate._calls.store._prefix = b""
        await lab.until(lambda: len(lab.leaders()) == 1)
        [leader] = lab.leaders()
        before = ticks[leader.name]
        await asyncio.sleep(10.0)
        ticked = ticks[leader.name] - before
        assert ticked >= 43, "S4: at least four times a second, however long a tick takes"
        assert ticked <= 45, "and no more than is asked for (I8)"
        assert set(ticks) == {leader.name}
        leader.loop.kill()
        await lab.until(lambda: len(lab.leaders()) == 1 and lab.leaders()[0] is not leader)
        await lab.until(lambda: len(ticks) == 2)

    lab.run(main())
