"""What `domicile kubernetes manifests` prints: account, rights, Service, workload and disruption
budget for a program with entities. Data only; the command writes it as YAML.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from domicile.stores.kubernetes.address import SCHEME, parse_kubernetes_url

Manifest = dict[str, Any]

NODE_PORT, HTTP_PORT = 7000, 9464

LOCKS = "/run/domicile"

DRAIN_S = 45
"""Seconds that the preStop hook waits until the node is empty."""

LEAVE_S = 45
"""Seconds for what follows: SIGTERM, and the leave of `drain_deadline_s` and more (H14)."""

RBAC = "rbac.authorization.k8s.io"


STORE_RULES: list[Manifest] = [
    {
        "apiGroups": [""], "resources": ["configmaps"],
        "verbs": ["get", "list", "watch", "create", "update", "delete"],
    },
    {
        "apiGroups": ["coordination.k8s.io"], "resources": ["leases"],
        "verbs": ["get", "list", "watch", "create", "patch", "delete"],
    },
]  # fmt: skip
"""What a node needs whose store is `kubernetes://`."""


@dataclass(frozen=True, slots=True)
class EntityProgram:
    """A program that is to run on Kubernetes."""

    name: str
    app: str
    """MODULE:NAME of the node, as `domicile run` takes it."""
    image: str
    store: str
    namespace: str = "default"
    version: str = ""
    replicas: int = 3
    workload: Literal["Deployment", "StatefulSet"] = "Deployment"


def entity_manifests(program: EntityProgram) -> list[Manifest]:
    """Everything that the program needs, in the order to apply."""
    here = {"name": program.name, "namespace": program.namespace, "labels": _labels(program)}
    # Names of what belongs to no namespace must not meet those of another one's.
    everywhere = {**here, "name": f"{program.namespace}-{program.name}-health"}
    del everywhere["namespace"]
    account = {"kind": "ServiceAccount", "name": program.name, "namespace": program.namespace}

    def rights(kind: str, metadata: Manifest, rules: list[Manifest]) -> list[Manifest]:
        role = {"apiGroup": RBAC, "kind": kind, "name": metadata["name"]}
        head = {"apiVersion": f"{RBAC}/v1", "metadata": metadata}
        return [
            {**head, "kind": kind, "rules": rules},
            {**head, "kind": f"{kind}Binding", "roleRef": role, "subjects": [account]},
        ]

    def store_rights() -> list[Manifest]:
        if not program.store.startswith(f"{SCHEME}://"):
            return []
        address = parse_kubernetes_url(program.store)
        if address.kubeconfig:
            return []  # it is another account that uses the store
        # Its own name: the store may lie in another namespace, which other programs use too.
        metadata = {
            "name": f"{program.namespace}-{program.name}-store",
            "namespace": address.namespace,
            "labels": _labels(program),
        }
        return rights("Role", metadata, STORE_RULES)

    pods = {"apiGroups": [""], "resources": ["pods"], "verbs": ["get", "list", "watch", "patch"]}
    machines = {"apiGroups": [""], "resources": ["nodes"], "verbs": ["get"]}
    system = {
        "apiGroups": [""], "resources": ["namespaces"], "resourceNames": ["kube-system"],
        "verbs": ["get"],
    }  # fmt: skip
    selector = {"matchLabels": {"app.kubernetes.io/name": program.name}}
    ports = [{"name": "node", "port": NODE_PORT}, {"name": "http", "port": HTTP_PORT}]
    return [
        {"apiVersion": "v1", "kind": "ServiceAccount", "metadata": here},
        *rights("Role", here, [pods]),
        *rights("ClusterRole", everywhere, [machines, system]),
        *store_rights(),
        {
            "apiVersion": "v1", "kind": "Service", "metadata": here,
            "spec": {"clusterIP": "None", "selector": selector["matchLabels"], "ports": ports},
        },
        _workload(program, here, selector),
        {
            "apiVersion": "policy/v1", "kind": "PodDisruptionBudget", "metadata": here,
            "spec": {"maxUnavailable": 1, "selector": selector},
        },
    ]  # fmt: skip


def _labels(program: EntityProgram) -> dict[str, str]:
    version = {"app.kubernetes.io/version": program.version} if program.version else {}
    return {"app.kubernetes.io/name": program.name, **version}


def _workload(program: EntityProgram, metadata: Manifest, selector: Manifest) -> Manifest:
    template: Manifest = {
        "metadata": {"labels": _labels(program)},
        "spec": {
            "serviceAccountName": program.name,
            "terminationGracePeriodSeconds": DRAIN_S + LEAVE_S,
            "containers": [_container(program)],
            "volumes": [{"name": "locks", "emptyDir": {}}],
        },
    }
    spec: Manifest = {"replicas": program.replicas, "selector": selector, "template": template}
    if program.workload == "Deployment":
        spec["minReadySeconds"] = 5
        # A new pod first: an update never leaves fewer nodes than there were.
        spec["strategy"] = {
            "type": "RollingUpdate",
            "rollingUpdate": {"maxSurge": 1, "maxUnavailable": 0},
        }
    else:
        spec |= {
            "serviceName": program.name,
            "minReadySeconds": 5,
            "podManagementPolicy": "Parallel",
            "updateStrategy": {"type": "RollingUpdate"},
        }
    return {"apiVersion": "apps/v1", "kind": program.workload, "metadata": metadata, "spec": spec}


def _container(program: EntityProgram) -> Manifest:
    def of_pod(name: str, path: str) -> Manifest:
        return {"name": name, "valueFrom": {"fieldRef": {"fieldPath": path}}}

    secret = {"name": f"{program.name}-domicile", "key": "token"}
    environment = [
        of_pod("POD_NAME", "metadata.name"),
        of_pod("POD_NAMESPACE", "metadata.namespace"),
        of_pod("POD_UID", "metadata.uid"),
        of_pod("POD_IP", "status.podIP"),
        {"name": "DOMICILE_STORE", "value": program.store},
        {"name": "DOMICILE_TOKEN", "valueFrom": {"secretKeyRef": secret}},
        {"name": "DOMICILE_HEALTH", "value": f"kubernetes://?locks={LOCKS}"},
        {"name": "DOMICILE_HTTP", "value": f"0.0.0.0:{HTTP_PORT}"},
    ]
    if program.version:
        path = "metadata.labels['app.kubernetes.io/version']"
        environment.append(of_pod("DOMICILE_VERSION", path))

    def probe(path: str, **more: int) -> Manifest:
        return {"httpGet": {"path": path, "port": "http"}, **more}

    drain = ["domicile", "drain", "--self", "--wait", str(DRAIN_S)]
    return {
        "name": "node",
        "image": program.image,
        "command": ["domicile", "run", program.app],
        "env": environment,
        "ports": [
            {"name": "node", "containerPort": NODE_PORT},
            {"name": "http", "containerPort": HTTP_PORT},
        ],
        "startupProbe": probe("/readyz", periodSeconds=2, failureThreshold=60),
        "readinessProbe": probe("/readyz", periodSeconds=3),
        "livenessProbe": probe("/healthz", periodSeconds=10, failureThreshold=6),
        "lifecycle": {"preStop": {"exec": {"command": drain}}},
        "volumeMounts": [{"name": "locks", "mountPath": LOCKS}],
        "resources": {"requests": {"cpu": "250m", "memory": "128Mi"}},
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "capabilities": {"drop": ["ALL"]},
        },
    }
