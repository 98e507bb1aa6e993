"""What every driver of replica groups must do (F3, F6, F8-F11).

For authors of drivers: derive `class TestMine(ReplicaDriverContract)` and define `open`, which
yields `ReplicaServers`: two real servers without data, and what a test may do to them. The
scenarios use nothing else.

- `driver`, `address`: of the first or the second server (0, 1).
- `unlock`, `lock`: what a guard does to a server.
- `write`: a client's write on a new connection; True once it is acknowledged, False if it was
  refused or not answered in time. `session` opens a connection and keeps it; `write_in` writes on
  it.
- `has`: whether a server shows a write. `crash`, `start`: its process.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from typing import Any, Protocol

import pytest

from domicile.failover.driver import ReplicaDriver
from domicile.failover.records import Resyncs


class ReplicaServers(Protocol):
    """Two servers and what a test may do to them."""

    def driver(self, number: int) -> ReplicaDriver:
        """The driver of a server; always the same one."""
        ...

    def address(self, number: int) -> str:
        """Where others reach a server."""
        ...

    async def unlock(self, number: int, epoch: int) -> None:
        """Open a server as a guard does."""
        ...

    async def lock(self, number: int) -> None:
        """Close a server as a guard does."""
        ...

    async def write(self, number: int, value: str) -> bool:
        """A client's write on a connection of its own."""
        ...

    async def session(self, number: int) -> Any:
        """A client's connection that stays open."""
        ...

    async def write_in(self, session: Any, value: str) -> bool:
        """A write on such a connection."""
        ...

    async def has(self, number: int, value: str) -> bool:
        """Whether a server shows a write."""
        ...

    async def crash(self, number: int) -> None:
        """SIGKILL of a server."""
        ...

    async def start(self, number: int) -> None:
        """Start it again."""
        ...


Scenario = Callable[[ReplicaServers], Awaitable[None]]


