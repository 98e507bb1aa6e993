"""The tables of the stores' benchmark: figures beside their floors, and which machine was busy."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from proving.benchmarks import stores
from proving.benchmarks.stores_report import (
    CELLS,
    allowed,
    chosen,
    commits_table,
    flat,
    idle_table,
    page,
    watch_table,
)


def measured(value: float, load: float = 0.2, **more: Any) -> list[dict[str, Any]]:
    return [{"value": value, "load": load, "cpus": 2, "fsync_s": 0.000_1, **more}]


def idle(rate: float, load: float = 0.2) -> list[dict[str, Any]]:
    return measured(rate, load, node_share=0.003, server_share=0.01)


def test_an_idle_cluster_may_ask_once_a_second_for_each_node_and_five_times_besides() -> None:
    assert [allowed(nodes) for nodes in (1, 10, 50)] == [6.0, 15.0, 55.0]
    row = idle_table({"idle-etcd-10-16": idle(15.0), "idle-etcd-10-4096": idle(15.0)})
    assert row.splitlines()[2] == (
        "| etcd | 10 | 15.0 (1.50) |  |  | 15.0 (1.50) | 15 | met, flat | 0.30 % | 1.00 % | 0.2 |"
    )
    assert "| MISSED |" in idle_table({"idle-etcd-10-16": idle(15.1)})


def test_a_cost_that_grows_with_shards_is_told() -> None:
    assert flat([6.0, 7.0, 6.5])
    assert not flat([6.0, 10.1])
    rows = idle_table({"idle-redis-50-16": idle(20.0), "idle-redis-50-256": idle(40.0)})
    assert "met, NOT flat" in rows


def test_only_what_one_process_batches_has_a_floor() -> None:
    times = {"p50_s": 0.01, "p99_s": 0.02}
    found = {
        key: measured(rate, **times)
        for key, rate in (
            ("commits-postgresql-1x1", 10.0), ("commits-postgresql-1x64", 1_000.0),
            ("commits-redis-1x64", 10.0),
        )
    }  # fmt: skip
    rows = commits_table(found).splitlines()[2:]
    assert [row.split(" | ")[3:5] for row in rows] == [["", ""], ["1,000", "met"], ["", ""]]
    missed = commits_table({"commits-postgresql-1x64": measured(999.0, **times)})
    assert "| 1,000 | MISSED |" in missed


@pytest.mark.parametrize(("p99_s", "said"), [(0.05, "met"), (0.051, "MISSED")])
def test_a_watch_is_judged_by_its_p99(p99_s: float, said: str) -> None:
    found = {"watch-etcd": measured(p99_s, p50_s=0.001, p99_s=p99_s, max_s=0.2, count=500)}
    assert f"| 50 | {said} |" in watch_table(found)


def test_a_round_on_a_busy_machine_says_so() -> None:
    assert "| 1.0 |" in idle_table({"idle-etcd-1-16": idle(5.0, load=1.0)})
    assert "| 1.1 (busy) |" in idle_table({"idle-etcd-1-16": idle(5.0, load=1.1)})


def test_cells_are_chosen_by_name_or_by_words() -> None:
    assert chosen(["idle-etcd-1-16"]) == ["idle-etcd-1-16"], "one name, not all that begin so"
    assert len(chosen(["watch"])) == 4
    assert chosen([]) == list(CELLS)
    assert all(cell.key == key for key, cell in CELLS.items())
    assert page({}) == ""
    with pytest.raises(SystemExit):
        stores.arguments(["--only", "nothing like it"])


def test_what_is_missing_is_told_and_measured_first_round_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    done: list[str] = []

    def measure(cell: Any, scale: Any, parent: Any) -> dict[str, Any]:
        done.append(cell.key)
        return measured(2_000.0, p50_s=0.01, p99_s=0.02)[0]

    monkeypatch.setattr(stores, "measure", measure)
    asked = ["--cache", str(tmp_path), "--only", "commits-etcd", "--next"]
    for _ in range(4):
        assert stores.main(asked) == 0
    assert done == [
        "commits-etcd-1x1", "commits-etcd-1x64", "commits-etcd-4x16", "commits-etcd-1x1",
    ]  # fmt: skip
    assert "5 rounds are missing" in capsys.readouterr().out
    assert stores.main(asked[:-1]) == 0
    assert len(done) == 9


def test_the_page_keeps_the_cells_that_were_not_chosen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    page_file = tmp_path / "page.md"
    page_file.write_text(
        "<!-- measured:stores -->\nold\n<!-- /measured:stores -->\n", encoding="utf-8"
    )
    before = page_file.read_text(encoding="utf-8")

    def measure(cell: Any, scale: Any, parent: Any) -> dict[str, Any]:
        shares = {"node_share": 0.01, "server_share": 0.01, "p50_s": 0.01, "p99_s": 0.02}
        return measured(2_000.0, max_s=0.03, count=9, **shares)[0]

    monkeypatch.setattr(stores, "measure", measure)
    monkeypatch.setattr(stores, "PAGE", page_file)
    asked = ["--cache", str(tmp_path), "--rounds", "1", "--write-docs"]
    assert stores.main([*asked, "--only", "etcd"]) == 1
    assert "nothing is kept of commits-sqlite-1x1" in capsys.readouterr().err
    assert page_file.read_text(encoding="utf-8") == before
    assert stores.main(asked) == 0
    assert stores.main([*asked, "--only", "etcd", "--again"]) == 0
    written = page_file.read_text(encoding="utf-8")
    assert all(f"| {title} |" in written for title in ("SQLite", "etcd", "PostgreSQL"))
