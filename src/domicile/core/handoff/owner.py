"""One shard at its owner: what it accepts, what it returns, when its epoch is over (H7–H11).

`Owner` holds the phase, the refused links and the unstarted messages. The shell feeds it entries,
requests and flushes, runs what `start` returns, and carries out the effects. An owner never
forwards a message: a message that may not run here goes back to its sender, in order.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Generic

from domicile.core.handoff.admission import Admission
from domicile.core.handoff.mailbox import Mailbox, Q, take_out
from domicile.core.handoff.tables import DROPS, OwnerAction, OwnerEvent, Phase
from domicile.core.handoff.tables import OWNER_TRANSITIONS as TRANSITIONS
from domicile.core.ids import EntityKey, Incarnation, LinkKey, ShardKey
from domicile.core.state.shardmap import FREE, Entry

PARKED = 4_096
"""I6: messages of one link that may wait until a record is read (H7)."""


@dataclass(frozen=True, slots=True)
class FlushAsked:
    """A `Flush` as it arrived."""

    source: LinkKey
    id: int


# effects


@dataclass(frozen=True, slots=True)
class Wake:
    """The entity has a message that may start."""

    entity: EntityKey


@dataclass(frozen=True, slots=True)
class Accepted(Generic[Q]):
    """The message is in its mailbox, which now holds `depth`."""

    queued: Q
    depth: int


@dataclass(frozen=True, slots=True)
class SendBack(Generic[Q]):
    """Return these messages on their link (H8, H9)."""

    source: LinkKey
    messages: tuple[Q, ...]


@dataclass(frozen=True, slots=True)
class AnswerFlush:
    """Answer `Flushed` (H8)."""

    source: LinkKey
    id: int


@dataclass(frozen=True, slots=True)
class Refuse(Generic[Q]):
    """The mailbox or the node is full: tell the sender (I6)."""

    queued: Q
    by_node: bool = False


@dataclass(frozen=True, slots=True)
class Discard(Generic[Q]):
    """Messages of a lost link, which will never run (H8)."""

    messages: tuple[Q, ...]


@dataclass(frozen=True, slots=True)
class ReadRecord:
    """The sender knows a newer entry than this owner: read the shard's record (H7)."""


@dataclass(frozen=True, slots=True)
class PhaseChanged:
    """A step of the table: `does` is the action for the shell."""

    phase: Phase
    epoch: int
    does: OwnerAction


OwnerEffect = (
    Wake
    | Accepted[Q]
    | SendBack[Q]
    | AnswerFlush
    | Refuse[Q]
    | Discard[Q]
    | ReadRecord
    | PhaseChanged
)


_OPEN = Phase.OPEN


