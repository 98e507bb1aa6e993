"""The life of a group of real servers: guard, agent and server are processes of their own.

The whole of it, on each database and on stores that are servers, is in `tests/replica`.
"""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from replica_lab import ReplicaGroup, play
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


MAY_RUN_FIRST = "import os; os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(1))"


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux has these priorities")
def test_a_guard_runs_first_and_what_it_starts_does_not() -> None:
    """On a machine that is much too busy it comes to its deadline in time."""
    if subprocess.run([sys.executable, "-c", MAY_RUN_FIRST], stderr=subprocess.DEVNULL).returncode:
        pytest.skip("this user may not change priorities (CAP_SYS_NICE)")

    async def scenario(group: ReplicaGroup) -> None:
        await group.whole()
        for machine in group.machines:
            assert machine.run is not None
            policy = os.sched_getscheduler(machine.run.pid)
            assert policy == os.SCHED_RR | os.SCHED_RESET_ON_FORK
            for what in ("agent", "server"):
                assert os.sched_getscheduler(machine.pid(what)) == os.SCHED_OTHER

    play(scenario, 2)
