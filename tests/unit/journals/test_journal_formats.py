"""Journals of an older format are brought up to date once, whole, and lose nothing."""

from __future__ import annotations

import asyncio
import itertools
from pathlib import Path

import apsw
import asyncpg
import pytest
from postgres_lab import shared_server

from domicile.core.ids import EntityKey
from domicile.errors import ConfigError
from domicile.journals.key_days import DAY_S, KEPT_DAYS
from domicile.journals.postgres.journal import PostgresJournal
from domicile.journals.postgres.schema import (
    DAYS_AHEAD,
    TODAY,
    day_partition,
    entity_number,
)
from domicile.journals.sqlite.journal import SqliteJournal
from domicile.journals.sqlite.schema import APPLICATION_ID, FORMAT, day_table, known_days
from domicile.membership.clock import SystemClock
from domicile.ports.journal import (
    Journal,
    JournalWrite,
    Recovered,
    StoredEvent,
    StoredReply,
    Wanted,
    WriteRefused,
    Written,
)
from domicile.testing.suites.journal import (
    BOB,
    CAROL,
    ENTITY,
    MUCH,
    OLD,
    OTHER,
    SHARD,
    A,
    batch,
    events_of,
    recovered,
    remembered_ids,
    scanned,
    write,
)

LABS = Path(__file__).parents[2] / "labs"
HISTORY = "e" * 32
OLD_DAY = "inbox_020000"
"""The table with the keys of a day long ago, as format 2 named it."""

ROWS = [
    (SHARD.shard, ENTITY, 1, b"1"),
    (OTHER.shard, CAROL, 1, b"c"),
    (SHARD.shard, BOB, 1, b""),
    (SHARD.shard, ENTITY, 2, b"2"),
    (OTHER.shard, CAROL, 2, b"d"),
]
"""Shard, entity, number and data of the events, in the order of their commits."""


async def check_all_is_there(journal: Journal) -> None:
    """What an older version has written, with offsets, and what the new format adds."""
    assert await journal.history() == HISTORY
    assert await scanned(journal) == (
        StoredEvent(1, ENTITY, 1, b"1"), StoredEvent(2, BOB, 1, b""),
        StoredEvent(3, ENTITY, 2, b"2"),
    )  # fmt: skip
    assert [one.offset for one in await scanned(journal, OTHER)] == [1, 2]
    assert await recovered(journal) == Recovered((b"1", b"2"), 2, False, keys=("k",))
    assert await journal.inbox([(ENTITY, "k")]) == [StoredReply(b"r")]
    # The fence is as it was: the old batch is known, the next one goes on.
    done = write(ENTITY, 1, b"2")
    assert await journal.settle(batch(2, OLD, done)) == [Written(2, 3)]
    more = JournalWrite(SHARD, ENTITY, 2, (b"3",), snapshot=(3, b"s"), remember=True)
    assert await journal.write(batch(3, OLD, more, write(BOB, 1, b"b"))) == [
        Written(3, 4), Written(2, 5),
    ]  # fmt: skip
    assert await remembered_ids(journal) == ["alice"]
    assert (await recovered(journal)).snapshot == (3, b"s")


# SQLite


def old_file(path: Path, offset: int = 3) -> None:
    """A file as format 1 had it."""
    raw = apsw.Connection(str(path))
    raw.pragma("journal_mode", "wal")
    raw.execute((LABS / "sqlite_journal_1.sql").read_text(encoding="utf-8"))
    raw.execute("INSERT INTO cluster VALUES (1, 'c', ?), (2, 'other', 'x')", (HISTORY,))
    raw.execute(
        "INSERT INTO fence VALUES (1, 1, 'default', 0, ?, 1, ?, ?, 2, 0), "
        "(2, 1, 'default', 0, ?, 1, ?, 2, 2, 0)",
        (SHARD.shard, A, offset, OTHER.shard, A),
    )
    numbers: dict[EntityKey, int] = {}
    for shard, entity, seq, data in ROWS:
        n = numbers.setdefault(entity, len(numbers) + 1)
        raw.execute(
            "INSERT INTO entity VALUES (?, 1, ?, ?, ?, ?) ON CONFLICT (n) DO UPDATE "
            "SET seq = excluded.seq, bytes = bytes + excluded.bytes",
            (n, *entity, seq, len(data)),
        )
        fence = 1 if shard == SHARD.shard else 2
        raw.execute(
            "INSERT INTO event (fence, entity, seq, data) VALUES (?, ?, ?, ?)",
            (fence, n, seq, data),
        )
    # An entity that has nothing but a key.
    raw.execute("INSERT INTO entity VALUES (9, 1, 'Account', 'zoe', 0, 0)")
    raw.execute(
        f"CREATE TABLE {OLD_DAY} (pos INTEGER PRIMARY KEY, entity INTEGER NOT NULL, "
        "key TEXT NOT NULL, reply BLOB, UNIQUE (entity, key)) STRICT"
    )
    raw.execute(f"INSERT INTO {OLD_DAY} (entity, key, reply) VALUES (1, 'k', ?)", (b"r",))
    raw.execute(f"CREATE VIEW inbox AS SELECT entity, key, reply FROM {OLD_DAY}")
    raw.pragma("application_id", APPLICATION_ID)
    raw.pragma("user_version", 1)
    raw.close()


