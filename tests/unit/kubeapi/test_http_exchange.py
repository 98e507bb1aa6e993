"""The exchange over HTTP: connections that are kept, answers that break off, what is asked directly
before a request is sent."""

from __future__ import annotations

import asyncio
import re
import socket
import sys
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import suppress
from functools import partial
from random import Random
from typing import Any

import pytest
import uvloop
from http_lab import ANSWER, HttpServer, served

from domicile.errors import ConfigError, Fenced
from domicile.kubeapi import http_exchange
from domicile.kubeapi.credentials import Credentials
from domicile.kubeapi.exchange import ApiAnswer, ApiRequest, BrokenExchange
from domicile.kubeapi.http_exchange import MAX_CONNECTIONS, MAX_WAITING_BYTES, HttpExchange

LOOPS: list[Callable[[], asyncio.AbstractEventLoop]] = [
    asyncio.new_event_loop,
    uvloop.new_event_loop,  # kopf takes it where it is installed
]
chosen = LOOPS[0]


@pytest.fixture(autouse=True, params=LOOPS, ids=["asyncio", "uvloop"])
def loop(request: pytest.FixtureRequest) -> None:
    """Each test runs on either loop."""
    global chosen
    chosen = request.param


def run(scenario: Coroutine[Any, Any, None]) -> None:
    with asyncio.Runner(loop_factory=chosen) as runner:
        runner.run(scenario)


def on_a_server(body: Callable[[HttpServer, HttpExchange], Awaitable[None]]) -> None:
    """Run a test beside a server, with an exchange to it."""

    async def scenario() -> None:
        async with served() as server:
            exchange = HttpExchange(Credentials(server.url))
            try:
                await body(server, exchange)
            finally:
                await exchange.close()

    run(scenario())


async def asked(exchange: HttpExchange, path: str, method: str = "GET") -> tuple[int, bytes]:
    async with exchange.open(ApiRequest(method, path)) as answer:
        return answer.status, await whole(answer)


async def until_none_is_left(exchange: HttpExchange) -> None:
    async with asyncio.timeout(30):
        while exchange._open:  # pyright: ignore[reportPrivateUsage] # noqa: ASYNC110
            await asyncio.sleep(0.01)


async def whole(answer: ApiAnswer) -> bytes:
    return b"".join([piece async for piece in answer.chunks()])


def test_a_request_is_checked_after_its_connection_is_there() -> None:
    async def body(server: HttpServer, exchange: HttpExchange) -> None:
        asked_before: list[str] = []
        check = partial(asked_before.append, "before")
        async with exchange.open(ApiRequest("GET", "/first", before_sending=check)) as answer:
            assert answer.status == 200
        assert asked_before == ["before"]

        def refuse() -> None:
            raise Fenced("the Lease is over")

        # On the connection that is there, and on one that has to be made.
        for _ in range(2):
            with pytest.raises(Fenced, match="the Lease is over"):
                async with exchange.open(ApiRequest("POST", "/late", before_sending=refuse)):
                    raise AssertionError("it was sent")
            for writer in server.writers:
                writer.close()
            await until_none_is_left(exchange)
        assert await asked(exchange, "/last", "POST") == (200, b"{}")
        assert b"/late" not in server.received
        assert server.received.count(b" HTTP/1.1\r\n") == 2

    on_a_server(body)


def test_without_a_connection_nothing_is_asked() -> None:
    async def scenario() -> None:
        async with served() as server:
            gone = server.url
        exchange = HttpExchange(Credentials(gone))

        def check() -> None:
            raise AssertionError("there is no connection yet")

        with pytest.raises(BrokenExchange, match="no connection") as broken:
            async with exchange.open(ApiRequest("POST", "/", before_sending=check)):
                pass
        assert not broken.value.sent
        await exchange.close()

    run(scenario())


@pytest.mark.skipif(sys.platform != "linux", reason="other systems answer otherwise when full")
def test_the_next_address_of_a_name_is_tried_while_there_is_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(http_exchange, "CONNECT_S", 4.0)

    async def body(server: HttpServer, exchange: HttpExchange) -> None:
        loop = asyncio.get_running_loop()
        full = socket.socket()
        full.bind(("127.0.0.2", exchange._port))  # pyright: ignore[reportPrivateUsage]
        full.listen(0)
        clients = [socket.socket() for _ in range(4)]
        for one in clients:
            one.setblocking(False)
            one.connect_ex(full.getsockname())

        async def resolved(_: object) -> list[str]:
            return ["127.0.0.2", "127.0.0.1"]

        monkeypatch.setattr(exchange, "_addresses", resolved)
        try:
            began = loop.time()
            assert await asked(exchange, "/") == (200, b"{}")
            assert loop.time() - began >= 1.9
        finally:
            for one in (*clients, full):
                one.close()

    on_a_server(body)


