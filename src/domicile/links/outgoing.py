"""The shell of a dialled link: dialling, redialling, noticing silence, giving up.

Made by `domicile.links.layer` alone. It must never act on a packet of a connection that it has
left.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from random import Random

import msgspec

from domicile.core.wire import Frame, Hello, Packet, Refused, ToSender, Welcome
from domicile.links.machine import LinkBroken, LinkVoid, OutgoingLink
from domicile.links.session import UNSPOKEN, Session, SessionBatches, cancel
from domicile.links.token import check_welcome, prove_hello
from domicile.ports.clock import Timer
from domicile.ports.transport import Connection, Peer, Transport

log = logging.getLogger("domicile")

SILENCE_S = 2.0
"""Seconds of silence after which a dialled connection that owes an answer is given up."""

BACKOFF_MIN_S = 0.02
BACKOFF_FIRST_S = 0.1
BACKOFF_MAX_S = 0.5
"""A redial waits a random time from the first number to the second, which doubles up to the
third."""


class OutgoingSession(Session[OutgoingLink]):
    """A dialled link and its connection to the peer, which is dialled again as long as the link
    exists."""

    def __init__(
        self,
        layer: SessionBatches,
        link: OutgoingLink,
        peer: Peer,
        transport: Transport,
        random: Random,
        next_session: Callable[[], int],
        lose: Callable[[OutgoingSession, str], None],
        token: str = "",
        stalled: Callable[[], bool] = lambda: False,
    ) -> None:
        super().__init__(layer, link)
        self.peer = peer
        self._token = token
        self._hello: Hello | None = None
        self._transport = transport
        self._random = random
        self._next_session = next_session
        self._lose = lose
        self._stalled = stalled
        self._way: _Way | None = None
        self._failures = 0
        self._turned_away = ""
        self.trouble = ""
        """Why the peer cannot be reached; empty while the link is up."""
        self._quiet_since = 0.0
        self._progress: tuple[int, int] | None = None
        self._fruitless_since: float | None = None
        self._redial_timer: Timer | None = None
        self._silence_timer: Timer | None = None
        self._loss_timer: Timer | None = None

    def flush(self) -> None:
        """Write what was queued in this turn; dial if that has not happened yet."""
        if self.ended:
            return
        if not self.link.session:
            self._expect_loss()
            self._dial()
        if self.link.up and not self.link.unacknowledged:
            self._quiet_since = self.layer.clock.now()
        super().flush()
        if self.link.up and self.link.unacknowledged:
            self._expect_silence()

    def opened(self, connection: Connection) -> None:
        """The connection is open: send the hello."""
        self.connection = connection
        self._quiet_since = self.layer.clock.now()
        hello = self.link.hello()
        if self._token:
            hello = msgspec.structs.replace(hello, proof=prove_hello(self._token, hello))
        self._hello = hello
        self.write(hello)

    def received(self, session: int, packet: Packet) -> None:
        """A packet on the current connection; raises `LinkBroken`."""
        self._quiet_since = self.layer.clock.now()
        if isinstance(packet, Frame):
            self._deliver(packet, self.link.take(session, packet))
        elif isinstance(packet, Welcome):
            self._welcome(session, packet)
        elif not isinstance(packet, Refused):
            raise LinkBroken(f"a {type(packet).__name__} came from the accepting end")
        elif self.link.resumes:
            self._lose(self, f"resume refused: {packet.reason}")
        else:
            self.layer.meter.count("link.turned_away")
            self._turn_away(logging.INFO, "refused this process", packet.reason)

    def _turn_away(self, level: int, what: str, reason: str) -> None:
        """This connection cannot be used: dial again, and log the reason once."""
        self.trouble = f"{self.peer.address} {what}: {reason}"
        if reason != self._turned_away:
            self._turned_away = reason
            log.log(level, "%s", self.trouble)
        self.redial()

    def heard(self) -> None:
        """The peer has sent something."""
        self._quiet_since = self.layer.clock.now()

    def redial(self) -> None:
        """Give up this connection, if there is one, and dial again after a delay."""
        self._leave()
        if self._redial_timer is not None:
            return
        self._expect_loss()
        longest_s = min(BACKOFF_MAX_S, BACKOFF_FIRST_S * 2 ** min(self._failures, 8))
        self._failures += 1
        delay_s = self._random.uniform(BACKOFF_MIN_S, longest_s)
        self._redial_timer = self.layer.later(delay_s, self._on_redial)

    def give_up(self, reason: str) -> None:
        """As `Session.give_up`."""
        self._lose(self, reason)

    def end(self) -> None:
        """Stop permanently."""
        self._leave()
        for timer in (self._redial_timer, self._silence_timer, self._loss_timer):
            cancel(timer)
        super().end()

    def _dial(self) -> None:
        session = self._next_session()
        self.link.dial(session)
        self._way = _Way(self, session)
        self._quiet_since = self.layer.clock.now()
        self._expect_silence()
        self._transport.dial(self.peer.address, self._way)

    def _leave(self) -> None:
        way, self._way = self._way, None
        self.connection = None
        self.link.down()
        if way is not None:
            way.leave()

    def _welcome(self, session: int, welcome: Welcome) -> None:
        assert self._hello is not None, "nobody is welcomed before the hello"
        if not check_welcome(self._token, self._hello, welcome):
            # The process that answers there must not get a single request (DX-07).
            self.layer.meter.count("token.distrusted")
            reason = "it does not prove that it knows the token"
            self._turn_away(logging.WARNING, "is not trusted", reason)
            return
        try:
            frames = self.link.welcome(session, welcome)
        except LinkVoid as void:
            self._lose(self, f"resume impossible: {void}")
            return
        if self._fruitless():
            timeout_s = self.layer.settings.link_timeout_s
            self._lose(self, f"nothing gets through to {self.peer.address} for {timeout_s:g} s")
            return
        self._failures = 0
        self._turned_away = self.trouble = ""
        cancel(self._loss_timer)
        self._loss_timer = None
        self.write_frames(frames)
        unspoken = self.link.release_held()
        if unspoken:
            self.layer.meter.count(UNSPOKEN, unspoken)
        if self.link.ready:
            self.layer.mark(self)
        if self.link.unacknowledged:
            self._expect_silence()

    def _fruitless(self) -> bool:
        """Whether one connection after the other broke before its first frame got through.

        A frame that the peer or the network never lets pass would hold up all others forever.
        """
        now, progress = self.layer.clock.now(), self.link.progress
        if progress != self._progress or not self.link.unacknowledged:
            self._progress, self._fruitless_since = progress, None
            return False
        if self._fruitless_since is None:
            self._fruitless_since = now
        return now - self._fruitless_since >= self.layer.settings.link_timeout_s

    def _deliver(self, frame: Frame, messages: tuple[ToSender, ...]) -> None:
        if messages:
            self.taken(self.peer.incarnation, frame)
        if self.link.ready:
            self.layer.mark(self)
        if messages:
            self.deliver(messages, partial(self.layer.events.on_answers, self.peer.incarnation))

    def _expect_loss(self) -> None:
        if self._loss_timer is None:
            self._loss_timer = self.layer.later(self.layer.settings.link_timeout_s, self._on_loss)

    def _on_loss(self) -> None:
        self._loss_timer = None
        if self.layer.alive() and not self.ended:
            if self._stalled():
                # DX-10: it keeps its shards, and goes on with what it has read. If it does not come
                # back, its record ends, and `forget` loses the link.
                self._expect_loss()
                return
            timeout_s = self.layer.settings.link_timeout_s
            reason = f"no connection to {self.peer.address} for {timeout_s:g} s"
            if self._turned_away:
                reason += f", refused: {self._turned_away}"
            self._lose(self, reason)

    def _on_redial(self) -> None:
        self._redial_timer = None
        if self.layer.alive() and not self.ended:
            self._dial()

    def _expect_silence(self) -> None:
        if self._silence_timer is None:
            due = self._quiet_since + SILENCE_S
            self._silence_timer = self.layer.clock.call_at(due, self._on_silence)

    def _on_silence(self) -> None:
        self._silence_timer = None
        if not self.layer.alive() or self._way is None:
            return
        if self.link.up and not self.link.unacknowledged:
            return
        if self.layer.clock.now() < self._quiet_since + SILENCE_S:
            self._expect_silence()
            return
        self.layer.meter.count("link.silent")
        self.trouble = f"{self.peer.address} does not answer"
        self.redial()


class _Way:
    """One dialled connection. After `leave` it passes on nothing and sends nothing."""

    def __init__(self, side: OutgoingSession, session: int) -> None:
        self._session = session
        self._layer = side.layer
        self._connection: Connection | None = None
        self._side: OutgoingSession | None = side

    def leave(self) -> None:
        """The link goes on without this connection."""
        self._side = None
        if self._connection is not None:
            self._connection.close()

    def opened(self, connection: Connection) -> None:
        """The connection is open."""
        self._connection = connection
        if self._side is None:
            connection.close()
        elif self._side.layer.alive():
            self._side.opened(connection)

    def received(self, data: bytes) -> None:
        """One packet."""
        side = self._side
        if side is None or not side.layer.alive():
            return
        packet = side.layer.decode(self._connection, data)
        try:
            if packet is None:
                side.redial()
            else:
                side.link.weigh(len(data))
                side.received(self._session, packet)
        except LinkBroken as broken:
            side.layer.complain("link.broken", self._connection, str(broken))
            side.redial()

    def receiving(self) -> None:
        """A long packet is arriving."""
        if self._side is not None:
            self._side.heard()

    def closed(self, reason: str) -> None:
        """The connection broke, or could not be made."""
        self._connection = None
        side = self._side
        if side is not None and side.layer.alive():
            side.trouble = f"{side.peer.address}: {reason}"
            side.redial()
            side.layer.events.on_disconnected(side.peer.incarnation)

    def guard(self) -> bool:
        """L3: whether bytes that were put off may still be sent, also after `leave`."""
        return self._layer.alive()
