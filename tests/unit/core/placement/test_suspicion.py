"""Who is blamed for the death of an owner, and what follows (DX-20, DX-24)."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace
from plan_lab import C, D, serving

from domicile.core.ids import EntityKey
from domicile.core.placement.model import RoleInput, ShardTrials
from domicile.core.placement.slices import PAUSE, at_once
from domicile.core.placement.suspicion import (
    LONGEST_PAUSE_S,
    always_on_trial,
    blames_needed,
    faded,
    judge,
    loses_owners,
    on_the_brink,
    pause_s,
    rests_between_runs,
    tried_again,
)
from domicile.core.state.shardmap import INNOCENT, MOST_BARRED, MOST_SUSPECTS, Entry, Suspicion
from domicile.settings import Settings

MINE, OTHER = EntityKey("t", "mine"), EntityKey("t", "other")
SETTINGS = Settings()
CROWD = ShardTrials(crowd=True)


def new(*entities: EntityKey) -> ShardTrials:
    """Entities that had just begun to run, beside each other."""
    return ShardTrials(entities)


def alone(entity: EntityKey = MINE) -> ShardTrials:
    """An entity that was tried alone."""
    return ShardTrials((entity,), alone=entity)


def long(*entities: EntityKey) -> ShardTrials:
    """Entities that had run for a while."""
    return ShardTrials(long=entities)


def suspect(*suspicion: object) -> Entry:
    """A shard of a dead owner."""
    return replace(serving(D, 7), **dict(zip(Suspicion._fields, suspicion, strict=False)))


def test_many_shards_are_judged_in_slices() -> None:
    part = RoleInput((serving(D, 7),) * 20_000)
    slices = list(judge(part, range(20_000), SETTINGS))
    assert len(slices) >= 20_000 // PAUSE


def verdict(
    entry: Entry,
    named: ShardTrials | None = None,
    recent: int | None = None,
    settings: Settings = SETTINGS,
) -> Suspicion:
    """What speaks against one shard after its owner's death, if it gets a home."""
    deaths = entry.deaths if recent is None else recent
    part = RoleInput(
        (entry,),
        recent_deaths={0: deaths} if deaths else {},
        named={} if named is None else {0: named},
    )
    homes, away = at_once(judge(part, [0], settings))
    assert away == {}
    return homes[0]


def after(*deaths: ShardTrials | None) -> Suspicion:
    """What speaks against a shard after some deaths in a row."""
    found = INNOCENT
    for trials in deaths:
        found = verdict(suspect(*found), trials)
    return found


def brink(suspicion: Suspicion, entity: EntityKey = MINE) -> bool:
    return on_the_brink(suspect(*suspicion), entity, SETTINGS.poison_deaths)


def test_a_death_alone_counts_and_blames_nobody() -> None:
    for deaths in range(1, 20):
        found = after(*[None] * deaths)
        assert found == Suspicion(deaths)
        assert not brink(found)


def test_the_third_death_puts_the_entity_away_that_had_just_begun_at_the_second_too() -> None:
    assert not brink(after(None))
    second = after(None, new(MINE, OTHER))
    assert second == Suspicion(2, 1, suspects=(MINE, OTHER))
    assert brink(second)
    assert not brink(second, EntityKey("t", "third")), "it did not run at the second death"
    assert after(None, new(MINE, OTHER), alone()) == Suspicion(3, 0, 1, (MINE,))


def test_one_trial_alone_is_a_coincidence() -> None:
    """An unrelated crash may come in the moment of any trial, also soon after another."""
    third = after(None, new(OTHER), alone())
    assert third == Suspicion(3, 2, suspects=(MINE,))
    assert after(None, new(OTHER), alone(), None) == Suspicion(4)
    assert after(None, new(OTHER), alone(), alone()) == Suspicion(4, 0, 1, (MINE,))


