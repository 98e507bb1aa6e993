"""`domicile status` and `domicile where`, against stores filled through the store port."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import groups_lab
import pytest
from cluster_lab import GONE, A, B, C, Stored, healthy, moving, node, poisoned, serving
from groups_lab import primary, values, write
from msgspec import structs
from typer.testing import CliRunner, Result

from domicile.core.hashing import shard_of
from domicile.core.ids import EntityKey, Incarnation, ShardKey
from domicile.core.state.keys import CONFIG_KEY, MOVED_KEY, needs_key
from domicile.core.state.records import ConfigRecord, MoveRecord, TypeRecord, encode_record
from domicile.core.state.shardmap import FREE
from domicile.core.state.txn import Committed, Put
from domicile.ops.cli import app
from domicile.ops.show import age_text
from domicile.stores.sqlite.store import SqliteStore


@pytest.fixture(autouse=True)
def no_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("DOMICILE_STORE", raising=False)
    monkeypatch.chdir(tmp_path)


def domicile(*arguments: str) -> Result:
    return CliRunner().invoke(app, arguments)


HOLD = """
import sys, pathlib
from domicile.stores.file_locks import FileLocks
FileLocks(pathlib.Path(sys.argv[1])).hold(sys.argv[2])
"""


def live_and_die(path: Path, incarnation: Incarnation, age_s: float) -> None:
    """A process that held the incarnation's lock and ended without letting go of it."""
    locks = path.with_name(path.name + ".d")
    subprocess.run([sys.executable, "-c", HOLD, str(locks), incarnation], check=True)
    began = time.time() - age_s
    os.utime(locks / incarnation, (began, began))


def test_a_healthy_cluster_is_told_as_such(tmp_path: Path) -> None:
    result = domicile("status", healthy().write(tmp_path / "s.db"))
    assert result.exit_code == 0, result.output
    lines = [line.split() for line in result.stdout.splitlines()]
    assert ["node-a", "127.0.0.1:7097", "up", "2", "coordinator"] in lines
    assert ["node-b", "127.0.0.1:7098", "up", "2"] in lines
    assert ["default", "4", "4", "0", "0", "0"] in lines
    assert "every shard is served" in result.stdout
    assert "clients" not in result.stdout


def test_a_store_that_a_cluster_has_left_says_where_it_is(tmp_path: Path) -> None:
    """Else it looks like a cluster whose nodes are all gone."""
    path = tmp_path / "s.db"
    url = Stored(shards={"default": [serving(GONE)]}).write(path)
    write(path, {MOVED_KEY: encode_record(MoveRecord("to", "etcd://a:2379", "x"))})
    result = domicile("status", url)
    assert result.exit_code == 3
    assert "moved    to etcd://a:2379: processes refuse this store" in result.stdout
    assert "start one with" not in result.stdout
    assert json.loads(domicile("status", url, "--json").stdout)["moved"].startswith("to etcd://a")
    write(path, {MOVED_KEY: encode_record(MoveRecord("from", "etcd://a:2379", "x"))})
    assert "moved    from etcd://a:2379, and not whole yet" in domicile("status", url).stdout


def test_a_store_of_replica_groups_alone_names_their_command(tmp_path: Path) -> None:
    path = tmp_path / "s.db"
    url = write(path, values(groups_lab.serving(), primary()))
    result = domicile("status", url)
    assert result.exit_code == 3
    assert "has no nodes yet and never had any; it has replica groups: domicile replica status" in (
        result.stderr
    )


