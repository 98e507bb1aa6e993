"""What many entities were, read from the file together (J9).

The journal's reading thread calls it inside of a transaction. Three statements serve a whole group
of small entities, and each returns one row: with a row for each event or entity the thread would
need the interpreter's lock for each of them. Entities with more than fits get statements of their
own. Nothing here may write.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import msgspec

from domicile.ports.journal import MOST_KEYS, Recovered, Wanted

PAGE_EVENTS = 4_096
"""Most events of one entity in one page."""

_HEADS = f"""SELECT json_group_array(json_array(coalesce(e.n, 0), coalesce(e.seq, 0),
        coalesce(e.deleted, 0), coalesce(e.bytes, 0), coalesce(iif(e.state IS NULL, e.seq,
            (SELECT max(v.seq) FROM event v WHERE v.entity = e.n)), 0),
        length(e.state), s.seq, length(s.data),
        iif(j.value->>2 = 0, json((SELECT json_group_array(key) FROM (
            SELECT x.key FROM inbox x WHERE x.entity = e.n LIMIT {MOST_KEYS + 1}))), NULL)
    ) ORDER BY j.key)
    FROM json_each(?1) j
    LEFT JOIN entity e ON e.cluster = ?2 AND e.type = j.value->>0 AND e.id = j.value->>1
    LEFT JOIN snapshot s ON s.entity = e.n AND j.value->>3"""

_STATES = """SELECT CAST(group_concat(data, '') AS BLOB) FROM (
    SELECT e.state AS data FROM json_each(?) j CROSS JOIN entity e ON e.n = j.value ORDER BY j.key
)"""

_SNAPSHOTS = """SELECT CAST(group_concat(data, '') AS BLOB) FROM (
    SELECT s.data FROM json_each(?) j CROSS JOIN snapshot s ON s.entity = j.value ORDER BY j.key
)"""

_EVENTS = """SELECT json_group_array(length(data)), CAST(group_concat(data, '') AS BLOB) FROM (
    SELECT v.data FROM json_each(?) j
    CROSS JOIN event v ON v.entity = j.value->>0 AND v.seq > j.value->>1 ORDER BY j.key, v.seq
)"""

_PAGE = """SELECT json_group_array(length(data)), CAST(group_concat(data, '') AS BLOB), max(seq)
    FROM (SELECT seq, data FROM event WHERE entity = ? AND seq > ? ORDER BY seq LIMIT ?)"""

_FITS = """SELECT count(*) FROM (
    SELECT sum(length(data)) OVER (ORDER BY seq) AS total
    FROM event WHERE entity = ? AND seq > ? ORDER BY seq LIMIT ?
) WHERE total <= ?"""


def recover_group(
    connection: Any, cluster: int | None, wanted: Sequence[Wanted], max_bytes: int
) -> list[Recovered]:
    """As `Journal.recover`; the transaction is the caller's."""
    rows = [(*one.entity, one.after, one.snapshot and one.after == 0) for one in wanted]
    [(text,)] = connection.execute(_HEADS, (_json(rows), cluster)).fetchall()
    heads = msgspec.json.decode(text, type=list[_Head])
    room = _Room(connection, max_bytes)
    parts = [room.part(one, head) for one, head in zip(wanted, heads, strict=True)]
    return list(_put_together(connection, parts))


class _Head(msgspec.Struct, array_like=True, gc=False):
    """What the file says of one entity; zeros if it is not there."""

    n: int
    seq: int
    deleted: int
    event_bytes: int
    newest: int
    """The number of its last event."""
    state_bytes: int | None
    snapshot_seq: int | None
    snapshot_bytes: int | None
    keys: list[str] | None


class _Part(msgspec.Struct, gc=False):
    """What an answer holds of one entity."""

    n: int
    seq: int
    more: bool
    keys: tuple[str, ...] | None = None
    state_bytes: int | None = None
    snapshot: tuple[int, int] | None = None
    """Its number, and how many bytes it has."""
    after: int = 0
    count: int = 0
    """How many events after `after` are read together with those of others."""
    events: tuple[bytes, ...] = ()
    """Events that were read alone."""