def test_a_crowd_is_tried_one_at_a_time_and_that_costs_one_more_death() -> None:
    second = after(None, CROWD)
    assert second == Suspicion(2, 1)
    assert brink(second), "any of its entities"
    assert after(None, CROWD, alone()) == Suspicion(3, 2, suspects=(MINE,))
    assert after(None, CROWD, alone(), alone()) == Suspicion(4, 0, 1, (MINE,))
    many = [EntityKey("t", str(number)) for number in range(MOST_SUSPECTS + 1)]
    assert after(None, new(*many)) == Suspicion(2, 1)
    assert after(None, new(*many[1:])).suspects == tuple(many[1:])


def test_a_crowd_acquits_nobody() -> None:
    assert after(None, new(MINE), CROWD).suspects == (MINE,)
    assert after(None, new(MINE), ShardTrials((OTHER,), crowd=True)).suspects == (MINE,)


def test_who_did_not_run_again_is_no_suspect() -> None:
    assert after(None, new(MINE, OTHER), new(OTHER)).suspects == (OTHER,)
    assert after(None, new(MINE), new(OTHER)).suspects == (OTHER,)
    assert after(None, new(MINE), long(OTHER)).suspects == ()


def test_a_death_without_a_trial_clears_of_earlier_blame() -> None:
    assert after(None, new(MINE), None) == Suspicion(3)
    assert after(None, new(MINE), None, alone()) == Suspicion(4, 1, suspects=(MINE,))


def test_several_on_trial_are_all_kept_on_the_brink() -> None:
    found = after(None, new(MINE, OTHER), new(MINE, OTHER))
    assert found == Suspicion(3, 2, suspects=(MINE, OTHER))
    assert brink(found)


# what runs for long


def test_three_deaths_do_not_put_away_what_runs_for_long() -> None:
    """It may be innocent and run at every crash; nor is it a suspect when it begins again."""
    assert after(None, long(MINE), long(MINE)) == Suspicion(3, 2)
    assert after(None, long(MINE), alone()) == Suspicion(3, 2, suspects=(MINE,))
    assert after(None, alone(), long(MINE)) == Suspicion(3, 2)


def test_twice_as_many_deaths_put_away_what_alone_runs_for_long() -> None:
    assert after(None, *[long(MINE)] * 3) == Suspicion(4, 3)
    assert after(None, *[long(MINE)] * 4) == Suspicion(5, 4, suspects=(MINE,))
    assert after(None, *[long(MINE)] * 5) == Suspicion(6, 0, 1, (MINE,))
    assert after(None, *[long(MINE, OTHER)] * 5) == Suspicion(6, 5, suspects=(MINE, OTHER))
    assert after(None, *[long(MINE, OTHER)] * 4, long(MINE)).barred == (MINE,)
    assert after(None, *[long(OTHER)] * 4, long(MINE)).barred == (), "it did not run before"
    beside = ShardTrials((OTHER,), (MINE,))
    assert after(None, *[long(MINE)] * 4, beside).barred == ()
    hidden = ShardTrials((), (MINE,), crowd=True)
    assert after(None, *[long(MINE)] * 4, hidden).barred == ()


@pytest.mark.parametrize(
    ("other", "against", "barred"),
    [
        (long(OTHER), (5, 4), ()),
        (long(OTHER), (5, 2), (MINE,)),
        (alone(OTHER), (2, 0), ()),
        (new(OTHER), (5, 4), (MINE,)),
        (CROWD, (5, 4), (MINE,)),
    ],
)
def test_two_shards_of_one_owner_with_as_much_against_them_hide_each_other(
    other: ShardTrials, against: tuple[int, int], barred: tuple[EntityKey, ...]
) -> None:
    entries = (suspect(5, 4, 0, (), (MINE,)), suspect(*against, 0, (), (OTHER,)))
    recent = {0: 5, 1: against[0]}
    part = RoleInput(entries, recent_deaths=recent, named={0: long(MINE), 1: other})
    homes, _ = at_once(judge(part, [0, 1], SETTINGS))
    assert homes[0].barred == barred


