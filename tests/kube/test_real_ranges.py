"""Range rings on a real API server with its gate on, and the refusal of one without (KR-16)."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import AsyncExitStack
from typing import Any

import pytest
from kube_lab import GROUP, SITES, ApiServer, install_websites, started, until
from ring_judge import judge_acts

from domicile.kube.member import Ring
from domicile.kube.range_member import RangeMember, UnfilteredList
from domicile.kubeapi.client import KubeClient
from domicile.kubeapi.credentials import find_credentials
from domicile.kubeapi.http_exchange import HttpExchange
from domicile.kubeapi.kinds import LEASES

OBJECTS = 300
COUNT = 32


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ApiServer]:
    gate = "--feature-gates=ShardedListAndWatch=true"
    for one in started(tmp_path_factory.mktemp("kube"), gate):
        asyncio.run(install_websites(one))
        yield one


@pytest.fixture(scope="module")
def plain_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ApiServer]:
    for one in started(tmp_path_factory.mktemp("kube")):
        asyncio.run(install_websites(one))
        yield one


class Instance:
    """A member in this process, with a user of its own."""

    def __init__(self, server: ApiServer, name: str) -> None:
        self._server, self.name = server, name
        self.member: RangeMember | None = None
        self.seen: dict[str, int] = {}
        self.acts: list[dict[str, Any]] = []
        self.task = asyncio.ensure_future(self._run())

    async def _run(self) -> None:
        exchange = HttpExchange(find_credentials(str(self._server.kubeconfig_of(self.name))))
        async with KubeClient(exchange, timeout_s=30.0) as client:
            made = Ring("websites").ranges(
                client, instance=self.name, namespace="default", count=COUNT, unique_name=True
            )
            async with made as self.member:
                await self.member.run(self._reconcile, GROUP, "websites")

    async def _reconcile(self, _: KubeClient, one: Any) -> None:
        name, loop = one.metadata.name, asyncio.get_running_loop()
        act = {"object": name, "instance": self.name, "run": f"{self.name}-{len(self.acts)}"}
        self.acts.append({**act, "at": loop.time()})
        try:
            await asyncio.sleep(0.02)
            self.seen[name] = self.seen.get(name, 0) + 1
        finally:
            # All instances have one clock.
            self.acts.append({**act, "at": loop.time()})

    @property
    def held(self) -> list[int]:
        return [] if self.member is None else sorted(self.member.held)

    async def end(self) -> None:
        self.task.cancel()
        await asyncio.wait((self.task,))
        if not self.task.cancelled():
            self.task.result()


@pytest.mark.scenario("KR-16")
def test_ranges_are_handed_over_and_no_object_is_written(server: ApiServer) -> None:
    async def body() -> None:
        async with AsyncExitStack() as stack:
            client = await stack.enter_async_context(server.client())
            for number in range(OBJECTS):
                await client.create(SITES, {"metadata": {"name": f"site-{number}"}}, "default")
            there: dict[str, Instance] = {}

            def start(name: str) -> None:
                there[name] = Instance(server, name)
                stack.push_async_callback(there[name].end)

            async def shared(*names: str) -> bool:
                for one in there.values():
                    assert not one.task.done() or one.name not in names, one.task
                held = [there[name].held for name in names]
                everything = sorted(index for each in held for index in each)
                return everything == list(range(COUNT)) and all(held)

            async def all_seen(*names: str) -> bool:
                seen = {name for one in names for name in there[one].seen}
                return len(seen) == OBJECTS

            start("a")
            start("b")
            await until(lambda: shared("a", "b"), "two share the ranges")
            await until(lambda: all_seen("a", "b"), "each object was handled")
            assert not there["a"].seen.keys() & there["b"].seen.keys()
            start("c")
            await until(lambda: shared("a", "b", "c"), "three share the ranges")
            for one in there.values():
                assert len(one.held) <= 12  # 1.05 times a third, rounded up
            await until(lambda: enough(there["c"]), "the third has its objects", 60)
            # A new object comes to one instance alone, by its watch.
            before = {name: dict(one.seen) for name, one in there.items()}
            await client.create(SITES, {"metadata": {"name": "late"}}, "default")
            await until(lambda: came(there, "late"), "a new object is handled")
            await there["a"].end()
            await until(lambda: shared("b", "c"), "the ranges of one that left", 60)
            assert sum("late" in one.seen for one in there.values()) <= 2
            assert all("late" not in seen for seen in before.values())
            leases = (await client.list(LEASES, "default", labels="domicile.dev/range")).items
            assert len(leases) == COUNT
            assert {one.spec.holder_identity for one in leases} == {"b", "c"}
            runs, overlaps = judge_acts([act for one in there.values() for act in one.acts])
            assert runs > OBJECTS, "objects that moved were worked on again"
            assert not overlaps, overlaps[:10]

    async def enough(one: Instance) -> bool:
        return len(one.seen) >= OBJECTS // 5

    async def came(there: dict[str, Instance], name: str) -> bool:
        return any(name in one.seen for one in there.values())

    asyncio.run(body())
    by_instances = [
        one for one in server.audited()
        if one["user"]["username"] in "abc" and one["verb"] not in ("get", "list", "watch")
    ]  # fmt: skip
    assert by_instances
    assert {one["objectRef"]["resource"] for one in by_instances} == {"leases"}


@pytest.mark.scenario("KR-16", partial=True)
def test_a_server_without_the_gate_is_refused(plain_server: ApiServer) -> None:
    async def body() -> None:
        async with plain_server.client() as client:
            for number in range(3):
                await client.create(SITES, {"metadata": {"name": f"site-{number}"}}, "default")

            async def reconcile(_: KubeClient, __: Any) -> None:
                raise AssertionError("nothing may be handled")

            member = Ring("websites").ranges(
                client, instance="a", namespace="default", unique_name=True
            )
            async with member as one:
                with pytest.raises(UnfilteredList, match="--feature-gates=ShardedListAndWatch"):
                    await one.run(reconcile, GROUP, "websites")

    asyncio.run(body())
