"""Nodes whose event loop is blocked: for a while, and for good (DX-10)."""

from __future__ import annotations

import asyncio
import logging
import os
import threading
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import pytest
from real_entities import enter
from real_lab import balanced, deadline, judge, lives, of, open_ledger, run, seen

from domicile import Entity, EventSourced, MaybeExecuted, Node, Settings, connect, handler
from domicile.backends.wiring import open_backends
from domicile.core.ids import EntityKey, Incarnation, ShardKey
from domicile.core.state.keys import node_key
from domicile.core.state.records import NodeRecord, decode_record
from domicile.core.state.shardmap import Entry
from domicile.entity.model.entity import entity_type
from domicile.incarnation.context import Backends
from domicile.journals.memory import MemoryJournal
from domicile.ports.meter import NoMeter
from domicile.testing import History, Processes

TTL_S = 2.0
PATIENT = Settings(shards=6, ttl_s=TTL_S, link_timeout_s=1.0)
"""A link that is silent for 3 s counts as lost, unless its peer says that its loop is blocked."""
BUSY_S = 120.0
"""Seconds that anything may take on a busy machine."""
STRICT = Settings(shards=6, ttl_s=TTL_S, stall_limit_s=1.0)


def stand_still(until: str) -> None:
    """Block the calling thread until a file is there."""
    while not os.path.exists(until):
        time.sleep(0.01)


class Mason(Entity, name="mason"):
    """Lays stones, and sometimes stands in everybody's way."""

    def __init__(self) -> None:
        self.stones = 0

    @handler
    async def lay(self) -> int:
        self.stones += 1
        return self.stones

    @handler
    async def wait_for(self, file: str) -> int:
        """Suspend until a file is there."""
        while not os.path.exists(file):  # noqa: ASYNC110, ASYNC240
            await asyncio.sleep(0.01)
        return await self.lay()

    @handler
    async def stand(self, until: str, sender: str) -> int:
        """Block the whole loop until a file is there, then go on for another step."""
        stand_still(until)
        await asyncio.sleep(0)
        enter(self.id, sender, 1)
        return os.getpid()


def at_home(cluster: Processes, node: int, count: int) -> list[str]:
    """Masons whose home is a node now."""
    found = [id for n in range(count * 30) if cluster.owner(Mason, id := f"m{n}") == node]
    assert len(found) >= count
    return found[:count]


def everything(cluster: Processes) -> list[Entry]:
    return [cluster.entry(ShardKey("default", n)) for n in range(cluster.settings.shards)]


def mine(cluster: Processes, node: int) -> Incarnation:
    found = cluster.incarnation(node)
    assert found is not None
    return found


def said(history: History, incarnation: Incarnation) -> list[bool]:
    """What a node's record said about its loop, one after the other."""
    key = node_key(incarnation)
    puts = [put for event in history.of("commit") for put in event.fields["puts"]]
    return [decode_record(value, NodeRecord).stalled for one, value, *_ in puts if one == key]


