"""The network of a simulated cluster: connections with latency, and verbs that break them.

`SimNetwork` is outside of all processes. A packet reaches a process through `SimLoop.post`, so it
is kept while the process is frozen, as in a full socket. All chance comes from one seeded
generator, and everything is kept in the order in which it was made. Harnesses call the verbs;
processes see only a `Transport`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from random import Random
from typing import NamedTuple

from domicile.ports.transport import Connection, ConnectionHandler, Transport
from domicile.testing.history import History
from domicile.testing.sim.loop import SimLoop, World

LATENCY_MIN_S = 0.0002
LATENCY_MAX_S = 0.002
DIAL_TIMEOUT_S = 3.0
KEPT_PACKETS = 4
CUT_NOTICED_S = 0.2
"""Seconds within which each end notices a cut."""


class SimNetwork:
    """Connections between named hosts, in virtual time."""

    def __init__(self, world: World, history: History, random: Random) -> None:
        self.jitter_s = 0.0
        """Seconds added to the longest time that a packet takes."""
        self.skew_s = 0.0
        """Some paths between two hosts always take up to this many seconds longer than others."""
        self._ways: dict[tuple[str, str], float] = {}
        self.world = world
        self.history = history
        self._random = random
        self._port = 7000
        self._listeners: dict[str, _Listener] = {}
        self._wires: dict[int, _Wire] = {}
        self._made = 0
        self._sides: dict[str, int] = {}
        self._blocks: dict[tuple[str, str], None] = {}
        self._slow: dict[str, float] = {}
        self._slow_ways: dict[tuple[str, str], float] = {}
        self._nobody: SimLoop | None = None

    def transport(self, loop: SimLoop, host: str) -> Transport:
        """A transport for one process on a host. Every `listen` is a new address, `host:port`."""
        return SimTransport(self, loop, host)

    def partition(self, sides: Sequence[Sequence[str]]) -> None:
        """Hosts of different sides no longer reach each other, in place of any earlier sides.

        Packets are held, as retransmissions are, and flow after `heal` if the connection still
        exists. Hosts that are not named reach all others.
        """
        self._sides = {host: number for number, side in enumerate(sides) for host in side}
        self._resume()

    def block(self, source: str, target: str) -> None:
        """Nothing from `source` arrives at `target`; the other direction still works."""
        self._blocks[source, target] = None

    def heal(self) -> None:
        """End every partition and block; what was held flows."""
        self._sides = {}
        self._blocks = {}
        self._resume()

    def cut(self, one: str, other: str) -> None:
        """Break all connections between two hosts.

        Each end notices it at its own time within 200 ms. Of the packets under way in each
        direction some first ones arrive, late, before that; the rest is lost.
        """
        for wire in list(self._wires.values()):
            if wire.joins(one, other):
                wire.cut()

    def linger(self, one: str, other: str, lingers_s: float) -> None:
        """Break all connections between two hosts; the accepting ends notice it late.

        The dialling end notices it within 200 ms and dials again. What it had sent on the old
        connection arrives over the whole time, so also after what it sends on the new one.
        """
        for wire in list(self._wires.values()):
            if wire.joins(one, other):
                wire.cut(lingers_s)

    def duplicate(self, one: str, other: str) -> int:
        """Repeat the beginning and the newest packets of what was dialled between two hosts.

        They arrive once more on a connection of their own, as from a middlebox that replays a flow;
        answers on it are dropped. Returns how many connections were repeated.
        """
        if self._nobody is None:
            self._nobody = self.world.process("nobody")
        repeated = 0
        for wire in list(self._wires.values()):
            near = wire.ends[0]
            if wire.joins(one, other) and near.sent:
                repeated += 1
                ghost = self.dial(self._nobody, near.host, wire.address, _Deaf())
                for data in near.sent:
                    ghost.pipe.push(_Packet("data", data=data))
        return repeated

    def slow_way(self, source: str, target: str, extra_s: float) -> None:
        """Packets of one direction between two hosts take this much longer; 0 ends it."""
        self._slow_ways[source, target] = extra_s

    def slow(self, host: str, extra_s: float) -> None:
        """Packets from and to a host take this much longer; 0 for no longer than others."""
        self._slow[host] = extra_s

    def kill(self, host: str) -> None:
        """The host's process is dead: its peers see a reset after the packets it had sent."""
        for address in [at for at, found in self._listeners.items() if found.host == host]:
            del self._listeners[address]
        for wire in list(self._wires.values()):
            for end in wire.ends:
                if end.host == host:
                    end.give_up("reset")

    def reaches(self, source: str, target: str) -> bool:
        """Whether packets flow from one host to another now."""
        if (source, target) in self._blocks:
            return False
        one, other = self._sides.get(source), self._sides.get(target)
        return one is None or other is None or one == other

    def latency_s(self, source: str, target: str) -> float:
        """How long the next packet takes."""
        extra_s = self._slow.get(source, 0.0) + self._slow.get(target, 0.0)
        if self._slow_ways:
            extra_s += self._slow_ways.get((source, target), 0.0)
        if self.skew_s:
            way = self._ways.get((source, target))
            if way is None:
                way = self._random.choice((0.0, 0.0, self._random.random()))
                self._ways[source, target] = way
            extra_s += way * self.skew_s
        return self._random.uniform(LATENCY_MIN_S, LATENCY_MAX_S + self.jitter_s) + extra_s

    def listen(self, loop: SimLoop, host: str, accept: Callable[[], ConnectionHandler]) -> str:
        """A new address on a host."""
        self._port += 1
        address = f"{host}:{self._port}"
        self._listeners[address] = _Listener(loop, host, accept)
        return address

    def unlisten(self, address: str) -> None:
        """The listener at an address has stopped."""
        self._listeners.pop(address, None)

    def listener(self, address: str) -> _Listener | None:
        """The listener at an address, if any."""
        return self._listeners.get(address)

    def dial(self, loop: SimLoop, host: str, address: str, handler: ConnectionHandler) -> _End:
        """Try to connect; returns the dialling end, which is open only once its handler is told
        so."""
        self._made += 1
        wire = self._wires[self._made] = _Wire(self, self._made, self._random, address)
        near = wire.between(host, address.rpartition(":")[0])
        near.attach(loop, handler)
        self.world.call_at(self.world.now + DIAL_TIMEOUT_S, near.time_out)
        near.pipe.push(_Packet("dial", address))
        return near

    def discard(self, number: int) -> None:
        """Forget a connection that neither end uses any more."""
        self._wires.pop(number, None)

    def _resume(self) -> None:
        for wire in list(self._wires.values()):
            for end in wire.ends:
                end.pipe.resume()


