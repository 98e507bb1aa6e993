"""Random faults on a cluster of real processes under load, judged by the simulator's checkers.

    python -m proving.chaos --minutes 20 --seed 1        or: make chaos MINUTES=20 SEED=1

Prints a live line of counts and a report in the end. Exit code 0 only if no checker objected,
every kind of fault and of call happened, and liveness was judged; a failing round leaves a bundle,
and its name is printed. Ctrl-C ends the round that is under way, judges it and reports, with exit
code 130 unless something was wrong; a second one ends it all at once.
"""

from __future__ import annotations

import argparse
import asyncio
import math
import os
import shlex
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from domicile.settings import FENCINGS
from domicile.testing.processes.environment import Network
from proving.chaos.bundle import leave
from proving.chaos.round import Result, RoundPlan, play
from proving.chaos.server import CHAOS_SERVERS, EMBEDDED, NO_SERVER, StoreServer
from proving.chaos.tally import KINDS, NONE, SERVED, Tally
from proving.chaos.verdict import FAILED, INTERRUPTED, Verdict, conclude

ROUND_S = 120.0
"""How long a round is, about; also what a run's memory is bounded by."""

FAULTLESS = 5
"""One round in so many, of a run that has as many, is without faults: elsewhere they excuse most
gaps for a while, and some bugs show only where nothing excuses them."""

RATE = 60.0
"""Calls per second; with nested asks about twice as many messages."""

SHOWN = 5
LINE_S = 10.0
"""How often the live line comes, unless said, where it can't be overwritten."""