def test_json_holds_everything_and_nothing_else_is_printed(tmp_path: Path) -> None:
    stored = Stored(
        nodes=[node(A), node(B, status="leaving"), node(C)],
        leader=node(C),
        clients=[GONE],
        drains=["node-c"],
        wishes={ShardKey("default", 1): "node-a"},
        shards={
            "default": [serving(A), moving(B, A), serving(GONE), FREE, serving(C)],
            "other": [serving(A, 7)],
        },
    )
    path = tmp_path / "s.db"
    url = stored.write(path)
    result = domicile("status", url, "--json")
    assert result.exit_code == 3
    assert result.stderr == ""
    seen = json.loads(result.stdout)
    nodes = {one["node"]: one for one in seen["nodes"]}
    assert [(one["serving"], one["moving"]) for one in nodes.values()] == [(2, 0), (0, 1), (1, 0)]
    assert [one["status"] for one in nodes.values()] == ["up", "leaving", "draining"]
    assert [one["coordinator"] for one in nodes.values()] == [False, False, True]
    assert nodes["node-a"]["types"] == ["counter", "room"]
    assert seen["roles"] == [
        {
            "role": "default",
            "shards": 5,
            "serving": 2,
            "moving": 1,
            "lost": 1,
            "free": 1,
            "quarantined": 0,
        },
        {
            "role": "other",
            "shards": 1,
            "serving": 1,
            "moving": 0,
            "lost": 0,
            "free": 0,
            "quarantined": 0,
        },
    ]
    assert seen["clients"] == [{"incarnation": GONE, "status": "up", "age_s": None}]
    assert seen["drains"] == ["node-c"]
    assert seen["wishes"] == [{"role": "default", "shard": 1, "node": "node-a"}]
    assert (seen["served"], seen["coordinator"], seen["store"]) == (False, "node-c", url)
    text = domicile("status", url)
    assert text.exit_code == 3
    for words in ("3 shards are not served", "0 + 1", "default/1 to node-a", "ffffffff (up"):
        assert words in text.stdout


def test_what_operators_did_and_what_is_poisoned_is_shown(tmp_path: Path) -> None:
    audit = {"at": "2026-01-02T03:04:05.678Z", "by": "eva@desk", "command": "free", "what": "x"}
    barred = structs.replace(serving(B), deaths=4, tries=2, barred=(EntityKey("cart", "c 1"),))
    stored = Stored(
        nodes=[node(A, version="2.0"), node(B, version="1.9")],
        leader=node(A),
        shards={"default": [serving(A), barred, poisoned(3)]},
        more={
            b"target": b"2.0",
            b"audit/2026-01-02T03:04:05.678Z-0001": json.dumps({**audit, "why": "stuck"}).encode(),
            b"audit/2026-01-01T03:04:05.678Z-ffff": json.dumps({**audit, "by": "adam"}).encode(),
            b"audit/2026-01-03T03:04:05.678Z-ffff": b"no JSON",
        },
    )
    url = stored.write(tmp_path / "s.db")
    result = domicile("status", url, "--json")
    assert result.exit_code == 3
    seen = json.loads(result.stdout)
    entity = {"type": "cart", "id": "c 1", "tries": 2, "pause_s": 20.0}
    whole = {"type": None, "id": None, "tries": 0, "pause_s": 10.0}
    assert seen["quarantined"] == [
        {"role": "default", "shard": 1, "deaths": 4, **entity},
        {"role": "default", "shard": 2, "deaths": 3, **whole},
    ]
    assert seen["roles"][0]["quarantined"] == 1
    assert seen["roles"][0]["lost"] == 0
    assert (seen["target"], seen["audit"]) == ("2.0", {**audit, "why": "stuck"})
    assert [one["version"] for one in seen["nodes"]] == ["2.0", "1.9"]
    text = domicile("status", url).stdout
    flat = " ".join(text.split())
    lines = [line.split() for line in text.splitlines()]
    assert [
        "node-b",
        "127.0.0.1:7098",
        "up",
        "1.9",
        "1",
    ] in lines
    assert ["default", "3", "2", "0", "0", "0", "1"] in lines
    assert "cart/c 1 (default/1): 4 owners died, tried again after 20 s" in flat
    assert "domicile unquarantine default/1" in flat
    assert "default/2: 3 owners died, tried again after 10 s" in flat
    assert "target   2.0" in text
    assert "last command  2026-01-02T03:04:05.678Z eva@desk, free: x (stuck)" in text


@pytest.mark.scenario("DX-24", partial=True)
def test_shards_that_lose_owners_with_nobody_to_blame_are_shown(tmp_path: Path) -> None:
    shards = [structs.replace(serving(A), deaths=deaths) for deaths in (0, 2, 3, *[4] * 9)]
    tried = structs.replace(serving(A), deaths=4, tries=1)
    stored = Stored(nodes=[node(A)], leader=node(A), shards={"default": [*shards, tried]})
    url = stored.write(tmp_path / "s.db")
    seen = json.loads(domicile("status", url, "--json").stdout)["losing_owners"]
    assert seen[0] == {"role": "default", "shard": 2, "deaths": 3}
    assert [one["shard"] for one in seen] == list(range(2, 12))
    flat = " ".join(domicile("status", url).stdout.split())
    assert "losing owners default/3 (4), default/4 (4)," in flat
    assert "default/10 (4) and 2 more: these died in a row" in flat


