"""Seeds of replica groups: `python -m proving.groups --seeds 0:300`.

Each seed is a group of three servers in virtual time: writers, faults for a while, then a calm in
which everything must be whole again. Even seeds are synchronous, odd ones asynchronous. A bad seed
is one line to repeat: `python -m proving.groups --seed 17`.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import logging
import multiprocessing
import signal
import sys
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from random import Random

from domicile.failover.records import GroupConfig, GroupPhase, GroupState
from domicile.testing.groups.checkers import (
    check_contents,
    check_kept,
    check_one_primary,
    check_promotions,
    check_receipts,
    states,
    stored_receipts,
)
from domicile.testing.groups.group import GroupMachineHost, SimGroup

COMMAND = "python -m proving.groups"
BEGIN_S = 3.0
FAULTY_S = 28.0
CALM_S = 40.0
"""After the last fault has ended: this long a group may take to be whole again."""

Strike = Callable[[SimGroup, GroupMachineHost, Random], None]


def _agent_killed(group: SimGroup, at: GroupMachineHost, random: Random) -> None:
    group.kill_agent(at, random.choice((0.1, 1.0, 6.0)))


def _agent_frozen(group: SimGroup, at: GroupMachineHost, random: Random) -> None:
    group.freeze_agent(at, random.choice((0.5, 2.0, 5.0)))


def _guard_frozen(group: SimGroup, at: GroupMachineHost, random: Random) -> None:
    group.freeze_guard(at, random.choice((0.5, 5.0)))
    if random.random() < 0.5:
        group.freeze_agent(at, 5.0)


def _guard_killed(group: SimGroup, at: GroupMachineHost, random: Random) -> None:
    group.kill_guard(at)


def _machine_frozen(group: SimGroup, at: GroupMachineHost, random: Random) -> None:
    group.freeze_machine(at, random.choice((1.0, 4.0, 7.0)))


def _server_frozen(group: SimGroup, at: GroupMachineHost, random: Random) -> None:
    group.freeze_server(at, random.choice((0.3, 4.0)))


def _server_crashed(group: SimGroup, at: GroupMachineHost, random: Random) -> None:
    back_s, lost = random.choice((0.05, 0.5, 3.0)), random.choice((0, 3, 1_000_000))
    # Only a server that cascades has a process for each session. With one left, no disk is lost.
    orphans = group.cascades and random.random() < 0.5
    group.crash_server(at, back_s, 0 if orphans else lost, orphans=orphans)


def _power(group: SimGroup, at: GroupMachineHost, random: Random) -> None:
    group.lose_machine(at, random.choice((0.5, 5.0)))


def _store_cut(group: SimGroup, at: GroupMachineHost, random: Random) -> None:
    group.cut_store(at, random.choice((0.5, 4.0, 7.0)))


def _outage(group: SimGroup, at: GroupMachineHost, random: Random) -> None:
    group.outage(random.choice((0.5, 4.0)))


def _partition(group: SimGroup, at: GroupMachineHost, random: Random) -> None:
    others = [machine for machine in group.machines if machine is not at]
    group.partition(at, random.choice(others), random.choice((1.0, 5.0)))


def _slow(group: SimGroup, at: GroupMachineHost, random: Random) -> None:
    group.slow(at, random.choice((10.0, 40.0)), random.choice((1.0, 4.0)))


def _uncertain(group: SimGroup, at: GroupMachineHost, random: Random) -> None:
    group.uncertain(at, random.choice((2.0, 6.0)))


def _laggard(group: SimGroup, at: GroupMachineHost, random: Random) -> None:
    """One replica lags behind; then those that have more are not there."""
    lagging, other = random.sample([one for one in group.machines if one is not at], 2)
    group.partition(at, lagging, 6.0)
    group.after(random.uniform(0.3, 1.5), partial(_leave_behind, group, at, other))


def _leave_behind(group: SimGroup, at: GroupMachineHost, other: GroupMachineHost) -> None:
    group.lose_machine(at, 6.0)
    group.kill_agent(other, 6.0)


STRIKES: tuple[Strike, ...] = (
    _agent_killed, _agent_killed, _agent_frozen, _agent_frozen, _guard_frozen, _guard_killed,
    _machine_frozen, _machine_frozen, _server_frozen, _server_crashed, _server_crashed, _power,
    _store_cut, _store_cut, _outage, _partition, _partition, _slow, _uncertain, _uncertain,
    _laggard, _laggard,
)  # fmt: skip

# Plots: several faults, each at the moment that the state tells. What they break is too rare else.

PLOT_WAIT_S = 6.0
"""How long a plot waits for its next moment before it gives up."""

AWAY_S = 9.0
"""How long a plot takes a machine away, if it does not bring it back before."""

Plot = Callable[[SimGroup, GroupState, Random], Awaitable[None]]


def _cast(
    group: SimGroup, state: GroupState, random: Random
) -> tuple[GroupMachineHost, GroupMachineHost, GroupMachineHost]:
    """The primary, and the two others in any order."""
    primary = next(one for one in group.machines if one.name == state.primary_server)
    one, other = random.sample([one for one in group.machines if one is not primary], 2)
    return primary, one, other


async def _until(group: SimGroup, ready: Callable[[GroupState], bool]) -> GroupState | None:
    """The state once it is as wanted, seen at once; None if it takes too long."""
    end = group.world.now + PLOT_WAIT_S
    while group.world.now < end:
        state, _ = await group.state()
        if state is not None and ready(state):
            return state
        await asyncio.sleep(0.003)
    return None


async def _two_fall(group: SimGroup, state: GroupState, random: Random) -> None:
    """The primary falls, its successor falls too, and the first one comes back before it.

    Either the first primary has a long tail that nobody else has, or one replica lacks much and
    follows the successor without having got an entry from it (F7, F8, F12).
    """
    primary, one, lagging = _cast(group, state, random)
    if random.random() < 0.5:
        group.partition(primary, one, AWAY_S)
        group.partition(primary, lagging, AWAY_S)
        group.burst(primary, 40)
    else:
        group.partition(lagging, primary, 2 * AWAY_S)
        group.partition(lagging, one, 2 * AWAY_S)
    await asyncio.sleep(random.uniform(0.2, 0.6))
    group.lose_machine(primary, 2 * AWAY_S)
    epoch = state.epoch

    def succeeded(now: GroupState) -> bool:
        follower = [other for other in group.machines if other.name != now.primary_server]
        follows = any(other.database.follows == now.primary_server for other in follower)
        return now.phase is GroupPhase.SERVING and now.epoch > epoch and follows

    after = await _until(group, succeeded)
    if after is not None:
        await asyncio.sleep(random.choice((0.0, 0.05, 0.2)))
        successor, _, _ = _cast(group, after, random)
        group.lose_machine(successor, AWAY_S)
        served = after.epoch
        await _until(group, lambda now: now.phase is GroupPhase.ELECTING and now.epoch > served)
        await asyncio.sleep(random.choice((0.0, 0.0, 2.0)))
    primary.database.start()
    primary.start_agent()


async def _set_shrinks(group: SimGroup, state: GroupState, random: Random) -> None:
    """The primary falls just after a member without its data became its only quorum (F12)."""
    primary, gone, lagging = _cast(group, state, random)
    group.kill_agent(gone, AWAY_S)
    await asyncio.sleep(random.uniform(1.5, 2.5))
    group.partition(primary, lagging, PLOT_WAIT_S)
    before = state.quorums
    if await _until(group, lambda now: now.quorums != before) is not None:
        await asyncio.sleep(random.choice((0.02, 0.05, 0.2)))
        group.lose_machine(primary, AWAY_S)


async def _set_grows(group: SimGroup, state: GroupState, random: Random) -> None:
    """A member comes back, the state cannot be changed, and all but another member falls (F12)."""
    primary, back, other = _cast(group, state, random)
    group.kill_agent(back, 2 * AWAY_S)
    before = state.quorums
    if await _until(group, lambda now: now.quorums != before) is None:
        return
    await asyncio.sleep(0.5)
    back.start_agent()
    at = group.world.now
    while (  # noqa: ASYNC110
        back.name not in await group.members() and group.world.now < at + PLOT_WAIT_S
    ):
        await asyncio.sleep(0.003)
    group.deafen_store(primary, 2.0)
    group.partition(primary, other, 2.0)
    await asyncio.sleep(random.uniform(0.5, 1.5))
    group.lose_machine(primary, AWAY_S)
    group.lose_machine(back, AWAY_S)


async def _switch_to_a_laggard(group: SimGroup, state: GroupState, random: Random) -> None:
    """An operator asks for a server that lacks the newest entries, and cannot get them (F11)."""
    primary, lagging, _ = _cast(group, state, random)
    group.partition(primary, lagging, random.choice((1.0, PLOT_WAIT_S)))
    await asyncio.sleep(random.uniform(0.1, 0.5))
    await group.switch_over(lagging.name)
    await asyncio.sleep(random.uniform(0.5, 2.0))


async def _server_blinks(group: SimGroup, state: GroupState, random: Random) -> None:
    """The primary's server restarts within a moment, with less than a replica has (F4)."""
    primary, ahead, _ = _cast(group, state, random)
    group.crash_server(primary, random.choice((0.01, 0.05)), random.choice((5, 15)))
    group.partition(primary, ahead, 1.0)
    await asyncio.sleep(1.0)


