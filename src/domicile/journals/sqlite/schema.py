"""The tables of a SQLite journal, and a batch as one SQL statement.

A write is one INSERT into a view of the connection's own temp schema; its trigger does all the
work. SQLite takes the write lock, checks the fences, writes and commits without returning to Python
(S9). A transaction of several statements would wait for the interpreter's lock between them, while
all other processes wait for the file. The trigger leaves its answers in temp tables. SQLite has one
writer, so nothing changes between the trigger's checks and its writes (J2). Rows are read by
`jsonb_each`: with `json_each` each `->>` would parse its row anew.

Keys of asks lie in one table per day, as the journal counts days (`key_days`). A table that is too
old is dropped as a whole. A write whose trigger names the table of an earlier day is refused with
nothing written: so no key gets an earlier day than that of its commit.
Only `domicile.journals.sqlite` uses this module. No write may need a second statement.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from domicile.journals.key_days import DAY_S, KeyDays
from domicile.ports.journal import BLIND, Batch, Claim, counted, placed

APPLICATION_ID = 0x646F6D6A
"""Marks a file as a journal of Domicile; "domj" in ASCII."""

FORMAT = 3

_NO_KEYS = "CREATE VIEW inbox AS SELECT NULL AS entity, NULL AS key, NULL AS reply WHERE false"

DAYS = """
CREATE TABLE key_days (
    n INTEGER PRIMARY KEY CHECK (n = 1),
    counted_s REAL NOT NULL,           -- the time that processes have seen pass
    since INTEGER NOT NULL             -- the day that the count began with
) STRICT;
CREATE TABLE inbox_999999 (refused INTEGER) STRICT;
"""
"""The count of days. The second table is none of a day: it has the name by which format 2 would
know the newest one, so that a process of that format, which asks the time of day how old keys are,
writes and drops nothing any more."""

TABLES = f"""
CREATE TABLE cluster (
    n INTEGER PRIMARY KEY,
    name TEXT NOT NULL UNIQUE,
    history TEXT NOT NULL
) STRICT;
CREATE TABLE fence (
    n INTEGER PRIMARY KEY,
    cluster INTEGER NOT NULL,
    role TEXT NOT NULL,
    layout INTEGER NOT NULL,
    shard INTEGER NOT NULL,
    epoch INTEGER NOT NULL,
    owner TEXT NOT NULL,
    next INTEGER NOT NULL DEFAULT 0,   -- the last offset of the shard
    batch INTEGER NOT NULL DEFAULT 0,  -- the last batch that wrote, or that settling used up
    void INTEGER NOT NULL DEFAULT 0,   -- the last batch that settling used up: it never wrote
    writes INTEGER NOT NULL DEFAULT 0, -- how many batches the shard has taken
    UNIQUE (cluster, role, layout, shard)
) STRICT;
CREATE TABLE process (
    owner TEXT PRIMARY KEY,            -- an incarnation that has claimed a shard
    cluster INTEGER NOT NULL,
    pid INTEGER NOT NULL,
    started TEXT NOT NULL              -- tells processes with one id apart
) STRICT;
CREATE TABLE entity (
    n INTEGER PRIMARY KEY,
    cluster INTEGER NOT NULL,
    type TEXT NOT NULL,
    id TEXT NOT NULL,
    seq INTEGER NOT NULL DEFAULT 0,    -- how many events, saves and deletions it has had
    bytes INTEGER NOT NULL DEFAULT 0,  -- how many bytes its events have
    fence INTEGER,                     -- of its shard; only a key has none
    last INTEGER NOT NULL DEFAULT 0,   -- which batch of its shard wrote it last
    deleted INTEGER NOT NULL DEFAULT 0,     -- the seq of its last deletion
    remembered INTEGER NOT NULL DEFAULT 0,
    state BLOB,                        -- of an entity without events
    UNIQUE (cluster, type, id)
) STRICT;
CREATE INDEX entity_remembered ON entity (fence) WHERE remembered;
CREATE TABLE event (
    pos INTEGER PRIMARY KEY,
    fence INTEGER NOT NULL,
    entity INTEGER NOT NULL,
    seq INTEGER NOT NULL,
    off INTEGER NOT NULL,              -- rises in the order of the shard's commits
    data BLOB,                         -- NULL: the entity was deleted here
    UNIQUE (entity, seq)
) STRICT;
CREATE UNIQUE INDEX event_off ON event (fence, off);
CREATE TABLE snapshot (
    entity INTEGER PRIMARY KEY,
    seq INTEGER NOT NULL,              -- of the last event in it
    data BLOB NOT NULL
) STRICT;
{_NO_KEYS};
{DAYS}"""

FROM_1 = """
ALTER TABLE fence ADD COLUMN writes INTEGER NOT NULL DEFAULT 0;
ALTER TABLE entity ADD COLUMN fence INTEGER;
ALTER TABLE entity ADD COLUMN last INTEGER NOT NULL DEFAULT 0;
ALTER TABLE entity ADD COLUMN deleted INTEGER NOT NULL DEFAULT 0;
ALTER TABLE entity ADD COLUMN remembered INTEGER NOT NULL DEFAULT 0;
ALTER TABLE entity ADD COLUMN state BLOB;
CREATE INDEX entity_remembered ON entity (fence) WHERE remembered;
ALTER TABLE event RENAME TO event_1;
CREATE TABLE event (
    pos INTEGER PRIMARY KEY,
    fence INTEGER NOT NULL,
    entity INTEGER NOT NULL,
    seq INTEGER NOT NULL,
    off INTEGER NOT NULL,
    data BLOB,
    UNIQUE (entity, seq)
) STRICT;
INSERT INTO event (pos, fence, entity, seq, off, data)
    SELECT pos, fence, entity, seq, next_offset(fence), data FROM event_1 ORDER BY pos;