@pytest.mark.parametrize("others", [("counter",), ("counter", "annex")])
def test_types_that_some_nodes_of_a_role_lack_are_shown(
    tmp_path: Path, others: tuple[str, ...]
) -> None:
    """DX-26."""
    types = {"counter": TypeRecord("default"), "annex": TypeRecord("default")}
    config = ConfigRecord({"default": 3}, types=types)
    stored = Stored(
        nodes=[node(A, types=others), node(B, types=("counter",)), node(C, roles=(), types=())],
        leader=node(A),
        shards={"default": [serving(A), serving(B), serving(B)]},
        config=False,
        more={
            CONFIG_KEY: encode_record(config),
            **{needs_key(ShardKey("default", n)): b'["annex"]' for n in (0, 1, 2)},
        },
    )
    url = stored.write(tmp_path / "s.db")
    result = domicile("status", url, "--json")
    assert result.exit_code == 0, result.output
    (gap,) = json.loads(result.stdout)["type_gaps"]
    text = domicile("status", url).stdout
    if "annex" in others:
        assert gap == {
            "role": "default", "type": "annex", "present_at": ["node-a"],
            "missing_at": ["node-b"], "needing": 3, "waiting": 2,
        }  # fmt: skip
        assert "annex (role default) is missing at node-b; 2 shards wait for a node that" in text
    else:
        assert (gap["present_at"], gap["waiting"]) == ([], 3)
        assert "annex (role default) is missing at node-a, node-b: no node has it; 3 shar" in text


def test_managers_are_shown_as_such(tmp_path: Path) -> None:
    first, second = node(B, roles=(), types=()), node(C, roles=(), types=())
    stored = Stored(nodes=[node(A), first, second], leader=second, shards={"default": [serving(A)]})
    url = stored.write(tmp_path / "s.db")
    seen = json.loads(domicile("status", url, "--json").stdout)
    assert [one["manager"] for one in seen["nodes"]] == [False, True, True]
    lines = [line.split() for line in domicile("status", url).stdout.splitlines()]
    assert ["node-b", "127.0.0.1:7098", "up", "manager,", "standby"] in lines
    assert ["node-c", "127.0.0.1:7099", "up", "manager,", "coordinator"] in lines


def test_a_manager_without_nodes_is_a_cluster_that_serves_nothing(tmp_path: Path) -> None:
    alone = node(A, roles=(), types=())
    url = Stored(nodes=[alone], leader=alone, config=False).write(tmp_path / "s.db")
    result = domicile("status", url)
    assert result.exit_code == 3
    assert "no shards yet" in result.stdout
    assert "manager, coordinator" in result.stdout
    where = domicile("where", "counter", "c1", url)
    assert where.exit_code == 3
    assert "no node serves entities of type 'counter'" in where.stderr
    assert "no node is registered at all" in where.stderr


def test_where_nobody_is_left_the_shard_is_not_served(tmp_path: Path) -> None:
    config = ConfigRecord({"default": 1, "games": 4}, types={"game": TypeRecord("games")})
    stored = Stored(
        shards={"default": [serving(GONE)], "games": [serving(GONE, 9)] * 4},
        config=False,
        more={CONFIG_KEY: encode_record(config)},
    )
    url = stored.write(tmp_path / "s.db")
    result = domicile("where", "game", "g1", url)
    assert result.exit_code == 3, result.output
    assert f"games/{shard_of(EntityKey('game', 'g1'), 4)} of 4" in result.stdout
    assert "lost" in result.stdout
    unknown = domicile("where", "lamp", "l1", url)
    assert unknown.exit_code == 3
    assert "no node is registered at all" in unknown.stderr
    assert domicile("kick", "game", "g1", url).exit_code == 1


def test_a_dead_node_counts_for_nothing_before_its_lease_runs_out(tmp_path: Path) -> None:
    path = tmp_path / "s.db"
    url = healthy().write(path)
    live_and_die(path, A, age_s=42)
    result = domicile("status", url, "--json")
    assert result.exit_code == 3
    seen = json.loads(result.stdout)
    assert seen["nodes"][0]["status"] == "dead"
    assert seen["nodes"][0]["age_s"] == pytest.approx(42, abs=20)
    assert seen["roles"][0]["lost"] == 2
    assert seen["coordinator"] is None


def test_looking_changes_nothing_in_the_store(tmp_path: Path) -> None:
    path = tmp_path / "s.db"
    url = healthy().write(path)
    before = json.loads(domicile("status", url, "--json").stdout)
    assert json.loads(domicile("status", url, "--json").stdout) == before
    assert domicile("where", "counter", "c1", url).exit_code == 0
    assert json.loads(domicile("status", url, "--json").stdout) == before


