"""The PostgreSQL journal, on a server of the test run's own: the contract, days, bad usage."""

from __future__ import annotations

import asyncio
import itertools
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, suppress
from typing import TypeVar

import asyncpg
import pytest
from pooler_lab import (
    Settings,
    drops_settings,
    keeps_the_path_only,
    pooler,
    refuses_settings,
)
from postgres_lab import GUARDED, PostgresServer, programs, shared_server

from domicile.backends.registry import shown_url
from domicile.errors import ConfigError
from domicile.journals.key_days import DAY_S, KEPT_DAYS
from domicile.journals.postgres import connections
from domicile.journals.postgres.connections import Connections
from domicile.journals.postgres.journal import PostgresJournal
from domicile.journals.postgres.schema import (
    DAY_PARTITION,
    DAYS_AHEAD,
    FUNCTIONS,
    TODAY,
    create_partition,
)
from domicile.membership.clock import SystemClock
from domicile.ports.journal import (
    Batch,
    Journal,
    JournalUnknown,
    JournalWrite,
    StoredReply,
    WriteRefused,
    Written,
)
from domicile.testing.suites.journal import (
    BESIDE,
    CAROL,
    ENTITY,
    NEW,
    OLD,
    OTHER,
    SHARD,
    Gate,
    JournalContract,
    batch,
    events_of,
    write,
)

numbers = itertools.count()

T = TypeVar("T")


@pytest.fixture(autouse=True)
def _server() -> None:
    shared_server()


def opened(
    cluster: str = "", now: Callable[[], float] | None = None, **more: object
) -> PostgresJournal:
    name = cluster or f"c{next(numbers)}"
    return PostgresJournal(
        shared_server().url, name, SystemClock(now), shown="postgresql://here", **more
    )  # type: ignore[arg-type]


class TestPostgresJournal(JournalContract):
    patience_s = 60.0

    @asynccontextmanager
    async def open(self, pause: Callable[[], Awaitable[None]]) -> AsyncIterator[Journal]:
        journal = opened(pause=pause, wait_s=30.0)
        self._watching = await asyncpg.connect(shared_server().url)
        yield journal
        await journal.close()
        await self._watching.close()

    async def queued(self, journal: Journal) -> int:
        return int(
            await self._watching.fetchval(
                "SELECT count(*) FROM pg_stat_activity "
                "WHERE wait_event_type = 'Lock' AND application_name = 'domicile journal'"
            )
        )


def test_what_is_written_is_there_for_another_process() -> None:
    async def scenario() -> None:
        here, there = opened("shared"), opened("shared")
        await here.claim([OLD])
        keyed = JournalWrite(SHARD, ENTITY, 0, (b"1", b"\0\xff", b""), (("k", b"reply"),))
        await here.write(batch(1, OLD, keyed))
        assert await events_of(there) == (b"1", b"\0\xff", b"")
        assert await there.inbox([(ENTITY, "k"), (ENTITY, "l")]) == [StoredReply(b"reply"), None]
        assert await there.claim([NEW]) == [None]
        stale = batch(2, OLD, write(ENTITY, 3, b"stale"))
        assert await here.write(stale) == [WriteRefused("fenced", 2)]
        other = opened("apart")
        assert await other.claim([OLD]) == [None]
        assert await events_of(other) == ()
        for journal in (here, there, other):
            await journal.close()

    asyncio.run(scenario())


async def kept_days(raw: asyncpg.Connection[asyncpg.Record]) -> list[int]:
    rows = await raw.fetch(
        "SELECT inhrelid::regclass::text AS name FROM pg_inherits "
        "WHERE inhparent = 'inbox'::regclass"
    )
    return sorted(int(row["name"].removeprefix(DAY_PARTITION)) for row in rows)


async def looking_into(cluster: str) -> asyncpg.Connection[asyncpg.Record]:
    return await asyncpg.connect(
        shared_server().url, server_settings={"search_path": f"{cluster}_journal"}
    )


def test_keys_are_dropped_by_the_day() -> None:
    now_s = 0.0

    async def scenario() -> None:
        nonlocal now_s
        journal, other = [opened("days", lambda: now_s) for _ in range(2)]
        await journal.claim([OLD])
        await other.claim([])
        raw = await looking_into("days")
        first = await raw.fetchval(TODAY)
        assert await kept_days(raw) == list(range(first, first + DAYS_AHEAD + 1))
        await journal.write(batch(1, OLD, JournalWrite(SHARD, ENTITY, 0, (b"1",), (("k", b"r"),))))
        # A process counts at most half a day between two of its looks.
        for quarter in range(4 * (KEPT_DAYS + 1)):
            assert await journal.inbox([(ENTITY, "k")]) == [StoredReply(b"r")]
            now_s += DAY_S / 4
            await (other, journal)[quarter % 2].claim([])
        assert await raw.fetchval(TODAY) == first + KEPT_DAYS + 1
        assert await journal.inbox([(ENTITY, "k")]) == [None]
        last = first + KEPT_DAYS + 1
        assert await kept_days(raw) == list(range(first + 1, last + DAYS_AHEAD))
        for one in (journal, other):
            await one.close()
        await raw.close()

    asyncio.run(scenario())


