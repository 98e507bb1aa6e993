"""Remembered entities: started without a message after moves, crashes and a full restart."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest

from domicile import (
    Durable,
    EventSourced,
    HandlerFailed,
    MaybeExecuted,
    Settings,
    Unavailable,
    handler,
)
from domicile.entity.hosting import remembering
from domicile.entity.hosting.remembering import AT_ONCE
from domicile.ports.journal import JournalUnknown
from domicile.testing import Sim, simulated
from domicile.testing.sim.remote import RemoteJournal

FEW = Settings(shards=8)
SEEDS = 2

STARTED: list[tuple[str, int]] = []
"""Which entities started, and under which epoch."""
BROKEN: set[str] = set()
"""Entities whose start fails."""
SLOW: set[str] = set()
"""Entities that take their time when they stop."""
STOPPED: list[str] = []

MANY = 10_100

JOURNAL_CALLS = ("claim", "write", "settle", "recover", "inbox", "remembered")


class Pace:
    """How many entities start at the same time, once their starts take time."""

    def __init__(self) -> None:
        self.takes_s = 0.0
        self.now = self.most = 0

    def begin(self) -> None:
        self.takes_s, self.now, self.most = 0.05, 0, 0

    async def start(self) -> None:
        if self.takes_s:
            self.now += 1
            self.most = max(self.most, self.now)
            await asyncio.sleep(self.takes_s)
            self.now -= 1


PACE = Pace()


@dataclass(frozen=True)
class Seen:
    what: int


class Device(EventSourced[int, Seen], name="device", remember=True):
    async def on_start(self) -> None:
        STARTED.append((self.id, self.epoch))
        await PACE.start()
        if self.id in BROKEN:
            raise KeyError("broken")

    async def on_stop(self) -> None:
        if self.id in SLOW:
            STOPPED.append("slow")
            await asyncio.sleep(2.0)

    @staticmethod
    def initial(id: str, /) -> int:
        return 0

    @staticmethod
    def apply(state: int, event: Seen, /) -> int:
        return state + event.what

    @handler
    async def see(self, what: int) -> int:
        return await self.persist(Seen(what))

    @handler
    async def see_and_fail(self) -> None:
        await self.persist(Seen(1))
        raise KeyError("after persist")

    @handler
    async def linger(self, seconds: float) -> None:
        await asyncio.sleep(seconds)

    @handler
    async def touch(self) -> None:
        """Stores nothing."""

    @handler
    async def rest(self) -> None:
        self.passivate()

    @handler
    async def retire(self) -> None:
        await self.persist(Seen(0))
        await self.forget()

    @handler
    async def retire_and_fail(self) -> None:
        await self.forget()
        raise KeyError("after forget")

    @handler
    async def end(self) -> None:
        await self.delete()

    @handler
    async def end_and_rest(self) -> None:
        await self.delete()
        self.passivate()

    @handler
    async def retire_and_rest(self) -> None:
        await self.forget()
        self.passivate()


class Setting(Durable[str], name="setting", remember=True):
    async def on_start(self) -> None:
        STARTED.append((self.id, self.epoch))

    @staticmethod
    def initial(id: str, /) -> str:
        return ""

    @handler
    async def set(self, value: str) -> None:
        await self.save(value)

    @handler
    async def end_and_rest(self) -> None:
        await self.delete()
        self.passivate()


KINDS: list[Any] = [Device, Setting]


def reset() -> None:
    STARTED.clear()
    BROKEN.clear()
    SLOW.clear()
    STOPPED.clear()
    PACE.takes_s = 0.0


def started(*ids: str) -> bool:
    return {*ids} <= {id for id, _ in STARTED}


async def crash(sim: Sim, id: str) -> None:
    old = sim.owner(Device, id)
    sim.crash(old)
    await sim.wait_until(lambda: sim.owner(Device, id) != old and sim.settled())


@simulated(entities=KINDS, nodes=3, seeds=SEEDS, settings=FEW)
@pytest.mark.scenario("RG-19", partial=True)
async def test_a_remembered_entity_starts_at_its_new_home(sim: Sim) -> None:
    reset()
    await sim.ref(Device, "d").ask(Device.see, 1)
    await sim.ref(Device, "idle").ask(Device.touch)
    await sim.ref(Setting, "s").ask(Setting.set, "x")
    for id, kind in (("d", Device), ("s", Setting), ("idle", Device)):
        old = sim.owner(kind, id)
        await sim.wish(sim.shard(kind, id), (old + 1) % 3)
        await sim.wait_until(lambda kind=kind, id=id, old=old: sim.owner(kind, id) != old)  # type: ignore[misc]
    STARTED.clear()
    for id in ("d", "idle"):
        await crash(sim, id)
        sim.start(next(node.index for node in sim.nodes if not node.up))
    await sim.wait_until(lambda: started("d"))
    await sim.advance(2)
    assert not started("idle"), "an entity that stored nothing is not remembered"


@pytest.mark.parametrize("held", [1, 3])
@pytest.mark.parametrize("seed", range(SEEDS))
def test_a_shard_whose_row_is_held_keeps_no_other_from_starting(seed: int, held: int) -> None:
    async def scenario() -> None:
        reset()
        async with sim:
            sim.add()
            await sim.wait_until(sim.settled)
            ids = [f"d{n}" for n in range(40)]
            for id in ids:
                await sim.ref(Device, id).ask(Device.see, 1)
            shards = sorted({sim.shard(Device, id) for id in ids}, key=lambda one: one.shard)
            sim.crash(0)
            STARTED.clear()
            for shard in shards[:held]:
                sim.hold_row(shard, 200.0)
            sim.add()
            await sim.wait_until(sim.settled)
            free = {id for id in ids if sim.shard(Device, id) not in shards[:held]}
            await sim.advance(60)
            assert {id for id, _ in STARTED} == free
            await sim.advance(200)
            assert started(*ids), "once the rows are free, their entities start"

    sim = Sim(seed, entities=KINDS, nodes=0, settings=FEW)
    try:
        sim.world.run(scenario(), sim.loop)
    finally:
        sim.close()


@simulated(entities=KINDS, nodes=3, seeds=SEEDS, settings=FEW)
@pytest.mark.scenario("RG-19", partial=True)
async def test_after_a_full_restart_everything_remembered_starts(sim: Sim) -> None:
    reset()
    ids = [f"d{n}" for n in range(40)]
    for id in ids:
        await sim.ref(Device, id).ask(Device.see, 1)
    await sim.ref(Setting, "s").ask(Setting.set, "x")
    for node in range(3):
        sim.crash(node)
    STARTED.clear()
    for node in range(3):
        sim.start(node)
    await sim.wait_until(lambda: started(*ids, "s"))
    assert await sim.ref(Device, "d7").ask(Device.see, 1) == 2
    by_shard: dict[Any, list[str]] = {}
    for id, _ in STARTED:
        if id in ids:
            by_shard.setdefault(sim.shard(Device, id), []).append(id)
    for each in by_shard.values():
        assert each == sorted(each, key=ids.index, reverse=True), "those written last come first"


@simulated(entities=KINDS, nodes=2, seeds=SEEDS, settings=FEW)
@pytest.mark.scenario("LS-16")
async def test_the_flag_commits_with_the_event_or_not_at_all(sim: Sim) -> None:
    reset()
    with pytest.raises(HandlerFailed):
        await sim.ref(Device, "failed").ask(Device.see_and_fail)
    await sim.ref(Device, "kept").ask(Device.see, 1)
    with pytest.raises(HandlerFailed):
        await sim.ref(Device, "kept").ask(Device.retire_and_fail)
    await sim.ref(Device, "retired").ask(Device.see, 1)
    await sim.ref(Device, "retired").ask(Device.retire)
    for node in range(2):
        sim.crash(node)
    STARTED.clear()
    for node in range(2):
        sim.start(node)
    await sim.wait_until(lambda: started("kept"))
    await sim.advance(3)
    assert [id for id, _ in STARTED] == ["kept"]


@simulated(entities=KINDS, nodes=2, seeds=SEEDS, settings=FEW)
@pytest.mark.scenario("RG-20", partial=True)
async def test_what_is_forgotten_or_deleted_does_not_come_back_until_it_stores_again(
    sim: Sim,
) -> None:
    reset()
    for id in ("forgotten", "deleted", "again", "resting"):
        await sim.ref(Device, id).ask(Device.see, 1)
    await sim.ref(Device, "forgotten").ask(Device.retire)
    await sim.ref(Device, "deleted").ask(Device.end)
    await sim.ref(Device, "again").ask(Device.end)
    assert await sim.ref(Device, "again").ask(Device.see, 5) == 5
    await sim.ref(Device, "resting").ask(Device.rest)
    for node in range(2):
        sim.crash(node)
    STARTED.clear()
    for node in range(2):
        sim.start(node)
    await sim.wait_until(lambda: started("again", "resting"))
    await sim.advance(3)
    assert sorted(id for id, _ in STARTED) == ["again", "resting"]


@simulated(entities=KINDS, nodes=2, seeds=4, settings=FEW)
@pytest.mark.scenario("RG-20", partial=True)
async def test_a_journal_that_fails_and_a_start_that_fails_lose_nobody(sim: Sim) -> None:
    reset()
    ids = [f"d{n}" for n in range(12)]
    for id in ids:
        await sim.ref(Device, id).ask(Device.see, 1)
    BROKEN.add("d3")
    sim.crash(0)
    journal = sim.nodes[1].journal
    assert journal is not None
    journal.lost_request = 1.0
    await sim.wait_until(sim.settled)
    await sim.advance(8)
    journal.lost_request = 0.0
    STARTED.clear()
    sim.start(0)
    here = [id for id in ids if sim.owner(Device, id) == 1]
    await sim.wait_until(lambda: started("d3") or "d3" not in here)
    BROKEN.clear()
    await sim.advance(25)
    seen = [id for id, _ in STARTED]
    assert seen.count("d3") >= 1
    for id in here:
        assert await sim.ref(Device, id).ask(Device.see, 0) == 1


ENDS: list[Any] = [Device.end_and_rest, Device.retire_and_rest, Device.rest]

ONE_SHARD = Settings(shards=1)


async def shard_of_many(sim: Sim) -> list[str]:
    """Many are remembered; their home dies, and the next one is about to start them."""
    reset()
    ids = [f"d{n}" for n in range(120)]
    for id in ids:
        await sim.ref(Device, id).ask(Device.see, 1)
    PACE.takes_s = 0.5
    sim.crash(sim.owner(Device, "d0"))
    STARTED.clear()
    await sim.wait_until(lambda: len(STARTED) > 5)
    return ids


def starts_of(id: str) -> int:
    return [one for one, _ in STARTED].count(id)


@simulated(entities=KINDS, nodes=2, seeds=2, settings=ONE_SHARD)
@pytest.mark.scenario("RG-20")
async def test_an_entity_that_ends_before_its_turn_comes_is_not_started_again(sim: Sim) -> None:
    """What the journal has listed is a while ago: a message was there first, and it was the last
    one."""
    ids = await shard_of_many(sim)
    # Those written first are last in the list.
    ended = ids[: len(ENDS)]
    asks = [sim.ref(Device, id).options(timeout_s=30).ask for id in ended]
    await asyncio.gather(*[ask(end) for ask, end in zip(asks, ENDS, strict=True)])
    assert [starts_of(id) for id in ended] == [1] * len(ENDS)
    assert not started(*ids), "the list is not done"
    await sim.wait_until(lambda: started(*ids))
    await sim.advance(15)
    assert [starts_of(id) for id in ended] == [1] * len(ENDS)


@simulated(entities=KINDS, nodes=2, seeds=2, settings=ONE_SHARD)
@pytest.mark.scenario("RG-20", partial=True)
async def test_an_entity_that_ends_while_its_start_is_to_be_tried_again_stays_ended(
    sim: Sim,
) -> None:
    reset()
    for id in ("a", "b", "c"):
        await sim.ref(Device, id).ask(Device.see, 1)
    BROKEN.update(("a", "b", "c"))
    sim.crash(sim.owner(Device, "a"))
    STARTED.clear()
    await sim.wait_until(lambda: started("a", "b", "c"))
    BROKEN.clear()
    for id, end in zip(("a", "b", "c"), ENDS, strict=True):

        async def ends(id: str = id, end: Any = end) -> bool:
            try:
                await sim.ref(Device, id).ask(end)
            except Unavailable:
                return False
            return True

        while not await ends():
            await sim.advance(0.01)
    STARTED.clear()
    await sim.advance(30)
    assert STARTED == []


@simulated(entities=KINDS, nodes=2, seeds=2, settings=ONE_SHARD)
@pytest.mark.scenario("RG-20", partial=True)
async def test_too_many_that_end_meanwhile_are_asked_for_anew(sim: Sim) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(remembering, "MOST_ENDED", 3)
        ids = await shard_of_many(sim)
        ended = ids[:10]
        asks = [sim.ref(Device, id).options(timeout_s=30).ask for id in ended]
        await asyncio.gather(*[ask(Device.end_and_rest) for ask in asks])
        await sim.wait_until(lambda: started(*ids))
        await sim.advance(15)
        assert [starts_of(id) for id in ended] == [1] * len(ended)
        assert [starts_of(id) for id in ids] == [1] * len(ids)


@simulated(entities=KINDS, nodes=1, seeds=2, settings=ONE_SHARD)
@pytest.mark.scenario("RG-20", partial=True)
async def test_a_list_from_before_the_last_write_of_an_entity_does_not_start_it(sim: Sim) -> None:
    """It has left memory, its deletion is on its way, and the journal is asked for the list."""
    reset()
    setting = sim.ref(Setting, "s")
    await setting.ask(Setting.set, "x")
    runtime = sim.nodes[0].node.life.runtime  # type: ignore[union-attr]
    [host] = runtime.hosts.values()
    sim.hold_row(sim.shard(Setting, "s"), 3.0)
    await sim.advance(0.1)
    ending = asyncio.ensure_future(setting.options(timeout_s=30).ask(Setting.end_and_rest))
    await sim.wait_until(lambda: not host.cells)
    assert not ending.done()
    STARTED.clear()
    runtime.loop.post(lambda: runtime.remembering.opened(host))  # type: ignore[attr-defined]
    await ending
    await sim.advance(5)
    assert STARTED == []


class Failing:
    """Calls of the journal that get no answer, some times for each."""

    def __init__(self) -> None:
        self.left: dict[str, int] = {}
        self.is_done = False
        """Whether a call that gets no answer is done by the journal."""
        self.hit: set[str] = set()

    @contextmanager
    def patched(self, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
        with monkeypatch.context() as patch:
            for call in JOURNAL_CALLS:
                patch.setattr(
                    RemoteJournal, call, self._instead(call, getattr(RemoteJournal, call))
                )
            yield

    def _instead(self, call: str, original: Callable[..., Awaitable[Any]]) -> Callable[..., Any]:
        async def answer(journal: RemoteJournal, *args: Any, **options: Any) -> Any:
            if not self.left.get(call):
                return await original(journal, *args, **options)
            self.left[call] -= 1
            self.hit.add(call)
            if self.is_done:
                await original(journal, *args, **options)
            raise JournalUnknown(f"{call} got no answer")

        return answer


async def until_answered(ref: Any, method: Any, key: str, *args: Any) -> None:
    """A caller that repeats its ask by its key until it is answered."""
    while True:
        try:
            return await ref.options(key=key, timeout_s=20.0).ask(method, *args)  # type: ignore[no-any-return]
        except MaybeExecuted:
            continue


@simulated(entities=KINDS, nodes=2, seeds=1, settings=FEW)
@pytest.mark.scenario("RG-20")
async def test_no_failing_call_of_the_journal_loses_or_invents_a_remembered_entity(
    sim: Sim,
) -> None:
    """Each call fails in turn, more often than it is repeated, done or not; then all restart."""
    reset()
    failing = Failing()
    expected: set[str] = set()
    with failing.patched(pytest.MonkeyPatch()):
        for call, is_done in itertools.product(JOURNAL_CALLS, (False, True)):
            here = f"{call}-{is_done}"
            failing.is_done = is_done
            for id in ("ends", "deleted"):
                await sim.ref(Device, f"{here}-{id}").ask(Device.see, 1)
            # A batch is settled only if its write got no answer.
            failing.left = {"write": 1, call: 7}
            for id, method, args in (
                ("comes", Device.see, (1,)),
                ("ends", Device.retire, ()),
                ("deleted", Device.end, ()),
            ):
                await until_answered(sim.ref(Device, f"{here}-{id}"), method, here, *args)
            expected.add(f"{here}-comes")
            for node in range(2):
                sim.crash(node)
            STARTED.clear()
            failing.left = {call: 7}
            for node in range(2):
                sim.start(node)
            await sim.wait_until(lambda: started(*expected), timeout_s=60.0)
            await sim.advance(3)
            assert {id for id, _ in STARTED} == expected, here
            assert call in failing.hit, here
            failing.left = {}


@simulated(entities=KINDS, nodes=2, seeds=SEEDS, settings=FEW)
@pytest.mark.scenario("RG-20", partial=True)
async def test_a_remembered_entity_starts_again_after_a_write_that_failed(sim: Sim) -> None:
    reset()
    device = sim.ref(Device, "d")
    await device.ask(Device.see, 1)
    journal = sim.nodes[sim.owner(Device, "d")].journal
    assert journal is not None
    journal.lost_request = 1.0
    with pytest.raises(MaybeExecuted):
        await device.options(timeout_s=30).ask(Device.see, 1)
    STARTED.clear()
    journal.lost_request = 0.0
    await sim.wait_until(lambda: started("d"))


@simulated(entities=KINDS, nodes=2, seeds=4, settings=FEW)
@pytest.mark.scenario("RG-19", partial=True)
async def test_a_move_that_is_taken_back_leaves_nobody_asleep(sim: Sim) -> None:
    reset()
    ids = [f"d{n}" for n in range(60)]
    for id in ids:
        await sim.ref(Device, id).ask(Device.see, 1)
    old = sim.owner(Device, "d0")
    shard = sim.shard(Device, "d0")
    here = [id for id in ids if sim.shard(Device, id) == shard]
    await sim.ref(Device, "d0").tell(Device.linger, 0.2)
    SLOW.add(here[-1])
    STARTED.clear()
    await sim.wish(shard, 1 - old)
    await sim.wait_until(lambda: "slow" in STOPPED)
    await sim.wish(shard, None)
    await sim.wait_until(lambda: sim.settled() and sim.owner(Device, "d0") == old)
    await sim.wait_until(lambda: started(*here))


def coordinators(sim: Sim) -> list[int]:
    """The nodes that coordinate now: one, or none for a while."""
    return [
        process.index
        for process in sim.nodes
        if process.up and process.node and process.node.life and process.node.life.control.leading
    ]


@simulated(entities=KINDS, nodes=3, seeds=1, settings=Settings(shards=1))
@pytest.mark.scenario("RG-19")
async def test_ten_thousand_of_a_shard_start_after_a_move_a_failover_and_a_full_restart(
    sim: Sim,
) -> None:
    """Nobody sends them a message, a few start at a time, and messages are served meanwhile."""
    reset()
    few = [f"d{n}" for n in range(100)]
    for id in few:
        await sim.ref(Device, id).ask(Device.see, 1)
    home, shard = sim.owner(Device, "d0"), sim.shard(Device, "d0")

    [leading] = coordinators(sim)
    target = leading if leading != home else (home + 1) % 3
    STARTED.clear()
    await sim.wish(shard, target)
    await sim.wait_until(lambda: started(*few))
    assert sim.owner(Device, "d0") == target

    await sim.wish(shard, leading)
    await sim.wait_until(lambda: sim.settled() and sim.owner(Device, "d0") == leading)
    await sim.wait_until(lambda: len(STARTED) >= 2 * len(few) or target == leading)
    STARTED.clear()
    sim.crash(leading)  # home and coordinator in one
    await sim.wait_until(lambda: started(*few))
    assert sim.owner(Device, "d0") != leading
    assert coordinators(sim) != [leading]
    sim.start(leading)

    ids = [f"d{n}" for n in range(MANY)]
    STARTED.clear()
    for number, id in enumerate(ids[len(few) :], 1):
        await sim.ref(Device, id).tell(Device.see, 1)
        if number % 500 == 0:
            await sim.wait_until(lambda number=number: len(STARTED) >= number)  # type: ignore[misc]
    await sim.advance(2)
    for node in range(3):
        sim.crash(node)
    STARTED.clear()
    PACE.begin()
    for node in range(3):
        sim.start(node)
    await sim.wait_until(lambda: len(STARTED) > 10)
    assert await sim.ref(Device, "d0").ask(Device.see, 1) == 2
    assert len(STARTED) < MANY / 2, "messages need not wait until all have started"
    await sim.wait_until(lambda: len(STARTED) >= MANY, timeout_s=120.0)
    assert {id for id, _ in STARTED} == {*ids}
    assert len(STARTED) == MANY, "each once"
    assert 1 < PACE.most <= AT_ONCE + 1, "one more for the message"
