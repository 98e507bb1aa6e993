"""Event-sourced entities: recovery, repeat-safe asks, and what a fence or a lost reply does."""

from __future__ import annotations

import asyncio
import types
from dataclasses import dataclass
from typing import Any

import pytest

from domicile import (
    ConfigError,
    Entity,
    EventSourced,
    HandlerFailed,
    MaybeExecuted,
    NotExecuted,
    Rejection,
    Settings,
    handler,
)
from domicile.core.ids import Incarnation
from domicile.persist.eventsourced import EventCodec
from domicile.ports.journal import Claim
from domicile.testing import Sim, simulated

FEW = Settings(shards=8)
SEEDS = 2

LOG: list[Any] = []
"""What entities did; emptied at the start of each run."""


@dataclass(frozen=True)
class Paid:
    amount: int


@dataclass(frozen=True)
class Closed:
    why: str = ""


@dataclass(frozen=True)
class Stray:
    """No event of an account."""


class Empty(Rejection, name="account.empty"):
    """Not enough there."""


class Account(EventSourced[int, Paid | Closed], name="account"):
    @staticmethod
    def initial(id: str, /) -> int:
        LOG.append(("initial", id))
        return 0

    @staticmethod
    def apply(state: int, event: Paid | Closed, /) -> int:
        match event:
            case Paid(amount):
                if amount > 1_000:
                    raise ValueError("too much to apply")
                return state + amount
            case Closed():
                return -1

    @handler
    async def pay(self, amount: int) -> int:
        LOG.append(("pay", amount))
        return await self.persist(Paid(amount))

    @handler
    async def take(self, amount: int) -> int:
        if await self.state() < amount:
            raise Empty(self.id, amount)
        return await self.persist(Paid(-amount))

    @handler
    async def pay_twice(self, amount: int) -> tuple[int, int, int]:
        first = await self.persist(Paid(amount))
        between = await self.state()
        return first, between, await self.persist(Paid(amount), Paid(amount))

    @handler
    async def pay_and_close(self, amount: int, why: str) -> int:
        return await self.persist(Paid(amount), Closed(why))

    @handler
    async def pay_slowly(self, amount: int, for_s: float) -> int:
        LOG.append("slow")
        await asyncio.sleep(for_s)
        return await self.persist(Paid(amount))

    @handler
    async def pay_and_fail(self, amount: int) -> int:
        await self.persist(Paid(amount))
        raise KeyError("after persist")

    @handler
    async def pay_and_tell(self, amount: int, other: str) -> int:
        balance = await self.persist(Paid(amount))
        await self.ref(Witness, other).tell(Witness.hear, self.id)
        LOG.append("told")
        return balance

    @handler
    async def pay_tell_and_pay(self, amount: int, other: str) -> int:
        for _ in range(2):
            await self.persist(Paid(amount))
            await self.ref(Witness, other).tell(Witness.hear, self.id)
        return await self.persist(Paid(amount))

    @handler
    async def pay_ask_and_hang(self, amount: int, other: str) -> int:
        balance = await self.persist(Paid(amount))
        await self.ref(Witness, other).ask(Witness.see)
        LOG.append("hanging")
        await asyncio.sleep(100)
        return balance

    @handler
    async def stray(self) -> None:
        await self.persist(Stray())  # type: ignore[arg-type]

    @handler(shared=True)
    async def balance(self) -> int:
        return await self.state()

    @handler(shared=True)
    async def pay_shared(self, amount: int) -> int:
        return await self.persist(Paid(amount))

    @handler
    async def pay_from_outside(self) -> None:
        async def later() -> None:
            await asyncio.sleep(1)
            try:
                await self.persist(Paid(1))
            except RuntimeError as error:
                LOG.append(str(error))

        LOG.append(asyncio.get_running_loop().create_task(later()))


class Witness(Entity, name="witness"):
    def __init__(self) -> None:
        self.heard: list[str] = []

    @handler
    async def hear(self, name: str) -> None:
        LOG.append(("heard", name))
        self.heard.append(name)

    @handler
    async def see(self) -> int:
        return len(self.heard)


