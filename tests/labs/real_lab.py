"""What the scenarios on real processes share: entities, a ledger on disk, readers of a history.

The entities run in other processes, so what they see goes to a file that all of them append to;
its name travels in the environment.
"""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import suppress
from pathlib import Path
from random import Random
from typing import Any, TypeVar

import pytest
from lines_lab import whole_lines
from real_entities import LEDGER, Clerk, Desk, Diary

from domicile import (
    Client,
    DomicileError,
    MaybeExecuted,
    NotExecuted,
    connect,
)
from domicile.core.ids import NOBODY, Incarnation, ShardKey
from domicile.core.state.keys import MAP
from domicile.core.state.shardmap import Entry
from domicile.testing import Event, History, Processes, check
from domicile.testing.checkers.reading import read
from domicile.testing.processes.member_process import die_with
from domicile.testing.processes.recorder import FileRecorder
from proving.chaos.starving import felt

T = TypeVar("T")

ROLE = "default"


def run(test: Coroutine[Any, Any, T]) -> T:
    """Run an async test."""
    return asyncio.run(test)


def open_ledger(monkeypatch: pytest.MonkeyPatch, directory: Path) -> Path:
    """A fresh ledger that processes started from here on write to."""
    path = directory / "ledger"
    path.touch()
    monkeypatch.setenv(LEDGER, str(path))
    return path


def seen(ledger: Path) -> dict[tuple[str, str], list[int]]:
    """What every entity saw of every sender, in order."""
    found: dict[tuple[str, str], list[int]] = {}
    for line in whole_lines(ledger):
        id, sender, number = line.split("\t")
        found.setdefault((id, sender), []).append(int(number))
    return found


def mine(cluster: Processes, node: int) -> Incarnation:
    """The incarnation of a node, which must stand."""
    found = cluster.incarnation(node)
    assert found is not None
    return found


def balanced(cluster: Processes) -> bool:
    """Whether everything is served, by all nodes alike."""
    shards = [ShardKey(ROLE, number) for number in range(cluster.settings.shards)]
    owners = Counter(cluster.entry(shard).owner for shard in shards)
    homes = [owners.get(cluster.incarnation(node.index) or NOBODY, 0) for node in cluster.nodes]
    return cluster.settled() and max(homes) - min(homes) <= 1


def entries(cluster: Processes) -> dict[int, Entry]:
    """What the store says of every shard."""
    return {
        number: cluster.entry(ShardKey(ROLE, number)) for number in range(cluster.settings.shards)
    }


def id_at(cluster: Processes, node: int) -> str:
    """A diary whose home is a node now."""
    return next(id for n in range(1_000) if cluster.owner(Diary, id := f"d{n}") == node)


async def written(cluster: Processes, id: str, line: str) -> int:
    """Write until there is an answer: a link that breaks under way leaves it open what ran."""
    while True:
        with suppress(MaybeExecuted, NotExecuted):
            return await cluster.ref(Diary, id).ask(Diary.write, line)


# readers of a history


def judge(history: History) -> None:
    """No checker objects."""
    violations = check(history)
    assert not violations, "\n".join(str(violation) for violation in violations[:5])


def of(history: History, incarnation: str, *kinds: str) -> list[Event]:
    """What one incarnation did."""
    return [event for event in history.of(*kinds) if event.fields["inc"] == incarnation]


def deadline(history: History, incarnation: str) -> float:
    """L1: how long an incarnation may act, from its acknowledged renewals alone."""
    return max(
        event.fields["sent_at"] + event.fields["ttl"] - event.fields["margin"]
        for event in of(history, incarnation, "renewed")
    )


def fenced(cluster: Processes, incarnation: str) -> bool:
    """Whether an incarnation has ended itself."""
    return any(
        event.kind == "fenced" and event.fields["inc"] == incarnation for event in cluster.recorded
    )


def acted_late(history: History, incarnation: str) -> bool:
    """Whether an incarnation did anything past the deadline of its lease (L1).

    A reply is noted after it was written: SIGSTOP may come in between. What the last guard before
    a pause let pass counts as of then.
    """
    until, guarded_at = deadline(history, incarnation), read(history).rest_of_turn
    deeds = ("start", "resume", "reply", "accept", "released", "told")
    return any(
        event.kind in deeds
        and event.fields["inc"] == incarnation
        and guarded_at.get(position, event.at) >= until
        for position, event in enumerate(history.events)
    )


def lives(history: History, name: str) -> list[Incarnation]:
    """The incarnations of a node, in order."""
    return [event.fields["inc"] for event in history.of("life") if event.fields["node"] == name]


def map_commits(history: History, by: str, since: float) -> list[Event]:
    """What a node changed in the map since a time."""
    return [
        event
        for event in history.of("commit")
        if event.fields["by"] == by
        and event.at >= since
        and any(key.startswith(MAP) for key, *_ in event.fields["puts"])
    ]


def fault_at(history: History, fault: str, incarnation: str) -> float:
    """When a fault was last done to an incarnation."""
    return max(
        event.at
        for event in history.of("fault")
        if event.fields["fault"] == fault and event.fields["inc"] == incarnation
    )


# how long something takes


ROUNDS, EXCUSES = 2, 4
"""How often a promise must hold, and how often the machine may be the reason that it did not."""


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


