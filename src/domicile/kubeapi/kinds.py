"""Where each kind of object is served: group, version, plural, and the type it decodes to.

Kinds that Domicile has types for are named here. Others are looked up by the client
(`KubeClient.discover`) and decode to their metadata alone. Pure.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from domicile.kubeapi.objects import (
    ConfigMap,
    ControllerRing,
    KubeLease,
    KubeNode,
    KubePod,
    PartialObject,
)

K = TypeVar("K", bound=PartialObject)


@dataclass(frozen=True, slots=True)
class ApiKind(Generic[K]):
    """A kind of object as the API server serves it."""

    group: str
    version: str
    plural: str
    kind: str
    namespaced: bool
    type: type[K]

    @property
    def api_version(self) -> str:
        """`group/version`, or only the version for the core group."""
        return f"{self.group}/{self.version}" if self.group else self.version

    @property
    def shown(self) -> str:
        """Its name in errors and RBAC rules: `leases.coordination.k8s.io`."""
        return f"{self.plural}.{self.group}" if self.group else self.plural

    def path(self, namespace: str = "", name: str = "", subresource: str = "") -> str:
        """The URL's path of one object, or of all in a namespace, or of all."""
        root = f"/apis/{self.group}/{self.version}" if self.group else f"/api/{self.version}"
        if self.namespaced and namespace:
            root += f"/namespaces/{namespace}"
        parts = [part for part in (self.plural, name, subresource) if part]
        return "/".join((root, *parts))


LEASES = ApiKind("coordination.k8s.io", "v1", "leases", "Lease", True, KubeLease)
CONFIG_MAPS = ApiKind("", "v1", "configmaps", "ConfigMap", True, ConfigMap)
SECRETS = ApiKind("", "v1", "secrets", "Secret", True, ConfigMap)
"""Their data is base64, and otherwise like that of a ConfigMap."""

NAMESPACES = ApiKind("", "v1", "namespaces", "Namespace", False, PartialObject)
PODS = ApiKind("", "v1", "pods", "Pod", True, KubePod)
MACHINES = ApiKind("", "v1", "nodes", "Node", False, KubeNode)
"""The machines of a Kubernetes cluster, which it calls nodes."""

EVENTS = ApiKind("", "v1", "events", "Event", True, PartialObject)
WEBHOOKS = ApiKind(
    "admissionregistration.k8s.io",
    "v1",
    "mutatingwebhookconfigurations",
    "MutatingWebhookConfiguration",
    False,
    PartialObject,
)
RINGS = ApiKind(
    "sharding.timebertt.dev", "v1alpha1", "controllerrings", "ControllerRing", False, ControllerRing
)

AnyApiKind = ApiKind[Any]
