"""What `domicile ring install` prints: the CRD, the rights, the Service and the Deployment. Data
only; the command writes it as YAML.
"""

from __future__ import annotations

from collections.abc import Sequence

from domicile.kube.certificates import SECRET
from domicile.kube.conventions import GROUP, GroupResource
from domicile.kube.serving import METRICS_PORT, WEBHOOK_PORT
from domicile.ops.entity_manifests import Manifest

NAME = "domicile-sharder"
LABELS = {"app.kubernetes.io/name": NAME}

_READY = '.status.conditions[?(@.type=="Ready")].status'
_STRING: Manifest = {"type": "string"}
_INTEGER: Manifest = {"type": "integer", "format": "int32"}


def _resource(extra: Manifest) -> Manifest:
    properties = {"group": _STRING, "resource": _STRING, **extra}
    return {"type": "object", "required": ["resource"], "properties": properties}


def _list_of_resources(items: Manifest) -> Manifest:
    return {
        "type": "array",
        "items": items,
        "x-kubernetes-list-type": "map",
        "x-kubernetes-list-map-keys": ["group", "resource"],
    }


def ring_definition() -> Manifest:
    """The CustomResourceDefinition of `ControllerRing`, as the controller sharding project has it
    (KR-01)."""
    main = _resource({"controlledResources": _list_of_resources(_keyed(_resource({})))})
    requirement = {
        "type": "object",
        "required": ["key", "operator"],
        "properties": {
            "key": _STRING,
            "operator": _STRING,
            "values": {"type": "array", "items": _STRING},
        },
    }
    selector = {
        "type": "object",
        "properties": {
            "matchLabels": {"type": "object", "additionalProperties": _STRING},
            "matchExpressions": {"type": "array", "items": requirement},
        },
        "x-kubernetes-map-type": "atomic",
    }
    condition = {
        "type": "object",
        "required": ["type", "status"],
        "properties": {
            **dict.fromkeys(("type", "status", "reason", "message"), _STRING),
            "lastTransitionTime": {"type": "string", "format": "date-time"},
            "observedGeneration": {"type": "integer", "format": "int64"},
        },
    }
    status = {
        "type": "object",
        "properties": {
            "observedGeneration": {"type": "integer", "format": "int64"},
            "shards": _INTEGER,
            "availableShards": _INTEGER,
            "conditions": {
                "type": "array",
                "items": condition,
                "x-kubernetes-list-type": "map",
                "x-kubernetes-list-map-keys": ["type"],
            },
        },
    }
    spec = {
        "type": "object",
        "properties": {
            "resources": _list_of_resources(_keyed(main)),
            "namespaceSelector": selector,
        },
    }
    schema = {
        "type": "object",
        "properties": {
            "apiVersion": _STRING,
            "kind": _STRING,
            "metadata": {"type": "object"},
            "spec": spec,
            "status": status,
        },
        "x-kubernetes-validations": [
            {
                "rule": "size(self.metadata.name) <= 63",
                "message": "a ring's name has at most 63 characters",
            }
        ],
    }
    columns = [
        {"name": "Ready", "type": "string", "jsonPath": _READY},
        {"name": "Available", "type": "string", "jsonPath": ".status.availableShards"},
        {"name": "Shards", "type": "string", "jsonPath": ".status.shards"},
        {"name": "Age", "type": "date", "jsonPath": ".metadata.creationTimestamp"},
    ]  # fmt: skip
    version: Manifest = {
        "name": "v1alpha1",
        "served": True,
        "storage": True,
        "subresources": {"status": {}},
        "additionalPrinterColumns": columns,
        "schema": {"openAPIV3Schema": schema},
    }
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {"name": f"controllerrings.{GROUP}"},
        "spec": {
            "group": GROUP,
            "scope": "Cluster",
            "names": {
                "kind": "ControllerRing",
                "listKind": "ControllerRingList",
                "plural": "controllerrings",
                "singular": "controllerring",
            },
            "versions": [version],
        },
    }


def _keyed(resource: Manifest) -> Manifest:
    """The group is a key of the list, so it needs a default: the core group."""
    properties = {**resource["properties"], "group": {"type": "string", "default": ""}}
    return {**resource, "properties": properties}


def _rule(group: str, resources: Sequence[str], verbs: Sequence[str]) -> Manifest:
    return {"apiGroups": [group], "resources": list(resources), "verbs": list(verbs)}


