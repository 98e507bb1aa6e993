"""Which version is newer, and who may receive while several are there (SM-13, SM-14)."""

from __future__ import annotations

from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from domicile.core.placement.versions import mixed, ranks, same, target_versions

ASCENDING = [
    ["9", "10", "20240101"],
    ["0.9", "1.0.dev1", "1.0a1", "1.0rc1", "1.0", "1.0+built.2", "1.0.post1", "1.1", "1!0.1"],
    ["2024-05-01", "2024-05-01T00:00:01", "2024-05-01T12:00:00Z", "2024-05-02T00:00+02:00"],
]


@pytest.mark.parametrize("versions", ASCENDING, ids=["numbers", "PEP 440", "times"])
def test_versions_are_compared_as_what_they_are(versions: list[str]) -> None:
    assert ranks(reversed(versions)) == {text: rank for rank, text in enumerate(versions)}
    for older, newer in combinations(versions, 2):
        assert target_versions([newer, older]) == (newer,)
        assert mixed([older, newer])


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("1.0", "1.0.0"),
        ("v1.0", "1.0"),
        ("1.0-1", "1.0.post1"),
        ("7", "007"),
        ("2024-05-01T12:00Z", "2024-05-01T14:00+02:00"),
        ("2024-05-01", "2024-05-01T00:00:00+00:00"),
        ("blue", "blue"),
        ("", ""),
    ],
)
def test_equal_versions_are_not_mixed(one: str, other: str) -> None:
    assert same(one, other)
    assert not mixed([one, other])
    assert target_versions([one, other]) == tuple(dict.fromkeys((one, other)))


@pytest.mark.parametrize(
    "versions",
    [
        ["blue", "green"],
        ["1.0", "blue"],
        ["", "1.0"],
        ["1.0", "2024-05-01"],
        ["1.0", "1" * 5_000],
        ["١", "٢"],
        ["1_0", "2"],
        ["-1", "1"],
    ],
)
def test_what_is_not_of_one_kind_has_no_order(versions: list[str]) -> None:
    assert ranks(versions) is None
    assert mixed(versions)
    assert target_versions(versions) == tuple(versions), "no preference"


def test_no_versions_at_all_are_equal() -> None:
    assert not mixed(["", "", ""])
    assert target_versions(["", ""]) == ("",)
    assert not mixed([])
    assert target_versions([]) == ()


def test_a_stored_target_is_met_exactly_not_by_the_newest() -> None:
    assert target_versions(["1.0", "2.0", "1.0.0"], "1.0") == ("1.0", "1.0.0")
    assert target_versions(["1.0", "2.0"], "2") == ("2.0",)
    assert target_versions(["blue", "green"], "green") == ("green",)
    assert target_versions(["blue", "1.0.0", "2.0"], "1.0") == ("1.0.0",)


def test_a_target_that_nobody_has_is_no_preference() -> None:
    assert target_versions(["1.0", "2.0"], "3.0") == ("1.0", "2.0")
    assert target_versions(["1.0", "2.0"], "blue") == ("1.0", "2.0")


TEXTS = st.one_of(
    st.integers(0, 30).map(str),
    st.from_regex(r"\A[0-3]\.[0-3](rc[0-2])?(\.post[0-2])?\Z"),
    st.datetimes().map(lambda time: time.isoformat()),
    st.text(max_size=5),
)


@given(st.lists(TEXTS, max_size=6), TEXTS)
def test_any_texts_have_an_answer(present: list[str], stored: str) -> None:
    found = target_versions(present, stored)
    assert bool(found) == bool(present)
    assert all(text in present for text in found)
    assert sorted(target_versions(present[::-1], stored)) == sorted(found), "order does not matter"
    known = ranks(present)
    if known is not None:
        newest = target_versions(present)
        assert all(known[one] == max(known.values()) for one in newest)
        assert mixed(present) == (len(newest) < len(known))
