"""When shards without an owner may get one (C8, S5)."""

from __future__ import annotations

from domicile.core.coordinator.waiting import StartupWait
from domicile.core.ids import NOBODY, Incarnation
from domicile.core.state.records import NodeRecord
from domicile.core.state.shardmap import FREE, Entry
from domicile.settings import Settings

A, B, C = (Incarnation(name) for name in "abc")
EVERYBODY = dict.fromkeys((A, B, C), 0.0)


def records(*names: Incarnation) -> dict[Incarnation, NodeRecord]:
    return {name: NodeRecord(f"node-{name}", name, "", ("r",), (), 6.0) for name in names}


def owned(*owners: Incarnation) -> list[Entry]:
    return [Entry(owner, 3, "serving", NOBODY, 3, f"node-{owner}") for owner in owners]


def test_a_first_start_waits_until_registrations_are_quiet() -> None:
    settle = StartupWait(Settings())
    settle.joined(10.0)
    assert not settle.settled("r", [FREE, FREE], records(A), EVERYBODY, 10.2)
    assert settle.at == 10.5
    settle.joined(10.4)
    assert not settle.settled("r", [FREE, FREE], records(A, B), EVERYBODY, 10.6)
    assert settle.settled("r", [FREE, FREE], records(A, B), EVERYBODY, 10.9)


def test_it_waits_three_seconds_at_most() -> None:
    settle = StartupWait(Settings())
    for tenth in range(29):
        settle.joined(tenth / 10)
        assert not settle.settled("r", [FREE], records(A), EVERYBODY, tenth / 10)
    settle.joined(3.0)
    assert settle.settled("r", [FREE], records(A), EVERYBODY, 3.0)


def test_enough_nodes_end_the_wait_and_too_few_never_do() -> None:
    settle = StartupWait(Settings(min_nodes=2))
    settle.joined(0.0)
    assert not settle.settled("r", [FREE], records(A), EVERYBODY, 60.0)
    settle.joined(60.0)
    assert not settle.settled("r", [FREE], records(A, B), {A: 60.0}, 60.0), "B is not heard yet"
    assert settle.settled("r", [FREE], records(A, B), EVERYBODY, 60.0), "no need to be quiet"


def test_min_nodes_holds_up_a_first_allocation_only() -> None:
    settle = StartupWait(Settings(min_nodes=3))
    settle.joined(0.0)
    assert settle.settled("r", owned(C, C), records(A), EVERYBODY, 1.0)


def test_one_crash_in_a_steady_cluster_waits_for_nothing() -> None:
    settle = StartupWait(Settings())
    settle.joined(99.9)
    assert settle.settled("r", owned(A, B, C), records(A, B), EVERYBODY, 100.0)


def test_when_most_owners_are_gone_those_that_come_back_are_waited_for() -> None:
    settle = StartupWait(Settings())
    settle.joined(99.9)
    assert not settle.settled("r", owned(A, B, C), records(A), EVERYBODY, 100.0)


def test_after_an_outage_a_single_gone_owner_may_come_back_too() -> None:
    settle = StartupWait(Settings())
    settle.joined(1.0)
    settle.returned(100.0)
    assert not settle.settled("r", owned(A, B, C), records(A, B), EVERYBODY, 100.1)
    assert settle.settled("r", owned(A, B, C), records(A, B), EVERYBODY, 100.5)


def test_quarantined_shards_keep_nobody_waiting() -> None:
    settle = StartupWait(Settings())
    settle.joined(99.9)
    held = Entry(NOBODY, 3, "quarantined", NOBODY, 3, "node-c", 3)
    assert settle.settled("r", [held, *owned(A)], records(A), EVERYBODY, 100.0)


def test_after_a_rewind_takeovers_wait_for_a_whole_ttl() -> None:
    settle = StartupWait(Settings())
    assert not settle.after_rewind(False, 0.0)
    assert settle.after_rewind(True, 10.0)
    assert settle.after_rewind(True, 16.0)
    assert not settle.after_rewind(True, 16.01)
    assert not settle.after_rewind(False, 17.0)
    assert settle.after_rewind(True, 20.0), "another one"