class Owner(Generic[Q]):
    """The owner's side of one shard."""

    __slots__ = (
        "admission", "entry", "epoch", "latest", "mailbox_limit", "mailboxes", "me", "parked",
        "phase", "refused_links", "shard",
    )  # fmt: skip

    def __init__(
        self,
        shard: ShardKey,
        me: Incarnation,
        mailbox_limit: int,
        admission: Admission | None = None,
    ) -> None:
        self.shard = shard
        self.me = me
        self.mailbox_limit = mailbox_limit
        self.admission = Admission() if admission is None else admission
        self.phase = Phase.CLOSED
        self.epoch = 0
        self.entry: Entry = FREE
        self.refused_links: dict[LinkKey, None] = {}
        self.latest: dict[Incarnation, str] = {}
        self.mailboxes: dict[EntityKey, Mailbox[Q]] = {}
        self.parked: dict[LinkKey, deque[Q]] = {}

    @property
    def released(self) -> bool:
        """Whether the newest epoch owned here is over; `Return` and `Flushed` carry it (H3)."""
        return self.phase is Phase.RELEASED

    @property
    def admits(self) -> bool:
        """Whether handlers of this shard may start."""
        return self.phase is Phase.OPEN or self.phase is Phase.DRAINING

    def see(self, entry: Entry) -> tuple[OwnerEffect[Q], ...]:
        """Take a map entry from any source; it counts only if it is newer (C3)."""
        if entry.change <= self.entry.change:
            return ()
        self.entry = entry
        out = list(self.happen(self._classify(entry), entry.epoch))
        for source in list(self.parked):
            self._unpark(source, out)
        return tuple(out)

    def _classify(self, entry: Entry) -> OwnerEvent:
        if entry.owner != self.me:
            return OwnerEvent.FOREIGN if entry.epoch > self.epoch else OwnerEvent.STALE
        if entry.epoch < self.epoch:
            return OwnerEvent.STALE
        newer = entry.epoch > self.epoch
        if entry.state == "moving":
            return OwnerEvent.MOVING_NEWER if newer else OwnerEvent.MOVING_SAME
        return OwnerEvent.SERVING_NEWER if newer else OwnerEvent.SERVING_SAME

    def happen(self, happening: OwnerEvent, epoch: int = 0) -> tuple[OwnerEffect[Q], ...]:
        """Take one step of the table."""
        transition = TRANSITIONS[self.phase, happening]
        out: list[OwnerEffect[Q]] = []
        if transition.does in DROPS:
            self._drop(out)
        self.phase = transition.to[0]
        if happening in (OwnerEvent.SERVING_NEWER, OwnerEvent.MOVING_NEWER):
            self.epoch = epoch
        if transition.does is OwnerAction.CUT:
            self._cut(out)
        if transition.does is OwnerAction.RELEASE and self.mailboxes:
            self._drop(out)
        if transition.does is not OwnerAction.NOTHING:
            out.append(PhaseChanged(self.phase, self.epoch, transition.does))
        return tuple(out)

    def request(self, queued: Q) -> tuple[OwnerEffect[Q], ...]:
        """A message arrives (H7)."""
        out: list[OwnerEffect[Q]] = []
        waiting = self.parked.get(queued.source)
        if waiting is None and not self._ahead(queued):
            self._admit(queued, out)
        elif self._too_heavy(queued) or (waiting is not None and len(waiting) >= PARKED):
            # If it were sent back, it would soon arrive again.
            out.append(Refuse(queued, by_node=True))
        elif waiting is not None:
            waiting.append(queued)
            self._enter(queued)
        else:
            self.parked[queued.source] = deque((queued,))
            self._enter(queued)
            out.append(ReadRecord())
        return tuple(out)

    def clear(self, source: LinkKey, entity: EntityKey, epoch: int, change: int) -> bool:
        """Whether a message would be admitted and start at once: its entity is idle (H7)."""
        return not (
            self.phase is not _OPEN
            or epoch != self.epoch
            or change > self.entry.change
            or epoch > self.entry.epoch
            or self.refused_links
            or self.parked
            or (self.mailboxes and entity in self.mailboxes)
        )

    def occupy(self, source: LinkKey, entity: EntityKey, shared: bool) -> None:
        """A message for which `clear` was true runs now, as after `request` and `start`."""
        self.latest[source.sender] = source.link
        mailbox = self.mailboxes.get(entity)
        if mailbox is None:
            mailbox = self.mailboxes[entity] = Mailbox()
        # Shared handlers that this handler asked may be suspended meanwhile: they count as readers.
        assert shared or not mailbox.readers, "an exclusive handler runs alone"
        assert not mailbox.writer, "an exclusive handler runs alone"
        if shared:
            mailbox.readers += 1
        else:
            mailbox.writer = True

    def flush(self, asked: FlushAsked) -> tuple[OwnerEffect[Q], ...]:
        """H8: return all unstarted messages of that link, accept the link again, answer.

        Parked messages go back too: reading the record that they wait for may take long.
        """
        out: list[OwnerEffect[Q]] = []
        self.latest[asked.source.sender] = asked.source.link
        parked = self._take_parked(asked.source)
        self._remove(lambda queued, _: queued.source.sender == asked.source.sender, out, parked)
        self.refused_links.pop(asked.source, None)
        out.append(AnswerFlush(asked.source, asked.id))
        return tuple(out)

    def link_gone(self, source: LinkKey) -> None:
        """The state of a link was dropped: the link is no longer refused, and its parked messages,
        which were never accepted, are dropped."""
        self.refused_links.pop(source, None)
        self._take_parked(source)
        if self.latest.get(source.sender) == source.link:
            del self.latest[source.sender]

    def start(self, entity: EntityKey) -> Q | None:
        """The next message that may run on this entity now; it then counts as started."""
        mailbox = self.mailboxes.get(entity)
        if mailbox is None or not self.admits or not mailbox.ready():
            return None
        queued = mailbox.queue.popleft()
        self.left(queued)
        if queued.shared:
            mailbox.readers += 1
            mailbox.waking = True
        else:
            mailbox.writer = True
        return queued

    def reached(self, entity: EntityKey) -> bool:
        """The shared message that `start` gave last reaches its handler now; True if the entity may
        start another beside it."""
        mailbox = self.mailboxes[entity]
        mailbox.waking = False
        return mailbox.ready()

    def finish(self, entity: EntityKey, shared: bool, reached: bool = True) -> bool:
        """A started message ended; True if the entity may start another.

        `reached`: whether a shared message reached its handler before.
        """
        mailbox = self.mailboxes[entity]
        if shared:
            mailbox.readers -= 1
            if not reached:
                mailbox.waking = False
        else:
            mailbox.writer = False
        if mailbox.queue or mailbox.readers or mailbox.writer:
            return mailbox.ready()
        del self.mailboxes[entity]
        return False

    def hold(self, entity: EntityKey) -> bool:
        """Keep an idle entity from starting a message, until `finish`; False if it runs one."""
        mailbox = self.mailboxes.get(entity)
        if mailbox is None:
            mailbox = self.mailboxes[entity] = Mailbox()
        elif mailbox.writer or mailbox.readers:
            return False
        mailbox.writer = True
        return True

    def timer(self, queued: Q) -> bool:
        """The owner's message to itself (`after`): only while open, never returned or refused."""
        if self.phase is not Phase.OPEN:
            return False
        self._put(queued)
        return True

    def left(self, queued: Q) -> None:
        """A message no longer waits here. Every caller that takes a message away calls this."""
        self.admission.leave(queued.source.sender, queued.size_bytes)

    def _enter(self, queued: Q) -> None:
        self.admission.enter(queued.source.sender, queued.size_bytes)

    def _too_heavy(self, queued: Q) -> bool:
        return self.admission.too_heavy(queued.source.sender, queued.size_bytes)

    def _ahead(self, queued: Q) -> bool:
        return queued.change > self.entry.change or queued.epoch > self.entry.epoch

    def _admit(self, queued: Q, out: list[OwnerEffect[Q]]) -> None:
        """H7: accept if the link is not refused, the epoch is right, and the shard is open, or
        draining and the message finishing."""
        self.latest[queued.source.sender] = queued.source.link
        fits = queued.epoch == self.epoch and (
            self.phase is Phase.OPEN or (self.phase is Phase.DRAINING and queued.finishing)
        )
        if queued.source in self.refused_links or not fits:
            self.refused_links[queued.source] = None
            out.append(SendBack(queued.source, (queued,)))
            return
        mailbox = self.mailboxes.get(queued.entity)
        depth = 0 if mailbox is None else len(mailbox.queue)
        if depth >= self.mailbox_limit:
            out.append(Refuse(queued))
            return
        sender = queued.source.sender
        if self.admission.refuses(sender, queued.size_bytes, depth, queued.nested, queued.ttl_s):
            out.append(Refuse(queued, by_node=True))
            return
        mailbox = self._put(queued)
        out.append(Accepted(queued, len(mailbox.queue)))
        if mailbox.ready():
            self.admission.ready += not depth
            out.append(Wake(queued.entity))

    def _put(self, queued: Q) -> Mailbox[Q]:
        mailbox = self.mailboxes.get(queued.entity)
        if mailbox is None:
            mailbox = self.mailboxes[queued.entity] = Mailbox()
        mailbox.queue.append(queued)
        self._enter(queued)
        return mailbox

    def _cut(self, out: list[OwnerEffect[Q]]) -> None:
        """H9: keep each mailbox up to its last finishing message, return the rest."""
        self._remove(lambda _, after_last_finishing: after_last_finishing, out)

    def _remove(
        self,
        wanted: Callable[[Q, bool], bool],
        out: list[OwnerEffect[Q]],
        parked: Iterable[Q] = (),
    ) -> None:
        """Return messages on their link and refuse that link; discard them if the link is lost."""
        back, lost, ready = take_out(self.mailboxes, self.latest, wanted, self.left)
        for queued in parked:
            back.setdefault(queued.source, []).append(queued)
        out.extend([Wake(entity) for entity in ready])
        for source, messages in back.items():
            self.refused_links[source] = None
            out.append(SendBack(source, tuple(sorted(messages, key=lambda queued: queued.n))))
        if lost:
            out.append(Discard(tuple(lost)))

    def _drop(self, out: list[OwnerEffect[Q]]) -> None:
        """The shard is lost: return all unstarted messages; the shell cancels running handlers."""
        self._remove(lambda _mail, _after: True, out)
        for entity, mailbox in list(self.mailboxes.items()):
            mailbox.queue.clear()
            if mailbox.idle():
                del self.mailboxes[entity]

    def _take_parked(self, source: LinkKey) -> tuple[Q, ...]:
        parked = tuple(self.parked.pop(source, ()))
        for queued in parked:
            self.left(queued)
        return parked

    def _unpark(self, source: LinkKey, out: list[OwnerEffect[Q]]) -> None:
        waiting = self.parked[source]
        while waiting:
            if self._ahead(waiting[0]):
                out.append(ReadRecord())
                return
            queued = waiting.popleft()
            self.left(queued)
            self._admit(queued, out)
        del self.parked[source]