@pytest.mark.parametrize("step_days", [10, -10, 365, -365])
def test_a_step_of_the_time_of_day_forgets_no_key(
    monkeypatch: pytest.MonkeyPatch, step_days: int
) -> None:
    """A server whose clock is wrong for a while, also right after a start."""
    assert "clock_timestamp" not in FUNCTIONS
    right = connections.WALL

    async def scenario() -> None:
        name = f"step{step_days + 365}"
        for number, wrong_days in enumerate((0, step_days, 0, -step_days, 0), 1):
            monkeypatch.setattr(connections, "WALL", f"{right} + {wrong_days * DAY_S}")
            journal = opened(name)
            await journal.claim([OLD])
            keyed = JournalWrite(SHARD, ENTITY, number - 1, (b"1",), ((f"{number}", None),))
            assert await journal.write(batch(number, OLD, keyed)) == [Written(number, number)]
            asked = [(ENTITY, f"{key}") for key in range(1, number + 1)]
            assert None not in await journal.inbox(asked)
            await journal.close()

    asyncio.run(scenario())


def test_a_new_day_waits_for_no_reader_and_keeps_no_write_waiting() -> None:
    """A dump, or an export, reads all tables over midnight; a change of them would wait for it."""
    now_s = 0.0

    async def scenario() -> None:
        nonlocal now_s
        journal = opened("midnight", wait_s=2.0)
        await journal.claim([OLD])
        looking = opened("midnight", lambda: now_s, wait_s=2.0)
        await looking.claim([])
        raw = await looking_into("midnight")
        today = await raw.fetchval(TODAY)
        old = today - KEPT_DAYS - 1
        await raw.execute(create_partition(old))
        await raw.execute("UPDATE meta SET since = 0")
        async with raw.transaction(isolation="repeatable_read", readonly=True):
            await raw.fetch("SELECT * FROM inbox")
            for number in range(3):
                # The last look finds the day begun, and tries again to drop what is old.
                now_s += DAY_S / 2
                async with asyncio.TaskGroup() as tasks:
                    opening = tasks.create_task(looking.claim([]))
                    keyed = JournalWrite(SHARD, ENTITY, number, (b"1",), ((f"{number}", None),))
                    done = await journal.write(batch(1 + number, OLD, keyed))
                    assert done == [Written(number + 1, number + 1)]
                assert opening.result() == []
        days = await kept_days(raw)
        assert today + 1 == await raw.fetchval(TODAY)
        assert {old, today + 1 + DAYS_AHEAD} <= {*days}
        late = opened("midnight")
        await late.claim([])
        assert old not in await kept_days(raw)
        for one in (late, looking, journal):
            await one.close()
        await raw.close()

    asyncio.run(scenario())


def test_one_locked_shard_delays_no_other() -> None:
    """DX-29: somebody's session holds the fence row of a shard."""

    async def scenario() -> None:
        journal = opened("locked", wait_s=0.5)
        await journal.claim([OLD, BESIDE])
        raw = await asyncpg.connect(
            shared_server().url, server_settings={"search_path": "locked_journal"}
        )
        async with raw.transaction():
            await raw.execute("SELECT 1 FROM fence WHERE shard = $1 FOR UPDATE", SHARD.shard)
            mine, theirs = write(ENTITY, 0, b"1"), write(CAROL, 0, b"c", shard=OTHER)
            both = await journal.write(batch(1, (OLD, BESIDE), mine, theirs))
            assert list(both) == [WriteRefused("busy", 1), Written(1, 1)]
            with pytest.raises(JournalUnknown, match="stayed locked"):
                await journal.write(batch(2, OLD, mine))
        assert await journal.settle(batch(2, OLD, mine)) == [None]
        assert await journal.write(batch(3, OLD, mine)) == [Written(1, 1)]
        await journal.close()
        await raw.close()

    asyncio.run(scenario())


