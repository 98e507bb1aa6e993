"""A chaos run knows when the machine starves it: leases that are lost by that are no violation."""

from __future__ import annotations

import threading
from collections import Counter
from itertools import chain, count, repeat

import pytest

from domicile.testing.checkers.deadlines import check_deadlines
from domicile.testing.checkers.order import check_order
from domicile.testing.checkers.reading import STARVED, read
from domicile.testing.history import Event
from domicile.testing.processes.history import SLACK_S, RealHistory
from proving.chaos import starving
from proving.chaos.starving import STARVED_S, felt
from proving.chaos.tally import Tally


def test_only_what_comes_much_too_late_is_felt(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(starving, "PULSE_S", 0.001)
    heard: list[tuple[float, float]] = []

    def late(since: float, until: float) -> None:
        heard.append((since, until))

    enough = threading.Event()
    # In pairs: when it was asked to wake up, and when it did.
    late_s = chain([0.0, STARVED_S / 2, STARVED_S * 2, 0.0, STARVED_S * 3], repeat(0.0))
    times = chain.from_iterable((at, at + 0.001 + late) for at, late in zip(count(), late_s))
    lock = threading.Lock()

    def now() -> float:
        with lock:
            at = next(times)
            if at > 20:
                enough.set()
            return at

    with felt(now, late):
        assert enough.wait(20.0)
    # The thread asks for the time before its first rest, so its pairs are those above.
    assert heard == [(2, 2.001 + STARVED_S * 2), (4, 4.001 + STARVED_S * 3)]
    assert not [one for one in threading.enumerate() if one.name == "chaos-pulse"]


@pytest.mark.parametrize("began", [0.0, 0.02, 0.05, 0.099])
def test_what_stands_still_for_longer_than_checkers_allow_is_felt(began: float) -> None:
    """However long after the thread that feels it has asked to be woken up."""
    assert starving.too_late(0.0, began + SLACK_S + 0.001)
    assert not starving.too_late(0.0, starving.PULSE_S + began)


def lost(*faults: Event) -> list[str]:
    """What is said of a tell whose sender lost its lease, and of nothing else."""
    names = {"inc": "a", "role": "default", "shard": 0, "n": 1}
    submit = {**names, "type": "t", "id": "x", "method": "m", "ask": False, "chain": [], "held": 0}
    events = [
        Event(0.0, "life", {"inc": "a", "node": "", "hosts": False, "limits": {}}),
        *faults,
        Event(9.0, "submit", {**submit, "timeout": 6.0}),
        Event(9.5, "fenced", {"inc": "a", "reason": "deadline passed"}),
        Event(9.5, "lost", names),
    ]
    return [found.message for found in check_order(RealHistory(events, Counter()))]


def test_a_starved_machine_excuses_a_lost_lease_and_nothing_else_does() -> None:
    assert len(lost()) == 1
    assert lost(starved(8.0, 8.5)) == []


def starved(since: float, until: float) -> Event:
    fields = {"fault": STARVED, "node": None, "inc": None, "until": until}
    return Event(since, "fault", fields)


def overdue(*faults: Event) -> list[str]:
    """What is said of a fence two seconds after the deadline."""
    renewed = {"inc": "a", "sent_at": 0.0, "ttl": 3.0, "margin": 0.6}
    events = [
        Event(0.0, "life", {"inc": "a", "node": "", "hosts": False, "limits": {}}),
        Event(0.0, "renewed", renewed),
        *faults,
        Event(4.4, "fenced", {"inc": "a", "reason": "deadline passed"}),
    ]
    return [found.message for found in check_deadlines(RealHistory(events, Counter()))]


def test_a_machine_that_let_nobody_run_delays_a_fence_until_its_end() -> None:
    assert len(overdue()) == 1
    assert overdue(starved(1.0, 4.2)) == []
    assert len(overdue(starved(1.0, 3.0))) == 1


def test_how_often_it_starved_is_told() -> None:
    tally = Tally(starved=2)
    tally.add(Tally(starved=1))
    assert "times starved                 3" in tally.report()


def test_how_many_rounds_were_judged_for_liveness_is_told() -> None:
    """A machine that starves in the calm begins it anew, perhaps too late to be judged (L)."""
    tally = Tally(rounds=2, calm=1)
    tally.add(Tally(rounds=1, calm=1))
    assert "rounds                        3\n  judged for liveness         2\n" in tally.report()


def test_a_calm_that_begins_anew_too_late_is_not_judged() -> None:
    def unjudged(*quiet: float) -> bool:
        events = [Event(at, "quiet", {}) for at in quiet]
        return read(RealHistory([*events, Event(40.0, "gone", {})], Counter())).settled_at() is None

    assert not unjudged(10.0)
    assert unjudged(10.0, 30.0)