class _Listener(NamedTuple):
    """An address that accepts."""

    loop: SimLoop
    host: str
    accept: Callable[[], ConnectionHandler]


class SimTransport:
    """A `Transport` of one simulated process."""

    def __init__(self, network: SimNetwork, loop: SimLoop, host: str) -> None:
        self._network = network
        self._loop = loop
        self._host = host
        self._addresses: list[str] = []
        self._ends: list[_End] = []
        self.closed = False

    async def listen(self, accept: Callable[[], ConnectionHandler]) -> str:
        """Start to accept; the address that peers can dial."""

        def arrive() -> ConnectionHandler:
            return _Tracked(self, accept())

        address = self._network.listen(self._loop, self._host, arrive)
        self._addresses.append(address)
        return address

    def dial(self, address: str, handler: ConnectionHandler) -> None:
        """Connect to an address; `handler.opened` or `handler.closed` follows."""
        if not self.closed:
            self.track(self._network.dial(self._loop, self._host, address, handler))

    async def close(self) -> None:
        """Stop accepting and close every connection; this end's handlers are not called."""
        self.closed = True
        for address in self._addresses:
            self._network.unlisten(address)
        ends, self._ends = self._ends, []
        for end in ends:
            end.close()

    def track(self, end: Connection) -> None:
        """Remember an end, to close it with the transport."""
        if isinstance(end, _End):
            self._ends = [known for known in self._ends if not known.over]
            self._ends.append(end)


