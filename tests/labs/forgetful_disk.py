"""A disk that forgets what was not synced when the power goes, and that can be full or read-only.

Writes go to real files at once, so all connections of this process see them, as they see what lies
in a system's cache. The disk notes what each file would hold after a power cut.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from random import Random
from typing import Any

import apsw

_Change = tuple[int, bytes | None]
"""A write at an offset, or (None) a cut of the file there."""

SECTOR = 512


class StoredFile:
    """What survives of one file for certain, and what came since its last sync."""

    def __init__(self) -> None:
        self.synced = b""
        self.unsynced: list[_Change] = []

    def sync(self) -> None:
        """Everything so far survives."""
        self.synced = _changed(self.synced, self.unsynced)
        self.unsynced = []

    def torn(self, random: Random) -> bytes:
        """One of the things that a power cut may leave: any sectors of what was not synced."""
        kept: list[_Change] = []
        for at, data in self.unsynced:
            if data is None:
                if random.random() < 0.5:
                    kept.append((at, None))
                continue
            for start in range(0, len(data), SECTOR):
                if random.random() < 0.5:
                    kept.append((at + start, data[start : start + SECTOR]))
        return _changed(self.synced, kept)


def _changed(content: bytes, changes: list[_Change]) -> bytes:
    image = bytearray(content)
    for at, data in changes:
        if data is None:
            del image[at:]
            continue
        image.extend(bytes(max(0, at - len(image))))
        image[at : at + len(data)] = data
    return bytes(image)


class ForgetfulDisk(apsw.VFS):
    """`cut` is called at each sync, before it has an effect and after it."""

    NAME = "domicile-forgetful"

    def __init__(self) -> None:
        super().__init__(self.NAME, "unix", makedefault=True)
        self.files: dict[str, StoredFile] = {}
        self._unlinked: dict[str, None] = {}
        """Deleted, but they come back until their directory is synced."""
        self.cut: Callable[[], None] = lambda: None
        self.room_bytes: int | None = None
        """How far a file may grow; None for as far as it likes."""
        self.is_read_only = False

    def xOpen(self, name: Any, flags: list[int]) -> apsw.VFSFile:  # noqa: N802
        return _ForgetfulFile(self, name, flags)

    def xDelete(self, filename: str, syncdir: bool) -> None:  # noqa: N802
        super().xDelete(filename, syncdir)
        self._unlinked[Path(filename).name] = None
        if syncdir:
            self.sync_directory()

    def opened(self, name: str) -> StoredFile:
        """What the disk knows of a file; one that was deleted begins anew."""
        if name in self._unlinked:
            del self._unlinked[name]
            self.files[name].unsynced.append((0, None))
        return self.files.setdefault(name, StoredFile())

    def sync_directory(self) -> None:
        """What was deleted is gone for good."""
        for name in self._unlinked:
            del self.files[name]
        self._unlinked.clear()

    def left(self, random: Random | None = None) -> dict[str, bytes]:
        """The files after a power cut now: what was synced, and with `random` some of the rest."""
        return {
            name: file.synced if random is None else file.torn(random)
            for name, file in self.files.items()
        }


class _ForgetfulFile(apsw.VFSFile):
    def __init__(self, disk: ForgetfulDisk, name: Any, flags: list[int]) -> None:
        if disk.is_read_only:
            flags[0] &= ~(apsw.SQLITE_OPEN_READWRITE | apsw.SQLITE_OPEN_CREATE)
            flags[0] |= apsw.SQLITE_OPEN_READONLY
        super().__init__("unix", name, flags)
        path = name.filename() if isinstance(name, apsw.URIFilename) else name
        self._disk = disk
        self._stored = disk.opened(Path(path or "unnamed").name)
        # As SQLite does: the first sync of a new journal is one of the directory, too.
        new = apsw.SQLITE_OPEN_WAL | apsw.SQLITE_OPEN_MAIN_JOURNAL
        self._syncs_directory = bool(flags[0] & apsw.SQLITE_OPEN_CREATE and flags[0] & new)

    def xWrite(self, data: bytes, offset: int) -> None:  # noqa: N802
        room = self._disk.room_bytes
        if room is not None and offset + len(data) > room:
            raise apsw.FullError("as the test wants it")
        super().xWrite(data, offset)
        self._stored.unsynced.append((offset, bytes(data)))

    def xTruncate(self, newsize: int) -> None:  # noqa: N802
        super().xTruncate(newsize)
        self._stored.unsynced.append((newsize, None))

    def xSync(self, flags: int) -> None:  # noqa: N802
        self._disk.cut()
        self._stored.sync()
        self._disk.cut()
        if self._syncs_directory:
            self._syncs_directory = False
            self._disk.sync_directory()
            self._disk.cut()


@contextmanager
def forgetful_disk() -> Iterator[ForgetfulDisk]:
    """The disk of all files that SQLite opens meanwhile."""
    disk = ForgetfulDisk()
    try:
        yield disk
    finally:
        disk.unregister()
