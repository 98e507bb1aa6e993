"""The little HTTP server: what it answers, and what hostile clients cost it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Coroutine
from contextlib import asynccontextmanager, suppress
from http import HTTPStatus
from typing import Any

import pytest

from domicile.errors import ConfigError
from domicile.observe import http
from domicile.observe.http import HttpServer, Page, split_address


def hello() -> Page:
    """A page."""
    return Page(HTTPStatus.OK, "héllo\n")


def broken() -> Page:
    """A page that fails."""
    raise ValueError("broken")


PAGES = {"/hello": hello, "/broken": broken}


def run(test: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(test, 30))


@asynccontextmanager
async def serving(**options: Any) -> AsyncGenerator[HttpServer]:
    """A server at a free port; nothing of it is left afterwards."""
    server = HttpServer("127.0.0.1:0", PAGES, **options)
    await server.start()
    try:
        yield server
    finally:
        await server.close()
    assert server.address == ""
    names = [task.get_name() for task in asyncio.all_tasks()]
    assert "domicile-http" not in names


async def connect(server: HttpServer) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    host, port = server.address.split(":")
    return await asyncio.open_connection(host, int(port))


async def say(server: HttpServer, request: bytes) -> bytes:
    """Everything that comes back, until the server closes."""
    reader, writer = await connect(server)
    writer.write(request)
    try:
        return await reader.read()
    except ConnectionResetError:
        return b""
    finally:
        writer.close()


def test_a_page() -> None:
    async def test() -> None:
        async with serving() as server:
            answer = await say(server, b"GET /hello?x=1 HTTP/1.1\r\nHost: x\r\n\r\n")
        head, _, body = answer.partition(b"\r\n\r\n")
        assert body.decode() == "héllo\n"
        assert head.split(b"\r\n") == [
            b"HTTP/1.1 200 OK",
            b"Content-Type: text/plain; charset=utf-8",
            b"Content-Length: 7",
            b"Cache-Control: no-store",
            b"Connection: close",
        ]

    run(test())


def test_head_is_a_page_without_its_body() -> None:
    async def test() -> None:
        async with serving() as server:
            answer = await say(server, b"HEAD /hello HTTP/1.1\r\n\r\n")
        assert answer.startswith(b"HTTP/1.1 200 OK\r\n")
        assert b"Content-Length: 7\r\n" in answer
        assert answer.endswith(b"\r\n\r\n")

    run(test())


@pytest.mark.parametrize(
    ("request_line", "status"),
    [
        (b"GET /nothing HTTP/1.1", b"404"),
        (b"POST /hello HTTP/1.1", b"405"),
        (b"GET /broken HTTP/1.1", b"500"),
        (b"GET /hello HTTP/2", b"400"),
        (b"\x00\xff\xfe", b"400"),
        (b"GET  /hello HTTP/1.1", b"400"),
        (b"", b"400"),
        (b"GET /hello HTTP/1.1\r\nX: " + b"x" * http.MAX_HEAD_BYTES, b"431"),
    ],
)
def test_what_is_no_such_request_is_refused(request_line: bytes, status: bytes) -> None:
    async def test() -> None:
        async with serving() as server:
            answer = await say(server, request_line + b"\r\n\r\n")
            assert answer[:13].split(b" ")[1] == status
            assert (b"Allow: GET, HEAD" in answer) == (status == b"405")
            assert (await say(server, b"GET /hello HTTP/1.1\r\n\r\n")).startswith(b"HTTP/1.1 200")

    run(test())


def test_a_head_without_end_costs_no_more_than_its_limit() -> None:
    async def test() -> None:
        async with serving() as server:
            answer = await say(server, b"x" * (64 * 1024))
            assert answer == b"" or answer.startswith(b"HTTP/1.1 431")
            assert (await say(server, b"GET /hello HTTP/1.1\r\n\r\n")).startswith(b"HTTP/1.1 200")

    run(test())


def test_one_that_says_nothing_is_closed_in_time() -> None:
    async def test() -> None:
        async with serving(request_s=0.05) as server:
            reader, writer = await connect(server)
            writer.write(b"GET /hel")
            with suppress(ConnectionResetError):
                assert await reader.read() == b""
            writer.close()

    run(test())


def test_one_that_goes_away_in_the_middle_harms_nothing(caplog: pytest.LogCaptureFixture) -> None:
    async def test() -> None:
        async with serving() as server:
            for data in (b"", b"GET /hello", b"GET /hello HTTP/1.1\r\n\r\n"):
                _, writer = await connect(server)
                writer.write(data)
                writer.transport.abort()
            assert (await say(server, b"GET /hello HTTP/1.1\r\n\r\n")).startswith(b"HTTP/1.1 200")

    run(test())
    assert caplog.records == []


def test_connections_are_bounded_and_free_again() -> None:
    async def test() -> None:
        async with serving() as server:
            idle = [await connect(server) for _ in range(http.MAX_CONNECTIONS)]
            # The last of them was accepted once the server has a task for each.
            while len(server._serving) < http.MAX_CONNECTIONS:  # noqa: ASYNC110
                await asyncio.sleep(0.001)
            assert await say(server, b"GET /hello HTTP/1.1\r\n\r\n") == b""
            for _, writer in idle:
                writer.close()
            while server._serving:  # noqa: ASYNC110
                await asyncio.sleep(0.001)
            assert (await say(server, b"GET /hello HTTP/1.1\r\n\r\n")).startswith(b"HTTP/1.1 200")

    run(test())


def test_closing_ends_the_open_connections() -> None:
    async def test() -> None:
        async with serving(request_s=3600) as server:
            reader, writer = await connect(server)
            while not server._serving:  # noqa: ASYNC110
                await asyncio.sleep(0.001)
        with suppress(ConnectionResetError):
            assert await reader.read() == b""
        writer.close()

    run(test())


def test_a_port_that_is_taken_is_a_readable_error() -> None:
    async def test() -> None:
        async with serving() as server:
            other = HttpServer(server.address, PAGES)
            with pytest.raises(ConfigError, match=r"can't be served.*another port"):
                await other.start()
            await other.close()

    run(test())


@pytest.mark.parametrize(
    ("address", "host", "port"),
    [
        ("127.0.0.1:9464", "127.0.0.1", 9464),
        (":0", "127.0.0.1", 0),
        ("0.0.0.0:80", "0.0.0.0", 80),
        ("[::1]:80", "::1", 80),
        ("localhost:65535", "localhost", 65535),
    ],
)
def test_addresses(address: str, host: str, port: int) -> None:
    assert split_address(address) == (host, port)


@pytest.mark.parametrize(
    "address", ["9464", "localhost", "x:65536", "x:-1", "::1:80", "[]:1", "x:٣"]
)
def test_what_is_no_address_is_refused(address: str) -> None:
    with pytest.raises(ConfigError, match="is no address"):
        split_address(address)
