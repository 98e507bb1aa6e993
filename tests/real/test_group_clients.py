"""Clients of a cluster find a group's primary, in a program with an event loop and without one."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path

import pytest
from groups_lab import electing, primary, server, serving, values, write

from domicile import Group, Node, Primary, SyncGroup, Unavailable, connect, connect_sync

WHOLE = values(serving(), primary(), server("s2"))
NEXT = values(serving("s2", 4))


@pytest.mark.scenario("FO-17")
def test_a_client_finds_and_follows_the_primary(tmp_path: Path) -> None:
    path = tmp_path / "s.db"
    url = write(path, WHOLE)

    async def main() -> list[Primary]:
        told: list[Primary] = []
        async with connect(url) as client:
            orders = client.group("orders")
            assert isinstance(orders, Group)
            found = await orders.primary()
            assert (found.host, found.port, found.epoch) == ("127.0.0.1", 7001, 3)
            async with asyncio.timeout(60):
                async for one in orders.primaries():
                    told.append(one)
                    if len(told) == 2:
                        break
                    # A change with nobody to serve in between.
                    await asyncio.to_thread(write, path, values(electing()))
                    with pytest.raises(Unavailable, match="electing 4"):
                        await orders.primary(wait_s=0.05)
                    await asyncio.to_thread(write, path, NEXT)
        with pytest.raises(Unavailable, match="not part of a cluster"):
            await orders.primary()
        return told

    told = asyncio.run(main())
    assert [(one.server, one.epoch) for one in told] == [("s1", 3), ("s2", 4)]


def test_a_node_finds_the_primary_of_a_group_beside_its_shards(tmp_path: Path) -> None:
    url = write(tmp_path / "s.db", WHOLE)

    async def main() -> str:
        async with Node(url) as node:
            return (await node.group("orders").primary()).address

    assert asyncio.run(main()) == "127.0.0.1:7001"


@pytest.mark.scenario("FO-17")
def test_a_program_without_a_loop_follows_the_primary(tmp_path: Path) -> None:
    path = tmp_path / "s.db"
    with connect_sync(write(path, WHOLE)) as client:
        orders = client.group("orders")
        assert isinstance(orders, SyncGroup)
        assert orders.primary().address == "127.0.0.1:7001"
        told: list[int] = []
        for one in orders.primaries():
            told.append(one.epoch)
            if len(told) == 2:
                break
            write(path, NEXT)
        assert told == [3, 4]
        with pytest.raises(Unavailable, match="there is no group 'bills'"):
            client.group("bills").primary(wait_s=0.05)


def test_a_loop_over_primaries_ends_with_the_client(tmp_path: Path) -> None:
    client = connect_sync(write(tmp_path / "s.db", WHOLE))
    first = threading.Event()
    ended: list[Exception] = []

    def follow() -> None:
        try:
            for _ in client.group("orders").primaries():
                first.set()
        except Unavailable as error:
            ended.append(error)

    thread = threading.Thread(target=follow)
    thread.start()
    assert first.wait(60)
    client.close()
    thread.join(60)
    assert not thread.is_alive()
    assert len(ended) == 1


def test_a_loop_over_primaries_ends_with_the_client_on_an_event_loop(tmp_path: Path) -> None:
    url = write(tmp_path / "s.db", WHOLE)

    async def main() -> None:
        first = asyncio.Event()

        async def follow(orders: Group) -> None:
            async for _ in orders.primaries():
                first.set()

        async with connect(url) as client:
            following = asyncio.ensure_future(follow(client.group("orders")))
            await first.wait()
        with pytest.raises(Unavailable):
            async with asyncio.timeout(60):
                await following

    asyncio.run(main())
