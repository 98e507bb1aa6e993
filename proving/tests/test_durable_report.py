"""The table of the durable benchmarks: figures beside their floors, goals and the disk."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from proving.benchmarks import durable
from proving.benchmarks.durable_parts import FILLING, Notebook, Noted
from proving.benchmarks.durable_report import CELLS, chosen, missing, table, verdict
from proving.benchmarks.kept import Kept


def measured(value: float, fsync_s: float = 0.000_1, **more: Any) -> dict[str, Any]:
    return {"value": value, "fsync_s": fsync_s, **more}


def test_an_event_has_100_bytes_as_it_is_stored() -> None:
    assert len(Notebook.__domicile_events__.encode(Noted(FILLING))) == 100


def test_a_row_shows_the_median_beside_floor_goal_processes_and_disk() -> None:
    rounds = [
        measured(per_s, p50_s=0.001, p99_s=0.002, cpu_us={"home": 30.0, "client": 8.0})
        for per_s in (21_000.0, 40_000.0, 22_000.0)
    ]
    assert table({"wire-sqlite": rounds}).splitlines()[2] == (
        "| keyed ask over the wire, 1,000 entities, 1,000 in flight, SQLite | 22,000/s | 20,000/s "
        "| 30,000/s | floor met | 1.00 / 2.00 | 30.0 | 8.0 |  | 0.10 |"
    )


@pytest.mark.parametrize(
    ("key", "value", "fsync_s", "said"),
    [
        ("wire-sqlite", 30_000.0, 0.004, "goal met"),
        ("wire-sqlite", 20_000.0, 0.004, "floor met"),
        ("wire-sqlite", 19_000.0, 0.000_2, "missed"),
        ("wire-sqlite", 19_000.0, 0.004, "missed, on a slow disk"),
        ("home-sqlite", 25.0, 0.004, "goal met"),
        ("home-sqlite", 35.1, 0.004, "missed"),
        ("size-postgresql", 500.0, 0.004, "floor met"),
        ("lone-postgresql", 1.6, 0.004, "missed, on a slow disk"),
        ("asyncpg-wire", 1.0, 0.004, ""),
    ],
)
def test_a_figure_is_judged_by_what_is_wanted(
    key: str, value: float, fsync_s: float, said: str
) -> None:
    assert verdict(CELLS[key], [measured(value, fsync_s)]) == said


def test_cells_are_chosen_by_words_in_their_names() -> None:
    assert chosen(["lone"]) == ["lone-sqlite", "lone-postgresql", "asyncpg-lone", "restate-lone"]
    assert chosen(["size-sqlite", "hot"]) == ["hot-sqlite", "hot-postgresql", "size-sqlite"]
    assert chosen([]) == list(CELLS)
    with pytest.raises(SystemExit):
        durable.arguments(["--only", "nothing like it"])


def test_what_is_absent_has_its_reason() -> None:
    told = missing({"restate-lone": "no npm"})
    assert told == "peer: Restate, one at a time, p50: not measured: no npm"


def test_rounds_are_kept_and_gone_on_with(tmp_path: Path) -> None:
    path = tmp_path / "cache" / "durable.json"
    kept = Kept(path, asdict(durable.QUICK))
    kept.add("wire-sqlite", measured(1.0))
    kept.add("wire-sqlite", measured(2.0))
    again = Kept(path, asdict(durable.QUICK))
    assert [one["value"] for one in again.cells["wire-sqlite"]] == [1.0, 2.0]
    again.forget("wire-sqlite")
    assert again.cells == {}
    assert Kept(path, asdict(durable.Scale())).cells == {}, "another scale begins anew"


def test_the_disk_is_probed_where_the_journal_lies(tmp_path: Path) -> None:
    assert durable.fdatasync_s(tmp_path, 3) > 0
    assert list(tmp_path.iterdir()) == []
