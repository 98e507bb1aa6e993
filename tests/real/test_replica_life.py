"""The life of a group of real servers: guard, agent and server are processes of their own.

The whole of it, on each database and on stores that are servers, is in `tests/replica`.
"""

from __future__ import annotations

import pytest
from replica_lab import play
from replica_scenarios import (
    frozen_processes_leave_no_server_open,
    outlives_what_is_killed,
    replaces_a_primary_whose_agent_stands_still,
)


@pytest.mark.scenario("FO-01", "FO-08", "FO-21")
@pytest.mark.scenario("FO-03", "FO-05", partial=True)
def test_a_group_outlives_what_is_killed_of_it() -> None:
    play(outlives_what_is_killed)


@pytest.mark.scenario("FO-21")
@pytest.mark.scenario("FO-10", partial=True)
def test_frozen_processes_leave_no_server_open() -> None:
    play(frozen_processes_leave_no_server_open)


@pytest.mark.scenario("FO-03", "FO-08", "FO-21", partial=True)
def test_a_group_of_postgresql_replaces_its_primary() -> None:
    play(replaces_a_primary_whose_agent_stands_still, 2, kind="postgresql")
