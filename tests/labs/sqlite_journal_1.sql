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
