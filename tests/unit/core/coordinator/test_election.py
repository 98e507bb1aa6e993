"""Who campaigns when (C1)."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from domicile.core.coordinator.election import campaign_at, eligible, rank
from domicile.core.ids import Incarnation
from domicile.core.state.records import NodeRecord

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
