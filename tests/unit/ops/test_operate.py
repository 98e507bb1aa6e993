"""Commands that change a cluster: what they say, ask, commit and log."""

from __future__ import annotations

import asyncio
import json
import os
import pty
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from cluster_lab import (
    GONE,
    A,
    B,
    Stored,
    contents,
    healthy,
    listed,
    node,
    poisoned,
    serving,
)
from msgspec import structs
from typer.testing import CliRunner, Result

from domicile import Entity, Node, Settings, handler
from domicile.core.ids import EntityKey, ShardKey
from domicile.core.lease.lease import RECORD_FOREVER_S
from domicile.core.state.keys import AUDIT, LEADER_KEY, block_key, dead_key, node_key
from domicile.core.state.records import NodeRecord
from domicile.core.state.shardmap import FREE, decode_block
from domicile.core.state.txn import Committed, Listing, Outcome, Put, Unknown
from domicile.errors import StoreUnavailable
from domicile.ops.cli import app
from domicile.ops.operator import Operator
from domicile.ops.operator_commits import (
    KEPT_AUDITS,
    AuditRecord,
    OperatorCommit,
    StoreSnapshot,
    has_shards,
)
from domicile.ops.operator_commits import free_commit as free_deed
from domicile.ops.status import open_existing
from domicile.stores.file_locks import FileLocks
from domicile.stores.namespace import Namespace
from domicile.stores.sqlite.store import SqliteStore


class Idle(Entity, name="idle"):
    @handler
    async def hello(self) -> None: ...


@pytest.fixture(autouse=True)
def no_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("DOMICILE_STORE", raising=False)
    monkeypatch.chdir(tmp_path)


def domicile(*arguments: str) -> Result:
    return CliRunner().invoke(app, arguments)


def audits(path: Path) -> list[dict[str, str]]:
    """The stored audit records, the oldest first."""
    found = [item for item in sorted(contents(path).items()) if item[0].startswith(AUDIT)]
    return [json.loads(value) for _, value in found]


