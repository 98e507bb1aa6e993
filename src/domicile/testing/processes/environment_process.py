"""The environment of a test cluster, held by one process: a network with fault proxies, a small
disk.

`domicile.testing.processes.environment` runs `main`. As root it makes a network namespace for each
node, joined by a bridge, and mounts a small disk. Namespaces have no name outside of this process,
so the kernel removes them when it ends; the process unmounts the disk itself. It ends when its
stdin does: that is when its parent is gone, for any reason. Without root nodes have addresses of
their own on the loopback interface, and the proxies make the cuts.

Commands are lines of JSON on stdin, each answered by one line on stdout once it is done.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Generator
from pathlib import Path

import msgspec

from domicile.testing.processes.fault_proxy import CLIENT, STORE, Gates, Rule, Way
from domicile.testing.processes.member_process import NEW_NETWORK, Place, system_call

GATE_PORT = 7_000
NODE_PORT = 7_001
FIRST_HOST = 10
"""The last part of node 0's address; the test's own client has 1, the server of a store 2."""

IP_S = 10.0
_MNT_DETACH = 2
_NOWHERE = "02:00:00:00:ff:ff"
"""A hardware address that no interface has: packets to it are lost silently."""


class Layout(msgspec.Struct, frozen=True):
    """The environment that the harness wants."""

    nodes: int
    namespaces: bool
    subnet: str
    seed: int
    disk: str = ""
    disk_bytes: int = 0
    store: bool = False
    """Whether the server of a store has a namespace, too."""

    @property
    def hosts(self) -> tuple[int, ...]:
        """The nodes, and the server of a store if it has a host."""
        return (*range(self.nodes), *((STORE,) if self.store else ()))


class Ready(msgspec.Struct, frozen=True):
    """The first answer: the places of the nodes, or the reason why there are none."""

    places: list[Place] = []
    disk: str = ""
    error: str = ""
    store: Place | None = None


class Order(msgspec.Struct, frozen=True):
    """A command: the rules of all paths from now on, or two nodes whose connections break."""

    rules: list[tuple[int, int, Rule]] | None = None
    broken: tuple[int, int] | None = None


class Done(msgspec.Struct, frozen=True):
    """The answer to an order."""

    connections: int = 0
    losses: int = 0
    error: str = ""


def _set_namespace(descriptor: int) -> None:
    system_call("setns", descriptor, NEW_NETWORK)


class _Namespaces:
    """One namespace per host, one for the bridge, and a cable into that of the test itself."""

    def __init__(self, layout: Layout) -> None:
        self._subnet = layout.subnet
        self._hosts = layout.hosts
        self._ends = (CLIENT, *layout.hosts)
        self._home = _here()
        system_call("unshare", NEW_NETWORK)
        self._hub = _here()
        self._spaces: dict[int, int] = {}
        self._cut: dict[Way, None] = {}
        self._cable = f"dom{os.getpid()}"

    def build(self) -> None:
        """Make everything; raises `OSError` if that is not allowed."""
        _ip("link set lo up", "link add br0 type bridge", "link set br0 up")
        for number, node in enumerate(self._hosts):
            system_call("unshare", NEW_NETWORK)
            self._spaces[node] = _here()
            self._plug(node, "eth0", f"port{number}")
            _ip("link set lo up")
        _set_namespace(self._home)
        self._plug(CLIENT, self._cable, "client")
        for node in self._ends:
            with self._inside(node):
                _ip(*(self._neighbour(node, to, cut=False) for to in self._ends))

    def _plug(self, node: int, name: str, port: str) -> None:
        """A virtual cable from this process's current namespace to the bridge."""
        _ip(
            f"link add {name} address {_hardware(node)} type veth peer name {port} "
            f"netns /proc/{os.getpid()}/fd/{self._hub}",
            f"addr add {self.host(node)}/24 dev {name}",
            f"link set {name} up",
        )
        inside = _here()
        _set_namespace(self._hub)
        _ip(f"link set {port} master br0 up")
        _set_namespace(inside)
        os.close(inside)

    def _neighbour(self, node: int, to: int, *, cut: bool) -> str:
        if node == to:
            return ""
        hardware = _NOWHERE if cut else _hardware(to)
        device = self._cable if node == CLIENT else "eth0"
        return f"neigh replace {self.host(to)} lladdr {hardware} nud permanent dev {device}"

    @contextlib.contextmanager
    def _inside(self, node: int) -> Generator[None]:
        _set_namespace(self._home if node == CLIENT else self._spaces[node])
        try:
            yield
        finally:
            _set_namespace(self._home)

    def host(self, node: int) -> str:
        """A node's address."""
        return _address(self._subnet, node)

    def place(self, node: int) -> Place:
        """A node's addresses and namespace."""
        return Place(
            f"127.0.0.1:{NODE_PORT}",
            f"{self.host(node)}:{GATE_PORT}",
            namespace=f"/proc/{os.getpid()}/fd/{self._spaces[node]}",
        )

    def gate(self, node: int) -> socket.socket:
        """The socket of its proxy: it stays in that namespace, whichever process uses it."""
        with self._inside(node):
            return socket.create_server((self.host(node), GATE_PORT))

    def dial(self, node: int) -> tuple[socket.socket, tuple[str, int]]:
        """A socket from its proxy to the node, and the address to connect to."""
        with self._inside(node):
            sock = socket.socket()
        sock.setblocking(False)
        return sock, ("127.0.0.1", NODE_PORT)

    def obey(self, rules: dict[Way, Rule]) -> dict[Way, Rule]:
        """Cut paths in the kernel; returns the rules that are left to the proxies."""
        cut = {way: None for way, rule in rules.items() if rule.cut}
        for node in self._ends:
            lines = [
                self._neighbour(node, to, cut=(node, to) in cut)
                for to in self._ends
                if ((node, to) in cut) != ((node, to) in self._cut)
            ]
            if lines:
                with self._inside(node):
                    _ip(*lines)
        self._cut = cut
        return {way: msgspec.structs.replace(rule, cut=False) for way, rule in rules.items()}


