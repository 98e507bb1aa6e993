"""Groups of real servers under faults, judged by a writer that knows nothing of Domicile.

By hand: `make test-replica`. Each test starts three servers, their guards and their agents. What
cuts the store runs on a store that is a server.
"""

from __future__ import annotations

import shutil
from time import monotonic

import pytest
from replica_databases import each_database
from replica_lab import ReplicaGroup, StoreName, play

from domicile.failover.records import GroupPhase

SESSIONS = 100

OPENED = "the server accepts writes in epoch"
"""What a guard logs whenever it has opened its server."""

STORES: tuple[StoreName, ...] = ("sqlite", "etcd")

each_store = pytest.mark.parametrize("store", STORES)


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


STALL_S = 5.0


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
        # Longer than a client waits, and than a server may by default.
        before = list(group.writer.open.values()).count(old.name)
        await group.freeze(old, "server")
        until = monotonic() + STALL_S
        await group.until(
            lambda: (
                list(group.writer.open.values()).count(old.name) > before and monotonic() > until
            ),
            "a write was not answered in time",
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

    play(scenario, kind=kind, store=store, more="ttl_s = 120\nprobe_s = 60")


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
