"""Calls come at equal intervals, and none is caught up."""

from __future__ import annotations

from random import Random

import pytest

from domicile.concurrency.cadence import Cadence


def test_the_duration_of_calls_does_not_count() -> None:
    random, now = Random(1), 100.0
    cadence = Cadence(0.23, now)
    for _ in range(1_000):
        now += random.uniform(0.0, 0.2)  # the call
        now += cadence.wait_s(now)
    assert now == pytest.approx(100.0 + 1_000 * 0.23)


def test_calls_that_were_missed_are_not_caught_up() -> None:
    cadence = Cadence(0.2, 0.0)
    assert cadence.wait_s(5.0) == 0.0
    assert cadence.wait_s(5.0) == pytest.approx(0.2)
