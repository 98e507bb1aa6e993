"""Hosts with link layers on a simulated network, for the tests of links."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Iterator
from typing import Any

from domicile.core.ids import Incarnation, LinkKey, new_incarnation
from domicile.core.wire import Ping, Pong, Reply, ReplyStatus, Request, ToOwner, ToSender
from domicile.links.layer import LinkLayer
from domicile.ports.transport import Peer
from domicile.settings import Settings
from domicile.testing.history import History
from domicile.testing.sim.clock import SimClock
from domicile.testing.sim.loop import World
from domicile.testing.sim.network import SimNetwork

CLUSTER = "test"


def request(n: int) -> Request:
    return Request("r", 0, n, 1, 1, "T", "id", "m", b"", True, False, 1.0)


class Host:
    """A process with a link layer, that notes what it hears and answers every request."""

    def __init__(self, lab: Lab, name: str, settings: Settings) -> None:
        self.lab = lab
        self.name = name
        self.loop = lab.world.process(name)
        self.transport = lab.network.transport(self.loop, name)
        self.random = lab.world.stream(f"host {name}")
        self.inc = new_incarnation(self.random)
        self.valid = True
        self.answers = True
        self.inside = False
        self.sent: dict[str, list[int]] = {}
        self.meant: dict[str, str] = {}
        self.requests: dict[LinkKey, list[int]] = {}
        self.order: list[str] = []
        self.replied: dict[LinkKey, list[int]] = {}
        self.heard: dict[str, list[int]] = {}
        self.lost: list[tuple[Incarnation, str]] = []
        self.unsent: list[int] = []
        self.gone: list[LinkKey] = []
        self.stalled: list[Incarnation] = []
        """Peers whose records say that their loop is blocked."""
        self.layer = LinkLayer(
            self.transport,
            SimClock(lab.world, self.loop),
            settings,
            self.random,
            lab.history,
            self.inc,
            CLUSTER,
            "",
            lambda: self.valid,
            self,
            stalled=lambda peer: peer in self.stalled,
        )

    async def listen(self) -> None:
        self.layer.address = await self.transport.listen(self.layer.accept)

    @property
    def peer(self) -> Peer:
        return Peer(self.inc, self.layer.address)

    def link_to(self, other: Host) -> str:
        return self.layer._out[other.inc].link.link

    def do(self, action: Callable[[], object]) -> None:
        """Something that this process does in one turn; it hears nothing meanwhile."""

        def turn() -> None:
            self.inside = True
            action()
            self.inside = False

        self.loop.call_soon(turn)

    def send(self, other: Host, *ns: int) -> None:
        def action() -> None:
            for n in ns:
                self.layer.send(other.peer, request(n))
                if other.inc in self.layer._out:
                    self.sent.setdefault(self.link_to(other), []).append(n)
                    self.meant[self.link_to(other)] = other.name

        self.do(action)

    def on_requests(self, link: LinkKey, messages: Iterator[ToOwner]) -> None:
        for message in messages:
            self.on_request(link, message)

    def on_answers(self, peer: Incarnation, messages: Iterator[ToSender]) -> None:
        for message in messages:
            self.on_answer(peer, message)

    def on_request(self, link: LinkKey, message: ToOwner) -> None:
        assert not self.inside
        assert link not in self.gone
        if isinstance(message, Request):
            self.requests.setdefault(link, []).append(message.n)
            self.order.append(f"request {message.n}")
            if self.answers:
                self.replied.setdefault(link, []).append(message.n)
                self.layer.answer(link, Reply("r", 0, message.n, ReplyStatus.OK, b""))
        elif isinstance(message, Ping):
            self.order.append(f"ping {message.id}")
            self.layer.answer(link, Pong(message.id))

    def on_answer(self, peer: Incarnation, message: ToSender) -> None:
        assert not self.inside
        if isinstance(message, Reply):
            link = self.layer._out[peer].link.link
            self.heard.setdefault(link, []).append(message.n)

    def on_link_lost(self, peer: Incarnation, reason: str, unsent: tuple[ToOwner, ...]) -> None:
        assert not self.inside
        self.lost.append((peer, reason))
        self.unsent += [message.n for message in unsent if isinstance(message, Request)]

    def on_disconnected(self, peer: Incarnation) -> None:
        pass

    def on_link_gone(self, link: LinkKey) -> None:
        assert not self.inside
        self.gone.append(link)
        self.order.append("gone")

    def all_heard(self) -> list[int]:
        return [n for ns in self.heard.values() for n in ns]

    def all_requests(self) -> list[int]:
        return [n for ns in self.requests.values() for n in ns]


class Lab:
    """A few hosts on one network."""

    def __init__(self, seed: int) -> None:
        self.world = World(seed)
        self.history = History(lambda: self.world.now)
        self.network = SimNetwork(self.world, self.history, self.world.stream("network"))
        self.driver = self.world.process("driver")

    async def host(self, name: str, settings: Settings | None = None) -> Host:
        host = Host(self, name, settings or Settings())
        await host.listen()
        return host

    async def pair(self) -> tuple[Host, Host]:
        return await self.host("p"), await self.host("q")

    def taken(self, host: Host) -> int:
        return sum(event.fields["inc"] == host.inc for event in self.history.of("taken"))


def simulate(test: Callable[[Lab], Coroutine[Any, Any, None]], seed: int = 1) -> Lab:
    lab = Lab(seed)
    lab.world.run(test(lab), lab.driver)
    assert lab.world.errors == []
    lab.world.close()
    return lab
