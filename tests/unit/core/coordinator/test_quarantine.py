"""How a leader uses what dead owners had on trial, and how quarantines end (DX-20, DX-24)."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from domicile.core.coordinator.quarantine import OwnerDeaths, named
from domicile.core.ids import NOBODY, EntityKey, Incarnation, ShardKey
from domicile.core.placement.model import PlanInput, RoleInput
from domicile.core.placement.suspicion import pause_s
from domicile.core.state.cluster_view import ClusterView
from domicile.core.state.records import NodeRecord, OnTrial, TrialRecord
from domicile.core.state.shardmap import INNOCENT, Entry, Suspicion
from domicile.settings import Settings

A, B = Incarnation("a"), Incarnation("b")
MINE = EntityKey("t", "mine")
SETTINGS = Settings()


def serving(owner: Incarnation, epoch: int = 1, **more: object) -> Entry:
    return replace(Entry(owner, epoch, "serving", change=epoch), **more)


def on(shard: int, epoch: int = 1, role: str = "r", entity: EntityKey | None = None) -> OnTrial:
    return OnTrial(role, shard, epoch, *(entity or ("", "")))


def test_a_record_names_shards_of_its_owner_and_epoch_only() -> None:
    entries = (serving(A, 3), serving(A, 3), serving(B, 3))
    record = TrialRecord((on(0, 3), on(1, 2), on(2, 3), on(9, 3), on(-1, 3), on(0, 3, "other")))
    assert named({A: record}, "r", entries) == {0: None}


def test_one_entity_is_named_only_if_no_other_was_tried_in_any_role() -> None:
    entries = (serving(A), serving(A))
    alone = TrialRecord((on(1), on(0, entity=MINE)))
    assert named({A: alone}, "r", entries) == {0: MINE, 1: None}
    two = TrialRecord((on(0, entity=MINE), on(0, role="other", entity=EntityKey("t", "x"))))
    assert named({A: two}, "r", entries) == {0: None}
    both = TrialRecord((on(0), on(0, entity=MINE)))
    assert named({A: both}, "r", entries) == {0: MINE}


class Watch:
    """One leadership's clock, with one shard."""

    def __init__(self, entry: Entry) -> None:
        self.deaths, self.view = OwnerDeaths(SETTINGS), ClusterView(follow_entries=False)
        self.entry, self.now = entry, 100.0

    def seen(self) -> RoleInput:
        self.deaths.at = float("inf")
        return self.deaths.added_to(RoleInput((self.entry,)), self.view, "r", self.now)

    def reconsidered(self) -> list[Suspicion]:
        node = NodeRecord("node-a", A, "a:1", ("r",), (), 6.0)
        view = PlanInput(A, {A: node}, {}, (), {"r": self.seen()})
        return [one.suspicion for one in self.deaths.reconsidered(view, ())]


def test_deaths_count_for_a_while_and_are_forgotten_with_the_blame() -> None:
    watch = Watch(serving(A, deaths=2, blamed=1, tries=3))
    assert watch.seen().recent_deaths == {0: 2}
    assert watch.deaths.at == 160.0
    watch.now = 159.9
    assert watch.reconsidered() == []
    watch.entry = replace(watch.entry, epoch=2, deaths=3)
    watch.now = 160.1
    assert watch.seen().recent_deaths == {0: 3}, "another death begins another time"
    watch.now = 220.2
    assert watch.seen().recent_deaths == {}
    assert watch.reconsidered() == [INNOCENT]


@pytest.mark.parametrize("tries", [1, 2, 5])
def test_entities_are_served_again_after_their_pause(tries: int) -> None:
    watch = Watch(serving(A, deaths=3, tries=tries, barred=(MINE,)))
    assert watch.reconsidered() == []
    watch.now += pause_s(tries) - 0.1
    watch.entry = replace(watch.entry, epoch=2)
    assert watch.reconsidered() == [], "and a new owner does not make it longer"
    watch.now += 0.2
    assert watch.reconsidered() == [Suspicion(3, 1, tries)]


def test_a_shard_is_due_after_its_pause_and_an_operator_need_not_wait() -> None:
    watch = Watch(Entry(NOBODY, 4, "quarantined", change=9, deaths=3, tries=1))
    assert watch.seen().due == ()
    watch.now += pause_s(1)
    assert watch.seen().due == (0,)
    watch = Watch(serving(A, deaths=3, tries=4, barred=(MINE,)))
    watch.view.clearances[ShardKey("r", 0)] = True
    assert watch.seen().cleared == (0,)
    assert watch.reconsidered() == [INNOCENT]