def opened(path: Path) -> SqliteJournal:
    return SqliteJournal(path, "c")


def shape(path: Path) -> dict[str, object]:
    """Tables with their columns, indexes and views of a file, without those of days."""
    raw = apsw.Connection(str(path))
    names = raw.execute(
        "SELECT type, name FROM sqlite_schema WHERE tbl_name NOT GLOB 'day_*' ORDER BY name"
    ).fetchall()
    columns = {
        name: raw.execute("SELECT * FROM pragma_table_xinfo(?)", (name,)).fetchall()
        for _, name in names
    }
    raw.close()
    return {"names": names, "columns": columns, "format": FORMAT}


def test_a_file_of_format_1_is_brought_up_to_date(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    old_file(tmp_path / "old")

    async def scenario() -> None:
        # Both do it at once: one waits, and finds it done.
        one, two = opened(tmp_path / "old"), opened(tmp_path / "old")
        assert await asyncio.gather(one.claim([OLD]), two.claim([OLD])) == [[None], [None]]
        await check_all_is_there(one)
        assert await events_of(two) == (b"1", b"2", b"3")
        fresh = opened(tmp_path / "fresh")
        await fresh.claim([])
        for journal in (one, two, fresh):
            await journal.close()

    asyncio.run(scenario())
    assert shape(tmp_path / "old") == shape(tmp_path / "fresh")
    assert caplog.text.count("has format 1 and is brought to format 3") == 1


def test_a_reader_may_be_the_first_to_open_an_old_file(tmp_path: Path) -> None:
    old_file(tmp_path / "old")

    async def scenario() -> None:
        journal = opened(tmp_path / "old")
        wanted = [Wanted(ENTITY), Wanted(BOB), Wanted(EntityKey("Account", "zoe"))]
        found = await journal.recover(wanted, MUCH)
        assert [one.events for one in found] == [(b"1", b"2"), (b"",), ()]
        await journal.close()

    asyncio.run(scenario())


def test_an_older_version_writes_nothing_to_the_new_tables(tmp_path: Path) -> None:
    """Its triggers know no offset; what they would write without one is refused."""

    async def scenario() -> None:
        journal = opened(tmp_path / "new")
        await journal.claim([OLD])
        await journal.close()

    asyncio.run(scenario())
    raw = apsw.Connection(str(tmp_path / "new"))
    with pytest.raises(apsw.ConstraintError):
        raw.execute("INSERT INTO event (fence, entity, seq, data) VALUES (1, 1, 1, x'31')")
    # One of format 2 that looks which days there are finds a last one that takes no keys.
    names = "SELECT name FROM sqlite_schema WHERE type = 'table' AND name GLOB 'inbox_*'"
    [(name,)] = raw.execute(names).fetchall()
    assert int(name.removeprefix("inbox_")) == 999_999
    with pytest.raises(apsw.SQLError, match="no column"):
        raw.execute(f"INSERT INTO {name} (entity, key, reply) VALUES (1, 'k', NULL)")
    raw.close()


def test_keys_of_an_older_format_are_kept_for_as_long_as_new_ones(tmp_path: Path) -> None:
    """Their days are of the time of day, which may have been wrong."""
    old_file(tmp_path / "old")
    now_s = 0.0

    async def scenario() -> None:
        nonlocal now_s
        journal = SqliteJournal(tmp_path / "old", "c", now=lambda: now_s)
        await journal.claim([OLD])
        keys = [JournalWrite(SHARD, ENTITY, 2, (), (("new", None),))]
        await journal.write(batch(3, OLD, *keys))
        for passed in range(KEPT_DAYS + 1):
            asked = [(ENTITY, "k"), (ENTITY, "new")]
            assert await journal.inbox(asked) == [StoredReply(b"r"), StoredReply(None)], passed
            for _ in range(2):
                now_s += DAY_S / 2
                await journal.claim([OLD])
        assert await journal.inbox([(ENTITY, "k"), (ENTITY, "new")]) == [None, None]
        await journal.close()

    asyncio.run(scenario())
    raw = apsw.Connection(str(tmp_path / "old"))
    assert len(known_days(raw)) == KEPT_DAYS + 1
    raw.close()


def test_a_file_of_format_2_keeps_its_keys(tmp_path: Path) -> None:
    async def scenario() -> None:
        journal = opened(tmp_path / "x")
        await journal.claim([OLD])
        await journal.write(batch(1, OLD, JournalWrite(SHARD, ENTITY, 0, (), (("k", b"r"),))))
        await journal.close()
        raw = apsw.Connection(str(tmp_path / "x"))
        [day] = known_days(raw)
        raw.execute(
            f"DROP VIEW inbox; ALTER TABLE {day_table(day)} RENAME TO {OLD_DAY}; "
            f"CREATE VIEW inbox AS SELECT entity, key, reply FROM {OLD_DAY}; "
            "DROP TABLE key_days; DROP TABLE inbox_999999"
        )
        raw.pragma("user_version", 2)
        raw.close()
        again = opened(tmp_path / "x")
        assert await again.inbox([(ENTITY, "k")]) == [StoredReply(b"r")]
        late = JournalWrite(SHARD, ENTITY, 0, (), (("k", None),))
        assert await again.write(batch(2, OLD, late)) == [WriteRefused("key", 1)]
        await again.close()

    asyncio.run(scenario())


def test_a_file_that_contradicts_itself_stays_as_it_was(tmp_path: Path) -> None:
    old_file(tmp_path / "old", offset=7)
    before = shape(tmp_path / "old")

    async def scenario() -> None:
        journal = opened(tmp_path / "old")
        for _ in range(2):
            with pytest.raises(ConfigError, match=r"1 shards have other events.*nothing was chang"):
                await journal.claim([OLD])
        await journal.close()

    asyncio.run(scenario())
    assert shape(tmp_path / "old") == before


def test_a_file_of_a_newer_format_is_refused_and_untouched(tmp_path: Path) -> None:
    old_file(tmp_path / "new")
    raw = apsw.Connection(str(tmp_path / "new"))
    raw.pragma("user_version", FORMAT + 1)
    raw.close()

    async def scenario() -> None:
        journal = opened(tmp_path / "new")
        with pytest.raises(ConfigError, match=rf"has format {FORMAT + 1}.*upgrade Domicile here"):
            await journal.claim([OLD])
        with pytest.raises(ConfigError, match=rf"has format {FORMAT + 1}.*upgrade Domicile here"):
            await events_of(journal)
        await journal.close()

    asyncio.run(scenario())


# PostgreSQL

numbers = itertools.count()


async def old_schema(cluster: str, *, fences: bool = True) -> asyncpg.Connection[asyncpg.Record]:
    """A schema as format 1 had it, written by the function of that format."""
    raw = await asyncpg.connect(
        shared_server().url, server_settings={"search_path": f"{cluster}_journal"}
    )
    await raw.execute(f"CREATE SCHEMA {cluster}_journal")
    await raw.execute((LABS / "postgres_journal_1.sql").read_text(encoding="utf-8"))
    await raw.execute("INSERT INTO meta VALUES (1, $1)", HISTORY)
    today = await raw.fetchval("SELECT extract(epoch FROM now())::bigint / 86400")
    for day in (today, today + 1):
        await raw.execute(
            f"CREATE TABLE inbox_{day:06} PARTITION OF inbox FOR VALUES FROM ({day}) TO ({day + 1})"
        )
    shards = [SHARD.shard, OTHER.shard]
    await raw.fetch(
        "SELECT claim_shards($1, $2, $3, $4, $5)",
        ["default"] * 2, [0, 0], shards, [1, 1], [A, A],
    )  # fmt: skip
    for number, ((first, second), expected) in enumerate(
        zip([(ROWS[0], ROWS[1]), (ROWS[3], ROWS[4])], (0, 1), strict=True), 1
    ):
        rows = [first, second] if number == 2 else [first, second, ROWS[2]]
        entities = [entity for _, entity, _, _ in rows]
        places = [shards.index(shard) + 1 for shard, _, _, _ in rows]
        keyed = [1] if number == 1 else []
        await raw.fetch(
            f"SELECT write_batch({', '.join(f'${n}' for n in range(1, 23))})",
            number, ["default"] * 2, [0, 0], shards, [1, 1], A,
            [places.count(1), places.count(2)],
            places, [entity_number(one) for one in entities], [one.type for one in entities],
            [one.id for one in entities], [expected if n < 2 else 0 for n in range(len(rows))],
            [1] * len(rows), list(range(1, len(rows) + 1)), [1] * len(rows),
            [data for _, _, _, data in rows],
            keyed, ["k"] * len(keyed), [b"r"] * len(keyed), [], [], [],
        )  # fmt: skip
    if not fences:
        await raw.execute("DELETE FROM fence WHERE shard = $1", OTHER.shard)
    return raw


def connected(cluster: str) -> PostgresJournal:
    url = shared_server().url
    return PostgresJournal(url, cluster, SystemClock(), shown="postgresql://here", wait_s=30.0)


def test_a_schema_of_format_1_is_brought_up_to_date() -> None:
    shared_server()

    async def columns(raw: asyncpg.Connection[asyncpg.Record], schema: str) -> list[object]:
        rows = await raw.fetch(
            "SELECT table_name, column_name, data_type, is_nullable, collation_name "
            "FROM information_schema.columns WHERE table_schema = $1 "
            "AND table_name NOT LIKE 'day_%' ORDER BY 1, 2",
            schema,
        )
        indexes = await raw.fetch(
            "SELECT indexname FROM pg_indexes WHERE schemaname = $1 "
            "AND tablename NOT LIKE 'day_%' ORDER BY 1",
            schema,
        )
        return [*map(tuple, rows), *map(tuple, indexes)]

    async def scenario() -> None:
        raw = await old_schema("old")
        one, two = connected("old"), connected("old")
        assert await asyncio.gather(one.claim([OLD]), two.claim([OLD])) == [[None], [None]]
        await check_all_is_there(one)
        assert await events_of(two) == (b"1", b"2", b"3")
        assert await raw.fetchval("SELECT format FROM meta") == 3
        fresh = connected("fresh")
        await fresh.claim([])
        assert await columns(raw, "old_journal") == await columns(raw, "fresh_journal")
        with pytest.raises(asyncpg.UndefinedFunctionError):
            await raw.fetch(
                f"SELECT write_batch({', '.join(f'${n}' for n in range(1, 23))})", *[None] * 22
            )
        for journal in (one, two, fresh):
            await journal.close()
        await raw.close()

    asyncio.run(scenario())


async def made_old(cluster: str) -> tuple[asyncpg.Connection[asyncpg.Record], int]:
    """A schema that this version has made, as format 2 had it; a session, and its day."""
    raw = await asyncpg.connect(
        shared_server().url, server_settings={"search_path": f"{cluster}_journal"}
    )
    today = await raw.fetchval(TODAY)
    for day in range(today, today + DAYS_AHEAD + 1):
        await raw.execute(f"ALTER TABLE {day_partition(day)} RENAME TO inbox_{day:06}")
    await raw.execute("ALTER TABLE meta DROP counted_s, DROP since")
    await raw.execute("ALTER FUNCTION store_batch RENAME TO write_batch")
    await raw.execute("UPDATE meta SET format = 2")
    return raw, today


def test_a_schema_of_format_2_keeps_its_keys() -> None:
    shared_server()

    async def scenario() -> None:
        journal = connected("second")
        await journal.claim([OLD])
        await journal.write(batch(1, OLD, JournalWrite(SHARD, ENTITY, 0, (), (("k", b"r"),))))
        raw, today = await made_old("second")
        again = connected("second")
        late = batch(2, OLD, JournalWrite(SHARD, ENTITY, 0, (), (("k", None),)))
        assert await again.write(late) == [WriteRefused("key", 1)]
        assert await again.inbox([(ENTITY, "k")]) == [StoredReply(b"r")]
        assert await raw.fetchval(TODAY) == today + 1, "behind the newest day that has a key"
        for one in (again, journal):
            await one.close()
        await raw.close()

    asyncio.run(scenario())


def test_a_key_that_commits_while_a_schema_is_brought_up_to_date_is_kept() -> None:
    """A process of format 2 writes the first key of its day meanwhile."""
    shared_server()

    async def scenario() -> None:
        journal = connected("meanwhile")
        await journal.claim([OLD])
        raw, today = await made_old("meanwhile")
        writing = raw.transaction()
        await writing.start()
        await raw.execute(
            "INSERT INTO inbox (entity, key, day, reply) VALUES ($1, 'k', $2, $3)",
            entity_number(ENTITY), today, b"r",
        )  # fmt: skip
        again = connected("meanwhile")
        opening = asyncio.create_task(again.history())
        await asyncio.wait((opening,), timeout=1.0)
        await writing.commit()
        await opening
        assert await again.inbox([(ENTITY, "k")]) == [StoredReply(b"r")]
        for one in (again, journal):
            await one.close()
        await raw.close()

    asyncio.run(scenario())


def test_a_schema_that_contradicts_itself_stays_as_it_was() -> None:
    shared_server()

    async def scenario() -> None:
        raw = await old_schema("odd", fences=False)
        journal = connected("odd")
        for _ in range(2):
            with pytest.raises(ConfigError, match=r"2 events are of shards.*nothing was changed"):
                await journal.claim([OLD])
        await journal.close()
        assert await raw.fetchval("SELECT format FROM meta") == 1
        assert await raw.fetchval("SELECT count(*) FROM event") == len(ROWS)
        await raw.close()

    asyncio.run(scenario())
