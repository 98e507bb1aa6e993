"""Connections within one process, for `memory://` clusters on real event loops.

`MemoryNetwork` is the shared registry of listeners; every node or client of the process has its own
`MemoryTransport` on it. Packets arrive in order, in a later turn of the receiver's event loop,
never inside `send`. Not for the simulator, which has a network with faults.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from domicile.ports.transport import ConnectionHandler


class MemoryNetwork:
    """The listeners of this process by address."""

    def __init__(self) -> None:
        self._listeners: dict[str, _Listener] = {}
        self._count = 0

    def bind(self, listener: _Listener) -> str:
        """A new address for a listener."""
        self._count += 1
        address = f"memory:{self._count}"
        self._listeners[address] = listener
        return address

    def unbind(self, address: str) -> None:
        """The listener at an address has stopped."""
        self._listeners.pop(address, None)

    def find(self, address: str) -> _Listener | None:
        """The listener at an address, if any."""
        return self._listeners.get(address)


class MemoryTransport:
    """A `Transport` for one node or client on a `MemoryNetwork`."""

    def __init__(self, network: MemoryNetwork) -> None:
        self._network = network
        self._addresses: list[str] = []
        self._ends: dict[_End, None] = {}
        self._closed = False

    async def listen(self, accept: Callable[[], ConnectionHandler]) -> str:
        """Start to accept; the address that peers can dial."""
        listener = _Listener(self, accept, asyncio.get_running_loop())
        address = self._network.bind(listener)
        self._addresses.append(address)
        return address

    def dial(self, address: str, handler: ConnectionHandler) -> None:
        """Connect to an address; `handler.opened` or `handler.closed` follows in a later turn."""
        if self._closed:
            return
        near = _End(self, handler, asyncio.get_running_loop())
        self._ends[near] = None
        listener = self._network.find(address)
        if listener is None:
            _post(near.loop, lambda: near.lost(f"nobody listens at {address}"))
        else:
            _post(listener.loop, lambda: listener.arrive(near))

    async def close(self) -> None:
        """Stop accepting and close every connection; this end's handlers are not called."""
        self._closed = True
        for address in self._addresses:
            self._network.unbind(address)
        for end in list(self._ends):
            end.close()

    @property
    def is_closed(self) -> bool:
        """Whether `close` was called."""
        return self._closed

    def track(self, end: _End) -> None:
        """Remember an open end, to close it with the transport."""
        self._ends[end] = None

    def untrack(self, end: _End) -> None:
        """An end has closed."""
        self._ends.pop(end, None)


class _Listener:
    """An address that accepts."""

    def __init__(
        self,
        transport: MemoryTransport,
        accept: Callable[[], ConnectionHandler],
        loop: asyncio.AbstractEventLoop,
    ) -> None:
        self.loop = loop
        self._transport = transport
        self._accept = accept

    def arrive(self, near: _End) -> None:
        """A peer dialled; runs on the listener's loop."""
        if near.over:
            return
        if self._transport.is_closed:
            _post(near.loop, lambda: near.lost("nobody listens there any more"))
            return
        far = _End(self._transport, self._accept(), self.loop)
        far.peer, near.peer = near, far
        self._transport.track(far)
        _post(near.loop, near.open)
        far.open()


class _End:
    """One end of a connection. A `Connection` for its handler."""

    def __init__(
        self,
        transport: MemoryTransport,
        handler: ConnectionHandler,
        loop: asyncio.AbstractEventLoop,
    ) -> None:
        self.loop = loop
        self.peer: _End | None = None
        self.over = False
        self._transport = transport
        self._handler = handler

    def send(self, data: bytes) -> None:
        """Hand a packet to the other end, in a later turn."""
        peer = self.peer
        if not self.over and peer is not None:
            _post(peer.loop, lambda: peer.arrived(data))

    def close(self) -> None:
        """Close. The other end is told after the packets already sent."""
        peer = self.peer
        if self._finish() and peer is not None:
            _post(peer.loop, lambda: peer.lost("closed by the peer"))

    def open(self) -> None:
        """The connection is open."""
        if not self.over:
            self._handler.opened(self)

    def arrived(self, data: bytes) -> None:
        """A packet from the other end."""
        if not self.over:
            self._handler.received(data)

    def lost(self, reason: str) -> None:
        """The other end has closed, or was never there."""
        if self._finish():
            self._handler.closed(reason)

    def _finish(self) -> bool:
        if self.over:
            return False
        self.over = True
        self._transport.untrack(self)
        return True


def _post(loop: asyncio.AbstractEventLoop, callback: Callable[[], None]) -> None:
    """Run on a loop in a later turn, from any thread; nothing happens if the loop is closed."""
    if loop.is_closed():
        return
    if loop is asyncio.get_running_loop():
        loop.call_soon(callback)
    else:
        loop.call_soon_threadsafe(callback)
