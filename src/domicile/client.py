"""A process that sends and is never home: `connect`."""

from __future__ import annotations

from typing import Self

from domicile.config import Settings
from domicile.entity.client import Client
from domicile.entity.ref import Outbound
from domicile.errors import ConfigError
from domicile.life import Lives, Plan
from domicile.ports.meter import Meter
from domicile.wiring import backends, check_cluster, check_store


class ConnectedClient(Client):
    """A client of one cluster. Made by `connect`."""

    def __init__(
        self, store: str, *, cluster: str, settings: Settings, meter: Meter | None = None
    ) -> None:
        check_store(store)
        check_cluster(cluster)
        self._store, self._cluster = store, cluster
        self._settings, self._meter = settings, meter
        self._lives = Lives()

    async def __aenter__(self) -> Self:
        """Join; messages can be sent from here on."""
        if self._lives.started:
            raise ConfigError("this client was started already; call connect() again")
        wired = backends(
            self._store, cluster=self._cluster, settings=self._settings, meter=self._meter
        )
        await self._lives.start(wired, Plan(self._cluster, "", {}, {}, self._settings, False))
        return self

    async def __aexit__(self, *exc: object) -> None:
        """Leave: wait for what is under way, then go (H14)."""
        await self._lives.stop()

    def _outbound(self) -> Outbound:
        return self._lives


def connect(
    store: str,
    *,
    cluster: str = "domicile",
    settings: Settings | None = None,
    meter: Meter | None = None,
) -> ConnectedClient:
    """A way into a cluster for a process that is home to nothing.

    ::

        async with connect("sqlite:///.domicile/dev.db") as client:
            await client.ref(Counter, "c1").ask(Counter.add)
    """
    known = Settings.from_environment() if settings is None else settings
    return ConnectedClient(store, cluster=cluster, settings=known, meter=meter)
