"""The webhook's answers: always allowed, whatever comes (K4)."""

from __future__ import annotations

import base64
import json
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from domicile.kube.admission import Answered, OwnerNeeded, RingView, answer, answer_beside
from domicile.kube.hashring import HashRing
from domicile.kubeapi.objects import PartialObject, RingSpec

SHARD = "shard.alpha.sharding.timebertt.dev/sites"
DRAIN = "drain.alpha.sharding.timebertt.dev/sites"
SPEC = msgspec.convert(
    {
        "resources": [
            {
                "group": "",
                "resource": "secrets",
                "controlledResources": [{"group": "apps", "resource": "deployments"}],
            }
        ]
    },
    RingSpec,
)
VIEW = RingView("sites", SPEC, HashRing(["a", "b", "c"]))


def review(**changes: Any) -> bytes:
    request = {
        "uid": "u1",
        "kind": {"group": "", "version": "v1", "kind": "Secret"},
        "resource": {"group": "", "version": "v1", "resource": "secrets"},
        "name": "foo",
        "namespace": "default",
        "operation": "CREATE",
        "object": {"metadata": {"name": "foo"}},
        **changes,
    }
    return json.dumps({"request": request}).encode()


def answered(body: bytes, view: RingView | None = VIEW) -> Answered:
    found = answer(body, view)
    assert isinstance(found, Answered)
    return found


def steps(body: bytes) -> Any:
    response = json.loads(body)["response"]
    assert response["allowed"] is True
    return json.loads(base64.b64decode(response["patch"])) if "patch" in response else None


def test_a_new_object_is_labelled_and_its_namespace_is_the_requests() -> None:
    found = answered(review())
    assert found.assigned_to == "b"
    assert json.loads(found.body)["response"]["uid"] == "u1"
    assert steps(found.body) == [{"op": "add", "path": "/metadata/labels", "value": {SHARD: "b"}}]


def test_other_labels_stay_and_a_drain_label_goes() -> None:
    one = {"metadata": {"name": "foo", "labels": {"x": "y", DRAIN: ""}}}
    path = "/metadata/labels/{}.alpha.sharding.timebertt.dev~1sites"
    assert steps(answered(review(object=one)).body) == [
        {"op": "add", "path": path.format("shard"), "value": "b"},
        {"op": "remove", "path": path.format("drain")},
    ]


def controlled() -> bytes:
    owners = [
        {"apiVersion": "v1", "kind": "Node", "name": "n"},
        {"apiVersion": "v1", "kind": "Secret", "name": "foo", "controller": True},
    ]
    return review(
        kind={"group": "apps", "kind": "Deployment"},
        resource={"group": "apps", "resource": "deployments"},
        name="",
        object={"metadata": {"generateName": "x-", "ownerReferences": owners}},
    )


@pytest.mark.parametrize(
    ("at", "given"),
    [("b", "b"), ("a", "a"), ("gone", "b"), ("", "b"), (None, "b")],
)
def test_an_object_goes_where_its_controller_is(at: str | None, given: str) -> None:
    """KR-04: the owner waits at `a` for its drain, though the ring wants it at `b`."""
    needed = answer(controlled(), VIEW)
    assert isinstance(needed, OwnerNeeded)
    assert (needed.owner.kind, needed.owner.name, needed.namespace) == ("Secret", "foo", "default")
    owner = None
    if at is not None:
        owner = msgspec.convert({"metadata": {"labels": {SHARD: at}}}, PartialObject)
    found = answer_beside(needed, owner)
    assert found.assigned_to == given
    assert steps(found.body) == [{"op": "add", "path": "/metadata/labels", "value": {SHARD: given}}]


def test_of_one_instance_no_owner_is_asked_for() -> None:
    assert answered(controlled(), RingView("sites", SPEC, HashRing(["a"]))).assigned_to == "a"


@pytest.mark.parametrize(
    "body",
    [
        review(object={"metadata": {"name": "foo", "labels": {SHARD: "a"}}}),
        review(name="", object={"metadata": {"generateName": "x-"}}),
        review(resource={"group": "", "resource": "pods"}),
        review(resource={"group": "apps", "resource": "deployments"}),
        review(object=None),
        b"{}",
        b"nonsense",
        b"",
    ],
)
def test_what_cannot_be_assigned_is_allowed_as_it_is(body: bytes) -> None:
    found = answered(body)
    assert steps(found.body) is None
    assert found.why_not


@pytest.mark.parametrize("view", [None, RingView("sites", SPEC, HashRing(()))])
def test_without_a_ring_or_instances_too(view: RingView | None) -> None:
    assert steps(answered(review(), view).body) is None


@given(st.binary(max_size=60) | st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3)
    | st.dictionaries(st.sampled_from(["request", "object", "metadata", "labels", "uid"]), inner),
).map(lambda value: json.dumps(value).encode()))  # fmt: skip
def test_no_bytes_are_refused(body: bytes) -> None:
    assert json.loads(answered(body).body)["response"]["allowed"] is True
