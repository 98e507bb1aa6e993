"""`domicile inspect` and `domicile kick`, and stuck handlers in `domicile status`, against stores
filled through the store port."""

from __future__ import annotations

import asyncio
import io
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import pytest
from cluster_lab import GONE, A, B, Stored, contents, healthy, moving, node, serving
from rich.console import Console
from typer.testing import CliRunner, Result

from domicile.core.hashing import shard_of
from domicile.core.ids import EntityKey, ShardKey
from domicile.core.state.keys import AUDIT, CONFIG_KEY, KICK, kick_key, stuck_key
from domicile.core.state.records import ConfigRecord, TypeRecord, encode_record
from domicile.core.state.txn import At, Put
from domicile.diagnose.records import (
    KickOutcome,
    KickRecord,
    StuckRecord,
    StuckTurn,
    decode_kick,
    encode_kick,
    encode_stuck,
)
from domicile.membership.clock import SystemClock
from domicile.ops.cli import app
from domicile.ops.show import count, stuck_view
from domicile.ops.stuck import commands as stuck
from domicile.ops.stuck.commands import told
from domicile.ops.stuck.inspecting import ranges
from domicile.ops.stuck_seen import StuckSeen
from domicile.stores.namespace import Namespace
from domicile.stores.sqlite.store import SqliteStore

STACK = ("shop.py:41 Room.pay", "bank.py:7 ask_bank", "asyncio/locks.py Event.wait")


@pytest.fixture(autouse=True)
def no_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("DOMICILE_STORE", raising=False)
    monkeypatch.chdir(tmp_path)


def domicile(*arguments: str) -> Result:
    return CliRunner().invoke(app, arguments)


def late(age_s: float = 100.0, *, id: str = "r1", more: int = 0) -> bytes:
    """What a node of this machine says of a handler that began some time ago."""
    now = SystemClock().now()
    turn = StuckTurn("default", 2, "room", id, "pay", now - age_s, "waits", 3, STACK)
    return encode_stuck(StuckRecord(now - 1.0, (turn,), more, 12))


def with_late() -> Stored:
    stored = healthy()
    stored.more = {stuck_key(A): late()}
    return stored


def test_status_names_a_stuck_handler(tmp_path: Path) -> None:
    url = with_late().write(tmp_path / "s.db")
    seen = json.loads(domicile("status", url, "--json").stdout)
    (one,) = seen["stuck"]
    age_s = one.pop("age_s")
    assert age_s >= 100, "as of now, not as of when it was written"
    assert one == {
        "node": "node-a", "incarnation": A, "type": "room", "id": "r1", "role": "default",
        "shard": 2, "handler": "pay", "kind": "waits", "queue": 3, "stack": list(STACK),
    }  # fmt: skip
    text = domicile("status", url).stdout
    line = next(line for line in text.splitlines() if line.startswith("stuck"))
    for words in ("room/r1 pay", "node-a", "default/2", "waits for 2 min", "3 queued", "bank.py:7"):
        assert words in line
    assert "shop.py" not in text, "the whole stack is for inspect"


@pytest.mark.parametrize(
    ("stack", "line"),
    [
        (STACK, "bank.py:7 ask_bank"),
        (
            ("shop/cart.py:16 Cart.ask", "httpx/_client.py:9 get", "httpcore/x.py:1 f"),
            "shop/cart.py:16 Cart.ask",
        ),
        (
            ("shop/cart.py:16 Cart.pay", "httpx/_client.py:9 get", "shop/hooks.py:5 retry",
             "asyncio/tasks.py sleep"),
            "shop/hooks.py:5 retry",
        ),
        (("app.py:16 Cart.ask", "anyio/streams.py:4 receive"), "app.py:16 Cart.ask"),
        (("asyncio/locks.py Event.wait", "asyncio/futures.py f"), "asyncio/futures.py f"),
    ],
)  # fmt: skip
def test_the_line_of_a_stuck_handler_is_the_users(stack: tuple[str, ...], line: str) -> None:
    console = Console(width=400, file=io.StringIO())
    seen = StuckSeen("n", A, "cart", "c1", "default", 2, "pay", "waits", 3.0, 0, stack)
    with console.capture() as shown:
        console.print(stuck_view([seen]))
    assert shown.get().rstrip().endswith(f"0 queued, {line}")


def test_status_of_a_cluster_where_nothing_is_stuck_says_nothing_of_it(tmp_path: Path) -> None:
    stored = healthy()
    stored.more = {stuck_key(B): b"no JSON", stuck_key(GONE): late()}
    url = stored.write(tmp_path / "s.db")
    result = domicile("status", url, "--json")
    assert json.loads(result.stdout)["stuck"] == []
    assert "stuck" not in domicile("status", url).stdout


