"""The bounded exhaustive search as a command: `make search`.

Prints for each scenario how many states it has, and fails on any violation, on a scenario that
was not searched to its end, and on a kind of fault that struck nowhere.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Sequence

from proving.search.explore import Explored, explore
from proving.search.scenario import FAULTS, Scenario, Violation
from proving.search.scenarios import SCENARIOS

LEAST_STATES = 100_000
REPORT_EVERY = 50_000


def main(arguments: Sequence[str] | None = None) -> int:
    """Search; 0 if nothing is wrong, 1 if something is."""
    parser = argparse.ArgumentParser(
        prog="python -m proving.search",
        description="Every order of events of small clusters, on the real machines.",
    )
    parser.add_argument("--only", metavar="TEXT", help="scenarios whose name contains this")
    parser.add_argument("--limit", type=int, default=2_000_000, help="states of one scenario")
    parser.add_argument("--list", action="store_true", help="show the scenarios and stop")
    options = parser.parse_args(arguments)
    chosen = [scenario for scenario in SCENARIOS if (options.only or "") in scenario.name]
    if not chosen:
        parser.error(f"no scenario's name contains {options.only!r}; see --list")
    if options.list:
        print("\n".join(scenario.name for scenario in chosen))
        return 0
    return _search(chosen, options.limit, whole=not options.only)


def _search(scenarios: Sequence[Scenario], limit: int, whole: bool) -> int:
    began = time.process_time()
    print(_row("scenario", "states", "steps", "depth", "ends", "CPU s", "strikes"))
    found: list[Explored] = []
    bad: list[str] = []
    for scenario in scenarios:
        since = time.process_time()
        try:
            seen = explore(scenario, limit, _report(scenario))
        except Violation as violation:
            print(f"\n{scenario.name}: VIOLATION: {violation}\n")
            bad.append(f"{scenario.name}: {str(violation).splitlines()[0]}")
            continue
        spent_s = time.process_time() - since
        struck = ", ".join(f"{name}: {count:,}" for name, count in seen.faults.items())
        counts = (seen.states, seen.transitions, seen.depth, seen.ends)
        print(_row(scenario.name, *(f"{count:,}" for count in counts), f"{spent_s:.1f}", struck))
        found.append(seen)
        if not seen.complete:
            bad.append(f"{scenario.name}: more than {limit:,} states; raise --limit")
    states = sum(seen.states for seen in found)
    if whole:
        bad += _shortfalls(found, states)
    steps = sum(seen.transitions for seen in found)
    spent_s = time.process_time() - began
    print(f"{states:,} states, {steps:,} steps in {spent_s:.0f} s of CPU; {len(bad)} problems")
    for problem in bad:
        print(f"  {problem}")
    return 1 if bad else 0


def _shortfalls(found: Sequence[Explored], states: int) -> list[str]:
    """What a whole search must have met."""
    struck = {name: None for seen in found for name in seen.faults}
    short = [f"no scenario met the fault {name!r}" for name in FAULTS if name not in struck]
    if states < LEAST_STATES:
        short.append(f"only {states:,} states, at least {LEAST_STATES:,} are wanted")
    return short


def _report(scenario: Scenario) -> Callable[[int, int], None]:
    show = sys.stderr.isatty()

    def report(states: int, depth: int) -> None:
        if show:
            print(f"{scenario.name}: {states:,} states, depth {depth}", end="\r", file=sys.stderr)
        elif states % REPORT_EVERY == 0:
            print(f"{scenario.name}: {states:,} states, depth {depth}", file=sys.stderr)

    return report


def _row(name: str, *columns: str) -> str:
    *numbers, last = columns
    return f"{name:<42}" + "".join(f"{number:>10}" for number in numbers) + f"   {last}".rstrip()


if __name__ == "__main__":
    sys.exit(main())
