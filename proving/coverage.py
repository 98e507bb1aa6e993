"""What a campaign went through: totals, the table of faults by step, and what was missed.

Called by the campaign and by `proving.long`. Counting only; verdicts on histories are
the checkers'.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from textwrap import wrap
from typing import Protocol

from proving.profiles import PROFILES, SPECS
from proving.seed_result import LEAST_FAULTS, LEAST_MESSAGES, MID_MOVE, Tally

LEAST_MID_MOVE = 0.3

FAULTS = tuple(sorted({kind: None for spec in PROFILES.values() for kind in spec.kinds}))
STEPS = (
    "coordinator absent", "coordinator batching releases", "coordinator committing",
    "coordinator idle", "coordinator listing", "coordinator settling",
    "coordinator waiting for releases", "home lost", "moving, owner draining",
    "moving, owner gone", "moving, owner open", "moving, owner released", "serving, not yet open",
)  # fmt: skip

RARE = ("moving, owner closed",)
"""Steps that are shown when they are struck, and not asked for."""

EVERYWHERE = ("coordinator idle", "coordinator waiting for releases", "home lost", MID_MOVE)
"""Steps that every kind of fault must strike in a campaign of `MANY` seeds or more."""

FREQUENT = (
    "block", "crash", "cut", "duplicate", "freeze", "freeze past the lease", "late answers",
    "leader frozen", "linger", "lost replies", "outage", "partition", "several crash", "slow",
    "stop", "store clock", "unknown", "watch",
)  # fmt: skip
"""Kinds that must strike the shorter steps too."""

SHORTER = (
    "coordinator committing", "moving, owner draining", "moving, owner open",
    "moving, owner released",
)  # fmt: skip

MANY = 1_000


class Judged(Protocol):
    """What is needed of a seed's result."""

    @property
    def seed(self) -> int:
        """Which seed."""
        ...

    @property
    def profile(self) -> str:
        """Of which profile."""
        ...

    @property
    def ok(self) -> bool:
        """Whether no promise was broken."""
        ...

    @property
    def tally(self) -> Tally:
        """What it went through."""
        ...

    @property
    def cpu_s(self) -> float:
        """What it cost."""
        ...


def shortfalls(results: Sequence[Judged], whole: bool) -> list[str]:
    """What the seeds should have gone through and did not."""
    missing: list[str] = []
    for result in results:
        missing += too_little(result)
    if whole:
        faults, struck = totals(results)
        hits: Counter[tuple[str, str]] = Counter()
        for result in results:
            hits.update(result.tally.hits)
        profiles = {result.profile: None for result in results}
        share = sum(result.tally.mid_move for result in results) / len(results)
        missing += unmet(profiles, faults, struck, share)
        if len(results) >= MANY:
            missing += unhit(profiles, hits)
    return missing


def too_little(result: Judged) -> list[str]:
    """What one seed fell short of."""
    tally = result.tally
    return [
        f"seed {result.seed}: {value} {name}, at least {least} wanted"
        for name, value, least in (
            ("messages", tally.messages, LEAST_MESSAGES),
            ("faults", sum(tally.faults.values()), LEAST_FAULTS),
            ("completed moves", tally.moves, SPECS[result.profile].least_moves),
        )
        if value < least
    ]


def unmet(
    profiles: Collection[str],
    faults: Counter[str],
    struck: Counter[str],
    mid_move: float,
) -> list[str]:
    """Faults and steps that no seed of some profiles met."""
    kinds = sorted({kind for name in profiles for kind in SPECS[name].kinds})
    missing = [f"no seed had the fault {name!r}" for name in kinds if not faults[name]]
    missing += [f"no fault struck {name!r}" for name in STEPS if not struck[name]]
    if mid_move < LEAST_MID_MOVE:
        missing.append(f"only {mid_move:.0%} of seeds had a fault in a hand-off with mail")
    return missing


def unhit(profiles: Collection[str], hits: Counter[tuple[str, str]]) -> list[str]:
    """Combinations of a fault and a step that many seeds should have had."""
    kinds = sorted({kind for name in profiles for kind in SPECS[name].kinds})
    return [
        f"no seed had the fault {kind!r} at the step {step!r}"
        for kind in kinds
        for step in (*EVERYWHERE, *(SHORTER if kind in FREQUENT else ()))
        if not hits[kind, step]
    ]


def totals(results: Sequence[Judged]) -> tuple[Counter[str], Counter[str]]:
    """All faults by kind, and by the step that they struck."""
    faults: Counter[str] = Counter()
    struck: Counter[str] = Counter()
    for result in results:
        faults.update(result.tally.faults)
        struck.update(result.tally.struck)
    return faults, struck


TABLES_FROM = 100
"""From this many seeds on the tables are shown unasked: with fewer, most of their cells are
empty."""


def report(results: Sequence[Judged], wall_s: float, *, verbose: bool = False) -> str:
    """A page for people: a summary that fits a screen, and with `verbose` or many seeds tables."""
    faults, struck = totals(results)
    hits: Counter[tuple[str, str]] = Counter()
    for result in results:
        hits.update(result.tally.hits)
    count = max(1, len(results))
    cpu = sorted(result.cpu_s for result in results) or [0.0]
    profiles = Counter(result.profile for result in results)
    kinds = sorted({*faults, *(kind for name in profiles for kind in SPECS[name].kinds)})
    lines = [
        f"{len(results)} seeds in {wall_s:.0f} s; CPU per seed: median {cpu[len(cpu) // 2]:.2f} s, "
        f"most {cpu[-1]:.2f} s",
        f"messages {sum(r.tally.messages for r in results):,}, "
        f"completed moves {sum(r.tally.moves for r in results):,}, "
        f"faults {sum(faults.values()):,}",
        f"seeds with a fault in a hand-off with mail in flight: "
        f"{sum(r.tally.mid_move for r in results) / count:.0%}",
        "profiles: " + ", ".join(f"{name} {seeds:,}" for name, seeds in sorted(profiles.items())),
        f"bad seeds: {sum(not result.ok for result in results):,}",
    ]
    if not verbose and len(results) < TABLES_FROM:
        most = ", ".join(f"{many:,} {name}" for name, many in faults.most_common())
        lines += wrap(f"faults by kind: {most or 'none'}", width=100, subsequent_indent="  ")
        return "\n".join(lines)
    lines += [
        "",
        "faults by kind",
        *(f"  {faults[name]:>7,}  {name}" for name in kinds),
        "",
        "faults by the step they struck",
        *(f"  {struck[name]:>7,}  {name}" for name in sorted({*STEPS, *struck})),
        "",
        *table(kinds, hits),
    ]
    return "\n".join(lines)


def table(kinds: Sequence[str], hits: Counter[tuple[str, str]]) -> list[str]:
    """Faults by kind (rows) and step (columns); a dot where none struck."""
    width = max([len(kind) for kind in kinds], default=0)
    lines = ["faults by kind and step:"]
    steps = (*STEPS, *RARE)
    lines += [f"  {chr(ord('a') + index)}  {step}" for index, step in enumerate(steps)]
    letters = "".join(f"{chr(ord('a') + index):>7}" for index in range(len(steps)))
    lines.append(f"  {'':<{width}}{letters}")
    for kind in kinds:
        cells = [hits[kind, step] for step in steps]
        row = "".join(f"{cell if cell else '.':>7}" for cell in cells)
        lines.append(f"  {kind:<{width}}{row}")
    return lines
