"""Real processes: stopped beyond their lease and continued (LS-13, DX-01, DX-15), or killed
(DX-04)."""

from __future__ import annotations

import asyncio
import signal
import subprocess
from contextlib import suppress
from typing import Literal

import pytest
from real_lab import (
    ROLE,
    Clerk,
    Diary,
    balanced,
    deadline,
    fault_at,
    judge,
    lives,
    map_commits,
    of,
    run,
    start_reader,
)

from domicile import DomicileError, MaybeExecuted, Settings
from domicile.core.ids import Incarnation, ShardKey, dead_key, node_key
from domicile.entity.define import Entity
from domicile.testing import History, Processes
from domicile.testing.member_signals import standing_still

TTL_S = 2.0
SHORT = Settings(shards=6, ttl_s=TTL_S)


def ids_at(cluster: Processes, kind: type[Entity], node: int, count: int) -> list[str]:
    """Entities whose home is a node now."""
    found = [id for n in range(count * 20) if cluster.owner(kind, id := f"c{n}") == node]
    assert len(found) >= count
    return found[:count]


def mine(cluster: Processes, node: int) -> Incarnation:
    found = cluster.incarnation(node)
    assert found is not None
    return found


def drains(cluster: Processes, shard: ShardKey) -> bool:
    """Whether the owner of a shard has begun to give it up."""
    owner, epoch = cluster.entry(shard).owner, cluster.entry(shard).epoch
    return any(
        (event.fields["shard"], event.fields["epoch"]) == (shard.shard, epoch)
        for event in of(cluster.history(), owner, "draining")
    )


# LS-13, DX-01: a node


@pytest.mark.scenario("LS-13")
@pytest.mark.scenario("DX-01", partial=True)
def test_a_node_that_was_stopped_beyond_its_lease_changes_nothing_and_begins_anew() -> None:
    async def scenario() -> None:
        async with Processes([Diary], nodes=3, settings=SHORT) as cluster:
            await cluster.wait_until(lambda: balanced(cluster))
            leader = cluster.leader()
            node = next(one for one in range(3) if one != leader)
            target = next(one for one in range(3) if one not in (leader, node))
            napper, bystander = ids_at(cluster, Diary, node, 2)
            diary = cluster.ref(Diary, napper).options(timeout_s=60)
            old, shard = mine(cluster, node), cluster.shard(Diary, napper)
            epoch = cluster.entry(shard).epoch
            assert await diary.ask(Diary.write, "at the old home") == 1
            # Woken up it would finish a handler, answer, and say that its shard is released.
            nap = asyncio.ensure_future(diary.ask(Diary.nap, 1.0))
            await cluster.wait_until(lambda: len(of(cluster.history(), old, "start")) == 2)
            await cluster.wish(shard, target)
            await cluster.wait_until(lambda: drains(cluster, shard))
            cluster.freeze(node)
            await cluster.wait_until(
                lambda: (
                    cluster.entry(shard).state == "serving"
                    and cluster.entry(shard).owner not in ("", old)
                )
            )
            assert await diary.ask(Diary.write, "at the new home") == 1
            with pytest.raises(MaybeExecuted):
                await nap
            before = cluster.entry(shard)
            cluster.thaw(node)
            await cluster.wait_until(lambda: cluster.incarnation(node) not in (None, old))
            assert cluster.entry(shard) == before
            assert before.epoch == epoch + 1
            assert await diary.ask(Diary.write, "still there") == 2

            # The new incarnation is as good as any other.
            back = cluster.shard(Diary, bystander)
            await cluster.wish(back, node)
            await cluster.wait_until(
                lambda: cluster.settled() and cluster.owner(Diary, bystander) == node
            )
            process = cluster.nodes[node].process
            assert process is not None
            born = await cluster.ref(Diary, bystander).ask(Diary.birth)
            assert born == (1, process.pid), "another process, or one with a memory"
            history, name = cluster.history(), cluster.nodes[node].name
        judge(history)
        until, new = deadline(history, old), lives(history, name)[1]
        assert lives(history, name) == [old, new]
        assert fault_at(history, "freeze", old) < until < fault_at(history, "thaw", old)
        late = ("start", "resume", "reply", "accept", "released", "told")
        assert [event for event in of(history, old, *late) if event.at >= until] == []
        [fenced] = of(history, old, "fenced")
        assert fenced.at > fault_at(history, "thaw", old)
        stored = [
            {key for key, *_ in event.fields["puts"]} | {*event.fields["deletes"]}
            for event in history.of("commit")
            if event.fields["by"] == name and event.at >= fault_at(history, "freeze", old)
        ]
        assert stored[0] == {node_key(new)}
        assert all(node_key(old) not in keys for keys in stored)
        assert map_commits(history, name, 0.0) == []

    run(scenario())


