"""The kit for tests of controllers: rings in virtual time, with faults, judged at the end."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from domicile.errors import Fenced
from domicile.kubeapi.client import KubeClient
from domicile.kubeapi.kinds import ApiKind
from domicile.kubeapi.objects import PartialObject
from domicile.testing.rings import RingSim

GROUP = "example.com"
SITES = ApiKind(GROUP, "v1", "websites", "Website", True, PartialObject)


def made(seed: int = 0) -> RingSim:
    return RingSim("websites", GROUP, "websites", "Website", seed=seed)


class Calls:
    """A function for instances that notes how its calls end, by the instance's name."""

    def __init__(self, works_s: float = 0.0, again_s: float | None = None) -> None:
        self._works_s, self._again_s = works_s, again_s
        self.began: dict[str, list[str]] = {}
        self.ended: dict[str, list[str]] = {}

    def of(self, instance: str) -> Callable[[KubeClient, Any], Any]:
        async def reconcile(client: KubeClient, one: Any) -> float | None:
            self.began.setdefault(instance, []).append(one.metadata.name)
            how = "fenced"
            try:
                await asyncio.sleep(self._works_s)
                merge = {"metadata": {"annotations": {"by": instance}}}
                await client.patch(SITES, one.metadata.name, "default", merge=merge)
                how = "done"
            except asyncio.CancelledError:
                how = "cancelled"
                raise
            finally:
                self.ended.setdefault(instance, []).append(how)
            return self._again_s

        return reconcile


def add(sim: RingSim, *names: str, instance: str = "") -> None:
    labels = {sim.ring.shard_label: instance} if instance else {}
    for name in names:
        sim.server.put("websites", {"metadata": {"name": name, "labels": labels}}, GROUP)


def marked(sim: RingSim) -> dict[str, str]:
    return {
        name: (one["metadata"].get("annotations") or {}).get("by", "")
        for name, one in sim.objects().items()
    }


@pytest.mark.parametrize("seed", range(3))
def test_instances_share_objects_and_take_over(seed: int) -> None:
    names = [f"site-{number}" for number in range(12)]

    async def scenario(sim: RingSim) -> None:
        calls = Calls()
        sim.sharder()
        for name in "ab":
            sim.instance(name, calls.of(name))
        add(sim, *names)
        await sim.until(lambda: set(marked(sim).values()) == {"a", "b"})
        sim.instance("a2", calls.of("a2"))
        sim.server.break_watches()
        await sim.until(lambda: all(sim.belongs_to(name) for name in names))

    made(seed).run(scenario)


def test_a_frozen_instance_loses_its_objects_and_begins_anew() -> None:
    async def scenario(sim: RingSim) -> None:
        calls = Calls(again_s=1.0)
        sim.sharder()
        a = sim.instance("a", calls.of("a"))
        add(sim, "home")
        await sim.until(lambda: marked(sim) == {"home": "a"})
        a.freeze()
        assert not a.alive
        sim.instance("b", calls.of("b"))
        await sim.until(lambda: marked(sim) == {"home": "b"})
        a.thaw()
        await sim.until(lambda: a.members == 2)

    made().run(scenario)


def test_an_instance_that_is_cut_off_stops_by_itself() -> None:
    async def scenario(sim: RingSim) -> None:
        calls = Calls(again_s=1.0)
        a = sim.instance("a", calls.of("a"))
        add(sim, "home", instance="a")
        await sim.until(lambda: marked(sim) == {"home": "a"})
        a.cut_off()
        await sim.until(lambda: a.member is not None and not a.member.valid)
        count = len(calls.began["a"])
        await asyncio.sleep(60)
        assert len(calls.began["a"]) == count
        a.reconnect()
        await sim.until(lambda: len(calls.began["a"]) > count)

    made().run(scenario)


@pytest.mark.parametrize("how", ["taken", "deleted"])
def test_a_call_ends_when_the_lease_is_lost(how: str) -> None:
    async def scenario(sim: RingSim) -> None:
        calls = Calls(works_s=30.0)
        a = sim.instance("a", calls.of("a"))
        add(sim, "home", instance="a")
        await sim.until(lambda: calls.began)
        first = a.member
        assert first is not None
        if how == "taken":
            await sim.take_lease("a")
        else:
            sim.delete_lease("a")
        await sim.until(lambda: calls.ended, 10)
        assert calls.ended["a"] == ["cancelled"]
        with pytest.raises(Fenced):
            first.guard()

    made().run(scenario)


@pytest.mark.parametrize("by_range", [False, True])
@pytest.mark.parametrize(("works_s", "ends"), [(3.0, "done"), (30.0, "cancelled")])
def test_an_instance_that_leaves_lets_calls_end_for_a_while(
    by_range: bool, works_s: float, ends: str
) -> None:
    async def scenario(sim: RingSim) -> None:
        calls = Calls(works_s=works_s)
        a = sim.instance("a", calls.of("a"), by_range=by_range)
        add(sim, "home", instance="a")
        await sim.until(lambda: calls.began)
        left_at = sim.now
        a.leave()
        await sim.until(lambda: a.ended)
        assert calls.ended["a"] == [ends]
        assert sim.now - left_at < 7
        # No thread of the call goes on, so objects may move at once.
        assert sim.leases()["a"] == ""

    made().run(scenario)


def test_a_write_to_an_object_of_another_instance_is_found() -> None:
    async def scenario(sim: RingSim) -> None:
        bare = sim.client("a")

        async def reconcile(_: KubeClient, one: Any) -> None:
            merge = {"metadata": {"annotations": {"by": "a"}}}
            await bare.patch(SITES, "of-b", "default", merge=merge)

        async def nothing(_: KubeClient, __: Any) -> None: ...

        sim.instance("a", reconcile)
        sim.instance("b", nothing)
        add(sim, "of-a", instance="a")
        add(sim, "of-b", instance="b")
        await sim.until(lambda: marked(sim)["of-b"])

    with pytest.raises(AssertionError, match="a wrote of-b, which belonged to b"):
        made().run(scenario)


def test_a_seed_repeats_its_run() -> None:
    def run() -> list[tuple[float, str, str, str]]:
        sim = made(5)

        async def scenario(sim: RingSim) -> None:
            calls = Calls(again_s=2.0)
            sim.sharder()
            for name in "ab":
                sim.instance(name, calls.of(name))
            add(sim, *(f"site-{number}" for number in range(6)))
            await asyncio.sleep(60)

        sim.run(scenario)
        return [(one.at, one.client, one.verb, one.name) for one in sim.server.log]

    assert run() == run()
