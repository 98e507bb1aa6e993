"""Deaths that are proved: records go at once, and only those of the dead (C5, L6)."""

from __future__ import annotations

from domicile import Entity, Settings, handler
from domicile.core.deaths import burial
from domicile.core.ids import LEADER_KEY, Incarnation, client_key, dead_key, node_key
from domicile.core.members import Members
from domicile.core.records import ClientRecord, LeaderRecord, NodeRecord, encode_record
from domicile.core.txn import At, Delete, Item, Listing, Present, Put
from domicile.testing import Sim, simulated

LONG = Settings(shards=16, ttl_s=60.0)
"""A lease that no test here waits for."""


class Lamp(Entity, name="lamp"):
    @handler
    async def look(self) -> str:
        return self.id


def some_members() -> Members:
    members = Members()
    records = {
        node_key(Incarnation("a")): NodeRecord("one", Incarnation("a"), "", (), (), 6.0),
        node_key(Incarnation("b")): NodeRecord("two", Incarnation("b"), "", (), (), 6.0),
        client_key(Incarnation("c")): ClientRecord(Incarnation("c")),
        LEADER_KEY: LeaderRecord(Incarnation("a"), "one"),
    }
    items = [Item(key, encode_record(record), 7, 7) for key, record in records.items()]
    members.relist(Listing(9, tuple(items)))
    return members


def test_a_dead_leader_loses_record_and_office_in_one_commit() -> None:
    conditions, writes = burial(some_members(), Incarnation("a"), "no lock", "mine")
    key = node_key(Incarnation("a"))
    assert conditions == (Present(key), At(LEADER_KEY, 7))
    proof = Put(dead_key(Incarnation("a")), b"no lock", "mine")
    assert writes == (Delete(key), proof, Delete(LEADER_KEY))


def test_another_node_or_client_loses_its_record_only() -> None:
    for dead, key in (("b", node_key(Incarnation("b"))), ("c", client_key(Incarnation("c")))):
        conditions, writes = burial(some_members(), Incarnation(dead), "no lock", "mine")
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
