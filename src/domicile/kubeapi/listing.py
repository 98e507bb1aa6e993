"""Decodes a list of any length as a stream: memory holds one piece and one object (K5).

The API server ignores `limit` when it lists from its cache (resourceVersion=0), so a list of
100,000 objects arrives as one body. `ListDecoder` takes its bytes as they come and gives complete
objects back. Pure: no loop, no socket.
"""

from __future__ import annotations

import codecs
import json
from collections.abc import Iterator
from typing import Any

MAX_OBJECT_CHARACTERS = 8 << 20
"""I6: one object, with its managed fields. The API server takes none of more than 3 MiB."""

_SPACE = " \t\r\n"


class MalformedList(Exception):
    """The answer is no list of objects."""


class ListDecoder:
    """The incremental decoder of one list. `feed` all pieces, then call `close`."""

    def __init__(self) -> None:
        self._text = codecs.getincrementaldecoder("utf-8")()
        self._buffer = ""
        self._at = 0
        self._decode = json.JSONDecoder().raw_decode
        self._state = "start"
        self.head: dict[str, Any] = {}
        """The list's own fields, all but the items, once they have arrived."""

    @property
    def resource_version(self) -> str:
        """The state of the server that the list shows."""
        metadata = self.head.get("metadata")
        return str(metadata.get("resourceVersion", "")) if isinstance(metadata, dict) else ""  # pyright: ignore[reportUnknownMemberType, reportUnknownArgumentType]

    @property
    def waiting_characters(self) -> int:
        """What is buffered: an object that has not arrived to its end."""
        return len(self._buffer) - self._at

    def feed(self, piece: bytes) -> Iterator[dict[str, Any]]:
        """The objects that this piece completes."""
        self._buffer = self._buffer[self._at :] + self._text.decode(piece)
        self._at = 0
        while True:
            found, item = self._next()
            if item is not None:
                yield item
            elif not found:
                break
        if self.waiting_characters > MAX_OBJECT_CHARACTERS:
            raise MalformedList(f"an object of a list has over {MAX_OBJECT_CHARACTERS} characters")

    def close(self) -> None:
        """The body has ended. Raises `MalformedList` if the list has not."""
        if self._state != "end":
            raise MalformedList("the list broke off before its end")

    def _next(self) -> tuple[bool, dict[str, Any] | None]:
        """Take one step: whether there was enough to take it, and the object if it gave one."""
        letter = self._peek()
        if not letter:
            return False, None
        match self._state:
            case "start":
                self._expect(letter, "{")
                self._state = "key"
            case "key" if letter in ",}":
                self._at += 1
                self._state = "end" if letter == "}" else "key"
            case "key":
                return self._field()
            case "items" if letter in ",]":
                self._at += 1
                self._state = "key" if letter == "]" else "items"
            case "items":
                done, value = self._value()
                if not done:
                    return False, None
                if not isinstance(value, dict):
                    raise MalformedList("an item of the list is no object")
                return True, value  # pyright: ignore[reportUnknownVariableType]
            case _:
                raise MalformedList("the list goes on after its end")
        return True, None

    def _field(self) -> tuple[bool, None]:
        start = self._at
        done, key = self._value()
        letter = self._peek() if done else ""
        if letter:
            self._expect(letter, ":")
            letter = self._peek()
        if letter and key == "items" and letter == "[":
            self._at += 1
            self._state = "items"
            return True, None
        if letter:
            done, value = self._value(scalar=True)
            if done:
                self.head[str(key)] = value
                return True, None
        self._at = start
        return False, None

    def _value(self, *, scalar: bool = False) -> tuple[bool, Any]:
        try:
            value, end = self._decode(self._buffer, self._at)
        except json.JSONDecodeError as error:
            # What has not arrived to its end is no error; what can't become JSON grows too long.
            if error.pos < len(self._buffer) - 8 and self._buffer[self._at] not in '{["':
                raise MalformedList(f"no JSON: {error}") from error
            return False, None
        if scalar and self._buffer[end : end + 1] not in (",", "}", *_SPACE):
            return False, None  # a number may go on
        self._at = end
        return True, value

    def _peek(self) -> str:
        while self._at < len(self._buffer) and self._buffer[self._at] in _SPACE:
            self._at += 1
        return self._buffer[self._at : self._at + 1]

    def _expect(self, letter: str, wanted: str) -> None:
        if letter != wanted:
            raise MalformedList(f"{wanted!r} was expected, not {letter!r}")
        self._at += 1
