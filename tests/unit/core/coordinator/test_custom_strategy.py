"""A user's allocation function as the coordinator sees it: one question per role and round."""

from __future__ import annotations

from plan_lab import NOW, SETTINGS, A, B, node, serving

from domicile.core.coordinator.custom_strategy import CustomStrategy
from domicile.core.ids import Incarnation
from domicile.core.placement.model import PlanInput, RoleInput
from domicile.core.placement.strategies import Situation

ROLES = ("one", "two")


def view(*, balance: bool, homes: tuple[Incarnation, ...] = (A, B), drains: str = "") -> PlanInput:
    nodes = {inc: node(inc, roles=ROLES) for inc in (A, B)}
    parts = {role: RoleInput(tuple(serving(home) for home in homes)) for role in ROLES}
    heard, gone = dict.fromkeys(nodes, NOW), (drains,) if drains else ()
    return PlanInput(Incarnation("me"), nodes, heard, gone, parts, balance, "custom")


def round_of_balancing(counsel: CustomStrategy) -> list[Situation]:
    """Every question of one round, each answered at once, one after the other."""
    questions, _ = counsel.consult(view(balance=True), NOW)
    asked = list(questions)
    while questions:
        assert len(asked) <= 10, "the round does not end"
        counsel.advised(questions.pop(0), {})
        more, _ = counsel.consult(view(balance=True), NOW)
        questions += more
        asked += more
    return asked


def test_a_round_asks_about_each_role_once_whenever_the_answers_come() -> None:
    counsel = CustomStrategy(SETTINGS)
    assert [one.role for one in round_of_balancing(counsel)] == ["one", "two"]
    assert not counsel.waiting


def test_the_next_round_asks_anew() -> None:
    counsel = CustomStrategy(SETTINGS)
    first = round_of_balancing(counsel)
    assert counsel.consult(view(balance=False), NOW)[0] == []
    assert round_of_balancing(counsel) == first


def test_answers_of_a_round_that_still_waits_are_used_by_its_roles() -> None:
    counsel = CustomStrategy(SETTINGS)
    (one, two), _ = counsel.consult(view(balance=True), NOW)
    counsel.advised(one, {0: "node-b"})
    for _ in range(3):
        questions, seen = counsel.consult(view(balance=True), NOW)
        assert not questions
        assert seen.roles["one"].advice == {0: "node-b"}
        assert seen.roles["two"].undecided
    counsel.advised(two, {1: "node-a"})
    questions, seen = counsel.consult(view(balance=True), NOW)
    assert not questions
    assert seen.roles["two"].advice == {1: "node-a"}


def test_one_answer_is_good_for_all_stages_of_a_drain() -> None:
    """In between rounds, too: it empties in stages, and each of them changes the situation."""
    counsel = CustomStrategy(SETTINGS)
    round_of_balancing(counsel)
    drained = view(balance=False, homes=(A, A, B), drains="node-a")
    questions, _ = counsel.consult(drained, NOW)
    assert [one.role for one in questions] == ["one", "two"]
    for question in questions:
        counsel.advised(question, {0: "node-b"})
    for homes in ((A, A, B), (A, B, B)):
        questions, seen = counsel.consult(view(balance=False, homes=homes, drains="node-a"), NOW)
        assert questions == []
        assert seen.roles["one"].advice == {0: "node-b"}
    questions, _ = counsel.consult(view(balance=False, homes=(B, B, B), drains="node-a"), NOW)
    assert questions == [], "the next round is soon enough"


def test_what_else_changes_while_a_node_is_drained_is_asked_about() -> None:
    counsel = CustomStrategy(SETTINGS)
    questions, _ = counsel.consult(view(balance=False, homes=(A, A, B), drains="node-a"), NOW)
    for question in questions:
        counsel.advised(question, {})
    back = view(balance=False, homes=(A, A, A), drains="node-a")
    assert [one.role for one in counsel.consult(back, NOW)[0]] == ["one", "two"], "a shard came"
    for question in questions:
        counsel.advised(question, {})
    other = view(balance=False, homes=(A, A, B), drains="node-b")
    questions = counsel.consult(other, NOW)[0]
    assert [seat.node for one in questions for seat in one.seats] == [], "both wait for an answer"
