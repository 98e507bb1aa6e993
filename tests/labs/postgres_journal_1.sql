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
        WITH held AS MATERIALIZED (
            SELECT f.* FROM unnest(roles, layouts, shards) AS c (role, layout, shard)
            JOIN fence f USING (role, layout, shard)
            ORDER BY f.role, f.layout, f.shard FOR NO KEY UPDATE OF f SKIP LOCKED
        )
        SELECT array_agg(CASE WHEN h.role IS NULL AND f.role IS NOT NULL THEN 2
                    WHEN h.epoch = c.epoch AND h.owner = claimant AND h.batch < number THEN 0
                    ELSE 1 END ORDER BY c.n),
                array_agg(coalesce(h.epoch, f.epoch, 0) ORDER BY c.n),
                array_agg(coalesce(h.next, 0) ORDER BY c.n)
            INTO states, newests, bases
            FROM unnest(roles, layouts, shards, epochs)
                WITH ORDINALITY AS c (role, layout, shard, epoch, n)
            LEFT JOIN fence f ON (f.role, f.layout, f.shard) = (c.role, c.layout, c.shard)
            LEFT JOIN held h ON (h.role, h.layout, h.shard) = (c.role, c.layout, c.shard);
    ELSE
        WITH held AS MATERIALIZED (
            SELECT f.* FROM unnest(roles, layouts, shards) AS c (role, layout, shard)
            JOIN fence f USING (role, layout, shard)
            ORDER BY f.role, f.layout, f.shard FOR NO KEY UPDATE OF f
        )
        SELECT array_agg(CASE WHEN h.role IS NULL AND f.role IS NOT NULL THEN 2
                    WHEN h.epoch = c.epoch AND h.owner = claimant AND h.batch < number THEN 0
                    ELSE 1 END ORDER BY c.n),
                array_agg(coalesce(h.epoch, f.epoch, 0) ORDER BY c.n),
                array_agg(coalesce(h.next, 0) ORDER BY c.n)
            INTO states, newests, bases
            FROM unnest(roles, layouts, shards, epochs)
                WITH ORDINALITY AS c (role, layout, shard, epoch, n)
            LEFT JOIN fence f ON (f.role, f.layout, f.shard) = (c.role, c.layout, c.shard)
            LEFT JOIN held h ON (h.role, h.layout, h.shard) = (c.role, c.layout, c.shard);
    END IF;
    -- What does not fit.
    SELECT array_agg(w.n) INTO wrong_seqs
        FROM unnest(entities, expecteds) WITH ORDINALITY AS w (entity, expected, n)
        LEFT JOIN entity e USING (entity)
        WHERE w.expected <> -1 AND w.expected <> coalesce(e.seq, 0);
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
        SELECT array_agg(CASE WHEN states[i] = 0 AND i = ANY (ARRAY(
                SELECT of_claim[w] FROM unnest(wrong_seqs || wrong_keys) w)) THEN 3
            ELSE states[i] END ORDER BY i) INTO states FROM generate_subscripts(states, 1) i;
    END IF;
    -- What fits.
    UPDATE fence f SET next = f.next + c.k, batch = number
        FROM unnest(roles, layouts, shards, counts, states) AS c (role, layout, shard, k, state)
        WHERE (f.role, f.layout, f.shard) = (c.role, c.layout, c.shard) AND c.state = 0;
    INSERT INTO entity AS e (entity, type, id, seq)
        SELECT w.entity, w.type, w.id, w.k
        FROM unnest(of_claim, entities, types, ids, events) AS w (c, entity, type, id, k)
        WHERE states[w.c] = 0
        ON CONFLICT ON CONSTRAINT entity_pkey DO UPDATE SET seq = e.seq + excluded.seq;
    INSERT INTO event (entity, seq, role, shard, off, data)
        SELECT e.entity, e.seq - events[v.w] + v.j, roles[of_claim[v.w]], shards[of_claim[v.w]],
            bases[of_claim[v.w]]
                + row_number() OVER (PARTITION BY of_claim[v.w] ORDER BY v.w, v.j), v.data
        FROM unnest(of_event, places, datas) AS v (w, j, data)
        JOIN entity e ON e.entity = entities[v.w]
        WHERE states[of_claim[v.w]] = 0;
    INSERT INTO inbox (entity, key, day, reply)
        SELECT entities[k.i], k.key, today, k.reply
        FROM unnest(of_key, keys, replies) AS k (i, key, reply) WHERE states[of_claim[k.i]] = 0;
    IF cardinality(of_answer) > 0 THEN
        UPDATE inbox x SET reply = a.reply
            FROM unnest(of_answer, answered, answers) AS a (i, key, reply)
            WHERE x.entity = entities[a.i] AND x.key = a.key AND states[of_claim[a.i]] = 0;
    END IF;
    RETURN QUERY
        SELECT w.n, CASE states[w.c] WHEN 0 THEN 'ok' WHEN 1 THEN 'fenced'
                WHEN 2 THEN 'busy' ELSE CASE WHEN w.n = ANY (wrong_seqs) THEN 'seq'
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
