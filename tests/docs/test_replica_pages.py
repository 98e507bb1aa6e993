"""The pages about running a replica group: their files are read, and the table is whole."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import pytest
from typer.main import get_command

from domicile.failover.replica_settings import (
    SERVER,
    ReplicaSettings,
    kind_options,
    replica_settings,
)
from domicile.ops.cli import app

KINDS = ("postgresql", "valkey")

PAGES = Path(__file__).resolve().parents[2] / "docs" / "how-to"
PAGE = PAGES / "run-a-replica-group.md"
POSTGRES = PAGES / "replica-group-of-postgresql.md"
CLIENTS = PAGES / "find-the-primary.md"


@pytest.mark.parametrize(
    ("page", "id", "kind"),
    [(PAGE, "orders-1", "valkey"), (POSTGRES, "bills-1", "postgresql")],
)
def test_the_file_on_the_page_is_accepted(page: Path, id: str, kind: str, tmp_path: Path) -> None:
    found = re.search(r"```text\n(store = .*?)```", page.read_text(), re.DOTALL)
    assert found is not None
    file = tmp_path / f"{id}.toml"
    file.write_text(found[1])
    settings = replica_settings(file, {})
    assert settings.id == id
    assert settings.kind().name == kind


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


def units() -> dict[str, str]:
    """The systemd units of the page, by their names."""
    return dict(
        re.findall(
            r"`(domicile-[a-z]+@\.service)`:\n\n```text\n(.*?)```", PAGE.read_text(), re.DOTALL
        )
    )


def test_the_units_call_what_there_is_and_ask_only_the_main_process() -> None:
    commands = get_command(app).commands["replica"].commands  # type: ignore[attr-defined]
    assert sorted(units()) == ["domicile-agent@.service", "domicile-guard@.service"]
    for name, unit in units().items():
        (line,) = re.findall(r"^ExecStart=(.*)$", unit, re.MULTILINE)
        command, *words = line.split("domicile replica ")[1].split()
        assert name == f"domicile-{command}@.service"
        options = {one for param in commands[command].params for one in param.opts}
        assert {one for one in words if one.startswith("--")} <= options
        # control-group, the default, would signal the server, too.
        assert re.findall(r"^KillMode=(.*)$", unit, re.MULTILINE) == ["mixed"]


def test_systemd_takes_the_units(tmp_path: Path) -> None:
    program = shutil.which("systemd-analyze")
    if program is None:
        pytest.skip("systemd-analyze is not installed: the page's units are not checked")
    for name, unit in units().items():
        real = unit.replace(
            "/opt/domicile/bin/domicile", str(Path(sys.executable).parent / "domicile")
        )
        (tmp_path / name).write_text(real)
    files = [str(tmp_path / f"domicile-{one}@orders-1.service") for one in ("guard", "agent")]
    for file in files:
        Path(file).symlink_to(Path(file).name.replace("orders-1", ""))
    ran = subprocess.run(
        [program, "verify", "--man=no", *files], capture_output=True, text=True, check=False,
        env={**os.environ, "SYSTEMD_UNIT_PATH": f"{tmp_path}:"},
    )  # fmt: skip
    about = [line for line in ran.stderr.splitlines() if "domicile" in line]
    assert about == [], ran.stderr


def test_haproxy_takes_what_the_page_shows(tmp_path: Path) -> None:
    program = shutil.which("haproxy") or shutil.which("haproxy", path="/usr/sbin")
    if program is None:
        pytest.skip("haproxy is not installed: the page's configuration is not checked")
    found = re.search(r"```text\n(defaults\n.*?)```", CLIENTS.read_text(), re.DOTALL)
    assert found is not None
    file = tmp_path / "haproxy.cfg"
    file.write_text(found[1])
    ran = subprocess.run(
        [program, "-c", "-f", str(file)], capture_output=True, text=True, check=False
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
