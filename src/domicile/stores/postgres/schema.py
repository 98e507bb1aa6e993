"""The tables of the PostgreSQL store, and every read and write as one call of a function (S10).

A write locks the one row of `meta` first: so revisions rise in the order of commits. Then it
advances store time (S4), ends the leases that have expired (S3), checks and writes. Inside a
function each statement sees what is committed when it starts; the checks behind the lock rely on
that. A renewal locks the row of its lease only.

A caller shows the newest revision that it knows, with that revision's random tag. Where the tag is
another one, the store lost commits that the caller saw, even if it has more revisions now (S5).

Users need no right to the tables: the functions run with the rights of the schema's owner. Only
`domicile.stores.postgres` uses this module. No write may begin without `begin_write`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from domicile.core.state.txn import Absent, At, Condition, Delete, Present, Put, Write
from domicile.settings import MAX_TICK_S

SCHEMA = "domicile_store"
CHANNEL = "domicile_store"
"""Where NOTIFY says that there are commits."""

FORMAT = 1

LOCK = 0x646F6D73
"""The advisory lock of those who create or change tables; "doms" in ASCII."""

REWOUND = "DM001"
"""The SQLSTATE of a call that shows a revision which the store no longer has (S5)."""

TRIM_EVERY = 256
"""Old changes are deleted once in so many revisions."""

AT, ABSENT, PRESENT, PUT, DELETE = range(5)

UPGRADES: dict[int, str] = {}
"""For each older format: what makes the next one of it."""

TABLES = f"""
CREATE TABLE {SCHEMA}.meta (
    one boolean PRIMARY KEY DEFAULT true CHECK (one),
    format int NOT NULL,
    history text NOT NULL,
    place text NOT NULL,              -- the server's data directory and its timeline
    revision bigint NOT NULL,
    tag uuid NOT NULL,
    trimmed bigint NOT NULL,          -- changes up to this revision are forgotten
    ended bigint NOT NULL,            -- how many leases have expired
    time float8 NOT NULL,             -- store time, as of `wall`
    wall float8 NOT NULL,
    led float8 NOT NULL               -- when a coordinator ticked last, by the wall clock
) WITH (fillfactor = 10);
CREATE TABLE {SCHEMA}.item (
    key bytea PRIMARY KEY,
    value bytea NOT NULL,
    created bigint NOT NULL,
    revision bigint NOT NULL,
    lease text COLLATE "C"
);
CREATE INDEX item_lease ON {SCHEMA}.item (lease) WHERE lease IS NOT NULL;
CREATE TABLE {SCHEMA}.lease (
    id text COLLATE "C" PRIMARY KEY,
    ttl float8 NOT NULL,
    deadline float8 NOT NULL          -- without an index: a renewal changes nothing else
) WITH (fillfactor = 50);
CREATE TABLE {SCHEMA}.txn (
    revision bigint PRIMARY KEY,
    tag uuid NOT NULL,
    at float8 NOT NULL,               -- by the wall clock
    by text NOT NULL,
    expiry boolean NOT NULL
);
CREATE TABLE {SCHEMA}.change (
    revision bigint NOT NULL,
    n int NOT NULL,
    key bytea NOT NULL,
    created bigint,
    lease text,
    value bytea,                      -- NULL is a deletion
    PRIMARY KEY (revision, n)
);
WITH first AS (
    INSERT INTO {SCHEMA}.meta SELECT true, {FORMAT}, gen_random_uuid()::text, '', 0,
        gen_random_uuid(), 0, 0, 0, extract(epoch FROM clock_timestamp()), 0
    RETURNING tag, wall
)
INSERT INTO {SCHEMA}.txn SELECT 0, tag, wall, '', false FROM first;
"""

_WALL = "extract(epoch FROM clock_timestamp())::float8"
_RIGHTS = f"SECURITY DEFINER SET search_path = {SCHEMA}, pg_temp"
_KNOWN = "known_history text, known_revision bigint, known_tag uuid"
_SHOWN = "known_history, known_revision, known_tag"
_STATE = "history text, newest bigint, newest_tag uuid"
_M = "m.history, m.revision, m.tag"

# What a wall clock that may be stepped has added to store time since the last reading (S4).
_NOW = f"m.time + least(greatest(w - m.wall, 0), {MAX_TICK_S})"

FUNCTIONS = f"""
-- S5. A revision whose tag is forgotten cannot be compared; a watch from there is refused anyway.
CREATE OR REPLACE FUNCTION {SCHEMA}.check_known(m {SCHEMA}.meta, {_KNOWN}) RETURNS void
LANGUAGE plpgsql STABLE AS $$
BEGIN
    IF known_history IS NULL THEN
        RETURN;
    ELSIF m.history <> known_history THEN
        RAISE EXCEPTION 'it has another history' USING ERRCODE = '{REWOUND}';
    ELSIF m.revision < known_revision THEN
        RAISE EXCEPTION 'it is at revision %, after %', m.revision, known_revision
            USING ERRCODE = '{REWOUND}';
    ELSIF m.revision = known_revision AND m.tag <> known_tag OR EXISTS (
        SELECT 1 FROM txn t WHERE t.revision = known_revision AND t.tag <> known_tag
    ) THEN
        RAISE EXCEPTION 'its revision % is another one', known_revision
            USING ERRCODE = '{REWOUND}';
    END IF;
