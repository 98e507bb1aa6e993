"""The tables of a SQLite journal, and a batch as one SQL statement.

A write is one INSERT into a view of the connection's own temp schema; its trigger does all the
work. SQLite takes the write lock, checks the fences, writes and commits without returning to Python
(S9). A transaction of several statements would wait for the interpreter's lock between them, while
all other processes wait for the file. The trigger leaves its answers in temp tables. SQLite has one
writer, so nothing changes between the trigger's checks and its writes (J2).

Keys of asks lie in one table per day; a table that is older than `KEPT_DAYS` is dropped as a whole.
Only `domicile.journals.sqlite` uses this module. No write may need a second statement.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from domicile.ports.journal import BLIND, Batch, Claim

APPLICATION_ID = 0x646F6D6A
"""Marks a file as a journal of Domicile; "domj" in ASCII."""

FORMAT = 1

KEPT_DAYS = 7
"""For how many whole days the journal remembers the keys of asks."""

TABLES = """
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
    next INTEGER NOT NULL DEFAULT 0,   -- how many events the shard has
    batch INTEGER NOT NULL DEFAULT 0,  -- the last batch that wrote, or that settling used up
    void INTEGER NOT NULL DEFAULT 0,   -- the last batch that settling used up: it never wrote
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
    seq INTEGER NOT NULL DEFAULT 0,    -- how many events it has
    bytes INTEGER NOT NULL DEFAULT 0,  -- and how many bytes these have
    UNIQUE (cluster, type, id)
) STRICT;
CREATE TABLE event (
    pos INTEGER PRIMARY KEY,           -- rises in the order of commits
    fence INTEGER NOT NULL,
    entity INTEGER NOT NULL,
    seq INTEGER NOT NULL,
    data BLOB NOT NULL,
    UNIQUE (entity, seq)
) STRICT;
"""

SCRATCH = """
CREATE TEMP TABLE held (c INTEGER PRIMARY KEY, fence, ok, epoch, next, k);
CREATE TEMP TABLE written (i INTEGER PRIMARY KEY, c, type, id, k, bytes, entity, seq, fault);
CREATE TEMP VIEW claiming AS
    SELECT NULL AS cluster, NULL AS pid, NULL AS started, NULL AS claims;
CREATE TEMP VIEW writing AS SELECT NULL AS cluster, NULL AS number, NULL AS claims, NULL AS writes,
    NULL AS events, NULL AS keys, NULL AS replies, NULL AS data;
CREATE TEMP VIEW filling AS SELECT * FROM writing;
CREATE TEMP TRIGGER claim INSTEAD OF INSERT ON claiming BEGIN
    DELETE FROM held;
    INSERT OR IGNORE INTO process SELECT DISTINCT value->>4, NEW.cluster, NEW.pid, NEW.started
        FROM json_each(NEW.claims);
    INSERT INTO fence (cluster, role, layout, shard, epoch, owner)
        SELECT NEW.cluster, value->>0, value->>1, value->>2, value->>3, value->>4
        FROM json_each(NEW.claims) WHERE true
        ON CONFLICT (cluster, role, layout, shard) DO UPDATE SET
            batch = iif(excluded.epoch > epoch, 0, batch),
            void = iif(excluded.epoch > epoch, 0, void),
            epoch = excluded.epoch, owner = excluded.owner
        WHERE excluded.epoch > epoch;
    INSERT INTO held (c, ok, epoch)
        SELECT j.key, f.epoch = j.value->>3 AND f.owner = j.value->>4, f.epoch
        FROM json_each(NEW.claims) j CROSS JOIN fence f ON f.cluster = NEW.cluster
            AND f.role = j.value->>0 AND f.layout = j.value->>1 AND f.shard = j.value->>2;
END;
"""

CLAIM = "INSERT INTO claiming VALUES (?, ?, ?, ?)"
WRITE = "INSERT INTO writing VALUES (?, ?, ?, ?, ?, ?, ?, ?)"
FILL_IN = "INSERT INTO filling VALUES (?, ?, ?, ?, ?, ?, ?, ?)"
"""As `WRITE`, for a batch that brings replies of keys that were stored before."""

HELD = "SELECT json_group_array(json_array(ok, epoch, next) ORDER BY c) FROM held"
WRITTEN = "SELECT json_group_array(json_array(fault, seq) ORDER BY i) FROM written"

TAKEN, CLASHES = 1, 2
"""What `held.ok` says: the shard takes its part of the batch, or some write of it does not fit.
Anything else: the claim does not hold."""

_CHECK = f"""
    DELETE FROM held;
    DELETE FROM written;
    INSERT INTO held
        SELECT j.key, f.n, f.epoch = j.value->>3 AND f.owner = j.value->>4 AND f.batch < NEW.number,
            f.epoch, f.next, j.value->>5
        FROM json_each(NEW.claims) j LEFT JOIN fence f ON f.cluster = NEW.cluster
            AND f.role = j.value->>0 AND f.layout = j.value->>1 AND f.shard = j.value->>2;
    INSERT INTO written
        SELECT j.key, j.value->>0, j.value->>1, j.value->>2, j.value->>4, j.value->>5, e.n,
            coalesce(e.seq, 0), iif(j.value->>3 IN ({BLIND}, coalesce(e.seq, 0)), NULL, 'seq')
        FROM json_each(NEW.writes) j LEFT JOIN entity e ON e.cluster = NEW.cluster
            AND e.type = j.value->>1 AND e.id = j.value->>2;
    UPDATE written SET fault = 'key' WHERE fault IS NULL AND i IN (
        SELECT w.i FROM json_each(NEW.keys) j CROSS JOIN written w ON w.i = j.value->>0
        CROSS JOIN inbox x ON x.entity = w.entity AND x.key = j.value->>1);