def test_a_holder_that_stands_still_in_its_transaction_is_ended_by_the_server() -> None:
    """A stopped process keeps no shard from its successor for longer than its own patience (J3)."""

    async def scenario() -> None:
        gate = Gate()
        stopped, successor = opened("held", wait_s=0.5, pause=gate), opened("held", wait_s=30.0)
        await stopped.claim([OLD])
        gate.shut()
        one = batch(1, OLD, write(ENTITY, 0, b"1"))
        writing = asyncio.ensure_future(stopped.write(one))
        await gate.reached()
        assert await successor.claim([NEW]) == [None]
        assert not writing.done(), "it still stands still"
        gate.open()
        with pytest.raises(JournalUnknown):
            await writing
        assert await stopped.settle(one) == [WriteRefused("fenced", NEW.epoch)]
        assert await events_of(successor) == ()
        await stopped.close()
        await successor.close()

    asyncio.run(scenario())


def test_a_full_disk_is_told_and_nothing_is_half_written() -> None:
    """The server's own error, raised where it would come from: a table that can't grow."""

    async def scenario() -> None:
        journal = opened("full")
        await journal.claim([OLD])
        raw = await looking_into("full")
        await raw.execute(
            """CREATE FUNCTION grow() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
                RAISE EXCEPTION 'could not extend file "base/1/2": No space left on device'
                    USING ERRCODE = 'disk_full';
            END $$;
            CREATE TRIGGER full_disk BEFORE INSERT ON event EXECUTE FUNCTION grow()"""
        )
        one = batch(1, OLD, JournalWrite(SHARD, ENTITY, 0, (b"1",), (("k", b"r"),)))
        with pytest.raises(JournalUnknown) as caught:
            await journal.write(one)
        told = str(caught.value)
        assert "the disk of the server is full" in told
        assert "base/1/2" in told
        assert "make room" in told
        assert "nothing of this call was stored" in told
        assert await journal.settle(one) == [None]
        assert await journal.inbox([(ENTITY, "k")]) == [None]
        await raw.execute("DROP TRIGGER full_disk ON event")
        again = batch(2, OLD, *one.writes)
        assert await journal.write(again) == [Written(1, 1)]
        await journal.close()
        await raw.close()

    asyncio.run(scenario())


async def refused(url: str, cluster: str = "refused") -> str:
    journal = PostgresJournal(url, cluster, SystemClock(), shown=shown_url(url))
    with pytest.raises(ConfigError) as caught:
        await journal.claim([OLD])
    await journal.close()
    return str(caught.value)


def test_what_is_wrong_with_a_database_is_told() -> None:
    url = shared_server().url

    async def scenario() -> None:
        raw = await asyncpg.connect(url)
        await raw.execute(f"CREATE ROLE {GUARDED} LOGIN PASSWORD 'right'")
        await raw.execute("CREATE DATABASE closed")
        await raw.execute("REVOKE CREATE ON DATABASE closed FROM PUBLIC")
        told = await refused(url.replace("domicile@", f"{GUARDED}:wrong@"))
        assert "refuses this user" in told
        assert "wrong" not in told, "a password is not shown"
        told = await refused(
            url.replace("domicile@", f"{GUARDED}:right@").replace("/postgres", "/closed")
        )
        assert 'must own the schema "refused_journal"' in told
        assert "create it" in await refused(url.replace("/postgres", "/nowhere"))
        journal = opened("newer")
        await journal.claim([])
        await journal.close()
        await raw.execute("UPDATE newer_journal.meta SET format = 99")
        assert "upgrade Domicile here" in await refused(url, "newer")
        await raw.execute(f"DROP ROLE {GUARDED}")
        await raw.close()

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("takes", "told"),
    [
        (drops_settings, "ignores settings of the session"),
        (keeps_the_path_only, r"ignores settings of the session \(enable_seqscan"),
        (refuses_settings, "refuses settings of the session"),
    ],
)
def test_a_pooler_of_transactions_is_refused(
    takes: Callable[[Settings], Settings | None], told: str
) -> None:
    server = shared_server()

    async def scenario() -> None:
        async with pooler(server.port, takes) as port:
            text = await refused(server.url.replace(f":{server.port}/", f":{port}/"), "pooled")
            assert re.search(told, text)
            assert "a pool in session mode" in text
        raw = await asyncpg.connect(server.url)
        made = "SELECT count(*) FROM pg_namespace WHERE nspname = 'pooled_journal'"
        assert await raw.fetchval(made) == 0, "nothing was written through it"
        await raw.close()

    asyncio.run(scenario())


def test_a_pooler_of_sessions_serves() -> None:
    server = shared_server()

    async def scenario() -> None:
        async with pooler(server.port, lambda settings: settings) as port:
            url = server.url.replace(f":{server.port}/", f":{port}/")
            journal = PostgresJournal(url, "sessions", SystemClock(), shown="postgresql://pool")
            assert await journal.claim([OLD]) == [None]
            assert await journal.write(batch(1, OLD, write(ENTITY, 0, b"1"))) == [Written(1, 1)]
            await journal.close()

    asyncio.run(scenario())


