"""A byte proxy whose bytes arrive late, on either way, or of which only the first arrive."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from time import monotonic

from domicile.testing.suites.byte_proxy import PIECE_BYTES, ByteProxy

POLL_S = 0.01

MOST_PIECES = 1_000
"""So many pieces may be on their way; then the sender has to wait."""


class LateProxy(ByteProxy):
    """What comes in now goes out so many seconds later, and in between there may be more."""

    def __init__(self, host: str, port: int) -> None:
        super().__init__(host, port)
        self._requests_s = self._answers_s = 0.0
        self._limit: _Limit | None = None

    async def late(self, *, requests_s: float = 0.0, answers_s: float = 0.0) -> None:
        """From now on what is sent to the server, and what it sends, takes so long."""

        def changed() -> None:
            self._requests_s, self._answers_s = requests_s, answers_s

        await self._do(changed)

    async def only(self, most_bytes: int) -> None:
        """No connection that begins from now on gets more than about so many bytes of answers."""

        def changed() -> None:
            self._limit = _Limit(most_bytes)

        await self._do(changed)

    async def all(self) -> None:
        """End `only`. What was kept back passes."""

        def changed() -> None:
            if self._limit is not None:
                self._limit.lifted = True
            self._limit = None

        await self._do(changed)

    @property
    def keeps_back(self) -> bool:
        """Whether a connection has had all that it may get now."""
        return self._limit is not None and self._limit.reached

    async def _pass_requests(self, reader: asyncio.StreamReader, passage: object) -> None:
        late = _Late(reader, lambda: self._requests_s)
        await super()._pass_requests(late, passage)  # type: ignore[arg-type]

    async def _pass_answers(self, reader: asyncio.StreamReader, passage: object) -> None:
        late = _Late(reader, lambda: self._answers_s, self._limit)
        await super()._pass_answers(late, passage)  # type: ignore[arg-type]


class _Limit:
    def __init__(self, most_bytes: int) -> None:
        self.most_bytes = most_bytes
        self.reached = self.lifted = False


class _Late:
    """A reader from which each piece comes late."""

    def __init__(
        self,
        reader: asyncio.StreamReader,
        late_s: Callable[[], float],
        limit: _Limit | None = None,
    ) -> None:
        self._reader, self._late_s, self._limit = reader, late_s, limit
        self._bytes = 0
        self._pieces: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue(MOST_PIECES)
        self._pump: asyncio.Task[None] | None = None

    async def read(self, size: int) -> bytes:
        if self._pump is None:
            self._pump = asyncio.create_task(self._take())
            current = asyncio.current_task()
            assert current is not None
            current.add_done_callback(lambda _: self._pump and self._pump.cancel())
        due, piece = await self._pieces.get()
        await asyncio.sleep(due - monotonic())
        limit = self._limit
        while limit is not None and self._bytes >= limit.most_bytes and not limit.lifted:
            limit.reached = True
            await asyncio.sleep(POLL_S)
        self._bytes += len(piece)
        return piece

    async def _take(self) -> None:
        piece = b"begun"
        while piece:
            try:
                piece = await self._reader.read(PIECE_BYTES)
            except OSError:
                piece = b""
            await self._pieces.put((monotonic() + self._late_s(), piece))
