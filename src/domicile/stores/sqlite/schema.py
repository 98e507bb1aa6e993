"""The embedded store's tables, and its writes as single SQL statements (S9).

Each write is one INSERT into a view of the connection's own temp schema, whose trigger does all
the work: SQLite takes the write lock, works and commits without returning to Python. The trigger
leaves the result in temp tables, `now` and (for commits) `outcome`, which no other connection can
see or change. One INSERT may have several commits as rows: each is checked alone and gets its own
revision, and SQLite waits for the disk once. Only `domicile.stores.sqlite` uses it. No write may
need a second statement.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence

from domicile.core.state.txn import Absent, At, Condition, Put, Write
from domicile.stores.key_range import above

APPLICATION_ID = 0x646F6D69
"""Marks a file as a store of Domicile; "domi" in ASCII."""

FORMAT = 1

TABLES = """
CREATE TABLE meta (
    id INTEGER PRIMARY KEY CHECK (id = 1),
    history TEXT NOT NULL,
    boot TEXT NOT NULL,
    time REAL NOT NULL,
    revision INTEGER NOT NULL,
    trimmed INTEGER NOT NULL  -- changes up to this revision are forgotten
) STRICT;
CREATE TABLE item (
    key BLOB NOT NULL UNIQUE,
    value BLOB NOT NULL,
    created INTEGER NOT NULL,
    revision INTEGER NOT NULL,
    lease TEXT
) STRICT;
CREATE INDEX item_lease ON item (lease) WHERE lease IS NOT NULL;
CREATE TABLE lease (id TEXT PRIMARY KEY, ttl_s REAL NOT NULL, deadline REAL NOT NULL) STRICT;
CREATE INDEX lease_deadline ON lease (deadline);
CREATE TABLE txn (
    revision INTEGER PRIMARY KEY,
    at REAL NOT NULL,
    by TEXT NOT NULL,
    expiry INTEGER NOT NULL
) STRICT;
CREATE TABLE change (
    revision INTEGER NOT NULL,
    n INTEGER NOT NULL,
    key BLOB NOT NULL,
    created INTEGER,
    lease TEXT,
    value BLOB,  -- NULL is a deletion
    UNIQUE (revision, n)
) STRICT;
"""

COLUMNS = (
    *("history", "floor", "boot", "elapsed", "by", "kept"),
    *("lease", "ttl_s", "n", "ops", "data", "upto"),
)

_SCRATCH = f"""
CREATE TEMP TABLE now (
    id INTEGER PRIMARY KEY, rebooted, at, revision, wrote, conflict, ttl_s
);
CREATE TEMP TABLE outcome (n INTEGER PRIMARY KEY, revision, conflict);
CREATE TEMP TABLE due (id TEXT PRIMARY KEY);
CREATE TEMP TABLE op (n INTEGER PRIMARY KEY, kind, key, value, lease, revision);
CREATE TEMP VIEW call AS SELECT {", ".join(f"NULL AS {name}" for name in COLUMNS)};
"""

# Ends the leases in `due`; one commit removes the items attached to them.
_END_DUE = """
    UPDATE now SET revision = revision + 1
        WHERE EXISTS (SELECT 1 FROM item WHERE lease IN (SELECT id FROM due));
    INSERT INTO txn SELECT revision, at, NEW.by, 1 FROM now
        WHERE EXISTS (SELECT 1 FROM item WHERE lease IN (SELECT id FROM due));
    INSERT INTO change
        SELECT now.revision, row_number() OVER (ORDER BY item.key), item.key, NULL, NULL, NULL
        FROM now, item WHERE item.lease IN (SELECT id FROM due);
    DELETE FROM item WHERE lease IN (SELECT id FROM due);
    UPDATE now SET wrote = 1 WHERE EXISTS (SELECT 1 FROM lease WHERE id IN (SELECT id FROM due));
    DELETE FROM lease WHERE id IN (SELECT id FROM due);
"""

# The history must be the known one (S5). Then time advances; within one boot it never goes back
# (S4). Expired leases end before anything else is read (S3). A new boot ends all leases: 9e999 is
# infinity. With an OR, every write would scan all leases instead of using the index.
_BEGIN = f"""
    SELECT RAISE(ABORT, 'rewound') WHERE NOT EXISTS (
        SELECT 1 FROM meta WHERE history = NEW.history AND revision >= NEW.floor);
    INSERT OR REPLACE INTO now
        SELECT 1, boot <> NEW.boot, iif(boot = NEW.boot, max(time, NEW.elapsed), NEW.elapsed),
            revision, 0, NULL, NULL
        FROM meta;
    DELETE FROM due;
    INSERT INTO due SELECT lease.id FROM now CROSS JOIN lease
        WHERE lease.deadline <= iif(now.rebooted, 9e999, now.at);
    {_END_DUE}
