"""`domicile doctor`: what it finds, says, and how it ends."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import apsw
import pytest
from cluster_lab import GONE, A, Stored, contents, healthy, node
from typer.testing import CliRunner, Result

from domicile import Settings
from domicile.backends import registry
from domicile.backends.registry import Backend, OpenOptions
from domicile.core.state.keys import block_key, node_key
from domicile.core.state.records import MoveRecord, encode_record
from domicile.core.state.txn import Condition, Conflict, Listing, Outcome, Put, Write
from domicile.errors import StoreUnavailable
from domicile.ops import waiting
from domicile.ops.checkup import examine
from domicile.ops.cli import app
from domicile.ops.waiting import told_if_slow
from domicile.ports.findings import Finding, Severity
from domicile.ports.store import Store
from domicile.stores.etcd import rpc_pb2 as pb
from domicile.stores.etcd.address import parse_etcd_url
from domicile.stores.etcd.findings import EtcdMemberSaid, EtcdSurvey, cluster_findings
from domicile.stores.memory.store import MemoryStore
from domicile.stores.postgres.findings import postgres_findings
from domicile.stores.redis.calls import ScriptAnswer
from domicile.stores.redis.findings import server_findings
from domicile.stores.redis.server import RedisFacts
from domicile.stores.sqlite.findings import file_system
from domicile.testing.sim.clock import ManualClock


@pytest.fixture(autouse=True)
def no_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("DOMICILE_STORE", raising=False)
    monkeypatch.chdir(tmp_path)


def domicile(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["doctor", *arguments])


def found(result: Result) -> dict[str, str]:
    """The worst severity of each subject."""
    worst: dict[str, str] = {}
    order = [severity.value for severity in Severity]
    for one in json.loads(result.stdout)["findings"]:
        before = worst.get(one["subject"], "ok")
        worst[one["subject"]] = max(before, one["severity"], key=order.index)
    return worst


def test_a_healthy_store_gets_no_error_and_loses_nothing(tmp_path: Path) -> None:
    url = healthy().write(tmp_path / "dev.db")
    before = contents(tmp_path / "dev.db")
    result = domicile(url, "--json")
    assert result.exit_code == 0, result.output
    seen = found(result)
    assert "error" not in seen.values()
    subjects = "reached,file system,disk,file,store,reads,renewals,commits,size,cluster,journal"
    assert all(subject in seen for subject in subjects.split(","))
    assert contents(tmp_path / "dev.db") == before


def test_what_people_see_fits_into_80_columns(tmp_path: Path) -> None:
    moved = encode_record(MoveRecord("to", "redis://elsewhere:6379/0", "x"))
    url = Stored(shards={"default": []}, more={b"moved": moved}).write(tmp_path / "dev.db")
    result = domicile(url)
    assert result.exit_code == 0, result.output
    lines = result.stdout.splitlines()
    assert all(len(line) <= 80 for line in lines[1:])
    assert (
        "warning  cluster      the cluster was moved to redis://elsewhere:6379/0:" in result.stdout
    )
    assert "Next: name the other store." in result.stdout
    assert lines[-1] == "1 warning"


def test_what_is_in_the_store_is_judged(tmp_path: Path) -> None:
    more = {
        node_key(GONE): b"not json", b"rewound": b"x", block_key("default", 0): b"not a block",
    }  # fmt: skip
    url = Stored(nodes=[node(A)], shards={"default": []}, more=more).write(tmp_path / "dev.db")
    result = domicile(url, "--json")
    assert result.exit_code == 1
    seen = found(result)
    assert (seen["cluster"], seen["history"]) == ("error", "warning")
    said = [one["said"] for one in json.loads(result.stdout)["findings"]]
    assert any("1 node, 0 clients, and nobody coordinates" in one for one in said)
    assert any("2 keys can't be read" in one for one in said)


def test_a_store_that_is_away_or_is_none(tmp_path: Path) -> None:
    missing = domicile(f"sqlite:///{tmp_path / 'none.db'}", "--json")
    assert (missing.exit_code, found(missing)) == (3, {"store": "error"})
    assert not (tmp_path / "none.db").exists()
    (tmp_path / "text.db").write_text("this is a text, and no database of any kind at all")
    assert domicile(f"sqlite:///{tmp_path / 'text.db'}").exit_code == 3
    assert domicile("sqlite:x").exit_code == 2
    assert domicile().exit_code == 2
    nobody = domicile("redis://me:secret@127.0.0.1:1/0", "--json")
    assert nobody.exit_code == 3
    assert "secret" not in nobody.output


def test_a_reader_writes_nothing(tmp_path: Path) -> None:
    url = healthy().write(tmp_path / "dev.db")
    result = domicile(url, "--json", "--read-only")
    assert result.exit_code == 0
    assert "commits" not in found(result)
    with apsw.Connection(str(tmp_path / "dev.db")) as database:
        ((revisions,),) = database.execute("SELECT count(*) FROM txn").fetchall()
    assert revisions == 1


def test_a_journal_is_reached_or_said_to_be_away(tmp_path: Path) -> None:
    url = healthy().write(tmp_path / "dev.db")
    (tmp_path / "broken.journal").write_text("no journal at all, only a text that is here")
    broken = domicile(url, "--json", "--journal", f"sqlite:///{tmp_path / 'broken.journal'}")
    assert (broken.exit_code, found(broken)["journal"]) == (1, "error")
    there = domicile(url, "--json", "--journal", "memory://")
    assert found(there)["journal"] == "ok"


class Slow:
    """A store whose renewals take long, and that refuses what the test says."""

    def __init__(self, store: Store, *, delay_s: float = 0.0, refuses: bool = False) -> None:
        self._store, self._delay_s, self._refuses = store, delay_s, refuses

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    async def renew(self, lease: str) -> float | None:
        await asyncio.sleep(self._delay_s)
        return await self._store.renew(lease)

    async def commit(self, conditions: Sequence[Condition], writes: Sequence[Write]) -> Outcome:
        if self._refuses:
            return Conflict(b"k")
        return await self._store.commit(conditions, writes)

    async def findings(self) -> Sequence[Finding]:
        raise StoreUnavailable("no answer, as the test wants it")


class Slows(Backend):
    scheme = "slow"
    stores = "slow://x (a test)"

    def __init__(self, **faults: Any) -> None:
        self._faults = faults
        self._store = MemoryStore(ManualClock())

    def open_store(self, url: str, options: OpenOptions) -> Store:
        store: Store = Slow(self._store.client("x"), **self._faults)  # type: ignore[assignment]
        return store

    async def fill(self) -> None:
        await self._store.client("x").commit([], [Put(b"c/config", b"?")])


def slowly(monkeypatch: pytest.MonkeyPatch, **faults: Any) -> dict[str, Finding]:
    slows = Slows(**faults)
    monkeypatch.setattr(registry, "_known", {**registry._known, "slow": slows})
    settings = Settings(ttl_s=6.0, op_timeout_s=0.05)

    async def look() -> tuple[list[Finding], bool]:
        await slows.fill()
        return await examine("slow://x", "c", settings, None)

    findings, there = asyncio.run(look())
    assert there
    return {one.subject: one for one in findings if one.severity is not Severity.OK}


def test_slow_renewals_are_compared_with_the_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    bad = slowly(monkeypatch, delay_s=0.06)
    assert bad["renewals"].severity is Severity.ERROR
    assert "0.05 s (op_timeout_s)" in bad["renewals"].said
    assert bad["store"].said.startswith("no answer")


def test_refused_commits_are_errors(monkeypatch: pytest.MonkeyPatch) -> None:
    bad = slowly(monkeypatch, refuses=True)
    assert bad["commits"].severity is Severity.ERROR


# what stores say


def test_the_file_system_of_a_path_is_found() -> None:
    mounts = (
        "1 0 8:1 / / rw - ext4 /dev/sda rw\n"
        "2 1 0:5 / /srv rw shared:1 - nfs4 host:/srv rw\n"
        "3 1 0:6 / /srv/my\\040disk rw - xfs /dev/sdb rw\n"
        "broken\n"
    )
    assert file_system(Path("/var/x.db"), mounts) == "ext4"
    assert file_system(Path("/srv/x.db"), mounts) == "nfs4"
    assert file_system(Path("/srvx/x.db"), mounts) == "ext4"
    assert file_system(Path("/srv/my disk/x.db"), mounts) == "xfs"
    assert file_system(Path("/x"), "") == ""


GOOD = {
    "redis_version": "8.0.1", "role": "master", "aof_enabled": "1", "aof_last_write_status": "ok",
    "maxmemory": "0", "maxmemory_policy": "noeviction", "used_memory": "1000000",
}  # fmt: skip


def state(*, age_s: float = 0.1, leases: int = 0) -> ScriptAnswer:
    return ScriptAnswer("ok", "ab" * 16, 7, "t", age_s, 100.0, (3, leases, 7, 0, b"100000000", 0))


def judged(info: dict[str, str], appendfsync: str | None = "always", **more: Any) -> dict[str, str]:
    order = [severity.value for severity in Severity]
    worst: dict[str, str] = {}
    for one in server_findings(RedisFacts(info, appendfsync), state(**more)):
        before = worst.get(one.subject, "ok")
        worst[one.subject] = max(before, one.severity.value, key=order.index)
    return {subject: severity for subject, severity in worst.items() if severity != "ok"}


@pytest.mark.parametrize(
    ("info", "appendfsync", "more", "expected"),
    [
        ({}, "always", {}, {}),
        ({"role": "slave"}, "always", {}, {"server": "error"}),
        ({"connected_slaves": "2"}, "always", {}, {"replicas": "warning"}),
        ({"cluster_enabled": "1"}, "always", {}, {"cluster": "warning"}),
        ({}, "everysec", {}, {"persistence": "error"}),
        ({}, None, {}, {"persistence": "warning"}),
        ({"aof_enabled": "0"}, "always", {}, {"persistence": "error"}),
        ({"aof_last_write_status": "err"}, "always", {}, {"disk": "error"}),
        ({"maxmemory_policy": "allkeys-lru"}, "always", {}, {"memory": "warning"}),
        ({"maxmemory_policy": "allkeys-lru", "maxmemory": "9"}, "always", {}, {"memory": "error"}),
        ({"maxmemory": "1100000"}, "always", {}, {"memory": "warning"}),
        ({}, "always", {"age_s": 60.0, "leases": 2}, {"time": "warning"}),
        ({}, "always", {"age_s": 60.0}, {}),
    ],
)
def test_a_redis_server_is_judged(
    info: dict[str, str], appendfsync: str | None, more: dict[str, Any], expected: dict[str, str]
) -> None:
    seen = judged({**GOOD, **info}, appendfsync, **more)
    # Its clock is that of the test; and that it is never consistent across a failover is a note.
    assert seen.pop("consistency") == "note"
    assert seen.pop("clock") == "note"
    assert seen == expected


def test_a_redis_server_is_judged_before_anything_is_stored_there() -> None:
    """That is when its settings can still be changed."""
    nothing = ScriptAnswer("absent", "", 0, "", 0.0, 0.0, ())
    info = {**GOOD, "aof_enabled": "0"}
    said = {one.subject: one for one in server_findings(RedisFacts(info, "always"), nothing)}
    assert said["persistence"].severity is Severity.ERROR
    assert said["store"].said == "nothing is stored here yet"
    assert "time" not in said


POSTGRES = {
    "version": "17.2", "number": 170002, "standby": False, "read_only": False, "who": "app",
    "super": False, "may_create": False, "owner": "owner", "may_use": True, "forbidden": None,
    "fsync": "on", "full_pages": "on", "commits": "on", "standby_names": "", "standbys": 0,
    "waited_for": 0, "unseen": 0, "most": 100, "sessions": 10, "longest": 1.0,
    "database": 10_000_000, "size": 200_000, "wall": 1_000.0,
}  # fmt: skip
CONTENTS = {
    "format": 1, "history": "abcdefgh-1", "revision": 20, "trimmed": 4, "stale": 0.1, "keys": 3,
    "leases": 2, "oldest": 60.0,
}  # fmt: skip


@pytest.mark.parametrize(
    ("facts", "contents", "subject", "severity"),
    [
        ({}, {}, "server", "ok"),
        ({"number": 120009, "version": "12.9"}, {}, "server", "error"),
        ({"standby": True}, {}, "server", "error"),
        ({"read_only": True}, {}, "server", "error"),
        ({"may_use": False}, {}, "privileges", "error"),
        ({"owner": None}, {}, "privileges", "error"),
        ({"super": True}, {}, "privileges", "note"),
        ({"fsync": "off"}, {}, "durability", "error"),
        ({"commits": "off"}, {}, "durability", "error"),
        ({"standbys": 1}, {}, "standbys", "warning"),
        ({"standbys": 1, "standby_names": "*", "waited_for": 1}, {}, "standbys", "ok"),
        ({"standby_names": "a"}, {}, "standbys", "error"),
        ({"sessions": 90}, {}, "connections", "warning"),
        ({"longest": 3_600.0}, {}, "connections", "warning"),
        ({"wall": 4_600.0}, {}, "clock", "note"),
        ({}, {"stale": 60.0}, "time", "warning"),
        ({}, {"stale": 60.0, "leases": 0}, "store", "ok"),
    ],
)
def test_a_postgresql_server_is_judged(
    facts: dict[str, Any], contents: dict[str, Any], subject: str, severity: str
) -> None:
    found = postgres_findings({**POSTGRES, **facts}, {**CONTENTS, **contents}, now=1_000.0)
    order = [one.value for one in Severity]
    mine = [one.severity.value for one in found if one.subject == subject]
    assert max(mine, key=order.index) == severity
    assert all(one.step for one in found if one.severity in (Severity.WARNING, Severity.ERROR))


def test_what_is_stored_in_postgresql_is_told_as_far_as_the_user_may_look() -> None:
    [store] = [one for one in postgres_findings(POSTGRES, CONTENTS) if one.subject == "store"]
    assert "revision 20; 3 keys, 2 leases; changes are kept from revision 5 on" in store.said
    found = postgres_findings(POSTGRES, None)
    assert any("may not read the tables" in one.said for one in found)
    found = postgres_findings({**POSTGRES, "owner": None, "may_create": True}, None)
    assert any("there is no store in this database" in one.said for one in found)


def test_a_terminal_is_told_that_a_store_lets_it_wait(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    async def late(url: str) -> None:
        with told_if_slow(url):
            await asyncio.sleep(0)
            await asyncio.sleep(0)

    monkeypatch.setattr(waiting, "SLOW_S", 0.0)
    url = "redis://me:secret@10.0.0.5:6379/0"
    asyncio.run(late(url))
    assert capsys.readouterr().err == "", "it is not a terminal"
    monkeypatch.setattr(waiting, "_at_terminal", lambda: True)
    asyncio.run(late(url))
    assert capsys.readouterr().err == "waiting for an answer of redis://10.0.0.5:6379/0\n"
    monkeypatch.setattr(waiting, "SLOW_S", 60.0)
    asyncio.run(late(url))
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    ("words", "more"),
    [
        (["doctor"], []),
        (["status"], []),
        (["drain", "n1"], []),
        (["store", "copy"], ["sqlite:///there.db"]),
    ],
)
def test_commands_tell_a_terminal_which_store_lets_them_wait(
    words: list[str], more: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Late(MemoryStore):
        async def list(self, prefix: bytes) -> Listing:
            for _ in range(3):
                await asyncio.sleep(0)
            return await super().list(prefix)

        async def close(self) -> None:
            """Nothing is open."""

    class LateBackend(Backend):
        scheme, stores = "late", "late://store (one that hesitates)"

        def open_store(self, url: str, options: OpenOptions) -> Store:
            return Late(ManualClock())

    monkeypatch.setattr(registry, "_known", {**registry._known, "late": LateBackend()})
    monkeypatch.setattr(waiting, "SLOW_S", 0.0)
    monkeypatch.setattr(waiting, "_at_terminal", lambda: True)
    result = CliRunner().invoke(app, [*words, "late://store", *more])
    assert "waiting for an answer of late://store" in result.stderr


def test_the_grants_that_help_may_be_typed_for_any_user() -> None:
    lacks = {**POSTGRES, "who": 'my-"app"', "may_use": False, "forbidden": ["tick"]}
    [one] = [one for one in postgres_findings(lacks, None) if one.severity is Severity.ERROR]
    assert one.step.endswith(
        ': GRANT USAGE ON SCHEMA domicile_store TO "my-""app"""; '
        'GRANT EXECUTE ON ALL FUNCTIONS IN SCHEMA domicile_store TO "my-""app"""'
    )


