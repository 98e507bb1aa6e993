"""The tables of a PostgreSQL journal, and a batch as one call of a function.

`store_batch` locks the fence rows in shard order, checks every write, and writes: one statement for
the client, one round trip, one transaction. Inside the function each statement sees what is
committed when it starts. That matters behind a lock: a plain statement would go on with the
snapshot that it took before it waited (J2). Every cluster has a schema of its own.

Only `domicile.journals.postgres` uses this module. No write may check a fence without its row lock.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from hashlib import blake2b
from uuid import UUID

from domicile.core.ids import EntityKey
from domicile.journals.key_days import DAY_S
from domicile.ports.journal import BLIND, MOST_KEYS, Batch, Claim, Wanted, counted, placed

FORMAT = 3

DAYS_AHEAD = 3
"""For how many days that follow today the journal has places for keys, at best."""

DAY_PARTITION = "day_"

LOCK = 0x646F6D6A
"""The advisory lock of those who create or change tables; "domj" in ASCII."""

TODAY = f"SELECT floor(m.counted_s / {DAY_S})::int FROM meta m"
"""The day that keys get which come now."""

OK, FENCED, BUSY, CLASH = range(4)
"""What becomes of a shard's part of a batch, as a number: PostgreSQL finds an element of an array
at once only if all elements have one size."""


def _hold(how: str) -> str:
    """Lock the fence rows, in shard order, and say what each of them allows."""
    return f"""WITH held AS MATERIALIZED (
            SELECT f.* FROM unnest(roles, layouts, shards) AS c (role, layout, shard)
            JOIN fence f USING (role, layout, shard)
            ORDER BY f.role, f.layout, f.shard FOR NO KEY UPDATE OF f{how}
        )
        SELECT array_agg(CASE WHEN h.role IS NULL AND f.role IS NOT NULL THEN {BUSY}
                    WHEN h.epoch = c.epoch AND h.owner = claimant AND h.batch < number THEN {OK}
                    ELSE {FENCED} END ORDER BY c.n),
                array_agg(coalesce(h.epoch, f.epoch, 0) ORDER BY c.n),
                array_agg(coalesce(h.next, 0) ORDER BY c.n),
                array_agg(coalesce(h.n, 0) ORDER BY c.n),
                array_agg(coalesce(h.writes, 0) + 1 ORDER BY c.n)
            INTO states, newests, bases, fences, turns
            FROM unnest(roles, layouts, shards, epochs)
                WITH ORDINALITY AS c (role, layout, shard, epoch, n)
            LEFT JOIN fence f ON (f.role, f.layout, f.shard) = (c.role, c.layout, c.shard)
            LEFT JOIN held h ON (h.role, h.layout, h.shard) = (c.role, c.layout, c.shard);"""


TABLES = """
CREATE TABLE meta (
    format int NOT NULL,
    history text NOT NULL,
    counted_s double precision NOT NULL,  -- the time that processes have seen pass
    since int NOT NULL                    -- the day that the count began with
);
CREATE TABLE fence (
    role text COLLATE "C" NOT NULL,
    layout int NOT NULL,
    shard int NOT NULL,
    epoch bigint NOT NULL,
    owner text NOT NULL,
    next bigint NOT NULL DEFAULT 0,   -- the last offset of the shard
    batch bigint NOT NULL DEFAULT 0,  -- the last batch that wrote, or that settling used up
    void bigint NOT NULL DEFAULT 0,   -- the last batch that settling used up: it never wrote
    n int GENERATED ALWAYS AS IDENTITY,
    writes bigint NOT NULL DEFAULT 0, -- how many batches the shard has taken
    PRIMARY KEY (role, layout, shard)
) WITH (fillfactor = 50);
CREATE TABLE entity (
    entity uuid PRIMARY KEY,
    type text COLLATE "C" NOT NULL,
    id text COLLATE "C" NOT NULL,
    seq bigint NOT NULL,              -- how many events, saves and deletions it has had
    fence int,                        -- the number of its shard's fence
    last bigint NOT NULL DEFAULT 0,   -- which batch of its shard wrote it last
    deleted bigint NOT NULL DEFAULT 0,  -- the seq of its last deletion
    remembered bool NOT NULL DEFAULT false,
    state bytea                       -- of an entity without events
) WITH (fillfactor = 70);
-- Not by `last`: an index of it would make every write of an entity a change of all indexes.
CREATE INDEX entity_remembered ON entity (fence) WHERE remembered;
CREATE TABLE event (
    entity uuid NOT NULL,
    seq bigint NOT NULL,
    off bigint NOT NULL,              -- the event's place among those of its shard
    fence int NOT NULL,
    data bytea,                       -- NULL: the entity was deleted here
    PRIMARY KEY (entity, seq),
    UNIQUE (fence, off)
);
CREATE TABLE snapshot (
    entity uuid PRIMARY KEY,
    seq bigint NOT NULL,              -- of the last event in it
    data bytea NOT NULL
);
CREATE TABLE inbox (
    entity uuid NOT NULL,
    key text COLLATE "C" NOT NULL,
    day int NOT NULL,
    reply bytea,
    PRIMARY KEY (entity, key, day)
) PARTITION BY RANGE (day);
"""

WITHOUT_FUNCTIONS = """
DROP FUNCTION claim_shards;
DROP FUNCTION write_batch;
DROP FUNCTION settle_batch;
"""
"""First step from any older format: its processes write nothing more."""

FROM_1 = """
ALTER TABLE fence ADD n int GENERATED ALWAYS AS IDENTITY, ADD writes bigint NOT NULL DEFAULT 0;
ALTER TABLE entity ADD fence int, ADD last bigint NOT NULL DEFAULT 0,
    ADD deleted bigint NOT NULL DEFAULT 0, ADD remembered bool NOT NULL DEFAULT false,
    ADD state bytea;
