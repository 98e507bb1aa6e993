"""Who is home to which shard: entries with epochs, stored in blocks of 64.

`change` numbers every change of one entry and never goes back, so two entries of a shard are
ordered by it alone, wherever they came from (watch, leader, Return). The leader raises it in
commits that are conditional on the block's revision, so no two entries share a number.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from typing import Annotated, Literal

import msgspec

from domicile.core.ids import NOBODY, Incarnation, ShardKey

BLOCK_SIZE = 64

ShardState = Literal["free", "serving", "moving", "quarantined"]


MAX_COUNT = (1 << 62) - 1
"""No number that is counted up from 1 gets here, and one more still fits into 64 bits."""

Count = Annotated[int, msgspec.Meta(ge=0, le=MAX_COUNT)]


class Entry(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """One shard's place. Free: nobody ever owned it. Moving: `owner` drains, `to` is the wish.
    Quarantined: its last owners died with it, and it gets no home before an operator says so."""

    owner: Incarnation = NOBODY
    epoch: Count = 0
    state: ShardState = "free"
    to: Incarnation = NOBODY
    change: Count = 0
    previous: str = ""
    """Node id of the last owner, preferred after a restart of everything (C8)."""
    deaths: Count = 0
    """How many owners in a row it lost to their deaths, as far as those were close together."""


FREE = Entry()


class Block(msgspec.Struct, frozen=True, array_like=True):
    """64 entries as stored under one key. `txn` finds a commit of unknown outcome (S1)."""

    txn: str
    entries: tuple[Entry, ...]


class _Packed(msgspec.Struct, frozen=True, array_like=True):
    """A block as stored. Names are the same in many entries, so entries hold their numbers."""

    txn: str
    incarnations: bytes
    """16 bytes each, numbered from 1; 0 is nobody."""
    names: tuple[str, ...]
    """All other names, numbered on."""
    rows: tuple[Annotated[tuple[Count, ...], msgspec.Meta(max_length=7)], ...]
    """Owner, epoch, change, previous, state, to, deaths, without zeros at the end."""


_STATES: tuple[ShardState, ...] = ("serving", "free", "moving", "quarantined")
_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(_Packed)


def encode_block(block: Block) -> bytes:
    """The stored form of a block. An entry that nobody ever changed is an empty row."""
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
    return _encoder.encode((block.txn, b"".join(packed.values()), names, rows))


@lru_cache(maxsize=16)
def decode_block(value: bytes) -> Block:
    """A block from its stored form. Blocks are frozen, so one is shared by all who read it.

    They do so one right after the other; whatever is kept for longer is of the past.
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
    except IndexError as error:
        raise msgspec.ValidationError("a block's entry has a number that names nothing") from error
    return Block(packed.txn, tuple(entries))


def _is_incarnation(name: str) -> bool:
    return len(name) == 32 and not name.strip("0123456789abcdef")


def block_count(shards: int) -> int:
    """How many blocks hold this many shards."""
    return -(-shards // BLOCK_SIZE)


class ShardMap:
    """A process's cached view. Entries only ever get newer; unknown shards are `FREE`."""

    __slots__ = ("_entries",)

    def __init__(self) -> None:
        self._entries: dict[ShardKey, Entry] = {}

    def get(self, shard: ShardKey) -> Entry:
        """The newest entry known."""
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
        """Take a whole block's entries; what changed, in shard order.

        `before` are those that were taken last of this block: only what differs is looked at.
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
