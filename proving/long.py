"""A campaign over days: seeds of the mixed profiles, stopped and resumed at will: `make sim-long`.

Keeps a state file with the next seed and the tallies of all before it, replaced as a whole after
every batch, so that a stop at any moment loses at most that batch. It refuses to go on with other
code than it began with: its tallies would then be of two programs.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import sys
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, field
from pathlib import Path

import domicile
from proving.campaign import Result, explain, stream_seeds
from proving.coverage import MANY, table, too_little, unhit, unmet
from proving.profiles import MIXED, PROFILES

COMMAND = "python -m proving.long"
SEEDS = 100_000
BATCH = 40
KEPT_BAD = 100
MOST_LINES = 20
STATE = Path(".domicile") / "sim-long.json"
BETWEEN = " / "
"""Between a fault and a step in the names of the state file."""


@dataclass
class State:
    """What the seeds so far went through."""

    code: str
    next_seed: int = 0
    cpu_s: float = 0.0
    messages: int = 0
    moves: int = 0
    mid_move: int = 0
    short: int = 0
    bad: list[dict[str, str | int]] = field(default_factory=lambda: list[dict[str, str | int]]())
    bad_seeds: int = 0
    faults: dict[str, int] = field(default_factory=lambda: dict[str, int]())
    struck: dict[str, int] = field(default_factory=lambda: dict[str, int]())
    hits: dict[str, int] = field(default_factory=lambda: dict[str, int]())

    def add(self, result: Result) -> None:
        """Count the next seed."""
        tally = result.tally
        self.next_seed = result.seed + 1
        self.cpu_s += result.cpu_s
        self.messages += tally.messages
        self.moves += tally.moves
        self.mid_move += tally.mid_move
        self.short += bool(too_little(result))
        _count(self.faults, tally.faults.items())
        _count(self.struck, tally.struck.items())
        _count(self.hits, ((BETWEEN.join(pair), count) for pair, count in tally.hits.items()))
        if not result.ok:
            self.bad_seeds += 1
            first = [*result.violations, result.error][0].splitlines()[0]
            if len(self.bad) < KEPT_BAD:
                self.bad.append({"seed": result.seed, "profile": result.profile, "why": first})


def _count(into: dict[str, int], items: Iterable[tuple[str, int]]) -> None:
    for name, count in items:
        into[name] = into.get(name, 0) + count


def code_digest(package: Path | None = None) -> str:
    """A digest of the source that runs: the product and what proves it."""
    here, product = Path(__file__).resolve().parent, Path(domicile.__file__).resolve().parent
    digest = hashlib.blake2b(digest_size=16)
    for root in (product, here) if package is None else (package,):
        for path in sorted(root.rglob("*.py")):
            digest.update(f"{path.relative_to(root)}\n".encode())
            digest.update(path.read_bytes())
    return digest.hexdigest()


def load(path: Path) -> State | None:
    """The state so far; None if there is none. `ValueError` if the file is not one."""
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return None
    try:
        return State(**json.loads(text))
    except (TypeError, json.JSONDecodeError) as error:
        raise ValueError(
            f"{path} is not the state of a long campaign ({error}); move it away to begin anew"
        ) from error


def save(path: Path, state: State) -> None:
    """Put the state in place of the last one; a reader sees the one or the other, whole."""
    path.parent.mkdir(parents=True, exist_ok=True)
    fresh = path.with_name(f"{path.name}.{os.getpid()}.new")
    try:
        with fresh.open("w", encoding="utf-8") as file:
            json.dump(asdict(state), file, indent=1, sort_keys=True)
            file.write("\n")
            file.flush()
            os.fsync(file.fileno())
        fresh.replace(path)
    finally:
        fresh.unlink(missing_ok=True)


def page(state: State, until: int) -> str:
    """What the seeds so far went through, for people."""
    hits: Counter[tuple[str, str]] = Counter()
    for name, count in state.hits.items():
        kind, _, step = name.partition(BETWEEN)
        hits[kind, step] = count
    seeds = max(1, state.next_seed)
    missing: list[str] = []
    if state.next_seed >= MANY:
        faults, struck = Counter(state.faults), Counter(state.struck)
        missing += unmet(PROFILES, faults, struck, state.mid_move / seeds)
        missing += unhit(PROFILES, hits)
    lines = [
        f"{state.next_seed:,} of {until:,} seeds; CPU per seed {state.cpu_s / seeds:.2f} s",
        f"messages {state.messages:,}, completed moves {state.moves:,}, "
        f"faults {sum(state.faults.values()):,}",
        *table(sorted(state.faults), hits),
        *missing[:MOST_LINES],
        *(f"seed {bad['seed']} of {bad['profile']}: {bad['why']}" for bad in state.bad),
        f"{state.bad_seeds} bad seeds, {state.short} seeds that fell short of their profile",
    ]
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    """The command: 0 if no seed so far is bad, 1 if one is, 2 if it makes no sense to go on."""
    parser = argparse.ArgumentParser(
        prog=COMMAND,
        description="Run many seeds of the mixed profiles, and go on where it was stopped.",
        epilog="Ctrl-C stops it; the same command goes on.",
    )
    parser.add_argument("--until", type=int, default=SEEDS, help="the end, not included")
    parser.add_argument("--state", type=Path, default=STATE, help="the file to go on from")
    parser.add_argument("--jobs", type=int, default=2, help="processes to spread them over")
    parser.add_argument(
        "--other-code", action="store_true", help="go on though the source has changed"
    )
    options = parser.parse_args(arguments)
    if options.until < 1 or options.jobs < 1:
        parser.error("nothing to run: give --until and --jobs of at least 1")
    code = code_digest()
    try:
        state = load(options.state) or State(code)
    except ValueError as error:
        parser.error(str(error))
    if state.code != code:
        if not options.other_code:
            parser.error(
                f"the source has changed since {options.state} was begun, at seed "
                f"{state.next_seed:,}: remove that file to begin anew, or give --other-code"
            )
        state.code = code
    return _go_on(state, options.state, options.until, options.jobs)


def _go_on(state: State, path: Path, until: int, jobs: int) -> int:
    if state.next_seed:
        print(f"going on from seed {state.next_seed:,}", flush=True)
    stopped = False
    try:
        _run(state, path, until, jobs)
    except KeyboardInterrupt:
        stopped = True
    # Read again what is certain: an interrupted batch may have been counted in part.
    state = load(path) or state
    print(page(state, until))
    if stopped:
        print(f"stopped; go on with: {COMMAND} --until {until} --state {path}")
    return 1 if state.bad_seeds or state.short else 0


def _run(state: State, path: Path, until: int, jobs: int) -> None:
    began, first, bad = time.monotonic(), state.next_seed, state.bad_seeds
    with closing(stream_seeds(range(first, until), jobs, MIXED, 4)) as stream:
        for result in stream:
            state.add(result)
            if not result.ok:
                print("\n".join(explain(result, smaller=state.bad_seeds - bad <= 3)), flush=True)
            if state.next_seed % BATCH and state.next_seed != until and result.ok:
                continue
            save(path, state)
            done = state.next_seed - first
            left_s = (until - state.next_seed) * (time.monotonic() - began) / done
            print(
                f"{state.next_seed:,}/{until:,} seeds, {state.bad_seeds} bad, "
                f"about {left_s / 60:.0f} min left",
                flush=True,
            )


if __name__ == "__main__":
    sys.exit(main())
