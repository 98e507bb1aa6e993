"""Many seeds of the fault profiles, over several processes: `make sim`.

Prints what the seeds went through and fails on any violation, on a seed that fell short of its
profile, and on a fault or step that no seed hit. A failing seed is shrunk to the strikes that it
needs, and is one line to repeat: `python -m proving.campaign --seed 17 --keep 3,7`.
"""

from __future__ import annotations

import argparse
import gc
import logging
import multiprocessing
import signal
import sys
import time
from collections.abc import Collection, Generator, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from functools import partial

from domicile.testing.checkers import check
from proving.coverage import TABLES_FROM, report, shortfalls
from proving.profile import Profile
from proving.profiles import MIXED, SPECS, profile_of
from proving.seed_result import Tally
from proving.shrink import shrink

COMMAND = "python -m proving.campaign"
SHRUNK = 3
"""The most failing seeds of one campaign that are shrunk."""


@dataclass
class Result:
    """One seed, judged."""

    seed: int
    tally: Tally
    cpu_s: float
    violations: list[str] = field(default_factory=lambda: list[str]())
    error: str = ""
    profile: str = "standard"
    strikes: tuple[int, ...] = ()
    """The numbers of all strikes that were planned and not left out."""

    @property
    def ok(self) -> bool:
        """Whether nothing is wrong with the run itself."""
        return not self.violations and not self.error

    @property
    def kinds(self) -> tuple[str, ...]:
        """Which rules were broken; a run that went wrong otherwise counts as one."""
        rules = {line.split(" ", 1)[0]: None for line in self.violations}
        return tuple(rules) or (("error",) if self.error else ())


def run_seed(seed: int, profile: str = "standard", skip: Collection[int] = ()) -> Result:
    """Run and judge one seed of a profile, without the strikes whose numbers are in `skip`."""
    log = logging.getLogger("domicile")
    level = log.level
    collecting = gc.isenabled()
    log.setLevel(logging.CRITICAL)
    gc.disable()  # one run's garbage is small; it is collected when the run is over
    try:
        result = _run_and_close(Profile(seed, profile_of(profile, seed), skip))
        # Its world was closed while it was still in use, so all of it has survived once.
        gc.collect(1)
        return result
    finally:
        log.setLevel(level)
        if collecting:
            gc.enable()


def _run_and_close(run: Profile) -> Result:
    try:
        return judge(run)
    finally:
        run.sim.close()


def judge(run: Profile) -> Result:
    """Run a profile and judge its history, which stays to be looked at until `sim.close()`."""
    began = time.process_time()
    sim = run.sim
    result = Result(sim.seed, run.tally, 0.0, profile=run.name, strikes=run.strikes)

    async def main() -> None:
        async with sim:
            await run.run()

    try:
        sim.world.run(main(), sim.loop)
    except Exception as error:
        result.error = f"{type(error).__name__}: {error}"
    result.violations = [str(violation) for violation in check(sim.history)]
    if not result.error and sim.world.errors:
        process, context = sim.world.errors[0]
        result.error = f"{process}: {context.get('message')}: {context.get('exception')!r}"
    result.tally = run.finish()
    result.cpu_s = time.process_time() - began
    return result


def stream_seeds(
    seeds: Sequence[int], jobs: int, profile: str, chunk: int
) -> Generator[Result, None, None]:
    """Results in the order of seeds, as they come; closing it ends what is under way."""
    context = multiprocessing.get_context("spawn")
    with context.Pool(jobs, initializer=begin_work) as pool:
        yield from pool.imap(partial(run_seed, profile=profile), seeds, chunksize=chunk)


