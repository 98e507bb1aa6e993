"""Real processes: stopped beyond their lease and continued (LS-13, DX-01, DX-15), or killed
(DX-04)."""

from __future__ import annotations

import asyncio
import signal
import subprocess
from collections import Counter
from typing import Literal

import pytest
from real_entities import Clerk, Diary
from real_lab import (
    Loss,
    balanced,
    deadline,
    fault_at,
    judge,
    lives,
    map_commits,
    mine,
    of,
    run,
    start_reader,
    within_each_time,
)

from domicile import DomicileError, MaybeExecuted, Settings
from domicile.core.ids import ShardKey
from domicile.core.state.keys import dead_key, node_key
from domicile.entity.model.entity import Entity
from domicile.testing import History, Processes
from domicile.testing.processes.member_signals import standing_still

TTL_S = 2.0
SHORT = Settings(shards=6, ttl_s=TTL_S)


def ids_at(cluster: Processes, kind: type[Entity], node: int, count: int) -> list[str]:
    """Entities whose home is a node now."""
    found = [id for n in range(count * 20) if cluster.owner(kind, id := f"c{n}") == node]
    assert len(found) >= count
    return found[:count]


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
            nap = asyncio.ensure_future(diary.ask(Diary.nap, 5.0))
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
            nap = asyncio.ensure_future(diary.ask(Diary.nap, 2.5))
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


HARDY = 1_000_000
"""Deaths here are nobody's fault."""


@pytest.mark.scenario("DX-04")
@pytest.mark.parametrize("who", ["a node", "the coordinator"])
def test_the_shards_of_a_killed_node_are_served_elsewhere_within_a_second(who: str) -> None:
    """SIGKILL frees its lock in the kernel: nobody waits for a lease of a minute."""
    ttl_s = 60.0

    async def scenario() -> None:
        settings = Settings(shards=6, ttl_s=ttl_s, poison_deaths=HARDY)
        async with Processes([Diary], nodes=3, settings=settings) as cluster:
            lost: list[Loss] = []

            async def lose_one() -> tuple[float, float]:
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
                lost.append(loss)
                cluster.start(victim)
                return fault_at(history, "crash", loss.incarnation), loss.served_at(history)[1]

            await within_each_time(cluster, 1.0, lose_one)
            history = cluster.history()
        judge(history)
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
            lost: list[Loss] = []

            async def lose_one() -> tuple[float, float]:
                await cluster.wait_until(lambda: balanced(cluster) and cluster.leader() is not None)
                node = next(one for one in range(3) if one != cluster.leader())
                loss = Loss(cluster, node)
                cluster.freeze(node)
                await loss.replaced()
                history, key = cluster.history(), node_key(loss.incarnation)
                assert any(key in event.fields["deletes"] for event in history.of("expire"))
                lost.append(loss)
                cluster.thaw(node)
                await cluster.wait_until(
                    lambda: cluster.incarnation(node) not in (None, loss.incarnation)
                )
                return fault_at(history, "freeze", loss.incarnation), loss.served_at(history)[1]

            await within_each_time(cluster, within_s, lose_one)
            history = cluster.history()
        judge(history)
        for loss in lost:
            granted = of(history, loss.incarnation, "renewed")[-1].fields
            assert granted["sent_at"] + ttl_s <= loss.served_at(history)[0], "and not before"

    run(scenario())


# DX-15


BULK_BYTES = 256 * 1024
BULKS = 120
BEHIND = 40
"""Messages in the frame that brings the order to stand still, right behind it."""

TURNS = 5
DEEDS = ("start", "resume", "reply")
KERNEL_BYTES = 16 * 1024 * 1024
"""More than two sockets hold."""

FILLED_S = 240.0
"""A machine with a load of 40 needed over a minute."""

MOST_ASKS = 1_500
"""Asks of the crowd that are under way: a machine that is too slow for more gets no more."""


class Crowd:
    """Asks of all kinds to one node's clerks, without an end until told."""

    def __init__(self, cluster: Processes, busy: list[str], others: list[str]) -> None:
        self._cluster, self._busy, self._others = cluster, busy, others
        self.over = False
        self.failures: list[DomicileError] = []
        self.over_with = 0

    async def press(self) -> None:
        """A new ask every few milliseconds, whatever became of the earlier ones."""
        number = 0
        async with asyncio.TaskGroup() as group:
            while not self.over:
                number += 1
                if number - self.over_with < MOST_ASKS:
                    group.create_task(self._one(number))
                else:
                    self.over_with += 1
                await asyncio.sleep(0.005)

    async def _one(self, number: int) -> None:
        # Refused at once or later, an ask must not end the others.
        try:
            await self._ask(number)
        except DomicileError as error:
            self.failures.append(error)
        finally:
            self.over_with += 1

    async def _ask(self, number: int) -> None:
        at_home, elsewhere = (ids[number % len(ids)] for ids in (self._busy, self._others))
        busy, other = (
            self._cluster.ref(Clerk, id).options(timeout_s=30) for id in (at_home, elsewhere)
        )
        match number % 4:
            case 0:
                await busy.ask(Clerk.quick, b"x" * 64 * 1024)
            case 1:
                await busy.ask(Clerk.patient, 40)
            case 2:
                await busy.ask(Clerk.curious, elsewhere)
            case _:
                await other.ask(Clerk.curious, at_home)