class _Loopback:
    """Loopback addresses, one per node; a process with another address is a client."""

    def __init__(self, layout: Layout) -> None:
        self._subnet = layout.subnet

    def build(self) -> None:
        """Nothing to make."""

    def host(self, node: int) -> str:
        """A node's address."""
        return _address(self._subnet, node)

    def place(self, node: int) -> Place:
        """A node's addresses and namespace."""
        host = self.host(node)
        return Place(f"{host}:{NODE_PORT}", f"{host}:{GATE_PORT}", source=host)

    def gate(self, node: int) -> socket.socket:
        """The socket of its proxy."""
        return socket.create_server((self.host(node), GATE_PORT))

    def dial(self, node: int) -> tuple[socket.socket, tuple[str, int]]:
        """A socket from its proxy to the node, and the address to connect to."""
        sock = socket.socket()
        sock.setblocking(False)
        return sock, (self.host(node), NODE_PORT)

    def obey(self, rules: dict[Way, Rule]) -> dict[Way, Rule]:
        """All rules are left to the proxies."""
        return rules


def _here() -> int:
    return os.open("/proc/self/ns/net", os.O_RDONLY | os.O_CLOEXEC)


def _address(subnet: str, node: int) -> str:
    last = {CLIENT: 1, STORE: 2}.get(node, FIRST_HOST + node)
    return f"{subnet}.{last}"


def _hardware(node: int) -> str:
    return f"02:00:00:00:01:{FIRST_HOST + node:02x}"


def _ip(*lines: str) -> None:
    try:
        ran = subprocess.run(
            ["ip", "-batch", "-"],
            input="\n".join(line for line in lines if line),
            capture_output=True,
            text=True,
            check=False,
            timeout=IP_S,
        )
    except subprocess.TimeoutExpired as error:
        raise OSError(str(error)) from error
    if ran.returncode:
        raise OSError(f"ip: {ran.stderr.strip()}")


def _mount(layout: Layout) -> None:
    Path(layout.disk).mkdir(parents=True, exist_ok=True)
    options = f"size={layout.disk_bytes},mode=755".encode()
    system_call("mount", b"tmpfs", layout.disk.encode(), b"tmpfs", 0, options)


def _unmount(layout: Layout) -> None:
    # A process that has a file open keeps that file, and nothing else stays.
    system_call("umount2", layout.disk.encode(), _MNT_DETACH)
    Path(layout.disk).rmdir()


def _say(answer: Ready | Done) -> None:
    sys.stdout.buffer.write(msgspec.json.encode(answer) + b"\n")
    sys.stdout.buffer.flush()


async def _serve(layout: Layout) -> None:
    net: _Namespaces | _Loopback
    try:
        net = _Namespaces(layout) if layout.namespaces else _Loopback(layout)
        net.build()
        hosts = {net.host(node): node for node in layout.hosts}
        gates = Gates(layout.seed, lambda host: hosts.get(host, CLIENT), net.dial)
        for node in layout.hosts:
            await gates.stand(node, net.gate(node))
        if layout.disk:
            _mount(layout)
    except OSError as error:
        _say(Ready(error=str(error)))
        return
    try:
        await _obey(layout, net, gates)
    finally:
        if layout.disk:
            _unmount(layout)


async def _obey(layout: Layout, net: _Namespaces | _Loopback, gates: Gates) -> None:
    """Carry out orders until stdin ends."""
    places = [net.place(node) for node in range(layout.nodes)]
    _say(Ready(places, layout.disk, store=net.place(STORE) if layout.store else None))
    reader = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(reader), sys.stdin
    )
    decode = msgspec.json.Decoder(Order).decode
    while line := await reader.readline():
        _say(_obeyed(gates, net.obey, decode(line)))


def _obeyed(gates: Gates, obey: Callable[[dict[Way, Rule]], dict[Way, Rule]], order: Order) -> Done:
    connections = 0
    try:
        if order.rules is not None:
            gates.obey(obey({(one, other): rule for one, other, rule in order.rules}))
        if order.broken is not None:
            connections = gates.break_off(*order.broken)
    except OSError as error:
        return Done(error=str(error))
    return Done(connections, gates.losses)


def main() -> None:
    """Hold what the layout in the first argument describes, until stdin ends."""
    # A signal to the test's process group is meant for the parent, which may still need this
    # process.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    layout = msgspec.json.decode(sys.argv[1], type=Layout)
    asyncio.run(_serve(layout))
