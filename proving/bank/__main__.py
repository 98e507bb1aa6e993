"""Transfers between durable accounts while nodes and the journal are killed, frozen and moved.

    python -m proving.bank --minutes 5 --seed 1 --journal postgresql
    make chaos-bank MINUTES=5 SEED=1 JOURNAL=postgresql

The callers keep a ledger outside the cluster. At rest it is compared with the events of all
accounts: nothing that was answered may be lost or be there twice, every answer that anybody saw
must rest on events that are there, and the total must be right. Exit code 0 only if nothing was
wrong, and if what the run is for has happened. A failing round keeps its directory, with the logs
of all processes, the ledger and the events.
"""

from __future__ import annotations

import argparse
import asyncio
import shlex
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from proving.bank.ledger import Complaint
from proving.bank.round import RoundPlan, play
from proving.postgres_server import NoPostgres, PostgresServer

ROUND_S = 60.0
SHOWN = 12
LINE_S = 10.0
JOURNALS = ("sqlite", "postgresql")
FINE, FAILED, MISUSED, INTERRUPTED = 0, 1, 2, 130

COUNTS = (
    "rounds", "transfers", "refused", "reads", "repeats", "MaybeExecuted", "NotExecuted",
    "kills", "kills in a commit", "kills in a stall", "freezes", "freezes in a write",
    "ended by others (J3)", "late batches", "moves", "drains", "restarts", "journal kills",
    "journal freezes",
    "batches", "writes", "fenced writes", "fenced claims", "unknown", "settled",
    "processes started again", "answers judged", "events judged",
)  # fmt: skip
"""What a report names, in this order, also if there was none of it."""