END $$;

-- Which data directory this is, and how often it was continued by a failover or a restore.
CREATE OR REPLACE FUNCTION {SCHEMA}.place() RETURNS text LANGUAGE sql STABLE AS $$
    SELECT system_identifier || '/' || substr(pg_walfile_name(pg_current_wal_insert_lsn()), 1, 8)
    FROM pg_control_system();
$$;

-- Ends leases; one commit removes what is attached to them.
CREATE OR REPLACE FUNCTION {SCHEMA}.end_leases(m {SCHEMA}.meta, ids text[], anyway boolean)
RETURNS {SCHEMA}.meta LANGUAGE plpgsql AS $$
DECLARE
    gone text[];
    removed int;
BEGIN
    -- A renewal that came first has moved the deadline: the row is judged again behind its lock.
    WITH d AS (
        DELETE FROM lease WHERE id = ANY (ids) AND (anyway OR deadline <= m.time) RETURNING id
    )
    SELECT array_agg(id) INTO gone FROM d;
    IF gone IS NULL THEN
        RETURN m;
    END IF;
    m.ended := m.ended + cardinality(gone);
    WITH d AS (DELETE FROM item WHERE lease = ANY (gone) RETURNING key)
    INSERT INTO change (revision, n, key)
        SELECT m.revision + 1, row_number() OVER (ORDER BY key), key FROM d;
    GET DIAGNOSTICS removed = ROW_COUNT;
    IF removed > 0 THEN
        m.revision := m.revision + 1;
        m.tag := gen_random_uuid();
        INSERT INTO txn VALUES (m.revision, m.tag, m.wall, '', true);
        PERFORM pg_notify('{CHANNEL}', m.revision::text);
    END IF;
    RETURN m;
END $$;

-- What every write does first: the lock that orders revisions, the history, the time, the leases.
CREATE OR REPLACE FUNCTION {SCHEMA}.begin_write({_KNOWN}) RETURNS {SCHEMA}.meta
LANGUAGE plpgsql AS $$
DECLARE
    m meta;
    w float8;
    here text := place();
    due text[];
BEGIN
    SELECT * INTO m FROM meta FOR NO KEY UPDATE;
    PERFORM check_known(m, {_SHOWN});
    w := {_WALL};
    m.time := {_NOW};
    m.wall := w;
    IF m.place <> here THEN
        -- After a failover or a restore, renewals may be lost of which their holders know.
        UPDATE lease SET deadline = greatest(deadline, m.time + ttl);
        m.place := here;
    END IF;
    SELECT array_agg(id) INTO due FROM lease WHERE deadline <= m.time;
    IF due IS NOT NULL THEN
        m := end_leases(m, due, false);
    END IF;
    RETURN m;
END $$;

