"""Remembered entities in real processes, on both journals: moves, deaths, lost answers."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import failing_journal
import pytest
from failing_journal import CALLS, Faults
from postgres_lab import shared_server
from real_entities import enter
from real_lab import open_ledger, seen

from domicile import EventSourced, MaybeExecuted, Settings, handler
from domicile.backends import OpenOptions
from domicile.backends.registry import journal_backend
from domicile.core.ids import EntityKey
from domicile.entity.hosting.remembering import AT_ONCE
from domicile.ports.journal import Wanted
from domicile.testing import Processes

failing_journal.install()

JOURNALS = ("sqlite", "postgresql")
MANY, AT_A_TIME, FEW = 10_100, 250, 50
SETTINGS = Settings(shards=1, ttl_s=3.0, ask_timeout_s=120.0, poison_deaths=1_000)
PAGE_BYTES = 1 << 20


@dataclass(frozen=True)
class Seen:
    what: int


class Starts:
    """How many entities of this process start at the same time."""

    now = 0


class Device(EventSourced[int, Seen], name="remembered.device", remember=True):
    """Notes each start, by its process, with how many others start beside it."""

    @staticmethod
    def initial(id: str, /) -> int:
        return 0

    @staticmethod
    def apply(state: int, event: Seen, /) -> int:
        return state + event.what

    async def on_start(self) -> None:
        Starts.now += 1
        enter(self.id, str(os.getpid()), Starts.now)
        await asyncio.sleep(0)
        Starts.now -= 1

    @handler
    async def see(self, what: int) -> int:
        return await self.persist(Seen(what))

    @handler
    async def retire(self) -> None:
        await self.persist(Seen(0))
        await self.forget()

    @handler
    async def end(self) -> None:
        await self.delete()


def url_of(kind: str, directory: Path) -> str:
    """A journal of its own for a test."""
    if kind == "postgresql":
        return shared_server().new_database()
    return f"sqlite:///{directory / 'events.journal'}"


async def stored(url: str, ids: Sequence[str]) -> set[str]:
    """Which entities have events, as another process reads the journal."""
    journal = journal_backend(url).open_journal(url, OpenOptions("judge", "domicile"))
    try:
        wanted = [Wanted(EntityKey("remembered.device", id), 0, snapshot=False) for id in ids]
        found = await journal.recover(wanted, PAGE_BYTES)
        return {id for id, one in zip(ids, found, strict=True) if one.events}
    finally:
        await journal.close()


class Ledger:
    """Who started, and where, since a moment."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def begin(self) -> None:
        """Forget what was."""
        os.truncate(self._path, 0)

    def started(self) -> set[str]:
        return {id for id, _ in seen(self._path)}

    def started_at(self, pid: int) -> set[str]:
        return {id for id, where in seen(self._path) if where == str(pid)}

    def together(self) -> int:
        """The most that started at the same time in one process."""
        return max(max(many) for many in seen(self._path).values())

    def twice(self) -> list[str]:
        """Who started more than once in one process."""
        return [id for (id, _), many in seen(self._path).items() if len(many) > 1]


def pid_of(cluster: Processes, node: int) -> int:
    process = cluster.nodes[node].process
    assert process is not None
    return process.pid


def restart_all(cluster: Processes) -> None:
    for node in cluster.nodes:
        if node.up:
            cluster.crash(node.index)
    for node in cluster.nodes:
        cluster.start(node.index)


async def until_answered(ref: Any, method: Any, key: str, *args: Any) -> None:
    """A caller that repeats its ask by its key until it is answered."""
    while True:
        try:
            return await ref.options(key=key, timeout_s=60.0).ask(method, *args)  # type: ignore[no-any-return]
        except MaybeExecuted:
            continue


