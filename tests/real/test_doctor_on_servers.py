"""`domicile doctor` and `domicile store copy` on real servers: what they say, and what they leave.

Each kind of server has one that is in order and some that are not.
"""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import Generator
from contextlib import closing, contextmanager
from threading import Thread
from typing import NamedTuple

import asyncpg
import etcd_lab
import postgres_lab
import pytest
import redis_lab
from typer.testing import CliRunner

from domicile import Entity, Node, Settings, handler
from domicile.ops.cli import app

SETTINGS = Settings(shards=8, ttl_s=10.0, ask_timeout_s=60.0)


class Visited(Entity, name="doctor.visited"):
    """Makes the store have a cluster."""

    @handler
    async def visit(self) -> int:
        return self.epoch


class Said(NamedTuple):
    code: int
    text: str
    findings: dict[str, list[dict[str, str]]]
    """By subject."""

    def worst(self, subject: str) -> str:
        order = ["ok", "note", "warning", "error"]
        return max((one["severity"] for one in self.findings[subject]), key=order.index)

    def about(self, subject: str) -> str:
        return " ".join(f"{one['said']} {one['step']}" for one in self.findings[subject])


def doctor(url: str, *more: str) -> Said:
    result = CliRunner().invoke(app, ["doctor", url, "--json", *more])
    findings: dict[str, list[dict[str, str]]] = {}
    for one in json.loads(result.stdout)["findings"]:
        findings.setdefault(one["subject"], []).append(one)
    return Said(result.exit_code, result.output, findings)


def used(url: str) -> None:
    """Let a node use the store and leave."""

    async def main() -> None:
        async with Node(url, entities=[Visited], settings=SETTINGS) as node:
            await node.ref(Visited, "v").ask(Visited.visit)

    asyncio.run(main())


def schemas(url: str) -> list[str]:
    async def look() -> list[str]:
        connection = await asyncpg.connect(url)
        try:
            rows = await connection.fetch(
                "SELECT nspname FROM pg_namespace WHERE nspname LIKE 'd%'"
            )
            return [row["nspname"] for row in rows]
        finally:
            await connection.close()

    return asyncio.run(look())


COMMANDS = (
    ["doctor", "URL"], ["doctor", "URL", "--read-only"], ["status", "URL"],
    ["where", "doctor.visited", "v", "URL"], ["drain", "n1", "URL"], ["target", "v1", "URL"],
    ["reset-history", "URL", "--yes"],
)  # fmt: skip


def command_on(url: str, words: list[str]) -> tuple[int, str]:
    result = CliRunner().invoke(app, [url if word == "URL" else word for word in words])
    return result.exit_code, result.output


@pytest.mark.parametrize("words", COMMANDS, ids=" ".join)
def test_no_command_makes_a_store_in_a_database_that_has_none(words: list[str]) -> None:
    url = postgres_lab.shared_server().new_database()
    code, said = command_on(url, words)
    assert code in (2, 3), said
    assert "there is no store" in " ".join(said.split())
    assert schemas(url) == []


@pytest.mark.parametrize("words", COMMANDS, ids=" ".join)
def test_no_command_makes_a_store_on_a_redis_server_that_has_none(words: list[str]) -> None:
    process = redis_lab.shared()
    url = process.new_database()
    code, said = command_on(url, words)
    assert "o cluster" in said or words[0] == "doctor", said
    assert code == (0 if words[0] == "doctor" else 3), said
    assert process.ask("KEYS", f"{{{url.rpartition('=')[2]}}}:*") == []


def test_a_copy_makes_no_store_where_it_copies_from(tmp_path: object) -> None:
    url = postgres_lab.shared_server().new_database()
    result = CliRunner().invoke(app, ["store", "copy", url, f"sqlite:///{tmp_path}/there.db"])
    assert result.exit_code != 0
    assert "there is no store" in result.output
    assert schemas(url) == []
    process = redis_lab.shared()
    url = process.new_database()
    result = CliRunner().invoke(app, ["store", "copy", url, f"sqlite:///{tmp_path}/there.db"])
    assert result.exit_code == 3
    assert process.ask("KEYS", f"{{{url.rpartition('=')[2]}}}:*") == []


# PostgreSQL


def test_doctor_on_postgresql_tells_server_rights_durability_and_contents() -> None:
    url = postgres_lab.shared_server().new_database()
    used(url)
    said = doctor(url)
    assert said.code == 0, said.text
    for subject in ("server", "privileges", "durability", "standbys", "clock", "tables", "store"):
        assert said.worst(subject) in ("ok", "note"), said.about(subject)
    assert "PostgreSQL 1" in said.about("server")
    assert "primary" in said.about("server")
    assert "is a superuser" in said.about("privileges")
    assert "synchronous_commit = on" in said.about("durability")
    assert "history " in said.about("store")
    assert "changes are kept from revision 1 on" in said.about("store")
    assert "commits" in said.findings