CREATE INDEX entity_remembered ON entity (fence) WHERE remembered;
ALTER TABLE event RENAME TO event_1;
ALTER INDEX event_pkey RENAME TO event_1_pkey;
CREATE TABLE event (
    entity uuid NOT NULL,
    seq bigint NOT NULL,
    off bigint NOT NULL,
    fence int NOT NULL,
    data bytea,
    PRIMARY KEY (entity, seq),
    UNIQUE (fence, off)
);
INSERT INTO event (entity, seq, off, fence, data)
    SELECT v.entity, v.seq, v.off, f.n, v.data FROM event_1 v
    JOIN fence f ON f.role = v.role AND f.layout = 0 AND f.shard = v.shard;
UPDATE entity e SET fence = v.fence FROM event v WHERE v.entity = e.entity AND v.seq = e.seq;
CREATE TABLE snapshot (
    entity uuid PRIMARY KEY,
    seq bigint NOT NULL,
    data bytea NOT NULL
);
"""
"""From format 1 to 2; `event_1` stays until its events are counted."""

FROM_2 = "ALTER TABLE meta ADD counted_s double precision, ADD since int"
"""From format 2 to 3. Partitions are renamed, and the columns filled, before `ALL_FILLED`."""

ALL_FILLED = """ALTER TABLE meta ALTER counted_s SET NOT NULL;
ALTER TABLE meta ALTER since SET NOT NULL"""

LOST = "SELECT (SELECT count(*) FROM event_1) - (SELECT count(*) FROM event)"
"""How many events a migration has not taken along."""

FUNCTIONS = f"""
CREATE FUNCTION claim_shards(
    roles text[], layouts int[], shards int[], epochs bigint[], owners text[]
) RETURNS TABLE (n bigint, granted bool, newest bigint) LANGUAGE plpgsql AS $$
#variable_conflict use_column
BEGIN
    INSERT INTO fence AS f (role, layout, shard, epoch, owner)
        SELECT c.* FROM unnest(roles, layouts, shards, epochs, owners)
            AS c (role, layout, shard, epoch, owner)
        ORDER BY c.role, c.layout, c.shard
        ON CONFLICT ON CONSTRAINT fence_pkey DO UPDATE SET
            batch = 0, void = 0, epoch = excluded.epoch, owner = excluded.owner
        WHERE excluded.epoch > f.epoch;
    RETURN QUERY
        SELECT c.n, f.epoch = c.epoch AND f.owner = c.owner, f.epoch
        FROM unnest(roles, layouts, shards, epochs, owners)
            WITH ORDINALITY AS c (role, layout, shard, epoch, owner, n)
        JOIN fence f USING (role, layout, shard) ORDER BY c.n;
