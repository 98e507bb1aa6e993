"""Projections: no event is left out and none comes twice, whatever stalls, fails or restarts."""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import msgspec
import pytest
from postgres_lab import shared_server

from domicile import (
    ConfigError,
    Deleted,
    Durable,
    EventSourced,
    JournalEvent,
    Node,
    Projector,
    Settings,
    handler,
    upcast,
)
from domicile.backends.memory import MEMORY
from domicile.core.ids import EntityKey, ShardKey
from domicile.journals.memory import MemoryJournal
from domicile.journals.postgres.journal import PostgresJournal
from domicile.journals.sqlite.journal import SqliteJournal
from domicile.membership.clock import SystemClock
from domicile.observe.metrics import Metrics
from domicile.persist import projections
from domicile.persist.projections import ProjectionRunner
from domicile.ports.journal import (
    Batch,
    Claim,
    EventPage,
    Journal,
    JournalUnknown,
    JournalWrite,
    Written,
)
from domicile.testing import MemoryProjection
from domicile.testing.suites.journal import A, Gate

numbers = itertools.count()


@dataclass(frozen=True)
class Paid:
    amount: int


@dataclass(frozen=True)
class Named:
    name: str


class Account(EventSourced[int, Paid | Named], name="account"):
    @staticmethod
    def initial(id: str, /) -> int:
        return 0

    @staticmethod
    def apply(state: int, event: Paid | Named, /) -> int:
        return state + (event.amount if isinstance(event, Paid) else 0)

    @upcast("Withdrawn")
    @staticmethod
    def _withdrawn(fields: dict[str, Any], /) -> Paid:
        return Paid(-fields["amount"])

    @handler
    async def pay(self, amount: int) -> int:
        return await self.persist(Paid(amount))


class Elsewhere(Account, name="elsewhere", role="other"):
    """An account of another role."""


class Plain(Durable[int], name="plain"):
    """An entity without events."""

    @staticmethod
    def initial(id: str, /) -> int:
        return 0


ENCODE = Account.__domicile_events__.encode
ALICE, BOB = EntityKey("account", "alice"), EntityKey("account", "bob")


def shard(number: int) -> ShardKey:
    return ShardKey("default", number)


def claim(number: int) -> Claim:
    return Claim(shard(number), 0, 1, A)


class Scribe:
    """Writes to a journal as an owner of its shards does."""

    def __init__(self, journal: Journal) -> None:
        self.journal = journal
        self._numbers = itertools.count(1)

    async def write(
        self,
        number: int,
        entity: EntityKey,
        *events: Any,
        delete: bool = False,
    ) -> None:
        await self.journal.claim([claim(number)])
        stored = tuple(one if isinstance(one, bytes) else ENCODE(one) for one in events)
        change = JournalWrite(shard(number), entity, -1, stored, delete=delete)
        [done] = await self.journal.write(Batch(next(self._numbers), (claim(number),), (change,)))
        assert isinstance(done, Written)


def runner(journal: Journal, projection: Any, *, shards: Sequence[int] = (0,), **more: Any) -> Any:
    wanted: dict[str, Any] = {
        "codecs": {"account": Account.__domicile_events__},
        "page_events": 100,
        "poll_s": (0.001, 0.005),
        "meter": Metrics(),
    }
    return ProjectionRunner(
        journal, projection, name="test", role="default", shards=shards, **(wanted | more)
    )


@asynccontextmanager
async def running(made: Any) -> AsyncIterator[Any]:
    task = asyncio.create_task(made.run())
    try:
        yield made
    finally:
        made.stop()
        await asyncio.wait_for(task, 60)


async def until(condition: Callable[[], bool]) -> None:
    while not condition():  # noqa: ASYNC110 - nothing announces it
        await asyncio.sleep(0)


async def caught_up(made: Any) -> None:
    await asyncio.wait_for(made.caught_up(), 60)


