"""Leases that somebody deleted, in virtual time: who makes one waits before it acts (L1)."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any

import pytest

from domicile.errors import Fenced
from domicile.kube.conventions import ABSENT, SHARDER, is_generated_name
from domicile.kube.holding import GuardedExchange, KubeLeaseHolder
from domicile.kube.member import Ring
from domicile.kubeapi.client import KubeClient
from domicile.kubeapi.exchange import ApiRequest
from domicile.kubeapi.kinds import CONFIG_MAPS, LEASES
from domicile.testing.kube import ApiFault, FakeApiServer
from domicile.testing.sim.clock import SimClock
from domicile.testing.sim.loop import World

LABELS = {"x": "y"}
NAME = "the-lease"


@dataclass
class Holders:
    """Holders of one Lease in one simulated process, and how long two were valid together."""

    world: World
    server: FakeApiServer = field(init=False)
    made: list[KubeLeaseHolder] = field(default_factory=list[KubeLeaseHolder])

    def __post_init__(self) -> None:
        self.server = FakeApiServer(random=self.world.stream("server"))
        loop = asyncio.get_running_loop()
        self.clock = SimClock(self.world, loop)  # type: ignore[arg-type]
        self.admin = KubeClient(self.server.exchange("admin"), random=self.world.stream("admin"))

    def holder(self, identity: str, **more: Any) -> KubeLeaseHolder:
        random = self.world.stream(f"{identity} {len(self.made)}")
        client = KubeClient(self.server.exchange(identity), random=random)
        made = KubeLeaseHolder(
            client,
            NAME,
            identity,
            "default",
            labels=LABELS,
            clock=self.clock,
            random=random,
            **more,
        )
        self.made.append(made)
        return made

    async def delete(self) -> None:
        await self.admin.delete(LEASES, NAME, "default")

    def lease(self) -> dict[str, Any]:
        (found,) = self.server.objects("leases", "coordination.k8s.io")
        return found

    async def until(self, condition: Callable[[], bool], seconds: float = 60.0) -> float:
        """Wait in virtual time, and see that never two are valid. How long it took."""
        began = self.world.now
        while not condition():
            assert self.world.now < began + seconds, [one.reason for one in self.made]
            await asyncio.sleep(0.05)
            assert sum(one.valid for one in self.made) <= 1
        return self.world.now - began


def run(body: Callable[[Holders], Coroutine[Any, Any, None]]) -> None:
    world = World(1)
    loop = world.process("test")

    async def main() -> None:
        await body(Holders(world))

    try:
        world.run(main(), loop)
    finally:
        world.close()


async def joined(joining: Awaitable[None]) -> asyncio.Task[None]:
    async def join() -> None:
        await joining

    return asyncio.ensure_future(join())


@pytest.mark.scenario("KR-13", partial=True)
def test_a_deleted_lease_is_held_by_one_at_a_time() -> None:
    async def body(holders: Holders) -> None:
        a, b = holders.holder("a"), holders.holder("b")
        await a.join()
        joining = await joined(b.join())
        await asyncio.sleep(0.5)
        await holders.delete()
        waited = await holders.until(joining.done)
        assert b.valid
        assert not a.valid
        # One duration, not the two of a holder that fell silent.
        assert 15.0 <= waited < 17.0
        await b.leave()

    run(body)


def test_a_holder_that_is_cut_off_is_over_before_a_new_lease_counts() -> None:
    """It can't learn that its Lease was deleted: its own time has to end."""

    async def body(holders: Holders) -> None:
        a, b = holders.holder("a"), holders.holder("b")
        await a.join()
        cut: list[ApiRequest] = []

        def fault(client: str, request: ApiRequest) -> ApiFault | None:
            if client != "a":
                return None
            cut.append(request)
            return ApiFault.UNREACHABLE

        holders.server.faults = fault
        await holders.delete()
        joining = await joined(b.join())
        await holders.until(lambda: b.valid)
        assert cut
        assert not a.valid
        await joining
        await b.leave()

    run(body)


def test_a_lease_that_was_given_back_is_taken_at_once() -> None:
    async def body(holders: Holders) -> None:
        a, b = holders.holder("a"), holders.holder("b")
        await a.join()
        await a.leave()
        joining = await joined(b.join())
        assert await holders.until(joining.done) < 1.0
        await b.leave()

    run(body)


def test_a_name_that_no_other_process_can_have_waits_for_nothing() -> None:
    async def body(holders: Holders) -> None:
        a = holders.holder("a", unique_name=True)
        joining = await joined(a.join())
        assert await holders.until(joining.done) < 1.0
        await a.leave()

    run(body)


def test_a_holder_that_leaves_while_it_waits_gives_nothing_back() -> None:
    """Given back, the Lease would tell the next one that nobody acts any more."""

    async def body(holders: Holders) -> None:
        a, b, c = (holders.holder(name) for name in "abc")
        await a.join()
        await holders.delete()
        joining = await joined(b.join())
        await asyncio.sleep(1.0)
        joining.cancel()
        await asyncio.wait((joining,))
        await b.leave()
        assert holders.lease()["spec"]["holderIdentity"] == "b"
        last = await joined(c.join())
        await holders.until(last.done)
        assert c.valid
        await c.leave()

    run(body)