CREATE OR REPLACE FUNCTION {SCHEMA}.finish_write(m {SCHEMA}.meta) RETURNS void
LANGUAGE sql AS $$
    UPDATE meta SET place = m.place, revision = m.revision, tag = m.tag, trimmed = m.trimmed,
        ended = m.ended, time = m.time, wall = m.wall, led = m.led;
$$;

-- Commits, one after the other, each checked alone. Arrays have the operations of all of them;
-- `firsts` says where each commit begins.
CREATE OR REPLACE FUNCTION {SCHEMA}.write_commits(
    {_KNOWN}, author text, kept bigint, firsts int[], loud boolean[],
    kinds smallint[], keys bytea[], datas bytea[], leases text[], revisions bigint[]
) RETURNS TABLE (n int, revision bigint, conflict int, {_STATE})
LANGUAGE plpgsql {_RIGHTS} AS $$
#variable_conflict use_column
DECLARE
    m meta := begin_write({_SHOWN});
    before bigint := m.revision;
    notified boolean := false;
    wrong int;
    changed int;
    a int;
    z int;
BEGIN
    FOR i IN 1 .. cardinality(firsts) LOOP
        a := firsts[i];
        z := coalesce(firsts[i + 1], cardinality(kinds) + 1) - 1;
        SELECT min(o.place) INTO wrong
            FROM unnest(kinds[a:z], keys[a:z], leases[a:z], revisions[a:z])
                WITH ORDINALITY AS o (kind, key, lease, at, place)
            LEFT JOIN item x ON x.key = o.key
            WHERE CASE o.kind
                WHEN {AT} THEN x.revision IS DISTINCT FROM o.at
                WHEN {ABSENT} THEN x.key IS NOT NULL
                WHEN {PRESENT} THEN x.key IS NULL
                WHEN {PUT} THEN o.lease IS NOT NULL
                    AND NOT EXISTS (SELECT 1 FROM lease l WHERE l.id = o.lease)
                ELSE false END;
        IF wrong IS NULL THEN
            INSERT INTO change (revision, n, key, created, lease, value)
                SELECT m.revision + 1, o.place, o.key,
                    CASE WHEN o.kind = {PUT} THEN coalesce(x.created, m.revision + 1) END,
                    o.lease, o.data
                FROM unnest(kinds[a:z], keys[a:z], datas[a:z], leases[a:z])
                    WITH ORDINALITY AS o (kind, key, data, lease, place)
                LEFT JOIN item x ON x.key = o.key
                WHERE o.kind = {PUT} OR o.kind = {DELETE} AND x.key IS NOT NULL;
            GET DIAGNOSTICS changed = ROW_COUNT;
            IF changed > 0 THEN
                m.revision := m.revision + 1;
                m.tag := gen_random_uuid();
                INSERT INTO txn VALUES (m.revision, m.tag, m.wall, author, false);
                DELETE FROM item x USING unnest(kinds[a:z], keys[a:z]) AS o (kind, key)
                    WHERE o.kind = {DELETE} AND x.key = o.key;
                INSERT INTO item AS x (key, value, created, revision, lease)
                    SELECT o.key, o.data, m.revision, m.revision, o.lease
                    FROM unnest(kinds[a:z], keys[a:z], datas[a:z], leases[a:z])
                        AS o (kind, key, data, lease)
                    WHERE o.kind = {PUT}
                    ON CONFLICT ON CONSTRAINT item_pkey DO UPDATE SET
                        value = excluded.value, revision = excluded.revision,
                        lease = excluded.lease;
                notified := notified OR loud[i];
            END IF;
        END IF;
        n := i;
        revision := m.revision;
        conflict := wrong;
        RETURN NEXT;
    END LOOP;
    IF m.revision / {TRIM_EVERY} > before / {TRIM_EVERY} THEN
        m.trimmed := greatest(m.trimmed, m.revision - kept);
        DELETE FROM change c WHERE c.revision <= m.trimmed;
        DELETE FROM txn t WHERE t.revision <= m.trimmed;
    END IF;
    PERFORM finish_write(m);
    IF notified THEN
        PERFORM pg_notify('{CHANNEL}', m.revision::text);
    END IF;
    -- The last row has what the caller knows from now on.
    n := 0;
    revision := NULL;
    conflict := NULL;
    history := m.history;
    newest := m.revision;
    newest_tag := m.tag;
    RETURN NEXT;
