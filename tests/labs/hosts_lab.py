"""Clusters over hosts: each node, and the server of the store, in a network namespace of its own.

They need root on Linux, and skip by name otherwise. `LOCKED` is a backend that a test installs: any
store, with file locks as proof of death. All hosts are of one machine, so the locks are true.
"""

from __future__ import annotations

import os
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import pytest
from real_entities import Diary
from real_lab import Loss, acted_late, balanced, entries, fenced, id_at, judge, mine, written

from domicile import Settings
from domicile.testing import Processes
from domicile.testing.processes.environment import StoreHost
from domicile.testing.processes.fault_proxy import STORE
from proving.chaos.server import NO_SERVER, SERVERS

SETTINGS = Settings(shards=6, ttl_s=3.0, balance_interval_s=0.3, ask_timeout_s=60.0)
LIMIT_S = 120.0
Starts = Callable[[StoreHost], str]

needs_namespaces = pytest.mark.skipif(
    sys.platform != "linux" or os.geteuid() != 0, reason="network namespaces need root on Linux"
)

LOCKED = '''
"""A store of another scheme behind `locked+`, with file locks beside it that prove deaths."""

import os
from pathlib import Path

from domicile.backends.registry import Backend, store_backend
from domicile.stores.file_locks import FileLocks


class LockedBackend(Backend):
    scheme = "SCHEME"
    stores = "SCHEME://... (a test)"

    def plain(self, url):
        return url.removeprefix("locked+")

    def open_store(self, url, options):
        return store_backend(self.plain(url)).open_store(self.plain(url), options)

    def commits(self, url, after):
        return store_backend(self.plain(url)).commits(self.plain(url), after)

    def health(self, url, options):
        return FileLocks(Path(os.environ["DOMICILE_TEST_LOCKS"]))


BACKEND = LockedBackend()
'''
"""Write the scheme into it."""


@contextmanager
def server_of_its_own(kind: str) -> Iterator[Starts]:
    """What starts a server of a store in a host, and returns the URL of an empty store."""
    try:
        server = SERVERS[kind]()
    except NO_SERVER as error:
        pytest.skip(str(error))

    def start(host: StoreHost) -> str:
        server.live_in(host)
        server.start()
        return server.new_database()

    try:
        yield start
    finally:
        server.stop()


def renewals(cluster: Processes) -> Counter[str]:
    """How often each incarnation has renewed its lease."""
    return Counter(event.fields["inc"] for event in cluster.recorded if event.kind == "renewed")


async def all_renew(cluster: Processes, times: int) -> None:
    """Every node renews its lease some times more."""
    before = renewals(cluster)

    def renewed() -> bool:
        now = renewals(cluster)
        lives = [cluster.incarnation(node.index) for node in cluster.nodes]
        return all(one is not None and now[one] >= before[one] + times for one in lives)

    await cluster.wait_until(renewed, timeout_s=LIMIT_S)


WAYS = ("both ways", "no answers", "no requests", "the leader")
"""How a host is cut off the store."""


async def a_host_is_cut_off_the_store(store: Starts, ways: Sequence[str] = WAYS) -> None:
    """Slowly reached, then not reached in both directions or in one; at last the leader's host."""
    async with Processes(
        [Diary], nodes=3, settings=SETTINGS, network="namespaces", store=store
    ) as cluster:
        await cluster.wait_until(lambda: balanced(cluster), timeout_s=LIMIT_S)
        for node in range(3):
            cluster.delay(node, 0.02, jitter_s=0.03, to=STORE)
        # On a busy machine a lease may be lost, but the next incarnation renews.
        await all_renew(cluster, 4)
        cluster.heal()

        victim = next(node for node in range(3) if node != cluster.leader())
        cut: list[str] = []
        for way in ways:
            await cluster.wait_until(lambda: balanced(cluster), timeout_s=LIMIT_S)
            leader = cluster.leader()
            assert leader is not None
            node = leader if way == "the leader" else victim
            loss, id = Loss(cluster, node), id_at(cluster, node)
            assert await written(cluster, id, way) >= 1
            match way:
                case "no answers":
                    cluster.block(STORE, node)
                case "no requests":
                    cluster.block(node, STORE)
                case _:
                    cluster.partition([node], [STORE])
            old = loss.incarnation
            await cluster.wait_until(lambda old=old: fenced(cluster, old), timeout_s=LIMIT_S)  # type: ignore[misc]
            await loss.replaced()
            assert await written(cluster, id, "elsewhere") >= 1
            assert cluster.owner(Diary, id) != node
            assert cluster.nodes[node].up, "its process goes on, and tries"
            if way == "the leader":
                assert cluster.leader() not in (None, node)
            cluster.heal()
            await cluster.wait_until(
                lambda node=node, old=old: cluster.incarnation(node) not in (None, old),  # type: ignore[misc]
                timeout_s=LIMIT_S,
            )
            cut.append(old)
        await cluster.wait_until(lambda: balanced(cluster), timeout_s=LIMIT_S)
        history = cluster.history()
    judge(history)
    assert len(set(cut)) == len(ways)
    assert not [old for old in cut if acted_late(history, old)]


