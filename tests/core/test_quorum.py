"""Who stays when members can't reach each other."""

from __future__ import annotations

from itertools import combinations

from hypothesis import given
from hypothesis import strategies as st

from domicile.core.quorum import Claims, evicted, survivors


def sides(*groups: tuple[int, ...]) -> Claims:
    return {one: group for group in groups for one in group}


@st.composite
def claims(draw: st.DrawFn) -> dict[int, tuple[int, ...] | None]:
    members = draw(st.lists(st.integers(1, 20), min_size=1, max_size=7, unique=True))
    said = st.none() | st.lists(st.sampled_from(members), unique=True).map(tuple)
    return {one: draw(said) for one in members}


def reach_each_other(said: Claims, one: int, other: int) -> bool:
    def claimed(a: int, b: int) -> bool:
        words = said[a]
        return words is None or b in words

    return claimed(one, other) and claimed(other, one)


def test_the_larger_side_stays() -> None:
    assert survivors(sides((1, 2), (3, 4, 5))) == (3, 4, 5)
    assert evicted(sides((1, 2), (3, 4, 5))) == (1, 2)


def test_of_equal_sides_the_one_with_the_highest_number_goes() -> None:
    assert survivors(sides((1, 4), (2, 3))) == (2, 3)


def test_a_one_way_fault_costs_the_member_that_has_it() -> None:
    everyone = (1, 2, 3, 4)
    deaf = {1: everyone, 2: everyone, 3: everyone, 4: (4,)}
    assert evicted(deaf) == (4,)
    liar = {1: (1,), 2: everyone, 3: everyone, 4: everyone}
    assert evicted(liar) == (1,)


def test_the_silent_are_taken_at_the_word_of_the_others() -> None:
    assert evicted({1: (1, 2, 3), 2: (1, 2, 3), 3: None}) == ()
    assert evicted({1: (1, 2), 2: (1, 2), 3: None}) == (3,)


def test_a_healthy_cluster_loses_nobody() -> None:
    assert evicted(sides((1, 2, 3, 4, 5))) == ()
    assert survivors({7: ()}) == (7,)


@given(claims())
def test_who_stays_reaches_everyone_who_stays(said: Claims) -> None:
    staying = survivors(said)
    assert staying, "never nobody"
    for one, other in combinations(staying, 2):
        assert reach_each_other(said, one, other)


@given(claims(), st.randoms(use_true_random=False))
def test_everybody_comes_to_the_same_answer(said: Claims, random: object) -> None:
    order = list(said)
    random.shuffle(order)  # type: ignore[attr-defined]
    assert survivors({one: said[one] for one in order}) == survivors(said)


@given(claims())
def test_a_member_that_all_reach_and_that_reaches_all_is_never_the_first_to_go(
    said: Claims,
) -> None:
    perfect = [
        one
        for one in said
        if all(reach_each_other(said, one, other) for other in said if other != one)
    ]
    gone = evicted(said)
    if gone and perfect:
        assert set(perfect) <= set(survivors(said))
