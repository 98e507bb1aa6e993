"""Links over TCP whose connections are cut at random: everything once, in order."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Iterator
from random import Random

import pytest
from links_lab import CLUSTER, request
from tcp_lab import Notes, on_both_loops, run, until

from domicile.core.ids import Incarnation, LinkKey, new_incarnation
from domicile.core.wire import Reply, ReplyStatus, Request, ToOwner, ToSender
from domicile.links.layer import LinkLayer
from domicile.membership.clock import SystemClock
from domicile.ports.transport import Peer
from domicile.settings import Settings
from domicile.transports.tcp import TcpTransport
from domicile.transports.tcp_connection import _RESET, TcpConnection

REQUESTS = 1_500


class LinkNotes(Notes):
    """Counts, and nothing else."""

    def event(self, kind: str, /, **fields: object) -> None:
        pass


class Host:
    """Link layer and transport of one incarnation; answers every request with some bytes."""

    def __init__(self, random: Random) -> None:
        self.notes = LinkNotes()
        self.random = random
        self.valid = True
        self.transport = TcpTransport(meter=self.notes)
        self.requests: list[int] = []
        self.replies: list[int] = []
        self.layer = LinkLayer(
            self.transport,
            SystemClock(),
            Settings(link_frames=16),
            random,
            self.notes,
            new_incarnation(random),
            CLUSTER,
            "",
            lambda: self.valid,
            self,
        )

    async def listen(self) -> None:
        self.layer.address = await self.transport.listen(self.layer.accept)

    def send(self, other: Host, n: int) -> None:
        self.layer.send(Peer(other.layer.me, other.layer.address), request(n))

    def on_requests(self, link: LinkKey, messages: Iterator[ToOwner]) -> None:
        for message in messages:
            self.on_request(link, message)

    def on_answers(self, peer: Incarnation, messages: Iterator[ToSender]) -> None:
        for message in messages:
            self.on_answer(peer, message)

    def on_request(self, link: LinkKey, message: ToOwner) -> None:
        assert isinstance(message, Request)
        self.requests.append(message.n)
        body = bytes(self.random.choice([0, 10, 1000, 200_000]))
        self.layer.answer(link, Reply("r", 0, message.n, ReplyStatus.OK, body))

    def on_answer(self, peer: Incarnation, message: ToSender) -> None:
        assert isinstance(message, Reply)
        self.replies.append(message.n)

    def on_link_lost(self, peer: Incarnation, reason: str, unsent: tuple[ToOwner, ...]) -> None:
        raise AssertionError(reason)

    def on_disconnected(self, peer: Incarnation) -> None:
        pass

    def on_link_gone(self, link: LinkKey) -> None:
        raise AssertionError(link)

    def cut(self) -> None:
        """Break a connection, with or without the bytes under way."""
        standing = list(self.transport._shared.connections)
        if standing:
            hurt(self.random.choice(standing), self.random.random() < 0.5)


def hurt(connection: TcpConnection, at_once: bool) -> None:
    if at_once:
        connection._sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
        connection._lose("cut")
    else:
        with contextlib.suppress(OSError):
            connection._sock.shutdown(socket.SHUT_RDWR)


@on_both_loops
@pytest.mark.parametrize("seed", [1, 2])
def test_cut_connections_lose_double_and_reorder_nothing(loop: str, seed: int) -> None:
    async def body() -> None:
        random = Random(seed)
        hosts = [Host(random), Host(random)]
        for host in hosts:
            await host.listen()
        try:
            for n in range(1, REQUESTS + 1):
                for host, other in (hosts, reversed(hosts)):
                    host.send(other, n)
                if random.random() < 0.3:
                    await asyncio.sleep(random.choice([0, 0, 0.002]))
                if random.random() < 0.02:
                    random.choice(hosts).cut()
            await until(lambda: all(len(host.replies) >= REQUESTS for host in hosts))
        finally:
            for host in hosts:
                host.layer.abort()
                await host.transport.close()
        for host in hosts:
            assert host.requests == host.replies == list(range(1, REQUESTS + 1))
            assert next(iter(host.layer._sessions.values())) > 2, "chance cut nothing"

    run(loop, body())


@on_both_loops
def test_a_fenced_link_layer_withholds_what_waits(loop: str) -> None:
    """The guard of every connection, dialled or accepted, is that of the incarnation."""

    async def body() -> None:
        random = Random(3)
        near, far = Host(random), Host(random)
        for host in (near, far):
            await host.listen()
        near.send(far, 1)
        await until(lambda: near.replies)
        connections = [*near.transport._shared.connections, *far.transport._shared.connections]
        assert len(connections) == 2
        for host, connection in zip((near, far), connections, strict=True):
            connection.send(b"x" * 24 * 1024 * 1024)
            assert connection._waiting
            host.valid = False
        await until(lambda: not any(connection._waiting for connection in connections))
        assert near.notes.counts["tcp.withheld_bytes"] > 0
        assert far.notes.counts["tcp.withheld_bytes"] > 0
        for host in (near, far):
            host.layer.abort()
            await host.transport.close()

    run(loop, body())


class Faulty(Host):
    """Fails on a message, by what nobody expected."""

    def __init__(self, random: Random) -> None:
        super().__init__(random)
        self.fails_at = 0
        self.lost: list[str] = []
        self.gone: list[LinkKey] = []

    def on_request(self, link: LinkKey, message: ToOwner) -> None:
        self._fail_at(message)
        super().on_request(link, message)

    def on_answer(self, peer: Incarnation, message: ToSender) -> None:
        self._fail_at(message)
        super().on_answer(peer, message)

    def _fail_at(self, message: ToOwner | ToSender) -> None:
        assert isinstance(message, Request | Reply)
        if message.n == self.fails_at:
            self.fails_at = 0
            raise SystemError("nobody expected this")

    def on_link_lost(self, peer: Incarnation, reason: str, unsent: tuple[ToOwner, ...]) -> None:
        self.lost.append(reason)

    def on_link_gone(self, link: LinkKey) -> None:
        self.gone.append(link)


@on_both_loops
@pytest.mark.parametrize("where", ["at the owner", "at the sender"])
def test_a_frame_that_is_not_taken_to_its_end_costs_the_link(loop: str, where: str) -> None:
    """I6: it counts as received, so its rest would be missing and nobody be told."""

    async def body() -> None:
        near, far = Faulty(Random(1)), Faulty(Random(2))
        try:
            for host in (near, far):
                await host.listen()
            near.send(far, 1)
            await until(lambda: near.replies)
            (far if where == "at the owner" else near).fails_at = 3
            for n in range(2, 6):
                near.send(far, n)
            await until(lambda: near.lost or len(near.replies) == 5)
            assert len(near.lost) == 1
            assert 3 not in near.replies
            near.send(far, 6)
            await until(lambda: near.replies[-1] == 6)
            assert not {3, 4, 5}.intersection(near.replies)
            assert far.requests == ([1, 2, 6] if where == "at the owner" else [1, 2, 3, 4, 5, 6])
            assert len(far.gone) == 1
        finally:
            for host in (near, far):
                host.layer.abort()
                await host.transport.close()

    run(loop, body())
