"""Misuse of `ask`: every marked line must be an error, and no other."""

from __future__ import annotations

from model import Account, Door, NotAnEntity, Savings

from domicile import Ref


async def arguments(account: Ref[Account]) -> None:
    await account.ask(Account.deposit, "5")  # E: arg-type
    await account.ask(Account.deposit)  # E: call-arg
    await account.ask(Account.deposit, 5, "rent")  # E: call-arg
    await account.ask(Account.deposit, 5, memo="rent")  # E: call-arg
    await account.ask(Account.deposit, 5, note=7)  # E: arg-type
    await account.ask(Account.owner, 1)  # E: call-arg


async def methods(account: Ref[Account], savings: Ref[Savings]) -> None:
    await account.ask(Door.open)  # E: arg-type
    await account.ask(NotAnEntity.deposit, 5)  # E: arg-type
    await account.ask(Savings.interest, 0.5)  # E: arg-type
    await account.ask(Savings.deposit, 5)  # E: arg-type
    await savings.ask(Door.open)  # E: arg-type
    await account.ask("deposit", 5)  # E: arg-type


async def replies(account: Ref[Account]) -> None:
    name: str = await account.ask(Account.deposit, 5)  # E: arg-type
    number: int = await account.ask(Account.owner)  # E: arg-type
    print(name, number)
    (await account.ask(Account.owner)).bit_length()  # E: attr-defined


async def forgotten(account: Ref[Account]) -> None:
    account.ask(Account.deposit, 5)  # E: unused-coroutine
    account.tell(Account.deposit, 5)  # E: unused-coroutine
    print(account.ask(Account.owner).upper())  # E: attr-defined