async def move(sim: Sim, id: str) -> None:
    to = (sim.owner(Account, id) + 1) % len(sim.nodes)
    await sim.wish(sim.shard(Account, id), to)
    await sim.wait_until(lambda: sim.owner(Account, id) == to and sim.settled())


async def crash(sim: Sim, id: str) -> None:
    """Kill the home and wait until someone else has it."""
    old = sim.owner(Account, id)
    sim.crash(old)
    await sim.wait_until(lambda: sim.owner(Account, id) != old and sim.settled())


def home_journal(sim: Sim, id: str) -> Any:
    journal = sim.nodes[sim.owner(Account, id)].journal
    assert journal is not None
    return journal


async def retried(ask: Any) -> Any:
    """What a caller with a key does: the same call until it is certain."""
    while True:
        try:
            return await ask()
        except (NotExecuted, MaybeExecuted):
            await asyncio.sleep(0.1)


# state and persist


@simulated(entities=[Account], nodes=2, seeds=SEEDS, settings=FEW)
async def test_persist_returns_the_new_state_and_stores_the_events(sim: Sim) -> None:
    LOG.clear()
    account = sim.ref(Account, "a")
    assert await account.ask(Account.balance) == 0
    assert await account.ask(Account.pay, 5) == 5
    assert await account.ask(Account.pay_twice, 2) == (7, 7, 11)
    assert await account.ask(Account.pay_and_close, 1, "done") == -1
    assert sim.events(Account, "a") == [Paid(5), Paid(2), Paid(2), Paid(2), Paid(1), Closed("done")]
    assert [entry for entry in LOG if entry[0] == "initial"] == [("initial", "a")]


@simulated(entities=[Account], nodes=3, seeds=SEEDS, settings=FEW)
async def test_state_is_recovered_after_a_move_and_after_a_crash(sim: Sim) -> None:
    LOG.clear()
    account = sim.ref(Account, "a")
    await account.ask(Account.pay, 5)
    await move(sim, "a")
    assert await account.ask(Account.balance) == 5
    assert await account.ask(Account.pay, 2) == 7
    await crash(sim, "a")
    assert await account.ask(Account.take, 3) == 4
    assert sim.events(Account, "a") == [Paid(5), Paid(2), Paid(-3)]


@simulated(entities=[Account], nodes=2, seeds=SEEDS, settings=FEW)
async def test_many_readers_recover_once(sim: Sim) -> None:
    LOG.clear()
    account = sim.ref(Account, "a")
    async with asyncio.TaskGroup() as group:
        asks = [group.create_task(account.ask(Account.balance)) for _ in range(5)]
    assert [ask.result() for ask in asks] == [0] * 5
    assert LOG == [("initial", "a")]


@simulated(entities=[Account], nodes=2, seeds=SEEDS, settings=FEW)
async def test_a_rejection_stores_nothing(sim: Sim) -> None:
    LOG.clear()
    with pytest.raises(Empty) as caught:
        await sim.ref(Account, "a").ask(Account.take, 3)
    assert caught.value.args == ("a", 3)
    assert sim.events(Account, "a") == []


@simulated(entities=[Account], nodes=2, seeds=SEEDS, settings=FEW)
async def test_what_a_handler_persisted_before_it_failed_is_dropped(sim: Sim) -> None:
    """J5: a turn is one unit."""
    LOG.clear()
    account = sim.ref(Account, "a")
    await account.ask(Account.pay, 1)
    with pytest.raises(HandlerFailed, match="after persist"):
        await account.ask(Account.pay_and_fail, 3)
    assert await account.ask(Account.balance) == 1
    assert await account.ask(Account.pay, 2) == 3
    assert sim.events(Account, "a") == [Paid(1), Paid(2)]


# what persist refuses


@simulated(entities=[Account], nodes=2, seeds=SEEDS, settings=FEW)
async def test_an_event_of_another_class_is_refused_and_changes_nothing(sim: Sim) -> None:
    LOG.clear()
    account = sim.ref(Account, "a")
    await account.ask(Account.pay, 1)
    with pytest.raises(HandlerFailed, match="not one of this entity's events"):
        await account.ask(Account.stray)
    assert await account.ask(Account.pay, 1) == 2
    assert sim.events(Account, "a") == [Paid(1), Paid(1)]


