"""A replica group's PostgreSQL on a machine that is much too slow.

What is given up for being late is taken up again, or gets more time: else it never ends.
"""

from __future__ import annotations

import pytest
from postgres_group_lab import FOUND, PostgresServers, level, needs, run_on, serve

from domicile.failover.drivers.postgres import driver
from domicile.failover.records import Resyncs

NEWEST = max(FOUND, default=18)

PATIENCE_S = 0.5
LATE_S = 1.0
"""How long a server waits at least for each file of the log when it starts."""


def start_late(servers: PostgresServers, number: int) -> None:
    """From now on this server takes long to start: it looks into a slow archive first."""
    with servers.local[number].own_config().open("a") as file:
        file.write(f"restore_command = 'sleep {LATE_S}; false'\n")


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
