"""How long a departing node waits for newcomers of the newest version (SM-14): once, not for each.

A whole leadership is driven by its own timers here, so that a wait which nobody ends shows.
"""

from __future__ import annotations

from itertools import cycle
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tiny_store import TinyStore

from domicile.core.coordinator.events import (
    Changed,
    Commit,
    CommitDone,
    CoordinatorEffect,
    CoordinatorEvent,
    Heard,
    Listed,
    Tick,
)
from domicile.core.coordinator.machine import Coordinator
from domicile.core.ids import NOBODY, Incarnation
from domicile.core.machines import Arm
from domicile.core.state.keys import drain_key, node_key
from domicile.core.state.shardmap import Entry
from domicile.settings import Settings

LEADER, OLD, STAYS = Incarnation("leader"), Incarnation("old"), Incarnation("stays")
SLOW = Settings(balance_interval_s=3_600.0)
"""Balancing looks at everything now and then, and must not be what ends a wait."""

STEP_S = 0.05


class Leadership:
    """A coordinator whose timers run and whose commits land at once."""

    def __init__(self, settings: Settings) -> None:
        self.store, self.now, self._seen, self._armed_at = TinyStore(1), 100.0, 0, float("inf")
        for node in (LEADER, OLD, STAYS):
            self.store.join(node, version="1")
        self.store.write(Entry(OLD, 1, "serving", NOBODY, 1, "node-old"))
        self._machine = Coordinator(LEADER, self.store.lead(LEADER), settings, Random(1))
        self._seen = self.store.revision
        for node in (OLD, STAYS):
            self.step(Heard(node))
        self.step(Listed(self.store.listing()))
        self.run(1.0)

    @property
    def home(self) -> Entry:
        return self.store.entry(0)

    def step(self, event: CoordinatorEvent) -> None:
        self._obey(self._machine.step(event, self.now))

    def _obey(self, effects: tuple[CoordinatorEffect, ...]) -> None:
        for effect in effects:
            if isinstance(effect, Arm):
                self._armed_at = effect.at
            elif isinstance(effect, Commit):
                outcome = self.store.commit(effect.conditions, effect.writes)
                self.step(CommitDone(effect.txn, outcome))
        for changes in tuple(self.store.log):
            if changes.revision > self._seen:
                self._seen = changes.revision
                self.step(Changed(changes))

    def run(self, seconds: float) -> None:
        """Time passes; the others are heard all the while."""
        until = self.now + seconds
        while self.now < until:
            self.now = min(until, self.now + STEP_S)
            for node in (OLD, STAYS):
                self.step(Heard(node))
            if self.now >= self._armed_at:
                self._armed_at = float("inf")
                self.step(Tick())

    def write(self, key: bytes, value: bytes = b"") -> None:
        self.store.put(key, value)
        self._obey(())

    def depart(self, drained: bool) -> None:
        if drained:
            self.write(drain_key("node-old"))
        else:
            self.store.join(OLD, "leaving", version="1")
            self._obey(())

    def begin(self, newcomer: Incarnation, node: str = "") -> None:
        self.store.join(newcomer, node=node, version="2")
        self._obey(())

    def end(self, newcomer: Incarnation) -> None:
        self.store.delete(node_key(newcomer))
        self._obey(())


@pytest.mark.parametrize("drained", [False, True])
def test_a_newcomer_that_is_heard_in_time_gets_the_shard(drained: bool) -> None:
    it, new = Leadership(SLOW), Incarnation("new")
    it.begin(new)
    it.depart(drained)
    it.run(SLOW.heard_s - 0.2)
    assert it.home.state == "serving", "it waits"
    it.step(Heard(new))
    assert (it.home.state, it.home.to) == ("moving", new)


@pytest.mark.parametrize("drained", [False, True])
def test_a_newcomer_that_stays_silent_is_waited_for_and_no_longer(drained: bool) -> None:
    it = Leadership(SLOW)
    it.begin(Incarnation("new"))
    it.depart(drained)
    it.run(SLOW.heard_s + 2 * STEP_S)
    assert (it.home.state, it.home.to) == ("moving", LEADER)


@given(
    st.lists(st.tuples(st.floats(0.05, 1.9), st.booleans()), min_size=1, max_size=60),
    st.floats(0.0, 3.0),
    st.booleans(),
)
def test_newcomers_that_crash_one_after_the_other_hold_a_departing_node_up_only_once(
    lives: list[tuple[float, bool]], departs_after_s: float, drained: bool
) -> None:
    """Each one registers before the one before it is gone, so that somebody new is always there."""
    it = Leadership(SLOW)
    began_at, departed_at, before = it.now, None, None
    for number, (life_s, renamed) in enumerate(cycle(lives)):
        newcomer = Incarnation(f"new-{number}")
        it.begin(newcomer, f"node-new-{number}" if renamed else "node-new")
        if before is not None:
            it.end(before)
        before = newcomer
        if departed_at is None and it.now >= began_at + departs_after_s:
            it.depart(drained)
            departed_at = it.now
        it.run(life_s)
        if departed_at is not None and it.now > departed_at + SLOW.heard_s + 2 * STEP_S:
            break
    assert (it.home.state, it.home.to) == ("moving", LEADER)
