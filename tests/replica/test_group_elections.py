"""Elections of groups of real servers, struck at each step (FO-03, FO-05, FO-06, FO-07).

By hand: `make test-replica`. The agents reach the store through gates, which hold them at one step
of a change of primary (`commit_gate`). What became of the state is read from the store's history.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Awaitable, Callable
from time import monotonic

import pytest
from replica_databases import each_database
from replica_lab import Machine, ReplicaGroup, StoreName, free_port, play

from domicile.core.ids import Incarnation
from domicile.failover.records import GroupPhase, GroupState, parse_agent

ROUNDS = 3

TRIES = 5
"""On a busy machine a lease may end before an agent gets to the step."""

PATIENT_S = 5.0
"""What a machine may take beside the configured times, and so many of its paces besides."""

PACES = 5

STORES: tuple[StoreName, ...] = ("sqlite", "etcd")

each_store = pytest.mark.parametrize("store", STORES)


async def incarnation_of(group: ReplicaGroup, machine: Machine) -> Incarnation:
    """Of its agent that is registered now."""
    found = [one.incarnation for one in await group.members() if one.server == machine.name]
    assert found, f"{machine.name} is not registered"
    return found[-1]


async def written_since(group: ReplicaGroup, state: GroupState) -> list[tuple[str, int, str]]:
    """Phase, epoch and writer of each state of later epochs, without moves of write quorums."""
    found: list[tuple[str, int, str]] = []
    for one in await group.history():
        told = (one.state.phase.value, one.state.epoch, one.by)
        if one.state.epoch > state.epoch and told not in found[-1:]:
            found.append(told)
    return found


async def restart_all(group: ReplicaGroup) -> None:
    for one in group.machines:
        one.goes_on()
        one.thaw()
        if one.run is None:
            group.start(one)


@pytest.mark.scenario("FO-03")
@each_database()
@each_store
@pytest.mark.parametrize(
    ("what", "configured_s", "more"),
    [
        # restart_s and freeze_s. Whoever waited for the lease would be late.
        ("server", 0.0 + 1.0, "ttl_s = 60"),
        # The lease, and freeze_s.
        ("machine", 15.0 + 1.0, "ttl_s = 15"),
    ],
    ids=["server", "machine"],
)
def test_a_killed_primary_is_replaced_by_exactly_one_in_time(
    kind: str, store: StoreName, what: str, configured_s: float, more: str
) -> None:
    async def scenario(group: ReplicaGroup) -> None:
        for _ in range(ROUNDS):
            state = await group.whole()
            old = group.machine(state.primary_server)
            await group.writer.goes_on(old.name, 10)
            pace_s = await group.pace_s()
            killed_at = monotonic()
            if what == "server":
                old.send("server", signal.SIGKILL)
            else:
                await group.kill(old)
            after = await group.serves(state.epoch + 1)
            took_s = next(one.at for one in group.serving if one.epoch == after.epoch) - killed_at
            pace_s = max(pace_s, await group.pace_s())
            print(f"{took_s:.2f} s of {configured_s:g} s; pace {pace_s:.2f} s")
            assert took_s < configured_s + PATIENT_S + PACES * pace_s
            # With its data a server that was only restarted is a candidate like any other (F8).
            assert after.primary_server != old.name or (
                what == "server" and group.database.keeps_data
            )
            await group.writer.goes_on(after.primary_server, 20)
            if old.run is None:
                group.start(old)
            again = await group.whole(after.epoch)
            assert (again.epoch, again.primary) == (after.epoch, after.primary)
            # Of all that were ever chosen or served since, there is one.
            chosen = {
                one.state.candidate_server
                for one in await group.history()
                if one.state.phase is GroupPhase.CHOSEN and one.state.epoch > state.epoch
            }
            served = {
                one.state.primary_server
                for one in await group.history()
                if one.state.phase is GroupPhase.SERVING and one.state.epoch > state.epoch
            }
            assert chosen == served == {after.primary_server}
            await group.fed_by(after.primary_server)

    play(scenario, kind=kind, store=store, more=more)


@pytest.mark.scenario("FO-05")
@each_database()
@each_store
def test_all_replicas_detect_at_once_and_one_of_them_orchestrates(
    kind: str, store: StoreName
) -> None:
    """Each would begin an election before any of them has: all first commits are on their way."""

    async def scenario(group: ReplicaGroup) -> None:
        point = "before electing"
        for _ in range(ROUNDS):
            state = await group.whole()
            old = group.machine(state.primary_server)
            others = group.others(old.name)
            names = {await incarnation_of(group, one): one.name for one in others}
            before = {one.name: len(one.told(point)) for one in others}
            for one in others:
                one.stops_at(point)
            await group.kill(old)
            await group.until(
                lambda others=others: all(one.stands_at(point) for one in others),  # type: ignore[misc]
                "all replicas have detected it",
            )
            assert await group.state() == state
            for one in others:
                one.goes_on()
            after = await group.serves(state.epoch + 1)
            await group.until(
                lambda others=others, before=before: all(  # type: ignore[misc]
                    len(one.told(point)) > before[one.name] for one in others
                ),
                "all of them have asked the store",
            )
            # One of them begins, decides, and nobody else writes anything but the candidate.
            began = [
                one.name for one in others if "Committed" in one.told(point)[before[one.name] :]
            ]
            [leader] = began
            assert await written_since(group, state) == [
                ("electing", state.epoch + 1, leader),
                ("chosen", state.epoch + 1, leader),
                ("serving", state.epoch + 1, after.primary_server),
            ]
            orchestrators = {
                one.state.orchestrator
                for one in await group.history()
                if one.state.phase is GroupPhase.ELECTING and one.state.epoch > state.epoch
            }
            assert [names[one] for one in orchestrators] == [leader]
            # The others obey.
            group.start(old)
            again = await group.whole(after.epoch)
            assert (again.epoch, again.primary) == (after.epoch, after.primary)
            await group.fed_by(after.primary_server)
            await group.writer.goes_on(after.primary_server, 10)

    play(scenario, 4, kind=kind, store=store, gated=True, more="ttl_s = 10")


@pytest.mark.scenario("FO-07")
@each_database()
@each_store
def test_a_record_is_released_by_its_holder_alone_and_does_not_outlive_a_crash(
    kind: str, store: StoreName
) -> None:
    async def scenario(group: ReplicaGroup) -> None:
        # The record of a server: nobody else can be this server, and its record stays.
        state = await group.whole()
        old = group.machine(state.primary_server)
        second = group.start(old, "agent")
        assert await asyncio.to_thread(second.wait) == 2
        assert "another agent" in old.log
        # Nor does one with the same id in another folder remove it.
        namesake = Machine(old.name, 9, free_port(), group.home / "9", group.database)
        group.start(namesake)
        await group.until(lambda: "has the id" in namesake.log, "it waits")
        members = await group.members()
        assert [one.incarnation for one in members if one.server == old.name] == [state.primary]
        assert namesake.run is not None
        namesake.run.terminate()
        assert await asyncio.to_thread(namesake.run.wait) == 0
        again = await group.whole()
        assert (again.epoch, again.primary) == (state.epoch, state.primary)

        # It crashes: only time ends its record, and only then others begin.
        x, y = group.others(old.name)
        x.stops_at("before chosen")
        y.stops_at("before electing")
        await group.kill(old)
        await group.until(lambda: x.stands_at("before chosen"), f"{x.name} has read positions")
        assert state.primary not in {one.incarnation for one in await group.members()}

        # The election is its orchestrator's, until the orchestrator's own record has ended.
        first, other = await incarnation_of(group, x), await incarnation_of(group, y)
        now = await group.state()
        assert now is not None
        assert (now.phase, now.orchestrator) == (GroupPhase.ELECTING, first)
        assert "record is gone" in now.why
        y.stops_at("before chosen")
        await group.freeze(x, "agent")

        async def replaced() -> bool:
            found = await group.state()
            return found is not None and found.orchestrator == other

        await group.until(replaced, f"{y.name} takes its place")
        assert first not in {one.incarnation for one in await group.members()}
        await group.until(lambda: y.stands_at("before chosen"), f"{y.name} has read positions")

        # What the first one sent before it fell asleep arrives now. It decides nothing any more.
        now = await group.state()
        assert not x.told("before chosen")
        x.goes_on()
        x.thaw()
        await group.until(lambda: x.told("before chosen"), "its old decision has arrived")
        assert "Committed" not in x.told("before chosen")
        assert await group.state() == now
        await group.until(lambda: y.stands_at("before chosen"), f"{y.name} goes on")
        y.goes_on()
        after = await group.serves(state.epoch + 1)
        assert "Committed" in y.told("before chosen")
        assert [by for phase, _, by in await written_since(group, state) if phase == "chosen"] == [
            y.name
        ]
        # Nor do the locks of the crashed one outlive it.
        group.start(old)
        await group.whole(after.epoch)
        await group.writer.goes_on(after.primary_server, 10)

        # In all that time each record ended by its own agent's word, or because its time was over.
        ended: dict[str, list[str]] = {}
        for commit in await group.commits():
            for key in commit.deletes:
                if (record := parse_agent(key.partition(b"/")[2])) is not None:
                    by = "time" if commit.expiry else commit.by
                    ended.setdefault(record[1], []).append(by)
        print(ended, x.told("before chosen"))
        assert "time" in ended[old.name]
        assert all(set(by) <= {"time", server} for server, by in ended.items())

    play(scenario, kind=kind, store=store, gated=True, more="ttl_s = 5")


# An orchestrator dies at each step


class Strike:
    """One group, and what is killed of a machine: its agent alone, or all of it."""

    def __init__(self, group: ReplicaGroup, of: str) -> None:
        self.group, self.of = group, of
        self.struck: Incarnation = Incarnation("")

    async def strike(self, machine: Machine) -> None:
        """Kill it, and hold nobody any longer."""
        self.struck = await incarnation_of(self.group, machine)
        if self.of == "machine":
            await self.group.kill(machine)
        else:
            machine.send("agent", signal.SIGKILL)
        for one in self.group.machines:
            one.goes_on()
            one.thaw()

    async def gets_to(self, machine: Machine, point: str, epoch: int) -> bool:
        """Wait until its agent is there; False if the election has gone past it."""
        found = False

        async def there() -> bool:
            nonlocal found
            found = machine.stands_at(point)
            now = await self.group.state()
            assert now is not None
            return found or now.epoch > epoch + 1 or (
                now.epoch == epoch + 1 and now.phase is GroupPhase.SERVING
            )  # fmt: skip

        await self.group.until(there, f"{machine.name} is {point}")
        return found

    async def phase(self) -> GroupState:
        now = await self.group.state()
        assert now is not None
        return now

    async def level(self) -> GroupState:
        """Everybody has the same, and the writer is silent: the lowest id would win."""
        self.group.writer.goes.clear()
        state = await self.group.whole()

        async def level() -> bool:
            return len({one.offset for one in await self.group.members()}) == 1

        await self.group.until(level, "all have the same")
        return state

    # the steps; each says whether it was in time

    async def electing_just_written(self, state: GroupState, low: Machine, high: Machine) -> bool:
        low.stops_at("before electing")
        high.stops_at("after electing")
        await self.group.kill(self.group.machine(state.primary_server))
        if not await self.gets_to(high, "after electing", state.epoch):
            return False
        now = await self.phase()
        assert (now.phase, now.epoch) == (GroupPhase.ELECTING, state.epoch + 1)
        assert now.orchestrator == await incarnation_of(self.group, high)
        await self.strike(high)
        return True

    async def positions_read(self, state: GroupState, low: Machine, high: Machine) -> bool:
        low.stops_at("before electing")
        high.stops_at("before chosen")
        await self.group.kill(self.group.machine(state.primary_server))
        if not await self.gets_to(high, "before chosen", state.epoch):
            return False
        now = await self.phase()
        assert (now.phase, now.epoch) == (GroupPhase.ELECTING, state.epoch + 1)
        assert now.orchestrator == await incarnation_of(self.group, high)
        assert {one.final for one in await self.group.members()} == {now.epoch}
        await self.strike(high)
        return True

    async def chosen_just_written(self, state: GroupState, low: Machine, high: Machine) -> bool:
        """The candidate is another one than the orchestrator."""
        low.stops_at("before electing", "before serving")
        high.stops_at("after chosen")
        await self.group.kill(self.group.machine(state.primary_server))
        if not await self.gets_to(high, "after chosen", state.epoch):
            return False
        now = await self.phase()
        assert (now.phase, now.epoch) == (GroupPhase.CHOSEN, state.epoch + 1)
        if now.candidate_server != low.name:
            return False
        assert now.orchestrator == await incarnation_of(self.group, high)
        await self.strike(high)
        return True

    async def chose_itself(self, state: GroupState, low: Machine, high: Machine) -> bool:
        """Candidate and orchestrator are one, which dies before it knows what it has written."""
        low.stops_at("after chosen")
        high.stops_at("before electing")
        await self.group.kill(self.group.machine(state.primary_server))
        if not await self.gets_to(low, "after chosen", state.epoch):
            return False
        now = await self.phase()
        assert (now.phase, now.epoch) == (GroupPhase.CHOSEN, state.epoch + 1)
        if now.candidate_server != low.name:
            return False
        assert now.candidate == now.orchestrator == await incarnation_of(self.group, low)
        await self.strike(low)
        return True

    async def promoted_not_confirmed(self, state: GroupState, low: Machine, high: Machine) -> bool:
        """The candidate's server is a primary by its own word, and nobody has been told."""
        low.stops_at("before electing", "before serving")
        await self.group.kill(self.group.machine(state.primary_server))
        if not await self.gets_to(low, "before serving", state.epoch):
            return False
        now = await self.phase()
        assert (now.phase, now.epoch) == (GroupPhase.CHOSEN, state.epoch + 1)
        assert now.candidate_server == low.name
        assert now.orchestrator == await incarnation_of(self.group, high)
        assert await self.group.database.fed_by(low.port) == 0
        await self.strike(low)
        return True

    async def promoted_and_orchestrator_gone(
        self, state: GroupState, low: Machine, high: Machine
    ) -> bool:
        low.stops_at("before electing", "before serving")
        await self.group.kill(self.group.machine(state.primary_server))
        if not await self.gets_to(low, "before serving", state.epoch):
            return False
        assert await self.group.database.fed_by(low.port) == 0
        await self.strike(high)
        return True

    async def switching_just_written(self, state: GroupState, low: Machine, high: Machine) -> bool:
        """The primary orchestrates a switchover."""
        old = self.group.machine(state.primary_server)
        await self.group.freeze(old, "agent")
        await self._asked(low)
        now = await self.phase()
        if now.phase is not GroupPhase.SWITCHING:
            return False
        await self.strike(old)
        return True

    async def switching_caught_up(self, state: GroupState, low: Machine, high: Machine) -> bool:
        old = self.group.machine(state.primary_server)
        old.stops_at("before chosen")
        await self._asked(low)
        if not await self.gets_to(old, "before chosen", state.epoch):
            return False
        now = await self.phase()
        assert (now.phase, now.candidate_server) == (GroupPhase.SWITCHING, low.name)
        await self.strike(old)
        return True

    async def switching_chosen(self, state: GroupState, low: Machine, high: Machine) -> bool:
        old = self.group.machine(state.primary_server)
        old.stops_at("after chosen")
        low.stops_at("before serving")
        await self._asked(low)
        if not await self.gets_to(old, "after chosen", state.epoch):
            return False
        now = await self.phase()
        assert (now.phase, now.candidate_server) == (GroupPhase.CHOSEN, low.name)
        await self.strike(old)
        return True

    async def switching_without_its_candidate(
        self, state: GroupState, low: Machine, high: Machine
    ) -> bool:
        """The candidate dies, after the primary has decided for it."""
        old = self.group.machine(state.primary_server)
        old.stops_at("before chosen")
        await self._asked(low)
        if not await self.gets_to(old, "before chosen", state.epoch):
            return False
        await self.strike(low)
        return True

    async def _asked(self, to: Machine) -> None:
        """An operator asks for a switchover. How that ends is told by the group."""
        self._asking = asyncio.create_task(
            self.group.domicile("switchover", "orders", "--to", to.name)
        )

        async def begun() -> bool:
            now = await self.phase()
            return now.phase is not GroupPhase.SERVING or self._asking.done()

        await self.group.until(begun, "a switchover begins")

    async def end(self) -> None:
        asking: asyncio.Task[object] | None = getattr(self, "_asking", None)
        if asking is not None:
            await asking


