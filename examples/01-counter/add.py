"""Ask counters to count: `python add.py visits 5`."""

from __future__ import annotations

import asyncio
import sys

from counter import STORE, Counter

from domicile import NotExecuted, connect


async def main(name: str, amount: int) -> None:
    """Wherever the counter is at home."""
    async with connect(STORE) as client:
        print(f"{name} is at {await client.ref(Counter, name).ask(Counter.add, amount)}")


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit("usage: python add.py NAME AMOUNT")
    try:
        asyncio.run(main(sys.argv[1], int(sys.argv[2])))
    except NotExecuted as error:
        sys.exit(f"nothing was counted: {error}")
