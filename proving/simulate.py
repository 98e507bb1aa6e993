"""`python -m proving.simulate`: seeds of the fault profiles in virtual time, judged; one of them as
a timeline.

The runs themselves are those of `proving.campaign`; this only chooses, shows progress and
prints.
"""

from __future__ import annotations

import gc
import logging
import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from domicile.ops.console import FAILED, INTERRUPTED, USAGE, examples, fail, writable

if TYPE_CHECKING:
    from proving.campaign import Result
    from proving.profile import Profile

PROGRESS_S = 1.0
"""How often progress is shown."""
SHRUNK = 3
"""The most bad seeds that are shrunk."""

TOLD = 10
"""The most bad seeds that are told of."""

DEFAULT_SEEDS = "0:100"


def sim(
    profile: Annotated[
        str, typer.Option(metavar="NAME", help="Which faults; mixed takes all profiles in turn.")
    ] = "mixed",
    seed: Annotated[
        int | None, typer.Option(min=0, show_default=False, help="Run this seed alone.")
    ] = None,
    seeds: Annotated[
        str | None,
        typer.Option(
            metavar="FIRST:END", show_default=DEFAULT_SEEDS, help="Run these; END not included."
        ),
    ] = None,
    jobs: Annotated[
        int, typer.Option(min=1, show_default="one per core", help="Processes to run seeds in.")
    ] = os.cpu_count() or 1,
    trace: Annotated[
        bool, typer.Option("--trace", help="Print the timeline of --seed: nodes, shards, faults.")
    ] = False,
    svg: Annotated[
        Path | None,
        typer.Option(show_default=False, dir_okay=False, help="Draw the timeline into this file."),
    ] = None,
    verbose: Annotated[
        bool, typer.Option("--verbose", help="Show tables of faults also for a few seeds.")
    ] = False,
    keep: Annotated[
        str | None,
        typer.Option(
            metavar="1,2",
            show_default=False,
            help="Of --seed: only these strikes, or none; the others are left out.",
        ),
    ] = None,
) -> None:
    """Simulate whole clusters under faults, in virtual time, and judge what happened.

    Every seed is one run that repeats exactly. A bad seed is shrunk to the strikes it needs and
    printed with the command that repeats it. Exits with 0 only if no promise was broken.
    """
    from proving.profiles import MIXED, SPECS

    if profile not in (MIXED, *SPECS):
        fail(f"--profile {profile!r} is not one of {', '.join((MIXED, *SPECS))}", USAGE)
    if seed is not None and seeds is not None:
        fail("say --seed or --seeds, not both", USAGE)
    if seed is None and (trace or svg is not None or keep is not None):
        fail("--trace, --svg and --keep are of one seed: say which, as in --seed 17", USAGE)
    if svg is not None:
        writable("--svg", svg)
    log = logging.getLogger("domicile")
    level = log.level
    log.setLevel(logging.CRITICAL)
    try:
        if seed is not None:
            code = _one(seed, profile, keep, trace, svg)
        else:
            code = _many(_range(seeds or DEFAULT_SEEDS), profile, jobs, verbose)
    except KeyboardInterrupt:
        fail("interrupted", INTERRUPTED)
    finally:
        log.setLevel(level)
    raise typer.Exit(code)


def _range(text: str) -> range:
    first, colon, end = text.partition(":")
    if not (colon and first.isdecimal() and end.isdecimal() and int(first) < int(end)):
        fail(f"--seeds {text!r} must look like {DEFAULT_SEEDS}: first:end, end not included", USAGE)
    return range(int(first), int(end))


# one seed


def _one(seed: int, profile: str, keep: str | None, trace: bool, svg: Path | None) -> int:
    from proving.campaign import judge
    from proving.profile import Profile
    from proving.profiles import profile_of

    name = profile_of(profile, seed)
    run = Profile(seed, name, () if keep is None else _skip(seed, name, keep))
    try:
        result = judge(run)
        if trace or svg is not None:
            _show(run, result, trace, svg)
    finally:
        run.sim.close()
    if result.ok:
        typer.echo(f"seed {seed} of {name}: zero violations")
        if not trace:
            for struck in result.tally.strikes:
                typer.echo(f"  {struck.at:8.3f} s  strike {struck.number}: {struck.what}")
        return 0
    _explain(result, smaller=keep is None and not trace)
    return FAILED


