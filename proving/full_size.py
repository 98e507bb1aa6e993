"""RG-05 in full size on real processes: a million numbered messages while shards move all the time.

    python -m proving.full_size                       10 senders x 1,000 x 100 entities
    python -m proving.full_size --numbers 20          a short one

Every sender is a client of its own and sends each entity so many numbers, by tells, asks, and asks
upon which the entity tells and asks another one; what entities send each other is numbered too and
comes on top. Meanwhile shards are wished elsewhere, wishes are taken back in the middle of a move,
and nodes are drained: the code is that of the test in `test_real_handoff`. Each entity writes what
it sees to a ledger before anything else, and that is compared with what was sent.

Exit code 0 if each entity saw each sender's numbers exactly once and in order and every ask had the
right answer, 1 if not, 2 for a wrong command. No history is recorded: no checker judges this run.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import resource
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "labs"))
from moving_lab import Quota, Tally, clients, keep_moving
from real_entities import LEDGER, Desk
from real_lab import ROLE

from domicile import Client, Settings
from domicile.core.ids import ShardKey
from domicile.testing import Processes

SETTINGS = Settings(shards=16, ask_timeout_s=120.0, node_wait_s=60.0)
"""Patient, so that a busy machine makes no ask fail: neither callers nor nodes give up early."""

NODES = 3
IN_FLIGHT = 64
PROGRESS_S = 2.0
ARRIVE_S = 120.0


def epochs(cluster: Processes) -> int:
    """The sum of all; every move raises it by one."""
    shards = range(cluster.settings.shards)
    return sum(cluster.entry(ShardKey(ROLE, number)).epoch for number in shards)


def peaks() -> tuple[int, int]:
    """MiB that this process and the largest node had at most."""
    kinds = (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)
    own, node = (resource.getrusage(kind).ru_maxrss // 1_024 for kind in kinds)
    return own, node


class Run:
    """One run, and what it has come to."""

    def __init__(self, arguments: argparse.Namespace, ledger: Path) -> None:
        self._senders: int = arguments.senders
        self._in_flight: int = arguments.in_flight
        asked = max(1, arguments.entities // 4)
        desks = arguments.entities - asked
        self._load = Quota(arguments.numbers, desks=desks, asked=asked)
        self._tally = Tally(ledger)
        self._wanted = arguments.senders * arguments.numbers * arguments.entities
        self._moves, self._took_s, self._began_at = 0, 0.0, time.monotonic()

    async def go(self) -> None:
        """All of it; raises if an ask fails or is answered wrongly, or if something stays away."""
        async with (
            Processes([Desk], nodes=NODES, settings=SETTINGS, record=False) as cluster,
            AsyncExitStack() as stack,
        ):
            senders = await clients(cluster, stack, self._senders, record=False)
            self._began_at = time.monotonic()
            before = epochs(cluster)
            sending = asyncio.ensure_future(self._send(senders))
            telling = asyncio.ensure_future(self._tell(cluster, before))
            try:
                await keep_moving(cluster, sending)
                await cluster.wait_until(self._arrived, timeout_s=ARRIVE_S)
            finally:
                self._moves = epochs(cluster) - before
                self._took_s = time.monotonic() - self._began_at
                for task in (telling, sending):
                    task.cancel()
                await asyncio.wait([telling, sending])

    async def _send(self, senders: Sequence[Client]) -> None:
        async with asyncio.TaskGroup() as group:
            for number, client in enumerate(senders):
                name = f"sender {number}"
                group.create_task(self._load.send_all(client, name, in_flight=self._in_flight))

    async def _tell(self, cluster: Processes, before: int) -> None:
        while True:
            await asyncio.sleep(PROGRESS_S)
            self._tally.read()
            self._moves = epochs(cluster) - before
            print(
                f"{time.monotonic() - self._began_at:7.1f} s  {self._load.count:>9,} sent  "
                f"{self._tally.noted:>9,} seen  {self._moves:>6,} moves  "
                f"{self._tally.duplicated} twice  {self._tally.reordered} out of order",
                flush=True,
            )

    def _arrived(self) -> bool:
        self._tally.read()
        return not self._tally.missing(self._load.sent)

    def report(self, error: BaseException | None) -> bool:
        """Print what came of it; whether all is well."""
        seconds = self._took_s or time.monotonic() - self._began_at
        self._tally.read()
        load, found = self._load, self._tally.verdict(self._load.sent)
        nested = sum(last + 1 for (_, name), last in load.sent.items() if " via " in name)
        own, node = peaks()
        print(
            f"\nmessages   {load.count:,} sent: {load.count - nested:,} by senders"
            f" (of {self._wanted:,}), {nested:,} by entities; {self._tally.noted:,} seen\n"
            f"moves      {self._moves:,} ({self._moves / seconds:.1f} a second)\n"
            f"seconds    {seconds:.1f} ({self._tally.noted / seconds:,.0f} messages a second)\n"
            f"lost       {found.lost}\nduplicated {found.duplicated}\n"
            f"reordered  {found.reordered}\nunexpected {found.unexpected}\n"
            f"memory     {own} MiB here, {node} MiB in the largest node, at most"
        )
        complete = load.count - nested == self._wanted
        if error is not None:
            print(f"failed: {type(cause := first_of(error)).__name__}: {cause}")
        return error is None and found.sound and complete and self._moves > 0


def first_of(error: BaseException) -> BaseException:
    """What happened; a group says no more than that there is something in it."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


def positive(text: str) -> int:
    """A number above 0, for argparse."""
    number = int(text)
    if number < 1:
        raise ValueError(text)
    return number


def main() -> int:
    """Run, tell, and say by the exit code what came of it."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--senders", type=positive, default=10)
    parser.add_argument("--numbers", type=positive, default=1_000, help="per sender and entity")
    parser.add_argument("--entities", type=positive, default=100)
    parser.add_argument("--in-flight", type=positive, default=IN_FLIGHT, help="per sender")
    arguments = parser.parse_args()
    if arguments.entities < 2:
        parser.error("--entities must be at least 2: some of them ask others")
    with tempfile.TemporaryDirectory(prefix="domicile-full-size-") as directory:
        ledger = Path(directory) / "ledger"
        ledger.touch()
        os.environ[LEDGER] = str(ledger)
        run = Run(arguments, ledger)
        error: BaseException | None = None
        try:
            asyncio.run(run.go())
        except (Exception, KeyboardInterrupt) as raised:
            error = raised
        return 0 if run.report(error) else 1


if __name__ == "__main__":
    sys.exit(main())
