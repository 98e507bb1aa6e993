"""A backup made under load and put in place: refused, accepted, and safe from former owners."""

from __future__ import annotations

import asyncio
import os
from dataclasses import dataclass
from pathlib import Path

import asyncpg
import pytest
from postgres_lab import shared_server
from typer.testing import CliRunner

from domicile import EventSourced, Settings, handler
from domicile.errors import DomicileError
from domicile.ops.cli import app
from domicile.testing import Processes


@dataclass(frozen=True)
class Put:
    """An amount that came in."""

    amount: int


class Jar(EventSourced[int, Put], name="restore.jar"):
    """Adds up."""

    @staticmethod
    def initial(id: str) -> int:
        return 0

    @staticmethod
    def apply(state: int, event: Put) -> int:
        return state + event.amount

    @handler
    async def put(self, amount: int) -> int:
        return await self.persist(Put(amount))

    @handler
    async def total(self) -> int:
        return await self.state()


IDS = tuple(f"j{n}" for n in range(12))
SETTINGS = Settings(shards=8, ask_timeout_s=60.0, poison_deaths=1_000)
LIMIT_S = 120.0


def domicile(*words: str) -> None:
    done = CliRunner().invoke(app, ["journal", *words])
    assert done.exit_code == 0, done.output


class SqliteBackup:
    """A copy of the file."""

    def __init__(self, directory: Path) -> None:
        self.path = directory / "events.journal"
        self.url = f"sqlite:///{self.path}"
        self._copy = directory / "backup.journal"

    def make(self) -> None:
        domicile("copy", self.url, f"sqlite:///{self._copy}")

    async def put_in_place(self) -> None:
        await asyncio.to_thread(self._move)

    def _move(self) -> None:
        for suffix in ("", "-wal", "-shm"):
            path = Path(f"{self.path}{suffix}")
            if path.exists():
                path.rename(f"{path}.old")
        os.rename(self._copy, self.path)


class PostgresBackup:
    """An export, which is imported after the schema was dropped."""

    def __init__(self, directory: Path) -> None:
        self.url = shared_server().new_database()
        self._file = str(directory / "backup.jsonl")

    def make(self) -> None:
        domicile("export", self._file, "--journal", self.url)

    async def put_in_place(self) -> None:
        raw = await asyncpg.connect(self.url)
        # What the frozen process has open would hold the tables.
        await raw.execute(
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity "
            "WHERE datname = current_database() AND pid <> pg_backend_pid()"
        )
        await raw.execute("DROP SCHEMA domicile_journal CASCADE")
        await raw.close()
        await asyncio.to_thread(domicile, "import", self._file, "--journal", self.url)


class Callers:
    """They put amounts into jars, one after the other, until they are told to stop."""

    def __init__(self, cluster: Processes) -> None:
        self._cluster = cluster
        self.acknowledged = dict.fromkeys(IDS, 0)
        self._ends = False

    async def put(self, id: str) -> None:
        while not self._ends:
            self.acknowledged[id] = await self._cluster.ref(Jar, id).ask(Jar.put, 1)

    async def reach(self, more: int) -> None:
        """Until every jar has got so many more."""
        goal = {id: count + more for id, count in self.acknowledged.items()}
        await self._cluster.wait_until(
            lambda: all(self.acknowledged[id] >= goal[id] for id in IDS), timeout_s=LIMIT_S
        )

    def stop(self) -> None:
        self._ends = True


async def totals(cluster: Processes) -> dict[str, int]:
    return {id: await cluster.ref(Jar, id).ask(Jar.total) for id in IDS}


@pytest.mark.parametrize("kind", [SqliteBackup, PostgresBackup])
@pytest.mark.scenario("DX-30")
def test_a_restored_journal_is_refused_and_then_accepted(
    kind: type[SqliteBackup | PostgresBackup], tmp_path: Path
) -> None:
    backup = kind(tmp_path)

    async def scenario() -> None:
        async with Processes(
            [Jar], nodes=3, settings=SETTINGS, journal=backup.url, record=False
        ) as cluster:
            callers = Callers(cluster)
            async with asyncio.TaskGroup() as tasks:
                for id in IDS:
                    tasks.create_task(callers.put(id))
                await callers.reach(3)
                before = dict(callers.acknowledged)
                await asyncio.to_thread(backup.make)
                after = dict(callers.acknowledged)
                await callers.reach(3)
                callers.stop()
            ended = dict(callers.acknowledged)

            # One owner stands still with a message that it has not read.
            stale = cluster.owner(Jar, IDS[0])
            old = cluster.incarnation(stale)
            assert old is not None
            cluster.freeze(stale)
            late = asyncio.ensure_future(cluster.ref(Jar, IDS[0]).ask(Jar.put, 1_000))
            others = [node for node in range(3) if node != stale]
            for node in others:
                cluster.crash(node)
            await cluster.wait_until(lambda: cluster.status(old) is None, timeout_s=LIMIT_S)
            await backup.put_in_place()

            # Nodes refuse it, and say what to do.
            refused = cluster.nodes[others[0]]
            cluster.start(others[0])
            await cluster.wait_until(lambda: not refused.up, timeout_s=LIMIT_S)
            assert "run `domicile journal accept`" in refused.log_tail()

            where = ("--journal", backup.url, "--yes", "--why", "DX-30")
            await asyncio.to_thread(domicile, "accept", cluster.store, *where)
            for node in others:
                cluster.start(node)
            cluster.thaw(stale)
            await cluster.wait_until(cluster.settled, timeout_s=LIMIT_S)
            with pytest.raises(DomicileError):
                await late

            # What was there when the backup was made is there, and it goes on from it.
            restored = await totals(cluster)
            assert all(before[id] <= restored[id] <= after[id] + 1 for id in IDS)
            assert all(restored[id] < ended[id] for id in IDS)
            for id in IDS:
                assert await cluster.ref(Jar, id).ask(Jar.put, 1) == restored[id] + 1
            await asyncio.to_thread(domicile, "verify", "--journal", backup.url)

    asyncio.run(scenario())
