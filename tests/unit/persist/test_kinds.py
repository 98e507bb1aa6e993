"""Durable states, snapshots, events of earlier versions, deletion."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec
import pytest

from domicile import ConfigError, Durable, EventSourced, HandlerFailed, Settings, handler, upcast
from domicile.core.ids import EntityKey
from domicile.persist.eventsourced import EventCodec
from domicile.persist.state_codec import StateCodec
from domicile.testing import Sim, simulated

FEW = Settings(shards=8)
SEEDS = 2
UNFIT = object()

LOG: list[Any] = []


@dataclass(frozen=True)
class Profile:
    name: str = ""
    tags: tuple[str, ...] = ()


class Person(Durable[Profile], name="person"):
    @staticmethod
    def initial(id: str, /) -> Profile:
        LOG.append(("initial", id))
        return Profile(id)

    @handler
    async def tag(self, what: str) -> int:
        profile = await self.state()
        await self.save(replace(profile, tags=(*profile.tags, what)))
        return len((await self.state()).tags)

    @handler
    async def tag_twice(self, what: str) -> int:
        await self.tag(what)
        return await self.tag(what)

    @handler
    async def tag_and_fail(self, what: str) -> None:
        await self.tag(what)
        raise KeyError(what)

    @handler
    async def end(self, again: bool = False) -> Profile:
        await self.delete()
        if again:
            await self.save(Profile("again"))
        return await self.state()

    @handler(shared=True)
    async def show(self) -> Profile:
        return await self.state()


async def crash(sim: Sim, kind: type[Any], id: str) -> None:
    old = sim.owner(kind, id)
    sim.crash(old)
    await sim.wait_until(lambda: sim.owner(kind, id) != old and sim.settled())


# whole states


@simulated(entities=[Person], nodes=3, seeds=SEEDS, settings=FEW)
async def test_a_saved_state_survives_a_crash(sim: Sim) -> None:
    LOG.clear()
    person = sim.ref(Person, "ada")
    assert await person.ask(Person.show) == Profile("ada")
    assert await person.ask(Person.tag, "a") == 1
    assert await person.options(key="k").ask(Person.tag_twice, "b") == 3
    assert await person.options(key="k").ask(Person.tag_twice, "b") == 3
    with pytest.raises(HandlerFailed):
        await person.ask(Person.tag_and_fail, "c")
    assert await person.ask(Person.show) == Profile("ada", ("a", "b", "b"))
    await crash(sim, Person, "ada")
    assert await person.ask(Person.show) == Profile("ada", ("a", "b", "b"))
    assert await person.ask(Person.tag, "d") == 4


@simulated(entities=[Person], nodes=2, seeds=SEEDS, settings=FEW)
async def test_many_saves_at_once_are_written_together(sim: Sim) -> None:
    LOG.clear()
    person = sim.ref(Person, "ada")
    async with asyncio.TaskGroup() as group:
        asks = [group.create_task(person.ask(Person.tag, str(n))) for n in range(20)]
    assert [ask.result() for ask in asks] == list(range(1, 21))
    await crash(sim, Person, "ada")
    assert (await person.ask(Person.show)).tags == tuple(map(str, range(20)))


@simulated(entities=[Person], nodes=3, seeds=SEEDS, settings=FEW)
async def test_what_is_deleted_is_gone_and_may_begin_again(sim: Sim) -> None:
    LOG.clear()
    person = sim.ref(Person, "ada")
    await person.ask(Person.tag, "a")
    assert await person.ask(Person.end) == Profile("ada")
    assert await person.ask(Person.show) == Profile("ada")
    await crash(sim, Person, "ada")
    assert await person.ask(Person.show) == Profile("ada")
    assert await person.ask(Person.tag, "b") == 1
    assert await person.ask(Person.end, again=True) == Profile("again")
    await crash(sim, Person, "ada")
    assert await person.ask(Person.show) == Profile("again")


def test_a_definition_is_checked() -> None:
    class Bare(Durable[Profile]): ...

    class Vague(Durable): ...  # type: ignore[type-arg]

    with pytest.raises(ConfigError, match="needs the static method initial"):
        Bare.__domicile_check__()
    with pytest.raises(ConfigError, match="does not say what its state is"):
        Vague.__domicile_check__()
    with pytest.raises(ConfigError, match="needs a static method initial"):
        Bare.initial("x")
    with pytest.raises(ConfigError, match=r"state object.* cannot be stored|cannot be stored"):
        StateCodec("Bare", type("Odd", (), {"__slots__": ()}) | set[type[int]])
    Person.__domicile_check__()


def test_a_state_of_an_earlier_version_is_read_as_far_as_it_fits() -> None:
    @dataclass(frozen=True)
    class Old:
        name: str

    @dataclass(frozen=True)
    class New:
        name: str
        tags: tuple[str, ...] = ()

    @dataclass(frozen=True)
    class Other:
        title: int

    stored = StateCodec("X", Old).encode(Old("ada"))
    assert StateCodec("X", New).read(stored) == New("ada")
    assert StateCodec("X", New).decode(stored, unfit=UNFIT) is UNFIT
    assert StateCodec("X", Old).decode(stored, unfit=UNFIT) == Old("ada")
    with pytest.raises(msgspec.ValidationError):
        StateCodec("X", Other).read(stored)
    assert StateCodec("X", Other).fields(stored) == {"name": "ada"}


# what an earlier version of a class has stored


@dataclass(frozen=True)
class Titled:
    title: str


class Renamed(Durable[Titled], name="person"):
    """`Person` after its state was changed."""

    @staticmethod
    def initial(id: str, /) -> Titled:
        return Titled("")

    @handler(shared=True)
    async def show(self) -> str:
        return (await self.state()).title


class Upgraded(Renamed, name="person"):
    @staticmethod
    def upgrade(stored: Any, /) -> Titled:
        return Titled(stored["name"])

    @handler(shared=True)
    async def show(self) -> str:
        return (await self.state()).title


@simulated(entities=[Person], nodes=1, seeds=1, settings=FEW)
async def test_a_state_that_no_longer_fits_names_the_fix(sim: Sim) -> None:
    LOG.clear()
    await sim.ref(Person, "ada").ask(Person.tag, "a")
    sim.crash(0)
    sim.add(entities=[Renamed])
    await sim.wait_until(sim.settled)
    with pytest.raises(HandlerFailed, match=r"add a static method upgrade\(stored\)"):
        await sim.ref(Renamed, "ada").ask(Renamed.show)
    sim.crash(1)
    sim.add(entities=[Upgraded])
    await sim.wait_until(sim.settled)
    assert await sim.ref(Upgraded, "ada").ask(Upgraded.show) == "ada"


@dataclass(frozen=True)
class Added:
    what: int
    note: str = ""


@dataclass(frozen=True)
class Removed:
    what: int
    why: str


class Today(EventSourced[tuple[int, ...], Added | Removed], name="today"):
    @staticmethod
    def initial(id: str, /) -> tuple[int, ...]:
        return ()

    @staticmethod
    def apply(state: tuple[int, ...], event: Added | Removed, /) -> tuple[int, ...]:
        return (*state, event.what if isinstance(event, Added) else -event.what)

    @upcast("Put")
    @staticmethod
    def _put(old: dict[str, Any]) -> Added:
        return Added(old["number"])

    @upcast("Removed")
    @staticmethod
    def _removed(old: dict[str, Any]) -> Removed:
        return Removed(old["what"], "unknown")


def stored(name: str, **fields: Any) -> bytes:
    return msgspec.msgpack.encode((name, fields))


def test_events_of_earlier_versions_become_events_of_today() -> None:
    codec = Today.__domicile_events__
    assert codec.decode(stored("Added", what=1)) == Added(1), "a new field has a default"
    assert codec.decode(stored("Put", number=2)) == Added(2)
    assert codec.decode(stored("Removed", what=3)) == Removed(3, "unknown")
    assert codec.decode(stored("Removed", what=3, why="x")) == Removed(3, "x")


def test_an_event_that_this_version_cannot_read_names_the_fix() -> None:
    codec = EventCodec("Today", (Added, Removed))
    with pytest.raises(ConfigError, match=r"lacks; add the class .* @upcast\('Put'\)"):
        codec.decode(stored("Put", number=2))
    with pytest.raises(ConfigError, match=r"no longer fits .*why.* @upcast\('Removed'\)"):
        codec.decode(stored("Removed", what=3))


def test_upcast_wants_a_static_method() -> None:
    with pytest.raises(ConfigError, match="needs a static method"):

        class Odd(EventSourced[int, Added]):
            @upcast("Old")
            def change(self, old: Any) -> Added:
                return Added(0)


# snapshots


@dataclass(frozen=True)
class Sum:
    total: int = 0
    seen: dict[str, int] = field(default_factory=dict[str, int])


class Adder(EventSourced[Sum, Added], name="adder", snapshot_every=10):
    @staticmethod
    def initial(id: str, /) -> Sum:
        return Sum()

    @staticmethod
    def apply(state: Sum, event: Added, /) -> Sum:
        LOG.append(("applied", event.what))
        return Sum(state.total + event.what, {**state.seen, str(event.what): 1})

    @handler
    async def add(self, what: int, times: int = 1) -> int:
        return (await self.persist(*[Added(what)] * times)).total

    @handler
    async def end(self) -> None:
        await self.delete()

    @handler(shared=True)
    async def total(self) -> int:
        return (await self.state()).total


class Wider(EventSourced[tuple[int, str], Added], name="adder", snapshot_every=10):
    """`Adder` with another state."""

    @staticmethod
    def initial(id: str, /) -> tuple[int, str]:
        return 0, id

    @staticmethod
    def apply(state: tuple[int, str], event: Added, /) -> tuple[int, str]:
        LOG.append(("applied", event.what))
        return state[0] + event.what, state[1]

    @handler(shared=True)
    async def total(self) -> int:
        return (await self.state())[0]


@simulated(entities=[Adder], nodes=3, seeds=SEEDS, settings=FEW)
async def test_recovery_begins_with_the_newest_snapshot(sim: Sim) -> None:
    adder = sim.ref(Adder, "a")
    for _ in range(24):
        await adder.ask(Adder.add, 1)
    await crash(sim, Adder, "a")
    LOG.clear()
    assert await adder.ask(Adder.total) == 24
    assert len(LOG) == 4
    # Those four count: the next snapshot comes six events later.
    assert await adder.ask(Adder.add, 1, 8) == 32
    await crash(sim, Adder, "a")
    LOG.clear()
    assert await adder.ask(Adder.total) == 32
    assert LOG == []
    assert len(sim.events(Adder, "a")) == 32


@simulated(entities=[Adder], nodes=2, seeds=SEEDS, settings=FEW)
async def test_a_snapshot_does_not_outlive_a_deletion(sim: Sim) -> None:
    adder = sim.ref(Adder, "a")
    await adder.ask(Adder.add, 1, 12)
    await adder.ask(Adder.end)
    assert await adder.ask(Adder.add, 5) == 5
    await crash(sim, Adder, "a")
    assert await adder.ask(Adder.total) == 5


@simulated(entities=[Adder], nodes=1, seeds=1, settings=FEW)
async def test_a_snapshot_of_another_type_is_not_used(sim: Sim) -> None:
    for _ in range(12):
        await sim.ref(Adder, "a").ask(Adder.add, 1)
    sim.crash(0)
    sim.add(entities=[Wider])
    await sim.wait_until(sim.settled)
    LOG.clear()
    assert await sim.ref(Wider, "a").ask(Wider.total) == 12
    assert len(LOG) == 12
    assert sim.servers.journal.peek(EntityKey("adder", "a"))


def test_a_snapshot_policy_is_checked() -> None:
    with pytest.raises(ConfigError, match="must be a number of events"):

        class Zero(EventSourced[int, Added], snapshot_every=0): ...
