"""Many seeds of the default profile, over several processes: `make sim`.

Prints what the seeds went through and fails on any violation, on a seed that fell short of the
profile, and on a fault or step that no seed hit. A failing seed is one line to repeat:
`python -m domicile.testing.campaign --seeds 17:18`.
"""

from __future__ import annotations

import argparse
import gc
import logging
import multiprocessing
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from domicile.testing.checkers import check
from domicile.testing.profile import Profile
from domicile.testing.standard import LEAST_FAULTS, LEAST_MESSAGES, Tally

LEAST_MOVES = 10
LEAST_MID_MOVE = 0.3

FAULTS = (
    "block", "crash", "cut", "freeze", "freeze past the lease", "late answers", "leader frozen",
    "lost replies", "outage", "partition", "slow", "stalled write", "stop", "watch",
)  # fmt: skip
STEPS = (
    "coordinator absent", "coordinator batching releases", "coordinator committing",
    "coordinator idle", "coordinator listing", "coordinator settling",
    "coordinator waiting for releases", "home lost", "moving, owner draining",
    "moving, owner gone", "moving, owner open", "moving, owner released", "serving, not yet open",
)  # fmt: skip


@dataclass
class Result:
    """One seed, judged."""

    seed: int
    tally: Tally
    cpu_s: float
    violations: list[str] = field(default_factory=lambda: list[str]())
    error: str = ""

    @property
    def ok(self) -> bool:
        """Whether nothing is wrong with the run itself."""
        return not self.violations and not self.error


def run_seed(seed: int) -> Result:
    """Run and judge one seed."""
    log = logging.getLogger("domicile")
    level = log.level
    collecting = gc.isenabled()
    log.setLevel(logging.CRITICAL)
    gc.disable()  # one run's garbage is small; it is collected when its world ends
    try:
        return _run_seed(seed)
    finally:
        log.setLevel(level)
        if collecting:
            gc.enable()


def _run_seed(seed: int) -> Result:
    began = time.process_time()
    profile = Profile(seed)
    sim = profile.sim
    result = Result(seed, profile.tally, 0.0)

    async def main() -> None:
        async with sim:
            await profile.run()

    try:
        sim.world.run(main(), sim.loop)
    except Exception as error:
        result.error = f"{type(error).__name__}: {error}"
    try:
        result.violations = [str(violation) for violation in check(sim.history)]
        if not result.error and sim.world.errors:
            process, context = sim.world.errors[0]
            result.error = f"{process}: {context.get('message')}: {context.get('exception')!r}"
        result.tally = profile.finish()
    finally:
        sim.close()
    result.cpu_s = time.process_time() - began
    return result


def run_seeds(
    seeds: Sequence[int], jobs: int, *, stop_at_first: bool = False, until_verdict: bool = False
) -> list[Result]:
    """Run seeds over processes, with a line of progress; results in the order of seeds.

    `stop_at_first` ends at the first bad seed; with `until_verdict` only violations count.
    """
    results: list[Result] = []
    context = multiprocessing.get_context("spawn")
    show = sys.stderr.isatty()
    # What is imported lives for ever: keep it out of every collection of garbage.
    with context.Pool(jobs, initializer=gc.freeze) as pool:
        for result in pool.imap(run_seed, seeds, chunksize=1 if stop_at_first else 4):
            results.append(result)
            if show or len(results) % 100 == 0:
                bad = sum(not one.ok for one in results)
                end = "\r" if show else "\n"
                print(f"{len(results)}/{len(seeds)} seeds, {bad} bad", end=end, file=sys.stderr)
            if stop_at_first and (result.violations or not (until_verdict or result.ok)):
                pool.terminate()
                break
    return results


