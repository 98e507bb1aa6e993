"""A node with very many shards leaves without looking at all of them again and again (H10, H14)."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable

import pytest

from domicile import Entity, Node, Settings, handler
from domicile.control.elected import Elected
from domicile.core.handoff.tables import Phase
from domicile.core.ids import ShardKey
from domicile.entity.hosting.shard_host import ShardHost
from domicile.entity.runtime import Runtime
from domicile.testing import Sim, simulated

SHARDS = 4_096
MOST = 2_048


class Field(Entity, name="unreleased-field"):
    @handler
    async def name(self) -> str:
        return self.id


class Barn(Entity, name="unreleased-barn", carry=True):
    count: int = 0

    @handler
    async def add(self) -> int:
        self.count += 1
        return self.count


class CountedHosts(dict[ShardKey, ShardHost]):
    """Hosts that count how often all of them are looked at."""

    looks = 0

    def values(self):  # type: ignore[no-untyped-def, override]
        self.looks += 1
        return super().values()


async def until(condition: Callable[[], bool]) -> None:
    while not condition():  # noqa: ASYNC110
        await asyncio.sleep(0)


async def leave(
    monkeypatch: pytest.MonkeyPatch, told: Counter[int], again: Counter[int]
) -> CountedHosts:
    """A node with many shards leaves. Its plane hears no release until each shard was released;
    then all are repeated. Counts, for each turn of the loop, what was told before and after."""
    turns, deaf = 0, True
    loop = asyncio.get_running_loop()
    hosts = CountedHosts()
    released, settled = Elected.released, Runtime.settled

    def turn() -> None:
        nonlocal turns
        turns += 1
        loop.call_soon(turn)

    def tell(plane: Elected, shard: ShardKey, epoch: int, floor: int) -> None:
        (told if deaf else again)[turns] += 1
        if not deaf:
            released(plane, shard, epoch, floor)

    monkeypatch.setattr(Elected, "released", tell)
    monkeypatch.setattr(
        Runtime, "settled", lambda runtime: again.total() >= SHARDS and settled(runtime)
    )
    settings = Settings(shards=SHARDS, settle_s=0.05, drain_deadline_s=120)
    node = Node("memory://unreleased", entities=[Field], settings=settings)
    async with node:
        assert await node.ref(Field, "one").ask(Field.name) == "one"
        life = node._lives.current
        assert life is not None
        runtime: Runtime = life.runtime
        await until(lambda: len(runtime.hosts) == SHARDS)
        hosts.update(runtime.hosts)
        runtime.hosts = hosts
        loop.call_soon(turn)
        leaving = asyncio.create_task(node._lives.stop())
        await until(lambda: {host.owner.phase for host in hosts.values()} == {Phase.RELEASED})
        hosts.looks = 0
        for _ in range(100):
            settled(runtime)
            assert not runtime.unreleased.draining
        looks = hosts.looks
        deaf = False
        runtime.unreleased.repeat_all()
        await until(lambda: again.total() >= SHARDS)
        await leaving
        hosts.looks = looks
    return hosts


def test_no_turn_repeats_more_than_some_hundred_releases_and_no_poll_looks_at_all_shards(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    told: Counter[int] = Counter()
    again: Counter[int] = Counter()
    hosts = asyncio.run(asyncio.wait_for(leave(monkeypatch, told, again), 180))
    assert again.total() >= SHARDS
    assert max(again.values()) <= MOST, again.most_common(3)
    assert hosts.looks == 0


@simulated(entities=[Barn, Field], nodes=3, seeds=6, settings=Settings(shards=12))
async def test_the_counts_agree_with_a_look_at_all_shards(
    sim: Sim, monkeypatch: pytest.MonkeyPatch
) -> None:
    compared: Counter[bool] = Counter()
    settled = Runtime.settled

    def compare(runtime: Runtime) -> bool:
        hosts = runtime.hosts.values()
        kept = any(host.unsettled for host in hosts)
        assert runtime.must_release == kept
        emptied = any(host.owner.phase is Phase.DRAINING for host in hosts)
        assert runtime.unreleased.draining == emptied
        compared[kept] += 1
        return settled(runtime)

    monkeypatch.setattr(Runtime, "settled", compare)
    await sim.wait_until(sim.settled)
    for number in range(24):
        await sim.ref(Barn, f"b{number}").ask(Barn.add)
        await sim.ref(Field, f"f{number}").ask(Field.name)
    sim.crash(0)
    await sim.stop(1)
    sim.start(0)
    sim.start(1)
    await sim.wait_until(sim.settled)
    await sim.stop(2)
    await sim.stop(0)
    assert compared[True]
    assert compared[False]