def test_a_connection_is_kept_for_the_next_request() -> None:
    async def body(server: HttpServer, exchange: HttpExchange) -> None:
        for _ in range(3):
            assert await asked(exchange, "/again") == (200, b"{}")
        async with exchange.open(ApiRequest("GET", "/unread")) as answer:
            assert answer.status == 200
        assert server.connections == 1
        await asyncio.gather(*(asked(exchange, f"/{number}") for number in range(5)))
        assert server.connections <= 6
        # What a server sends of its own accord is no answer to the next request.
        made = server.connections
        for writer in server.writers:
            writer.write(b"HTTP/1.1 408 Request Timeout\r\nContent-Length: 0\r\n\r\n")
        await until_none_is_left(exchange)
        assert await asked(exchange, "/next") == (200, b"{}")
        assert server.connections == made + 1

    on_a_server(body)


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nConnection: close\r\n\r\n{}", b"{}"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}rest", b"{}"),
        (b"HTTP/1.0 200 OK\r\nContent-Length: 2\r\n\r\n{}", b"{}"),
    ],
)
def test_a_connection_that_is_over_is_not_used_again(answer: bytes, said: bytes) -> None:
    async def body(server: HttpServer, exchange: HttpExchange) -> None:
        server.answers.append(answer)
        assert await asked(exchange, "/first") == (200, said)
        assert await asked(exchange, "/second") == (200, b"{}")
        assert server.connections == 2

    on_a_server(body)


def test_a_connection_that_was_idle_for_long_is_not_used_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(http_exchange, "KEEP_S", 0.0)

    async def body(server: HttpServer, exchange: HttpExchange) -> None:
        for number in range(1, 4):
            await asked(exchange, "/")
            assert server.connections == number

    on_a_server(body)


def test_a_connection_that_showed_a_former_certificate_is_not_used_again() -> None:
    """Also one that was in use when there was another: it would be used for ever if it is busy."""

    async def body(server: HttpServer, exchange: HttpExchange) -> None:
        async with exchange.open(ApiRequest("GET", "/")) as answer:
            # As `_token` does, for another request.
            exchange._shown = b"another"  # pyright: ignore[reportPrivateUsage]
            assert await whole(answer) == b"{}"
        for _ in range(2):
            assert await asked(exchange, "/") == (200, b"{}")
            assert server.connections == 2

    on_a_server(body)


def test_a_chunked_answer_and_one_after_other_news() -> None:
    async def body(server: HttpServer, exchange: HttpExchange) -> None:
        server.answers.append(
            b"HTTP/1.1 103 Early Hints\r\n\r\n"
            b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\nRetry-After: 7\r\n\r\n"
            b"3\r\none\r\n3\r\ntwo\r\n0\r\n\r\n"
        )
        async with exchange.open(ApiRequest("GET", "/watch")) as answer:
            assert answer.headers["retry-after"] == "7"
            assert await whole(answer) == b"onetwo"
        await asked(exchange, "/")
        assert server.connections == 1

    on_a_server(body)


