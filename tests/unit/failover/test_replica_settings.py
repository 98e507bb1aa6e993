"""Settings of a server of a group: file, environment, keywords, and the relations between them."""

from __future__ import annotations

import asyncio
import socket
from pathlib import Path
from typing import Any

import pytest

from domicile.errors import ConfigError
from domicile.failover import elsewhere
from domicile.failover.database_kinds import database_kind
from domicile.failover.elsewhere import check_resolved, server_port
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


def test_a_server_may_take_as_long_for_an_answer_as_the_settings_say() -> None:
    assert replica_settings(None, {}, **WHOLE).place().answer_s == 1.0
    assert replica_settings(None, {}, **WHOLE, ttl_s=20, probe_s=8).place().answer_s == 8.0


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
        ({"sync_count": 32}, r"sync_count must be .* less than 32"),
        ({"store": "redis://localhost:6379/0"}, "F14"),
        ({"url": "redis://"}, "host"),
    ],
)
def test_what_does_not_fit_is_refused(changed: dict[str, Any], why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        replica_settings(None, {}, **{**WHOLE, **changed})


@pytest.mark.parametrize(
    ("name", "value", "why"),
    [
        ("store", 5, "store must be a text, it is 5: .*etcd://"),
        ("group", 5, "group must be a text, it is 5"),
        ("driver", ["valkey"], r"driver must be a text, it is \['valkey'\]"),
        ("url", "", "server.url must be a text, it is ''"),
        ("id", 5, "id must be a text, it is 5: .*orders-1"),
        ("cluster", 5, "cluster must be a text, it is 5"),
        ("cluster", "a/b", "cluster='a/b' is no name"),
        ("cluster", "", "cluster='' is no name"),
        ("address", 5, "server.address must be a text, it is 5"),
        ("address", "noport", "server.address = 'noport' is not host:port: .*10.0.0.5:6379"),
        ("address", "h:", "server.address = 'h:' is not host:port"),
        ("address", ":6379", "server.address = ':6379' is not host:port"),
        ("address", "h:99999", "server.address = 'h:99999' is not host:port"),
        ("address", "fe80::1:6379", "server.address = 'fe80::1:6379' is not host:port"),
        ("http", 9465, "http must be a text, it is 9465: .*127.0.0.1:9465"),
        ("http", "9465", "http='9465' is no address: .*127.0.0.1:9464"),
        ("data", 5, "server.data must be a text, it is 5"),
        ("password_file", True, "server.password_file must be a text, it is True"),
        ("state", "", "state must be a text, it is ''"),
        ("mode", 5, "mode = 5 is not 'async' or 'sync'"),
        ("ttl_s", "3", "ttl_s must be a number, it is '3'"),
        ("probe_s", True, "probe_s must be a number, it is True"),
        ("switch_s", float("nan"), "switch_s must be positive, it is nan"),
        ("sync_count", "2", "sync_count must be a whole number, it is '2': .*sync_count = 1"),
        ("sync_count", 1.5, "sync_count must be a whole number, it is 1.5"),
        ("sync_count", True, "sync_count must be a whole number, it is True"),
        ("command", "valkey-server", "server.command must be a list of texts, it is 'valkey-s"),
        ("command", ["a", 5], r"server.command must be a list of texts, it is \('a', 5\)"),
        ("options", {"binaries": 5}, "server.binaries must be a text, it is 5"),
    ],
)
def test_a_value_of_a_wrong_kind_is_named_with_what_to_write(
    name: str, value: object, why: str
) -> None:
    with pytest.raises(ConfigError, match=why):
        replica_settings(None, {}, **{**WHOLE, name: value})
    with pytest.raises(ConfigError, match=why):
        ReplicaSettings(**{**WHOLE, name: value})


def test_a_variable_that_is_no_setting_is_told(caplog: pytest.LogCaptureFixture) -> None:
    replica_settings(None, {"DOMICILE_REPLICA_TTLS": "5", "DOMICILE_REPLICA_TTL_S": "5"}, **WHOLE)
    (told,) = [one.message for one in caplog.records]
    assert told == (
        "DOMICILE_REPLICA_TTLS is set in the environment, and nothing reads it; did you mean "
        "DOMICILE_REPLICA_TTL_S?"
    )


def test_a_mode_that_a_kind_has_not_is_named_with_those_it_has() -> None:
    settings = replica_settings(None, {}, **{**WHOLE, "mode": "sync"})
    with pytest.raises(ConfigError, match="a group of valkey has 'async' only"):
        settings.kind()


def test_a_value_of_a_wrong_kind_in_a_file_is_named(tmp_path: Path) -> None:
    for line, why in (
        ('sync_count = "2"', "sync_count must be a whole number, it is '2'"),
        ("cluster = 5", "cluster must be a text, it is 5"),
        ("probe_s = true", "probe_s must be a number, it is True"),
    ):
        with pytest.raises(ConfigError, match=why):
            replica_settings(written(tmp_path, f"{line}\n{FILE}"), {})
    with pytest.raises(ConfigError, match=r"server\.address must be a text, it is 5"):
        replica_settings(written(tmp_path, f"{FILE}\naddress = 5\n"), {})
    text = FILE.replace("valkey", "postgresql").replace("redis://", "postgresql://a@")
    with pytest.raises(ConfigError, match=r"server\.binaries must be a text, it is 5"):
        replica_settings(written(tmp_path, f"{text}\nbinaries = 5\n"), {})


def test_a_store_on_another_port_is_no_part_of_the_group() -> None:
    replica_settings(None, {}, **{**WHOLE, "store": "redis://localhost:6380"})


@pytest.mark.parametrize(
    ("store", "url", "address"),
    [
        ("redis://10.0.0.5:6379", "redis://127.0.0.1:6379", "10.0.0.5:6379"),
        ("redis://:secret@10.0.0.5", "redis://127.0.0.1", "10.0.0.5:6379"),
        ("rediss://DB.example.com/0", "redis://127.0.0.1", "db.example.com.:6379"),
        ("redis://localhost", "redis://127.0.0.1", ""),
        ("redis://127.0.0.2", "redis://127.0.0.1", ""),
        ("redis://[::1]", "redis://localhost", ""),
        ("redis://[::ffff:127.0.0.1]:6379", "redis://localhost", ""),
        ("redis://0.0.0.0:6379", "redis://localhost", ""),
        ("redis://[fd00:0::5]:6379", "redis://127.0.0.1", "[fd00::5]:6379"),
        ("redis:///run/valkey.sock", "redis://127.0.0.1", ""),
        ("postgresql://a@h1:5433,h2/domicile", "postgresql://a@h2:5432/postgres", ""),
        ("postgresql:///domicile", "postgresql://a@localhost/postgres", ""),
        ("postgresql:///d?host=/run/postgresql&port=5433", "postgresql://a@[::1]:5433/d", ""),
        ("postgresql://%2Frun%2Fpostgresql/d", "postgresql://a@127.0.0.1/d", ""),
    ],
)
def test_a_store_that_is_the_server_under_another_name_is_refused(
    store: str, url: str, address: str
) -> None:
    with pytest.raises(ConfigError, match="F14") as refused:
        replica_settings(None, {}, **{**WHOLE, "store": store, "url": url}, address=address)
    assert "secret" not in str(refused.value)


@pytest.mark.parametrize(
    ("store", "url", "address"),
    [
        ("redis://10.0.0.6:6379", "redis://127.0.0.1:6379", "10.0.0.5:6379"),
        ("redis:///run/valkey.sock", "redis://10.0.0.5", ""),
        ("sqlite:///var/lib/domicile.db", "redis://127.0.0.1", ""),
        ("etcd://127.0.0.1:2379,127.0.0.1:2381", "redis://127.0.0.1", ""),
        ("postgresql://a@localhost/domicile", "postgresql://a@localhost:5433/postgres", ""),
    ],
)
def test_a_store_elsewhere_is_accepted(store: str, url: str, address: str) -> None:
    replica_settings(None, {}, **{**WHOLE, "store": store, "url": url}, address=address)


def test_names_that_mean_one_machine_are_compared_by_its_addresses(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    names = {"db.internal": "10.0.0.5", "db-alias": "10.0.0.5", "other": "10.0.0.6"}

    def known(host: str, port: int, *_: object, **__: object) -> list[Any]:
        if host not in (*names, *names.values(), "198.51.100.7"):
            raise socket.gaierror(f"no address for {host}")
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (names.get(host, host), port))]

    monkeypatch.setattr(socket, "getaddrinfo", known)
    monkeypatch.setattr(elsewhere, "_is_own", lambda _, host: host == "198.51.100.7")

    def check(store: str, *servers: str) -> None:
        asyncio.run(check_resolved(store, [server_port(one, "address") for one in servers]))

    with pytest.raises(ConfigError, match="F14"):
        check("redis://db.internal", "db-alias:6379")
    with pytest.raises(ConfigError, match="F14"):
        check("redis://db.internal", "10.0.0.5:6379")
    with pytest.raises(ConfigError, match="F14"):
        check("redis://198.51.100.7", "127.0.0.1:6379")
    check("redis://db.internal", "other:6379")
    check("redis://db.internal:6380", "db-alias:6379")
    check("redis://not-known", "db-alias:6379")
    check("sqlite:///s.db", "db-alias:6379")


