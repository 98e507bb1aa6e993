"""The byte proxy: what a connection through it suffers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import pytest

from domicile.testing.suites.byte_proxy import ByteProxy

LIMIT_S = 60.0
Line = tuple[asyncio.StreamReader, asyncio.StreamWriter]


class Echo:
    """A server that says every line back, and knows what it got."""

    def __init__(self) -> None:
        self.got: list[bytes] = []

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while line := await reader.readline():
                self.got.append(line)
                writer.write(line)
                await writer.drain()
        except OSError:
            pass
        finally:
            writer.close()


@asynccontextmanager
async def proxied() -> AsyncIterator[tuple[ByteProxy, Echo]]:
    echo = Echo()
    server = await asyncio.start_server(echo.serve, "127.0.0.1", 0)
    async with server, ByteProxy("127.0.0.1", server.sockets[0].getsockname()[1]) as proxy:
        yield proxy, echo


def run(scenario: Callable[[ByteProxy, Echo], Awaitable[None]]) -> None:
    async def main() -> None:
        async with asyncio.timeout(LIMIT_S), proxied() as (proxy, echo):
            await scenario(proxy, echo)

    asyncio.run(main())


async def dial(proxy: ByteProxy) -> Line:
    return await asyncio.open_connection("127.0.0.1", proxy.port)


async def said(line: Line, text: bytes) -> bytes:
    line[1].write(text)
    return await line[0].readline()


def test_bytes_pass_and_a_cut_resets_what_is_open() -> None:
    async def scenario(proxy: ByteProxy, echo: Echo) -> None:
        line = await dial(proxy)
        assert await said(line, b"one\n") == b"one\n"
        await proxy.cut()
        with pytest.raises(ConnectionError):
            await said(line, b"two\n")
        assert await said(await dial(proxy), b"three\n") == b"three\n"
        assert echo.got == [b"one\n", b"three\n"]

    run(scenario)


def test_one_request_is_kept_back_and_others_pass() -> None:
    async def scenario(proxy: ByteProxy, echo: Echo) -> None:
        line, other = await dial(proxy), await dial(proxy)
        assert await said(line, b"before\n") == b"before\n"
        kept = await proxy.keep_back(b"this one")
        # It comes in two pieces, and a server does nothing with half of it.
        line[1].write(b"th")
        await line[1].drain()
        asked = asyncio.ensure_future(said(line, b"is one\nand the next\n"))
        assert await said(other, b"another\n") == b"another\n"
        await kept.here()
        assert await said(other, b"more\n") == b"more\n"
        assert echo.got == [b"before\n", b"another\n", b"more\n"]
        assert not asked.done()
        await kept.let_go()
        assert await asked == b"this one\n"
        assert await line[0].readline() == b"and the next\n"
        assert await said(line, b"this one again\n") == b"this one again\n"

    run(scenario)


def test_a_request_that_is_never_let_go_ends_with_the_proxy() -> None:
    async def main() -> None:
        async with asyncio.timeout(LIMIT_S):
            async with proxied() as (proxy, echo):
                line = await dial(proxy)
                assert await said(line, b"this\n") == b"this\n"
                # What came before does not count.
                kept = await proxy.keep_back(b"this")
                assert await said(line, b"another\n") == b"another\n"
                asked = asyncio.ensure_future(said(line, b"this\n"))
                await kept.here()
            with pytest.raises(ConnectionError):
                await asked
            assert echo.got == [b"this\n", b"another\n"]

    asyncio.run(main())


def test_a_lost_answer_is_of_a_request_that_arrived() -> None:
    async def scenario(proxy: ByteProxy, echo: Echo) -> None:
        line = await dial(proxy)
        await proxy.lose_next_answer(b"this")
        assert await said(line, b"another\n") == b"another\n"
        with pytest.raises(ConnectionError):
            await said(line, b"this one\n")
        assert echo.got == [b"another\n", b"this one\n"]
        assert proxy.lost == 1
        assert await said(await dial(proxy), b"this\n") == b"this\n"

    run(scenario)


def test_held_bytes_pass_in_the_end() -> None:
    async def scenario(proxy: ByteProxy, echo: Echo) -> None:
        line = await dial(proxy)
        assert await said(line, b"one\n") == b"one\n"
        await proxy.hold()
        answer = asyncio.ensure_future(said(line, b"two\n"))
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.05):
                await asyncio.shield(answer)
        assert echo.got == [b"one\n"]
        await proxy.release()
        assert await answer == b"two\n"

    run(scenario)


def test_who_is_refused_gets_a_reset() -> None:
    async def scenario(proxy: ByteProxy, echo: Echo) -> None:
        await proxy.refuse()
        with pytest.raises(ConnectionError):
            await said(await dial(proxy), b"one\n")
        await proxy.release()
        assert await said(await dial(proxy), b"two\n") == b"two\n"
        assert echo.got == [b"two\n"]

    run(scenario)


def test_delays_are_of_requests() -> None:
    async def scenario(proxy: ByteProxy, echo: Echo) -> None:
        line = await dial(proxy)
        await proxy.delay(0.05)
        loop = asyncio.get_running_loop()
        began = loop.time()
        assert await said(line, b"one\n") == b"one\n"
        assert loop.time() - began >= 0.05

    run(scenario)