"""

_CHECK_REPLIES = """
    UPDATE written SET fault = 'key' WHERE fault IS NULL AND i IN (
        SELECT w.i FROM json_each(NEW.replies) j CROSS JOIN written w ON w.i = j.value->>0
        WHERE NOT EXISTS (SELECT 1 FROM inbox x
            WHERE x.entity = w.entity AND x.key = j.value->>1 AND x.reply IS NULL));
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
    INSERT INTO event (fence, entity, seq, data)
        SELECT h.fence, w.entity, w.seq + j.value->>1, substr(NEW.data, j.value->>2, j.value->>3)
        FROM json_each(NEW.events) j CROSS JOIN written w ON w.i = j.value->>0
        CROSS JOIN held h ON h.c = w.c WHERE h.ok = {TAKEN};
    UPDATE entity SET seq = w.seq + w.k, bytes = entity.bytes + w.bytes
        FROM written w CROSS JOIN held h ON h.c = w.c
        WHERE h.ok = {TAKEN} AND w.k > 0 AND entity.n = w.entity;
    UPDATE fence SET next = h.next + h.k, batch = NEW.number
        FROM held h WHERE h.ok = {TAKEN} AND fence.n = h.fence;
"""

_REPLY = "iif(j.value->>2 IS NULL, NULL, substr(NEW.data, j.value->>2, j.value->>3))"

_KEEP = f"""
    INSERT INTO {{today}} (entity, key, reply)
        SELECT w.entity, j.value->>1, {_REPLY}
        FROM json_each(NEW.keys) j CROSS JOIN written w ON w.i = j.value->>0
        CROSS JOIN held h ON h.c = w.c WHERE h.ok = {TAKEN};
"""

_ANSWER = f"""
    UPDATE {{table}} SET reply = {_REPLY}
        FROM json_each(NEW.replies) j CROSS JOIN written w ON w.i = j.value->>0
        CROSS JOIN held h ON h.c = w.c
        WHERE h.ok = {TAKEN} AND {{table}}.entity = w.entity AND {{table}}.key = j.value->>1;
"""


def write_triggers(days: Sequence[int], *, pauses: bool) -> str:
    """The triggers that write a batch; the last of `days` is today. `pauses` is for tests."""
    tables = [day_table(day) for day in days]
    plain = [_PAUSE if pauses else "", _APPLY, _KEEP.format(today=tables[-1])]
    answers = [_ANSWER.format(table=table) for table in tables]
    return _trigger("writing", [_CHECK, _REFUSE, *plain]) + _trigger(
        "filling", [_CHECK, _CHECK_REPLIES, _REFUSE, *plain, *answers]
    )


def _trigger(view: str, parts: Sequence[str]) -> str:
    name = f"on_{view}"
    create = f"CREATE TEMP TRIGGER {name} INSTEAD OF INSERT ON {view} BEGIN"
    return "".join([f"DROP TRIGGER IF EXISTS temp.{name}; {create}", *parts, "END;"])


def day_table(day: int) -> str:
    """The table with the keys of one day, counted from 1970."""
    return f"inbox_{day:06}"


def create_day(day: int) -> str:
    """The statement that creates the table of a day."""
    return f"""CREATE TABLE {day_table(day)} (
        pos INTEGER PRIMARY KEY, entity INTEGER NOT NULL, key TEXT NOT NULL, reply BLOB,
        UNIQUE (entity, key)
    ) STRICT"""


def inbox_view(days: Sequence[int]) -> str:
    """The statements that make `inbox` the view of all keys that are kept."""
    parts = [f"SELECT entity, key, reply FROM {day_table(day)}" for day in days]
    return f"DROP VIEW IF EXISTS inbox; CREATE VIEW inbox AS {' UNION ALL '.join(parts)}"


def claim_values(
    cluster: int, pid: int, started: str, claims: Sequence[Claim]
) -> tuple[object, ...]:
    """The values of `CLAIM`."""
    rows = [(*_row(claim), claim.epoch, claim.owner) for claim in claims]
    return cluster, pid, started, _json(rows)


def write_values(cluster: int, batch: Batch) -> tuple[object, ...]:
    """The values of `WRITE`: rows as JSON, and one blob that they cut their bytes from."""
    counts = {claim.shard: 0 for claim in batch.claims}
    numbers = {shard: number for number, shard in enumerate(counts)}
    writes: list[tuple[object, ...]] = []
    events: list[tuple[int, int, int, int]] = []
    keys: list[tuple[object, ...]] = []
    replies: list[tuple[object, ...]] = []
    data: list[bytes] = []
    at = 1  # SQL counts bytes from 1
    for i, write in enumerate(batch.writes):
        count, size = len(write.events), sum(map(len, write.events))
        counts[write.shard] += count
        writes.append((numbers[write.shard], *write.entity, write.expected, count, size))
        for j, event in enumerate(write.events, 1):
            events.append((i, j, at, len(event)))
            data.append(event)
            at += len(event)
        for rows, pairs in ((keys, write.inbox), (replies, write.replies)):
            for key, reply in pairs:
                if reply is None:
                    rows.append((i, key, None, None))
                    continue
                rows.append((i, key, at, len(reply)))
                data.append(reply)
                at += len(reply)
    claims = [
        (*_row(claim), claim.epoch, claim.owner, counts[claim.shard]) for claim in batch.claims
    ]
    parts = map(_json, (claims, writes, events, keys, replies))
    return cluster, batch.number, *parts, b"".join(data)


def _row(claim: Claim) -> tuple[str, int, int]:
    return claim.shard.role, claim.layout, claim.shard.shard


def _json(rows: object) -> str:
    # As text: SQLite takes JSON in a blob for its own binary form.
    return msgspec.json.encode(rows).decode()