def at_terminal(place: Path, typed: str, *arguments: str) -> tuple[int, str]:
    """Exit code and all that is shown, by a process that has a terminal to ask at."""
    ours, theirs = pty.openpty()
    try:
        process = subprocess.Popen(
            [sys.executable, "-m", "domicile", *arguments],
            cwd=place,
            stdin=theirs,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        os.write(ours, typed.encode())
        shown, _ = process.communicate(timeout=60)
    finally:
        os.close(ours)
        os.close(theirs)
    return process.returncode, shown


def test_a_declared_death_is_committed_and_logged(tmp_path: Path) -> None:
    path = tmp_path / "s.db"
    url = healthy().write(path)
    result = domicile("declare-dead", "node-a", url, "--yes", "--why", "machine sold")
    assert result.exit_code == 0, result.output
    assert result.stdout == "node-a (aaaaaaaa) is declared dead; its shards are free\n"
    assert "can never run again" in result.stderr
    assert "two homes run until it notices" in result.stderr
    stored = contents(path)
    assert node_key(A) not in stored
    assert LEADER_KEY not in stored
    assert stored[dead_key(A)].startswith(b"declared dead by ")
    assert stored[dead_key(A)].endswith(b": machine sold")
    (record,) = audits(path)
    assert record["command"] == "declare-dead"
    assert record["why"] == "machine sold"
    assert A in record["what"]
    assert "@" in record["by"]
    assert f"logged as audit/{record['at']}-" in result.stderr
    assert domicile("declare-dead", "node-a", url, "--yes").exit_code == 1


def test_a_process_that_is_seen_to_run_is_warned_of(tmp_path: Path) -> None:
    path = tmp_path / "s.db"
    url = healthy().write(path)
    locks = FileLocks(path.with_name("s.db.d"))
    locks.hold(A)
    try:
        running = domicile("declare-dead", "node-a", url)
        silent = domicile("declare-dead", "node-b", url)
    finally:
        locks.let_go(A)
    assert "WARNING: its process is running on this machine" in running.stderr
    assert "WARNING" not in silent.stderr


def test_a_name_with_two_incarnations_is_wrong_usage(tmp_path: Path) -> None:
    path = tmp_path / "s.db"
    twin = node(GONE)
    both = Stored(
        nodes=[node(A), type(twin)(**{**_fields(twin), "node": "node-a"})],
        shards={"default": [serving(A)]},
    )
    result = domicile("declare-dead", "node-a", both.write(path), "--yes")
    assert result.exit_code == 2
    assert A in result.stderr
    assert GONE in result.stderr
    assert audits(path) == []
    assert domicile("declare-dead", GONE[:8], f"sqlite:///{path}", "--yes").exit_code == 0
    assert node_key(A) in contents(path)


def _fields(record: object) -> dict[str, object]:
    return {name: getattr(record, name) for name in type(record).__struct_fields__}  # type: ignore[attr-defined]


def test_a_shard_is_freed_by_a_release_in_its_owners_name(tmp_path: Path) -> None:
    path = tmp_path / "s.db"
    url = healthy().write(path)
    before = contents(path)
    result = domicile("free", "default/2", url, "--yes")
    assert result.exit_code == 0, result.output
    assert "two homes may run for a moment" in result.stderr
    new = {key: value for key, value in contents(path).items() if before.get(key) != value}
    release = f"release/{A}/default/2@3".encode()
    assert release in new
    assert [key for key in new if key != release and not key.startswith(AUDIT)] == []
    assert audits(path)[0]["what"] == "default/2@3 from node-a (aaaaaaaa)"


def test_what_cannot_be_done_is_told_before_anything_is_asked(tmp_path: Path) -> None:
    path = tmp_path / "s.db"
    stored = Stored(
        nodes=[node(A)], leader=node(A), shards={"default": [serving(A), FREE, serving(GONE)]}
    )
    url = stored.write(path)
    for arguments, code, words in (
        (("free", "default/1"), 1, "has no owner"),
        (("free", "default/2"), 1, "needs no force"),
        (("free", "default/9"), 1, "they are 0 to 2"),
        (("free", "other/0"), 1, "no role 'other'"),
        (("free", "default"), 2, "as in default/7"),
        (("unquarantine", "default/0"), 1, "is not quarantined; it is serving"),
        (("declare-dead", "node-x"), 1, "nobody is registered as 'node-x'"),
        (("drain", "node-x"), 1, "no node is registered as 'node-x'"),
        (("drain", "node-a", "--undo"), 1, "is not drained"),
        (("target", " "), 2, "is no version"),
        (("target", "1", "--clear"), 2, "not both"),
        (("target", "abc!!"), 2, "'abc!!' is no version"),
    ):
        result = domicile(*arguments, url)
        assert (result.exit_code, result.stdout) == (code, ""), result.output
        assert words in result.stderr
    assert audits(path) == []


def test_a_quarantined_shard_is_cleared(tmp_path: Path) -> None:
    path = tmp_path / "s.db"
    url = Stored(nodes=[node(A)], shards={"default": [serving(A), poisoned(3)]}).write(path)
    result = domicile("unquarantine", "default/1", url, "--yes", "--why", "fixed in 2.1")
    assert result.exit_code == 0, result.output
    assert contents(path)[b"pardon/default/1"] == b""
    assert audits(path)[0]["why"] == "fixed in 2.1"


def test_several_quarantines_or_all_are_ended_by_one_command(tmp_path: Path) -> None:
    path = tmp_path / "s.db"
    barred = structs.replace(serving(A), barred=(EntityKey("cart", "x"),), tries=1)
    many = [serving(A), barred, *[poisoned(3)] * 40]
    url = Stored(nodes=[node(A)], shards={"default": many}).write(path)
    assert domicile("unquarantine", "default/1", "default/2", url, "--yes").exit_code == 0
    found = [key for key in contents(path) if key.startswith(b"pardon/")]
    assert sorted(found) == [b"pardon/default/1", b"pardon/default/2"]
    assert audits(path)[0]["what"] == "default/1, default/2"
    result = domicile("unquarantine", "--all", url, "--yes")
    assert result.exit_code == 0, result.output
    assert len([key for key in contents(path) if key.startswith(b"pardon/")]) == 41


@pytest.mark.parametrize("words", [(), ("default/1", "--all"), ("memory://x", "memory://y")])
def test_unquarantine_needs_shards_or_all_and_one_store(
    tmp_path: Path, words: tuple[str, ...]
) -> None:
    url = Stored(nodes=[node(A)], shards={"default": [serving(A)]}).write(tmp_path / "s.db")
    result = domicile("unquarantine", *words, url)
    assert result.exit_code == 2
    assert "say which shards" in result.stderr
    result = domicile("unquarantine", "--all", url)
    assert (result.exit_code, result.stderr) == (1, "error: nothing is quarantined\n")


def test_history_is_reset_only_without_nodes(tmp_path: Path) -> None:
    path = tmp_path / "s.db"
    url = healthy().write(path)
    refused = domicile("reset-history", url, "--yes")
    assert refused.exit_code == 1
    assert "node-a (aaaaaaaa), node-b (bbbbbbbb). Stop them first" in refused.stderr
    assert audits(path) == []
    for name in ("node-a", "node-b"):
        assert domicile("declare-dead", name, url, "--yes").exit_code == 0
    result = domicile("reset-history", url, "--yes", "--why", "restored")
    assert result.exit_code == 0, result.output
    entries = decode_block(contents(path)[block_key("default", 0)]).entries
    assert [entry.epoch for entry in entries] == [1_000_001, 1_000_001, 1_000_003, 1_000_001]
    assert {(entry.owner, entry.state) for entry in entries} == {("", "free")}
    assert audits(path)[-1]["command"] == "reset-history"


def test_by_force_history_is_reset_under_running_nodes(tmp_path: Path) -> None:
    path = tmp_path / "s.db"
    url = Stored(
        nodes=[node(A)], shards={"default": [serving(A), serving(GONE)] + [FREE] * 68}
    ).write(path)
    result = domicile("reset-history", url, "--yes", "--force", "--gap", "10")
    assert result.exit_code == 0, result.output
    assert "WARNING: running nodes restart all their entities: node-a" in result.stderr
    stored = contents(path)
    first, second = (decode_block(stored[block_key("default", n)]).entries for n in (0, 1))
    assert [(entry.owner, entry.epoch) for entry in first[:3]] == [(A, 11), ("", 11), ("", 10)]
    assert [entry.epoch for entry in second] == [10] * 6


def test_the_target_version_is_shown_set_and_cleared(tmp_path: Path) -> None:
    path = tmp_path / "s.db"
    url = Stored(nodes=[node(A, version="2.0")], shards={"default": [serving(A)]}).write(path)
    assert "no target version" in domicile("target", url).stdout
    result = domicile("target", "1.9", url, "--why", "rollback")
    assert (result.exit_code, result.stdout) == (0, "target version 1.9\n")
    assert "no node of that version is registered; there are: 2.0" in result.stderr
    assert domicile("target", url).stdout == "1.9\n"
    assert contents(path)[b"target"] == b"1.9"
    assert domicile("target", "--clear", url).exit_code == 0
    assert b"target" not in contents(path)
    assert [record["what"] for record in audits(path)] == ["1.9", "no target version"]


def test_a_target_of_no_known_kind_needs_a_node_that_has_it_or_force(tmp_path: Path) -> None:
    path = tmp_path / "s.db"
    url = Stored(nodes=[node(A, version="blue")], shards={"default": [serving(A)]}).write(path)
    assert domicile("target", "green", url).exit_code == 2
    assert b"target" not in contents(path)
    known = domicile("target", "blue", url)
    assert (known.exit_code, known.stdout) == (0, "target version blue\n")
    assert "note" not in known.stderr
    assert domicile("target", "green", url, "--force").exit_code == 0
    assert contents(path)[b"target"] == b"green"


def test_a_target_for_nodes_without_a_version_is_said_to_be_one(tmp_path: Path) -> None:
    url = healthy().write(tmp_path / "s.db")
    result = domicile("target", "2.0", url)
    assert result.exit_code == 0
    assert "the registered nodes have no version" in result.stderr
    assert "(none)" not in result.stderr


def test_a_target_that_is_written_otherwise_is_the_same(tmp_path: Path) -> None:
    stored = Stored(nodes=[node(A, version="2.0")], shards={"default": [serving(A)]})
    assert "note" not in domicile("target", "2.0.0", stored.write(tmp_path / "s.db")).stderr


def test_a_node_that_is_empty_already_is_told_as_such(tmp_path: Path) -> None:
    path = tmp_path / "s.db"
    stored = Stored(nodes=[node(A), node(B)], drains=["node-b"], shards={"default": [serving(A)]})
    url = stored.write(path)
    assert domicile("drain", "node-b", url).stdout.startswith("node-b is empty already")
    assert domicile("drain", "node-a", url).stdout == "node-a is being emptied\n"


def test_a_node_that_was_emptied_at_once_was_not_empty_already(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "s.db"
    url = healthy().write(path)
    do = Operator.do

    async def do_and_lag(*args: Any) -> tuple[bytes, AuditRecord]:
        done = await do(*args)
        emptied = Stored(config=False, shards={"default": [serving(A)] * 4})
        await asyncio.to_thread(emptied.write, path)
        return done

    monkeypatch.setattr(Operator, "do", do_and_lag)
    assert domicile("drain", "node-b", url).stdout == "node-b is being emptied\n"
    assert domicile("drain", "node-b", url).stdout.startswith("node-b is empty already")


def test_a_drain_is_wished_and_taken_back(tmp_path: Path) -> None:
    path = tmp_path / "s.db"
    url = healthy().write(path)
    assert domicile("drain", "node-b", url).stdout == "node-b is being emptied\n"
    assert b"drain/node-b" in contents(path)
    assert domicile("drain", "node-b", url, "--undo").stdout == "node-b may have shards again\n"
    assert b"drain/node-b" not in contents(path)
    assert [record["command"] for record in audits(path)] == ["drain", "drain --undo"]


@pytest.mark.parametrize(
    "command",
    [
        ("declare-dead", "node-a"),
        ("free", "default/0"),
        ("unquarantine", "default/1"),
        ("reset-history",),
    ],
)
def test_without_a_terminal_nothing_is_done_unless_agreed_to(
    tmp_path: Path, command: tuple[str, ...]
) -> None:
    path = tmp_path / "s.db"
    nodes = [] if command == ("reset-history",) else [node(A)]
    url = Stored(nodes=nodes, shards={"default": [serving(A), poisoned(3)]}).write(path)
    before = contents(path)
    result = domicile(*command, url)
    assert result.exit_code == 2
    assert "say --yes" in result.stderr
    assert contents(path) == before


@pytest.mark.parametrize(
    ("typed", "code", "words"),
    [
        ("default/2\n", 0, "freed; a coordinator gives it a new home"),
        ("default/1\n", 1, "that is not default/2: nothing was done"),
        ("\x04", 130, "interrupted: nothing was done"),
    ],
)
def test_at_a_terminal_the_name_must_be_typed(
    tmp_path: Path, typed: str, code: int, words: str
) -> None:
    path = tmp_path / "s.db"
    url = healthy().write(path)
    got, shown = at_terminal(tmp_path, typed, "free", "default/2", url)
    assert got == code, shown
    assert words in shown
    assert bool(audits(path)) == (code == 0)


def test_at_most_a_hundred_records_are_kept(tmp_path: Path) -> None:
    path = tmp_path / "s.db"
    stored = healthy()
    stored.more = {
        AUDIT + f"2020-01-01T00:00:00.{number:03d}Z-0000".encode(): b"{}" for number in range(50)
    }
    url = stored.write(path)
    more = [Put(AUDIT + f"2021-{number:03d}".encode(), b"{}") for number in range(55)]

    async def add() -> None:
        store = Namespace(SqliteStore(path, by="test"), "domicile")
        try:
            assert isinstance(await store.commit((), more), Committed)
        finally:
            await store.close()

    asyncio.run(add())
    assert domicile("drain", "node-b", url).exit_code == 0
    keys = sorted(key for key in contents(path) if key.startswith(AUDIT))
    assert len(keys) == KEPT_AUDITS
    assert keys[0] == AUDIT + b"2020-01-01T00:00:00.006Z-0000"


def operated(
    url: str, work: Callable[[Operator], object], kind: type[SqliteStore] = SqliteStore
) -> object:
    async def run() -> object:
        whole = open_existing(url, "operator")
        store = kind(Path(url.removeprefix("sqlite:///")), by="operator")
        operator = Operator(replace(whole, store=store), "domicile")
        try:
            return await work(operator)  # type: ignore[misc]
        finally:
            await operator.close()

    return asyncio.run(run())


def test_a_cluster_that_moved_on_is_not_touched(tmp_path: Path) -> None:
    path = tmp_path / "s.db"
    url = healthy().write(path)

    async def work(operator: Operator) -> object:
        make = lambda picture: free_deed(picture, ShardKey("default", 2))  # noqa: E731
        return await operator.do("free", make, "default/2@2 from node-b (bbbbbbbb)", "")

    with pytest.raises(LookupError, match="moved on"):
        operated(url, work)
    assert audits(path) == []


class Mumbling(SqliteStore):
    """Does what it is asked and says that it does not know."""

    async def commit(self, *arguments: object) -> Outcome:
        await super().commit(*arguments)  # type: ignore[arg-type]
        return Unknown()


class Deaf(SqliteStore):
    """Does nothing and says that it does not know."""

    async def commit(self, *arguments: object) -> Outcome:
        return Unknown()


@pytest.mark.parametrize("kind", [Mumbling, Deaf])
def test_an_unknown_outcome_is_looked_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: type[SqliteStore]
) -> None:
    path = tmp_path / "s.db"
    url = healthy().write(path)
    monkeypatch.setattr("domicile.ops.operator.RETRY_S", 0.0)

    async def work(operator: Operator) -> object:
        made = lambda picture: OperatorCommit("x", (), (Put(b"x", b""),))  # noqa: E731
        return await operator.do("x", made, "x", "")

    if kind is Deaf:
        with pytest.raises(StoreUnavailable, match="repeat the command"):
            operated(url, work, kind)
    else:
        operated(url, work, kind)
    assert len(audits(path)) == (kind is Mumbling)

    async def look(operator: Operator) -> StoreSnapshot:
        return await operator.look()

    picture = operated(url, look)
    assert isinstance(picture, StoreSnapshot)
    assert B in picture.members.nodes


@pytest.fixture
def pod(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("POD_NAME", "shop-1")


@pytest.mark.usefixtures("pod")
def test_a_pod_that_ends_empties_its_node_and_leaves_no_wish_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "s.db"
    url = f"sqlite:////{str(path).lstrip('/')}"
    settings = Settings(shards=8, ttl_s=3.0)

    async def scenario() -> None:
        async with Node(url, entities=[Idle], node_id="shop-2", settings=settings):
            async with Node(url, entities=[Idle], node_id="shop-1", settings=settings):
                operator = Operator(open_existing(url, "test"), "domicile")
                try:
                    while not has_shards(await operator.look(), "shop-1"):  # noqa: ASYNC110
                        await asyncio.sleep(0.05)
                    done = await asyncio.to_thread(domicile, "drain", "--self", "--wait", "60", url)
                    assert (done.exit_code, done.stdout) == (0, "shop-1 is empty\n")
                    picture = await operator.look()
                    assert not has_shards(picture, "shop-1")
                    assert list(picture.members.drains) == ["shop-1"]
                finally:
                    await operator.close()
            assert not [key for key in contents_of(await listed(path)) if key.startswith(b"drain/")]
            # Nobody else can take them, so there is nothing to wait for.
            monkeypatch.setenv("POD_NAME", "shop-2")
            done = await asyncio.to_thread(domicile, "drain", "--self", "--wait", "600", url)
            assert done.exit_code == 0
            assert "keeps its shards: no other node" in done.stdout

    asyncio.run(scenario())


@pytest.mark.usefixtures("pod")
def test_a_pod_without_a_node_has_nothing_to_empty(tmp_path: Path) -> None:
    done = domicile("drain", "--self", healthy().write(tmp_path / "s.db"))
    assert done.exit_code == 0
    assert "no node is registered as shop-1" in done.stdout


def test_drain_without_a_name_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "or --self in a pod" in domicile("drain").output
    monkeypatch.delenv("POD_NAME", raising=False)
    done = domicile("drain", "--self", "sqlite:///x.db")
    assert done.exit_code == 2
    assert "POD_NAME" in done.output


def test_a_wait_for_an_empty_node_has_an_end(tmp_path: Path) -> None:
    done = domicile("drain", "node-b", healthy().write(tmp_path / "s.db"), "--wait", "0.1")
    assert done.exit_code == 1
    assert "node-b still has shards after 0.1 s" in done.output


@pytest.mark.usefixtures("pod")
def test_a_node_without_a_lease_gets_no_wish_that_outlives_it(tmp_path: Path) -> None:
    stored = Stored(nodes=[in_pod(node(A))], shards={"default": [serving(A)]})
    done = domicile("drain", "--self", stored.write(tmp_path / "s.db"))
    assert done.exit_code == 1
    assert "has no lease" in done.output


def in_pod(record: NodeRecord) -> NodeRecord:
    return structs.replace(record, node="shop-1", ttl_s=RECORD_FOREVER_S)


def contents_of(listing: Listing) -> dict[bytes, bytes]:
    return {item.key: item.value for item in listing.items}
