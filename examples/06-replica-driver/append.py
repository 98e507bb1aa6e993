"""Append a line at the group's primary: python append.py TEXT"""

from __future__ import annotations

import asyncio
import sys

import linelog

from domicile import connect


async def main() -> None:
    async with connect("sqlite:///.domicile/lines.db") as client:
        primary = await client.group("lines").primary(wait_s=30)
    await linelog.ask(primary.address, f"APPEND {sys.argv[1]}")
    print(f"{primary.server}: {(await linelog.ask(primary.address, 'READ'))['lines']}")


asyncio.run(main())
