"""What peers say to one incarnation: each kind of message goes straight to the part that takes it.

Made by `incarnation` once and called by the link layer. One table for each direction says who takes
what: the runtime brings its own rows, the rows of membership and control are added here. Nothing
here decides; it holds what is known of links only, and never sends a request.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from domicile.control.elected import Elected
from domicile.core.ids import Incarnation, LinkKey, ShardKey
from domicile.core.state.cluster_view import ClusterView
from domicile.core.wire import (
    AskRevert,
    Carry,
    CarryTaken,
    Goodbye,
    GoodbyeAck,
    Ping,
    Pong,
    Probe,
    Probed,
    Released,
    Suspect,
    Told,
    ToOwner,
    ToSender,
)
from domicile.entity.runtime import AnswerTakers, RequestTakers, Runtime
from domicile.incarnation.peer_probe import PeerProbe
from domicile.links.layer import LinkLayer
from domicile.ports.meter import Meter
from domicile.ports.transport import Peer


class Dispatcher:
    """Implements `LinkEvents`. Links are made with it, and told to it by `start`."""

    def __init__(
        self,
        *,
        runtime: Runtime,
        elected: Elected,
        members: ClusterView,
        meter: Meter,
        probe: PeerProbe,
        hosts: bool,
        suspected: Callable[[Incarnation], None],
        parted: Callable[[Incarnation], None],
    ) -> None:
        self._runtime, self._elected, self._members = runtime, elected, members
        self._meter, self._probe = meter, probe
        self._hosts, self._parted = hosts, parted
        self._links: LinkLayer | None = None
        self.incoming: dict[LinkKey, None] = {}
        """Links of peers that have said something."""
        self.goodbyes: dict[Incarnation, None] = {}
        """Peers that were told that this process leaves and have not acknowledged it (H14)."""
        self.requests: RequestTakers = {
            **runtime.requests,
            Ping: self._on_ping,
            Probe: self._on_probe,
            Probed: lambda link, probed: elected.on_probed(link.sender, probed),
            Suspect: lambda _, suspect: suspected(suspect.node),
            Released: lambda link, released: elected.on_released(link.sender, released),
            AskRevert: lambda link, asked: elected.on_ask_revert(link.sender, asked),
            Told: self._on_told,
            GoodbyeAck: lambda link, _: self.goodbyes.pop(link.sender, None),
            Carry: self._on_carry,
        }
        """Who takes what comes from processes that dialled this one, but for requests."""
        self.answers: AnswerTakers = {
            **runtime.answers,
            Pong: lambda peer, pong: probe.answered(peer, pong.id),
            Goodbye: self._on_goodbye,
            CarryTaken: lambda _, taken: runtime.carrier.on_taken(taken.id),
        }
        """Who takes what comes back from processes that this one dialled."""

    def start(self, links: LinkLayer) -> None:
        """The links stand."""
        self._links = links

    def heard(self, peer: Incarnation) -> None:
        """A peer said something: if this process leads, it knows that the peer is there."""
        if self._hosts and self._elected.leading:
            self._elected.on_heard(peer)

    # what links report

    def on_requests(self, link: LinkKey, messages: Iterator[ToOwner]) -> None:
        """From a process that dialled this one."""
        self.incoming[link] = None
        self.heard(link.sender)
        self._runtime.on_requests(link, messages, self.requests)

    def on_answers(self, peer: Incarnation, messages: Iterator[ToSender]) -> None:
        """Back from a process that this one dialled."""
        self.heard(peer)
        takers = self.answers
        for message in messages:
            takers[type(message)](peer, message)

    def on_link_lost(self, peer: Incarnation, reason: str, unsent: tuple[ToOwner, ...]) -> None:
        """A dialled link is lost for good."""
        self._runtime.sending.link_lost(peer, unsent)
        if peer in self._members.nodes:
            self._probe.lost(peer)

    def on_disconnected(self, peer: Incarnation) -> None:
        """A connection broke: perhaps its other end died (L6)."""
        self._parted(peer)

    def on_link_gone(self, link: LinkKey) -> None:
        """An incoming link's state was dropped."""
        self.incoming.pop(link, None)
        if not any(other.sender == link.sender for other in self.incoming):
            self.goodbyes.pop(link.sender, None)
        self._runtime.on_link_gone(link)

    # what takes more than one call

    def _on_ping(self, link: LinkKey, ping: Ping) -> None:
        self._answer(link, Pong(ping.id))

    def _on_probe(self, link: LinkKey, probe: Probe) -> None:
        if self._leads(link.sender) and probe.node in self._members.nodes:
            self._probe.probe(probe.node)

    def _on_told(self, link: LinkKey, told: Told) -> None:
        runtime = self._runtime
        if self._leads(link.sender) and runtime.exists(told.role, told.shard):
            runtime.learn(ShardKey(told.role, told.shard), told.entry)
            runtime.on_map_changed()

    def _on_carry(self, link: LinkKey, carry: Carry) -> None:
        if self._runtime.on_carry(link.sender, carry):
            self._answer(link, CarryTaken(carry.id))

    def _on_goodbye(self, peer: Incarnation, _: Goodbye) -> None:
        self._runtime.sending.departing(peer)
        links, node = self._links, self._members.nodes.get(peer)
        if links is not None:
            if node is not None:
                links.send(Peer(peer, node.address), GoodbyeAck())
            # H14: it goes once all that it sent is acknowledged.
            links.hurry(peer)

    def _leads(self, peer: Incarnation) -> bool:
        """Whether a peer may speak as the leader (C3). One that is newer than what is known here
        loses nothing but time: what it tells is stored, and the watch shows it."""
        leader = self._members.leader
        if leader is not None and leader.incarnation == peer:
            return True
        self._meter.count("leader.unknown")
        return False

    def _answer(self, link: LinkKey, message: ToSender) -> None:
        assert self._links is not None, "links report nothing before they stand"
        self._links.answer(link, message)
