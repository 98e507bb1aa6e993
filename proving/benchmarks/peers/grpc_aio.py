"""grpc.aio: bytes in, bytes out, nothing to decode; a unary call per message, or one stream."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
import grpc.aio

from proving.benchmarks.caller import PAYLOAD, Caller, closed_loop

SERVICE, UNARY, STREAM, ONE_WAY, PART = "bench.Echo", "Unary", "Stream", "OneWay", "part"


class Unary(Caller):
    """One call per message; a one-way message is a call with an empty reply."""

    def __init__(self, channel: Any) -> None:
        self._echo = channel.unary_unary(f"/{SERVICE}/{UNARY}")
        self._note = channel.unary_unary(f"/{SERVICE}/{ONE_WAY}")

    async def ask(self, number: int) -> None:
        """A call of its own."""
        await self._echo(PAYLOAD)

    async def note(self, number: int) -> None:
        """A call with an empty reply."""
        await self._note(PAYLOAD)

    async def tells(self, depth: int, seconds: float) -> dict[str, Any]:
        """There is nothing one-way."""
        return await closed_loop(self.note, depth, seconds)


class Stream(Caller):
    """One bidirectional stream for everything, one gRPC message per payload, replies in order."""

    def __init__(self, channel: Any) -> None:
        self._channel = channel
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._outbox = 0
        self._wake = asyncio.Event()
        self._asks: Any = None
        self._notes: Any = None
        self._reading = asyncio.Lock()

    @asynccontextmanager
    async def running(self) -> AsyncGenerator[Stream]:
        """With a task that writes and one that reads: a stream takes one write at a time."""
        self._asks = self._channel.stream_stream(f"/{SERVICE}/{STREAM}")()
        tasks = [asyncio.create_task(self._write()), asyncio.create_task(self._read())]
        try:
            yield self
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            self._asks.cancel()
            if self._notes is not None:
                self._notes.cancel()

    async def ask(self, number: int) -> None:
        """Its place in the order is its address."""
        reply: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append(reply)
        self._outbox += 1
        self._wake.set()
        await reply

    async def begin(self, part: int) -> int:
        """A stream of its own, which answers once per part."""
        if self._notes is not None:
            self._notes.cancel()
        call = self._channel.stream_stream(f"/{SERVICE}/{ONE_WAY}{STREAM}")
        self._notes = call(metadata=((PART, str(part)),))
        return 0

    async def send(self, first: int, count: int) -> None:
        """One gRPC message each."""
        for _ in range(count):
            await self._notes.write(PAYLOAD)

    async def confirm(self, total: int) -> None:
        """The answer to one part."""
        async with self._reading:
            await self._notes.read()

    async def _write(self) -> None:
        while True:
            await self._wake.wait()
            self._wake.clear()
            while self._outbox:
                self._outbox -= 1
                await self._asks.write(PAYLOAD)

    async def _read(self) -> None:
        while True:
            await self._asks.read()
            self._waiting.popleft().set_result(None)


async def _echo(data: bytes, context: Any) -> bytes:
    return data


async def _note(data: bytes, context: Any) -> bytes:
    return b""


async def _stream(messages: AsyncIterator[bytes], context: Any) -> AsyncGenerator[bytes]:
    async for data in messages:
        yield data


async def _notes(messages: AsyncIterator[bytes], context: Any) -> AsyncGenerator[bytes]:
    part = int(dict(context.invocation_metadata())[PART])
    count = 0
    async for _ in messages:
        count += 1
        if count % part == 0:
            yield b""


@asynccontextmanager
async def server(options: dict[str, Any]) -> AsyncGenerator[tuple[str, dict[str, Any]]]:
    """On a port of the kernel's choice."""
    handlers = grpc.method_handlers_generic_handler(
        SERVICE,
        {
            UNARY: grpc.unary_unary_rpc_method_handler(_echo),
            ONE_WAY: grpc.unary_unary_rpc_method_handler(_note),
            STREAM: grpc.stream_stream_rpc_method_handler(_stream),
            ONE_WAY + STREAM: grpc.stream_stream_rpc_method_handler(_notes),
        },
    )
    made = grpc.aio.server()
    made.add_generic_rpc_handlers((handlers,))
    port = made.add_insecure_port("127.0.0.1:0")
    await made.start()
    try:
        yield f"127.0.0.1:{port}", {}
    finally:
        await made.stop(0.2)


@asynccontextmanager
async def client(options: dict[str, Any]) -> AsyncGenerator[tuple[str, dict[str, Any]]]:
    """One channel to that server."""
    async with (
        grpc.aio.insecure_channel(options["where"]) as channel,
        Stream(channel).running() as stream,
    ):
        unary = Unary(channel)
        await unary.ask(0)
        await stream.ask(0)
        yield options["where"], {"unary": unary, "stream": stream}


PARTS = {"server": server, "client": client}
