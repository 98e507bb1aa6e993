"""Clusters of real processes for benchmarks that start, stop and replace nodes under load.

Used by the benchmarks of moves, recovery and soaking. A `Fleet` is `Processes` that grows and whose
nodes have versions; a `Driver` is the load's process as an asyncio program sees it.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict
from inspect import signature
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self, cast

from domicile import Entity, Settings
from domicile.core.ids import NOBODY, Incarnation, ShardKey
from domicile.testing import Processes
from domicile.testing.processes.node_process import NodeProcess
from proving.benchmarks.processes import Part, cpu_of_all_s

ROLE = "default"
CLIENT = -1
"""The harness's name for its own client."""


class Fleet(Processes):
    """Real node processes without histories, in numbers that change.

    Without a `store` they share an embedded one.
    """

    def __init__(
        self,
        entities: Sequence[type[Entity]],
        *,
        nodes: int,
        settings: Settings,
        version: str = "",
        loop: str = "asyncio",
        network: bool = False,
        directory: Path | None = None,
        store: str | None = None,
        store_at: Callable[[int], str] | None = None,
    ) -> None:
        # A namespace does not reach a server at a loopback address.
        kind = "auto" if store is None else "loopback"
        more: dict[str, Any] = {"network": kind} if network else {}
        more |= {"store": store, "store_at": store_at}
        super().__init__(
            entities, nodes=nodes, settings=settings, record=False, directory=directory,
            loop=cast("Literal['asyncio', 'uvloop']", loop), **more,
        )  # fmt: skip
        for node in self.nodes:
            node.version = version

    @staticmethod
    def has_network() -> bool:
        """Whether the harness can cut networks."""
        return "network" in signature(Processes.__init__).parameters

    def isolate(self, nodes: Sequence[int]) -> None:
        """Nobody reaches these nodes, and they reach nobody, but all reach the store."""
        others = [node for node in self.living() if node not in nodes]
        verb: Any = getattr(self, "partition")  # noqa: B009
        verb(list(nodes), [*others, CLIENT])

    def reconnect(self) -> None:
        """Undo that."""
        verb: Any = getattr(self, "heal")  # noqa: B009
        verb()

    def add(self, version: str = "") -> int:
        """One node more; the number of its place."""
        place = NodeProcess(len(self.nodes), True)
        place.version = version
        self.nodes.append(place)
        self.start(place.index)
        return place.index

    async def joined(self, node: int, timeout_s: float = 60.0) -> None:
        """Return once a node is registered."""
        await self.wait_until(lambda: self.incarnation(node) is not None, timeout_s=timeout_s)

    def living(self) -> list[int]:
        """The places whose processes run."""
        return [node.index for node in self.nodes if node.up]

    def shards(self) -> list[ShardKey]:
        """All of them."""
        return [ShardKey(ROLE, number) for number in range(self.settings.shards)]

    def epochs(self) -> list[int]:
        """Of every shard: each move to another owner raises it."""
        return [self.entry(shard).epoch for shard in self.shards()]

    def homes(self) -> dict[int, int]:
        """How many shards each living node is home to."""
        known: dict[Incarnation, int] = {}
        for node in self.living():
            known[self.incarnation(node) or NOBODY] = node
        found = dict.fromkeys(self.living(), 0)
        for shard in self.shards():
            owner = known.get(self.entry(shard).owner)
            if owner is not None:
                found[owner] += 1
        return found

    def served(self) -> bool:
        """Whether the store names a living home for every shard, quickly."""
        living = {self.incarnation(node) for node in self.living()}
        entries = map(self.entry, self.shards())
        return all(entry.state == "serving" and entry.owner in living for entry in entries)

    def balanced(self) -> bool:
        """Whether everything is served and no two nodes differ by more than one."""
        homes = self.homes().values()
        return max(homes) - min(homes) <= 1 and self.served()


def moves(before: Sequence[int], after: Sequence[int]) -> dict[int, int]:
    """How many shards moved how often, by their epochs."""
    counted = Counter(later - earlier for earlier, later in zip(before, after, strict=True))
    return dict(sorted(counted.items()))


class Driver:
    """The process that sends the load."""

    def __init__(self, fleet: Processes, *, entities: int, work_s: float, loop: str) -> None:
        options: dict[str, Any] = {
            "where": fleet.store, "loop": loop, "entities": entities, "work_s": work_s,
            "settings": asdict(fleet.settings),
        }  # fmt: skip
        self._part = Part(
            sys.executable, "proving.benchmarks.openloop", "load", options, fleet.directory
        )  # fmt: skip

    async def __aenter__(self) -> Self:
        await asyncio.to_thread(self._part.ready)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:  # fmt: skip
        await asyncio.to_thread(self._part.close)

    async def run(self, what: str, **more: Any) -> dict[str, Any]:
        """A wish to the load."""
        return await asyncio.to_thread(self._part.run, system="load", what=what, **more)

    def used_s(self) -> float:
        """CPU time of the load's process so far."""
        return cpu_of_all_s(self._part) or 0.0


class Stopwatch:
    """From when to when something happened, with the load's CPU time."""

    def __init__(self, driver: Driver, name: str) -> None:
        self._driver, self.name = driver, name
        self.since = self.until = 0.0
        self._used_s = 0.0

    def __enter__(self) -> Self:
        self.since, self._used_s = time.monotonic(), self._driver.used_s()
        return self

    def __exit__(self, *exc: object) -> None:
        self.until, self._used_s = time.monotonic(), self._driver.used_s() - self._used_s

    async def told(self) -> dict[str, Any]:
        """What the load saw meanwhile."""
        found = await self._driver.run("phase", since=self.since, until=self.until)
        return {
            "name": self.name, **found, "since": self.since, "until": self.until,
            "load_cpu_share": self._used_s / (self.until - self.since),
        }  # fmt: skip