STEPS: tuple[Callable[[Strike, GroupState, Machine, Machine], Awaitable[bool]], ...] = (
    Strike.electing_just_written,
    Strike.positions_read,
    Strike.chosen_just_written,
    Strike.chose_itself,
    Strike.promoted_not_confirmed,
    Strike.promoted_and_orchestrator_gone,
    Strike.switching_just_written,
    Strike.switching_caught_up,
    Strike.switching_chosen,
    Strike.switching_without_its_candidate,
)


@pytest.mark.scenario("FO-06")
@pytest.mark.parametrize("of", ["agent", "machine"])
@pytest.mark.parametrize(("kind", "mode"), [("valkey", "async"), ("postgresql", "sync")])
@each_store
def test_an_orchestrator_that_dies_at_each_step_is_replaced(
    kind: str, mode: str, store: StoreName, of: str
) -> None:
    """Held exactly at the step: at each, its agent alone is killed, or all of its machine."""
    chosen = os.environ.get("DOMICILE_TEST_STEP", "")

    async def scenario(group: ReplicaGroup) -> None:
        for step in STEPS:
            name = getattr(step, "__name__", "")
            if chosen not in name:
                continue
            for _ in range(TRIES):
                strike = Strike(group, of)
                state = await strike.level()
                low, high = sorted(group.others(state.primary_server), key=lambda one: one.name)
                began = monotonic()
                in_time = await step(strike, state, low, high)
                if in_time:
                    if (
                        mode == "sync"
                        and (first := group.machine(state.primary_server)).run is None
                    ):
                        # Without it too few have everything that was acknowledged.
                        group.start(first)
                    after = await group.serves(state.epoch + 1)
                    print(f"{name}: {monotonic() - began:.1f} s, epoch {after.epoch}")
                    assert after.primary != strike.struck
                await restart_all(group)
                await strike.end()
                after = await group.whole(state.epoch)
                if in_time:
                    break
            else:
                raise AssertionError(f"never in time: {name}")
            await group.fed_by(after.primary_server)
            group.writer.goes.set()
            await group.writer.goes_on(after.primary_server, 5)
            if mode == "sync":
                assert not await group.writer.missing(group.machine(after.primary_server))

    play(scenario, kind=kind, store=store, gated=True, more=f'ttl_s = 5\nmode = "{mode}"')
