"""The judge of sharders finds one that acts while another one holds their Lease (KR-13)."""

from __future__ import annotations

from typing import Any

import pytest
from ring_judge import DRAIN, SHARD, judge_audit, judge_sharders


def entry(version: int, user: str, resource: str, name: str, **more: Any) -> dict[str, Any]:
    return {
        "verb": "patch",
        "user": {"username": user},
        "objectRef": {"resource": resource},
        "responseStatus": {"code": 200},
        "responseObject": {"metadata": {"name": name, "resourceVersion": str(version)}, **more},
    }


def lease(version: int, holder: str) -> dict[str, Any]:
    return entry(version, holder, "leases", "sharders", spec={"holderIdentity": holder})


def test_each_write_is_judged_by_the_term_it_fell_into() -> None:
    log = [
        lease(1, "sharder-1"),
        entry(2, "sharder-1", "websites", "x"),
        entry(3, "a", "websites", "x"),
        lease(4, "sharder-2"),
        entry(5, "sharder-2", "websites", "x"),
    ]
    # The log is in the order of the answers, not of the writes.
    assert judge_sharders(reversed(log), "sharders") == (2, [])
    late = entry(6, "sharder-1", "websites", "y")
    assert judge_sharders([*log, late], "sharders") == (
        2,
        ["y at 6, by sharder-1: sharder-2 held sharders"],
    )


def site(
    version: int, user: str, labels: dict[str, str | None], *, named: int, code: int = 200
) -> dict[str, Any]:
    ring = {"shard": SHARD, "drain": DRAIN}
    found = entry(version, user, "websites", "x")
    found["objectRef"] = {"resource": "websites", "apiGroup": "example.com", "name": "x"}
    found["responseStatus"] = {"code": code}
    shown = {ring[name]: value for name, value in labels.items()}
    metadata = {"resourceVersion": str(named), "labels": shown}
    found["requestObject"] = {"metadata": metadata}
    if code < 300:
        found["responseObject"]["metadata"]["labels"] = shown
    else:
        found["responseObject"] = {"message": "context canceled"}
    return found


def test_a_write_whose_answer_was_lost_may_have_happened() -> None:
    """An instance lets go, is killed before the answer, and the next one acts: nothing is wrong.
    Without that write it is."""
    made = site(1, "admin", {"shard": "b"}, named=0)
    asked = site(2, "sharder-1", {"shard": "b", "drain": "true"}, named=1)
    let_go = site(0, "b", {"shard": None, "drain": None}, named=2, code=504)
    acts = site(4, "g", {"shard": "g"}, named=3)
    verdict = judge_audit([made, asked, let_go, acts], "bg")
    assert (verdict.wrong, verdict.let_go) == ([], 1)
    assert judge_audit([made, asked, acts], "bg").wrong == ["x at 4, by g: it belonged to b"]
    unasked = site(0, "b", {"shard": None}, named=1, code=504)
    acts = site(4, "g", {"shard": "g"}, named=3)
    assert judge_audit([made, unasked, acts], "bg").wrong == [
        "x at 3, by b: let go without being asked"
    ]


def test_a_json_patch_is_judged_as_any_other_write() -> None:
    """Kopf removes the labels by one."""
    made = site(1, "admin", {"shard": "b"}, named=0)
    asked = site(2, "sharder-1", {"shard": "b", "drain": "true"}, named=1)
    steps: list[dict[str, Any]] = [
        {"op": "test", "path": "/metadata/resourceVersion", "value": "2"},
        *(
            {"op": "remove", "path": f"/metadata/labels/{label.replace('/', '~1')}"}
            for label in (SHARD, DRAIN)
        ),
    ]
    let_go = {**site(3, "b", {"shard": "g"}, named=2), "requestObject": steps}
    lost = {**site(0, "b", {}, named=2, code=504), "requestObject": steps}
    acts = site(4, "g", {"shard": "g"}, named=3)
    for one in (let_go, lost):
        verdict = judge_audit([made, asked, one, acts], "bg")
        assert (verdict.wrong, verdict.let_go) == ([], 1)
    kept = {**lost, "requestObject": steps[:1]}
    assert judge_audit([made, asked, kept, acts], "bg").wrong


def child(version: int, user: str, shard: str, *, verb: str = "patch") -> dict[str, Any]:
    found = entry(version, user, "configmaps", "x-1")
    found["verb"] = verb
    found["objectRef"] = {"resource": "configmaps", "namespace": "default", "name": "x-1"}
    found["responseObject"]["metadata"] |= {
        "labels": {SHARD: shard},
        "ownerReferences": [{"name": "x", "controller": True}],
    }
    return found


def held(version: int, instance: str) -> dict[str, Any]:
    found = entry(version, instance, "leases", instance, spec={"holderIdentity": instance})
    found["objectRef"]["namespace"] = "default"
    return found


def judged(*entries: dict[str, Any]) -> tuple[list[str], list[str]]:
    verdict = judge_audit(entries, "ab", controlled="configmaps")
    return verdict.wrong, verdict.apart


