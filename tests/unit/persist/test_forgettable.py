"""Forgettable values: events stay, what they say of a person can go."""

from __future__ import annotations

import asyncio
import pickle
import traceback
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random
from typing import Any

import asyncpg
import msgspec
import pytest
from postgres_lab import shared_server

from domicile import (
    ConfigError,
    Deleted,
    Durable,
    Erasure,
    EventSourced,
    Forgettable,
    Forgotten,
    HandlerFailed,
    JournalEvent,
    MaybeExecuted,
    Node,
    Projector,
    Settings,
    handler,
    upcast,
)
from domicile.core.ids import EntityKey
from domicile.persist.forgettable import Vault, is_forgetful, vault_key
from domicile.ports.journal import MOST_KEYS
from domicile.testing import MemoryProjection, Sim, simulated

SECRET = "ada@example.org"
FEW = Settings(shards=4)


@dataclass(frozen=True)
class Registered:
    email: Forgettable[str]
    phones: list[Forgettable[int]]
    plan: str = "free"


@dataclass(frozen=True)
class Moved:
    plan: str


@dataclass(frozen=True)
class Person:
    email: Forgettable[str] | None = None
    copied: str = ""
    """A copy that the application unwraps: replays make it anew, without the value."""
    plan: str = ""


class User(EventSourced[Person, Registered | Moved], name="user", snapshot_every=2):
    @staticmethod
    def initial(id: str, /) -> Person:
        return Person()

    @staticmethod
    def apply(state: Person, event: Registered | Moved, /) -> Person:
        match event:
            case Registered(email, _, plan):
                return Person(email, email.value or "nobody", plan)
            case Moved(plan):
                return replace(state, plan=plan)

    @handler
    async def register(self, email: str) -> str:
        await self.persist(Registered(Forgettable(email), [Forgettable(7), Forgettable(8)]))
        return f"welcome {email}"

    @handler
    async def move(self, plan: str) -> None:
        await self.append(Moved(plan))

    @handler(shared=True)
    async def show(self) -> tuple[str | None, str, str]:
        state = await self.state()
        return None if state.email is None else state.email.value, state.copied, state.plan

    @handler
    async def forget_me(self) -> Erasure:
        return await self.erase()

    @handler
    async def forget_and_go_on(self) -> tuple[str | None, str]:
        before = await self.state()
        await self.erase()
        # What the handler still holds cannot come back by way of a new event.
        after = await self.persist(Registered(before.email or Forgettable("x"), []))
        return (None if after.email is None else after.email.value), after.copied

    @handler
    async def forget_and_fail(self) -> None:
        await self.erase()
        raise KeyError("after it was sent")

    @handler
    async def close(self) -> str:
        await self.delete()
        return "closed"

    @handler
    async def begin_anew(self, email: str) -> None:
        before = await self.state()
        assert before.email is not None
        await self.persist(Registered(Forgettable("never stored"), []))
        await self.delete()
        await self.persist(Registered(Forgettable(email), []), Registered(before.email, []))

    @handler
    async def leak(self) -> Any:
        return (await self.state()).email


class Profile(Durable[Person], name="profile"):
    @staticmethod
    def initial(id: str, /) -> Person:
        return Person()

    @handler
    async def set(self, email: str) -> None:
        await self.save(Person(Forgettable(email), "", "free"))

    @handler
    async def plan(self, plan: str) -> None:
        await self.save(replace(await self.state(), plan=plan))

    @handler(shared=True)
    async def show(self) -> tuple[str | None, str]:
        state = await self.state()
        return None if state.email is None else state.email.value, state.plan

    @handler
    async def forget_me(self) -> int:
        return (await self.erase()).values


async def restart(sim: Sim, kind: Any, id: str) -> None:
    home = sim.owner(kind, id)
    sim.crash(home)
    sim.start(home)
    await sim.wait_until(sim.settled)


def all_bytes(sim: Sim, type: str, id: str) -> bytes:
    """Everything that the journal holds of an entity."""
    journal = sim.servers.journal
    heads = [
        journal._heads.get(key) for key in (EntityKey(type, id), vault_key(EntityKey(type, id)))
    ]  # type: ignore[attr-defined]
    return pickle.dumps(
        [
            ([event.data for event in head.events], head.keys, head.state, head.snapshot)
            for head in heads
            if head is not None
        ]
    )


