"""One shard as one sending incarnation sees it: what waits, what was written where (H1–H6, N3–N5).

A sender writes to a new owner only after the old one answered its flush, or their link is lost;
so order rests on the owners' answers alone. The shell numbers nothing and decides nothing: it
sends what the effects say and reports what comes back.
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
        """The owner said released: as moving until a newer epoch (H3)."""
        self.state = SenderState.UNBOUND
        self.key: Home | None = None
        self.flush_id = 0
        self.last_flush = 0
        self.flush_at = 0.0
        self.seen_change = 0
        """The newest `moving` entry that was flushed for, or seen unbound (H4)."""
        self.queue: list[P] = []
        self.held_bytes = 0
        self.written: dict[int, P] = {}
        self.open = 0
        self.next_n = 1
        self.moving_since = 0.0
        self.wave_at = 0.0

    # what the shell reports

    def number(self) -> int:
        """The next number of this shard: taken at call time (H1)."""
        n = self.next_n
        self.next_n += 1
        return n

    def room(self, size_bytes: int, nested: bool = False) -> bool:
        """Whether one more message may be held, or be on its way to the home (I6)."""
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
        """A new message, numbered and with room (H1)."""
        self._hold(pending)
        return self._go_on(now)

    def see(self, entry: Entry, now: float) -> tuple[SenderEffect[P], ...]:
        """A map entry, from wherever: merged if newer (H3, H4)."""
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
        """Something else changed: what is finishing (N3), or which nodes are up."""
        return self._go_on(now)

    def returned(
        self, peer: Incarnation, ns: Iterable[int], entry: Entry, released: bool, now: float
    ) -> tuple[SenderEffect[P], ...]:
        """H3: reinsert by number, merge the entry, flush."""
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
        """H5, if it answers the flush that is out."""
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
        """It has started: room in the window; nothing more is owed to a tell."""
        pending = self.written.get(n)
        if pending is not None and pending.to == peer and not pending.started:
            pending.started = True
            self.open -= 1
            if pending.flow is not None:
                pending.flow.open -= 1 + pending.size_bytes // UNIT_BYTES
            if not pending.ask or pending.resolved:
                del self.written[n]
        # A wider window lets only what waits go on.
        return self._go_on(now) if self.queue else ()

    def answered(
        self, peer: Incarnation, n: int, now: float
    ) -> tuple[P | None, tuple[SenderEffect[P], ...]]:
        """A reply: the message it resolves, if any is still waiting."""
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

    def withdraw(self, pending: P, now: float) -> tuple[bool, tuple[SenderEffect[P], ...]]:
        """Its caller waits no more. True: it was never written, so it never runs."""
        pending.resolved = True
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
        """H6: what that peer had is unknown; what waits here stays, in order.

        `unsent` never left this process, so it cannot have run: it waits again.
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
        """H14: the peer says goodbye: write nothing more to it, flush."""
        out: list[SenderEffect[P]] = []
        if self.entry.owner == peer:
            self.over_epoch = max(self.over_epoch, self.entry.epoch)
        if self.key is not None and self.key.owner == peer:
            self._take(SenderEvent.MISMATCH, now, out)
        return tuple(out)

    def tick(self, now: float) -> tuple[SenderEffect[P], ...]:
        """An armed time came: waves (N5), and a `Flushed` that is overdue (H6)."""
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
            # A wave may have come before it, and only one time is armed.
            out.append(Arm(self.flush_at + self.limits.hold_timeout_s))
        return tuple(out)

    def refused(self) -> tuple[P, ...]:
        """What waits for a quarantined shard, which gets no home soon: resolved, and gone from here
        (DX-20). What was written may have run, and stays until its owner's answer or end."""
        if self.entry.state != "quarantined" or not self.queue:
            return ()
        messages = tuple(self.queue)
        self.queue.clear()
        for pending in messages:
            pending.resolved = True
            self._let_go(pending)
        return messages

    def waiting(self) -> bool:
        """Whether anything is queued, or written but neither started nor returned (H14)."""
        return bool(self.queue) or self.open > 0

    # decisions

    def finishing(self, pending: P) -> bool:
        """N3, N5: a draining shard waits for this one, as far as is known here."""
        if not pending.ask:
            return False
        if pending.urgent or any(map(self._drains, pending.chain)):
            return True
        return pending.behind is not None and any(map(self._drains, pending.behind()))

    def _drains(self, shard: ShardKey) -> bool:
        return shard == self.shard or self.is_moving(shard)

    def _home(self) -> Home | None:
        """The home that may be written to: none while free, gone, or released by its owner."""
        entry = self.entry
        if entry.state in _HOMELESS or entry.epoch <= self.over_epoch:
            return None
        if not self.is_up(entry.owner):
            return None
        return Home(entry.owner, entry.epoch)

    def _go_on(self, now: float) -> tuple[SenderEffect[P], ...]:
        """H4, then H2 or N4, as far as they go."""
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
        """H2, as far as the window goes; but what a running handler awaits never waits for it:
        the window may be full of mail that waits for that very handler."""
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
        """N4: a wanted message goes out behind all queued ones to the same entity."""
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
        """One step of the table, with what it does."""
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
        """Written, and known to have started or not to start there."""
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
        """Written, but certain not to have run."""
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
