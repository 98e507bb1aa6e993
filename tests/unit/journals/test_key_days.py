"""The count of days: it never runs faster than time, and it goes on as long as somebody looks."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from domicile.journals.key_days import (
    DAY_S,
    KEPT_DAYS,
    PROMISED_DAYS,
    STEP_S,
    DayLooks,
    KeyDays,
    first_days,
)

PROCESSES = 3


@given(
    st.lists(
        st.tuples(
            st.integers(0, PROCESSES - 1),
            st.sampled_from((0.0, 60.0, 3_600.0, 40_000.0, DAY_S, 5.0 * DAY_S, 40.0 * DAY_S)),
            st.sampled_from(("looks", "writes", "starts")),
        ),
        max_size=200,
    ),
)
def test_no_key_is_forgotten_before_seven_days_have_passed(
    steps: list[tuple[int, float, str]],
) -> None:
    days = first_days(1e9, ())
    looks = [DayLooks() for _ in range(PROCESSES)]
    now_s, offsets = 0.0, (0.0, 1e7, 5.0)
    keys: list[tuple[float, int]] = []
    for process, passes_s, does in steps:
        now_s += passes_s
        if does == "starts":
            looks[process] = DayLooks()
        elif does == "writes":
            keys.append((now_s, days.today))
        else:
            own_s = now_s + offsets[process]
            counted_s = looks[process].counted(days.counted_s, own_s)
            days = KeyDays(counted_s, days.since)
            looks[process].stored(counted_s, own_s)
        keys = [(at_s, day) for at_s, day in keys if _is_kept(days, day, now_s - at_s)]


def _is_kept(days: KeyDays, day: int, age_s: float) -> bool:
    is_kept = days.keeps(day)
    assert is_kept or age_s > PROMISED_DAYS * DAY_S
    return is_kept


def test_the_count_keeps_up_with_time_while_anybody_looks() -> None:
    days = first_days(20_000.0 * DAY_S, ())
    one, two = DayLooks(), DayLooks()
    for look in range(20 * 24):
        for looks in (one, two):
            counted_s = looks.counted(days.counted_s, look * 3_600.0)
            days = KeyDays(counted_s, days.since)
            looks.stored(counted_s, look * 3_600.0)
    assert days.today == 20_019
    assert not days.keeps(20_019 - KEPT_DAYS - 1)


def test_a_long_gap_counts_for_half_a_day_and_a_clock_that_goes_back_for_nothing() -> None:
    looks = DayLooks()
    assert looks.counted(5.0, 1e6) == 5.0, "what was before the first look, nobody has seen"
    looks.stored(5.0, 1e6)
    assert looks.counted(5.0, 1e6 + 90 * DAY_S) == 5.0 + STEP_S
    assert looks.counted(5.0, 0.0) == 5.0
    assert looks.counted(1e9, 1e6 + 60.0) == 1e9, "others have counted further"


def test_days_from_before_the_count_are_kept_as_if_they_were_its_first() -> None:
    days = first_days(20_000.5 * DAY_S, (19_000, 20_364))
    assert days.today == days.since == 20_365
    for passed, is_kept in ((0, True), (KEPT_DAYS, True), (KEPT_DAYS + 1, False)):
        later = KeyDays(days.counted_s + passed * DAY_S, days.since)
        assert [later.keeps(day) for day in (19_000, 20_364, 20_365)] == [is_kept] * 3
