"""`kubernetes://`: the health port that asks a Kubernetes API server about pods (C9).

The registry calls it. Nothing here reads a file or opens a connection before the port is used.
"""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from urllib.parse import parse_qsl, urlsplit

from domicile.backends.registry import OpenOptions
from domicile.errors import ConfigError
from domicile.ports.health import Health
from domicile.stores.file_locks import FileLocks

SCHEME = "kubernetes"

ANSWER_S = 10.0
"""Seconds in which the API server must answer."""

OPTIONS = ("labels", "locks", "kubeconfig", "context")


def pod_health(url: str, options: OpenOptions) -> Health:
    """`kubernetes://[NAMESPACE][?labels=…&locks=…&kubeconfig=…&context=…]`."""
    if find_spec("h11") is None:
        raise ConfigError(
            f"health {url!r} needs h11, not installed here: pip install 'domicile[kubernetes]'"
        )
    # Imported late: HTTP is an extra, and its import takes time.
    from domicile.kube.pod_health import PodHealth, own_pod
    from domicile.kubeapi.http_exchange import connect_to_kubernetes

    parts = urlsplit(url)
    given = dict(parse_qsl(parts.query, keep_blank_values=True))
    wrong = [name for name in given if name not in OPTIONS]
    if wrong or parts.path.strip("/"):
        raise ConfigError(
            f"health {url!r} is not understood: write {SCHEME}:// or {SCHEME}://NAMESPACE, with "
            f"options among {', '.join(OPTIONS)}, as in {SCHEME}://?locks=/run/domicile"
        )
    # Not the store's time limit: no lease waits for these answers.
    client, found = connect_to_kubernetes(
        given.get("kubeconfig"), given.get("context"), timeout_s=ANSWER_S
    )
    locks = given.get("locks")
    return PodHealth(
        client,
        own_pod(parts.netloc or found.namespace),
        labels=given.get("labels", ""),
        locks=FileLocks(Path(locks)) if locks else None,
    )