async def _wakes_among_electors(group: SimGroup, state: GroupState, random: Random) -> None:
    """A frozen primary takes the writes that waited for it while the others elect (F2, F6)."""
    primary, _, _ = _cast(group, state, random)
    if not primary.database.frozen:
        waking = asyncio.get_running_loop().create_task(group.wake_in_election(primary))
        await asyncio.sleep(0.1)
        group.burst(primary, 5)
        await waking


async def _left_alone_with_its_data(group: SimGroup, state: GroupState, random: Random) -> None:
    """A replica without its agent has most; another server answers at its primary's address (F10).

    It is the old primary's, which comes back without data, or with less, and follows a third one.
    """
    primary, ahead, lagging = _cast(group, state, random)
    group.partition(primary, lagging, 0.5)
    await asyncio.sleep(random.uniform(0.1, 0.3))
    group.burst(primary, random.choice((1, 10)))
    await asyncio.sleep(0.1)
    group.kill_agent(ahead, AWAY_S)
    group.crash_server(primary, 0.05, random.choice((10, 1_000_000)))
    epoch = state.epoch
    await _until(group, lambda now: now.phase is GroupPhase.SERVING and now.epoch > epoch)
    await asyncio.sleep(random.uniform(0.5, 1.0))
    ahead.start_agent()


