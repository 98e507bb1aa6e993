"""What a chaos run comes to: its exit code, and what is told beside its counts.

Called by `proving.chaos.__main__` in the end of a run. Pure: it reads the counts and the
plans of the rounds, and knows nothing of processes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from proving.chaos.round import LONG_S, RoundPlan
from proving.chaos.tally import AIMED, KINDS, Tally

LONG_MINUTES = 10.0
"""In a run of so many every kind of fault must strike, and half of the rounds be judged for
liveness; in a shorter one aimed faults may miss, and one round is enough."""

FINE = 0
FAILED = 1
INTERRUPTED = 130
"""As shells have it for SIGINT, and as the other commands end: what was asked for was not done."""


@dataclass(slots=True)
class Verdict:
    """The exit code, and why it is not 0."""

    code: int = FINE
    said: list[str] = field(default_factory=list[str])
    missing: list[str] = field(default_factory=list[str])
    """Kinds of faults, calls and work that had to happen, and did not."""


def conclude(tally: Tally, plans: Sequence[RoundPlan], *, interrupted: bool = False) -> Verdict:
    """Fine only if nobody objected, and everything happened and was judged that had to be.

    Whoever is interrupted may have found a violation, but never proves that there is none.
    """
    verdict = Verdict()
    long_run = sum(plan.length_s for plan in plans) >= LONG_MINUTES * 60.0
    wanted = {kind for plan in plans for kind in plan.kinds}
    missing = [what for what in tally.missing() if what not in KINDS or what in wanted]
    # Who asks for certain kinds only wants to see just these, however short the run is.
    lenient = not long_run and not any(plan.only for plan in plans)
    excused = [what for what in missing if lenient and what in AIMED]
    verdict.missing = [what for what in missing if what not in excused]
    if tally.violations:
        verdict.said.append(f"failed: {tally.violations} violations")
    if interrupted:
        verdict.said.append(
            f"interrupted: no verdict on the run; of its {len(plans)} rounds {tally.rounds} were "
            f"begun, and {tally.calm} judged for liveness"
        )
    if excused:
        verdict.said.append(f"never happened, as may be in a short run: {', '.join(excused)}")
    if verdict.missing:
        verdict.said.append(f"never happened: {', '.join(verdict.missing)}")
    unjudged = "" if interrupted else _unjudged(tally, long_run=long_run)
    if unjudged:
        verdict.said.append(unjudged)
    elif not any(plan.long for plan in plans):
        verdict.said.append(f"rounds of less than {LONG_S:g} s are not judged for liveness")
    if tally.violations:
        verdict.code = FAILED
    elif interrupted:
        verdict.code = INTERRUPTED
    elif verdict.missing or unjudged:
        verdict.code = FAILED
    return verdict


def _unjudged(tally: Tally, *, long_run: bool) -> str:
    """Why too few rounds were judged for liveness; empty if enough were."""
    least = max(1.0, tally.long / 2 if long_run else 0.0)
    if not tally.long or tally.calm >= least:
        return ""
    told = f"not judged for liveness: {tally.long - tally.calm} of {tally.long} rounds"
    if tally.starved:
        told += (
            f"; {tally.starved} times the machine did not let this process run, and each begins "
            "a calm anew: run it where less else is going on"
        )
    return told