@pytest.mark.parametrize(
    ("answer", "why"),
    [
        (b"", "closed the connection"),
        (b"HTTP/1.1 200 OK\r\nContent-", "closed the connection"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\n{}", "closed the connection"),
        (b"nonsense\r\n\r\n", "no HTTP"),
        (b"HTTP/1.1 200 OK\r\nX: " + b"x" * (1 << 17), "no HTTP"),
    ],
)
def test_an_answer_that_breaks_off_may_belong_to_what_was_done(answer: bytes, why: str) -> None:
    async def body(server: HttpServer, exchange: HttpExchange) -> None:
        server.answers += [answer, b""]
        if answer:
            # The connection ends after it.
            asyncio.get_running_loop().call_later(0.05, ends_all, server)
        with pytest.raises(BrokenExchange, match=why) as broken:
            await asked(exchange, "/", "POST")
        assert broken.value.sent

    def ends_all(server: HttpServer) -> None:
        for writer in server.writers:
            writer.close()

    on_a_server(body)


def test_a_server_waits_while_an_answer_is_not_read() -> None:
    size = 64 << 20

    async def body(server: HttpServer, exchange: HttpExchange) -> None:
        head = b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % size
        server.answers.append(head + bytes(size))
        async with exchange.open(ApiRequest("GET", "/list")) as answer:
            pieces = answer.chunks()
            read = len(await anext(pieces))
            before = -1
            while server.sent_bytes != before:
                # It stands still: what lies between us is full.
                before = server.sent_bytes
                await asyncio.sleep(0.2)
            assert before < size / 2
            connection = next(iter(exchange._open))  # pyright: ignore[reportPrivateUsage]
            assert connection._waiting_bytes < 4 * MAX_WAITING_BYTES  # pyright: ignore[reportPrivateUsage]
            async for piece in pieces:
                read += len(piece)
            assert read == size
        assert await asked(exchange, "/next") == (200, b"{}")
        assert server.connections == 1

    on_a_server(body)


def test_a_request_that_is_given_up_takes_its_connection_along() -> None:
    async def body(server: HttpServer, exchange: HttpExchange) -> None:
        server.answers.append(b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nslow")
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.1):
                await asked(exchange, "/slow")
        assert await asked(exchange, "/next") == (200, b"{}")
        assert server.connections == 2
        assert len(exchange._open) == 1  # pyright: ignore[reportPrivateUsage]
        reading = asyncio.ensure_future(asked(exchange, "/slow"))
        server.answers.append(b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nslow")
        while b"/slow" not in server.received.rpartition(b"/next")[2]:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        await exchange.close()
        with pytest.raises(BrokenExchange) as broken:
            await reading
        assert broken.value.sent
        with pytest.raises(RuntimeError, match="was closed"):
            await asked(exchange, "/late")

    on_a_server(body)


def test_an_address_may_have_a_path_and_a_query_has_signs() -> None:
    async def scenario() -> None:
        async with served() as server:
            exchange = HttpExchange(Credentials(f"{server.url}/k8s/clusters/one", token="t"))
            query = {"labelSelector": "a/b=c d,!e", "resourceVersion": "0"}
            async with exchange.open(ApiRequest("GET", "/api/v1/pods", query)) as answer:
                assert answer.status == 200
            await exchange.close()
            head = server.received.decode().split("\r\n")
            assert head[0] == (
                "GET /k8s/clusters/one/api/v1/pods?labelSelector=a%2Fb%3Dc%20d%2C%21e"
                "&resourceVersion=0 HTTP/1.1"
            )
            assert f"Host: {server.url.removeprefix('http://')}" in head
            assert "Authorization: Bearer t" in head
            assert not [line for line in head if line.startswith("Content-Length")]

    run(scenario())


def test_a_token_that_is_no_header_is_never_shown() -> None:
    async def scenario() -> None:
        async with served() as server:
            exchange = HttpExchange(Credentials(server.url, token="s3cret\nvalue"))
            with pytest.raises(ConfigError, match="look at the token") as told:
                await asked(exchange, "/")
            await exchange.close()
            assert "s3cret" not in str(told.value)
            assert told.value.__cause__ is None
            assert not server.received

    run(scenario())


class HeldServer:
    """A server whose connections the test itself answers and ends, between two turns of the
    client's loop."""

    def __init__(self) -> None:
        self._socket = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._socket.getsockname()[1]}"
        self.connection = socket.socket()

    async def answers(self, asking: Awaitable[tuple[int, bytes]]) -> tuple[int, bytes]:
        """The answer to the first request of the next connection."""
        loop = asyncio.get_running_loop()
        self._socket.setblocking(False)
        task = asyncio.ensure_future(asking)
        accepting = asyncio.ensure_future(loop.sock_accept(self._socket))
        async with asyncio.timeout(60):
            await asyncio.wait({task, accepting}, return_when=asyncio.FIRST_COMPLETED)
            if task.done():
                accepting.cancel()
                return await task
            self.connection, _ = await accepting
            self.connection.setblocking(False)
            await loop.sock_recv(self.connection, 1 << 16)
            await loop.sock_sendall(self.connection, ANSWER)
            return await task

    def close(self) -> None:
        self.connection.close()
        self._socket.close()


@pytest.mark.parametrize(
    "news", [b"", b"HTTP/1.1 408 Request Timeout\r\nContent-Length: 0\r\n\r\n"]
)
def test_a_kept_connection_with_news_that_the_loop_has_not_seen_is_not_used(news: bytes) -> None:
    """Else a write has no answer, or it has one to no request, and nobody knows whether it ran."""

    async def scenario() -> None:
        server = HeldServer()
        exchange = HttpExchange(Credentials(server.url))
        try:
            assert await server.answers(asked(exchange, "/first")) == (200, b"{}")
            before = server.connection
            # A network's delay is nothing here: what is sent has arrived.
            before.sendall(news)
            if not news:
                before.shutdown(socket.SHUT_WR)
            assert await server.answers(asked(exchange, "/second", "POST")) == (200, b"{}")
            with before, suppress(ConnectionResetError):
                assert before.recv(1) == b"", "nothing was sent on it"
        finally:
            await exchange.close()
            server.close()

    run(scenario())


def test_what_waits_for_a_connection_while_the_exchange_is_closed_sends_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def body(server: HttpServer, exchange: HttpExchange) -> None:
        found = asyncio.Event()

        async def resolved(_: object) -> list[str]:
            await found.wait()
            return ["127.0.0.1"]

        monkeypatch.setattr(exchange, "_addresses", resolved)
        late = asyncio.create_task(asked(exchange, "/late", "POST"))
        await asyncio.sleep(0)
        await exchange.close()
        found.set()
        with pytest.raises(RuntimeError, match="was closed"):
            await late
        await until_none_is_left(exchange)
        assert not server.received

    on_a_server(body)


@pytest.mark.parametrize("name", ["a..b", "x" * 70])
def test_an_address_that_can_be_no_name_is_told_at_once(name: str) -> None:
    with pytest.raises(ConfigError, match="is no address"):
        HttpExchange(Credentials(f"https://{name}:6443"))


class Echo:
    """A server whose answers have the path of their request, framed and cut by chance."""

    def __init__(self, random: Random) -> None:
        self._random = random
        self.ran: list[str] = []

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            goes_on = True
            while goes_on:
                head = (await reader.readuntil(b"\r\n\r\n")).decode()
                size = re.search(r"(?i)content-length: (\d+)", head)
                await reader.readexactly(int(size[1]) if size else 0)
                self.ran.append(head.split()[1])
                answer, goes_on = self._answer(head.split()[1].encode())
                while answer:
                    cut = self._random.choice((1, 7, 100, 5_000, len(answer)))
                    writer.write(answer[:cut])
                    answer = answer[cut:]
                    await asyncio.sleep(0)
        except (asyncio.IncompleteReadError, ConnectionError, RuntimeError):
            pass  # uvloop raises the last one if the peer has gone
        finally:
            writer.close()

    def _answer(self, path: bytes) -> tuple[bytes, bool]:
        """What is said, and whether the connection is kept."""
        body = path * self._random.randrange(1, 100)
        known = b"Content-Length: %d\r\n\r\n" % len(body) + body
        way = self._random.randrange(7)
        ok = b"HTTP/1.1 200 OK\r\n"
        if way == 0:
            chunks = [body[at : at + 99] for at in range(0, len(body), 99)]
            framed = b"".join(b"%x\r\n%b\r\n" % (len(one), one) for one in chunks)
            return ok + b"Transfer-Encoding: chunked\r\n\r\n" + framed + b"0\r\n\r\n", True
        if way == 1:
            return b"HTTP/1.1 204 No Content\r\nX-Path: " + path + b"\r\n\r\n", True
        if way == 2:
            return ok + b"\r\n" + body, False
        if way == 3:
            cut = self._random.randrange(len(ok + known))
            return (ok + known)[:cut], False
        early = b"HTTP/1.1 103 Early Hints\r\n\r\n" if way == 4 else b""
        return early + ok + known, way != 5


@pytest.mark.parametrize("seed", range(3))
def test_each_request_has_its_own_answer_whatever_becomes_of_the_others(seed: int) -> None:
    """Many at once, cancelled, abandoned and broken off at any moment: no connection is given on
    with the rest of an answer, none is left, and none runs that was not sent."""
    random = Random(seed)
    echo = Echo(random)
    told: list[bool] = []

    async def one(exchange: HttpExchange, path: str) -> None:
        sent: list[str] = []
        method, body = random.choice((("GET", b""), ("POST", b"x" * 50_000)))
        request = ApiRequest(method, path, body=body, before_sending=lambda: sent.append(path))
        try:
            async with exchange.open(request) as answer:
                if random.random() < 0.1:
                    return
                if answer.status == 204:
                    assert answer.headers["x-path"] == path
                    return
                found = b""
                async for piece in answer.chunks():
                    found += piece
                    if random.random() < 0.02:
                        return
                assert found == path.encode() * (len(found) // len(path))
        except BrokenExchange as error:
            told.append(error.sent == bool(sent))
        finally:
            assert sent or path not in echo.ran

    async def scenario() -> None:
        server = await asyncio.start_server(echo.serve, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        exchange = HttpExchange(Credentials(f"http://127.0.0.1:{port}"))
        loop = asyncio.get_running_loop()
        asked: list[asyncio.Task[None]] = []
        async with server, asyncio.timeout(120):
            for number in range(400):
                asked.append(asyncio.create_task(one(exchange, f"/{number}/")))
                if random.random() < 0.3:
                    loop.call_later(random.choice((0, 0.001, 0.01)), asked[-1].cancel)
                if random.random() < 0.3:
                    await asyncio.wait(asked[-8:], return_when=asyncio.FIRST_COMPLETED)
            for outcome in await asyncio.gather(*asked, return_exceptions=True):
                assert outcome is None or isinstance(outcome, asyncio.CancelledError)
            assert told
            assert all(told)
            assert len(echo.ran) == len(set(echo.ran)) > 100
            assert exchange._places._value == MAX_CONNECTIONS  # pyright: ignore[reportPrivateUsage]
            await exchange.close()
            await until_none_is_left(exchange)

    run(scenario())