def sharder_rules(resources: Sequence[GroupResource]) -> list[Manifest]:
    """What the sharder may do in the whole cluster."""
    watch = ("get", "list", "watch")
    return [
        _rule(GROUP, ("controllerrings",), watch),
        _rule(GROUP, ("controllerrings/status",), ("patch",)),
        _rule("coordination.k8s.io", ("leases",), (*watch, "create", "patch", "delete")),
        _rule("", ("namespaces",), watch),
        _rule("", ("events",), ("create",)),
        _rule(
            "admissionregistration.k8s.io",
            ("mutatingwebhookconfigurations",),
            ("get", "create", "patch"),
        ),
        # Blocking owner references need this where that admission plugin is on.
        _rule(GROUP, ("controllerrings/finalizers",), ("update",)),
        *(_rule(one.group, (one.resource,), ("get", "list", "patch")) for one in resources),
    ]


def install_manifests(
    namespace: str, image: str, replicas: int, resources: Sequence[GroupResource]
) -> list[Manifest]:
    """Everything that a cluster needs for the sharder, in the order to apply."""
    here = {"name": NAME, "namespace": namespace, "labels": LABELS}
    account = [{"kind": "ServiceAccount", "name": NAME, "namespace": namespace}]
    rbac = "rbac.authorization.k8s.io"

    def binding(kind: str, metadata: Manifest) -> Manifest:
        reference = {"apiGroup": rbac, "kind": kind, "name": NAME}
        return {
            "apiVersion": f"{rbac}/v1",
            "kind": f"{kind}Binding",
            "metadata": metadata,
            "roleRef": reference,
            "subjects": account,
        }

    everywhere = {"name": NAME, "labels": LABELS}
    secrets = [
        {**_rule("", ("secrets",), ("get", "patch")), "resourceNames": [SECRET]},
        _rule("", ("secrets",), ("create",)),
    ]
    return [
        ring_definition(),
        {
            "apiVersion": "v1",
            "kind": "Namespace",
            "metadata": {"name": namespace, "labels": LABELS},
        },
        {"apiVersion": "v1", "kind": "ServiceAccount", "metadata": here},
        {
            "apiVersion": f"{rbac}/v1",
            "kind": "ClusterRole",
            "metadata": everywhere,
            "rules": sharder_rules(resources),
        },
        binding("ClusterRole", everywhere),
        {"apiVersion": f"{rbac}/v1", "kind": "Role", "metadata": here, "rules": secrets},
        binding("Role", here),
        {
            "apiVersion": "v1",
            "kind": "Service",
            "metadata": here,
            "spec": {
                "selector": LABELS,
                "ports": [{"name": "webhook", "port": 443, "targetPort": WEBHOOK_PORT}],
            },
        },
        _deployment(namespace, image, replicas),
    ]


def _deployment(namespace: str, image: str, replicas: int) -> Manifest:
    command = ["domicile", "ring", "sharder", "--in-cluster", "--service", NAME]
    command += ["--listen", f"0.0.0.0:{WEBHOOK_PORT}", "--http", f"0.0.0.0:{METRICS_PORT}"]
    probe = {"httpGet": {"path": "/readyz", "port": METRICS_PORT}, "periodSeconds": 5}
    container = {
        "name": "sharder",
        "image": image,
        "command": command,
        "env": [
            {"name": "POD_NAME", "valueFrom": {"fieldRef": {"fieldPath": "metadata.name"}}},
            {
                "name": "POD_NAMESPACE",
                "valueFrom": {"fieldRef": {"fieldPath": "metadata.namespace"}},
            },
        ],
        "ports": [
            {"name": "webhook", "containerPort": WEBHOOK_PORT},
            {"name": "metrics", "containerPort": METRICS_PORT},
        ],
        "readinessProbe": probe,
        "livenessProbe": {**probe, "httpGet": {"path": "/healthz", "port": METRICS_PORT}},
        "resources": {
            "requests": {"cpu": "50m", "memory": "96Mi"},
            "limits": {"memory": "192Mi"},
        },
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "capabilities": {"drop": ["ALL"]},
            "runAsNonRoot": True,
            "runAsUser": 65532,
        },
    }
    spec = {
        "replicas": replicas,
        "selector": {"matchLabels": LABELS},
        "template": {
            "metadata": {"labels": LABELS},
            "spec": {"serviceAccountName": NAME, "containers": [container]},
        },
    }
    metadata = {"name": NAME, "namespace": namespace, "labels": LABELS}
    return {"apiVersion": "apps/v1", "kind": "Deployment", "metadata": metadata, "spec": spec}
