"""The processes of a benchmark: a home and a caller for Domicile, a server and a caller for gRPC.

Started by `run.py`, one process per part. A part says on stdout that it is ready, then answers
each line of JSON on stdin by one line of JSON on stdout, and ends with its stdin.

Asks are answered with what they carried. Tells, and their one-way counterparts, go out in rounds;
a round ends when the receiver has confirmed that all of it ran.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import importlib
import importlib.util
import json
import logging
import sys
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from statistics import quantiles
from typing import Any

from domicile import Client, Entity, Node, Ref, Settings, connect, handler

PAYLOAD_BYTES = 100
PAYLOAD = b"x" * PAYLOAD_BYTES
SETTINGS = Settings(idle_s=3_600.0, settle_s=0.05)
"""Nobody is passivated while it is measured, and a lone node need not wait for others."""

SERVICE, UNARY, STREAM, ONE_WAY, BATCH = "bench.Echo", "Unary", "Stream", "OneWay", "batch"


class Arrivals:
    """Counts the tells that ran, and wakes who waits for a number of them."""

    def __init__(self) -> None:
        self.count = 0
        self._wanted = 0
        self._reached = asyncio.Event()

    def note(self) -> None:
        """One more."""
        self.count += 1
        if self.count == self._wanted:
            self._reached.set()

    async def reach(self, wanted: int) -> None:
        """Wait until that many have run."""
        if self.count < wanted:
            self._wanted = wanted
            self._reached.clear()
            await self._reached.wait()


class Echo(Entity, name="echo"):
    """Does as little as an entity can."""

    @handler
    async def echo(self, data: bytes) -> bytes:
        """Give it back."""
        return data

    @handler
    async def note(self, data: bytes) -> None:
        """Be told."""
        self.resource(Arrivals).note()


class Tally(Entity, name="tally"):
    """Knows how many tells have run at its node."""

    @handler
    async def count(self) -> int:
        """So many."""
        return self.resource(Arrivals).count

    @handler
    async def reach(self, wanted: int) -> None:
        """Answer once so many have run."""
        await self.resource(Arrivals).reach(wanted)


class Caller(ABC):
    """One way to send, measured."""

    @abstractmethod
    async def ask(self, number: int) -> None:
        """Send the payload and take it back."""

    @abstractmethod
    async def tell(self, count: int) -> None:
        """Send so many one-way messages and return once the receiver confirmed that they ran."""

    async def asks(self, depth: int, seconds: float) -> dict[str, float]:
        """Asks per second and their latencies, by `depth` workers that ask at least once."""
        ends = time.perf_counter() + seconds
        took: list[float] = []

        async def work(first: int) -> None:
            number, now = first, time.perf_counter()
            while True:
                await self.ask(number)
                number += depth
                took.append(-now + (now := time.perf_counter()))
                if now >= ends:
                    return

        began = time.perf_counter()
        await asyncio.gather(*map(work, range(depth)))
        took_s = time.perf_counter() - began
        cuts = quantiles(took, n=100, method="inclusive") if len(took) > 1 else took * 99
        return {"count": len(took), "took_s": took_s, "p50_s": cuts[49], "p99_s": cuts[98]}

    async def tells(self, depth: int, seconds: float) -> dict[str, float]:
        """One-way messages per second, in confirmed rounds of `depth`."""
        sent, began = 0, time.perf_counter()
        while not sent or time.perf_counter() < began + seconds:
            await self.tell(depth)
            sent += depth
        return {"count": sent, "took_s": time.perf_counter() - began}


class Domicile(Caller):
    """Refs of a client, or of the home itself."""

    def __init__(self, refs: Sequence[Ref[Echo]], tally: Ref[Tally], sent: int) -> None:
        self._refs, self._tally, self._sent = refs, tally, sent

    @classmethod
    async def to(cls, client: Client, entities: int) -> Domicile:
        """A caller of entities that have all been started."""
        refs = [client.ref(Echo, str(number)) for number in range(entities)]
        for ref in refs:
            await ref.ask(Echo.echo, PAYLOAD)
        tally = client.ref(Tally, "tally")
        return cls(refs, tally, await tally.ask(Tally.count))

    async def ask(self, number: int) -> None:
        """One entity after the other."""
        await self._refs[number % len(self._refs)].ask(Echo.echo, PAYLOAD)

    async def tell(self, count: int) -> None:
        """The confirmation is an ask, sent behind the tells."""
        for number in range(self._sent, self._sent + count):
            await self._refs[number % len(self._refs)].tell(Echo.note, PAYLOAD)
        self._sent += count
        await self._tally.ask(Tally.reach, self._sent)

    async def tells(self, depth: int, seconds: float) -> dict[str, float]:
        """Counted from what the home has seen, of whomever."""
        self._sent = await self._tally.ask(Tally.count)
        return await super().tells(depth, seconds)


class Unary(Caller):
    """One call per message; a one-way message is a call with an empty reply."""

    def __init__(self, channel: Any) -> None:
        self._echo = channel.unary_unary(f"/{SERVICE}/{UNARY}")
        self._note = channel.unary_unary(f"/{SERVICE}/{ONE_WAY}")

    async def ask(self, number: int) -> None:
        """A call of its own."""
        await self._echo(PAYLOAD)

    async def tell(self, count: int) -> None:
        """All at once."""
        await asyncio.gather(*(self._note(PAYLOAD) for _ in range(count)))


class Stream(Caller):
    """One bidirectional stream for everything, one gRPC message per payload, replies in order."""

    def __init__(self, channel: Any) -> None:
        self._channel = channel
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._outbox = 0
        self._wake = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []
        self._asks: Any = None

    @asynccontextmanager
    async def running(self) -> AsyncGenerator[Stream]:
        """With a task that writes and one that reads: a stream takes one write at a time."""
        self._asks = self._channel.stream_stream(f"/{SERVICE}/{STREAM}")()
        self._tasks = [asyncio.create_task(self._write()), asyncio.create_task(self._read())]
        try:
            yield self
        finally:
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)
            self._asks.cancel()

    async def ask(self, number: int) -> None:
        """Its place in the order is its address."""
        reply: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append(reply)
        self._outbox += 1
        self._wake.set()
        await reply

    async def tell(self, count: int) -> None:
        """Never called: rounds share one stream, see `tells`."""
        raise NotImplementedError

    async def tells(self, depth: int, seconds: float) -> dict[str, float]:
        """On a stream of its own, which answers once per round."""
        stream = self._channel.stream_stream(f"/{SERVICE}/{ONE_WAY}{STREAM}")(
            metadata=((BATCH, str(depth)),)
        )
        sent, began = 0, time.perf_counter()
        while not sent or time.perf_counter() < began + seconds:
            for _ in range(depth):
                await stream.write(PAYLOAD)
            await stream.read()
            sent += depth
        took_s = time.perf_counter() - began
        await stream.done_writing()
        return {"count": sent, "took_s": took_s}

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


def grpc_handlers(grpc: Any) -> Any:
    """The server's side: bytes in, bytes out, nothing to decode."""

    async def echo(data: bytes, context: Any) -> bytes:
        return data

    async def note(data: bytes, context: Any) -> bytes:
        return b""

    async def stream(messages: AsyncIterator[bytes], context: Any) -> AsyncGenerator[bytes]:
        async for data in messages:
            yield data

    async def one_way(messages: AsyncIterator[bytes], context: Any) -> AsyncGenerator[bytes]:
        batch = int(dict(context.invocation_metadata())[BATCH])
        count = 0
        async for _ in messages:
            count += 1
            if count % batch == 0:
                yield b""

    return grpc.method_handlers_generic_handler(
        SERVICE,
        {
            UNARY: grpc.unary_unary_rpc_method_handler(echo),
            ONE_WAY: grpc.unary_unary_rpc_method_handler(note),
            STREAM: grpc.stream_stream_rpc_method_handler(stream),
            ONE_WAY + STREAM: grpc.stream_stream_rpc_method_handler(one_way),
        },
    )


