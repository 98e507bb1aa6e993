"""Who of those that leave stays until the others have let go (H14)."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from plan_lab import moving, serving

from domicile.core.coordinator.departures import TOGETHER_S, must_stay
from domicile.core.ids import NOBODY, Incarnation, ShardKey
from domicile.core.state.cluster_view import ClusterView
from domicile.core.state.records import LeaderRecord, NodeRecord
from domicile.core.state.shardmap import Entry

A, B, C = (Incarnation(name) for name in "abc")
SINCE = 10.0
LATER = SINCE + TOGETHER_S


def members(leader: str = "a", *entries: Entry, **statuses: str) -> ClusterView:
    """Nodes by name; a status in capital letters is that of one that never leads."""
    found = ClusterView()
    for name, status in statuses.items():
        inc = Incarnation(name)
        found.nodes[inc] = NodeRecord(
            f"node-{name}", inc, f"{name}:1", ("r",), (), 6.0, status.islower(), 1.0, "",
            status.lower(),
        )  # fmt: skip
    if leader:
        found.leader = LeaderRecord(Incarnation(leader), f"node-{leader}")
    for number, entry in enumerate(entries):
        found.map.merge(ShardKey("r", number), entry)
    return found


def stays(
    seen: ClusterView,
    me: Incarnation = A,
    *,
    leads: bool = True,
    now: float = LATER,
    role: str = "",
) -> bool:
    return must_stay(seen, me, role, leads=leads, since=SINCE, now=now)


def test_the_last_that_could_lead_stays_while_others_that_leave_have_shards() -> None:
    assert stays(members("a", serving(B), a="leaving", b="LEAVING"))
    assert stays(members("a", moving(B, C), a="leaving", b="LEAVING", c="UP"))
    assert not stays(members("a", serving(C), a="leaving", b="LEAVING", c="UP"))
    assert not stays(members("a", serving(A), a="leaving", b="LEAVING")), "its own do not count"


def test_what_goes_to_nobody_needs_no_further_word() -> None:
    assert not stays(members("a", moving(B, NOBODY), a="leaving", b="LEAVING"))
    assert stays(members("a", moving(B, NOBODY), serving(B), a="leaving", b="LEAVING"))


@pytest.mark.parametrize(("role", "found"), [("", False), ("r", False), ("other", True)])
def test_it_goes_if_somebody_stays_who_could_lead(role: str, found: bool) -> None:
    seen = members("a", serving(B), a="leaving", b="LEAVING", c="up")
    assert stays(seen, role=role) is found


def test_for_a_moment_it_waits_for_those_who_may_be_about_to_say_that_they_leave() -> None:
    seen = members("a", serving(B), a="leaving", b="UP")
    assert stays(seen, now=SINCE + 0.9 * TOGETHER_S)
    assert not stays(seen, now=LATER)
    alone = members("a", serving(A), a="leaving")
    assert not stays(alone, now=SINCE), "there is nobody to wait for"


def test_it_is_for_whoever_leads() -> None:
    seen = members("b", serving(C), a="leaving", b="leaving", c="LEAVING")
    assert not stays(seen, A, leads=False)
    assert stays(seen, B)
    assert stays(seen, A, leads=False, now=SINCE), "it may have decided to go before it knew of A"
    assert not stays(seen, C, leads=False, now=SINCE)
    assert stays(seen, B, leads=False), "it has just won"


def test_while_nobody_leads_all_who_could_stay() -> None:
    seen = members("", serving(C), a="leaving", b="leaving", c="LEAVING")
    assert [stays(seen, one, leads=False) for one in (A, B, C)] == [True, True, False]


def test_who_is_not_listed_goes() -> None:
    assert not stays(members("", serving(B), b="LEAVING"), leads=False)


@given(
    st.dictionaries(
        st.sampled_from("abcdef"), st.sampled_from(["up", "leaving", "evicted", "UP", "LEAVING"])
    ),
    st.lists(st.sampled_from("abcdef"), max_size=6),
    st.data(),
)
def test_somebody_sees_off_whoever_waits(
    statuses: dict[str, str], homes: list[str], data: st.DataObject
) -> None:
    """If they see the same: one who could lead stays as long as another that leaves has shards."""
    able = [name for name, status in statuses.items() if status in ("up", "leaving")]
    leader = data.draw(st.sampled_from([*able, ""]))
    seen = members(leader, *[serving(Incarnation(home)) for home in homes], **statuses)
    last = [
        name
        for name, status in statuses.items()
        if status.lower() == "leaving" and stays(seen, Incarnation(name), leads=name == leader)
    ]
    leavers = [home for home in homes if statuses.get(home, "").lower() == "leaving"]
    if any(status == "up" for status in statuses.values()):
        assert last == []
    elif leader:
        assert last == ([leader] if any(home != leader for home in leavers) else [])
    else:
        assert last == [
            name
            for name, status in statuses.items()
            if status == "leaving" and any(home != name for home in leavers)
        ]