DROP TABLE event_1;
CREATE UNIQUE INDEX event_off ON event (fence, off);
UPDATE entity SET fence = (
    SELECT v.fence FROM event v WHERE v.entity = entity.n ORDER BY v.seq DESC LIMIT 1);
CREATE TABLE snapshot (
    entity INTEGER PRIMARY KEY,
    seq INTEGER NOT NULL,
    data BLOB NOT NULL
) STRICT;
"""
"""From format 1 to 2, which had no offsets: events follow each other in the order of commits.
`next_offset` counts the events of a fence."""

MISNUMBERED = """SELECT count(*) FROM fence f
    WHERE f.next <> (SELECT coalesce(max(v.off), 0) FROM event v WHERE v.fence = f.n)"""
"""How many shards have another last offset than their fence says."""

SCRATCH = """
CREATE TEMP TABLE held (c INTEGER PRIMARY KEY, fence, ok, epoch, next, writes, k);
CREATE TEMP TABLE written (i INTEGER PRIMARY KEY, c, type, id, k, bytes, entity, seq, fault);
CREATE TEMP VIEW claiming AS
    SELECT NULL AS cluster, NULL AS pid, NULL AS started, NULL AS claims;
CREATE TEMP VIEW writing AS SELECT NULL AS cluster, NULL AS number, NULL AS data, NULL AS claims,
    NULL AS writes, NULL AS events, NULL AS keys;
CREATE TEMP VIEW changing AS SELECT *, NULL AS replies, NULL AS states, NULL AS snapshots,
    NULL AS flags, NULL AS deletions, NULL AS erasures FROM writing;
CREATE TEMP TRIGGER claim INSTEAD OF INSERT ON claiming BEGIN
    DELETE FROM held;
    INSERT OR IGNORE INTO process SELECT DISTINCT value->>4, NEW.cluster, NEW.pid, NEW.started
        FROM jsonb_each(NEW.claims);
    INSERT INTO fence (cluster, role, layout, shard, epoch, owner)
        SELECT NEW.cluster, value->>0, value->>1, value->>2, value->>3, value->>4
        FROM jsonb_each(NEW.claims) WHERE true
        ON CONFLICT (cluster, role, layout, shard) DO UPDATE SET
            batch = iif(excluded.epoch > epoch, 0, batch),
            void = iif(excluded.epoch > epoch, 0, void),
            epoch = excluded.epoch, owner = excluded.owner
        WHERE excluded.epoch > epoch;
    INSERT INTO held (c, ok, epoch)
        SELECT j.key, f.epoch = j.value->>3 AND f.owner = j.value->>4, f.epoch
        FROM jsonb_each(NEW.claims) j CROSS JOIN fence f ON f.cluster = NEW.cluster
            AND f.role = j.value->>0 AND f.layout = j.value->>1 AND f.shard = j.value->>2;