def test_a_connection_that_the_server_is_about_to_close_is_no_answer() -> None:
    async def scenario() -> None:
        connections = Connections(
            shared_server().url, "postgresql://here", "closing", 5.0, SystemClock().now
        )
        with pytest.raises(JournalUnknown, match="another operation"):
            async with connections.use():
                raise asyncpg.InternalClientError("another operation (2) is in progress")
        await connections.close()

    asyncio.run(scenario())


@pytest.fixture(scope="module")
def own_server() -> Iterator[PostgresServer]:
    """A server that a test may break."""
    bin = programs()
    assert bin is not None
    server = PostgresServer(bin)
    try:
        server.start()
        yield server
    finally:
        server.stop()


def opened_on(server: PostgresServer, cluster: str, wait_s: float = 5.0) -> PostgresJournal:
    return PostgresJournal(
        server.url, cluster, SystemClock(), shown="postgresql://own", wait_s=wait_s, serves=True
    )


def test_what_was_acknowledged_survives_a_crash_of_the_server(
    own_server: PostgresServer, caplog: pytest.LogCaptureFixture
) -> None:
    async def scenario() -> None:
        journal = opened_on(own_server, "crash")
        await journal.claim([OLD])
        acknowledged = 0
        for number in range(1, 50):
            await journal.write(batch(number, OLD, write(ENTITY, number - 1, b"%d" % number)))
            acknowledged = number
        own_server.kill()
        open_one = batch(50, OLD, write(ENTITY, acknowledged, b"lost"))
        for _ in range(3):
            with pytest.raises(JournalUnknown):
                await journal.write(open_one)
        await asyncio.to_thread(own_server.start)
        assert await journal.settle(open_one) == [None]
        found = await events_of(journal)
        assert found == tuple(b"%d" % number for number in range(1, acknowledged + 1))
        assert await journal.write(batch(51, OLD, write(ENTITY, acknowledged, b"on"))) == [
            Written(acknowledged + 1, acknowledged + 1)
        ]
        await journal.close()

    asyncio.run(scenario())
    # One line says why, one that it is over; asyncpg has told nothing of its own.
    first, last = [(record.name, record.getMessage()) for record in caplog.records]
    assert first[0] == last[0] == "domicile"
    assert "wait until their journal answers: the journal postgresql://own" in first[1]
    assert "postgresql://own answers again" in last[1]


async def until_it_answers(call: Callable[[], Awaitable[T]]) -> T:
    for _ in range(30):
        try:
            return await call()
        except JournalUnknown:
            continue
    raise AssertionError("the server goes on, and does not answer")


def test_a_server_that_stands_still_leaves_outcomes_that_can_be_settled(
    own_server: PostgresServer,
) -> None:
    """SIGSTOP of all its processes, while batches are on their way: none is lost, none comes
    twice."""

    async def scenario() -> None:
        journal = opened_on(own_server, "still", wait_s=1.0)
        await until_it_answers(lambda: journal.claim([OLD]))
        number = stored = 0
        for _ in range(2):
            number, stored = number + 1, stored + 1
            one = batch(number, OLD, write(ENTITY, stored - 1, b"%d" % stored))
            if await until_it_answers(lambda one=one: settled_write(journal, one)) == [None]:  # type: ignore[misc]
                stored -= 1
            number, late = number + 1, b"late %d" % number
            one = batch(number, OLD, write(ENTITY, stored, late))
            writing = asyncio.ensure_future(journal.write(one))
            # It stops anywhere: before the batch has come, in its middle, after its commit.
            await asyncio.sleep(0)
            own_server.freeze()
            with suppress(JournalUnknown):
                assert await writing == [Written(stored + 1, stored + 1)]
            own_server.thaw()
            outcome = await until_it_answers(lambda one=one: journal.settle(one))  # type: ignore[misc]
            assert await until_it_answers(lambda one=one: journal.settle(one)) == outcome  # type: ignore[misc]
            found = await until_it_answers(lambda: events_of(journal))
            assert len(found) == stored + (outcome != [None])
            assert (late in found) == (outcome != [None])
            stored = len(found)
        await journal.close()

    try:
        asyncio.run(scenario())
    finally:
        own_server.thaw()


async def settled_write(
    journal: PostgresJournal, one: Batch
) -> Sequence[Written | WriteRefused | None]:
    """Write a batch; if nobody answers, what became of it."""
    try:
        return await journal.write(one)
    except JournalUnknown:
        return await until_it_answers(lambda: journal.settle(one))
