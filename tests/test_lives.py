"""Nodes that come back, and leave nothing behind, under awkward circumstances."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Callable
from pathlib import Path

import pytest

from domicile import ConfigError, Node, Settings
from domicile.core.ids import Incarnation
from domicile.errors import Unavailable
from domicile.life import Life
from domicile.ports.health import Verdict
from domicile.ports.transport import ConnectionHandler
from domicile.stores.locks import FileLocks
from domicile.transports.memory import MemoryTransport

SETTINGS = Settings(shards=4, settle_s=0.05)


async def another_life(node: Node, first: Life) -> None:
    async with asyncio.timeout(20):
        while node.life in (None, first):  # noqa: ASYNC110
            await asyncio.sleep(0.02)


def test_a_rejoin_that_fails_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """L5: a port or a descriptor gets free again; nobody else would bring the node back."""
    listen = MemoryTransport.listen
    tries: list[None] = []

    async def second_fails(self: MemoryTransport, accept: Callable[[], ConnectionHandler]) -> str:
        tries.append(None)
        if len(tries) == 2:
            raise ConfigError("the port is taken")
        return await listen(self, accept)

    monkeypatch.setattr(MemoryTransport, "listen", second_fails)
    monkeypatch.setattr("domicile.life.lives.REJOIN_S", 0.01)

    async def main() -> None:
        async with Node("memory://rejoin", settings=SETTINGS) as node:
            first = node.life
            assert first is not None
            first.member.fence("test")
            await another_life(node, first)
        assert len(tries) == 3

    asyncio.run(main())


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_forked_child_does_not_keep_the_port(tmp_path: Path) -> None:
    async def main() -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        node = Node(f"sqlite:///{tmp_path}/s.db", listen=f"127.0.0.1:{port}", settings=SETTINGS)
        async with node:
            hold, let_go = os.pipe()
            child = os.fork()
            if child == 0:
                os.close(let_go)
                os.read(hold, 1)
                os._exit(0)
            try:
                first = node.life
                assert first is not None
                first.member.fence("test")
                await another_life(node, first)
            finally:
                os.close(let_go)
                os.close(hold)
                os.waitpid(child, 0)  # noqa: ASYNC222

    asyncio.run(main())


@pytest.mark.parametrize("turns", range(0, 60, 3))
def test_a_second_cancellation_leaves_no_lock_held(tmp_path: Path, turns: int) -> None:
    async def main() -> None:
        node = Node(f"sqlite:///{tmp_path}/s.db", settings=SETTINGS)

        async def live() -> None:
            async with node:
                await asyncio.sleep(60)

        task = asyncio.create_task(live())
        await asyncio.sleep(0.001 * turns)
        task.cancel()
        await asyncio.sleep(0.0005 * (turns % 7))
        task.cancel()
        await asyncio.wait([task], timeout=20)
        assert task.done()
        locks = tmp_path / "s.db.d"
        # A file that stays behind unlocked proves that its incarnation is dead (L6).
        for path in locks.iterdir() if locks.exists() else ():
            assert FileLocks(locks).verdict(Incarnation(path.name)) is Verdict.DEAD
        with pytest.raises(Unavailable):
            node._lives._running()

    asyncio.run(main())