WANTED = (
    "transfers", "reads", "repeats", "MaybeExecuted", "kills", "kills in a commit",
    "kills in a stall", "freezes",
    "freezes in a write", "moves", "restarts", "drains", "fenced writes",
)  # fmt: skip
WANTED_OF = {
    "sqlite": ("ended by others (J3)",),
    "postgresql": ("journal kills", "journal freezes", "late batches", "unknown"),
}
LONG_MINUTES = 3.0
"""In a run of so many minutes all that is wanted must happen."""


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The options; a mistake ends the program with exit code 2."""
    parser = argparse.ArgumentParser(
        prog="python -m proving.bank", description=(__doc__ or "").splitlines()[0]
    )
    add = parser.add_argument
    add("--minutes", type=float, default=2.0, help="how long, in rounds of about one")
    add("--seed", type=int, default=1, help="what faults and transfers are drawn from")
    add("--journal", choices=JOURNALS, default=JOURNALS[0])
    add("--nodes", type=int, default=3, help="at least 3")
    add("--round", type=int, help="only this round of the run")
    add("--out", type=Path, help="where a failing round is left")
    options = parser.parse_args(arguments)
    if options.nodes < 3:
        parser.error("--nodes must be at least 3")
    if not 0 < options.minutes < 100_000:
        parser.error("--minutes must be above 0")
    if options.round is not None and not 1 <= options.round <= _rounds(options.minutes):
        parser.error(f"--round must be from 1 to {_rounds(options.minutes)}")
    return options


def plans(
    options: argparse.Namespace, out: Path, server: PostgresServer | None = None
) -> list[RoundPlan]:
    """The rounds of a run, all of the same length."""
    count = _rounds(options.minutes)
    return [
        RoundPlan(
            options.seed, number, options.minutes * 60.0 / count, options.nodes,
            out / f"seed-{options.seed}-round-{number}", server,
        )
        for number in range(1, count + 1)
        if options.round in (None, number)
    ]  # fmt: skip


def repeat(options: argparse.Namespace, plan: RoundPlan) -> str:
    """The command that repeats one round, as far as real processes repeat."""
    words = [sys.executable, "-m", "proving.bank", "--minutes", str(options.minutes)]
    for name in ("seed", "journal", "nodes"):
        words += [f"--{name}", str(getattr(options, name))]
    return shlex.join([*words, "--round", str(plan.number)])


def missing(counts: Counter[str], journal: str, minutes: float) -> list[str]:
    """What had to happen, and did not."""
    wanted = WANTED + WANTED_OF[journal] if minutes >= LONG_MINUTES else ("transfers",)
    return [name for name in wanted if not counts[name]]


def report(counts: Counter[str]) -> str:
    """All counts, for people."""
    names = [*COUNTS, *sorted(name for name in counts if name not in COUNTS)]
    return "\n".join(f"{name:<26}{counts[name]:>10,}" for name in names)


def _rounds(minutes: float) -> int:
    return max(1, round(minutes * 60.0 / ROUND_S))


def _say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def _told(complaints: Sequence[Complaint], plan: RoundPlan, command: str) -> str:
    rules = Counter(one.rule for one in complaints)
    # One of each kind first: a single cause may have thousands of effects of the same kind.
    firsts = [next(one for one in complaints if one.rule == rule) for rule in rules]
    shown = [*firsts, *(one for one in complaints if one not in firsts)][:SHOWN]
    lines = [str(one) for one in shown]
    if len(complaints) > len(shown):
        listed = ", ".join(f"{count} {rule}" for rule, count in rules.items())
        lines.append(f"... in all {listed}; all of them are in complaints.txt")
    return "\n".join([*lines, f"left in: {plan.directory}", f"repeat with: {command}"])


async def _live(done: Counter[str], counts: Counter[str], head: str) -> None:
    began = time.monotonic()
    while True:
        await asyncio.sleep(LINE_S)
        both = done + counts
        named = ("transfers", "repeats", "MaybeExecuted", "kills", "freezes", "moves")
        shown = " ".join(f"{name} {both[name]:,}" for name in named)
        _say(f"{head} {time.monotonic() - began:3.0f} s | {shown}")


async def _run(options: argparse.Namespace, out: Path, server: PostgresServer | None) -> int:
    stop = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    done: Counter[str] = Counter()
    wrong: list[str] = []
    planned = plans(options, out, server)
    for plan in planned:
        if stop.is_set():
            break
        counts: Counter[str] = Counter()
        head = f"round {plan.number}/{planned[-1].number}"
        showing = asyncio.create_task(_live(done, counts, head))
        try:
            result = await play(plan, counts, stop)
        finally:
            showing.cancel()
        done.update(counts)
        if result.complaints:
            wrong.append(_told(result.complaints, plan, repeat(options, plan)))
            _say(wrong[-1])
        else:
            await asyncio.to_thread(shutil.rmtree, plan.directory, True)
    _say(f"\nbank: journal {options.journal}, seed {options.seed}")
    _say(report(done))
    for told in wrong:
        # Again, since this end may be all that is kept of a long log.
        _say(f"\n{told}")
    if wrong:
        _say(f"failed: {len(wrong)} of {done['rounds']} rounds")
        return FAILED
    if stop.is_set():
        _say("interrupted: no verdict on the rest of the run")
        return INTERRUPTED
    absent = missing(done, options.journal, options.minutes)
    if absent:
        _say(f"never happened: {', '.join(absent)}")
        return FAILED
    _say("nothing was lost, nothing came twice, and every answer holds")
    return FINE


def main(arguments: Sequence[str] | None = None) -> int:
    """The command."""
    options = parse(arguments)
    given: Path | None = options.out
    out = Path(tempfile.mkdtemp(prefix="domicile-bank-")) if given is None else given.absolute()
    out.mkdir(parents=True, exist_ok=True)
    server: PostgresServer | None = None
    try:
        if options.journal == "postgresql":
            server = PostgresServer()
            server.start()
        return asyncio.run(_run(options, out, server))
    except NoPostgres as error:
        _say(f"no verdict: {error}")
        return MISUSED
    finally:
        if server is not None:
            server.stop()
        if given is None:
            with suppress(OSError):
                out.rmdir()  # unless a failing round is left in it


if __name__ == "__main__":
    sys.exit(main())
