"""`domicile demo`: a bank on processes of this machine, faults, and a judged report.

Called by the command line. It uses the process harness and the checkers as any test would. It must
leave no process behind, and no directory unless the user wants it or something went wrong.
"""

from __future__ import annotations

import asyncio
import logging
import os
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import AsyncGenerator, Generator
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random

from rich.console import Console

from domicile.backends.registry import shown_url
from domicile.core.ids import NOBODY, Incarnation, ShardKey
from domicile.errors import DomicileError
from domicile.journals.sqlite.lock_holder import find_holder
from domicile.ops.demo.bank import Account, bookings_in, journal_file, journal_of
from domicile.ops.demo.ledger import BankAudit, bank_audit
from domicile.ops.demo.load import ACCOUNTS, SENDERS, Load, balance_of
from domicile.ops.demo.report import Recovery, Report, report_view, write_svg
from domicile.ops.demo.view import DemoMoment, DemoPicture, Lines, Screen
from domicile.ops.logs import TextFormatter
from domicile.settings import Settings
from domicile.testing.checkers import check
from domicile.testing.checkers.deadlines import check_deadlines
from domicile.testing.history import History
from domicile.testing.processes.cluster import CLUSTER, Processes
from domicile.testing.processes.history import RealHistory
from domicile.testing.processes.node_process import HarnessError, NodeProcess

SETTINGS = Settings(
    ttl_s=2.0, shards=64, balance_interval_s=0.3, balance_limit=0.25, ask_timeout_s=8.0,
    drain_deadline_s=5.0, linger_s=1.0,
)  # fmt: skip
"""A short lease, so that the frozen node's shards move within seconds."""

FROZEN_S = SETTINGS.ttl_s + 1.0
RECOVER_S = 30.0
ACTS_S = 8.0
"""About how many seconds the acts take without the load before and after."""

TICK_S = 0.125
INTERRUPTED = 130

PIPE_CLOSED = 141
"""What a shell says of a program whose output nobody reads any more (128 + SIGPIPE). Not 0: nothing
was judged."""

FEW = 3
"""Faults of the books and violations to show: the first ones explain the rest."""

GRACE_S = 20.0
"""Most seconds that an interrupted demo takes to end its tasks; usually it needs a moment."""


@dataclass(frozen=True)
class DemoOptions:
    """The options that the user gave."""

    seconds: float = 20.0
    nodes: int = 3
    seed: int = 1
    plain: bool = False
    keep: bool = False
    svg: Path | None = None
    store: str | None = None
    """An empty store; None: an embedded one."""


def victims(wanted: DemoOptions) -> tuple[int, int, int]:
    """Which nodes are killed, frozen and drained: the same for the same seed."""
    killed, frozen, drained = Random(wanted.seed).sample(range(wanted.nodes), 3)
    return killed, frozen, drained


