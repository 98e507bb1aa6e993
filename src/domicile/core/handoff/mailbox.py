"""Messages that wait at their owner: one mailbox per entity.

Only `core.handoff.owner` uses this module, and it decides which messages enter a mailbox. Nothing
here decides what runs.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Generic, TypeVar

import msgspec

from domicile.core.ids import EntityKey, Incarnation, LinkKey


class Queued(msgspec.Struct):
    """One message at its owner. The shell's subclass adds what only the shell needs."""

    source: LinkKey
    n: int
    entity: EntityKey
    epoch: int
    change: int
    finishing: bool
    shared: bool
    size_bytes: int = 0
    ttl_s: float = float("inf")
    nested: bool = False
    """Whether a running handler waits for this message."""


Q = TypeVar("Q", bound=Queued)


class Mailbox(Generic[Q]):
    """An entity's unstarted messages and running handlers. Exists only while there are any."""

    __slots__ = ("queue", "readers", "waking", "writer")

    def __init__(self) -> None:
        self.queue: deque[Q] = deque()
        self.readers = 0
        self.waking = False
        """Whether the reader that was taken last has not reached its handler yet: its entity starts
        first. The readers behind it wait, or they could begin before it (I5)."""
        self.writer = False

    def ready(self) -> bool:
        """Whether the head may start: readers together, a writer alone, never out of order."""
        if not self.queue or self.writer or self.waking:
            return False
        return self.queue[0].shared or self.readers == 0

    def idle(self) -> bool:
        """Whether nothing waits and nothing runs."""
        return not self.queue and not self.readers and not self.writer


def take_out(
    mailboxes: dict[EntityKey, Mailbox[Q]],
    latest: dict[Incarnation, str],
    wanted: Callable[[Q, bool], bool],
    left: Callable[[Q], None],
) -> tuple[dict[LinkKey, list[Q]], list[Q], list[EntityKey]]:
    """Take messages out. Returns the messages to send back, by link; the messages that came on a
    lost link; and the entities that may start a message now.

    The second argument of `wanted`: is the message behind the last finishing one of its mailbox?
    """
    back: dict[LinkKey, list[Q]] = {}
    lost: list[Q] = []
    ready: list[EntityKey] = []
    for entity, mailbox in list(mailboxes.items()):
        keep = 0
        for index, queued in enumerate(mailbox.queue):
            if queued.finishing:
                keep = index + 1
        kept: deque[Q] = deque()
        for index, queued in enumerate(mailbox.queue):
            if not wanted(queued, index >= keep):
                kept.append(queued)
                continue
            left(queued)
            if latest.get(queued.source.sender) == queued.source.link:
                back.setdefault(queued.source, []).append(queued)
            else:
                lost.append(queued)
        mailbox.queue = kept
        if mailbox.idle():
            del mailboxes[entity]
        elif mailbox.ready():
            ready.append(entity)
    return back, lost, ready
