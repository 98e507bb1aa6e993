"""Groups of real servers under faults, judged by a writer that knows nothing of Domicile.

By hand: `make test-replica`. Each test starts three servers, their guards and their agents. What
cuts the store runs on a store that is a server.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
from contextlib import suppress
from typing import Any

import etcd_lab
import pytest
from replica_databases import each_database
from replica_lab import ReplicaGroup, StoreName, play

from domicile.failover.records import GroupPhase

SESSIONS = 100

OPENED = "the server accepts writes in epoch"
"""What a guard logs whenever it has opened its server."""

STORES: tuple[StoreName, ...] = ("sqlite", "etcd")

each_store = pytest.mark.parametrize("store", STORES)


@pytest.mark.scenario("FO-11", "FO-20")
@pytest.mark.scenario("FO-18", partial=True)
@each_database()
@pytest.mark.parametrize("how", ["no answer", "reset", "answers after 5 s"])
def test_a_primary_without_its_store_is_closed_before_another_is_promoted(
    kind: str, how: str
) -> None:
    """Its clients still reach it. What they had open before commits nothing afterwards."""

    async def scenario(group: ReplicaGroup) -> None:
        state = await group.whole()
        old = group.machine(state.primary_server)
        sessions = [await old.session() for _ in range(SESSIONS)]
        keys = [f"w{9_000_000 + number}" for number in range(SESSIONS)]
        for session, key in zip(sessions, keys, strict=True):
            await session.begin(key)
        assert old.to_store is not None
        match how:
            case "no answer":
                await old.to_store.hold()
            case "reset":
                await old.to_store.refuse()
            case _:
                await old.to_store.delay(5.0)
        state = await group.serves(state.epoch + 1)
        assert state.primary_server != old.name
        committed = 0
        for session in sessions:
            with suppress(OSError, TimeoutError):
                async with asyncio.timeout(5.0):
                    committed += await session.commit()
            session.close()
        assert committed == 0
        await group.writer.goes_on(state.primary_server, 20)
        assert not (set(keys) & await group.machine(state.primary_server).keys())
        await old.to_store.delay(0.0)
        await old.to_store.release()
        state = await group.whole(state.epoch)
        assert not (set(keys) & await old.keys())

    play(scenario, kind=kind, store="etcd")


@pytest.mark.scenario("FO-12", partial=True)
@each_database()
def test_without_the_store_data_flows_while_it_may_and_nobody_is_promoted(kind: str) -> None:
    async def scenario(group: ReplicaGroup) -> None:
        state = await group.whole()
        old = group.machine(state.primary_server)
        server = etcd_lab.scenario_server()
        server.freeze()
        try:
            await group.writer.goes_on(old.name, 20)
        finally:
            server.thaw()
        # It was away for less than a lease: nothing has changed.
        await group.writer.goes_on(old.name, 20)
        again = await group.whole()
        assert (again.epoch, again.primary) == (state.epoch, state.primary)

        opened = {one.name: one.log.count(OPENED) for one in group.machines}
        assert opened[old.name]
        server.freeze()
        try:
            begun = len(old.log)
            await group.until(
                lambda: any(
                    said in old.log[begun:]
                    for said in ("the agent's lease ended", "this incarnation is over")
                ),
                "the deadline passed",
            )

            async def refuses() -> bool:
                with suppress(OSError, TimeoutError):
                    async with asyncio.timeout(1.0):
                        return not await (await old.session()).write("w9000000")
                return True

            await group.until(refuses, "the old primary refuses writes")
            # Nobody was promoted: no guard has opened a server since, not even the old one again.
            assert {one.name: one.log.count(OPENED) for one in group.machines} == opened
        finally:
            server.thaw()
        state = await group.whole()
        # All had what they had: nothing is lost, by whom it is served now.
        await group.writer.goes_on(state.primary_server, 20)
        assert not await group.writer.missing(group.machine(state.primary_server))

    play(scenario, kind=kind, store="etcd", more="ttl_s = 6")


@pytest.mark.scenario("FO-13", "FO-16")
@each_database()
@each_store
def test_an_empty_primary_is_not_followed_and_alone_it_waits(kind: str, store: StoreName) -> None:
    async def scenario(group: ReplicaGroup) -> None:
        state = await group.whole()
        await group.writer.goes_on(state.primary_server, 50)
        old = group.machine(state.primary_server)
        others = group.others(old.name)
        group.writer.goes.clear()
        state = await group.whole(state.epoch)
        for one in others:
            await group.freeze(one, "agent")

        async def alone() -> bool:
            return {one.server for one in await group.members()} == {old.name}

        await group.until(alone, "the leases of the others end")
        # Its machine comes back without a disk.
        await group.kill(old)
        shutil.rmtree(old.home / "data")
        if kind == "valkey":
            (old.home / "data").mkdir()
        group.start(old)

        async def waits() -> bool:
            found = await group.status()
            return bool(found["phase"] == "electing" and found["waits"] and found["next_step"])

        await group.until(waits, "it waits, and says for what and what to do")
        found = await group.state()
        assert found is not None
        assert (found.phase, found.epoch) == (GroupPhase.ELECTING, state.epoch + 1)
        for one in others:
            one.thaw()
        state = await group.whole(state.epoch + 1)
        assert state.primary_server != old.name
        group.writer.goes.set()
        await group.writer.goes_on(state.primary_server, 20)
        assert not await group.writer.missing(group.machine(state.primary_server))

    play(scenario, kind=kind, store=store)


@pytest.mark.scenario("FO-09")
@each_database()
@each_store
def test_a_stall_that_is_shorter_than_the_threshold_changes_nothing(
    kind: str, store: StoreName
) -> None:
    async def scenario(group: ReplicaGroup) -> None:
        state = await group.whole()
        old = group.machine(state.primary_server)
        await group.writer.goes_on(old.name, 20)
        # Longer than a client waits.
        before = list(group.writer.open.values()).count(old.name)
        await group.freeze(old, "server")
        await group.until(
            lambda: list(group.writer.open.values()).count(old.name) > before + 5,
            "some writes were not answered in time",
        )
        old.thaw()
        await group.writer.goes_on(old.name, 20)
        for what in ("agent", "guard"):
            await group.freeze(old, what)
            await group.writer.goes_on(old.name, 100)
            old.thaw()
            await group.writer.goes_on(old.name, 20)
        again = await group.whole()
        assert (again.epoch, again.primary, again.run) == (state.epoch, state.primary, state.run)
        assert [one.epoch for one in group.serving] == [state.epoch]

    play(scenario, kind=kind, store=store, more="ttl_s = 20\nprobe_s = 8")


@pytest.mark.scenario("FO-04")
@each_database()
@each_store
def test_the_most_advanced_wins_and_ties_go_to_the_lowest_id(kind: str, store: StoreName) -> None:
    async def scenario(group: ReplicaGroup) -> None:
        async def offsets() -> dict[str, int]:
            return {one.server: one.offset for one in await group.members()}

        # The one that would win a tie lags.
        state = await group.whole()
        old = group.machine(state.primary_server)
        lags, leads = sorted(group.others(old.name), key=lambda one: one.name)
        old.stopped += await group.database.hold_back(old.port, lags.port, lags.name)
        await group.writer.goes_on(old.name, 50)

        async def apart() -> bool:
            found = await offsets()
            return found[leads.name] > found[lags.name]

        await group.until(apart, f"{lags.name} lags")
        group.writer.goes.clear()
        await group.kill(old)
        state = await group.serves(state.epoch + 1)
        assert state.primary_server == leads.name
        # Before this it would still send what it has.
        old.thaw()
        group.start(old)
        state = await group.whole(state.epoch)

        # The one that would win a tie is dead.
        old = group.machine(state.primary_server)
        dead, live = sorted(group.others(old.name), key=lambda one: one.name)
        await group.freeze(dead, "server")

        async def noticed() -> bool:
            found = {one.server: one for one in await group.members()}
            return not found[dead.name].fit

        await group.until(noticed, f"{dead.name} does not answer")
        await group.kill(old)
        state = await group.serves(state.epoch + 1)
        assert state.primary_server == live.name
        dead.thaw()
        group.start(old)
        state = await group.whole(state.epoch)

        # All have the same.
        old = group.machine(state.primary_server)

        async def level() -> bool:
            return len(set((await offsets()).values())) == 1

        await group.until(level, "all have the same")
        await group.kill(old)
        state = await group.serves(state.epoch + 1)
        assert state.primary_server == min(one.name for one in group.others(old.name))
        group.start(old)
        await group.whole(state.epoch)

    play(scenario, kind=kind, store=store)


@pytest.mark.scenario("FO-07", partial=True)
@each_database()
@each_store
def test_a_record_is_its_holders_and_does_not_outlive_a_crash(kind: str, store: StoreName) -> None:
    async def scenario(group: ReplicaGroup) -> None:
        state = await group.whole()
        old = group.machine(state.primary_server)
        # Nobody else can be this server, and its record stays.
        second = group.start(old, "agent")
        assert await asyncio.to_thread(second.wait) == 2
        assert "another agent" in old.log
        assert state.primary in {one.incarnation for one in await group.members()}
        # It crashes: only time ends its record, and only then others begin.
        await group.kill(old)
        members = {one.incarnation for one in await group.members()}
        now = await group.state()
        assert now is not None
        assert state.primary in members or now.epoch > state.epoch
        state2 = await group.serves(state.epoch + 1)
        assert "record is gone" in state2.why
        assert state.primary not in {one.incarnation for one in await group.members()}
        # Nor do its locks outlive it.
        group.start(old)
        await group.whole(state2.epoch)

    play(scenario, kind=kind, store=store)


@pytest.mark.scenario("FO-06", partial=True)
@each_database()
@each_store
def test_an_orchestrator_that_is_killed_at_any_step_is_replaced(
    kind: str, store: StoreName
) -> None:
    """At each step the processes that must do the next one are killed, agent or whole machine."""

    async def at(
        group: ReplicaGroup, phase: GroupPhase, epoch: int, of: str, asked: asyncio.Task[Any]
    ) -> str:
        """Kill as soon as the state is in this phase; whose. Empty: it was over too soon."""
        while True:
            if asked.done() and asked.result().returncode:
                return ""
            state = await group.state()
            assert state is not None
            if state.epoch > epoch or (
                state.epoch == epoch and state.phase is GroupPhase.SERVING
            ):  # fmt: skip
                return ""
            right = state.epoch == epoch or phase is GroupPhase.SWITCHING
            if state.phase is phase and right:
                named = {
                    GroupPhase.ELECTING: state.orchestrator,
                    GroupPhase.CHOSEN: state.candidate,
                    GroupPhase.SWITCHING: state.primary,
                }[phase]
                found = [one for one in await group.members() if one.incarnation == named]
                if not found:
                    return ""
                machine = group.machine(found[0].server)
                if of == "machine":
                    await group.kill(machine)
                elif pid := machine.pid("agent"):
                    os.kill(pid, signal.SIGKILL)
                return machine.name
            await asyncio.sleep(0.002)

    async def scenario(group: ReplicaGroup) -> None:
        steps = [
            (phase, of)
            for phase in (GroupPhase.ELECTING, GroupPhase.CHOSEN, GroupPhase.SWITCHING)
            for of in ("agent", "machine")
        ]
        state = await group.whole()
        for phase, of in steps:
            for _ in range(10):
                state = await group.whole()
                await group.writer.goes_on(state.primary_server, 5)
                if phase is GroupPhase.SWITCHING:
                    asked = asyncio.create_task(group.domicile("switchover", "orders"))
                else:
                    group.machine(state.primary_server).send("server", signal.SIGKILL)
                    asked = asyncio.create_task(group.domicile("history", "orders"))
                killed = await at(group, phase, state.epoch + 1, of, asked)
                await asked
                for one in group.machines:
                    if one.run is None:
                        group.start(one)
                if killed:
                    break
            else:
                raise AssertionError(f"never in time for {phase.value}, {of}")
            state = await group.whole(state.epoch)
        await group.writer.goes_on(state.primary_server, 20)

    play(scenario, kind=kind, store=store)
