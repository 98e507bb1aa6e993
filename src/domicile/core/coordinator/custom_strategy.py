"""A user's allocation function as the coordinator sees it: open questions and known answers.

The coordinator calls this module and turns its questions into effects. The function runs in
`control`, which answers in bounded time, if necessary with a failure. After a failure every shard
stays where it is, and shards without a home go where the default strategy says. Nothing here calls
the user's function.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from domicile.core.placement import plan
from domicile.core.placement.model import PlanInput, RoleInput
from domicile.core.placement.strategies import Situation
from domicile.settings import Settings

CUSTOM = "custom"
"""Name of a strategy that is a user's function. Its answer becomes part of the plan's input."""


class CustomStrategy:
    """Questions and answers by role; each role has at most one open question."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._asked: dict[str, Situation] = {}
        self._answers: dict[str, tuple[Situation, Mapping[int, str]]] = {}
        self._fresh: dict[str, None] = {}
        """Roles whose answer no balancing round has used yet."""
        self._served: dict[str, None] = {}
        """Roles that have used an answer in this round. The round lasts until no role waits."""

    @property
    def waiting(self) -> bool:
        """Whether any question is open."""
        return bool(self._asked)

    def advised(self, asked: Situation, wanted: Mapping[int, str] | None) -> None:
        """Take an answer to a question; None means that the function failed."""
        if self._asked.get(asked.role) == asked:
            del self._asked[asked.role]
            self._answers[asked.role] = (asked, {} if wanted is None else dict(wanted))
            self._fresh[asked.role] = None

    def consult(self, view: PlanInput, now: float) -> tuple[list[Situation], PlanInput]:
        """Questions to ask now, and the view with the answers that are known and still valid."""
        questions: list[Situation] = []
        roles: dict[str, RoleInput] = {}
        for role, part in view.roles.items():
            present = plan.situation(view, role, now, self._settings)
            answered = self._answers.get(role)
            known = answered is not None and _stands(answered[0], present)
            # The function may use data outside the situation, so each round asks it again.
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
    """Whether an answer still holds. Shards may have moved since, from a node that may not receive
    to one that may: a departing node empties in stages, and all stages use the same answer."""
    if asked == present:
        return True
    seated = {seat.node: None for seat in asked.seats}
    return asked.seats == present.seats and all(
        old == new or (old not in seated and new in seated)
        for old, new in zip(asked.homes, present.homes, strict=True)
    )
