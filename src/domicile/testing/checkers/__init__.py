"""Did a run keep the rules? One checker per invariant, written from the rules alone.

Each checker is a function from a `History` to the violations it sees. Checkers read events and
stored values. They must import nothing of the runtime, so that they cannot share its mistakes.
"""

from __future__ import annotations

from collections.abc import Callable

from domicile.testing.checkers.bounded import check_bounded
from domicile.testing.checkers.carried import check_carried
from domicile.testing.checkers.deadlines import check_deadlines
from domicile.testing.checkers.drained import check_drained
from domicile.testing.checkers.durable import check_durable, check_gated
from domicile.testing.checkers.evicted import check_evicted
from domicile.testing.checkers.fenced import check_fenced
from domicile.testing.checkers.flushed import check_flushed
from domicile.testing.checkers.leading import check_leading
from domicile.testing.checkers.liveness import check_liveness
from domicile.testing.checkers.one_home import check_handlers, check_links, check_stored
from domicile.testing.checkers.order import check_order
from domicile.testing.checkers.stored import check_stored_first
from domicile.testing.checkers.verdict import Violation
from domicile.testing.history import History

__all__ = ["CHECKERS", "Violation", "check"]

CHECKERS: dict[str, Callable[[History], list[Violation]]] = {
    "C1": check_leading,
    "C6": check_evicted,
    "DX": check_carried,
    "H8": check_flushed,
    "H9": check_drained,
    "I1a": check_stored,
    "I1b": check_links,
    "I1c": check_handlers,
    "I2": check_fenced,
    "I3": check_stored_first,
    "I4": check_durable,
    "I5": check_order,
    "I6": check_bounded,
    "J5": check_gated,
    "L": check_liveness,
    "L3": check_deadlines,
}
"""Every checker by the rule it judges, sorted by name."""


def check(history: History) -> list[Violation]:
    """What is wrong with a history, by rule; an empty list if nothing is."""
    return [violation for checker in CHECKERS.values() for violation in checker(history)]