# the parts


@asynccontextmanager
async def home(options: argparse.Namespace) -> AsyncGenerator[tuple[str, dict[str, Caller]]]:
    """A node that is home to everything, and can call itself."""
    arrivals = Arrivals()

    @asynccontextmanager
    async def resources() -> AsyncGenerator[dict[type[Any], Any]]:
        yield {Arrivals: arrivals}

    node = Node(
        options.where, entities=[Echo, Tally], resources=resources, node_id="home",
        settings=SETTINGS,
    )  # fmt: skip
    async with node:
        yield options.where, {"domicile": await Domicile.to(node, options.entities)}


@asynccontextmanager
async def client(options: argparse.Namespace) -> AsyncGenerator[tuple[str, dict[str, Caller]]]:
    """A client of that home."""
    async with connect(options.where, settings=SETTINGS) as connected:
        yield options.where, {"domicile": await Domicile.to(connected, options.entities)}


@asynccontextmanager
async def grpc_server(options: argparse.Namespace) -> AsyncGenerator[tuple[str, dict[str, Caller]]]:
    """A grpc.aio server on a port of the kernel's choice."""
    grpc = importlib.import_module("grpc")
    server = importlib.import_module("grpc.aio").server()
    server.add_generic_rpc_handlers((grpc_handlers(grpc),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        yield f"127.0.0.1:{port}", {}
    finally:
        await server.stop(0.2)


@asynccontextmanager
async def grpc_client(options: argparse.Namespace) -> AsyncGenerator[tuple[str, dict[str, Caller]]]:
    """One channel to that server."""
    aio = importlib.import_module("grpc.aio")
    async with aio.insecure_channel(options.where) as channel, Stream(channel).running() as stream:
        unary = Unary(channel)
        await unary.ask(0)
        await stream.ask(0)
        yield options.where, {"unary": unary, "stream": stream}


PARTS = {part.__name__: part for part in (home, client, grpc_server, grpc_client)}


async def serve(options: argparse.Namespace) -> None:
    """Be that part until stdin ends."""
    lines = asyncio.StreamReader()
    pipe, _ = await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(lines), sys.stdin
    )
    try:
        async with PARTS[options.part](options) as (where, callers):
            say({"ready": where})
            async for line in lines:
                wanted = json.loads(line)
                gc.collect()
                cpu_s = time.process_time()
                if wanted["what"] == "cpu":
                    say({"cpu_s": cpu_s})
                    continue
                caller = callers[wanted["system"]]
                measure = caller.asks if wanted["what"] == "ask" else caller.tells
                measured = await measure(wanted["depth"], wanted["seconds"])
                say({**measured, "cpu_s": time.process_time() - cpu_s})
    finally:
        pipe.close()


def say(answer: dict[str, Any]) -> None:
    """One line for `run.py`."""
    print(json.dumps(answer), flush=True)


def loop_factory(name: str) -> Callable[[], asyncio.AbstractEventLoop] | None:
    """What makes the loop of that name."""
    return None if name == "asyncio" else importlib.import_module("uvloop").new_event_loop


def loops() -> Iterator[str]:
    """The loops that can be had here."""
    yield "asyncio"
    if importlib.util.find_spec("uvloop") is not None:
        yield "uvloop"


def main() -> None:
    """The command that `run.py` gives."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("part", choices=sorted(PARTS))
    parser.add_argument("--where", default="", help="store URL, or address of the gRPC server")
    parser.add_argument("--loop", default="asyncio", choices=["asyncio", "uvloop"])
    parser.add_argument("--entities", type=int, default=1_000)
    options = parser.parse_args()
    logging.basicConfig(level=logging.WARNING)
    with asyncio.Runner(loop_factory=loop_factory(options.loop)) as runner:
        runner.run(serve(options))


if __name__ == "__main__":
    main()