END $$;

CREATE OR REPLACE FUNCTION {SCHEMA}.grant_lease({_KNOWN}, name text, lasts float8)
RETURNS TABLE ({_STATE}) LANGUAGE plpgsql {_RIGHTS} AS $$
#variable_conflict use_column
DECLARE
    m meta := begin_write({_SHOWN});
BEGIN
    INSERT INTO lease (id, ttl, deadline) VALUES (name, lasts, m.time + lasts)
        ON CONFLICT (id) DO UPDATE SET ttl = excluded.ttl, deadline = excluded.deadline;
    PERFORM finish_write(m);
    RETURN QUERY SELECT {_M};
END $$;

CREATE OR REPLACE FUNCTION {SCHEMA}.revoke_lease({_KNOWN}, name text)
RETURNS TABLE ({_STATE}) LANGUAGE plpgsql {_RIGHTS} AS $$
#variable_conflict use_column
DECLARE
    m meta := begin_write({_SHOWN});
BEGIN
    m := end_leases(m, ARRAY[name], true);
    PERFORM finish_write(m);
    RETURN QUERY SELECT {_M};
END $$;

-- L1: renews, then reads the holder's own record. It locks the row of the lease only. The revision
-- lets the caller find a lost NOTIFY; `stale` is how long nobody has advanced store time, `led` how
-- long no coordinator has.
CREATE OR REPLACE FUNCTION {SCHEMA}.keep_lease({_KNOWN}, name text, own bytea)
RETURNS TABLE (
    {_STATE}, ttl float8, value bytea, created bigint, revision bigint, stale float8, led float8
) LANGUAGE plpgsql {_RIGHTS} AS $$
#variable_conflict use_column
DECLARE
    m meta;
    w float8;
BEGIN
    SELECT * INTO m FROM meta;
    PERFORM check_known(m, {_SHOWN});
    IF m.place <> place() THEN
        m := begin_write({_SHOWN});
        PERFORM finish_write(m);
    END IF;
    w := {_WALL};
    UPDATE lease l SET deadline = greatest(l.deadline, {_NOW} + l.ttl)
        WHERE l.id = name AND l.deadline > {_NOW} RETURNING l.ttl INTO ttl;
    IF ttl IS NULL AND EXISTS (SELECT 1 FROM lease l WHERE l.id = name) THEN
        -- S3: it has expired and nobody has ended it. Another renewal may still come first, so the
        -- lease is gone only once its end is committed.
        m := begin_write({_SHOWN});
        UPDATE lease l SET deadline = greatest(l.deadline, m.time + l.ttl)
            WHERE l.id = name RETURNING l.ttl INTO ttl;
        PERFORM finish_write(m);
    END IF;
    IF ttl IS NOT NULL THEN
        SELECT x.value, x.created, x.revision INTO value, created, revision
            FROM item x WHERE x.key = own;
    END IF;
    history := m.history;
    newest := m.revision;
    newest_tag := m.tag;
    stale := w - m.wall;
    led := w - m.led;
    RETURN NEXT;
END $$;

-- Advances store time. One that leads always does; others only after `gap` seconds without anybody.
CREATE OR REPLACE FUNCTION {SCHEMA}.tick({_KNOWN}, leads boolean, gap float8)
RETURNS TABLE ({_STATE}, stale float8, led float8) LANGUAGE plpgsql {_RIGHTS} AS $$
#variable_conflict use_column
DECLARE
    m meta;
    w float8 := {_WALL};
    ended_before bigint;
BEGIN
    SELECT * INTO m FROM meta;
    PERFORM check_known(m, {_SHOWN});
    stale := w - m.wall;
    led := w - m.led;
    IF leads OR stale NOT BETWEEN 0 AND gap THEN
        ended_before := m.ended;
        m := begin_write({_SHOWN});
        IF leads THEN
            m.led := m.wall;
        END IF;
        IF m.ended = ended_before THEN
            -- A tick that a crash forgets only delays the end of leases. An end is no tick.
            PERFORM set_config('synchronous_commit', 'off', true);
        END IF;
        PERFORM finish_write(m);
    END IF;
    RETURN QUERY SELECT {_M}, stale, led;