@simulated(entities=[Account], nodes=2, seeds=SEEDS, settings=FEW)
async def test_an_apply_that_raises_changes_nothing(sim: Sim) -> None:
    LOG.clear()
    account = sim.ref(Account, "a")
    await account.ask(Account.pay, 1)
    with pytest.raises(HandlerFailed, match="too much to apply"):
        await account.ask(Account.pay, 2_000)
    with pytest.raises(HandlerFailed, match="too much to apply"):
        await account.options(key="k").ask(Account.pay, 2_000)
    with pytest.raises(HandlerFailed, match="too much to apply"):
        await account.ask(Account.pay_twice, 1_001)
    assert await account.ask(Account.balance) == 1
    assert await account.ask(Account.pay, 1) == 2
    assert sim.events(Account, "a") == [Paid(1), Paid(1)]


@simulated(entities=[Account], nodes=2, seeds=SEEDS, settings=FEW)
async def test_a_shared_handler_cannot_persist(sim: Sim) -> None:
    LOG.clear()
    account = sim.ref(Account, "a")
    for ref in (account, account.options(key="k")):
        with pytest.raises(HandlerFailed, match="shared handler cannot persist"):
            await ref.ask(Account.pay_shared, 1)
    assert sim.events(Account, "a") == []


@simulated(entities=[Account], nodes=2, seeds=1, settings=FEW)
async def test_persist_works_in_a_running_handler_only(sim: Sim) -> None:
    LOG.clear()
    await sim.ref(Account, "a").ask(Account.pay_from_outside)
    await sim.advance(2)
    assert LOG[-1] == "a durable entity reads and stores inside a running handler only"
    assert sim.events(Account, "a") == []


def test_an_account_made_by_hand_cannot_persist() -> None:
    account = Account()
    for use in (account.persist(Paid(1)), account.state()):
        with pytest.raises(RuntimeError):
            asyncio.run(_await(use))


async def _await(use: Any) -> None:
    await use


def test_a_definition_without_a_fold_is_explained() -> None:
    class Bare(EventSourced[int, Paid]): ...

    with pytest.raises(ConfigError, match="needs a static method initial"):
        Bare.initial("x")
    with pytest.raises(ConfigError, match="needs a static method apply"):
        Bare.apply(0, Paid(1))


def test_event_classes_are_checked_with_the_class() -> None:
    with pytest.raises(ConfigError, match="an event type must be a class"):
        types.new_class("Odd", (EventSourced[int, "Paid"],))
    with pytest.raises(ConfigError, match="two event classes are named 'Paid'"):
        EventCodec("Odd", (Paid, type("Paid", (), {})))


def test_events_are_stored_by_class_name_and_fields() -> None:
    codec = EventCodec("Account", (Paid, Closed))
    for event in (Paid(3), Closed("x"), Closed()):
        assert codec.decode(codec.encode(event)) == event
    with pytest.raises(ConfigError, match="an event 'Closed' that this version of Account lacks"):
        EventCodec("Account", (Paid,)).decode(codec.encode(Closed()))


# keys


@simulated(entities=[Account], nodes=3, seeds=SEEDS, settings=FEW)
async def test_the_same_key_gives_the_stored_reply_and_one_effect(sim: Sim) -> None:
    LOG.clear()
    account = sim.ref(Account, "a")
    keyed = account.options(key="k1")
    assert await keyed.ask(Account.pay, 5) == 5
    await account.ask(Account.pay, 1)
    assert await keyed.ask(Account.pay, 5) == 5
    await move(sim, "a")
    assert await keyed.ask(Account.pay, 5) == 5
    await crash(sim, "a")
    assert await keyed.ask(Account.pay, 5) == 5
    assert await account.options(key="k2").ask(Account.pay, 5) == 11
    assert sim.events(Account, "a") == [Paid(5), Paid(1), Paid(5)]
    assert LOG.count(("pay", 5)) == 2, "a repeated key runs no handler"


