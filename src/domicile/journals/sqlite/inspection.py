"""What tools see of a SQLite journal, and a copy of it that is made while nodes write.

The journal's reading thread and `domicile journal copy` use it. It never writes to a journal that
nodes use.
"""

from __future__ import annotations

import os
import secrets
from contextlib import suppress
from pathlib import Path
from typing import Any

import apsw

from domicile.core.ids import Incarnation
from domicile.errors import ConfigError
from domicile.journals.sqlite.schema import APPLICATION_ID
from domicile.ports.journal import FenceSeen, JournalFigures, JournalNames

MOST = 100
"""Most faults of one kind that are told."""

_FIGURES = """SELECT history, (SELECT count(*) FROM entity WHERE cluster = c.n),
        count(v.pos), coalesce(sum(length(v.data)), 0)
    FROM cluster c LEFT JOIN fence f ON f.cluster = c.n LEFT JOIN event v ON v.fence = f.n
    WHERE c.n = ? GROUP BY c.n"""

_FENCES = """SELECT role, shard, layout, epoch, owner, next FROM fence WHERE cluster = ?
    ORDER BY role, layout, shard"""

# An entity with a whole state counts saves, too, and has no events for them.
_NUMBERS = f"""SELECT e.type, e.id, e.seq, e.deleted, count(v.seq)
    FROM entity e LEFT JOIN event v ON v.entity = e.n AND v.seq > e.deleted
    WHERE e.cluster = ? AND e.state IS NULL GROUP BY e.n
    HAVING count(v.seq) <> e.seq - e.deleted OR coalesce(max(v.seq), e.deleted) <> e.seq
    ORDER BY e.type, e.id LIMIT {MOST}"""

_STRAYS = f"""SELECT v.pos FROM event v JOIN fence f ON f.n = v.fence
    WHERE f.cluster = ? AND NOT EXISTS (
        SELECT 1 FROM entity e WHERE e.n = v.entity AND v.seq <= e.seq AND v.seq >= e.deleted)
    LIMIT {MOST}"""

# A deletion takes offsets away, but its own event stays until a later one.
_OFFSETS = f"""SELECT f.role, f.shard, f.next, count(v.pos), coalesce(max(v.off), 0)
    FROM fence f LEFT JOIN event v ON v.fence = f.n WHERE f.cluster = ? GROUP BY f.n
    HAVING coalesce(max(v.off), 0) <> f.next OR (count(v.pos) <> f.next
        AND NOT EXISTS (SELECT 1 FROM entity e WHERE e.fence = f.n AND e.deleted > 0))
    ORDER BY f.role, f.shard LIMIT {MOST}"""

_SNAPSHOTS = f"""SELECT e.type, e.id, s.seq, e.seq FROM snapshot s JOIN entity e ON e.n = s.entity
    WHERE e.cluster = ? AND (s.seq > e.seq OR s.seq <= e.deleted)
    ORDER BY e.type, e.id LIMIT {MOST}"""


def seen_figures(connection: Any, cluster: int | None) -> JournalFigures | None:
    """As `InspectableJournal.figures`."""
    rows = connection.execute(_FIGURES, (cluster,)).fetchall()
    if not rows:
        return None
    [(history, entities, events, size)] = rows
    fences = seen_fences(connection, cluster)
    version = connection.pragma("user_version")
    return JournalFigures("sqlite", version, history, entities, events, size, tuple(fences))


def seen_fences(connection: Any, cluster: int | None) -> list[FenceSeen]:
    """As `InspectableJournal.fences`."""
    return [
        FenceSeen(role, shard, layout, epoch, Incarnation(owner), offset)
        for role, shard, layout, epoch, owner, offset in connection.execute(_FENCES, (cluster,))
    ]


def seen_names(connection: Any, cluster: int | None) -> JournalNames:
    """As `InspectableJournal.names`."""
    clusters = connection.execute("SELECT name FROM cluster ORDER BY name").fetchall()
    types = connection.execute(
        "SELECT DISTINCT type FROM entity WHERE cluster = ? ORDER BY type", (cluster,)
    ).fetchall()
    return JournalNames(tuple(one for (one,) in clusters), tuple(one for (one,) in types))


def seen_faults(connection: Any, cluster: int | None) -> list[str]:
    """As `InspectableJournal.faults`."""
    found = [
        f"the file: {text}" for (text,) in connection.execute("PRAGMA quick_check") if text != "ok"
    ]
    for type, id, seq, deleted, count in connection.execute(_NUMBERS, (cluster,)):
        found.append(f"{type} {id!r} should have events {deleted + 1} to {seq}, and has {count}")
    for (pos,) in connection.execute(_STRAYS, (cluster,)):
        found.append(f"the event at place {pos} of the file belongs to no entity that knows it")
    for role, shard, offset, count, last in connection.execute(_OFFSETS, (cluster,)):
        found.append(
            f"shard {role}/{shard} should end at offset {offset}, and has {count} events up to "
            f"offset {last}"
        )
    for type, id, at, seq in connection.execute(_SNAPSHOTS, (cluster,)):
        found.append(f"{type} {id!r} has a snapshot of event {at}, and its last event is {seq}")
    return found


def copy_journal_file(path: Path, to: Path) -> None:
    """Copy a journal as of one moment, with another history, while nodes write to it (J11).

    The copy appears under its name when it is whole and on the disk.
    """
    if to.exists():
        raise ConfigError(f"{to} is there already; name a file that is not, or remove it")
    part = to.with_name(to.name + ".part")
    try:
        source: Any = apsw.Connection(str(path), flags=apsw.SQLITE_OPEN_READWRITE)
    except apsw.Error as error:
        raise ConfigError(f"there is no journal at {path} that can be read ({error})") from error
    try:
        if source.pragma("application_id") != APPLICATION_ID:
            raise ConfigError(f"{path} is not a journal; name the file that ends in .journal")
        to.parent.mkdir(parents=True, exist_ok=True)
        part.unlink(missing_ok=True)
        source.execute("VACUUM INTO ?", (str(part),))
        copy: Any = apsw.Connection(str(part), flags=apsw.SQLITE_OPEN_READWRITE)
        try:
            names = copy.execute("SELECT n FROM cluster").fetchall()
            copy.executemany(
                "UPDATE cluster SET history = ? WHERE n = ?",
                [(secrets.token_hex(16), n) for (n,) in names],
            )
        finally:
            copy.close()
        # SQLite does not wait for the disk when it writes such a copy.
        for place in (part, part.parent):
            handle = os.open(place, os.O_RDONLY)
            try:
                os.fsync(handle)
            finally:
                os.close(handle)
        os.rename(part, to)
    except (apsw.Error, OSError) as error:
        with suppress(OSError):
            part.unlink(missing_ok=True)
        raise ConfigError(
            f"{path} can't be copied to {to} ({error}): look whether there is room for it, and "
            "whether this user may write there; nothing was left behind"
        ) from error
    except BaseException:
        part.unlink(missing_ok=True)
        raise
    finally:
        source.close()
