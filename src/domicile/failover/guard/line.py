"""An agent's connection to its guard. Implements the port `Guard`.

A connection lasts as long as the agent's incarnation: when it breaks, the guard has closed the
server, or the guard is gone and a server that was its child too. So the incarnation is over then.
"""

from __future__ import annotations

import asyncio
from pathlib import Path

import msgspec

from domicile.failover.guard.messages import (
    MOST_BYTES,
    ExtendDeadline,
    OpenServer,
    ShutServer,
    decode_answer,
    encode_line,
)
from domicile.failover.records import WriteQuorum

ANSWER_S = 10.0
"""A guard that does not answer within this time is taken for gone."""


class GuardLine:
    """Open it with `connected`. Calls are sent at once and in their order, whatever becomes of
    them."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer
        self._numbers = 0
        self._waiting: dict[int, asyncio.Future[str]] = {}
        self._over = False

    @classmethod
    async def connected(cls, socket: Path) -> GuardLine:
        """A new connection; `OSError` if no guard is there."""
        return cls(*await asyncio.open_unix_connection(socket, limit=MOST_BYTES))

    async def keep_reading(self) -> None:
        """Take answers until the connection ends. Run it as a task beside the calls."""
        try:
            while line := await self._reader.readline():
                answer = decode_answer(line)
                waiting = self._waiting.get(answer.number)
                if waiting is not None and not waiting.done():
                    waiting.set_result(answer.error)
        except (OSError, ValueError, msgspec.MsgspecError):
            # A guard of another version, or one that was killed within a line: it is gone for us.
            pass
        finally:
            self._over = True
            for waiting in self._waiting.values():
                if not waiting.done():
                    waiting.set_result("the guard is gone")
            self._writer.close()

    async def open(self, epoch: int, run: str, until: float, quorum: WriteQuorum | None) -> None:
        """As `Guard.open`."""
        self._numbers += 1
        await self._ask(self._numbers, OpenServer(self._numbers, epoch, run, until, quorum))

    def extend(self, until: float) -> None:
        """As `Guard.extend`."""
        if not self._over:
            self._writer.write(encode_line(ExtendDeadline(until)))

    async def shut(self) -> None:
        """As `Guard.shut`."""
        self._numbers += 1
        await self._ask(self._numbers, ShutServer(self._numbers))

    async def _ask(self, number: int, order: OpenServer | ShutServer) -> None:
        if self._over:
            raise ConnectionError("the guard is gone")
        waiting = self._waiting[number] = asyncio.get_running_loop().create_future()
        self._writer.write(encode_line(order))
        try:
            async with asyncio.timeout(ANSWER_S):
                error = await waiting
        finally:
            del self._waiting[number]
        if error:
            raise ConnectionError(f"the guard: {error}")
