"""Ray: one actor, called from another driver. An actor is a process, so there is only one."""

from __future__ import annotations

import asyncio
import os
import shutil
import tempfile
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Any

# On loopback only, so it needs no token, which it would leave in the user's home.
os.environ.update(RAY_USAGE_STATS_ENABLED="0", RAY_AUTH_MODE="disabled")

import ray

from proving.benchmarks.caller import PAYLOAD, Caller

LOOPBACK = "127.0.0.1"
SPACE, NAME = "bench", "echo"


class Echo:
    """Gives back, and counts."""

    def __init__(self) -> None:
        self.count = 0

    def echo(self, data: bytes) -> bytes:
        """Give it back."""
        return data

    def note(self, data: bytes) -> None:
        """Be told."""
        self.count += 1

    def counted(self) -> int:
        """How many; behind all that the same caller sent before."""
        return self.count


class Actor(Caller):
    """A handle of the actor."""

    def __init__(self, actor: Any) -> None:
        self._actor = actor

    async def ask(self, number: int) -> None:
        """Call, and await the object that it makes."""
        await self._actor.echo.remote(PAYLOAD)

    async def send(self, first: int, count: int) -> None:
        """Call, and forget the object."""
        for _ in range(count):
            self._actor.note.remote(PAYLOAD)

    async def confirm(self, total: int) -> None:
        """An actor runs the calls of one caller in order."""
        await self._actor.counted.remote()


def _init(**options: Any) -> Any:
    return ray.init(log_to_driver=False, logging_level="error", namespace=SPACE, **options)


@asynccontextmanager
async def server(options: dict[str, Any]) -> AsyncGenerator[tuple[str, dict[str, Any]]]:
    """A cluster of this machine with the actor in it."""
    # Sockets are below it, and their paths must be short.
    place = tempfile.mkdtemp(prefix="ray-")
    try:
        context = await asyncio.to_thread(
            _init, num_cpus=2, include_dashboard=False, _temp_dir=place,
            _node_ip_address=LOOPBACK, object_store_memory=100 * 1024 * 1024,
        )  # fmt: skip
        actor = ray.remote(Echo).options(name=NAME).remote()
        await actor.counted.remote()
        yield context.address_info["gcs_address"], {}
    finally:
        ray.shutdown()
        shutil.rmtree(place, ignore_errors=True)


@asynccontextmanager
async def client(options: dict[str, Any]) -> AsyncGenerator[tuple[str, dict[str, Any]]]:
    """Another driver."""
    await asyncio.to_thread(_init, address=options["where"], _node_ip_address=LOOPBACK)
    try:
        actor = Actor(ray.get_actor(NAME))
        await actor.ask(0)
        yield options["where"], {"ray": actor}
    finally:
        ray.shutdown()


PARTS = {"server": server, "client": client}
