"""casty: a node of a cluster that loses nodes, and a client that asks who is home."""

from __future__ import annotations

import asyncio
import os
import socket
import time
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from casty import ActorSystem, Askable, Client, Cluster, Context, Limits, actor

LONG = timedelta(hours=1)
TRY_S = 0.25


@dataclass(frozen=True)
class Who(Askable[int]):
    """In which process do you live?"""


@actor(initial=0, idle_after=LONG)
async def room(ctx: Context[int, Who]) -> None:
    """Knows its process."""
    async for message in ctx.inbox:
        message.reply_to.tell(os.getpid())


class Asker:
    """Finds keys by their home, and says when one answers again."""

    def __init__(self, client: Any) -> None:
        self._client = client

    async def run(self, wanted: dict[str, Any]) -> dict[str, Any]:
        """One wish: `find` a key that lives in a process, or wait until it is `answered`."""
        if wanted["what"] == "find":
            for number in range(10_000):
                key = f"room-{number}"
                if await self._ask(key) == wanted["pid"]:
                    return {"key": key}
            raise NotImplementedError("no key lives there")
        while True:
            try:
                pid = await self._ask(wanted["key"])
            except asyncio.CancelledError:
                raise
            except Exception:
                await asyncio.sleep(0.01)
                continue
            if pid != wanted["pid"]:
                return {"at": time.monotonic()}

    async def _ask(self, key: str) -> int:
        return int(await self._client.ref(room, key).ask(Who()))


@asynccontextmanager
async def node(options: dict[str, Any]) -> AsyncGenerator[tuple[str, dict[str, Any]]]:
    """One of several, with casty's defaults."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        where = f"127.0.0.1:{free.getsockname()[1]}"
    seeds = (options["where"],) if options["where"] else ()
    async with ActorSystem(cluster=Cluster(bind=where, seeds=seeds)):
        yield where, {}


@asynccontextmanager
async def client(options: dict[str, Any]) -> AsyncGenerator[tuple[str, dict[str, Any]]]:
    """A client that does not wait long for one answer."""
    async with Client(
        seeds=(options["where"],), limits=Limits(), ask_timeout=timedelta(seconds=TRY_S)
    ) as connected:
        yield options["where"], {"casty": Asker(connected)}


PARTS = {"node": node, "client": client}
