"""How a leader uses what dead owners had on trial, and how quarantines end (DX-20, DX-24)."""

from __future__ import annotations

from typing import Literal

import pytest
from msgspec.structs import replace

from domicile.core.coordinator.quarantine import OwnerDeaths, named
from domicile.core.ids import NOBODY, EntityKey, Incarnation, ShardKey
from domicile.core.placement.model import PlanInput, RoleInput, ShardTrials
from domicile.core.placement.suspicion import pause_s
from domicile.core.state.cluster_view import ClusterView
from domicile.core.state.records import NodeRecord, OnTrial, TrialRecord
from domicile.core.state.shardmap import INNOCENT, Entry, Suspicion
from domicile.settings import Settings

A, B = Incarnation("a"), Incarnation("b")
MINE, OTHER = EntityKey("t", "mine"), EntityKey("t", "other")
SETTINGS = Settings()


def serving(owner: Incarnation, epoch: int = 1, **more: object) -> Entry:
    return replace(Entry(owner, epoch, "serving", change=epoch), **more)


def on(
    shard: int,
    epoch: int = 1,
    role: str = "r",
    entity: EntityKey | None = None,
    manner: Literal["", "alone", "long"] = "",
) -> OnTrial:
    return OnTrial(role, shard, epoch, *(entity or ("", "")), manner)


def test_a_record_names_shards_of_its_owner_and_epoch_only() -> None:
    entries = (serving(A, 3), serving(A, 3), serving(B, 3))
    record = TrialRecord((on(0, 3), on(1, 2), on(2, 3), on(9, 3), on(-1, 3), on(0, 3, "other")))
    assert named({A: record}, "r", entries) == {0: ShardTrials(crowd=True)}


def test_an_entity_is_alone_only_if_no_other_was_tried_so_in_any_role() -> None:
    entries = (serving(A), serving(A))
    mine = on(0, entity=MINE, manner="alone")
    alone = ShardTrials((MINE,), alone=MINE)
    found = named({A: TrialRecord((on(1), on(1, entity=OTHER), mine))}, "r", entries)
    assert found == {0: alone, 1: ShardTrials((OTHER,), crowd=True)}
    two = TrialRecord((mine, on(0, role="other", entity=OTHER, manner="alone")))
    assert named({A: two}, "r", entries) == {0: ShardTrials((MINE,))}
    assert named({A: TrialRecord((on(0), mine))}, "r", entries) == {0: alone._replace(crowd=True)}


def test_what_runs_for_long_is_told_apart() -> None:
    mine = [on(0, entity=MINE, manner=manner) for manner in ("", "alone", "long")]  # type: ignore[arg-type]
    record = TrialRecord((*mine, on(0, entity=OTHER, manner="long")))
    found = ShardTrials((MINE,), (MINE, OTHER), MINE)
    assert named({A: record}, "r", (serving(A),)) == {0: found}


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
    assert watch.reconsidered() == [Suspicion(3, 1, tries, suspects=(MINE,))]


def test_a_shard_is_due_after_its_pause_and_an_operator_need_not_wait() -> None:
    watch = Watch(Entry(NOBODY, 4, "quarantined", change=9, deaths=3, tries=1))
    assert watch.seen().due == ()
    watch.now += pause_s(1)
    assert watch.seen().due == (0,)
    watch = Watch(serving(A, deaths=3, tries=4, barred=(MINE,)))
    watch.view.clearances[ShardKey("r", 0)] = True
    assert watch.seen().cleared == (0,)
    assert watch.reconsidered() == [INNOCENT]
