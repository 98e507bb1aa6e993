"""The owner and the sender of a shard keep their books: whatever waits is counted, once."""

from __future__ import annotations

from random import Random

import pytest

from domicile.core.handoff.admission import Admission, Bounds, Outflow
from domicile.core.handoff.mailbox import Queued
from domicile.core.handoff.owner import (
    PARKED,
    Accepted,
    FlushAsked,
    Owner,
    Refuse,
    cancel_unstarted,
)
from domicile.core.handoff.pending import HoldLimits, Pending, WriteRequest
from domicile.core.handoff.sender import Sender
from domicile.core.ids import EntityKey, Incarnation, LinkKey, ShardKey
from domicile.core.state.shardmap import Entry

ME, OTHER = Incarnation("me"), Incarnation("other")
SHARD = ShardKey("r", 0)
SOURCES = [LinkKey(Incarnation(name), "l") for name in "abc"]


def queued(
    source: LinkKey, n: int, id: str = "e", *, size_bytes: int = 10, epoch: int = 1
) -> Queued:
    """One message."""
    return Queued(source, n, EntityKey("t", id), epoch, epoch, False, False, size_bytes, 10.0)


def opened(admission: Admission) -> Owner:
    """An owner that serves."""
    owner = Owner(SHARD, ME, 50, admission)
    owner.see(Entry(ME, 1, "serving", change=1))
    return owner


def waiting(owner: Owner) -> list[Queued]:
    """All unstarted mail."""
    parked = [one for line in owner.parked.values() for one in line if isinstance(one, Queued)]
    return parked + [one for mailbox in owner.mailboxes.values() for one in mailbox.queue]


@pytest.mark.parametrize("seed", range(30))
def test_whatever_happens_to_a_shard_all_that_waits_is_counted_once(seed: int) -> None:
    random = Random(seed)
    admission = Admission(Bounds(60, 4_000, 3_000, 2.0))
    owner = opened(admission)
    running: list[EntityKey] = []
    change = 1
    for n in range(1, 600):
        source = random.choice(SOURCES)
        what = random.random()
        if what < 0.6:
            epoch = owner.epoch + (random.random() < 0.1)
            size_bytes = random.choice((10, 100, 900))
            owner.request(
                queued(source, n, random.choice("uvwxyz"), size_bytes=size_bytes, epoch=epoch)
            )
        elif what < 0.75:
            entity = EntityKey("t", random.choice("uvwxyz"))
            if owner.start(entity) is not None:
                running.append(entity)
        elif what < 0.85 and running:
            owner.finish(running.pop(), False)
        elif what < 0.9:
            owner.flush(FlushAsked(source, n))
        elif what < 0.93:
            owner.link_gone(source)
        elif what < 0.96:
            found = {(one.source, one.n): None for one in waiting(owner) if random.random() < 0.3}
            cancel_unstarted(owner, found)
        elif not running:
            change += 1
            owner.see(Entry(ME, owner.epoch + 1, "serving", change=change))
        left = waiting(owner)
        assert admission.count == len(left)
        assert admission.size_bytes == sum(one.size_bytes for one in left)
        assert admission.size_bytes <= 2 * 4_000


def test_a_full_node_refuses_and_says_that_it_is_the_node() -> None:
    admission = Admission(Bounds(5, 10_000, 10_000, 2.0))
    owner = opened(admission)
    owner.hold(EntityKey("t", "e"))
    for n in range(5):
        owner.request(queued(SOURCES[0], n))
    seventh = queued(SOURCES[0], 7)
    assert owner.request(seventh) == (Refuse(seventh, by_node=True),)
    assert admission.count == 5


def test_parked_mail_is_bounded_in_bytes_and_what_is_beyond_is_refused() -> None:
    owner = opened(Admission(Bounds(10_000, 1_000_000, 1_000, 2.0)))
    ahead = [queued(SOURCES[0], n, size_bytes=300, epoch=2) for n in range(5)]
    for one in ahead[:3]:
        owner.request(one)
    assert owner.request(ahead[3]) == (Refuse(ahead[3], by_node=True),)
    assert len(owner.parked[SOURCES[0]]) == 3 < PARKED
    owner.see(Entry(ME, 2, "serving", change=2))
    assert owner.start(ahead[0].entity) is ahead[0]
    assert Accepted(ahead[4], 3) in owner.request(ahead[4])


# the sender


def sender(outflow: Outflow) -> Sender:
    """A sender that knows where its shard lives."""
    made = Sender(
        SHARD, HoldLimits(50, 10_000, 20, 10.0), lambda shard: False, lambda node: True, outflow
    )
    made.see(Entry(ME, 1, "serving", change=1), 0.0)
    return made


def pending(made: Sender, *, size_bytes: int = 10) -> Pending:
    """The next message."""
    return Pending(made.number(), EntityKey("t", "e"), True, (), size_bytes)


@pytest.mark.parametrize("seed", range(30))
def test_whatever_becomes_of_a_message_it_is_counted_on_its_way_and_no_longer(seed: int) -> None:
    random = Random(seed)
    outflow = Outflow()
    made = sender(outflow)
    change, epoch, owner = 1, 1, ME
    for _ in range(500):
        what = random.random()
        written = list(made.written)
        n = random.choice(written) if written else 0
        if what < 0.5:
            made.submit(pending(made, size_bytes=random.choice((10, 5_000))), 0.0)
        elif what < 0.65:
            made.begun(owner, n, 0.0)
        elif what < 0.8:
            made.answered(owner, n, 0.0)
        elif what < 0.85:
            made.returned(owner, (n,), made.entry, False, 0.0)
        elif what < 0.9 and made.queue:
            made.withdraw(random.choice(made.queue), 0.0)
        elif what < 0.93:
            made.link_lost(owner, [n] if n and not made.written[n].started else [], 0.0)
        elif what < 0.96:
            made.flushed(owner, made.flush_id, made.entry, False, 0.0)
        elif not made.written:
            owner = OTHER if owner == ME else ME
            change, epoch = change + 1, epoch + 1
            made.see(Entry(owner, epoch, "serving", change=change), 0.0)
        unstarted = [one for one in made.written.values() if not one.started]
        assert made.open == len(unstarted)
        on_the_way = sum(flow.open for flow in outflow.homes.values())
        assert on_the_way == sum(1 + one.size_bytes // 4_096 for one in unstarted)
        assert outflow.held_bytes == made.held_bytes == sum(one.size_bytes for one in made.queue)


def test_one_full_home_refuses_for_all_of_its_shards() -> None:
    outflow = Outflow(most=5)
    made, neighbour = sender(outflow), sender(outflow)
    first = pending(made)
    assert any(isinstance(effect, WriteRequest) for effect in made.submit(first, 0.0))
    home = made.clear()
    assert home is not None
    for _ in range(3):
        next_one = pending(made)
        next_one.to = home.owner
        made.post(next_one)
    assert made.clear() == home
    assert neighbour.room(10)
    made.submit(pending(made), 0.0)
    assert made.clear() is None
    assert not made.room(10)
    assert not neighbour.room(10)
    assert neighbour.room(10, nested=True)
    made.answered(ME, first.n, 0.0)
    assert neighbour.room(10)
