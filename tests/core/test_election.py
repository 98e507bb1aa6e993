"""Who campaigns when (C1)."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from domicile.core.election import campaign_at, eligible, rank, sees_off
from domicile.core.ids import Incarnation
from domicile.core.records import NodeRecord

A, B, C = Incarnation("a"), Incarnation("b"), Incarnation("c")


def record(status: str = "up", candidate: bool = True) -> NodeRecord:
    return NodeRecord("n", A, "x:1", ("r",), (), 6.0, candidate=candidate, status=status)


def test_rank_follows_the_create_revision_not_the_name() -> None:
    assert [rank(node, {A: 9, B: 3, C: 5}) for node in (A, B, C)] == [2, 0, 1]


def test_each_rank_waits_for_the_one_before() -> None:
    candidates = {A: 9, B: 3}
    assert campaign_at(B, candidates, 10.0) == 10.0
    assert campaign_at(A, candidates, 10.0) == pytest.approx(10.2)


def test_no_campaign_while_there_is_a_leader_nor_by_others() -> None:
    assert campaign_at(A, {A: 1}, None) is None
    assert campaign_at(C, {A: 1}, 10.0) is None


def test_who_is_eligible() -> None:
    assert eligible(record())
    assert not eligible(record(status="leaving"))
    assert not eligible(record(status="evicted"))
    assert not eligible(record(candidate=False))


@given(st.dictionaries(st.text("abcdef", min_size=1), st.integers(1, 4), min_size=1))
def test_ranks_are_a_permutation(revisions: dict[str, int]) -> None:
    candidates = {Incarnation(name): created for name, created in revisions.items()}
    ranks = sorted(rank(node, candidates) or 0 for node in candidates)
    assert ranks == list(range(len(candidates)))


def test_a_leaving_node_may_lead_only_where_that_is_no_matter() -> None:
    assert eligible(record(status="leaving"), leaving=True)
    assert not eligible(record(status="evicted"), leaving=True)
    assert not eligible(record(status="leaving", candidate=False), leaving=True)


def together(**statuses: str) -> dict[Incarnation, tuple[NodeRecord, int]]:
    """Nodes by name; a status in capital letters is that of one that never leads."""
    return {
        Incarnation(name): (record(status.lower(), candidate=status.islower()), created)
        for created, (name, status) in enumerate(statuses.items(), 1)
    }


def test_who_leads_and_leaves_sees_others_off_if_nobody_stays_who_could() -> None:
    nodes = together(a="leaving", b="LEAVING", c="UP")
    assert sees_off(A, nodes, "", leads=True, absent=False)
    assert not sees_off(A, together(a="leaving", b="LEAVING", c="up"), "", leads=True, absent=False)
    assert not sees_off(A, together(a="leaving"), "", leads=True, absent=False)


def test_who_has_another_role_than_the_one_that_leads_does_not_count() -> None:
    nodes = together(a="leaving", b="up")
    assert not sees_off(A, nodes, "r", leads=True, absent=False)
    assert sees_off(A, nodes, "other", leads=True, absent=False)


def test_while_nobody_leads_the_first_of_those_who_could_sees_others_off() -> None:
    nodes = together(c="LEAVING", b="leaving", a="leaving")
    found = {node: sees_off(node, nodes, "", leads=False, absent=True) for node in (A, B, C)}
    assert found == {A: False, B: True, C: False}
    assert not sees_off(B, nodes, "", leads=False, absent=False), "somebody else leads"


@given(
    st.dictionaries(
        st.sampled_from("abcdef"),
        st.sampled_from(["up", "leaving", "evicted", "UP", "LEAVING"]),
        min_size=2,
    ),
    st.data(),
)
def test_one_of_those_who_leave_sees_the_others_off(
    statuses: dict[str, str], data: st.DataObject
) -> None:
    """As far as they see the same: whoever stays if one can, else one of them."""
    nodes = together(**statuses)
    able = [name for name, status in statuses.items() if status in ("up", "leaving")]
    leader = data.draw(st.sampled_from([*able, ""]))
    last = [
        name
        for name, status in statuses.items()
        if status.lower() == "leaving"
        and sees_off(Incarnation(name), nodes, "", leads=name == leader, absent=not leader)
    ]
    stays = any(status == "up" for status in statuses.values())
    assert len(last) == (0 if stays or not able else 1)
