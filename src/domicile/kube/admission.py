"""What the webhook answers when an object of a ring is created or changed (K4). Pure.

The answer is always "allowed". An object that cannot be assigned now stays without a label; the
sharder's next walk finds it. An error inside is the same: a user's request must never fail because
of the sharder.

An object that another one controls belongs where its owner *is*, which is not always where the ring
wants the owner: an owner waits at its instance until that lets go of it. So the answer for such an
object is made in two steps, and the caller reads the owner between them.
"""

from __future__ import annotations

import base64
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from domicile.kube.conventions import GroupResource, drain_label, shard_label
from domicile.kube.hashring import Instances, object_key
from domicile.kubeapi.objects import ObjectMeta, OwnerReference, PartialObject, RingSpec


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


@dataclass(frozen=True, slots=True)
class OwnerNeeded:
    """The answer depends on where the object's owner is: read that, then call `answer_beside`."""

    owner: OwnerReference
    namespace: str
    request: AdmissionRequest
    view: RingView


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
    owner = metadata.controller
    return "" if owner is None else object_key(owner.group, owner.kind, namespace, owner.name)


def instance_beside(
    owner: PartialObject | None, label: str, instances: Instances, wanted: str
) -> str:
    """The instance of an object that `owner` controls: the owner's own, if that is there. Else it
    is the one that the ring wants, where the owner comes, too."""
    at = "" if owner is None else owner.metadata.label(label)
    return at if at in instances.instances else wanted


def answer(body: bytes, view: RingView | None) -> Answered | OwnerNeeded:
    """The answer to an AdmissionReview, or what it depends on. Never raises, never refuses."""
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


def answer_beside(needed: OwnerNeeded, owner: PartialObject | None) -> Answered:
    """The answer once the owner was read; None if there is no owner to be beside, or if nobody
    knows. Never raises, never refuses."""
    try:
        return _assigned(needed.request, needed.view, "controlled", owner)
    except Exception as error:  # K4
        why = f"{type(error).__name__}: {error}"
        return Answered(_review(needed.request.uid, ()), why_not=why, failed=True)


def _answer(request: AdmissionRequest, view: RingView | None) -> Answered | OwnerNeeded:
    if view is None:
        return Answered(_review(request.uid, ()), why_not="unknown ring", failed=True)
    if request.object is None:
        return Answered(_review(request.uid, ()), why_not="no object")
    metadata = request.object.metadata
    if metadata.label(shard_label(view.name)):
        return Answered(_review(request.uid, ()), why_not="has its label")
    resource = GroupResource(request.resource.group, request.resource.resource)
    role = role_in(view.spec, resource)
    if not role:
        return Answered(_review(request.uid, ()), why_not="not of the ring")
    owner = metadata.controller
    if role == "controlled" and owner is not None and len(view.instances.instances) > 1:
        return OwnerNeeded(owner, request.namespace, request, view)
    return _assigned(request, view, role, None)


def _assigned(
    request: AdmissionRequest, view: RingView, role: str, owner: PartialObject | None
) -> Answered:
    assert request.object is not None
    metadata = request.object.metadata
    label, drain = shard_label(view.name), drain_label(view.name)
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
    instance = instance_beside(owner, label, view.instances, view.instances.owner(key))
    if not instance:
        return Answered(_review(request.uid, ()), why_not="no instance is available")
    steps: list[Mapping[str, Any]] = []
    if metadata.labels is None:
        steps.append({"op": "add", "path": "/metadata/labels", "value": {label: instance}})
    else:
        steps.append({"op": "add", "path": _pointer(label), "value": instance})
    if metadata.has_label(drain):
        # It asked the former instance to let go, and says nothing to the new one.
        steps.append({"op": "remove", "path": _pointer(drain)})
    resource = GroupResource(request.resource.group, request.resource.resource)
    return Answered(_review(request.uid, steps), assigned_to=instance, resource=resource)


def _pointer(label: str) -> str:
    return "/metadata/labels/" + label.replace("~", "~0").replace("/", "~1")


def _review(uid: str, steps: Any) -> bytes:
    response: dict[str, Any] = {"uid": uid, "allowed": True}
    if steps:
        response["patchType"] = "JSONPatch"
        response["patch"] = base64.b64encode(msgspec.json.encode(steps)).decode()
    review = {"apiVersion": "admission.k8s.io/v1", "kind": "AdmissionReview", "response": response}
    return msgspec.json.encode(review)
