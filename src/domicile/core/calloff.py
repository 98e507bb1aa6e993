"""Messages whose callers wait no more: what has not started at its owner never will.

Called by a shard's host, beside the machine of `core.owner`. Nobody sends such a message again, so
those that stay keep their order without it, and each still runs at most once (I5).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping

from domicile.core.ids import EntityKey
from domicile.core.owner import Mail, Owner, Source

CalledOff = Mapping[tuple[Source, int], None]
"""The messages, by the link that they came on and their number."""


def call_off(owner: Owner, wanted: CalledOff) -> tuple[list[Mail], list[EntityKey]]:
    """Take unstarted messages away; these, and the entities that may start another one now.

    One look at everything that waits, for any number of messages: an owner that is overloaded
    hears of many at a time, and must not look at its whole queue for each.
    """
    found: list[Mail] = []
    for source, parked in list(owner.parked.items()):
        kept = [one for one in parked if not _is_among(one, wanted, found)]
        if not kept:
            # As if nothing had come: the next message is compared with the record anew (H7).
            del owner.parked[source]
        elif len(kept) < len(parked):
            owner.parked[source] = deque(kept)
    ready: list[EntityKey] = []
    for entity, box in list(owner.boxes.items()):
        left = [one for one in box.mail if not _is_among(one, wanted, found)]
        if len(left) == len(box.mail):
            continue
        box.mail = deque(left)
        if box.idle():
            del owner.boxes[entity]
        elif box.ready():
            ready.append(entity)
    for mail in found:
        owner.left(mail)
    return found, ready


def _is_among(mail: Mail, wanted: CalledOff, found: list[Mail]) -> bool:
    if (mail.source, mail.n) not in wanted:
        return False
    found.append(mail)
    return True