async def within_each_time(
    cluster: Processes, limit_s: float, once: Callable[[], Awaitable[tuple[float, float]]]
) -> None:
    """Something takes less than a time whenever it is done; it says when it began and ended.

    Only while the machine let nobody run it may take longer, and then it is done once more.
    """
    starved: list[tuple[float, float]] = []
    took: list[float] = []
    excused = pulses = 0

    def beat() -> float:
        nonlocal pulses
        pulses += 1
        return cluster.now()

    with felt(beat, lambda since, until: starved.append((since, until))):
        while len(took) - excused < ROUNDS:
            began, ended = await once()
            took.append(ended - began)
            if took[-1] < limit_s:
                continue
            # Whoever feels that is a thread, and has to be let run, too.
            felt_by = pulses + 3
            await cluster.wait_until(lambda felt_by=felt_by: pulses >= felt_by)  # type: ignore[misc]
            blame = [span for span in starved if span[0] < ended and began < span[1]]
            excused += 1
            assert blame, f"the machine is not to blame: {took}"
            assert excused <= EXCUSES, f"the machine lets nothing be measured: {took}"


# a client that can be stopped


def bulk_reader() -> None:
    """Ask for large answers, many at a time, until killed: the program of `start_reader`."""
    store, records, parent, size_bytes, *ids = sys.argv[1:]
    die_with(int(parent))

    async def read() -> None:
        async with connect(store, meter=FileRecorder(Path(records))) as client:

            async def ask(id: str) -> None:
                while True:
                    with suppress(DomicileError):
                        clerk = client.ref(Clerk, id).options(timeout_s=120)
                        await clerk.ask(Clerk.bulk, int(size_bytes))

            async with asyncio.TaskGroup() as group:
                for id in ids:
                    group.create_task(ask(id))

    asyncio.run(read())


def start_reader(cluster: Processes, size_bytes: int, ids: list[str]) -> subprocess.Popen[bytes]:
    """A process that asks each of these clerks for large answers without an end."""
    records = cluster.directory / "reader.events"
    arguments = [cluster.store, str(records), str(os.getpid()), str(size_bytes), *ids]
    with (cluster.directory / "reader.log").open("wb") as log:
        return subprocess.Popen(
            [sys.executable, "-c", "from real_lab import bulk_reader; bulk_reader()", *arguments],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        )


# numbered messages


DESKS, ASKED = 12, 3
"""Desks that relay, and further ones that they ask."""


class Load:
    """Numbered messages of all kinds from several senders, with a record of what must arrive."""

    def __init__(self, messages: int, *, desks: int = DESKS, asked: int = ASKED) -> None:
        self.left = messages
        self.desks, self.asked = desks, asked
        self.sent: dict[tuple[str, str], int] = {}

    async def send(self, client: Client, name: str, *, pause_s: float = 0.02) -> None:
        """One sender, until enough was sent by all of them."""
        random = Random(name)
        while self.left > 0:
            async with asyncio.TaskGroup() as group:
                for _ in range(random.randint(1, 24)):
                    at = random.randrange(self.desks + self.asked)
                    self.one(group, client, name, random, at)
            await asyncio.sleep(random.random() * pause_s)

    def number(self, sender: str, desk: str) -> int:
        """The next number of a sender for a desk."""
        self.sent[desk, sender] = self.sent.get((desk, sender), -1) + 1
        return self.sent[desk, sender]

    def one(
        self, group: asyncio.TaskGroup, client: Client, name: str, random: Random, at: int
    ) -> asyncio.Task[None]:
        """One message to a desk; done once it is answered, or if it is told, once it is queued."""
        # All as tasks: they start, and take their place in the order, in this order.
        desk = f"desk-{at}"
        number = self.number(name, desk)
        ref = client.ref(Desk, desk)
        kind = random.random()
        self.left -= 1
        if kind < 0.5:
            method = Desk.note if kind < 0.4 else Desk.ponder
            return group.create_task(ref.tell(method, name, number))
        if kind < 0.8 or at >= self.desks:
            return group.create_task(self._ask(ref.ask(Desk.ponder, name, number), number))
        # Always upwards, so that no two desks ever wait for each other.
        to = f"desk-{self.desks + at % self.asked}"
        via = f"{name} via {desk}"
        told, asked = self.number(via, to), self.number(via, to)
        self.left -= 2
        relay = ref.ask(Desk.relay, name, number, to, told)
        return group.create_task(self._ask(relay, asked))

    async def _ask(self, reply: Coroutine[Any, Any, int], expected: int) -> None:
        assert await reply == expected

    def arrived(self, ledger: Path) -> bool:
        """Whether as much is in the ledger as was sent."""
        return sum(map(len, seen(ledger).values())) >= sum(self.sent.values()) + len(self.sent)

    def compare(self, ledger: Path) -> None:
        """Every number of every sender came exactly once and in order."""
        found = seen(ledger)
        for key, last in self.sent.items():
            assert found.get(key) == list(range(last + 1)), key
        assert found.keys() == self.sent.keys()


def nothing_lost(history: History) -> None:
    """Every ask was answered and no tell was given up."""
    outcomes = Counter(event.fields["outcome"] for event in history.of("outcome"))
    assert set(outcomes) <= {"ok"}, outcomes
    assert not any(True for _ in history.of("lost"))