END $$;

CREATE FUNCTION store_batch(
    number bigint, roles text[], layouts int[], shards int[], epochs bigint[], claimant text,
    counts int[],
    of_claim int[], entities uuid[], types text[], ids text[], expecteds bigint[], rises int[],
    offsets int[], saved bytea[],
    of_event int[], places int[], event_offsets int[], datas bytea[],
    of_key int[], keys text[], replies bytea[],
    of_answer int[], answered text[], answers bytea[],
    of_snapshot int[], snapshot_seqs bigint[], snapshots bytea[],
    of_flag int[], flags bool[],
    of_deletion int[]
) RETURNS TABLE (n bigint, outcome text, newest bigint, seq bigint, off bigint)
LANGUAGE plpgsql AS $$
#variable_conflict use_column
DECLARE
    today int := ({TODAY});
    states int[];
    newests bigint[];
    bases bigint[];
    fences int[];
    turns bigint[];
    wrong_seqs int[];
    wrong_keys int[];
BEGIN
    -- A batch of several shards leaves out one whose row is held; a batch of one shard waits.
    IF cardinality(shards) > 1 THEN
        {_hold(" SKIP LOCKED")}
    ELSE
        {_hold("")}
    END IF;
    -- What does not fit.
    SELECT array_agg(w.n) INTO wrong_seqs
        FROM unnest(entities, expecteds) WITH ORDINALITY AS w (entity, expected, n)
        LEFT JOIN entity e USING (entity)
        WHERE w.expected <> {BLIND} AND w.expected <> coalesce(e.seq, 0);
    IF cardinality(of_snapshot) > 0 THEN
        SELECT wrong_seqs || array_agg(s.i) INTO wrong_seqs
            FROM unnest(of_snapshot, snapshot_seqs) AS s (i, seq)
            LEFT JOIN entity e ON e.entity = entities[s.i]
            WHERE s.seq > coalesce(e.seq, 0) + rises[s.i];
    END IF;
    SELECT array_agg(k.i) INTO wrong_keys
        FROM unnest(of_key, keys) AS k (i, key)
        JOIN inbox x ON x.entity = entities[k.i] AND x.key = k.key;
    IF cardinality(of_answer) > 0 THEN
        SELECT wrong_keys || array_agg(a.i) INTO wrong_keys
            FROM unnest(of_answer, answered) AS a (i, key)
            WHERE NOT EXISTS (SELECT 1 FROM inbox x
                WHERE x.entity = entities[a.i] AND x.key = a.key AND x.reply IS NULL);
    END IF;
    IF wrong_seqs || wrong_keys IS NOT NULL THEN
        SELECT array_agg(CASE WHEN states[i] = {OK} AND i = ANY (ARRAY(
                SELECT of_claim[w] FROM unnest(wrong_seqs || wrong_keys) w)) THEN {CLASH}
            ELSE states[i] END ORDER BY i) INTO states FROM generate_subscripts(states, 1) i;
    END IF;
    -- What fits.
    UPDATE fence f SET next = f.next + c.k, batch = number, writes = f.writes + 1
        FROM unnest(roles, layouts, shards, counts, states) AS c (role, layout, shard, k, state)
        WHERE (f.role, f.layout, f.shard) = (c.role, c.layout, c.shard) AND c.state = {OK};
    INSERT INTO entity AS e (entity, type, id, seq, fence, last, state)
        SELECT w.entity, w.type, w.id, w.k, fences[w.c],
            CASE WHEN w.k > 0 THEN turns[w.c] ELSE 0 END, w.state
        FROM unnest(of_claim, entities, types, ids, rises, saved)
            AS w (c, entity, type, id, k, state)
        WHERE states[w.c] = {OK}
        ON CONFLICT ON CONSTRAINT entity_pkey DO UPDATE SET
            seq = e.seq + excluded.seq, fence = excluded.fence,
            last = CASE WHEN excluded.seq > 0 THEN excluded.last ELSE e.last END,
            state = coalesce(excluded.state, e.state);
    INSERT INTO event (entity, seq, off, fence, data)
        SELECT e.entity, e.seq - rises[v.w] + v.j, bases[of_claim[v.w]] + v.o,
            fences[of_claim[v.w]], v.data
        FROM unnest(of_event, places, event_offsets, datas) AS v (w, j, o, data)
        JOIN entity e ON e.entity = entities[v.w]
        WHERE states[of_claim[v.w]] = {OK};
    INSERT INTO inbox (entity, key, day, reply)
        SELECT entities[k.i], k.key, today, k.reply
        FROM unnest(of_key, keys, replies) AS k (i, key, reply) WHERE states[of_claim[k.i]] = {OK};
    IF cardinality(of_answer) > 0 THEN
        UPDATE inbox x SET reply = a.reply
            FROM unnest(of_answer, answered, answers) AS a (i, key, reply)
            WHERE x.entity = entities[a.i] AND x.key = a.key AND states[of_claim[a.i]] = {OK};
    END IF;
    IF cardinality(of_snapshot) > 0 THEN
        INSERT INTO snapshot AS o (entity, seq, data)
            SELECT e.entity, s.seq, s.data
            FROM unnest(of_snapshot, snapshot_seqs, snapshots) AS s (i, seq, data)
            JOIN entity e ON e.entity = entities[s.i]
            WHERE states[of_claim[s.i]] = {OK} AND s.seq > e.deleted
            ON CONFLICT ON CONSTRAINT snapshot_pkey DO UPDATE SET
                seq = excluded.seq, data = excluded.data WHERE excluded.seq >= o.seq;
    END IF;
    IF cardinality(of_flag) > 0 THEN
        UPDATE entity e SET remembered = g.flag, last = turns[of_claim[g.i]]
            FROM unnest(of_flag, flags) AS g (i, flag)
            WHERE e.entity = entities[g.i] AND states[of_claim[g.i]] = {OK};
    END IF;
    -- A deletion is last: of what it takes away, its own write brings nothing here.
    IF cardinality(of_deletion) > 0 THEN
        DELETE FROM event v USING unnest(of_deletion) AS d (i)
            WHERE v.entity = entities[d.i] AND states[of_claim[d.i]] = {OK};
        DELETE FROM snapshot s USING unnest(of_deletion) AS d (i)
            WHERE s.entity = entities[d.i] AND states[of_claim[d.i]] = {OK};
        UPDATE entity e SET deleted = e.seq, remembered = false, state = NULL
            FROM unnest(of_deletion) AS d (i)
            WHERE e.entity = entities[d.i] AND states[of_claim[d.i]] = {OK};
        INSERT INTO event (entity, seq, off, fence)
            SELECT e.entity, e.seq, bases[of_claim[d.i]] + offsets[d.i], fences[of_claim[d.i]]
            FROM unnest(of_deletion) AS d (i) JOIN entity e ON e.entity = entities[d.i]
            WHERE states[of_claim[d.i]] = {OK};
    END IF;
    RETURN QUERY
        SELECT w.n, CASE states[w.c] WHEN {OK} THEN 'ok' WHEN {FENCED} THEN 'fenced'
                WHEN {BUSY} THEN 'busy' ELSE CASE WHEN w.n = ANY (wrong_seqs) THEN 'seq'
                WHEN w.n = ANY (wrong_keys) THEN 'key' ELSE 'busy' END END,
            newests[w.c], e.seq, bases[w.c] + w.o
        FROM unnest(of_claim, entities, offsets) WITH ORDINALITY AS w (c, entity, o, n)
        LEFT JOIN entity e USING (entity) ORDER BY w.n;
