"""Real processes of two wire protocols in one cluster, through rolling updates (DX-19)."""

from __future__ import annotations

import asyncio

import pytest
from real_entities import Diary
from real_lab import balanced, judge, nothing_lost, run

from domicile import Settings
from domicile.testing import Processes

OLDER, NEWER = (1, 1), (1, 2)
"""Today's protocol, and a next one that has no message more."""

SETTINGS = Settings(shards=12, balance_interval_s=0.1)
IDS = [f"d{number}" for number in range(24)]


@pytest.mark.scenario("DX-19")
def test_two_protocols_run_together_through_a_rolling_update() -> None:
    async def scenario() -> None:
        cluster = Processes([Diary], nodes=3, settings=SETTINGS)
        for node in cluster.nodes:
            node.protocols = OLDER
        asked = 0
        async with cluster:
            await cluster.wait_until(lambda: balanced(cluster))
            over = asyncio.Event()

            async def write(id: str) -> None:
                nonlocal asked
                while not over.is_set():
                    await cluster.ref(Diary, id).ask(Diary.write, str(asked))
                    # From one node to another, whatever each of them speaks.
                    await cluster.ref(Diary, id).ask(Diary.visit, f"{id}-friend", "hello")
                    asked += 1

            async with asyncio.TaskGroup() as group:
                for id in IDS:
                    group.create_task(write(id))
                for node in cluster.nodes:
                    before = asked
                    await cluster.stop(node.index)
                    node.protocols = NEWER
                    cluster.start(node.index)
                    await cluster.wait_until(lambda: balanced(cluster))
                    await cluster.wait_until(lambda before=before: asked > before + len(IDS))
                over.set()
            history = cluster.history()
        judge(history)
        nothing_lost(history)
        spoken = [event.fields for event in history.of("life") if event.fields["hosts"]]
        assert len(spoken) == 6, "every node ran twice"
        assert asked > 3 * len(IDS)

    run(scenario())
