"""Commands that look into journals: what they show, what they find wrong, what they copy."""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass
from itertools import count
from pathlib import Path

import apsw
import msgspec
import pytest
from postgres_lab import GUARDED, shared_server
from typer.testing import CliRunner, Result

from domicile import Durable, EventSourced, Forgettable, Node, handler
from domicile.core.ids import EntityKey, ShardKey
from domicile.journals.postgres.journal import PostgresJournal
from domicile.journals.sqlite.journal import SqliteJournal
from domicile.journals.sqlite.schema import APPLICATION_ID
from domicile.membership.clock import SystemClock
from domicile.ops.cli import app
from domicile.ports.journal import Batch, Claim, Journal, JournalWrite
from domicile.testing.suites.journal import A

ALICE, BOB, CARL = (EntityKey("account", id) for id in ("alice", "bob", "carl"))
numbers = count()


@pytest.fixture(autouse=True)
def no_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("DOMICILE_STORE", raising=False)
    monkeypatch.chdir(tmp_path)


def domicile(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["journal", *arguments])


def paid(amount: int) -> bytes:
    return msgspec.msgpack.encode(("Paid", {"amount": amount}))


async def fill(journal: Journal) -> None:
    """Two shards: events, a deletion, a whole state, a snapshot."""
    claims = (Claim(ShardKey("default", 0), 0, 3, A), Claim(ShardKey("default", 1), 0, 4, A))
    await journal.claim(claims)
    zero, one = (claim.shard for claim in claims)
    state = msgspec.msgpack.encode((b"mark", {"n": 7}))
    for number, writes in enumerate(
        (
            (JournalWrite(zero, ALICE, 0, (paid(5), paid(6)), snapshot=(2, b"s")),),
            (JournalWrite(one, BOB, 0, (paid(1),)), JournalWrite(zero, ALICE, 2, (paid(7),))),
            (JournalWrite(one, BOB, 1, delete=True),),
            (JournalWrite(one, CARL, 0, state=state, saves=3),),
        ),
        1,
    ):
        shards = [write.shard for write in writes]
        mine = tuple(claim for claim in claims if claim.shard in shards)
        await journal.write(Batch(number, mine, writes))
    await journal.close()