END $$;

CREATE OR REPLACE FUNCTION {SCHEMA}.compact({_KNOWN}, upto bigint)
RETURNS TABLE ({_STATE}) LANGUAGE plpgsql {_RIGHTS} AS $$
#variable_conflict use_column
DECLARE
    m meta := begin_write({_SHOWN});
BEGIN
    m.trimmed := greatest(m.trimmed, least(m.revision, upto));
    DELETE FROM change c WHERE c.revision <= m.trimmed;
    DELETE FROM txn t WHERE t.revision <= m.trimmed;
    PERFORM finish_write(m);
    RETURN QUERY SELECT {_M};
END $$;

-- What every read sees first, of the same snapshot as what it reads. `due`: a lease has expired,
-- whose end is not stored yet.
CREATE OR REPLACE FUNCTION {SCHEMA}.look({_KNOWN})
RETURNS TABLE ({_STATE}, due boolean, trimmed bigint) LANGUAGE plpgsql STABLE AS $$
#variable_conflict use_column
DECLARE
    m meta;
    w float8 := {_WALL};
BEGIN
    SELECT * INTO m FROM meta;
    PERFORM check_known(m, {_SHOWN});
    RETURN QUERY SELECT {_M},
        EXISTS (SELECT 1 FROM lease l WHERE l.deadline <= {_NOW}), m.trimmed;
END $$;

CREATE OR REPLACE FUNCTION {SCHEMA}.get_item({_KNOWN}, wanted bytea)
RETURNS TABLE ({_STATE}, due boolean, key bytea, value bytea, created bigint, revision bigint)
LANGUAGE sql STABLE {_RIGHTS} AS $$
    SELECT s.history, s.newest, s.newest_tag, s.due, x.key, x.value, x.created, x.revision
        FROM look({_SHOWN}) s LEFT JOIN item x ON x.key = wanted;
$$;

-- `above` is the smallest key behind all that are wanted; NULL: there is none.
CREATE OR REPLACE FUNCTION {SCHEMA}.list_items({_KNOWN}, first bytea, above bytea)
RETURNS TABLE ({_STATE}, due boolean, key bytea, value bytea, created bigint, revision bigint)
LANGUAGE plpgsql STABLE {_RIGHTS} AS $$
#variable_conflict use_column
DECLARE
    s record;
BEGIN
    SELECT * INTO s FROM look({_SHOWN});
    RETURN QUERY SELECT s.history, s.newest, s.newest_tag, s.due,
        NULL::bytea, NULL::bytea, NULL::bigint, NULL::bigint;
    -- Two statements: a plan for both would read all keys behind the first.
    IF above IS NULL THEN
        RETURN QUERY SELECT NULL::text, NULL::bigint, NULL::uuid, NULL::boolean,
            x.key, x.value, x.created, x.revision
            FROM item x WHERE x.key >= first ORDER BY x.key;
    ELSE
        RETURN QUERY SELECT NULL::text, NULL::bigint, NULL::uuid, NULL::boolean,
            x.key, x.value, x.created, x.revision
            FROM item x WHERE x.key >= first AND x.key < above ORDER BY x.key;
    END IF;
END $$;

-- Whole commits after a revision, about `most` rows of them; `upto`: there is nothing more up to
-- that revision.
CREATE OR REPLACE FUNCTION {SCHEMA}.read_changes(
    {_KNOWN}, seen bigint, first bytea, above bytea, most int
) RETURNS TABLE (
    {_STATE}, due boolean, trimmed bigint, upto bigint,
    revision bigint, key bytea, value bytea, created bigint
) LANGUAGE plpgsql STABLE {_RIGHTS} AS $$
#variable_conflict use_column
DECLARE
    s record;
    last bigint;