def test_what_runs_beside_a_lasting_suspect_does_not_hide_it_if_it_is_no_suspect() -> None:
    assert after(None, *[long(MINE)] * 4, long(MINE, OTHER)).barred == (MINE,)


def test_an_entity_that_serves_and_then_kills_needs_six_deaths_and_after_a_quarantine_one() -> None:
    """The first two deaths name nobody: only first runs were on trial."""
    assert after(None, None, *[long(MINE)] * 3) == Suspicion(5, 3, suspects=(MINE,))
    assert after(None, None, *[long(MINE)] * 4) == Suspicion(6, 0, 1, (MINE,))
    assert after(None, None, long(MINE), None, *[long(MINE)] * 3).barred == (), "not in a row"
    assert after(None, None, *[long(MINE)] * 3, new(MINE)).barred == (), "beside others, perhaps"
    again = tried_again(Suspicion(6, 0, 1, (MINE,)), SETTINGS.poison_deaths)
    assert verdict(suspect(*again), long(OTHER)).barred == ()
    assert verdict(suspect(*again), long(MINE)) == Suspicion(4, 0, 2, (MINE,))


def test_first_runs_and_later_ones_count_together() -> None:
    assert after(None, None, long(MINE), long(MINE), long(MINE), alone()).barred == (MINE,)
    assert after(None, None, long(MINE), alone(), alone()).barred == (MINE,)
    assert after(None, None, long(MINE), alone(), long(MINE)) == Suspicion(5, 3, suspects=(MINE,))


@pytest.mark.parametrize(("poison_deaths", "deaths"), [(1, 2), (2, 2), (3, 2), (5, 4)])
def test_every_run_is_on_trial_after_the_second_death(poison_deaths: int, deaths: int) -> None:
    assert not always_on_trial(suspect(deaths - 1), poison_deaths)
    assert always_on_trial(suspect(deaths), poison_deaths)


def test_entities_rest_between_their_runs_after_the_third_death() -> None:
    most = SETTINGS.poison_deaths
    assert not rests_between_runs(suspect(2, 1), MINE, most)
    assert not rests_between_runs(suspect(3, 0), MINE, most), "the last death named nobody"
    assert rests_between_runs(suspect(3, 1), MINE, most)
    assert rests_between_runs(suspect(5, 3, 0, (), (OTHER,)), MINE, most)
    again = suspect(*tried_again(Suspicion(6, 0, 1, (MINE,)), most))
    assert rests_between_runs(again, MINE, most)
    assert not rests_between_runs(again, OTHER, most), "only what was put away"


# the rest


def test_what_dies_together_says_less() -> None:
    named = {0: alone(), 1: alone()}
    both = (suspect(2, 1, 0, (), (MINE,)), replace(serving(C, 7), deaths=2, blamed=1))
    part = RoleInput(both, recent_deaths={0: 2, 1: 2}, named=named)
    homes, away = at_once(judge(part, [0, 1], SETTINGS))
    kept = Suspicion(3, 2, suspects=(MINE,))
    assert (homes, away) == ({0: kept, 1: kept}, {})
    entries = (suspect(5, 1, 0, (), (MINE,)), both[1])
    part = RoleInput(entries, recent_deaths={0: 5, 1: 2}, named=named)
    homes, _ = at_once(judge(part, [0, 1], SETTINGS))
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
    entry = suspect(2, 1, 3, barred, (named,))
    part = RoleInput((entry,), recent_deaths={0: 2}, named={0: alone(named)})
    homes, away = at_once(judge(part, [0], SETTINGS))
    assert (homes, away) == ({}, {0: Suspicion(3, 0, 4, barred, (named,))})
    again = tried_again(away[0], SETTINGS.poison_deaths)
    assert again == Suspicion(3, 1, 4, suspects=(named, *barred)[:MOST_SUSPECTS])