def _say(text: str = "", end: str = "\n") -> None:
    sys.stdout.write(text + end)
    sys.stdout.flush()


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The options; a mistake ends the program with exit code 2."""
    parser = argparse.ArgumentParser(
        prog="python -m proving.chaos", description=(__doc__ or "").splitlines()[0],
        epilog=f"Kinds of faults: {', '.join(KINDS)}. Unless kinds are named, a run of "
        f"{FAULTLESS} rounds or more has some without faults: the third, and each "
        f"{FAULTLESS}th after it.",
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
        help="namespaces need root; auto takes them where it can; not with a server as store",
    )  # fmt: skip
    add(
        "--store",
        choices=("sqlite", *CHAOS_SERVERS),
        default="sqlite",
        help="what coordinates them",
    )
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
    if options.network == "namespaces" and options.store in CHAOS_SERVERS:
        parser.error(
            f"--network namespaces does not go with --store {options.store}: the server listens at "
            "a loopback address, which a namespace does not reach"
        )
    if options.managers < 0:
        parser.error("--managers must not be negative")
    lacking = EMBEDDED if options.store in CHAOS_SERVERS else SERVED
    for kind in options.only:
        if kind in lacking:
            parser.error(f"--only '{kind}': a run with --store {options.store} has no such fault")
    rounds = _rounds(options.minutes)
    if options.round is not None and not 1 <= options.round <= rounds:
        parser.error(f"--round must be from 1 to {rounds}: a run of {options.minutes!r} minutes")
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


def _kinds(options: argparse.Namespace, number: int, count: int) -> tuple[str, ...]:
    """The kinds of faults of one round, as `RoundPlan.only` has them."""
    asked: tuple[str, ...] = tuple(options.only)
    faultless = not asked and count >= FAULTLESS and number % FAULTLESS == 3
    return (NONE,) if faultless else asked


def plans(
    options: argparse.Namespace, out: Path, server: StoreServer | None = None
) -> list[RoundPlan]:
    """The rounds of a run: all of the same length, most with all kinds of faults."""
    total_s = options.minutes * 60.0
    count = _rounds(options.minutes)
    # The server listens at a loopback address, which a namespace does not reach.
    network: Network = options.network if server is None else "loopback"
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
            only=_kinds(options, number, count),
            managers=options.managers,
            fencing=options.fencing,
            server=server,
        )
        for number in range(1, count + 1)
        if options.round in (None, number)
    ]


def repeat(options: argparse.Namespace, plan: RoundPlan) -> str:
    """The command that repeats one round, as far as real processes repeat."""
    return _command(options, options.minutes, ["--round", str(plan.number)], options.only)


def alone(options: argparse.Namespace, kind: str) -> str:
    """The command that shows one kind of fault alone, in a round or less."""
    return _command(options, min(options.minutes, ROUND_S / 60.0), [], [kind])


def _command(
    options: argparse.Namespace, minutes: float, more: list[str], only: Sequence[str]
) -> str:
    """A run with such options, to be typed in the directory that this one was started in."""
    words = [interpreter(sys.executable, Path.cwd()), "-m", "proving.chaos"]
    # `str` of a number is all of it: the plan depends on its last digit.
    words += ["--minutes", str(minutes)]
    for name in ("seed", "nodes", "rate", "network", "store", "managers", "fencing"):
        words += [f"--{name}", str(getattr(options, name))]
    words += [*more, *(["--eager"] if options.eager else [])]
    for kind in only:
        words += ["--only", kind]
    return shlex.join(words)


def interpreter(executable: str, directory: Path) -> str:
    """This Python, as one calls it from a directory; `python` may be another one, or none."""
    path = Path(executable)
    if not executable or not path.is_relative_to(directory):
        return executable or "python"
    # A bare name would be looked for elsewhere.
    below = path.relative_to(directory)
    return str(below) if len(below.parts) > 1 else f".{os.sep}{below}"


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


async def _run(options: argparse.Namespace, out: Path, server: StoreServer | None) -> int:
    stop, whole = asyncio.Event(), asyncio.current_task()
    assert whole is not None
    interrupted = False

    def asked() -> None:
        nonlocal interrupted
        if interrupted:
            whole.cancel()
        else:
            _say("\nends this round and judges it; asked once more, ends at once")
        interrupted = True
        stop.set()

    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, asked)
    done, wrong = Tally(), list[str]()
    rounds = plans(options, out, server)
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
    for told in wrong:
        # Again, since this end may be all that is kept of a long log.
        _say(told)
    verdict = conclude(done, rounds, interrupted=interrupted)
    for told in (*verdict.said, *_advice(options, verdict)):
        _say(told)
    return verdict.code


def _advice(options: argparse.Namespace, verdict: Verdict) -> list[str]:
    """What to do about what never happened: no bundle would tell."""
    if verdict.code != FAILED or not verdict.missing:
        return []
    told = ["It may take more minutes or another seed. What can't happen at all shows alone:"]
    for what in verdict.missing:
        line = alone(options, what if what in KINDS else NONE)
        if line not in told:
            told.append(line)
    return told


def _told(result: Result, plan: RoundPlan, command: str) -> str:
    """What was wrong with a round and where to find the rest, which is left there."""
    title = f"chaos, seed {plan.seed}, round {plan.number}"
    missing = leave(plan.directory, result.history, result.violations, command, title)
    told = [str(violation) for violation in result.violations[:SHOWN]]
    more = len(result.violations) - SHOWN
    if more > 0:
        told.append(f"... and {more} more in {plan.directory / 'violations.txt'}")
    told += [*missing, f"bundle: {plan.directory}\nrepeat with: {command}"]
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
    server: StoreServer | None = None
    try:
        if options.store in CHAOS_SERVERS:
            server = CHAOS_SERVERS[options.store]()
            server.start()
        return asyncio.run(_run(options, out, server))
    except asyncio.CancelledError:
        _say(f"\nended at once, without a verdict; what there is of it is in {out}")
        return INTERRUPTED
    except NO_SERVER as error:
        _say(f"no verdict: {error}")
        return 2
    finally:
        if server is not None:
            server.stop()
        if given is None:
            with suppress(OSError):
                out.rmdir()  # unless there is a bundle in it


if __name__ == "__main__":
    sys.exit(main())
