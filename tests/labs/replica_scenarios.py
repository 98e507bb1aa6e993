"""Lives of replica groups that several suites play: on each database, and on each kind of store."""

from __future__ import annotations

import asyncio
import os
import signal

from replica_lab import Machine, ReplicaGroup, lives

CLOSED = "the agent's lease ended"
"""What a guard says that closes its server at the deadline."""


async def outlives_what_is_killed(group: ReplicaGroup) -> None:
    """FO-01, FO-03, FO-05, FO-08, FO-21: server, agent and guard of the primary are killed."""
    # FO-01: what the records say.
    state = await group.whole()
    for one in await group.members():
        assert one.address == group.machine(one.server).address
        assert one.seen
        primary = one.server == state.primary_server
        assert one.role == ("primary" if primary else "replica")
        assert one.follows == ("" if primary else state.primary_server)
        assert one.position.epoch == state.epoch

    # FO-03, FO-05: the primary's server is killed; one of the others takes its place. A server
    # that comes back at once with its data may win instead: it has no less than the others.
    old = group.machine(state.primary_server)
    ids = {one.server: one.incarnation for one in await group.members()}
    busy = await group.database.keep_busy(old.port)
    old.send("server", signal.SIGKILL)
    state = await group.serves(state.epoch + 1)
    # FO-20: its sessions end before anyone serves, also one that a statement keeps busy.
    assert not any(lives(pid) for pid in busy)
    assert state.primary_server != old.name or group.database.keeps_data
    assert "does not run" in state.why or "restarted" in state.why

    # FO-08: it comes back as a replica without help. Ids and agents are the same (FO-01).
    state = await group.whole(state.epoch)
    assert {one.server: one.incarnation for one in await group.members()} == ids

    # FO-21: the agent is killed, and its server is closed at once. A new agent serves on, or
    # another server is elected where closing ends the server's run.
    old = group.machine(state.primary_server)
    before = old.pid("server")
    killed = old.send("agent", signal.SIGKILL)
    await group.until(lambda: "the agent is gone" in old.log, "the guard noticed")
    epoch = state.epoch
    state = await group.whole(epoch if not group.database.keeps_data else epoch + 1)
    assert old.pid("agent") != killed
    if not group.database.keeps_data:
        assert old.pid("server") == before

    # FO-21: the guard is killed, and takes server and agent along.
    old = group.machine(state.primary_server)
    server, agent = old.pid("server"), old.pid("agent")
    assert old.run is not None
    busy = await group.database.keep_busy(old.port)
    if busy:
        # It would heed no signal that asks it to end its sessions.
        os.kill(server, signal.SIGSTOP)
    old.run.kill()
    await asyncio.to_thread(old.run.wait)
    old.run = None
    await group.until(
        lambda: not any(lives(pid) for pid in (server, agent, *busy)), "children are gone"
    )
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


async def frozen_processes_leave_no_server_open(group: ReplicaGroup) -> None:
    """FO-10, FO-21: server, agent, or agent and guard of the primary stand still."""
    # FO-10: the server stands still. It is killed before anybody else is promoted.
    state = await group.whole()
    old = group.machine(state.primary_server)
    (frozen,) = await group.freeze(old, "server")
    state = await group.serves(state.epoch + 1)
    assert not lives(frozen)
    assert state.primary_server != old.name or group.database.keeps_data
    old.thaw()

    # FO-21: the agent stands still. The guard closes the server at the deadline.
    state = await group.whole(state.epoch)
    old = group.machine(state.primary_server)
    (agent,) = await group.freeze(old, "agent")
    state = await group.serves(state.epoch + 1)
    assert CLOSED in old.log
    assert state.primary_server != old.name
    os.kill(agent, signal.SIGCONT)

    # FO-21: agent and guard stand still. The kernel's timer kills the guard and so the server.
    while True:
        state = await group.whole(state.epoch)
        old = group.machine(state.primary_server)
        server, closed = old.pid("server"), old.log.count(CLOSED)
        await group.freeze(old, "agent", "guard")
        state = await group.serves(state.epoch + 1)
        assert state.primary_server != old.name
        if old.log.count(CLOSED) == closed:
            break
        # On a busy machine the agent stood still so long that the guard closed the server first.
        old.thaw()
    assert not lives(server)
    assert old.run is not None
    assert await asyncio.to_thread(old.run.wait) == -signal.SIGKILL
    old.run = None


async def replaces_a_primary_whose_agent_stands_still(group: ReplicaGroup) -> None:
    """FO-03, FO-08, FO-21: closed at the deadline, replaced, and back as a replica."""
    state = await group.whole()
    old = group.machine(state.primary_server)
    await group.writer.goes_on(old.name, 20)
    await group.freeze(old, "agent")
    state = await group.serves(state.epoch + 1)
    assert state.primary_server != old.name
    await group.writer.goes_on(state.primary_server, 20)
    old.thaw()
    state = await group.whole(state.epoch)
    group.writer.goes.clear()
    assert state.primary_server != old.name


class Losses:
    """What asynchronous failovers have lost: by an independent writer's word, and by receipts."""

    def __init__(self, group: ReplicaGroup) -> None:
        self._group = group
        self.lost: set[str] = set()
        """All that was acknowledged and is gone."""
        self._known: set[str] = set()

    async def count(self, primary: str, old: Machine, *along: Machine) -> set[str]:
        """What one failover lost, once the old primary follows: its receipt says the same.

        `along`: replicas that stayed with it. They may have a part of it, and a receipt for that.
        """
        group = self._group
        acked = {one.key for one in group.writer.acked}
        keys = await group.machine(primary).keys()
        receipts = [one for one in await group.receipts() if one.saved not in self._known]
        self._known |= {one.saved for one in receipts}
        missing = acked - keys - self.lost
        self.lost |= missing
        if not missing and not receipts:
            return missing
        [receipt] = [one for one in receipts if one.server == old.name]
        assert {one.server for one in receipts} <= {old.name, *(one.name for one in along)}
        saved = group.database.saved(receipt)
        assert missing <= saved
        # It may also hold writes that the server had, and whose answers were lost.
        unknown = {key for key, at in group.writer.open.items() if at == old.name} & saved
        assert len(missing) <= receipt.writes <= len(missing | unknown - keys)
        return missing


async def all_have_the_same(group: ReplicaGroup) -> set[str]:
    """No divergence: wait, without any writes, until all servers have what the primary has."""
    group.writer.goes.clear()
    state = await group.whole()
    primary = group.machine(state.primary_server)
    wanted = await group.database.rows(primary.port, primary.host)
    for one in group.others(primary.name):

        async def same(one: Machine = one) -> bool:
            return await group.database.rows(one.port, one.host) == wanted

        await group.until(same, f"{one.name} has what the primary has")
    assert await group.database.rows(primary.port, primary.host) == wanted
    return await primary.keys()