async def _cut_short_while_it_saves(group: SimGroup, state: GroupState, random: Random) -> None:
    """The old primary's agent is killed as soon as what it gives up is saved (F10)."""
    primary, one, other = _cast(group, state, random)
    group.partition(primary, one, 4.0)
    group.partition(primary, other, 4.0)
    group.burst(primary, 10)
    await asyncio.sleep(0.05)
    group.freeze_agent(primary, 4.0)
    saved, end = len(group.record.given_up), group.world.now + AWAY_S
    while (  # noqa: ASYNC110
        len(group.record.given_up) == saved and group.world.now < end
    ):
        await asyncio.sleep(0.0005)
    group.kill_agent(primary, 0.2)
    await asyncio.sleep(1.0)


async def _sessions_outlive(group: SimGroup, state: GroupState, random: Random) -> None:
    """The primary's server is gone, its sessions go on, and its guard can't end them now (F4)."""
    primary, _, _ = _cast(group, state, random)
    if group.cascades:
        group.freeze_guard(primary, random.choice((1.0, 5.0)))
        group.crash_server(primary, 5.5, 0, orphans=True)
        await asyncio.sleep(2.0)


async def _comes_back_into_an_election(group: SimGroup, state: GroupState, random: Random) -> None:
    """The primary's agent begins anew just as others, who saw its record go, elect (F1, F4).

    They stand still meanwhile, and so does what the new agent hears of the store afterwards.
    """
    primary, one, other = _cast(group, state, random)
    if primary.database.frozen or not primary.database.up:
        return
    group.kill_agent(primary, AWAY_S)
    await asyncio.sleep(1.2)
    for machine in (one, other):
        group.freeze_agent(machine, 2.6)
    end = group.world.now + 2.3
    while (  # noqa: ASYNC110
        primary.name in await group.members() and group.world.now < end
    ):
        await asyncio.sleep(0.003)
    primary.start_agent()
    while not primary.database.open_epoch and group.world.now < end + 0.5:  # noqa: ASYNC110
        await asyncio.sleep(0.003)
    group.late_news(primary, 2.0, 3.0)
    group.insist(primary, 3.0)
    await asyncio.sleep(2.0)


