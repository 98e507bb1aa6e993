"""A message that can't get through must not hold up the others of its link for good."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest

from domicile import Entity, Settings, connect, handler
from domicile.core.ids import Incarnation
from domicile.core.wire import Request, Welcome, encode_packet
from domicile.errors import MaybeExecuted, NotExecuted
from domicile.links.machine import OutgoingLink
from domicile.node import Node


class Scale(Entity, name="scale"):
    """Weighs."""

    @handler
    async def weigh(self, load: bytes) -> int:
        return len(load)

    @handler
    async def pid(self) -> int:
        return os.getpid()


def test_long_ids_count_for_the_size_of_a_frame() -> None:
    me, peer = Incarnation("a" * 32), Incarnation("b" * 32)
    link = OutgoingLink("l", 256, cluster="c", sender=me, receiver=peer, address="")
    link.dial(1)
    link.welcome(1, Welcome(0))
    for n in range(1000):
        link.send(Request("r", 0, n, 1, 1, "t", "i" * 40_000, "m", b"", True, False, 1.0))
    frames = link.pump()
    assert sum(len(frame.messages) for frame in frames) == 1000
    assert max(len(encode_packet(frame)) for frame in frames) < 2 * 1024 * 1024


def test_an_id_beyond_the_limit_of_messages_is_refused_and_harms_nobody(tmp_path: Path) -> None:
    async def main() -> None:
        url = f"sqlite:///{tmp_path}/s.db"
        settings = Settings(shards=4, settle_s=0.05, ask_timeout_s=60)
        node, client = (
            Node(url, entities=[Scale], settings=settings),
            connect(url, settings=settings),
        )
        async with node, client:
            with pytest.raises(NotExecuted):
                await client.ref(Scale, "i" * 34_000_000).ask(Scale.pid)
            assert await client.ref(Scale, "a").ask(Scale.pid) == os.getpid()

    asyncio.run(main())


def test_a_link_is_lost_when_the_peer_never_takes_its_first_frame(tmp_path: Path) -> None:
    async def main() -> None:
        url = f"sqlite:///{tmp_path}/s.db"
        theirs = Settings(shards=4, settle_s=0.05)
        ours = Settings(
            shards=4, link_timeout_s=1.0, message_bytes=64 * 1024 * 1024,
            hold_bytes=64 * 1024 * 1024, ask_timeout_s=30,
        )  # fmt: skip
        node, client = Node(url, entities=[Scale], settings=theirs), connect(url, settings=ours)
        async with node, client:
            with pytest.raises(MaybeExecuted):
                await client.ref(Scale, "a").ask(Scale.weigh, bytes(36_000_000))
            assert await client.ref(Scale, "a").ask(Scale.weigh, b"abc") == 3

    asyncio.run(main())


def test_a_message_longer_than_the_silence_gets_through_a_slow_network(tmp_path: Path) -> None:
    async def copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, rest: float) -> None:
        try:
            while data := await reader.read(16_384):
                writer.write(data)
                await writer.drain()
                await asyncio.sleep(rest)
        except OSError:
            pass
        finally:
            writer.close()

    async def main() -> None:
        url = f"sqlite:///{tmp_path}/s.db"
        port = 0

        async def pass_on(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            there, back = await asyncio.open_connection("127.0.0.1", port)
            await asyncio.gather(copy(reader, back, 0.02), copy(there, writer, 0))

        proxy = await asyncio.start_server(pass_on, "127.0.0.1", 0)
        via = proxy.sockets[0].getsockname()[1]
        settings = Settings(shards=4, settle_s=0.05)
        node = Node(url, entities=[Scale], settings=settings, advertise=f"127.0.0.1:{via}")
        async with proxy, node:
            assert node.life is not None
            port = node.life._transport._listeners[0]._sock.getsockname()[1]  # type: ignore[attr-defined]
            async with connect(url, settings=Settings(ask_timeout_s=120)) as client:
                assert await client.ref(Scale, "a").ask(Scale.weigh, bytes(3_000_000)) == 3_000_000

    asyncio.run(main())
