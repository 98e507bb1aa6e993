"""Who is blamed for the death of an owner, and what follows (DX-20, DX-24)."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace
from plan_lab import C, D, serving

from domicile.core.ids import EntityKey
from domicile.core.placement.model import RoleInput
from domicile.core.placement.suspicion import (
    LONGEST_PAUSE_S,
    blames_needed,
    faded,
    judge,
    on_the_brink,
    pause_s,
    tried_again,
)
from domicile.core.state.shardmap import INNOCENT, MOST_BARRED, Entry, Suspicion
from domicile.settings import Settings

MINE = EntityKey("t", "mine")
SETTINGS = Settings()
NEVER_NAMED: dict[int, EntityKey | None] = {}


def suspect(*suspicion: object) -> Entry:
    """A shard of a dead owner."""
    return replace(serving(D, 7), **dict(zip(Suspicion._fields, suspicion, strict=False)))


def verdict(
    entry: Entry,
    named: dict[int, EntityKey | None] = NEVER_NAMED,
    recent: int | None = None,
    settings: Settings = SETTINGS,
) -> Suspicion:
    """What speaks against one shard after its owner's death, if it gets a home."""
    deaths = entry.deaths if recent is None else recent
    part = RoleInput((entry,), recent_deaths={0: deaths} if deaths else {}, named=named)
    homes, away = judge(part, [0], settings)
    assert away == {}
    return homes[0]


def test_a_death_alone_counts_and_blames_nobody() -> None:
    entry = suspect()
    for deaths in range(1, 20):
        found = verdict(entry)
        assert found == Suspicion(deaths)
        entry = suspect(*found)
    assert not on_the_brink(entry, SETTINGS.poison_deaths)


def test_the_third_death_puts_the_entity_away_that_was_on_trial_alone() -> None:
    first = verdict(suspect())
    second = verdict(suspect(*first), {0: None})
    assert second == Suspicion(2, 1)
    assert on_the_brink(suspect(*second), SETTINGS.poison_deaths)
    third = verdict(suspect(*second), {0: MINE})
    assert third == Suspicion(3, 0, 1, (MINE,))


def test_a_death_without_a_trial_clears_of_earlier_blame() -> None:
    assert verdict(suspect(2, 1)) == Suspicion(3, 0)
    assert verdict(suspect(3, 0), {0: MINE}) == Suspicion(4, 1)


def test_several_on_trial_are_all_kept_on_the_brink() -> None:
    assert verdict(suspect(2, 1), {0: None}) == Suspicion(3, 1)


def test_what_dies_together_says_less() -> None:
    named: dict[int, EntityKey | None] = {0: MINE, 1: MINE}
    entries = (suspect(2, 1), replace(serving(C, 7), deaths=2, blamed=1))
    part = RoleInput(entries, recent_deaths={0: 2, 1: 2}, named=named)
    homes, away = judge(part, [0, 1], SETTINGS)
    assert (homes, away) == ({0: Suspicion(3, 1), 1: Suspicion(3, 1)}, {})
    entries = (suspect(5, 1), entries[1])
    part = RoleInput(entries, recent_deaths={0: 5, 1: 2}, named=named)
    homes, _ = judge(part, [0, 1], SETTINGS)
    assert homes[0] == Suspicion(6, 0, 1, (MINE,))


@pytest.mark.parametrize(
    ("barred", "named"),
    [
        (tuple(EntityKey("t", str(n)) for n in range(MOST_BARRED)), MINE),
        ((), EntityKey("t", "")),
    ],
)
def test_the_whole_shard_is_put_away_if_the_entity_can_not_be(
    barred: tuple[EntityKey, ...], named: EntityKey
) -> None:
    part = RoleInput((suspect(2, 1, 3, barred),), recent_deaths={0: 2}, named={0: named})
    homes, away = judge(part, [0], SETTINGS)
    assert (homes, away) == ({}, {0: Suspicion(3, 0, 4, barred)})


def test_what_is_tried_again_is_put_away_at_the_next_blame() -> None:
    again = tried_again(Suspicion(3, 0, 2, (MINE,)), SETTINGS.poison_deaths)
    assert again.barred == ()
    assert on_the_brink(suspect(*again), SETTINGS.poison_deaths)
    assert verdict(suspect(*again), {0: MINE}) == Suspicion(4, 0, 3, (MINE,))


def test_deaths_of_long_ago_do_not_count() -> None:
    assert verdict(suspect(2, 1, 1), {0: MINE}, recent=0) == Suspicion(1, 1)
    assert faded(Suspicion(3, 1, 2), 0) == INNOCENT
    assert faded(Suspicion(3, 0, 2, (MINE,)), 0) == Suspicion(0, 0, 2, (MINE,))


@pytest.mark.parametrize(("poison_deaths", "deaths"), [(1, 2), (2, 2), (3, 3), (5, 5)])
def test_how_many_deaths_are_too_many_is_a_setting(poison_deaths: int, deaths: int) -> None:
    """The first death can blame nobody, because nothing was on trial."""
    settings = Settings(poison_deaths=poison_deaths)
    found = verdict(suspect(), settings=settings)
    count = 1
    while not found.barred:
        entry = suspect(*found)
        alone = on_the_brink(entry, poison_deaths)
        found = verdict(entry, {0: MINE if alone else None}, settings=settings)
        count += 1
    assert count == found.deaths == deaths


def test_pauses_grow_up_to_a_limit() -> None:
    pauses = [pause_s(tries) for tries in range(12)]
    assert pauses[:5] == [10, 10, 20, 40, 80]
    assert pauses[-1] == pause_s(10**6) == LONGEST_PAUSE_S


@given(
    poison_deaths=st.integers(1, 6),
    deaths=st.lists(st.sampled_from(("unnamed", "crowd", "alone")), max_size=30),
)
def test_nobody_is_put_away_without_enough_blame_in_a_row(
    poison_deaths: int, deaths: list[str]
) -> None:
    settings = Settings(poison_deaths=poison_deaths)
    entry, row = suspect(), 0
    for how in deaths:
        if how == "unnamed":
            found, row = verdict(entry, settings=settings), 0
        else:
            alone = how == "alone" and on_the_brink(entry, poison_deaths)
            found = verdict(entry, {0: MINE if alone else None}, settings=settings)
            row += 1
        if found.barred:
            assert how == "alone"
            assert row >= blames_needed(poison_deaths)
            assert found.deaths >= poison_deaths
            found, row = INNOCENT, 0
        entry = suspect(*found)