"""

# `meta` is written only if something changed, so that a refused commit costs no disk write.
_FINISH = """
    DELETE FROM change WHERE revision <= (SELECT revision FROM now) - NEW.kept;
    DELETE FROM txn WHERE revision <= (SELECT revision FROM now) - NEW.kept;
    UPDATE meta SET revision = now.revision, boot = NEW.boot, time = now.at,
            trimmed = max(meta.trimmed, now.revision - NEW.kept)
        FROM now WHERE meta.revision <> now.revision OR now.wrote OR now.rebooted;
"""

# The first operation that fails is the conflict. Then `op` keeps only operations that change
# something.
_COMMIT = """
    DELETE FROM op;
    INSERT INTO op SELECT o.key, o.value ->> 0, substr(NEW.data, o.value ->> 1, o.value ->> 2),
            iif(o.value ->> 0 = 'put', substr(NEW.data, o.value ->> 3, o.value ->> 4), NULL),
            o.value ->> 5, o.value ->> 6
        FROM json_each(NEW.ops) AS o;
    UPDATE now SET conflict = (
        SELECT min(op.n) FROM op LEFT JOIN item ON item.key = op.key
        WHERE CASE op.kind
            WHEN 'at' THEN item.revision IS NOT op.revision
            WHEN 'absent' THEN item.key IS NOT NULL
            WHEN 'present' THEN item.key IS NULL
            WHEN 'put' THEN op.lease IS NOT NULL AND op.lease NOT IN (SELECT id FROM lease)
            ELSE 0 END);
    DELETE FROM op WHERE kind NOT IN ('put', 'delete')
        OR kind = 'delete' AND key NOT IN (SELECT key FROM item)
        OR (SELECT conflict FROM now) IS NOT NULL;
    UPDATE now SET revision = revision + 1 WHERE EXISTS (SELECT 1 FROM op);
    INSERT INTO txn SELECT revision, at, NEW.by, 0 FROM now WHERE EXISTS (SELECT 1 FROM op);
    INSERT INTO change
        SELECT now.revision, op.n, op.key,
            iif(op.kind = 'put', coalesce(item.created, now.revision), NULL), op.lease, op.value
        FROM now, op LEFT JOIN item ON item.key = op.key;
    DELETE FROM item WHERE key IN (SELECT key FROM op WHERE kind = 'delete');
    INSERT INTO item (key, value, created, revision, lease)
        SELECT op.key, op.value, now.revision, now.revision, op.lease
        FROM op, now WHERE op.kind = 'put'
        ON CONFLICT (key) DO UPDATE SET
            value = excluded.value, revision = excluded.revision, lease = excluded.lease;
    DELETE FROM op;
    INSERT OR REPLACE INTO outcome SELECT NEW.n, revision, conflict FROM now;
"""

_GRANT = """
    INSERT INTO lease SELECT NEW.lease, NEW.ttl_s, at + NEW.ttl_s FROM now WHERE true
        ON CONFLICT (id) DO UPDATE SET ttl_s = excluded.ttl_s, deadline = excluded.deadline;
    UPDATE now SET wrote = 1, ttl_s = NEW.ttl_s;
"""

_RENEW = """
    UPDATE lease SET deadline = (SELECT at FROM now) + ttl_s WHERE id = NEW.lease;
    UPDATE now SET wrote = 1, ttl_s = lease.ttl_s FROM lease WHERE lease.id = NEW.lease;
"""

_REVOKE = f"""
    DELETE FROM due;
    INSERT INTO due VALUES (NEW.lease);
    {_END_DUE}
"""

_COMPACT = """
    DELETE FROM change WHERE revision <= NEW.upto;
    DELETE FROM txn WHERE revision <= NEW.upto;
    UPDATE meta SET trimmed = max(trimmed, min(revision, NEW.upto));
