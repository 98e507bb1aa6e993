"""A driver drives any machine of commits: here one that is no coordinator."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from random import Random
from typing import Any

import pytest

from domicile.control.driver import FAILED, MachineDriver
from domicile.core.coordinator.events import (
    Changed,
    Commit,
    CommitDone,
    DriverEffect,
    DriverEvent,
    Listed,
    ReadBack,
    Reread,
    Resign,
    Tick,
)
from domicile.core.lease.lease import Lease
from domicile.core.machines import Arm
from domicile.core.state.txn import Changes, Committed, Put
from domicile.membership.store_calls import StoreCalls
from domicile.settings import Settings
from domicile.stores.memory.store import MemoryStore
from domicile.testing.history import History
from domicile.testing.sim.clock import SimClock
from domicile.testing.sim.loop import SimLoop, World

SETTINGS = Settings(ttl_s=2.0)


@dataclass(frozen=True)
class Say:
    """The toy's own event."""

    effects: tuple[Shout | DriverEffect, ...] = ()
    breaks: bool = False


@dataclass(frozen=True)
class Shout:
    """The toy's own effect."""

    text: str


class Toy:
    """Writes down every event, and wants what it was told to want."""

    doing = "playing"

    def __init__(self) -> None:
        self.events: list[Say | DriverEvent] = []

    def step(self, event: Say | DriverEvent, now: float) -> tuple[Shout | DriverEffect, ...]:
        self.events.append(event)
        if not isinstance(event, Say):
            return ()
        if event.breaks:
            raise RuntimeError("a bug")
        return event.effects


class ToyDriver(MachineDriver[Say, Shout]):
    """Counts what happens, in its own words."""

    _office = "toy"

    def __init__(self, world: World, loop: SimLoop, store: MemoryStore, lease: Lease) -> None:
        self.loop, self.toy, self.shouts, self.notes = loop, Toy(), list[str](), list[str]()
        self.acts, self.store = True, store
        super().__init__(
            self.toy, calls=StoreCalls(store.client("p"), SETTINGS.op_timeout_s),
            clock=SimClock(world, loop), meter=History(lambda: world.now), settings=SETTINGS,
            random=Random(1), guard=lambda: self.acts, lease=lease, lease_id="lease",
        )  # fmt: skip

    def _carry_out(self, effect: Shout) -> None:
        self.shouts.append(effect.text)
        if effect.text == "again":
            self.feed(Say((Shout("later"),)))

    def _unanswered(self) -> None:
        self.notes.append("unanswered")

    def _failed(self, event: Say | DriverEvent) -> None:
        self.notes.append(f"failed on {type(event).__name__}")

    def _ended(self, reason: str) -> None:
        self.notes.append(f"ended: {reason}")


def drive(
    main: Callable[[ToyDriver], Coroutine[Any, Any, None]], *, changes: Changes | None = None
) -> ToyDriver:
    """A whole term; `changes` pass while the first listing is under way."""
    world = World(0)
    loop = world.process("p")
    store = MemoryStore(SimClock(world, loop))
    lease = Lease(SETTINGS.margin_s, stop_budget_s=0.0)
    made: list[ToyDriver] = []

    async def whole() -> None:
        sent_at = loop.time()
        ttl_s = await store.client("p").grant("lease", SETTINGS.ttl_s)
        lease.granted(sent_at, ttl_s, loop.time())
        driver = ToyDriver(world, loop, store, lease)
        made.append(driver)
        task = asyncio.get_running_loop().create_task(driver.run())
        if changes is not None:
            driver.on_changes(changes)
        await asyncio.sleep(0.01)
        await main(driver)
        driver.end("done")
        await task

    world.run(whole(), loop)
    assert world.errors == []
    assert isinstance(made[0].toy.events[0], Listed)
    return made[0]


def test_commits_reads_and_ticks_come_back_as_events() -> None:
    async def main(driver: ToyDriver) -> None:
        put = Commit("t1", (), (Put(b"k", b"v"),))
        driver.feed(Say((put, Arm(driver.loop.time() + 0.5))))
        await asyncio.sleep(0.1)
        driver.feed(Say((ReadBack("t2", b"k"),)))
        await asyncio.sleep(1.0)

    events = [event for event in drive(main).toy.events if not isinstance(event, Say)]
    _, done, reread, tick = events
    assert isinstance(done, CommitDone)
    assert isinstance(done.outcome, Committed)
    assert isinstance(reread, Reread)
    assert reread.item is not None
    assert reread.item.value == b"v"
    assert tick == Tick()


def test_what_an_effect_causes_comes_after_its_siblings() -> None:
    async def main(driver: ToyDriver) -> None:
        driver.feed(Say((Shout("again"), Shout("sibling"))))

    assert drive(main).shouts == ["again", "sibling", "later"]


def test_changes_before_the_first_listing_come_after_it() -> None:
    async def main(driver: ToyDriver) -> None:
        assert [type(event) for event in driver.toy.events] == [Listed, Changed]

    drive(main, changes=Changes(1, ()))


def test_a_machine_that_breaks_ends_its_driver_only() -> None:
    async def main(driver: ToyDriver) -> None:
        driver.feed(Say(breaks=True))
        assert driver.reason == FAILED
        assert driver.doing == "over"
        driver.feed(Say((Shout("never"),)))

    driver = drive(main)
    assert driver.notes == ["failed on Say", f"ended: {FAILED}"]
    assert driver.shouts == []


@pytest.mark.parametrize("way", ["fenced", "resigned", "revoked"])
def test_it_ends_by_its_guard_its_machine_and_its_lease(way: str) -> None:
    async def main(driver: ToyDriver) -> None:
        match way:
            case "fenced":
                driver.acts = False
            case "resigned":
                driver.feed(Say((Resign("resigned"),)))
            case _:
                await driver.store.client("p").revoke("lease")
                await asyncio.sleep(SETTINGS.ttl_s)
        assert not driver.check()

    text = {"revoked": "the toy lease is gone"}.get(way, way)
    assert drive(main).notes == [f"ended: {text}"]


def test_it_stands_while_its_lease_is_renewed() -> None:
    async def main(driver: ToyDriver) -> None:
        await asyncio.sleep(10 * SETTINGS.ttl_s)
        assert driver.check()
        assert driver.doing == "playing"

    assert drive(main).notes == ["ended: done"]
