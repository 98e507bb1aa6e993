"""`Manager`: a coordinator without entities, and nodes that never coordinate."""

from __future__ import annotations

import asyncio
import os
import signal

import pytest

from domicile import ConfigError, Entity, Manager, Node, Settings, handler

SETTINGS = Settings(shards=4, settle_s=0.05)


class Post(Entity, name="manager.post"):
    """Knows its epoch."""

    @handler
    async def epoch_of(self) -> int:
        return self.epoch


def make(name: str) -> Manager:
    return Manager(f"memory://{name}", settings=SETTINGS, node_id="boss")


async def until_leading(*managers: Manager) -> Manager:
    async with asyncio.timeout(60):
        while True:
            leading = [manager for manager in managers if manager.leading]
            if leading:
                assert len(leading) == 1
                return leading[0]
            await asyncio.sleep(0.01)


def test_a_manager_gives_shards_to_nodes_that_never_coordinate() -> None:
    async def scenario() -> None:
        store = "memory://manager-gives"
        node = Node(store, entities=[Post], candidate=False, settings=SETTINGS)
        async with node, make("manager-gives") as manager:
            assert await node.ref(Post, "a").ask(Post.epoch_of) == 1
            assert manager.leading
            assert manager.life is not None
            assert not manager.life.runtime.hosts
            assert node.life is not None
            assert not node.life.control.leading

    asyncio.run(scenario())


def test_without_a_manager_such_nodes_wait() -> None:
    async def scenario() -> None:
        store = "memory://manager-waits"
        node = Node(store, entities=[Post], candidate=False, settings=SETTINGS)
        async with node:
            ask = asyncio.ensure_future(node.ref(Post, "a").ask(Post.epoch_of))
            done, _ = await asyncio.wait([ask], timeout=1.0)
            assert not done
            async with make("manager-waits"):
                assert await ask == 1

    asyncio.run(scenario())


def test_nobody_is_pre_empted() -> None:
    async def scenario() -> None:
        async with make("manager-standby") as second:
            await until_leading(second)
            async with make("manager-standby") as third:
                # Whatever it wants, it has had its turn once it has heard of the leader.
                assert third.life is not None
                assert third.life.member.members.leader is not None
                assert await until_leading(second, third) is second
            assert second.leading

    asyncio.run(scenario())


def test_the_next_one_takes_over_when_the_acting_one_leaves() -> None:
    async def scenario() -> None:
        first, second = make("manager-over"), make("manager-over")
        await first.__aenter__()
        await until_leading(first)
        async with second:
            assert not second.leading
            await first.__aexit__()
            assert await until_leading(second) is second

    asyncio.run(scenario())


def test_a_signal_ends_run_and_leaving_follows() -> None:
    async def scenario() -> None:
        async with make("manager-signal") as manager:
            before = signal.getsignal(signal.SIGTERM)
            running = asyncio.ensure_future(manager.run())
            async with asyncio.timeout(60):
                while signal.getsignal(signal.SIGTERM) is before:  # noqa: ASYNC110
                    await asyncio.sleep(0.01)
                os.kill(os.getpid(), signal.SIGTERM)
                await running
            assert manager.life is not None
        assert manager.life is None

    asyncio.run(scenario())


def test_misuse_is_told() -> None:
    async def scenario() -> None:
        manager = make("manager-misuse")
        with pytest.raises(ConfigError, match="start the manager first"):
            await manager.run()
        async with manager:
            with pytest.raises(ConfigError, match="started already"):
                await manager.__aenter__()

    asyncio.run(scenario())
    with pytest.raises(ConfigError, match="known kinds"):
        Manager("mysql://x")
    with pytest.raises(ConfigError, match="no name for a cluster"):
        Manager("memory://x", cluster="a/b")
