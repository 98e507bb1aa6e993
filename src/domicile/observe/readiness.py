"""Whether a process may be sent work, and whether it should be restarted (RG-23).

Pure: a shell says where the process stands, this says what a probe is told. Neither answer may
depend on a coordinator or a store being reachable now: while the lease holds, known shards work on
without both (I7), and a probe that took all nodes out of service at once would make an outage of a
pause.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ProbeInput:
    """Where a process stands in its cluster, as far as it knows itself."""

    started: bool = False
    """Whether it ever began to join."""
    failed: str = ""
    """What ended it for good, if something did; joining anew is not the end."""
    joined: bool = False
    """Whether an incarnation of it stands in the store."""
    was_joined: bool = False
    """Whether an earlier incarnation did: then it lost its lease and joins anew (L5)."""
    valid: bool = False
    """Whether that incarnation may act now (L3)."""
    viewed: bool = False
    """Whether it saw a view of the cluster that has its own record in it."""
    configured: bool = False
    """Whether that view says how many shards its roles have."""
    leaving: bool = False


@dataclass(frozen=True, slots=True)
class ProbeAnswer:
    """What a probe is told."""

    ok: bool
    reason: str


def health(at: ProbeInput) -> ProbeAnswer:
    """Whether restarting the process would not help: it runs, or joins by itself."""
    if at.failed:
        return ProbeAnswer(False, f"ended for good: {at.failed}")
    return ProbeAnswer(True, "runs")


def readiness(at: ProbeInput) -> ProbeAnswer:
    """Whether the process takes part: registered, with a first view of the assignment, to stay."""
    if at.failed:
        return ProbeAnswer(False, f"ended for good: {at.failed}")
    if at.leaving:
        return ProbeAnswer(False, "leaving the cluster")
    if not at.started:
        return ProbeAnswer(False, "not started")
    if not at.joined:
        if at.was_joined:
            return ProbeAnswer(False, "lost its lease and joins anew")
        return ProbeAnswer(False, "not registered yet")
    if not at.valid:
        return ProbeAnswer(False, "the lease ran out")
    if not at.viewed:
        return ProbeAnswer(False, "waits for the first view of the cluster")
    if not at.configured:
        return ProbeAnswer(False, "waits for the number of shards of its roles")
    return ProbeAnswer(True, "takes part")
