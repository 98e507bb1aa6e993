"""A cluster of real processes knows when the machine starves the test's own process."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

import pytest

from domicile.testing.processes import pulse
from domicile.testing.processes.history import SLACK_S
from domicile.testing.processes.pulse import PULSE_S, STARVED_S, feel

Heard = list[tuple[float, float]]


def heard(monkeypatch: pytest.MonkeyPatch, pulses: Iterable[tuple[float, float]]) -> Heard:
    """What is called starved if each pulse takes so long, with so much processor time."""
    left = list(pulses)
    at = used = 0.0
    found: Heard = []

    async def sleep(seconds: float) -> None:
        nonlocal at, used
        assert seconds == PULSE_S
        if not left:
            raise asyncio.CancelledError
        took, spent = left.pop(0)
        at, used = at + took, used + spent

    monkeypatch.setattr(pulse.asyncio, "sleep", sleep)

    async def test() -> None:
        with pytest.raises(asyncio.CancelledError):
            await feel(lambda: at, lambda: used, lambda *span: found.append(span))

    asyncio.run(test())
    return found


def test_a_loop_that_turns_in_time_is_not_starved(monkeypatch: pytest.MonkeyPatch) -> None:
    assert heard(monkeypatch, [(PULSE_S, 0.0), (PULSE_S + STARVED_S, 0.0)]) == []


def test_a_loop_that_did_not_turn_without_work_is_starved(monkeypatch: pytest.MonkeyPatch) -> None:
    assert heard(monkeypatch, [(1.0, 0.0), (PULSE_S, 0.0), (2.0, 0.1)]) == [
        (0.0, 1.0),
        (1.0 + PULSE_S, 3.0 + PULSE_S),
    ]


def test_a_loop_that_is_held_by_work_is_not_starved(monkeypatch: pytest.MonkeyPatch) -> None:
    assert heard(monkeypatch, [(1.0, 0.9), (3.0, 2.6)]) == []


@pytest.mark.parametrize("began", [0.0, 0.02, 0.05, 0.099])
def test_what_stands_still_for_longer_than_checkers_allow_is_felt(
    monkeypatch: pytest.MonkeyPatch, began: float
) -> None:
    """However long after a pulse: the rest of that pulse passes in the meantime."""
    assert len(heard(monkeypatch, [(began + SLACK_S + 0.001, 0.0)])) == 1
