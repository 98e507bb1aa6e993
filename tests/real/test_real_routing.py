"""Real processes: messages find their homes, with an old map and without a coordinator (SM-05,
SM-06, SM-07)."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path

import pytest
from real_entities import Diary
from real_lab import ROLE, balanced, judge, nothing_lost, of, run

from domicile import Client, Settings, connect
from domicile.core.ids import ShardKey
from domicile.core.state.keys import LEADER_KEY, MAP, block_key, wish_key
from domicile.core.state.shardmap import BLOCK_SIZE, Entry, decode_block
from domicile.core.state.txn import Put
from domicile.stores.namespace import Namespace
from domicile.stores.sqlite.store import SqliteStore
from domicile.testing import Processes
from domicile.testing.processes.recorder import FileRecorder

FEW = Settings(shards=6)


def one_id_per_shard(cluster: Processes) -> dict[ShardKey, str]:
    """An entity in every shard."""
    found: dict[ShardKey, str] = {}
    for number in range(400):
        found.setdefault(cluster.shard(Diary, f"d{number}"), f"d{number}")
    assert len(found) == cluster.settings.shards
    return found


@pytest.mark.scenario("SM-05")
def test_an_ask_starts_an_entity_on_another_node_and_is_answered() -> None:
    async def scenario() -> None:
        async with Processes([Diary], nodes=3, settings=FEW) as cluster:
            await cluster.wait_until(lambda: balanced(cluster))
            homes: dict[int, list[str]] = {}
            for id in one_id_per_shard(cluster).values():
                homes.setdefault(cluster.owner(Diary, id), []).append(id)
            assert sorted(homes) == [0, 1, 2]
            for node, ids in homes.items():
                process = cluster.nodes[node].process
                assert process is not None
                # From the test's own process, and from an entity on another node.
                assert await cluster.ref(Diary, ids[0]).ask(Diary.birth) == (1, process.pid)
                away = homes[(node + 1) % 3][1]
                visit = cluster.ref(Diary, ids[0]).ask(Diary.visit, away, "hello")
                assert await visit == 1
                assert await cluster.ref(Diary, away).ask(Diary.write, "again") == 2
            history = cluster.history()
            incarnations = [cluster.incarnation(node) for node in range(3)]
        judge(history)
        nothing_lost(history)
        hops = [
            (incarnations.index(event.fields["sender"]), incarnations.index(event.fields["inc"]))
            for event in history.of("start")
            if event.fields["sender"] in incarnations
        ]
        assert sorted(hops) == [(0, 1), (1, 2), (2, 0)]

    run(scenario())


async def stored(store: Namespace, shard: ShardKey) -> Entry:
    item = await store.get(block_key(shard.role, shard.shard // BLOCK_SIZE))
    assert item is not None
    return decode_block(item.value).entries[shard.shard % BLOCK_SIZE]


async def move(database: Path, cluster: str, moves: dict[ShardKey, str]) -> None:
    """Wish shards to other nodes and wait until the store says that they serve there."""
    store = Namespace(SqliteStore(database, by="mover"), cluster)
    try:
        before = {shard: await stored(store, shard) for shard in moves}
        for shard, name in moves.items():
            await store.commit((), (Put(wish_key(shard), name.encode()),))
        async with asyncio.timeout(120):
            for shard, old in before.items():
                entry = await stored(store, shard)
                while entry.state != "serving" or entry.epoch == old.epoch:
                    await asyncio.sleep(0.005)
                    entry = await stored(store, shard)
    finally:
        await store.close()


@pytest.mark.scenario("SM-06")
def test_a_message_by_an_old_map_comes_back_and_finds_the_home() -> None:
    async def scenario() -> None:
        async with Processes([Diary], nodes=3, settings=FEW) as cluster:
            await cluster.wait_until(lambda: balanced(cluster))
            homes = one_id_per_shard(cluster)
            for id in homes.values():
                await cluster.ref(Diary, id).ask(Diary.write, "before")
            old = {shard: cluster.entry(shard).owner for shard in homes}
            moves = {
                shard: cluster.nodes[(cluster.owner(Diary, id) + 1) % 3].name
                for shard, id in homes.items()
            }

            def meanwhile() -> None:
                """Everything moves while this process, its watch included, stands still."""
                work = move(cluster.directory / "store.db", "domicile", moves)
                thread = threading.Thread(target=lambda: asyncio.run(work))
                thread.start()
                thread.join()

            # The asks follow in the same turn, before any news of the store can be heard.
            asyncio.get_running_loop().call_soon(meanwhile)
            asks = [
                asyncio.ensure_future(
                    cluster.ref(Diary, id).options(timeout_s=60).ask(Diary.write, line)
                )
                for id in homes.values()
                for line in ("one", "two", "three")
            ]
            assert await asyncio.gather(*asks) == [1, 2, 3] * len(homes)
            history = cluster.history()
        judge(history)
        nothing_lost(history)
        for shard in homes:
            returned = [
                event.fields["inc"]
                for event in history.of("return")
                if event.fields["shard"] == shard.shard
            ]
            assert returned == [old[shard]] * 3, "it was not asked by the old map"
            started = [
                event.fields["inc"]
                for event in history.of("start")
                if event.fields["shard"] == shard.shard
            ]
            assert started[0] == old[shard]
            assert len({*started[1:]} - {old[shard]}) == 1
            assert len(started) == 4

    run(scenario())


TTL_S = 3.0


@pytest.mark.scenario("SM-07")
def test_known_shards_go_on_without_any_coordinator() -> None:
    async def scenario() -> None:
        settings = Settings(shards=6, ttl_s=TTL_S, ask_timeout_s=60.0)
        async with Processes([Diary], nodes=3, settings=settings, candidates=[0]) as cluster:
            shards = [ShardKey(ROLE, number) for number in range(6)]
            await cluster.drain(0)
            # Both of the others: one that the coordinator has not heard yet gets nothing.
            await cluster.wait_until(
                lambda: (
                    cluster.settled()
                    and {cluster.entry(one).owner for one in shards}
                    == {cluster.incarnation(1), cluster.incarnation(2)}
                )
            )
            ids = list(one_id_per_shard(cluster).values())
            left = [cluster.incarnation(1), cluster.incarnation(2)]
            cluster.crash(0)
            loop = asyncio.get_running_loop()
            ends_at = loop.time() + 3 * TTL_S
            asked = 0

            async def chat(client: Client) -> None:
                nonlocal asked
                while loop.time() < ends_at or asked <= 100:
                    for number, id in enumerate(ids):
                        await client.ref(Diary, id).ask(Diary.write, "asked")
                        await client.ref(Diary, id).ask(Diary.visit, ids[number - 1], "visited")
                        asked += 2
                    await asyncio.sleep(0.05)

            recorder = FileRecorder(cluster.directory / "late.events")
            # One client knew the cluster before, one comes only now.
            async with (
                connect(cluster.store, settings=settings, meter=recorder) as late,
                asyncio.TaskGroup() as group,
            ):
                group.create_task(chat(cluster))
                group.create_task(chat(late))
            recorder.close()
            assert cluster.leader() is None
            history = cluster.history()
        judge(history)
        nothing_lost(history)
        [crash] = [event for event in history.of("fault") if event.fields["fault"] == "crash"]
        written = {
            key
            for event in history.of("commit")
            if event.at > crash.at
            for key, *_ in event.fields["puts"]
        }
        assert not [key for key in written if key.startswith(MAP) or key == LEADER_KEY]
        for inc in left:
            assert inc is not None
            assert [event for event in of(history, inc, "start") if event.at > crash.at + 2 * TTL_S]
            assert not of(history, inc, "fenced")

    run(scenario())
