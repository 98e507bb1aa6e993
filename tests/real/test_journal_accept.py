"""A journal that the store does not know, or that lost events: refused, accepted, served again."""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path

import msgspec
import pytest
from postgres_lab import shared_server
from typer.testing import CliRunner, Result

from domicile import EventSourced, Node, Settings, handler
from domicile.backends.registry import OpenOptions, journal_backend
from domicile.core.ids import EntityKey, Incarnation, ShardKey
from domicile.core.state.keys import CONFIG_KEY, OFFSET
from domicile.core.state.records import ConfigRecord, decode_record, encode_record
from domicile.core.state.txn import Delete, Put, Write
from domicile.errors import ConfigError, MaybeExecuted
from domicile.ops.cli import app
from domicile.ports.journal import (
    Batch,
    Claim,
    FenceSeen,
    InspectableJournal,
    JournalWrite,
    WriteRefused,
)
from domicile.stores.namespace import Namespace
from domicile.stores.sqlite.store import SqliteStore

numbers = count()
SETTINGS = Settings(shards=4, ttl_s=6.0)
ANN, BEN = "ann", "ben"


@dataclass(frozen=True)
class Paid:
    """An amount."""

    amount: int


class Till(EventSourced[int, Paid], name="till"):
    """Adds up."""

    @staticmethod
    def initial(id: str) -> int:
        return 0

    @staticmethod
    def apply(state: int, event: Paid) -> int:
        return state + event.amount

    @handler
    async def pay(self, amount: int) -> int:
        return await self.persist(Paid(amount))

    @handler
    async def total(self) -> int:
        return await self.state()


@dataclass
class Place:
    """One cluster on a store of its own, with a journal of some kind."""

    directory: Path
    url: str
    cluster: str

    @property
    def store(self) -> str:
        return f"sqlite:///{self.directory / 'dev.db'}"

    def node(self, url: str = "") -> Node:
        return Node(
            self.store, entities=[Till], journal=url or self.url, cluster=self.cluster,
            settings=SETTINGS,
        )  # fmt: skip

    def run(self, body: Callable[[Node], Awaitable[None]], url: str = "") -> None:
        async def running() -> None:
            async with self.node(url) as node:
                await body(node)

        asyncio.run(running())

    def pay(self, *ids: str) -> None:
        async def paying(node: Node) -> None:
            for id in ids:
                await node.ref(Till, id).ask(Till.pay, 1)

        self.run(paying)

    def total(self, id: str, url: str = "") -> int:
        found: list[int] = []

        async def reading(node: Node) -> None:
            found.append(await node.ref(Till, id).ask(Till.total))

        self.run(reading, url)
        return found[0]

    def stored(self) -> tuple[ConfigRecord, dict[str, str]]:
        return self.change_store(lambda config, offsets: [])

    def change_store(
        self, change: Callable[[ConfigRecord, list[bytes]], Sequence[Write]]
    ) -> tuple[ConfigRecord, dict[str, str]]:
        """What the store knows of the journal, before it is changed."""

        async def reading() -> tuple[ConfigRecord, dict[str, str]]:
            store = SqliteStore(self.directory / "dev.db", by="test")
            mine = Namespace(store, self.cluster)
            item = await mine.get(CONFIG_KEY)
            assert item is not None
            config = decode_record(item.value, ConfigRecord)
            items = (await mine.list(OFFSET)).items
            if writes := change(config, [one.key for one in items]):
                await mine.commit([], writes)
            await store.close()
            return config, {one.key.decode(): one.value.decode() for one in items}

        return asyncio.run(reading())

    def fences(self) -> tuple[FenceSeen, ...]:
        async def reading() -> tuple[FenceSeen, ...]:
            journal = journal_backend(self.url).open_journal(
                self.url, OpenOptions("test", self.cluster)
            )
            assert isinstance(journal, InspectableJournal)
            fences = tuple(await journal.fences())
            await journal.close()
            return fences

        return asyncio.run(reading())

    def command(self, *words: str) -> Result:
        where = ("--cluster", self.cluster, "--journal", self.url)
        return CliRunner().invoke(app, ["journal", *words, *where])

    def accept(self, *words: str) -> Result:
        return self.command("accept", self.store, *words)

    def save(self) -> None:
        """Keep the journal as it is now: by a copy of the same history."""
        if self.url.startswith("sqlite"):
            path = Path(self.url.removeprefix("sqlite:///"))
            shutil.copy(path, path.with_suffix(".saved"))
        else:
            asyncio.run(_dump(self.url, f"{self.cluster}_journal", f"{self.cluster}_saved"))

    def put_back(self) -> None:
        """Put that copy in place, as by hand."""
        if self.url.startswith("sqlite"):
            path = Path(self.url.removeprefix("sqlite:///"))
            shutil.copy(path.with_suffix(".saved"), path)
        else:
            asyncio.run(_dump(self.url, f"{self.cluster}_saved", f"{self.cluster}_journal"))


