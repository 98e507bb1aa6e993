"""The sender's machine and a quarantined shard: what waits is refused, what was written is not."""

from __future__ import annotations

from domicile.core.handoff.pending import GiveUp, HoldLimits, Pending, WriteRequest
from domicile.core.handoff.sender import Sender
from domicile.core.ids import EntityKey, Incarnation, ShardKey
from domicile.core.state.shardmap import Entry

A = Incarnation("a" * 32)
SHARD = ShardKey("r", 0)
SERVING = Entry(A, 1, "serving", change=1)
QUARANTINED = Entry(epoch=1, state="quarantined", change=2, deaths=3)


def sender(window: int = 8) -> Sender:
    return Sender(
        SHARD, HoldLimits(10, 10_000, window, 10.0), lambda shard: False, lambda node: True
    )


def submit(sender: Sender) -> tuple[Pending, tuple[object, ...]]:
    pending = Pending(sender.number(), EntityKey("t", "x"), True, (), 100)
    return pending, sender.submit(pending, 0.0)


def test_what_waits_is_refused_once_and_leaves_no_trace() -> None:
    machine = sender()
    messages = [submit(machine)[0] for _ in range(3)]
    assert machine.refused() == (), "free shards are waited for"
    assert machine.see(QUARANTINED, 1.0) == ()
    assert machine.refused() == tuple(messages)
    assert all(pending.resolved for pending in messages)
    assert machine.refused() == ()
    assert (machine.queue, machine.held_bytes, machine.waiting()) == ([], 0, False)


def test_nothing_is_written_to_it() -> None:
    machine = sender()
    machine.see(QUARANTINED, 0.0)
    _, effects = submit(machine)
    assert effects == ()


def test_what_was_written_waits_for_its_owner_or_its_end() -> None:
    machine = sender(window=1)
    machine.see(SERVING, 0.0)
    written, effects = submit(machine)
    assert isinstance(effects[0], WriteRequest)
    waiting, _ = submit(machine)
    machine.see(QUARANTINED, 1.0)
    assert machine.refused() == (waiting,)
    assert not written.resolved
    lost = machine.link_lost(A, (), 2.0)
    assert GiveUp(written) in lost
    assert machine.refused() == ()


def test_what_comes_back_unstarted_is_refused_then() -> None:
    machine = sender()
    machine.see(SERVING, 0.0)
    pending, _ = submit(machine)
    machine.see(QUARANTINED, 1.0)
    assert machine.refused() == ()
    machine.returned(A, (pending.n,), QUARANTINED, False, 2.0)
    assert machine.refused() == (pending,)


def test_a_cleared_shard_is_written_to_again() -> None:
    machine = sender()
    machine.see(QUARANTINED, 0.0)
    machine.see(Entry(A, 2, "serving", change=3), 1.0)
    _, effects = submit(machine)
    assert [effect.epoch for effect in effects if isinstance(effect, WriteRequest)] == [2]
    assert machine.refused() == ()
