"""The page about running a replica group: its file is read, and its table is whole."""

from __future__ import annotations

import re
from dataclasses import fields
from pathlib import Path

from domicile.failover.replica_settings import (
    SERVER,
    ReplicaSettings,
    kind_options,
    replica_settings,
)

KINDS = ("postgresql", "valkey")

PAGE = Path(__file__).resolve().parents[2] / "docs" / "how-to" / "run-a-replica-group.md"


def test_the_file_on_the_page_is_accepted(tmp_path: Path) -> None:
    text = PAGE.read_text()
    found = re.search(r"```text\n(store = .*?)```", text, re.DOTALL)
    assert found is not None
    file = tmp_path / "orders-1.toml"
    file.write_text(found[1])
    settings = replica_settings(file, {})
    assert settings.id == "orders-1"
    assert settings.kind().name == "valkey"


def test_the_table_has_every_setting_and_its_default() -> None:
    rows = re.findall(r"^\| `([\w.]+)` \|(.*?)\|", PAGE.read_text(), re.MULTILINE)
    known = {
        (f"server.{one.name}" if one.name in SERVER else one.name): one.default
        for one in fields(ReplicaSettings)
        if one.name != "options"
    }
    known |= {f"server.{name}": "" for kind in KINDS for name in kind_options(kind)}
    assert sorted(name for name, _ in rows) == sorted(known)
    for name, shown in rows:
        if isinstance(known[name], float | int):
            assert float(shown) == known[name]
