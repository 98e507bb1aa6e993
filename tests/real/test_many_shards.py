"""Thousands of shards open at a node, and its event loop turns all the while."""

from __future__ import annotations

import asyncio
from collections import Counter

import pytest

from domicile import Entity, Node, Settings, handler
from domicile.core.ids import ShardKey
from domicile.core.state.shardmap import BLOCK_SIZE, Entry
from domicile.entity.runtime import Runtime

SHARDS = 8_192


class Plot(Entity, name="many-plot"):
    @handler
    async def name(self) -> str:
        return self.id


def test_no_turn_of_the_loop_opens_more_than_some_hundred_shards(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    opened: Counter[int] = Counter()
    turns, done = 0, asyncio.Event()
    see = Runtime.on_entry

    def count(runtime: Runtime, shard: ShardKey, entry: Entry) -> None:
        opened[turns] += 1
        see(runtime, shard, entry)
        if opened.total() == SHARDS:
            done.set()

    async def main() -> None:
        loop = asyncio.get_running_loop()

        def turn() -> None:
            nonlocal turns
            turns += 1
            loop.call_soon(turn)

        settings = Settings(shards=SHARDS, settle_s=0.05)
        async with Node("memory://many-shards", entities=[Plot], settings=settings) as node:
            loop.call_soon(turn)
            await done.wait()
            assert await node.ref(Plot, "one").ask(Plot.name) == "one"

    monkeypatch.setattr(Runtime, "on_entry", count)
    asyncio.run(asyncio.wait_for(main(), 180))
    assert max(opened.values()) <= 8 * BLOCK_SIZE, opened.most_common(3)
