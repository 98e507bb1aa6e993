"""The judge of sharders finds one that acts while another one holds their Lease (KR-13)."""

from __future__ import annotations

from typing import Any

from ring_judge import judge_sharders


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
