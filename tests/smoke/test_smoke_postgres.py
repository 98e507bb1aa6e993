"""Smoke: two real nodes and a client on PostgreSQL; one is killed, and the other serves on.

What else real processes must show is in `tests/real`; this one runs with every `make test`.
"""

from __future__ import annotations

import asyncio

from postgres_lab import shared_server
from smoke_lab import a_process_is_killed


def test_a_killed_process_is_replaced() -> None:
    asyncio.run(a_process_is_killed(shared_server().new_database(), judged=True))
