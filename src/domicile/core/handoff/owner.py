"""One shard at its owner: who may enter, what is sent back, when it is over (H7–H11).

`Owner` holds the phase, a gate per link and the unstarted mail. The shell feeds it entries,
requests and flushes, runs what `start` hands out, and carries out the returned effects. It
never forwards: mail that may not run here goes back to its sender, in order.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from domicile.core.handoff.admission import Admission
from domicile.core.handoff.mailbox import Mailbox, Queued, take_out
from domicile.core.handoff.tables import OWNER_TRANSITIONS as TRANSITIONS
from domicile.core.handoff.tables import OwnerEvent, Phase
from domicile.core.ids import EntityKey, Incarnation, LinkKey, ShardKey
from domicile.core.state.shardmap import FREE, Entry

PARKED = 4_096
"""I6: messages of one link that may wait for a record to be read (H7)."""


@dataclass(frozen=True, slots=True)
class FlushAsked:
    """A `Flush` as it arrived."""

    source: LinkKey
    id: int


# effects


@dataclass(frozen=True, slots=True)
class Wake:
    """The entity has mail that may start."""

    entity: EntityKey


@dataclass(frozen=True, slots=True)
class Accepted:
    """The message is in its mailbox, which now holds `depth`."""

    mail: Queued
    depth: int


@dataclass(frozen=True, slots=True)
class SendBack:
    """Return these to their link (H8, H9)."""

    source: LinkKey
    mail: tuple[Queued, ...]


@dataclass(frozen=True, slots=True)
class AnswerFlush:
    """Say `Flushed` (H8)."""

    source: LinkKey
    id: int


@dataclass(frozen=True, slots=True)
class Refuse:
    """The mailbox is full, or the node: tell the sender (I6)."""

    mail: Queued
    by_node: bool = False


@dataclass(frozen=True, slots=True)
class Discard:
    """Mail of a lost link that will never run (H8)."""

    mail: tuple[Queued, ...]


@dataclass(frozen=True, slots=True)
class ReadRecord:
    """The sender knows more than this owner: read the shard's record (H7)."""


@dataclass(frozen=True, slots=True)
class PhaseChanged:
    """What the table said: `does` names the action for the shell."""

    phase: Phase
    epoch: int
    does: str


OwnerEffect = (
    Wake | Accepted | SendBack | AnswerFlush | Refuse | Discard | ReadRecord | PhaseChanged
)


_OPEN = Phase.OPEN