@pytest.mark.parametrize("kind", JOURNALS)
@pytest.mark.scenario("RG-19")
def test_ten_thousand_of_a_shard_start_without_a_message_after_a_move_a_death_and_a_restart(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ledger, url = Ledger(open_ledger(monkeypatch, tmp_path)), url_of(kind, tmp_path)
    ids = [f"d{n}" for n in range(MANY)]

    async def see(cluster: Processes, chosen: Sequence[str]) -> None:
        for at in range(0, len(chosen), AT_A_TIME):
            async with asyncio.TaskGroup() as tasks:
                for id in chosen[at : at + AT_A_TIME]:
                    tasks.create_task(cluster.ref(Device, id).ask(Device.see, 1))

    async def scenario() -> None:
        async with Processes(
            [Device], nodes=2, settings=SETTINGS, journal=url, record=False
        ) as cluster:
            await cluster.wait_until(cluster.settled)
            few = ids[:FEW]
            await see(cluster, few)
            shard = cluster.shard(Device, "d0")

            leader, home = cluster.leader(), cluster.owner(Device, "d0")
            assert leader is not None
            if home == leader:
                # So that a move goes to the node that coordinates.
                await cluster.wish(shard, 1 - leader)
                await cluster.wait_until(lambda: cluster.owner(Device, "d0") == 1 - leader)
                await cluster.wait_until(lambda: ledger.started() >= {*few})
            ledger.begin()
            await cluster.wish(shard, leader)
            await cluster.wait_until(lambda: ledger.started_at(pid_of(cluster, leader)) == {*few})
            await cluster.wish(shard, None)

            ledger.begin()
            cluster.crash(leader)  # home and coordinator in one
            heir = pid_of(cluster, 1 - leader)
            await cluster.wait_until(lambda: ledger.started_at(heir) == {*few})
            cluster.start(leader)

            await see(cluster, ids[FEW:])
            restart_all(cluster)
            ledger.begin()
            await cluster.wait_until(lambda: ledger.started() == {*ids}, timeout_s=300.0)
            assert not ledger.twice()
            assert ledger.together() <= AT_ONCE
            assert await cluster.ref(Device, "d7").ask(Device.see, 1) == 2

    asyncio.run(scenario())


@pytest.mark.parametrize("kind", JOURNALS)
@pytest.mark.scenario("LS-16")
def test_whoever_has_an_event_is_remembered_and_nobody_else_also_after_kills_in_commits(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ledger, url = Ledger(open_ledger(monkeypatch, tmp_path)), url_of(kind, tmp_path)
    settings = Settings(shards=4, ttl_s=3.0, ask_timeout_s=60.0, poison_deaths=1_000)
    acknowledged: list[str] = []
    tried: list[str] = []
    uncertain: list[str] = []

    async def scenario() -> None:
        done = asyncio.Event()

        async def meet(number: int) -> None:
            """New entities, one after the other, each asked once."""
            while not done.is_set():
                id = f"d{number}-{len(tried)}"
                tried.append(id)
                try:
                    await cluster.ref(Device, id).ask(Device.see, 1)
                    acknowledged.append(id)
                except MaybeExecuted:
                    uncertain.append(id)

        async with Processes(
            [Device], nodes=2, settings=settings, journal=url, record=False
        ) as cluster:
            async with asyncio.TaskGroup() as tasks:
                for number in range(16):
                    tasks.create_task(meet(number))
                for node in (0, 1):
                    before = len(acknowledged)
                    await cluster.wait_until(
                        lambda least=before + 100: len(acknowledged) >= least  # type: ignore[misc]
                    )
                    cluster.crash(node)
                    await cluster.wait_until(cluster.settled)
                    cluster.start(node)
                await cluster.wait_until(cluster.settled)
                done.set()
            for member in cluster.nodes:
                cluster.crash(member.index)
            ledger.begin()
            held = await stored(url, tried)
            assert held >= {*acknowledged}
            assert uncertain, "no kill met a commit"
            for member in cluster.nodes:
                cluster.start(member.index)
            await cluster.wait_until(lambda: ledger.started() >= held)
            await cluster.wait_until(cluster.settled)
            # Those behind them in the queue of starts would have been started by now.
            assert await cluster.ref(Device, acknowledged[0]).ask(Device.see, 1) == 2
            assert ledger.started() == held

    asyncio.run(scenario())


@pytest.mark.parametrize("kind", JOURNALS)
@pytest.mark.scenario("RG-20")
def test_lost_answers_of_the_journal_neither_lose_nor_invent_a_remembered_entity(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each call fails in turn, more often than it is repeated, done or not; then all restart."""
    ledger, url = Ledger(open_ledger(monkeypatch, tmp_path)), url_of(kind, tmp_path)
    faults = Faults(tmp_path, monkeypatch)
    settings = Settings(shards=2, ttl_s=3.0, poison_deaths=1_000)
    expected: set[str] = set()

    async def scenario() -> None:
        async with Processes(
            [Device], nodes=1, settings=settings, record=False,
            journal=f"{failing_journal.PREFIX}{url}",
        ) as cluster:  # fmt: skip
            for is_done in (False, True):
                await cluster.wait_until(cluster.settled)
                for call in ("write", "settle", "recover", "inbox"):
                    here = f"{call}-{is_done}"
                    for id in ("ends", "deleted"):
                        await until_answered(
                            cluster.ref(Device, f"{here}-{id}"), Device.see, "0", 1
                        )
                    # A batch is settled only if its write got no answer.
                    faults.want({"write": 1, call: 7}, is_done=is_done)
                    for id, method, args in (
                        ("comes", Device.see, (1,)),
                        ("ends", Device.retire, ()),
                        ("deleted", Device.end, ()),
                    ):
                        await until_answered(
                            cluster.ref(Device, f"{here}-{id}"), method, here, *args
                        )
                    assert call in faults.felt(), here
                    expected.add(f"{here}-comes")
                faults.want({"claim": 7, "remembered": 7, "recover": 7}, is_done=is_done)
                cluster.crash(0)
                ledger.begin()
                cluster.start(0)
                await cluster.wait_until(lambda: ledger.started() >= expected, timeout_s=120.0)
                assert faults.felt() >= {"claim", "remembered"}
                faults.want({})
                for id in sorted(expected):
                    assert await cluster.ref(Device, id).ask(Device.see, 0) == 1
                assert ledger.started() == expected

    assert {"write", "settle", "recover", "inbox", "claim", "remembered"} == {*CALLS}
    asyncio.run(scenario())
