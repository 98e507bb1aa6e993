"""The table of the failover benchmark: figures beside their goals, peers without any."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from domicile.failover.replica_settings import replica_settings
from proving.benchmarks import failover
from proving.benchmarks.failover_groups import settings_text
from proving.benchmarks.report import fill


def runs(*gaps: float, load: float = 0.2, **more: Any) -> list[dict[str, Any]]:
    told = {"lost": 0, "late": 0, "acked": 100, "failed": 0, "load": load, "cpus": 2, **more}
    return [{**told, "gap": gap} for gap in gaps]


def test_every_system_meets_every_loss_and_kills_are_repeated_most() -> None:
    assert len(failover.CELLS) == len(failover.SYSTEMS) * len(failover.LOSSES)
    wanted = {key: cell.runs for key, cell in failover.CELLS.items()}
    assert (wanted["valkey-server"], wanted["valkey-machine"], wanted["valkey-cut"]) == (30, 30, 10)
    assert (wanted["sentinel-server"], wanted["patroni-tuned-frozen"]) == (5, 10)
    assert failover.chosen(["sentinel-server"]) == ["sentinel-server"]
    assert len(failover.chosen(["patroni-"])) == 3 * len(failover.LOSSES)


def test_the_slowest_run_misses_the_goal_and_a_busy_machine_is_named() -> None:
    (row,) = failover.page({"valkey-server": runs(0.5, 0.6, 2.5, load=30.0)}).splitlines()[2:]
    assert row == (
        "| server killed | Domicile, Valkey | 3 of 30 | 0.50 | 0.60 | 2.50 | 2 | MISSED | 0 of 300 "
        "| 0 |  | 30.0 (busy) |"
    )
    (row,) = failover.page({"valkey-planned": runs(0.2, 0.3, failed=2)}).splitlines()[2:]
    assert row.endswith("| 0.30 | 0.5 | met | 0 of 200 | 0 | 4 | 0.2 |")


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