@pytest.fixture(params=["sqlite", "postgres"])
def journal(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[str, str]:
    """The options that name a journal, by its URL and its cluster."""
    name = f"tools{next(numbers)}"
    if request.param == "sqlite":
        path = tmp_path / "dev.db.journal"
        asyncio.run(fill(SqliteJournal(path, name)))
        return f"sqlite:///{path}", name

    async def filled() -> None:
        await fill(PostgresJournal(shared_server().url, name, SystemClock(), shown="here"))

    asyncio.run(filled())
    return shared_server().url, name


def options(journal: tuple[str, str]) -> tuple[str, ...]:
    return "--journal", journal[0], "--cluster", journal[1]


def test_info(journal: tuple[str, str]) -> None:
    found = domicile("info", *options(journal), "--json")
    assert found.exit_code == 0, found.output
    seen = json.loads(found.stdout)
    assert (seen["format"], seen["entities"], seen["events"]) == (3, 3, 4)
    assert seen["bytes"] == 3 * len(paid(5))
    assert len(seen["history"]) == 32
    assert [(one["shard"], one["epoch"], one["offset"]) for one in seen["fences"]] == [
        (0, 3, 3),
        (1, 4, 2),
    ]
    text = domicile("info", *options(journal)).stdout
    assert "default/1  epoch 4  offset 2" in text


def test_show(journal: tuple[str, str]) -> None:
    found = domicile("show", "account", "alice", *options(journal))
    assert found.exit_code == 0, found.output
    assert found.stdout.splitlines() == [
        '1  Paid {"amount":5}',
        '2  Paid {"amount":6}',
        '3  Paid {"amount":7}',
    ]
    short = domicile("show", "account", "alice", *options(journal), "--at", "2", "--json")
    assert [json.loads(line)["seq"] for line in short.stdout.splitlines()] == [1, 2]
    assert domicile("show", "account", "carl", *options(journal)).stdout == '3  state {"n":7}\n'
    gone = domicile("show", "account", "bob", *options(journal))
    assert (gone.exit_code, gone.stdout) == (0, "")
    assert "has no events" in gone.stderr
    assert domicile("show", "account", "nobody", *options(journal)).exit_code == 1


@dataclass(frozen=True)
class Registered:
    email: Forgettable[str]
    tags: dict[int, bytes]


class Customer(EventSourced[int, Registered], name="customer"):
    @staticmethod
    def initial(id: str, /) -> int:
        return 0

    @staticmethod
    def apply(state: int, event: Registered, /) -> int:
        return state + 1

    @handler
    async def register(self, email: str) -> int:
        return await self.persist(Registered(Forgettable(email), {1: b"x"}))


@dataclass(frozen=True)
class Profile:
    email: Forgettable[str] | None = None
    visits: int = 0


class Visitor(Durable[Profile], name="visitor"):
    @staticmethod
    def initial(id: str, /) -> Profile:
        return Profile()

    @handler
    async def visit(self, email: str) -> None:
        await self.save(Profile(Forgettable(email), (await self.state()).visits + 1))


@pytest.mark.parametrize("how", [(), ("--json",)])
def test_values_that_can_be_erased_are_told_and_not_shown(
    how: tuple[str, ...], tmp_path: Path
) -> None:
    async def used() -> None:
        store = f"sqlite:///{tmp_path / 'x.db'}"
        async with Node(store, entities=[Customer, Visitor]) as node:
            await node.ref(Customer, "c").ask(Customer.register, "ada@example.org")
            for _ in range(2):
                await node.ref(Visitor, "v").ask(Visitor.visit, "ada@example.org")

    asyncio.run(used())
    store = f"sqlite:///{tmp_path / 'x.db'}"
    shown = []
    for command in (
        ("tail", store, "--from-start", "--once"),
        ("show", "customer", "c", store),
        ("show", "customer~forgettable", "c", store),
        ("show", "visitor", "v", store),
        ("show", "visitor~forgettable", "v", store),
    ):
        found = domicile(*command, *how)
        assert found.exit_code == 0, (command, found.output, found.exception)
        assert "ada" not in found.stdout
        assert b"ada".hex() not in found.stdout
        shown.append(found.stdout)
    tail, customer, vault, visitor, whole = shown
    assert "Registered" in tail
    assert "<forgettable " in customer
    assert "<forgettable " in visitor
    for one in (vault, whole):
        assert "<hidden, 16 bytes>" in one


def test_an_earlier_state_of_an_entity_without_events_is_refused(
    journal: tuple[str, str],
) -> None:
    early = domicile("show", "account", "carl", *options(journal), "--at", "1")
    assert (early.exit_code, early.stdout) == (1, "")
    assert "its newest one only, number 3" in early.stderr
    now = domicile("show", "account", "carl", *options(journal), "--at", "3")
    assert now.stdout == '3  state {"n":7}\n'


def test_whatever_can_be_stored_can_be_shown(tmp_path: Path) -> None:
    ext = msgspec.msgpack.Ext

    async def written() -> None:
        stored = SqliteJournal(tmp_path / "x.journal", "c")
        claim = Claim(ShardKey("default", 0), 0, 1, A)
        await stored.claim([claim])
        odd = {
            "raw": b"\x00\xff", "when": ext(-1, bytes(4)), "other": ext(9, b"x"),
            "keys": {(1, 2): 1, 3: 2, None: 3, b"k": 4},
        }  # fmt: skip
        events = (msgspec.msgpack.encode(("Odd", odd)), b"\xc1", msgspec.msgpack.encode(7))
        await stored.write(Batch(1, (claim,), (JournalWrite(claim.shard, ALICE, 0, events),)))
        await stored.close()

    asyncio.run(written())
    where = ("--journal", f"sqlite:///{tmp_path / 'x.journal'}", "--cluster", "c")
    for how in ((), ("--json",)):
        found = domicile("show", "account", "alice", *where, *how)
        assert found.exit_code == 0, found.output
        assert len(found.stdout.splitlines()) == 3
        assert "<extension 9: 78>" in found.stdout


def test_tail(journal: tuple[str, str]) -> None:
    found = domicile("tail", *options(journal), "--from-start", "--once")
    assert found.exit_code == 0, found.output
    assert found.stdout.splitlines() == [
        'default/0@1  account alice  1  Paid {"amount":5}',
        'default/0@2  account alice  2  Paid {"amount":6}',
        'default/0@3  account alice  3  Paid {"amount":7}',
        "default/1@2  account bob  2  deleted",
    ]
    assert domicile("tail", *options(journal), "--once").stdout == ""


def test_a_sound_journal_passes(journal: tuple[str, str]) -> None:
    found = domicile("verify", *options(journal))
    assert found.exit_code == 0, found.output
    assert found.stdout == "3 entities, 4 events: all agree\n"


@pytest.mark.parametrize(
    ("harm", "said"),
    [
        ("DELETE FROM event WHERE seq = 2 AND data IS NOT NULL", "should have events 1 to 3"),
        ("UPDATE event SET seq = 9 WHERE seq = 3", "belongs to no entity that knows it"),
        ("UPDATE fence SET next = 8 WHERE shard = 1", "shard default/1 should end at offset 8"),
        ("UPDATE snapshot SET seq = 4", "has a snapshot of event 4, and its last event is 3"),
    ],
)
def test_what_does_not_agree_is_told(journal: tuple[str, str], harm: str, said: str) -> None:
    url, name = journal
    if url.startswith("sqlite"):
        raw = apsw.Connection(url.removeprefix("sqlite:///"))
        raw.execute(harm)
        raw.close()
    else:
        import asyncpg

        async def hurt() -> None:
            raw = await asyncpg.connect(url, server_settings={"search_path": f"{name}_journal"})
            await raw.execute(harm)
            await raw.close()

        asyncio.run(hurt())
    found = domicile("verify", *options(journal))
    assert found.exit_code == 1, found.output
    assert said in found.stdout


def test_a_copy_is_whole_and_has_another_history(tmp_path: Path) -> None:
    path, to = tmp_path / "dev.db.journal", tmp_path / "backup" / "b.journal"

    async def scenario() -> None:
        journal = SqliteJournal(path, "domicile")
        await fill(journal)
        beside = SqliteJournal(path, "domicile")
        await beside.claim([])  # another process has it open
        done = await asyncio.to_thread(domicile, "copy", f"sqlite:///{path}", f"sqlite:///{to}")
        assert done.exit_code == 0, done.output
        await beside.close()

    asyncio.run(scenario())
    assert [one.name for one in to.parent.iterdir()] == ["b.journal"]
    ours, theirs = (
        json.loads(domicile("info", "--journal", f"sqlite:///{one}", "--json").stdout)
        for one in (path, to)
    )
    assert ours.pop("history") != theirs.pop("history")
    assert ours == theirs
    assert domicile("verify", "--journal", f"sqlite:///{to}").exit_code == 0
    again = domicile("copy", f"sqlite:///{path}", f"sqlite:///{to}")
    assert again.exit_code == 2
    assert "is there already" in again.stderr


def test_wrong_usage_says_what_to_write(tmp_path: Path) -> None:
    assert domicile("info").exit_code == 2
    missing = domicile("info", "sqlite:///nowhere.db")
    assert missing.exit_code == 3
    assert not list(tmp_path.iterdir())
    path = tmp_path / "dev.db.journal"
    asyncio.run(fill(SqliteJournal(path, "domicile")))
    as_store = domicile("info", f"sqlite:///{path}")
    assert as_store.exit_code == 3
    assert f"name it by --journal sqlite:///{path}" in as_store.stderr
    assert domicile("copy", f"sqlite:///{path}", "postgresql://x/y").exit_code == 2
    assert domicile("copy", "sqlite:///none.journal", "sqlite:///b.journal").exit_code == 2


@pytest.mark.parametrize("command", ["info", "verify", "tail", "show", "export"])
def test_another_cluster_is_named_and_nothing_is_created(
    command: str, journal: tuple[str, str], tmp_path: Path
) -> None:
    url, name = journal
    words = {"tail": ("--once",), "show": ("account", "alice"), "export": ("x.jsonl",)}
    found = domicile(command, *words.get(command, ()), "--journal", url, "--cluster", "blue")
    assert found.exit_code == 3, found.output
    assert "nothing of cluster 'blue', it holds " in found.stderr
    assert name in found.stderr
    again = domicile("info", "--journal", url, "--cluster", "blue")
    assert "blue" not in again.stderr.partition("it holds")[2]
    assert not (tmp_path / "x.jsonl").exists()


def test_a_wrong_type_is_told_which_there_are(journal: tuple[str, str]) -> None:
    found = domicile("show", "Account", "alice", *options(journal))
    assert found.exit_code == 1
    assert "its entity types are account" in found.stderr


def test_tools_leave_an_older_format_as_it_is(tmp_path: Path) -> None:
    old = (Path(__file__).parents[2] / "labs" / "sqlite_journal_1.sql").read_text(encoding="utf-8")
    path = tmp_path / "old.journal"
    raw = apsw.Connection(str(path))
    raw.execute(old)
    raw.pragma("user_version", 1)
    raw.pragma("application_id", APPLICATION_ID)
    raw.close()
    before = path.read_bytes()
    found = domicile("info", "--journal", f"sqlite:///{path}")
    assert found.exit_code == 3, found.output
    assert "has format 1, which is older" in found.stderr
    assert path.read_bytes() == before


def test_what_can_not_be_written_is_told(tmp_path: Path) -> None:
    asyncio.run(fill(SqliteJournal(tmp_path / "dev.db.journal", "c")))
    url = f"sqlite:///{tmp_path / 'dev.db.journal'}"
    (tmp_path / "file").touch()
    refused = domicile("copy", url, f"sqlite:///{tmp_path / 'file' / 'b.journal'}")
    assert refused.exit_code == 2, refused.output
    assert "can't be copied to" in refused.stderr
    assert "nothing was left behind" in refused.stderr


def test_a_journal_on_a_server_is_copied_with_the_tools_of_its_server() -> None:
    url = shared_server().url
    refused = domicile("copy", url, f"{url}_copy")
    assert refused.exit_code == 2, refused.output
    assert "`pg_dump` for PostgreSQL" in refused.stderr


def test_a_wrong_password_is_told_and_not_shown() -> None:
    url = shared_server().url.replace("domicile@", f"{GUARDED}:secret@")
    found = domicile("info", "--journal", url)
    assert found.exit_code == 2, found.output
    assert "refuses this user" in found.stderr
    assert "secret" not in found.output