@simulated(entities=[User], nodes=2, seeds=3, settings=FEW)
async def test_events_stay_and_their_values_go(sim: Sim) -> None:
    user = sim.ref(User, "ada")
    assert await user.options(key="k").ask(User.register, SECRET) == f"welcome {SECRET}"
    await user.ask(User.move, "gold")
    assert await user.ask(User.show) == (SECRET, SECRET, "gold")
    await restart(sim, User, "ada")
    assert await user.ask(User.show) == (SECRET, SECRET, "gold")
    [first, _] = sim.events(User, "ada")
    assert isinstance(first, Registered)
    assert (first.email.value, [one.value for one in first.phones]) == (SECRET, [7, 8])
    assert SECRET.encode() in all_bytes(sim, "user", "ada")
    receipt = await user.options(key="gone").ask(User.forget_me)
    assert (receipt.type, receipt.id, receipt.values) == ("user", "ada", 3)
    assert SECRET.encode() not in all_bytes(sim, "user", "ada"), "not in snapshots or replies"
    assert await user.ask(User.show) == (None, "nobody", "gold")
    assert await user.options(key="gone").ask(User.forget_me) == receipt, "its own reply is kept"
    with pytest.raises(HandlerFailed, match="its reply was erased"):
        await user.options(key="k").ask(User.register, SECRET)
    await restart(sim, User, "ada")
    assert await user.ask(User.show) == (None, "nobody", "gold")
    [first, _] = sim.events(User, "ada")
    assert first == Registered(Forgettable.erased(), [Forgettable.erased()] * 2)
    # And life goes on.
    await user.ask(User.register, "new@example.org")
    await restart(sim, User, "ada")
    assert await user.ask(User.show) == ("new@example.org", "new@example.org", "free")
    assert len(sim.events(User, "ada")) == 3


@simulated(entities=[User], nodes=2, seeds=2, settings=FEW)
async def test_what_a_handler_still_holds_is_erased_too(sim: Sim) -> None:
    user = sim.ref(User, "ada")
    await user.ask(User.register, SECRET)
    assert await user.ask(User.forget_and_go_on) == (None, "nobody")
    assert SECRET.encode() not in all_bytes(sim, "user", "ada")
    await user.ask(User.register, SECRET)
    with pytest.raises(HandlerFailed, match="after it was sent"):
        await user.ask(User.forget_and_fail)
    assert await user.ask(User.show) == (None, "nobody", "free")
    assert SECRET.encode() not in all_bytes(sim, "user", "ada")
    # A deletion takes the values along.
    await user.ask(User.register, SECRET)
    await user.ask(User.close)
    assert SECRET.encode() not in all_bytes(sim, "user", "ada")
    assert await user.ask(User.show) == (None, "", "")
    # What is stored after it in the same message stays.
    await user.ask(User.register, "kept@example.org")
    await user.ask(User.begin_anew, "new@example.org")
    await restart(sim, User, "ada")
    values = [one.email.value for one in sim.events(User, "ada") if isinstance(one, Registered)]
    assert values == ["new@example.org", "kept@example.org"]
    assert b"never stored" not in all_bytes(sim, "user", "ada")


@simulated(entities=[User], nodes=2, seeds=3, settings=FEW)
async def test_a_deletion_takes_stored_replies_along_and_their_asks_are_not_done_again(
    sim: Sim,
) -> None:
    user = sim.ref(User, "ada")
    assert await user.options(key="k").ask(User.register, SECRET) == f"welcome {SECRET}"
    assert await user.options(key="gone").ask(User.close) == "closed"
    assert SECRET.encode() not in all_bytes(sim, "user", "ada")

    async def asked_again() -> None:
        with pytest.raises(HandlerFailed, match="its reply was erased"):
            await user.options(key="k").ask(User.register, SECRET)
        assert await user.options(key="gone").ask(User.close) == "closed", "its own reply is kept"
        assert await user.ask(User.show) == (None, "", "")

    await asked_again()
    await restart(sim, User, "ada")
    await asked_again()


@simulated(entities=[User], nodes=1, seeds=2, settings=FEW)
async def test_a_reply_that_is_on_its_way_to_the_journal_is_not_given_after_a_deletion(
    sim: Sim,
) -> None:
    user = sim.ref(User, "ada")
    await user.ask(User.show)
    sim.hold_row(sim.shard(User, "ada"), 1.0)
    await sim.advance(0.1)
    first = asyncio.create_task(user.options(key="k").ask(User.register, SECRET))
    await sim.advance(0.05)
    gone = asyncio.create_task(user.ask(User.close))
    await sim.advance(0.05)
    again = asyncio.create_task(user.options(key="k").ask(User.register, SECRET))
    assert await first == f"welcome {SECRET}"
    assert await gone == "closed"
    with pytest.raises(HandlerFailed, match="its reply was erased"):
        await again