class Story:
    """One run: acts in order, under constant load."""

    def __init__(self, wanted: DemoOptions, screen: Screen, directory: Path) -> None:
        self._wanted, self._screen = wanted, screen
        given = None if wanted.store is None else journal_of(wanted.store, directory)
        self._cluster = Processes(
            [Account], nodes=wanted.nodes, settings=_settings(wanted), directory=directory,
            store=wanted.store, journal=given,
        )  # fmt: skip
        self._directory = directory
        self._load: Load | None = None
        self._audit: BankAudit | None = None
        self._recoveries: list[Recovery] = []
        self._refusals = 0
        self._conditions: dict[int, str] = {}
        self._loaded_s = 0.0

    async def tell(self) -> None:
        """From the start of the cluster to its end."""
        store = self._wanted.store
        where = "one embedded store" if store is None else f"the store {shown_url(store)}"
        self._screen.say(f"starting {self._wanted.nodes} node processes on {where}")
        cluster = self._cluster
        async with cluster:
            self._screen.say(f"every one of {cluster.settings.shards} shards is served")
            load = Load(cluster.store, cluster.settings, self._directory, self._wanted.seed)
            self._load = load
            async with _within("the accounts were not opened"):
                await load.open_accounts(cluster)
            self._screen.say(f"{len(ACCOUNTS)} accounts have {load.ledger.coins:,} coins together")
            began = time.monotonic()
            async with asyncio.TaskGroup() as group:
                sending = group.create_task(load.run())
                looking = group.create_task(self._look())
                await self._acts(*victims(self._wanted))
                self._loaded_s = time.monotonic() - began
                load.stop()
                await sending
                looking.cancel()
            self._screen.say("every transfer has come to its end; the accounts are asked")
            async with _within("not every account told its balance"):
                balances = {account: await balance_of(cluster, account) for account in ACCOUNTS}
            self._screen.say(f"they have {sum(balances.values()):,} coins; the cluster ends")
        journal = journal_of(cluster.store, self._directory)
        bookings = await bookings_in(journal, CLUSTER, cluster.settings.shards)
        self._audit = bank_audit(load.ledger, balances, bookings)

    def report(self) -> Report:
        """Judge the run; after `tell`."""
        load, audit = self._load, self._audit
        assert load is not None, "tell the story first"
        assert audit is not None, "the story was not told to its end"
        history = self._cluster.history()
        violations = check(history)
        return Report(
            seed=self._wanted.seed, nodes=self._wanted.nodes, senders=SENDERS,
            seconds=self._loaded_s, asks=load.asks, reads=load.reads, repeats=load.repeats,
            had_run=load.had_run, twice=load.twice, same=load.same, failed=load.failed,
            unanswered=load.asks - load.answered - load.failed, refused=load.ledger.refused,
            stale=load.stale, audit=audit, refusals=self._refusals,
            late_replies=late_replies(history), violations=[str(one) for one in violations],
            events=len(history.events), recoveries=self._recoveries,
        )  # fmt: skip

    def kill_all(self) -> None:
        """End every node process now; returns once they are reaped."""
        for node in self._cluster.nodes:
            if node.up:
                self._cluster.crash(node.index)

    async def _acts(self, killed: int, frozen: int, drained: int) -> None:
        cluster = self._cluster
        calm_s = max(0.2, (self._wanted.seconds - ACTS_S) / 5)
        await asyncio.sleep(calm_s)

        self._screen.say(f"kill -9 node-{killed}")
        began, homes, away = time.monotonic(), self._at(killed), self._incarnation(killed)
        cluster.crash(killed)
        self._conditions[killed] = "killed"
        await self._well("kill -9", f"node-{killed} dies in the middle of it", began, away, homes)
        await asyncio.sleep(calm_s)

        await self._freeze_and_thaw(frozen)
        await asyncio.sleep(calm_s)

        fresh = len(cluster.nodes)
        self._screen.say(f"a new node, node-{fresh}, joins")
        began = time.monotonic()
        cluster.nodes.append(NodeProcess(fresh, True))
        cluster.start(fresh)
        await cluster.wait_until(lambda: self._shards_at(fresh) > 0, timeout_s=RECOVER_S)
        await self._well("join", f"node-{fresh} starts and gets shards", began, NOBODY, [])
        await asyncio.sleep(calm_s)

        self._screen.say(f"SIGTERM to node-{drained}: it hands everything over")
        began, homes, away = time.monotonic(), self._at(drained), self._incarnation(drained)
        self._conditions[drained] = "leaving"
        async with asyncio.TaskGroup() as group:
            group.create_task(cluster.stop(drained))
            await self._well("SIGTERM", f"node-{drained} drains and leaves", began, away, homes)
        self._conditions[drained] = "left"
        await asyncio.sleep(calm_s)

    async def _freeze_and_thaw(self, frozen: int) -> None:
        cluster = self._cluster
        self._screen.say(
            f"SIGSTOP node-{frozen} while it is busy, for longer than its lease of "
            f"{cluster.settings.ttl_s:g} s"
        )
        began, homes, away = time.monotonic(), self._at(frozen), self._incarnation(frozen)
        before = self._stopped(frozen)
        await self._freeze(frozen)
        self._conditions[frozen] = "frozen"
        await self._well("SIGSTOP", f"node-{frozen} freezes past its lease", began, away, homes)
        await asyncio.sleep(max(0.0, FROZEN_S - (time.monotonic() - began)))
        self._screen.say(f"SIGCONT: node-{frozen} wakes, and owns nothing any more")
        cluster.thaw(frozen)
        began = time.monotonic()
        await cluster.wait_until(
            lambda: cluster.incarnation(frozen) not in (None, away), timeout_s=RECOVER_S
        )
        self._conditions.pop(frozen)
        with suppress(AssertionError):
            # Counters are a little older than the state in the store.
            await cluster.wait_until(lambda: self._stopped(frozen) > before, timeout_s=RECOVER_S)
        self._refusals = self._stopped(frozen) - before
        await self._well("SIGCONT", f"node-{frozen} joins as another incarnation", began, away, [])

    async def _freeze(self, node: int) -> None:
        """Freeze a node, but not in the middle of a write to the journal.

        Other nodes would end it when its lease is over (J3), so that nothing could wake up.
        """
        process = self._cluster.nodes[node].process
        assert process is not None
        async with _within(f"node-{node} never was between two writes to the journal"):
            while True:
                self._cluster.freeze(node)
                file = journal_file(journal_of(self._cluster.store, self._directory))
                if file is None or await asyncio.to_thread(find_holder, file) != process.pid:
                    return
                self._cluster.thaw(node)
                await asyncio.sleep(0.01)

    def _stopped(self, node: int) -> int:
        """How often a node was fenced or its guard refused."""
        counts = self._cluster.counts(node)
        return counts["lease.fenced"] + counts["guard.refused"]

    async def _well(
        self, act: str, what: str, began: float, away: Incarnation, accounts: list[str]
    ) -> None:
        """Wait until every shard is served elsewhere and the former home's accounts answer."""
        async with _within(f"not all was well after {act}"), asyncio.TaskGroup() as group:
            for account in accounts:
                group.create_task(balance_of(self._cluster, account))
            while not self._served_without(away):  # noqa: ASYNC110 - the harness has no event
                await asyncio.sleep(0.01)
        seconds = time.monotonic() - began
        self._recoveries.append(Recovery(act, what, seconds))
        self._screen.say(f"  all well after {seconds:.2f} s")

    def _served_without(self, away: Incarnation) -> bool:
        return self._cluster.settled() and away not in self._owners()

    def _owners(self) -> list[Incarnation]:
        shards = range(self._cluster.settings.shards)
        entries = (self._cluster.entry(ShardKey("default", number)) for number in shards)
        return [entry.owner for entry in entries if entry.state == "serving"]

    def _incarnation(self, node: int) -> Incarnation:
        found = self._cluster.incarnation(node)
        if found is None:
            raise HarnessError(f"node-{node} has no record in the store")
        return found

    def _at(self, node: int) -> list[str]:
        home = self._incarnation(node)
        cluster = self._cluster
        return [id for id in ACCOUNTS if cluster.entry(cluster.shard(Account, id)).owner == home]

    def _shards_at(self, node: int) -> int:
        home = self._cluster.incarnation(node)
        return 0 if home is None else self._owners().count(home)

    async def _look(self) -> None:
        """Show the state again and again, until cancelled."""
        load = self._load
        assert load is not None
        before, since, rate = 0, time.monotonic(), 0.0
        while True:
            await asyncio.sleep(TICK_S)
            now = time.monotonic()
            if now - since >= 1.0:
                rate, before, since = (load.answered - before) / (now - since), load.answered, now
            nodes = [
                (node.name, self._condition(node), self._shards_at(node.index))
                for node in self._cluster.nodes
            ]
            shards = self._cluster.settings.shards
            done = (load.transfers, load.reads, load.repeats.total())
            self._screen.show(DemoMoment(shards, nodes, rate, *done))

    def _condition(self, node: NodeProcess) -> str:
        return self._conditions.get(node.index, "up" if node.up else "gone")