# DX-01: a coordinator


@pytest.mark.scenario("DX-01", partial=True)
def test_a_coordinator_that_wakes_up_behind_its_successor_changes_nothing() -> None:
    async def scenario() -> None:
        async with Processes([Diary], nodes=4, settings=SHORT, candidates=[0, 1]) as cluster:
            await cluster.wait_until(lambda: balanced(cluster))
            leader = cluster.leader()
            assert leader in (0, 1)
            successor = 1 - leader
            napper = ids_at(cluster, Diary, 2, 1)[0]
            shard = cluster.shard(Diary, napper)
            before = cluster.entry(shard)
            other = cluster.shard(Diary, ids_at(cluster, Diary, successor, 1)[0])
            owner, old = mine(cluster, 2), mine(cluster, leader)
            # The move is decided by the old coordinator, its end falls into its sleep.
            diary = cluster.ref(Diary, napper).options(timeout_s=60)
            nap = asyncio.ensure_future(diary.ask(Diary.nap, 1.0))
            await cluster.wait_until(lambda: bool(of(cluster.history(), owner, "start")))
            await cluster.wish(shard, 3)
            await cluster.wait_until(lambda: drains(cluster, shard))
            cluster.freeze(leader)
            # And this it finds to do when it wakes up, before it can hear of its successor.
            await cluster.wish(other, 3)
            assert await nap == before.epoch
            await cluster.wait_until(lambda: cluster.leader() == successor)
            await cluster.wait_until(
                lambda: cluster.entry(shard).owner == cluster.entry(other).owner == mine(cluster, 3)
            )
            assert await diary.ask(Diary.write, "moved") == 1
            cluster.thaw(leader)
            await cluster.wait_until(lambda: cluster.incarnation(leader) not in (None, old))
            await cluster.wait_until(cluster.settled)
            assert cluster.leader() == successor
            assert cluster.entry(shard).owner == mine(cluster, 3)
            assert cluster.entry(shard).epoch == before.epoch + 1
            assert await diary.ask(Diary.write, "still there") == 2
            history, name = cluster.history(), cluster.nodes[leader].name
        judge(history)
        frozen_at = fault_at(history, "freeze", old)
        assert map_commits(history, name, 0.0)
        assert map_commits(history, name, frozen_at) == []
        assert map_commits(history, f"node-{successor}", frozen_at)
        # The release had come in while it slept, and was for nobody.
        thawed_at = fault_at(history, "thaw", old)
        released = of(history, owner, "released")
        slept = [event for event in released if frozen_at < event.at < thawed_at]
        assert [event.fields["shard"] for event in slept] == [shard.shard]
        assert [event for event in of(history, old, "told") if event.at > frozen_at] == []
        assert of(history, old, "fenced")

    run(scenario())


# DX-04


TRIES = 3
"""A machine may be busy elsewhere for a moment; a promise that is broken is broken each time."""

HARDY = 1_000_000
"""Deaths here are nobody's fault."""


class Loss:
    """A node that is about to be lost, and what it is home to."""

    def __init__(self, cluster: Processes, node: int) -> None:
        self.incarnation = mine(cluster, node)
        self._cluster = cluster
        shards = [ShardKey(ROLE, number) for number in range(cluster.settings.shards)]
        entries = {shard: cluster.entry(shard) for shard in shards}
        owned = {
            shard: one.epoch for shard, one in entries.items() if one.owner == self.incarnation
        }
        assert owned
        self._epochs = owned

    async def replaced(self) -> None:
        """Return once everything that it had is open elsewhere."""
        await self._cluster.wait_until(
            lambda: (
                self._cluster.settled()
                and all(self._cluster.entry(one).epoch > was for one, was in self._epochs.items())
            ),
            timeout_s=60,
        )

    def served_at(self, history: History) -> tuple[float, float]:
        """When the first and the last of its shards opened elsewhere, as their new homes noted."""
        opened = [
            next(
                event.at
                for event in history.of("open")
                if event.fields["shard"] == shard.shard and event.fields["epoch"] > epoch
            )
            for shard, epoch in self._epochs.items()
        ]
        return min(opened), max(opened)