async def _registers_late(group: SimGroup, state: GroupState, random: Random) -> None:
    """The primary's agent begins anew and reads the state long before it is registered (F1)."""
    primary, _, _ = _cast(group, state, random)
    if primary.database.frozen or not primary.database.up:
        return
    group.kill_agent(primary, AWAY_S)
    await asyncio.sleep(random.uniform(1.0, 2.5))
    group.slow_store(primary, random.choice((300.0, 600.0)), 7.0)
    primary.start_agent()
    epoch = state.epoch
    await _until(group, lambda now: now.phase is GroupPhase.SERVING and now.epoch > epoch)
    group.insist(primary, 4.0)
    await asyncio.sleep(4.0)


async def _stops_before_it_opens(group: SimGroup, state: GroupState, random: Random) -> None:
    """The new primary's agent stands still while it has its server opened (F2)."""
    _, to, _ = _cast(group, state, random)
    epoch = state.epoch
    if not await group.switch_over(to.name):
        return
    after = await _until(group, lambda now: now.phase is GroupPhase.SERVING and now.epoch > epoch)
    if after is None:
        return
    await asyncio.sleep(random.choice((0.0, 0.001, 0.002, 0.004)))
    primary, _, _ = _cast(group, after, random)
    group.freeze_agent(primary, 5.0)
    await asyncio.sleep(4.99)
    group.insist(primary, 0.1)
    await asyncio.sleep(0.1)


async def _forced_past_an_epoch(group: SimGroup, state: GroupState, random: Random) -> None:
    """A replica that has nothing of the last epoch becomes primary by a person's word (F8, F9)."""
    primary, to, lagging = _cast(group, state, random)
    if group.config.sync:
        return
    group.partition(lagging, primary, 2 * AWAY_S)
    group.partition(lagging, to, 2 * AWAY_S)
    group.burst(primary, 20)
    await asyncio.sleep(0.3)
    epoch = state.epoch
    if not await group.switch_over(to.name):
        return
    if await _until(group, lambda now: now.phase is GroupPhase.SERVING and now.epoch > epoch):
        group.lose_machine(to, 2 * AWAY_S)
        group.lose_machine(primary, AWAY_S)
        end = group.world.now + AWAY_S
        while group.world.now < end:
            await group.force()
            now, _ = await group.state()
            if now is not None and now.phase is GroupPhase.SERVING and now.epoch > epoch + 1:
                break
            await asyncio.sleep(0.3)
    primary.database.start()
    primary.start_agent()
    await asyncio.sleep(2.0)


async def _falls_once_promoted(group: SimGroup, state: GroupState, random: Random) -> None:
    """The candidate is promoted, and its agent is gone before it can say so (F9)."""
    primary, _, _ = _cast(group, state, random)
    group.kill_agent(primary, random.choice((3.5, AWAY_S)))
    after = await _until(group, lambda now: now.phase is GroupPhase.CHOSEN)
    if after is None:
        return
    chosen = next(one for one in group.machines if one.name == after.candidate_server)
    group.slow_store(chosen, 300.0, 2.0)
    promoted, end = len(group.record.promoted), group.world.now + 2.0
    while len(group.record.promoted) == promoted and group.world.now < end:  # noqa: ASYNC110
        await asyncio.sleep(0.001)
    group.kill_agent(chosen, random.choice((1.0, AWAY_S)))
    await asyncio.sleep(4.0)


async def _chosen_and_crashed(group: SimGroup, state: GroupState, random: Random) -> None:
    """The candidate's server restarts with less than it was chosen for (F9)."""
    primary, _, _ = _cast(group, state, random)
    group.kill_agent(primary, AWAY_S)
    after = await _until(group, lambda now: now.phase is GroupPhase.CHOSEN)
    if after is not None:
        chosen = next(one for one in group.machines if one.name == after.candidate_server)
        group.crash_server(chosen, 0.01, random.choice((2, 10)))
        await asyncio.sleep(1.0)


