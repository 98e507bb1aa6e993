"""A process that can be home to shards: the composition root.

`Node(...)` does no I/O; entering it joins the cluster, leaving it drains first (H14). A node
that loses its lease ends that incarnation and joins anew as another one (L5), by itself.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import replace
from typing import Any

from domicile import config
from domicile.backends.wiring import LOOPBACK
from domicile.core.placement.strategies import Strategy
from domicile.entity.model.client import Client
from domicile.entity.model.entity import Entity, catalogue
from domicile.entity.model.ref import Outbound
from domicile.errors import ConfigError
from domicile.failover.following import Group
from domicile.incarnation.context import Backends, Identity
from domicile.links.machine import PROTOCOLS
from domicile.observe.readiness import ProbeAnswer
from domicile.persist.durable_entity import DurableEntity
from domicile.ports.meter import Meter
from domicile.ports.trace import Tracer
from domicile.process import Process
from domicile.settings import Settings

Resources = Callable[[], AbstractAsyncContextManager[Mapping[type[Any], Any]]]


class Node(Process, Client):
    """Joins a cluster, is home to some of its shards, and sends to all of them.

    `store` is a URL: `memory://name` is shared by all nodes of this process that name it,
    `sqlite:///file.db` by all processes of this machine, `postgresql://`, `etcd://`, `redis://` and
    `kubernetes://` by processes of many machines. `entities` are the classes it can be home to.
    `resources` returns an async context manager that yields what entities get by
    `self.resource(Type)`. `listen` is `host:port` or `host:first-last`, `advertise` the address
    that others dial if that differs. `journal` keeps the events of event-sourced entities.
    `candidate=False` never coordinates. `version` is that of the program, else that of
    `DOMICILE_VERSION`: while versions are mixed only nodes of the newest, or of the operator's
    target version, receive shards.
    `capacity` weighs nodes against each other. `strategy` says where shards belong while this
    node coordinates: a name or a function. `shards` are the roles whose number of shards is not
    that of `settings`, as in `{"sessions": 512}`. `token` is the cluster's secret, else that of
    `DOMICILE_TOKEN`: a process that does not know it is refused. `tracer` takes trace context along
    with messages, as `domicile.observe.tracing.OpenTelemetry()` does. `meter` is for programs that
    count themselves; without one the node keeps the counters that `metrics()` shows.
    """

    _noun = "node"

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
        self._resources = resources
        self._candidate = candidate
        self._version = config.version_of(version, None if backends is None else {})
        self._capacity = capacity
        self._shards = _checked_shards(shards)
        self._protocols = _protocols
        self._tracer = tracer
        if not 0 < capacity < float("inf"):
            raise ConfigError(f"capacity={capacity!r} must be a positive number")
        kinds = [kind.cls for kind in self._catalogue.values()]
        durable = [kind.__name__ for kind in kinds if issubclass(kind, DurableEntity)]
        super().__init__(
            store, cluster=cluster, listen=listen, advertise=advertise, token=token,
            settings=settings, strategy=strategy, node_id=node_id, meter=meter, journal=journal,
            durable=durable, backends=backends,
        )  # fmt: skip

    def group(self, name: str, /) -> Group:
        """A replica group in the same store and cluster. Nothing is read yet."""
        return Group(name, self._lives.group_reach)

    def readiness(self) -> ProbeAnswer:
        """Whether this node takes part in its cluster, and why not: what `/readyz` says."""
        return self._observed.readiness()

    def health(self) -> ProbeAnswer:
        """Whether this node runs or joins by itself: what `/healthz` says."""
        return self._observed.health()

    def metrics(self) -> str:
        """What `/metrics` says, for a program with a web server of its own. On the loop only."""
        return self._observed.text()

    @asynccontextmanager
    async def lifespan(self, app: Any) -> AsyncGenerator[None]:
        """For web frameworks: `FastAPI(lifespan=node.lifespan)`."""
        async with self:
            yield

    def _outbound(self) -> Outbound:
        return self._lives

    async def _prepare(self, stack: AsyncExitStack) -> Mapping[type[Any], Any]:
        return {} if self._resources is None else await stack.enter_async_context(self._resources())

    def _identity(self, node_id: str, resources: Mapping[type[Any], Any]) -> Identity:
        return Identity(
            self._cluster, node_id, self._catalogue, resources, self._settings, self._candidate,
            version=self._version, capacity=self._capacity, strategy=self._strategy,
            protocols=self._protocols, shards=self._shards, token=self._token,
        )  # fmt: skip

    def _wire(self, node_id: str) -> Backends:
        wired = super()._wire(node_id)
        return wired if self._tracer is None else replace(wired, tracer=self._tracer)


def _checked_shards(shards: Mapping[str, int] | None) -> dict[str, int]:
    known = dict(shards or {})
    for role, count in known.items():
        if not isinstance(count, int) or isinstance(count, bool) or count < 1:  # pyright: ignore[reportUnnecessaryIsInstance]
            raise ConfigError(
                f"shards={{{role!r}: {count!r}}} must be a whole number from 1, as in "
                f"shards={{{role!r}: 512}}"
            )
    return known
