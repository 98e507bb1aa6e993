"""The coordinator as a server of its own: a member of the cluster that is home to nothing.

`Manager(...)` does no I/O; entering it joins, leaving it resigns and goes. It runs the same code
as a node that coordinates. Nodes that shall never coordinate say `candidate=False`.
"""

from __future__ import annotations

from contextlib import AsyncExitStack
from typing import Self

from domicile import config
from domicile.backends.wiring import LOOPBACK, check_urls, open_backends
from domicile.core.placement.strategies import Strategy, check_strategy
from domicile.errors import ConfigError
from domicile.incarnation.context import Identity
from domicile.incarnation.incarnation import RunningIncarnation
from domicile.incarnation.observation import Observation
from domicile.incarnation.signals import default_node_id, until_asked
from domicile.incarnation.supervisor import Supervisor
from domicile.ports.meter import Meter
from domicile.ports.watchdog import Watchdog
from domicile.settings import Settings
from domicile.stores.namespace import check_cluster


class Manager:
    """Decides who owns what, in a process that serves nothing; a second one stands by (C1).

    `store` is the URL that the nodes have. `listen` is `host:port` or `host:first-last`,
    `advertise` the address that nodes dial if that differs. `token` is the cluster's secret, else
    that of `DOMICILE_TOKEN`. `strategy` says where shards belong:
    a name or a function. Nodes work on while no manager is there (I7), and find the next one by
    the store.
    """

    def __init__(
        self,
        store: str,
        *,
        cluster: str = "domicile",
        listen: str = LOOPBACK,
        advertise: str | None = None,
        token: str | None = None,
        settings: Settings | None = None,
        strategy: str | Strategy = "least_shards",
        node_id: str | None = None,
        meter: Meter | None = None,
    ) -> None:
        check_urls(store)
        check_cluster(cluster)
        check_strategy(strategy)
        self._store, self._cluster = store, cluster
        self._listen, self._advertise = listen, advertise
        self._token = config.token_of(token)
        self._settings = config.from_environment() if settings is None else settings
        self._strategy = strategy
        self._node_id, self._meter = node_id, meter
        self._watchdog: Watchdog | None = None
        self._lives = Supervisor()
        self._observed = Observation(self._lives, self._settings.http, meter)
        self._stack = AsyncExitStack()

    @property
    def settings(self) -> Settings:
        """The limits and timings this manager runs with."""
        return self._settings

    @property
    def store(self) -> str:
        """The URL of the store."""
        return self._store

    @property
    def cluster(self) -> str:
        """The name of the cluster."""
        return self._cluster

    @property
    def life(self) -> RunningIncarnation | None:
        """The current incarnation, if one is registered."""
        return self._lives.current

    @property
    def leading(self) -> bool:
        """Whether it coordinates now; else it stands by."""
        return self.life is not None and self.life.elected.leading

    @property
    def http_address(self) -> str:
        """Where `/metrics`, `/healthz` and `/readyz` are served now; empty if nowhere."""
        return self._observed.address

    def answer_at(self, http: str) -> None:
        """Serve probes and metrics here, whatever the settings say. Before the start."""
        self._observed = Observation(self._lives, http, self._meter)

    def watch_over(self, watchdog: Watchdog) -> None:
        """Have a watchdog end this process if it hangs past its lease (L4). Before the start."""
        self._watchdog = watchdog

    async def __aenter__(self) -> Self:
        """Join; from here on it coordinates, or stands by while another one does."""
        if self._lives.started:
            raise ConfigError("this manager was started already; make a new one for another run")
        node_id = self._node_id or default_node_id()
        wired = open_backends(
            self._store, cluster=self._cluster, settings=self._settings, by=node_id,
            listen=self._listen, advertise=self._advertise, meter=self._observed.meter,
            watchdog=self._watchdog, token=self._token,
        )  # fmt: skip
        plan = Identity(
            self._cluster, node_id, {}, {}, self._settings, True, strategy=self._strategy,
            token=self._token,
        )  # fmt: skip
        async with AsyncExitStack() as stack:
            await stack.enter_async_context(self._observed)
            await self._lives.start(wired, plan)
            self._stack = stack.pop_all()
        return self

    async def __aexit__(self, *exc: object) -> None:
        """Resign if it coordinates, then leave (H14)."""
        async with self._stack:
            await self._lives.stop()

    async def run(self) -> None:
        """Coordinate or stand by until cancelled, or until SIGTERM or SIGINT asks to leave.

        Returning is not leaving yet: the end of `async with manager` is. A second signal ends the
        process at once.
        """
        if not self._lives.started:
            raise ConfigError("start the manager first: `async with manager: await manager.run()`")
        await until_asked(self._lives)
