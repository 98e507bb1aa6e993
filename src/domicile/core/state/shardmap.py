"""Which node is home to which shard: entries with epochs, stored in blocks of 64.

`change` numbers every change of one entry and never goes back. So two entries of a shard are
ordered by it alone, whatever their source is (watch, leader, Return). The leader raises it in
commits that are conditional on the block's revision, so no two entries share a number. Only the
leader makes new entries; all other code compares and merges them.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from typing import Annotated, Literal, NamedTuple

import msgspec

from domicile.core.ids import NOBODY, EntityKey, Incarnation, ShardKey

BLOCK_SIZE = 64

ShardState = Literal["free", "serving", "moving", "quarantined"]


MAX_COUNT = (1 << 62) - 1
"""No counter that starts at 1 reaches this, and this plus one still fits into 64 bits."""

Count = Annotated[int, msgspec.Meta(ge=0, le=MAX_COUNT)]


MOST_BARRED = 8
"""I6: entities of one shard that may be put away. One more, and the whole shard is."""

Barred = Annotated[tuple[EntityKey, ...], msgspec.Meta(max_length=MOST_BARRED)]

MOST_SUSPECTS = 8
"""I6: entities of one shard that are suspects by name. If there are more, none is named."""

Suspects = Annotated[tuple[EntityKey, ...], msgspec.Meta(max_length=MOST_SUSPECTS)]


class Suspicion(NamedTuple):
    """What speaks against a shard, as its entry holds it (DX-20)."""

    deaths: int = 0
    """Owners in a row that died with this shard, at short intervals."""
    blamed: int = 0
    """How many of the latest of those deaths came while entities of this shard were on trial."""
    tries: int = 0
    """How often the shard or one of its entities was put away; each time for longer."""
    barred: tuple[EntityKey, ...] = ()
    """Entities that are put away; the rest of the shard is served."""
    suspects: tuple[EntityKey, ...] = ()
    """Entities that ran at all of the latest blamed deaths. Only one of them may be put away at the
    next death. Until many deaths are blamed, only those count that had just begun to run. Empty: it
    is not known which entities ran."""


INNOCENT = Suspicion()


class Entry(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """One shard's place. Free: it never had an owner. Moving: `owner` empties it for `to`.
    Quarantined: it killed several owners in a row; it gets no home for a while."""

    owner: Incarnation = NOBODY
    epoch: Count = 0
    state: ShardState = "free"
    to: Incarnation = NOBODY
    change: Count = 0
    previous: str = ""
    """Node id of the last owner, preferred after a restart of the whole cluster (C8)."""
    deaths: Count = 0
    blamed: Count = 0
    tries: Count = 0
    barred: Barred = ()
    suspects: Suspects = ()

    @property
    def suspicion(self) -> Suspicion:
        """The last five fields, which `Suspicion` explains."""
        return Suspicion(self.deaths, self.blamed, self.tries, self.barred, self.suspects)


FREE = Entry()


class Block(msgspec.Struct, frozen=True, array_like=True):
    """64 entries as stored under one key. `txn` identifies a commit of unknown outcome (S1)."""

    txn: str
    entries: tuple[Entry, ...]


def leader_txn(leader: Incarnation, term: int, number: int) -> str:
    """The id of a leader's commit. Its term is the revision at which it acquired the leader key."""
    return f"{leader}-{term}-{number}"


def term_of(txn: str) -> int:
    """The term of the leader that made a commit (S8); 0: it was not made by a leader."""
    _, _, rest = txn.partition("-")
    term, _, number = rest.partition("-")
    return int(term) if _is_count(term) and _is_count(number) else 0


def _is_count(text: str) -> bool:
    return text.isascii() and text.isdecimal()


class _Packed(msgspec.Struct, frozen=True, array_like=True):
    """A block as stored. Many entries have the same names, so entries hold numbers of names."""

    txn: str
    incarnations: bytes
    """16 bytes each, numbered from 1; 0 is `NOBODY`."""
    names: tuple[str, ...]
    """All other names; their numbers follow those of the incarnations."""
    rows: tuple[Annotated[tuple[Count, ...], msgspec.Meta(max_length=7)], ...]
    """Owner, epoch, change, previous, state, to, deaths, without zeros at the end."""
    blames: tuple[tuple[Count, Count, Count, Barred], ...] = ()
    """Number of the row, blamed, tries, barred, for entries that have them. Earlier versions
    ignore it: their rows may have no more than seven numbers."""
    suspects: tuple[tuple[Count, Suspects], ...] = ()
    """Number of the row, suspects, for entries that have them. Earlier versions ignore it."""


