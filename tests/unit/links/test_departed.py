"""Who is gone is remembered in little room (I1b, I6)."""

from __future__ import annotations

import sys
from random import Random

from hypothesis import given
from hypothesis import strategies as st

from domicile.core.ids import Incarnation, new_incarnation
from domicile.links.departed import MOST_GONE, DepartedPeers

NAMES = st.integers(0, 40).map(lambda number: Incarnation(f"{number:032x}"))


@given(st.lists(NAMES), st.integers(1, 20))
def test_the_last_half_is_always_remembered_and_nobody_who_never_was_here(
    names: list[Incarnation], most: int
) -> None:
    gone = DepartedPeers(most)
    order: dict[Incarnation, None] = {}
    for name in names:
        if name not in gone:
            order.pop(name, None)
            order[name] = None
        gone.add(name)
        assert name in gone
    last = list(order)
    assert all(name in gone for name in last[-max(1, most // 2) :])
    assert sum(name in gone for name in last) <= max(2, most)
    assert not any(Incarnation(f"{number:032x}") in gone for number in range(41, 60))


def test_of_many_visitors_nothing_is_kept_but_a_number_each() -> None:
    random, gone = Random(1), DepartedPeers()
    before = sys.getallocatedblocks()
    for _ in range(2 * MOST_GONE + 10):
        last = new_incarnation(random)
        gone.add(last)
    assert sys.getallocatedblocks() - before < 200
    assert len(gone._newer) + len(gone._older) <= MOST_GONE
    assert last in gone
