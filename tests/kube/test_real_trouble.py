"""Fifty joins, leaves, kills and freezes on a real API server, judged by its audit log.

Every object has one instance that is there, at rest; between, none has two (KR-08, KR-14). That
holds for what the objects control, too, which is made at its owner's instance, also while the owner
is waited for (KR-04). The instances and the sharders are processes; a frozen one is stopped by
SIGSTOP, and goes on later.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from kube_lab import INSTANCES, ApiServer, install_websites, started, until
from ring_cluster import Cluster, rests
from ring_instance import SITES
from ring_judge import judge_acts, judge_audit, judge_sharders

from domicile.kube.sharding import LEADER
from domicile.kubeapi.client import KubeClient
from domicile.kubeapi.kinds import LEASES, NAMESPACES, RINGS

STEPS = int(os.environ.get("DOMICILE_RING_STEPS", "50"))
SEED = int(os.environ.get("DOMICILE_RING_SEED", "1"))
OBJECTS = 40
OUTSIDE = "outside"
MOST, FEWEST = 5, 1
REST_S = 400.0
CHANGE_AT = 10
"""The step after which the other sharder has to act. All are at rest then."""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ApiServer]:
    for one in started(tmp_path_factory.mktemp("kube")):
        asyncio.run(install_websites(one))
        yield one


@pytest.mark.scenario("KR-08", "KR-13", "KR-14")
def test_no_object_has_two_instances_through_fifty_troubles(
    server: ApiServer, tmp_path: Path
) -> None:
    with ExitStack() as stack:
        cluster = Cluster(server, tmp_path, stack)
        asyncio.run(troubles(server, cluster))
    verdict = judge_audit(server.audited(), INSTANCES, controlled="configmaps")
    runs, overlaps = judge_acts(
        json.loads(line) for line in cluster.acts.read_text().splitlines() if line.endswith("}")
    )
    shown = (
        f"{STEPS} steps: {verdict.writes} writes, {verdict.assigned} assigned, {verdict.drains} "
        f"drained, {verdict.let_go} let go, of which {verdict.handed} went to another one at once, "
        f"{verdict.moved} moved, {verdict.takes} Leases taken, "
        f"{runs} runs, {verdict.children} children, {len(verdict.apart)} apart"
    )
    print(shown)
    assert not verdict.wrong, verdict.wrong[:10]
    assert not overlaps, overlaps[:10]
    acted, usurped = judge_sharders(server.audited(), LEADER)
    assert not usurped, usurped[:10]
    assert acted == 2 or STEPS < CHANGE_AT, "both sharders have acted, one after the other"
    assert verdict.owners.pop(OUTSIDE) == "", "its namespace is not the ring's"
    assert len(verdict.owners) == OBJECTS
    assert all(verdict.owners.values())
    asked_alone = sum(
        path.read_text(errors="replace").count("goes by the ring alone")
        for path in tmp_path.glob("sharder-*.log")
    )
    assert len(verdict.apart) <= asked_alone, verdict.apart[:10]
    assert all(at == owners for at, owners in verdict.beside.values()), verdict.beside
    assert len(verdict.beside) >= verdict.children >= STEPS, shown
    # There was something to judge.
    assert min(verdict.acts, runs) > OBJECTS, shown
    assert all((verdict.drains, verdict.handed, verdict.moved, verdict.takes)), shown


async def troubles(server: ApiServer, cluster: Cluster) -> None:
    choice = random.Random(SEED)
    async with server.client() as client:
        here = {"matchLabels": {"kubernetes.io/metadata.name": "default"}}
        controlled = [{"group": "", "resource": "configmaps"}]
        resources = [
            {"group": "example.com", "resource": "websites", "controlledResources": controlled}
        ]
        spec = {"resources": resources, "namespaceSelector": here}
        await client.create(NAMESPACES, {"metadata": {"name": "elsewhere"}})
        await client.create(SITES, {"metadata": {"name": OUTSIDE}}, "elsewhere")
        await client.create(RINGS, {"metadata": {"name": "websites"}, "spec": spec})
        for name in ("sharder-1", "sharder-2"):
            cluster.sharder(name)
        for name in "abc":
            cluster.join(name)
        await until(lambda: rests(client, cluster, 0), "three instances", REST_S)
        for number in range(OBJECTS):
            body = {"metadata": {"name": f"site-{number}"}}
            await client.create(SITES, body, "default")
        await until(lambda: rests(client, cluster, OBJECTS), "all have an instance", REST_S)
        steps = 0
        while steps < STEPS:
            what = await trouble(cluster, choice)
            await asyncio.sleep(choice.uniform(0.2, 3.0))
            if what == "sharder":
                continue  # on top of the steps
            steps += 1
            if steps % 10 == 0 or steps == STEPS:
                for name in list(cluster.frozen):
                    cluster.thaw(name)
                await until(lambda: rests(client, cluster, OBJECTS), f"rest, step {steps}", REST_S)
            if steps == CHANGE_AT:
                await the_other_sharder_acts(client, cluster)


async def the_other_sharder_acts(client: KubeClient, cluster: Cluster) -> None:
    """Kill the acting sharder while there is something to move, and start it again afterwards. By
    chance alone it may be the same one that acts all the time."""
    acting = (await client.get(LEASES, LEADER, "sharding-system")).spec.holder_identity
    assert acting in cluster.sharders
    cluster.kill_sharder(acting)
    if len(cluster.processes) > FEWEST:
        cluster.kill(min(cluster.processes))
    else:
        cluster.join(min(set(INSTANCES) - set(cluster.processes)))
    await until(lambda: rests(client, cluster, OBJECTS), "the other sharder moves them", REST_S)
    cluster.sharder(acting)


async def trouble(cluster: Cluster, choice: random.Random) -> str:
    """One join, leave, kill, freeze or thaw of an instance, or the kill of a sharder."""
    there = sorted(set(cluster.processes) - set(cluster.frozen))
    away = sorted(set(INSTANCES) - set(cluster.processes))
    what = choice.choice(("join", "leave", "kill", "freeze", "join", "sharder"))
    if what == "sharder":
        # The acting one, or the other: both can do without it.
        name = choice.choice(sorted(cluster.sharders))
        cluster.kill_sharder(name)
        cluster.sharder(name)
    elif what == "join" or len(there) <= FEWEST:
        if cluster.frozen and choice.random() < 0.5:
            cluster.thaw(choice.choice(sorted(cluster.frozen)))
        elif len(cluster.processes) < MOST:
            cluster.join(choice.choice(away))
        else:
            cluster.leave(choice.choice(there))
    elif what == "leave":
        cluster.leave(choice.choice(there))
    elif what == "kill":
        cluster.kill(choice.choice(there))
    else:
        cluster.freeze(choice.choice(there))
    return what
