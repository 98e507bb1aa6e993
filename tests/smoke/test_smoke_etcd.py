"""Smoke: two real nodes and a client on an etcd server; one is killed, and the other serves on."""

from __future__ import annotations

import asyncio

from etcd_lab import shared_server
from smoke_lab import a_process_is_killed


def test_a_killed_process_is_replaced() -> None:
    asyncio.run(a_process_is_killed(shared_server().url("smoke")))