async def nobody_reaches_the_store(store: Starts, seconds: float) -> None:
    """Leases run out: all stop, nothing is decided meanwhile, and all begin anew afterwards."""
    async with Processes(
        [Diary], nodes=3, settings=SETTINGS, network="namespaces", store=store
    ) as cluster:
        await cluster.wait_until(lambda: balanced(cluster), timeout_s=LIMIT_S)
        lives, before = [mine(cluster, node) for node in range(3)], entries(cluster)
        cluster.partition([0, 1, 2], [STORE])
        until = cluster.now() + seconds
        await cluster.wait_until(
            lambda: all(fenced(cluster, one) for one in lives), timeout_s=LIMIT_S
        )
        assert cluster.now() < until, "they stopped while it lasted"
        await cluster.wait_until(lambda: cluster.now() >= until, timeout_s=LIMIT_S)
        # No time of an outage counts for a lease that others hold, and nobody decides.
        assert {n: one.epoch for n, one in entries(cluster).items()} == {
            n: one.epoch for n, one in before.items()
        }
        assert all(node.up for node in cluster.nodes)
        cluster.heal()
        await cluster.wait_until(
            lambda: balanced(cluster) and not {mine(cluster, n) for n in range(3)} & {*lives},
            timeout_s=LIMIT_S,
        )
        assert await written(cluster, "after", "all of it") == 1
        history = cluster.history()
    judge(history)
    assert not [old for old in lives if acted_late(history, old)]


async def nodes_go_on_without_the_store(store: Starts, seconds: float) -> None:
    """`fencing="health"`: for as long as it takes every home stays, and answers (I7)."""
    settings = Settings(
        shards=6, ttl_s=3.0, balance_interval_s=0.3, ask_timeout_s=60.0, fencing="health"
    )
    async with Processes(
        [Diary], nodes=3, settings=settings, network="namespaces", store=store
    ) as cluster:
        await cluster.wait_until(lambda: balanced(cluster), timeout_s=LIMIT_S)
        lives, before = [mine(cluster, node) for node in range(3)], entries(cluster)
        ids = [id_at(cluster, node) for node in range(3)]
        lines = [await written(cluster, id, "before") for id in ids]
        cluster.partition([0, 1, 2], [STORE])
        until, asks = cluster.now() + seconds, 0
        while cluster.now() < until:
            for id in ids:
                await cluster.ref(Diary, id).ask(Diary.nap, 0.2)
                asks += 1
        cluster.heal()
        assert asks > seconds / 2
        # Only then anything is decided again.
        settled = cluster.now() + 2 * settings.ttl_s
        await cluster.wait_until(lambda: cluster.now() >= settled, timeout_s=LIMIT_S)
        assert [mine(cluster, node) for node in range(3)] == lives
        assert entries(cluster) == before
        found = [await cluster.ref(Diary, id).ask(Diary.write, "after") for id in ids]
        assert found == [line + 1 for line in lines], "what they remember was never lost"
        # And a death is still seen.
        loss = Loss(cluster, 1)
        cluster.crash(1)
        await loss.replaced()
        history = cluster.history()
    judge(history)
    assert not [event for event in history.of("fenced") if event.fields["inc"] in lives]
