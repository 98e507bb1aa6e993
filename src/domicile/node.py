"""A process that can be home to shards: the composition root.

`Node(...)` does no I/O; entering it joins the cluster, leaving it drains first (H14). A node
that loses its lease ends that incarnation and joins anew as another one (L5), by itself.
"""

from __future__ import annotations

import os
import socket
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from random import Random
from typing import Any, ClassVar, Self

from domicile.config import Settings
from domicile.control.clock import SystemClock
from domicile.entity.client import Client
from domicile.entity.define import Entity, catalogue
from domicile.entity.ref import Outbound
from domicile.errors import ConfigError
from domicile.life import Backends, Life, Lives, Plan
from domicile.persist.memory import MemoryJournal
from domicile.ports.meter import NoMeter
from domicile.stores.memory import MemoryStore
from domicile.transports.memory import MemoryNetwork, MemoryTransport

Resources = Callable[[], AbstractAsyncContextManager[Mapping[type[Any], Any]]]


class _Here:
    """A `memory://name` shared by the nodes of one process."""

    known: ClassVar[dict[str, _Here]] = {}

    def __init__(self) -> None:
        self.store = MemoryStore(SystemClock())
        self.journal = MemoryJournal()
        self.network = MemoryNetwork()


class Node(Client):
    """Joins a cluster, is home to some of its shards, and sends to all of them.

    `store` is a URL; `memory://name` is shared by all nodes of this process that name it.
    `entities` are the classes it can be home to. `resources` returns an async context manager
    that yields what entities get by `self.resource(Type)`. `candidate=False` never coordinates.
    """

    def __init__(
        self,
        store: str,
        *,
        entities: Sequence[type[Entity]] = (),
        cluster: str = "domicile",
        resources: Resources | None = None,
        candidate: bool = True,
        settings: Settings | None = None,
        node_id: str | None = None,
        backends: Callable[[], Backends] | None = None,
    ) -> None:
        self._catalogue = catalogue(entities)
        self._url = store
        self._cluster = cluster
        self._resources = resources
        self._candidate = candidate
        self._settings = Settings.from_environment() if settings is None else settings
        self._node_id = node_id
        self._stack = AsyncExitStack()
        self._lives = Lives()
        self._backends = backends or (lambda: _backends(store, cluster))
        if backends is None:
            _check_url(store)

    @property
    def settings(self) -> Settings:
        """The limits and timings this node runs with."""
        return self._settings

    @property
    def life(self) -> Life | None:
        """The current incarnation, if one is registered."""
        return self._lives.current

    async def __aenter__(self) -> Self:
        """Join; messages can be sent, and shards may come, from here on."""
        if self._lives.started:
            raise ConfigError("this node was started already; make a new Node for another run")
        async with AsyncExitStack() as stack:
            resources: Mapping[type[Any], Any] = {}
            if self._resources is not None:
                resources = await stack.enter_async_context(self._resources())
            backends = self._backends()
            node_id = self._node_id or _default_node_id(backends.random)
            await self._lives.start(
                backends,
                Plan(
                    self._cluster, node_id, self._catalogue, resources, self._settings,
                    self._candidate,
                ),
            )  # fmt: skip
            self._stack = stack.pop_all()
        return self

    async def __aexit__(self, *exc: object) -> None:
        """Leave: hand everything over, then go (H14)."""
        async with self._stack:
            await self._lives.stop()

    async def run(self) -> None:
        """Serve until cancelled."""
        if not self._lives.started:
            raise ConfigError("start the node first: `async with node: await node.run()`")
        await self._lives.wait()

    @asynccontextmanager
    async def lifespan(self, app: Any) -> AsyncGenerator[None]:
        """For web frameworks: `FastAPI(lifespan=node.lifespan)`."""
        async with self:
            yield

    def _outbound(self) -> Outbound:
        return self._lives


def _check_url(url: str) -> None:
    scheme, found, _ = url.partition("://")
    if not found or scheme != "memory":
        raise ConfigError(f"store {url!r} is not one of the known kinds: memory://name")


def _backends(url: str, cluster: str) -> Backends:
    here = _Here.known.setdefault(f"{url}#{cluster}", _Here())
    random = Random(os.urandom(16))
    return Backends(
        store=here.store.client(f"process-{random.getrandbits(32):08x}"),
        transport=lambda: MemoryTransport(here.network),
        journal=here.journal,
        clock=SystemClock(),
        meter=NoMeter(),
        random=random,
    )


def _default_node_id(random: Random) -> str:
    return f"{socket.gethostname()}-{os.getpid()}-{random.getrandbits(16):04x}"