class _Tracked:
    """An accepting handler whose end is closed with its transport."""

    def __init__(self, transport: SimTransport, handler: ConnectionHandler) -> None:
        self._transport = transport
        self._handler = handler
        self.received = handler.received
        self.receiving = handler.receiving
        self.closed = handler.closed

    def opened(self, connection: Connection) -> None:
        """The connection is open."""
        if self._transport.closed:
            connection.close()
        else:
            self._transport.track(connection)
            self._handler.opened(connection)

    def guard(self) -> bool:
        """The guard of the handler itself."""
        return self._handler.guard()


class _Deaf:
    """The handler of a connection whose packets are dropped."""

    def opened(self, connection: Connection) -> None:
        """The connection is open."""

    def received(self, data: bytes) -> None:
        """A packet came back."""

    def receiving(self) -> None:
        """A packet is coming back."""

    def closed(self, reason: str) -> None:
        """The connection has ended."""

    def guard(self) -> bool:
        """Always true."""
        return True


class _Packet(NamedTuple):
    """A packet under way: `dial`, `open`, `data` or `close`."""

    kind: str
    text: str = ""
    data: bytes = b""


class _Wire:
    """One connection, from the dial on: two ends, a pipe out of each."""

    def __init__(self, network: SimNetwork, number: int, random: Random, address: str) -> None:
        self.network = network
        self.address = address
        self._number = number
        self._random = random
        self.ends: tuple[_End, ...] = ()

    def between(self, near_host: str, far_host: str) -> _End:
        """Make both ends; returns the dialling one."""
        near, far = _End(self, near_host), _End(self, far_host)
        near.pipe, far.pipe = _Pipe(self.network, near, far), _Pipe(self.network, far, near)
        near.peer, far.peer = far, near
        self.ends = (near, far)
        return near

    def joins(self, one: str, other: str) -> bool:
        """Whether it is between two hosts, in either direction."""
        hosts = tuple(end.host for end in self.ends)
        return hosts in ((one, other), (other, one))

    def cut(self, lingers_s: float = 0.0) -> None:
        """Break it; see `SimNetwork.cut` and `SimNetwork.linger`."""
        now = self.network.world.now
        for end in self.ends:
            late_s = lingers_s if end is self.ends[1] else 0.0
            learns_at = now + late_s + self._random.uniform(0.0, CUT_NOTICED_S)
            end.peer.pipe.break_off(learns_at, self._random)
            self.network.world.call_at(learns_at, end.learn_of_cut)

    def settle(self) -> None:
        """Forget it once neither end is used."""
        if all(end.over for end in self.ends):
            self.network.discard(self._number)


