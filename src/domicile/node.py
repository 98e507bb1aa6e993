"""A process that can be home to shards: the composition root.

`Node(...)` does no I/O; entering it joins the cluster, leaving it drains first (H14). A node
that loses its lease ends that incarnation and joins anew as another one (L5), by itself.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import (
    AbstractAsyncContextManager,
    AsyncExitStack,
    asynccontextmanager,
)
from dataclasses import replace
from typing import Any, Self

from domicile import config
from domicile.backends.wiring import LOOPBACK, check_urls, open_backends
from domicile.core.placement.strategies import Strategy, check_strategy
from domicile.entity.model.client import Client
from domicile.entity.model.entity import Entity, catalogue
from domicile.entity.model.ref import Outbound
from domicile.errors import ConfigError
from domicile.incarnation.context import Backends, Identity
from domicile.incarnation.incarnation import RunningIncarnation
from domicile.incarnation.observation import Observation
from domicile.incarnation.signals import default_node_id, until_asked
from domicile.incarnation.supervisor import Supervisor
from domicile.links.machine import PROTOCOLS
from domicile.observe.readiness import ProbeAnswer
from domicile.persist.eventsourced import EventSourced
from domicile.ports.meter import Meter
from domicile.ports.trace import Tracer
from domicile.ports.watchdog import Watchdog
from domicile.settings import Settings
from domicile.stores.namespace import check_cluster

Resources = Callable[[], AbstractAsyncContextManager[Mapping[type[Any], Any]]]


class Node(Client):
    """Joins a cluster, is home to some of its shards, and sends to all of them.

    `store` is a URL: `memory://name` is shared by all nodes of this process that name it,
    `sqlite:///file.db` by all processes of this machine. `entities` are the classes it can be
    home to. `resources` returns an async context manager that yields what entities get by
    `self.resource(Type)`. `listen` is `host:port` or `host:first-last`, `advertise` the address
    that others dial if that differs. `journal` keeps the events of event-sourced entities.
    `candidate=False` never coordinates. `version` is that of the program: while versions are
    mixed only nodes of the newest, or of the operator's target version, receive shards.
    `capacity` weighs nodes against each other. `strategy` says where shards belong while this
    node coordinates: a name or a function. `shards` are the roles whose number of shards is not
    that of `settings`, as in `{"sessions": 512}`. `token` is the cluster's secret, else that of
    `DOMICILE_TOKEN`: a process that does not know it is refused. `tracer` takes trace context along
    with messages, as `domicile.observe.tracing.OpenTelemetry()` does. `meter` is for programs that
    count themselves; without one the node keeps the counters that `metrics()` shows.
    """

    def __init__(
        self,
        store: str,
        *,
        entities: Sequence[type[Entity]] = (),
        cluster: str = "domicile",
        listen: str = LOOPBACK,
        advertise: str | None = None,
        journal: str | None = None,
        resources: Resources | None = None,
        candidate: bool = True,
        version: str | None = None,
        capacity: float = 1.0,
        strategy: str | Strategy = "least_shards",
        shards: Mapping[str, int] | None = None,
        token: str | None = None,
        settings: Settings | None = None,
        node_id: str | None = None,
        meter: Meter | None = None,
        tracer: Tracer | None = None,
        backends: Callable[[], Backends] | None = None,
        _protocols: tuple[int, int] = PROTOCOLS,
    ) -> None:
        self._catalogue = catalogue(entities)
        self._store = store
        self._cluster = cluster
        self._listen, self._advertise, self._journal = listen, advertise, journal
        self._resources = resources
        self._candidate = candidate
        self._version, self._capacity, self._strategy = version or "", capacity, strategy
        self._settings = config.from_environment() if settings is None else settings
        self._shards = _checked_shards(shards)
        self._protocols = _protocols
        self._node_id = node_id
        self._meter, self._tracer = meter, tracer
        if not 0 < capacity < float("inf"):
            raise ConfigError(f"capacity={capacity!r} must be a positive number")
        check_strategy(strategy)
        self._watchdog: Watchdog | None = None
        self._stack = AsyncExitStack()
        self._lives = Supervisor()
        self._backends = backends
        http = self._settings.http if backends is None else ""
        self._observed = Observation(self._lives, http, meter)
        self._token = config.token_of(token, {} if backends is not None else None)
        if backends is None:
            durable = [kind.__name__ for kind in entities if issubclass(kind, EventSourced)]
            check_urls(store, journal, durable)
            check_cluster(cluster)

    @property
    def settings(self) -> Settings:
        """The limits and timings this node runs with."""
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
    def http_address(self) -> str:
        """Where `/metrics`, `/healthz` and `/readyz` are served now; empty if nowhere."""
        return self._observed.address

    def readiness(self) -> ProbeAnswer:
        """Whether this node takes part in its cluster, and why not: what `/readyz` says."""
        return self._observed.readiness()

    def health(self) -> ProbeAnswer:
        """Whether this node runs or joins by itself: what `/healthz` says."""
        return self._observed.health()

    def metrics(self) -> str:
        """What `/metrics` says, for a program with a web server of its own. On the loop only."""
        return self._observed.text()

    def answer_at(self, http: str) -> None:
        """Serve probes and metrics here, whatever the settings say. Before the start."""
        self._observed = Observation(self._lives, http, self._meter)

    def watch_over(self, watchdog: Watchdog) -> None:
        """Have a watchdog end this process if it hangs past its lease (L4). Before the start."""
        self._watchdog = watchdog

    async def __aenter__(self) -> Self:
        """Join; messages can be sent, and shards may come, from here on."""
        if self._lives.started:
            raise ConfigError("this node was started already; make a new Node for another run")
        async with AsyncExitStack() as stack:
            resources: Mapping[type[Any], Any] = {}
            if self._resources is not None:
                resources = await stack.enter_async_context(self._resources())
            await stack.enter_async_context(self._observed)
            node_id = self._node_id or default_node_id()
            wired = self._wire(node_id) if self._backends is None else self._backends()
            await self._lives.start(
                wired if self._tracer is None else replace(wired, tracer=self._tracer),
                Identity(
                    self._cluster, node_id, self._catalogue, resources, self._settings,
                    self._candidate, self._version, self._capacity, self._strategy,
                    self._protocols, self._shards, self._token,
                ),
            )  # fmt: skip
            self._stack = stack.pop_all()
        return self

    async def __aexit__(self, *exc: object) -> None:
        """Leave: hand everything over, then go (H14)."""
        async with self._stack:
            await self._lives.stop()

    async def run(self) -> None:
        """Serve until cancelled, or until SIGTERM or SIGINT asks to leave.

        Returning is not leaving yet: the end of `async with node` is. A second signal ends the
        process at once.
        """
        if not self._lives.started:
            raise ConfigError("start the node first: `async with node: await node.run()`")
        await until_asked(self._lives)

    @asynccontextmanager
    async def lifespan(self, app: Any) -> AsyncGenerator[None]:
        """For web frameworks: `FastAPI(lifespan=node.lifespan)`."""
        async with self:
            yield

    def _outbound(self) -> Outbound:
        return self._lives

    def _wire(self, node_id: str) -> Backends:
        return open_backends(
            self._store, cluster=self._cluster, settings=self._settings, by=node_id,
            listen=self._listen, advertise=self._advertise, journal=self._journal,
            meter=self._observed.meter, watchdog=self._watchdog, token=self._token,
        )  # fmt: skip


def _checked_shards(shards: Mapping[str, int] | None) -> dict[str, int]:
    known = dict(shards or {})
    for role, count in known.items():
        if not isinstance(count, int) or isinstance(count, bool) or count < 1:  # pyright: ignore[reportUnnecessaryIsInstance]
            raise ConfigError(
                f"shards={{{role!r}: {count!r}}} must be a whole number from 1, as in "
                f"shards={{{role!r}: 512}}"
            )
    return known
