"""The page about running a replica group: its file is read, and its table is whole."""

from __future__ import annotations

import re
import shutil
import subprocess
from dataclasses import fields
from pathlib import Path

import pytest

from domicile.failover.replica_settings import (
    SERVER,
    ReplicaSettings,
    kind_options,
    replica_settings,
)

KINDS = ("postgresql", "valkey")

PAGES = Path(__file__).resolve().parents[2] / "docs" / "how-to"
PAGE = PAGES / "run-a-replica-group.md"
CLIENTS = PAGES / "find-the-primary.md"


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


def test_haproxy_takes_what_the_page_shows(tmp_path: Path) -> None:
    program = shutil.which("haproxy") or shutil.which("haproxy", path="/usr/sbin")
    if program is None:
        pytest.skip("haproxy is not installed: the page's configuration is not checked")
    found = re.search(r"```text\n(defaults\n.*?)```", CLIENTS.read_text(), re.DOTALL)
    assert found is not None
    file = tmp_path / "haproxy.cfg"
    file.write_text(found[1])
    ran = subprocess.run([program, "-c", "-f", str(file)], capture_output=True, text=True)
    assert ran.returncode == 0, ran.stdout + ran.stderr
