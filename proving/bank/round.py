"""One round of the bank: a cluster, its callers, its faults, a rest, and the verdict.

Called by `proving.bank.__main__`. Each round has a cluster and a journal of its own. What failed of
the harness itself is a complaint as well: the rounds before it keep their report.
"""

from __future__ import annotations

import asyncio
import shutil
import traceback
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

import msgspec

from domicile import Settings
from domicile.backends import OpenOptions
from domicile.backends.registry import journal_backend
from domicile.core.ids import EntityKey
from domicile.persist.eventsourced import EventCodec
from domicile.ports.journal import Journal, Wanted
from domicile.testing import Processes
from proving.bank.account import Account, Booked, Slip
from proving.bank.ledger import Complaint, Ledger, judge
from proving.bank.probe import PREFIX, figures_of_all
from proving.bank.strikes import Strikes
from proving.bank.tellers import Tellers
from proving.postgres_server import PostgresServer

SETTINGS = Settings(
    shards=16, ttl_s=3.0, link_timeout_s=4.0, hold_timeout_s=2.0, poison_deaths=1_000_000
)
CLUSTER = "domicile"
ACCOUNTS = 24
TELLERS = 16
READERS = 4
SETTLE_S = 120.0
END_S = 120.0
REPEATS = 300
PAGE_BYTES = 1 << 22


@dataclass(frozen=True, slots=True)
class RoundPlan:
    """What a round is made from."""

    seed: int
    number: int
    length_s: float
    nodes: int
    directory: Path
    server: PostgresServer | None = None
    """Its server, if the journal is in PostgreSQL."""

    def stream(self, name: str) -> Random:
        """Chance of its own for everything."""
        return Random(f"{self.seed} {self.number} {name}")


@dataclass(slots=True)
class Result:
    """What came of a round."""

    counts: Counter[str]
    complaints: list[Complaint] = field(default_factory=list[Complaint])


async def play(plan: RoundPlan, counts: Counter[str], stop: asyncio.Event) -> Result:
    """Play one round; `counts` are filled while it goes on, `stop` ends it early."""
    result = Result(counts)
    plan.directory.mkdir(parents=True, exist_ok=True)
    try:
        await _play(plan, result, stop)
    except Exception:
        result.complaints.append(Complaint("harness", "", traceback.format_exc()))
    counts["rounds"] += 1
    if result.complaints:
        told = "\n".join(map(str, result.complaints))
        (plan.directory / "complaints.txt").write_text(f"{told}\n", encoding="utf-8")
        if plan.server is not None:
            await asyncio.to_thread(shutil.copy, plan.server.log, plan.directory / "postgres.log")
    return result


async def _play(plan: RoundPlan, result: Result, stop: asyncio.Event) -> None:
    accounts = [f"a{number}" for number in range(ACCOUNTS)]
    file = None if plan.server else (plan.directory / "bank.journal").absolute()
    if plan.server is not None:
        url = await asyncio.to_thread(plan.server.new_database)
    else:
        url = f"sqlite:///{file}"
    cluster = Processes(
        [Account], nodes=plan.nodes, settings=SETTINGS, directory=plan.directory,
        journal=f"{PREFIX}{url}", record=False,
    )  # fmt: skip
    counts = result.counts
    served: dict[str, Slip] = {}
    async with cluster:
        tellers = Tellers(cluster, accounts, counts, plan.stream("tellers"))
        strikes = Strikes(
            cluster, accounts, counts, plan.stream("strikes"), journal=file, server=plan.server,
            look=tellers.look_at_all,
        )  # fmt: skip
        try:
            await _run(plan, result, stop, tellers, strikes)
            async with asyncio.timeout(END_S):
                for account in accounts:
                    served[account] = await tellers.state_of(account)
                await tellers.repeat_some(REPEATS)
        except TimeoutError:
            text = f"an account did not answer within {END_S:g} s, after all faults were mended"
            result.complaints.append(Complaint("hang", "", text))
        counts.update(figures_of_all(plan.directory))
        del counts["in flight"]
    held = await read_back(url, accounts)
    keep(plan.directory, tellers.ledger, held)
    result.complaints += judge(tellers.ledger, held, served)
    counts["answers judged"] += len(tellers.ledger.sights)
    counts["events judged"] += sum(map(len, held.values()))


async def _run(
    plan: RoundPlan, result: Result, stop: asyncio.Event, tellers: Tellers, strikes: Strikes
) -> None:
    """Callers under faults, then a rest in which all transfers must end."""
    await tellers.open()
    async with asyncio.TaskGroup() as group:
        calling = [group.create_task(tellers.transfer_on()) for _ in range(TELLERS)]
        calling += [group.create_task(tellers.read_on()) for _ in range(READERS)]
        striking = [
            group.create_task(strikes.strike_nodes()),
            group.create_task(strikes.strike_journal()),
            group.create_task(strikes.move_shards()),
        ]
        try:
            async with asyncio.timeout(plan.length_s):
                await stop.wait()
        except TimeoutError:
            pass
        strikes.end()
        await asyncio.wait(striking)
        await strikes.mend()
        tellers.end()
        _, late = await asyncio.wait(calling, timeout=END_S)
        for task in late:
            task.cancel()
        if late:
            unanswered = [leg.name for leg in tellers.ledger.legs.values() if leg.is_open]
            text = f"{len(late)} callers have no answer {END_S:g} s after the last fault: "
            result.complaints.append(Complaint("hang", "", text + ", ".join(unanswered[:20])))


async def read_back(url: str, accounts: Sequence[str]) -> dict[str, list[Booked]]:
    """All events that the journal holds of all accounts, read beside the cluster."""
    journal = journal_backend(url).open_journal(url, OpenOptions("judge", CLUSTER))
    try:
        return {account: await _events(journal, account) for account in accounts}
    finally:
        await journal.close()


async def _events(journal: Journal, account: str) -> list[Booked]:
    codec: EventCodec = Account.__domicile_events__
    entity = EntityKey("bank.account", account)
    events: list[Booked] = []
    more = True
    while more:
        [page] = await journal.recover([Wanted(entity, len(events), snapshot=False)], PAGE_BYTES)
        events += map(codec.decode, page.events)
        more = page.more
    return events


def keep(directory: Path, ledger: Ledger, held: dict[str, list[Booked]]) -> None:
    """Leave what the verdict rests on beside the logs of the processes."""
    (directory / "journal.json").write_bytes(msgspec.json.encode(held))
    (directory / "ledger.json").write_bytes(msgspec.json.encode(ledger))
