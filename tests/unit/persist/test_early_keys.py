"""An entity that has used more keys than it knows looks up those of waiting messages early."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest

from domicile import EventSourced, MaybeExecuted, Settings, handler
from domicile.core.ids import EntityKey
from domicile.persist import entity_log
from domicile.persist.writer import JournalWriter
from domicile.ports.journal import StoredReply
from domicile.testing import Sim, simulated

FEW = Settings(shards=8)
ASKS = 40


@dataclass(frozen=True)
class Counted:
    what: str


class Tally(EventSourced[tuple[str, ...], Counted], name="tally"):
    @staticmethod
    def initial(id: str, /) -> tuple[str, ...]:
        return ()

    @staticmethod
    def apply(state: tuple[str, ...], event: Counted, /) -> tuple[str, ...]:
        return (*state, event.what)

    @handler
    async def count(self, what: str) -> int:
        return len(await self.persist(Counted(what)))


GROUPS: list[int] = []
"""How many keys each look-up of the journal was for."""


@pytest.fixture(autouse=True)
def few_known_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if the entity had used thousands of keys."""
    look_up = JournalWriter._look_up

    async def counted(
        self: JournalWriter, asked: Sequence[tuple[EntityKey, str]]
    ) -> Sequence[StoredReply | None]:
        GROUPS.append(len(asked))
        return await look_up(self, asked)

    GROUPS.clear()
    monkeypatch.setattr(JournalWriter, "_look_up", counted)
    monkeypatch.setattr(entity_log, "KNOWN_KEYS", 1)


async def used(sim: Sim, id: str) -> Any:
    """An entity that does not know all its keys any more."""
    tally = sim.ref(Tally, id).options(timeout_s=30)
    for n in range(2):
        await tally.options(key=f"before {n}").ask(Tally.count, f"before {n}")
    return tally


@simulated(entities=[Tally], nodes=2, seeds=2, settings=FEW)
async def test_keys_of_waiting_messages_share_look_ups(sim: Sim) -> None:
    tally = await used(sim, "t")
    GROUPS.clear()
    asks = [tally.options(key=f"k{n}").ask(Tally.count, f"k{n}") for n in range(ASKS)]
    assert sorted(await asyncio.gather(*asks)) == list(range(3, ASKS + 3))
    assert sum(GROUPS) <= ASKS + 1
    assert len(GROUPS) <= ASKS / 4, "each message looked its key up by itself"


@simulated(entities=[Tally], nodes=2, seeds=4, settings=FEW)
async def test_a_key_that_waits_twice_takes_effect_once(sim: Sim) -> None:
    tally = await used(sim, "t")
    keys = [f"k{n // 2}" for n in range(ASKS)]
    again = [f"k{n}" for n in range(ASKS // 2)]
    first = await asyncio.gather(*(tally.options(key=k).ask(Tally.count, k) for k in keys))
    second = await asyncio.gather(*(tally.options(key=k).ask(Tally.count, k) for k in again))
    assert first[::2] == first[1::2] == second
    assert sorted(event.what for event in sim.events(Tally, "t")[2:]) == sorted(again)


@simulated(entities=[Tally], nodes=3, seeds=8, settings=FEW)
async def test_under_faults_each_key_takes_effect_once(sim: Sim) -> None:
    ids = ["t", "u", "v"]
    for id in ids:
        await used(sim, id)
    replies: dict[tuple[str, str], list[int]] = {}

    async def caller(number: int) -> None:
        for n in range(20):
            # Callers share keys, and each repeats its own until it is answered.
            id, key = ids[n % len(ids)], f"{number // 2}-{n}"
            tally = sim.ref(Tally, id).options(timeout_s=20, key=key)
            while True:
                try:
                    reply = await tally.ask(Tally.count, key)
                except MaybeExecuted:
                    continue
                replies.setdefault((id, key), []).append(reply)
                break

    callers = [sim.loop.create_task(caller(number)) for number in range(8)]
    for _ in range(4):
        await sim.advance(sim.random.uniform(0.05, 0.3))
        match sim.random.randrange(3):
            case 0:
                sim.servers.stall(sim.random.uniform(0.1, 1.0), lambda: None)
            case 1:
                node = sim.owner(Tally, ids[0])
                sim.crash(node)
                await sim.wait_until(sim.settled)
                sim.start(node)
            case _:
                journal = sim.nodes[sim.owner(Tally, ids[1])].journal
                assert journal is not None
                journal.lost_reply = 0.5
                await sim.advance(0.2)
                journal.lost_reply = 0.0
    await asyncio.gather(*callers)
    for id in ids:
        counted = [event.what for event in sim.events(Tally, id)]
        assert len(counted) == len(dict.fromkeys(counted))
    assert all(len(dict.fromkeys(told)) == 1 for told in replies.values())
