"""The load on the demo's bank: senders that transfer coins and read balances.

`ops.demo.run` runs it in its own process. Each ask is repeated until it is answered: those that
book carry a key, so that a repeat books nothing twice. The senders' ledger never asks the bank.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Coroutine
from pathlib import Path
from random import Random
from typing import Any

from domicile.client import ConnectedClient, connect
from domicile.entity.model.client import Client
from domicile.errors import DomicileError, MaybeExecuted, NotExecuted
from domicile.ops.demo.bank import Account, Slip
from domicile.ops.demo.ledger import Ledger, Order
from domicile.settings import Settings
from domicile.testing.processes.recorder import FileRecorder

ACCOUNTS = tuple(f"account-{number}" for number in range(48))
OPENING = 100
"""Coins that each account has at first."""

MOST = 40
"""Coins of the largest transfer: often enough more than there are."""

SENDERS = 3
PER_SECOND = 60
"""Transfers and reads per second that each sender begins."""

READS = 1 / 3
TWICE = 0.1
"""The parts of all that is sent that are reads, and transfers that are sent once more after their
answer."""

IN_FLIGHT = 512
RETRY_S = 0.02
LEFT_S = 15.0


class Load:
    """Several senders at work, their ledger, and what their asks went through."""

    def __init__(self, store: str, settings: Settings, directory: Path, seed: int) -> None:
        self.ledger = Ledger()
        self.asks = 0
        self.answered = 0
        self.transfers = 0
        self.reads = 0
        self.failed = 0
        self.stale = 0
        """Reads that saw less than an answer that was there before they were asked."""
        self.had_run = 0
        """Asks that had run although their sender was told that they may have run."""
        self.repeats: Counter[str] = Counter()
        """Asks that were sent again, by what their sender was told before."""
        self.twice = 0
        """Orders that were sent once more after their answer."""
        self.same = 0
        """Those of them that got the first answer again."""
        self._stopping = False
        self._open: dict[asyncio.Task[None], None] = {}
        self._newest: Counter[str] = Counter()
        self._senders: list[tuple[ConnectedClient, FileRecorder, Random]] = []
        for number in range(SENDERS):
            recorder = FileRecorder(directory / f"sender-{number}.events")
            client = connect(store, settings=settings, meter=recorder)
            self._senders.append((client, recorder, Random(f"{seed}/{number}")))

    async def open_accounts(self, client: Client) -> None:
        """Put the first coins into every account; returns when all of them are booked."""
        async with asyncio.TaskGroup() as group:
            for account in ACCOUNTS:
                order = self.ledger.opening(account, OPENING)
                group.create_task(self._order(client, order))

    async def run(self) -> None:
        """Send until stopped, bring every transfer to its end, and let the senders leave."""
        try:
            async with asyncio.TaskGroup() as group:
                for number, (client, _, random) in enumerate(self._senders):
                    group.create_task(self._sender(f"s{number}", client, random))
        finally:
            for _, recorder, _ in self._senders:
                recorder.close()

    def stop(self) -> None:
        """Begin nothing more."""
        self._stopping = True

    async def _sender(self, name: str, client: ConnectedClient, random: Random) -> None:
        loop = asyncio.get_running_loop()
        begun = 0
        async with client:
            due = loop.time()
            while not self._stopping:
                due = max(due + 1 / PER_SECOND, loop.time() - 0.2)
                await asyncio.sleep(due - loop.time())
                if len(self._open) < IN_FLIGHT:
                    begun += 1
                    task = loop.create_task(self._one(f"{name}-{begun}", client, random))
                    self._open[task] = None
                    task.add_done_callback(lambda done: self._open.pop(done, None))
            left = list(self._open)
            if left:
                await asyncio.wait(left, timeout=LEFT_S)
            for task in left:
                task.cancel()
            await asyncio.gather(*left, return_exceptions=True)

    def _one(self, name: str, client: ConnectedClient, random: Random) -> Coroutine[Any, Any, None]:
        source, target = random.sample(ACCOUNTS, 2)
        amount, twice = random.randint(1, MOST), random.random() < TWICE
        if random.random() < READS:
            return self.read(client, source)
        return self.transfer(client, name, source, target, amount, twice)

    async def transfer(
        self, client: Client, name: str, source: str, target: str, amount: int, twice: bool
    ) -> None:
        """Move coins; if `twice`, each of the two orders is sent once more after its answer."""
        transfer = self.ledger.transfer(name, source, target, amount)
        await self._order(client, transfer.taken, twice=twice)
        if transfer.taken.is_answered:
            await self._order(client, transfer.given, twice=twice)
        self.transfers += transfer.is_answered

    async def _order(self, client: Client, order: Order, *, twice: bool = False) -> None:
        slip = await self._slip(client, order)
        if slip is None:
            return
        order.is_refused, order.is_answered = slip.is_refused, not slip.is_refused
        self.had_run += slip.attempt < order.attempts
        if twice:
            self.twice += 1
            again = await self._slip(client, order)
            self.same += again == slip

    async def _slip(self, client: Client, order: Order) -> Slip | None:
        """Ask by the order's key until the account answers; None if the handler failed."""
        ref = client.ref(Account, order.account).options(key=order.key)
        method = Account.withdraw if order.amount < 0 else Account.deposit
        self.asks += 1
        while True:
            order.attempts += 1
            try:
                slip = await ref.ask(method, order.key, abs(order.amount), order.attempts)
            except (NotExecuted, MaybeExecuted) as error:
                await self._again(error)
            except DomicileError:
                self.failed += 1
                return None
            else:
                self.answered += 1
                self._saw(order.account, slip)
                return slip

    async def read(self, client: Client, account: str) -> None:
        """Read a balance, and see whether it is older than an answer that was there before."""
        self.asks += 1
        while True:
            newest = self._newest[account]
            try:
                slip = await client.ref(Account, account).ask(Account.look)
            except (NotExecuted, MaybeExecuted) as error:
                await self._again(error)
            except DomicileError:
                self.failed += 1
                return
            else:
                self.answered += 1
                self.reads += 1
                self.stale += slip.bookings < newest
                self._saw(account, slip)
                return

    async def _again(self, error: DomicileError) -> None:
        told = "not executed" if isinstance(error, NotExecuted) else "maybe executed"
        self.repeats[told] += 1
        await asyncio.sleep(RETRY_S)

    def _saw(self, account: str, slip: Slip) -> None:
        self._newest[account] = max(self._newest[account], slip.bookings)


async def balance_of(client: Client, account: str) -> int:
    """Ask one account again and again until it answers."""
    while True:
        try:
            ref = client.ref(Account, account).options(timeout_s=1.0)
            return (await ref.ask(Account.look)).balance
        except (NotExecuted, MaybeExecuted):
            await asyncio.sleep(RETRY_S)
