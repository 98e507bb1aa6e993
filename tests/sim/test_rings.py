"""Controller rings in virtual time: instances come, leave, die and freeze; the API server fails."""

from __future__ import annotations

import asyncio

import pytest
from rings_lab import Rings

SEEDS = range(8)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.scenario("KR-03", "KR-04", "KR-07", "KR-08", partial=True)
def test_instances_come_and_leave(seed: int) -> None:
    async def body(rings: Rings) -> None:
        rings.sharder("sharder-1")
        for name in ("a", "b"):
            rings.instance(name)
        await rings.until(lambda: len(rings.leases()) == 3)
        for number in range(rings.objects):
            rings.add(number)
        await rings.until(lambda: rings.at_rest(["a", "b"]))
        rings.instance("c")
        await rings.until(lambda: "c" in rings.spread() and rings.at_rest(["a", "b", "c"]))
        left_at = rings.world.now
        rings.processes["a"].leave()
        await rings.until(lambda: rings.at_rest(["b", "c"]))
        assert rings.world.now - left_at < 8
        await rings.until(lambda: len({act.object for act in rings.acts}) == rings.objects)

    Rings(seed).run(body)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.scenario("KR-07", partial=True)
def test_a_killed_instance_loses_its_lease_first(seed: int) -> None:
    async def body(rings: Rings) -> None:
        rings.sharder("sharder-1")
        for name in ("a", "b"):
            rings.instance(name)
        for number in range(rings.objects):
            rings.add(number)
        await rings.until(lambda: rings.at_rest(["a", "b"]))
        killed_at = rings.world.now
        rings.kill("a")
        await rings.until(lambda: rings.at_rest(["b"]))
        assert 25 < rings.world.now - killed_at < 40
        taken = [w for w in rings.server.log if w.name == "a" and w.plural == "leases"]
        holders = [(w.after or {}).get("spec", {}).get("holderIdentity") for w in taken]
        assert "shardlease-controller" in holders
        first = next(
            w.at
            for w in taken
            if (w.after or {})["spec"]["holderIdentity"] == "shardlease-controller"
        )
        moved = [w for w in rings.server.log if w.plural == "websites" and w.at > killed_at]
        assert moved
        assert min(w.at for w in moved) > first

    Rings(seed).run(body)


@pytest.mark.parametrize("seed", range(30))
@pytest.mark.scenario("KR-08", "KR-13", "KR-14", partial=True)
def test_a_ring_comes_to_rest_after_any_trouble(seed: int) -> None:
    async def body(rings: Rings) -> None:
        random = rings.world.stream("trouble")
        for name in ("sharder-1", "sharder-2"):
            rings.sharder(name)
        names = ["a", "b", "c"]
        for name in names:
            rings.instance(name)
        for number in range(rings.objects):
            rings.add(number)
        rings.wild = True
        for number in range(12):
            await asyncio.sleep(random.uniform(0.5, 25))
            name = random.choice(names)
            process = rings.processes[name]
            match random.choice(("leave", "kill", "freeze", "cut", "sharder", "watch", "compact")):
                case "leave" if process.stop is not None and not process.loop.dead:
                    process.leave()
                    await asyncio.sleep(random.uniform(0, 5))
                    if process.ended:
                        rings.instance(name)
                case "kill":
                    rings.kill(name)
                    await asyncio.sleep(random.uniform(0, 60))
                    rings.instance(name)
                case "freeze":
                    process.loop.freeze()
                    await asyncio.sleep(random.uniform(0, 60))
                    process.loop.thaw()
                case "cut":
                    process.exchange.cut = True
                    await asyncio.sleep(random.uniform(0, 60))
                    process.exchange.cut = False
                case "sharder":
                    which = f"sharder-{random.choice((1, 2))}"
                    if random.random() < 0.5:
                        rings.kill(which)
                        rings.sharder(which)
                    else:
                        rings.processes[which].loop.freeze()
                        await asyncio.sleep(random.uniform(0, 60))
                        rings.processes[which].loop.thaw()
                case "watch":
                    rings.server.break_watches()
                case _:
                    rings.server.compact()
            rings.add(1000 + number)
        rings.wild = False
        for name in names:
            process = rings.processes[name]
            if process.loop.dead or process.ended:
                rings.instance(name)
        await rings.until(lambda: rings.at_rest(names), 900)

    Rings(seed).run(body)