BEGIN
    SELECT * INTO s FROM look({_SHOWN});
    SELECT q.revision INTO last FROM (
        SELECT c.revision FROM change c WHERE c.revision > seen
        ORDER BY c.revision, c.n LIMIT 1 OFFSET most
    ) q;
    last := coalesce(last, s.newest);
    RETURN QUERY SELECT s.history, s.newest, s.newest_tag, s.due, s.trimmed, last,
        NULL::bigint, NULL::bytea, NULL::bytea, NULL::bigint;
    RETURN QUERY SELECT NULL::text, NULL::bigint, NULL::uuid, NULL::boolean, NULL::bigint,
        NULL::bigint, c.revision, c.key, c.value, c.created
        FROM change c WHERE c.revision > seen AND c.revision <= last
            AND c.key >= first AND (above IS NULL OR c.key < above)
        ORDER BY c.revision, c.n;
END $$;

CREATE OR REPLACE FUNCTION {SCHEMA}.about() RETURNS TABLE (format int, history text)
LANGUAGE sql STABLE {_RIGHTS} AS $$
    SELECT m.format, m.history FROM meta m;
$$;

REVOKE ALL ON ALL FUNCTIONS IN SCHEMA {SCHEMA} FROM PUBLIC;
"""

USED = (
    "about", "compact", "get_item", "grant_lease", "keep_lease", "list_items", "read_changes",
    "revoke_lease", "tick", "write_commits",
)  # fmt: skip
"""The functions that a user of the store calls. The others belong to them."""


def _call(name: str, values: int) -> str:
    return f"SELECT * FROM {SCHEMA}.{name}({', '.join(f'${n}' for n in range(1, values + 1))})"


WRITE_COMMITS = _call("write_commits", 12)
GRANT = _call("grant_lease", 5)
REVOKE = _call("revoke_lease", 4)
KEEP = _call("keep_lease", 5)
TICK = _call("tick", 5)
COMPACT = _call("compact", 4)
GET = _call("get_item", 4)
LIST = _call("list_items", 5)
LOG = _call("read_changes", 7)
ABOUT = _call("about", 0)
# By the catalogue itself: what a session has cached of it may be older than a lock that it got.
THERE = f"""SELECT EXISTS (SELECT 1 FROM pg_proc p JOIN pg_namespace n ON n.oid = p.pronamespace
    WHERE n.nspname = '{SCHEMA}' AND p.proname = 'about')"""


class Operations(NamedTuple):
    """The operations of one commit, a column each; the caller's order decides the conflict."""

    kinds: tuple[int, ...]
    keys: tuple[bytes, ...]
    datas: tuple[bytes | None, ...]
    leases: tuple[str | None, ...]
    revisions: tuple[int | None, ...]

    @property
    def size_bytes(self) -> int:
        """Bytes of keys and values."""
        return sum(map(len, self.keys)) + sum([len(data) for data in self.datas if data])


def operation_columns(conditions: Sequence[Condition], writes: Sequence[Write]) -> Operations:
    """The columns of a commit."""
    rows: list[tuple[int, bytes, bytes | None, str | None, int | None]] = []
    for condition in conditions:
        match condition:
            case At(key, revision):
                rows.append((AT, key, None, None, revision))
            case Absent(key):
                rows.append((ABSENT, key, None, None, None))
            case Present(key):
                rows.append((PRESENT, key, None, None, None))
    for write in writes:
        match write:
            case Put(key, value, lease):
                rows.append((PUT, key, value, lease, None))
            case Delete(key):
                rows.append((DELETE, key, None, None, None))
    if not rows:
        return Operations((), (), (), (), ())
    return Operations(*zip(*rows, strict=True))


def commit_columns(commits: Sequence[Operations]) -> tuple[list[object], ...]:
    """Several commits as `write_commits` takes them: where each begins, and all their columns."""
    firsts: list[object] = []
    columns: tuple[list[object], ...] = ([], [], [], [], [])
    for commit in commits:
        firsts.append(len(columns[0]) + 1)
        for column, values in zip(columns, commit, strict=True):
            column.extend(values)
    return firsts, *columns
