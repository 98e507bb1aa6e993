"""Real processes: what an entity hands to another one at the same home is not shared (SM-27)."""

from __future__ import annotations

import pytest
from real_lab import run

from domicile import Entity, Settings, handler
from domicile.testing import Processes

TEXT = "long enough to be no constant " * 10


class Desk(Entity, name="desk"):
    """Keeps what it is given."""

    def __init__(self) -> None:
        self.kept: list[int] = []

    @handler
    async def keep(self, given: list[int]) -> list[int]:
        self.kept = given
        return self.kept

    @handler
    async def look(self) -> list[int]:
        return self.kept

    @handler
    async def is_there(self, text: str, place: int) -> bool:
        """Whether a text lies where another one lay that is still alive."""
        return id(text) == place

    @handler
    async def give(self, to: str) -> list[int]:
        """Hand a list over and change it, and what came back, afterwards."""
        other, given = self.ref(Desk, to), [1]
        back = await other.ask(Desk.keep, given)
        given.append(2)
        back.append(3)
        return await other.ask(Desk.look)

    @handler
    async def compare(self, to: str) -> bool:
        """Whether another one is given the very same text."""
        text = TEXT + to
        return await self.ref(Desk, to).ask(Desk.is_there, text, id(text))


@pytest.mark.scenario("SM-27")
@pytest.mark.parametrize("serialize_local", [False, True])
def test_at_one_home_sends_are_coded_as_if_remote(serialize_local: bool) -> None:
    async def scenario() -> None:
        settings = Settings(shards=4, serialize_local=serialize_local)
        async with Processes([Desk], nodes=1, settings=settings) as cluster:
            desk = cluster.ref(Desk, "a")
            for _ in range(2):  # the first one starts the other entity
                assert await desk.ask(Desk.give, "b") == [1]
                assert await desk.ask(Desk.compare, "b") is not serialize_local

    run(scenario())
