"""What the webhook answers when an object of a ring is created or changed (K4). Pure.

The answer is always "allowed". An object that cannot be assigned now stays without a label; the
sharder's next walk finds it. An error inside is the same: a user's request must never fail because
of the sharder.
"""

from __future__ import annotations

import base64
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from domicile.kube.conventions import GroupResource, drain_label, shard_label
from domicile.kube.hashring import Instances, object_key
from domicile.kubeapi.objects import ObjectMeta, PartialObject, RingSpec


class GroupVersionResource(msgspec.Struct, frozen=True):
    """A resource as an admission request names it."""

    group: str = ""
    version: str = ""
    resource: str = ""


class GroupVersionKind(msgspec.Struct, frozen=True):
    """A kind as an admission request names it."""

    group: str = ""
    version: str = ""
    kind: str = ""


class AdmissionRequest(msgspec.Struct, frozen=True, rename="camel"):
    """The part of an AdmissionReview's request that is read."""

    uid: str = ""
    kind: GroupVersionKind = GroupVersionKind()
    resource: GroupVersionResource = GroupVersionResource()
    name: str = ""
    namespace: str = ""
    operation: str = ""
    object: PartialObject | None = None


class AdmissionReview(msgspec.Struct, frozen=True, rename="camel"):
    """What the API server sends."""

    request: AdmissionRequest | None = None


@dataclass(frozen=True, slots=True)
class RingView:
    """What is needed to assign an object: the ring's resources, and the instances now."""

    name: str
    spec: RingSpec
    instances: Instances


@dataclass(frozen=True, slots=True)
class Answered:
    """The answer, and what it did, for the metrics."""

    body: bytes
    assigned_to: str = ""
    why_not: str = ""
    failed: bool = False
    """Whether something was wrong with the review, or in here."""
    resource: GroupResource | None = None


def role_in(spec: RingSpec, resource: GroupResource) -> str:
    """`main` for the ring's objects, `controlled` for those that belong to them, else empty."""
    for one in spec.resources:
        if (one.group, one.resource) == resource:
            return "main"
    for one in spec.resources:
        if any((c.group, c.resource) == resource for c in one.controlled_resources):
            return "controlled"
    return ""


def key_of(
    role: str, group: str, kind: str, namespace: str, name: str, metadata: ObjectMeta
) -> str:
    """The key that an object is assigned by; empty if it can't be assigned."""
    if role == "main":
        return object_key(group, kind, namespace, name) if name else ""
    for owner in metadata.owner_references:
        if owner.controller:
            return object_key(owner.group, owner.kind, namespace, owner.name)
    return ""


def answer(body: bytes, view: RingView | None) -> Answered:
    """The answer to an AdmissionReview. Never raises, never refuses."""
    uid = ""
    try:
        request = msgspec.json.decode(body, type=AdmissionReview).request
        if request is None:
            return Answered(_review(uid, ()), why_not="no request", failed=True)
        uid = request.uid
        return _answer(request, view)
    except Exception as error:  # K4: whatever goes wrong, the user's request goes through
        why = f"{type(error).__name__}: {error}"
        return Answered(_review(uid, ()), why_not=why, failed=True)


def _answer(request: AdmissionRequest, view: RingView | None) -> Answered:
    if view is None:
        return Answered(_review(request.uid, ()), why_not="unknown ring", failed=True)
    if request.object is None:
        return Answered(_review(request.uid, ()), why_not="no object")
    metadata = request.object.metadata
    label, drain = shard_label(view.name), drain_label(view.name)
    if metadata.label(label):
        return Answered(_review(request.uid, ()), why_not="has its label")
    resource = GroupResource(request.resource.group, request.resource.resource)
    role = role_in(view.spec, resource)
    if not role:
        return Answered(_review(request.uid, ()), why_not="not of the ring")
    # The object itself may have no namespace yet: that of the request counts (K4).
    key = key_of(
        role,
        request.kind.group,
        request.kind.kind,
        request.namespace,
        request.name or metadata.name,
        metadata,
    )
    if not key:
        return Answered(_review(request.uid, ()), why_not="no name or no controller yet")
    owner = view.instances.owner(key)
    if not owner:
        return Answered(_review(request.uid, ()), why_not="no instance is available")
    steps: list[Mapping[str, Any]] = []
    if metadata.labels is None:
        steps.append({"op": "add", "path": "/metadata/labels", "value": {label: owner}})
    else:
        steps.append({"op": "add", "path": _pointer(label), "value": owner})
    if metadata.has_label(drain):
        # It asked the former instance to let go, and says nothing to the new one.
        steps.append({"op": "remove", "path": _pointer(drain)})
    return Answered(_review(request.uid, steps), assigned_to=owner, resource=resource)


def _pointer(label: str) -> str:
    return "/metadata/labels/" + label.replace("~", "~0").replace("/", "~1")


def _review(uid: str, steps: Any) -> bytes:
    response: dict[str, Any] = {"uid": uid, "allowed": True}
    if steps:
        response["patchType"] = "JSONPatch"
        response["patch"] = base64.b64encode(msgspec.json.encode(steps)).decode()
    review = {"apiVersion": "admission.k8s.io/v1", "kind": "AdmissionReview", "response": response}
    return msgspec.json.encode(review)
