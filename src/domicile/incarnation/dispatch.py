"""What peers say to one incarnation: each kind of message goes straight to the part that takes it.

Made by `incarnation` once and called by the link layer. One table for each direction says who takes
what: the runtime and the control plane bring their own rows, the rest is added here. Nothing here
decides; it holds what is known of links only, and never sends a request.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from domicile.core.ids import Incarnation, LinkKey, ShardKey
from domicile.core.state.cluster_view import ClusterView
from domicile.core.wire import (
    Carry,
    CarryTaken,
    Goodbye,
    GoodbyeAck,
    Ping,
    Pong,
    Told,
    ToOwner,
    ToSender,
)
from domicile.entity.runtime import Runtime
from domicile.links.layer import LinkLayer
from domicile.ports.control import ControlPlane
from domicile.ports.transport import AnswerTakers, Peer, RequestTakers


class Dispatcher:
    """Implements `LinkEvents`. Links are made with it, and told to it by `start`."""

    def __init__(
        self,
        *,
        runtime: Runtime,
        control: ControlPlane,
        members: ClusterView,
        parted: Callable[[Incarnation], None],
    ) -> None:
        self._runtime, self._control, self._members = runtime, control, members
        self._parted = parted
        self._links: LinkLayer | None = None
        self.incoming: dict[LinkKey, None] = {}
        """Links of peers that have said something."""
        self.goodbyes: dict[Incarnation, None] = {}
        """Peers that were told that this process leaves and have not acknowledged it (H14)."""
        self.requests: RequestTakers = {
            **runtime.requests,
            **control.requests,
            Ping: self._on_ping,
            Told: self._on_told,
            GoodbyeAck: lambda link, _: self.goodbyes.pop(link.sender, None),
            Carry: self._on_carry,
        }
        """Who takes what comes from processes that dialled this one, but for requests."""
        self.answers: AnswerTakers = {
            **runtime.answers,
            **control.answers,
            Goodbye: self._on_goodbye,
            CarryTaken: lambda _, taken: runtime.carrier.on_taken(taken.id),
        }
        """Who takes what comes back from processes that this one dialled."""

    def start(self, links: LinkLayer) -> None:
        """The links stand."""
        self._links = links

    # what links report

    def on_requests(self, link: LinkKey, messages: Iterator[ToOwner]) -> None:
        """From a process that dialled this one."""
        self.incoming[link] = None
        self._control.heard(link.sender)
        self._runtime.on_requests(link, messages, self.requests)

    def on_answers(self, peer: Incarnation, messages: Iterator[ToSender]) -> None:
        """Back from a process that this one dialled."""
        self._control.heard(peer)
        takers = self.answers
        for message in messages:
            takers[type(message)](peer, message)

    def on_link_lost(self, peer: Incarnation, reason: str, unsent: tuple[ToOwner, ...]) -> None:
        """A dialled link is lost: it cannot be resumed."""
        self._runtime.sending.link_lost(peer, unsent)
        if peer in self._members.nodes:
            self._control.suspect(peer)

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

    def _on_told(self, link: LinkKey, told: Told) -> None:
        runtime = self._runtime
        if self._control.speaks_for_map(link.sender) and runtime.exists(told.role, told.shard):
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

    def _answer(self, link: LinkKey, message: ToSender) -> None:
        assert self._links is not None, "links report nothing before they stand"
        self._links.answer(link, message)
