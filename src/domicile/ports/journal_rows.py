"""All that a journal has of a cluster, as rows: what is exported, and imported into another kind.

Journals that can be moved implement `TransferableJournal`; `domicile journal export` and `import`
call it. First come the shards, then each entity with its events and keys behind it. The names of
the fields are those of the exported lines: they must never change within a version of that format.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator
from typing import Protocol, runtime_checkable

import msgspec

ROWS_CLASH = (
    "rows do not fit together, so nothing was imported: the export was changed, take another one"
)
"""What a journal says of rows that no journal has had."""


class ShardRow(msgspec.Struct, frozen=True, gc=False, tag_field="kind", tag="shard"):
    """A fence without its owner. Later rows name it by its place among the shards, from 0."""

    role: str
    layout: int
    shard: int
    epoch: int
    offset: int
    """The last one of the shard."""
    writes: int
    """How many batches the shard has taken."""


class EntityRow(
    msgspec.Struct, frozen=True, gc=False, omit_defaults=True, tag_field="kind", tag="entity"
):
    """An entity. The rows of its events, in order, and of its keys follow."""

    type: str
    id: str
    seq: int
    shard: int | None = None
    """The shard that wrote it last; None if it has nothing but keys."""
    last: int = 0
    """Which batch of that shard wrote it last: it orders remembered entities."""
    deleted: int = 0
    """The number of its last deletion."""
    remembered: bool = False
    state: bytes | None = None
    snapshot: tuple[int, bytes] | None = None


class EventRow(
    msgspec.Struct, frozen=True, gc=False, omit_defaults=True, tag_field="kind", tag="event"
):
    """An event of the entity before it. Without data, the entity was deleted here."""

    shard: int
    offset: int
    seq: int
    data: bytes | None = None


class KeyRow(
    msgspec.Struct, frozen=True, gc=False, omit_defaults=True, tag_field="kind", tag="key"
):
    """A key of an ask to the entity before it, the day it came on, as its journal counts, and its
    reply."""

    key: str
    day: int
    reply: bytes | None = None


JournalRow = ShardRow | EntityRow | EventRow | KeyRow


@runtime_checkable
class TransferableJournal(Protocol):
    """A journal whose contents can be read as rows, and made of rows."""

    def rows(self) -> AsyncGenerator[JournalRow, None]:
        """All that there is of the cluster, as of one moment, while nodes write."""
        ...

    async def fill(self, rows: AsyncIterator[JournalRow]) -> None:
        """Take all of these rows, or nothing: one transaction.

        `ConfigError` if the journal has anything of the cluster. The id of the journal is its own
        (J11), and no owner has the shards. Keys are kept as if they came now.
        """
        ...
