"""A proxy in front of a store's server that makes the faults of a connection, byte by byte.

For the labs of stores: put one proxy between each client and the server, and the verbs of `Stores`
can be told as what happens to bytes. It knows no protocol. It runs in a thread of its own, so it
goes on while a test blocks its event loop. Bytes stay in order; none is passed twice.
"""

from __future__ import annotations

import asyncio
import socket
import struct
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Self

from domicile.stores.loop_thread import LoopThread

PIECE_BYTES = 65_536
LONGEST_MARK = 256
"""Bytes of a mark that is found though it comes in two pieces."""

DIAL_S = 10.0
_RESET = struct.pack("ii", 1, 0)
"""SO_LINGER so that closing sends RST and not FIN."""


@dataclass(slots=True, eq=False)
class _Passage:
    """One connection: the client's end and the server's."""

    near: asyncio.StreamWriter
    far: asyncio.StreamWriter
    swallows: bool = False
    kept: KeptRequest | None = None
    last: bytes = b""
    """The end of what the client has sent: a mark may come in two pieces."""
    tasks: list[asyncio.Task[None]] = field(default_factory=list[asyncio.Task[None]])

    def reset(self) -> None:
        """Break both halves, as a machine that is gone does. What is on the way is lost."""
        for end in (self.near, self.far):
            end.transport.abort()


class KeptRequest:
    """A request that a proxy keeps back, with all that its connection sends behind it."""

    def __init__(self, having: bytes, thread: LoopThread) -> None:
        self.having = having
        """Bytes by which the request is known."""
        self._thread = thread
        self._here, self._goes, self._answered = asyncio.Event(), asyncio.Event(), asyncio.Event()

    async def here(self) -> None:
        """Wait until the request is there. The server does not get it."""
        await asyncio.wrap_future(self._thread.submit(self._here.wait))

    async def let_go(self) -> None:
        """Pass it on. Returns once the server has sent something on that connection."""

        async def gone() -> None:
            self._goes.set()
            await self._answered.wait()

        await asyncio.wrap_future(self._thread.submit(gone))

    # in the thread of the proxy

    async def stay(self) -> None:
        """It is there: wait until it may go on."""
        self._here.set()
        await self._goes.wait()

    def heard(self) -> None:
        """The server has sent something on that connection."""
        if self._goes.is_set():
            self._answered.set()