def test_more_than_are_named_are_counted(tmp_path: Path) -> None:
    stored = healthy()
    stored.more = {stuck_key(A): late(more=4), stuck_key(B): late(id="r2", more=1)}
    url = stored.write(tmp_path / "s.db")
    seen = json.loads(domicile("status", url, "--json").stdout)
    assert sorted(one["id"] for one in seen["stuck"]) == ["r1", "r2"]
    assert seen["more_stuck"] == 5
    assert "and 5 more" in domicile("status", url).stdout


def test_a_node_is_inspected(tmp_path: Path) -> None:
    url = with_late().write(tmp_path / "s.db")
    result = domicile("inspect", "node-a", url)
    assert result.exit_code == 0, result.output
    for words in (A, "up, coordinator", "127.0.0.1:7097", "2 shards: 0, 2", "12 entities", *STACK):
        assert words in result.stdout
    seen = json.loads(domicile("inspect", A[:8], url, "--json").stdout)
    assert seen["node"]["node"] == "node-a"
    assert seen["serving"] == {"default": [0, 2]}
    assert seen["residents"] == 12
    assert [one["handler"] for one in seen["stuck"]] == ["pay"]
    quiet = domicile("inspect", "node-b", url)
    assert quiet.exit_code == 0
    assert "nothing is stuck" in quiet.stdout
    assert json.loads(domicile("inspect", "node-b", url, "--json").stdout)["residents"] is None


def test_a_node_with_moving_shards_is_inspected(tmp_path: Path) -> None:
    stored = Stored(
        nodes=[node(A), node(B)], shards={"default": [serving(A), moving(A, B), serving(B)]}
    )
    url = stored.write(tmp_path / "s.db")
    text = domicile("inspect", "node-a", url).stdout
    assert "1 shard: 0" in text
    assert "1 shard: 1" in text
    seen = json.loads(domicile("inspect", "node-a", url, "--json").stdout)
    assert (seen["serving"], seen["moving"]) == ({"default": [0]}, {"default": [1]})


def test_an_entity_is_inspected(tmp_path: Path) -> None:
    stored = with_late()
    owner = A if shard_of(EntityKey("room", "r1"), 4) in (0, 2) else B
    stored.more = {stuck_key(owner): late()}
    url = stored.write(tmp_path / "s.db")
    result = domicile("inspect", "room", "r1", url)
    assert result.exit_code == 0, result.output
    for words in ("room/r1", "serving", *STACK):
        assert words in result.stdout
    seen = json.loads(domicile("inspect", "room", "r1", url, "--json").stdout)
    assert [one["id"] for one in seen["stuck"]] == ["r1"]
    assert seen["place"]["incarnation"] == owner
    other = domicile("inspect", "room", "r9", url)
    assert "nothing is stuck" in other.stdout


def test_the_store_may_come_from_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = with_late().write(tmp_path / "s.db")
    monkeypatch.setenv("DOMICILE_STORE", url)
    assert "2 shards: 0, 2" in domicile("inspect", "node-a").stdout
    assert "room/r1" in domicile("inspect", "room", "r1").stdout


def test_what_is_not_there_can_not_be_inspected(tmp_path: Path) -> None:
    stored = healthy()
    stored.clients = [GONE]
    url = stored.write(tmp_path / "s.db")
    nobody = domicile("inspect", "node-x", url)
    assert nobody.exit_code == 1
    assert "nobody is registered as 'node-x'" in nobody.stderr
    client = domicile("inspect", GONE, url)
    assert client.exit_code == 1
    assert "is a client" in client.stderr
    kind = domicile("inspect", "room", url)
    assert kind.exit_code == 1
    assert "'room' is an entity type: say its id too, as in `domicile inspect room" in kind.stderr
    assert domicile("inspect", "lamp", "l1", url).exit_code == 1
    assert domicile("inspect", "node-a", f"sqlite:///{tmp_path}/none.db").exit_code == 3


def test_a_type_is_known_when_its_nodes_are_gone(tmp_path: Path) -> None:
    config = ConfigRecord({"default": 1}, types={"lamp": TypeRecord("default")})
    stored = Stored(config=False, more={CONFIG_KEY: encode_record(config)})
    result = domicile("inspect", "lamp", stored.write(tmp_path / "s.db"))
    assert result.exit_code == 1
    assert "'lamp' is an entity type" in result.stderr


def test_one_thing_is_not_several() -> None:
    assert count(1, "shard") == "1 shard"
    assert count(1, "entity", "entities") == "1 entity"
    assert count(0, "shard") == "0 shards"
    assert count(1_200, "entity", "entities") == "1,200 entities"


