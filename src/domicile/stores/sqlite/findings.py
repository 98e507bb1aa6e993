"""What `domicile doctor` reports about the file of an embedded store.

Only `domicile.stores.sqlite.store` uses it, in a thread: it reads the disk. It changes nothing.
"""

from __future__ import annotations

import os
import shutil
import time
from pathlib import Path

import apsw

from domicile.ports.findings import Finding, Severity
from domicile.stores.sqlite.file import Database, boot_id, elapsed_s
from domicile.stores.sqlite.schema import STATE

MOUNTS = Path("/proc/self/mountinfo")

REMOTE = ("nfs", "nfs4", "cifs", "smb3", "smbfs", "9p", "fuse.sshfs", "ceph", "glusterfs")
"""File systems whose locks and shared memory do not reach other machines, or fail."""

FLEETING = ("tmpfs", "ramfs")

LARGE_WAL_BYTES = 64 * 1024 * 1024
LEAST_FREE_BYTES = 256 * 1024 * 1024
READ_S = 5.0


def file_findings(path: Path) -> list[Finding]:
    """Judge a store's file. Blocks."""
    return [*_place(path), *_disk(path), *_wal(path), *_contents(path)]


def _place(path: Path) -> list[Finding]:
    kind = file_system(path, MOUNTS.read_text(encoding="utf-8") if MOUNTS.exists() else "")
    if kind in REMOTE:
        return [
            Finding(
                Severity.ERROR, "file system",
                f"{kind} does not share locks and memory as SQLite needs it: the file can be "
                "damaged, and shards get two homes",
                "put the file on a local disk, or use a store on a server",
            )
        ]  # fmt: skip
    if kind in FLEETING:
        return [
            Finding(
                Severity.WARNING, "file system", f"{kind} is gone after a restart of the machine",
                "put the file on a disk, unless that is what you want",
            )
        ]  # fmt: skip
    return [Finding(Severity.OK, "file system", kind or "unknown")]


def file_system(path: Path, mounts: str) -> str:
    """The type of the file system with a path, from the text of Linux's `mountinfo`."""
    best, kind = "", ""
    for line in mounts.splitlines():
        left, _, right = line.partition(" - ")
        fields, more = left.split(), right.split()
        if len(fields) < 5 or not more:
            continue
        place = fields[4].replace("\\040", " ")
        inside = place == "/" or f"{path}/".startswith(f"{place.rstrip('/')}/")
        if inside and len(place) >= len(best):
            best, kind = place, more[0]
    return kind


def _disk(path: Path) -> list[Finding]:
    free = shutil.disk_usage(path.parent).free
    said = f"{free / 2**30:,.1f} GiB free"
    if free < LEAST_FREE_BYTES:
        step = "free space: a full disk stops every write"
        return [Finding(Severity.WARNING, "disk", said, step)]
    if not os.access(path, os.W_OK):
        step = "run it as the user of the nodes"
        return [Finding(Severity.NOTE, "disk", f"{said}; this user may only read", step)]
    return [Finding(Severity.OK, "disk", said)]


def _wal(path: Path) -> list[Finding]:
    try:
        size = os.stat(f"{path}-wal").st_size
    except OSError:
        size = 0
    said = f"{path.stat().st_size / 2**20:,.1f} MiB, and {size / 2**20:,.1f} MiB in the -wal file"
    if size > LARGE_WAL_BYTES:
        return [
            Finding(
                Severity.WARNING, "file",
                f"{said}: some process reads without an end, so the -wal file can't be emptied",
                "look for a process that is stopped, or another program that has the file open",
            )
        ]  # fmt: skip
    return [Finding(Severity.OK, "file", said)]


def _contents(path: Path) -> list[Finding]:
    database: Database | None = None
    try:
        database = Database(path, create=False)
        database.wait_for_locks(time.monotonic() + READ_S)
        mode = database.pragma("journal_mode")
        history, revision, at_s, boot, deadline = database.one(STATE)
    except apsw.Error as error:
        step = "see whether another program holds its lock, and that it is a store"
        return [Finding(Severity.ERROR, "store", f"the file can't be read ({error})", step)]
    finally:
        if database is not None:
            database.close()
    found = [Finding(Severity.OK, "store", f"history {history[:8]}, revision {revision:,}")]
    if mode != "wal":
        step = "let a node open it once: it sets the mode"
        found.append(Finding(Severity.WARNING, "store", f"journal mode {mode}, not WAL", step))
    if boot != boot_id():
        said = "last written before this boot of the machine: all its leases have ended"
        found.append(Finding(Severity.NOTE, "time", said))
    elif deadline is not None and deadline <= elapsed_s():
        said = "leases have expired that nobody has ended yet"
        found.append(Finding(Severity.NOTE, "time", said, "the next process ends them"))
    else:
        said = f"the machine's clock since its boot; last write {elapsed_s() - at_s:,.1f} s ago"
        found.append(Finding(Severity.OK, "time", said))
    return found
