"""A TCP proxy that leads to the primary of a group, for programs that can't ask for it.

It forwards bytes and understands none of them. Three rules. It connects to a server only while that
server is the announced primary, by knowledge that was confirmed (`GroupFollower.announced`). As
soon as the state says anything else, all connections to that server are cut, before one to another
is begun. No byte of a client goes to a second server, because a client's connection ends with the
one behind it. So a write that a client got acknowledged went to one primary.

While a group elects or switches, new connections wait, and also from the announcement of a primary
until its agent tells that the guard has opened it: until then the server may refuse clients. During
a switchover the open ones stay: the primary holds writes back and may serve on. Everything is
bounded: connections, their buffers, the waits.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from dataclasses import dataclass
from typing import cast

from domicile.concurrency.task_set import TaskSet
from domicile.errors import ConfigError
from domicile.failover.following import GroupFollower, split_host
from domicile.failover.records import GroupPhase
from domicile.ports.meter import Meter, NoMeter
from domicile.transports.addresses import parse, written

log = logging.getLogger("domicile")

BUFFER_BYTES = 256 * 1024
"""I6: what may wait in one direction of a connection; then the other end is not read."""

RETRY_S = 0.05
"""How soon a server that does not accept is tried again."""

LOOK_S = 0.25
"""How often it looks whether its knowledge has become too old, without news."""

BACKLOG = 512


@dataclass(frozen=True, slots=True)
class ProxyLimits:
    """How much a proxy takes on."""

    connections: int = 1_000
    """Clients at a time; further ones are closed at once."""
    wait_s: float = 10.0
    """How long a new client waits for a primary, and for a connection to it."""
    connect_s: float = 2.0
    """How long one try to connect may take."""


@dataclass(frozen=True, slots=True)
class _Target:
    """One epoch's primary. Connections belong to it and end with it."""

    epoch: int
    server: str
    address: str


class GroupProxy:
    """Listens from `start` to `close`; `run` keeps it true to the group in between."""

    def __init__(
        self,
        follower: GroupFollower,
        listen: str,
        *,
        limits: ProxyLimits | None = None,
        meter: Meter | None = None,
    ) -> None:
        self._host, self._port, _ = parse(listen, "the address to listen at")
        self._follower, self._meter = follower, NoMeter() if meter is None else meter
        self._limits = ProxyLimits() if limits is None else limits
        self._server: asyncio.Server | None = None
        self._target: _Target | None = None
        self._opened: _Target | None = None
        """The announced primary, once its agent has told that it is open."""
        self._clients: dict[_Client, None] = {}
        self._connecting: TaskSet[None] = TaskSet("domicile-proxy")
        self._changed = asyncio.Event()

    @property
    def address(self) -> str:
        """Where it listens, as `host:port`; empty before `start` and after `close`."""
        if self._server is None or not self._server.sockets:
            return ""
        host, port = self._server.sockets[0].getsockname()[:2]
        return written(host, port)

    @property
    def connections(self) -> int:
        """Clients that are connected now."""
        return len(self._clients)

    @property
    def waiting_bytes(self) -> int:
        """What the proxy holds for ends that do not take it."""
        return sum(one.waiting_bytes for one in self._clients)

    async def start(self) -> None:
        """Listen. `ConfigError` if that can't be done."""
        loop = asyncio.get_running_loop()
        try:
            self._server = await loop.create_server(
                lambda: _Client(self), self._host, self._port, backlog=BACKLOG
            )
        except OSError as error:
            where = written(self._host, self._port)
            raise ConfigError(
                f"the proxy can't listen at {where}: {error.strerror or error}; choose another "
                "address, or port 0 for any free one"
            ) from error

    async def close(self) -> None:
        """Stop listening and cut all connections."""
        if self._server is not None:
            self._server.close()
            self._server = None
        self._cut("the proxy ends")
        await self._connecting.close()

    async def run(self) -> None:
        """Follow the group until cancelled; the follower runs in a task of somebody else."""
        follower = self._follower
        while True:
            version = follower.version
            self._look()
            await follower.after(version, follower.now() + LOOK_S)

    # the rule

    def _look(self) -> None:
        """Cut what must not go on, and then say where new connections go."""
        target = self._announced()
        if self._target is not None and target != self._target and not self._stays(self._target):
            self._cut(f"{self._target.server} is not the primary of epoch {self._target.epoch}")
            self._target = None
        if target is not None and target != self._target:
            # Nothing is left of the one before, or `_stays` is the same server and epoch.
            self._target = target
            log.info("leads to %s at %s, epoch %d", target.server, target.address, target.epoch)
        if target is not None:
            self._changed.set()
        else:
            self._changed.clear()

    def _announced(self) -> _Target | None:
        """The primary that takes clients. A single look at it that fails keeps nobody out."""
        found, state = self._follower.announced(), self._follower.records.state
        if state is not None and state.phase is not GroupPhase.SERVING:
            # It is closed now. In the same epoch, it must be opened again.
            self._opened = None
        if found is None or state is None:
            return None
        target = _Target(state.epoch, found.server, found.address)
        if found.role == "primary":
            self._opened = target
        return target if target == self._opened else None

    def _stays(self, target: _Target) -> bool:
        """Whether open connections may go on: the state still has that server for that epoch.

        News counts for this before it is confirmed; a store that is away cuts nothing, because the
        server's guard closes it by itself.
        """
        state = self._follower.records.state
        served = (GroupPhase.SERVING, GroupPhase.SWITCHING)
        if state is None or state.phase not in served or state.epoch != target.epoch:
            return False
        if state.primary_server != target.server:
            return False
        found = self._follower.records.members.get(state.primary)
        return found is None or found.address == target.address

    def _cut(self, why: str) -> None:
        cut = list(self._clients)
        linked = sum(one.linked for one in cut)
        if linked:
            log.info("%d connections are cut: %s", linked, why)
            self._meter.count("proxy.cut", linked)
        for one in cut:
            # A client that still waits has sent nothing to anyone.
            if one.linked or self._server is None:
                one.abort()

    # connections

    def accept(self, client: _Client) -> bool:
        """A client has connected; False: there is no room for it."""
        if self._server is None or len(self._clients) >= self._limits.connections:
            self._meter.count("proxy.refused")
            return False
        self._clients[client] = None
        self._meter.count("proxy.accepted")
        self._connecting.spawn(self._link(client))
        return True

    def gone(self, client: _Client) -> None:
        """A client's connection has ended."""
        self._clients.pop(client, None)

    async def _link(self, client: _Client) -> None:
        pause_s = 0.0
        try:
            async with asyncio.timeout(self._limits.wait_s):
                linked = False
                while not linked and not client.ended:
                    await asyncio.sleep(pause_s)
                    linked, pause_s = await self._try_to_link(client), RETRY_S
        except TimeoutError:
            self._meter.count("proxy.unconnected")
            client.abort()

    async def _try_to_link(self, client: _Client) -> bool:
        await self._changed.wait()
        target = self._target
        if target is None:
            return False
        loop, side = asyncio.get_running_loop(), _Side()
        try:
            host, port = split_host(target.address)
            async with asyncio.timeout(self._limits.connect_s):
                await loop.create_connection(lambda: side, host, port)
        except (OSError, ValueError, TimeoutError):
            side.abort()
            return False
        except BaseException:
            side.abort()
            raise
        # While this connected the group may have moved on, and the client may have gone.
        self._look()
        if self._target != target or not self._changed.is_set() or client.ended:
            side.abort()
            return False
        side.link(client)
        client.link(side)
        return True


