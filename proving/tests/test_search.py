"""Small scenarios through every order of events; the larger ones run with `make search`."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace

import pytest

from domicile.core.coordinator.events import CoordinatorEffect, CoordinatorEvent, ReleasedBy, Tick
from domicile.core.coordinator.machine import Coordinator
from domicile.core.handoff.tables import Phase
from domicile.core.machines import Arm
from domicile.core.state.keys import BlockKey
from proving.search import FAULTS, Scenario, Violation, explore, walk
from proving.search.__main__ import main
from proving.search.machines import Machines
from proving.search.scenarios import SCENARIOS, swift, tells
from proving.search.values import EPOCH_S, Steady, clone, freeze
from proving.search.world import World

SMALL = (
    "a cold start",
    "a node is drained",
    "an owner asks for its shard back",
    "a window of one",
    "Started travels",
    "a handler asks into its own shard",
    "a handler waits behind one that asks back",
    "Released comes again",
    "Told is lost",
    "a watch breaks",
    "one key: a move",
    "one key: a cold start",
    "one key: a commit's outcome is unknown",
)
BY_NAME = {scenario.name: scenario for scenario in SCENARIOS}


@pytest.mark.parametrize("name", SMALL)
def test_every_order_of_events_keeps_the_rules(name: str) -> None:
    scenario = BY_NAME[name]
    explored = explore(scenario)
    assert explored.complete
    assert explored.ends > 0
    assert tuple(explored.faults) == scenario.faults


@pytest.mark.parametrize("fault", FAULTS)
def test_every_fault_strikes_a_move_somewhere(fault: str) -> None:
    """One fault of each kind, without messages: nothing may stay `moving`."""
    scenario = Scenario("a move", (), clients=0, faults=(fault,))
    if fault in ("link lost", "overdue Flushed"):
        scenario = swift(replace(scenario, messages=tells(1, 1)))
    explored = explore(scenario)
    assert explored.complete
    assert explored.faults[fault] > 0


def test_a_search_is_deterministic() -> None:
    scenario = Scenario("a move", (), clients=0, faults=("leader dies",))
    assert explore(scenario) == explore(scenario)


def test_a_search_stops_at_its_limit() -> None:
    explored = explore(Scenario("a move", tells(2)), limit=500)
    assert (explored.states >= 500, explored.complete) == (True, False)


def test_progress_is_reported() -> None:
    heard: list[tuple[int, int]] = []
    explore(Scenario("a move", tells(3)), 12_000, lambda *so_far: heard.append(so_far))
    assert [states for states, _ in heard] == [5_000, 10_000]


def test_a_state_is_copied_whole() -> None:
    """A step on a copy leaves the state that it was copied from as it was."""
    world = World(Machines(swift(Scenario("a move", tells(1), faults=("crash",)))))
    for _ in range(12):
        key = world.key()
        for action in world.enabled():
            after = world.copy()
            after.take(action)
            assert world.key() == key
        world.take(world.enabled()[0])


def test_machines_are_values() -> None:
    machines = Machines(Scenario("a move", tells(1)))
    owner = machines.owners[machines.new_owner(0, 0)]
    copied = clone(owner)
    assert freeze(copied, 0.0) == freeze(owner, 0.0)
    copied.phase = Phase.RELEASED
    assert owner.phase is Phase.CLOSED
    assert freeze(copied, 0.0) != freeze(owner, 0.0)


def test_what_is_shared_in_a_machine_stays_shared_in_its_copy() -> None:
    shared = {"a": [1]}
    first, second = clone([shared, shared])
    assert first is second
    assert first is not shared


@pytest.mark.parametrize(
    ("first", "second", "same"),
    [(0.1, 0.2, True), (-0.1, -0.2, True), (-0.1, -30.0, False), (0.1, 30.0, False)],
)
def test_only_the_class_of_a_time_matters(first: float, second: float, same: bool) -> None:
    one, other = freeze([EPOCH_S + first], EPOCH_S), freeze([EPOCH_S + 9 + second], EPOCH_S + 9)
    assert (one == other) is same


def test_chance_is_left_out() -> None:
    assert Steady(1).random() == Steady(2).random()


@pytest.mark.parametrize(
    ("bad", "complaint"),
    [
        (lambda: Scenario("x", (), faults=("earthquake",)), "no fault is called 'earthquake'"),
        (lambda: Scenario("x", (), swift=True), "only a manager can be swift"),
    ],
)
def test_a_scenario_that_makes_no_sense_is_refused(bad: object, complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        bad()  # type: ignore[operator]


def test_the_names_of_scenarios_differ() -> None:
    assert len(BY_NAME) == len(SCENARIOS)


def test_the_scenarios_meet_every_fault() -> None:
    met = {fault for scenario in SCENARIOS for fault in scenario.faults}
    assert sorted(met) == sorted(FAULTS)


def test_the_command_prints_a_row_for_each_scenario(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--only", "a handler waits"]) == 0
    out = capsys.readouterr().out
    assert "a handler waits behind one that asks back" in out
    assert out.splitlines()[-1].endswith("0 problems")


def test_the_command_says_what_it_could_not_search(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--only", "a handler waits", "--limit", "100"]) == 1
    assert "raise --limit" in capsys.readouterr().out


def test_the_command_shows_the_way_to_a_violation(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = replace(swift(Scenario("broken", tells(2))), flush_overtakes=True)
    monkeypatch.setattr("proving.search.__main__.SCENARIOS", (broken,))
    assert main(["--only", "broken"]) == 1
    out = capsys.readouterr().out
    assert "VIOLATION: I5: reordered" in out
    assert "\n  operate\n" in out


def test_the_command_runs_as_a_module() -> None:
    run = [sys.executable, "-m", "proving.search", "--list"]
    listed = subprocess.run(run, capture_output=True, text=True, timeout=60, check=True).stdout
    assert listed.splitlines() == [scenario.name for scenario in SCENARIOS]


def test_a_walk_says_which_seed_went_wrong() -> None:
    broken = replace(swift(Scenario("broken", tells(3))), flush_overtakes=True)
    with pytest.raises(Violation, match=r"seed \d+: "):
        walk(broken, range(2_000))


def test_an_end_that_settles_nothing_is_stuck() -> None:
    """Nobody campaigns after the leader's death, so what it began is never finished."""
    with pytest.raises(Violation, match="stuck: shard 0 is moving"):
        explore(Scenario("orphaned", (), clients=0, candidates=(), faults=("leader dies",)))


class Unsealing(Coordinator):
    """Decides in blocks that carry another leader's term."""

    def _unsealed(self, block: BlockKey) -> bool:
        return False


ONE_KEY = Scenario(
    "deposed", (), clients=0, candidates=(1,), faults=("leader deposed",), one_key=True
)


def test_a_leader_that_seals_nothing_is_found() -> None:
    with pytest.raises(Violation, match=r"S8: the leader of term .* decided in a block of term 0"):
        explore(replace(ONE_KEY, coordinator=Unsealing))


class Restless(Coordinator):
    """Hears no release, and is never at rest."""

    turn = 0

    def step(self, event: CoordinatorEvent, now: float) -> tuple[CoordinatorEffect, ...]:
        if isinstance(event, ReleasedBy):
            return ()
        effects = super().step(event, now)
        if isinstance(event, Tick):
            self.turn = 1 - self.turn
        return (*effects, Arm(now + 0.1))


def test_going_round_in_circles_is_stuck_too() -> None:
    """No state without a way on, and yet none of these ways leads to an end."""
    with pytest.raises(Violation, match="stuck: no way leads to an end"):
        explore(Scenario("restless", (), clients=0, coordinator=Restless))
