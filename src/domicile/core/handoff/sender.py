"""One shard as one sending incarnation sees it: what waits, what was written where (H1–H6, N3–N5).

A sender writes to a new owner only after the old owner answered its flush, or after their link is
lost. So order depends on the owners' answers alone. The shell must not number or decide anything:
it sends what the effects say and reports what comes back.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable, Iterable
from typing import Generic

from domicile.core.handoff.admission import UNIT_BYTES, Flow, Outflow
from domicile.core.handoff.pending import (
    GiveUp,
    HoldLimits,
    Home,
    P,
    Selects,
    SenderEffect,
    SendFlush,
    WriteRequest,
    is_nested,
    next_wave,
    number_of,
    split_prefix,
)
from domicile.core.handoff.tables import FLUSHES, SenderEvent, SenderState
from domicile.core.handoff.tables import SENDER_TRANSITIONS as TRANSITIONS
from domicile.core.ids import Incarnation, ShardKey
from domicile.core.machines import Arm
from domicile.core.state.shardmap import FREE, Entry

_HOMELESS = ("free", "quarantined")
_BOUND = SenderState.BOUND


class Sender(Generic[P]):
    """The sender's side of one shard."""

    __slots__ = (
        "entry", "flow", "flush_at", "flush_id", "held_bytes", "is_moving", "is_up", "key",
        "last_flush", "limits", "moving_since", "next_n", "open", "outflow", "over_epoch", "queue",
        "seen_change", "shard", "state", "wave_at", "written",
    )  # fmt: skip

    def __init__(
        self,
        shard: ShardKey,
        limits: HoldLimits,
        is_moving: Callable[[ShardKey], bool],
        is_up: Callable[[Incarnation], bool],
        outflow: Outflow | None = None,
    ) -> None:
        self.shard = shard
        self.limits = limits
        self.is_moving = is_moving
        self.is_up = is_up
        self.outflow = Outflow() if outflow is None else outflow
        self.flow = Flow(1 << 60, 1 << 60)
        self.entry: Entry = FREE
        self.over_epoch = 0
        """The owner released this epoch: treated as moving until a newer epoch comes (H3)."""
        self.state = SenderState.UNBOUND
        self.key: Home | None = None
        self.flush_id = 0
        self.last_flush = 0
        self.flush_at = 0.0
        self.seen_change = 0
        """`change` of the newest moving entry that caused a flush, or came while unbound (H4)."""
        self.queue: list[P] = []
        self.held_bytes = 0
        self.written: dict[int, P] = {}
        self.open = 0
        self.next_n = 1
        self.moving_since = 0.0
        self.wave_at = 0.0

    # what the shell reports

    def number(self) -> int:
        """The next message number of this shard, taken when the call is made (H1)."""
        n = self.next_n
        self.next_n += 1
        return n

    def room(self, size_bytes: int, nested: bool = False) -> bool:
        """Whether one more message may be held here, or be on its way to the home (I6)."""
        return (
            len(self.queue) < self.limits.buffer
            and self.held_bytes + size_bytes <= self.limits.hold_bytes
            and self.outflow.takes(self.entry.owner, size_bytes, nested)
        )

    def clear(self) -> Home | None:
        """The home to which a new message would be written at once, as by `submit` (H2)."""
        home, entry = self.key, self.entry
        if (
            home is None
            or self.queue
            or self.state is not _BOUND
            or entry.state != "serving"
            or home.epoch != entry.epoch
            or home.owner != entry.owner
            or home.epoch <= self.over_epoch
            or self.open >= self.limits.window
            or self.flow.open >= self.flow.limit
            or not self.is_up(home.owner)
        ):
            return None
        return home

    def post(self, pending: P) -> None:
        """Note a message as written to the home that `clear` has just named: `pending.to`."""
        self.written[pending.n] = pending
        if not pending.started:
            self.open += 1
            pending.flow = self.flow
            self.flow.open += 1 + pending.size_bytes // UNIT_BYTES

    def submit(self, pending: P, now: float) -> tuple[SenderEffect[P], ...]:
        """Take a new message that has its number and for which `room` was true (H1)."""
        self._hold(pending)
        return self._go_on(now)

    def see(self, entry: Entry, now: float) -> tuple[SenderEffect[P], ...]:
        """Take a map entry from any source; it counts only if it is newer (H3, H4)."""
        if entry.change <= self.entry.change:
            return ()
        moving = entry.state == "moving"
        if moving:
            self.moving_since = now
            self.wave_at = 0.0
        self.entry = entry
        if not moving:
            self.wave_at = 0.0
            for pending in self.queue:
                pending.urgent = False
        return self._go_on(now)

    def look(self, now: float) -> tuple[SenderEffect[P], ...]:
        """Something outside changed: which messages are finishing (N3), or which nodes are up."""
        return self._go_on(now)

    def returned(
        self, peer: Incarnation, ns: Iterable[int], entry: Entry, released: bool, now: float
    ) -> tuple[SenderEffect[P], ...]:
        """H3: put the messages back into the queue by number, merge the entry, flush."""
        out: list[SenderEffect[P]] = []
        came_back = False
        for n in ns:
            pending = self.written.get(n)
            if pending is None or pending.to != peer or pending.started:
                continue
            came_back = True
            self._take_back(pending)
        if came_back:
            self._note_over(peer, released)
        if came_back and self.key is not None and self.key.owner == peer:
            self._take(SenderEvent.RETURN, now, out)
        out.extend(self.see(entry, now))
        out.extend(self._go_on(now))
        return tuple(out)

    def flushed(
        self, peer: Incarnation, id: int, entry: Entry, released: bool, now: float
    ) -> tuple[SenderEffect[P], ...]:
        """H5, if this answers the flush that is under way."""
        out: list[SenderEffect[P]] = []
        if id == self.flush_id and self.key is not None and self.key.owner == peer:
            self._note_over(peer, released)
            self._take(SenderEvent.FLUSHED, now, out)
        else:
            self._take(SenderEvent.LATE, now, out)
        out.extend(self.see(entry, now))
        out.extend(self._go_on(now))
        return tuple(out)

    def begun(self, peer: Incarnation, n: int, now: float) -> tuple[SenderEffect[P], ...]:
        """A message has started: the window has room again, and a tell is done."""
        pending = self.written.get(n)
        if pending is not None and pending.to == peer and not pending.started:
            pending.started = True
            self.open -= 1
            if pending.flow is not None:
                pending.flow.open -= 1 + pending.size_bytes // UNIT_BYTES
            if not pending.ask or pending.resolved:
                del self.written[n]
        # Room in the window matters only for messages that wait.
        return self._go_on(now) if self.queue else ()

    def answered(
        self, peer: Incarnation, n: int, now: float
    ) -> tuple[P | None, tuple[SenderEffect[P], ...]]:
        """A reply came. Returns the message that it resolves, if its caller still waits."""
        pending = self.written.get(n)
        if pending is None or pending.to != peer:
            return None, ()
        del self.written[n]
        if not pending.started:
            self._close(pending)
        effects = self._go_on(now) if self.queue else ()
        if pending.resolved:
            return None, effects
        pending.resolved = True
        return pending, effects

    def withdraw(
        self, pending: P, now: float, *, recalled: bool = False
    ) -> tuple[bool, tuple[SenderEffect[P], ...]]:
        """The caller of a message no longer waits. True: it was never written, so it never runs.

        `recalled`: it was written to a link that had not sent it, and was removed there.
        """
        pending.resolved = True
        if recalled:
            self._take_back(pending)
            return True, self._go_on(now)
        if pending.to is None:
            self.queue.remove(pending)
            self._let_go(pending)
            return True, self._go_on(now)
        if pending.started:
            self.written.pop(pending.n, None)
        return False, ()

    def link_lost(
        self, peer: Incarnation, unsent: Iterable[int], now: float
    ) -> tuple[SenderEffect[P], ...]:
        """H6: the outcome of what was written to that peer is unknown; queued messages stay, in
        order.

        `unsent` messages never left this process, so they cannot have run: they wait again.
        """
        out: list[SenderEffect[P]] = []
        for n in unsent:
            pending = self.written.get(n)
            if pending is not None and pending.to == peer:
                self._take_back(pending)
        self._give_up(peer, out)
        if self.key is not None and self.key.owner == peer:
            self._take(SenderEvent.LINK_LOST, now, out)
        out.extend(self._go_on(now))
        return tuple(out)

    def departing(self, peer: Incarnation, now: float) -> tuple[SenderEffect[P], ...]:
        """H14: the peer leaves: write no more messages to it, flush."""
        out: list[SenderEffect[P]] = []
        if self.entry.owner == peer:
            self.over_epoch = max(self.over_epoch, self.entry.epoch)
        if self.key is not None and self.key.owner == peer:
            self._take(SenderEvent.MISMATCH, now, out)
        return tuple(out)

    def tick(self, now: float) -> tuple[SenderEffect[P], ...]:
        """An armed time is reached: send a wave (N5), give up an overdue flush (H6)."""
        out: list[SenderEffect[P]] = []
        if self.state is SenderState.FLUSHING and now >= self.flush_at + self.limits.hold_timeout_s:
            assert self.key is not None
            self._give_up(self.key.owner, out, unstarted_only=True)
            self._take(SenderEvent.HOLD_TIMEOUT, now, out)
        if self.wave_at and now >= self.wave_at:
            self.wave_at = 0.0
            for pending in self.queue:
                pending.urgent = pending.urgent or (pending.ask and bool(pending.chain))
        out.extend(self._go_on(now))
        if self.state is SenderState.FLUSHING:
            # A wave may have been armed before this, and only one time is armed.
            out.append(Arm(self.flush_at + self.limits.hold_timeout_s))
        return tuple(out)

    def refused(self) -> tuple[P, ...]:
        """Take out all queued messages of a quarantined shard, which gets no home soon (DX-20).

        Written messages may have run: they stay until their owner answers or ends.
        """
        if self.entry.state != "quarantined" or not self.queue:
            return ()
        messages = tuple(self.queue)
        self.queue.clear()
        for pending in messages:
            pending.resolved = True
            self._let_go(pending)
        return messages

    def waiting(self) -> bool:
        """Whether a message is queued, or written but neither started nor returned (H14)."""
        return bool(self.queue) or self.open > 0

    # decisions

    def finishing(self, pending: P) -> bool:
        """N3, N5: whether a draining shard waits for this message, as far as this process knows."""
        if not pending.ask:
            return False
        if pending.urgent or any(map(self._drains, pending.chain)):
            return True
        return pending.behind is not None and any(map(self._drains, pending.behind()))

    def _drains(self, shard: ShardKey) -> bool:
        return shard == self.shard or self.is_moving(shard)

    def _home(self) -> Home | None:
        """The home that may be written to. None while the shard is free, its owner is not up, or
        its owner released it."""
        entry = self.entry
        if entry.state in _HOMELESS or entry.epoch <= self.over_epoch:
            return None
        if not self.is_up(entry.owner):
            return None
        return Home(entry.owner, entry.epoch)

    def _go_on(self, now: float) -> tuple[SenderEffect[P], ...]:
        """Flush if needed (H4), then write what may be written now (H2 or N4)."""
        out: list[SenderEffect[P]] = []
        home = self._home()
        moving = self.entry.state == "moving"
        if self.key is not None and self.key != (self.entry.owner, self.entry.epoch):
            self._take(SenderEvent.MISMATCH, now, out)
        if moving and self.seen_change < self.entry.change:
            self._take(SenderEvent.MOVING, now, out)
        if self.state is not SenderState.FLUSHING and home is not None and self.key in (None, home):
            if moving:
                self._write_lane(home, self.finishing, True, now, out)
            else:
                self._write_heads(home, now, out)
        if moving and any(held.ask and held.chain and not held.urgent for held in self.queue):
            if not self.wave_at:
                self.wave_at = self._next_wave(now)
            out.append(Arm(self.wave_at))
        return tuple(out)

    def _next_wave(self, now: float) -> float:
        return next_wave(self.moving_since, now)

    def _write_heads(self, home: Home, now: float, out: list[SenderEffect[P]]) -> None:
        """H2: write until the window is full. Messages that a running handler awaits go out anyway:
        the window may be full of messages that wait for that very handler."""
        count = min(len(self.queue), max(0, self.limits.window - self.open))
        heads = self.queue[:count]
        del self.queue[:count]
        for pending in heads:
            pending.beyond = False
            self._write(pending, home, self.finishing(pending), now, out)
        if self.queue:
            self._write_lane(home, is_nested, False, now, out)

    def _write_lane(
        self,
        home: Home,
        wanted: Selects[P],
        finishing: bool,
        now: float,
        out: list[SenderEffect[P]],
    ) -> None:
        """N4: a wanted message goes out behind all earlier queued ones to the same entity."""
        goes, self.queue[:] = split_prefix(self.queue, wanted)
        for pending in goes:
            pending.beyond = self.open >= self.limits.window
            self._write(pending, home, finishing or self.finishing(pending), now, out)

    def _write(
        self, pending: P, home: Home, finishing: bool, now: float, out: list[SenderEffect[P]]
    ) -> None:
        self._take(SenderEvent.WRITE, now, out)
        if self.key is None:
            self.flow = self.outflow.to(home.owner)
        self.key = home
        self._let_go(pending)
        pending.to = home.owner
        pending.started = False
        self.post(pending)
        change = self.entry.change
        out.append(WriteRequest(pending, home.owner, home.epoch, change, finishing, self.open))

    def _take(self, happening: SenderEvent, now: float, out: list[SenderEffect[P]]) -> None:
        """Take one step of the table, and do its action."""
        transition = TRANSITIONS[self.state, happening]
        self.state = transition.to[0]
        if happening is SenderEvent.MOVING:
            self.seen_change = self.entry.change
        if transition.does in FLUSHES:
            assert self.key is not None
            self.last_flush += 1
            self.flush_id = self.last_flush
            self.flush_at = now
            out.append(SendFlush(self.key.owner, self.flush_id))
            out.append(Arm(now + self.limits.hold_timeout_s))
        elif self.state is SenderState.UNBOUND:
            self.key = None
            self.flush_id = 0

    def _close(self, pending: P) -> None:
        """A written message has started, or is known not to start there: it no longer counts."""
        self.open -= 1
        if pending.flow is not None:
            pending.flow.open -= 1 + pending.size_bytes // UNIT_BYTES

    def _let_go(self, pending: P) -> None:
        self.held_bytes -= pending.size_bytes
        self.outflow.held_bytes -= pending.size_bytes

    def _hold(self, pending: P) -> None:
        self.held_bytes += pending.size_bytes
        self.outflow.held_bytes += pending.size_bytes
        if not self.queue or self.queue[-1].n < pending.n:
            self.queue.append(pending)
        else:
            insort(self.queue, pending, key=number_of)

    def _take_back(self, pending: P) -> None:
        """A written message has certainly not run: queue it again unless it is resolved."""
        del self.written[pending.n]
        self._close(pending)
        pending.to = None
        if not pending.resolved:
            self._hold(pending)

    def _note_over(self, peer: Incarnation, released: bool) -> None:
        if released and self.key is not None and self.key.owner == peer:
            self.over_epoch = max(self.over_epoch, self.key.epoch)

    def _give_up(
        self, peer: Incarnation, out: list[SenderEffect[P]], unstarted_only: bool = False
    ) -> None:
        for n, pending in list(self.written.items()):
            if pending.to != peer or (unstarted_only and pending.started):
                continue
            del self.written[n]
            if not pending.started:
                self._close(pending)
            if not pending.resolved:
                pending.resolved = True
                out.append(GiveUp(pending))
