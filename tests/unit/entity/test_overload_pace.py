"""How long a line of ready entities takes, and when the event loop gets its turn."""

from __future__ import annotations

import asyncio

from domicile.entity.running.workers import QUANTUM, SPELL_S, TURN_S, Fairness, Worker, Workers


class Hand:
    """A clock that is moved by hand."""

    def __init__(self) -> None:
        self.now = 100.0
        self.turns = 0

    def pace(self) -> Fairness:
        """A pace on this clock."""
        return Fairness(lambda: self.now, lambda: self.turns)


def test_the_time_of_a_job_is_known_once_somebody_was_ready_for_long_enough() -> None:
    hand = Hand()
    pace = hand.pace()
    while hand.now < 100.0 + SPELL_S:
        assert pace.job_s == 0.0
        pace.begin()
        hand.now += 0.005
        pace.ran()
        pace.end(ready=True)
    assert round(pace.job_s, 6) == 0.005
    pace.end(ready=False)
    assert pace.job_s == 0.0, "whoever comes now waits for nobody"


def test_handlers_that_nobody_waited_for_count_too() -> None:
    hand = Hand()
    pace = hand.pace()
    pace.begin()
    for _ in range(10):
        pace.ran()
    hand.turns += 1_000
    hand.now += 2 * SPELL_S
    pace.end(ready=True)
    assert round(pace.job_s, 9) == 2 * SPELL_S / 1_000


def test_slow_jobs_let_the_loop_turn_before_there_are_many_of_them() -> None:
    hand = Hand()
    ran: list[int] = []

    async def main() -> list[int]:
        workers = Workers(lambda: hand.now)

        def job(worker: Worker) -> None:
            ran.append(1)
            hand.now += 0.001

        for _ in range(4 * QUANTUM):
            workers.submit(job)
        seen: list[int] = []
        while len(ran) < 4 * QUANTUM:
            await asyncio.sleep(0)
            seen.append(len(ran))
        assert await workers.close(1.0) == 0
        return seen

    seen = asyncio.run(main())
    steps = [after - before for before, after in zip([0, *seen], seen, strict=False)]
    assert max(steps) <= TURN_S / 0.001 + 1


def test_quick_jobs_are_limited_by_number() -> None:
    ran: list[int] = []

    async def main() -> int:
        workers = Workers()
        for _ in range(2 * QUANTUM):
            workers.submit(lambda worker: ran.append(1))
        await asyncio.sleep(0)
        seen = len(ran)
        await workers.close(1.0)
        return seen

    assert asyncio.run(main()) == QUANTUM
