"""What a seed of a campaign is, what it counts, and how to see where a run stands.

Shared by the profile that drives a run and the mischief that disturbs it. Looks at processes
without touching them: an observer that fenced what it looks at would hide what it looks for.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import dataclass, field

from domicile.core.handoff.tables import Phase
from domicile.core.ids import ShardKey
from domicile.incarnation.incarnation import RunningIncarnation
from domicile.settings import Settings
from domicile.testing.sim.cluster import Sim
from domicile.testing.sim.node import SimNode

NODES = 5
LEAST_FAULTS = 5
LEAST_MESSAGES = 1_000
SHARDS = 64
ROOMS = 4
FAULTY_S = 27.0
CALM_S = 33.0
POISON_DEATHS = 1000
SETTINGS = Settings(
    shards=SHARDS,
    window=16,
    buffer=40,
    mailbox=16,
    chain=3,
    hold_timeout_s=1.0,
    poison_deaths=POISON_DEATHS,
    poison_window_s=20.0,
)
"""Tight limits, and a hold timeout below the link timeout, so that both are met. Nothing is put in
quarantine: homes die here for no fault of their shards; but deaths are counted, and forgotten."""

MID_MOVE = "a hand-off with mail in flight"

STEPS = ("moving", "draining", "released", "serving", "open", "leading", "told", "finish", "accept")
"""Steps of a hand-off that an ambush can wait for, by the event that shows them."""


@dataclass(frozen=True, slots=True)
class Struck:
    """One thing that was done to the cluster: of which strike, when, and what it was."""

    number: int
    at: float
    what: str


@dataclass
class Tally:
    """What one seed went through."""

    messages: int = 0
    faults: Counter[str] = field(default_factory=lambda: Counter[str]())
    struck: Counter[str] = field(default_factory=lambda: Counter[str]())
    hits: Counter[tuple[str, str]] = field(default_factory=lambda: Counter[tuple[str, str]]())
    """Faults by their kind and the step that they struck."""
    strikes: list[Struck] = field(default_factory=lambda: list[Struck]())
    """What was done to the cluster, in order."""
    moves: int = 0
    mid_move: bool = False
    digest: str = ""


def situation(sim: Sim, shards: dict[ShardKey, list[str]]) -> list[str]:
    """Which steps of the protocols are under way at this moment."""
    steps: dict[str, None] = {}
    for shard in shards:
        entry = sim.entry(shard)
        owner = next((node for node in sim.nodes if node.incarnation == entry.owner), None)
        life = None if owner is None or owner.node is None else owner.node.life
        host = None if life is None else life.runtime.hosts.get(shard)
        phase = None if host is None else host.owner.phase
        if entry.state == "moving":
            steps[f"moving, owner {'gone' if phase is None else phase.value}"] = None
            if waiting(sim, shard):
                steps[MID_MOVE] = None
        elif owner is None or not owner.up:
            steps["home lost"] = None
        elif phase is not Phase.OPEN:
            steps["serving, not yet open"] = None
    steps[f"coordinator {_coordinator_step(sim)}"] = None
    return list(steps)


def waiting(sim: Sim, shard: ShardKey) -> list[int]:
    """The processes with open mail for a shard; -1 is the client."""
    lives: dict[int, RunningIncarnation | None] = {-1: sim.client_life}
    for process in sim.nodes:
        if process.up and process.node is not None:
            lives[process.index] = process.node.life
    found: list[int] = []
    for index, life in lives.items():
        sender = None if life is None else life.runtime.sending.senders.get(shard)
        if sender is not None and sender.waiting():
            found.append(index)
    return found


def _coordinator_step(sim: Sim) -> str:
    for process in sim.nodes:
        step = leading(process)
        if step:
            return step
    return "absent"


def leading(process: SimNode) -> str:
    """What a process does as a leader, if it is one; looks without touching."""
    life = None if process.node is None else process.node.life
    step = "" if life is None or not process.up else life.control.status
    return "" if step in ("following", "over") else step


def seen(task: asyncio.Task[None]) -> None:
    """Errors of a burst surface unless its process was ended."""
    if not task.cancelled():
        error = task.exception()
        if error is not None:
            raise error