def test_a_lease_whose_making_was_not_answered_waits_too() -> None:
    async def body(holders: Holders) -> None:
        a, b = holders.holder("a"), holders.holder("b")
        await a.join()
        lost: list[ApiRequest] = []

        def fault(client: str, request: ApiRequest) -> ApiFault | None:
            if client == "b" and request.method == "POST" and not lost:
                lost.append(request)
                return ApiFault.UNANSWERED
            return None

        holders.server.faults = fault
        await holders.delete()
        joining = await joined(b.join())
        await holders.until(joining.done)
        assert lost
        assert b.valid
        await b.leave()

    run(body)


def test_a_lease_that_the_sharder_made_says_nothing_of_the_one_before() -> None:
    """It made one for a name that had none, and gave that back at once: nobody was there."""

    async def body(holders: Holders) -> None:
        a, b = holders.holder("a"), holders.holder("b")
        await a.join()
        await holders.delete()
        metadata = {"name": NAME, "labels": LABELS, "annotations": {ABSENT: "true"}}
        made = {"metadata": metadata, "spec": {"holderIdentity": SHARDER}}
        await holders.admin.create(LEASES, made, "default")
        returned = {"spec": {"holderIdentity": "", "leaseDurationSeconds": 1}}
        await holders.admin.patch(LEASES, NAME, "default", merge=returned)
        joining = await joined(b.join())
        waited = await holders.until(joining.done)
        assert b.valid
        assert waited >= 15.0
        await b.leave()

    run(body)


def test_a_lease_that_is_deleted_again_while_its_maker_waits_is_lost() -> None:
    async def body(holders: Holders) -> None:
        a = holders.holder("a")
        joining = await joined(a.join())
        await asyncio.sleep(1.0)
        await holders.delete()
        await holders.until(joining.done)
        with pytest.raises(Fenced, match="the Lease was deleted"):
            a.guard()
        await a.leave()

    run(body)


def test_a_slow_answer_does_not_shorten_the_wait_for_a_silent_holder() -> None:
    """K1: what was seen counts from when the answer came. The holder may have renewed since the
    question was sent."""

    async def body(holders: Holders) -> None:
        a, b = holders.holder("a"), holders.holder("b")
        await a.join()

        def slow(client: str, request: ApiRequest) -> ApiFault | None:
            # Repeated until the client's own time for a call is over, but for its last moment.
            late = holders.world.now < asked_at + 8.0
            if client == "b":
                return ApiFault.UNREACHABLE if late else None
            return None if late else ApiFault.UNREACHABLE

        asked_at = holders.world.now
        holders.server.faults = slow
        joining = await joined(b.join())
        await asyncio.sleep(8.0)
        last = a.valid_until
        await holders.until(joining.done)
        assert holders.world.now >= last + 2.0
        await b.leave()

    run(body)


def test_a_write_that_waited_for_its_connection_is_checked_again() -> None:
    """K7: the Lease was valid when the write began, and is not when it could be sent."""

    async def body(holders: Holders) -> None:
        a = holders.holder("a")
        exchange = holders.server.exchange("a's writes")
        writer = GuardedExchange(exchange, a)
        await a.join()
        written = len(holders.server.log)
        exchange.connect_s = a.valid_until - holders.world.now + 1.0
        await a.abandon()
        client = KubeClient(writer, timeout_s=60.0, random=holders.world.stream("writer"))
        with pytest.raises(Fenced):
            await client.create(CONFIG_MAPS, {"metadata": {"name": "late"}}, "default")
        assert len(holders.server.log) == written

    run(body)


@pytest.mark.parametrize(
    ("name", "generated"),
    [
        ("websites-6d4cf56db6-x7k2p", True),
        ("daemon-bcdfg", True),
        ("websites-0", False),
        ("websites-24567", False),
        ("my-nginx", False),
        ("a", False),
        ("bcdfg", False),
    ],
)
def test_names_that_kubernetes_generates(name: str, generated: bool) -> None:
    assert is_generated_name(name) is generated


def test_only_a_pods_own_generated_name_counts_as_unique(monkeypatch: pytest.MonkeyPatch) -> None:
    pod = "websites-6d4cf56db6-x7k2p"
    client = KubeClient(FakeApiServer().exchange("a"))

    def unique(**more: Any) -> list[bool]:
        ring = Ring("websites")
        made = (ring.member(client, **more), ring.ranges(client, **more))
        return [one.unique_name for one in made]

    monkeypatch.setenv("POD_NAME", pod)
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    assert unique() == [False, False]
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "10.0.0.1")
    assert unique() == [True, True]
    # Somebody chose it: another process may have it, too.
    assert unique(instance=pod) == [False, False]
    assert unique(instance="a", unique_name=True) == [True, True]
    monkeypatch.setenv("POD_NAME", "websites-0")
    assert unique() == [False, False]
    assert unique(unique_name=True) == [True, True]
