"""A journal as a stream of lines: the file that `domicile journal export` writes.

Each line is one JSON object with a `kind`; bytes are base64. The first line names the format, the
last one has the number and the digest of all lines before it, so a file that was cut off or changed
is never taken for a whole one. Nothing here holds more than one line.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import aclosing
from typing import BinaryIO

import msgspec
from xxhash import xxh3_128

from domicile.errors import ConfigError
from domicile.ports.journal_rows import (
    EntityRow,
    JournalRow,
    KeyRow,
    ShardRow,
    TransferableJournal,
)

VERSION = 1
"""The version of the format. A reader takes the versions up to its own."""

MOST_LINE_BYTES = 1 << 28
"""I6: a longer line is no line of an export: an entity's state has some megabytes at most."""

EVERY = 1_000
"""Rows after which the progress is told."""


class FirstLine(msgspec.Struct, frozen=True, tag_field="kind", tag="journal"):
    """What the lines hold, and where they are from."""

    version: int
    cluster: str
    history: str


class LastLine(msgspec.Struct, frozen=True, tag_field="kind", tag="end"):
    """How many lines came before this one, and their digest (xxh3, 128 bits)."""

    lines: int
    digest: str


_Line = FirstLine | LastLine | JournalRow

_decoder: msgspec.json.Decoder[_Line] = msgspec.json.Decoder(_Line)
_encoder = msgspec.json.Encoder()


async def write_lines(
    journal: TransferableJournal, first: FirstLine, out: BinaryIO, told: Callable[[int], None]
) -> int:
    """Write all that a journal has; returns the number of rows. `told` gets how many so far."""
    digest, count = xxh3_128(), 0

    def put(line: object) -> None:
        data = _encoder.encode(line) + b"\n"
        digest.update(data)
        out.write(data)

    put(first)
    async with aclosing(journal.rows()) as rows:
        async for row in rows:
            put(row)
            count += 1
            if count % EVERY == 0:
                told(count)
    put(LastLine(count + 1, digest.hexdigest()))
    return count


class ReadLines:
    """The lines of an export. `first` is read at once, `rows` only once."""

    def __init__(self, source: BinaryIO, name: str, told: Callable[[int], None]) -> None:
        self._source, self._name, self._told = source, name, told
        self._digest, self._lines = xxh3_128(), 0
        first = self._next()
        if not isinstance(first, FirstLine):
            raise ConfigError(f"{name} is no export of a journal: its first line does not say so")
        if first.version > VERSION:
            raise ConfigError(
                f"{name} has version {first.version} of the format; this version of Domicile reads "
                f"versions up to {VERSION}: upgrade it here"
            )
        self.first = first

    async def rows(self) -> AsyncIterator[JournalRow]:
        """All rows; `ConfigError` at the first that can't be, or if the end is missing."""
        shards = entities = 0
        while True:
            digest, lines = self._digest.hexdigest(), self._lines
            match self._next():
                case FirstLine():
                    raise self._wrong("the first line comes a second time")
                case LastLine() as last:
                    if (last.lines, last.digest) != (lines, digest):
                        raise self._wrong("lines before the last one were lost or changed")
                    return
                case ShardRow() as row:
                    shards += 1
                    yield row
                case row:
                    entities += isinstance(row, EntityRow)
                    place = None if isinstance(row, KeyRow) else row.shard
                    if not entities or (place is not None and not 0 <= place < shards):
                        raise self._wrong("it names an entity or a shard that did not come before")
                    yield row
            if self._lines % EVERY == 0:
                self._told(self._lines)

    def _next(self) -> _Line:
        data = self._source.readline(MOST_LINE_BYTES)
        if not data.endswith(b"\n"):
            raise ConfigError(
                f"{self._name} ends after {self._lines} lines, before its last line: the export "
                "was interrupted, or the file was cut off; take another one"
            )
        try:
            line = _decoder.decode(data)
        except msgspec.MsgspecError as error:
            raise self._wrong(str(error)) from error
        self._digest.update(data)
        self._lines += 1
        return line

    def _wrong(self, why: str) -> ConfigError:
        return ConfigError(
            f"{self._name}, line {self._lines + 1}: {why}; this is no export of a journal, or it "
            "was changed: take another one"
        )
