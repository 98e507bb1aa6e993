"""How long a line of ready entities takes, and when the event loop gets its turn."""

from __future__ import annotations

import asyncio

from domicile.core.handoff.admission import Admission, Bounds
from domicile.core.ids import Incarnation
from domicile.entity.running.workers import (
    QUANTUM,
    SPELL_S,
    SPELLS,
    TURN_S,
    Fairness,
    Worker,
    Workers,
)
from domicile.settings import Settings


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
    while not pace.job_s:
        pace.begin()
        hand.now += 0.005
        pace.ran()
        pace.end(ready=True)
    assert round(pace.job_s, 6) == 0.005
    assert SPELLS * SPELL_S <= hand.now - 100.0 <= SPELLS * (SPELL_S + 0.006)
    pace.end(ready=False)
    assert pace.job_s == 0.0, "whoever comes now waits for nobody"


def test_handlers_that_nobody_waited_for_count_too() -> None:
    hand = Hand()
    pace = hand.pace()
    for _ in range(SPELLS):
        pace.begin()
        for _ in range(10):
            pace.ran()
        hand.turns += 1_000
        hand.now += 2 * SPELL_S
        pace.end(ready=True)
    assert round(pace.job_s, 9) == 2 * SPELL_S / 1_000


def test_jobs_count_as_slow_only_if_they_were_slow_several_times_in_a_row() -> None:
    hand = Hand()
    pace = hand.pace()

    def spell(job_s: float) -> float:
        pace.begin()
        for _ in range(100):
            pace.ran()
        hand.now += 100 * job_s
        pace.end(ready=True)
        return round(pace.job_s, 6)

    assert [spell(one) for one in (0.002, 0.002, 0.002)] == [0.0, 0.0, 0.002]
    assert [spell(one) for one in (0.5, 0.002, 0.003)] == [0.002] * 3
    assert [spell(one) for one in (0.004, 0.005, 0.006)] == [0.002, 0.003, 0.004]
    assert spell(0.002) == 0.002


def test_a_stall_of_the_process_refuses_nothing_of_a_thousand_messages() -> None:
    """Nothing runs for 0.5 s, e.g. on a busy machine: that says nothing about the jobs."""
    defaults, hand, ran = Settings(), Hand(), 0
    bounds = Bounds(defaults.node_mail, 1 << 30, 1 << 30, defaults.node_wait_s)
    admission, sender = Admission(bounds), Incarnation("sender")
    for _ in range(1_000):
        admission.enter(sender, 100)

    async def main() -> None:
        workers = Workers(lambda: hand.now)

        def job(worker: Worker) -> None:
            nonlocal ran
            ran += 1
            admission.leave(sender, 100)
            hand.now += 0.5 if ran == 50 else 0.000_01

        for _ in range(1_000):
            workers.submit(job)
        while ran < 1_000:
            await asyncio.sleep(0)
            admission.ready, admission.job_s = workers.line
            assert not admission.refuses(sender, 100, 0, False, 10.0), ran
        assert await workers.close(1.0) == 0

    asyncio.run(main())


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
