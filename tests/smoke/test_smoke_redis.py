"""Smoke: two real nodes and a client on a Valkey server; one is killed, and the other serves on."""

from __future__ import annotations

import asyncio

from redis_lab import server
from smoke_lab import a_process_is_killed


def test_a_killed_process_is_replaced() -> None:
    with server() as process:
        asyncio.run(a_process_is_killed(process.url, judged=True))
