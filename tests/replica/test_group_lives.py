"""The lives of groups that `tests/real` plays on Valkey and SQLite, on every other pair.

By hand: `make test-replica`. Each test starts three servers, their guards and their agents.
"""

from __future__ import annotations

import pytest
from replica_lab import StoreName, play
from replica_scenarios import frozen_processes_leave_no_server_open, outlives_what_is_killed

OTHERS = pytest.mark.parametrize(
    ("kind", "store"),
    [
        ("valkey", "etcd"),
        ("postgresql", "sqlite"),
        ("postgresql", "etcd"),
        ("redis", "sqlite"),
        ("redis", "etcd"),
    ],
)


@pytest.mark.scenario("FO-01", "FO-08", "FO-21")
@pytest.mark.scenario("FO-03", "FO-05", partial=True)
@OTHERS
def test_a_group_outlives_what_is_killed_of_it(kind: str, store: StoreName) -> None:
    play(outlives_what_is_killed, kind=kind, store=store)


@pytest.mark.scenario("FO-21")
@pytest.mark.scenario("FO-10", partial=True)
@OTHERS
def test_frozen_processes_leave_no_server_open(kind: str, store: StoreName) -> None:
    play(frozen_processes_leave_no_server_open, kind=kind, store=store)
