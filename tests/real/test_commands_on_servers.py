"""The commands that operate a cluster, on each kind of server, with nodes that run."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import Callable

import etcd_lab
import postgres_lab
import pytest
import redis_lab

from domicile import Entity, Node, Settings, handler

SETTINGS = Settings(shards=8, ttl_s=6.0, ask_timeout_s=60.0)
PATIENCE_S = 60.0

STORES: dict[str, Callable[[], str]] = {
    "postgresql": lambda: postgres_lab.shared_server().new_database(),
    "etcd": lambda: etcd_lab.shared_server().new_database(),
    "redis": lambda: redis_lab.shared().new_database(),
}


class Guest(Entity, name="commands.guest"):
    """Lives where a command asks."""

    @handler
    async def greet(self) -> int:
        return self.epoch


async def domicile(*words: str, code: int = 0) -> str:
    """What a command prints; it must end with that code."""
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-m", "domicile", *words]
    done = await asyncio.to_thread(
        subprocess.run, command, capture_output=True, text=True, env=environ, check=False
    )
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout


@pytest.mark.parametrize("kind", STORES)
def test_commands_that_look_and_that_wish_work_on_each_server(kind: str) -> None:
    url = STORES[kind]()

    async def main() -> None:
        async with (
            Node(url, entities=[Guest], settings=SETTINGS, node_id="one") as one,
            Node(url, entities=[Guest], settings=SETTINGS, node_id="two"),
        ):
            await one.ref(Guest, "g").ask(Guest.greet)

            status = json.loads(await domicile("status", url, "--json"))
            assert {node["node"] for node in status["nodes"]} == {"one", "two"}

            home = json.loads(await domicile("where", "commands.guest", "g", url, "--json"))
            assert home["node"] in ("one", "two")

            said = await domicile("inspect", "one", url)
            assert "one" in said
            said = await domicile("inspect", "commands.guest", "g", url)
            assert "commands.guest" in said

            await domicile("drain", "two", url, "--wait", str(PATIENCE_S))
            home = json.loads(await domicile("where", "commands.guest", "g", url, "--json"))
            assert home["node"] == "one"
            await domicile("drain", "two", url, "--undo")

            await domicile("target", url)
            said = await domicile("doctor", url)
            assert "2 nodes" in " ".join(said.split())
            assert "error" not in said

    asyncio.run(main())