@pytest.mark.scenario("DX-04")
@pytest.mark.parametrize("who", ["a node", "the coordinator"])
def test_the_shards_of_a_killed_node_are_served_elsewhere_within_a_second(who: str) -> None:
    """SIGKILL frees its lock in the kernel: nobody waits for a lease of a minute."""
    ttl_s = 60.0

    async def scenario() -> None:
        settings = Settings(shards=6, ttl_s=ttl_s, poison_deaths=HARDY)
        async with Processes([Diary], nodes=3, settings=settings) as cluster:
            took: list[float] = []
            lost: list[Loss] = []
            while not took or (took[-1] >= 1.0 and len(took) < TRIES):
                await cluster.wait_until(lambda: balanced(cluster) and cluster.leader() is not None)
                leader = cluster.leader()
                assert leader is not None
                victim = leader if who == "the coordinator" else (leader + 1) % 3
                id = ids_at(cluster, Diary, victim, 1)[0]
                assert await cluster.ref(Diary, id).ask(Diary.write, "before") >= 1
                loss = Loss(cluster, victim)
                cluster.crash(victim)
                await loss.replaced()
                assert await cluster.ref(Diary, id).ask(Diary.write, "after") == 1
                assert cluster.leader() not in (None, victim)
                history = cluster.history()
                crashed_at = fault_at(history, "crash", loss.incarnation)
                took.append(loss.served_at(history)[1] - crashed_at)
                lost.append(loss)
                cluster.start(victim)
            history = cluster.history()
        judge(history)
        assert took[-1] < 1.0, took
        for loss in lost:
            inc = loss.incarnation
            [burial] = [
                event for event in history.of("commit") if node_key(inc) in event.fields["deletes"]
            ]
            assert dead_key(inc) in [key for key, *_ in burial.fields["puts"]]
            assert loss.served_at(history)[1] < deadline(history, inc)

    run(scenario())


@pytest.mark.scenario("DX-04")
@pytest.mark.parametrize(("ttl_s", "within_s"), [(2.0, 3.0), (Settings().ttl_s, 10.0)])
def test_the_shards_of_a_silent_node_are_served_elsewhere_once_its_lease_is_over(
    ttl_s: float, within_s: float
) -> None:
    """SIGSTOP leaves it its lock: nothing but the lease tells that it is gone, on any store."""

    async def scenario() -> None:
        settings = Settings(shards=6, ttl_s=ttl_s, poison_deaths=HARDY)
        async with Processes([Diary], nodes=3, settings=settings) as cluster:
            took: list[float] = []
            lost: list[Loss] = []
            while not took or (took[-1] >= within_s and len(took) < TRIES):
                await cluster.wait_until(lambda: balanced(cluster) and cluster.leader() is not None)
                node = next(one for one in range(3) if one != cluster.leader())
                loss = Loss(cluster, node)
                cluster.freeze(node)
                await loss.replaced()
                history, key = cluster.history(), node_key(loss.incarnation)
                assert any(key in event.fields["deletes"] for event in history.of("expire"))
                frozen_at = fault_at(history, "freeze", loss.incarnation)
                took.append(loss.served_at(history)[1] - frozen_at)
                lost.append(loss)
                cluster.thaw(node)
            history = cluster.history()
        judge(history)
        assert took[-1] < within_s, took
        for loss in lost:
            granted = of(history, loss.incarnation, "renewed")[-1].fields
            assert granted["sent_at"] + ttl_s <= loss.served_at(history)[0], "and not before"

    run(scenario())


# DX-15


BULK_BYTES = 256 * 1024
BULKS = 120
KERNEL_BYTES = 16 * 1024 * 1024
"""More than two sockets hold."""


class Crowd:
    """Asks of all kinds to one node's clerks, without an end until told."""

    def __init__(self, cluster: Processes, busy: list[str], others: list[str]) -> None:
        self._cluster, self._busy, self._others = cluster, busy, others
        self.over = False
        self.failures: list[DomicileError] = []

    async def press(self) -> None:
        """A new ask every few milliseconds, whatever became of the earlier ones."""
        ref, number = self._cluster.ref, 0
        async with asyncio.TaskGroup() as group:
            while not self.over:
                number += 1
                busy = ref(Clerk, self._busy[number % len(self._busy)]).options(timeout_s=30)
                kind = number % 4
                if kind == 0:
                    ask = busy.ask(Clerk.quick, b"x" * 64 * 1024)
                elif kind == 1:
                    ask = busy.ask(Clerk.patient, 40)
                elif kind == 2:
                    ask = busy.ask(Clerk.curious, self._others[number % len(self._others)])
                else:
                    other = ref(Clerk, self._others[number % len(self._others)])
                    ask = other.options(timeout_s=30).ask(
                        Clerk.curious, self._busy[number % len(self._busy)]
                    )
                group.create_task(self._one(ask))
                await asyncio.sleep(0.005)

    async def _one(self, ask: object) -> None:
        try:
            await ask  # type: ignore[misc]
        except DomicileError as error:
            self.failures.append(error)


