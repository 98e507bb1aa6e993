"""Numbered messages while shards move and nodes leave: what the tests of RG-05 and RG-10 share with
the run in full size.

A `Tally` follows the ledger while it grows and keeps one number for each entity and sender, so that
a run of a million messages needs no more memory than one of a thousand.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from random import Random

from real_entities import Desk
from real_lab import ROLE, Load

from domicile import Client, connect
from domicile.core.ids import ShardKey
from domicile.testing import Processes
from domicile.testing.processes.recorder import FileRecorder

PIECE_BYTES = 1 << 20
MOST_AHEAD = 10_000
ENDLESS = 1_000_000_000


# what was seen


@dataclass(frozen=True, slots=True)
class Verdict:
    """How what entities saw differs from what was sent to them."""

    lost: int
    duplicated: int
    reordered: int
    unexpected: int
    """Seen, but never sent."""

    @property
    def sound(self) -> bool:
        """Every number was seen exactly once, in order."""
        return not (self.lost or self.duplicated or self.reordered or self.unexpected)


class Tally:
    """A reader of a ledger: how many lines it has, and which of them were not the next number."""

    def __init__(self, ledger: Path) -> None:
        self.noted = self.duplicated = self.reordered = 0
        self._ledger = ledger
        self._offset = 0
        self._rest = b""
        self._next: dict[tuple[str, str], int] = {}
        self._ahead: dict[tuple[str, str], set[int]] = {}
        """Numbers that came before a smaller one of the same sender."""

    def read(self) -> None:
        """Take in the lines that are new."""
        with self._ledger.open("rb") as file:
            file.seek(self._offset)
            while piece := file.read(PIECE_BYTES):
                self._offset += len(piece)
                *lines, self._rest = (self._rest + piece).split(b"\n")
                for line in lines:
                    id, sender, number = line.decode().split("\t")
                    self._take((id, sender), int(number))

    def _take(self, key: tuple[str, str], number: int) -> None:
        self.noted += 1
        expected, ahead = self._next.get(key, 0), self._ahead.get(key)
        if number < expected or (ahead and number in ahead):
            self.duplicated += 1
        elif number > expected:
            self._ahead.setdefault(key, set()).add(number)
            assert sum(map(len, self._ahead.values())) <= MOST_AHEAD, "nothing is in order here"
        else:
            self.reordered += bool(ahead)
            expected += 1
            while ahead and expected in ahead:
                ahead.remove(expected)
                expected += 1
            self._next[key] = expected

    def missing(self, sent: dict[tuple[str, str], int]) -> int:
        """How many of the numbers up to these were not seen yet."""
        return sum(
            max(0, last + 1 - self._next.get(key, 0) - len(self._ahead.get(key, ())))
            for key, last in sent.items()
        )

    def verdict(self, sent: dict[tuple[str, str], int]) -> Verdict:
        """What is wrong if nothing more comes; `sent` has the last number of each."""
        unexpected = 0
        for key in {**self._next, **self._ahead}:
            beyond = self._next.get(key, 0) - 1 - sent.get(key, -1)
            extra = [number for number in self._ahead.get(key, ()) if number > sent.get(key, -1)]
            unexpected += max(0, beyond) + len(extra)
        return Verdict(self.missing(sent), self.duplicated, self.reordered, unexpected)


# what is sent


class Quota(Load):
    """Exactly so many numbers from every sender to every desk, and what desks ask each other."""

    def __init__(self, numbers: int, *, desks: int, asked: int) -> None:
        super().__init__(ENDLESS, desks=desks, asked=asked)
        self._numbers = numbers

    async def send_all(self, client: Client, name: str, *, in_flight: int) -> None:
        """One sender from its first to its last message."""
        random, room = Random(name), asyncio.Semaphore(in_flight)
        async with asyncio.TaskGroup() as group:
            for _ in range(self._numbers):
                order = [*range(self.desks + self.asked)]
                random.shuffle(order)
                for at in order:
                    await room.acquire()
                    task = self.one(group, client, name, random, at)
                    task.add_done_callback(lambda _: room.release())

    @property
    def count(self) -> int:
        """How many messages were sent so far, those of the desks among them."""
        return ENDLESS - self.left


async def clients(
    cluster: Processes, stack: AsyncExitStack, count: int, *, record: bool = True
) -> list[Client]:
    """The cluster's own client and some more; their events join the history if `record`."""
    found: list[Client] = [cluster]
    for number in range(1, count):
        recorder = None
        if record:
            recorder = FileRecorder(cluster.directory / f"client-{number}.events")
            stack.callback(recorder.close)
        client = connect(cluster.store, settings=cluster.settings, meter=recorder)
        found.append(await stack.enter_async_context(client))
    return found


# moves


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


# nodes that leave

LEAVERS = ("coordinator", "two at once", "slow entity")


def leavers(cluster: Processes, who: str, busy: str) -> list[int]:
    """The nodes that one of `LEAVERS` means; `busy` is the slow entity."""
    leader = cluster.leader()
    assert leader is not None
    if who == "coordinator":
        return [leader]
    if who == "two at once":
        return [node.index for node in cluster.nodes if node.index != leader][:2]
    return [cluster.owner(Desk, busy)]


async def leave_under_load(
    cluster: Processes, ledger: Path, leaving: Sequence[int], busy: str | None = None
) -> None:
    """Stop nodes at once in the middle of a load; everything sent before, then and after runs."""
    load = Load(ENDLESS)
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
