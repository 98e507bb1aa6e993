"""A user's allocation function as the coordinator sees it: asked, waited for, never relied upon.

Called by the coordinator, which turns questions into effects. The function runs elsewhere and
always has an answer in bounded time, if only that it failed; a failed one leaves every shard
where it is and the homeless to the default strategy.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from domicile.core.placement import plan
from domicile.core.placement.model import PlanInput, RoleInput
from domicile.core.placement.strategies import Situation
from domicile.settings import Settings

CUSTOM = "custom"
"""The strategy is a user's function: it is consulted, and its advice is part of the view."""


class CustomStrategy:
    """What was asked and answered, by role; one question at a time for each."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._asked: dict[str, Situation] = {}
        self._answers: dict[str, tuple[Situation, Mapping[int, str]]] = {}
        self._fresh: dict[str, None] = {}
        """Roles whose answer no round of balancing has used yet."""
        self._served: dict[str, None] = {}
        """Roles done with in this round, which goes on while others wait for their answer."""

    @property
    def waiting(self) -> bool:
        """Whether some question is open."""
        return bool(self._asked)

    def advised(self, asked: Situation, wanted: Mapping[int, str] | None) -> None:
        """An answer, or None for a failure."""
        if self._asked.get(asked.role) == asked:
            del self._asked[asked.role]
            self._answers[asked.role] = (asked, {} if wanted is None else dict(wanted))
            self._fresh[asked.role] = None

    def consult(self, view: PlanInput, now: float) -> tuple[list[Situation], PlanInput]:
        """Questions to ask now, and the view with the answers that are known."""
        questions: list[Situation] = []
        roles: dict[str, RoleInput] = {}
        for role, part in view.roles.items():
            present = plan.situation(view, role, now, self._settings)
            answered = self._answers.get(role)
            known = answered is not None and _stands(answered[0], present)
            # What it knows besides the situation may have changed: each round asks it anew.
            due = view.balance and role not in self._served
            if answered is not None and known and (role in self._fresh or not due):
                roles[role] = replace(part, advice=answered[1])
                if due:
                    del self._fresh[role]
                    self._served[role] = None
                continue
            emptying = any(home in view.drains for home in present.homes)
            if role not in self._asked and (due or emptying or "" in present.homes):
                self._asked[role] = present
                questions.append(present)
            roles[role] = replace(part, undecided=True)
        if not self._asked:
            self._served.clear()
        return questions, replace(view, roles=roles)


def _stands(asked: Situation, present: Situation) -> bool:
    """Whether an answer is still one: nothing changed, but that shards left who may not receive.

    Who departs does so in stages, each by the same answer.
    """
    if asked == present:
        return True
    seated = {seat.node: None for seat in asked.seats}
    return asked.seats == present.seats and all(
        old == new or (old not in seated and new in seated)
        for old, new in zip(asked.homes, present.homes, strict=True)
    )
