"""Real processes: managers that come and go (SM-07, SM-19, SM-20), and one that stands by (C1)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from math import ceil
from pathlib import Path

import apsw
import pytest
from real_entities import Diary
from real_lab import ROLE, judge, run

from domicile import Settings
from domicile.core.ids import NOBODY, Incarnation, ShardKey
from domicile.core.lease.keeper import JITTER
from domicile.core.state.keys import node_key
from domicile.core.state.shardmap import Entry
from domicile.stores.sqlite.store import commits
from domicile.testing import Processes

SHORT = Settings(ttl_s=3, shards=24)
MANY = Settings(ttl_s=3, shards=40, balance_interval_s=0.5)
FAILED = "lease.unacknowledged"
"""How often a node tried in vain to renew."""


def entries(cluster: Processes) -> dict[int, Entry]:
    """What the store says of every shard."""
    return {
        number: cluster.entry(ShardKey(ROLE, number)) for number in range(cluster.settings.shards)
    }


def homes(cluster: Processes) -> dict[int, tuple[Incarnation, int]]:
    """Owner and epoch of every shard."""
    return {number: (entry.owner, entry.epoch) for number, entry in entries(cluster).items()}


def level(cluster: Processes) -> bool:
    """Whether everything is served, by all running nodes alike."""
    owners = Counter(entry.owner for entry in entries(cluster).values())
    counts = [
        owners.get(cluster.incarnation(node.index) or NOBODY, 0)
        for node in cluster.nodes
        if node.up and not node.manager
    ]
    return cluster.settled() and max(counts) - min(counts) <= 1


def leaders(cluster: Processes) -> list[str]:
    """The nodes that ever coordinated, by name and in order."""
    history = cluster.history()
    names = {event.fields["inc"]: event.fields["node"] for event in history.of("life")}
    return [names[event.fields["inc"]] for event in history.of("leading")]


@contextmanager
def locked(cluster: Processes) -> Iterator[None]:
    """The store is down: somebody holds the only write lock on its file."""
    path = cluster.directory / "store.db"
    connection = apsw.Connection(str(path), vfs="unix")
    try:
        connection.set_busy_timeout(5_000)
        connection.execute("BEGIN EXCLUSIVE")
        cluster.note_fault("outage")
        yield
        cluster.note_fault("heal")
    finally:
        connection.close(force=True)


async def renewals(cluster: Processes, node: int, count: int) -> None:
    """Return once a node has renewed its lease so often from now on."""
    incarnation = cluster.incarnation(node)
    assert incarnation is not None

    def renewed() -> int:
        return sum(
            event.kind == "renewed" and event.fields["inc"] == incarnation
            for event in cluster.recorded
        )

    enough = renewed() + count
    await cluster.wait_until(lambda: renewed() >= enough)


async def rounds(cluster: Processes, count: int) -> None:
    """Some balancing rounds of the leader, in which things might happen that must not.

    It tells of no round in which nothing moves, but of renewals, and their number says how long it
    has been at it.
    """
    settings, leader = cluster.settings, cluster.leader()
    assert leader is not None
    shortest_s = (1 - JITTER) * settings.renew_s
    await renewals(cluster, leader, 2 + ceil(count * settings.balance_interval_s / shortest_s))


async def talk(cluster: Processes) -> None:
    """Every diary writes into the next one, so that nodes send to each other."""
    for number in range(12):
        diary = cluster.ref(Diary, f"d{number}")
        assert await diary.ask(Diary.visit, f"d{(number + 1) % 12}", "hello") > 0


@pytest.mark.scenario("SM-19")
def test_a_restarted_manager_goes_on_from_the_store() -> None:
    async def scenario() -> None:
        async with Processes([Diary], nodes=3, managers=1, settings=SHORT) as cluster:
            await cluster.wait_until(lambda: level(cluster))
            before, gone = homes(cluster), cluster.incarnation(2)
            assert gone is not None
            first = cluster.incarnation(3)
            cluster.crash(3)
            cluster.crash(2)
            await cluster.wait_until(lambda: cluster.leader() is None)
            assert homes(cluster) == before
            cluster.start(3)
            await cluster.wait_until(lambda: level(cluster) and cluster.leader() == 3)
            await rounds(cluster, 2)
            after = homes(cluster)
            assert cluster.leader() == 3
            assert cluster.incarnation(3) != first
            assert cluster.status(gone) is None, "its record stands"
            assert gone not in {owner for owner, _ in after.values()}
            for number, (owner, epoch) in before.items():
                if owner == gone:
                    assert after[number][1] == epoch + 1
                else:
                    assert after[number] == (owner, epoch)
            assert set(leaders(cluster)) == {"manager-3"}
            history = cluster.history()
        judge(history)
        unregistered = [
            event
            for event in history.of("commit", "expire")
            if node_key(gone) in event.fields["deletes"]
        ]
        assert len(unregistered) == 1

    run(scenario())


@pytest.mark.scenario("SM-20")
@pytest.mark.parametrize("past_the_lease", [False, True])
def test_the_store_is_down_in_a_rebalance_and_the_manager_restarts(past_the_lease: bool) -> None:
    async def scenario() -> None:
        async with Processes([Diary], nodes=3, managers=1, settings=MANY) as cluster:
            await cluster.wait_until(lambda: level(cluster))
            cluster.crash(2)
            await cluster.wait_until(lambda: level(cluster))
            cluster.start(2)

            def begun() -> bool:
                newcomer = cluster.incarnation(2)
                there = entries(cluster).values()
                return newcomer is not None and any(entry.to == newcomer for entry in there)

            await cluster.wait_until(begun)
            failed = [cluster.counts(node)[FAILED] for node in range(3)]
            with locked(cluster):
                assert not level(cluster), "the outage must begin in the middle of a rebalance"
                cluster.crash(3)
                cluster.start(3)
                # What was committed before the outage may still be on its way to this process.
                newest = commits(cluster.directory / "store.db")[-1].revision
                await cluster.wait_until(lambda: cluster._looked().members.revision >= newest)
                before = homes(cluster)
                if past_the_lease:
                    fenced = lambda: {  # noqa: E731
                        event.fields["inc"] for event in cluster.history().of("fenced")
                    }
                    nodes = {cluster.incarnation(node) for node in range(3)}
                    await cluster.wait_until(lambda: nodes <= fenced())
                else:
                    # Each node has tried in vain by then to reach the store.
                    await cluster.wait_until(
                        lambda: all(
                            cluster.counts(node)[FAILED] > failed[node] for node in range(3)
                        )
                    )
                assert homes(cluster) == before
            await cluster.wait_until(lambda: level(cluster))
            await talk(cluster)
            # An epoch has one owner (I1a): judged over all commits by the checkers, too.
            history = cluster.history()
        judge(history)

    run(scenario())


@pytest.mark.scenario("SM-07")
def test_nodes_talk_on_for_as_long_as_there_is_no_manager() -> None:
    async def scenario() -> None:
        async with Processes([Diary], nodes=3, managers=1, settings=SHORT) as cluster:
            await cluster.wait_until(lambda: level(cluster))
            before = homes(cluster)
            cluster.crash(3)
            await cluster.wait_until(lambda: cluster.leader() is None)
            # Longer than the leases of nodes: they are renewed without a coordinator.
            for _ in range(2 * ceil(SHORT.ttl_s / SHORT.renew_s)):
                await talk(cluster)
                await renewals(cluster, 0, 1)
            assert homes(cluster) == before
            assert cluster.leader() is None
            cluster.start(3)
            await cluster.wait_until(lambda: cluster.leader() == 3)
            await cluster.stop(2)
            await cluster.wait_until(lambda: level(cluster))
            await talk(cluster)
            history = cluster.history()
        judge(history)

    run(scenario())


def test_a_second_manager_stands_by_and_takes_over() -> None:
    async def scenario() -> None:
        async with Processes([Diary], nodes=2, managers=2, settings=SHORT) as cluster:
            await cluster.wait_until(lambda: level(cluster) and cluster.leader() is not None)
            acting = cluster.leader()
            assert acting in (2, 3)
            standby = 5 - acting
            before = homes(cluster)
            assert leaders(cluster) == [f"manager-{acting}"]
            cluster.crash(acting)
            await cluster.wait_until(lambda: cluster.leader() == standby)
            await rounds(cluster, 2)
            assert homes(cluster) == before
            # It acts: a node that leaves is emptied.
            await cluster.stop(1)
            await cluster.wait_until(lambda: level(cluster))
            # The first one comes back and stands by: nobody is pre-empted (C1).
            cluster.start(acting)
            await cluster.wait_until(lambda: cluster.incarnation(acting) is not None)
            await rounds(cluster, 1)
            assert cluster.leader() == standby
            # It leaves in an orderly way: the other one need not wait for a lease.
            await cluster.stop(standby)
            await cluster.wait_until(lambda: cluster.leader() == acting)
            history = cluster.history()
        judge(history)

    run(scenario())


def test_a_manager_beside_nodes_that_may_coordinate(tmp_path: Path) -> None:
    async def scenario() -> None:
        processes = Processes(
            [Diary], nodes=2, managers=1, candidates=[0], settings=SHORT, directory=tmp_path / "c"
        )
        async with processes as cluster:
            await cluster.wait_until(lambda: level(cluster) and cluster.leader() is not None)
            acting = cluster.leader()
            assert acting in (0, 2)
            cluster.crash(acting)
            await cluster.wait_until(lambda: cluster.leader() == 2 - acting)
            await cluster.wait_until(lambda: level(cluster))
            await talk(cluster)

    run(scenario())
