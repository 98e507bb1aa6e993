"""An application that follows the primary of a replica group, and tells each change."""

from __future__ import annotations

import asyncio
import sys

from domicile import connect

STORE = "sqlite:///.domicile/orders.db"


async def main(changes: int) -> None:
    """Tell the primary of now, and so many changes; all of them if the number is negative."""
    async with connect(STORE) as client:
        orders = client.group("orders")
        print(f"asked: {(await orders.primary()).address}", flush=True)
        async for primary in orders.primaries():
            print(f"epoch {primary.epoch}: {primary.address}", flush=True)
            if not changes:
                return
            changes -= 1


if __name__ == "__main__":
    asyncio.run(main(int(sys.argv[1]) if sys.argv[1:] else -1))
