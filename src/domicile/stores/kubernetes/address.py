"""What a `kubernetes://` URL says: the namespace, the store's name, how to get there. Pure."""

from __future__ import annotations

import re
from dataclasses import dataclass
from urllib.parse import parse_qsl, unquote

from domicile.errors import ConfigError

SCHEME = "kubernetes"
STORE = "domicile"
OPTIONS = ("kubeconfig", "context", "store")

_FORM = (
    "write kubernetes://namespace, in a pod or with a kubeconfig, or "
    "kubernetes://namespace?kubeconfig=/path/to/file&context=name"
)
_LABEL = re.compile(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?")


@dataclass(frozen=True, slots=True)
class KubernetesAddress:
    """One store: the ConfigMaps and Leases of a namespace that carry its name as a label."""

    namespace: str
    store: str = STORE
    kubeconfig: str | None = None
    context: str | None = None

    @property
    def shown(self) -> str:
        """The URL without its options, for messages."""
        return f"{SCHEME}://{self.namespace}"


def parse_kubernetes_url(url: str) -> KubernetesAddress:
    """The parts of a URL; `ConfigError` with the correct form if it is not complete."""
    namespace, _, query = url.removeprefix(f"{SCHEME}://").partition("?")
    namespace = unquote(namespace.strip("/"))
    shown = f"{SCHEME}://{namespace}"
    if not _LABEL.fullmatch(namespace):
        raise ConfigError(f"the store {shown} names no namespace: {_FORM}")
    options: dict[str, str] = {}
    for name, value in parse_qsl(query, keep_blank_values=True):
        if name not in OPTIONS:
            raise ConfigError(
                f"the store {shown} has an unknown option {name!r}; known: {', '.join(OPTIONS)}"
            )
        if name in options or not value:
            raise ConfigError(f"the store {shown} must have a value for {name}=, and one only")
        options[name] = value
    store = options.pop("store", STORE)
    if not _LABEL.fullmatch(store):
        raise ConfigError(
            f"the store {shown} has store={store!r}: write up to 63 lower-case letters, digits "
            "and hyphens"
        )
    return KubernetesAddress(namespace, store, **options)
