"""Operators' commands on real clusters: what they commit is what coordinators and nodes heed."""

from __future__ import annotations

import asyncio
import shutil
import sys
from pathlib import Path

from domicile import Entity, Settings, handler
from domicile.core.ids import ShardKey
from domicile.core.state.shardmap import Entry
from domicile.testing import Processes, check

ROLE = "default"
PATIENT = Settings(ttl_s=60, shards=6)
"""Leases that outlive every test: what happens soon happens because an operator said so."""


class Candle(Entity, name="operate.candle"):
    """Burns somewhere."""

    @handler
    async def burn(self) -> int:
        return self.epoch


async def domicile(cluster: Processes, command: str, *arguments: str) -> str:
    """Run a command to its end; what it printed."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "domicile", command, *arguments, cluster.store,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip
    out, err = await process.communicate()
    assert process.returncode == 0, err.decode()
    return out.decode()


def entries(cluster: Processes) -> dict[int, Entry]:
    return {
        number: cluster.entry(ShardKey(ROLE, number)) for number in range(cluster.settings.shards)
    }


def of(cluster: Processes, node: int) -> list[int]:
    """The shards of a node."""
    owner = cluster.incarnation(node)
    return [number for number, entry in entries(cluster).items() if entry.owner == owner]


def test_a_frozen_node_is_declared_dead_long_before_its_lease_ends() -> None:
    async def scenario() -> None:
        async with Processes([Candle], nodes=3, settings=PATIENT, candidates=[0]) as cluster:
            await cluster.wait_until(lambda: cluster.settled() and len(of(cluster, 2)) == 2)
            before, dead, old = cluster.incarnation(2), of(cluster, 2), entries(cluster)
            cluster.freeze(2)
            said = await domicile(cluster, "declare-dead", "node-2", "--yes")
            assert "node-2" in said
            await cluster.wait_until(cluster.settled)
            found = entries(cluster)
            assert all(found[number].epoch == old[number].epoch + 1 for number in dead)
            # It was not dead: it finds its record gone, stops, and joins as another one.
            cluster.thaw(2)
            await cluster.wait_until(lambda: cluster.incarnation(2) not in (None, before))
            await cluster.wait_until(lambda: cluster.settled() and len(of(cluster, 2)) == 2)
            history = cluster.history()
        # The word was false, which is what the checkers object to, and to nothing that followed.
        told = [found.message for found in check(history)]
        assert told
        assert [words for words in told if "went before it stopped (C5)" not in words] == []

    asyncio.run(scenario())


def test_a_freed_shard_gets_a_new_epoch_and_a_drained_node_none() -> None:
    async def scenario() -> None:
        async with Processes([Candle], nodes=2, settings=PATIENT, candidates=[0]) as cluster:
            await cluster.wait_until(lambda: cluster.settled() and len(of(cluster, 1)) == 3)
            victim = of(cluster, 1)[0]
            epoch = entries(cluster)[victim].epoch
            await domicile(cluster, "drain", "node-1")
            await cluster.wait_until(lambda: not of(cluster, 1) and cluster.settled())
            await domicile(cluster, "free", f"{ROLE}/{victim}", "--yes")
            await cluster.wait_until(
                lambda: entries(cluster)[victim].epoch == epoch + 2 and cluster.settled()
            )
            assert len(of(cluster, 0)) == 6
            await domicile(cluster, "drain", "node-1", "--undo")
            await cluster.wait_until(lambda: cluster.settled() and len(of(cluster, 1)) == 3)
            history = cluster.history()
        # By force, as the checkers notice; and nothing else.
        (found,) = check(history)
        assert f"shard {ROLE}/{victim} was given to node-0" in found.message

    asyncio.run(scenario())


def test_epochs_after_a_restored_backup_are_beyond_all_that_were_used(tmp_path: Path) -> None:
    place, settings = tmp_path / "cluster", Settings(ttl_s=3, shards=6)

    async def run_once(moves: int) -> int:
        """The highest epoch after some moves by wish."""
        async with Processes([Candle], nodes=2, settings=settings, directory=place) as cluster:
            for _ in range(moves):
                shard = ShardKey(ROLE, 0)
                to = 1 if cluster.entry(shard).owner == cluster.incarnation(0) else 0
                await cluster.wish(shard, to)
                owner = cluster.incarnation(to)
                await cluster.wait_until(
                    lambda owner=owner, shard=shard: cluster.entry(shard).owner == owner  # type: ignore[misc]
                )
            await cluster.wait_until(cluster.settled)
            return max(entry.epoch for entry in entries(cluster).values())

    async def reset() -> None:
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "domicile", "reset-history", f"sqlite:///{place / 'store.db'}",
            "--yes", "--gap", "5000", stdin=asyncio.subprocess.DEVNULL,
        )  # fmt: skip
        assert await process.wait() == 0

    asyncio.run(run_once(0))
    backup = tmp_path / "backup.db"
    shutil.copy(place / "store.db", backup)
    used = asyncio.run(run_once(3))
    for file in place.glob("store.db*"):
        if file.is_file():
            file.unlink()
    for file in place.glob("*.events"):
        file.unlink()
    shutil.copy(backup, place / "store.db")
    asyncio.run(reset())

    async def scenario() -> None:
        async with Processes(
            [Candle], nodes=2, settings=settings, directory=place, record=False
        ) as cluster:
            assert min(entry.epoch for entry in entries(cluster).values()) > 5000 > used
            assert await cluster.ref(Candle, "a").ask(Candle.burn) > 5000

    asyncio.run(scenario())
