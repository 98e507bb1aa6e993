"""Store time (S4): it follows the wall while that is steady, and no step of it counts."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from domicile.settings import MAX_TICK_S
from domicile.stores.storetime import StoreTime

WALLS = st.lists(st.floats(-1e6, 1e6, allow_nan=False), min_size=1, max_size=50)


def test_it_follows_a_steady_wall_exactly() -> None:
    time = StoreTime(100.0)
    for wall_s in (100.1, 100.3, 100.3, 100.55):
        time = time.advanced(wall_s)
        assert time.now_s == wall_s


def test_a_step_forward_counts_as_one_tick() -> None:
    time = StoreTime(100.0).advanced(3700.0)
    assert time.now_s == 100.0 + MAX_TICK_S
    assert time.advanced(3700.1).now_s - time.now_s < 0.1001


def test_a_step_back_counts_for_nothing_and_time_goes_on_at_once() -> None:
    time = StoreTime(10_000.0).advanced(6_400.0)
    assert time.now_s == 10_000.0
    assert abs(time.advanced(6_400.2).now_s - 10_000.2) < 1e-9


@given(WALLS)
def test_each_look_adds_the_clamped_difference(walls: list[float]) -> None:
    time = StoreTime(walls[0])
    expected = walls[0]
    for before, wall_s in pairwise(walls):
        after = time.advanced(wall_s)
        expected += min(max(wall_s - before, 0.0), MAX_TICK_S)
        assert abs(after.now_s - expected) < 1e-6
        assert after.now_s >= time.now_s - 1e-9
        time = after