def begin_work() -> None:
    """In a new process: Ctrl-C is for the one that started it."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # What is imported lives for ever: keep it out of every collection of garbage.
    gc.freeze()


def run_seeds(
    seeds: Sequence[int],
    jobs: int,
    *,
    stop_at_first: bool = False,
    until_verdict: bool = False,
    profile: str = "standard",
) -> list[Result]:
    """Run seeds over processes, with a line of progress; results in the order of seeds.

    `stop_at_first` ends at the first bad seed; with `until_verdict` only violations count.
    """
    results: list[Result] = []
    show = sys.stderr.isatty()
    with closing(stream_seeds(seeds, jobs, profile, 1 if stop_at_first else 4)) as stream:
        for result in stream:
            results.append(result)
            if show or len(results) % 100 == 0:
                bad = sum(not one.ok for one in results)
                end = "\r" if show else "\n"
                print(f"{len(results)}/{len(seeds)} seeds, {bad} bad", end=end, file=sys.stderr)
            if stop_at_first and (result.violations or not (until_verdict or result.ok)):
                break
    return results


def explain(
    result: Result, *, smaller: bool = True, keep: tuple[int, ...] | None = None
) -> list[str]:
    """What is wrong with a seed, what was done to it, and the line that repeats it.

    With `smaller` it is first run again, many times, for the fewest strikes that break the same
    rule; else `keep` says which strikes it had, None for all.
    """
    lines = [f"seed {result.seed} of {result.profile} is bad"]
    if smaller and result.strikes:

        def fails(wanted: tuple[int, ...]) -> bool:
            skip = [number for number in result.strikes if number not in wanted]
            again = run_seed(result.seed, result.profile, skip)
            return result.kinds[0] in again.kinds

        shrunk = shrink(result.strikes, fails)
        if len(shrunk.keep) < len(result.strikes):
            keep = shrunk.keep
            skip = [number for number in result.strikes if number not in keep]
            result = run_seed(result.seed, result.profile, skip)
            more = "" if shrunk.complete else ", perhaps fewer"
            lines[0] += f"; {len(keep)} of its strikes are enough{more} ({shrunk.runs} runs)"
    lines += [f"  {line}" for told in result.violations[:3] for line in told.splitlines()]
    lines += [f"  {result.error}"] if result.error else []
    lines += [
        f"  {struck.at:8.3f} s  strike {struck.number}: {struck.what}"
        for struck in result.tally.strikes
    ]
    only = "" if keep is None else f" --keep {','.join(map(str, keep)) or 'none'}"
    lines.append(f"repeat it with: {COMMAND} --seed {result.seed} --profile {result.profile}{only}")
    return lines


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; the exit code says whether all went well."""
    parser = argparse.ArgumentParser(
        prog=COMMAND,
        description="Run seeds of the fault profiles and judge their histories.",
        epilog="examples: --seeds 0:1000 --jobs 2    --seed 17 --profile store --keep 3,7",
    )
    parser.add_argument("--seeds", default="0:1000", help="first:end, end not included")
    parser.add_argument("--seed", type=int, help="just this one, and what was done to it")
    names = [MIXED, *SPECS]
    parser.add_argument(
        "--profile", default=MIXED, choices=names, metavar="NAME", help=", ".join(names)
    )
    parser.add_argument("--keep", help="of --seed: only these strikes, such as 3,7, or none")
    parser.add_argument("--jobs", type=int, default=2, help="processes to spread them over")
    parser.add_argument("--first", action="store_true", help="stop at the first bad seed")
    parser.add_argument(
        "--verbose", action="store_true", help=f"tables also for fewer than {TABLES_FROM} seeds"
    )
    parser.add_argument("--whole", action="store_true", help="do not shrink bad seeds")
    options = parser.parse_args(arguments)
    if options.seed is not None:
        return _one(parser, options)
    if options.keep is not None:
        parser.error("--keep is of one seed: give --seed too")
    try:
        first, end = (int(part) for part in options.seeds.split(":"))
    except ValueError:
        parser.error(f"--seeds {options.seeds!r} must look like 0:1000")
    if end <= first or options.jobs < 1:
        parser.error("nothing to run: give --seeds first:end with end > first, and --jobs >= 1")
    began = time.monotonic()
    seeds = range(first, end)
    jobs = min(options.jobs, len(seeds))
    results = run_seeds(seeds, jobs, stop_at_first=options.first, profile=options.profile)
    print(report(results, time.monotonic() - began, verbose=options.verbose))
    bad = [result for result in results if not result.ok]
    for index, result in enumerate(bad[:10]):
        print()
        for line in explain(result, smaller=index < SHRUNK and not options.whole):
            print(line)
    missing = [] if options.first else shortfalls(results, whole=len(results) >= 100)
    for line in missing[:20]:
        print(line)
    verdict = "zero violations" if not bad else f"{len(bad)} bad seeds"
    print(f"\n{verdict}" + (f", {len(missing)} shortfalls" if missing else ""))
    return 1 if bad or missing else 0


def _one(parser: argparse.ArgumentParser, options: argparse.Namespace) -> int:
    """One seed, with what was done to it."""
    skip: list[int] = []
    kept: tuple[int, ...] | None = None
    if options.keep is not None:
        text = "" if options.keep == "none" else options.keep
        try:
            keep = [int(part) for part in text.split(",") if part]
        except ValueError:
            parser.error(f"--keep {options.keep!r} must look like 3,7, or be none")
        run = Profile(options.seed, profile_of(options.profile, options.seed))
        run.sim.close()
        unknown = sorted({*keep} - {*run.strikes})
        if unknown:
            parser.error(
                f"--keep {options.keep}: seed {options.seed} of {run.name} has no strike "
                f"{unknown[0]}; it has {run.strikes[0]} to {run.strikes[-1]}"
            )
        skip = [number for number in run.strikes if number not in keep]
        kept = tuple(keep)
    result = run_seed(options.seed, options.profile, skip)
    if result.ok:
        print(f"seed {result.seed} of {result.profile}: zero violations")
        for struck in result.tally.strikes:
            print(f"  {struck.at:8.3f} s  strike {struck.number}: {struck.what}")
        return 0
    smaller = kept is None and not options.whole
    for line in explain(result, smaller=smaller, keep=kept):
        print(line)
    return 1


if __name__ == "__main__":
    sys.exit(main())
