"""RG-23: readiness is true only after registration and a first view of the assignment, and stays
sensible while the coordinator or the store is away.
"""

from __future__ import annotations

import asyncio
import re
from pathlib import Path

import pytest
from real_entities import Diary
from real_lab import balanced, run

from domicile import Entity, Node, Settings, handler
from domicile.observe.readiness import ProbeAnswer
from domicile.testing import Processes, Sim, simulated

FEW = Settings(shards=8)
READY = ProbeAnswer(True, "takes part")


class Lamp(Entity, name="lamp"):
    @handler
    async def light(self) -> str:
        return self.id

    @handler
    async def glow(self, seconds: float) -> None:
        await asyncio.sleep(seconds)


def answers(sim: Sim) -> list[ProbeAnswer]:
    """What each node that is up says now."""
    return [
        process.node.readiness() for process in sim.nodes if process.up and process.node is not None
    ]


@pytest.mark.scenario("RG-23")
@simulated(entities=[Lamp], nodes=3, seeds=10, settings=FEW)
async def test_readiness_comes_after_registration_and_the_first_view(sim: Sim) -> None:
    assert answers(sim) == [READY] * 3
    fresh = sim.add()
    seen: dict[str, None] = {}

    def joined() -> bool:
        node = sim.nodes[fresh].node
        assert node is not None
        answer = node.readiness()
        seen[answer.reason] = None
        life = node.life
        if answer.ok:
            # Not before it stands in the store and has seen that it does.
            assert life is not None
            assert life.me in life.member.members.nodes
            assert life.member.members.config is not None
            assert node.health().ok
        return answer.ok

    await sim.wait_until(joined)
    assert next(iter(seen)) in ("not started", "not registered yet")
    assert list(seen)[-1] == READY.reason


@pytest.mark.scenario("RG-23")
@simulated(entities=[Lamp], nodes=3, seeds=10, settings=FEW)
async def test_readiness_stays_while_the_coordinator_is_away(sim: Sim) -> None:
    first = leader(sim)
    sim.crash(first)
    for _ in range(100):
        await sim.advance(0.1)
        assert answers(sim) == [READY] * 2
    assert leader(sim) not in (first, None), "and another one took over meanwhile"


def leader(sim: Sim) -> int:
    """Which node coordinates."""
    for process in sim.nodes:
        life = None if process.node is None or not process.up else process.node.life
        if life is not None and life.control.leading:
            return process.index
    return -1


@pytest.mark.scenario("RG-23")
@simulated(entities=[Lamp], nodes=3, seeds=10, settings=FEW)
async def test_readiness_stays_while_the_store_is_away_until_the_lease_ends(sim: Sim) -> None:
    sim.store_outage()
    began = sim.loop.time()
    while sim.loop.time() - began < sim.settings.ttl_s - sim.settings.margin_s - 2:
        assert answers(sim) == [READY] * 3, "with all of them out of service, nothing would be left"
        await sim.advance(0.1)
    told: dict[str, None] = {}

    def all_out() -> bool:
        told.update((answer.reason, None) for answer in answers(sim))
        return not any(answer.ok for answer in answers(sim))

    await sim.wait_until(all_out)
    assert set(told) <= {READY.reason, "the lease ran out", "lost its lease and is rejoining"}
    for process in sim.nodes:
        assert process.node is not None
        assert process.node.health().ok, "a restart would help nobody"
    sim.store_back()
    await sim.wait_until(lambda: answers(sim) == [READY] * 3, timeout_s=60)
    await sim.wait_until(sim.settled, timeout_s=60)
    assert await sim.ref(Lamp, "a").ask(Lamp.light) == "a"


@pytest.mark.scenario("RG-23")
@simulated(
    entities=[Lamp], nodes=3, seeds=5, settings=Settings(shards=8, fencing="health"), locks=True
)
async def test_without_leases_readiness_does_not_end_with_the_store(sim: Sim) -> None:
    sim.store_outage()
    for _ in range(60):
        await sim.advance(1.0)
        assert answers(sim) == [READY] * 3
    sim.store_back()