class ReplicaDriverContract(ABC):
    """Derive a test class from this and define `open`."""

    patience_s: float = 60.0
    """Seconds of real time that one scenario may take."""

    @abstractmethod
    def open(self) -> AbstractAsyncContextManager[ReplicaServers]:
        """Two new servers."""

    def run(self, scenario: Scenario) -> None:
        """Run one scenario on new servers."""

        async def main() -> None:
            async with asyncio.timeout(self.patience_s), self.open() as servers:
                await scenario(servers)

        asyncio.run(main())

    async def pair(self, servers: ReplicaServers) -> None:
        """The first server serves epoch 1, the second follows it."""
        first, second = servers.driver(0), servers.driver(1)
        await first.stand()
        await second.stand()
        await first.promote(1)
        await second.follow(servers.address(0), 0)
        await servers.unlock(0, 1)

    async def level(self, servers: ReplicaServers) -> int:
        """Wait until the second server has all that the first one has; its offset."""
        while True:
            first = await servers.driver(0).look()
            second = await servers.driver(1).look()
            if first.offset == second.offset:
                return second.offset
            await asyncio.sleep(0.05)

    def test_a_server_that_stands_refuses_writes_and_keeps_what_it_has(self) -> None:
        """F3, F6: and its offset does not move any more."""

        async def scenario(servers: ReplicaServers) -> None:
            await self.pair(servers)
            assert await servers.write(0, "kept")
            await self.level(servers)
            for number in (1, 0):
                driver = servers.driver(number)
                await driver.stand()
                before = await driver.look()
                assert (before.up, before.open_epoch, before.follows) == (True, 0, "")
                assert not await servers.write(number, "refused")
                await driver.stand()
                assert (await driver.look()).offset == before.offset
                assert await servers.has(number, "kept")

        self.run(scenario)

    def test_only_the_guard_opens(self) -> None:
        """F2: a promoted server still refuses writes."""

        async def scenario(servers: ReplicaServers) -> None:
            driver = servers.driver(0)
            await driver.stand()
            await driver.promote(3)
            assert not await servers.write(0, "early")
            assert (await driver.look()).open_epoch == 0
            await servers.unlock(0, 3)
            assert (await driver.look()).open_epoch == 3
            assert await servers.write(0, "served")
            await servers.lock(0)
            assert (await driver.look()).open_epoch == 0
            assert not await servers.write(0, "late")

        self.run(scenario)

    def test_a_session_that_was_open_commits_nothing_after_the_lock(self) -> None:
        """FO-20."""

        async def scenario(servers: ReplicaServers) -> None:
            await self.pair(servers)
            sessions = [await servers.session(0) for _ in range(5)]
            for number, session in enumerate(sessions):
                assert await servers.write_in(session, f"before-{number}")
            await servers.lock(0)
            for number, session in enumerate(sessions):
                assert not await servers.write_in(session, f"after-{number}")
            for number in range(5):
                assert await servers.has(0, f"before-{number}")
                assert not await servers.has(0, f"after-{number}")

        self.run(scenario)

    def test_a_promotion_begins_a_history_with_an_entry(self) -> None:
        """F8, F9: without one nobody could tell who has something of this epoch."""

        async def scenario(servers: ReplicaServers) -> None:
            driver = servers.driver(0)
            await driver.stand()
            histories = [(await driver.look()).native]
            for epoch in (1, 2):
                before = await driver.look()
                await driver.promote(epoch)
                after = await driver.look()
                assert after.offset > before.offset
                assert after.run == before.run
                histories.append(after.native)
            assert len(dict.fromkeys(histories)) == 3

        self.run(scenario)

    def test_following_ends_with_the_same_history_and_offset(self) -> None:
        """FO-02: also for a server that had nothing to do with the group."""

        async def scenario(servers: ReplicaServers) -> None:
            first, second = servers.driver(0), servers.driver(1)
            await second.stand()
            await second.promote(1)
            await servers.unlock(1, 1)
            assert await servers.write(1, "foreign")
            await first.stand()
            await first.promote(1)
            await servers.unlock(0, 1)
            assert await servers.write(0, "mine")
            await second.stand()
            await second.follow(servers.address(0), 0)
            await self.level(servers)
            primary, replica = await first.look(), await second.look()
            assert replica.native == primary.native
            assert replica.follows == servers.address(0)
            assert await servers.has(1, "mine")
            assert not await servers.has(1, "foreign")
            assert not await servers.write(1, "refused")
            assert list(primary.acknowledged) != []

        self.run(scenario)

    def test_a_drained_server_refuses_writes_and_goes_on_feeding(self) -> None:
        """F11."""

        async def scenario(servers: ReplicaServers) -> None:
            await self.pair(servers)
            for number in range(20):
                assert await servers.write(0, f"before-{number}")
            await servers.driver(0).drain()
            assert (await servers.driver(0).look()).open_epoch == 0
            await self.level(servers)
            assert await servers.has(1, "before-19")
            assert not await servers.write(0, "refused")
            assert not await servers.has(0, "refused")
            offset = (await servers.driver(0).look()).offset
            await servers.driver(0).dismiss()
            facts = await servers.driver(0).look()
            assert (facts.open_epoch, facts.offset) == (0, offset)
            assert not await servers.has(0, "refused")

        self.run(scenario)

    def test_a_server_that_got_ready_goes_on_following_until_it_is_promoted(self) -> None:
        """F11: and if nothing comes of it, it follows as before."""

        async def scenario(servers: ReplicaServers) -> None:
            await self.pair(servers)
            first, second = servers.driver(0), servers.driver(1)
            for round in range(2):
                await second.get_ready()
                await second.get_ready()
                assert await servers.write(0, f"meanwhile-{round}")
                await self.level(servers)
                assert (await second.look()).follows == servers.address(0)
                assert not await servers.write(1, "refused")
                if not round:
                    await second.follow(servers.address(0), 0)
                    assert await servers.has(1, "meanwhile-0")
            await first.drain()
            kept = await self.level(servers)
            await second.stand()
            assert (await second.look()).offset >= kept
            await second.promote(2)
            assert (await second.look()).open_epoch == 0
            assert not await servers.write(1, "early")
            await servers.unlock(1, 2)
            assert await servers.write(1, "next")
            assert await servers.has(1, "meanwhile-1")

        self.run(scenario)

    def test_what_an_old_primary_has_beyond_is_saved_counted_and_given_up(self) -> None:
        """F10, FO-08: it comes back, loses what nobody else has, and says how much that was."""

        async def scenario(servers: ReplicaServers) -> None:
            await self.pair(servers)
            first, second = servers.driver(0), servers.driver(1)
            assert await servers.write(0, "common")
            kept = await self.level(servers)
            await second.stand()
            for number in range(7):
                assert await servers.write(0, f"lost-{number}")
            await first.stand()
            await second.promote(2)
            await servers.unlock(1, 2)
            assert await servers.write(1, "next")
            saved = await first.save(kept)
            assert saved.writes == 7
            await first.follow(servers.address(1), kept)
            await self.level(servers)
            assert (await first.look()).native == (await second.look()).native
            assert await servers.has(0, "common")
            assert await servers.has(0, "next")
            assert not await servers.has(0, "lost-0")

        self.run(scenario)

    def test_what_it_took_to_follow_is_counted(self) -> None:
        """One copy of everything, one of what was missing, and one return of an old primary."""

        async def scenario(servers: ReplicaServers) -> None:
            async def counted() -> Resyncs:
                seen = [(await servers.driver(number).look()).resyncs for number in (0, 1)]
                known = [one for one in seen if one is not None]
                if not known:
                    pytest.skip("this driver does not count how servers follow again")
                return Resyncs(
                    full=sum(one.full for one in known), partial=sum(one.partial for one in known),
                    rewound=sum(one.rewound for one in known),
                )  # fmt: skip

            await self.pair(servers)
            first, second = servers.driver(0), servers.driver(1)
            assert await counted() == Resyncs(full=1)
            kept = await self.level(servers)
            await second.stand()
            assert await servers.write(0, "missing")
            await second.follow(servers.address(0), kept)
            assert await counted() == Resyncs(full=1, partial=1)
            # To follow as before takes nothing.
            kept = await self.level(servers)
            await second.follow(servers.address(0), kept)
            assert await counted() == Resyncs(full=1, partial=1)

            await second.stand()
            assert await servers.write(0, "lost")
            await first.stand()
            await second.promote(2)
            await servers.unlock(1, 2)
            await first.save(kept)
            assert await counted() == Resyncs(full=1, partial=1)
            await first.follow(servers.address(1), kept)
            now = await counted()
            assert (now.full + now.rewound, now.partial) == (2, 1)

        self.run(scenario)

    def test_a_restart_shows_as_another_run_and_is_not_open(self) -> None:
        """F3, F4: as far as the driver sees; who starts the server sees to the rest."""

        async def scenario(servers: ReplicaServers) -> None:
            await self.pair(servers)
            driver = servers.driver(0)
            before = await driver.look()
            await servers.crash(0)
            assert not (await driver.look()).up
            with pytest.raises((OSError, TimeoutError)):
                await driver.stand()
            await servers.start(0)
            after = await driver.look()
            assert after.up
            assert after.run != before.run
            assert after.open_epoch != 1

        self.run(scenario)

    def test_calls_may_be_repeated(self) -> None:
        """A call that was cancelled or not answered is made again."""

        async def scenario(servers: ReplicaServers) -> None:
            await self.pair(servers)
            second = servers.driver(1)
            before = await second.look()
            await second.follow(servers.address(0), 0)
            assert (await second.look()).native == before.native
            await second.stand()
            await second.stand()
            await second.follow(servers.address(0), before.offset)
            await self.level(servers)
            await servers.driver(0).drain()
            await servers.driver(0).drain()
            await servers.unlock(0, 1)
            assert await servers.write(0, "again")

        self.run(scenario)