def test_numbers_are_written_as_ranges() -> None:
    assert ranges([]) == ""
    assert ranges([3]) == "3"
    assert ranges([0, 1, 2, 5, 7, 8]) == "0-2, 5, 7-8"


# kicks


@contextmanager
def owner(path: Path, entity: EntityKey, outcome: KickOutcome) -> Iterator[list[KickRecord]]:
    """Somebody who answers a kick as the owner would; the wishes it has seen."""
    seen: list[KickRecord] = []
    key = kick_key(ShardKey("default", shard_of(entity, 4)), entity)
    over = threading.Event()

    async def answer() -> None:
        store = Namespace(SqliteStore(path, by="owner"), "domicile")
        try:
            while not over.is_set():
                item = await store.get(key)
                if item is not None:
                    record = decode_kick(item.value)
                    seen.append(record)
                    done = msgspec.structs.replace(record, outcome=outcome)
                    put = Put(key, encode_kick(done), record.lease)
                    await store.commit((At(key, item.revision),), (put,))
                    return
                await asyncio.sleep(0.01)
        finally:
            await store.close()

    thread = threading.Thread(target=lambda: asyncio.run(answer()))
    thread.start()
    try:
        yield seen
    finally:
        over.set()
        thread.join()


def audits(path: Path) -> list[dict[str, str]]:
    return [json.loads(value) for key, value in sorted(contents(path).items())
            if key.startswith(AUDIT)]  # fmt: skip


def test_a_kick_waits_for_its_outcome_and_leaves_nothing_but_its_record(tmp_path: Path) -> None:
    path = tmp_path / "s.db"
    url = healthy().write(path)
    with owner(path, EntityKey("room", "r/1 ü"), KickOutcome(ended=1, waiting=2)) as wishes:
        result = domicile("kick", "room", "r/1 ü", url, "--why", "hangs")
    assert result.exit_code == 0, result.output
    assert result.stdout == "room 'r/1 ü': 1 handler cancelled (2 messages waiting)\n"
    (wish,) = wishes
    assert "@" in wish.by
    (record,) = audits(path)
    assert (record["command"], record["why"]) == ("kick", "hangs")
    assert "room 'r/1 ü' in default/" in record["what"]
    assert "logged as audit/" in result.stderr
    assert not [key for key in contents(path) if key.startswith(KICK)]


def test_a_kick_that_did_not_free_the_entity_fails(tmp_path: Path) -> None:
    path = tmp_path / "s.db"
    url = healthy().write(path)
    with owner(path, EntityKey("room", "r1"), KickOutcome(ignoring=1)):
        result = domicile("kick", "room", "r1", url)
    assert result.exit_code == 1
    assert "kick once more" in result.stderr


def test_a_kick_that_nobody_answers_is_taken_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stuck, "WAIT_S", 0.2)
    path = tmp_path / "s.db"
    url = healthy().write(path)
    result = domicile("kick", "room", "r1", url)
    assert result.exit_code == 3
    assert "did not answer" in result.stderr
    assert not [key for key in contents(path) if key.startswith(KICK)]
    assert len(audits(path)) == 1


def test_a_dry_run_changes_nothing(tmp_path: Path) -> None:
    path = tmp_path / "s.db"
    url = healthy().write(path)
    before = contents(path)
    result = domicile("kick", "room", "r1", url, "--dry-run")
    assert result.exit_code == 0
    assert result.stdout.startswith("would kick room 'r1' in default/")
    assert contents(path) == before


def test_what_has_no_owner_can_not_be_kicked(tmp_path: Path) -> None:
    stored = Stored(nodes=[node(A)], shards={"default": [serving(GONE)]})
    url = stored.write(tmp_path / "s.db")
    result = domicile("kick", "room", "r1", url)
    assert result.exit_code == 1
    assert "at a node that is gone" in result.stderr
    unknown = domicile("kick", "lamp", "l1", url)
    assert unknown.exit_code == 1
    assert "no node serves entities of type 'lamp'" in unknown.stderr


@pytest.mark.parametrize(
    ("outcome", "words", "free"),
    [
        (KickOutcome(), "nothing of x was suspended", True),
        (KickOutcome(waiting=4), "nothing of x was suspended", True),
        (KickOutcome(ended=2), "2 handlers cancelled", True),
        (KickOutcome(dropped=1), "1 handler given up, never to be resumed", True),
        (KickOutcome(ended=1, ignoring=1), "1 handler cancelled; 1 handler did not end", False),
        (KickOutcome(blocking=1), "1 function in a thread, which can't be interrupted", False),
    ],
)
def test_every_outcome_is_told(outcome: KickOutcome, words: str, free: bool) -> None:
    text, is_free = told("x", outcome)
    assert words in text
    assert is_free is free
