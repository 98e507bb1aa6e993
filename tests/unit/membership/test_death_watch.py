"""Deaths that are proved: records go at once, and only those of the dead (C5, L6)."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest

from domicile import ConfigError, Entity, Node, Settings, handler
from domicile.core.ids import Incarnation
from domicile.core.lease.death_probes import PROBE_S, removal
from domicile.core.state.cluster_view import ClusterView
from domicile.core.state.keys import LEADER_KEY, client_key, dead_key, node_key
from domicile.core.state.records import ClientRecord, LeaderRecord, NodeRecord, encode_record
from domicile.core.state.txn import At, Delete, Item, Listing, Present, Put
from domicile.membership.death_watch import (
    EVIDENCE_S,
    SWEEP_EVERY_S,
    DeathWatch,
    check_fencing,
    let_go,
)
from domicile.ports.health import Health, Verdict
from domicile.stores.file_locks import FileLocks
from domicile.stores.memory.store import MemoryStore
from domicile.testing import Sim, simulated
from domicile.testing.history import History
from domicile.testing.sim.clock import SimClock
from domicile.testing.sim.health import SimLocks
from domicile.testing.sim.loop import World

LONG = Settings(shards=16, ttl_s=60.0)
"""A lease that no test here waits for."""


class Lamp(Entity, name="lamp"):
    @handler
    async def look(self) -> str:
        return self.id


def some_members() -> ClusterView:
    members = ClusterView()
    records = {
        node_key(Incarnation("a")): NodeRecord("one", Incarnation("a"), "", (), (), 6.0),
        node_key(Incarnation("b")): NodeRecord("two", Incarnation("b"), "", (), (), 6.0),
        client_key(Incarnation("c")): ClientRecord(Incarnation("c")),
        LEADER_KEY: LeaderRecord(Incarnation("a"), "one"),
    }
    items = [Item(key, encode_record(record), 7, 7) for key, record in records.items()]
    members.load(Listing(9, tuple(items)))
    return members


def test_a_dead_leader_loses_record_and_office_in_one_commit() -> None:
    conditions, writes = removal(some_members(), Incarnation("a"), "no lock", "mine")
    key = node_key(Incarnation("a"))
    assert conditions == (Present(key), At(LEADER_KEY, 7))
    proof = Put(dead_key(Incarnation("a")), b"no lock", "mine")
    assert writes == (Delete(key), proof, Delete(LEADER_KEY))


def test_another_node_or_client_loses_its_record_only() -> None:
    for dead, key in (("b", node_key(Incarnation("b"))), ("c", client_key(Incarnation("c")))):
        conditions, writes = removal(some_members(), Incarnation(dead), "no lock", "mine")
        assert conditions == (Present(key),)
        assert writes == (Delete(key), Put(dead_key(Incarnation(dead)), b"no lock", "mine"))


@simulated(entities=[Lamp], nodes=3, seeds=20, settings=LONG, locks=True, rough=True)
async def test_a_crash_does_not_wait_for_the_lease(sim: Sim) -> None:
    for id in ("a", "b", "c"):
        began = sim.world.now
        sim.crash(sim.owner(Lamp, id))
        await sim.wait_until(sim.settled)
        assert await sim.ref(Lamp, id).ask(Lamp.look) == id
        assert sim.world.now - began < 5.0
        for node in sim.nodes:
            if not node.up:
                sim.start(node.index)
        await sim.wait_until(sim.settled)


@simulated(entities=[Lamp], nodes=3, seeds=20, settings=LONG, locks=True)
async def test_a_frozen_process_is_not_dead(sim: Sim) -> None:
    frozen = sim.owner(Lamp, "a")
    before = sim.nodes[frozen].incarnation
    sim.freeze(frozen)
    await sim.advance(20.0)
    assert sim.owner(Lamp, "a") == frozen
    sim.thaw(frozen)
    assert await sim.ref(Lamp, "a").ask(Lamp.look) == "a"
    assert sim.nodes[frozen].incarnation == before


# a look-out of its own, with a health port that a test dictates

A, B = Incarnation("a"), Incarnation("b")


class Oracle:
    """A health port that says what it is told to say, and may fail."""

    def __init__(self) -> None:
        self.says: dict[Incarnation, Verdict] = {}
        self.broken: tuple[str, ...] = ()
        self.asked: list[Incarnation] = []
        self.gone: list[bool] = []

    def hold(self, incarnation: Incarnation) -> None:
        """Nothing to hold."""

    def let_go(self, incarnation: Incarnation, *, gone: bool = True) -> None:
        if "let_go" in self.broken:
            raise RuntimeError("no locks today")
        self.gone.append(gone)

    def verdict(self, incarnation: Incarnation) -> Verdict:
        self.asked.append(incarnation)
        if "verdict" in self.broken:
            raise RuntimeError("no verdicts today")
        return self.says.get(incarnation, Verdict.ALIVE)

    def evidence(self, incarnation: Incarnation) -> str:
        if "evidence" in self.broken:
            raise RuntimeError("no words today")
        return "told so"


class Lookout:
    """Node `b` looks out for node `a`, in a store that holds both of their records."""

    def __init__(self, settings: Settings, oracle: Oracle | None = None) -> None:
        self.world = World(1)
        self.loop = self.world.process("test")
        self.history = History(self.world.clock)
        self.store = MemoryStore(SimClock(self.world, self.loop)).client("test")
        self.oracle = oracle or Oracle()
        self.members = ClusterView()
        self.deaths = DeathWatch(
            store=self.store, health=self.oracle, clock=SimClock(self.world, self.loop),
            meter=self.history, settings=settings, members=self.members, me=B,
            lease="mine", guard=lambda: True,
        )  # fmt: skip

    def run(self, test: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Let the look-out run beside a test, which begins well before the next look."""

        async def main() -> None:
            await self.store.grant("mine", 10 * EVIDENCE_S)
            for one in (A, B):
                record = NodeRecord(one, one, "", (), (), 6.0)
                await self.store.commit((), (Put(node_key(one), encode_record(record)),))
            self.members.load(await self.store.list(b""))
            looking = asyncio.ensure_future(self.deaths.run())
            await asyncio.sleep(PROBE_S / 4)
            try:
                await test()
            finally:
                looking.cancel()
                await asyncio.gather(looking, return_exceptions=True)

        try:
            self.world.run(main(), self.loop)
        finally:
            self.world.close()
        assert not self.world.errors

    async def stands(self) -> bool:
        """Whether the record of `a` is there."""
        return await self.store.get(node_key(A)) is not None


