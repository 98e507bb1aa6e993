"""Random faults on a cluster of real processes under load, judged by the simulator's checkers.

    python -m domicile.testing.chaos --minutes 20 --seed 1        or: make chaos MINUTES=20 SEED=1

Prints a live line of counts and a report in the end. Exit code 0 only if no checker objected and
every kind of fault and of call happened; a failing round leaves a bundle, and its name is printed.
Ctrl-C ends the round that is under way, judges it and reports; a second one ends it all at once.
"""

from __future__ import annotations

import argparse
import asyncio
import math
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from domicile.config import FENCINGS
from domicile.testing.chaos.bundle import leave
from domicile.testing.chaos.round import Result, RoundPlan, play
from domicile.testing.chaos.tally import AIMED, KINDS, NONE, Tally
from domicile.testing.surroundings import Network

ROUND_S = 120.0
"""How long a round is, about; also what a run's memory is bounded by."""

LONG_MINUTES = 10.0
"""In a run of so many every kind of fault must strike; aimed ones may miss in a shorter one."""

RATE = 60.0
"""Calls per second; with nested asks about twice as many messages."""

SHOWN = 5
INTERRUPTED = 130
"""The exit code of whoever is interrupted twice, as shells have it for SIGINT."""

LINE_S = 10.0
"""How often the live line comes, unless said, where it can't be overwritten."""


