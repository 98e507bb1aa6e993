"""The folder beside a server's data: the server's id, its chain, locks, the guard's socket.

Guard and agent use it, each under a lock of its own: one of each per server (F1). The notes are
replaced as a whole and reach the disk before `save` returns, so they are as durable as the data.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import sys
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

import msgspec

from domicile.errors import ConfigError
from domicile.failover.driver import ServerNotes

if sys.platform != "win32":
    import fcntl

MODE = 0o700
"""Of a new folder: receipts of losses hold data."""

NOTES = "notes.json"
SOCKET = "guard.sock"

MOST_SOCKET_BYTES = 103
"""Bytes of the longest path of a Unix socket that every platform accepts."""


class StateFolder:
    """One server's folder."""

    def __init__(self, path: Path) -> None:
        self.path = path.absolute()
        self.socket = self.path / SOCKET
        if len(os.fsencode(self.socket)) > MOST_SOCKET_BYTES:
            raise ConfigError(
                f"state = {str(path)!r} is too long: the guard's socket lies there, and the path "
                f"of a socket has at most {MOST_SOCKET_BYTES} bytes. Name a shorter folder"
            )

    @contextmanager
    def held(self, by: Literal["agent", "guard"]) -> Generator[None, None, None]:
        """Be the only agent, or the only guard, of this server; `ConfigError` if there is one."""
        self.make()
        with (self.path / f"{by}.lock").open("a+") as file:
            if sys.platform != "win32":
                try:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    file.seek(0)
                    raise ConfigError(
                        f"another {by} (pid {file.read().strip() or 'unknown'}) uses {self.path}: "
                        "each server has one; stop that one, or give this server a state folder of "
                        "its own"
                    ) from None
            file.truncate(0)
            file.write(f"{os.getpid()}\n")
            file.flush()
            yield

    def make(self) -> None:
        """Create the folder if it is not there."""
        try:
            self.path.mkdir(mode=MODE, parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(
                f"the state folder {self.path} can't be made: {error.strerror}. Name a folder that "
                "this user may write"
            ) from error

    def notes(self, server: str) -> NoteFile:
        """The server's notes; new ones for this id if there are none. `ConfigError`: of another
        server, or not readable."""
        file = self.path / NOTES
        try:
            found = msgspec.json.decode(file.read_bytes(), type=ServerNotes)
        except FileNotFoundError:
            found = ServerNotes(server, folder=secrets.token_hex(8))
            _replace(file, found)
        except (OSError, msgspec.MsgspecError) as error:
            raise ConfigError(
                f"the notes {file} can't be read: {error}. They tell which data this server has; "
                "put them back from a copy, or remove them, and then the server counts as new"
            ) from error
        if found.server != server:
            raise ConfigError(
                f"the folder {self.path} belongs to server {found.server!r}, and the settings "
                f"name {server!r}: an id is for ever. Name {found.server!r}, or another folder"
            )
        if not found.folder:
            found = msgspec.structs.replace(found, folder=secrets.token_hex(8))
            _replace(file, found)
        return NoteFile(file, found)


class NoteFile:
    """Implements `NoteBook`."""

    def __init__(self, file: Path, notes: ServerNotes) -> None:
        self._file, self._notes = file, notes

    def load(self) -> ServerNotes:
        """As `NoteBook.load`."""
        return self._notes

    async def save(self, notes: ServerNotes) -> None:
        """As `NoteBook.save`. Cancelled or not, the file has the old notes or the new ones."""
        # Shielded: after a cancellation the next save must not be overtaken by this one.
        writing = asyncio.ensure_future(asyncio.to_thread(_replace, self._file, notes))
        try:
            await asyncio.shield(writing)
        except asyncio.CancelledError:
            await asyncio.wait([writing])
            raise
        self._notes = notes


def _replace(file: Path, notes: ServerNotes) -> None:
    new = file.with_suffix(".new")
    with new.open("wb") as out:
        out.write(msgspec.json.encode(notes))
        out.flush()
        os.fsync(out.fileno())
    new.replace(file)
    if sys.platform != "win32":
        folder = os.open(file.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)
