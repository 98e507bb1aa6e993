"""What must type-check, with the types that must be inferred."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, assert_type

from model import Account, Door, Savings

from domicile import (
    Client,
    Durable,
    Entity,
    Erasure,
    EventSourced,
    Forgettable,
    Ref,
    Region,
    blocking,
    by_message,
    handler,
    murmur2,
    shardcake,
    xxh3,
)
from domicile.testing import given


async def calls(client: Client) -> None:
    account = client.ref(Account, "alice")
    assert_type(account, Ref[Account])
    assert_type(account.id, str)
    assert_type(await account.ask(Account.deposit, 5), int)
    assert_type(await account.ask(Account.deposit, amount=5, note="rent"), int)
    assert_type(await account.ask(Account.owner), str)
    await account.ask(Account.close)
    await account.tell(Account.deposit, 5)
    assert_type(await account.options(timeout_s=0.05).ask(Account.owner), str)
    assert_type(account.options(key="r1", timeout_s=1), Ref[Account])
    assert_type(await client.ref(Door, "front").ask(Door.open), bool)


async def derived(savings: Ref[Savings]) -> None:
    assert_type(await savings.ask(Account.deposit, 5), int)
    assert_type(await savings.ask(Savings.deposit, 5), int)
    assert_type(await savings.ask(Savings.interest, 0.5), float)


def by_tenant(entity_id: str, shards: int) -> int:
    return murmur2(entity_id.partition("/")[0], shards)


class Tenant(Entity, shard_id=by_tenant):
    pass


class Cake(Entity, shard_id=shardcake):
    pass


class Usual(Entity, shard_id=xxh3):
    pass


class Parcel(Entity, shard_id=by_message):
    pass


class Sums(Entity, carry=True, idle_s=None):
    last: float = 0.0

    @blocking
    def total(self, numbers: list[float]) -> float:
        return sum(numbers)

    @handler(timeout_s=1)
    @blocking
    def count(self, numbers: list[float]) -> int:
        return len(numbers)

    @handler
    async def mean(self, numbers: list[float]) -> float:
        self.after(1, self.total, numbers)
        return await self.total(numbers) / await self.count(numbers)


async def threads(sums: Ref[Sums]) -> None:
    assert_type(await sums.ask(Sums.total, [1.0]), float)
    assert_type(await sums.ask(Sums.count, numbers=[1.0]), int)
    await sums.tell(Sums.total, [1.0])


async def regions(client: Client) -> None:
    region = client.region(Account, entity_id=lambda message: message.account)
    assert_type(region, Region[Account])
    assert_type(await region.ask("anything"), Any)
    await region.send(("anything", 1))
    parcels = client.region(
        Parcel, entity_id=lambda message: message.id, shard_id=lambda message, shards: shards - 1
    )
    assert_type(parcels, Region[Parcel])


async def inside(account: Account) -> None:
    door = account.ref(Door, "front")
    assert_type(await door.ask(Door.open), bool)
    assert_type(account.resource(dict[str, int]), dict[str, int])


@dataclass(frozen=True)
class Registered:
    email: Forgettable[str]


@dataclass(frozen=True)
class Left:
    pass


class Visits(EventSourced[int, Registered | Left], name="visits"):
    @handler
    async def register(self, email: str) -> int:
        receipt = await self.erase()
        assert_type(receipt, Erasure)
        assert_type(receipt.values, int)
        async with self.fenced(None):
            pass
        event = Registered(Forgettable(email))
        assert_type(event.email, Forgettable[str])
        assert_type(event.email.value, str | None)
        return await self.persist(event)


class Setting(Durable[str], name="setting"):
    @handler
    async def set(self, value: str) -> bool:
        await self.save(value)
        return True


def kit() -> None:
    outcome = given(Visits, "v", Registered(Forgettable("a"))).when(Visits.register, "b")
    assert_type(outcome.reply, int)
    assert_type(outcome.state, int)
    assert_type(outcome.events, list[Registered | Left])
    outcome.then(events=[Registered(Forgettable("b"))], reply=2, state=3)
    assert_type(given(Setting, "s", state="x").when(Setting.set, "y").then(reply=True).state, str)