def _say(text: str = "", end: str = "\n") -> None:
    sys.stdout.write(text + end)
    sys.stdout.flush()


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The options; a mistake ends the program with exit code 2."""
    parser = argparse.ArgumentParser(
        prog="python -m domicile.testing.chaos", description=(__doc__ or "").splitlines()[0],
        epilog=f"Kinds of faults: {', '.join(KINDS)}.",
    )  # fmt: skip
    add = parser.add_argument
    add("--minutes", type=_positive, default=2.0, help="how long, in rounds of about two")
    add("--seed", type=int, default=1, help="what faults and load are drawn from")
    add("--nodes", type=int, default=5, help="at least 3")
    add("--rate", type=_positive, default=RATE, help="calls per second")
    add("--round", type=int, help="only this round of the run")
    add("--out", type=Path, help="where a failing round leaves its bundle")
    add("--every", type=_positive, help="seconds between two live lines")
    add(
        "--network", default="auto", choices=("auto", "namespaces", "loopback"),
        help="namespaces need root; auto takes them where it can",
    )  # fmt: skip
    add("--managers", type=int, default=0, help="coordinators of their own; default: nodes are")
    add("--fencing", default="lease", choices=FENCINGS)
    add("--eager", action="store_true", help="judge while it goes on, end at the first violation")
    add(
        "--only", action="append", default=[], choices=(*KINDS, NONE), metavar="KIND",
        help="only faults of this kind; may be repeated; 'none': load and moves alone",
    )  # fmt: skip
    options = parser.parse_args(arguments)
    if options.nodes < 3:
        parser.error("--nodes must be at least 3")
    if options.managers < 0:
        parser.error("--managers must not be negative")
    rounds = _rounds(options.minutes)
    if options.round is not None and not 1 <= options.round <= rounds:
        parser.error(f"--round must be from 1 to {rounds}: a run of {options.minutes:g} minutes")
    return options


def _positive(text: str) -> float:
    """A number above 0, for argparse."""
    number = float(text)
    if not 0 < number < math.inf:
        raise argparse.ArgumentTypeError(f"{text} is not above 0")
    return number


def _rounds(minutes: float) -> int:
    """How many rounds a run has."""
    return max(1, round(minutes * 60.0 / ROUND_S))


def plans(options: argparse.Namespace, out: Path) -> list[RoundPlan]:
    """The rounds of a run: all of the same length."""
    total_s = options.minutes * 60.0
    count = _rounds(options.minutes)
    network: Network = options.network
    return [
        RoundPlan(
            seed=options.seed,
            number=number,
            nodes=options.nodes,
            length_s=total_s / count,
            rate=options.rate,
            network=network,
            directory=out / f"seed-{options.seed}-round-{number}",
            eager=options.eager,
            only=tuple(options.only),
            managers=options.managers,
            fencing=options.fencing,
        )
        for number in range(1, count + 1)
        if options.round in (None, number)
    ]


def repeat(options: argparse.Namespace, plan: RoundPlan) -> str:
    """The command that repeats one round, as far as real processes repeat."""
    return (
        f"python -m domicile.testing.chaos --minutes {options.minutes:g} --seed {plan.seed} "
        f"--nodes {plan.nodes} --rate {plan.rate:g} --network {options.network} "
        f"--managers {plan.managers} --fencing {plan.fencing} --round {plan.number}"
        + "".join(f" --only '{kind}'" for kind in plan.only)
    )


async def _live(tally: Tally, done: Tally, head: str, every_s: float | None) -> None:
    """The live line: overwritten on a terminal, as far as it fits, now and then elsewhere."""
    terminal = sys.stdout.isatty()
    every_s = every_s or (1.0 if terminal else LINE_S)
    began = time.monotonic()
    while True:
        await asyncio.sleep(every_s)
        shown = Tally()
        shown.add(done)
        shown.add(tally)
        line = shown.line(f"{head} {time.monotonic() - began:3.0f} s")
        if terminal:
            # One that wraps could not be overwritten.
            line = line[: shutil.get_terminal_size().columns - 1]
        _say(f"\r{line}\x1b[K" if terminal else line, end="" if terminal else "\n")


async def _run(options: argparse.Namespace, out: Path) -> int:
    stop, whole = asyncio.Event(), asyncio.current_task()
    assert whole is not None

    def asked() -> None:
        if stop.is_set():
            whole.cancel()
        else:
            _say("\nends this round and judges it; asked once more, ends at once")
        stop.set()

    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, asked)
    done, wrong = Tally(), list[str]()
    rounds = plans(options, out)
    began = time.monotonic()
    for plan in rounds:
        if stop.is_set():
            break
        tally = Tally()
        head = f"round {plan.number}/{rounds[-1].number}"
        showing = asyncio.create_task(_live(tally, done, head, options.every))
        try:
            result = await play(plan, tally, stop)
        finally:
            showing.cancel()
            if sys.stdout.isatty():
                _say()
        done.add(result.tally)
        if result.violations:
            wrong.append(_told(result, plan, repeat(options, plan)))
            _say(wrong[-1])
        else:
            await asyncio.to_thread(shutil.rmtree, plan.directory, True)
    _say(f"\nchaos: seed {options.seed}, {time.monotonic() - began:.0f} s")
    _say(done.report())
    missing = [what for what in done.missing() if what not in unwanted(options.only)]
    if missing:
        _say(f"never happened: {', '.join(missing)}")
    for told in wrong:
        # Again, since this end may be all that is kept of a long log.
        _say(told)
    return verdict(done, options.minutes, options.only)


def verdict(tally: Tally, minutes: float, only: Sequence[str] = ()) -> int:
    """The exit code: 0 only if nobody objected and everything happened that had to."""
    excused = [*unwanted(only)]
    if minutes < LONG_MINUTES and not only:
        excused += AIMED
    missing = [what for what in tally.missing() if what not in excused]
    return 1 if tally.violations or missing else 0


def unwanted(only: Sequence[str]) -> list[str]:
    """Kinds of faults that were not asked for."""
    return [kind for kind in KINDS if only and kind not in only]


def _told(result: Result, plan: RoundPlan, command: str) -> str:
    """What was wrong with a round and where to find the rest, which is left there."""
    title = f"chaos, seed {plan.seed}, round {plan.number}"
    leave(plan.directory, result.history, result.violations, command, title)
    told = [str(violation) for violation in result.violations[:SHOWN]]
    more = len(result.violations) - SHOWN
    if more > 0:
        told.append(f"... and {more} more in {plan.directory / 'violations.txt'}")
    told.append(f"bundle: {plan.directory}\nrepeat with: {command}")
    return "\n" + "\n\n".join(told)


def main(arguments: Sequence[str] | None = None) -> int:
    """The command."""
    options = parse(arguments)
    given: Path | None = options.out
    out = Path(tempfile.mkdtemp(prefix="domicile-chaos-")) if given is None else given
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        _say(f"{out} can't be a directory for bundles ({error.strerror}); name another by --out")
        return 2
    try:
        return asyncio.run(_run(options, out))
    except asyncio.CancelledError:
        _say(f"\nended at once, without a verdict; what there is of it is in {out}")
        return INTERRUPTED
    finally:
        if given is None:
            with suppress(OSError):
                out.rmdir()  # unless there is a bundle in it


if __name__ == "__main__":
    sys.exit(main())
