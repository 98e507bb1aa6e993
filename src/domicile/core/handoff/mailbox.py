"""Unstarted mail as it lies at its owner: a box per entity.

Used by `core.handoff.owner` alone, which says who may enter. Nothing here decides what runs.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

import msgspec

from domicile.core.ids import EntityKey, Incarnation, LinkKey


class Queued(msgspec.Struct):
    """One message at its owner. `load` is the shell's business."""

    source: LinkKey
    n: int
    entity: EntityKey
    epoch: int
    change: int
    finishing: bool
    shared: bool
    load: Any
    size_bytes: int = 0
    ttl_s: float = float("inf")
    nested: bool = False
    """Whether a running handler waits for it."""


class Mailbox:
    """An entity's unstarted mail and what runs of it. Exists only while there is any."""

    __slots__ = ("mail", "readers", "writer")

    def __init__(self) -> None:
        self.mail: deque[Queued] = deque()
        self.readers = 0
        self.writer = False

    def ready(self) -> bool:
        """Whether the head may start: readers together, a writer alone, never out of order."""
        if not self.mail or self.writer:
            return False
        return self.mail[0].shared or self.readers == 0

    def idle(self) -> bool:
        """Nothing waits, nothing runs."""
        return not self.mail and not self.readers and not self.writer


def take_out(
    boxes: dict[EntityKey, Mailbox],
    latest: dict[Incarnation, str],
    wanted: Callable[[Queued, bool], bool],
    left: Callable[[Queued], None],
) -> tuple[dict[LinkKey, list[Queued]], list[Queued], list[EntityKey]]:
    """Take mail out: what goes back by link, what came on a lost link, and who may start now.

    `wanted` is also told whether a message is behind the last finishing one of its box.
    """
    back: dict[LinkKey, list[Queued]] = {}
    lost: list[Queued] = []
    ready: list[EntityKey] = []
    for entity, box in list(boxes.items()):
        keep = 0
        for index, mail in enumerate(box.mail):
            if mail.finishing:
                keep = index + 1
        kept: deque[Queued] = deque()
        for index, mail in enumerate(box.mail):
            if not wanted(mail, index >= keep):
                kept.append(mail)
                continue
            left(mail)
            if latest.get(mail.source.sender) == mail.source.link:
                back.setdefault(mail.source, []).append(mail)
            else:
                lost.append(mail)
        box.mail = kept
        if box.idle():
            del boxes[entity]
        elif box.ready():
            ready.append(entity)
    return back, lost, ready
