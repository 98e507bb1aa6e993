"""A small HTTP/1.1 server for probes and scrapers: GET and HEAD of a few fixed paths.

Made by `incarnation.observation`. Everything is bounded (I6): the head of a request, the time for a
request, the connections at a time. Each connection answers one request and is closed. It reads only
the head, changes nothing, and must never raise into the loop: a hostile client costs one
connection. It is not a web framework and must not become one.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from http import HTTPStatus

from domicile.errors import ConfigError

log = logging.getLogger("domicile")

MAX_HEAD_BYTES = 8 * 1024
REQUEST_S = 5.0
MAX_CONNECTIONS = 32

_TEXT = "text/plain; charset=utf-8"


@dataclass(frozen=True, slots=True)
class Page:
    """The answer of a path."""

    status: HTTPStatus
    body: str
    content_type: str = _TEXT


Pages = Mapping[str, Callable[[], Page]]


class HttpServer:
    """Serves pages at an address from `start` to `close`, on the loop that started it."""

    def __init__(self, address: str, pages: Pages, *, request_s: float = REQUEST_S) -> None:
        self._host, self._port = split_address(address)
        self._pages = pages
        self._request_s = request_s
        self._server: asyncio.Server | None = None
        self._serving: dict[asyncio.Task[None], None] = {}

    @property
    def address(self) -> str:
        """Its address, as `host:port`; empty before `start` and after `close`."""
        if self._server is None or not self._server.sockets:
            return ""
        host, port = self._server.sockets[0].getsockname()[:2]
        return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"

    async def start(self) -> None:
        """Listen. Raises `ConfigError` if that can't be done at this address."""
        try:
            self._server = await asyncio.start_server(
                self._accept, self._host, self._port, limit=MAX_HEAD_BYTES
            )
        except OSError as error:
            raise ConfigError(
                f"http={self._host}:{self._port} can't be served: {error.strerror or error}; "
                "choose another port, or port 0 for any free one"
            ) from error

    async def close(self) -> None:
        """Stop listening and end the connections that are open."""
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
            self._serve(reader, writer), name="domicile-http"
        )
        self._serving[task] = None
        task.add_done_callback(self._served)

    def _served(self, task: asyncio.Task[None]) -> None:
        self._serving.pop(task, None)
        if not task.cancelled() and task.exception() is not None:
            log.error("an HTTP connection failed", exc_info=task.exception())

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            with suppress(TimeoutError, ConnectionError):
                async with asyncio.timeout(self._request_s):
                    await self._exchange(reader, writer)
                    writer.close()
                    await writer.wait_closed()
        finally:
            # Bytes that the client has not read by now are dropped.
            writer.transport.abort()

    async def _exchange(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            head = await reader.readuntil(b"\r\n\r\n")
        except asyncio.IncompleteReadError:
            return
        except asyncio.LimitOverrunError:
            page = _refusal(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE)
            writer.write(_response("GET", page))
        else:
            method, page = self._answer(head)
            writer.write(_response(method, page))
        await writer.drain()

    def _answer(self, head: bytes) -> tuple[str, Page]:
        line = head.split(b"\r\n", 1)[0].decode("latin-1")
        parts = line.split(" ")
        if len(parts) != 3 or not parts[2].startswith("HTTP/1."):
            return "GET", _refusal(HTTPStatus.BAD_REQUEST)
        method, target, _ = parts
        if method not in ("GET", "HEAD"):
            return method, _refusal(HTTPStatus.METHOD_NOT_ALLOWED)
        make = self._pages.get(target.partition("?")[0])
        if make is None:
            return method, _refusal(HTTPStatus.NOT_FOUND)
        try:
            return method, make()
        except Exception:
            log.exception("the page %s failed", target.partition("?")[0])
            return method, _refusal(HTTPStatus.INTERNAL_SERVER_ERROR)


def split_address(address: str) -> tuple[str, int]:
    """Host and port of `host:port`; `:port` is this machine only. `ConfigError` if it is neither.

    An IPv6 host is in brackets. A host that accepts connections from everywhere is written out:
    `0.0.0.0:9464`.
    """
    host, colon, port = address.rpartition(":")
    bare = host[1:-1] if host.startswith("[") and host.endswith("]") else host
    if (
        not colon
        or not (port.isascii() and port.isdigit() and int(port) < 65_536)
        or (":" in bare and bare == host)
        or (host and not bare)
    ):
        raise ConfigError(
            f"http={address!r} is no address: write host:port, as in http='127.0.0.1:9464', or "
            "port 0 for any free one"
        )
    return bare or "127.0.0.1", int(port)


def _refusal(status: HTTPStatus) -> Page:
    return Page(status, f"{status.phrase}\n")


def _response(method: str, page: Page) -> bytes:
    body = page.body.encode()
    head = [
        f"HTTP/1.1 {page.status.value} {page.status.phrase}",
        f"Content-Type: {page.content_type}",
        f"Content-Length: {len(body)}",
        "Cache-Control: no-store",
        "Connection: close",
    ]
    if page.status is HTTPStatus.METHOD_NOT_ALLOWED:
        head.append("Allow: GET, HEAD")
    text = "\r\n".join([*head, "", ""]).encode()
    return text if method == "HEAD" else text + body