_STATES: tuple[ShardState, ...] = ("serving", "free", "moving", "quarantined")
_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(_Packed)


def encode_block(block: Block) -> bytes:
    """The stored form of a block. An entry that was never changed is an empty row."""
    used: dict[str, None] = {}
    for entry in block.entries:
        used[entry.owner] = used[entry.previous] = used[entry.to] = None
    used.pop("", None)
    packed = {name: bytes.fromhex(name) for name in used if _is_incarnation(name)}
    names = [name for name in used if name not in packed]
    number = {name: index for index, name in enumerate(("", *packed, *names))}
    rows: list[list[int]] = []
    for entry in block.entries:
        if entry == FREE:
            rows.append([])
            continue
        owner, previous, to = number[entry.owner], number[entry.previous], number[entry.to]
        state = _STATES.index(entry.state)
        row = [owner, entry.epoch, entry.change, previous, state, to, entry.deaths]
        while len(row) > 1 and not row[-1]:
            row.pop()
        rows.append(row)
    blames = [
        (index, entry.blamed, entry.tries, entry.barred)
        for index, entry in enumerate(block.entries)
        if entry.blamed or entry.tries or entry.barred
    ]
    suspects = [
        (index, entry.suspects) for index, entry in enumerate(block.entries) if entry.suspects
    ]
    known = (block.txn, b"".join(packed.values()), names, rows)
    if suspects:
        return _encoder.encode((*known, blames, suspects))
    return _encoder.encode((*known, blames) if blames else known)


@lru_cache(maxsize=16)
def decode_block(value: bytes) -> Block:
    """A block from its stored form. Blocks are frozen, so all readers share one object.

    Readers decode the same value shortly after each other; older values are not needed again.
    """
    packed = _decoder.decode(value)
    digits = packed.incarnations.hex()
    names = ["", *(digits[at : at + 32] for at in range(0, len(digits), 32)), *packed.names]
    entries: list[Entry] = []
    try:
        for row in packed.rows:
            if not row:
                entries.append(FREE)
                continue
            owner, epoch, change, previous, state, to, deaths = row + (0,) * (7 - len(row))
            entries.append(
                Entry(
                    Incarnation(names[owner]),
                    epoch,
                    _STATES[state],
                    Incarnation(names[to]),
                    change,
                    names[previous],
                    deaths,
                )
            )
        for index, blamed, tries, barred in packed.blames:
            entries[index] = msgspec.structs.replace(
                entries[index], blamed=blamed, tries=tries, barred=barred
            )
        for index, suspects in packed.suspects:
            entries[index] = msgspec.structs.replace(entries[index], suspects=suspects)
    except IndexError as error:
        raise msgspec.ValidationError("a block's entry has a number that names nothing") from error
    return Block(packed.txn, tuple(entries))


def _is_incarnation(name: str) -> bool:
    return len(name) == 32 and not name.strip("0123456789abcdef")


def block_count(shards: int) -> int:
    """How many blocks hold this many shards."""
    return -(-shards // BLOCK_SIZE)


class ShardMap:
    """A process's cached map. Entries only become newer; unknown shards are `FREE`."""

    __slots__ = ("_entries",)

    def __init__(self) -> None:
        self._entries: dict[ShardKey, Entry] = {}

    def get(self, shard: ShardKey) -> Entry:
        """The newest known entry."""
        return self._entries.get(shard, FREE)

    def merge(self, shard: ShardKey, entry: Entry) -> bool:
        """Take `entry` if it is newer; True if it was."""
        if entry.change <= self.get(shard).change:
            return False
        self._entries[shard] = entry
        return True

    def merge_block(
        self, role: str, number: int, entries: tuple[Entry, ...], before: tuple[Entry, ...] = ()
    ) -> list[tuple[ShardKey, Entry]]:
        """Take the entries of a whole block; return what changed, in shard order.

        `before` are the entries taken last from this block: only entries that differ are merged.
        """
        changed: list[tuple[ShardKey, Entry]] = []
        if len(before) != len(entries):
            fresh = list(range(len(entries)))
        else:
            pairs = enumerate(zip(before, entries, strict=True))
            fresh = [index for index, (old, new) in pairs if old.change != new.change]
        for index in fresh:
            entry = entries[index]
            shard = ShardKey(role, number * BLOCK_SIZE + index)
            if self.merge(shard, entry):
                changed.append((shard, entry))
        return changed

    def __iter__(self) -> Iterator[tuple[ShardKey, Entry]]:
        return iter(self._entries.items())
