"""A small fault proxy: every connection of a test cluster passes the gate of the node it goes to.

`domicile.testing.processes.environment_process` runs it. A gate passes bytes on unchanged and in
order, later or not at all, as TCP does on a bad network. It must never pass a byte out of order or
twice.

Paths (`Way`) are named by node numbers, `(from, to)`; -1 is every process that is no node, -2 the
server of a store that has a host of its own. What passes a path obeys its rule:

- `cut`: nothing arrives. Bytes wait, as if sent again and again, until the path is open; a new
  connection opens, but gets no answer.
- `delay_s`, `jitter_s`: every piece takes that long, and up to the jitter longer.
- `loss`: the chance that a piece meets a loss, as TCP shows it: it stalls for a while, its
  connection is cut, or new connections are refused, or hang, for a while.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from contextlib import suppress
from random import Random

import msgspec

PIECE_BYTES = 65_536
PIECES = 32
"""Pieces that may be on one path of one connection; further ones wait in the sockets."""

STALL_S = (0.2, 1.5)
AWAY_S = (0.3, 2.0)
"""Seconds, at least and at most, for which a loss stalls a piece, and keeps new connections out."""

CLIENT = -1
STORE = -2


class Rule(msgspec.Struct, frozen=True, omit_defaults=True):
    """What happens to bytes on a path."""

    cut: bool = False
    delay_s: float = 0.0
    jitter_s: float = 0.0
    loss: float = 0.0


OPEN = Rule()
Way = tuple[int, int]
_Piece = tuple[float, bytes | None]
"""When a piece is due, and its bytes; None is the end."""


class Gates:
    """The gates of one cluster, and the rules of its paths."""

    def __init__(
        self,
        seed: int,
        node_at: Callable[[str], int],
        dial: Callable[[int], tuple[socket.socket, tuple[str, int]]],
    ) -> None:
        self.random = Random(f"gates {seed}")
        self._node_at = node_at
        self._dial = dial
        self._rules: dict[Way, Rule] = {}
        self._changed = asyncio.Event()
        self._away: dict[Way, tuple[float, bool]] = {}
        self._passing: dict[_Passage, Way] = {}
        self._servers: list[asyncio.Server] = []
        self.losses = 0
        """How many pieces met a loss."""

    async def stand(self, node: int, sock: socket.socket) -> None:
        """Put a gate before a node, at a listening socket."""

        async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await self._accept(node, reader, writer)

        self._servers.append(await asyncio.start_server(accept, sock=sock))

    def obey(self, rules: dict[Way, Rule]) -> None:
        """Use these rules from now on; paths that are not named are open."""
        self._rules = rules
        if not any(rule.loss for rule in rules.values()):
            self._away.clear()
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    def break_off(self, one: int, other: int) -> int:
        """Cut the connections between two nodes in both directions; returns how many."""
        found = [passage for passage, way in self._passing.items() if {*way} == {one, other}]
        for passage in found:
            passage.abort()
        return len(found)

    def close(self) -> None:
        """Close all gates and cut their connections."""
        for server in self._servers:
            server.close()
        for passage in list(self._passing):
            passage.abort()

    def rule(self, way: Way) -> Rule:
        """The current rule of a path."""
        return self._rules.get(way, OPEN)

    async def passable(self, way: Way) -> None:
        """Wait until a path is no longer cut."""
        while self.rule(way).cut:
            await self._changed.wait()

    async def meet_loss(self, way: Way, passage: _Passage) -> None:
        """Decide by chance whether a piece meets a loss, and which kind."""
        rule, random = self.rule(way), self.random
        if not rule.loss or random.random() >= rule.loss:
            return
        self.losses += 1
        chosen = random.random()
        if chosen < 0.6:
            with suppress(TimeoutError):
                # Any change of the rules ends the stall: a healed network sends again what is
                # missing.
                await asyncio.wait_for(self._changed.wait(), random.uniform(*STALL_S))
            return
        if chosen > 0.8:
            until = asyncio.get_running_loop().time() + random.uniform(*AWAY_S)
            self._away[way] = (until, random.random() < 0.5)
        passage.abort()

    async def _accept(
        self, node: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        host = str(writer.get_extra_info("peername")[0])
        way = (self._node_at(host), node)
        passage = _Passage(self, way, reader, writer)
        self._passing[passage] = way
        try:
            if await self._comes_through(way):
                await passage.run(*self._dial(node))
        finally:
            del self._passing[passage]
            writer.transport.abort()

    async def _comes_through(self, way: Way) -> bool:
        until, hangs = self._away.get(way, (0.0, False))
        left_s = until - asyncio.get_running_loop().time()
        if left_s > 0:
            if not hangs:
                return False
            with suppress(TimeoutError):
                await asyncio.wait_for(self._changed.wait(), left_s)
        await self.passable(way)
        return True


class _Passage:
    """One connection through a gate."""

    def __init__(
        self,
        gates: Gates,
        way: Way,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
    ) -> None:
        self._gates, self._way = gates, way
        self._outer = (reader, writer)
        self._inner: asyncio.StreamWriter | None = None

    def abort(self) -> None:
        """Cut it: both ends see a reset."""
        self._outer[1].transport.abort()
        if self._inner is not None:
            self._inner.transport.abort()

    async def run(self, sock: socket.socket, there: tuple[str, int]) -> None:
        """Pass bytes until both ends are done."""
        try:
            await asyncio.get_running_loop().sock_connect(sock, there)
        except OSError:
            sock.close()  # no process listens behind this gate now
            return
        reader, writer = await asyncio.open_connection(sock=sock)
        self._inner = writer
        back = (self._way[1], self._way[0])
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._pass(self._way, self._outer[0], writer))
                group.create_task(self._pass(back, reader, self._outer[1]))
        except* OSError:
            pass
        finally:
            writer.transport.abort()

    async def _pass(
        self, way: Way, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        pieces: asyncio.Queue[_Piece] = asyncio.Queue(PIECES)
        async with asyncio.TaskGroup() as group:
            group.create_task(self._take(way, reader, pieces))
            group.create_task(self._give(way, pieces, writer))

    async def _take(
        self, way: Way, reader: asyncio.StreamReader, pieces: asyncio.Queue[_Piece]
    ) -> None:
        loop, random = asyncio.get_running_loop(), self._gates.random
        data: bytes | None = b""
        while data is not None:
            try:
                data = await reader.read(PIECE_BYTES) or None
            except OSError:
                data = None
            rule = self._gates.rule(way)
            late_s = rule.delay_s + random.random() * rule.jitter_s if rule is not OPEN else 0.0
            await pieces.put((loop.time() + late_s, data))

    async def _give(
        self, way: Way, pieces: asyncio.Queue[_Piece], writer: asyncio.StreamWriter
    ) -> None:
        loop, gates = asyncio.get_running_loop(), self._gates
        while True:
            due, data = await pieces.get()
            late_s = due - loop.time()
            if late_s > 0:
                await asyncio.sleep(late_s)
            await gates.passable(way)
            if data is None:
                with suppress(OSError):
                    writer.write_eof()
                return
            await gates.meet_loss(way, self)
            writer.write(data)
            await writer.drain()