def test_doctor_on_postgresql_names_what_a_user_lacks() -> None:
    server = postgres_lab.shared_server()
    url = server.new_database()
    name = url.rpartition("/")[2]
    role = f"app_{name}"
    owner, app_url = url, url.replace("domicile@", f"{role}@")

    def run(*statements: str) -> None:
        async def main() -> None:
            connection = await asyncpg.connect(owner)
            for statement in statements:
                await connection.execute(statement)
            await connection.close()

        asyncio.run(main())

    run(f"CREATE ROLE {role} LOGIN", f"REVOKE CREATE ON DATABASE {name} FROM PUBLIC")
    said = doctor(app_url)
    assert said.code == 3
    assert said.worst("privileges") == "error"
    assert "CREATE on the database" in said.about("privileges")
    used(owner)
    said = doctor(app_url)
    assert said.code == 3
    run(said.findings["privileges"][0]["step"].partition(": ")[2])
    assert doctor(app_url).code == 0
    run(f"REVOKE ALL ON ALL FUNCTIONS IN SCHEMA domicile_store FROM {role}")
    said = doctor(app_url)
    assert said.code == 3
    assert said.worst("privileges") == "error"
    assert "EXECUTE on about, compact" in said.about("privileges")
    # What it says to do next is what helps.
    run(said.findings["privileges"][0]["step"].partition(": ")[2])
    said = doctor(app_url)
    assert said.code == 0, said.text
    assert "may call the store's functions" in said.about("privileges")
    assert "ask as their owner" in said.about("tables")


@pytest.mark.parametrize(
    ("options", "subject", "severity", "words"),
    [
        (["-c", "fsync=off"], "durability", "error", "set `fsync = on`"),
        (["-c", "full_page_writes=off"], "durability", "warning", "full_page_writes = on"),
    ],
)
def test_doctor_on_postgresql_tells_of_settings_that_lose_commits(
    options: list[str], subject: str, severity: str, words: str
) -> None:
    bin = postgres_lab.programs()
    postgres_lab.shared_server()
    assert bin is not None
    server = postgres_lab.PostgresServer(bin, *options)
    try:
        server.start()
        url = server.new_database()
        used(url)
        said = doctor(url)
        assert said.worst(subject) == severity, said.text
        assert words in said.about(subject)
        assert said.code == (1 if severity == "error" else 0)
    finally:
        server.stop()


def test_doctor_on_postgresql_tells_what_is_not_promised_with_standbys() -> None:
    """An asynchronous one, then one that every commit waits for and that is gone, then itself."""
    bin = postgres_lab.programs()
    postgres_lab.shared_server()
    assert bin is not None
    server = postgres_lab.PostgresServer(bin)
    standby = postgres_lab.PostgresServer(bin)
    try:
        server.start()
        url = server.new_database()
        used(url)
        standby.follow(server)
        server.wait_for_standby()
        said = doctor(url)
        assert said.code == 0, said.text
        assert said.worst("standbys") == "warning"
        assert "acknowledged commits may be missing" in said.about("standbys")
        there = doctor(url.replace(f":{server.port}/", f":{standby.port}/"))
        assert there.code == 3, there.text
        assert there.worst("server") == "error"
        assert "name the primary" in there.about("server")
        server.set("synchronous_standby_names", "'nobody'")
        said = doctor(url, "--read-only")
        assert said.worst("standbys") == "error"
        assert "every commit waits for one" in said.about("standbys")
    finally:
        standby.stop()
        server.stop()


# Programs at the port that are no such server


@contextmanager
def stranger(answer: bytes) -> Generator[int]:
    """A program that answers everything with these bytes and closes; its port."""
    with closing(socket.create_server(("127.0.0.1", 0))) as server:

        def serve() -> None:
            while True:
                try:
                    asked, _ = server.accept()
                except OSError:
                    return
                with closing(asked):
                    asked.recv(65_536)
                    asked.sendall(answer)

        Thread(target=serve, daemon=True).start()
        yield server.getsockname()[1]
        server.shutdown(socket.SHUT_RDWR)


@pytest.mark.parametrize(
    ("url", "answer", "words"),
    [
        ("postgresql://app@127.0.0.1:{}/bank", b"HTTP/1.1 400 No\r\n\r\n", "a PostgreSQL server"),
        ("redis://127.0.0.1:{}/0", b"HTTP/1.1 400 No\r\n\r\n", "neither Redis nor Valkey"),
        ("redis://127.0.0.1:{}/0", b"", "or speak TLS: write rediss://"),
        ("etcd://127.0.0.1:{}", b"HTTP/1.1 400 No\r\n\r\n", "no etcd server"),
    ],
)
def test_another_program_at_the_port_is_told_as_such(url: str, answer: bytes, words: str) -> None:
    with stranger(answer) as port:
        said = doctor(url.format(port))
    assert said.code == 3, said.text
    assert words in said.about("store")


