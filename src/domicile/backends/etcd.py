"""`etcd://a:2379,b:2379,c:2379`: a store for clusters over many machines.

The registry calls it. It needs grpcio and protobuf, which the extra `domicile[etcd]` installs;
nothing here imports them before a store is opened.
"""

from __future__ import annotations

from domicile.backends.registry import Backend, OpenOptions
from domicile.membership.clock import SystemClock
from domicile.ports.store import Store
from domicile.stores.commit_log import QueuedCommit
from domicile.stores.etcd.address import parse_etcd_url


class EtcdBackend(Backend):
    """Keys of an etcd cluster under one root. It has no journals: a program must name one."""

    scheme = "etcd"
    stores = "etcd://a:2379,b:2379,c:2379 (nodes of many machines)"
    needs = ("grpc", "google.protobuf")
    install = "domicile[etcd]"

    def check_url(self, url: str) -> None:
        """As `Backend.check_url`."""
        parse_etcd_url(url)

    def open_store(self, url: str, options: OpenOptions) -> Store:
        """As `Backend.open_store`."""
        # Imported late: gRPC is an extra, and its import takes time.
        from domicile.stores.etcd.store import EtcdStore

        return EtcdStore(
            parse_etcd_url(url),
            by=options.by,
            cluster=options.cluster,
            op_timeout_s=options.op_timeout_s,
            meter=options.meter,
        )

    def commits(self, url: str, after: int) -> list[QueuedCommit] | None:
        """As `Backend.commits`, if the URL says `log=true`."""
        address = parse_etcd_url(url)
        if not address.logged:
            return None
        from domicile.stores.etcd.commits import etcd_commits  # late, as above

        return etcd_commits(address, after, SystemClock().now)


ETCD = EtcdBackend()
