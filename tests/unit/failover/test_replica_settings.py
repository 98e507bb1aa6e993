"""Settings of a server of a group: file, environment, keywords, and the relations between them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from domicile.errors import ConfigError
from domicile.failover.replica_settings import ReplicaSettings, replica_settings

FILE = """
store = "etcd://127.0.0.1:2379"
group = "orders"
driver = "valkey"
id = "orders-1"
state = ".domicile/orders-1"
ttl_s = 4

[server]
url = "redis://127.0.0.1:6379"
command = ["valkey-server", "valkey.conf"]
"""

WHOLE = {
    "store": "etcd://127.0.0.1:2379", "group": "orders", "driver": "valkey", "id": "orders-1",
    "state": "s", "url": "redis://127.0.0.1:6379",
}  # fmt: skip


def written(tmp_path: Path, text: str) -> Path:
    file = tmp_path / "orders-1.toml"
    file.write_text(text)
    return file


def test_a_file_gives_the_settings_and_the_environment_wins(tmp_path: Path) -> None:
    file = written(tmp_path, FILE)
    found = replica_settings(file, {})
    assert found.command == ("valkey-server", "valkey.conf")
    assert (found.ttl_s, found.probe_s, found.freeze_s, found.restart_s) == (4, 1.0, 1.0, 0.0)
    assert found.state == Path(".domicile/orders-1")
    assert found.reached_at() == "127.0.0.1:6379"
    found = replica_settings(
        file,
        {
            "DOMICILE_REPLICA_TTL_S": "5", "DOMICILE_REPLICA_SERVER_URL": "redis://h:7000",
            "DOMICILE_REPLICA_SERVER_COMMAND": "valkey-server 'my file'",
            "DOMICILE_REPLICA_ID": "other", "DOMICILE_TTL_S": "9",
        },
        id="mine",
    )  # fmt: skip
    assert (found.ttl_s, found.id) == (5.0, "mine")
    assert found.command == ("valkey-server", "my file")
    assert found.reached_at() == "h:7000"
    assert ReplicaSettings(**WHOLE).ttl_s == 3.0


def test_a_password_comes_from_a_file(tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("p@ss\n")
    found = replica_settings(
        None, {}, **{**WHOLE, "url": "redis://me@h:1"}, password_file=tmp_path / "secret"
    )
    assert found.place().url == "redis://me:p%40ss@h:1"
    with pytest.raises(ConfigError, match="password_file"):
        replica_settings(None, {}, **WHOLE, password_file="absent").place()


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        ({"ttl_s": 0.5}, "ttl_s"),
        ({"ttl_s": 2.0, "probe_s": 1.9}, "probe_s"),
        ({"freeze_s": 0}, "freeze_s"),
        ({"restart_s": -1}, "restart_s"),
        ({"switch_s": "x"}, "switch_s must be a number"),
        ({"mode": "maybe"}, "mode"),
        ({"group": "a/b"}, "group"),
        ({"id": "a/b"}, "id"),
        ({"state": 5}, "state must be a text"),
        ({"sync_count": 0}, "sync_count"),
        ({"store": "redis://localhost:6379/0"}, "F14"),
        ({"url": "redis://"}, "host"),
    ],
)
def test_what_does_not_fit_is_refused(changed: dict[str, Any], why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        replica_settings(None, {}, **{**WHOLE, **changed})


def test_a_store_on_another_port_is_no_part_of_the_group() -> None:
    replica_settings(None, {}, **{**WHOLE, "store": "redis://localhost:6380"})


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (FILE.replace("group", "grop"), "did you mean 'group'"),
        (FILE.replace("url", "ulr"), r"\[server\] 'ulr'; did you mean 'url'"),
        (FILE.replace('group = "orders"', ""), "must say group"),
        (FILE + 'binaries = "auto"\n', r"\[server\] 'binaries'"),
        (FILE.replace('["valkey-server", "valkey.conf"]', '"valkey-server"'), "list of texts"),
        ("x = ", "not TOML"),
        ("server = 1", "table"),
    ],
)
def test_a_wrong_file_says_what_is_wrong(tmp_path: Path, text: str, why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        replica_settings(written(tmp_path, text), {})


def test_a_wrong_variable_is_named() -> None:
    with pytest.raises(ConfigError, match="DOMICILE_REPLICA_TTL_S"):
        replica_settings(None, {"DOMICILE_REPLICA_TTL_S": "soon"}, **WHOLE)
    with pytest.raises(ConfigError, match="can't be read"):
        replica_settings(Path("absent.toml"), {})


def test_a_mode_that_the_database_lacks_is_refused() -> None:
    with pytest.raises(ConfigError, match="async"):
        replica_settings(None, {}, **WHOLE, mode="sync").kind()


def test_an_id_may_be_left_out_and_a_kind_has_settings_of_its_own(tmp_path: Path) -> None:
    text = """
store = "etcd://127.0.0.1:2379"
group = "ledger"
driver = "postgresql"
mode = "sync"
state = ".domicile/ledger-1"

[server]
url = "postgresql://agent@127.0.0.1:5432/postgres"
data = "data/ledger-1"
binaries = "auto"
replication = "postgresql://replicator@127.0.0.1:5432"
"""
    found = replica_settings(written(tmp_path, text), {"DOMICILE_REPLICA_SERVER_BINARIES": "/b"})
    assert found.id == "ledger-1"
    assert found.options == {
        "binaries": "/b",
        "replication": "postgresql://replicator@127.0.0.1:5432",
    }
