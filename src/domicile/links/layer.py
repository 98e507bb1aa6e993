"""All links of one incarnation: the shell around the machines in `domicile.links.machine`.

Owns connections, timers and batching. What is queued during one turn of the event loop leaves as
one frame per link at its end. The runtime calls `LinkLayer` through the `Links` port. It is called
back through `LinkEvents`, never from inside its own call of `send`, `answer` or `forget`. Nothing
here may hand a byte to a connection without comparing the guard first (L3).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from random import Random

import msgspec

from domicile.core.ids import Incarnation, LinkKey
from domicile.core.state.agreement import common_protocol, no_common_protocol
from domicile.core.wire import (
    Figures,
    Flush,
    Hello,
    Look,
    Refused,
    Request,
    ToOwner,
    ToSender,
    Welcome,
    encode_packet,
)
from domicile.links.departed import DepartedPeers
from domicile.links.incoming import IncomingConnection, IncomingSession
from domicile.links.machine import PROTOCOLS, Acceptor, OutgoingLink, protocols_of
from domicile.links.outgoing import OutgoingSession
from domicile.links.session import UNSPOKEN, SessionBatches
from domicile.links.token import check_hello, check_look, prove_figures, prove_welcome
from domicile.ports.clock import Clock
from domicile.ports.meter import Meter
from domicile.ports.transport import ConnectionHandler, LinkEvents, Peer, Transport
from domicile.settings import Settings
from domicile.transports.limits import (
    MOST_OF_ONE_HOST,
    MOST_STRANGERS,
    MOST_UNREGISTERED,
    BoundedGuests,
    peer_of,
    plain,
)

UNPROVED = (
    "this cluster has a token and the caller proves none that is good here: give it the "
    "cluster's, by token= or DOMICILE_TOKEN"
)


class LinkLayer(SessionBatches):
    """The links that this incarnation dialled and those that were dialled to it."""

    def __init__(
        self,
        transport: Transport,
        clock: Clock,
        settings: Settings,
        random: Random,
        meter: Meter,
        me: Incarnation,
        cluster: str,
        address: str,
        guard: Callable[[], bool],
        events: LinkEvents,
        protocols: tuple[int, int] = PROTOCOLS,
        token: str = "",
        registered: Callable[[Incarnation], bool] = lambda _: False,
        figures: Callable[[], Figures] | None = None,
        stalled: Callable[[Incarnation], bool] = lambda _: False,
    ) -> None:
        super().__init__(clock, settings, meter, me, guard, events)
        self._token = token
        self.protocols = protocols
        self.cluster = cluster
        self.address = address
        self._transport = transport
        self._random = random
        self._out: dict[Incarnation, OutgoingSession] = {}
        self._in: dict[LinkKey, IncomingSession] = {}
        self._doors: dict[Incarnation, Acceptor] = {}
        self._callers: dict[IncomingConnection, None] = {}
        self._registered = registered
        self._figures = figures
        self._stalled = stalled
        self._lobby: BoundedGuests[IncomingConnection] = BoundedGuests(
            MOST_STRANGERS, MOST_OF_ONE_HOST
        )
        self._unregistered: BoundedGuests[Incarnation] = BoundedGuests(MOST_UNREGISTERED)
        self._sessions: dict[Incarnation, int] = {}
        self._forgotten = DepartedPeers()
        self._hurried: dict[Incarnation, None] = {}
        self._doors_closed = False
        self._reporting: dict[Incarnation, tuple[ToOwner, ...]] = {}
        self._troubles: dict[Incarnation, str] = {}
        """Why the last link to a peer was lost, until there is another one."""

    def send(self, peer: Peer, message: ToOwner, *, control: bool = False) -> None:
        """Queue a message on the link to a peer; dial if there is no link."""
        if self.aborted:
            return
        side = self._out.get(peer.incarnation)
        if side is None:
            if self._is_gone(peer.incarnation):
                self._report_soon(peer.incarnation, () if control else (message,))
                return
            side = self._out[peer.incarnation] = self._dialled(peer)
            if peer.incarnation in self._hurried:
                side.hurry()
        if side.link.send(message, control=control):
            self.mark(side)
        else:
            self.meter.count(UNSPOKEN)

    def post(self, peer: Incarnation, message: Request | Flush, *, at_once: bool = False) -> bool:
        """As `send`, if a link to that peer exists; False if not, and then nothing was done."""
        side = self._out.get(peer)
        if side is None or self.aborted:
            return False
        waiting = side.link.post(message)
        if at_once and side.link.ready and not side.held:
            side.flush()
        elif waiting >= side.soon and side.link.ready:
            side.flush_early()
        elif not side.dirty:
            self.mark(side)
        return True

    def recall(self, peer: Incarnation, request: Request) -> bool:
        """Take a request back that no connection to a peer can have carried; False if one may
        have."""
        side = self._out.get(peer)
        return side is not None and side.link.recall(request.role, request.shard, request.n)

    def trouble(self, peer: Incarnation) -> str:
        """Why a peer cannot be reached now; empty if its link is up, or not tried yet."""
        side = self._out.get(peer)
        if side is None:
            return self._troubles.get(peer, "")
        if side.link.up:
            return ""
        return side.trouble or f"{side.peer.address} has not answered yet"

    def answer(self, link: tuple[Incarnation, str], message: ToSender) -> None:
        """Queue on an incoming link, back to its sender. Dropped if that link is gone."""
        side = self._in.get(link)  # type: ignore[call-overload]
        if side is None or self.aborted:
            return
        waiting = side.link.answer(message)
        if waiting < 0:
            self.complain("link.clogged", side.connection, "it takes none of its answers")
            self._cut_off(link[0], self._doors[link[0]])
        elif waiting >= side.soon and side.link.ready:
            side.flush_early()
        elif not side.dirty:
            self.mark(side)

    def forget(self, peer: Incarnation) -> None:
        """The peer's record is gone: lose its links both ways, take no frame from it (I1b).

        The events follow in a later turn, never inside this call.
        """
        if self.aborted:
            return
        self._forgotten.add(peer)
        self._sessions.pop(peer, None)
        self._troubles.pop(peer, None)
        self._hurried.pop(peer, None)
        side = self._out.pop(peer, None)
        if side is not None:
            unsent = side.link.unsent
            side.end()
            self._report_soon(peer, unsent)
        self._shut(peer)

    def _is_gone(self, peer: Incarnation) -> bool:
        """Whether a peer is remembered as gone. One with a record only shares its hash with a gone
        one."""
        return peer in self._forgotten and not self._registered(peer)

    def _shut(self, peer: Incarnation) -> None:
        """Drop all state of a peer's links to this process; the event follows in a later turn."""
        self._hurried.pop(peer, None)
        self._unregistered.leave(peer)
        door = self._doors.pop(peer, None)
        if door is not None:
            self._cut_off(peer, door)

    def _cut_off(self, peer: Incarnation, door: Acceptor) -> None:
        link = door.drop()
        if link is not None:
            key = LinkKey(peer, link.link)
            self._in.pop(key).end()
            asyncio.get_running_loop().call_soon(self._tell_gone, key)

    def connected(self, peer: Incarnation) -> bool:
        """Whether the dialled link to a peer has a live connection now."""
        side = self._out.get(peer)
        return side is not None and side.link.up

    @property
    def links_up(self) -> int:
        """How many links have a live connection, both ways counted."""
        return sum(side.link.up for side in self._sides())

    @property
    def waiting_bytes(self) -> int:
        """Bytes that were handed to connections and that the kernel has not taken yet."""
        return sum(getattr(side.connection, "waiting_bytes", 0) for side in self._sides())

    def _sides(self) -> list[OutgoingSession | IncomingSession]:
        return [*self._out.values(), *self._in.values()]

    def hurry(self, peer: Incarnation) -> None:
        """A peer leaves and waits for what it sent to be acknowledged (H14)."""
        if peer in self._forgotten:
            return
        self._hurried[peer] = None
        for key, side in self._in.items():
            if key.sender == peer:
                side.hurry()
        if peer in self._out:
            self._out[peer].hurry()

    @property
    def incoming(self) -> tuple[LinkKey, ...]:
        """The links that peers dialled to this process, also those that have not carried anything
        yet."""
        return tuple(self._in)

    def close_doors(self) -> None:
        """Accept no new link (H14): messages that no link has carried wait for a new home."""
        self._doors_closed = True

    def pending(self) -> bool:
        """Whether anything sent is still unacknowledged (H14)."""
        return any(side.link.pending for side in self._out.values()) or any(
            side.link.pending for side in self._in.values()
        )

    def abort(self) -> None:
        """This incarnation is fenced: close everything, send nothing more (L4)."""
        if self.aborted:
            return
        super().abort()
        for dialled in self._out.values():
            dialled.end()
        for accepted in self._in.values():
            accepted.end()
        for caller in list(self._callers):
            caller.end()
        self._out.clear()
        self._in.clear()
        self._doors.clear()

    def accept(self) -> ConnectionHandler:
        """A handler for one incoming connection, for `Transport.listen`."""
        return IncomingConnection(self, self._callers, self._lobby, self._admit, self._show)

    def _dialled(self, peer: Peer) -> OutgoingSession:
        link = OutgoingLink(
            f"{self._random.getrandbits(64):016x}",
            self.settings.link_frames,
            cluster=self.cluster,
            sender=self.me,
            receiver=peer.incarnation,
            address=self.address,
            protocols=self.protocols,
        )
        session = partial(self._next_session, peer.incarnation)
        side = OutgoingSession(
            self, link, peer, self._transport, self._random, session, self._lose, self._token,
            partial(self._stalled, peer.incarnation),
        )  # fmt: skip
        side.trouble = self._troubles.pop(peer.incarnation, "")
        return side

    def _next_session(self, peer: Incarnation) -> int:
        """Session numbers rise over all links to one peer, so that late hellos are recognised as
        late."""
        session = self._sessions[peer] = self._sessions.get(peer, 0) + 1
        return session

    def _lose(self, side: OutgoingSession, reason: str) -> None:
        """A dialled link is lost permanently; the next send to that peer starts a new one."""
        del self._out[side.peer.incarnation]
        unsent = side.link.unsent
        side.end()
        self._troubles[side.peer.incarnation] = side.trouble or reason
        self.meter.count("link.lost")
        self.events.on_link_lost(side.peer.incarnation, reason, unsent)

    def _drop(self, side: IncomingSession) -> None:
        """Forget an incoming link; its connections are closed first."""
        self._doors[side.key.sender].drop()
        self._in.pop(side.key).end()
        self._tell_gone(side.key)

    def _admit(self, caller: IncomingConnection, hello: Hello) -> None:
        """The first packet on an incoming connection."""
        refusal = self._refusal(hello)
        if refusal:
            if refusal is UNPROVED:
                self.complaints.about(peer_of(caller.connection), refusal)
            self._refuse(caller, Refused(refusal))
            return
        if self._doors_closed and LinkKey(hello.sender, hello.link) not in self._in:
            caller.end()
            return
        door = self._doors.get(hello.sender)
        if door is None:
            self._make_room(hello.sender)
            door = self._doors[hello.sender] = Acceptor(self.settings.link_frames)
        admission = door.hello(hello, common_protocol(self.protocols, protocols_of(hello)))
        gone = None
        if admission.gone is not None:
            gone = LinkKey(hello.sender, admission.gone.link)
            self._in.pop(gone).end()
        side = None
        if admission.link is not None:
            key = LinkKey(hello.sender, hello.link)
            side = self._in.get(key)
            if side is None:
                side = self._in[key] = IncomingSession(self, key, admission.link, self._drop)
                if hello.sender in self._hurried:
                    side.hurry()
            side.adopt(caller, hello.session)
        if gone is not None:
            self._tell_gone(gone)
        if side is None or admission.answer is None:
            self._refuse(caller, admission.answer)
        elif side.write(self._proved(hello, admission.answer)):
            side.write_frames(admission.frames)

    def _proved(self, hello: Hello, answer: Welcome | Refused) -> Welcome | Refused:
        """The answer with this end's own proof, if there is a token (DX-07)."""
        if not self._token or isinstance(answer, Refused):
            return answer
        return msgspec.structs.replace(answer, proof=prove_welcome(self._token, hello, answer))

    def _show(self, caller: IncomingConnection, look: Look) -> None:
        """A tool asks how busy this incarnation is. It gets one answer and opens no link."""
        unproved = bool(self._token) and not check_look(self._token, look)
        refusal = UNPROVED if unproved else self._misdirected(look.cluster, look.receiver)
        if unproved:
            self.meter.count("token.refused")
            self.complaints.about(peer_of(caller.connection), refusal)
        if refusal or self._figures is None:
            self._refuse(caller, Refused(refusal or "this process has no figures"))
            return
        figures = self._figures()
        if self._token:
            proof = prove_figures(self._token, look, figures)
            figures = msgspec.structs.replace(figures, proof=proof)
        if caller.connection is not None:
            self.transmit(caller.connection, encode_packet(figures))
        caller.end()

    def _make_room(self, sender: Incarnation) -> None:
        """I6: bound how many senders without a known record are remembered."""
        if self._registered(sender):
            return
        goes = self._unregistered.enter(sender)
        if goes is not None and not self._registered(goes):
            self.meter.count("link.unregistered")
            self._shut(goes)

    def _refusal(self, hello: Hello) -> str:
        # The token is checked first: a caller without a proof learns nothing, not even the
        # cluster's name.
        if self._token and not check_hello(self._token, hello):
            self.meter.count("token.refused")
            return UNPROVED
        if hello.cluster == self.cluster and hello.sender == self.me:
            return f"incarnation {self.me} is this one, which does not dial itself"
        misdirected = self._misdirected(hello.cluster, hello.receiver)
        if misdirected:
            return misdirected
        here, there = self.protocols, protocols_of(hello)
        if not common_protocol(here, there):
            return no_common_protocol(here, there)
        if self._is_gone(hello.sender):
            return f"the record of incarnation {hello.sender} is gone (I1b)"
        return ""

    def _misdirected(self, cluster: str, receiver: Incarnation) -> str:
        if cluster != self.cluster:
            return f"this is cluster {self.cluster!r}, not {plain(cluster)!r}"
        if receiver != self.me:
            return f"this is incarnation {self.me}, not {plain(receiver)}"
        return ""

    def _refuse(self, caller: IncomingConnection, answer: Welcome | Refused | None) -> None:
        if answer is not None and caller.connection is not None:
            self.meter.count("link.refused")
            self.transmit(caller.connection, encode_packet(answer))
        caller.end()

    def _tell_gone(self, key: LinkKey) -> None:
        if self.alive():
            self.meter.count("link.gone")
            self.events.on_link_gone(key)

    def _report_soon(self, peer: Incarnation, unsent: tuple[ToOwner, ...]) -> None:
        if peer not in self._reporting:
            asyncio.get_running_loop().call_soon(self._report_lost, peer)
        self._reporting[peer] = self._reporting.get(peer, ()) + unsent

    def _report_lost(self, peer: Incarnation) -> None:
        unsent = self._reporting.pop(peer)
        if self.alive():
            self.meter.count("link.lost")
            self.events.on_link_lost(peer, f"the record of incarnation {peer} is gone", unsent)
