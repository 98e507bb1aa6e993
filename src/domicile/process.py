"""A member of a cluster, as a program starts and runs it: what `Node` and `Manager` share.

Making one does no I/O; entering it joins the cluster, leaving it hands over and goes (H14). A
member that loses its lease ends that incarnation and joins again as another one (L5), by itself.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from typing import Any, ClassVar, Self

from domicile import config
from domicile.backends.registry import shown_url
from domicile.backends.wiring import check_journal, check_urls, open_backends
from domicile.core.placement.strategies import Strategy, check_strategy
from domicile.errors import ConfigError
from domicile.incarnation.context import Backends, Identity
from domicile.incarnation.incarnation import RunningIncarnation
from domicile.incarnation.observation import Observation
from domicile.incarnation.signals import LeaveSignals, default_node_id, until_asked
from domicile.incarnation.supervisor import Supervisor
from domicile.ports.meter import Meter
from domicile.ports.watchdog import Watchdog
from domicile.settings import Settings
from domicile.stores.namespace import check_cluster


class Process(ABC):
    """Joins a cluster and runs until it is asked to leave. Derived by `Node` and `Manager`.

    With `backends` of its own it takes nothing from URLs and environment, and answers no HTTP.
    `durable` names the entity classes that keep events.
    """

    _noun: ClassVar[str] = "process"

    def __init__(
        self,
        store: str,
        *,
        cluster: str,
        listen: str,
        advertise: str | None,
        token: str | None,
        settings: Settings | None,
        strategy: str | Strategy,
        node_id: str | None,
        meter: Meter | None,
        journal: str | None = None,
        durable: Sequence[str] = (),
        backends: Callable[[], Backends] | None = None,
    ) -> None:
        self._store, self._cluster = store, cluster
        self._listen, self._advertise, self._journal = listen, advertise, journal
        self._settings = config.from_environment() if settings is None else settings
        self._strategy, self._node_id, self._meter = strategy, node_id, meter
        self._backends = backends
        self._durable = bool(durable)
        self._watchdog: Watchdog | None = None
        self._stack = AsyncExitStack()
        self._lives = Supervisor()
        check_strategy(strategy)
        wired = backends is None
        self._observed = Observation(self._lives, self._settings.http if wired else "", meter)
        self._token = config.token_of(token, None if wired else {})
        if wired:
            check_urls(store, journal, durable)
            check_cluster(cluster)

    @property
    def settings(self) -> Settings:
        """The limits and timings that it runs with."""
        return self._settings

    @property
    def store(self) -> str:
        """The URL of the store."""
        return self._store

    @property
    def journal(self) -> str | None:
        """The journal's URL, if one was named."""
        return self._journal

    @property
    def cluster(self) -> str:
        """The name of the cluster."""
        return self._cluster

    @property
    def token(self) -> str:
        """The cluster's secret, for tools that ask its nodes. Never log it."""
        return self._token

    @property
    def life(self) -> RunningIncarnation | None:
        """The current incarnation, if one is registered."""
        return self._lives.current

    @property
    def http_address(self) -> str:
        """Where `/metrics`, `/healthz` and `/readyz` are served now; empty if nowhere."""
        return self._observed.address

    def __repr__(self) -> str:
        name = self._node_id if self.life is None else self.life.tags["node"]
        where = f"cluster {self._cluster!r} in {shown_url(self._store)}"
        kind = type(self).__name__
        return f"<{kind}{f' {name}' if name else ''} of {where}: {self._lives.standing}>"

    def answer_at(self, http: str) -> None:
        """Serve probes and metrics here, whatever the settings say. Before the start."""
        self._observed = Observation(self._lives, http, self._meter)

    def watch_over(self, watchdog: Watchdog) -> None:
        """Have a watchdog end this process if it hangs past its lease (L4). Before the start."""
        self._watchdog = watchdog

    async def __aenter__(self) -> Self:
        """Join; returns once it is registered."""
        if self._lives.started:
            raise ConfigError(
                f"this {self._noun} was started already; make a new {type(self).__name__} for "
                "another run"
            )
        async with AsyncExitStack() as stack:
            resources = await self._prepare(stack)
            await stack.enter_async_context(self._observed)
            node_id = self._node_id or default_node_id()
            backends = self._wire(node_id)
            if self._durable and self._backends is None:
                await check_journal(backends)
            await self._lives.start(backends, self._identity(node_id, resources))
            self._stack = stack.pop_all()
        return self

    async def __aexit__(self, *exc: object) -> None:
        """Leave: hand everything over, then go (H14)."""
        async with self._stack:
            await self._lives.stop()

    async def run(self) -> None:
        """Serve until cancelled, or until SIGTERM or SIGINT asks to leave.

        Returning is not leaving yet: the end of `async with` is. A second signal ends the process
        at once.
        """
        with LeaveSignals() as signals:
            await self.run_until(signals.asked)

    async def run_until(self, asked: asyncio.Event) -> None:
        """Serve until cancelled, or until `asked` is set: for a program that takes signals itself.

        As with `run`, the end of `async with` is the leave.
        """
        if not self._lives.started:
            noun = self._noun
            raise ConfigError(f"start the {noun} first: `async with {noun}: await {noun}.run()`")
        await until_asked(self._lives, asked)

    async def _prepare(self, stack: AsyncExitStack) -> Mapping[type[Any], Any]:
        """Enter what must be there before it joins; what entities get of it."""
        return {}

    @abstractmethod
    def _identity(self, node_id: str, resources: Mapping[type[Any], Any]) -> Identity:
        """What it wants to be in the cluster."""

    def _wire(self, node_id: str) -> Backends:
        """What it is wired to, with its own name in the store's history."""
        if self._backends is not None:
            return self._backends()
        return open_backends(
            self._store, cluster=self._cluster, settings=self._settings, by=node_id,
            listen=self._listen, advertise=self._advertise, journal=self._journal,
            meter=self._observed.meter, watchdog=self._watchdog, token=self._token,
        )  # fmt: skip