@simulated(entities=[Account], nodes=2, seeds=SEEDS, settings=FEW)
async def test_keys_belong_to_one_entity(sim: Sim) -> None:
    LOG.clear()
    for id in ("a", "b"):
        assert await sim.ref(Account, id).options(key="k").ask(Account.pay, 5) == 5


@simulated(entities=[Account], nodes=1, seeds=1, settings=FEW)
async def test_a_key_or_an_id_that_a_journal_cannot_hold_is_refused(sim: Sim) -> None:
    account = sim.ref(Account, "a")
    assert await account.options(key="k" * 512).ask(Account.pay, 5) == 5
    with pytest.raises(ConfigError, match="has 513 characters; the limit is 512"):
        account.options(key="k" * 513)
    with pytest.raises(ConfigError, match="NUL character"):
        account.options(key="k\0")
    with pytest.raises(ConfigError, match="NUL character"):
        sim.ref(Account, "a\0")


@simulated(entities=[Account], nodes=2, seeds=SEEDS, settings=FEW)
async def test_a_keyed_handler_sees_what_it_persisted(sim: Sim) -> None:
    LOG.clear()
    account = sim.ref(Account, "a")
    assert await account.options(key="k").ask(Account.pay_twice, 2) == (2, 2, 6)
    assert await account.options(key="k").ask(Account.pay_twice, 2) == (2, 2, 6)
    assert sim.events(Account, "a") == [Paid(2)] * 3


@simulated(entities=[Account], nodes=2, seeds=SEEDS, settings=FEW)
async def test_a_keyed_handler_that_fails_leaves_no_trace(sim: Sim) -> None:
    """One transaction: its events, its key and its reply, or none of them."""
    LOG.clear()
    account = sim.ref(Account, "a")
    with pytest.raises(HandlerFailed, match="after persist"):
        await account.options(key="k").ask(Account.pay_and_fail, 3)
    with pytest.raises(Empty):
        await account.options(key="k").ask(Account.take, 3)
    assert sim.events(Account, "a") == []
    assert await account.options(key="k").ask(Account.pay, 4) == 4
    assert await account.ask(Account.balance) == 4


@simulated(entities=[Account], nodes=2, seeds=4, settings=FEW)
async def test_lost_journal_replies_change_no_effect_of_a_keyed_ask(sim: Sim) -> None:
    LOG.clear()
    account = sim.ref(Account, "a")
    home_journal(sim, "a").lost_reply = 0.5
    for number in range(5):
        keyed = account.options(key=f"k{number}", timeout_s=60)
        await retried(lambda keyed=keyed: keyed.ask(Account.pay, 1))  # type: ignore[misc]
    home_journal(sim, "a").lost_reply = 0.0
    assert await account.ask(Account.balance) == 5
    assert sim.events(Account, "a") == [Paid(1)] * 5


@simulated(entities=[Account], nodes=2, seeds=SEEDS, settings=FEW)
async def test_a_journal_that_never_answers_means_maybe_executed(sim: Sim) -> None:
    """J4: and the entity forgets its memory before it goes on."""
    LOG.clear()
    account = sim.ref(Account, "a").options(timeout_s=60)
    assert await account.ask(Account.pay, 1) == 1
    home_journal(sim, "a").lost_reply = 1.0
    with pytest.raises(MaybeExecuted):
        await account.ask(Account.pay, 2)
    home_journal(sim, "a").lost_reply = 0.0
    assert await account.ask(Account.balance) == 3
    assert sim.events(Account, "a") == [Paid(1), Paid(2)]


@simulated(entities=[Account], nodes=2, seeds=SEEDS, settings=FEW)
async def test_a_write_that_never_arrived_is_sent_again(sim: Sim) -> None:
    """J4: once settled, it can't come late, so its caller need not hear of it."""
    LOG.clear()
    account = sim.ref(Account, "a").options(timeout_s=60)
    assert await account.ask(Account.pay, 1) == 1
    home_journal(sim, "a").lost_request = 1.0
    async with asyncio.TaskGroup() as group:
        ask = group.create_task(account.ask(Account.pay, 2))
        await sim.advance(1.0)
        home_journal(sim, "a").lost_request = 0.0
    assert ask.result() == 3
    assert sim.events(Account, "a") == [Paid(1), Paid(2)]
    [settled] = [e.fields for e in sim.history.events if e.kind == "settle"]
    last = [e.fields for e in sim.history.events if e.kind == "append"][-1]
    assert settled["how"] == "void"
    assert last["batch"] > settled["batch"]


