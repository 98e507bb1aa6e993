"""What a plan costs: `python -m proving.benchmarks.planner [--quick] [--json FILE]`.

Times the coordinator's decision for every strategy at two sizes, on one core and without caches:
everything homeless, one node gone, one node more, half of the nodes drained, nothing to do. Beside
the times: how they grow with the number of shards, the peak of memory (from a run of its own),
the moves until all is at rest beside the fewest possible, and what a change costs on the wire.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import time
import tracemalloc
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from math import log
from pathlib import Path
from random import Random
from statistics import median

import msgspec

from domicile import Settings
from domicile.core.ids import NOBODY, Incarnation, new_incarnation
from domicile.core.placement import strategies
from domicile.core.placement.model import Plan, PlanInput, RoleInput
from domicile.core.placement.plan import plan
from domicile.core.state.records import NodeRecord
from domicile.core.state.shardmap import BLOCK_SIZE, FREE, Block, Entry, encode_block
from domicile.core.wire import Told

NOW = 1_000.0
SETTINGS = Settings()
ROLE = "r"
CASES = ("everything homeless", "one node gone", "one node more", "half drained", "at rest")


@dataclass(frozen=True)
class Size:
    """Shards and nodes."""

    shards: int
    nodes: int


@dataclass(frozen=True)
class Scale:
    """What is measured: two sizes with as many nodes, and how often."""

    small: Size = Size(10_000, 1_000)
    large: Size = Size(100_000, 1_000)
    repeats: int = 3


QUICK = Scale(Size(500, 20), Size(1_000, 20), 1)


@dataclass(frozen=True)
class Figure:
    """One case at one size."""

    strategy: str
    case: str
    shards: int
    nodes: int
    took_s: float
    peak_bytes: int
    decisions: int


@dataclass(frozen=True)
class Way:
    """From one node more, or one less, to rest."""

    strategy: str
    change: str
    shards: int
    nodes: int
    moved: int
    fewest: int
    rounds: int
    least: int
    """Shards of the node that has the fewest in the end."""
    most: int


@dataclass(frozen=True)
class Wire:
    """One changed entry in a cluster of so many nodes, in bytes."""

    nodes: int
    block_bytes: int
    plain_bytes: int
    told_bytes: int


def records(count: int) -> dict[Incarnation, NodeRecord]:
    """Nodes that are up."""
    random = Random(count)
    made: dict[Incarnation, NodeRecord] = {}
    for index in range(count):
        inc = new_incarnation(random)
        made[inc] = NodeRecord(f"node-{index}", inc, f"10.0.0.1:{index}", (ROLE,), (), 6.0)
    return made


def view(
    entries: Sequence[Entry],
    nodes: dict[Incarnation, NodeRecord],
    strategy: str,
    drains: tuple[str, ...] = (),
) -> PlanInput:
    """A view in which every node was just heard."""
    heard_at = dict.fromkeys(nodes, NOW)
    part = {ROLE: RoleInput(tuple(entries))}
    return PlanInput(NOBODY, nodes, heard_at, drains, part, balance=True, strategy=strategy)


def carry_out(
    entries: Sequence[Entry], nodes: dict[Incarnation, NodeRecord], made: Plan
) -> list[Entry]:
    """The map once everything in a plan has been done."""
    after = list(entries)
    goes = [(own.shard.shard, own.owner) for own in made.owns]
    goes += [(move.shard.shard, move.to) for move in made.moves]
    for shard, owner in goes:
        after[shard] = served(after[shard], owner, nodes)
    return after


def served(old: Entry, owner: Incarnation, nodes: dict[Incarnation, NodeRecord]) -> Entry:
    """The next entry of a shard."""
    return Entry(owner, old.epoch + 1, "serving", NOBODY, old.change + 1, nodes[owner].node)


def settled(shards: int, nodes: dict[Incarnation, NodeRecord], strategy: str) -> list[Entry]:
    """A map in which everything is where it belongs."""
    first = [FREE] * shards
    return carry_out(first, nodes, plan(view(first, nodes, strategy), NOW, SETTINGS))


def situations(size: Size, strategy: str) -> dict[str, PlanInput]:
    """The cases by name."""
    nodes = records(size.nodes)
    entries = settled(size.shards, nodes, strategy)
    gone = dict(list(nodes.items())[1:])
    more = {**nodes, **dict(list(records(size.nodes + 1).items())[-1:])}
    half = tuple(record.node for record in list(nodes.values())[::2])
    views = (
        view([FREE] * size.shards, nodes, strategy),
        view(entries, gone, strategy),
        view(entries, more, strategy),
        view(entries, nodes, strategy, half),
        view(entries, nodes, strategy),
    )
    return dict(zip(CASES, views, strict=True))


def timed(one: PlanInput, repeats: int) -> tuple[float, int]:
    """Seconds of CPU for a plan, the median of several, and how many decisions it has."""
    took: list[float] = []
    count = 0
    for _ in range(repeats):
        strategies.forget()
        began = time.process_time()
        count = len(plan(one, NOW, SETTINGS).decisions)
        took.append(time.process_time() - began)
    return median(took), count


def peak_bytes(one: PlanInput) -> int:
    """The most memory that a plan holds at once, its result included."""
    strategies.forget()
    tracemalloc.start()
    try:
        plan(one, NOW, SETTINGS)
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def measure(scale: Scale, say: Callable[[str], None]) -> list[Figure]:
    """Every case of every strategy at both sizes."""
    figures: list[Figure] = []
    for strategy in strategies.NAMES:
        for size in (scale.small, scale.large):
            say(f"{strategy}: {size.shards:,} shards on {size.nodes:,} nodes")
            for case, one in situations(size, strategy).items():
                took_s, count = timed(one, scale.repeats)
                peak = peak_bytes(one)
                figures.append(Figure(strategy, case, size.shards, size.nodes, took_s, peak, count))
    return figures


def ways(size: Size, say: Callable[[str], None]) -> list[Way]:
    """How far it is to rest after a node joined and after one left."""
    found: list[Way] = []
    for strategy in strategies.NAMES:
        say(f"{strategy}: to rest, {size.shards:,} shards on {size.nodes:,} nodes")
        nodes = records(size.nodes)
        more = {**nodes, **dict(list(records(size.nodes + 1).items())[-1:])}
        for change, before, after in (("joins", nodes, more), ("leaves", more, nodes)):
            entries = settled(size.shards, before, strategy)
            homes = [entry.owner for entry in entries]
            moved = rounds = 0
            # Done once a plan wants nothing: at most every shard can move in a round of its own.
            for _ in range(size.shards):
                made = plan(view(entries, after, strategy), NOW, SETTINGS)
                if not made.decisions:
                    break
                rounds, moved = rounds + 1, moved + len(made.decisions)
                entries = carry_out(entries, after, made)
            counts = dict.fromkeys(after, 0)
            for entry in entries:
                counts[entry.owner] += 1
            fewest = (
                size.shards // (size.nodes + 1)
                if change == "joins"
                else sum(home not in after for home in homes)
            )
            least, most = min(counts.values()), max(counts.values())
            found.append(
                Way(strategy, change, size.shards, size.nodes, moved, fewest, rounds, least, most)
            )
    return found


def wire(sizes: Sequence[int]) -> list[Wire]:
    """What is written, and what is told, when one entry changes."""
    found: list[Wire] = []
    for count in sizes:
        random, nodes = Random(count), records(count)
        entries: list[Entry] = []
        for _ in range(BLOCK_SIZE):
            owner, epoch = random.choice(list(nodes)), random.randrange(1, 300)
            change = 2 * epoch - 1
            entries.append(Entry(owner, epoch, "serving", NOBODY, change, nodes[owner].node))
        block = Block(f"{entries[0].owner}-1234-56", tuple(entries))
        told = Told(ROLE, 1_234, entries[0])
        plain, packed = msgspec.msgpack.encode(block), encode_block(block)
        found.append(Wire(count, len(packed), len(plain), len(msgspec.msgpack.encode(told))))
    return found


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table, numbers to the right."""
    lines = [head, ["---", *["---:"] * (len(head) - 1)], *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def report(figures: list[Figure], far: list[Way], bytes_of: list[Wire]) -> str:
    """Everything as tables."""
    small, large = figures[0], figures[len(CASES)]
    sizes = [f"{one.shards:,} × {one.nodes:,}" for one in (small, large)]
    rows: list[list[str]] = []
    by_name = {(one.strategy, one.case, one.shards): one for one in figures}
    for strategy in strategies.NAMES:
        for case in CASES:
            a, b = (by_name[strategy, case, one.shards] for one in (small, large))
            power = log(max(b.took_s, 1e-6) / max(a.took_s, 1e-6)) / log(b.shards / a.shards)
            rows.append(
                [
                    f"{strategy}: {case}",
                    f"{a.took_s * 1e3:,.1f} ms",
                    f"{b.took_s * 1e3:,.1f} ms",
                    f"{power:.2f}",
                    f"{b.peak_bytes / 2**20:,.1f} MiB",
                    f"{b.decisions:,}",
                ]
            )
    parts = [
        table(["plan", *sizes, "exponent", "peak, large", "decisions, large"], rows),
        table(
            ["to rest", "moved", "fewest possible", "rounds", "shards per node"],
            [
                [
                    f"{one.strategy}: {one.nodes:,} nodes, one {one.change}",
                    f"{one.moved:,}",
                    f"{one.fewest:,}",
                    f"{one.rounds:,}",
                    f"{one.least} to {one.most}",
                ]
                for one in far
            ],
        ),
        table(
            ["bytes for one change", "block stored", "the same without a table", "Told"],
            [
                [
                    f"{one.nodes:,} nodes",
                    f"{one.block_bytes:,}",
                    f"{one.plain_bytes:,}",
                    f"{one.told_bytes:,}",
                ]
                for one in bytes_of
            ],
        ),
    ]
    return "\n\n".join(parts)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--quick", action="store_true", help="small sizes, to see that it runs")
    parser.add_argument("--json", type=Path, help="write the figures there as well")
    given = parser.parse_args()

    def say(line: str) -> None:
        print(line, file=sys.stderr)

    scale = QUICK if given.quick else Scale()
    figures = measure(scale, say)
    far = ways(scale.small, say)
    bytes_of = wire((3, 25, scale.small.nodes))
    print(f"Python {platform.python_version()}, {os.cpu_count()} CPUs, one of them used\n")
    print(report(figures, far, bytes_of))
    if given.json is not None:
        found = {
            "python": platform.python_version(),
            "cpus": os.cpu_count(),
            "quick": given.quick,
            "plans": [asdict(one) for one in figures],
            "ways": [asdict(one) for one in far],
            "wire": [asdict(one) for one in bytes_of],
        }
        given.json.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
