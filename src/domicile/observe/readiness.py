"""Whether a process may be sent work, and whether it should be restarted (RG-23).

Pure: a shell describes the state of the process, this module decides the answer to a probe. Neither
answer may depend on a coordinator or a store being reachable now. While the lease holds, known
shards work on without both (I7). A probe that took all nodes out of service at once would turn a
pause into an outage.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ProbeInput:
    """The state of a process in its cluster, as far as it knows itself."""

    started: bool = False
    """Whether it ever began to join."""
    failed: str = ""
    """The reason why it stopped permanently, if it did; rejoining is not an end."""
    joined: bool = False
    """Whether an incarnation of it is registered in the store."""
    was_joined: bool = False
    """Whether an earlier incarnation was: then it lost its lease and is rejoining (L5)."""
    valid: bool = False
    """Whether that incarnation may act now (L3)."""
    viewed: bool = False
    """Whether it saw a view of the cluster that has its own record in it."""
    configured: bool = False
    """Whether that view says how many shards its roles have."""
    leaving: bool = False


@dataclass(frozen=True, slots=True)
class ProbeAnswer:
    """The answer to a probe."""

    ok: bool
    reason: str


def health(at: ProbeInput) -> ProbeAnswer:
    """Whether the process needs no restart: it runs, or joins by itself."""
    if at.failed:
        return ProbeAnswer(False, f"stopped permanently: {at.failed}")
    return ProbeAnswer(True, "runs")


def readiness(at: ProbeInput) -> ProbeAnswer:
    """Whether the process takes part: registered, with a first view of the shard map, and not
    leaving."""
    if at.failed:
        return ProbeAnswer(False, f"stopped permanently: {at.failed}")
    if at.leaving:
        return ProbeAnswer(False, "leaving the cluster")
    if not at.started:
        return ProbeAnswer(False, "not started")
    if not at.joined:
        if at.was_joined:
            return ProbeAnswer(False, "lost its lease and is rejoining")
        return ProbeAnswer(False, "not registered yet")
    if not at.valid:
        return ProbeAnswer(False, "the lease ran out")
    if not at.viewed:
        return ProbeAnswer(False, "waits for the first view of the cluster")
    if not at.configured:
        return ProbeAnswer(False, "waits for the number of shards of its roles")
    return ProbeAnswer(True, "takes part")