class _End:
    """One end of a connection: the `Connection` that its process writes to."""

    pipe: _Pipe
    peer: _End

    def __init__(self, wire: _Wire, host: str) -> None:
        self.host = host
        self.over = False
        self.sent: list[bytes] = []
        """The first packet and the newest ones, for `SimNetwork.duplicate`."""
        self._wire = wire
        self._opened = False
        self._loop: SimLoop | None = None
        self._handler: ConnectionHandler | None = None

    def attach(self, loop: SimLoop, handler: ConnectionHandler) -> None:
        """Give this end its process and handler."""
        self._loop = loop
        self._handler = handler

    def send(self, data: bytes) -> None:
        """Put a packet on the network."""
        if not self.over:
            if len(self.sent) == KEPT_PACKETS:
                del self.sent[1]
            self.sent.append(data)
            self._wire.network.history.frame(self.host, self.peer.host, data)
            self.pipe.push(_Packet("data", data=data))

    def close(self) -> None:
        """Close. The other end is told after the packets under way."""
        self.give_up("closed by the peer")

    def give_up(self, reason: str) -> None:
        """End without calling this end's handler; the other end gets the reason."""
        if not self.over:
            self.over = True
            self.pipe.push(_Packet("close", reason))
            self._wire.settle()

    def arrive(self, packet: _Packet) -> None:
        """The network delivers a packet; the process handles it when it runs next."""
        if packet.kind == "dial":
            self._accept(packet.text)
        elif self._loop is not None:
            self._loop.post(lambda: self._turn_to(packet))

    def time_out(self) -> None:
        """The dial took too long."""
        if not self._opened and not self.over and self._loop is not None:
            self._loop.post(self._fail_dial)

    def learn_of_cut(self) -> None:
        """This end notices that the connection is broken."""
        if self._loop is None:
            self.over = True
            self._wire.settle()
        else:
            self._loop.post(lambda: self._turn_to(_Packet("close", "connection lost")))

    def _accept(self, address: str) -> None:
        if self.over:
            return
        listener = self._wire.network.listener(address)
        if listener is None:
            self.give_up(f"nobody listens at {address}")
            return
        accept = listener.accept
        self._loop = listener.loop
        self._loop.post(lambda: self._stand(accept))
        self.pipe.push(_Packet("open"))

    def _stand(self, accept: Callable[[], ConnectionHandler]) -> None:
        if not self.over:
            self._handler = accept()
            self._opened = True
            self._handler.opened(self)

    def _fail_dial(self) -> None:
        if not self._opened and not self.over:
            self._turn_to(_Packet("close", "timed out"))

    def _turn_to(self, packet: _Packet) -> None:
        handler = self._handler
        if self.over or handler is None:
            return
        if packet.kind == "data":
            handler.received(packet.data)
        elif packet.kind == "open":
            self._opened = True
            handler.opened(self)
        else:
            self.give_up(packet.text)
            handler.closed(packet.text)


class _Pipe:
    """One direction of a connection: first in, first out, with latency.

    Each packet has one arrival; an arrival on a blocked path is made up for later. Arrivals take
    the packet at the head, so that nothing overtakes.
    """

    def __init__(self, network: SimNetwork, source: _End, target: _End) -> None:
        self._network = network
        self._source = source
        self._target = target
        self._packets: deque[_Packet] = deque()
        self._stalled = 0
        self._last_at = 0.0
        self._broken = False
        self._generation = 0

    def push(self, packet: _Packet) -> None:
        """Send a packet."""
        if not self._broken:
            self._packets.append(packet)
            self._expect()

    def resume(self) -> None:
        """The path may be free again: make up for missed arrivals."""
        if self._stalled and self._network.reaches(self._source.host, self._target.host):
            stalled, self._stalled = self._stalled, 0
            for _ in range(stalled):
                self._expect()

    def break_off(self, until: float, random: Random) -> None:
        """Some first packets arrive at times before `until`; the rest, and later ones, do not."""
        if self._broken:
            return
        self._broken = True
        self._generation += 1
        self._stalled = 0
        now = self._network.world.now
        survivors = random.randint(0, len(self._packets))
        while len(self._packets) > survivors:
            self._packets.pop()
        for at in sorted(random.uniform(now, until) for _ in range(survivors)):
            self._arrive_at(at)

    def _expect(self) -> None:
        latency_s = self._network.latency_s(self._source.host, self._target.host)
        self._last_at = max(self._last_at, self._network.world.now + latency_s)
        self._arrive_at(self._last_at)

    def _arrive_at(self, at: float) -> None:
        generation = self._generation

        def arrive() -> None:
            if generation != self._generation:
                return
            if self._network.reaches(self._source.host, self._target.host):
                self._target.arrive(self._packets.popleft())
            else:
                self._stalled += 1

        self._network.world.call_at(at, arrive)