def etcd_status(member: int, **more: Any) -> pb.StatusResponse:
    fields = {"version": "3.5.21", "dbSize": 2**20, "dbSizeInUse": 2**20, "leader": 1, **more}
    header = pb.ResponseHeader(cluster_id=7, member_id=member, revision=9)
    return pb.StatusResponse(header=header, **fields)


def etcd_findings(
    url: str = "etcd://a,b,c",
    members: int = 3,
    alarms: Sequence[tuple[int, int]] | None = (),
    auth: bool | None = None,
    **more: Any,
) -> list[Finding]:
    address = parse_etcd_url(url)
    servers = [
        EtcdMemberSaid(endpoint, etcd_status(number, **more))
        for number, endpoint in enumerate(address.endpoints, 1)
    ]
    listed = [pb.Member(ID=number, name=f"m{number}") for number in range(1, members + 1)]
    return cluster_findings(EtcdSurvey(address, servers, listed, alarms, auth, 5))


def test_alarms_that_nobody_told_are_not_called_none() -> None:
    assert [one.said for one in etcd_findings() if one.subject == "alarms"] == ["none"]
    assert [one for one in etcd_findings(alarms=None) if one.subject == "alarms"] == []


@pytest.mark.parametrize(
    ("given", "subject", "severity", "words"),
    [
        ({}, "members", "ok", "without 1 of them"),
        ({"members": 0}, "members", "note", "no member tells"),
        ({"members": 4}, "members", "warning", "does not name m4"),
        ({"members": 2}, "members", "error", "is no member"),
        ({"version": "3.3.1"}, "version", "error", "3.4 or newer"),
        ({"url": "etcd://a", "members": 1, "version": "3.5.1"}, "version", "warning", "14370"),
        ({"leader": 0}, "leader", "error", "knows no leader"),
        ({"alarms": [(1, 1)]}, "alarms", "error", "etcdctl alarm disarm"),
        ({"alarms": [(2, 2)]}, "alarms", "error", "its data differs"),
        ({"dbSize": 1_900 * 2**20}, "space", "warning", "the usual limit"),
        ({"dbSize": 90, "dbSizeQuota": 100}, "space", "warning", "raise --quota"),
        ({"dbSize": 900 * 2**20}, "space", "note", "etcdctl defrag"),
        ({"url": "etcd://a,b,c?tls=true", "auth": False}, "access", "note", "no login"),
        ({"url": "etcd://u:p@a,b,c?tls=true", "auth": True}, "access", "ok", "logged in as 'u'"),
        ({"url": "etcd://u:p@a,b,c", "auth": False}, "access", "warning", "etcdctl auth enable"),
        ({}, "store", "ok", "history 7, revision 9; changes are kept from revision 5 on"),
    ],
)
def test_an_etcd_cluster_is_judged(
    given: dict[str, Any], subject: str, severity: str, words: str
) -> None:
    found = [one for one in etcd_findings(**given) if one.subject == subject]
    order = [one.value for one in Severity]
    assert max((one.severity.value for one in found), key=order.index) == severity
    assert words in " ".join(f"{one.said} {one.step}" for one in found)
    assert all(one.step for one in found if one.severity in (Severity.WARNING, Severity.ERROR))