@pytest.fixture
def lookout() -> Lookout:
    return Lookout(Settings())


def test_a_suspect_that_is_dead_is_buried_before_the_next_look(lookout: Lookout) -> None:
    """SM-08."""

    async def test() -> None:
        lookout.oracle.says[A] = Verdict.DEAD
        began = lookout.world.now
        lookout.deaths.suspect(A)
        await asyncio.sleep(PROBE_S / 100)
        assert not await lookout.stands()
        assert lookout.world.now - began < PROBE_S / 2
        evidence = await lookout.store.get(dead_key(A))
        assert evidence is not None
        assert evidence.value == b"told so"

    lookout.run(test)


@pytest.mark.parametrize("verdict", [Verdict.ALIVE, Verdict.UNKNOWN])
def test_a_suspect_that_is_not_proved_dead_keeps_its_record(
    lookout: Lookout, verdict: Verdict
) -> None:
    async def test() -> None:
        lookout.oracle.says[A] = verdict
        lookout.oracle.asked.clear()
        lookout.deaths.suspect(A)
        assert lookout.oracle.asked == [A], "it was looked at, at once"
        await asyncio.sleep(100 * PROBE_S)
        assert await lookout.stands()

    lookout.run(test)


def test_only_others_that_are_registered_can_be_suspected(lookout: Lookout) -> None:
    async def test() -> None:
        lookout.oracle.asked.clear()
        lookout.deaths.suspect(B)
        lookout.deaths.suspect(Incarnation("stranger"))
        assert lookout.oracle.asked == []

    lookout.run(test)


def test_a_health_port_that_raises_proves_nothing_and_stops_nothing(lookout: Lookout) -> None:
    async def test() -> None:
        lookout.oracle.says[A] = Verdict.DEAD
        lookout.oracle.broken = ("verdict",)
        lookout.deaths.suspect(A)
        lookout.deaths.look_soon()
        await asyncio.sleep(10 * PROBE_S)
        assert await lookout.stands()
        assert lookout.history.counts["health.failed"] > 5
        lookout.oracle.broken = ("evidence",)
        await asyncio.sleep(2 * PROBE_S)
        assert not await lookout.stands()
        evidence = await lookout.store.get(dead_key(A))
        assert evidence is not None
        assert b"can't say why (no words today)" in evidence.value

    lookout.run(test)


def test_without_a_lease_the_evidence_gets_one_of_its_own() -> None:
    lookout = Lookout(Settings(fencing="health"))

    async def test() -> None:
        await lookout.store.revoke("mine")
        lookout.oracle.says[A] = Verdict.DEAD
        await asyncio.sleep(2 * PROBE_S)
        assert not await lookout.stands()
        assert await lookout.store.get(dead_key(A)) is not None
        await asyncio.sleep(EVIDENCE_S)
        assert await lookout.store.get(dead_key(A)) is None, "it is kept for ever (I6)"

    lookout.run(test)


# clients, of which many come and go


C, D = Incarnation("c"), Incarnation("d")


async def register(lookout: Lookout, *clients: Incarnation) -> None:
    """Records of clients, as this node's watch shows them."""
    for one in clients:
        put = Put(client_key(one), encode_record(ClientRecord(one)))
        await lookout.store.commit((), (put,))
    lookout.members.load(await lookout.store.list(b""))