@pytest.mark.scenario("RG-23")
@simulated(entities=[Lamp], nodes=3, seeds=10, settings=FEW)
async def test_one_that_leaves_is_not_ready_while_it_hands_over(sim: Sim) -> None:
    node = sim.nodes[1].node
    assert node is not None
    lamp = next(f"l{n}" for n in range(100) if sim.owner(Lamp, f"l{n}") == 1)
    glowing = asyncio.ensure_future(sim.ref(Lamp, lamp).ask(Lamp.glow, 2.0))
    await sim.advance(0.5)
    leaving = asyncio.ensure_future(sim.stop(1))
    await sim.advance(0.2)
    assert node.readiness() == ProbeAnswer(False, "leaving the cluster")
    assert node.health().ok
    assert answers(sim)[0] == READY
    await glowing
    await leaving
    assert not node.readiness().ok


# real processes


ADDRESS = re.compile(r"metrics and probes at http://(\S+)")


async def get(address: str, path: str) -> tuple[int, str]:
    """Status and body of a page."""
    host, port = address.split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    try:
        writer.write(f"GET {path} HTTP/1.1\r\nHost: {address}\r\n\r\n".encode())
        answer = (await reader.read()).decode()
    finally:
        writer.close()
    head, _, body = answer.partition("\r\n\r\n")
    return int(head.split(" ", 2)[1]), body


async def turns(address: str) -> int:
    """How many handlers a node has begun."""
    _, text = await get(address, "/metrics")
    return int(re.findall(r"^domicile_turns_total (\d+)$", text, re.MULTILINE)[0])


def address(cluster: Processes, node: int) -> str:
    """Where a node serves its probes, as its log says."""
    log = cluster.nodes[node].log
    assert log is not None
    found = ADDRESS.findall(log.read_text(encoding="utf-8"))
    return str(found[-1])


@pytest.mark.scenario("RG-23")
def test_probes_of_real_processes(tmp_path: Path) -> None:
    settings = Settings(shards=8, http="127.0.0.1:0", poison_deaths=1_000)

    async def test() -> None:
        async with Processes(
            [Diary], nodes=2, settings=settings, candidates=[0, 1], directory=tmp_path
        ) as cluster:
            await cluster.wait_until(lambda: balanced(cluster))
            at = [address(cluster, node) for node in (0, 1)]
            for one in at:
                assert await get(one, "/readyz") == (200, "takes part\n")
                assert await get(one, "/healthz") == (200, "runs\n")
            # So many that each node begins more than the 61 of which one is timed.
            diaries = [cluster.ref(Diary, f"d{n}") for n in range(64)]
            for diary in diaries * 10:
                await diary.ask(Diary.write, "x")
            totals = 0
            for one in at:
                status, text = await get(one, "/metrics")
                assert status == 200
                assert "\ndomicile_nodes 2\n" in text
                assert '\ndomicile_shards{role="default",phase="open"} 4\n' in text
                assert "\ndomicile_ready 1\n" in text
                totals += await turns(one)
                assert 'domicile_handler_seconds_count{type="diary",handler="write"}' in text
            assert totals == 640
            first = cluster.leader()
            assert first is not None
            other = 1 - first
            cluster.crash(first)
            while not (cluster.settled() and cluster.leader() == other):
                assert await get(at[other], "/readyz") == (200, "takes part\n")
            # One that leaves says so as long as it has to wait for something.
            begun = await turns(at[other])
            napping = asyncio.ensure_future(diaries[0].ask(Diary.nap, 4.0))
            while await turns(at[other]) == begun:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
            stopping = asyncio.ensure_future(cluster.stop(other))
            told: dict[tuple[int, str], None] = {}
            while not stopping.done():
                try:
                    told[await get(at[other], "/readyz")] = None
                except (OSError, IndexError):
                    break
            await stopping
            assert list(told)[-1] == (503, "leaving the cluster\n")
            await napping

    run(test())


def test_a_node_in_a_host_program_serves_its_own_probes(tmp_path: Path) -> None:
    async def test() -> None:
        node = Node(
            f"sqlite:///{tmp_path / 'store.db'}",
            entities=[Lamp],
            settings=Settings(shards=8, settle_s=0.05, http=":0"),
        )
        assert node.http_address == ""
        assert node.readiness() == ProbeAnswer(False, "not started")
        async with node:
            assert node.http_address.startswith("127.0.0.1:")
            while not node.readiness().ok:  # noqa: ASYNC110
                await asyncio.sleep(0.005)
            assert await get(node.http_address, "/readyz") == (200, "takes part\n")
            assert (await get(node.http_address, "/metrics"))[1].splitlines()[:3] == (
                node.metrics().splitlines()[:3]
            )
        assert node.http_address == ""
        assert node.readiness() == ProbeAnswer(False, "leaving the cluster")

    run(test())
