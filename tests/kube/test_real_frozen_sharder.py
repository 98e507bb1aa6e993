"""The acting sharder is frozen while it moves objects, and goes on while another one moves them.

It has decided on moves that it did not send, and has a walk that is not at its end. Meanwhile the
other sharder takes the sharders' Lease. The instance that was killed may come back under its name,
too. The API server's audit log judges all writes (KR-13, KR-14).
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator
from contextlib import ExitStack, aclosing
from pathlib import Path

import pytest
from kube_lab import INSTANCES, ApiServer, install_websites, started, until
from ring_cluster import Cluster, rests
from ring_instance import SITES
from ring_judge import SHARD, judge_acts, judge_audit, judge_sharders

from domicile.kube.sharding import LEADER
from domicile.kubeapi.client import KubeClient
from domicile.kubeapi.follow import ObjectChanged, ObjectsListed, follow
from domicile.kubeapi.kinds import LEASES, RINGS

OBJECTS = 120
REST_S = 400.0
FREEZES = 3
MOST_TRIES = 12
"""A move of all objects may be over before anybody sees that it has begun."""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ApiServer]:
    for one in started(tmp_path_factory.mktemp("kube")):
        asyncio.run(install_websites(one))
        yield one


class Places:
    """At which instance each object is, as a watch tells."""

    def __init__(self) -> None:
        self.at: dict[str, str] = {}
        self._news = asyncio.Event()

    async def follow(self, client: KubeClient) -> None:
        async with aclosing(follow(client, SITES, "default")) as changes:
            async for change in changes:
                match change:
                    case ObjectsListed(items):
                        self.at = {one.metadata.name: one.metadata.label(SHARD) for one in items}
                    case ObjectChanged(one):
                        self.at[one.metadata.name] = one.metadata.label(SHARD)
                    case _:
                        pass
                self._news.set()

    def count(self, instance: str) -> int:
        return list(self.at.values()).count(instance)

    async def until(self, condition: Callable[[], bool]) -> None:
        """As soon as it holds."""
        async with asyncio.timeout(REST_S):
            while not condition():
                self._news.clear()
                await self._news.wait()


@pytest.mark.scenario("KR-13", "KR-14", partial=True)
def test_a_sharder_that_is_frozen_while_it_moves_objects_moves_none_afterwards(
    server: ApiServer, tmp_path: Path
) -> None:
    with ExitStack() as stack:
        # Writes of instances are rare, so that a sharder that was late would meet few conflicts.
        cluster = Cluster(server, tmp_path, stack, again_s=20.0, controlled=False)
        frozen, handed = asyncio.run(freezes(server, cluster))
    entries = server.audited()
    verdict = judge_audit(entries, INSTANCES)
    runs, overlaps = judge_acts(
        json.loads(line) for line in cluster.acts.read_text().splitlines() if line.endswith("}")
    )
    acted, usurped = judge_sharders(entries, LEADER)
    print(
        f"{frozen} freezes with {handed} objects left to move: {verdict.writes} writes, "
        f"{verdict.moved} moved, {verdict.drains} drained, "
        f"{verdict.takes} Leases taken, {runs} runs"
    )
    assert frozen == FREEZES, "no sharder was caught while it moved objects"
    assert not usurped, usurped[:10]
    assert not verdict.wrong, verdict.wrong[:10]
    assert not overlaps, overlaps[:10]
    assert acted == 2
    assert len(verdict.owners) == OBJECTS
    assert all(verdict.owners.values())
    assert handed
    assert verdict.moved >= FREEZES
    assert runs > OBJECTS


async def freezes(server: ApiServer, cluster: Cluster) -> tuple[int, int]:
    """How often a sharder was frozen while it moved objects, and how many were left then."""
    async with server.client() as client:
        spec = {"resources": [{"group": SITES.group, "resource": SITES.plural}]}
        await client.create(RINGS, {"metadata": {"name": "websites"}, "spec": spec})
        for name in ("sharder-1", "sharder-2"):
            cluster.sharder(name)
        for name in "abc":
            cluster.join(name)
        await until(lambda: rests(client, cluster, 0), "three instances", REST_S)
        for number in range(OBJECTS):
            await client.create(SITES, {"metadata": {"name": f"site-{number}"}}, "default")
        await until(lambda: rests(client, cluster, OBJECTS), "all have an instance", REST_S)
        places = Places()
        following = asyncio.ensure_future(places.follow(client))
        frozen = handed = 0
        try:
            for number in range(MOST_TRIES):
                left = await one_freeze(client, cluster, places, "abc"[number % 3], frozen % 2 == 0)
                frozen, handed = frozen + (left > 0), handed + left
                if frozen == FREEZES:
                    break
        finally:
            following.cancel()
            await asyncio.wait((following,))
        return frozen, handed


async def one_freeze(
    client: KubeClient, cluster: Cluster, places: Places, victim: str, comes_back: bool
) -> int:
    """Kill an instance, and freeze the acting sharder when it has moved the first of its objects.
    Returns how many it had not moved."""

    async def holder() -> str:
        return (await client.get(LEASES, LEADER, "sharding-system")).spec.holder_identity or ""

    acting = await holder()
    await places.until(lambda: len(places.at) == OBJECTS and places.count(victim) > 0)
    before = places.count(victim)
    cluster.kill(victim)
    await places.until(lambda: places.count(victim) < before)
    cluster.freeze_sharder(acting)
    try:
        left = places.count(victim)
        if comes_back:
            cluster.join(victim)

        async def other_acts() -> bool:
            return await holder() not in (acting, "")

        await until(other_acts, "the other sharder holds the Lease", REST_S)
        if left and not comes_back:
            await places.until(lambda: places.count(victim) < left)
    finally:
        # It goes on while the other one is at work.
        cluster.thaw_sharder(acting)
    if not comes_back:
        await until(lambda: rests(client, cluster, OBJECTS), "the others have all", REST_S)
        cluster.join(victim)
    await until(lambda: rests(client, cluster, OBJECTS), "all is at rest", REST_S)
    return left
