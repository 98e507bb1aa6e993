"""The fault proxy: bytes arrive late or not at all, but never twice, changed or out of order."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any

import pytest

from domicile.testing.processes.fault_proxy import CLIENT, Gates, Rule

SOON_S = 10.0
THERE, BACK = (CLIENT, 0), (0, CLIENT)


class Echo:
    """A server behind a gate that sends everything back, and the gate before it."""

    def __init__(self, gates: Gates, gate: int, server: asyncio.Server) -> None:
        self.gates, self.gate, self.server = gates, gate, server
        self.got = bytearray()

    async def connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """A connection through the gate."""
        return await asyncio.open_connection("127.0.0.1", self.gate)


@asynccontextmanager
async def echo(seed: int = 0) -> AsyncIterator[Echo]:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(65_536):
            found.got += data
            writer.write(data)
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    address: tuple[str, int] = server.sockets[0].getsockname()

    def dial(node: int) -> tuple[socket.socket, tuple[str, int]]:
        assert node == 0
        sock = socket.socket()
        sock.setblocking(False)
        return sock, address

    gates = Gates(seed, lambda host: CLIENT, dial)
    gate = socket.create_server(("127.0.0.1", 0))
    await gates.stand(0, gate)
    found = Echo(gates, gate.getsockname()[1], server)
    try:
        yield found
    finally:
        gates.close()
        server.close()


def run(test: Callable[[], Coroutine[Any, Any, None]]) -> None:
    asyncio.run(asyncio.wait_for(test(), 60.0))


async def soon(what: Awaitable[bytes]) -> bytes:
    return await asyncio.wait_for(what, SOON_S)


async def quiet(what: Coroutine[Any, Any, bytes]) -> bool:
    """Whether nothing comes for a while; a gate that lets it through would within milliseconds."""
    task = asyncio.ensure_future(what)
    done, _ = await asyncio.wait([task], timeout=0.3)
    task.cancel()
    await asyncio.wait([task])
    return not done


def test_an_open_gate_passes_everything_and_the_end() -> None:
    async def test() -> None:
        async with echo() as there:
            reader, writer = await there.connect()
            data = bytes(range(256)) * 4_000
            writer.write(data)
            assert await soon(reader.readexactly(len(data))) == data
            writer.write_eof()
            assert await soon(reader.read()) == b""
            writer.close()

    run(test)


@pytest.mark.parametrize("way", [THERE, BACK])
def test_a_cut_holds_one_direction_until_it_is_open_again(way: tuple[int, int]) -> None:
    async def test() -> None:
        async with echo() as there:
            reader, writer = await there.connect()
            writer.write(b"before")
            assert await soon(reader.readexactly(6)) == b"before"
            there.gates.obey({way: Rule(cut=True)})
            writer.write(b"during")
            assert await quiet(reader.readexactly(6))
            assert bytes(there.got) == (b"before" if way == THERE else b"beforeduring")
            there.gates.obey({})
            assert await soon(reader.readexactly(6)) == b"during"
            writer.close()

    run(test)


def test_nobody_answers_a_new_connection_on_a_way_that_is_cut() -> None:
    async def test() -> None:
        async with echo() as there:
            there.gates.obey({THERE: Rule(cut=True)})
            reader, writer = await there.connect()
            writer.write(b"hello")
            assert await quiet(reader.readexactly(5))
            there.gates.obey({})
            assert await soon(reader.readexactly(5)) == b"hello"
            writer.close()

    run(test)


def test_a_delay_holds_each_piece_for_that_long_in_order() -> None:
    async def test() -> None:
        async with echo() as there:
            there.gates.obey({THERE: Rule(delay_s=0.1, jitter_s=0.05), BACK: Rule(delay_s=0.1)})
            reader, writer = await there.connect()
            loop = asyncio.get_running_loop()
            began = loop.time()
            for number in range(20):
                writer.write(bytes([number]) * 1_000)
                await asyncio.sleep(0.001)
            got = await soon(reader.readexactly(20_000))
            assert loop.time() - began >= 0.2
            assert got == b"".join(bytes([number]) * 1_000 for number in range(20))
            writer.close()

    run(test)


def test_connections_of_a_pair_are_broken_off_and_others_are_not() -> None:
    async def test() -> None:
        async with echo() as there:
            reader, writer = await there.connect()
            writer.write(b"x")
            assert await soon(reader.readexactly(1)) == b"x"
            assert there.gates.break_off(0, 7) == 0
            assert there.gates.break_off(0, CLIENT) == 1
            with pytest.raises((ConnectionError, asyncio.IncompleteReadError)):
                await soon(reader.readexactly(1))
            again, writer = await there.connect()
            writer.write(b"y")
            assert await soon(again.readexactly(1)) == b"y"
            writer.close()

    run(test)


def test_loss_stalls_cuts_and_refuses_but_never_mixes_bytes_up() -> None:
    """Whatever a connection brings is the beginning of what was sent into it."""

    async def one(there: Echo) -> str:
        sent, got = bytearray(), bytearray()
        try:
            reader, writer = await there.connect()
            for number in range(30):
                piece = bytes([number]) * 50
                writer.write(piece)
                sent += piece
                got += await soon(reader.readexactly(50))
            writer.close()
        except (OSError, asyncio.IncompleteReadError):
            pass
        assert sent.startswith(got)
        return "whole" if len(got) == 1_500 else "cut"

    async def test() -> None:
        async with echo(seed=5) as there:
            there.gates.obey({THERE: Rule(loss=0.03), BACK: Rule(loss=0.03)})
            fates = await asyncio.gather(*(one(there) for _ in range(30)))
            assert {*fates} == {"whole", "cut"}
            assert there.gates.losses > 5
            there.gates.obey({})
            assert await one(there) == "whole"

    run(test)


def test_a_dead_node_refuses_what_its_gate_let_in() -> None:
    async def test() -> None:
        async with echo() as there:
            there.server.close()
            await there.server.wait_closed()
            reader, writer = await there.connect()
            with pytest.raises((ConnectionError, asyncio.IncompleteReadError)):
                await soon(reader.readexactly(1))
            writer.close()

    run(test)
