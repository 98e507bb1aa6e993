"""Owner and sender machines as values: copied, compared, and checked between any two steps.

Used by the explorations of the hand-off and by the tests of the sender alone.
"""

from __future__ import annotations

from collections import deque
from dataclasses import replace
from typing import Any

from domicile.core.handoff import Bond
from domicile.core.owner import Box, FlushAsked, Owner
from domicile.core.sender import Sender

FLUSH_LIMIT = 12
"""No sender of these small worlds needs more flushes; more means that it runs in circles."""


class Violation(AssertionError):
    """A step that a rule forbids."""


def clone_owner(owner: Owner) -> Owner:
    new = type(owner).__new__(type(owner))
    new.shard, new.me, new.mailbox = owner.shard, owner.me, owner.mailbox
    new.phase, new.epoch, new.entry = owner.phase, owner.epoch, owner.entry
    new.gates, new.latest = dict(owner.gates), dict(owner.latest)
    new.boxes = {}
    for entity, box in owner.boxes.items():
        copy = new.boxes[entity] = Box()
        copy.mail, copy.readers, copy.writer = deque(box.mail), box.readers, box.writer
    new.parked = {source: deque(waiting) for source, waiting in owner.parked.items()}
    return new


def clone_sender(sender: Sender) -> Sender:
    new = type(sender).__new__(type(sender))
    for name in Sender.__slots__:
        setattr(new, name, getattr(sender, name))
    new.queue = [replace(letter) for letter in sender.queue]
    new.written = {n: replace(letter) for n, letter in sender.written.items()}
    return new


def owner_key(owner: Owner) -> tuple[Any, ...]:
    boxes = tuple(
        (entity, tuple((m.source, m.n, m.finishing) for m in box.mail), box.writer, box.readers)
        for entity, box in sorted(owner.boxes.items())
    )
    parked = tuple(
        (source, tuple((m.id,) if isinstance(m, FlushAsked) else (m.n, m.epoch) for m in waiting))
        for source, waiting in sorted(owner.parked.items())
    )
    return (
        owner.phase, owner.epoch, owner.entry.change, tuple(sorted(owner.gates)),
        tuple(sorted(owner.latest.items())), boxes, parked,
    )  # fmt: skip


def sender_key(sender: Sender) -> tuple[Any, ...]:
    return (
        sender.bond, sender.key, sender.entry.change, sender.over_epoch, sender.flush_id,
        sender.last_flush, sender.seen_change, sender.open, sender.next_n, bool(sender.wave_at),
        tuple((letter.n, letter.urgent) for letter in sender.queue),
        tuple((n, m.to, m.started, m.resolved, m.urgent) for n, m in sender.written.items()),
    )  # fmt: skip


def check_sender(sender: Sender) -> None:
    """What must hold of a sender between any two steps."""
    numbers = [letter.n for letter in sender.queue]
    if numbers != sorted(dict.fromkeys(numbers)):
        raise Violation(f"the queue is out of order: {numbers}")
    if any(letter.to is not None or letter.resolved for letter in sender.queue):
        raise Violation("a written or resolved letter is queued")
    if sender.open != sum(not letter.started for letter in sender.written.values()):
        raise Violation("the window does not count what is written and unstarted")
    if not 0 <= sender.open <= sender.limits.window:
        raise Violation(f"the window is overrun: {sender.open}")
    if sender.held_bytes != sum(letter.size_bytes for letter in sender.queue):
        raise Violation("held_bytes does not count what is queued")
    if (sender.bond is Bond.UNBOUND) != (sender.key is None):
        raise Violation(f"{sender.bond} with key {sender.key}")
    if (sender.bond is Bond.FLUSHING) != (sender.flush_id != 0):
        raise Violation(f"{sender.bond} with flush {sender.flush_id}")
    if sender.last_flush > FLUSH_LIMIT:
        raise Violation("it flushes in circles")
