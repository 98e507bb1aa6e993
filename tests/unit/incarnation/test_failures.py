"""Who fails again and again gives up, and who fails now and then does not."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from domicile.incarnation.supervisor import MOST_FAILED, STEADY_S, FailureCount


def test_so_many_in_a_row_and_no_more() -> None:
    failures = FailureCount()
    found = [failures.again(0.1) for _ in range(MOST_FAILED + 1)]
    assert found == [True] * MOST_FAILED + [False]


@given(st.lists(st.floats(0.0, 2 * STEADY_S)))
def test_a_steady_life_begins_the_count_anew(lives: list[float]) -> None:
    failures = FailureCount()
    for index, lasted_s in enumerate(lives):
        row = 0
        for earlier_s in reversed(lives[: index + 1]):
            row += 1
            if earlier_s >= STEADY_S:
                break
        assert failures.again(lasted_s) == (row <= MOST_FAILED)
