"""How long nobody takes writes when a primary is lost: replica groups, Sentinel, Patroni.

    python -m proving.benchmarks.failover                       all runs that are missing
    python -m proving.benchmarks.failover --next                the missing runs of one cell
    python -m proving.benchmarks.failover --only valkey-server  cells with that in their names
    python -m proving.benchmarks.failover --runs 2              at most so many runs of each cell
    python -m proving.benchmarks.failover --list                the names of the cells

A cell is a system and a loss; three servers serve its runs. Each run is kept in a JSON file at
once, and the same command goes on where it ended. The losses, always of the primary:

- **server**: SIGKILL of the server. Its agent lives.
- **machine**: SIGKILL of the server and of what keeps it: agent and guard, Sentinel, or Patroni.
- **frozen**: SIGSTOP of all of that.
- **cut**: a network that loses all that the machine sends and gets.
- **planned**: an operator asks for another primary.
- **following**: the same, with clients of `domicile.failover.clients`; of Domicile's groups only.

A client of each server writes all the time and knows nothing of who is the primary. `gap` is the
time from the loss to the first acknowledgement of a write that was sent after it; for `planned`,
where two clients stay with a server as long as it answers, it is the longest time without any
acknowledgement. For `following` each of two clients writes one numbered key after the other through
`follow_redis` or `follow_asyncpg`: it is the longest time that one of them was without an
acknowledgement, until all servers follow the new primary. `lost` counts acknowledged writes that
are gone once the machine is back, `late` those that the old primary acknowledged after the new one
had acknowledged its first.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import platform
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import median
from time import monotonic

from proving.benchmarks.command import count, run
from proving.benchmarks.failover_clients import Acked, Clients, Followers
from proving.benchmarks.failover_groups import Contender, OurGroup, Unable
from proving.benchmarks.failover_peers import PatroniCluster, SentinelGroup
from proving.benchmarks.kept import CACHE, Kept, Measured, tell
from proving.benchmarks.processes import ROOT
from proving.benchmarks.recovery import quantile
from proving.benchmarks.report import fill, grid
from proving.benchmarks.stores_report import busy

PAGE = ROOT / "docs" / "explanation" / "replica-groups.md"
LIMIT_S = 150.0
STEADY = 100
"""Writes that the primary must have acknowledged before it is lost."""

STAYERS = 2
TTL_S = 3.0

LOSSES = {
    "server": "server killed", "machine": "agent and server killed", "frozen": "machine frozen",
    "cut": "network cut", "planned": "planned switchover",
    "following": "planned switchover, clients that follow",
}  # fmt: skip
GOALS_S = {"server": 2.0, "machine": TTL_S + 2.0, "planned": 0.5, "following": 0.5}
"""At p99, of Domicile's."""


@dataclass(frozen=True, slots=True)
class System:
    """What is measured, how it is set, and how often."""

    title: str
    kills: int
    others: int
    make: Callable[[], Contender]
    ours: bool = False


