"""Range rings in virtual time: instances share ranges of uids, and no object is written (K8)."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import pytest
from rings_lab import GROUP, Rings

from domicile.errors import ConfigError
from domicile.kube.member import Ring
from domicile.kube.range_member import (
    UnfilteredList,
    _RangeController,  # pyright: ignore[reportPrivateUsage]
)
from domicile.kube.ranges import HashRange, RangeView, check_count, fnv1a
from domicile.kubeapi.client import KubeClient
from domicile.kubeapi.kinds import LEASES

ALL = tuple("abc")


def test_the_hash_and_the_selector_are_the_servers() -> None:
    # Vectors of FNV-1a, 64 bits.
    assert fnv1a("") == 0xCBF29CE484222325
    assert fnv1a("a") == 0xAF63DC4C8601EC8C
    assert fnv1a("foobar") == 0x85944171F73967E8
    halves = [HashRange(0, 2), HashRange(1, 2)]
    assert halves[1].selector == (
        "shardRange(object.metadata.uid, '0x8000000000000000', '0x10000000000000000')"
    )
    assert halves[0].selector.endswith("'0x0000000000000000', '0x8000000000000000')")
    for uid in ("a", "foobar", "x"):
        assert [one.holds(uid) for one in halves].count(True) == 1
    for count in (0, 1025):
        with pytest.raises(ConfigError, match="1 to 1024"):
            check_count(count)


def judge_ranges(rings: Rings) -> None:
    """No write for an object, and each range given before another one took it."""
    holders: dict[str, str] = {}
    for write in rings.server.log:
        if write.client and write.plural == "websites":
            raise AssertionError(f"{write.client} wrote {write.name}")
        if write.plural == "leases" and write.after is not None:
            holders[write.name] = write.after.get("spec", {}).get("holderIdentity") or ""


async def begin(rings: Rings, names: tuple[str, ...] = ALL) -> None:
    for number in range(rings.objects):
        await rings.add(number, child=False)
    for name in names:
        rings.instance(name, by_range=True)
    await rings.until(lambda: rings.shared_by_range(*names))


async def come_and_leave(rings: Rings) -> None:
    rings.work_s, rings.again_s = (1.0, 4.0), 0.5
    await begin(rings, ("a", "b"))
    await asyncio.sleep(20)
    rings.instance("c", by_range=True)
    await rings.until(lambda: rings.shared_by_range("a", "b", "c"), 60)
    await asyncio.sleep(20)
    left_at = rings.world.now
    rings.processes["a"].leave()
    await rings.until(lambda: rings.shared_by_range("b", "c"))
    assert rings.world.now - left_at < 12
    await asyncio.sleep(20)


async def one_is_cut_off(rings: Rings) -> None:
    rings.work_s, rings.again_s = (2.0, 6.0), 0.5
    await begin(rings, ("a", "b"))
    cut_at = rings.world.now
    rings.processes["a"].exchange.cut = True
    await rings.until(lambda: rings.shared_by_range("b"))
    assert 25 < rings.world.now - cut_at < 45
    await asyncio.sleep(30)


async def one_is_killed_and_comes_back(rings: Rings) -> None:
    rings.again_s = 1.0
    await begin(rings, ("a", "b"))
    rings.kill("a")
    await asyncio.sleep(1)
    rings.instance("a", by_range=True)
    await rings.until(lambda: rings.shared_by_range("a", "b"))
    await asyncio.sleep(10)


async def all_leases_are_deleted(rings: Rings) -> None:
    """`kubectl delete leases --all`, while another instance comes."""
    rings.work_s, rings.again_s = (2.0, 6.0), 0.5
    await begin(rings, ("a", "b"))
    await asyncio.sleep(10)
    admin = KubeClient(rings.server.exchange("admin"), random=rings.world.stream("admin"))
    for lease in rings.server.objects("leases", LEASES.group):
        await admin.delete(LEASES, lease["metadata"]["name"], "default")
    rings.instance("c", by_range=True)
    await rings.until(lambda: rings.shared_by_range("a", "b", "c"))
    await asyncio.sleep(20)


@pytest.mark.parametrize(
    "body",
    [come_and_leave, one_is_cut_off, one_is_killed_and_comes_back, all_leases_are_deleted],
)
@pytest.mark.scenario("KR-16", partial=True)
def test_ranges_move_and_objects_stay_as_they_are(
    body: Callable[[Rings], Coroutine[Any, Any, None]],
) -> None:
    for seed in range(2):
        rings = Rings(seed, objects=24)
        rings.run(body)
        judge_ranges(rings)
        assert len({act.object for act in rings.acts}) == 24


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.scenario("KR-16", partial=True)
def test_a_range_ring_comes_to_rest_after_any_trouble(seed: int) -> None:
    async def body(rings: Rings) -> None:
        random = rings.world.stream("trouble")
        rings.work_s, rings.again_s = (0.5, 4.0), 1.0
        await begin(rings)
        rings.wild = True
        for number in range(8):
            await asyncio.sleep(random.uniform(0.5, 25))
            name = random.choice(ALL)
            process = rings.processes[name]
            match random.choice(("leave", "kill", "freeze", "cut", "watch", "compact")):
                case "leave" if process.stop is not None and not process.loop.dead:
                    process.leave()
                    await asyncio.sleep(random.uniform(0, 5))
                    if process.ended:
                        rings.instance(name, by_range=True)
                case "kill":
                    rings.kill(name)
                    await asyncio.sleep(random.uniform(0, 60))
                    rings.instance(name, by_range=True)
                case "freeze":
                    process.loop.freeze()
                    await asyncio.sleep(random.uniform(0, 60))
                    process.loop.thaw()
                case "cut":
                    process.exchange.cut = True
                    await asyncio.sleep(random.uniform(0, 60))
                    process.exchange.cut = False
                case "watch":
                    rings.server.break_watches()
                case _:
                    rings.server.compact()
            await rings.add(1000 + number, child=False)
        rings.wild = False
        for name in ALL:
            process = rings.processes[name]
            if process.loop.dead or process.ended:
                rings.instance(name, by_range=True)
        await rings.until(lambda: rings.shared_by_range(*ALL), 900)

    rings = Rings(seed)
    rings.run(body)
    judge_ranges(rings)


@pytest.mark.scenario("KR-16", partial=True)
def test_an_object_that_was_made_anew_is_not_forgotten_with_the_old_one() -> None:
    """Two objects of one name, one after the other, lie in two ranges by their uids."""

    async def body(rings: Rings) -> None:
        rings.work_s, rings.again_s = (0.0, 0.1), 1.0
        await begin(rings, ("a",))
        await asyncio.sleep(5)
        for number in range(rings.objects):
            rings.server.remove("websites", f"site-{number}", GROUP)
            await rings.add(number, child=False)
        await asyncio.sleep(5)
        # Half of the ranges are given away, those of old objects among them.
        rings.instance("b", by_range=True)
        await rings.until(lambda: rings.shared_by_range("a", "b"))
        settled_at = rings.world.now
        await asyncio.sleep(10)
        acted = {act.object for act in rings.acts if act.began > settled_at + 5}
        assert len(acted) == rings.objects

    Rings(0, objects=60).run(body)


@pytest.mark.scenario("KR-16", partial=True)
def test_a_server_that_does_not_filter_is_refused() -> None:
    async def body(rings: Rings) -> None:
        rings.server.filters_shards = False
        client = KubeClient(rings.server.exchange("a"))

        async def reconcile(_: KubeClient, __: Any) -> None:
            raise AssertionError("nothing may be handled")

        async with Ring("plain").ranges(client, instance="a", namespace="default") as member:
            with pytest.raises(UnfilteredList, match="ShardedListAndWatch"):
                await member.run(reconcile, GROUP, "websites")
        with pytest.raises(ConfigError, match="has 32 ranges, not 8"):
            async with Ring("plain").ranges(client, instance="b", namespace="default", count=8):
                pass

    Rings(0).run(body)


# Bugs that the judges must find.


def takes_what_is_held(monkeypatch: pytest.MonkeyPatch) -> None:
    """K8: a range is taken from an instance that still holds it."""
    monkeypatch.setattr(RangeView, "free_at", lambda *_: float("-inf"))


def gives_before_the_work_has_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """K3: a range is given while a call of it runs."""

    async def give(self: Any, index: int) -> None:
        self._reflectors.pop(index).cancel()
        self._objects.pop(index, None)
        await self._release(index)
        self._member.held.pop(index, None)
        del self._busy[index]

    monkeypatch.setattr(_RangeController, "_give", give)


@pytest.mark.parametrize("mutant", [takes_what_is_held, gives_before_the_work_has_ended])
def test_a_planted_bug_is_found(
    mutant: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    mutant(monkeypatch)
    found: list[str] = []
    for seed in range(4):
        try:
            Rings(seed, objects=24).run(come_and_leave)
        except Exception as error:
            found.append(str(error))
            break
    assert found, f"{mutant.__name__} survived"
    assert "two instances" in found[0], found