def _skip(seed: int, name: str, keep: str) -> list[int]:
    """The numbers of all strikes but those to be kept."""
    from proving.profile import Profile

    words = [word for word in keep.split(",") if word] if keep != "none" else []
    if not all(word.strip().isdecimal() for word in words) or not (words or keep == "none"):
        fail(f"--keep {keep!r} must look like 3,7, or be none", USAGE)
    run = Profile(seed, name)
    run.sim.close()
    kept = [int(word) for word in words]
    for number in kept:
        if number not in run.strikes:
            last = run.strikes[-1] if run.strikes else 0
            fail(f"--keep {keep}: seed {seed} of {name} has strikes up to {last} only", USAGE)
    return [number for number in run.strikes if number not in kept]


def _show(run: Profile, result: Result, trace: bool, svg: Path | None) -> None:
    from domicile.testing.checkers import check
    from domicile.testing.timeline.picture import draw
    from domicile.testing.timeline.trace import trace as traced_of
    from domicile.testing.timeline.words import text

    found = check(run.sim.history)
    verdict = f"{len(found)} violations" if found else "zero violations"
    title = f"seed {result.seed} of {result.profile}: {verdict}"
    traced = traced_of(run.sim.history, found, title=title)
    if trace:
        sys.stdout.write(text(traced) + "\n")
    if svg is not None:
        svg.write_text(draw(traced), encoding="utf-8")
        typer.echo(f"drawn into {svg}", err=True)


# many seeds


def _many(seeds: Sequence[int], profile: str, jobs: int, verbose: bool) -> int:
    from proving.coverage import report, shortfalls

    began = time.monotonic()
    results = _run(seeds, profile, min(jobs, len(seeds)))
    typer.echo(report(results, time.monotonic() - began, verbose=verbose))
    bad = [result for result in results if not result.ok]
    for number, result in enumerate(bad[:TOLD]):
        typer.echo("")
        _explain(result, smaller=number < SHRUNK)
    missing = shortfalls(results, whole=len(results) >= 1000)
    for line in missing[:20]:
        typer.echo(line)
    verdict = f"{len(bad)} bad seeds" if bad else "zero violations"
    typer.echo(f"\n{verdict}" + (f", {len(missing)} shortfalls" if missing else ""))
    return FAILED if bad or missing else 0


def _run(seeds: Sequence[int], profile: str, jobs: int) -> list[Result]:
    from proving.campaign import run_seed

    work = partial(run_seed, profile=profile)
    results: list[Result] = []
    progress = _Progress(len(seeds))
    context = multiprocessing.get_context("spawn")
    with context.Pool(jobs, initializer=_begin) as pool:
        for result in pool.imap(work, seeds, chunksize=2):
            results.append(result)
            progress.told(len(results), sum(not one.ok for one in results))
    progress.end()
    return results


def _begin() -> None:
    """In each process: Ctrl-C is the parent's to hear, and what is imported lives for ever."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    gc.freeze()


class _Progress:
    """How far it is, on standard error: one line at a terminal, else now and then one more."""

    def __init__(self, total: int) -> None:
        self._total = total
        self._live = sys.stderr.isatty()
        self._next = time.monotonic() + PROGRESS_S
        self._pause_s = PROGRESS_S if self._live else 10.0
        self._shown = False

    def told(self, done: int, bad: int) -> None:
        now = time.monotonic()
        if now >= self._next:
            self._next = now + (0.1 if self._live else self._pause_s)
            self._shown = True
            line = f"{done}/{self._total} seeds, {bad} bad"
            typer.echo(f"\r{line}" if self._live else line, err=True, nl=not self._live)

    def end(self) -> None:
        if self._shown and self._live:
            typer.echo("", err=True)


def _explain(result: Result, *, smaller: bool) -> None:
    from proving.campaign import COMMAND, explain

    if smaller:
        told = f"seed {result.seed} is bad: looking for the fewest strikes that make it so"
        typer.echo(told, err=True)
    for line in explain(result, smaller=smaller):
        typer.echo(line.replace(COMMAND, "python -m proving.simulate"))


app = typer.Typer(add_completion=False, rich_markup_mode="rich")
app.command(
    epilog=examples(
        "python -m proving.simulate",
        "python -m proving.simulate --profile store --seeds 0:1000 --jobs 4",
        "python -m proving.simulate --seed 17 --trace --svg build/seed-17.svg",
        "python -m proving.simulate --seed 17 --profile network --keep 3,7 --trace",
    )
)(sim)

if __name__ == "__main__":
    app()