SYSTEMS: dict[str, System] = {
    "valkey": System(
        "Domicile, Valkey", 30, 10, lambda: OurGroup("valkey", "async"), ours=True
    ),
    "postgresql": System(
        "Domicile, PostgreSQL", 30, 10, lambda: OurGroup("postgresql", "async"), ours=True
    ),
    "postgresql-sync": System(
        "Domicile, PostgreSQL, sync", 30, 10, lambda: OurGroup("postgresql", "sync"), ours=True
    ),
    "sentinel": System("Sentinel, defaults", 5, 5, lambda: SentinelGroup(30_000)),
    "sentinel-tuned": System("Sentinel, down after 1 s", 10, 10, lambda: SentinelGroup(1_000)),
    "patroni": System("Patroni, defaults", 5, 5, lambda: PatroniCluster("default")),
    "patroni-tuned": System("Patroni, tuned", 10, 10, lambda: PatroniCluster("tuned")),
    "patroni-sync": System("Patroni, tuned, sync", 10, 10, lambda: PatroniCluster("sync")),
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Cell:
    """A system and a loss."""

    system: str
    loss: str

    @property
    def key(self) -> str:
        """Its name for the command line and in the file."""
        return f"{self.system}-{self.loss}"

    @property
    def runs(self) -> int:
        """How often it is measured."""
        system = SYSTEMS[self.system]
        return system.kills if self.loss in ("server", "machine") else system.others


CELLS = {
    cell.key: cell
    for cell in (Cell(system, loss) for loss in LOSSES for system in SYSTEMS)
    if SYSTEMS[cell.system].ours or cell.loss != "following"
}


# measuring


async def lose(contender: Contender, loss: str) -> Measured:
    """Lose the primary once, and have it back."""
    primary = await contender.whole()
    async with Clients(contender.connect, contender.ports) as clients:
        if loss == "planned":
            await clients.stay_instead(primary, STAYERS)
        begun = len(clients.acked)
        await _until(lambda: len(clients.acked) > begun + STEADY, "the primary takes writes")
        failed, struck_at = clients.failed, monotonic()
        await contender.strike(loss, primary)
        done_at = struck_at if loss == "planned" else monotonic()
        # What stands still or is cut off may have answered a write that was on its way.
        elsewhere = loss in ("frozen", "cut", "planned")

        def again() -> float | None:
            for one in clients.acked[begun:]:
                if one.sent_at >= done_at and not (elsewhere and one.server == primary):
                    return one.acked_at
            return None

        await _until(lambda: again() is not None, "somebody takes writes again")
        first = again()
        assert first is not None
        gap_s = first - struck_at
        if loss == "planned":
            times = [one.acked_at for one in clients.acked if one.acked_at >= struck_at - 0.5]
            gap_s = max(b - a for a, b in pairwise(times))
        else:
            await contender.heal(primary)
        after = await contender.whole()
        await clients.end()
        kept = await contender.keys(after)
        lost = sum(one.key not in kept for one in clients.acked)
        late = sum(
            one.server == primary and one.acked_at > first and loss != "server"
            for one in clients.acked
        ) if after != primary else 0  # fmt: skip
        return {
            "gap": gap_s, "lost": lost, "late": late, "acked": len(clients.acked),
            "failed": clients.failed - failed,
        }  # fmt: skip


async def switch_over(group: OurGroup) -> Measured:
    """Ask for another primary while clients of the helpers write, and wait for all servers."""
    primary = await group.whole()
    async with group.following(STAYERS) as writes, Followers(writes) as clients:
        await _until(lambda: clients.each_acked(STEADY // STAYERS), "the primary takes writes")
        failed, struck_at = len(clients.failed), monotonic()
        await group.strike("planned", primary)
        after = await group.whole()
        assert after != primary, "the switchover was reverted"
        begun = [len(acked) for acked in clients.acked]
        await _until(
            lambda: all(len(acked) > n for acked, n in zip(clients.acked, begun, strict=True)),
            "every client writes again",
        )
        await clients.end()
        for error in clients.failed[failed:]:
            tell(f"a write failed: {error}")
        kept = await group.keys(after)
        acked = [one for each in clients.acked for one in each]
        return {
            "gap": longest_wait(clients.acked, struck_at),
            "lost": sum(one.key not in kept for one in acked), "late": 0, "acked": len(acked),
            "failed": len(clients.failed) - failed,
        }  # fmt: skip


def longest_wait(acked: Sequence[Sequence[Acked]], struck_at: float) -> float:
    """The longest time in which a client got no acknowledgement, of what ended after a moment."""
    return max(
        after.acked_at - before.acked_at
        for each in acked
        for before, after in pairwise(each)
        if after.acked_at >= struck_at
    )


async def _until(met: Callable[[], bool], what: str) -> None:
    until = monotonic() + LIMIT_S
    while not met():
        if monotonic() > until:
            raise Unable(f"not within {LIMIT_S:g} s: {what}")
        await asyncio.sleep(0.01)


async def measured(cell: Cell, runs: int, keep: Callable[[Measured], None]) -> None:
    """So many runs, each kept as soon as it is over."""
    contender = SYSTEMS[cell.system].make()
    try:
        await contender.start()
        for _ in range(runs):
            load = os.getloadavg()[0]
            if cell.loss == "following":
                assert isinstance(contender, OurGroup)
                told = await switch_over(contender)
            else:
                told = await lose(contender, cell.loss)
            keep({**told, "load": load, "cpus": os.cpu_count() or 1})
    finally:
        await contender.stop()


# telling


def page(found: dict[str, list[Measured]]) -> str:
    """A row per cell."""
    rows: list[list[str]] = []
    for key, cell in CELLS.items():
        rounds = found.get(key) or []
        if rounds:
            rows.append(_row(cell, rounds))
    head = ["lost", "system", "runs", "min s", "p50 s", "p99 s", "goal s", "", "writes lost",
            "acknowledged late", "writes failed", "load"]  # fmt: skip
    return grid(head, rows)


def _row(cell: Cell, rounds: Sequence[Measured]) -> list[str]:
    system = SYSTEMS[cell.system]
    gaps = [one["gap"] for one in rounds]
    p99 = quantile(gaps, 0.99)
    goal_s = GOALS_S.get(cell.loss) if system.ours else None
    lost, acked = sum(one["lost"] for one in rounds), sum(one["acked"] for one in rounds)
    failed, late = (sum(one[name] for one in rounds) for name in ("failed", "late"))
    most = max(one["load"] for one in rounds)
    return [
        LOSSES[cell.loss], system.title, f"{len(rounds)} of {cell.runs}",
        *(f"{figure:.2f}" for figure in (min(gaps), median(gaps), p99)),
        "" if goal_s is None else f"{goal_s:g}",
        "" if goal_s is None else "met" if p99 <= goal_s else "MISSED",
        f"{lost:,} of {acked:,}",
        # Clients that follow do not know which server has answered.
        "" if cell.loss == "following" else f"{late:,}",
        str(failed) if cell.loss in ("planned", "following") else "",
        f"{most:.1f}{' (busy)' if busy(rounds) else ''}",
    ]  # fmt: skip


def chosen(texts: Sequence[str]) -> list[str]:
    """The cells whose names have one of these words in them, or are one; all without any."""
    exact = [text for text in texts if text in CELLS]
    words = [text for text in texts if text not in CELLS]
    return [key for key in CELLS if not texts or key in exact or any(one in key for one in words)]


def arguments(given: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m proving.benchmarks.failover", description=__doc__, allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    add = parser.add_argument
    add("--only", action="append", default=[], metavar="WORD", help="cells with it in their names")
    add("--next", action="store_true", help="the missing runs of one cell, and end")
    add("--runs", type=count, metavar="N", help="at most so many of each cell, kept ones included")
    add("--again", action="store_true", help="measure the chosen cells anew")
    add("--list", action="store_true", help="the names of the cells")
    add("--table", action="store_true", help="the table of what is kept; measure nothing")
    add("--write-docs", action="store_true", help="the table also goes to the page of groups")
    add("--cache", type=Path, default=CACHE, help="where results are kept")
    options = parser.parse_args(given)
    if not chosen(options.only):
        parser.error(f"no cell has {options.only} in its name: see --list")
    return options


def _facts() -> str:
    return (
        f"{platform.system()} {platform.machine()}, {os.cpu_count()} CPUs, Python "
        f"{platform.python_version()}; three servers on loopback, one etcd server as store. Load: "
        "the highest before a run; where it says busy, other programs had the machine, too, and "
        "only what is set by timers holds."
    )


def main(given: Sequence[str] | None = None) -> int:
    """The command; 1 if a chosen cell of Domicile's could not be measured."""
    options = arguments(given)
    keys = chosen(options.only)
    if options.list:
        print("\n".join(keys))
        return 0
    kept = Kept(options.cache / "failover.json", {"ttl_s": TTL_S, "servers": 3})
    if options.again:
        for key in keys:
            kept.forget(key)
    absent: dict[str, str] = {}
    left = {
        key: min(CELLS[key].runs, options.runs or CELLS[key].runs) - len(kept.cells.get(key, []))
        for key in keys
    }
    todo = [key for key in keys if left[key] > 0]
    for key in [] if options.table else todo[:1] if options.next else todo:

        def keep(told: Measured, key: str = key) -> None:
            kept.add(key, told)
            tell(f"{key} run {len(kept.cells[key])}: {told}")

        try:
            asyncio.run(measured(CELLS[key], left[key], keep))
        except (Unable, OSError, TimeoutError, AssertionError) as error:
            absent[key] = f"{type(error).__name__}: {error}"
            tell(f"{key}: {absent[key]}")
    found = {key: kept.cells.get(key, []) for key in keys}
    text = f"{page(found)}\n\n{_facts()}"
    print(text)
    for key, why in absent.items():
        print(f"\n{key}: not measured: {why}")
    if options.write_docs:
        filled = fill(PAGE.read_text(encoding="utf-8"), "failover", f"{text}\n")
        PAGE.write_text(filled, encoding="utf-8")
    return 1 if any(SYSTEMS[CELLS[key].system].ours for key in absent) else 0


if __name__ == "__main__":
    run(main)
