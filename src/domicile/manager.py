"""The coordinator as a server of its own: a member of the cluster that is home to nothing.

`Manager(...)` does no I/O; entering it joins, leaving it resigns and goes. It runs the same code
as a node that coordinates. Nodes that shall never coordinate say `candidate=False`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from domicile.backends.wiring import LOOPBACK
from domicile.core.placement.strategies import Strategy
from domicile.incarnation.context import Identity
from domicile.ports.meter import Meter
from domicile.process import Process
from domicile.settings import Settings


class Manager(Process):
    """Decides who owns what, in a process that serves nothing; a second one stands by (C1).

    `store` is the URL that the nodes have. `listen` is `host:port` or `host:first-last`,
    `advertise` the address that nodes dial if that differs. `token` is the cluster's secret, else
    that of `DOMICILE_TOKEN`. `strategy` says where shards belong:
    a name or a function. Nodes work on while no manager is there (I7), and find the next one by
    the store.
    """

    _noun = "manager"

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
        super().__init__(
            store, cluster=cluster, listen=listen, advertise=advertise, token=token,
            settings=settings, strategy=strategy, node_id=node_id, meter=meter,
        )  # fmt: skip

    @property
    def leading(self) -> bool:
        """Whether it coordinates now; else it stands by."""
        return self.life is not None and self.life.control.leading

    def _identity(self, node_id: str, resources: Mapping[type[Any], Any]) -> Identity:
        return Identity(
            self._cluster, node_id, {}, resources, self._settings, True, strategy=self._strategy,
            token=self._token,
        )  # fmt: skip