def test_what_is_tried_again_is_put_away_at_the_next_blame_but_nothing_else_is() -> None:
    again = tried_again(Suspicion(3, 0, 2, (MINE,)), SETTINGS.poison_deaths)
    assert again == Suspicion(3, 1, 2, suspects=(MINE,))
    assert brink(again)
    assert not brink(again, OTHER)
    assert verdict(suspect(*again), alone()) == Suspicion(4, 0, 3, (MINE,))
    assert verdict(suspect(*again), new(OTHER)) == Suspicion(4, 2, 2, suspects=(OTHER,))


def test_a_shard_that_loses_owners_is_told_of_until_something_is_put_away() -> None:
    assert [loses_owners(suspect(deaths)) for deaths in range(5)] == [False] * 3 + [True] * 2
    assert not loses_owners(suspect(4, 0, 1, (MINE,)))
    assert not loses_owners(replace(suspect(3), state="quarantined"))


def test_deaths_of_long_ago_do_not_count() -> None:
    old = suspect(2, 1, 1, (), (MINE,))
    assert verdict(old, alone(), recent=0) == Suspicion(1, 1, suspects=(MINE,))
    assert faded(Suspicion(3, 1, 2, (), (MINE,)), 0) == INNOCENT
    assert faded(Suspicion(3, 0, 2, (MINE,)), 0) == Suspicion(0, 0, 2, (MINE,))


@pytest.mark.parametrize(("poison_deaths", "deaths"), [(1, 2), (2, 2), (3, 3), (5, 5)])
@pytest.mark.parametrize("hidden", [False, True])
def test_how_many_deaths_are_too_many_is_a_setting(
    poison_deaths: int, deaths: int, hidden: bool
) -> None:
    """The first death can blame nobody, because nothing was on trial. If many others run beside
    the culprit until it is tried alone, one more death is needed."""
    settings = Settings(poison_deaths=poison_deaths)
    found = verdict(suspect(), settings=settings)
    count = 1
    while not found.barred:
        entry = suspect(*found)
        beside = CROWD if hidden else new(MINE, OTHER)
        trials = alone() if on_the_brink(entry, MINE, poison_deaths) else beside
        found = verdict(entry, trials, settings=settings)
        count += 1
    assert count == found.deaths == deaths + (hidden and poison_deaths > 2)
    assert found.barred == (MINE,)


def test_pauses_grow_up_to_a_limit() -> None:
    pauses = [pause_s(tries) for tries in range(12)]
    assert pauses[:5] == [10, 10, 20, 40, 80]
    assert pauses[-1] == pause_s(10**6) == LONGEST_PAUSE_S


HOW = ("unnamed", "crowd", "mine", "both", "long", "other")


@given(poison_deaths=st.integers(1, 6), deaths=st.lists(st.sampled_from(HOW), max_size=30))
def test_nobody_is_put_away_without_enough_blame_in_a_row(
    poison_deaths: int, deaths: list[str]
) -> None:
    settings = Settings(poison_deaths=poison_deaths)
    found = INNOCENT
    row: list[tuple[str, Suspicion]] = []
    for how in deaths:
        entry = suspect(*found)
        trials = {
            "unnamed": None, "crowd": CROWD, "long": long(MINE), "both": new(MINE, OTHER),
            "mine": new(MINE), "other": new(OTHER),
        }[how]  # fmt: skip
        if how == "mine" and on_the_brink(entry, MINE, poison_deaths):
            trials = alone()
        row = [] if how == "unnamed" else [*row, (how, found)]
        found = verdict(entry, trials, settings=settings)
        if not found.barred:
            continue
        assert found.barred == (MINE,)
        assert found.deaths >= poison_deaths
        needed = blames_needed(poison_deaths)
        if how == "long":
            assert len(row) >= 2 * needed
            assert found.deaths >= 2 * poison_deaths
        else:
            assert how == "mine"
            assert len(row) >= needed
            named = [one for one, _ in row[:-1] if one != "crowd"]
            assert needed == 1 or named[-1] in ("mine", "both"), "at the death before, too"
        found, row = INNOCENT, []