END;
"""

CLAIM = "INSERT INTO claiming VALUES (?, ?, ?, ?)"
WRITE = "INSERT INTO writing VALUES (?, ?, ?, ?, ?, ?, ?)"
CHANGE = "INSERT INTO changing VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)"
"""As `WRITE`, for a batch that has more than events and new keys."""

HELD = "SELECT json_group_array(json_array(ok, epoch, next) ORDER BY c) FROM held"
WRITTEN = "SELECT json_group_array(json_array(fault, seq) ORDER BY i) FROM written"

TAKEN, CLASHES = 1, 2
"""What `held.ok` says: the shard takes its part of the batch, or some write of it does not fit.
Anything else: the claim does not hold."""

_DAY = f"""
    SELECT RAISE(ABORT, 'another day has begun') FROM key_days
        WHERE n = 1 AND CAST(counted_s / {DAY_S} AS INTEGER) <> {{day}};
"""

_CHECK = f"""
    DELETE FROM held;
    DELETE FROM written;
    INSERT INTO held
        SELECT j.key, f.n, f.epoch = j.value->>3 AND f.owner = j.value->>4 AND f.batch < NEW.number,
            f.epoch, f.next, f.writes, j.value->>5
        FROM jsonb_each(NEW.claims) j LEFT JOIN fence f ON f.cluster = NEW.cluster
            AND f.role = j.value->>0 AND f.layout = j.value->>1 AND f.shard = j.value->>2;
    INSERT INTO written
        SELECT j.key, j.value->>0, j.value->>1, j.value->>2, j.value->>4, j.value->>5, e.n,
            coalesce(e.seq, 0), iif(j.value->>3 IN ({BLIND}, coalesce(e.seq, 0)), NULL, 'seq')
        FROM jsonb_each(NEW.writes) j LEFT JOIN entity e ON e.cluster = NEW.cluster
            AND e.type = j.value->>1 AND e.id = j.value->>2;
    UPDATE written SET fault = 'key' WHERE fault IS NULL AND i IN (
        SELECT w.i FROM jsonb_each(NEW.keys) j CROSS JOIN written w ON w.i = j.value->>0
        CROSS JOIN inbox x ON x.entity = w.entity AND x.key = j.value->>1);
"""

_CHECK_REPLIES = """
    UPDATE written SET fault = 'key' WHERE fault IS NULL AND i IN (
        SELECT w.i FROM jsonb_each(NEW.replies) j CROSS JOIN written w ON w.i = j.value->>0
        WHERE NOT EXISTS (SELECT 1 FROM inbox x
            WHERE x.entity = w.entity AND x.key = j.value->>1 AND x.reply IS NULL));
"""

_CHECK_SNAPSHOTS = """
    UPDATE written SET fault = 'seq' WHERE fault IS NULL AND i IN (
        SELECT w.i FROM jsonb_each(NEW.snapshots) j CROSS JOIN written w ON w.i = j.value->>0
        WHERE j.value->>1 > w.seq + w.k);
"""

_REFUSE = f"""
    UPDATE held SET ok = {CLASHES}
        WHERE ok = {TAKEN} AND c IN (SELECT c FROM written WHERE fault IS NOT NULL);
"""

_PAUSE = f"""
    SELECT pause() WHERE EXISTS (SELECT 1 FROM held WHERE ok = {TAKEN});
"""

_APPLY = f"""
    INSERT INTO entity (cluster, type, id) SELECT NEW.cluster, w.type, w.id
        FROM written w CROSS JOIN held h ON h.c = w.c WHERE h.ok = {TAKEN} AND w.entity IS NULL;
    UPDATE written SET entity = (SELECT e.n FROM entity e
            WHERE e.cluster = NEW.cluster AND e.type = written.type AND e.id = written.id)
        WHERE entity IS NULL;
    INSERT INTO event (fence, entity, seq, off, data)
        SELECT h.fence, w.entity, w.seq + j.value->>1, h.next + j.value->>2,
            substr(NEW.data, j.value->>3, j.value->>4)
        FROM jsonb_each(NEW.events) j CROSS JOIN written w ON w.i = j.value->>0
        CROSS JOIN held h ON h.c = w.c WHERE h.ok = {TAKEN};
    UPDATE entity SET seq = w.seq + w.k, bytes = entity.bytes + w.bytes, fence = h.fence,
            last = h.writes + 1
        FROM written w CROSS JOIN held h ON h.c = w.c
        WHERE h.ok = {TAKEN} AND w.k > 0 AND entity.n = w.entity;
    UPDATE fence SET next = h.next + h.k, batch = NEW.number, writes = h.writes + 1
        FROM held h WHERE h.ok = {TAKEN} AND fence.n = h.fence;
