"""A server of HTTP in this process, for clients of the Kubernetes API: it keeps what arrived."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

ANSWER = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}"
PIECE_BYTES = 1 << 16


class HttpServer:
    """Answers each request on a port of its own, and keeps what arrived."""

    def __init__(self) -> None:
        self.received = b""
        self.url = ""
        self.answers: list[bytes] = []
        """What is said to the next requests, before `ANSWER` is. An empty one ends the
        connection."""
        self.hold: asyncio.Event | None = None
        """What a request that arrives now waits for before it is answered."""
        self.connections = 0
        self.sent_bytes = 0
        """Of the answers, as far as they were taken off our hands."""
        self.writers: list[asyncio.StreamWriter] = []

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        self.writers.append(writer)
        try:
            while head := await reader.readuntil(b"\r\n\r\n"):
                self.received += head
                if self.hold is not None:
                    await self.hold.wait()
                answer = self.answers.pop(0) if self.answers else ANSWER
                if not answer:
                    break
                for first in range(0, len(answer), PIECE_BYTES):
                    writer.write(answer[first : first + PIECE_BYTES])
                    await writer.drain()
                    self.sent_bytes = first + PIECE_BYTES
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()


@asynccontextmanager
async def served() -> AsyncIterator[HttpServer]:
    made = HttpServer()
    server = await asyncio.start_server(made.serve, "127.0.0.1", 0)
    made.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    async with server:
        yield made
