"""DX-09: a handler that does not end is named by `status` within 5 s, and `kick` frees it."""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from real_lab import balanced

from domicile import Entity, MaybeExecuted, Settings, handler
from domicile.core.ids import EntityKey
from domicile.core.state.keys import kick_key
from domicile.core.state.txn import Put
from domicile.diagnose.records import KickOutcome, KickRecord, decode_kick, encode_kick
from domicile.ops.operator_commits import StoreSnapshot
from domicile.ops.status import ClusterStatus, summed_up
from domicile.testing import Processes, Sim, check, simulated

FEW = Settings(shards=8)
REAL = Settings(ttl_s=20, shards=4)
STEADY = Settings(ttl_s=20, shards=4, link_timeout_s=240, stall_limit_s=240)
"""A lease and links that outlast a loop which stands still while commands run."""
BUSY_S = 200.0
"""Seconds that commands may take on a busy machine, each of which starts a process."""
SOON_S = 5.0


class Jam(Entity, name="stuck.jam"):
    """Gets stuck in several ways."""

    @handler
    async def hello(self) -> str:
        return "hello"

    @handler(timeout_s=300)
    async def hang(self) -> None:
        await self.never()

    @handler(timeout_s=300)
    async def ignore(self) -> None:
        while True:
            with contextlib.suppress(asyncio.CancelledError):
                await self.never()

    @handler(timeout_s=300)
    async def block(self, until: str) -> None:
        """Hold the event loop until there is such a file, and no longer than the node can bear."""
        limit = time.monotonic() + BUSY_S
        while not Path(until).exists() and time.monotonic() < limit:  # noqa: ASYNC240
            time.sleep(0.02)  # noqa: ASYNC251

    async def never(self) -> None:
        await asyncio.get_running_loop().create_future()


def spawned(cluster: Sim | Processes, method: Any, id: str) -> asyncio.Task[Any]:
    patient = cluster.ref(Jam, id).options(timeout_s=300)
    return asyncio.get_running_loop().create_task(patient.ask(method))


# virtual time


async def status_of(sim: Sim) -> ClusterStatus:
    """What `domicile status` shows."""
    listing = await sim._operator_store().list(b"")
    return summed_up(StoreSnapshot(listing), "sim://", "domicile", lambda _: False, lambda _: None)


async def kicked(sim: Sim, id: str) -> KickOutcome:
    """What `domicile kick` does."""
    sim.note_fault("kick")
    store, key = sim._operator_store(), kick_key(sim.shard(Jam, id), EntityKey("stuck.jam", id))
    await store.grant("kick", 30)
    await store.commit((), (Put(key, encode_kick(KickRecord("eva", "kick")), "kick"),))

    def outcome() -> KickOutcome | None:
        item = sim.servers.store.peek(key)
        return None if item is None else decode_kick(item.value).outcome

    await sim.wait_until(lambda: outcome() is not None)
    found = outcome()
    assert found is not None
    await store.revoke("kick")
    return found


@pytest.mark.scenario("DX-09")
@simulated(entities=[Jam], nodes=3, seeds=5, settings=FEW)
async def test_status_names_a_stuck_handler_in_time_and_a_kick_frees_it(sim: Sim) -> None:
    began = sim.world.now
    task, behind = spawned(sim, Jam.hang, "j"), spawned(sim, Jam.hello, "j")
    seen = await status_of(sim)
    while not seen.stuck:
        await sim.advance(0.1)
        seen = await status_of(sim)
    assert sim.world.now - began < SOON_S
    (one,) = seen.stuck
    assert (one.type, one.id, one.handler, one.queue) == ("stuck.jam", "j", "hang", 1)
    assert (one.role, one.shard) == sim.shard(Jam, "j")
    assert one.node == sim.node_id(sim.owner(Jam, "j"))
    assert one.age_s >= 2
    assert [step.rpartition(" ")[2] for step in one.stack] == ["Jam.hang", "Jam.never"]
    assert await kicked(sim, "j") == KickOutcome(ended=1)
    with pytest.raises(MaybeExecuted, match="kicked by an operator"):
        await task
    assert await behind == "hello"
    await sim.advance(2)
    assert not (await status_of(sim)).stuck


