"""The embedded store, measured: `python -m proving.benchmarks.store [--seconds S] [--directory
DIR]`.

Says how long a commit takes, how long until another process's watch has seen it, and what three
watches cost while nothing happens. A process of its own follows; nothing else runs.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from domicile.core.state.txn import Put
from domicile.stores.sqlite.store import SqliteStore

FLAG = "--follow"


def quantiles(values: list[float]) -> str:
    ordered = sorted(values)
    parts = [(0.5, "p50"), (0.99, "p99"), (1.0, "max")]
    picked = [(name, ordered[min(len(ordered) - 1, int(len(ordered) * q))]) for q, name in parts]
    return ", ".join(f"{name} {1000 * value:.2f} ms" for name, value in picked)


async def follow(path: Path, count: int) -> None:
    """Print how old each change was when it was seen."""
    store = SqliteStore(path, by="follower")
    watch = store.watch(b"at", (await store.list(b"")).revision)
    print("ready", flush=True)
    for _ in range(count):
        item = (await anext(watch)).changes[0].item
        assert item is not None
        print(time.monotonic() - float(item.value), flush=True)
    await store.close()


async def commits(path: Path, seconds: float) -> None:
    """How long a small commit takes, one after the other."""
    store = SqliteStore(path, by="writer")
    took: list[float] = []
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        start = time.monotonic()
        await store.commit([], [Put(b"k", bytes(100))])
        took.append(time.monotonic() - start)
    await store.close()
    print(f"commit of 100 bytes: {quantiles(took)}; {len(took) / seconds:,.0f} a second")


async def seen(path: Path, count: int) -> None:
    """How long from a commit's return to its sight in a watch of another process."""
    store = SqliteStore(path, by="writer")
    await store.commit([], [Put(b"first", b"")])
    command = [sys.executable, __file__, FLAG, str(path), str(count)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as follower:  # noqa: ASYNC220
        assert follower.stdout is not None
        assert await asyncio.to_thread(follower.stdout.readline) == "ready\n"
        ages: list[float] = []
        for _ in range(count):
            await asyncio.sleep(0.05)
            await store.commit([], [Put(b"at", b"%r" % time.monotonic())])
            ages.append(float(await asyncio.to_thread(follower.stdout.readline)))
    await store.close()
    print(f"from a call of commit to another process's watch: {quantiles(ages)}")


async def idle(path: Path, seconds: float) -> None:
    """What three watches cost this process while nothing happens."""
    store = SqliteStore(path, by="watcher")
    start = (await store.list(b"")).revision
    watches = [store.watch(prefix, start) for prefix in (b"a/", b"b/", b"c/")]
    waiting = [asyncio.ensure_future(anext(watch)) for watch in watches]
    await asyncio.sleep(1.0)
    before, switches = time.process_time(), resource.getrusage(resource.RUSAGE_SELF).ru_nvcsw
    await asyncio.sleep(seconds)
    used = time.process_time() - before
    switches = resource.getrusage(resource.RUSAGE_SELF).ru_nvcsw - switches
    for each in waiting:
        each.cancel()
    await asyncio.gather(*waiting, return_exceptions=True)
    await store.close()
    print(
        f"three idle watches: {100 * used / seconds:.3f} % of a core, "
        f"{switches / seconds:.1f} wake-ups a second"
    )


def main() -> None:
    if sys.argv[1:2] == [FLAG]:
        asyncio.run(follow(Path(sys.argv[2]), int(sys.argv[3])))
        return
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument("--directory", type=Path, default=None)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.directory) as directory:
        path = Path(directory) / "store.db"
        print(f"load average {os.getloadavg()[0]:.1f}")
        asyncio.run(commits(path, options.seconds))
        asyncio.run(seen(path, int(options.seconds * 20)))
        asyncio.run(idle(path, options.seconds))


if __name__ == "__main__":
    main()