class _Side(asyncio.Protocol):
    """One end: what it receives goes to the other end, no faster than that takes it.

    Before it is linked to another end it keeps what comes, and sends nothing on.
    """

    def __init__(self) -> None:
        self.transport: asyncio.Transport | None = None
        self.peer: _Side | None = None
        self.ended = False
        self.eof = False
        self._early = bytearray()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast("asyncio.Transport", transport)
        self.transport.set_write_buffer_limits(high=BUFFER_BYTES)
        held = self.transport.get_extra_info("socket")
        if held is not None:
            # A peer whose machine vanished is noticed by the kernel in the end.
            held.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)

    def data_received(self, data: bytes) -> None:
        peer = self.peer
        if peer is not None and peer.transport is not None:
            peer.transport.write(data)
            return
        self._early += data
        if len(self._early) >= BUFFER_BYTES and self.transport is not None:
            self.transport.pause_reading()

    def link(self, other: _Side) -> None:
        """Send on to another end from now on."""
        self.peer = other
        if self._early:
            assert other.transport is not None
            other.transport.write(bytes(self._early))
            self._early.clear()
        if self.eof and other.transport is not None:
            other.transport.write_eof()
        if self.transport is not None:
            self.transport.resume_reading()

    def eof_received(self) -> bool:
        peer, self.eof = self.peer, True
        if peer is None:
            # Who has sent nothing until its end has given up.
            return bool(self._early)
        assert peer.transport is not None
        if peer.eof:
            peer.transport.close()
            return False
        peer.transport.write_eof()
        return True

    def pause_writing(self) -> None:
        if self.peer is not None and self.peer.transport is not None:
            self.peer.transport.pause_reading()

    def resume_writing(self) -> None:
        if self.peer is not None and self.peer.transport is not None:
            self.peer.transport.resume_reading()

    def connection_lost(self, exc: Exception | None) -> None:
        self.ended = True
        peer = self.peer
        if peer is not None and peer.transport is not None and not peer.ended:
            if exc is None:
                # What it has sent before its end still goes out.
                peer.transport.close()
            else:
                peer.transport.abort()

    @property
    def held_bytes(self) -> int:
        """What came and was not sent on, and what was sent and not taken."""
        sent = 0 if self.transport is None else self.transport.get_write_buffer_size()
        return len(self._early) + sent

    def abort(self) -> None:
        """End it now; nothing more is sent or taken."""
        self.ended = True
        if self.transport is not None:
            self.transport.abort()


class _Client(_Side):
    """The connection of a client: it counts, and its end ends the one behind it."""

    def __init__(self, proxy: GroupProxy) -> None:
        super().__init__()
        self._proxy = proxy

    @property
    def linked(self) -> bool:
        """Whether a server is behind it."""
        return self.peer is not None

    @property
    def waiting_bytes(self) -> int:
        """What it and the end behind it hold."""
        return sum(one.held_bytes for one in (self, self.peer) if one is not None)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        if not self._proxy.accept(self):
            self.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._proxy.gone(self)

    def abort(self) -> None:
        super().abort()
        if self.peer is not None:
            self.peer.abort()
        self._proxy.gone(self)
