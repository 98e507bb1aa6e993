"""What a server has beyond its next primary: the files of its log are saved, its writes counted.

A *write* is a transaction that committed, of a client: not the marks of promotions, and not what
the server writes by itself to keep statistics.
"""

from __future__ import annotations

import asyncio
import re
import shutil
from collections.abc import Iterable
from pathlib import Path

from domicile.failover.driver import SavedLoss
from domicile.failover.drivers.postgres.local_server import LocalServer
from domicile.failover.drivers.postgres.timelines import (
    Lineage,
    is_segment,
    lsn_text,
    segment_name,
    segment_number,
)

MOST_LOST_BYTES = 8 << 30
"""I6: the most that is saved."""

STATISTICS = (2619, 2696, 2840, 2841, 3429, 3430, 3431, 3432, 3433)
"""The files of pg_statistic and its like, with indexes and what is stored out of line."""

RECORD = re.compile(r"^rmgr: (\S+)\s.*?\btx:\s*(\d+), lsn: .*?desc: (.*)$")
RELATION = re.compile(r"\brel \d+/\d+/(\d+)")


async def save_log(server: LocalServer, own: Lineage, kept: int, end: int, size: int) -> SavedLoss:
    """Copy the files of the log that have [kept, end), and count the commits in it.

    `size`: of one of these files.
    """
    wal = server.data / "pg_wal"
    names = await asyncio.to_thread(lambda: [one.name for one in wal.iterdir()])
    found, whole = segments_beyond(own, kept, end, size, names)
    if len(found) * size > MOST_LOST_BYTES:
        raise ConnectionError(
            f"{len(found) * size} bytes would be lost, more than {MOST_LOST_BYTES} are not saved "
            "by themselves: copy pg_wal, then remove what the server has"
        )
    folder = server.folder / f"lost-{own[-1].timeline}-{kept:X}-{end:X}"
    await asyncio.to_thread(folder.mkdir, parents=True, exist_ok=True)
    for name in found:
        whole &= await asyncio.to_thread(_copy, wal / name, folder)
    counted = -1
    if whole:
        counted = 0
        for one in own:
            begin, until = max(one.begin, kept), min(one.end, end)
            if begin < until:
                counted += count_commits(
                    await server.run(
                        "pg_waldump", "--path", str(server.data / "pg_wal"), "--timeline",
                        str(one.timeline), "--start", lsn_text(begin), "--end", lsn_text(until),
                    )
                )  # fmt: skip
    return SavedLoss(counted, str(folder))


def segments_beyond(
    own: Lineage, kept: int, end: int, size: int, names: Iterable[str]
) -> tuple[list[str], bool]:
    """Those files of the log that reach into [kept, end), and whether that is all of it.

    Much of a log is gone if it is not known from where on it is lost.
    """
    found: list[str] = []
    wanted = 0
    for one in own:
        begin, until = max(one.begin, kept), min(one.end, end)
        if begin < until:
            first, last = begin // size, (until - 1) // size
            wanted += last - first + 1
            found += sorted(
                name
                for name in names
                if is_segment(name)
                and first <= segment_number(name, size) <= last
                and name == segment_name(one.timeline, segment_number(name, size), size)
            )
    return found, len(found) == wanted


def count_commits(dump: str) -> int:
    """How many transactions of clients commit, in the output of `pg_waldump`."""
    marks: list[str] = []
    idle: dict[str, bool] = {}
    committed: list[str] = []
    for line in dump.splitlines():
        found = RECORD.match(line)
        if found is None or found[2] == "0":
            continue
        manager, transaction, what = found.groups()
        if manager == "Transaction" and what.startswith("COMMIT"):
            committed.append(transaction)
        elif manager == "LogicalMessage" and 'prefix "domicile"' in what:
            marks.append(transaction)
        elif not what.startswith("INPLACE"):
            relations = [int(one) for one in RELATION.findall(what)]
            if relations:
                only = all(one in STATISTICS for one in relations)
                idle[transaction] = idle.get(transaction, True) and only
    return sum(one not in marks and not idle.get(one, False) for one in committed)


def _copy(source: Path, folder: Path) -> bool:
    try:
        shutil.copy2(source, folder / source.name)
    except FileNotFoundError:
        return False
    return True
