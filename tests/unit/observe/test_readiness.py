"""What a probe is told, for every place where a process can stand (RG-23)."""

from __future__ import annotations

from dataclasses import fields, replace
from itertools import product

import pytest

from domicile.observe.readiness import ProbeInput, health, readiness

TAKES_PART = ProbeInput(
    started=True, joined=True, was_joined=True, valid=True, viewed=True, configured=True
)


def test_one_that_takes_part_is_ready() -> None:
    assert readiness(TAKES_PART).ok
    assert health(TAKES_PART).ok


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"started": False, "joined": False, "was_joined": False}, "not started"),
        ({"joined": False, "was_joined": False}, "not registered yet"),
        ({"joined": False}, "lost its lease and is rejoining"),
        ({"valid": False}, "the lease ran out"),
        ({"viewed": False}, "waits for the first view of the cluster"),
        ({"configured": False}, "waits for the number of shards of its roles"),
        ({"leaving": True}, "leaving the cluster"),
        ({"failed": "ValueError: x"}, "stopped permanently: ValueError: x"),
    ],
)
def test_whatever_is_missing_is_named(change: dict[str, bool | str], reason: str) -> None:
    answer = readiness(replace(TAKES_PART, **change))  # type: ignore[arg-type]
    assert (answer.ok, answer.reason) == (False, reason)


def test_ready_is_nothing_less_than_everything() -> None:
    names = [field.name for field in fields(ProbeInput)]
    for values in product((False, True), repeat=len(names)):
        at = dict(zip(names, values, strict=True))
        at["failed"] = "x" if at["failed"] else ""  # type: ignore[assignment]
        standing = ProbeInput(**at)
        needed = ("started", "joined", "valid", "viewed", "configured")
        wanted = all(at[name] for name in needed) and not at["leaving"] and not at["failed"]
        assert readiness(standing).ok == wanted
        assert health(standing).ok == (not at["failed"]), "a restart helps none of the others"
        assert health(standing).ok or not readiness(standing).ok
