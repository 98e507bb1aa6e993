"""How the independent writer of groups judges what servers acknowledge: by when it arrives."""

from __future__ import annotations

import pytest
from replica_lab import Acked, Seen, wrong_answers

FIRST = Seen(1, "one", 10.0, 9.9)
NEXT = Seen(2, "two", 20.0, 19.9)
AGAIN = Seen(3, "one", 30.0, 29.9)


@pytest.mark.parametrize(
    ("after", "before", "wrong"),
    [
        (15.0, 15.1, False),
        # Sent long before, and acknowledged by the old primary once the new one was announced.
        (20.5, 20.6, True),
        # Handed over late: it may have arrived before.
        (19.8, 20.6, False),
        # Not excused by an announcement that came later, however soon that was.
        (29.7, 29.8, True),
        # The announcement may have come before the answer, and was seen after it.
        (29.94, 29.95, False),
        (31.0, 31.1, False),
    ],
)
def test_an_answer_is_judged_by_when_it_arrives(after: float, before: float, wrong: bool) -> None:
    acked = [Acked("w0000001", "one", after, before)]
    assert bool(wrong_answers(acked, [FIRST, NEXT, AGAIN])) is wrong
