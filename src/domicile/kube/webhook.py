"""The webhook's server: HTTPS, reviews in, reviews out.

It knows HTTP and limits, not rings: `answer` makes the body. Everything is bounded (I6): body,
time, connections. A certificate that was made anew is taken for the next connection.
"""

from __future__ import annotations

import asyncio
import logging
import ssl
from collections.abc import Awaitable, Callable
from contextlib import suppress

import h11

from domicile.errors import ConfigError

log = logging.getLogger("domicile.kube")

MAX_BODY_BYTES = 16 << 20
"""A review has an object twice, and the API server takes none of more than 3 MiB."""

MAX_CONNECTIONS = 512
IDLE_S = 120.0
REQUEST_S = 10.0
READ_BYTES = 1 << 16

ReviewAnswer = Callable[[str, bytes], Awaitable[bytes]]


class WebhookServer:
    """Serves reviews at an address from `start` to `close`."""

    def __init__(self, host: str, port: int, tls: ssl.SSLContext, answer: ReviewAnswer) -> None:
        self._host, self._port, self._tls, self._answer = host, port, tls, answer
        self._server: asyncio.Server | None = None
        self._serving: dict[asyncio.Task[None], None] = {}

    @property
    def port(self) -> int:
        """The port, once it listens."""
        assert self._server is not None
        port: int = self._server.sockets[0].getsockname()[1]
        return port

    async def start(self) -> None:
        """Listen. Raises `ConfigError` if that can't be done."""
        try:
            self._server = await asyncio.start_server(
                self._accept, self._host, self._port, ssl=self._tls, ssl_handshake_timeout=REQUEST_S
            )
        except OSError as error:
            raise ConfigError(
                f"the webhook can't listen at {self._host}:{self._port}: {error.strerror or error}"
            ) from error

    async def close(self) -> None:
        """Stop listening; requests that are being answered are answered."""
        if self._server is None:
            return
        server, self._server = self._server, None
        server.close()
        tasks = list(self._serving)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self._server is None or len(self._serving) >= MAX_CONNECTIONS:
            writer.transport.abort()
            return
        task = asyncio.get_running_loop().create_task(
            self._serve(reader, writer), name="domicile-webhook"
        )
        self._serving[task] = None
        task.add_done_callback(self._served)

    def _served(self, task: asyncio.Task[None]) -> None:
        self._serving.pop(task, None)
        if not task.cancelled() and task.exception() is not None:
            log.error("a connection of the webhook failed", exc_info=task.exception())

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connection = h11.Connection(h11.SERVER)
        try:
            with suppress(TimeoutError, ConnectionError, ssl.SSLError, h11.RemoteProtocolError):
                while await self._one(connection, reader, writer):
                    connection.start_next_cycle()
        finally:
            writer.transport.abort()

    async def _one(
        self,
        connection: h11.Connection,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
    ) -> bool:
        """Answer one request; whether the connection can take another one."""
        async with asyncio.timeout(IDLE_S):
            request = await _next(connection, reader)
        if not isinstance(request, h11.Request):
            return False  # the peer closed the connection
        body = bytearray()
        async with asyncio.timeout(REQUEST_S):
            while isinstance(event := await _next(connection, reader), h11.Data):
                body += event.data
                if len(body) > MAX_BODY_BYTES:
                    break
            if len(body) > MAX_BODY_BYTES:
                status, said = 413, b"too large\n"
            elif request.method != b"POST":
                status, said = 405, b"POST an AdmissionReview\n"
            elif isinstance(event, h11.EndOfMessage):
                path = request.target.decode("latin-1").partition("?")[0]
                status, said = 200, await self._answer(path, bytes(body))
            else:
                return False
            headers = [("Content-Type", "application/json"), ("Content-Length", str(len(said)))]
            head = connection.send(h11.Response(status_code=status, headers=headers))
            data = connection.send(h11.Data(said))
            end = connection.send(h11.EndOfMessage())
            writer.write((head or b"") + (data or b"") + (end or b""))
            await writer.drain()
        return connection.our_state is h11.DONE and connection.their_state is h11.DONE


async def _next(connection: h11.Connection, reader: asyncio.StreamReader) -> object:
    while True:
        event = connection.next_event()
        if event is not h11.NEED_DATA:
            return event
        connection.receive_data(await reader.read(READ_BYTES))
