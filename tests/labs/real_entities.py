"""Entities of the tests on real processes.

Each process of a cluster imports the module of its entities. So this one imports little: most of
the processor time of a start is imports.
"""

from __future__ import annotations

import asyncio
import os
import signal
import threading

from domicile import Entity, handler

LEDGER = "DOMICILE_TEST_LEDGER"


def enter(id: str, sender: str, number: int) -> None:
    """One line in the ledger, by one write: lines of several processes do not mix."""
    file = os.open(os.environ[LEDGER], os.O_WRONLY | os.O_APPEND)
    try:
        os.write(file, f"{id}\t{sender}\t{number}\n".encode())
    finally:
        os.close(file)


class Diary(Entity, name="diary"):
    """Keeps its lines in memory and knows how often it was started at this home."""

    def __init__(self) -> None:
        self.starts = 0
        self.lines: list[str] = []

    async def on_start(self) -> None:
        self.starts += 1

    @handler
    async def write(self, line: str) -> int:
        self.lines.append(line)
        return len(self.lines)

    @handler
    async def birth(self) -> tuple[int, int]:
        """How often it was started here, and in which process."""
        return self.starts, os.getpid()

    @handler
    async def visit(self, other: str, line: str) -> int:
        """Ask another diary, from the node of this one."""
        return await self.ref(Diary, other).ask(Diary.write, line)

    @handler
    async def nap(self, seconds: float) -> int:
        await asyncio.sleep(seconds)
        return self.epoch


class Desk(Entity, name="desk"):
    """Notes numbers; some notes take a while, some need another desk."""

    @handler
    async def note(self, sender: str, number: int) -> int:
        enter(self.id, sender, number)
        return number

    @handler
    async def ponder(self, sender: str, number: int) -> int:
        enter(self.id, sender, number)
        await asyncio.sleep(self.random.random() ** 4 * 0.05)
        return number

    @handler
    async def relay(self, sender: str, number: int, to: str, inner: int) -> int:
        enter(self.id, sender, number)
        via, other = f"{sender} via {self.id}", self.ref(Desk, to)
        await other.tell(Desk.note, via, inner)
        return await other.ask(Desk.ponder, via, inner + 1)

    @handler
    async def labour(self, sender: str, number: int) -> int:
        """Slow enough to be found at work by whoever asks its node to leave."""
        enter(self.id, sender, number)
        await asyncio.sleep(1.5)
        return number


class Clerk(Entity, name="clerk"):
    """Quick and slow work and large answers, each of which is visible if it goes on too late."""

    @handler
    async def quick(self, load: bytes) -> int:
        return len(load)

    @handler(shared=True)
    async def patient(self, steps: int) -> int:
        for _ in range(steps):
            await asyncio.sleep(0.05)
        return steps

    @handler(shared=True)
    async def curious(self, other: str) -> int:
        await asyncio.sleep(0.02)
        return await self.ref(Clerk, other).ask(Clerk.quick, b"x" * 1_000)

    @handler
    async def bulk(self, size_bytes: int) -> bytes:
        return b"x" * size_bytes

    @handler
    async def stand_still(self) -> int:
        """Stop this whole process here, in the middle of a turn, until somebody continues it."""
        # To this thread: a signal to the process may be taken by another one, and this one runs on.
        signal.pthread_kill(threading.get_ident(), signal.SIGSTOP)
        return os.getpid()
