"""Proof of death on one machine: a file lock that each incarnation holds while its process runs.

The kernel releases the lock when the process ends, however it ends. So a process that can take the
lock knows that the incarnation can never run again (L6). The lock is `flock`, which belongs to the
open file: with POSIX locks, two users in one process caused a false DEAD. Backends of the embedded
store use it, on a local disk; the event loop may call it. Nothing here may take an exclusive lock
on a file that an owner could still want to lock.
"""

from __future__ import annotations

import errno
import os
import secrets
import stat
import time
import weakref
from bisect import bisect_right
from contextlib import suppress
from itertools import islice
from pathlib import Path

from domicile.core.ids import Incarnation
from domicile.errors import StoreUnavailable
from domicile.ports.health import Verdict

SWEEP_AFTER_S = 86_400.0
"""Seconds for which a proof of death is kept after it was first seen, unless the finder removed it
with the record. Under `fencing = "health"` records have no lease, and the dead incarnation's record
may belong to a cluster that is not running now (C9)."""

SWEPT_AT_ONCE = 32
LISTED_AT_ONCE = 4_096
"""I6: a sweep reads the names of `LISTED_AT_ONCE` files and checks `SWEPT_AT_ONCE` of them, however
many exist. Each sweep begins at another name. Removed files make room for others in the listing."""

_UNWRITABLE = (errno.EACCES, errno.EPERM, errno.EROFS)
_READ = os.O_RDONLY | getattr(os, "O_CLOEXEC", 0)
_MAKE = os.O_RDWR | os.O_CREAT | os.O_EXCL | getattr(os, "O_CLOEXEC", 0)


