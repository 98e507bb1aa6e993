"""CPU per message of two source trees, interleaved in one run: is the new code slower?

    python -m proving.benchmarks.compare OLD NEW [--pairs 15] [--only tell]
    make compare OLD=path/to/checkout

`OLD` and `NEW` are checkouts of this repository; both run on this interpreter. A pair is two fresh
processes, one per tree, that take turns, so both meet the same machine. Each process times the same
work some times and keeps the least CPU time. The ratio of the medians is what carries over to other
machines; the times themselves do not. Exit code 1 if a median ratio is above `--limit`.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Sequence
from itertools import count
from pathlib import Path

TURNS = 6
"""Times that a process is measured with one kind of work; the least counts."""

PAYLOAD = b"x" * 100
REFS = 200
KINDS = ("local ask", "remote ask", "lone ask", "tell", "queued ask", "activation")


async def part() -> None:
    """One process: a node and a client of it. Measures what standard input names."""
    from domicile import Entity, Node, Settings, connect, handler

    noted = 0

    class Echo(Entity, name="compare.echo"):
        @handler
        async def echo(self, data: bytes) -> bytes:
            return data

        @handler
        async def note(self, data: bytes) -> None:
            nonlocal noted
            noted += 1

        @handler
        async def slow(self, data: bytes) -> bytes:
            await asyncio.sleep(0)
            return data

    settings, fresh = Settings(idle_s=3600.0, settle_s=0.05), count()
    with tempfile.TemporaryDirectory() as place:
        url = f"sqlite:///{place}/store.db"
        async with (
            Node(url, entities=[Echo], node_id="home", settings=settings) as node,
            connect(url, settings=settings) as client,
        ):
            here = [node.ref(Echo, str(n)) for n in range(REFS)]
            there = [client.ref(Echo, str(n)) for n in range(REFS)]
            for ref in (*here, *there):
                await ref.ask(Echo.echo, PAYLOAD)

            async def local_ask(n: int) -> None:
                for i in range(n):
                    await here[i % REFS].ask(Echo.echo, PAYLOAD)
                    if not i % 250:
                        await asyncio.sleep(0)

            async def remote_ask(n: int) -> None:
                async def one(k: int) -> None:
                    for i in range(n // 100):
                        await there[(k + i) % REFS].ask(Echo.echo, PAYLOAD)

                await asyncio.gather(*(one(k) for k in range(100)))

            async def lone_ask(n: int) -> None:
                for i in range(n):
                    await there[i % REFS].ask(Echo.echo, PAYLOAD)

            async def tell(n: int) -> None:
                end = noted + n
                for i in range(n):
                    await there[i % REFS].tell(Echo.note, PAYLOAD)
                    if not i % 200:
                        await asyncio.sleep(0)
                while noted < end:  # noqa: ASYNC110
                    await asyncio.sleep(0.0005)

            async def queued_ask(n: int) -> None:
                async def one(k: int) -> None:
                    for _ in range(n // 100):
                        await there[k % 5].ask(Echo.slow, PAYLOAD)

                await asyncio.gather(*(one(k) for k in range(100)))

            async def activation(n: int) -> None:
                async def one() -> None:
                    for _ in range(n // 100):
                        await client.ref(Echo, f"new-{next(fresh)}").ask(Echo.echo, PAYLOAD)

                await asyncio.gather(*(one() for _ in range(100)))

            work: dict[str, tuple[Callable[[int], Awaitable[None]], int]] = {
                "local ask": (local_ask, 8_000),
                "remote ask": (remote_ask, 3_000),
                "lone ask": (lone_ask, 400),
                "tell": (tell, 4_000),
                "queued ask": (queued_ask, 1_500),
                "activation": (activation, 3_000),
            }
            loop = asyncio.get_running_loop()
            print("ready", flush=True)
            while kind := (await loop.run_in_executor(None, sys.stdin.readline)).strip():
                function, messages = work[kind]
                gc.collect()
                gc.disable()
                began = time.process_time()
                await function(messages)
                took_s = time.process_time() - began
                gc.enable()
                print(took_s / messages * 1e6, flush=True)


class Measured:
    """A process of one tree."""

    def __init__(self, tree: Path) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-P", __file__, "--part"],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            env={**os.environ, "PYTHONPATH": str(tree / "src"), "PYTHONHASHSEED": "1"},
        )  # fmt: skip
        if self._said() != "ready":
            raise SystemExit(f"{tree} does not start")

    def cpu_us(self, kind: str) -> float:
        """CPU per message, in microseconds."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"{kind}\n")
        self._process.stdin.flush()
        return float(self._said())

    def end(self) -> None:
        """Let it leave."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(60)

    def _said(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline().strip()


def compare(
    old: Path, new: Path, pairs: int, kinds: Sequence[str]
) -> dict[str, list[tuple[float, float]]]:
    """CPU per message of each pair, by kind of work."""
    found: dict[str, list[tuple[float, float]]] = {kind: [] for kind in kinds}
    for pair in range(pairs):
        trees = (old, new) if pair % 2 == 0 else (new, old)
        running = {tree: Measured(tree) for tree in trees}
        for kind in kinds:
            times: dict[Path, list[float]] = {old: [], new: []}
            for turn in range(TURNS):
                for tree in trees if turn % 2 == 0 else trees[::-1]:
                    times[tree].append(running[tree].cpu_us(kind))
            found[kind].append((min(times[old]), min(times[new])))
        for one in running.values():
            one.end()
        print(f"pair {pair + 1} of {pairs}", file=sys.stderr, flush=True)
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    """The command."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("trees", nargs="*", type=Path, help="OLD NEW")
    parser.add_argument("--pairs", type=int, default=15)
    parser.add_argument("--limit", type=float, default=1.03)
    parser.add_argument("--only", action="append", choices=KINDS)
    parser.add_argument("--part", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.part:
        asyncio.run(part())
        return 0
    if len(options.trees) != 2:
        parser.error("name two checkouts: OLD NEW")
    old, new = (tree.resolve() for tree in options.trees)
    found = compare(old, new, options.pairs, options.only or KINDS)
    load = os.getloadavg()[0]
    print(f"CPU per message in µs, {options.pairs} pairs; load of the machine {load:.1f}\n")
    print(
        "| | old | new | median ratio | smallest to largest |\n| --- | ---: | ---: | ---: | --- |"
    )
    worst = 0.0
    for kind, times in found.items():
        ratios = [after / before for before, after in times]
        ratio = statistics.median(ratios)
        worst = max(worst, ratio)
        before = statistics.median(one for one, _ in times)
        after = statistics.median(other for _, other in times)
        spread = f"{min(ratios):.3f} to {max(ratios):.3f}"
        print(f"| {kind} | {before:.1f} | {after:.1f} | {ratio:.3f} | {spread} |")
    print(f"\nthe largest median ratio is {worst:.3f}, at most {options.limit} is wanted")
    return 0 if worst <= options.limit else 1


if __name__ == "__main__":
    sys.exit(main())