@simulated(entities=[User], nodes=1, seeds=2, settings=FEW)
async def test_a_key_between_two_deletions_on_their_way_is_not_used_twice(sim: Sim) -> None:
    user = sim.ref(User, "ada").options(timeout_s=20)
    await user.ask(User.show)
    shard = sim.shard(User, "ada")
    sim.hold_row(shard, 1.0)
    await sim.advance(0.1)
    earlier = asyncio.create_task(user.ask(User.close))
    await sim.advance(0.05)
    first = asyncio.create_task(user.options(key="k").ask(User.register, SECRET))
    await sim.advance(0.05)
    later = asyncio.create_task(user.ask(User.close))
    await sim.advance(0.05)
    sim.hold_row(shard, 1.0)
    assert await earlier == "closed"
    again = asyncio.create_task(user.options(key="k").ask(User.register, SECRET))
    assert await first == f"welcome {SECRET}"
    assert await later == "closed"
    with pytest.raises(HandlerFailed, match="its reply was erased"):
        await again


@simulated(entities=[User], nodes=1, seeds=2, settings=FEW)
async def test_a_reply_that_was_looked_up_before_the_erasure_is_not_given_after_it(
    sim: Sim,
) -> None:
    """With so many keys that the entity does not know them all, it looks them up early."""
    user = sim.ref(User, "ada")
    keys = [f"k{number}" for number in range(MOST_KEYS + 1)]
    await asyncio.gather(*[user.options(key=key).ask(User.register, SECRET) for key in keys])
    await restart(sim, User, "ada")
    await user.ask(User.show)
    gone = asyncio.create_task(user.options(key="gone").ask(User.forget_me))
    again = [
        asyncio.create_task(user.options(key=key).ask(User.register, SECRET)) for key in keys[:20]
    ]
    assert (await gone).values == 3 * len(keys)
    for one in again:
        with pytest.raises(HandlerFailed, match="its reply was erased"):
            await one


@simulated(entities=[User], nodes=3, seeds=6, settings=FEW)
async def test_a_crash_around_an_erasure_leaves_nothing_that_was_told_to_be_gone(sim: Sim) -> None:
    user = sim.ref(User, "ada")
    for round in range(4):
        await user.ask(User.register, SECRET)
        erasing = asyncio.create_task(user.ask(User.forget_me))
        await sim.advance(0.001 * round)
        home = sim.owner(User, "ada")
        sim.crash(home)
        try:
            await erasing
        except MaybeExecuted:
            await user.ask(User.forget_me)
        sim.start(home)
        await sim.wait_until(sim.settled)
        assert (await user.ask(User.show))[:2] == (None, "nobody")
        assert SECRET.encode() not in all_bytes(sim, "user", "ada")


@simulated(entities=[Profile], nodes=2, seeds=2, settings=FEW)
async def test_a_whole_state_keeps_only_its_newest_values(sim: Sim) -> None:
    profile = sim.ref(Profile, "ada")
    await profile.ask(Profile.set, "old@example.org")
    await profile.ask(Profile.set, SECRET)
    await profile.ask(Profile.plan, "gold")
    assert b"old@example.org" not in all_bytes(sim, "profile", "ada")
    await restart(sim, Profile, "ada")
    assert await profile.ask(Profile.show) == (SECRET, "gold")
    await profile.ask(Profile.plan, "tin")
    assert await profile.ask(Profile.forget_me) == 1
    assert await profile.ask(Profile.show) == (None, "tin")
    await profile.ask(Profile.plan, "lead")
    await restart(sim, Profile, "ada")
    assert await profile.ask(Profile.show) == (None, "lead")
    assert SECRET.encode() not in all_bytes(sim, "profile", "ada")


@simulated(entities=[User], nodes=1, seeds=1, settings=FEW)
async def test_a_forgettable_does_not_travel_by_itself(sim: Sim) -> None:
    user = sim.ref(User, "ada")
    await user.ask(User.register, SECRET)
    with pytest.raises(HandlerFailed, match="Forgettable"):
        await user.ask(User.leak)


class Guest(EventSourced[Person, Moved], name="guest", snapshot_every=1):
    """Its state has a value that its events do not have."""

    @staticmethod
    def initial(id: str, /) -> Person:
        return Person(Forgettable(id))

    @staticmethod
    def apply(state: Person, event: Moved, /) -> Person:
        return replace(state, plan=event.plan)

    @handler
    async def move(self, plan: str) -> str | None:
        state = await self.persist(Moved(plan))
        return None if state.email is None else state.email.value


