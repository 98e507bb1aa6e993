"""A process that works on a SQLite store: `python sqlite_worker.py PATH WHAT [COUNT]`.

It answers on stdout, a line for each thing it did, and waits for lines on stdin where it says so.
"""

from __future__ import annotations

import asyncio
import os
import sys
import time
from pathlib import Path

from domicile.core.state.txn import Absent, At, Committed, Condition, Put
from domicile.errors import StoreError
from domicile.stores.sqlite.file import Database
from domicile.stores.sqlite.store import SqliteStore


def say(*words: object) -> None:
    # In one piece: several processes may share the pipe.
    os.write(1, (" ".join(map(str, words)) + "\n").encode())


async def add(path: Path, count: int) -> None:
    """Add 1 to a counter that many times, by compare and set."""
    store = SqliteStore(path, by="adder", op_timeout_s=30.0)
    won = 0
    while won < count:
        item = await store.get(b"n")
        held: Condition = At(b"n", item.revision) if item else Absent(b"n")
        value = int(item.value) + 1 if item else 1
        outcome = await store.commit([held], [Put(b"n", b"%d" % value)])
        if isinstance(outcome, Committed):
            won += 1
            say(outcome.revision, value)
    await store.close()


def crowd(path: Path, count: int) -> None:
    """That many processes that add 5 each at the same time."""
    gate, open_gate = os.pipe()
    children: list[int] = []
    for _ in range(count):
        child = os.fork()
        if child == 0:
            os.close(open_gate)
            os.read(gate, 1)
            asyncio.run(add(path, 5))
            os._exit(0)
        children.append(child)
    os.close(open_gate)
    for child in children:
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


async def follow(path: Path, count: int) -> None:
    """Say when changes of a key that holds a time were seen, in seconds after it."""
    store = SqliteStore(path, by="follower")
    watch = store.watch(b"at", (await store.list(b"")).revision)
    say("ready")
    for _ in range(count):
        changes = await anext(watch)
        item = changes.changes[0].item
        assert item is not None
        say(time.monotonic() - float(item.value))
    await store.close()


async def attempt(path: Path, count: int) -> None:
    """For each line of input try a commit and a lease, and say what came of it."""
    store = SqliteStore(path, by="worker", op_timeout_s=5.0)
    if count:
        await store.commit([], [Put(b"first", b"")])
    say("ready")
    for line in sys.stdin:
        if line.startswith("limit"):
            import resource

            size = int(line.split()[1])
            hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
            resource.setrlimit(resource.RLIMIT_FSIZE, (size if size >= 0 else hard, hard))
        value = bytes(int(line.split()[-1]))
        answers: list[str] = []
        for call in (store.commit([], [Put(b"k", value)]), store.grant("l", 60.0)):
            try:
                answers.append(type(await call).__name__)
            except StoreError as error:
                answers.append(f"{type(error).__name__}: {error}")
        say(" | ".join(answers))
    await store.close()


async def flood(path: Path, count: int) -> None:
    """That many at once commit without end, and say which commit got which revision."""
    store = SqliteStore(path, by="flood", kept_commits=10**6)

    async def one(name: str) -> None:
        number = 0
        while True:
            number += 1
            key = f"{name}/{number}".encode()
            outcome = await store.commit([Absent(key)], [Put(key, b""), Put(key + b"*", b"")])
            assert isinstance(outcome, Committed)
            say(key.decode(), outcome.revision)

    await asyncio.gather(*[one(f"{os.getpid()}/{index}") for index in range(count)])


def lock(path: Path, count: int) -> None:
    """Take the write lock and keep it until killed."""
    database = Database(path)
    database.run("BEGIN IMMEDIATE")
    say("locked")
    sys.stdin.read()


if __name__ == "__main__":
    file, what, number = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
    if what in ("lock", "crowd"):
        {"lock": lock, "crowd": crowd}[what](file, number)
    else:
        works = {"add": add, "follow": follow, "attempt": attempt, "flood": flood}
        asyncio.run(works[what](file, number))
