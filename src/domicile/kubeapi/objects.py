"""The Kubernetes objects that Domicile reads and writes, as typed data.

Only the fields that are used are named. Unknown fields are dropped when an object is decoded, so an
object that others write too is changed by patches, not replaced. Pure: bytes in, structs out.
"""

from __future__ import annotations

import re
from datetime import UTC, datetime
from typing import Any

import msgspec


class _Camel(msgspec.Struct, rename="camel", omit_defaults=True, kw_only=True, frozen=True):
    pass


class OwnerReference(_Camel, frozen=True):
    """The object that another one belongs to."""

    api_version: str = ""
    kind: str = ""
    name: str = ""
    uid: str = ""
    controller: bool = False

    @property
    def group(self) -> str:
        """The API group; empty for the core group."""
        return self.api_version.rpartition("/")[0]


class ObjectMeta(_Camel, frozen=True):
    """What all objects have."""

    name: str = ""
    namespace: str = ""
    generate_name: str = ""
    uid: str = ""
    resource_version: str = ""
    generation: int = 0
    creation_timestamp: str = ""
    deletion_timestamp: str = ""
    labels: dict[str, str] | None = None
    annotations: dict[str, str] | None = None
    owner_references: tuple[OwnerReference, ...] = ()

    @property
    def controller(self) -> OwnerReference | None:
        """The object that controls this one, if there is one."""
        return next((owner for owner in self.owner_references if owner.controller), None)

    def label(self, key: str) -> str:
        """The value of a label; empty if it is missing."""
        return (self.labels or {}).get(key, "")

    def has_label(self, key: str) -> bool:
        """Whether a label is there, whatever its value."""
        return key in (self.labels or {})

    def annotation(self, key: str) -> str:
        """The value of an annotation; empty if it is missing."""
        return (self.annotations or {}).get(key, "")


class PartialObject(_Camel, frozen=True):
    """An object of any kind, of which only the metadata is read (`PartialObjectMetadata`)."""

    api_version: str = ""
    kind: str = ""
    metadata: ObjectMeta = ObjectMeta()


class FieldsEntry(_Camel, frozen=True):
    """Which fields one writer wrote last, and when."""

    time: str = ""
    fields_v1: dict[str, dict[str, dict[str, Any]]] = msgspec.field(default={}, name="fieldsV1")


class WrittenMeta(ObjectMeta, frozen=True):
    """Metadata with the history of its fields."""

    managed_fields: tuple[FieldsEntry, ...] = ()

    def labelled_at(self, label: str) -> str:
        """When a label was written last, to the second; empty if that is not known."""
        times = [
            one.time
            for one in self.managed_fields
            if f"f:{label}" in one.fields_v1.get("f:metadata", {}).get("f:labels", {})
        ]
        return max(times, default="")


class WrittenObject(PartialObject, frozen=True):
    """An object of any kind, of which the metadata is read, with its history."""

    metadata: WrittenMeta = WrittenMeta()


class LeaseSpec(_Camel, frozen=True):
    """What a Lease says. Times are texts: nothing here compares clocks of machines (K1)."""

    holder_identity: str | None = None
    lease_duration_seconds: int | None = None
    acquire_time: str | None = None
    renew_time: str | None = None
    lease_transitions: int | None = None


class KubeLease(PartialObject, frozen=True):
    """A `Lease` of `coordination.k8s.io/v1`."""

    spec: LeaseSpec = LeaseSpec()


class ConfigMap(PartialObject, frozen=True):
    """A `ConfigMap` of `v1`."""

    data: dict[str, str] | None = None


class ContainerState(_Camel, frozen=True):
    """What a container is doing: exactly one of the three is there."""

    waiting: dict[str, Any] | None = None
    running: dict[str, Any] | None = None
    terminated: dict[str, Any] | None = None


class ContainerStatus(_Camel, frozen=True):
    """What the kubelet last said about a container."""

    name: str = ""
    state: ContainerState = ContainerState()
    restart_count: int = 0


class PodContainer(_Camel, frozen=True):
    """A container that a pod is to have."""

    name: str = ""