@simulated(entities=[Guest], nodes=2, seeds=1, settings=FEW)
async def test_a_snapshot_may_have_values_that_no_event_has(sim: Sim) -> None:
    guest = sim.ref(Guest, "eve")
    for plan in ("a", "b"):
        assert await guest.ask(Guest.move, plan) == "eve"
        await restart(sim, Guest, "eve")
    assert await guest.ask(Guest.move, "c") == "eve"


async def many(store: str, journal: str | None) -> list[JournalEvent[Any]]:
    """A life on real journals, restarted in between, with a projection."""
    seen = MemoryProjection()

    async def life(work: Any) -> Any:
        async with Node(store, journal=journal, entities=[User], settings=FEW) as node:
            return await work(node.ref(User, "ada"))

    async def first(user: Any) -> None:
        await asyncio.gather(*[user.ask(User.move, f"p{n}") for n in range(5)])
        await user.options(key="k").ask(User.register, SECRET)

    async def second(user: Any) -> Erasure:
        assert await user.ask(User.show) == (SECRET, SECRET, "free")
        async with Projector(seen, entities=[User], store=store, journal=journal) as projector:
            await projector.caught_up()
            receipt: Erasure = await user.ask(User.forget_me)
            await projector.caught_up()
        return receipt

    async def third(user: Any) -> None:
        assert await user.ask(User.show) == (None, "nobody", "free")
        with pytest.raises(HandlerFailed, match="its reply was erased"):
            await user.options(key="k").ask(User.register, SECRET)

    await life(first)
    assert (await life(second)).values == 3
    await life(third)
    late = MemoryProjection()

    async def fourth(_: Any) -> None:
        async with Projector(late, entities=[User], store=store, journal=journal) as projector:
            await projector.caught_up()

    await life(fourth)
    [again] = [one for one in late.of("ada") if isinstance(one, Registered)]
    assert again.email.is_erased, "who reads later never learns it"
    return [one for one in seen.of("ada") if not isinstance(one, Moved)]


def test_on_a_file(tmp_path: Path) -> None:
    seen = asyncio.run(many(f"sqlite:///{tmp_path}/s.db", None))
    assert_told(seen)


def test_on_a_server() -> None:
    url = shared_server().new_database()

    async def scenario() -> None:
        assert_told(await many("memory://erased", url))
        raw = await asyncpg.connect(url)
        for table in ("event", "snapshot", "inbox", "entity"):
            rows = await raw.fetch(f"SELECT t::text AS row FROM domicile_journal.{table} t")
            assert SECRET.encode().hex() not in "".join(row["row"] for row in rows), table
        await raw.close()

    asyncio.run(scenario())


def assert_told(seen: Sequence[Any]) -> None:
    """A projection got the value, and later that it is gone."""
    registered, forgotten = seen
    assert isinstance(registered, Registered)
    assert registered.email.value == SECRET
    assert forgotten == Forgotten()
    assert forgotten != Deleted()


def test_older_and_newer_versions_of_a_field() -> None:
    @dataclass(frozen=True)
    class Named:
        name: Forgettable[str]

    class Old(EventSourced[int, Named], name="old"):
        @upcast("Called")
        @staticmethod
        def _called(old: dict[str, Any], /) -> Named:
            assert isinstance(old["first"], Forgettable)
            return Named(old["first"])

    codec = Old.__domicile_events__
    assert codec.is_forgetful
    # Stored before the field was forgettable: it is read, and it stays in its event.
    plain = msgspec.msgpack.encode(("Named", {"name": "ada"}))
    assert codec.decode(plain) == Named(Forgettable("ada"))

    @dataclass(frozen=True)
    class Called:
        first: Forgettable[str]

    class Before(EventSourced[int, Called], name="before"):
        pass

    vault = Vault(Random(1))
    with vault.open():
        stored = Before.__domicile_events__.encode(Called(Forgettable("ada")))
        assert b"ada" not in stored
        assert codec.decode(stored) == Named(Forgettable("ada"))
    # Without its vault nothing is known.
    assert codec.decode(stored) == Named(Forgettable.erased())


def test_what_it_shows_and_equals() -> None:
    one: Forgettable[str] = Forgettable(SECRET)
    assert SECRET not in repr(one)
    assert SECRET not in "".join(traceback.format_exception_only(ValueError(one)))
    assert one == Forgettable(SECRET)
    assert hash(one) == hash(Forgettable(SECRET))
    assert one != Forgettable("x")
    assert one != SECRET
    assert one != Forgettable.erased()
    assert Forgettable(None) != Forgettable.erased()
    assert not Forgettable(None).is_erased
    assert (is_forgetful(Registered), is_forgetful(Moved)) == (True, False)
    with pytest.raises(ConfigError, match="kept for stored values"):

        class Odd(Durable[int], name="user~forgettable"):
            pass