def suspended_at(history: History, incarnation: str, at: float) -> int:
    """How many handlers had started and not finished."""
    on = 0
    for event in of(history, incarnation, "start", "finish"):
        if event.at <= at:
            on += 1 if event.kind == "start" else -1
    return on


def unread_bytes(cluster: Processes, owner: str) -> int:
    """What was answered to the reader and it has not got: in the kernel, or still on this side."""
    # One pass over what is recorded: to merge a history each time would keep this machine busy.
    readers: dict[str, None] = {}
    replies, outcomes = Counter[str](), Counter[str]()
    for _, kind, fields in cluster.recorded:
        if kind == "submit" and fields["method"] == "bulk":
            readers[fields["inc"]] = None
        elif kind == "reply" and fields["inc"] == owner:
            replies[fields["sender"]] += 1
        elif kind == "outcome":
            outcomes[fields["inc"]] += 1
    return BULK_BYTES * sum(replies[reader] - outcomes[reader] for reader in readers)


async def fill_both_ways(
    cluster: Processes, incarnation: str, reader: subprocess.Popen[bytes]
) -> None:
    """Stop the reader in the middle of large answers, until they can only wait in user space."""
    await cluster.wait_until(
        lambda: unread_bytes(cluster, incarnation) > BULK_BYTES, timeout_s=FILLED_S
    )
    cluster.note_fault("pause of a client")
    reader.send_signal(signal.SIGSTOP)
    await cluster.wait_until(
        lambda: unread_bytes(cluster, incarnation) > KERNEL_BYTES, timeout_s=FILLED_S
    )


async def stop_in_a_turn(
    cluster: Processes, node: int, incarnation: str, clerks: list[str]
) -> list[asyncio.Task[int | None]]:
    """Stop a node in a handler, with more messages of the same frame right behind; those."""
    process = cluster.nodes[node].process
    assert process is not None
    first, *others = (cluster.ref(Clerk, id).options(timeout_s=30) for id in clerks)
    await asyncio.gather(*(clerk.ask(Clerk.quick, b"") for clerk in (first, *others)))
    behind: list[asyncio.Task[int | None]] = []
    for _ in range(TURNS):
        # All of it begins in one turn, so that one frame brings it (L3).
        order = asyncio.ensure_future(first.tell(Clerk.stand_still))
        behind += [
            asyncio.ensure_future((clerk.tell if n % 2 else clerk.ask)(Clerk.quick, b"behind"))
            for n, clerk in enumerate(others)
        ]
        await order
        await cluster.wait_until(lambda: standing_still(process.pid))
        cluster.freeze(node)
        if of(cluster.history(), incarnation, *DEEDS)[-1].fields.get("method") == "stand_still":
            return behind
        # It wrote to the store just then, which would have stopped everyone (S9), and went on.
        cluster.thaw(node)
    raise AssertionError(f"in none of {TURNS} turns it could be stopped")


@pytest.mark.scenario("DX-15")
@pytest.mark.parametrize("loop", ["asyncio", "uvloop"])
def test_nothing_starts_goes_on_or_answers_past_the_deadline(
    loop: Literal["asyncio", "uvloop"],
) -> None:
    async def scenario() -> None:
        settings = Settings(shards=6, ttl_s=5.0)
        async with Processes([Clerk], nodes=3, settings=settings, loop=loop) as cluster:
            await cluster.wait_until(lambda: balanced(cluster))
            node = next(one for one in range(3) if one != cluster.leader())
            old = mine(cluster, node)
            busy = ids_at(cluster, Clerk, node, BULKS + 1 + BEHIND)
            busy, idle = busy[:BULKS], busy[BULKS:]
            others = ids_at(cluster, Clerk, (node + 1) % 3, 20)
            crowd = Crowd(cluster, busy[:40], others)
            pressing = asyncio.ensure_future(crowd.press())
            reader = start_reader(cluster, BULK_BYTES, busy)
            try:
                await fill_both_ways(cluster, old, reader)
                behind = await stop_in_a_turn(cluster, node, old, idle)
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
                await pressing
            outcomes = await asyncio.gather(*behind, return_exceptions=True)
            assert all(isinstance(one, DomicileError | int | None) for one in outcomes)
            assert await cluster.ref(Clerk, busy[0]).ask(Clerk.quick, b"xx") == 2
            history, counts = cluster.history(), cluster.counts(node)
        judge(history)
        until, frozen_at = deadline(history, old), fault_at(history, "freeze", old)
        assert frozen_at < until < fault_at(history, "thaw", old)
        # Until it fell asleep it did all of these: the silence afterwards is no accident. It stood
        # still in a handler, so nothing that a guard has let pass before can come later (L3).
        deeds = of(history, old, *DEEDS)
        assert {event.kind for event in deeds} == {*DEEDS}
        assert deeds[-1].fields.get("method") == "stand_still", "something came behind it"
        assert deeds[-1].at < until
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
