"""A process that keeps a projection up to date: `Projector`. It needs a journal, and no node."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable, Mapping
from typing import Any, Self

import msgspec

from domicile.backends.registry import OpenOptions, journal_backend, shown_url, store_backend
from domicile.core.state.keys import CONFIG_KEY
from domicile.core.state.records import ConfigRecord, decode_record
from domicile.entity.model.entity import entity_type
from domicile.errors import ConfigError, StoreError
from domicile.observe.metrics import Metrics
from domicile.persist.eventsourced import EventCodec, EventSourced
from domicile.persist.projections import Projection, ProjectionFigures, ProjectionRunner
from domicile.ports.journal import Journal
from domicile.ports.meter import Meter
from domicile.stores.namespace import Namespace, check_cluster

log = logging.getLogger("domicile")

LOOK_S = (0.1, 5.0)
"""Seconds of the first and the longest pause while the cluster's number of shards is not known."""

POLL_S = (0.05, 2.0)


class Projector:
    """Reads the events of entity classes from a journal and gives them to a projection.

    `store` is the cluster's store: it says where the journal is and how many shards there are.
    With a `journal` and `shards` no store is needed. `shards` chooses the numbers that this process
    reads; each shard should have one reader. All classes have one role. `poll_s` is the shortest
    and the longest pause between two looks at a journal without new events.
    """

    def __init__(
        self,
        projection: Projection,
        *,
        entities: Iterable[type[EventSourced[Any, Any]]],
        store: str | None = None,
        journal: str | None = None,
        cluster: str = "domicile",
        shards: Iterable[int] | None = None,
        name: str | None = None,
        page_events: int = 500,
        poll_s: tuple[float, float] = POLL_S,
        op_timeout_s: float = 5.0,
        meter: Meter | None = None,
    ) -> None:
        check_cluster(cluster)
        self._projection, self._store, self._cluster = projection, store, cluster
        self._name = type(projection).__name__ if name is None else name
        self._role, self._codecs = _codecs(tuple(entities))
        self._shards = None if shards is None else _numbers(shards)
        self._journal = _journal_url(store, journal)
        if self._shards is None and store is None:
            raise ConfigError(
                f"projection {self._name}: say how many shards there are: give the cluster's "
                "store=..., or the numbers of the shards, as in shards=range(256)"
            )
        if page_events < 1 or not 0 < poll_s[0] <= poll_s[1]:
            raise ConfigError(
                f"projection {self._name}: page_events={page_events!r} must be at least 1, and "
                f"poll_s={poll_s!r} a shortest and a longest pause above 0"
            )
        self._page_events, self._poll_s, self._op_timeout_s = page_events, poll_s, op_timeout_s
        self._meter = Metrics() if meter is None else meter
        self._runner: ProjectionRunner | None = None
        self._is_begun = False
        self._opened = asyncio.Event()
        self._stopping = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    async def run(self) -> None:
        """Keep the projection up to date until `stop` is called, or until this call is cancelled.

        Failures of the journal, of the store and of the projection are logged and tried again.
        """
        if self._is_begun:
            raise ConfigError(f"projection {self._name} was started already; make a new Projector")
        self._is_begun = True
        shards = await self._found_shards() if self._shards is None else self._shards
        if self._stopping.is_set():
            return
        journal = self._open_journal()
        try:
            self._runner = ProjectionRunner(
                journal, self._projection, name=self._name, role=self._role, shards=shards,
                codecs=self._codecs, page_events=self._page_events, poll_s=self._poll_s,
                meter=self._meter,
            )  # fmt: skip
            self._opened.set()
            await self._runner.run()
        finally:
            await journal.close()

    def stop(self) -> None:
        """Let `run` end: an `apply` that runs may end, and no other begins. For signal handlers."""
        self._stopping.set()
        if self._runner is not None:
            self._runner.stop()

    async def __aenter__(self) -> Self:
        """Run beside the program until the end of the block."""
        self._task = asyncio.create_task(self.run(), name=f"projection {self._name}")
        return self

    async def __aexit__(self, *exc: object) -> None:
        """Stop, and wait for the end."""
        assert self._task is not None
        self.stop()
        await self._task

    async def caught_up(self) -> None:
        """Wait until the projection has stored all events that are committed now.

        Only while it runs. It waits as long as the projection fails.
        """
        await self._opened.wait()
        assert self._runner is not None
        await self._runner.caught_up()

    @property
    def lag(self) -> int | None:
        """How many events the projection is behind; None while that is not known."""
        found = self.figures()
        return None if found is None or found.unread else found.lag

    def figures(self) -> ProjectionFigures | None:
        """How far the projection is; None before the journal is open."""
        return None if self._runner is None else self._runner.figures()

    def metrics(self) -> str:
        """Lag and counters in the text format that scrapers read, for a web server of one's own."""
        meter = self._meter if isinstance(self._meter, Metrics) else Metrics()
        return meter.text(() if self._runner is None else self._runner.gauges())

    def _open_journal(self) -> Journal:
        options = OpenOptions(
            self._name, self._cluster, self._store or "", self._op_timeout_s, self._meter,
            reads_only=True,
        )  # fmt: skip
        return journal_backend(self._journal).open_journal(self._journal, options)

    async def _found_shards(self) -> list[int]:
        """The numbers of all shards, from the cluster's config; waits for a first node."""
        assert self._store is not None
        options = OpenOptions(
            self._name, self._cluster, self._store, self._op_timeout_s, self._meter,
            reads_only=True,
        )  # fmt: skip
        backend = store_backend(self._store)
        opened = backend.open_store(self._store, options)
        store = Namespace(opened, self._cluster)
        pause_s, longest_s = LOOK_S
        why = told = ""
        try:
            while not self._stopping.is_set():
                try:
                    # A file that is not there yet must not be created by a process that only reads.
                    gone = None if backend.reach == "process" else backend.missing(self._store)
                    item = await store.get(CONFIG_KEY) if gone is None else None
                    if item is not None:
                        config = decode_record(item.value, ConfigRecord)
                        if self._role in config.shards:
                            return list(range(config.shards[self._role]))
                    why = "no node of that role has joined yet"
                except StoreError as error:
                    why = str(error)
                except msgspec.MsgspecError as error:
                    raise ConfigError(
                        f"the cluster's config record cannot be read ({error}); check that "
                        f"{shown_url(self._store)} is the store of a cluster of this version"
                    ) from error
                if why != told:
                    told = why
                    log.warning(
                        "projection %s waits until it knows how many shards role %r has in cluster "
                        "%r of %s: %s; start a node, or give shards=...",
                        self._name, self._role, self._cluster, shown_url(self._store), why,
                    )  # fmt: skip
                await self._pause(pause_s)
                pause_s = min(2 * pause_s, longest_s)
            return []
        finally:
            await opened.close()

    async def _pause(self, pause_s: float) -> None:
        try:
            async with asyncio.timeout(pause_s):
                await self._stopping.wait()
        except TimeoutError:
            pass


