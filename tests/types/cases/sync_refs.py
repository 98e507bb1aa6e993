"""Clients for plain threads: the same types as refs, without `await`."""

from __future__ import annotations

from typing import assert_type

from model import Account, Door

from domicile import SyncClient, SyncRef, connect_sync


def calls(client: SyncClient) -> None:
    account = client.ref(Account, "alice")
    assert_type(account, SyncRef[Account])
    assert_type(account.ask(Account.deposit, 5), int)
    assert_type(account.options(timeout_s=0.05).ask(Account.owner), str)
    account.tell(Account.deposit, amount=5)
    with connect_sync("sqlite:///x.db", cluster="blue", token="secret") as other:
        assert_type(other, SyncClient)


def misuse(account: SyncRef[Account]) -> None:
    account.ask(Account.deposit, "5")  # E: arg-type
    account.ask(Account.deposit)  # E: call-arg
    account.ask(Door.open)  # E: arg-type
    account.tell(Account.deposit, 5, memo="rent")  # E: call-arg
    account.ask("deposit", 5)  # E: arg-type
    number: int = account.ask(Account.owner)  # E: assignment
    print(number)