@pytest.mark.parametrize("id", ["c1", "c2", "c7"])
def test_where_names_the_home(tmp_path: Path, id: str) -> None:
    url = healthy().write(tmp_path / "s.db")
    number = shard_of(EntityKey("counter", id), 4)
    entry = healthy().shards["default"][number]
    result = domicile("where", "counter", id, url, "--json")
    assert result.exit_code == 0
    assert json.loads(result.stdout) == {
        "type": "counter", "id": id, "role": "default", "shard": number, "shards": 4,
        "state": "serving", "served": True, "epoch": entry.epoch, "node": entry.previous,
        "incarnation": entry.owner, "address": f"127.0.0.1:{7000 + ord(entry.owner[0])}",
        "to": None,
    }  # fmt: skip
    text = domicile("where", "counter", id, url).stdout
    for words in (f"default/{number} of 4", "serving", entry.previous, f"epoch    {entry.epoch}"):
        assert words in text


def test_where_tells_of_homes_that_move_or_are_gone(tmp_path: Path) -> None:
    moved = Stored(nodes=[node(A), node(B)], shards={"default": [moving(A, B, 5)]})
    result = domicile("where", "counter", "c1", moved.write(tmp_path / "a.db"))
    assert result.exit_code == 3
    assert "moving to node-b" in result.stdout
    gone = Stored(nodes=[node(A)], shards={"default": [serving(GONE)]})
    result = domicile("where", "counter", "c1", gone.write(tmp_path / "b.db"))
    assert result.exit_code == 3
    assert "lost" in result.stdout
    assert "record is gone" in result.stdout
    free = Stored(nodes=[node(A)], shards={"default": [FREE]})
    result = domicile("where", "counter", "c1", free.write(tmp_path / "c.db"))
    assert result.exit_code == 3
    assert "nobody" in result.stdout


def test_where_finds_the_role_of_a_type(tmp_path: Path) -> None:
    stored = Stored(
        nodes=[
            node(A, roles=("default",), types=("counter",)),
            node(B, roles=("other",), types=("game",)),
            node(C, roles=("default", "other"), types=("counter", "game", "both")),
        ],
        shards={"default": [serving(A)], "other": [serving(B, 9)]},
    )
    url = stored.write(tmp_path / "s.db")
    assert json.loads(domicile("where", "game", "g", url, "--json").stdout)["epoch"] == 9
    unclear = domicile("where", "both", "x", url)
    assert unclear.exit_code == 1
    assert "--role default or --role other" in unclear.stderr
    assert domicile("where", "both", "x", url, "--role", "other").exit_code == 0
    assert "known ones: default, other" in domicile("where", "x", "x", url, "--role", "z").stderr


def test_a_type_that_no_node_serves_is_an_error_with_the_known_ones(tmp_path: Path) -> None:
    result = domicile("where", "contour", "c1", healthy().write(tmp_path / "s.db"))
    assert result.exit_code == 1
    assert "no node serves entities of type 'contour'; known ones: counter, room" in result.stderr
    assert result.stdout == ""


def test_a_missing_store_is_never_made(tmp_path: Path) -> None:
    for url in ("sqlite:///nothing.db", "sqlite:///no/such/place.db"):
        for command in (("status",), ("where", "counter", "c1")):
            result = domicile(*command, url)
            assert result.exit_code == 3
            assert "there is no store at" in result.stderr
            assert "domicile run" in result.stderr
            assert result.stdout == ""
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "empty.db").touch()
    assert domicile("status", "sqlite:///empty.db").exit_code == 3
    assert (tmp_path / "empty.db").stat().st_size == 0


