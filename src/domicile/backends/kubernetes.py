"""`kubernetes://namespace`: a store for clusters that have nothing but a Kubernetes API server.

The registry calls it. It needs h11 and more, which the extra `domicile[kubernetes]` installs;
nothing here imports them before a store is opened.
"""

from __future__ import annotations

from domicile.backends.registry import Backend, OpenOptions
from domicile.membership.clock import SystemClock
from domicile.ports.store import Store
from domicile.stores.kubernetes.address import parse_kubernetes_url


class KubernetesBackend(Backend):
    """ConfigMaps and Leases of a namespace. It has no journals: a program must name one."""

    scheme = "kubernetes"
    stores = "kubernetes://namespace (nodes with a Kubernetes API server)"
    needs = ("h11", "yaml")
    install = "domicile[kubernetes]"

    def check_url(self, url: str) -> None:
        """As `Backend.check_url`."""
        parse_kubernetes_url(url)

    def open_store(self, url: str, options: OpenOptions) -> Store:
        """As `Backend.open_store`."""
        # Imported late: they are of an extra, and their import takes time.
        from domicile.kubeapi.client import KubeClient
        from domicile.kubeapi.http_exchange import connect_to_kubernetes
        from domicile.stores.kubernetes.store import KubernetesStore

        address = parse_kubernetes_url(url)

        def connect() -> KubeClient:
            client, _ = connect_to_kubernetes(
                address.kubeconfig, address.context, timeout_s=options.op_timeout_s
            )
            return client

        return KubernetesStore(
            address,
            connect,
            now=SystemClock().now,
            by=options.by,
            op_timeout_s=options.op_timeout_s,
            reads_only=options.reads_only,
        )


KUBERNETES = KubernetesBackend()
