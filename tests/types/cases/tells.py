"""Misuse of `tell`, of options and of what makes refs."""

from __future__ import annotations

from datetime import UTC, datetime

from model import Account, Door, NotAnEntity, Savings

from domicile import Client, Ref, Region


async def tells(account: Ref[Account]) -> None:
    await account.tell(Account.deposit, "5")  # E: arg-type
    await account.tell(Account.deposit)  # E: call-arg
    await account.tell(Account.deposit, 5, memo="rent")  # E: call-arg
    await account.tell(Door.open)  # E: arg-type
    await account.tell(Savings.interest, 0.5)  # E: arg-type


async def options(account: Ref[Account]) -> None:
    account.options(timeout=1.0)  # E: call-arg
    account.options(timeout_s="1")  # E: arg-type
    account.options(key=7)  # E: arg-type
    account.options(at=datetime.now(UTC))  # E: call-arg
    account.options(1.0)  # E: call-arg
    await account.options(timeout_s=1.0).ask(Door.open)  # E: arg-type


def refs(client: Client, account: Account) -> None:
    client.ref(NotAnEntity, "x")  # E: type-var
    client.ref("account", "x")  # E: arg-type
    client.ref(Account, 7)  # E: arg-type
    client.ref(Account)  # E: call-arg
    account.ref(NotAnEntity, "x")  # E: type-var
    door: Ref[Door] = client.ref(Account, "x")  # E: arg-type
    print(door)


async def regions(client: Client) -> None:
    client.region(NotAnEntity, entity_id=str)  # E: type-var
    client.region(Account)  # E: call-arg
    client.region(Account, entity_id=len)  # E: arg-type
    client.region(Account, str)  # E: call-arg
    client.region(Account, entity_id=str, shard_id=lambda message: 0)  # E: arg-type
    region = client.region(Account, entity_id=str)
    door: Region[Door] = region  # E: assignment
    await region.send()  # E: call-arg
    await region.ask("a", "b")  # E: call-arg
    region.send("a")  # E: unused-coroutine
    print(door)


def absent(account: Ref[Account]) -> None:
    print(account.deliver)  # E: attr-defined
    print(account.stream)  # E: attr-defined