class _Room:
    """Decides how much of each entity an answer holds: about so many bytes in all."""

    def __init__(self, connection: Any, max_bytes: int) -> None:
        self._connection = connection
        self._left = max_bytes
        self._is_first = True

    def part(self, wanted: Wanted, head: _Head) -> _Part:
        """What there is room for."""
        after = wanted.after
        known = head.keys
        keys = None if known is None or len(known) > MOST_KEYS else tuple(known)
        if head.seq <= after:
            return _Part(head.n, after, False, keys)
        part = _Part(head.n, head.seq, False, keys, head.state_bytes)
        if head.snapshot_seq is not None:
            part.snapshot = (head.snapshot_seq, head.snapshot_bytes or 0)
        is_begun = head.state_bytes is not None or part.snapshot is not None
        if is_begun and not self._take((head.state_bytes or 0) + (head.snapshot_bytes or 0)):
            return _Part(head.n, after, True)
        part.after = max(after, head.deleted, head.snapshot_seq or 0)
        count = head.newest - part.after
        if count > 0:
            if (
                head.state_bytes is None
                and count <= PAGE_EVENTS
                and self._take(head.event_bytes, surely=True)
            ):
                part.count = count
            else:
                self._page(part, head, count)
                if not (part.events or is_begun):
                    return _Part(head.n, after, True)
        return part

    def _page(self, part: _Part, head: _Head, count: int) -> None:
        """Read as many events of one entity as there is room for."""
        count = min(count, PAGE_EVENTS)
        asked = (part.n, part.after, count, self._left)
        [(fits,)] = self._connection.execute(_FITS, asked).fetchall()
        last: int | None = part.after
        if fits or self._is_first:
            page = (part.n, part.after, max(1, fits))
            [(sizes, data, last)] = self._connection.execute(_PAGE, page).fetchall()
            part.events = tuple(_cut(data, msgspec.json.decode(sizes, type=list[int])))
            self._left -= len(data or b"")
            self._is_first = False
        part.more = (last or part.after) < head.newest
        if part.more:
            part.seq = last or part.after

    def _take(self, size: int, *, surely: bool = False) -> bool:
        """Take so many bytes, if there is room; the first piece always finds some."""
        if size > self._left and (surely or not self._is_first):
            return False
        self._left -= size
        self._is_first = False
        return True


def _put_together(connection: Any, parts: Sequence[_Part]) -> Iterator[Recovered]:
    states = _pieces(
        connection, _STATES,
        [(part.n, part.state_bytes) for part in parts if part.state_bytes is not None],
    )  # fmt: skip
    snapshots = _pieces(
        connection, _SNAPSHOTS,
        [(part.n, part.snapshot[1]) for part in parts if part.snapshot is not None],
    )  # fmt: skip
    events: list[bytes] = []
    together = [(part.n, part.after) for part in parts if part.count]
    if together:
        [(sizes, data)] = connection.execute(_EVENTS, (_json(together),)).fetchall()
        events = list(_cut(data, msgspec.json.decode(sizes, type=list[int])))
    at = 0
    for part in parts:
        own = part.events
        if part.count:
            own = tuple(events[at : at + part.count])
            at += part.count
        yield Recovered(
            own,
            part.seq,
            part.more,
            None if part.snapshot is None else (part.snapshot[0], next(snapshots)),
            None if part.state_bytes is None else next(states),
            part.keys,
        )
    assert at == len(events), "an entity has other events than its row says"


def _pieces(connection: Any, query: str, rows: Sequence[tuple[int, int]]) -> Iterator[bytes]:
    """The bytes of some entities, which have these sizes."""
    if not rows:
        return iter(())
    [(data,)] = connection.execute(query, (_json([n for n, _ in rows]),)).fetchall()
    return _cut(data, [size for _, size in rows])


def _cut(data: bytes | None, sizes: Sequence[int]) -> Iterator[bytes]:
    at = 0
    for size in sizes:
        yield b"" if data is None else data[at : at + size]
        at += size


def _json(rows: object) -> str:
    # As text: SQLite takes JSON in a blob for its own binary form.
    return msgspec.json.encode(rows).decode()
