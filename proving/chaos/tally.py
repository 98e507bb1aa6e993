"""What a chaos run went through, counted; for its live line and its report.

Filled by `proving.chaos.round`. Nothing here judges.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

PLAIN = (
    "kill", "freeze", "long freeze", "partition", "one way", "cut", "delay", "loss",
    "clock step", "full disk", "store cut", "restart", "roll",
)  # fmt: skip
AIMED = (
    "slow move", "asleep", "unheard", "severed", "crossed", "hostage", "deaf leader",
    "stale leader", "cut leader", "contest", "slow store",
)  # fmt: skip
"""They wait for a moment that need not come within a few minutes."""

SERVED = ("server kill", "server freeze", "server cut")
"""Only a store with a server has them."""

KINDS = PLAIN + AIMED + SERVED
"""Every kind of fault; a run that misses one has not done its work."""

NONE = "none"
"""No fault at all: then every gap counts, for nothing explains one."""

CALLS = ("ask", "tell", "nested", "event-sourced")
WORK = ("messages", "moves")
"""What the load is to bring about: without any nothing was tried."""


@dataclass(slots=True)
class Tally:
    """Counts of a run, or of one round."""

    rounds: int = 0
    long: int = 0
    """Rounds that are long enough for a calm in which liveness can be judged (L)."""
    calm: int = 0
    """Rounds that ended in such a calm, so that it was."""
    faultless: int = 0
    """Rounds of load and moves alone: nothing in them explains a gap."""
    messages: int = 0
    moves: int = 0
    fences: int = 0
    starved: int = 0
    """How often the machine did not let the harness itself run."""
    held_back: int = 0
    """Calls that were not made, because enough others to the same room had no answer yet."""
    restarts: int = 0
    """Processes that were started again, for whatever reason."""
    events: int = 0
    faults: Counter[str] = field(default_factory=Counter[str])
    calls: Counter[str] = field(default_factory=Counter[str])
    outcomes: Counter[str] = field(default_factory=Counter[str])
    rules: Counter[str] = field(default_factory=Counter[str])
    """Violations, by rule."""

    def add(self, other: Tally) -> None:
        """Take in another one."""
        for name in (
            "rounds", "long", "calm", "faultless", "messages", "moves", "fences", "starved",
            "held_back", "restarts", "events",
        ):  # fmt: skip
            setattr(self, name, getattr(self, name) + getattr(other, name))
        for name in ("faults", "calls", "outcomes", "rules"):
            getattr(self, name).update(getattr(other, name))

    @property
    def violations(self) -> int:
        """How many there were."""
        return sum(self.rules.values())

    def missing(self) -> list[str]:
        """Kinds of faults, kinds of calls, and what all of them are for, that never happened."""
        faults = [kind for kind in KINDS if not self.faults[kind]]
        calls = [call for call in CALLS if not self.calls[call]]
        counts = {"messages": self.messages, "moves": self.moves}
        return faults + calls + [what for what in WORK if not counts[what]]

    def line(self, head: str) -> str:
        """The live line; what matters most comes first, for a terminal may be narrow."""
        faults = " ".join(f"{kind.replace(' ', '-')} {self.faults[kind]}" for kind in KINDS)
        return (
            f"{head} | violations {self.violations} | messages {self.messages:,} "
            f"moves {self.moves:,} faults {self.faults.total():,} | {faults}"
        )

    def report(self) -> str:
        """All counts, for people."""
        lines = [
            f"rounds                {self.rounds:>9,}",
            f"  judged for liveness {self.calm:>9,}",
            f"rounds without faults {self.faultless:>9,}",
            f"messages that ran     {self.messages:>9,}",
            f"moves                 {self.moves:>9,}",
            f"fences                {self.fences:>9,}",
            f"times starved         {self.starved:>9,}",
            f"calls held back       {self.held_back:>9,}",
            f"processes restarted   {self.restarts:>9,}",
            f"events judged         {self.events:>9,}",
            *_table("calls", self.calls, CALLS),
            *_table("outcomes", self.outcomes, sorted(self.outcomes)),
            *_table("faults", self.faults, KINDS),
            f"violations            {self.violations:>9,}",
            *(f"  {rule:<20}{count:>9,}" for rule, count in sorted(self.rules.items())),
        ]
        return "\n".join(lines)


def _table(title: str, counts: Counter[str], names: tuple[str, ...] | list[str]) -> list[str]:
    return [title, *(f"  {name:<20}{counts[name]:>9,}" for name in names)]
