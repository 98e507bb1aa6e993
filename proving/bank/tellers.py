"""The callers of the bank: tellers that transfer, readers that look. They keep the ledger.

Started by `proving.bank.round` in the process of the harness. A teller repeats each ask by its key
until it is answered. Some keys are sent twice at once, and some again after their answer. It ends
only when its transfer has ended: at rest no money may be on its way.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Coroutine, Sequence
from random import Random
from typing import Any

from domicile import HandlerFailed, MaybeExecuted, NotExecuted
from domicile.testing import Processes
from proving.bank.account import Account, Overdrawn, Slip
from proving.bank.ledger import Ledger, Leg

OPENING = 1_000
"""What each account has at first."""

MOST = 400
"""The largest amount of a transfer; often more than there is."""

ASK_S = 5.0
PAUSE_S = 0.05
TWICE = 0.1
AGAIN = 0.1
HOT = 0.3
"""So many of the transfers have the first account on one side."""

READ_S = 0.02

Look = Callable[[Account], Coroutine[Any, Any, Slip]]
LOOKS: tuple[Look, ...] = (Account.balance, Account.peek)


class Tellers:
    """The callers of one round."""

    def __init__(
        self, cluster: Processes, accounts: Sequence[str], counts: Counter[str], random: Random
    ) -> None:
        self.ledger = Ledger()
        self._cluster, self._accounts, self._counts = cluster, accounts, counts
        self._random = random
        self._over = asyncio.Event()
        self._number = 0

    def end(self) -> None:
        """No new transfers."""
        self._over.set()

    async def open(self) -> None:
        """Put the opening amount into every account."""
        for account in self._accounts:
            await self._leg(self.ledger.begin(f"open-{account}", account, OPENING))

    async def transfer_on(self) -> None:
        """One teller: one transfer after the other."""
        while not self._over.is_set():
            source, target = self._random.sample(self._accounts, 2)
            if self._random.random() < HOT and target != self._accounts[0]:
                source = self._accounts[0]
            amount = self._random.randint(1, MOST)
            self._number += 1
            name = f"t{self._number}"
            leg = self.ledger.begin(f"{name}-out", source, -amount)
            await self._leg(leg)
            if not leg.answers:
                self._counts["refused"] += 1
                continue
            await self._leg(self.ledger.begin(f"{name}-in", target, amount))
            self._counts["transfers"] += 1

    async def read_on(self) -> None:
        """One reader: one look after the other, in turns of their own and beside others."""
        while not self._over.is_set():
            await self._look(self._random.choice(self._accounts), self._random.choice(LOOKS))
            await asyncio.sleep(READ_S)

    async def look_at_all(self) -> None:
        """Look at every account at once, in every way; the answers may take long."""
        looks = [self._look(account, how) for account in self._accounts for how in LOOKS]
        await asyncio.gather(*looks)

    async def _look(self, account: str, how: Look) -> None:
        begun = self._now()
        try:
            slip = await self._cluster.ref(Account, account).ask(how)
        except (MaybeExecuted, NotExecuted) as error:
            self._counts[f"reads: {type(error).__name__}"] += 1
        else:
            self._counts["reads"] += 1
            self.ledger.saw(account, how.__name__, slip, begun, self._now())

    async def state_of(self, account: str) -> Slip:
        """What an account is now; asked until it answers."""
        while True:
            begun = self._now()
            try:
                slip = await self._cluster.ref(Account, account).ask(Account.balance)
            except (MaybeExecuted, NotExecuted):
                await asyncio.sleep(PAUSE_S)
                continue
            self.ledger.saw(account, "last look", slip, begun, self._now())
            return slip

    async def repeat_some(self, count: int) -> None:
        """Ask again by keys that were answered, from all of the round."""
        known = [leg for leg in self.ledger.legs.values() if leg.answers]
        for leg in self._random.sample(known, min(count, len(known))):
            await self._ask(leg)
            self._counts["repeats"] += 1

    async def _leg(self, leg: Leg) -> None:
        """A leg until it is answered; some are asked for more often than need be."""
        if self._random.random() < TWICE:
            self._counts["repeats"] += 1
            await asyncio.gather(self._ask(leg), self._ask(leg))
        else:
            await self._ask(leg)
        if leg.answers and self._random.random() < AGAIN:
            self._counts["repeats"] += 1
            await self._ask(leg)

    async def _ask(self, leg: Leg) -> None:
        ref = self._cluster.ref(Account, leg.account).options(key=leg.name, timeout_s=ASK_S)
        method = Account.withdraw if leg.amount < 0 else Account.deposit
        while True:
            begun = self._now()
            try:
                slip = await ref.ask(method, abs(leg.amount), leg.name)
            except Overdrawn as refusal:
                self.ledger.refused(leg, refusal.slip, begun, self._now())
                return
            except MaybeExecuted:
                self._counts["MaybeExecuted"] += 1
            except NotExecuted:
                self._counts["NotExecuted"] += 1
            except HandlerFailed as error:
                self.ledger.failed(leg, error)
                return
            else:
                self.ledger.answered(leg, slip, begun, self._now())
                return
            self._counts["repeats"] += 1
            await asyncio.sleep(PAUSE_S * (0.5 + self._random.random()))

    def _now(self) -> float:
        return self._cluster.now()