END $$;

CREATE FUNCTION settle_batch(
    number bigint, roles text[], layouts int[], shards int[], epochs bigint[], claimant text
) RETURNS TABLE (n bigint, outcome text, newest bigint, off bigint) LANGUAGE plpgsql AS $$
#variable_conflict use_column
BEGIN
    PERFORM 1 FROM unnest(roles, layouts, shards) AS c (role, layout, shard)
        JOIN fence f USING (role, layout, shard)
        ORDER BY f.role, f.layout, f.shard FOR NO KEY UPDATE OF f;
    -- The number is used up, so that a late batch writes nothing. The row remembers that it never
    -- wrote: a second settling, after a lost answer, must not take its number for a proof.
    UPDATE fence f SET batch = greatest(f.batch, number), void = number
        FROM unnest(roles, layouts, shards, epochs) AS c (role, layout, shard, epoch)
        WHERE (f.role, f.layout, f.shard) = (c.role, c.layout, c.shard)
            AND f.epoch = c.epoch AND f.owner = claimant
            AND (f.batch < number OR f.void = number);
    RETURN QUERY
        SELECT c.n, CASE WHEN f.epoch IS DISTINCT FROM c.epoch OR f.owner <> claimant THEN 'fenced'
                WHEN f.void = number THEN 'void' ELSE 'there' END,
            coalesce(f.epoch, 0), coalesce(f.next, 0)
        FROM unnest(roles, layouts, shards, epochs)
            WITH ORDINALITY AS c (role, layout, shard, epoch, n)
        LEFT JOIN fence f USING (role, layout, shard) ORDER BY c.n;