def shortfalls(results: Sequence[Result], whole: bool) -> list[str]:
    """What the seeds should have gone through and did not."""
    missing: list[str] = []
    for result in results:
        tally = result.tally
        for name, value, least in (
            ("messages", tally.messages, LEAST_MESSAGES),
            ("faults", sum(tally.faults.values()), LEAST_FAULTS),
            ("completed moves", tally.moves, LEAST_MOVES),
        ):
            if value < least:
                missing.append(f"seed {result.seed}: {value} {name}, at least {least} wanted")
    if whole:
        faults, struck = totals(results)
        missing += [f"no seed had the fault {name!r}" for name in FAULTS if not faults[name]]
        missing += [f"no fault struck {name!r}" for name in STEPS if not struck[name]]
        share = sum(result.tally.mid_move for result in results) / len(results)
        if share < LEAST_MID_MOVE:
            missing.append(f"only {share:.0%} of seeds had a fault in a hand-off with mail")
    return missing


def totals(results: Sequence[Result]) -> tuple[Counter[str], Counter[str]]:
    """All faults by kind, and by the step that they struck."""
    faults: Counter[str] = Counter()
    struck: Counter[str] = Counter()
    for result in results:
        faults.update(result.tally.faults)
        struck.update(result.tally.struck)
    return faults, struck


def report(results: Sequence[Result], wall_s: float) -> str:
    """A page for people."""
    faults, struck = totals(results)
    count = max(1, len(results))
    cpu = sorted(result.cpu_s for result in results) or [0.0]
    lines = [
        f"{len(results)} seeds in {wall_s:.0f} s; CPU per seed: median {cpu[len(cpu) // 2]:.2f} s, "
        f"most {cpu[-1]:.2f} s",
        f"messages {sum(r.tally.messages for r in results):,}, "
        f"completed moves {sum(r.tally.moves for r in results):,}, "
        f"faults {sum(faults.values()):,}",
        f"seeds with a fault in a hand-off with mail in flight: "
        f"{sum(r.tally.mid_move for r in results) / count:.0%}",
        "",
        "faults by kind",
        *(f"  {faults[name]:>7,}  {name}" for name in sorted({*FAULTS, *faults})),
        "",
        "faults by the step they struck",
        *(f"  {struck[name]:>7,}  {name}" for name in sorted({*STEPS, *struck})),
    ]
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; the exit code says whether all went well."""
    parser = argparse.ArgumentParser(
        prog="python -m domicile.testing.campaign",
        description="Run seeds of the default fault profile and judge their histories.",
        epilog="examples: --seeds 0:1000 --jobs 2    --seeds 17:18 (repeat one seed)",
    )
    parser.add_argument("--seeds", default="0:1000", help="first:end, end not included")
    parser.add_argument("--jobs", type=int, default=2, help="processes to spread them over")
    parser.add_argument("--first", action="store_true", help="stop at the first bad seed")
    options = parser.parse_args(arguments)
    try:
        first, end = (int(part) for part in options.seeds.split(":"))
    except ValueError:
        parser.error(f"--seeds {options.seeds!r} must look like 0:1000")
    if end <= first or options.jobs < 1:
        parser.error("nothing to run: give --seeds first:end with end > first, and --jobs >= 1")
    began = time.monotonic()
    seeds = range(first, end)
    results = run_seeds(seeds, min(options.jobs, len(seeds)), stop_at_first=options.first)
    print(report(results, time.monotonic() - began))
    bad = [result for result in results if not result.ok]
    for result in bad[:10]:
        print(f"\nseed {result.seed} is bad; repeat it with:")
        print(f"  python -m domicile.testing.campaign --seeds {result.seed}:{result.seed + 1}")
        for line in [*result.violations[:3], *([result.error] if result.error else [])]:
            print(f"  {line}")
    missing = [] if options.first else shortfalls(results, whole=len(results) >= 100)
    for line in missing[:20]:
        print(line)
    verdict = "zero violations" if not bad else f"{len(bad)} bad seeds"
    print(f"\n{verdict}" + (f", {len(missing)} shortfalls" if missing else ""))
    return 1 if bad or missing else 0


if __name__ == "__main__":
    sys.exit(main())