@asynccontextmanager
async def _within(complaint: str) -> AsyncGenerator[None]:
    """A bound on what the bank must do by itself."""
    try:
        async with asyncio.timeout(RECOVER_S):
            yield
    except TimeoutError:
        raise HarnessError(f"{complaint} within {RECOVER_S:g} s") from None


def late_replies(history: History) -> int:
    """Replies after a deadline, as the checker of L3 counts them; at most the checker's limit."""
    # Starts and resumptions get another name: they would use up the checker's limit.
    events = [
        event._replace(kind="judged apart") if event.kind in ("start", "resume") else event
        for event in history.events
    ]
    found = check_deadlines(RealHistory(events, Counter()))
    return sum(any(event.kind == "reply" for event in one.events) for one in found)


def _settings(wanted: DemoOptions) -> Settings:
    return replace(SETTINGS, min_nodes=wanted.nodes)


class _Console(Console):
    closed = False
    """Whether nobody reads the output any more."""

    def on_broken_pipe(self) -> None:
        """The output is closed, as in `domicile demo | head`: end in an orderly way, as after
        Ctrl-C."""
        self.quiet = self.closed = True
        with open(os.devnull, "wb") as nowhere:
            os.dup2(nowhere.fileno(), sys.stdout.fileno())
        signal.raise_signal(signal.SIGINT)