def test_other_things_in_its_place_are_told_apart(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("a plain file, not a database at all\n" * 50)
    result = domicile("status", "sqlite:///notes.txt")
    assert (result.exit_code, result.stdout) == (3, "")
    assert "not a database" in result.stderr
    assert "directory" in domicile("status", f"sqlite:///{tmp_path}").stderr
    assert "inside one process" in domicile("status", "memory://dev").stderr
    assert domicile("status", "memory://dev").exit_code == 3
    assert "did you mean sqlite:///dev.db" in domicile("status", "dev.db").stderr
    assert domicile("status", "dev.db").exit_code == 2


def test_a_cluster_of_another_name_is_pointed_out(tmp_path: Path) -> None:
    url = healthy().write(tmp_path / "s.db", "shop")
    result = domicile("status", url)
    assert result.exit_code == 3
    assert "no cluster 'domicile'" in result.stderr
    assert "--cluster shop" in result.stderr
    assert domicile("status", url, "--cluster", "shop").exit_code == 0


def test_a_store_without_a_cluster_is_told_as_such(tmp_path: Path) -> None:
    async def write(key: bytes) -> None:
        store = SqliteStore(tmp_path / "s.db")
        await store.commit((), (Put(key, b""),))
        await store.close()

    asyncio.run(write(b"domicile/drain/x"))
    result = domicile("status", f"sqlite:///{tmp_path / 's.db'}")
    assert result.exit_code == 3
    assert "never had any" in result.stderr


def test_the_store_comes_from_the_argument_the_app_or_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    result = domicile("status")
    assert result.exit_code == 2
    assert "DOMICILE_STORE" in result.stderr
    (tmp_path / "statusapp.py").write_text(
        'from domicile import Node\nnode = Node("sqlite:///app.db", cluster="shop")\n'
    )
    healthy().write(tmp_path / "app.db", "shop")
    url = healthy().write(tmp_path / "env.db")
    monkeypatch.setenv("DOMICILE_STORE", url)
    assert json.loads(domicile("status", "--json").stdout)["store"] == url
    monkeypatch.syspath_prepend(tmp_path)
    seen = json.loads(domicile("status", "--app", "statusapp:node", "--json").stdout)
    assert (seen["store"], seen["cluster"]) == ("sqlite:///app.db", "shop")
    assert domicile("where", "counter", "c1", "--app", "statusapp:node").exit_code == 0


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (None, "age unknown"),
        (0.2, "0 s"),
        (99, "99 s"),
        (120, "2 min"),
        (7_200, "2.0 h"),
        (864_000, "10 d"),
    ],
)
def test_ages_are_for_people(seconds: float | None, text: str) -> None:
    assert age_text(seconds) == text


READER = """
import os, sys
from typer.testing import CliRunner
from domicile.ops.cli import app
url, other = sys.argv[1:]
# Another user may not reach the interpreter's modules: this imports them all.
CliRunner().invoke(app, ["status", "--store-only", other])
if os.getuid() == 0:
    os.setgroups([])
    os.setgid(65534)
    os.setuid(65534)
shown = CliRunner().invoke(app, ["status", "--store-only", url])
print(shown.output)
sys.exit(shown.exit_code)
"""


def read_only(url: str, beside: Path) -> subprocess.CompletedProcess[str]:
    """`domicile status` by a user who may read the store's files and write none of them."""
    command = [sys.executable, "-c", READER, url, healthy().write(beside / "other.db")]
    return subprocess.run(command, capture_output=True, check=False, text=True)


@pytest.fixture
def shelf() -> Iterator[Path]:
    """A directory that all users may read; files in it are made read-only by `locked`."""
    with tempfile.TemporaryDirectory() as name:
        path = Path(name)
        path.chmod(0o755)
        yield path
        path.chmod(0o755)


def locked(shelf: Path) -> None:
    for path in shelf.iterdir():
        path.chmod(0o444 if path.is_file() else 0o555)
    shelf.chmod(0o555)


def test_a_user_who_may_only_read_sees_the_status(shelf: Path, tmp_path: Path) -> None:
    """Also while a lease has expired, which this user may not end."""
    url = healthy().write(shelf / "s.db")

    async def main() -> subprocess.CompletedProcess[str]:
        store = SqliteStore(shelf / "s.db", by="test")
        try:
            ttl_s = await store.grant("short", 1.0)
            put = await store.commit((), (Put(b"domicile/x", b"", "short"),))
            assert isinstance(put, Committed)
            over = time.monotonic() + ttl_s
            while time.monotonic() < over:  # noqa: ASYNC110
                await asyncio.sleep(0.05)
            locked(shelf)
            return await asyncio.to_thread(read_only, url, tmp_path)
        finally:
            os.chmod(shelf, 0o755)
            await store.close()

    ran = asyncio.run(main())
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert "every shard is served" in ran.stdout


def test_a_store_that_nobody_has_open_tells_a_reader_why_it_cannot_be_read(
    shelf: Path, tmp_path: Path
) -> None:
    """SQLite would have to make its -shm file."""
    url = healthy().write(shelf / "s.db")
    locked(shelf)
    ran = read_only(url, tmp_path)
    assert ran.returncode == 3
    assert "while a process has the store open" in ran.stdout