@pytest.mark.scenario("DX-10")
@pytest.mark.parametrize("loop", ["asyncio", "uvloop"])
@pytest.mark.parametrize("coordinates", [False, True])
def test_a_loop_that_is_blocked_for_longer_than_the_lease_costs_no_shard(
    loop: Literal["asyncio", "uvloop"],
    coordinates: bool,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    if loop == "uvloop":
        pytest.importorskip("uvloop")
    ledger, end = open_ledger(monkeypatch, tmp_path), tmp_path / "end"

    async def scenario() -> None:
        async with Processes([Mason], nodes=3, settings=PATIENT, loop=loop) as cluster:
            await cluster.wait_until(lambda: balanced(cluster))
            leader = cluster.leader()
            node = next(one for one in range(3) if (one == leader) == coordinates)
            me = mine(cluster, node)
            blocker, bystander = at_home(cluster, node, 2)
            asking = cluster.ref(Mason, bystander).options(timeout_s=BUSY_S)
            assert await asking.ask(Mason.lay) == 1
            before, began = everything(cluster), time.clock_gettime(time.CLOCK_BOOTTIME)
            standing = asyncio.ensure_future(
                cluster.ref(Mason, blocker)
                .options(timeout_s=BUSY_S)
                .ask(Mason.stand, str(end), "a")
            )
            await cluster.wait_until(lambda: len(of(cluster.history(), me, "start")) == 2)
            queued = [asyncio.ensure_future(asking.ask(Mason.lay)) for _ in range(5)]

            def long_ago() -> bool:
                renewals = [one.fields["sent_at"] for one in of(cluster.history(), me, "renewed")]
                return renewals[-1] > began + 2 * TTL_S

            await cluster.wait_until(long_ago)
            assert not any(ask.done() for ask in (standing, *queued))
            assert everything(cluster) == before
            end.touch()
            await standing
            assert await asyncio.gather(*queued) == [2, 3, 4, 5, 6], "still the same entity"
            assert seen(ledger) == {(blocker, "a"): [1]}
            assert everything(cluster) == before
            assert mine(cluster, node) == me
            await cluster.wait_until(lambda: said(cluster.history(), me)[-1] is False)
        history = cluster.history()
        assert not list(history.of("fenced"))
        assert True in said(history, me), "its peers knew why it was silent"
        judge(history)

    run(scenario())


@pytest.mark.scenario("DX-10")
def test_a_loop_that_is_blocked_beyond_the_limit_is_fenced_and_replaced(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    ledger, end = open_ledger(monkeypatch, tmp_path), tmp_path / "end"

    async def scenario() -> None:
        async with Processes([Mason], nodes=3, settings=STRICT) as cluster:
            await cluster.wait_until(lambda: balanced(cluster))
            leader = cluster.leader()
            node = next(one for one in range(3) if one != leader)
            me = mine(cluster, node)
            (blocker,) = at_home(cluster, node, 1)
            shard = cluster.shard(Mason, blocker)
            mason = cluster.ref(Mason, blocker).options(timeout_s=BUSY_S)
            assert await mason.ask(Mason.lay) == 1
            epoch = cluster.entry(shard).epoch
            cluster.note_fault("freeze", cluster.nodes[node])
            standing = asyncio.ensure_future(mason.ask(Mason.stand, str(end), "a"))
            await cluster.wait_until(lambda: len(of(cluster.history(), me, "start")) == 2)
            await cluster.wait_until(
                lambda: all(entry.owner not in ("", me) for entry in everything(cluster))
            )
            assert cluster.entry(shard).epoch > epoch
            with pytest.raises(MaybeExecuted):
                await standing
            assert await mason.ask(Mason.lay) == 1, "a new life elsewhere"
            taken_at = cluster.history().events[-1].at
            cluster.note_fault("thaw", cluster.nodes[node])
            end.touch()
            await cluster.wait_until(lambda: cluster.incarnation(node) not in (None, me))
            await cluster.wait_until(cluster.settled)
        history = cluster.history()
        assert seen(ledger) == {}, "the handler went on for another step"
        (fenced,) = of(history, me, "fenced")
        assert fenced.at > taken_at > deadline(history, me)
        late = of(history, me, "start", "resume", "reply", "released", "renewed")
        assert not [event for event in late if event.at > taken_at]
        assert len(lives(history, cluster.node_id(node))) == 2
        judge(history)

    run(scenario())


class Renewals(NoMeter):
    """Notes the renewals of one process, from whatever thread."""

    def __init__(self) -> None:
        self.fenced: list[str] = []
        self.sent_at: list[float] = []

    def event(self, kind: str, /, **fields: object) -> None:
        if kind == "renewed":
            self.sent_at.append(float(str(fields["sent_at"])))
        elif kind == "fenced":
            self.fenced.append(str(fields["reason"]))


def accepted(cluster: Processes) -> int:
    """How many messages have arrived at nodes."""
    return sum(event.kind == "accept" for event in cluster.recorded)


@pytest.mark.scenario("DX-10")
def test_a_client_whose_loop_is_blocked_keeps_its_lease_and_gets_its_answers(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    open_ledger(monkeypatch, tmp_path)

    async def scenario() -> None:
        notes, file = Renewals(), tmp_path / "end"
        async with Processes([Mason], nodes=2, settings=PATIENT) as cluster:
            # A mason forgets its stones when it moves.
            await cluster.wait_until(lambda: balanced(cluster))
            async with connect(cluster.store, settings=PATIENT, meter=notes) as client:
                mason = client.ref(Mason, "m").options(timeout_s=BUSY_S)
                assert await mason.ask(Mason.lay) == 1
                waiting = asyncio.ensure_future(mason.ask(Mason.wait_for, str(file)))
                queued = [asyncio.ensure_future(mason.ask(Mason.lay)) for _ in range(5)]
                await cluster.wait_until(lambda: accepted(cluster) == 7)
                began = notes.sent_at[-1]
                # The whole loop stands still, for several times the lease and the links' patience.
                touching = threading.Thread(
                    target=touch_when, args=(lambda: notes.sent_at[-1] > began + 3 * TTL_S, file)
                )
                touching.start()
                stand_still(str(file))
                assert notes.sent_at[-1] > began + 3 * TTL_S, "it renewed beside the loop"
                assert await waiting == 2
                assert await asyncio.gather(*queued) == [3, 4, 5, 6, 7]
                touching.join()
            assert notes.fenced == []

    run(scenario())


def test_a_client_that_does_not_turn_for_too_long_loses_its_lease(tmp_path: Path) -> None:
    async def scenario() -> None:
        notes, file = Renewals(), tmp_path / "end"

        def given_up() -> bool:
            return time.clock_gettime(time.CLOCK_BOOTTIME) > notes.sent_at[-1] + TTL_S

        async with connect(f"sqlite:///{tmp_path / 'store.db'}", settings=STRICT, meter=notes):
            touching = threading.Thread(target=touch_when, args=(given_up, file))
            touching.start()
            stand_still(str(file))
            touching.join()
            await wait_until(lambda: bool(notes.fenced))

    run(scenario())


# one process, so that both nodes write to one journal


@dataclass(frozen=True)
class Paid:
    amount: int


class Purse(EventSourced[int, Paid], name="purse"):
    """Counts what was paid in, and can be made to stand in the way in between."""

    stands = threading.Event()
    go_on = threading.Event()

    @staticmethod
    def initial(id: str, /) -> int:
        return 0

    @staticmethod
    def apply(state: int, event: Paid, /) -> int:
        return state + event.amount

    @handler
    async def pay(self, amount: int) -> int:
        await self.persist(Paid(amount))
        return await self.state()

    @handler
    async def stand_and_pay(self, amount: int) -> int:
        Purse.stands.set()
        assert Purse.go_on.wait(2 * BUSY_S)
        await self.persist(Paid(amount))
        return await self.state()


def in_node(path: Path, name: str, journal: MemoryJournal) -> Node:
    store = f"sqlite:///{path}"

    def wired() -> Backends:
        found = open_backends(store, cluster="domicile", settings=STRICT, by=name)
        return replace(found, journal=journal)

    return Node(store, entities=[Purse], settings=STRICT, node_id=name, backends=wired)


@asynccontextmanager
async def in_a_thread(node: Node) -> AsyncIterator[asyncio.AbstractEventLoop]:
    """A node on a loop of its own."""
    begun: asyncio.Queue[asyncio.AbstractEventLoop] = asyncio.Queue()
    home, over = asyncio.get_running_loop(), asyncio.Event()

    async def serve() -> None:
        async with node:
            home.call_soon_threadsafe(begun.put_nowait, asyncio.get_running_loop())
            await over.wait()

    thread = asyncio.ensure_future(asyncio.to_thread(asyncio.run, serve()))
    loop = await begun.get()
    try:
        yield loop
    finally:
        loop.call_soon_threadsafe(over.set)
        await thread


async def wait_until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(BUSY_S):
        while not condition():  # noqa: ASYNC110 - other loops make it true
            await asyncio.sleep(0.01)


def owners(node: Node) -> list[str]:
    """Who owns what, as a node knows it."""
    assert node.life is not None
    known = node.life.member.map
    return [known.get(ShardKey("default", n)).owner for n in range(STRICT.shards)]


@pytest.mark.scenario("DX-10")
def test_what_a_blocked_handler_writes_after_it_was_replaced_is_not_stored(tmp_path: Path) -> None:
    async def scenario() -> None:
        journal, path = MemoryJournal(), tmp_path / "store.db"
        Purse.stands.clear()
        Purse.go_on.clear()
        blocked, other = in_node(path, "blocked", journal), in_node(path, "other", journal)
        async with other, in_a_thread(blocked):
            assert blocked.life is not None
            assert other.life is not None
            me, you = blocked.life.me, other.life.me
            await wait_until(lambda: sorted(owners(other)) == sorted(3 * [me] + 3 * [you]))
            purses = [f"p{n}" for n in range(100)]
            id = next(id for id in purses if owners(other)[shard_of(id)] == me)
            purse = other.ref(Purse, id).options(timeout_s=BUSY_S)
            assert await purse.ask(Purse.pay, 1) == 1
            standing = asyncio.ensure_future(purse.ask(Purse.stand_and_pay, 10))
            await asyncio.to_thread(Purse.stands.wait, BUSY_S)
            await wait_until(lambda: owners(other) == 6 * [you])
            with pytest.raises(MaybeExecuted):
                await standing
            assert await purse.ask(Purse.pay, 100) == 101
            Purse.go_on.set()
            await wait_until(lambda: blocked.life is not None and blocked.life.me != me)
            assert journal.peek(EntityKey("purse", id)) == expected(1, 100)
            assert await purse.ask(Purse.pay, 1_000) == 1_101

    try:
        run(scenario())
    finally:
        Purse.go_on.set()
    assert not [one for one in threading.enumerate() if one.name.startswith("domicile-")]


def shard_of(id: str) -> int:
    described = entity_type(Purse)
    return described.place(EntityKey(described.name, id), STRICT.shards)


def expected(*amounts: int) -> tuple[bytes, ...]:
    return tuple(Purse.__domicile_events__.encode(Paid(amount)) for amount in amounts)


def test_a_handler_that_holds_the_loop_is_named(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    open_ledger(monkeypatch, tmp_path)

    async def scenario() -> None:
        async with Node("memory://stall", entities=[Mason], settings=Settings(shards=4)) as node:
            assert node.life is not None
            watch = node.life.loop_watch
            assert watch is not None

            def said() -> bool:
                return bool(watch.reports)

            file = tmp_path / "end"
            looking = threading.Thread(target=touch_when, args=(said, file))
            looking.start()
            try:
                await node.ref(Mason, "m1").ask(Mason.stand, str(file), "")
            finally:
                looking.join()
            (report,) = watch.reports
            assert report.handler == ("mason", "m1", "stand")
            line = stand_line()
            assert report.where == f"{__file__}:{line} in stand"
        assert not [one for one in threading.enumerate() if one.name.startswith("domicile-")]

    with caplog.at_level(logging.WARNING, logger="domicile"):
        run(scenario())
    assert "stand of mason 'm1' holds the event loop" in caplog.text


def touch_when(condition: Callable[[], bool], file: Path) -> None:
    deadline = time.monotonic() + BUSY_S
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.01)
    file.touch()


def stand_line() -> int:
    """Where the handler calls what blocks."""
    lines = Path(__file__).read_text(encoding="utf-8").splitlines()
    return lines.index("        stand_still(until)") + 1
