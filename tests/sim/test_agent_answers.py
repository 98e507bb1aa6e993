"""What is answered beside each agent of a simulated group: at most one is the primary (FO-17)."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from http import HTTPStatus
from random import Random

import msgspec
import pytest

from domicile.failover.agent import Agent
from domicile.failover.answers import agent_pages
from domicile.failover.chains import ORIGIN
from domicile.failover.records import GroupConfig
from domicile.observe.http import Page
from domicile.observe.metrics import Metrics
from domicile.testing.groups.group import GroupMachineHost, SimGroup

Pages = dict[str, Callable[[], Page]]


def pages_of(machine: GroupMachineHost) -> Pages:
    def current() -> Agent | None:
        return machine.agent

    def now() -> float:
        # As the agent's own clock: a frozen process answers nobody.
        assert machine.loop is not None
        return machine.group.world.now

    return dict(agent_pages(current, Metrics(), now))


def answers(machines: list[GroupMachineHost], path: str) -> list[str]:
    """The servers whose agents say 200."""
    found: list[str] = []
    for machine in machines:
        loop = machine.loop
        if loop is not None and pages_of(machine)[path]().status is HTTPStatus.OK:
            found.append(machine.name)
    return found


@pytest.mark.scenario("FO-17", partial=True)
@pytest.mark.parametrize("seed", range(4))
def test_at_most_one_agent_says_that_its_server_is_the_primary(seed: int) -> None:
    group = SimGroup(seed, GroupConfig("sim", mode="sync" if seed % 2 else "async"))
    random = Random(seed)
    told: dict[str, int] = {}

    async def main() -> None:
        group.start()
        for number in range(3_000):
            await asyncio.sleep(0.02)
            primaries = answers(group.machines, "/primary")
            assert len(primaries) <= 1
            replicas = answers(group.machines, "/replica")
            assert not [name for name in replicas if name in primaries]
            if primaries:
                told[primaries[0]] = told.get(primaries[0], 0) + 1
            if number % 700 == 500 and primaries:
                victim = next(one for one in group.machines if one.name == primaries[0])
                random.choice((group.lose_machine, group.cut_store))(victim, 6.0)
        assert len(answers(group.machines, "/primary")) == 1
        assert len(answers(group.machines, "/replica")) == 2

    try:
        group.world.run(main(), group.world.process("test"))
    finally:
        group.world.close()
    assert len(told) > 1
    assert sum(told.values()) > 1_000


def test_a_replica_that_still_catches_up_is_not_one_for_reads() -> None:
    """FO-02: it follows the primary already, and what it answers is of an earlier epoch."""
    group = SimGroup(1, GroupConfig("sim"))
    told: list[Page] = []

    async def main() -> None:
        group.start()
        async with asyncio.timeout(30.0):
            while len(answers(group.machines, "/replica")) < 2:  # noqa: ASYNC110
                await asyncio.sleep(0.05)
        (name, _) = answers(group.machines, "/replica")
        machine = next(one for one in group.machines if one.name == name)
        assert machine.agent is not None
        members, me = machine.agent.machine.members, machine.agent.machine.me
        members[me] = msgspec.structs.replace(members[me], chain=ORIGIN, offset=0)
        told.append(pages_of(machine)["/replica"]())

    try:
        group.world.run(main(), group.world.process("test"))
    finally:
        group.world.close()
    assert told[0].status is HTTPStatus.SERVICE_UNAVAILABLE
    assert told[0].body.startswith("it still catches up with s")


def test_an_agent_that_has_not_joined_says_so() -> None:
    pages = agent_pages(lambda: None, Metrics(), lambda: 0.0)
    for path in ("/primary", "/replica"):
        page = pages[path]()
        assert page.status is HTTPStatus.SERVICE_UNAVAILABLE
        assert page.body == "the agent has not joined\n"
    assert pages["/metrics"]().status is HTTPStatus.OK
    assert pages["/healthz"]() == Page(HTTPStatus.OK, "the agent has not joined\n")


def test_the_metrics_beside_an_agent_are_those_of_its_group() -> None:
    group = SimGroup(1, GroupConfig("sim"))
    text: list[str] = []

    async def main() -> None:
        group.start()
        async with asyncio.timeout(30.0):
            while await group.settled():  # noqa: ASYNC110
                await asyncio.sleep(0.05)
        await asyncio.sleep(2.0)
        text.append(pages_of(group.machines[0])["/metrics"]().body)

    try:
        group.world.run(main(), group.world.process("test"))
    finally:
        group.world.close()
    lines = text[0].splitlines()
    assert "domicile_group_served 1" in lines
    assert "domicile_group_would_lose_bytes 0" in lines
    assert 'domicile_group_healthy{server="s3"} 1' in lines