class PodSpec(_Camel, frozen=True):
    """What a pod is to be, and on which machine."""

    node_name: str = ""
    containers: tuple[PodContainer, ...] = ()


class PodStatus(_Camel, frozen=True):
    """What is known about a pod."""

    phase: str = ""
    container_statuses: tuple[ContainerStatus, ...] = ()
    init_container_statuses: tuple[ContainerStatus, ...] = ()
    ephemeral_container_statuses: tuple[ContainerStatus, ...] = ()


class KubePod(PartialObject, frozen=True):
    """A `Pod` of `v1`."""

    spec: PodSpec = PodSpec()
    status: PodStatus = PodStatus()


class NodeTaint(_Camel, frozen=True):
    """What keeps pods away from a machine, or says something about it."""

    key: str = ""
    effect: str = ""


class KubeNodeSpec(_Camel, frozen=True):
    """What a machine is to be."""

    taints: tuple[NodeTaint, ...] = ()


class KubeNode(PartialObject, frozen=True):
    """A `Node` of `v1`: a machine of the Kubernetes cluster, not a node of ours."""

    spec: KubeNodeSpec = KubeNodeSpec()


class ControlledResource(_Camel, frozen=True):
    """A kind of objects that belong to a ring's objects."""

    group: str = ""
    resource: str = ""


class RingResource(_Camel, frozen=True):
    """A kind of objects that a ring shares among its instances."""

    group: str = ""
    resource: str = ""
    controlled_resources: tuple[ControlledResource, ...] = ()


class LabelRequirement(_Camel, frozen=True):
    """One expression of a label selector."""

    key: str = ""
    operator: str = ""
    values: tuple[str, ...] = ()


class LabelSelector(_Camel, frozen=True):
    """Which objects are meant, by their labels."""

    match_labels: dict[str, str] | None = None
    match_expressions: tuple[LabelRequirement, ...] = ()

    def matches(self, labels: dict[str, str] | None) -> bool:
        """Whether an object with these labels is meant. An unknown operator matches nothing."""
        have = labels or {}
        if any(have.get(key) != value for key, value in (self.match_labels or {}).items()):
            return False
        return all(_meets(have, one) for one in self.match_expressions)


def _meets(labels: dict[str, str], one: LabelRequirement) -> bool:
    match one.operator:
        case "In":
            return labels.get(one.key) in one.values
        case "NotIn":
            return labels.get(one.key) not in one.values
        case "Exists":
            return one.key in labels
        case "DoesNotExist":
            return one.key not in labels
        case _:
            return False


class RingSpec(_Camel, frozen=True):
    """What a `ControllerRing` asks for."""

    resources: tuple[RingResource, ...] = ()
    namespace_selector: LabelSelector | None = None


class StatusCondition(_Camel, frozen=True):
    """One condition of a status."""

    type: str = ""
    status: str = ""
    reason: str = ""
    message: str = ""
    observed_generation: int = 0
    last_transition_time: str = ""


class RingStatus(_Camel, frozen=True):
    """What the sharder says about a ring. The counts are written even if they are 0."""

    observed_generation: int = 0
    shards: int = 0
    available_shards: int = 0
    conditions: tuple[StatusCondition, ...] = ()


class ControllerRing(PartialObject, frozen=True):
    """A `ControllerRing` of `sharding.timebertt.dev/v1alpha1`."""

    spec: RingSpec = RingSpec()
    status: RingStatus = RingStatus()


class Status(_Camel, frozen=True):
    """The answer of the API server where there is no object."""

    message: str = ""
    reason: str = ""
    code: int = 0
    details: dict[str, Any] | None = None


_NAME = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*")


def is_object_name(name: str) -> bool:
    """Whether a Lease could be called so, and be named by a label (63 characters)."""
    return len(name) <= 63 and _NAME.fullmatch(name) is not None


def micro_time(when: datetime) -> str:
    """A time of day as Leases have it."""
    return when.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")


def second_time(when: datetime) -> str:
    """A time of day as metadata and conditions have it."""
    return when.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