END $$;
"""

CLAIM = "SELECT n, granted, newest FROM claim_shards($1, $2, $3, $4, $5)"
# Without waiting: rows that another transaction holds are left out, missing ones are not.
# The function gets what is locked already, so it waits for none of them.
CLAIM_FREE = """WITH asked AS MATERIALIZED (
        SELECT * FROM unnest($1::text[], $2::int[], $3::int[], $4::bigint[], $5::text[])
            WITH ORDINALITY AS c (role, layout, shard, epoch, owner, n)
    ), held AS MATERIALIZED (
        SELECT f.role, f.layout, f.shard FROM asked JOIN fence f USING (role, layout, shard)
        ORDER BY f.role, f.layout, f.shard FOR NO KEY UPDATE OF f SKIP LOCKED
    ), free AS MATERIALIZED (
        SELECT a.* FROM asked a
        LEFT JOIN fence f USING (role, layout, shard) LEFT JOIN held h USING (role, layout, shard)
        WHERE h.role IS NOT NULL OR f.role IS NULL
    ), arrays AS MATERIALIZED (
        SELECT array_agg(role ORDER BY n) AS roles, array_agg(layout ORDER BY n) AS layouts,
            array_agg(shard ORDER BY n) AS shards, array_agg(epoch ORDER BY n) AS epochs,
            array_agg(owner ORDER BY n) AS owners, array_agg(n ORDER BY n) AS places
        FROM free
    )
    SELECT x.places[c.n] AS n, c.granted, c.newest
    FROM arrays x, claim_shards(x.roles, x.layouts, x.shards, x.epochs, x.owners) c"""
WRITE = f"""SELECT outcome, newest, seq, off
    FROM store_batch({", ".join(f"${n}" for n in range(1, 32))})"""
ERASE = """WITH gone AS (DELETE FROM snapshot WHERE entity = ANY($1::uuid[]))
    UPDATE inbox SET reply = NULL WHERE entity = ANY($1::uuid[])"""
SETTLE = "SELECT outcome, newest, off FROM settle_batch($1, $2, $3, $4, $5, $6)"
SEQS = """SELECT coalesce(e.seq, 0) FROM unnest($1::uuid[]) WITH ORDINALITY w (entity, n)
    LEFT JOIN entity e USING (entity) ORDER BY w.n"""

PAGE_EVENTS = 4_096
"""Most events of one entity in one page of a recovery."""

# Snapshots, states and events of a row count as a whole; a row that begins behind `max_bytes` is
# left out. The client cuts the last one.
RECOVER = f"""SELECT seq, deleted, newest, snapshot_seq, keys, before, seqs,
        CASE WHEN before < $4 OR before = 0 THEN state END AS state,
        CASE WHEN before < $4 OR before = 0 THEN snapshot END AS snapshot,
        CASE WHEN before < $4 OR before = 0 THEN data END AS data
    FROM (
        SELECT r.*, sum(r.size) OVER (ORDER BY r.n) - r.size AS before FROM (
            SELECT w.n, h.seq, h.deleted, h.state, s.seq AS snapshot_seq, s.data AS snapshot,
                k.keys, p.data, p.seqs,
                CASE WHEN h.state IS NULL THEN h.seq
                    ELSE (SELECT max(e.seq) FROM event e WHERE e.entity = w.entity) END AS newest,
                coalesce(length(h.state), 0) + coalesce(length(s.data), 0)
                    + coalesce(p.size, 0) AS size
            FROM unnest($1::uuid[], $2::bigint[], $3::bool[])
                WITH ORDINALITY w (entity, after, whole, n)
            LEFT JOIN entity h USING (entity)
            LEFT JOIN snapshot s ON s.entity = w.entity AND w.whole
            LEFT JOIN LATERAL (
                SELECT array_agg(v.data ORDER BY v.seq) AS data, sum(length(v.data)) AS size,
                    array_agg(v.seq ORDER BY v.seq) FILTER (WHERE h.state IS NOT NULL) AS seqs
                FROM (
                    SELECT e.seq, e.data, sum(length(e.data)) OVER (ORDER BY e.seq) AS total,
                        row_number() OVER (ORDER BY e.seq) AS place
                    FROM event e WHERE e.entity = w.entity
                        AND e.seq > greatest(w.after, h.deleted, s.seq)
                    ORDER BY e.seq LIMIT {PAGE_EVENTS}
                ) v WHERE v.total <= $4 OR v.place = 1
            ) p ON h.seq > w.after
            LEFT JOIN LATERAL (
                SELECT coalesce(array_agg(x.key), ARRAY[]::text[]) AS keys FROM (
                    SELECT x.key FROM inbox x WHERE x.entity = w.entity LIMIT {MOST_KEYS + 1}
                ) x
            ) k ON w.after = 0
        ) r
    ) q ORDER BY n"""

INBOX = """SELECT x.entity IS NOT NULL AS known, x.reply
    FROM unnest($1::uuid[], $2::text[]) WITH ORDINALITY w (entity, key, n)
    LEFT JOIN inbox x USING (entity, key) ORDER BY w.n"""

# One statement sees one state of the tables: the last offset and the events belong together.
SCAN = """SELECT f.next, v.off, v.seq, v.data, v.found, e.type, e.id FROM fence f
    LEFT JOIN LATERAL (
        SELECT * FROM (
            SELECT p.*, sum(coalesce(length(p.data), 0)) OVER (ORDER BY p.off) AS total,
                row_number() OVER (ORDER BY p.off) AS place, count(*) OVER () AS found
            FROM (
                SELECT * FROM event v WHERE v.fence = f.n AND v.off > $3 ORDER BY v.off LIMIT $4
            ) p
        ) q WHERE q.total <= $5 OR q.place = 1
    ) v ON true
    LEFT JOIN entity e ON e.entity = v.entity
    WHERE f.role = $1 AND f.layout = 0 AND f.shard = $2 ORDER BY v.off"""

OFFSETS = "SELECT shard, next FROM fence WHERE role = $1 AND layout = 0"

MARKS = """SELECT m.history, f.role, f.shard, f.next FROM meta m
    LEFT JOIN (unnest($1::text[], $2::int[]) AS w (role, shard) JOIN fence f USING (role, shard))
        ON f.layout = 0"""

REMEMBERED = """SELECT e.type, e.id, e.last FROM fence f JOIN entity e ON e.fence = f.n
    WHERE f.role = $1 AND f.layout = 0 AND f.shard = $2 AND e.remembered
        AND ($3::bigint IS NULL OR e.last < $3 OR (e.last = $3 AND (e.type, e.id) > ($4, $5)))
    ORDER BY e.last DESC, e.type, e.id LIMIT $6"""


_Row = tuple[object, ...]


@lru_cache(maxsize=65_536)
def entity_number(entity: EntityKey) -> UUID:
    """The key of an entity in all tables: no look-up is needed, and nobody can make two collide."""
    name = f"{entity.type}\0{entity.id}".encode()
    return UUID(bytes=blake2b(name, digest_size=16).digest())


def day_partition(day: int) -> str:
    """The partition with the keys of one day, as the journal counts days (`key_days`)."""
    return f"{DAY_PARTITION}{day:06}"


def create_partition(day: int) -> str:
    """The statement that creates the partition of a day, unless it is there.

    Attaching a table asks for a weaker lock than creating a partition: it waits for no reader of
    other days, as `pg_dump`, and keeps no write waiting.
    """
    name = day_partition(day)
    return f"""DO $$ BEGIN
        IF to_regclass('{name}') IS NULL THEN
            CREATE TABLE {name} (LIKE inbox INCLUDING ALL);
            ALTER TABLE inbox ATTACH PARTITION {name} FOR VALUES FROM ({day}) TO ({day + 1});
        END IF;
    END $$"""


def claim_arrays(claims: Sequence[Claim]) -> tuple[object, ...]:
    """The values of `CLAIM`."""
    return (*_rows(claims), [claim.owner for claim in claims])


def settle_arrays(batch: Batch) -> tuple[object, ...]:
    """The values of `SETTLE`."""
    return batch.number, *_rows(batch.claims), batch.claims[0].owner


def recover_arrays(wanted: Sequence[Wanted], max_bytes: int) -> tuple[object, ...]:
    """The values of `RECOVER`."""
    rows = [
        (entity_number(one.entity), one.after, one.snapshot and one.after == 0) for one in wanted
    ]
    return *_columns(rows, 3), max_bytes


def write_arrays(batch: Batch) -> tuple[object, ...]:
    """The values of `WRITE`. Places in arrays are counted from 1."""
    numbers = {claim.shard: number for number, claim in enumerate(batch.claims, 1)}
    counts = [0] * len(batch.claims)
    writes: list[_Row] = []
    events: list[_Row] = []
    keys: list[_Row] = []
    replies: list[_Row] = []
    snapshots: list[_Row] = []
    flags: list[_Row] = []
    deletions: list[_Row] = []
    for i, write in enumerate(batch.writes, 1):
        number, entity = numbers[write.shard], write.entity
        before = counts[number - 1]
        counts[number - 1] = offset = before + placed(write)
        keys += [(i, key, reply) for key, reply in write.inbox]
        replies += [(i, key, reply) for key, reply in write.replies]
        state = None
        if write.delete:
            deletions.append((i,))
        else:
            state = write.state
            events += [(i, j, before + j, event) for j, event in enumerate(write.events, 1)]
            if write.snapshot is not None:
                snapshots.append((i, *write.snapshot))
            if write.remember is not None:
                flags.append((i, write.remember))
        row = (number, entity_number(entity), *entity, write.expected, counted(write))
        writes.append((*row, offset, state))
    return (
        batch.number, *_rows(batch.claims), batch.claims[0].owner, counts,
        *_columns(writes, 8), *_columns(events, 4), *_columns(keys, 3), *_columns(replies, 3),
        *_columns(snapshots, 3), *_columns(flags, 2), *_columns(deletions, 1),
    )  # fmt: skip


def _rows(claims: Sequence[Claim]) -> tuple[list[object], ...]:
    rows = [(claim.shard.role, claim.layout, claim.shard.shard, claim.epoch) for claim in claims]
    return _columns(rows, 4)


def _columns(rows: Sequence[_Row], count: int) -> tuple[list[object], ...]:
    """Rows as one array for each column."""
    return tuple(map(list, zip(*rows, strict=True))) or tuple([] for _ in range(count))