async def _dump(url: str, source: str, to: str) -> None:
    """Replace the rows of one schema by those of another; the first time it gets the tables."""
    import asyncpg

    raw = await asyncpg.connect(url)
    try:
        tables = ("meta", "fence", "entity", "event", "snapshot", "inbox")
        async with raw.transaction():
            await raw.execute(f"CREATE SCHEMA IF NOT EXISTS {to}")
            for table in tables:
                await raw.execute(
                    f"CREATE TABLE IF NOT EXISTS {to}.{table} AS TABLE {source}.{table} "
                    "WITH NO DATA"
                )
                await raw.execute(f"DELETE FROM {to}.{table}")
                await raw.execute(
                    f"INSERT INTO {to}.{table} OVERRIDING SYSTEM VALUE TABLE {source}.{table}"
                )
    finally:
        await raw.close()


@pytest.fixture(params=["sqlite", "postgresql"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Place:
    """A cluster that has stored something and was stopped."""
    name = f"accept{next(numbers)}"
    url = f"sqlite:///{tmp_path / 'j.journal'}"
    if request.param == "postgresql":
        url = shared_server().new_database()
    made = Place(tmp_path, url, name)
    made.pay(ANN, BEN, ANN)
    return made


def history_of(place: Place) -> str:
    return str(json.loads(place.command("info", "--json").stdout)["history"])


def test_the_first_join_leaves_the_history_and_stops_leave_offsets(place: Place) -> None:
    config, offsets = place.stored()
    history = history_of(place)
    assert config.journals == {"default": history}
    at = {f"offset/default/{one.shard}": one.offset for one in place.fences()}
    assert sum(at.values()) == 3
    assert offsets == {key: f"{offset} {history}" for key, offset in at.items() if offset}
    assert place.total(ANN) == 2


def test_a_claim_leaves_the_offset_while_the_node_runs(place: Place) -> None:
    place.change_store(lambda config, offsets: [Delete(key) for key in offsets])

    async def running(node: Node) -> None:
        assert await node.ref(Till, ANN).ask(Till.total) == 2
        async with asyncio.timeout(60):
            while not (await asyncio.to_thread(place.stored))[1]:  # noqa: ASYNC110 - another client
                await asyncio.sleep(0)

    place.run(running)


def test_another_journal_is_refused_and_the_next_step_is_named(place: Place) -> None:
    with pytest.raises(ConfigError, match="the journal of this process ends with it"):
        place.total(ANN, "memory://")
    other = f"sqlite:///{place.directory / 'other.journal'}"
    with pytest.raises(ConfigError, match="domicile journal accept") as refused:
        place.total(ANN, other)
    assert "Nothing was changed" in str(refused.value)
    assert "role 'default'" in str(refused.value)
    assert place.total(ANN) == 2


@pytest.mark.scenario("DX-30", partial=True)
def test_a_journal_put_back_by_hand_is_refused_until_it_is_accepted(place: Place) -> None:
    place.save()
    place.pay(ANN, ANN, BEN)
    before = {(one.role, one.shard): one.epoch for one in place.fences()}
    place.put_back()
    with pytest.raises(ConfigError, match="older than the store knows"):
        place.total(ANN)
    dry = place.accept()
    assert dry.exit_code == 2
    assert "At least 3 events" in dry.stderr
    assert "say --yes" in dry.stderr
    with pytest.raises(ConfigError, match="older than the store knows"):
        place.total(ANN)
    old = history_of(place)
    done = place.accept("--yes", "--why", "restored")
    assert done.exit_code == 0, done.output
    assert "logged as audit/" in done.stderr
    config, offsets = place.stored()
    assert config.journals == {"default": history_of(place)}
    assert old not in config.journals.values()
    assert {one.split()[1] for one in offsets.values()} == {history_of(place)}
    fences = place.fences()
    assert len(fences) == SETTINGS.shards
    assert all(one.epoch > before.get((one.role, one.shard), 0) for one in fences)
    assert place.total(ANN) == 2
    place.pay(ANN)
    assert place.total(ANN) == 3
    again = place.accept("--yes")
    assert (again.exit_code, "nothing to do" in again.stdout) == (0, True)
    # The same backup once more is another journal now.
    place.put_back()
    with pytest.raises(ConfigError, match="is not the one"):
        place.total(ANN)


def test_a_former_owner_cannot_write_to_an_accepted_journal(place: Place) -> None:
    fence = next(one for one in place.fences() if one.offset)
    place.save()
    place.pay(ANN, BEN)
    stale = next(one for one in place.fences() if one.shard == fence.shard)
    place.put_back()
    assert place.accept("--yes").exit_code == 0

    async def writing() -> None:
        journal = journal_backend(place.url).open_journal(
            place.url, OpenOptions("test", place.cluster)
        )
        shard = ShardKey(fence.role, fence.shard)
        claim = Claim(shard, 0, stale.epoch, Incarnation(stale.owner))
        assert (await journal.claim([claim]))[0] is not None
        write = JournalWrite(shard, EntityKey("till", ANN), -1, (b"x",))
        [answer] = await journal.write(Batch(1 << 40, (claim,), (write,)))
        assert isinstance(answer, WriteRefused)
        assert answer.why == "fenced"
        await journal.close()

    asyncio.run(writing())


def test_a_journal_that_was_replaced_under_a_running_node_is_not_served(tmp_path: Path) -> None:
    url = shared_server().new_database()
    place = Place(tmp_path, url, f"accept{next(numbers)}")
    place.pay(ANN)
    place.save()
    place.pay(ANN, ANN)

    async def running(node: Node) -> None:
        await asyncio.to_thread(place.put_back)
        with pytest.raises(MaybeExecuted, match="older than the store knows"):
            await node.ref(Till, ANN).ask(Till.pay, 1)
        busy = await asyncio.to_thread(place.accept, "--yes")
        assert busy.exit_code == 1
        assert "nodes are registered" in busy.stderr
        forced = await asyncio.to_thread(place.accept, "--yes", "--force")
        assert forced.exit_code == 0, forced.output
        while True:
            try:
                assert await node.ref(Till, ANN).ask(Till.pay, 1) == 2
                return
            except MaybeExecuted:
                continue

    place.run(running)


def test_a_cluster_from_before_learns_the_history_at_the_next_join(place: Place) -> None:
    history = history_of(place)
    place.change_store(
        lambda config, offsets: [
            Put(CONFIG_KEY, encode_record(msgspec.structs.replace(config, journals={}))),
            *map(Delete, offsets),
        ]
    )
    assert place.total(ANN) == 2
    config, _ = place.stored()
    assert config.journals == {"default": history}


def test_a_journal_in_memory_is_compared_with_nothing(tmp_path: Path) -> None:
    place = Place(tmp_path, "memory://", "domicile")
    place.pay(ANN)
    assert place.total(ANN) == 0
    config, offsets = place.stored()
    assert (config.journals, offsets) == ({}, {})
    refused = place.accept("--yes")
    assert refused.exit_code == 1
    assert "ends with its process" in refused.stderr


def test_accept_says_what_it_needs(tmp_path: Path) -> None:
    assert CliRunner().invoke(app, ["journal", "accept"]).exit_code == 2
    place = Place(tmp_path, f"sqlite:///{tmp_path / 'j.journal'}", "domicile")
    assert place.accept().exit_code == 3
    place.pay(ANN)
    wrong = place.accept("--role", "nobody")
    assert wrong.exit_code == 2
    assert "known ones: default" in wrong.stderr