def test_nothing_is_said_of_logins_that_nobody_made() -> None:
    for url in ("etcd://a?tls=true", "etcd://u:p@a?tls=true"):
        said = [one.said for one in etcd_findings(url, members=1) if one.subject == "access"]
        assert said == ["TLS"]


def test_members_of_an_etcd_cluster_that_is_away_are_not_to_be_asked_as_another_user() -> None:
    address = parse_etcd_url("etcd://a,b")
    away = [EtcdMemberSaid(endpoint, None, "it is away") for endpoint in address.endpoints]
    found = cluster_findings(EtcdSurvey(address, away, [], None, None, 0))
    assert [one.said for one in found if one.subject == "members"] == [
        "a:2379 gives no status: it is away",
        "b:2379 gives no status: it is away",
    ]


def test_servers_of_two_etcd_clusters_are_not_said_to_have_a_bad_network() -> None:
    address = parse_etcd_url("etcd://a,b")
    servers = [
        EtcdMemberSaid(endpoint, etcd_status(number, leader=number))
        for number, endpoint in enumerate(address.endpoints, 1)
    ]
    assert servers[1].status is not None
    servers[1].status.header.cluster_id = 8
    listed = [pb.Member(ID=1, name="m1")]
    found = cluster_findings(EtcdSurvey(address, servers, listed, (), False, 5))
    assert [one.said for one in found if one.subject == "leader"] == []
    assert any("2 etcd clusters" in one.said for one in found)
