"""What tools see of a PostgreSQL journal. Only `domicile.journals.postgres` uses it; it reads."""

from __future__ import annotations

from typing import TYPE_CHECKING

from domicile.core.ids import Incarnation
from domicile.ports.journal import FenceSeen, JournalFigures, JournalNames

if TYPE_CHECKING:
    from domicile.postgres.sessions import Connection

_CLUSTERS = """SELECT left(n.nspname, -length('_journal')) FROM pg_namespace n
    WHERE n.nspname LIKE '%\\_journal' AND to_regclass(format('%I.fence', n.nspname)) IS NOT NULL
    ORDER BY 1"""

MOST = 100
"""Most faults of one kind that are told."""

LOOK_S = 3_600.0
"""Seconds that a look at all events may take."""

_FIGURES = """SELECT format, history, (SELECT count(*) FROM entity) AS entities, v.events, v.size
    FROM meta, (SELECT count(*) AS events, coalesce(sum(length(data)), 0)::bigint AS size
        FROM event) v"""

_FENCES = """SELECT role, shard, layout, epoch, owner, next FROM fence
    ORDER BY role, layout, shard"""

# An entity with a whole state counts saves, too, and has no events for them.
_NUMBERS = f"""SELECT e.type, e.id, e.seq, e.deleted, count(v.seq) AS events
    FROM entity e LEFT JOIN event v ON v.entity = e.entity AND v.seq > e.deleted
    WHERE e.state IS NULL GROUP BY e.entity
    HAVING count(v.seq) <> e.seq - e.deleted OR coalesce(max(v.seq), e.deleted) <> e.seq
    ORDER BY e.type, e.id LIMIT {MOST}"""

_STRAYS = f"""SELECT v.off, v.fence FROM event v WHERE NOT EXISTS (
        SELECT 1 FROM entity e
        WHERE e.entity = v.entity AND v.seq <= e.seq AND v.seq >= e.deleted)
    LIMIT {MOST}"""

# A deletion takes offsets away, but its own event stays until a later one.
_OFFSETS = f"""SELECT f.role, f.shard, f.next, count(v.off) AS events,
        coalesce(max(v.off), 0) AS last
    FROM fence f LEFT JOIN event v ON v.fence = f.n GROUP BY f.role, f.layout, f.shard
    HAVING coalesce(max(v.off), 0) <> f.next OR (count(v.off) <> f.next
        AND NOT EXISTS (SELECT 1 FROM entity e WHERE e.fence = f.n AND e.deleted > 0))
    ORDER BY f.role, f.shard LIMIT {MOST}"""

_SNAPSHOTS = f"""SELECT e.type, e.id, s.seq AS at, e.seq
    FROM snapshot s JOIN entity e USING (entity) WHERE s.seq > e.seq OR s.seq <= e.deleted
    ORDER BY e.type, e.id LIMIT {MOST}"""


async def seen_tables(connection: Connection) -> JournalFigures:
    """As `InspectableJournal.figures`."""
    async with connection.transaction(isolation="repeatable_read", readonly=True):
        row = await connection.fetchrow(_FIGURES, timeout=LOOK_S)
        fences = await fence_rows(connection)
    assert row is not None
    return JournalFigures(
        "postgresql", row["format"], row["history"], row["entities"], row["events"], row["size"],
        tuple(fences),
    )  # fmt: skip


async def fence_rows(connection: Connection) -> list[FenceSeen]:
    """As `InspectableJournal.fences`."""
    return [
        FenceSeen(
            one["role"], one["shard"], one["layout"], one["epoch"], Incarnation(one["owner"]),
            one["next"],
        )
        for one in await connection.fetch(_FENCES, timeout=LOOK_S)
    ]  # fmt: skip


async def known_names(connection: Connection) -> JournalNames:
    """As `InspectableJournal.names`."""
    types = await connection.fetch("SELECT DISTINCT type FROM entity ORDER BY type", timeout=LOOK_S)
    return JournalNames(tuple(await known_clusters(connection)), tuple(one[0] for one in types))


async def known_clusters(connection: Connection) -> list[str]:
    """The clusters that have a journal in the database."""
    rows = await connection.fetch(_CLUSTERS)
    return [row[0] for row in rows]


async def wrong_tables(connection: Connection) -> list[str]:
    """As `InspectableJournal.faults`."""
    found: list[str] = []
    async with connection.transaction(isolation="repeatable_read", readonly=True):
        for row in await connection.fetch(_NUMBERS, timeout=LOOK_S):
            found.append(
                f"{row['type']} {row['id']!r} should have events {row['deleted'] + 1} to "
                f"{row['seq']}, and has {row['events']}"
            )
        for row in await connection.fetch(_STRAYS, timeout=LOOK_S):
            found.append(
                f"the event at offset {row['off']} of fence {row['fence']} belongs to no entity "
                "that knows it"
            )
        for row in await connection.fetch(_OFFSETS, timeout=LOOK_S):
            found.append(
                f"shard {row['role']}/{row['shard']} should end at offset {row['next']}, and has "
                f"{row['events']} events up to offset {row['last']}"
            )
        for row in await connection.fetch(_SNAPSHOTS, timeout=LOOK_S):
            found.append(
                f"{row['type']} {row['id']!r} has a snapshot of event {row['at']}, and its last "
                f"event is {row['seq']}"
            )
    return found