@simulated(entities=[Account], nodes=1, seeds=SEEDS, settings=FEW)
async def test_what_many_entities_persist_at_once_is_written_together(sim: Sim) -> None:
    """J3: the writes of all that wait, over all shards, are one transaction."""
    LOG.clear()
    for _ in range(3):
        async with asyncio.TaskGroup() as group:
            for number in range(60):
                group.create_task(sim.ref(Account, f"{number}").ask(Account.pay, 1))
    writes = [e.fields for e in sim.history.events if e.kind == "append" and e.fields["ok"]]
    assert len(writes) == 180
    batches = {write["batch"]: 0 for write in writes}
    assert len(batches) < 90
    assert all(sim.events(Account, f"{number}") == [Paid(1)] * 3 for number in range(60))


@simulated(entities=[Account], nodes=3, seeds=4, settings=FEW)
async def test_a_keyed_ask_survives_the_crash_of_its_home(sim: Sim) -> None:
    LOG.clear()
    account = sim.ref(Account, "a")
    for number in range(3):
        keyed = account.options(key=f"k{number}")
        async with asyncio.TaskGroup() as group:
            ask = group.create_task(retried(lambda keyed=keyed: keyed.ask(Account.pay, 1)))  # type: ignore[misc]
            await sim.advance(sim.random.uniform(0.001, 0.01))
            if number < 2:
                sim.crash(sim.owner(Account, "a"))
        assert ask.result() == number + 1
        await sim.wait_until(sim.settled)
    assert sim.events(Account, "a") == [Paid(1)] * 3


# told after stored


@simulated(entities=[Account, Witness], nodes=2, seeds=SEEDS, settings=FEW)
async def test_a_keyed_handlers_events_commit_before_its_tell_leaves(sim: Sim) -> None:
    """I4."""
    LOG.clear()
    keyed = sim.ref(Account, "a").options(key="k")
    assert await keyed.ask(Account.pay_and_tell, 5, "w") == 5
    appends = [e for e in sim.history.events if e.kind == "append"]
    sent = [e for e in sim.history.events if e.kind == "submit" and e.fields["method"] == "hear"]
    assert [(e.fields["count"], e.fields["keys"], e.fields["ok"]) for e in appends] == [
        (1, ["k"], True), (0, [], True),
    ]  # fmt: skip
    assert appends[0].at < sent[0].at < appends[1].at
    assert await keyed.ask(Account.pay_and_tell, 5, "w") == 5
    await sim.advance(1)
    assert LOG.count(("heard", "a")) == 1
    assert sim.events(Account, "a") == [Paid(5)]


@simulated(entities=[Account, Witness], nodes=2, seeds=SEEDS, settings=FEW)
async def test_a_keyed_handler_may_go_on_persisting_after_it_sent_something(sim: Sim) -> None:
    """The key is stored with the first events, its reply with the last."""
    LOG.clear()
    keyed = sim.ref(Account, "a").options(key="k")
    for _ in range(2):
        assert await keyed.ask(Account.pay_tell_and_pay, 5, "w") == 15
    assert sim.events(Account, "a") == [Paid(5)] * 3
    appends = [e.fields for e in sim.history.events if e.kind == "append"]
    assert [(one["count"], one["keys"], one["ok"]) for one in appends] == [
        (1, ["k"], True), (1, [], True), (1, [], True),
    ]  # fmt: skip
    await sim.wait_until(lambda: LOG.count(("heard", "a")) == 2)


