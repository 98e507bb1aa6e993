"""A SQLite journal as rows, and made of rows.

`SqliteJournal` calls it, in a thread of its own and with a connection of its own: a read of all
that there is takes long, and the threads of the journal have other things to do.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from domicile.core.ids import NOBODY
from domicile.errors import ConfigError
from domicile.journals.sqlite.file import JournalFile
from domicile.journals.sqlite.schema import day_table, known_days, stored_days
from domicile.ports.journal_rows import EntityRow, EventRow, JournalRow, KeyRow, ShardRow

_SHARDS = """SELECT n, role, layout, shard, epoch, next, writes FROM fence WHERE cluster = ?
    ORDER BY role, layout, shard"""

_ENTITIES = """SELECT e.n, e.type, e.id, e.seq, e.fence, e.last, e.deleted, e.remembered, e.state,
        s.seq, s.data
    FROM entity e LEFT JOIN snapshot s ON s.entity = e.n WHERE e.cluster = ?
    ORDER BY e.type, e.id"""

_EVENTS = "SELECT fence, off, seq, data FROM event WHERE entity = ? ORDER BY seq"


def stored_rows(file: JournalFile, cluster: str) -> Iterator[JournalRow]:
    """All rows of a cluster, in one reading transaction that ends with the last of them."""
    raw: Any = file.use()
    raw.execute("BEGIN")
    number = _cluster(raw, cluster)
    places: dict[int, int] = {}
    for place, row in enumerate(raw.execute(_SHARDS, (number,)).fetchall()):
        places[row[0]] = place
        yield ShardRow(*row[1:])
    days = known_days(raw)
    for n, type, id, seq, fence, last, deleted, flag, state, at, snapshot in raw.execute(
        _ENTITIES, (number,)
    ):
        yield EntityRow(
            type, id, seq, None if fence is None else places[fence], last, deleted, bool(flag),
            state, None if at is None else (at, snapshot),
        )  # fmt: skip
        for fence, *event in raw.execute(_EVENTS, (n,)):
            yield EventRow(places[fence], *event)
        for day in days:
            keys = f"SELECT key, reply FROM {day_table(day)} WHERE entity = ? ORDER BY pos"
            for key, reply in raw.execute(keys, (n,)):
                yield KeyRow(key, day, reply)
    raw.execute("COMMIT")


class Filling:
    """A transaction that makes the cluster's part of a file. End it by `done`, or drop the file."""

    def __init__(self, file: JournalFile, cluster: str) -> None:
        self._raw: Any = file.use()
        self._raw.execute("BEGIN IMMEDIATE")
        self._cluster = _cluster(self._raw, cluster)
        days = stored_days(self._raw)
        assert days is not None, "the file is in use already"
        self._today = days.today
        self._shards: list[int] = []
        self._entity = 0
        for table in ("fence", "entity"):
            found = self._raw.execute(
                f"SELECT count(*) FROM {table} WHERE cluster = ?", (self._cluster,)
            ).fetchall()
            if found != [(0,)]:
                raise ConfigError(
                    f"the journal {file.path} has something of cluster {cluster!r} already; import "
                    "into a new file, or under another --cluster"
                )

    def add(self, rows: Sequence[JournalRow]) -> None:
        """Take some rows; an entity goes on with the next ones."""
        for row in rows:
            match row:
                case EventRow():
                    self._event(row)
                case EntityRow():
                    self._entity_row(row)
                case KeyRow():
                    self._key(row)
                case ShardRow():
                    self._shards.append(
                        self._new(
                            "fence (cluster, role, layout, shard, epoch, next, writes, owner)",
                            self._cluster, row.role, row.layout, row.shard, row.epoch, row.offset,
                            row.writes, NOBODY,
                        )
                    )  # fmt: skip

    def done(self) -> None:
        """Commit everything."""
        self._raw.execute(
            "UPDATE entity SET bytes = (SELECT coalesce(sum(length(v.data)), 0) FROM event v "
            "WHERE v.entity = entity.n) WHERE cluster = ?",
            (self._cluster,),
        )
        self._raw.execute("COMMIT")

    def _entity_row(self, row: EntityRow) -> None:
        fence = None if row.shard is None else self._shards[row.shard]
        self._entity = self._new(
            "entity (cluster, type, id, seq, fence, last, deleted, remembered, state)",
            self._cluster, row.type, row.id, row.seq, fence, row.last, row.deleted,
            int(row.remembered), row.state,
        )  # fmt: skip
        if row.snapshot is not None:
            self._new("snapshot (entity, seq, data)", self._entity, *row.snapshot)

    def _event(self, row: EventRow) -> None:
        self._new(
            "event (fence, entity, off, seq, data)",
            self._shards[row.shard], self._entity, row.offset, row.seq, row.data,
        )  # fmt: skip

    def _key(self, row: KeyRow) -> None:
        # Another journal counted its day. It is known from now on only what passes.
        where = f"{day_table(self._today)} (entity, key, reply)"
        self._new(where, self._entity, row.key, row.reply)

    def _new(self, where: str, *values: object) -> int:
        marks = ", ".join("?" * len(values))
        self._raw.execute(f"INSERT INTO {where} VALUES ({marks})", values)
        return int(self._raw.last_insert_rowid())


def _cluster(raw: Any, name: str) -> int:
    rows = raw.execute("SELECT n FROM cluster WHERE name = ?", (name,)).fetchall()
    return int(rows[0][0]) if rows else 0