def suspended_at(history: History, incarnation: str, at: float) -> int:
    """How many handlers had started and not finished."""
    on = 0
    for event in of(history, incarnation, "start", "finish"):
        if event.at <= at:
            on += 1 if event.kind == "start" else -1
    return on


def unread_bytes(cluster: Processes, owner: str) -> int:
    """What was answered to the reader and it has not got: in the kernel, or still on this side."""
    history = cluster.history()
    readers = [event.fields["inc"] for event in history.of("submit") if is_bulk(event.fields)]
    if not readers:
        return 0
    replies = [one for one in of(history, owner, "reply") if one.fields["sender"] == readers[0]]
    return BULK_BYTES * (len(replies) - len(of(history, readers[0], "outcome")))


def is_bulk(fields: dict[str, object]) -> bool:
    return fields["method"] == "bulk"


async def fill_both_ways(
    cluster: Processes, node: int, incarnation: str, reader: subprocess.Popen[bytes]
) -> None:
    """Stop the reader in the middle of large answers, until they can only wait in user space."""
    await cluster.wait_until(lambda: unread_bytes(cluster, incarnation) > BULK_BYTES)
    cluster.note_fault("pause of a client")
    reader.send_signal(signal.SIGSTOP)
    await cluster.wait_until(lambda: unread_bytes(cluster, incarnation) > KERNEL_BYTES)
    # In the middle of a turn, with more that is ready behind it.
    clerk = ids_at(cluster, Clerk, node, 1)[0]
    await cluster.ref(Clerk, clerk).options(timeout_s=30).tell(Clerk.stand_still)
    process = cluster.nodes[node].process
    assert process is not None
    await cluster.wait_until(lambda: standing_still(process.pid))
    cluster.freeze(node)


@pytest.mark.scenario("DX-15")
@pytest.mark.parametrize("loop", ["asyncio", "uvloop"])
def test_nothing_starts_goes_on_or_answers_past_the_deadline(
    loop: Literal["asyncio", "uvloop"],
) -> None:
    async def scenario() -> None:
        settings = Settings(shards=6, ttl_s=3.0)
        async with Processes([Clerk], nodes=3, settings=settings, loop=loop) as cluster:
            await cluster.wait_until(lambda: balanced(cluster))
            node = next(one for one in range(3) if one != cluster.leader())
            old = mine(cluster, node)
            busy = ids_at(cluster, Clerk, node, BULKS)
            others = ids_at(cluster, Clerk, (node + 1) % 3, 20)
            crowd = Crowd(cluster, busy[:40], others)
            pressing = asyncio.ensure_future(crowd.press())
            reader = start_reader(cluster, BULK_BYTES, busy)
            try:
                await fill_both_ways(cluster, node, old, reader)
                # Its socket has room again from here on, while the node sleeps.
                reader.send_signal(signal.SIGCONT)
                shard = cluster.shard(Clerk, busy[0])
                await cluster.wait_until(lambda: cluster.entry(shard).owner not in ("", old))
                cluster.thaw(node)
                await cluster.wait_until(lambda: cluster.incarnation(node) not in (None, old))
                await cluster.wait_until(cluster.settled)
            finally:
                crowd.over = True
                reader.kill()
                reader.wait()
                with suppress(DomicileError):
                    await pressing
            assert await cluster.ref(Clerk, busy[0]).ask(Clerk.quick, b"xx") == 2
            history, counts = cluster.history(), cluster.counts(node)
        judge(history)
        until, frozen_at = deadline(history, old), fault_at(history, "freeze", old)
        assert frozen_at < until < fault_at(history, "thaw", old)
        # Until it fell asleep it did all of these: the silence afterwards is no accident.
        for kind in ("start", "resume", "reply"):
            assert of(history, old, kind)
        assert suspended_at(history, old, frozen_at) > 0
        piled_up = [
            event
            for event in history.of("write")
            if event.fields["to"] == old and frozen_at < event.at < until
        ]
        assert len(piled_up) > 20, "nothing was waiting for it"
        assert counts["tcp.withheld_bytes"] > 0
        assert counts["guard.refused"] > 0
        assert of(history, old, "fenced")
        assert any(isinstance(failure, MaybeExecuted) for failure in crowd.failures)

    run(scenario())
