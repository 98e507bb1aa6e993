"""The table of the failover benchmark: figures beside their goals, peers without any."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from domicile.failover.replica_settings import replica_settings
from proving.benchmarks import failover
from proving.benchmarks.failover_clients import Acked, Followers
from proving.benchmarks.failover_groups import settings_text
from proving.benchmarks.report import fill


def runs(*gaps: float, load: float = 0.2, **more: Any) -> list[dict[str, Any]]:
    told = {"lost": 0, "late": 0, "acked": 100, "failed": 0, "load": load, "cpus": 2, **more}
    return [{**told, "gap": gap} for gap in gaps]


def test_every_system_meets_every_loss_and_kills_are_repeated_most() -> None:
    ours = [key for key, system in failover.SYSTEMS.items() if system.ours]
    of_all = len(failover.SYSTEMS) * (len(failover.LOSSES) - 1)
    assert len(failover.CELLS) == of_all + len(ours)
    assert failover.chosen(["following"]) == [f"{key}-following" for key in ours]
    wanted = {key: cell.runs for key, cell in failover.CELLS.items()}
    assert (wanted["valkey-server"], wanted["valkey-machine"], wanted["valkey-cut"]) == (30, 30, 10)
    assert (wanted["sentinel-server"], wanted["patroni-tuned-frozen"]) == (5, 10)
    assert failover.chosen(["sentinel-server"]) == ["sentinel-server"]
    assert len(failover.chosen(["patroni-"])) == 3 * (len(failover.LOSSES) - 1)


def test_the_slowest_run_misses_the_goal_and_a_busy_machine_is_named() -> None:
    (row,) = failover.page({"valkey-server": runs(0.5, 0.6, 2.5, load=30.0)}).splitlines()[2:]
    assert row == (
        "| server killed | Domicile, Valkey | 3 of 30 | 0.50 | 0.60 | 2.50 | 2 | MISSED | 0 of 300 "
        "| 0 |  | 30.0 (busy) |"
    )
    (row,) = failover.page({"valkey-planned": runs(0.2, 0.3, failed=2)}).splitlines()[2:]
    assert row.endswith("| 0.30 | 0.5 | met | 0 of 200 | 0 | 4 | 0.2 |")


def test_clients_that_follow_have_a_row_of_their_own() -> None:
    told = runs(0.31, 0.42, failed=0)
    (row,) = failover.page({"postgresql-sync-following": told}).splitlines()[2:]
    assert row == (
        "| planned switchover, clients that follow | Domicile, PostgreSQL, sync | 2 of 10 | 0.31 "
        "| 0.36 | 0.42 | 0.5 | met | 0 of 200 |  | 0 | 0.2 |"
    )


def test_the_longest_wait_is_that_of_one_client_after_the_request() -> None:
    """Another client's acknowledgements do not cut it short; what ended before does not count."""

    def acked(*times: float) -> list[Acked]:
        return [Acked(f"w{at}", -1, at - 0.01, at) for at in times]

    first, second = acked(0.0, 2.0, 2.1, 2.6, 2.7), acked(1.9, 2.2, 2.3, 2.4, 2.5, 2.9)
    assert failover.longest_wait([first, second], 2.05) == pytest.approx(0.5)
    assert failover.longest_wait([first, second], 1.95) == pytest.approx(2.0)
    assert failover.longest_wait([second], 2.05) == pytest.approx(0.4)


def test_followers_count_what_fails_and_go_on() -> None:
    async def scenario() -> None:
        written: list[str] = []

        async def write(key: str) -> None:
            written.append(key)
            if len(written) == 3:
                raise ConnectionResetError("it may have run")

        async with Followers([write, write]) as clients:
            async with asyncio.timeout(60):
                while not clients.each_acked(5):  # noqa: ASYNC110
                    await asyncio.sleep(0.005)
            await clients.end()
        assert [str(error) for error in clients.failed] == ["it may have run"]
        acked = [one.key for each in clients.acked for one in each]
        assert written[2] not in acked
        assert len(set(written)) == len(written)
        assert set(acked) <= set(written)

    asyncio.run(scenario())


def test_peers_have_no_goal_and_lost_writes_are_counted() -> None:
    (row,) = failover.page({"sentinel-tuned-machine": runs(2.4, lost=7)}).splitlines()[2:]
    assert "| 1 of 10 | 2.40 | 2.40 | 2.40 |  |  | 7 of 100 | 0 |" in row


def test_what_an_old_primary_acknowledged_after_the_new_one_is_in_the_table() -> None:
    told = failover.page({"sentinel-tuned-cut": [*runs(2.4, late=1_200), *runs(2.6, late=161)]})
    names, row = ([cell.strip() for cell in line.split("|")] for line in told.splitlines()[::2])
    assert row[names.index("acknowledged late")] == "1,361"


def test_the_page_has_a_place_for_the_table(capsys: pytest.CaptureFixture[str]) -> None:
    text = failover.PAGE.read_text(encoding="utf-8")
    assert "a table" in fill(text, "failover", "a table\n")
    assert failover.main(["--list", "--only", "valkey-server"]) == 0
    assert capsys.readouterr().out == "valkey-server\n"


@pytest.mark.parametrize(
    ("driver", "mode"), [("valkey", "async"), ("postgresql", "async"), ("postgresql", "sync")]
)
def test_an_agent_takes_the_settings_that_the_benchmark_writes(
    tmp_path: Path, driver: str, mode: str
) -> None:
    home = tmp_path / "orders-1"
    home.mkdir()
    file = home / "server.toml"
    file.write_text(
        settings_text(home, 7001, 7002, "etcd://127.0.0.1:2379", driver, mode, Path("/bin"))
    )
    found = replica_settings(file, {})
    assert (found.id, found.mode, found.reached_at()) == ("orders-1", mode, "127.0.0.1:7002")
    found.kind()
    if driver == "postgresql":
        assert found.place().options == {"binaries": "/bin"}