class Owner:
    """The owner's side of one shard."""

    __slots__ = (
        "admission", "boxes", "entry", "epoch", "gates", "latest", "mailbox", "me", "parked",
        "phase", "shard",
    )  # fmt: skip

    def __init__(
        self,
        shard: ShardKey,
        me: Incarnation,
        mailbox: int,
        admission: Admission | None = None,
    ) -> None:
        self.shard = shard
        self.me = me
        self.mailbox = mailbox
        self.admission = Admission() if admission is None else admission
        self.phase = Phase.CLOSED
        self.epoch = 0
        self.entry: Entry = FREE
        self.gates: dict[LinkKey, None] = {}
        self.latest: dict[Incarnation, str] = {}
        self.boxes: dict[EntityKey, Mailbox] = {}
        self.parked: dict[LinkKey, deque[Queued]] = {}

    @property
    def released(self) -> bool:
        """Whether the newest own epoch is over: what `Return` and `Flushed` say (H3)."""
        return self.phase is Phase.RELEASED

    @property
    def admits(self) -> bool:
        """Whether handlers of this shard may start."""
        return self.phase is Phase.OPEN or self.phase is Phase.DRAINING

    def see(self, entry: Entry) -> tuple[OwnerEffect, ...]:
        """A map entry, from wherever (C3): merged if newer."""
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

    def happen(self, happening: OwnerEvent, epoch: int = 0) -> tuple[OwnerEffect, ...]:
        """Take one step of the table."""
        transition = TRANSITIONS[self.phase, happening]
        out: list[OwnerEffect] = []
        if "drop" in transition.does or transition.does == "reopen":
            self._drop(out)
        self.phase = transition.to[0]
        if happening in (OwnerEvent.SERVING_NEWER, OwnerEvent.MOVING_NEWER):
            self.epoch = epoch
        if transition.does == "cut":
            self._cut(out)
        if transition.does != "nothing":
            out.append(PhaseChanged(self.phase, self.epoch, transition.does))
        return tuple(out)

    def request(self, mail: Queued) -> tuple[OwnerEffect, ...]:
        """A message arrives (H7)."""
        out: list[OwnerEffect] = []
        waiting = self.parked.get(mail.source)
        if waiting is None and not self._ahead(mail):
            self._admit(mail, out)
        elif self._too_heavy(mail) or (waiting is not None and len(waiting) >= PARKED):
            # Sent back it would soon be here again.
            out.append(Refuse(mail, by_node=True))
        elif waiting is not None:
            waiting.append(mail)
            self._enter(mail)
        else:
            self.parked[mail.source] = deque((mail,))
            self._enter(mail)
            out.append(ReadRecord())
        return tuple(out)

    def clear(self, source: LinkKey, entity: EntityKey, epoch: int, change: int) -> bool:
        """Whether a message would be admitted and start at once (H7), its entity being idle."""
        return not (
            self.phase is not _OPEN
            or epoch != self.epoch
            or change > self.entry.change
            or epoch > self.entry.epoch
            or self.gates
            or self.parked
            or (self.boxes and entity in self.boxes)
        )

    def occupy(self, source: LinkKey, entity: EntityKey, shared: bool) -> None:
        """A message that was clear to start runs: as after `request` and `start`."""
        self.latest[source.sender] = source.link
        box = self.boxes.get(entity)
        if box is None:
            box = self.boxes[entity] = Mailbox()
        # Shared ones that it asked itself may have suspended meanwhile: they are readers, too.
        assert shared or not box.readers, "an exclusive handler runs alone"
        assert not box.writer, "an exclusive handler runs alone"
        if shared:
            box.readers += 1
        else:
            box.writer = True

    def flush(self, asked: FlushAsked) -> tuple[OwnerEffect, ...]:
        """H8: return all unstarted mail of that link, open its gate, say so.

        What is parked goes back, too: the record that it waits for may be long in coming.
        """
        out: list[OwnerEffect] = []
        self.latest[asked.source.sender] = asked.source.link
        parked = self._take_parked(asked.source)
        self._remove(lambda mail, _: mail.source.sender == asked.source.sender, out, parked)
        self.gates.pop(asked.source, None)
        out.append(AnswerFlush(asked.source, asked.id))
        return tuple(out)

    def link_gone(self, source: LinkKey) -> None:
        """The link's state was dropped: its gate is void, parked mail never counted as accepted."""
        self.gates.pop(source, None)
        self._take_parked(source)
        if self.latest.get(source.sender) == source.link:
            del self.latest[source.sender]

    def start(self, entity: EntityKey) -> Queued | None:
        """The next message that may run now on this entity; it counts as started."""
        box = self.boxes.get(entity)
        if box is None or not self.admits or not box.ready():
            return None
        mail = box.mail.popleft()
        self.left(mail)
        if mail.shared:
            box.readers += 1
        else:
            box.writer = True
        return mail

    def finish(self, entity: EntityKey, shared: bool) -> bool:
        """A started message ended; True if the entity may start another."""
        box = self.boxes[entity]
        if shared:
            box.readers -= 1
        else:
            box.writer = False
        if box.mail or box.readers or box.writer:
            return box.ready()
        del self.boxes[entity]
        return False

    def hold(self, entity: EntityKey) -> bool:
        """Keep an entity that runs nothing from starting anything, until `finish`."""
        box = self.boxes.get(entity)
        if box is None:
            box = self.boxes[entity] = Mailbox()
        elif box.writer or box.readers:
            return False
        box.writer = True
        return True

    def timer(self, mail: Queued) -> bool:
        """Mail of the owner to itself (`after`): only while open, never returned or refused."""
        if self.phase is not Phase.OPEN:
            return False
        self._put(mail)
        return True

    def left(self, mail: Queued) -> None:
        """A message waits here no more; whoever takes one away says so."""
        self.admission.leave(mail.source.sender, mail.size_bytes)

    def _enter(self, mail: Queued) -> None:
        self.admission.enter(mail.source.sender, mail.size_bytes)

    def _too_heavy(self, mail: Queued) -> bool:
        return self.admission.too_heavy(mail.source.sender, mail.size_bytes)

    def _ahead(self, mail: Queued) -> bool:
        return mail.change > self.entry.change or mail.epoch > self.entry.epoch

    def _admit(self, mail: Queued, out: list[OwnerEffect]) -> None:
        """H7: gate open, right epoch, and open or (draining and finishing)."""
        self.latest[mail.source.sender] = mail.source.link
        fits = mail.epoch == self.epoch and (
            self.phase is Phase.OPEN or (self.phase is Phase.DRAINING and mail.finishing)
        )
        if mail.source in self.gates or not fits:
            self.gates[mail.source] = None
            out.append(SendBack(mail.source, (mail,)))
            return
        box = self.boxes.get(mail.entity)
        depth = 0 if box is None else len(box.mail)
        if depth >= self.mailbox:
            out.append(Refuse(mail))
            return
        sender = mail.source.sender
        if self.admission.refuses(sender, mail.size_bytes, depth, mail.nested, mail.ttl_s):
            out.append(Refuse(mail, by_node=True))
            return
        box = self._put(mail)
        out.append(Accepted(mail, len(box.mail)))
        if box.ready():
            self.admission.ready += not depth
            out.append(Wake(mail.entity))

    def _put(self, mail: Queued) -> Mailbox:
        box = self.boxes.get(mail.entity)
        if box is None:
            box = self.boxes[mail.entity] = Mailbox()
        box.mail.append(mail)
        self._enter(mail)
        return box

    def _cut(self, out: list[OwnerEffect]) -> None:
        """H9: keep each mailbox up to its last finishing message, return the rest."""
        self._remove(lambda _, after_last_finishing: after_last_finishing, out)

    def _remove(
        self,
        wanted: Callable[[Queued, bool], bool],
        out: list[OwnerEffect],
        parked: Iterable[Queued] = (),
    ) -> None:
        """Send mail back to its link (gating it), or discard it if that link is lost."""
        back, lost, ready = take_out(self.boxes, self.latest, wanted, self.left)
        for mail in parked:
            back.setdefault(mail.source, []).append(mail)
        out.extend([Wake(entity) for entity in ready])
        for source, mails in back.items():
            self.gates[source] = None
            out.append(SendBack(source, tuple(sorted(mails, key=lambda mail: mail.n))))
        if lost:
            out.append(Discard(tuple(lost)))

    def _drop(self, out: list[OwnerEffect]) -> None:
        """The shard is lost: everything unstarted goes back; the shell cancels what runs."""
        self._remove(lambda _mail, _after: True, out)
        for entity, box in list(self.boxes.items()):
            box.mail.clear()
            if box.idle():
                del self.boxes[entity]

    def _take_parked(self, source: LinkKey) -> tuple[Queued, ...]:
        parked = tuple(self.parked.pop(source, ()))
        for mail in parked:
            self.left(mail)
        return parked

    def _unpark(self, source: LinkKey, out: list[OwnerEffect]) -> None:
        waiting = self.parked[source]
        while waiting:
            if self._ahead(waiting[0]):
                out.append(ReadRecord())
                return
            mail = waiting.popleft()
            self.left(mail)
            self._admit(mail, out)
        del self.parked[source]


CancelledMessages = Mapping[tuple[LinkKey, int], None]
"""The messages, by the link that they came on and their number."""


def cancel_unstarted(
    owner: Owner, wanted: CancelledMessages
) -> tuple[list[Queued], list[EntityKey]]:
    """Take unstarted messages away; these, and the entities that may start another one now.

    One look at everything that waits, for any number of messages: an owner that is overloaded
    hears of many at a time, and must not look at its whole queue for each.
    """
    found: list[Queued] = []
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


def _is_among(mail: Queued, wanted: CancelledMessages, found: list[Queued]) -> bool:
    if (mail.source, mail.n) not in wanted:
        return False
    found.append(mail)
    return True