"""


def _taken(rows: str) -> str:
    """The rows of one value of a batch, with their writes, as far as their shards take them."""
    return f"""jsonb_each(NEW.{rows}) j CROSS JOIN written w ON w.i = j.value->>0
        CROSS JOIN held h ON h.c = w.c AND h.ok = {TAKEN}"""


def _each(rows: str, *columns: str) -> str:
    """As `_taken`, for UPDATE: without the limit SQLite would look at every row of its table."""
    return f"(SELECT w.entity, {', '.join(columns)} FROM {_taken(rows)} LIMIT -1) t"


def _cut(at: int) -> str:
    """The bytes that a row names by their place and their length."""
    return f"substr(NEW.data, j.value->>{at}, j.value->>{at + 1})"


# A deletion is last: of what it takes away, its own write brings nothing here.
_CHANGE = f"""
    UPDATE entity SET state = t.state
        FROM {_each("states", f"{_cut(1)} AS state")} WHERE entity.n = t.entity;
    INSERT INTO snapshot (entity, seq, data)
        SELECT w.entity, j.value->>1, {_cut(2)} FROM {_taken("snapshots")}
        CROSS JOIN entity e ON e.n = w.entity WHERE j.value->>1 > e.deleted
        ON CONFLICT (entity) DO UPDATE SET seq = excluded.seq, data = excluded.data
        WHERE excluded.seq >= snapshot.seq;
    UPDATE entity SET remembered = t.flag, fence = t.fence, last = t.last
        FROM {_each("flags", "j.value->>1 AS flag", "h.fence", "h.writes + 1 AS last")}
        WHERE entity.n = t.entity;
    DELETE FROM event WHERE entity IN (SELECT w.entity FROM {_taken("deletions")});
    DELETE FROM snapshot WHERE entity IN (SELECT w.entity FROM {_taken("deletions")});
    UPDATE entity SET deleted = t.seq, bytes = 0, remembered = 0, state = NULL
        FROM {_each("deletions", "w.seq + w.k AS seq")} WHERE entity.n = t.entity;
    INSERT INTO event (fence, entity, seq, off)
        SELECT h.fence, w.entity, w.seq + w.k, h.next + j.value->>1 FROM {_taken("deletions")};
"""

_ERASE_SNAPSHOT = f"""
    DELETE FROM snapshot WHERE entity IN (SELECT w.entity FROM {_taken("erasures")});
"""

_ERASE_REPLIES = f"""
    UPDATE {{table}} SET reply = NULL
        WHERE entity IN (SELECT w.entity FROM {_taken("erasures")});
"""

_KEEP = f"""
    INSERT INTO {{today}} (entity, key, reply)
        SELECT w.entity, j.value->>1, iif(j.value->>2 IS NULL, NULL, {_cut(2)})
        FROM {_taken("keys")};
"""

_ANSWER = f"""
    UPDATE {{table}} SET reply = t.reply
        FROM {_each("replies", "j.value->>1 AS key", f"{_cut(2)} AS reply")}
        WHERE {{table}}.entity = t.entity AND {{table}}.key = t.key;