def test_only_an_address_of_this_machine_is_its_own() -> None:
    assert elsewhere._is_own(socket.AF_INET, "127.0.0.1")  # pyright: ignore[reportPrivateUsage]
    assert not elsewhere._is_own(socket.AF_INET, "192.0.2.1")  # pyright: ignore[reportPrivateUsage]


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (FILE.replace("group", "grop"), "did you mean 'group'"),
        (FILE.replace("url", "ulr"), r"\[server\] 'ulr'; did you mean 'url'"),
        (FILE.replace("[server]", "[serve]"), "unknown name 'serve'; did you mean 'server'"),
        ('data = "/d"\n' + FILE, r"unknown name 'data': it belongs into the table \[server\]"),
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


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("raise OSError('no library')", "can't be loaded from .*OSError: no library"),
        ("class Kind:\n    name = 'half'", "has no modes, options, check, driver, gate, process"),
        (
            "from domicile.errors import ConfigError\nraise ConfigError('pip install it')",
            "^pip install it$",
        ),
    ],
)
def test_a_kind_of_another_package_that_does_not_work_is_told(
    text: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = f"kind_{abs(hash(text))}"
    (tmp_path / f"{module}.py").write_text(text)
    info = tmp_path / "half-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: half\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[domicile.failover]\nhalf = {module}:Kind\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(ConfigError, match=said):
        database_kind("half")
    with pytest.raises(ConfigError, match="did you mean 'half'"):
        database_kind("hald")
