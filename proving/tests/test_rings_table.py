"""The tables of the rings' benchmark: what is met, what is missed, what is kept of other cells."""

from __future__ import annotations

from typing import Any

from proving.benchmarks.rings import CELLS, MIB, chosen, page


def sized(most_mib: float) -> dict[str, Any]:
    return {
        "at_rest": 60 * MIB, "most_changing": most_mib * MIB, "most_walking": 61 * MIB,
        "change_cpu": 0.002, "share": 0.35, "load": 1.0, "cpus": 2,
    }  # fmt: skip


def test_growth_is_judged_against_the_fewest_objects() -> None:
    found = {
        "objects-1000": [sized(66)],
        "objects-10000": [sized(70)],
        "objects-100000": [sized(72)],
    }
    rows = page(found).splitlines()[2:]
    assert ["MISSED" in row for row in rows] == [False, False, True]
    assert "+6.0" in rows[2]


def test_a_sharder_must_stay_below_the_most_it_may_take() -> None:
    assert "MISSED" in page({"objects-1000": [sized(91)]})


def test_cells_are_chosen_by_words() -> None:
    assert chosen([]) == list(CELLS)
    assert chosen(["objects-1000"]) == ["objects-1000"]
    assert chosen(["moves"]) == ["moves"]
