"""Clients of the failover benchmark: they number their writes, and know nothing of any product.

A session is one connection and never another one behind its user's back. `Probes` write to every
server at once, so what they see does not depend on how clients find a primary. Clients that stay
write to one server for as long as it answers: what they are refused is what a program would be
refused. `Followers` are the exception: each writes by way of a helper of Domicile's.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from time import monotonic
from typing import Any, Protocol

import asyncpg
from asyncpg.exceptions import InternalClientError

CONNECT_S = 2.0
ANSWER_S = 0.5
"""A probe that is not answered within this time begins a new session."""

PATIENT_S = 15.0
"""So long a client that stays waits for its answer: longer than a switchover may take."""

EVERY_S = 0.005
AGAIN_S = 0.02

FAILURES = (OSError, TimeoutError, asyncpg.PostgresError, asyncpg.InterfaceError,
            InternalClientError, asyncio.IncompleteReadError)  # fmt: skip


class Session(Protocol):
    """One connection of a client."""

    async def write(self, key: str) -> bool:
        """Whether the server acknowledged; False: it refused."""
        ...

    def close(self) -> None:
        """Let go of it."""
        ...


Connect = Callable[[int], Any]
"""Opens a session to a port of this machine; a coroutine function."""


class ValkeySession:
    """Speaks RESP on one connection."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer

    async def write(self, key: str) -> bool:
        """As `Session.write`."""
        return await self.ask("SET", key, "1") == "OK"

    async def ask(self, *words: str) -> Any:
        """One command and its answer; an error is a text that begins with a minus sign."""
        parts = "".join(f"${len(word)}\r\n{word}\r\n" for word in words)
        self._writer.write(f"*{len(words)}\r\n{parts}".encode())
        return await self._answer()

    async def _answer(self) -> Any:
        line = (await self._reader.readuntil(b"\r\n"))[:-2].decode()
        kind, rest = line[:1], line[1:]
        if kind == "$":
            size = int(rest)
            return "" if size < 0 else (await self._reader.readexactly(size + 2)).decode()[:-2]
        if kind == "*":
            return [await self._answer() for _ in range(int(rest))]
        return line if kind == "-" else rest

    def close(self) -> None:
        """As `Session.close`."""
        self._writer.close()


async def valkey(port: int) -> ValkeySession:
    """A session to a Valkey server."""
    async with asyncio.timeout(CONNECT_S):
        return ValkeySession(*await asyncio.open_connection("127.0.0.1", port, limit=1 << 26))


class PostgresSession:
    """One connection to PostgreSQL, as a role that may write one table."""

    def __init__(self, connection: Any) -> None:
        self._connection = connection

    async def write(self, key: str) -> bool:
        """As `Session.write`."""
        try:
            await self._connection.execute(f"INSERT INTO public.kept VALUES ('{key}')")
        except asyncpg.ReadOnlySQLTransactionError:
            return False
        return True

    def close(self) -> None:
        """As `Session.close`."""
        self._connection.terminate()


async def postgres(port: int) -> PostgresSession:
    """A session to a PostgreSQL server."""
    connection = await asyncpg.connect(
        host="127.0.0.1", port=port, user="app", database="postgres", timeout=CONNECT_S, ssl=False
    )
    return PostgresSession(connection)


@dataclass(frozen=True, slots=True)
class Acked:
    """A write that a server acknowledged."""

    key: str
    server: int
    """-1: the client does not know."""
    sent_at: float
    acked_at: float


class Clients:
    """All clients of one run, from `async with` to its end."""

    def __init__(self, connect: Connect, ports: Sequence[int]) -> None:
        self._connect, self._ports = connect, ports
        self._numbers = itertools.count(1)
        self._tasks: list[asyncio.Task[None]] = []
        self.acked: list[Acked] = []
        self.failed = 0
        """Writes of clients that stay which were refused or not answered."""

    async def __aenter__(self) -> Clients:
        """Begin with the probes."""
        for server in range(len(self._ports)):
            self._tasks.append(asyncio.create_task(self._probe(server)))
        return self

    async def __aexit__(self, *exc: object) -> None:
        """End all."""
        await self.end()

    async def end(self) -> None:
        """Nothing is written any more."""
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)
        self._tasks.clear()

    async def stay_instead(self, server: int, number: int) -> None:
        """So many clients that stay with a server take the place of the probes."""
        await self.end()
        for _ in range(number):
            self._tasks.append(asyncio.create_task(self._stay(server)))

    async def _probe(self, server: int) -> None:
        while True:
            with suppress(*FAILURES):
                session = await self._connect(self._ports[server])
                try:
                    while await self._write(session, server, ANSWER_S):  # noqa: ASYNC110
                        await asyncio.sleep(EVERY_S)
                    while not await self._write(session, server, ANSWER_S):  # noqa: ASYNC110
                        await asyncio.sleep(AGAIN_S)
                finally:
                    session.close()
            await asyncio.sleep(AGAIN_S)

    async def _stay(self, server: int) -> None:
        while True:
            served = False
            try:
                session: Session = await self._connect(self._ports[server])
                try:
                    while await self._write(session, server, PATIENT_S):
                        served = True
                        await asyncio.sleep(EVERY_S)
                    self.failed += served
                finally:
                    session.close()
            except FAILURES:
                # Only a session that has served is a program's; the others look for the primary.
                self.failed += served
            server = (server + 1) % len(self._ports)
            await asyncio.sleep(AGAIN_S)

    async def _write(self, session: Session, server: int, limit_s: float) -> bool:
        key = f"w{next(self._numbers):07d}"
        sent_at = monotonic()
        async with asyncio.timeout(limit_s):
            taken = await session.write(key)
        if taken:
            self.acked.append(Acked(key, server, sent_at, monotonic()))
        return taken


Write = Callable[[str], Awaitable[object]]
"""Writes one key; any error means that a program's write has failed."""

ANY_NUMBER = 1 << 20
"""Each client of a helper numbers its keys in a range of its own."""


class Followers:
    """Clients that write by what they are given, from `async with` to its end.

    Each writes one key after the other and goes on after a failure, as a program that reports it.
    """

    def __init__(self, writes: Sequence[Write]) -> None:
        self._writes = writes
        self._over = False
        self._tasks: list[asyncio.Task[None]] = []
        self.acked: list[list[Acked]] = [[] for _ in writes]
        """Of each client."""
        self.failed: list[Exception] = []

    async def __aenter__(self) -> Followers:
        """Begin to write."""
        for number in range(len(self._writes)):
            self._tasks.append(asyncio.create_task(self._keep_writing(number)))
        return self

    async def __aexit__(self, *exc: object) -> None:
        """End all."""
        await self.end()

    async def end(self) -> None:
        """Nothing is written any more."""
        self._over = True  # a client library may swallow the cancellation of a write
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)
        self._tasks.clear()

    def each_acked(self, least: int) -> bool:
        """Whether each client had so many writes acknowledged."""
        return all(len(each) >= least for each in self.acked)

    async def _keep_writing(self, number: int) -> None:
        for at in itertools.count(number * ANY_NUMBER):
            if self._over:
                return
            key, sent_at = f"w{at:07d}", monotonic()
            try:
                await self._writes[number](key)
            except Exception as error:
                # Whatever a helper raises is what a program would have to deal with.
                self.failed.append(error)
                await asyncio.sleep(AGAIN_S)
                continue
            self.acked[number].append(Acked(key, -1, sent_at, monotonic()))
            await asyncio.sleep(EVERY_S)