async def _hears_nothing_while_it_switches(
    group: SimGroup, state: GroupState, random: Random
) -> None:
    """The primary hands over, and never hears that it did: its deadline comes (F11)."""
    primary, to, _ = _cast(group, state, random)
    group.slow_store(primary, 300.0, 1.5)
    if not await group.switch_over(to.name):
        return
    epoch = state.epoch
    after = await _until(group, lambda now: now.phase is not GroupPhase.SWITCHING)
    if after is not None and after.epoch > epoch:
        group.cut_store(primary, 4.0)
        group.insist(primary, 3.0)
        await asyncio.sleep(3.0)


PLOTS: tuple[Plot, ...] = (
    _two_fall, _two_fall, _set_shrinks, _set_grows, _switch_to_a_laggard, _server_blinks,
    _wakes_among_electors, _left_alone_with_its_data, _cut_short_while_it_saves, _sessions_outlive,
    _comes_back_into_an_election, _registers_late, _stops_before_it_opens, _forced_past_an_epoch,
    _falls_once_promoted, _chosen_and_crashed, _hears_nothing_while_it_switches,
)  # fmt: skip


@dataclass
class GroupResult:
    """One seed, judged."""

    seed: int
    mode: str
    violations: list[str] = field(default_factory=lambda: list[str]())
    error: str = ""
    epochs: int = 0
    writes: int = 0
    forced: int = 0
    lost: int = 0
    """Acknowledged writes that an asynchronous group gave up, with a receipt."""
    faults: list[str] = field(default_factory=lambda: list[str]())

    @property
    def ok(self) -> bool:
        """Whether nothing is wrong."""
        return not self.violations and not self.error


async def _faults(group: SimGroup, random: Random, until: float) -> None:
    loop = asyncio.get_running_loop()
    waking: list[asyncio.Task[None]] = []
    while group.world.now < until:
        await asyncio.sleep(random.uniform(0.3, 3.5))
        state, _ = await group.state()
        primary = [one for one in group.machines if state and one.name == state.primary_server]
        candidate = [one for one in group.machines if state and one.name == state.candidate_server]
        # Most often who matters now, and more than one thing at a time now and then.
        for _ in range(random.choice((1, 1, 2))):
            pool = random.choice((group.machines, primary, candidate)) or group.machines
            dice = random.random()
            if dice < 0.2 and state is not None and state.phase is GroupPhase.SERVING:
                await random.choice(PLOTS)(group, state, random)
                break
            if dice < 0.35:
                await group.switch_over(random.choice(group.machines).name)
            elif dice < 0.4 and primary and not primary[0].database.frozen:
                waking.append(loop.create_task(group.wake_in_election(primary[0])))
            else:
                random.choice(STRIKES)(group, random.choice(pool), random)
    for task in waking:
        await task


async def _live(group: SimGroup, random: Random, result: GroupResult) -> None:
    group.start()
    loop = asyncio.get_running_loop()
    end = group.world.now + BEGIN_S + FAULTY_S
    writers = [loop.create_task(group.keep_writing(name, end + 8.0)) for name in "ab"]
    await asyncio.sleep(BEGIN_S)
    missing = await group.settled()
    state, _ = await group.state()
    if state is None or missing.startswith("the group is"):
        result.violations.append(f"L broken: the group did not begin: {missing}")
        return
    await _faults(group, random, end)
    await asyncio.sleep(7.5)  # the longest fault is over
    for machine in group.machines:
        machine.database.start()
        machine.start_agent()
    for writer in writers:
        await writer
    calm = group.world.now + CALM_S
    while missing := await group.settled():
        if not group.config.sync and group.world.now > calm - CALM_S / 2:
            # Everybody lost the newest entries in crashes: only a person goes on from there.
            await group.force()
        if group.world.now > calm:
            result.violations.append(f"L broken: still after {CALM_S:g} s of calm: {missing}")
            result.violations += group.told()
            return
        await asyncio.sleep(0.5)
    state, _ = await group.state()
    assert state is not None
    log = group.databases[state.primary_server].log
    now = group.world.now
    logs = {name: database.log for name, database in group.databases.items()}
    for violation in (
        *check_one_primary(group.history, group.record),
        *check_kept(
            group.record, log, stored_receipts(group.history), sync=group.config.sync, at=now
        ),
        *check_contents(logs, now),
        *check_receipts(group.record),
        *check_promotions(group.history, group.record),
    ):
        result.violations.append(str(violation))
    kept = {entry.write: None for entry in log}
    result.lost = sum(write not in kept for write in group.record.acknowledged)