def test_a_client_that_parts_is_looked_at_and_nobody_else(lookout: Lookout) -> None:
    async def test() -> None:
        await register(lookout, C, D)
        lookout.oracle.asked.clear()
        lookout.deaths.parted(C)
        await asyncio.sleep(PROBE_S / 4)
        assert set(lookout.oracle.asked) == {C}
        lookout.oracle.asked.clear()
        lookout.deaths.parted(Incarnation("stranger"))
        await asyncio.sleep(PROBE_S / 4)
        assert lookout.oracle.asked == []
        lookout.deaths.parted(A)
        await asyncio.sleep(PROBE_S / 4)
        assert set(lookout.oracle.asked) == {A, C, D}, "a node may not have died alone"

    lookout.run(test)


@pytest.mark.parametrize(
    ("fencing", "gone"),
    [("lease", [True, True]), ("health", [True])],
    ids=["its lease ends", "without a lease a store that is put back needs the proof"],
)
def test_the_dead_are_buried_at_once_and_their_proof_let_go(fencing: str, gone: list[bool]) -> None:
    lookout = Lookout(Settings(fencing=fencing))

    async def test() -> None:
        await register(lookout, C, D)
        lookout.oracle.says[C] = Verdict.DEAD
        lookout.oracle.asked.clear()
        lookout.deaths.parted(C)
        await asyncio.sleep(PROBE_S / 4)
        assert await lookout.store.get(client_key(C)) is None
        assert set(lookout.oracle.asked) == {C}
        assert await lookout.store.get(client_key(D)) is not None
        assert lookout.oracle.gone == [True]
        lookout.oracle.says[A] = Verdict.DEAD
        lookout.deaths.parted(A)
        await asyncio.sleep(PROBE_S / 4)
        assert not await lookout.stands()
        assert lookout.oracle.gone == gone

    lookout.run(test)


class Keeper(Oracle):
    """A health port that keeps proofs."""

    swept = 0

    def sweep(self) -> int:
        self.swept += 1
        if "sweep" in self.broken:
            raise RuntimeError("no brooms today")
        return 0


def test_a_node_that_runs_on_removes_old_proofs_from_time_to_time() -> None:
    """Else they would stay until the next process starts."""
    keeper = Keeper()
    lookout = Lookout(Settings(), keeper)

    async def test() -> None:
        await asyncio.sleep(SWEEP_EVERY_S)
        assert keeper.swept == 1
        keeper.broken = ("sweep",)
        await asyncio.sleep(SWEEP_EVERY_S)
        assert keeper.swept == 2
        assert lookout.history.counts["health.failed"] == 1
        keeper.says[A] = Verdict.DEAD
        await asyncio.sleep(2 * PROBE_S)
        assert not await lookout.stands(), "the watch goes on"

    lookout.run(test)


def test_clients_that_come_and_go_do_not_put_off_the_look_at_everybody(lookout: Lookout) -> None:
    async def test() -> None:
        await register(lookout, C)
        lookout.oracle.says[A] = Verdict.DEAD
        for _ in range(100):
            lookout.deaths.parted(C)
            await asyncio.sleep(PROBE_S / 80)
        assert not await lookout.stands()

    lookout.run(test)


def test_letting_go_never_fails() -> None:
    oracle = Oracle()
    let_go(oracle, A, gone=False)
    oracle.broken = ("let_go",)
    let_go(oracle, A, gone=True)
    assert oracle.gone == [False]


# what fencing by health needs


def test_fencing_by_health_needs_a_health_port() -> None:
    check_fencing(Settings(fencing="health"), Oracle())
    check_fencing(Settings(), None)
    with pytest.raises(ConfigError, match=r"use a store of the form sqlite:///"):
        check_fencing(Settings(fencing="health"), None)


def test_a_node_without_a_health_port_does_not_join() -> None:
    async def join() -> None:
        settings = Settings(fencing="health")
        node = Node("memory://nobody-can-prove-anything", entities=[Lamp], settings=settings)
        with pytest.raises(ConfigError, match="or fencing='lease'"):
            async with node:
                pass

    asyncio.run(join())


def test_who_let_go_is_dead_unless_its_record_is_gone() -> None:
    world = World(1)
    try:
        health: Health = SimLocks().of(world.process("one"))
        assert health.verdict(A) is Verdict.UNKNOWN
        health.hold(A)
        assert health.verdict(A) is Verdict.ALIVE
        health.let_go(A, gone=False)
        assert health.verdict(A) is Verdict.DEAD
        health.hold(B)
        health.let_go(B)
        assert health.verdict(B) is Verdict.UNKNOWN
    finally:
        world.close()


def test_a_lock_file_that_was_let_go_of_is_proof(tmp_path: Path) -> None:
    mine, other = FileLocks(tmp_path), FileLocks(tmp_path)
    mine.hold(A)
    assert other.verdict(A) is Verdict.ALIVE
    mine.let_go(A, gone=False)
    assert other.verdict(A) is Verdict.DEAD
    assert "its holder has stopped permanently" in other.evidence(A)
    assert other.sweep() == 0, "proof stays for a while after it was first seen"
    assert other.verdict(A) is Verdict.DEAD
    assert other.sweep(older_than_s=-60.0) == 1
