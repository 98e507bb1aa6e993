"""When a node that leaves is done with its shards, and when it may take more time (H14)."""

from __future__ import annotations

from itertools import product

import pytest
from plan_lab import moving, serving

from domicile.core.coordinator.departures import may_overstay, unfinished
from domicile.core.handoff.tables import Phase
from domicile.core.ids import NOBODY, Incarnation
from domicile.core.state.shardmap import Entry

ME, NEXT = Incarnation("me"), Incarnation("next")


def keeps(
    entry: Entry,
    phase: Phase = Phase.RELEASED,
    *,
    epoch: int = 1,
    handing_over: bool = False,
    may_place: bool = False,
) -> bool:
    return unfinished(
        entry, ME, phase, epoch, handing_over=handing_over, may_place=lambda: may_place
    )


@pytest.mark.parametrize("phase", Phase)
@pytest.mark.parametrize("entry", [serving(NEXT), moving(NEXT, ME), serving(NOBODY), Entry()])
def test_a_shard_that_the_store_gives_to_others_keeps_nobody(entry: Entry, phase: Phase) -> None:
    assert not keeps(entry, phase, handing_over=True, may_place=True)


@pytest.mark.parametrize("phase", [Phase.OPEN, Phase.DRAINING])
@pytest.mark.parametrize("entry", [serving(ME), moving(ME, NEXT), moving(ME, NOBODY)])
def test_what_is_not_released_keeps_its_owner(entry: Entry, phase: Phase) -> None:
    assert keeps(entry, phase)


def test_an_epoch_that_the_owner_has_not_seen_yet_must_still_be_released() -> None:
    assert keeps(serving(ME, epoch=2), epoch=1)
    assert not keeps(moving(ME, NOBODY, epoch=2), epoch=2)


def test_a_release_that_waits_for_the_next_home_to_take_fields_keeps_its_owner() -> None:
    assert keeps(moving(ME, NEXT), handing_over=True)
    assert keeps(moving(ME, NOBODY), handing_over=True)


def test_a_released_shard_keeps_its_owner_until_its_next_home_is_stored_if_it_can_be() -> None:
    assert keeps(moving(ME, NEXT), may_place=True)
    assert not keeps(moving(ME, NEXT), may_place=False), "nobody can store it"
    assert not keeps(moving(ME, NOBODY), may_place=True), "there is no next home to wait for"


def test_whether_a_shard_can_be_placed_is_asked_only_if_that_decides() -> None:
    def never() -> bool:
        raise AssertionError("looks at every node")

    for entry, phase in [(serving(NEXT), Phase.RELEASED), (serving(ME), Phase.OPEN)]:
        unfinished(entry, ME, phase, 1, handing_over=False, may_place=never)


def test_a_node_takes_more_time_for_what_is_being_emptied_or_can_still_be_decided() -> None:
    found = {
        (draining, unreleased, decides)
        for draining, unreleased, decides in product((False, True), repeat=3)
        if may_overstay(draining=draining, unreleased=unreleased, decides=decides)
    }
    assert found == {
        (True, False, False), (True, False, True), (True, True, False), (True, True, True),
        (False, True, True),
    }  # fmt: skip
