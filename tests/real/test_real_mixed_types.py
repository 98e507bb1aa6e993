"""Real processes: nodes of one role with different entity types, and an update that adds one
(DX-26).
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys

import pytest
from real_lab import run

from domicile import Entity, Settings, Unavailable, handler
from domicile.testing import Processes
from domicile.testing.processes.node_process import NodeProcess

SETTINGS = Settings(shards=24, ask_timeout_s=60.0, poison_deaths=1_000)
"""Patient, so that a busy machine makes no ask fail."""

IDS = [f"a{number}" for number in range(60)]


class Room(Entity, name="room"):
    """Known to all nodes."""

    def __init__(self) -> None:
        self.count = 0

    @handler
    async def visit(self) -> int:
        self.count += 1
        return self.count


class Annex(Entity, name="annex"):
    """Known to new nodes only."""

    @handler
    async def where(self) -> str:
        return self.id


async def ask_all(cluster: Processes) -> None:
    """All annexes, at the same time."""

    async def one(id: str) -> None:
        assert await cluster.ref(Annex, id).ask(Annex.where) == id

    async with asyncio.TaskGroup() as group:
        for id in IDS:
            group.create_task(one(id))


async def known(cluster: Processes) -> None:
    """Return once the test's client knows a node with annexes."""
    while True:
        try:
            await cluster.ref(Annex, "first").ask(Annex.where)
        except Unavailable as error:
            if "no node has registered entity type 'annex'" not in str(error):
                raise
            await asyncio.sleep(0.05)
        else:
            return


@pytest.mark.scenario("DX-26")
def test_a_rolling_update_that_adds_a_type_fails_no_ask_and_is_told() -> None:
    async def test() -> None:
        cluster = Processes([Room, Annex], nodes=2, settings=SETTINGS)
        for node in cluster.nodes:
            node.entities = [Room]
        over = asyncio.Event()

        async def talk(id: str) -> None:
            while not over.is_set():
                await cluster.ref(Room, id).ask(Room.visit)
                await asyncio.sleep(0.01)

        async with cluster, asyncio.TaskGroup() as group:
            for number in range(8):
                group.create_task(talk(f"r{number}"))
            for old in range(2):
                cluster.nodes.append(NodeProcess(2 + old, True))
                cluster.start(2 + old)
                await known(cluster)
                await ask_all(cluster)
                assert [one["type"] for one in await gaps(cluster)] == ["annex"]
                await cluster.stop(old)
                await ask_all(cluster)
            assert await gaps(cluster) == []
            logs = "".join(
                path.read_text(encoding="utf-8") for path in cluster.directory.glob("node-*.log")
            )
            over.set()
        assert "'annex' is missing at node-0, node-1" in logs
        assert "lacks entity type 'annex', which other nodes of role 'default' have" in logs

    run(test())


async def gaps(cluster: Processes) -> list[dict[str, object]]:
    """What `domicile status --json` says of types that some nodes lack."""
    command = (sys.executable, "-m", "domicile", "status", cluster.store, "--json")
    process = await asyncio.create_subprocess_exec(*command, stdout=subprocess.PIPE)
    output, _ = await process.communicate()
    found: list[dict[str, object]] = json.loads(output)["type_gaps"]
    return found
