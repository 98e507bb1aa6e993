"""Pay into an account, or out of it: `python pay.py alice 100`."""

from __future__ import annotations

import asyncio
import sys

from bank import STORE, Account, Overdrawn

from domicile import connect


async def main(name: str, amount: int) -> None:
    """Wherever the account is at home; a home that is lost is waited for."""
    async with connect(STORE) as client:
        account = client.ref(Account, name).options(timeout_s=50)
        try:
            print(f"{name} has {await account.ask(Account.pay, amount)}")
        except Overdrawn as refusal:
            print(f"{name} has only {refusal.args[0]}")


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit("usage: python pay.py NAME AMOUNT")
    asyncio.run(main(sys.argv[1], int(sys.argv[2])))