CancelledMessages = Mapping[tuple[LinkKey, int], None]
"""Messages by the link that they came on and their number."""


def cancel_unstarted(owner: Owner[Q], wanted: CancelledMessages) -> tuple[list[Q], list[EntityKey]]:
    """Take unstarted messages away. Returns them, and the entities that may start a message now.

    One pass over all waiting messages, for any number of cancelled ones: an overloaded owner gets
    many cancellations at a time and must not search its whole queue for each.
    """
    found: list[Q] = []
    for source, parked in list(owner.parked.items()):
        kept = [one for one in parked if not _is_among(one, wanted, found)]
        if not kept:
            # As if none had arrived: the next message is compared with the record again (H7).
            del owner.parked[source]
        elif len(kept) < len(parked):
            owner.parked[source] = deque(kept)
    ready: list[EntityKey] = []
    for entity, mailbox in list(owner.mailboxes.items()):
        left = [one for one in mailbox.queue if not _is_among(one, wanted, found)]
        if len(left) == len(mailbox.queue):
            continue
        mailbox.queue = deque(left)
        if mailbox.idle():
            del owner.mailboxes[entity]
        elif mailbox.ready():
            ready.append(entity)
    for queued in found:
        owner.left(queued)
    return found, ready


def _is_among(queued: Q, wanted: CancelledMessages, found: list[Q]) -> bool:
    if (queued.source, queued.n) not in wanted:
        return False
    found.append(queued)
    return True
