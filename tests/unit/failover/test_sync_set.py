"""Write quorums: at every step an election reads each acknowledged write (F12)."""

from __future__ import annotations

from collections.abc import Callable
from itertools import chain, combinations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from domicile.failover.records import MAX_QUORUMS, WriteQuorum
from domicile.failover.sync_set import (
    InUse,
    SyncMove,
    SyncStep,
    holds,
    next_step,
    unmet,
    wanted_quorum,
)

STANDBYS = ("a", "b", "c")
EVERY_SET = tuple(
    chain.from_iterable(combinations(STANDBYS, size) for size in range(1, len(STANDBYS) + 1))
)
EVERY_QUORUM = tuple(
    WriteQuorum("p", members, count)
    for members in EVERY_SET
    for count in range(1, len(members) + 1)
)
AB, ABC, C = WriteQuorum("p", ("a", "b")), WriteQuorum("p", STANDBYS), WriteQuorum("p", ("c",))

Step = Callable[[tuple[WriteQuorum, ...], InUse, WriteQuorum, dict[str, int]], SyncStep | None]


def test_the_state_lists_then_the_server_uses_then_the_state_drops() -> None:
    acknowledged = {"a": 5, "b": 5, "c": 0}
    step = next_step((AB,), InUse(AB, 0), C, acknowledged)
    assert step == SyncStep(SyncMove.LIST, C, (AB, C))
    step = next_step((AB, C), InUse(AB, 0), C, acknowledged)
    assert step == SyncStep(SyncMove.USE, C, (AB, C))
    assert next_step((AB, C), InUse(C, 5), C, acknowledged) is None, "c has not caught up"
    step = next_step((AB, C), InUse(C, 5), C, {"c": 5})
    assert step == SyncStep(SyncMove.DROP, C, (C,))
    assert next_step((C,), InUse(C, 5), C, {"c": 5}) is None


def test_a_full_list_waits_until_the_quorum_in_use_has_caught_up() -> None:
    listed = tuple(EVERY_QUORUM[:MAX_QUORUMS])
    wanted = EVERY_QUORUM[MAX_QUORUMS]
    in_use = InUse(listed[-1], 3)
    assert next_step(listed, in_use, wanted, {}) is None
    caught_up = dict.fromkeys(STANDBYS, 3)
    step = next_step(listed, in_use, wanted, caught_up)
    assert step == SyncStep(SyncMove.DROP, listed[-1], (listed[-1],))


def test_too_few_followers_keep_the_quorum_so_that_writes_wait() -> None:
    assert wanted_quorum("p", ["b", "a", "a"], 1, None) == AB
    assert wanted_quorum("p", ["a"], 2, ABC) == ABC
    assert wanted_quorum("p", [], 1, None) is None


def test_unmet_quorums_say_what_is_missing() -> None:
    assert unmet([AB], ["p"]) == ()
    assert unmet([AB], ["a", "b"]) == ()
    (one,) = unmet([AB], ["a"])
    assert str(one) == "p + any 1 of (a, b): needs p, or 1 more of its members"
    assert unmet([WriteQuorum("p", STANDBYS, 2)], ["a", "b"]) == ()
    assert len(unmet([AB, C], ["a"])) == 2


def test_nobody_is_needed_where_nothing_can_be_acknowledged() -> None:
    assert unmet([WriteQuorum("p", (), 1)], []) == ()
    assert not holds(WriteQuorum("p", (), 1), 0, {})


class Group:
    """A primary and three standbys; the election may read any set of standbys that suffices."""

    def __init__(self, first: WriteQuorum, step: Step) -> None:
        self.step = step
        self.listed: tuple[WriteQuorum, ...] = (first,)
        self.in_use = InUse(first, 0)
        self.wanted = first
        self.length = self.acknowledged = 0
        self.has = dict.fromkeys(STANDBYS, 0)

    def do(self, what: str, which: int) -> None:
        standby = STANDBYS[which % len(STANDBYS)]
        if what == "write":
            self.length += 1
        elif what == "receive":
            self.has[standby] = min(self.length, self.has[standby] + 1)
        elif what == "acknowledge":
            while self.acknowledged < self.length and holds(
                self.in_use.quorum, self.acknowledged + 1, self.has
            ):
                self.acknowledged += 1
        elif what == "want":
            self.wanted = EVERY_QUORUM[which % len(EVERY_QUORUM)]
        else:
            self.take(self.step(self.listed, self.in_use, self.wanted, dict(self.has)))
        self.judge()

    def take(self, step: SyncStep | None) -> None:
        if step is None:
            return
        if step.move is SyncMove.USE:
            self.in_use = InUse(step.quorum, self.length)
        self.listed = step.listed

    def judge(self) -> None:
        for readers in ((), *EVERY_SET):
            if not unmet(self.listed, readers):
                best = max((self.has[one] for one in readers), default=0)
                assert best >= self.acknowledged, (readers, self.listed, self.in_use, self.has)


ACTIONS = st.lists(
    st.tuples(
        st.sampled_from(("write", "receive", "receive", "acknowledge", "want", "step", "step")),
        st.integers(0, 20),
    ),
    max_size=60,
)


@given(first=st.sampled_from(EVERY_QUORUM), actions=ACTIONS)
@settings(max_examples=300, deadline=None)
def test_no_acknowledged_write_is_ever_outside_what_an_election_reads(
    first: WriteQuorum, actions: list[tuple[str, int]]
) -> None:
    group = Group(first, next_step)
    for what, which in actions:
        group.do(what, which)


@given(first=st.sampled_from(EVERY_QUORUM), wanted=st.sampled_from(EVERY_QUORUM))
def test_a_wanted_quorum_is_reached_once_everybody_catches_up(
    first: WriteQuorum, wanted: WriteQuorum
) -> None:
    group = Group(first, next_step)
    group.do("write", 0)
    group.wanted = wanted
    for _ in range(10):
        for which in range(3):
            group.do("receive", which)
        group.do("step", 0)
    assert group.listed == (wanted,)
    assert group.in_use.quorum == wanted


def server_first(
    listed: tuple[WriteQuorum, ...], in_use: InUse, wanted: WriteQuorum, has: dict[str, int]
) -> SyncStep | None:
    """Broken: the server uses a quorum that the state does not list yet."""
    if wanted != in_use.quorum:
        return SyncStep(SyncMove.USE, wanted, listed)
    return next_step(listed, in_use, wanted, has)


def dropped_early(
    listed: tuple[WriteQuorum, ...], in_use: InUse, wanted: WriteQuorum, has: dict[str, int]
) -> SyncStep | None:
    """Broken: the old quorum goes before the new one has caught up."""
    step = next_step(listed, in_use, wanted, has)
    if step is None and len(listed) > 1:
        return SyncStep(SyncMove.DROP, in_use.quorum, (in_use.quorum,))
    return step


@pytest.mark.parametrize(
    ("broken", "actions"),
    [
        (server_first, ("write", "want", "step", "receive", "acknowledge")),
        (dropped_early, ("write", "receive a", "acknowledge", "want", "step", "step", "step")),
    ],
)
def test_the_wrong_order_loses_a_write(broken: Step, actions: tuple[str, ...]) -> None:
    group = Group(WriteQuorum("p", ("a",)), broken)
    which = {"want": EVERY_QUORUM.index(C), "receive": 2}
    assert loses(group, [(one.split()[0], which.get(one, 0)) for one in actions])


def loses(group: Group, actions: list[tuple[str, int]]) -> bool:
    try:
        for what, which in actions:
            group.do(what, which)
    except AssertionError:
        return True
    return False
