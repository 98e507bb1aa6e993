"""Misuse of durable entities: events of others, values that may be gone, wrong expectations."""

from __future__ import annotations

from good import Registered, Setting, Visits

from domicile import Forgettable
from domicile.testing import given


def length(event: Registered) -> int:
    return len(event.email.value)  # E: arg-type


Registered("ada@example.org")  # E: arg-type
Registered(Forgettable(7))  # E: arg-type

given(Visits, "v", "registered")  # E: misc
given(Setting, "s", state=7)  # E: misc
given(Visits, "v").when(Visits.register, 7)  # E: arg-type
given(Visits, "v").when(Visits.register)  # E: call-arg
given(Visits, "v").when(Visits.register, "a").then(reply="one")  # E: arg-type
given(Visits, "v").when(Visits.register, "a").then(events=[7])  # E: list-item
given(Setting, "s").when(Setting.set, "y").rejects(KeyError)  # E: arg-type