"""


def write_triggers(days: Sequence[int], *, pauses: bool) -> str:
    """The triggers that write a batch; the last of `days` is today. `pauses` is for tests."""
    tables = [day_table(day) for day in days]
    plain = [_PAUSE if pauses else "", _APPLY, _KEEP.format(today=tables[-1])]
    checks = [_CHECK, _CHECK_REPLIES, _CHECK_SNAPSHOTS, _REFUSE]
    answers = [_ANSWER.format(table=table) for table in tables]
    erasures = [_ERASE_SNAPSHOT, *(_ERASE_REPLIES.format(table=table) for table in tables)]
    day = _DAY.format(day=days[-1])
    return _trigger("writing", [day, _CHECK, _REFUSE, *plain]) + _trigger(
        "changing", [day, *checks, *plain, *answers, _CHANGE, *erasures]
    )


def _trigger(view: str, parts: Sequence[str]) -> str:
    name = f"on_{view}"
    create = f"CREATE TEMP TRIGGER {name} INSTEAD OF INSERT ON {view} BEGIN"
    return "".join([f"DROP TRIGGER IF EXISTS temp.{name}; {create}", *parts, "END;"])


_DAY_TABLE = "day_"


def day_table(day: int) -> str:
    """The table with the keys of one day."""
    return f"{_DAY_TABLE}{day:06}"


def known_days(connection: Any) -> list[int]:
    """The days that have tables, in order."""
    names = connection.execute(
        "SELECT name FROM sqlite_schema WHERE type = 'table' AND name GLOB ? ORDER BY name",
        (f"{_DAY_TABLE}*",),
    ).fetchall()
    return [int(name.removeprefix(_DAY_TABLE)) for (name,) in names]


def stored_days(connection: Any) -> KeyDays | None:
    """The count of days; None if none was stored yet."""
    rows = connection.execute("SELECT counted_s, since FROM key_days WHERE n = 1").fetchall()
    return KeyDays(*rows[0]) if rows else None


def create_day(day: int) -> str:
    """The statement that creates the table of a day."""
    return f"""CREATE TABLE {day_table(day)} (
        pos INTEGER PRIMARY KEY, entity INTEGER NOT NULL, key TEXT NOT NULL, reply BLOB,
        UNIQUE (entity, key)
    ) STRICT"""


def rename_days(connection: Any) -> None:
    """From format 2, whose day tables had other names."""
    # A view whose tables get other names would follow them, or stand in their way.
    connection.execute("DROP VIEW IF EXISTS inbox")
    for (name,) in connection.execute(
        "SELECT name FROM sqlite_schema WHERE type = 'table' AND name GLOB 'inbox_*'"
    ).fetchall():
        connection.execute(f"ALTER TABLE {name} RENAME TO {day_table(int(name[6:]))}")
    connection.execute(inbox_view(known_days(connection)))
    connection.execute(DAYS)


def inbox_view(days: Sequence[int]) -> str:
    """The statements that make `inbox` the view of all keys that are kept."""
    parts = [f"SELECT entity, key, reply FROM {day_table(day)}" for day in days]
    new = f"CREATE VIEW inbox AS {' UNION ALL '.join(parts)}" if parts else _NO_KEYS
    return f"DROP VIEW IF EXISTS inbox; {new}"


def claim_values(
    cluster: int, pid: int, started: str, claims: Sequence[Claim]
) -> tuple[object, ...]:
    """The values of `CLAIM`."""
    rows = [(*_row(claim), claim.epoch, claim.owner) for claim in claims]
    return cluster, pid, started, _json(rows)


def write_values(cluster: int, batch: Batch) -> tuple[str, tuple[object, ...]]:
    """`WRITE` or `CHANGE`, and its values: rows as JSON, and one blob that they cut bytes from."""
    counts = {claim.shard: 0 for claim in batch.claims}
    numbers = {shard: number for number, shard in enumerate(counts)}
    writes: list[_Row] = []
    events: list[_Row] = []
    keys: list[_Row] = []
    changes: tuple[list[_Row], ...] = ([], [], [], [], [], [])
    blob = _Blob()
    for i, write in enumerate(batch.writes):
        count, shard = counted(write), write.shard
        before = counts[shard]
        counts[shard] = before + placed(write)
        size = 0
        if not write.delete:
            for j, event in enumerate(write.events, 1):
                events.append((i, j, before + j, *blob.add(event)))
                size += len(event)
        writes.append((numbers[shard], *write.entity, write.expected, count, size))
        for key, reply in write.inbox:
            keys.append((i, key, *((None, None) if reply is None else blob.add(reply))))
        replies, states, snapshots, flags, deletions, erasures = changes
        replies += [(i, key, *blob.add(reply)) for key, reply in write.replies]
        if write.erase:
            erasures.append((i,))
        if write.delete:
            deletions.append((i, counts[shard]))
            continue
        if write.state is not None:
            states.append((i, *blob.add(write.state)))
        if write.snapshot is not None:
            seq, data = write.snapshot
            snapshots.append((i, seq, *blob.add(data)))
        if write.remember is not None:
            flags.append((i, int(write.remember)))
    claims = [
        (*_row(claim), claim.epoch, claim.owner, counts[claim.shard]) for claim in batch.claims
    ]
    plain = (cluster, batch.number, blob.whole(), *map(_json, (claims, writes, events, keys)))
    return (CHANGE, (*plain, *map(_json, changes))) if any(changes) else (WRITE, plain)


_Row = tuple[object, ...]


class _Blob:
    """Pieces of bytes, one after the other."""

    def __init__(self) -> None:
        # SQL counts bytes from 1. The first one is nobody's: a piece of an empty blob is NULL.
        self._pieces: list[bytes] = [b"\0"]
        self._at = 2

    def add(self, piece: bytes) -> tuple[int, int]:
        """Where a piece lies, and how long it is."""
        at, size = self._at, len(piece)
        self._pieces.append(piece)
        self._at += size
        return at, size

    def whole(self) -> bytes:
        """All of them."""
        return b"".join(self._pieces)


def _row(claim: Claim) -> tuple[str, int, int]:
    return claim.shard.role, claim.layout, claim.shard.shard


def _json(rows: object) -> str:
    # As text: SQLite takes JSON in a blob for its own binary form.
    return msgspec.json.encode(rows).decode()