class ByteProxy:
    """Passes connections on to `host:port`. Use it with `async with`; `port` is where it listens,
    any of `listen[0]` unless one is named.

    All verbs may be called from any event loop and return once they hold.
    """

    def __init__(self, host: str, port: int, listen: tuple[str, int] = ("127.0.0.1", 0)) -> None:
        self._target = host, port
        self._listen = listen
        self._thread = LoopThread("byte-proxy")
        self._server: asyncio.Server | None = None
        self._passages: dict[_Passage, None] = {}
        self._open: asyncio.Event | None = None
        self._delay_s = 0.0
        self._loses: bytes | None = None
        self._keeps: KeptRequest | None = None
        self._refuses = False
        self.port = 0
        """The port at which the proxy listens, of 127.0.0.1 if nothing else was said."""
        self.lost = 0
        """How many answers were lost."""

    def start(self) -> Self:
        """Listen. For code that is not async; blocks for a moment."""
        self._thread.submit(self._start).result(DIAL_S)
        return self

    async def __aenter__(self) -> Self:
        """Listen."""
        return self.start()

    async def close(self) -> None:
        """Break every connection and end."""
        await asyncio.wrap_future(self._thread.submit(self._stop))
        self._thread.close()

    async def __aexit__(self, *exc: object) -> None:
        """Break every connection and end."""
        await self.close()

    async def cut(self) -> None:
        """Reset every connection; new ones work."""
        await self._do(self._reset_all)

    async def hold(self) -> None:
        """Let no byte pass from now on, in either direction. Connections open, but get nothing."""
        await asyncio.wrap_future(self._thread.submit(self._shut))

    def hold_at_once(self) -> None:
        """As `hold`, for code that is not async; blocks until it holds."""
        self._thread.submit(self._shut).result(DIAL_S)

    async def release(self) -> None:
        """End `hold` and `refuse`. Bytes that were held pass."""

        def opened() -> None:
            self._refuses = False
            self._gate().set()

        await self._do(opened)

    async def refuse(self) -> None:
        """Reset every connection and every new one, until `release`."""

        def refused() -> None:
            self._refuses = True
            self._reset_all()

        await self._do(refused)

    async def delay(self, seconds: float) -> None:
        """From now on each piece towards the server waits that long."""

        def delayed() -> None:
            self._delay_s = seconds

        await self._do(delayed)

    async def lose_next_answer(self, to: bytes = b"") -> None:
        """The next request reaches the server, and its connection is reset when the server answers.

        With `to` it is the next request that has these bytes. A server that answers in steps needs
        it: the first bytes of its answer must mean that the request was carried out.
        """

        def armed() -> None:
            self._loses = to

        await self._do(armed)

    async def keep_back(self, having: bytes) -> KeptRequest:
        """Keep back the next request that has these bytes, as a network that is slow for it alone.

        Its connection sends nothing more until the request may go; the others go on, and answers
        pass.
        """
        kept = KeptRequest(having, self._thread)

        def armed() -> None:
            self._keeps = kept

        await self._do(armed)
        return kept

    # in the thread of the proxy

    async def _do(self, change: object) -> None:
        assert callable(change)

        async def changed() -> None:
            change()

        await asyncio.wrap_future(self._thread.submit(changed))

    async def _shut(self) -> None:
        self._gate().clear()

    async def _start(self) -> None:
        self._open = asyncio.Event()
        self._open.set()
        self._server = await asyncio.start_server(self._serve, *self._listen)
        self.port = int(self._server.sockets[0].getsockname()[1])

    async def _stop(self) -> None:
        if self._server is not None:
            self._server.close()
        tasks = [task for passage in self._passages for task in passage.tasks]
        self._reset_all()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, near: asyncio.StreamWriter) -> None:
        _resets_on_close(near)
        if self._refuses:
            near.transport.abort()
            return
        try:
            async with asyncio.timeout(DIAL_S):
                far_reader, far = await asyncio.open_connection(*self._target)
        except (OSError, TimeoutError):
            near.transport.abort()
            return
        _resets_on_close(far)
        passage = _Passage(near, far)
        self._passages[passage] = None
        passage.tasks += [
            asyncio.ensure_future(self._pass_requests(reader, passage)),
            asyncio.ensure_future(self._pass_answers(far_reader, passage)),
        ]
        try:
            await asyncio.gather(*passage.tasks, return_exceptions=True)
        finally:
            for task in passage.tasks:
                task.cancel()
            passage.reset()
            self._passages.pop(passage, None)

    async def _pass_requests(self, reader: asyncio.StreamReader, passage: _Passage) -> None:
        with suppress(OSError):
            while data := await reader.read(PIECE_BYTES):
                if self._delay_s:
                    await asyncio.sleep(self._delay_s)
                await self._gate().wait()
                if self._loses is not None and self._loses in data:
                    self._loses = None
                    passage.swallows = True
                await self._stay(data, passage)
                passage.far.write(data)
                await passage.far.drain()
        await self._end(passage.far)

    async def _pass_answers(self, reader: asyncio.StreamReader, passage: _Passage) -> None:
        with suppress(OSError):
            while data := await reader.read(PIECE_BYTES):
                await self._gate().wait()
                if passage.kept is not None:
                    passage.kept.heard()
                if passage.swallows:
                    self.lost += 1
                    passage.reset()
                    return
                passage.near.write(data)
                await passage.near.drain()
        await self._end(passage.near)

    async def _stay(self, data: bytes, passage: _Passage) -> None:
        kept, before = self._keeps, passage.last
        passage.last = (before + data)[-LONGEST_MARK:]
        if kept is None:
            return
        # Not all of it: a mark that was whole before does not count.
        begun = before[len(before) - min(len(before), len(kept.having) - 1) :]
        if kept.having in begun + data:
            self._keeps, passage.kept = None, kept
            await kept.stay()

    async def _end(self, writer: asyncio.StreamWriter) -> None:
        """The one end is closed: so is the other, once what was sent before has passed."""
        with suppress(OSError, RuntimeError):
            if writer.can_write_eof():
                writer.write_eof()

    def _gate(self) -> asyncio.Event:
        assert self._open is not None, "enter the proxy with `async with` first"
        return self._open

    def _reset_all(self) -> None:
        for passage in tuple(self._passages):
            passage.reset()


def _resets_on_close(writer: asyncio.StreamWriter) -> None:
    found: socket.socket | None = writer.get_extra_info("socket")
    if found is not None:
        found.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
