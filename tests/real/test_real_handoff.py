"""Real processes: shards that move under load (RG-05) and nodes that leave (RG-10).

The first one in full size, a million messages, is `make full-size`.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence
from contextlib import AsyncExitStack
from pathlib import Path

import pytest
from moving_lab import LEAVERS, Tally, Verdict, clients, keep_moving, leave_under_load, leavers
from real_entities import Desk
from real_lab import Load, balanced, judge, nothing_lost, of, open_ledger, run

from domicile import Settings
from domicile.testing import Event, Processes

MESSAGES, ROUNDS = 4_000, 10
"""Messages of a round; one round is enough unless the machine is busy."""

SETTINGS = Settings(shards=8, ask_timeout_s=60.0)
"""Patient, so that a busy machine makes no ask fail by its own impatience."""


# RG-05


def verdict(directory: Path, numbers: list[int], last: int) -> Verdict:
    """On a ledger with these numbers from one sender, of which so many were sent."""
    ledger = directory / "written"
    ledger.write_text("".join(f"d\ts\t{number}\n" for number in numbers), encoding="utf-8")
    tally = Tally(ledger)
    tally.read()
    assert tally.noted == len(numbers)
    return tally.verdict({("d", "s"): last})


def test_a_tally_tells_what_was_lost_seen_twice_out_of_order_and_never_sent(tmp_path: Path) -> None:
    assert verdict(tmp_path, [0, 1, 2, 3], 3) == Verdict(0, 0, 0, 0)
    assert verdict(tmp_path, [0, 1, 3], 3) == Verdict(1, 0, 0, 0)
    assert verdict(tmp_path, [0, 1], 3) == Verdict(2, 0, 0, 0)
    assert verdict(tmp_path, [0, 1, 1, 2, 3, 0], 3) == Verdict(0, 2, 0, 0)
    assert verdict(tmp_path, [0, 2, 2, 1, 3], 3) == Verdict(0, 1, 1, 0)
    assert verdict(tmp_path, [0, 3, 2, 1], 3) == Verdict(0, 0, 1, 0)
    assert verdict(tmp_path, [0, 1, 2, 5], 1) == Verdict(0, 0, 0, 2)
    assert Tally(tmp_path / "written").verdict({("d", "s"): 0, ("e", "s"): 4}).lost == 6
    assert verdict(tmp_path, [0], 0).sound
    assert not any(verdict(tmp_path, bad, 2).sound for bad in ([0, 2], [0, 2, 1], [0, 0, 1, 2]))


def test_a_tally_reads_a_ledger_that_grows_in_the_middle_of_a_line(tmp_path: Path) -> None:
    ledger = tmp_path / "grows"
    ledger.write_bytes(b"d\ts\t0\nd\ts")
    tally = Tally(ledger)
    tally.read()
    with ledger.open("ab") as file:
        file.write(b"\t1\nd\ts\t2")
    tally.read()
    assert tally.noted == 2
    assert tally.missing({("d", "s"): 2}) == 1


def in_vain(events: Sequence[Event]) -> bool:
    """Unless shards moved all the time, mail came back, and chains passed draining shards."""
    found = Counter(event.kind for event in events)
    return (
        found["released"] < MESSAGES / 100
        or found["return"] < MESSAGES / 200
        or not any(event.kind == "write" and event.fields["finishing"] for event in events)
    )


@pytest.mark.scenario("RG-05")
def test_every_number_arrives_once_and_in_order_while_shards_move(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ledger = open_ledger(monkeypatch, tmp_path)
    load, tally = Load(0), Tally(ledger)

    def arrived() -> bool:
        tally.read()
        return not tally.missing(load.sent)

    async def scenario() -> None:
        async with Processes([Desk], nodes=3, settings=SETTINGS) as cluster:
            async with AsyncExitStack() as stack:
                senders = await clients(cluster, stack, 4)

                async def send() -> None:
                    # A busy machine may move few shards in the time of so many messages.
                    for _ in range(ROUNDS):
                        load.left = MESSAGES
                        async with asyncio.TaskGroup() as group:
                            for number, client in enumerate(senders):
                                for task in range(2):
                                    group.create_task(load.send(client, f"sender {number}.{task}"))
                        if not in_vain(cluster.recorded):
                            break

                await keep_moving(cluster, asyncio.ensure_future(send()))
                await cluster.wait_until(arrived)
            history = cluster.history()
        tally.read()
        assert tally.verdict(load.sent) == Verdict(0, 0, 0, 0)
        judge(history)
        nothing_lost(history)
        assert not in_vain(history.events)
        assert len({event.fields["inc"] for event in history.of("submit")}) >= 6

    run(scenario())


# RG-10


@pytest.mark.scenario("RG-10")
@pytest.mark.parametrize("who", LEAVERS)
def test_a_node_that_is_asked_to_leave_takes_nothing_with_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, who: str
) -> None:
    ledger = open_ledger(monkeypatch, tmp_path)
    busy = "desk-slow"

    async def scenario() -> None:
        async with Processes([Desk], nodes=4, settings=SETTINGS) as cluster:
            await cluster.wait_until(lambda: balanced(cluster))
            leaving = leavers(cluster, who, busy)
            gone = [cluster.incarnation(node) for node in leaving]
            slow = busy if who == "slow entity" else None
            await leave_under_load(cluster, ledger, leaving, slow)
            assert cluster.leader() not in (None, *leaving)
            history = cluster.history()
        judge(history)
        nothing_lost(history)
        for inc in gone:
            assert inc is not None
            assert of(history, inc, "start"), "it had nothing to do"
            assert of(history, inc, "released"), "it had nothing to hand over"
            assert of(history, inc, "ended")
            assert not of(history, inc, "fenced")

    run(scenario())
