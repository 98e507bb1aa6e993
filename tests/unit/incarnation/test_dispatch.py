"""Every kind of message has somebody who takes it: at nodes, at clients, and within a process."""

from __future__ import annotations

from typing import get_args

from domicile import Entity, handler
from domicile.core.wire import Cancel, Flush, Request, ToOwner, ToSender
from domicile.entity.runtime import AnswerMessage
from domicile.testing import Sim, simulated


class Desk(Entity, name="desk"):
    """Answers."""

    @handler
    async def note(self) -> int:
        return 1


@simulated(entities=[Desk], nodes=2, seeds=1)
async def test_no_message_that_a_link_lets_through_is_without_a_taker(sim: Sim) -> None:
    await sim.wait_until(sim.settled)
    assert await sim.ref(Desk, "a").ask(Desk.note) == 1
    for life in (sim.node(0).life, sim.client_life):
        assert life is not None
        assert life.dispatch.requests.keys() == {*get_args(ToOwner)} - {Request}
        assert life.dispatch.answers.keys() == {*get_args(ToSender)}
        # What a process says to itself.
        assert life.runtime.requests.keys() == {Flush, Cancel}
        assert life.runtime.answers.keys() == {*get_args(AnswerMessage)}