class FileLocks:
    """Implements `domicile.ports.health.Health` by files in a directory, one per incarnation."""

    def __init__(self, directory: Path) -> None:
        # Absolute, as the store's path: this process may change its working directory.
        self._directory = directory.absolute()
        self._held: dict[Incarnation, int] = {}
        self._swept = ""
        """The name of the file at which the last sweep ended."""
        _all.add(self)

    def hold(self, incarnation: Incarnation) -> None:
        """As `Health.hold`."""
        if incarnation in self._held:
            return
        try:
            self._directory.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise StoreUnavailable(
                f"the directory {self._directory} can't be made ({error.strerror}), where the "
                "store's processes keep their locks; make what is above it writable for this user, "
                "or name another path for the store"
            ) from error
        # Locked before it has its name: no process finds it unlocked while its owner runs.
        path = self._directory / incarnation
        draft = self._directory / f".{incarnation}.{secrets.token_hex(4)}"
        descriptor = -1
        try:
            descriptor = os.open(draft, _MAKE, 0o644)
            _lock(descriptor, shared=False)
            os.write(descriptor, f"{os.fstat(descriptor).st_ino} {os.getpid()}\n".encode())
            os.rename(draft, path)
        except OSError as error:
            if descriptor >= 0:
                os.close(descriptor)
                with suppress(OSError):
                    draft.unlink()
            if error.errno in _UNWRITABLE:
                raise StoreUnavailable(
                    f"the directory {self._directory} can't be written to ({error.strerror}), "
                    "where the store's processes keep their locks; make it writable for this "
                    "user, or name another path for the store"
                ) from error
            raise StoreUnavailable(
                f"{path} can't be locked ({error.strerror}), so nobody could tell when this "
                "process has died; see that its disk has room and can lock files"
            ) from error
        self._held[incarnation] = descriptor
        # Names are random, so each incarnation sweeps other files.
        self.sweep(after=incarnation)

    def let_go(self, incarnation: Incarnation, *, gone: bool = True) -> None:
        """As `Health.let_go`: an unlocked file that is left is the proof."""
        descriptor = self._held.pop(incarnation, None)
        if descriptor is None:
            if gone and self.verdict(incarnation) is Verdict.DEAD:
                with suppress(OSError):
                    (self._directory / incarnation).unlink()
            return
        try:
            with suppress(OSError):
                if gone:
                    (self._directory / incarnation).unlink()
                else:
                    # Still a valid lock file, but it no longer names this process.
                    os.ftruncate(descriptor, 0)
                    os.pwrite(descriptor, b"%d\n" % os.fstat(descriptor).st_ino, 0)
        finally:
            os.close(descriptor)

    def verdict(self, incarnation: Incarnation) -> Verdict:
        """As `Health.verdict`. A missing or foreign lock file proves nothing."""
        # If a file system turns `flock` into POSIX locks, a probe would drop this process's own.
        if any(incarnation in locks._held for locks in _all):
            return Verdict.ALIVE
        return self._probe(f"{self._directory}/{incarnation}")

    def evidence(self, incarnation: Incarnation) -> str:
        """As `Health.evidence`."""
        path = self._directory / incarnation
        try:
            pid = path.read_text(encoding="ascii").split()[1]
        except (OSError, ValueError, IndexError):
            return f"the lock on {path} can be taken: its holder has stopped permanently"
        return f"the lock on {path} can be taken: process {pid}, which held it, has ended"

    def age_s(self, incarnation: Incarnation) -> float | None:
        """As `TellsAge.age_s`: the file is made when an incarnation begins, and not changed."""
        try:
            made = (self._directory / incarnation).stat().st_mtime
        except OSError:
            return None
        return max(0.0, time.time() - made)

    def sweep(self, older_than_s: float = SWEEP_AFTER_S, *, after: str | None = None) -> int:
        """Remove lock files of incarnations that were found dead long ago; return how many.

        Checks only a few files: those whose names come after `after`, or where the last sweep
        ended, then the first ones.
        """
        limit = time.time() - older_than_s
        removed = 0
        some = self._some(self._swept if after is None else after)
        self._swept = some[-1].name if some else ""
        for path in some:
            if self.verdict(Incarnation(path.name)) is not Verdict.DEAD:
                continue
            with suppress(OSError):
                found = path.stat()
                if found.st_mode & stat.S_IWUSR:
                    path.chmod(stat.S_IRUSR | stat.S_IRGRP | stat.S_IROTH)
                    os.utime(path)
                elif found.st_mtime < limit:
                    path.unlink()
                    removed += 1
        return removed

    def _some(self, after: str) -> list[Path]:
        try:
            with os.scandir(self._directory) as entries:
                names = sorted([entry.name for entry in islice(entries, LISTED_AT_ONCE)])
        except OSError:
            return []
        first = bisect_right(names, after)
        some = (names[first:] + names[:first])[:SWEPT_AT_ONCE]
        return [self._directory / name for name in some]

    def _probe(self, path: str) -> Verdict:
        try:
            descriptor = os.open(path, _READ)
        except OSError:
            return Verdict.UNKNOWN
        try:
            # Shared, so that two probes at the same time both see a dead incarnation.
            _lock(descriptor, shared=True)
            made = os.read(descriptor, 64).split()
            # Any process can lock a copy of a lock file: only the original file counts.
            original = made[:1] == [b"%d" % os.fstat(descriptor).st_ino]
            return Verdict.DEAD if original else Verdict.UNKNOWN
        except BlockingIOError:
            return Verdict.ALIVE
        except OSError:
            return Verdict.UNKNOWN
        finally:
            os.close(descriptor)

    def _close_in_child(self) -> None:
        # Closed, not unlocked: unlocking would also release the parent's lock.
        descriptors, self._held = list(self._held.values()), {}
        for descriptor in descriptors:
            os.close(descriptor)


def _lock(descriptor: int, *, shared: bool) -> None:
    """Take a lock or raise `BlockingIOError`. Without file locks no verdict is ever DEAD."""
    try:
        import fcntl
    except ImportError as error:
        raise OSError(errno.ENOSYS, "this system has no file locks") from error
    fcntl.flock(descriptor, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)


_all: weakref.WeakSet[FileLocks] = weakref.WeakSet()


def _after_fork() -> None:
    for locks in list(_all):
        locks._close_in_child()  # pyright: ignore[reportPrivateUsage]


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