def test_a_redis_that_does_not_answer_tls_is_told_as_such() -> None:
    with closing(socket.create_server(("127.0.0.1", 0))) as server:
        said = doctor(f"rediss://127.0.0.1:{server.getsockname()[1]}/0")
    assert said.code == 3, said.text
    assert "if it speaks no TLS, write redis://" in said.about("store")


# etcd


def test_doctor_on_etcd_says_of_logins_what_it_saw() -> None:
    server = etcd_lab.needed()
    try:
        server.start()
        used(server.url("doctor"))
        server.ctl("user", "add", "root:right")
        server.ctl("user", "grant-role", "root", "root")
        server.ctl("auth", "enable")
        asked = server.url("doctor")
        said = doctor(asked)
        assert said.code == 3, said.text
        assert "asks for a user" in said.about("store")
        assert "may write" not in said.text
        said = doctor(asked.replace("//", "//root:wrong@"))
        assert said.code == 3, said.text
        assert "refuses user" in said.about("store")
        assert "logged in" not in said.text
        said = doctor(asked.replace("//", "//root:right@"))
        assert said.code == 0, said.text
        assert "logged in as 'root'" in said.about("access")
    finally:
        server.stop()


def test_doctor_on_etcd_tells_members_version_leader_space_access_and_history() -> None:
    server = etcd_lab.shared_server()
    url = server.url("doctor-one")
    used(url)
    said = doctor(url)
    assert said.code == 0, said.text
    for subject in ("members", "leader", "alarms", "space", "store"):
        assert said.worst(subject) in ("ok", "note"), said.about(subject)
    assert "run three members" in said.about("members")
    assert "etcd 3." in said.about("version")
    assert "leads" in said.about("leader")
    assert "the usual limit" in said.about("space") or "of 2,048" in said.about("space")
    assert "no TLS" in said.about("access")
    assert "no login" in said.about("access")
    assert "history " in said.about("store")
    assert "changes are kept from revision" in said.about("store")
    server.ctl("compact", str(server.revision()))
    assert f"kept from revision {server.revision():,} on" in doctor(url).about("store")


def test_doctor_on_etcd_tells_of_members_that_are_down_or_not_named() -> None:
    with etcd_lab.EtcdMembers() as members:
        url = members.url("doctor")
        used(url)
        said = doctor(url)
        assert said.code == 0, said.text
        assert "3 members; the store goes on without 1 of them" in said.about("members")
        assert said.worst("members") == "ok"
        one = f"etcd://127.0.0.1:{members.members[0].port}/doctor"
        assert "the URL does not name m1, m2" in doctor(one).about("members")
        down = next(one for one in members.members if one is not members.leader())
        down.kill()
        said = doctor(url)
        assert said.worst("members") == "warning"
        assert f"127.0.0.1:{down.port} gives no status" in said.about("members")
        # Without a majority the store is away, and the doctor still says who knows no leader.
        left = [one for one in members.members if one is not down]
        left[1].kill()
        said = doctor(url)
        assert said.code == 3, said.text
        assert "etcdctl" in said.about("members")


def test_doctor_on_etcd_tells_of_a_full_database() -> None:
    server = etcd_lab.needed(options=["--quota-backend-bytes", "262144"])
    try:
        server.start()
        url = server.url("doctor")
        used(url)
        filled = ""
        for number in range(200):
            try:
                server.ctl("put", f"other/{number}", "x" * 20_000)
            except AssertionError as error:
                filled = str(error)
                break
        assert "database space exceeded" in filled
        said = doctor(url, "--read-only")
        assert said.code == 1, said.text
        assert said.worst("alarms") == "error"
        assert "NOSPACE" in said.about("alarms")
        assert "etcdctl alarm disarm" in said.about("alarms")
    finally:
        server.stop()


# Redis and Valkey


def test_doctor_on_redis_tells_what_a_server_loses(caplog: pytest.LogCaptureFixture) -> None:
    with redis_lab.server() as process:
        url = process.new_database()
        used(url)
        said = doctor(url)
        assert said.code == 0, said.text
        assert said.worst("persistence") == "ok"
        process.ask("CONFIG", "SET", "appendfsync", "everysec")
        said = doctor(url)
        assert said.code == 1, said.text
        assert said.worst("persistence") == "error"
        assert "appendfsync always" in said.about("persistence")
        assert caplog.messages == [], "what a finding says is not logged as well"
