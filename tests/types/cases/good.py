"""What must type-check, with the types that must be inferred."""

from __future__ import annotations

from typing import assert_type

from model import Account, Door, Savings

from domicile import Client, Ref


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


async def inside(account: Account) -> None:
    door = account.ref(Door, "front")
    assert_type(await door.ask(Door.open), bool)
    assert_type(account.resource(dict[str, int]), dict[str, int])