@pytest.fixture(autouse=True)
def _short_retries(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(projections, "RETRY_S", (0.001, 0.01))


class Blind:
    """A journal that does not tell the last offsets of its shards."""

    def __init__(self, inner: Journal) -> None:
        self._inner = inner

    def __getattr__(self, name: str) -> Any:
        if name == "offsets":
            raise AttributeError(name)
        return getattr(self._inner, name)


def test_events_come_decoded_with_their_places_and_only_of_wanted_types() -> None:
    async def scenario() -> None:
        journal, seen = MemoryJournal(), MemoryProjection()
        scribe = Scribe(journal)
        await scribe.write(0, ALICE, Paid(5), Named("A"))
        await scribe.write(0, EntityKey("order", "o1"), b"not to be decoded")
        await scribe.write(0, ALICE, msgspec.msgpack.encode(("Withdrawn", {"amount": 2})))
        async with running(runner(journal, seen)) as made:
            await caught_up(made)
            assert made.figures() == (0, 0, 0, 1)
        assert seen.events == [
            JournalEvent("account", "alice", 1, 1, Paid(5)),
            JournalEvent("account", "alice", 2, 2, Named("A")),
            JournalEvent("account", "alice", 3, 4, Paid(-2)),
        ]
        assert seen.offsets == {0: 4}

    asyncio.run(scenario())


@pytest.mark.parametrize("is_blind", [False, True])
def test_each_shard_has_its_own_offset_and_is_read_in_pages(is_blind: bool) -> None:
    async def scenario() -> None:
        inner, seen = MemoryJournal(), MemoryProjection()
        scribe = Scribe(inner)
        for number in range(4):
            for amount in range(number + 1):
                await scribe.write(number, EntityKey("account", f"a{number}"), Paid(amount))
        journal: Any = Blind(inner) if is_blind else inner
        async with running(runner(journal, seen, shards=(1, 2, 3), page_events=2)) as made:
            await caught_up(made)
        assert seen.offsets == {1: 2, 2: 3, 3: 4}
        assert seen.of("a0") == []
        assert seen.of("a3") == [Paid(0), Paid(1), Paid(2), Paid(3)]

    asyncio.run(scenario())


def test_a_commit_that_stalls_leaves_no_gap() -> None:
    """The stalled write holds its shard: nothing of that shard gets past it, others go on."""

    async def scenario() -> None:
        gate = Gate()
        journal, seen = MemoryJournal(pause=gate), MemoryProjection()
        await journal.claim([claim(0), claim(1)])
        scribe = Scribe(journal)
        await scribe.write(0, ALICE, Paid(1))
        async with running(runner(journal, seen, shards=(0, 1))) as made:
            await caught_up(made)
            gate.shut()
            first = asyncio.create_task(scribe.write(0, ALICE, Paid(2)))
            await until(lambda: bool(gate.held))
            second = asyncio.create_task(scribe.write(0, BOB, Paid(3)))
            await until(lambda: bool(journal.queued))
            await caught_up(made)
            assert seen.offsets[0] == 1
            gate.open()
            await first
            await second
            await caught_up(made)
        assert [one.offset for one in seen.events] == [1, 2, 3]
        assert [one.event for one in seen.events] == [Paid(1), Paid(2), Paid(3)]

    asyncio.run(scenario())


def test_a_deletion_is_an_event_of_its_own() -> None:
    async def scenario() -> None:
        journal, seen, late = MemoryJournal(), MemoryProjection(), MemoryProjection()
        scribe = Scribe(journal)
        await scribe.write(0, ALICE, Paid(1), Paid(2))
        async with running(runner(journal, seen)) as made:
            await caught_up(made)
            await scribe.write(0, ALICE, delete=True)
            await scribe.write(0, ALICE, Paid(4))
            await caught_up(made)
        assert seen.of("alice") == [Paid(1), Paid(2), Deleted(), Paid(4)]
        async with running(runner(journal, late)) as made:
            await caught_up(made)
        assert late.of("alice") == [Deleted(), Paid(4)]
        assert late.offsets == seen.offsets == {0: 4}

    asyncio.run(scenario())


def test_a_new_run_goes_on_from_the_stored_offset() -> None:
    async def scenario() -> None:
        journal, seen = MemoryJournal(), MemoryProjection()
        scribe = Scribe(journal)
        for round in range(3):
            await scribe.write(0, ALICE, Paid(round))
            async with running(runner(journal, seen)) as made:
                await caught_up(made)
        # It would raise for an event that came twice.
        assert seen.of("alice") == [Paid(0), Paid(1), Paid(2)]

    asyncio.run(scenario())


class Failing(MemoryProjection):
    """Fails as often as it is told, before or after it has stored."""

    def __init__(self, failures: int, *, after: bool = False) -> None:
        super().__init__()
        self.left, self.after = failures, after
        self.tried: list[tuple[Sequence[Any], int]] = []

    async def apply(self, shard: int, events: Sequence[JournalEvent[Any]], upto: int, /) -> None:
        if shard == 0:
            self.tried.append((events, upto))
        if self.after:
            await super().apply(shard, events, upto)
        if shard == 0 and self.left:
            self.left -= 1
            raise OSError("the database is away")
        if not self.after:
            await super().apply(shard, events, upto)


def test_a_failed_apply_is_tried_again_with_the_same_events(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def scenario() -> None:
        journal, seen = MemoryJournal(), Failing(3)
        scribe, metrics = Scribe(journal), Metrics()
        await scribe.write(0, ALICE, Paid(1), Paid(2))
        await scribe.write(1, BOB, Paid(3))
        async with running(runner(journal, seen, shards=(0, 1), meter=metrics)) as made:
            await until(lambda: bool(seen.tried))
            # What is committed meanwhile comes in a page of its own.
            await scribe.write(0, ALICE, Paid(4))
            await caught_up(made)
            assert made.figures().failing == 0
        first = seen.tried[0]
        assert seen.tried[:4] == [first] * 4
        assert first[1] == 2
        assert seen.of("alice") == [Paid(1), Paid(2), Paid(4)]
        assert seen.of("bob") == [Paid(3)]
        assert metrics.counts["projection.failed"] == 3
        assert metrics.counts["projection.events"] == 4

    with caplog.at_level(logging.WARNING, "domicile"):
        asyncio.run(scenario())
    (text, *_) = [one.getMessage() for one in caplog.records]
    assert "shard default/0 stays at offset 0, because of OSError: the database is away" in text
    assert "tried again in" in text


def test_an_apply_that_stored_and_then_failed_is_not_repeated() -> None:
    async def scenario() -> None:
        journal, seen = MemoryJournal(), Failing(1, after=True)
        await Scribe(journal).write(0, ALICE, Paid(1))
        async with running(runner(journal, seen)) as made:
            await caught_up(made)
        assert seen.of("alice") == [Paid(1)]
        assert len(seen.tried) == 1

    asyncio.run(scenario())


def test_one_hanging_shard_delays_no_other_and_stopping_waits_for_it() -> None:
    async def scenario() -> None:
        release, begun = asyncio.Event(), asyncio.Event()

        class Slow(MemoryProjection):
            async def apply(self, shard: int, events: Any, upto: int, /) -> None:
                if shard == 0:
                    begun.set()
                    await release.wait()
                await super().apply(shard, events, upto)

        journal, seen = MemoryJournal(), Slow()
        scribe = Scribe(journal)
        await scribe.write(0, ALICE, Paid(1))
        await scribe.write(1, BOB, Paid(2))
        made = runner(journal, seen, shards=(0, 1), page_events=1)
        task = asyncio.create_task(made.run())
        await begun.wait()
        await until(lambda: 1 in seen.offsets)
        assert made.figures().lag == 1 or made.figures().unread == 1
        await scribe.write(0, ALICE, Paid(3))
        made.stop()
        for _ in range(100):
            await asyncio.sleep(0)
        assert not task.done()
        release.set()
        await asyncio.wait_for(task, 60)
        # The call that ran has ended, and no other began.
        assert seen.of("alice") == [Paid(1)]

    asyncio.run(scenario())


def test_a_journal_that_lost_events_is_not_read_on(caplog: pytest.LogCaptureFixture) -> None:
    async def scenario() -> None:
        journal, seen = MemoryJournal(), MemoryProjection()
        await Scribe(journal).write(0, ALICE, Paid(1))
        seen.offsets[0] = 7
        async with running(runner(journal, seen)) as made:
            await until(lambda: bool(made.figures().failing))
        assert seen.events == []

    with caplog.at_level(logging.WARNING, "domicile"):
        asyncio.run(scenario())
    assert "ends at offset 1, but the projection has stored offset 7" in caplog.text


def test_a_journal_that_is_away_is_asked_again(caplog: pytest.LogCaptureFixture) -> None:
    class Away(MemoryJournal):
        left = 3

        async def offsets(self, role: str) -> dict[int, int]:
            if self.left:
                self.left -= 1
                raise JournalUnknown("no answer")
            return await super().offsets(role)

        async def scan(self, shard: ShardKey, after: int, limit: int) -> EventPage:
            if self.left:
                raise JournalUnknown("no answer")
            return await super().scan(shard, after, limit)

    async def scenario() -> None:
        journal, seen = Away(), MemoryProjection()
        await Scribe(journal).write(0, ALICE, Paid(1))
        async with running(runner(journal, seen)):
            await until(lambda: bool(seen.events))

    with caplog.at_level(logging.WARNING, "domicile"):
        asyncio.run(scenario())
    assert "the journal can't be read, it is tried again: no answer" in caplog.text


def test_the_lag_is_a_figure_and_a_metric() -> None:
    async def scenario() -> None:
        journal, seen = MemoryJournal(), Failing(1_000_000)
        await Scribe(journal).write(0, ALICE, Paid(1), Paid(2))
        seen.offsets[0] = 1
        made = runner(journal, seen)
        assert made.figures() == (0, 1, 0, 1)
        async with running(made):
            await until(lambda: bool(made.figures().failing))
            assert made.figures() == (1, 0, 1, 1)
            text = Metrics().text(made.gauges())
        labels = '{projection="test",role="default"}'
        assert f"domicile_projection_lag_events{labels} 1" in text
        assert f"domicile_projection_failing_shards{labels} 1" in text

    asyncio.run(scenario())


@asynccontextmanager
async def journals(kind: str, tmp_path: Path, count: int) -> AsyncIterator[list[Any]]:
    """Several connections to one journal, as several processes have them."""
    name = f"p{os.getpid()}{next(numbers)}"
    if kind == "sqlite":
        made: list[Any] = [
            SqliteJournal(tmp_path / "x.journal", name, wait_s=60.0) for _ in range(count)
        ]
    else:
        url = shared_server().url
        made = [
            PostgresJournal(url, name, SystemClock(), shown="postgresql://here", wait_s=60.0)
            for _ in range(count)
        ]
    yield made
    for one in made:
        await one.close()


@pytest.mark.parametrize("kind", ["sqlite", "postgres"])
def test_nothing_is_lost_or_doubled_beside_concurrent_writers(kind: str, tmp_path: Path) -> None:
    """Writers commit, some delete; the projection fails now and then and restarts meanwhile."""
    shards, rounds, random = range(3), 40, Random(1)

    class Shaky(MemoryProjection):
        async def apply(self, shard: int, events: Any, upto: int, /) -> None:
            stores = random.random()
            if stores < 0.9:
                await super().apply(shard, events, upto)
            if stores > 0.8:
                raise OSError("before it stored, or after")

    async def writes(journal: Journal, number: int) -> None:
        scribe = Scribe(journal)
        for round in range(rounds):
            entity = EntityKey("account", f"{number}-{round % 5}")
            await scribe.write(number, entity, Paid(round), Named("x"))
            if round % 20 == 19:
                await scribe.write(number, EntityKey("account", f"{number}-0"), delete=True)

    async def scenario() -> None:
        seen = Shaky()
        async with journals(kind, tmp_path, 4) as (reading, *writing):
            await writing[0].claim([claim(number) for number in shards])
            tasks = [
                asyncio.create_task(writes(one, n)) for n, one in zip(shards, writing, strict=True)
            ]
            while not all(task.done() for task in tasks):
                async with running(runner(reading, seen, shards=shards, page_events=7)) as made:
                    await caught_up(made)
            await asyncio.gather(*tasks)
            async with running(runner(reading, seen, shards=shards, page_events=7)) as made:
                await caught_up(made)
                assert made.figures() == (0, 0, 0, 3)
            placed = 2 * rounds + rounds // 20
            assert seen.offsets == dict.fromkeys(shards, placed)
            for number in shards:
                mine = [one for one in seen.events if one.id.startswith(f"{number}-")]
                offsets = [one.offset for one in mine]
                assert offsets == sorted(set(offsets))
                # Only what a deletion took away before it was read may be missing.
                missing = [at for at in range(1, placed + 1) if at not in offsets]
                last = max(one.offset for one in mine if one.event == Deleted())
                kept = {one.offset for one in mine if one.id != f"{number}-0"}
                page = await reading.scan(shard(number), 0, 1_000)
                assert {one.offset for one in page.events} <= set(offsets)
                assert all(at < last and at not in kept for at in missing)
                assert len(kept) == 2 * rounds * 4 // 5

    asyncio.run(scenario())


# opened by URL


def test_a_projector_finds_journal_and_shards_by_the_store(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path / 'dev.db'}"

    async def scenario() -> None:
        seen = MemoryProjection()
        # It waits for the first node, and for the journal's file.
        async with Projector(seen, entities=[Account], store=url, poll_s=(0.01, 0.05)) as projector:
            assert projector.lag is None
            async with Node(url, entities=[Account], settings=Settings(shards=4)) as node:
                for id in ("alice", "bob"):
                    await node.ref(Account, id).ask(Account.pay, 3)
                await caught_up(projector)
                assert projector.lag == 0
                assert "domicile_projection_events_total 2" in projector.metrics()
                figures = projector.figures()
                assert figures is not None
                assert figures.shards == 4
        assert seen.of("alice") == seen.of("bob") == [Paid(3)]
        # Without a node, and with the shards given, no store is needed.
        again = MemoryProjection()
        async with Projector(
            again, entities=[Account], journal=f"{url}.journal", shards=range(4)
        ) as projector:
            await caught_up(projector)
        assert sorted(one.id for one in again.events) == ["alice", "bob"]

    asyncio.run(scenario())


def test_a_projector_in_the_memory_of_one_process() -> None:
    async def scenario() -> None:
        url, seen = "memory://projector", MemoryProjection()
        try:
            async with (
                Node(url, entities=[Account], settings=Settings(shards=4)) as node,
                Projector(seen, entities=[Account], store=url, poll_s=(0.01, 0.05)) as projector,
            ):
                await node.ref(Account, "alice").ask(Account.pay, 3)
                await caught_up(projector)
            assert seen.of("alice") == [Paid(3)]
        finally:
            MEMORY.forget(url, "domicile")

    asyncio.run(scenario())


def test_a_projector_that_waits_for_a_node_can_be_stopped(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def scenario() -> None:
        url = f"sqlite:///{tmp_path / 'dev.db'}"
        projector = Projector(MemoryProjection(), entities=[Account], store=url)
        task = asyncio.create_task(projector.run())
        await until(lambda: "waits until it knows how many shards" in caplog.text)
        projector.stop()
        await asyncio.wait_for(task, 60)
        with pytest.raises(ConfigError, match="started already"):
            await projector.run()

    with caplog.at_level(logging.WARNING, "domicile"):
        asyncio.run(scenario())
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"entities": []}, "of one role, entities=[...] has none"),
        ({"entities": [Account, Elsewhere]}, "default, other"),
        ({"entities": [Plain]}, "stores no events"),
        ({"store": None}, "say which journal"),
        ({"store": None, "journal": "sqlite:///x.journal"}, "say how many shards"),
        ({"shards": [1, 1]}, "each of them once"),
        ({"page_events": 0}, "page_events=0"),
        ({"poll_s": (2.0, 1.0)}, "a shortest and a longest pause"),
    ],
)
def test_wrong_usage_is_told_at_once(wrong: dict[str, Any], said: str) -> None:
    usual: dict[str, Any] = {"entities": [Account], "store": "sqlite:///dev.db"}
    with pytest.raises(ConfigError) as caught:
        Projector(MemoryProjection(), **(usual | wrong))
    assert said in str(caught.value)
