"""DX-20, DX-24 on real processes: entities that kill their process, and crashes without a cause."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import sys
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from random import Random

import pytest
from real_lab import run

from domicile import DomicileError, Entity, Settings, handler
from domicile.core.ids import EntityKey, ShardKey
from domicile.testing import Processes

SETTINGS = Settings(shards=64, http="127.0.0.1:0")
SHORTLY = replace(SETTINGS, poison_window_s=600)
"""Deaths count as one series, however slow the machine is."""
KEYS = [f"k{number}" for number in range(200)]
ADDRESS = re.compile(r"metrics and probes at http://(\S+)")


class Fuse(Entity, name="quarantine.fuse"):
    """Counts; `light` kills its process while a file exists."""

    def __init__(self) -> None:
        self.count = 0

    @handler
    async def add(self) -> int:
        self.count += 1
        return self.count

    @handler
    async def light(self, flag: str) -> int:
        if Path(flag).exists():  # noqa: ASYNC240
            os.kill(os.getpid(), signal.SIGKILL)
        return 0


def put_away(cluster: Processes) -> list[tuple[int, str, tuple[EntityKey, ...]]]:
    """Shards that are quarantined, or of which entities are."""
    found = [
        (number, cluster.entry(ShardKey("default", number)))
        for number in range(cluster.settings.shards)
    ]
    return [
        (number, entry.state, entry.barred)
        for number, entry in found
        if entry.state == "quarantined" or entry.barred
    ]


def most_deaths(cluster: Processes) -> int:
    """Of how many homes in a row the store says that they died with one shard."""
    shards = range(cluster.settings.shards)
    return max(cluster.entry(ShardKey("default", number)).deaths for number in shards)


def home_of_most_deaths(cluster: Processes) -> int:
    """The node that is home to the shard that lost most homes in a row."""
    entries = [
        cluster.entry(ShardKey("default", number)) for number in range(cluster.settings.shards)
    ]
    owner = max(entries, key=lambda entry: entry.deaths).owner
    return next(node.index for node in cluster.nodes if cluster.incarnation(node.index) == owner)


async def add_until_answered(cluster: Processes, key: str) -> None:
    for _ in range(600):
        try:
            await cluster.ref(Fuse, key).options(timeout_s=10).ask(Fuse.add)
        except DomicileError:
            await asyncio.sleep(0.05)
        else:
            return
    raise AssertionError(f"{key} was never served")


@asynccontextmanager
async def load(cluster: Processes) -> AsyncGenerator[None]:
    """Callers that ask one key after the other until the end."""
    over = asyncio.Event()

    async def caller(random: Random) -> None:
        while not over.is_set():
            await add_until_answered(cluster, random.choice(KEYS))
            await asyncio.sleep(0.005)

    async with asyncio.TaskGroup() as group:
        for number in range(4):
            group.create_task(caller(Random(number)))
        yield
        over.set()


def restart_the_dead(cluster: Processes) -> int:
    """Start every node whose process is gone; how many there were."""
    dead = [node.index for node in cluster.nodes if not node.up]
    for node in dead:
        cluster.start(node)
    return len(dead)


def logs(cluster: Processes) -> str:
    """What all processes logged so far."""
    return "\n".join(
        path.read_text(encoding="utf-8", errors="replace")
        for path in sorted(cluster.directory.glob("*.log"))
    )


async def domicile(*arguments: str) -> tuple[int | None, str]:
    """Run a command to its end; its exit code and what it printed."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "domicile", *arguments,
        stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE,
    )  # fmt: skip
    out, _ = await process.communicate()
    return process.returncode, out.decode()


async def metrics(cluster: Processes, node: int) -> str:
    log = cluster.nodes[node].log
    assert log is not None
    host, port = ADDRESS.findall(log.read_text(encoding="utf-8"))[-1].split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(b"GET /metrics HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
    text = await reader.read()
    writer.close()
    return text.decode()


@pytest.mark.scenario("DX-24")
def test_three_killed_nodes_leave_every_key_in_service(tmp_path: Path) -> None:
    async def test() -> None:
        async with Processes([Fuse], nodes=3, settings=SHORTLY, directory=tmp_path) as cluster:
            async with load(cluster):
                for key in KEYS:
                    await add_until_answered(cluster, key)
                crashes = 0
                while most_deaths(cluster) < 3:
                    # One that hits a shard on its way to another node counts for nobody.
                    crashes += 1
                    assert crashes <= 6
                    victim = home_of_most_deaths(cluster)
                    cluster.crash(victim)
                    for key in KEYS:
                        await add_until_answered(cluster, key)
                    cluster.start(victim)
                    await cluster.wait_until(cluster.settled, timeout_s=60)
                    assert put_away(cluster) == []
                assert most_deaths(cluster) == 3, "nothing else holds blame back"
            for key in KEYS:
                await add_until_answered(cluster, key)
            assert put_away(cluster) == []
            assert "quarantined" not in logs(cluster)

    run(test())


@pytest.mark.scenario("DX-20")
@pytest.mark.scenario("DX-24")
def test_an_entity_that_kills_its_process_is_put_away_announced_and_comes_back(
    tmp_path: Path,
) -> None:
    flag = tmp_path / "deadly"
    flag.touch()

    async def light(cluster: Processes) -> int:
        return await cluster.ref(Fuse, "mine").options(timeout_s=5).ask(Fuse.light, str(flag))

    async def until_put_away(cluster: Processes) -> int:
        """How many nodes die before it is put away; they are started again."""
        deaths = 0
        while not put_away(cluster):
            with pytest.raises(DomicileError):
                await light(cluster)
            deaths += restart_the_dead(cluster)
        return deaths

    async def shown(cluster: Processes) -> tuple[list[dict[str, object]], str]:
        """What `status` and a node's metrics say while it is put away, though that ends soon."""
        while True:
            await until_put_away(cluster)
            code, text = await domicile("status", cluster.store, "--json")
            found = json.loads(text)["quarantined"]
            page = await metrics(cluster, cluster.owner(Fuse, KEYS[0]))
            if found and put_away(cluster):
                assert code in (0, 3)
                return found, page

    async def test() -> None:
        async with Processes(
            [Fuse], nodes=3, settings=SETTINGS, directory=tmp_path / "cluster"
        ) as cluster:
            shard = cluster.shard(Fuse, "mine")
            where, entity = f"default/{shard.shard}", EntityKey("quarantine.fuse", "mine")
            async with load(cluster):
                assert await until_put_away(cluster) == 3
                assert put_away(cluster) == [(shard.shard, "serving", (entity,))]
                for key in KEYS:
                    await add_until_answered(cluster, key)
                said = [line for line in logs(cluster).splitlines() if " quarantined: " in line]
                assert len(said) == 1
                assert f"domicile unquarantine {where}" in said[0]
                found, page = await shown(cluster)
                assert [(one["type"], one["id"]) for one in found] == [entity]
                assert 'domicile_quarantined{what="entities"} 1' in page
                flag.unlink()
                code, _ = await domicile("unquarantine", where, cluster.store, "--yes")
                assert code == 0 or not put_away(cluster), "it may have come back by itself"
                await cluster.wait_until(lambda: not put_away(cluster))
                await cluster.wait_until(cluster.settled, timeout_s=60)
                assert await light(cluster) == 0

    run(test())
