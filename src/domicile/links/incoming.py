"""The shell of an accepted link, and incoming connections from their first packet on.

Made by `domicile.links.layer` alone. A connection may act for its link only while its session is
the newest one.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from domicile.core.ids import LinkKey
from domicile.core.wire import Frame, Hello, Look, Packet, Reply
from domicile.links.machine import IncomingLink, LinkBroken
from domicile.links.session import Session, SessionBatches, cancel
from domicile.ports.clock import Timer
from domicile.ports.transport import Connection
from domicile.transports.limits import BoundedGuests, host_of


class IncomingSession(Session[IncomingLink]):
    """An incoming link and its current connection, if any."""

    def __init__(
        self,
        layer: SessionBatches,
        key: LinkKey,
        link: IncomingLink,
        drop: Callable[[IncomingSession], None],
    ) -> None:
        super().__init__(layer, link)
        self.key = key
        self._drop = drop
        self._caller: IncomingConnection | None = None
        self._gone_timer: Timer | None = None

    def adopt(self, caller: IncomingConnection, session: int) -> None:
        """The connection of a newer session replaces the current one, which is closed."""
        older, self._caller = self._caller, caller
        self.connection = caller.connection
        caller.serve(self, session)
        if older is not None:
            older.end()
        cancel(self._gone_timer)
        self._gone_timer = None

    def write(self, packet: Packet) -> bool:
        """Hand one packet to the connection, and note the replies in it."""
        if not super().write(packet):
            return False
        if self.layer.tracing and isinstance(packet, Frame):
            for message in packet.messages:
                if isinstance(message, Reply):
                    self.layer.meter.event(
                        "reply",
                        inc=self.layer.me,
                        sender=self.key.sender,
                        role=message.role,
                        shard=message.shard,
                        n=message.n,
                    )
        return True

    def received(self, session: int, frame: Frame) -> None:
        """A frame on a connection of this link; raises `LinkBroken`."""
        messages = self.link.take(session, frame)
        if messages:
            self.taken(self.key.sender, frame)
            take = partial(self.layer.events.on_requests, self.key)
            self.answering(partial(self.deliver, messages, take))
        elif self.link.ready:
            self.layer.mark(self)

    def receiving(self) -> None:
        """A long frame is arriving: acknowledge early, or the peer takes this end for silent."""
        if self.link.up:
            self.write(self.link.bare_ack())

    def left(self, caller: IncomingConnection) -> None:
        """A connection has ended; if it was the newest, the link waits for the next one."""
        if caller is not self._caller or self.ended:
            return
        self._caller = None
        self.connection = None
        self.link.down()
        patience_s = 2 * self.layer.settings.link_timeout_s
        self._gone_timer = self.layer.later(patience_s, self._on_gone)

    def give_up(self, reason: str) -> None:
        """As `Session.give_up`: the sender is told when it tries to resume, and may start a new
        link."""
        self._drop(self)

    def end(self) -> None:
        """Stop permanently, and close the connection."""
        super().end()
        cancel(self._gone_timer)
        caller, self._caller = self._caller, None
        if caller is not None:
            caller.end()

    def _on_gone(self) -> None:
        self._gone_timer = None
        if self.layer.alive() and not self.ended:
            self._drop(self)


class IncomingConnection:
    """One incoming connection: unknown until its hello, then the connection of one link."""

    def __init__(
        self,
        layer: SessionBatches,
        callers: dict[IncomingConnection, None],
        lobby: BoundedGuests[IncomingConnection],
        admit: Callable[[IncomingConnection, Hello], None],
        show: Callable[[IncomingConnection, Look], None],
    ) -> None:
        self.connection: Connection | None = None
        self._session = 0
        self._layer = layer
        self._callers = callers
        self._lobby = lobby
        self._admit = admit
        self._show = show
        self._side: IncomingSession | None = None
        self._over = False
        self._timer: Timer | None = None

    def serve(self, side: IncomingSession, session: int) -> None:
        """The hello was accepted: this connection belongs to `side`."""
        self._side = side
        self._session = session
        self._lobby.leave(self)
        cancel(self._timer)

    def end(self) -> None:
        """Close the connection from this end."""
        connection = self.connection
        self._finish()
        if connection is not None:
            connection.close()

    def opened(self, connection: Connection) -> None:
        """The connection is open; a hello must follow."""
        self.connection = connection
        self._callers[self] = None
        goes = self._lobby.enter(self, host_of(connection))
        if goes is not None:
            goes.turn_out("link.crowded", "others came before it said who it is")
        if self._layer.aborted:
            self.end()
        elif self._layer.alive():
            self._timer = self._layer.later(self._layer.settings.link_timeout_s, self._on_stranger)

    def received(self, data: bytes) -> None:
        """One packet."""
        if self._over:
            return
        if not self._layer.alive():
            if self._side is None:
                # Peers may see a record before its process knows that its lease counts. A dialler
                # whose connection is closed then comes again soon; silence would keep it waiting.
                self.end()
            return
        packet = self._layer.decode(self.connection, data)
        try:
            if packet is None:
                self.end()
            elif self._side is None and isinstance(packet, Hello):
                self._admit(self, packet)
            elif self._side is None and isinstance(packet, Look):
                self._show(self, packet)
            elif self._side is not None and isinstance(packet, Frame):
                self._side.link.weigh(len(data))
                self._side.received(self._session, packet)
            else:
                raise LinkBroken(f"{type(packet).__name__} is out of place")
        except LinkBroken as broken:
            self.turn_out("link.broken", str(broken))

    def turn_out(self, count: str, reason: str) -> None:
        """Close the connection for a reason that the operator should know."""
        self._layer.complain(count, self.connection, reason)
        self.end()

    def receiving(self) -> None:
        """A long packet is arriving."""
        if not self._over and self._side is not None and self._layer.alive():
            self._side.receiving()

    def closed(self, reason: str) -> None:
        """The connection broke, or the peer closed it."""
        self.connection = None
        if self._layer.alive():
            side = self._side
            self._finish()
            if side is not None:
                self._layer.events.on_disconnected(side.key.sender)

    def guard(self) -> bool:
        """L3: whether bytes that were put off may still be sent."""
        return self._layer.alive()

    def _finish(self) -> None:
        if self._over:
            return
        self._over = True
        self.connection = None
        self._callers.pop(self, None)
        self._lobby.leave(self)
        cancel(self._timer)
        if self._side is not None:
            self._side.left(self)

    def _on_stranger(self) -> None:
        if self._side is None and not self._over and self._layer.alive():
            timeout_s = self._layer.settings.link_timeout_s
            self.turn_out("link.stranger", f"it did not say who it is within {timeout_s:g} s")
