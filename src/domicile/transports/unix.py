"""Sockets that are files: addresses `unix:/path`, for processes of one machine and one user.

Used by `domicile.transports.tcp`. The file is for its owner alone, is removed with the listener,
and a stale one is replaced. Nothing here may remove a file that has a listener.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import secrets
import socket
import stat
import sys
from collections.abc import AsyncGenerator, Callable
from pathlib import Path

from domicile.errors import ConfigError

if sys.platform != "win32":
    import fcntl

PREFIX = "unix:"
MODE = 0o600
MOST_PATH_BYTES = 103
"""Bytes of the longest socket path that every platform accepts."""

_LOCK_TRIES = 100
_LOCK_PAUSE_S = 0.01
_NAME = "domicile-{}.sock"


def is_unix(address: str) -> bool:
    """Whether an address names a file."""
    return address.startswith(PREFIX)


def path_of(address: str, meaning: str) -> Path:
    """The file that an address names; raises `ConfigError`."""
    text = address.removeprefix(PREFIX)
    if not hasattr(socket, "AF_UNIX"):
        raise ConfigError(
            f"{meaning} {address!r}: this platform has no Unix sockets; use host:port"
        )
    if not text or "\0" in text:
        raise ConfigError(f"{meaning} {address!r} names no file: write unix:/path/to/file")
    path = Path(os.path.abspath(text))
    if len(os.fsencode(path)) > MOST_PATH_BYTES:
        raise ConfigError(
            f"{meaning} {address!r} is too long: a Unix socket's path has at most "
            f"{MOST_PATH_BYTES} bytes"
        )
    return path


async def bind_path(path: Path, backlog: int) -> tuple[socket.socket, Path]:
    """A socket that listens at a file, or at a new one in a directory. Raises `ConfigError`."""
    async with _locked(_directory(path)):
        path = _free(path)
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            sock.setblocking(False)
            sock.bind(str(path))
            # No peer can connect before this: a socket that does not listen yet refuses everyone.
            path.chmod(MODE)
            sock.listen(backlog)
        except OSError as error:
            sock.close()
            raise ConfigError(
                f"cannot listen at {PREFIX}{path}: {error.strerror}. Name a file in a directory "
                "that this user may write to"
            ) from error
        return sock, path


def remover(path: Path) -> Callable[[], None]:
    """Returns a function that removes this file, and no other one that took its name later."""
    mine = path.stat()

    def remove() -> None:
        with contextlib.suppress(OSError):
            found = path.stat()
            if (found.st_dev, found.st_ino) == (mine.st_dev, mine.st_ino):
                path.unlink()

    return remove


@contextlib.asynccontextmanager
async def _locked(directory: Path) -> AsyncGenerator[None]:
    """Let one process at a time look for stale files: two would remove each other's new one."""
    if sys.platform == "win32":
        yield
        return
    try:
        descriptor = os.open(directory, os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        raise ConfigError(
            f"cannot listen in {directory}: {error.strerror}. Make the directory first, such that "
            "this user may read and write it"
        ) from error
    try:
        for _ in range(_LOCK_TRIES):
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                await asyncio.sleep(_LOCK_PAUSE_S)
        else:
            raise ConfigError(
                f"cannot listen in {directory}: another process keeps it locked. Find it by "
                f"`fuser {directory}`, or listen in another directory"
            )
        yield
    finally:
        os.close(descriptor)


def _directory(path: Path) -> Path:
    return path if path.is_dir() else path.parent


def _free(path: Path) -> Path:
    """A file name that is not used; raises `ConfigError`."""
    if path.is_dir():
        _sweep(path)
        return path_of(f"{PREFIX}{path / _NAME.format(secrets.token_hex(4))}", "the address")
    if os.path.lexists(path):
        _remove_stale(path)
    return path


def _remove_stale(path: Path) -> None:
    """Remove a stale file to make room for a new one; `ConfigError` if it is in use."""
    if not stat.S_ISSOCK(path.lstat().st_mode):
        raise ConfigError(
            f"cannot listen at {PREFIX}{path}: there is a file that is no socket. Remove it, or "
            "name another"
        )
    if _answers(path):
        raise ConfigError(
            f"cannot listen at {PREFIX}{path}: another process listens there. Stop it, or name "
            "another file; a directory gets a new one for each process"
        )
    with contextlib.suppress(FileNotFoundError):
        path.unlink()


def _sweep(directory: Path) -> None:
    """Remove the files that killed processes left in a directory."""
    for path in directory.glob(_NAME.format("*")):
        with contextlib.suppress(OSError):
            if stat.S_ISSOCK(path.lstat().st_mode) and not _answers(path):
                path.unlink()


def _answers(path: Path) -> bool:
    """Whether a process listens at a file; True if that cannot be told."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.setblocking(False)
        return probe.connect_ex(str(path)) not in (errno.ECONNREFUSED, errno.ENOENT)
