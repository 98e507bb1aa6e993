"""Context variables that a handler sets are its own: no other message ever sees them."""

from __future__ import annotations

import asyncio
import decimal
from contextvars import ContextVar

import pytest

from domicile import Entity, Settings, handler
from domicile.entity.running.workers import Workers
from domicile.testing import Sim, simulated

colour: ContextVar[str] = ContextVar("colour", default="none")


class Painter(Entity, name="painter"):
    @handler
    async def paint(self, shade: str, before_s: float, after_s: float) -> str:
        """Set a variable, perhaps between two waits; what it was before."""
        if before_s:
            await asyncio.sleep(before_s)
        was = colour.get()
        colour.set(shade)
        if after_s:
            await asyncio.sleep(after_s)
        assert colour.get() == shade
        return was


@pytest.mark.parametrize("before_s", [0.0, 0.01])
@pytest.mark.parametrize("after_s", [0.0, 0.01])
@simulated(entities=[Painter], nodes=1, seeds=1, settings=Settings(shards=2))
async def test_no_handler_sees_what_another_one_set(
    sim: Sim, before_s: float, after_s: float
) -> None:
    """In one frame, behind each other in one mailbox, within a call, and later."""
    names = ["a", "b", "a", "c", "a"]
    for _ in range(2):
        seen = await asyncio.gather(
            *(sim.ref(Painter, n).ask(Painter.paint, n, before_s, after_s) for n in names)
        )
        assert seen == ["none"] * len(names)
    outcome: list[str] = []

    async def at_home(node: object) -> None:
        for name in names:
            ref = sim.node(0).ref(Painter, name)
            outcome.append(await ref.ask(Painter.paint, name, before_s, after_s))

    sim.spawn(0, at_home)
    await sim.wait_until(lambda: len(outcome) == len(names))
    assert outcome == ["none"] * len(names)


def test_a_worker_is_used_again_unless_a_variable_was_left_in_it() -> None:
    async def count() -> None:
        decimal.Decimal("1.1") * 2

    async def paint() -> None:
        colour.set("red")

    async def main() -> None:
        workers = Workers()
        tasks = []
        for work in (count, count, paint, count):
            tasks.append(workers.lend(lambda worker, work=work: (worker.start(work()), worker)[1]))
        assert tasks[0] is tasks[1] is tasks[2]
        assert tasks[3] is not tasks[2]
        assert await workers.close(1.0) == 0

    asyncio.run(main())