def _codecs(
    entities: tuple[type[EventSourced[Any, Any]], ...],
) -> tuple[str, Mapping[str, EventCodec]]:
    """The role that classes have, and what reads the events of their types."""
    codecs: dict[str, EventCodec] = {}
    roles: dict[str, None] = {}
    for cls in entities:
        kind = entity_type(cls)
        if not issubclass(cls, EventSourced):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise ConfigError(
                f"{kind.cls.__name__} stores no events, so a projection can't read it; derive it "
                "from EventSourced, or leave it out of entities=[...]"
            )
        cls.__domicile_check__()
        roles[kind.role] = None
        codecs[kind.name] = cls.__domicile_events__
    if len(roles) != 1:
        raise ConfigError(
            "a projection reads entity classes of one role, entities=[...] has "
            f"{', '.join(roles) or 'none'}; make a Projector for each role"
        )
    return next(iter(roles)), codecs


def _numbers(shards: Iterable[int]) -> list[int]:
    found = list(shards)
    if any(number < 0 for number in found) or len(dict.fromkeys(found)) < len(found):
        raise ConfigError(f"shards={found!r} must be numbers from 0 on, each of them once")
    return found


def _journal_url(store: str | None, journal: str | None) -> str:
    if journal is not None:
        journal_backend(journal)
        return journal
    found = None if store is None else store_backend(store).default_journal(store)
    if found is None:
        raise ConfigError(
            'say which journal the events are in, as in journal="sqlite:///events.journal", or '
            "give the store=... that the journal belongs to"
        )
    return found
