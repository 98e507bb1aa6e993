"""Messages that wait at their owner: one mailbox per entity.

Used by `core.handoff.owner` alone, which says who may enter. Nothing here decides what runs.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Generic, TypeVar

import msgspec

from domicile.core.ids import EntityKey, Incarnation, LinkKey


class Queued(msgspec.Struct):
    """One message at its owner. A shell extends it by what only the shell needs to know."""

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
    """Whether a running handler waits for it."""


Q = TypeVar("Q", bound=Queued)


class Mailbox(Generic[Q]):
    """An entity's unstarted messages and what runs of it. Exists only while there is any."""

    __slots__ = ("queue", "readers", "writer")

    def __init__(self) -> None:
        self.queue: deque[Q] = deque()
        self.readers = 0
        self.writer = False

    def ready(self) -> bool:
        """Whether the head may start: readers together, a writer alone, never out of order."""
        if not self.queue or self.writer:
            return False
        return self.queue[0].shared or self.readers == 0

    def idle(self) -> bool:
        """Nothing waits, nothing runs."""
        return not self.queue and not self.readers and not self.writer


def take_out(
    mailboxes: dict[EntityKey, Mailbox[Q]],
    latest: dict[Incarnation, str],
    wanted: Callable[[Q, bool], bool],
    left: Callable[[Q], None],
) -> tuple[dict[LinkKey, list[Q]], list[Q], list[EntityKey]]:
    """Take mail out: what goes back by link, what came on a lost link, and who may start now.

    `wanted` is also told whether a message is behind the last finishing one of its mailbox.
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