# real processes


async def domicile(cluster: Processes, *arguments: str, code: int = 0) -> str:
    """Run a command to its end; what it printed. A shard may be on its way while status looks."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "domicile", *arguments, cluster.store,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip
    out, err = await process.communicate()
    codes = (0, 3) if arguments[0] == "status" else (code,)
    assert process.returncode in codes, err.decode()
    return out.decode() + err.decode()


async def until_stuck(cluster: Processes, id: str) -> dict[str, Any]:
    """The named handler as status shows it, once it does."""
    async with asyncio.timeout(BUSY_S):
        while True:
            seen = json.loads((await domicile(cluster, "status", "--json")).splitlines()[0])
            for one in seen["stuck"]:
                if one["id"] == id:
                    return dict(one)
            await asyncio.sleep(0.1)


@pytest.mark.scenario("DX-09")
def test_real_processes_name_stuck_handlers_and_are_freed_by_kicks() -> None:
    async def scenario() -> None:
        async with Processes([Jam], nodes=2, settings=REAL) as cluster:
            await cluster.wait_until(lambda: balanced(cluster))
            task, behind = spawned(cluster, Jam.hang, "j"), spawned(cluster, Jam.hello, "j")
            one = await until_stuck(cluster, "j")
            assert (one["type"], one["handler"], one["queue"]) == ("stuck.jam", "hang", 1)
            assert one["node"] == f"node-{cluster.owner(Jam, 'j')}"
            assert one["age_s"] >= 2
            assert any("Jam.never" in step for step in one["stack"])
            assert "stuck.jam/j hang" in await domicile(cluster, "status")
            whole = await domicile(cluster, "inspect", "stuck.jam", "j")
            assert "Jam.hang" in whole
            assert "Jam.never" in whole

            cluster.note_fault("kick")
            assert "1 handler cancelled" in await domicile(cluster, "kick", "stuck.jam", "j")
            with pytest.raises(MaybeExecuted, match="kicked by an operator"):
                await task
            assert await behind == "hello"
            assert "nothing of" in await domicile(cluster, "kick", "stuck.jam", "j")

            cluster.note_fault("kick")
            deaf = spawned(cluster, Jam.ignore, "deaf")
            await until_stuck(cluster, "deaf")
            said = await domicile(cluster, "kick", "stuck.jam", "deaf", code=1)
            assert "kick once more" in said
            cluster.note_fault("kick")
            assert "given up" in await domicile(cluster, "kick", "stuck.jam", "deaf")
            with pytest.raises(MaybeExecuted, match="kicked by an operator"):
                await deaf
            assert await cluster.ref(Jam, "deaf").ask(Jam.hello) == "hello"
            history = cluster.history()
        assert check(history) == []

    asyncio.run(scenario())


@pytest.mark.scenario("DX-09")
def test_a_real_handler_that_holds_the_event_loop_is_named_meanwhile(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with Processes([Jam], nodes=2, settings=STEADY, record=False) as cluster:
            await cluster.wait_until(lambda: balanced(cluster))
            enough = tmp_path / "enough"
            task = asyncio.get_running_loop().create_task(
                cluster.ref(Jam, "held").options(timeout_s=300).ask(Jam.block, str(enough))
            )
            one = await until_stuck(cluster, "held")
            assert (one["kind"], one["handler"]) == ("runs", "block")
            assert one["node"] == f"node-{cluster.owner(Jam, 'held')}"
            assert any("Jam.block" in step for step in one["stack"])
            assert not task.done()
            enough.touch()
            await task
            async with asyncio.timeout(BUSY_S):
                while json.loads(await domicile(cluster, "status", "--json"))["stuck"]:
                    pass

    asyncio.run(scenario())