"""

_BODIES = {
    "commit": _COMMIT,
    "grant": _GRANT,
    "renew": _RENEW,
    "revoke": _REVOKE,
    "expire": "",
    "compact": _COMPACT,
}

PREPARE = _SCRATCH + "".join(
    f"CREATE TEMP VIEW {name}_call AS SELECT * FROM call;\n"
    f"CREATE TEMP TRIGGER {name}_do INSTEAD OF INSERT ON {name}_call BEGIN"
    f"{_BEGIN}{body}{_FINISH}END;\n"
    for name, body in _BODIES.items()
)
"""What a connection that writes needs in its temp schema."""

CALLS = {
    name: f"INSERT INTO {name}_call VALUES ({', '.join(f':{column}' for column in COLUMNS)})"
    for name in _BODIES
}
"""The one statement of each kind of write."""

_EACH = {
    "n": "each.key",
    "ops": "each.value -> 2",
    "data": "substr(:data, each.value ->> 0, each.value ->> 1)",
}
CALLS["commit"] = (
    f"INSERT INTO commit_call SELECT {', '.join(_EACH.get(name, f':{name}') for name in COLUMNS)} "
    "FROM json_each(:ops) AS each ORDER BY each.key"
)

OUTCOME = "SELECT revision, conflict, ttl_s FROM temp.now"
OUTCOMES = "SELECT revision, conflict, NULL FROM temp.outcome WHERE n < ? ORDER BY n"

_STATE = "meta.history, meta.revision, meta.time, meta.boot, (SELECT min(deadline) FROM lease)"

STATE = f"SELECT {_STATE} FROM meta"
GET = (
    f"SELECT {_STATE}, item.key, item.value, item.created, item.revision "
    "FROM meta LEFT JOIN item ON item.key = ?"
)
LIST = (
    f"SELECT {_STATE}, item.key, item.value, item.created, item.revision "
    "FROM meta LEFT JOIN item ON item.key >= ?{below} ORDER BY item.key"
)
LOG = (
    f"SELECT {_STATE}, meta.trimmed, change.revision, change.key, change.value, change.created "
    "FROM meta LEFT JOIN change ON change.revision > ? AND change.key >= ?{below} "
    "ORDER BY change.revision, change.n"
)
HURRIED = (
    "SELECT EXISTS (SELECT 1 FROM change "
    "WHERE revision > ? AND NOT (key >= ? AND key < coalesce(?, x'')))"
)
COMMITS = (
    "SELECT txn.revision, txn.at, txn.by, txn.expiry, change.key, change.value, change.lease "
    "FROM txn JOIN change USING (revision) ORDER BY txn.revision, change.n"
)


def ranged(query: str, prefix: bytes, *before: object) -> tuple[str, tuple[object, ...]]:
    """A query and its parameters, limited to the keys under a prefix."""
    end = above(prefix)
    if end is None:
        return query.format(below=""), (*before, prefix)
    below = " AND change.key < ?" if "change.key" in query else " AND item.key < ?"
    return query.format(below=below), (*before, prefix, end)


def together(commits: Iterable[tuple[str, bytes]]) -> tuple[str, bytes]:
    """Several packed commits as one: JSON, and a blob in which each commit has a piece."""
    places: list[str] = []
    blob = bytearray()
    for ops, data in commits:
        places.append(f"[{len(blob) + 1}, {len(data)}, {ops}]")
        blob += data
    return f"[{', '.join(places)}]", bytes(blob)


def packed(conditions: Sequence[Condition], writes: Sequence[Write]) -> tuple[str, bytes]:
    """The operations of a commit as JSON. Keys and values, which JSON cannot hold, are positions in
    the commit's piece of a blob. The caller packs, so that an error concerns only that caller."""
    # A leading byte, because for SQLite a piece of an empty blob is NULL.
    data = bytearray(b"\0")

    def place(piece: bytes) -> tuple[int, int]:
        data.extend(piece)
        return len(data) - len(piece) + 1, len(piece)

    ops: list[tuple[object, ...]] = []
    for condition in conditions:
        revision = condition.revision if isinstance(condition, At) else None
        kind = "at" if revision is not None else "present"
        kind = "absent" if isinstance(condition, Absent) else kind
        ops.append((kind, *place(condition.key), None, None, None, revision))
    for write in writes:
        if isinstance(write, Put):
            ops.append(("put", *place(write.key), *place(write.value), write.lease, None))
        else:
            ops.append(("delete", *place(write.key), None, None, None, None))
    return json.dumps(ops), bytes(data)