def run_demo(wanted: DemoOptions) -> int:
    """Run, show and judge; returns the exit code."""
    console = _Console(highlight=False)
    directory = Path(tempfile.mkdtemp(prefix="domicile-demo-"))
    plain = wanted.plain or not console.is_terminal
    screen: Screen = Lines(console) if plain else DemoPicture(console)
    story = Story(wanted, screen, directory)
    keep = True
    try:
        with screen, _logged_to(directory / "demo.log"):
            interrupted = _tell(story)
        if interrupted:
            keep = wanted.keep
            console.print("interrupted; every process is gone")
            return PIPE_CLOSED if console.closed else INTERRUPTED
        console.print("judging what every process wrote down...")
        report = story.report()
        view = report_view(report)
        console.print(view)
        if wanted.svg is not None:
            write_svg(view, wanted.svg, "domicile demo")
        broken, details = report.broken(), [*report.audit.faults, *report.violations]
        for reason in (*broken, *details[:FEW]):
            console.print(reason, soft_wrap=True, markup=False)
        (directory / "violations.txt").write_text("\n".join(details), encoding="utf-8")
        if len(details) > FEW:
            console.print("...", len(details) - FEW, "more are in violations.txt")
        keep = wanted.keep or bool(broken)
        return 1 if broken else 0
    except KeyboardInterrupt:  # while judging
        keep = wanted.keep
        console.print("interrupted; every process is gone")
        return PIPE_CLOSED if console.closed else INTERRUPTED
    except Exception as error:
        for leaf in _leaves(error):
            known = isinstance(leaf, DomicileError | HarnessError | AssertionError | OSError)
            told = str(leaf) if known else "".join(traceback.format_exception(leaf))
            console.print(f"the demo failed: {told}", soft_wrap=True, markup=False)
        return 1
    finally:
        if keep:
            console.print(f"logs, histories and the store are in {directory}", soft_wrap=True)
        else:
            shutil.rmtree(directory, ignore_errors=True)


@contextmanager
def _logged_to(path: Path) -> Generator[None]:
    """Write the senders' log lines to the other logs, not between the lines shown."""
    handler = logging.FileHandler(path, encoding="utf-8")
    handler.setFormatter(TextFormatter())
    root = logging.getLogger()
    root.addHandler(handler)
    try:
        yield
    finally:
        root.removeHandler(handler)
        handler.close()


def _leaves(error: BaseException) -> list[BaseException]:
    inner: tuple[BaseException, ...] = getattr(error, "exceptions", ())
    return [leaf for one in inner for leaf in _leaves(one)] or [error]


def _tell(story: Story) -> bool:
    """Run a story on a loop of its own; True if a signal ended it."""
    loop = asyncio.new_event_loop()
    asked: list[signal.Signals] = []
    try:
        telling = loop.create_task(story.tell())

        def interrupt(kind: signal.Signals) -> None:
            asked.append(kind)
            story.kill_all()
            telling.cancel()

        for kind in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            loop.add_signal_handler(kind, interrupt, kind)
        loop.run_until_complete(_end_of(telling, asked))
        if not asked:
            telling.result()
    finally:
        loop.set_exception_handler(lambda loop, context: None)
        loop.close()
    return bool(asked)


async def _end_of(telling: asyncio.Task[None], asked: list[signal.Signals]) -> None:
    """Wait until the run ends. After an interrupt wait only a moment: the nodes are killed."""
    while not asked and not telling.done():
        await asyncio.wait([telling], timeout=TICK_S)
    deadline = time.monotonic() + GRACE_S
    while not telling.done() and time.monotonic() < deadline:
        # An orderly leave would wait for nodes that were killed.
        for task in asyncio.all_tasks():
            if task is not asyncio.current_task():
                task.cancel()
        await asyncio.wait([telling], timeout=0.05)
