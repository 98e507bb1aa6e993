"""The measured processes of `proving.benchmarks.stores`: idle nodes, writers and a follower."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

from domicile import Node, Settings
from domicile.backends.wiring import open_backends, open_whole_store
from domicile.core.state.txn import Put
from domicile.incarnation.context import Backends
from domicile.observe import Metrics
from domicile.ports.store import Store
from proving.benchmarks.home import Echo
from proving.benchmarks.idle import Counting
from proving.benchmarks.part import Options
from proving.benchmarks.part import Part as PartOf

VALUE_BYTES = 100
AT = b"bench/at"
PATIENCE_S = 30.0


class Counts:
    """Tells how often an embedded store was called so far; renewals with their reads count once."""

    def __init__(self, counts: Counter[str]) -> None:
        self._counts = counts

    async def run(self, wanted: dict[str, Any]) -> dict[str, Any]:
        """The number of calls."""
        return {"calls": sum(self._counts.values()) - self._counts["get"]}


@asynccontextmanager
async def node(options: Options) -> AsyncGenerator[tuple[str, dict[str, Any]]]:
    """A node that does nothing. One on the embedded store counts its calls."""
    counts: Counter[str] = Counter()
    settings = Settings(shards=options["shards"], balance_limit=1.0, balance_shards=10_000)

    def wired() -> Backends:
        made = open_backends(
            options["where"], cluster="domicile", settings=settings, by=options["id"],
            meter=Metrics(),
        )  # fmt: skip
        return replace(made, store=Counting(made.store, counts))

    async with Node(
        options["where"], entities=[Echo], node_id=options["id"], settings=settings,
        backends=wired if options["counts"] else None,
    ):  # fmt: skip
        yield options["where"], {"node": Counts(counts)}


class Writes:
    """Commits, as many at a time as is wanted, or one in a while that says when it was called."""

    def __init__(self, store: Store, by: str) -> None:
        self._store, self._by = store, by

    async def run(self, wanted: dict[str, Any]) -> dict[str, Any]:
        """Commits for a while: how many, and how long each took."""
        if wanted["what"] == "stamps":
            return await self._stamps(wanted["count"], wanted["gap_s"])
        if wanted["what"] != "commits":
            raise NotImplementedError(f"no {wanted['what']}")
        await self._commits(wanted["depth"], wanted["warm_s"])
        began = time.perf_counter()
        took = await self._commits(wanted["depth"], wanted["seconds"])
        return {
            "count": len(took), "took_s": time.perf_counter() - began,
            "p50_s": quantile(took, 0.5), "p99_s": quantile(took, 0.99), "max_s": max(took),
        }  # fmt: skip

    async def _commits(self, depth: int, seconds: float) -> list[float]:
        took: list[float] = []
        until = time.perf_counter() + seconds

        async def one(number: int) -> None:
            key = f"bench/{self._by}/{number}".encode()
            while (began := time.perf_counter()) < until:
                await self._store.commit([], [Put(key, bytes(VALUE_BYTES))])
                took.append(time.perf_counter() - began)

        async with asyncio.TaskGroup() as group:
            for number in range(depth):
                group.create_task(one(number))
        return took

    async def _stamps(self, count: int, gap_s: float) -> dict[str, Any]:
        for _ in range(count):
            await asyncio.sleep(gap_s)
            await self._store.commit([], [Put(AT, b"%r" % time.monotonic())])
        return {"count": count}


@asynccontextmanager
async def writer(options: Options) -> AsyncGenerator[tuple[str, dict[str, Any]]]:
    """A process that writes."""
    store = open_whole_store(options["where"], by=options["id"]).store
    try:
        await store.commit([], [Put(b"bench/first", b"")])
        yield options["where"], {"writer": Writes(store, options["id"])}
    finally:
        await store.close()


class Follows:
    """Says how old each stamp was when this process's watch had it."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._reading: asyncio.Task[None] | None = None
        self._ages: list[float] = []

    async def run(self, wanted: dict[str, Any]) -> dict[str, Any]:
        """`begin` to watch, then the ages of so many stamps."""
        if wanted["what"] == "begin":
            revision = (await self._store.list(b"")).revision
            self._reading = asyncio.create_task(self._read(revision, wanted["count"]))
            return {}
        assert self._reading is not None
        async with asyncio.timeout(PATIENCE_S):
            await self._reading
        return {
            "count": len(self._ages),
            **{f"p{name}_s": quantile(self._ages, int(name) / 100) for name in ("50", "99")},
            "max_s": max(self._ages),
        }

    async def _read(self, revision: int, count: int) -> None:
        async for changes in self._store.watch(AT, revision):
            seen = time.monotonic()
            for change in changes.changes:
                if change.item is not None:
                    self._ages.append(seen - float(change.item.value))
            if len(self._ages) >= count:
                return


@asynccontextmanager
async def follower(options: Options) -> AsyncGenerator[tuple[str, dict[str, Any]]]:
    """A process that watches."""
    store = open_whole_store(options["where"], by=options["id"]).store
    try:
        yield options["where"], {"follower": Follows(store)}
    finally:
        await store.close()


def quantile(values: list[float], share: float) -> float:
    """The value that a share of all does not exceed."""
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]


PARTS: dict[str, PartOf] = {"node": node, "writer": writer, "follower": follower}
