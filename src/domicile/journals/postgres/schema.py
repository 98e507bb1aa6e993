"""The tables of a PostgreSQL journal, and a batch as one call of a function.

`write_batch` locks the fence rows in shard order, checks every write, and writes: one statement for
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
from domicile.ports.journal import BLIND, Batch, Claim

FORMAT = 1

KEPT_DAYS = 7
"""For how many whole days the journal remembers the keys of asks."""

LOCK = 0x646F6D6A
"""The advisory lock of those who create or change tables; "domj" in ASCII."""

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
                array_agg(coalesce(h.next, 0) ORDER BY c.n)
            INTO states, newests, bases
            FROM unnest(roles, layouts, shards, epochs)
                WITH ORDINALITY AS c (role, layout, shard, epoch, n)
            LEFT JOIN fence f ON (f.role, f.layout, f.shard) = (c.role, c.layout, c.shard)
            LEFT JOIN held h ON (h.role, h.layout, h.shard) = (c.role, c.layout, c.shard);"""


TABLES = f"""
CREATE TABLE meta (
    format int NOT NULL,
    history text NOT NULL
);
CREATE TABLE fence (
    role text COLLATE "C" NOT NULL,
    layout int NOT NULL,
    shard int NOT NULL,
    epoch bigint NOT NULL,
    owner text NOT NULL,
    next bigint NOT NULL DEFAULT 0,   -- how many events the shard has
    batch bigint NOT NULL DEFAULT 0,  -- the last batch that wrote, or that settling used up
    void bigint NOT NULL DEFAULT 0,   -- the last batch that settling used up: it never wrote
    PRIMARY KEY (role, layout, shard)
) WITH (fillfactor = 50);
CREATE TABLE entity (
    entity uuid PRIMARY KEY,
    type text COLLATE "C" NOT NULL,
    id text COLLATE "C" NOT NULL,
    seq bigint NOT NULL               -- how many events it has
) WITH (fillfactor = 70);
CREATE TABLE event (
    entity uuid NOT NULL,
    seq bigint NOT NULL,
    role text COLLATE "C" NOT NULL,
    shard int NOT NULL,
    off bigint NOT NULL,              -- the event's place among those of its shard
    data bytea NOT NULL,
    PRIMARY KEY (entity, seq)
);
CREATE TABLE inbox (
    entity uuid NOT NULL,
    key text COLLATE "C" NOT NULL,
    day int NOT NULL,
    reply bytea,
    PRIMARY KEY (entity, key, day)
) PARTITION BY RANGE (day);

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

CREATE FUNCTION write_batch(
    number bigint, roles text[], layouts int[], shards int[], epochs bigint[], claimant text,
    counts int[],
    of_claim int[], entities uuid[], types text[], ids text[], expecteds bigint[], events int[],
    of_event int[], places int[], datas bytea[],
    of_key int[], keys text[], replies bytea[],
    of_answer int[], answered text[], answers bytea[]
) RETURNS TABLE (n bigint, outcome text, newest bigint, seq bigint, off bigint)
LANGUAGE plpgsql AS $$
#variable_conflict use_column
DECLARE
    today int := extract(epoch FROM clock_timestamp())::bigint / 86400;
    states int[];
    newests bigint[];
    bases bigint[];
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
    UPDATE fence f SET next = f.next + c.k, batch = number
        FROM unnest(roles, layouts, shards, counts, states) AS c (role, layout, shard, k, state)
        WHERE (f.role, f.layout, f.shard) = (c.role, c.layout, c.shard) AND c.state = {OK};
    INSERT INTO entity AS e (entity, type, id, seq)
        SELECT w.entity, w.type, w.id, w.k
        FROM unnest(of_claim, entities, types, ids, events) AS w (c, entity, type, id, k)
        WHERE states[w.c] = {OK}
        ON CONFLICT ON CONSTRAINT entity_pkey DO UPDATE SET seq = e.seq + excluded.seq;
    INSERT INTO event (entity, seq, role, shard, off, data)
        SELECT e.entity, e.seq - events[v.w] + v.j, roles[of_claim[v.w]], shards[of_claim[v.w]],
            bases[of_claim[v.w]]
                + row_number() OVER (PARTITION BY of_claim[v.w] ORDER BY v.w, v.j), v.data
        FROM unnest(of_event, places, datas) AS v (w, j, data)
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
    RETURN QUERY
        SELECT w.n, CASE states[w.c] WHEN {OK} THEN 'ok' WHEN {FENCED} THEN 'fenced'
                WHEN {BUSY} THEN 'busy' ELSE CASE WHEN w.n = ANY (wrong_seqs) THEN 'seq'
                WHEN w.n = ANY (wrong_keys) THEN 'key' ELSE 'busy' END END,
            newests[w.c], e.seq,
            bases[w.c] + sum(w.k) OVER (PARTITION BY w.c ORDER BY w.n)::bigint
        FROM unnest(of_claim, entities, events) WITH ORDINALITY AS w (c, entity, k, n)
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

CLAIM = "SELECT granted, newest FROM claim_shards($1, $2, $3, $4, $5)"
WRITE = f"""SELECT outcome, newest, seq, off
    FROM write_batch({", ".join(f"${n}" for n in range(1, 23))})"""
SETTLE = "SELECT outcome, newest, off FROM settle_batch($1, $2, $3, $4, $5, $6)"
SEQS = """SELECT coalesce(e.seq, 0) FROM unnest($1::uuid[]) WITH ORDINALITY w (entity, n)
    LEFT JOIN entity e USING (entity) ORDER BY w.n"""

PAGE_EVENTS = 4_096
"""Most events of one entity in one page of a recovery."""

RECOVER = f"""SELECT w.n, h.seq, p.data, p.last
    FROM unnest($1::uuid[], $2::bigint[]) WITH ORDINALITY w (entity, after, n)
    LEFT JOIN entity h USING (entity)
    LEFT JOIN LATERAL (
        SELECT array_agg(v.data ORDER BY v.seq) AS data, max(v.seq) AS last FROM (
            SELECT e.seq, e.data, sum(length(e.data)) OVER (ORDER BY e.seq) AS total
            FROM event e WHERE e.entity = w.entity AND e.seq > w.after
            ORDER BY e.seq LIMIT {PAGE_EVENTS}
        ) v WHERE v.total <= $3 OR v.seq = w.after + 1
    ) p ON h.seq > w.after
    ORDER BY w.n"""

INBOX = """SELECT x.entity IS NOT NULL AS known, x.reply
    FROM unnest($1::uuid[], $2::text[]) WITH ORDINALITY w (entity, key, n)
    LEFT JOIN inbox x USING (entity, key) ORDER BY w.n"""


@lru_cache(maxsize=65_536)
def entity_number(entity: EntityKey) -> UUID:
    """The key of an entity in all tables: no look-up is needed, and nobody can make two collide."""
    name = f"{entity.type}\0{entity.id}".encode()
    return UUID(bytes=blake2b(name, digest_size=16).digest())


def day_partition(day: int) -> str:
    """The partition with the keys of one day, counted from 1970."""
    return f"inbox_{day:06}"


def create_partition(day: int) -> str:
    """The statement that creates the partition of a day."""
    return (
        f"CREATE TABLE IF NOT EXISTS {day_partition(day)} PARTITION OF inbox "
        f"FOR VALUES FROM ({day}) TO ({day + 1})"
    )


def claim_arrays(claims: Sequence[Claim]) -> tuple[object, ...]:
    """The values of `CLAIM`."""
    return (*_rows(claims), [claim.owner for claim in claims])


def settle_arrays(batch: Batch) -> tuple[object, ...]:
    """The values of `SETTLE`."""
    return batch.number, *_rows(batch.claims), batch.claims[0].owner


def write_arrays(batch: Batch) -> tuple[object, ...]:
    """The values of `WRITE`. Places in arrays are counted from 1."""
    numbers = {claim.shard: number for number, claim in enumerate(batch.claims, 1)}
    counts = [0] * len(batch.claims)
    writes: list[tuple[object, ...]] = []
    events: list[tuple[object, ...]] = []
    keys: list[tuple[object, ...]] = []
    replies: list[tuple[object, ...]] = []
    for i, write in enumerate(batch.writes, 1):
        number, count = numbers[write.shard], len(write.events)
        counts[number - 1] += count
        entity = write.entity
        writes.append((number, entity_number(entity), *entity, write.expected, count))
        events += [(i, j, event) for j, event in enumerate(write.events, 1)]
        keys += [(i, key, reply) for key, reply in write.inbox]
        replies += [(i, key, reply) for key, reply in write.replies]
    return (
        batch.number, *_rows(batch.claims), batch.claims[0].owner, counts,
        *_columns(writes, 6), *_columns(events, 3), *_columns(keys, 3), *_columns(replies, 3),
    )  # fmt: skip


def _rows(claims: Sequence[Claim]) -> tuple[list[object], ...]:
    rows = [(claim.shard.role, claim.layout, claim.shard.shard, claim.epoch) for claim in claims]
    return _columns(rows, 4)


def _columns(rows: Sequence[tuple[object, ...]], count: int) -> tuple[list[object], ...]:
    """Rows as one array for each column."""
    return tuple(map(list, zip(*rows, strict=True))) or tuple([] for _ in range(count))
