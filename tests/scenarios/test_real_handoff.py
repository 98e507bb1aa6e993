"""Real processes: shards that move under load (RG-05) and nodes that leave (RG-10).

`DOMICILE_REAL_MESSAGES` sets how many messages RG-05 sends.
"""

from __future__ import annotations

import asyncio
import os
from contextlib import AsyncExitStack
from pathlib import Path
from random import Random

import pytest
from real_lab import ROLE, Desk, Load, balanced, judge, nothing_lost, of, open_ledger, run

from domicile import Client, Settings, connect
from domicile.core.ids import ShardKey
from domicile.testing import Processes
from domicile.testing.recorder import FileRecorder

MESSAGES = int(os.environ.get("DOMICILE_REAL_MESSAGES", "4000"))
ENDLESS = 1_000_000_000
SETTINGS = Settings(shards=8, ask_timeout_s=60.0)
"""Patient, so that a busy machine makes no ask fail by its own impatience."""


async def clients(cluster: Processes, stack: AsyncExitStack, count: int) -> list[Client]:
    """The test's own client and some more; their events join the history."""
    found: list[Client] = [cluster]
    for number in range(1, count):
        recorder = FileRecorder(cluster.directory / f"client-{number}.events")
        stack.callback(recorder.close)
        client = connect(cluster.store, settings=cluster.settings, meter=recorder)
        found.append(await stack.enter_async_context(client))
    return found


async def keep_moving(cluster: Processes, sending: asyncio.Task[None]) -> None:
    """Wishes, wishes taken back in the middle of a move, drains: until all senders are done."""
    random = Random("moves")
    drained: int | None = None
    while not sending.done():
        shard = ShardKey(ROLE, random.randrange(cluster.settings.shards))
        await cluster.wish(shard, random.randrange(len(cluster.nodes)))
        if random.random() < 0.3:
            await cluster.wish(shard, None)
        if random.random() < 0.05:
            if drained is None:
                drained = random.randrange(len(cluster.nodes))
                await cluster.drain(drained)
            else:
                await cluster.undrain(drained)
                drained = None
        await asyncio.sleep(random.random() * 0.02)
    await sending


@pytest.mark.scenario("RG-05")
def test_every_number_arrives_once_and_in_order_while_shards_move(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ledger = open_ledger(monkeypatch, tmp_path)
    load = Load(MESSAGES)

    async def scenario() -> None:
        async with Processes([Desk], nodes=3, settings=SETTINGS) as cluster:
            async with AsyncExitStack() as stack:
                senders = await clients(cluster, stack, 4)

                async def send() -> None:
                    async with asyncio.TaskGroup() as group:
                        for number, client in enumerate(senders):
                            for task in range(2):
                                group.create_task(load.send(client, f"sender {number}.{task}"))

                await keep_moving(cluster, asyncio.ensure_future(send()))
                await cluster.wait_until(lambda: load.arrived(ledger))
            load.compare(ledger)
            history = cluster.history()
        judge(history)
        nothing_lost(history)
        # Not in vain: shards moved all the time, mail came back, chains passed draining shards.
        assert len(list(history.of("released"))) >= MESSAGES / 100
        assert len(list(history.of("return"))) >= MESSAGES / 200
        assert any(event.fields["finishing"] for event in history.of("write"))
        assert len({event.fields["inc"] for event in history.of("submit")}) >= 6

    run(scenario())


async def leave_under_load(
    cluster: Processes, ledger: Path, leaving: list[int], load: Load, busy: str | None = None
) -> None:
    """Stop nodes at once in the middle of a load; everything sent before, then and after runs."""
    async with AsyncExitStack() as stack:
        senders = await clients(cluster, stack, 2)
        async with asyncio.TaskGroup() as group:
            for number, client in enumerate(senders):
                group.create_task(load.send(client, f"sender {number}"))
            await cluster.wait_until(lambda: load.left < ENDLESS - 100)
            if busy is not None:
                labour = load.number("slow", busy)
                group.create_task(cluster.ref(Desk, busy).ask(Desk.labour, "slow", labour))
                later = [load.number("slow", busy) for _ in range(3)]
                for number in later:
                    group.create_task(cluster.ref(Desk, busy).ask(Desk.note, "slow", number))
                await cluster.wait_until(lambda: f"{busy}\tslow" in ledger.read_text("utf-8"))
            await asyncio.gather(*(cluster.stop(node) for node in leaving))
            load.left = 100
        await cluster.wait_until(lambda: load.arrived(ledger) and cluster.settled())
    load.compare(ledger)


@pytest.mark.scenario("RG-10")
@pytest.mark.parametrize("who", ["coordinator", "two at once", "slow entity"])
def test_a_node_that_is_asked_to_leave_takes_nothing_with_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, who: str
) -> None:
    ledger = open_ledger(monkeypatch, tmp_path)
    load = Load(ENDLESS)

    async def scenario() -> None:
        async with Processes([Desk], nodes=4, settings=SETTINGS) as cluster:
            await cluster.wait_until(lambda: balanced(cluster))
            leader = cluster.leader()
            assert leader is not None
            busy = None
            if who == "coordinator":
                leaving = [leader]
            elif who == "two at once":
                leaving = [node for node in range(4) if node != leader][:2]
            else:
                busy = "desk-slow"
                leaving = [cluster.owner(Desk, busy)]
            gone = [cluster.incarnation(node) for node in leaving]
            await leave_under_load(cluster, ledger, leaving, load, busy)
            assert cluster.leader() not in (None, *leaving)
            history = cluster.history()
        judge(history)
        nothing_lost(history)
        for inc in gone:
            assert inc is not None
            assert of(history, inc, "start"), "it had nothing to do"
            assert of(history, inc, "released"), "it had nothing to hand over"
            assert of(history, inc, "ended")
            assert not of(history, inc, "fenced")

    run(scenario())