def run_group_seed(seed: int) -> GroupResult:
    """Run and judge one seed."""
    log = logging.getLogger("domicile")
    level = log.level
    log.setLevel(logging.CRITICAL)
    # A deadline that comes while a switchover still goes on, and one that hardly ever comes.
    switch_s = 1.5 if seed // 8 % 2 else 10.0
    config = GroupConfig("sim", mode="async" if seed % 2 else "sync", switch_s=switch_s)
    # Each kind of servers, and with each way to have them guarded, as far as there are such.
    cascades = seed % 2 == 0 or seed % 4 == 3
    group = SimGroup(seed, config, cascades=cascades, attached=seed % 8 == 1)
    result = GroupResult(seed, config.mode)
    collecting = gc.isenabled()
    gc.disable()
    try:
        main = _live(group, group.world.stream("strikes"), result)
        group.world.run(main, group.world.process("test"))
        if group.world.errors:
            process, context = group.world.errors[0]
            result.error = f"{process}: {context.get('message')}: {context.get('exception')!r}"
    except Exception as error:
        result.error = f"{type(error).__name__}: {error}"
    finally:
        result.faults = [f"{at:8.3f} s  {what}" for at, what in group.faults]
        result.forced = group.forced
        result.writes = len(group.record.acknowledged)
        result.epochs = max((state["epoch"] for _, state in states(group.history)), default=0)
        group.world.close()
        log.setLevel(level)
        if collecting:
            gc.enable()
        gc.collect()
    return result


def _begin_work() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def _run(seeds: Sequence[int], jobs: int) -> Iterator[GroupResult]:
    """Results in the order of seeds; bad ones are told at once."""
    if jobs == 1:
        results = map(run_group_seed, seeds)
        yield from _show(results)
        return
    context = multiprocessing.get_context("spawn")
    with context.Pool(jobs, initializer=_begin_work) as pool:
        yield from _show(pool.imap(run_group_seed, seeds))


def _show(results: Iterable[GroupResult]) -> Iterator[GroupResult]:
    for number, result in enumerate(results, start=1):
        if not result.ok:
            print("\n".join(told(result)), flush=True)
        if number % 25 == 0:
            print(f"{number} seeds", file=sys.stderr, flush=True)
        yield result


def told(result: GroupResult) -> list[str]:
    """What is wrong with a seed, and the line that repeats it."""
    return [
        f"seed {result.seed} ({result.mode}) is bad",
        *(f"  {line}" for line in result.violations[:4]),
        *([f"  {result.error}"] if result.error else []),
        *(f"  {line}" for line in result.faults),
        f"repeat it with: {COMMAND} --seed {result.seed}",
    ]


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; the exit code says whether all went well."""
    parser = argparse.ArgumentParser(prog=COMMAND, description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seeds", default="0:300", help="first:end, end not included")
    parser.add_argument("--seed", type=int, help="just this one")
    parser.add_argument("--jobs", type=int, default=1)
    options = parser.parse_args(arguments)
    if options.seed is not None:
        seeds = range(options.seed, options.seed + 1)
    else:
        first, end = (int(part) for part in options.seeds.split(":"))
        seeds = range(first, end)
    began = time.monotonic()
    results = list(_run(seeds, options.jobs))
    bad = [result for result in results if not result.ok]
    print(
        f"{len(results)} seeds, {len(bad)} bad; {sum(one.writes for one in results):,} writes "
        f"acknowledged, {sum(one.epochs for one in results):,} epochs, "
        f"{sum(one.lost for one in results):,} writes given up with a receipt or lost in crashes, "
        f"{sum(one.forced for one in results)} elections forced; "
        f"{time.monotonic() - began:.0f} s"
    )
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
