"""A process that sends and is never home: `connect`."""

from __future__ import annotations

from dataclasses import replace
from typing import Self

from domicile import config
from domicile.backends.registry import shown_url
from domicile.backends.wiring import check_urls, open_backends
from domicile.entity.model.client import Client
from domicile.entity.model.ref import Outbound
from domicile.errors import ConfigError
from domicile.failover.following import Group
from domicile.incarnation.context import Identity
from domicile.incarnation.supervisor import Supervisor
from domicile.ports.meter import Meter
from domicile.ports.trace import Tracer
from domicile.settings import Settings
from domicile.stores.namespace import check_cluster


class ConnectedClient(Client):
    """A client of one cluster. Made by `connect`."""

    def __init__(
        self,
        store: str,
        *,
        cluster: str,
        settings: Settings,
        token: str | None = None,
        meter: Meter | None = None,
        tracer: Tracer | None = None,
    ) -> None:
        check_urls(store)
        check_cluster(cluster)
        self._store, self._cluster = store, cluster
        self._settings, self._meter, self._tracer = settings, meter, tracer
        self._token = config.token_of(token)
        self._lives = Supervisor()

    async def __aenter__(self) -> Self:
        """Join; messages can be sent from here on."""
        if self._lives.started:
            raise ConfigError("this client was started already; call connect() again")
        wired = open_backends(
            self._store,
            cluster=self._cluster,
            settings=self._settings,
            meter=self._meter,
            token=self._token,
        )
        wired = wired if self._tracer is None else replace(wired, tracer=self._tracer)
        plan = Identity(self._cluster, "", {}, {}, self._settings, False, token=self._token)
        await self._lives.start(wired, plan)
        return self

    async def __aexit__(self, *exc: object) -> None:
        """Leave: wait for what is under way, then go (H14)."""
        await self._lives.stop()

    def group(self, name: str, /) -> Group:
        """A replica group in the same store and cluster. Nothing is read yet."""
        return Group(name, self._lives.group_reach)

    @property
    def outbound(self) -> Outbound:
        """Where the calls of this client's refs go."""
        return self._lives

    def _outbound(self) -> Outbound:
        return self._lives

    def __repr__(self) -> str:
        where = f"{self._cluster!r} in {shown_url(self._store)}"
        return f"<{type(self).__name__} of cluster {where}: {self._lives.standing}>"


def connect(
    store: str,
    *,
    cluster: str = "domicile",
    token: str | None = None,
    settings: Settings | None = None,
    meter: Meter | None = None,
    tracer: Tracer | None = None,
) -> ConnectedClient:
    """A way into a cluster for a process that is home to nothing.

    `token` is the cluster's secret, else that of `DOMICILE_TOKEN`.

    ::

        async with connect("sqlite:///.domicile/dev.db") as client:
            await client.ref(Counter, "c1").ask(Counter.add)
    """
    known = config.from_environment() if settings is None else settings
    return ConnectedClient(
        store, cluster=cluster, settings=known, token=token, meter=meter, tracer=tracer
    )
