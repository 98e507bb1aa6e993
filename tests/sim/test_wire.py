"""Wire protocols of neighbouring versions in one cluster, and of versions too far apart (DX-19)."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from random import Random

import pytest
from manager_lab import inside

from domicile import ConfigError, Entity, Node, Settings, handler
from domicile.core.ids import ShardKey
from domicile.core.state.keys import CONFIG_KEY
from domicile.core.wire import Cancel, Carry, Probe, Probed, Suspect
from domicile.links import machine
from domicile.testing import Sim, simulated
from domicile.testing.sim.simulated import run_simulation

FEW = Settings(shards=8)


@pytest.fixture(autouse=True)
def _a_next_protocol(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if some messages of today had come with protocol 2: older links do without them."""
    for kind in (Cancel, Carry, Probe, Probed, Suspect):
        monkeypatch.setitem(machine.SINCE, kind, 2)
        monkeypatch.setitem(machine._TO_OWNER, kind, 2)


def spoken(sim: Sim) -> dict[tuple[str, str], int]:
    """What every dialled link between running nodes speaks."""
    names = {process.incarnation: process.name for process in sim.nodes if process.up}
    found: dict[tuple[str, str], int] = {}
    for process in sim.nodes:
        life = None if process.node is None or not process.up else process.node.life
        if life is not None and life._links is not None:
            for peer, side in life._links._out.items():
                if side.link.up and peer in names:
                    found[process.name, names[peer]] = side.link.protocol
    return found


class Desk(Entity, name="desk"):
    """Counts, and asks another desk to."""

    def __init__(self) -> None:
        self.count = 0

    @handler
    async def note(self, other: str) -> int:
        self.count += 1
        if other:
            await self.ref(Desk, other).ask(Desk.note, "")
        return self.count


@pytest.mark.scenario("DX-19")
@pytest.mark.parametrize("seed", range(6))
def test_neighbouring_protocols_run_together_through_a_rolling_update(seed: int) -> None:
    async def body(sim: Sim) -> None:
        asked = 0
        over = False

        async def load(lane: int) -> None:
            nonlocal asked
            while not over:
                await sim.ref(Desk, f"d{lane}").ask(Desk.note, f"e{lane}")
                asked += 1
                await sim.advance(0.02)

        async def shuffle() -> None:
            while not over:
                up = [process.index for process in sim.nodes if process.up]
                shard = ShardKey("default", sim.random.randrange(8))
                await sim.wish(shard, sim.random.choice(up))
                await sim.advance(0.3)

        async with asyncio.TaskGroup() as group:
            for lane in range(5):
                group.create_task(load(lane))
            group.create_task(shuffle())
            await sim.advance(2)
            assert set(spoken(sim).values()) == {1}
            for node in range(3):
                await sim.stop(node)
                sim.nodes[node].protocols = (1, 2)
                sim.start(node)
                await sim.wait_until(lambda n=node: sim.nodes[n].incarnation is not None)  # type: ignore[misc]
                await sim.advance(2)
                if node < 2:
                    check_spoken(sim)
            over = True
        await sim.wait_until(lambda: set(spoken(sim).values()) == {2})
        assert asked > 500
        assert not list(sim.history.of("lost"))
        outcomes = {event.fields["outcome"] for event in sim.history.of("outcome")}
        assert outcomes == {"ok"}, "no ask failed"

    sim = Sim(seed, entities=[Desk], nodes=3, settings=FEW)
    for process in sim.nodes:
        process.protocols = (1, 1)
    run_simulation(sim, body)


def check_spoken(sim: Sim) -> None:
    """In the middle of an update every pair speaks the newest that both know."""
    newest = {process.name: process.protocols[1] for process in sim.nodes}
    links = spoken(sim)
    assert links
    for (one, other), protocol in links.items():
        assert protocol == min(newest[one], newest[other])


@pytest.mark.scenario("DX-19")
@simulated(entities=[Desk], nodes=2, seeds=4, settings=FEW)
async def test_a_process_with_no_protocol_in_common_is_refused_and_told_why(sim: Sim) -> None:
    async def join(node: Node) -> str:
        wired = node._backends
        assert wired is not None
        stranger = Node(
            "sim://", entities=[Desk], settings=FEW, node_id="stranger", _protocols=(4, 4),
            backends=lambda: replace(wired(), random=Random(3)),
        )  # fmt: skip
        with pytest.raises(ConfigError) as refused:
            async with stranger:
                pass
        return str(refused.value)

    before = sim.servers.store.peek(CONFIG_KEY)
    why = await inside(sim, 0, join)
    for part in ("node 'node-", "4 to 4", "1 to 1", "none is common", "version by version"):
        assert part in why
    assert sim.servers.store.peek(CONFIG_KEY) == before
    client = sim.client_life
    assert client is not None
    nodes = [record.node for record in client.member.members.nodes.values()]
    assert sorted(nodes) == ["node-0", "node-1"]
    assert await sim.ref(Desk, "d").ask(Desk.note, "e") == 1
