"""What all links of one incarnation share: the guard, one flush per turn, acknowledging, writing.

`SessionBatches` is the base of `LinkLayer`; `Session` is that of a dialled and of an accepted link.
Nothing here may hand a byte to a connection without comparing the guard first (L3).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Generic, TypeVar

import msgspec

from domicile.core.ids import Incarnation
from domicile.core.wire import Frame, Packet, decode_packet, encode_packet
from domicile.links.machine import IncomingLink, OutgoingLink
from domicile.ports.clock import Clock, Timer
from domicile.ports.meter import Meter, takes_events
from domicile.ports.transport import Connection, LinkEvents
from domicile.settings import Settings
from domicile.transports.compress import Deflated, deflate, inflate
from domicile.transports.framing import packet_limit_bytes
from domicile.transports.limits import Complaints, peer_of

ACK_DELAY_S = 1.2
"""A frame is acknowledged at most this long after it arrived."""

SOON_MESSAGES = 16
"""Queued messages that are written before the end of the turn: the peer works on them while the
rest is made."""

MANY_MESSAGES = 1_024
"""The same after such an early write. A connection hands only the first packet of a turn to the
kernel at once (`Connection.send`). Later frames wait for the end of the turn anyway, and a larger
frame costs less."""

UNSPOKEN = "link.unspoken"
"""Counts messages that were dropped because the protocol of their link does not have them
(DX-19)."""

M = TypeVar("M")
End = TypeVar("End", bound=OutgoingLink | IncomingLink)


class SessionBatches:
    """The guard and the batching of all links: everything queued in a turn is written at its
    end."""

    def __init__(
        self,
        clock: Clock,
        settings: Settings,
        meter: Meter,
        me: Incarnation,
        guard: Callable[[], bool],
        events: LinkEvents,
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self.clock = clock
        self.settings = settings
        self.meter = meter
        self.tracing = takes_events(meter)
        self.me = me
        self.events = events
        self.aborted = False
        self.complaints = Complaints(clock.now)
        self._max_packet_bytes = packet_limit_bytes(settings.message_bytes)
        self._guard = guard
        self._dirty: list[Session[Any]] = []
        self._flushing = False

    def abort(self) -> None:
        """Send nothing any more; this is final."""
        self.aborted = True
        self._dirty.clear()

    def later(self, delay_s: float, callback: Callable[[], None]) -> Timer:
        """Call back after `delay_s` seconds."""
        return self.clock.call_at(self.clock.now() + delay_s, callback)

    def alive(self) -> bool:
        """L3: checked at the entry of every callback. The guard itself may abort this layer."""
        return not self.aborted and self._guard() and not self.aborted

    def transmit(self, connection: Connection, data: bytes) -> bool:
        """L3: the guard is compared directly before each send; once it fails, nothing is ever
        sent."""
        if not self.alive():
            self.abort()
            return False
        connection.send(data)
        return True

    def decode(self, connection: Connection | None, data: bytes) -> Packet | None:
        """A packet, or None if the bytes are not one: then the caller closes that connection."""
        try:
            if type(data) is Deflated:
                data = inflate(data, self._max_packet_bytes)
            return decode_packet(data)
        except (msgspec.MsgspecError, ValueError, RecursionError) as error:
            self.complain("link.garbage", connection, f"it sent no packet: {error}")
            return None

    def complain(self, count: str, connection: Connection | None, reason: str) -> None:
        """A peer broke the rules: count it, and log it unless too much was logged lately
        (DX-08)."""
        self.meter.count(count)
        self.complaints.about(peer_of(connection), reason)

    def mark(self, side: Session[Any]) -> None:
        """Have `side` write what it can at the end of this turn."""
        if side.dirty or self.aborted:
            return
        side.dirty = True
        if side.held:
            return
        self._dirty.append(side)
        if not self._flushing:
            self._flushing = True
            self._loop.call_soon(self._flush)

    def _flush(self) -> None:
        self._flushing = False
        dirty, self._dirty = self._dirty, []
        for side in dirty:
            side.dirty = False
        if not self.alive():
            return
        for side in dirty:
            side.flush()


class Session(Generic[End]):
    """What a dialled and an accepted link share: batching, acknowledging, writing."""

    def __init__(self, layer: SessionBatches, link: End) -> None:
        self.layer = layer
        self.link = link
        self.connection: Connection | None = None
        self.dirty = False
        self.held = False
        self.ended = False
        self.soon = SOON_MESSAGES
        """Number of queued messages that cause a write before the end of this turn."""
        self._taken: list[Any] = []
        """The messages of the frame that is being read."""
        self._ack_timer: Timer | None = None
        self._ack_at_once = max(1, layer.settings.link_frames // 4)

    def flush(self) -> None:
        """Write what was queued, at the end of a turn."""
        self.soon = SOON_MESSAGES
        self._write_queued()

    def flush_early(self) -> None:
        """Write what was queued, within a turn."""
        self.soon = MANY_MESSAGES
        self._write_queued()

    def _write_queued(self) -> None:
        if self.ended:
            return
        self.write_frames(self.link.pump())
        if self.link.up and self.link.owed >= self._ack_at_once:
            self.write(self.link.bare_ack())

    def hurry(self) -> None:
        """Acknowledge everything at once from now on: the peer waits for it."""
        self._ack_at_once = 1
        if self.link.owed:
            self.layer.mark(self)

    def deliver(self, messages: tuple[M, ...], take: Callable[[Iterator[M]], None]) -> None:
        """Hand over the messages of a frame, as long as this link exists (I1b)."""
        if self.ended:
            return
        # `end` empties the list, which also ends the iterator.
        left = list(messages)
        self._taken = left
        try:
            take(iter(left))
        except Exception as error:
            # The frame counts as received, so the rest of it would be missing and its sender not
            # told (I6).
            if not self.ended:
                self.give_up(f"a message could not be taken here: {error!r}")
            raise
        finally:
            # An idle link keeps nothing of its last frame.
            left.clear()

    def give_up(self, reason: str) -> None:
        """Lose this link permanently, even if its connection could go on."""
        raise NotImplementedError

    def answering(self, answer: Callable[[], None]) -> None:
        """Call `answer`; what it queues here is written at its end, in this turn."""
        self.held = True
        try:
            answer()
        except BaseException:
            self.held = self.dirty = False
            self.layer.mark(self)
            raise
        self.held = False
        if (self.dirty or self.link.ready) and self.layer.alive():
            self.dirty = False
            self.flush()

    def write(self, packet: Packet) -> bool:
        """Hand one packet to the connection; False if there is no connection or the guard fails."""
        if self.connection is None or self.ended:
            return False
        data = encode_packet(packet)
        over_bytes = self.layer.settings.compress_bytes
        if over_bytes and len(data) > over_bytes and isinstance(packet, Frame):
            data = self._smaller(data)
        return self.layer.transmit(self.connection, data)

    def write_frames(self, frames: Iterable[Frame]) -> None:
        """Hand frames to the connection in order."""
        for frame in frames:
            if not self.write(frame):
                return

    def _smaller(self, data: bytes) -> bytes:
        small = deflate(data)
        if small is None:
            return data
        self.layer.meter.count("link.saved_bytes", len(data) - len(small))
        return small

    def taken(self, peer: Incarnation, frame: Frame) -> None:
        """Note that a numbered frame was accepted and must be acknowledged."""
        layer = self.layer
        if layer.tracing:
            layer.meter.event(
                "taken",
                inc=layer.me,
                peer=peer,
                link=self.link.link,
                session=self.link.session,
                no=frame.no,
            )
        if self.link.owed >= self._ack_at_once:
            layer.mark(self)
        elif self._ack_timer is None:
            self._ack_timer = layer.later(ACK_DELAY_S, self._on_ack)

    def end(self) -> None:
        """Stop permanently: no timer, no connection, no state."""
        self.ended = True
        self._taken.clear()
        self.link.end()
        cancel(self._ack_timer)

    def _on_ack(self) -> None:
        self._ack_timer = None
        if self.layer.alive() and self.link.up and self.link.owed:
            self.write(self.link.bare_ack())


def cancel(timer: Timer | None) -> None:
    """Cancel a timer that may not be there."""
    if timer is not None:
        timer.cancel()