def test_what_an_object_controls_is_judged_by_where_that_object_is() -> None:
    begun = (held(1, "a"), held(2, "b"), site(3, "admin", {"shard": "a"}, named=0))
    made = child(4, "a", "a", verb="create")
    let_go = site(6, "a", {"shard": "b"}, named=5)
    asked = site(5, "sharder-1", {"shard": "a", "drain": "true"}, named=3)
    moved = child(8, "sharder-1", "b")
    assert judged(*begun, made, asked, let_go, moved, child(9, "b", "b")) == ([], [])
    # A patch that changes nothing is answered with the version that there is.
    assert judged(*begun, made, asked, child(5, "sharder-1", "b"), child(5, "b", "b"))[0] == [
        "x-1 at 5, by sharder-1: taken from a, which held its Lease"
    ]
    # Its call goes on after the owner was let go of.
    assert judged(*begun, made, asked, let_go, child(7, "a", "a"))[0] == [
        "x-1 at 7, by a: x belonged to b"
    ]
    # It is moved before its owner.
    assert judged(*begun, made, child(5, "sharder-1", "b"))[0] == [
        "x-1 at 5, by sharder-1: taken from a, which held its Lease"
    ]
    # It is made apart from its owner, which waits at `a`.
    assert judged(*begun, asked, child(7, "a", "b", verb="create")) == ([], ["x-1 at b, x at a"])
    # Perhaps the owner was let go of: nobody got the answer.
    lost = site(0, "a", {"shard": None, "drain": None}, named=5, code=504)
    assert judged(*begun, made, asked, lost, moved, child(9, "b", "b")) == ([], [])


def test_a_move_whose_answer_was_lost_is_judged_by_the_version_that_it_made() -> None:
    """The sharder is killed while it moves what an object controls. The next write tells when the
    move came: after the owner's, or before it."""
    begun = (held(1, "a"), held(2, "b"), site(3, "admin", {"shard": "a"}, named=0))
    made = child(4, "a", "a", verb="create")
    asked = site(5, "sharder-1", {"shard": "a", "drain": "true"}, named=3)
    moved = child(0, "sharder-1", "b")
    moved["responseStatus"] = {"code": 504}
    moved["requestObject"] = {
        "metadata": {"resourceVersion": "4", "labels": {SHARD: "b", DRAIN: None}}
    }
    moved["responseObject"] = {"message": "context canceled"}

    def acts(named: int) -> dict[str, Any]:
        found = child(12, "b", "b")
        found["requestObject"] = {"metadata": {"resourceVersion": str(named)}}
        return found

    let_go = site(8, "a", {"shard": "b"}, named=5)
    assert judged(*begun, made, asked, let_go, moved, acts(9)) == ([], [])
    assert judged(*begun, made, asked, let_go, moved, acts(7))[0] == [
        "x-1 at 7, by sharder-1: taken from a, which held its Lease"
    ]


def unanswered(version: int, user: str, changed: dict[str, str | None]) -> dict[str, Any]:
    """A patch of `x-1` that names a version, and that nobody got an answer to."""
    found = child(0, user, "")
    found["responseStatus"] = {"code": 504}
    found["requestObject"] = {"metadata": {"resourceVersion": str(version), "labels": changed}}
    found["responseObject"] = {"message": "context canceled"}
    return found


@pytest.mark.parametrize("of_the_first", [4, 7])
def test_of_several_lost_writes_those_count_that_explain_the_next_one(of_the_first: int) -> None:
    """An instance is killed while it writes, and the sharder while it moves. If the instance wrote,
    the sharder's patch names what it made; else both name the same version."""
    begun = (held(1, "b"), site(3, "admin", {"shard": "a"}, named=0))
    made = child(4, "a", "a", verb="create")
    wrote = unanswered(4, "a", {})
    moved = unanswered(of_the_first, "sharder-1", {SHARD: "b", DRAIN: None})
    acts = child(12, "b", "b")
    acts["requestObject"] = {"metadata": {"resourceVersion": "9"}}
    site_moved = site(6, "sharder-1", {"shard": "b"}, named=3)
    for entries in ((moved, wrote), (wrote, moved)):
        assert judged(*begun, made, *entries, site_moved, acts) == ([], [])
    # One that cannot have moved it explains nothing.
    assert judged(*begun, made, wrote, site_moved, acts)[0] == [
        "x-1 at 12, by b: it belonged to a",
        "x-1 at 12, by b: let go without being asked",
    ]


def test_a_version_that_is_known_to_be_made_otherwise_was_not_made_by_a_lost_write() -> None:
    """The answer to a patch that changes nothing may be logged before that to the last change."""
    begun = (held(1, "a"), site(3, "admin", {"shard": "a"}, named=0))
    lost = site(0, "a", {}, named=3, code=504)
    moved = site(6, "sharder-1", {"shard": "b"}, named=3)
    taken = {**held(5, "a"), "user": {"username": "sharder-1"}}
    taken["responseObject"]["spec"] = {"holderIdentity": "shardlease-controller"}
    nothing = site(6, "b", {"shard": "b"}, named=6)
    for entries in ((nothing, moved), (moved, nothing)):
        assert judge_audit([*begun, lost, taken, *entries], "ab").wrong == []
    # Without the sharder's move, the instance writes to an object of another one.
    assert judge_audit([*begun, lost, taken, nothing], "ab").wrong
