"""What the agents of a real group answer over HTTP, while its primary is killed (FO-17)."""

from __future__ import annotations

import asyncio
import re
import urllib.error
import urllib.request

import pytest
from replica_lab import Machine, ReplicaGroup, play


def ask(machine: Machine, path: str) -> tuple[int, str]:
    """What its newest agent answers; 0: nobody does."""
    found = re.findall(r"metrics and answers at (http://\S+)", machine.log)
    if not found:
        return 0, ""
    try:
        with urllib.request.urlopen(f"{found[-1]}{path}", timeout=30) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()
    except OSError:
        return 0, ""


async def codes(group: ReplicaGroup, path: str) -> dict[str, int]:
    return {one.name: (await asyncio.to_thread(ask, one, path))[0] for one in group.machines}


@pytest.mark.scenario("FO-17")
def test_each_agent_says_whether_its_server_is_the_primary() -> None:
    async def scenario(group: ReplicaGroup) -> None:
        state = await group.whole()
        old = group.machine(state.primary_server)
        other = group.others(old.name)[0]

        async def told(primary: Machine, replica: Machine) -> bool:
            writes, reads = await codes(group, "/primary"), await codes(group, "/replica")
            assert list(writes.values()).count(200) <= 1
            return (writes, reads) == (
                {primary.name: 200, replica.name: 503},
                {primary.name: 503, replica.name: 200},
            )

        await group.until(lambda: told(old, other), "the agents answer")
        assert ask(old, "/primary") == (200, f"{old.address}\n")
        assert ask(other, "/healthz")[0] == 200
        lines = ask(other, "/metrics")[1].splitlines()
        assert "domicile_group_served 1" in lines
        assert f'domicile_group_healthy{{server="{other.name}"}} 1' in lines
        assert any(one.startswith("domicile_group_would_lose_bytes ") for one in lines)

        await group.kill(old)
        await group.serves(state.epoch + 1, by=other.name)

        async def moved() -> bool:
            return await codes(group, "/primary") == {old.name: 0, other.name: 200}

        await group.until(moved, "the next primary answers")
        group.start(old)
        await group.whole(state.epoch + 1)
        await group.until(lambda: told(other, old), "the old primary answers as a replica")

        # Its counters are those of the process, over all incarnations: none is dropped.
        state = await group.whole(state.epoch + 1)
        await group.freeze(other, "agent")
        await group.serves(state.epoch + 1, by=old.name)
        other.thaw()

        async def counted() -> bool:
            text = (await asyncio.to_thread(ask, other, "/metrics"))[1]
            return "domicile_lease_fenced_total 1" in text.splitlines()

        await group.until(counted, "the lease that was lost is counted")
        await group.until(lambda: told(old, other), "each agent answers again")

    play(scenario, 2, more='http = "127.0.0.1:0"')
