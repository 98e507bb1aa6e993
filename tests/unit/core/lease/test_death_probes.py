"""Whom a node looks at to find the dead, and how often (I8, L6)."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from domicile.core.ids import Incarnation
from domicile.core.lease.death_probes import CLIENTS_AT_ONCE, EARLY_S, LOOKS, PROBE_S, ProbeSchedule

ME = Incarnation("m")
NODES = [ME, *map(Incarnation, "ab")]


def clients(count: int) -> dict[Incarnation, None]:
    return {Incarnation(f"c{number:04}"): None for number in range(count)}


def test_a_client_that_seems_dead_is_looked_at_alone_and_at_once() -> None:
    lookout, known = ProbeSchedule(ME), clients(3)
    assert lookout.due(NODES, known, 0.0) == [*NODES[1:], *known]
    assert lookout.next_rest_s(0.25) == 0.75
    lookout.suspect(Incarnation("c0001"))
    assert lookout.next_rest_s(0.25) == 0.0
    assert lookout.due(NODES, known, 0.25) == [Incarnation("c0001")]
    assert lookout.due(NODES, known, 0.25) == []
    assert lookout.next_rest_s(0.25) == 0.75, "and the next look at everybody is not put off"
    lookout.suspect(Incarnation("c0001"))
    assert lookout.due(NODES, {}, 0.25) == [], "its record is gone meanwhile"


def test_a_sign_of_a_dead_node_has_all_nodes_looked_at_as_often() -> None:
    lookout = ProbeSchedule(ME)
    lookout.due(NODES, {}, 0.0)
    lookout.alarm()
    now = 0.0
    for _ in range(LOOKS):
        assert lookout.due(NODES, {}, now) == NODES[1:]
        now += lookout.next_rest_s(now)
    assert lookout.due(NODES, {}, now - PROBE_S / 2) == []


@given(st.integers(0, 5 * CLIENTS_AT_ONCE), st.text("0123456789cmz", max_size=4))
def test_every_client_has_its_turn_and_no_look_grows_with_their_number(count: int, me: str) -> None:
    lookout, known = ProbeSchedule(Incarnation(me)), clients(count)
    seen: dict[Incarnation, None] = {}
    for turn in range(-(-count // CLIENTS_AT_ONCE)):
        due = lookout.due((), known, turn * PROBE_S)
        assert len(due) <= CLIENTS_AT_ONCE
        seen.update(dict.fromkeys(due))
    assert sorted(seen) == [one for one in known if one != me]


@given(st.lists(st.tuples(st.sampled_from("np"), st.floats(0.0, 0.2)), max_size=60))
def test_whatever_parts_everybody_is_looked_at_every_second(
    signs: list[tuple[str, float]],
) -> None:
    lookout, known = ProbeSchedule(ME), clients(4)
    now = last = 0.0
    lookout.due(NODES, known, now)
    for sign, after_s in [*signs, ("", 0.0), ("", 0.0)]:
        ends = now + after_s
        while (rest_s := lookout.next_rest_s(now)) < ends - now:
            now += rest_s
            last = now if len(lookout.due(NODES, known, now)) > 4 else last
            assert now - last <= PROBE_S
        now = ends
        if sign == "n":
            lookout.alarm()
        elif sign == "p":
            lookout.suspect(Incarnation("c0002"))
        looked = len(lookout.due(NODES, known, now)) > 4
        assert looked or sign != "n", "a sign of death is not put off"
        last = now if looked else last
        assert now - last <= PROBE_S + EARLY_S
