"""The SQLite journal: the contract, several processes' connections, days, and bad files."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import apsw
import apsw.ext
import pytest

from domicile.errors import ConfigError
from domicile.journals.key_days import DAY_S, KEPT_DAYS
from domicile.journals.sqlite import journal as journal_module
from domicile.journals.sqlite import recovery as recovery_module
from domicile.journals.sqlite.journal import SqliteJournal
from domicile.journals.sqlite.schema import (
    SCRATCH,
    TABLES,
    create_day,
    inbox_view,
    write_triggers,
)
from domicile.ports.journal import (
    Journal,
    JournalUnknown,
    JournalWrite,
    StoredReply,
    Wanted,
    WriteRefused,
    Written,
)
from domicile.testing.suites.journal import (
    ENTITY,
    NEW,
    OLD,
    SHARD,
    JournalContract,
    batch,
    events_of,
    write,
)


class TestSqliteJournal(JournalContract):
    one_writer = True

    @pytest.fixture(autouse=True)
    def _place(self, tmp_path: Path) -> None:
        self._path = tmp_path
        self._opened = 0

    @asynccontextmanager
    async def open(self, pause: Callable[[], Awaitable[None]]) -> AsyncIterator[Journal]:
        loop = asyncio.get_running_loop()

        async def paused() -> None:
            await pause()

        def wait() -> None:
            # In the writing thread: the loop has the gate.
            asyncio.run_coroutine_threadsafe(paused(), loop).result()

        self._opened += 1
        journal = SqliteJournal(self._path / f"{self._opened}.journal", "c", pause=wait)
        yield journal
        await journal.close()

    async def queued(self, journal: Journal) -> int:
        assert isinstance(journal, SqliteJournal)
        return journal.queued


def opened(path: Path, cluster: str = "c", **more: Any) -> SqliteJournal:
    return SqliteJournal(path / "x.journal", cluster, **more)


def keyed(expected: int, key: str, *events: bytes) -> JournalWrite:
    return JournalWrite(SHARD, ENTITY, expected, events, ((key, b"reply of " + key.encode()),))


def test_what_is_written_is_there_for_another_process(tmp_path: Path) -> None:
    async def scenario() -> None:
        here, there = opened(tmp_path), opened(tmp_path)
        await here.claim([OLD])
        await here.write(batch(1, OLD, keyed(0, "k", b"1", b"\0\xff", b"")))
        assert await events_of(there) == (b"1", b"\0\xff", b"")
        assert await there.inbox([(ENTITY, "k")]) == [StoredReply(b"reply of k")]
        assert await there.claim([NEW]) == [None]
        assert await here.write(batch(2, OLD, write(ENTITY, 3, b"stale"))) == [
            WriteRefused("fenced", 2)
        ]
        await here.close()
        await there.close()
        again = opened(tmp_path)
        assert await events_of(again) == (b"1", b"\0\xff", b"")
        await again.close()

    asyncio.run(scenario())


def test_clusters_of_one_file_do_not_see_each_other(tmp_path: Path) -> None:
    async def scenario() -> None:
        ours, theirs = opened(tmp_path, "ours"), opened(tmp_path, "theirs")
        await ours.claim([NEW])
        await ours.write(batch(1, NEW, write(ENTITY, 0, b"ours")))
        assert await theirs.claim([OLD]) == [None]
        assert await theirs.write(batch(1, OLD, write(ENTITY, 0, b"theirs"))) == [Written(1, 1)]
        assert await events_of(ours) == (b"ours",)
        assert await events_of(theirs) == (b"theirs",)
        await ours.close()
        await theirs.close()

    asyncio.run(scenario())


def test_keys_are_kept_for_seven_days_and_dropped_by_the_day(tmp_path: Path) -> None:
    now_s = 0.0

    async def scenario() -> None:
        nonlocal now_s
        one, two = [opened(tmp_path, now=lambda: now_s) for _ in range(2)]

        async def pass_days(days: int) -> None:
            nonlocal now_s
            for _ in range(2 * days):
                now_s += DAY_S / 2
                await two.claim([OLD])

        await two.claim([OLD])
        await one.claim([OLD])
        await one.write(batch(1, OLD, keyed(0, "first", b"1")))
        await pass_days(KEPT_DAYS)
        assert await two.write(batch(2, OLD, keyed(1, "first", b"2"))) == [WriteRefused("key", 1)]
        late = JournalWrite(SHARD, ENTITY, 1, (), (("open", None),))
        await two.write(batch(3, OLD, late))
        # `one` still has a trigger that names the table which `two` drops.
        await pass_days(1)
        assert await one.inbox([(ENTITY, "first"), (ENTITY, "open")]) == [None, StoredReply(None)]
        assert await one.write(batch(4, OLD, keyed(1, "first", b"2"))) == [Written(2, 2)]
        reply = JournalWrite(SHARD, ENTITY, 2, (), (), (("open", b"done"),))
        assert await one.write(batch(5, OLD, reply)) == [Written(2, 2)]
        assert await two.inbox([(ENTITY, "open")]) == [StoredReply(b"done")]
        now_s -= 3 * DAY_S
        await one.close()
        again = opened(tmp_path, now=lambda: now_s)
        assert await again.write(batch(6, OLD, keyed(2, "back", b"3"))) == [Written(3, 3)]
        assert await events_of(again) == (b"1", b"2", b"3")
        await again.close()
        await two.close()

    asyncio.run(scenario())


@pytest.mark.parametrize("step_days", [10, -10, 365, -365])
def test_a_step_of_the_time_of_day_forgets_no_key(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step_days: int
) -> None:
    """A clock that is wrong for a while, also right after a start, makes nothing happen twice."""
    right_s = time.time()

    async def scenario() -> None:
        for number, wrong_days in enumerate((0, step_days, 0, -step_days, 0), 1):
            monkeypatch.setattr(time, "time", lambda days=wrong_days: right_s + days * DAY_S)
            journal = opened(tmp_path)
            await journal.claim([OLD])
            await journal.write(batch(number, OLD, keyed(number - 1, f"{number}", b"1")))
            asked = [(ENTITY, f"{key}") for key in range(1, number + 1)]
            assert None not in await journal.inbox(asked)
            await journal.close()

    asyncio.run(scenario())


def test_a_key_gets_the_day_of_its_commit(tmp_path: Path) -> None:
    """A process that stood still for days, between its look at the day and its write."""
    now_s = 0.0

    async def scenario() -> None:
        nonlocal now_s
        stood, other = opened(tmp_path, now=lambda: 0.0), opened(tmp_path, now=lambda: now_s)
        for journal in (stood, other):
            await journal.claim([OLD])
        for _ in range(2 * KEPT_DAYS):
            now_s += DAY_S / 2
            await other.claim([OLD])
        await stood.write(batch(1, OLD, keyed(0, "late", b"1")))
        for _ in range(2 * KEPT_DAYS):
            now_s += DAY_S / 2
            await other.claim([OLD])
        assert await other.inbox([(ENTITY, "late")]) == [StoredReply(b"reply of late")]
        await stood.close()
        await other.close()

    asyncio.run(scenario())


def test_a_long_history_comes_in_pages_and_none_is_left_out(tmp_path: Path) -> None:
    events = tuple(b"%06d" % n for n in range(9_000))

    async def scenario() -> None:
        journal = opened(tmp_path)
        await journal.claim([OLD])
        await journal.write(batch(1, OLD, write(ENTITY, 0, *events)))
        for max_bytes in (1, 1_000, 30_000, 1 << 20):
            seq, found, pages = 0, list[bytes](), 0
            while True:
                [page] = await journal.recover([Wanted(ENTITY, seq)], max_bytes)
                assert sum(map(len, page.events)) <= max(max_bytes, 6)
                found += page.events
                seq, pages = page.seq, pages + 1
                if not page.more or (max_bytes == 1 and pages == 50):
                    break
            assert tuple(found) == events[: len(found)]
            assert len(found) == (50 if max_bytes == 1 else len(events))
        await journal.close()

    asyncio.run(scenario())


def test_a_file_that_is_no_journal_is_refused(tmp_path: Path) -> None:
    async def refused(journal: SqliteJournal) -> str:
        with pytest.raises(ConfigError) as caught:
            await journal.claim([OLD])
        await journal.close()
        return str(caught.value)

    async def scenario() -> None:
        (tmp_path / "x.journal").mkdir()
        assert "is a directory" in await refused(opened(tmp_path))
        (tmp_path / "x.journal").rmdir()
        raw = apsw.Connection(str(tmp_path / "x.journal"))
        raw.execute("CREATE TABLE other (n)")
        assert "another program's database" in await refused(opened(tmp_path))
        raw.execute("DROP TABLE other")
        journal = opened(tmp_path)
        assert await journal.claim([OLD]) == [None]
        await journal.close()
        raw.pragma("user_version", 99)
        raw.close()
        told = await refused(opened(tmp_path))
        assert "has format 99" in told
        assert "upgrade Domicile here" in told

    asyncio.run(scenario())


def test_a_file_that_was_replaced_takes_nothing_more(tmp_path: Path) -> None:
    """What is written to a deleted file is lost, so it must not be acknowledged (I4)."""

    async def scenario() -> None:
        journal = opened(tmp_path)
        await journal.claim([OLD])
        (tmp_path / "x.journal").rename(tmp_path / "y.journal")
        with pytest.raises(JournalUnknown, match="deleted or replaced"):
            await journal.write(batch(1, OLD, write(ENTITY, 0, b"1")))
        await journal.close()

    asyncio.run(scenario())


def test_a_lock_that_another_process_keeps_is_told_and_nothing_is_written(tmp_path: Path) -> None:
    async def scenario() -> None:
        journal = opened(tmp_path, wait_s=0.05)
        await journal.claim([OLD])
        raw = apsw.Connection(str(tmp_path / "x.journal"))
        raw.execute("BEGIN IMMEDIATE")
        one = batch(1, OLD, write(ENTITY, 0, b"1"))
        with pytest.raises(JournalUnknown, match=r"stayed locked.*fuser -v"):
            await journal.write(one)
        assert await events_of(journal) == ()
        raw.execute("ROLLBACK")
        raw.close()
        assert await journal.settle(one) == [None]
        await journal.close()

    asyncio.run(scenario())


def test_nothing_is_made_before_the_first_call(tmp_path: Path) -> None:
    async def scenario(*, calls: bool) -> None:
        journal = opened(tmp_path / "deeper")
        if calls:
            await journal.claim([])
        await journal.close()

    asyncio.run(scenario(calls=False))
    assert not list(tmp_path.iterdir())
    asyncio.run(scenario(calls=True))
    assert (tmp_path / "deeper" / "x.journal").exists()


def test_no_statement_looks_at_a_whole_table() -> None:
    """SQLite would begin an UPDATE with its own table, and copy all keys for an outer join."""
    raw = apsw.Connection(":memory:")
    days = [1, 2, 3]
    for script in (TABLES, *map(create_day, days), inbox_view(days), SCRATCH):
        raw.execute(script)
    raw.execute(write_triggers(days, pauses=False))
    bodies = raw.execute("SELECT sql FROM sqlite_temp_schema WHERE type = 'trigger'").fetchall()
    statements = [
        re.sub(r"RAISE\([^)]*\)", "1", re.sub(r"NEW\.(\w+)", r":\1", statement))
        for (body,) in bodies
        for statement in body.partition("BEGIN")[2].removesuffix("END").split(";")
        if statement.strip()
    ]
    assert len(statements) > 20
    statements += [
        text
        for module in (journal_module, recovery_module)
        for text in vars(module).values()
        if isinstance(text, str) and text.startswith("SELECT")
    ]
    assert len(statements) > 30
    for statement in statements:
        names = re.findall(r":(\w+)", statement)
        values = dict.fromkeys(names) if names else (None,) * bindings(raw, statement)
        steps = [row[3] for row in raw.execute(f"EXPLAIN QUERY PLAN {statement}", values)]
        scanned_tables = {step.split()[1] for step in steps if step.startswith("SCAN")}
        # Rows of the call itself: JSON, and what a trigger has noted of its writes and claims.
        own = {"j", "jsonb_each", "t", "w", "h", "held", "written"}
        left = {name for name in scanned_tables - own if not name.startswith("(subquery")}
        assert not left, (statement, steps)
    raw.close()


def bindings(raw: apsw.Connection, statement: str) -> int:
    return apsw.ext.query_info(raw, statement).bindings_count