@simulated(entities=[Account, Witness], nodes=3, seeds=SEEDS, settings=FEW)
async def test_a_key_whose_reply_was_never_stored_says_so(sim: Sim) -> None:
    """Its effects stand, so running it again would double them."""
    LOG.clear()
    account = sim.ref(Account, "a")
    keyed = account.options(key="k")
    async with asyncio.TaskGroup() as group:
        ask = group.create_task(_outcome(keyed.ask(Account.pay_ask_and_hang, 5, "w")))
        await sim.wait_until(lambda: "hanging" in LOG)
        await crash(sim, "a")
    assert isinstance(ask.result(), MaybeExecuted)
    with pytest.raises(HandlerFailed, match="read the state instead"):
        await keyed.ask(Account.pay_ask_and_hang, 5, "w")
    assert await account.ask(Account.balance) == 5


async def _outcome(ask: Any) -> Any:
    try:
        return await ask
    except (NotExecuted, MaybeExecuted) as error:
        return error


# fences


async def outclaim(sim: Sim, id: str) -> int:
    """Someone claims an account's shard under a newer epoch, and its home does not know: which."""
    shard = sim.shard(Account, id)
    epoch = sim.entry(shard).epoch + 1
    claimed: asyncio.Future[Any] = sim.loop.create_future()

    async def claim() -> None:
        result = await sim.servers.journal.claim([Claim(shard, 0, epoch, Incarnation("0" * 32))])
        sim.loop.post(lambda: claimed.set_result(result))

    sim.servers.journal_loop.create_task(claim())
    assert await claimed == [None]
    return epoch


@simulated(entities=[Account], nodes=2, seeds=SEEDS, settings=FEW)
async def test_a_fenced_write_commits_nothing_and_drops_the_shard(sim: Sim) -> None:
    """I2, J2: it is dropped as after a fenced claim, and its next epoch is above the thief's."""
    LOG.clear()
    account = sim.ref(Account, "a")
    assert await account.ask(Account.pay, 1) == 1
    epoch = await outclaim(sim, "a")
    with pytest.raises(MaybeExecuted, match="newer home"):
        await account.ask(Account.pay, 2)
    assert sim.events(Account, "a") == [Paid(1)]
    # Nothing in memory outlives it either: the next answer comes from a home with a newer epoch.
    assert await account.ask(Account.balance) == 1
    assert sim.entry(sim.shard(Account, "a")).epoch > epoch
    assert await account.ask(Account.pay, 2) == 3
    assert sim.events(Account, "a") == [Paid(1), Paid(2)]


@simulated(entities=[Account], nodes=2, seeds=SEEDS, settings=FEW)
async def test_a_fence_found_while_settling_drops_the_shard_too(sim: Sim) -> None:
    """J4: whether the write was there before the thief came is never to be known."""
    LOG.clear()
    account = sim.ref(Account, "a").options(timeout_s=60)
    assert await account.ask(Account.pay, 1) == 1
    home_journal(sim, "a").lost_request = 1.0
    async with asyncio.TaskGroup() as group:
        ask = group.create_task(_outcome(account.ask(Account.pay, 2)))
        await sim.advance(1.0)
        epoch = await outclaim(sim, "a")
        home_journal(sim, "a").lost_request = 0.0
    assert isinstance(ask.result(), MaybeExecuted)
    assert "newer home" not in str(ask.result())
    assert await account.ask(Account.balance) == 1
    assert sim.entry(sim.shard(Account, "a")).epoch > epoch


@simulated(entities=[Account], nodes=3, seeds=4, settings=FEW)
async def test_a_frozen_home_commits_nothing_after_its_successor(sim: Sim) -> None:
    """I2, I1(b)."""
    LOG.clear()
    account = sim.ref(Account, "a")
    old = sim.owner(Account, "a")
    async with asyncio.TaskGroup() as group:
        slow = group.create_task(
            _outcome(account.options(timeout_s=60).ask(Account.pay_slowly, 100, 0.5))
        )
        await sim.wait_until(lambda: "slow" in LOG)
        sim.freeze(old)
        await sim.wait_until(lambda: sim.owner(Account, "a") != old)
        assert await retried(lambda: account.ask(Account.pay, 1)) == 1
        sim.thaw(old)
    assert isinstance(slow.result(), MaybeExecuted)
    await sim.advance(5)
    assert sim.events(Account, "a") == [Paid(1)]
