"""Connections (as a transport gives them) and links (as the runtime uses them).

A connection is what TCP offers: ordered packets that may stop at any time. A link is a numbered,
acknowledged session between two incarnations that survives reconnects. Protocols only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, Protocol

from domicile.core.ids import Incarnation, LinkKey
from domicile.core.wire import Flush, Request, ToOwner, ToSender

RequestTakers = dict[type[Any], Callable[[LinkKey, Any], object]]
"""By message type: what handles messages from processes that dialled this one."""

AnswerTakers = dict[type[Any], Callable[[Incarnation, Any], object]]
"""By message type: what handles messages from processes that this one dialled."""


class Connection(Protocol):
    """One direction-agnostic pipe of packets. Never blocks; keeps no buffer past a guard (L3)."""

    def send(self, data: bytes) -> None:
        """Hand a packet to the kernel. After `close` or loss this does nothing.

        What the kernel does not take now waits here. `ConnectionHandler.guard` is compared directly
        before each later attempt; once it fails, what waits is dropped and never sent (L3).
        """
        ...

    def close(self) -> None:
        """Close. The peer's handler is told; this end's `closed` is not called."""
        ...


class ConnectionHandler(Protocol):
    """What happens on a connection. Called on this process's event loop, one at a time."""

    def opened(self, connection: Connection) -> None:
        """The connection is open; `received` may follow."""
        ...

    def received(self, data: bytes) -> None:
        """One whole packet."""
        ...

    def receiving(self) -> None:
        """A long packet is arriving: the peer is there. Called from time to time, before its
        `received`."""
        ...

    def closed(self, reason: str) -> None:
        """The peer closed, the network broke, or dialling failed. Called at most once."""
        ...

    def guard(self) -> bool:
        """L3: whether bytes that were put off may be handed to the kernel now."""
        ...


class Transport(Protocol):
    """Makes connections. `dial` never raises: failure is `handler.closed`."""

    async def listen(self, accept: Callable[[], ConnectionHandler]) -> str:
        """Start to accept; the address that peers can dial."""
        ...

    def dial(self, address: str, handler: ConnectionHandler) -> None:
        """Connect to an address; `handler.opened` or `handler.closed` follows."""
        ...

    async def close(self) -> None:
        """Stop accepting and close every connection; this end's handlers are not called."""
        ...


class Peer(NamedTuple):
    """The peer to dial: an incarnation (its identity) at an address."""

    incarnation: Incarnation
    address: str


class LinkEvents(Protocol):
    """What links report to the runtime."""

    def on_requests(self, link: LinkKey, messages: Iterator[ToOwner]) -> None:
        """The messages of one frame, on a link that a peer dialled, as long as the link exists."""
        ...

    def on_answers(self, peer: Incarnation, messages: Iterator[ToSender]) -> None:
        """The messages of one frame, back on a link that this process dialled."""
        ...

    def on_link_lost(self, peer: Incarnation, reason: str, unsent: tuple[ToOwner, ...]) -> None:
        """A dialled link is lost permanently. What it carried unanswered has an unknown outcome
        (H6). `unsent` are the requests that were never handed to any connection, in order."""
        ...

    def on_disconnected(self, peer: Incarnation) -> None:
        """A connection to or from a peer broke; its link may resume."""
        ...

    def on_link_gone(self, link: LinkKey) -> None:
        """An incoming link's state was dropped; no shard refuses it any more."""
        ...


class Links(Protocol):
    """All links of one incarnation."""

    def send(self, peer: Peer, message: ToOwner, *, control: bool = False) -> None:
        """Queue a message on the link to a peer; dial if there is no link. `control` messages may
        pass requests, never the other way round: `Flush`, `Goodbye` and requests are never
        control."""
        ...

    def post(self, peer: Incarnation, message: Request | Flush, *, at_once: bool = False) -> bool:
        """As `send`, if a link to that peer exists; False if not, and then nothing was done.

        `at_once`: probably nothing more is sent in this turn.
        """
        ...

    def recall(self, peer: Incarnation, request: Request) -> bool:
        """Take a request back that no connection to a peer can have carried: it never runs. False
        if one may have carried it."""
        ...

    def trouble(self, peer: Incarnation) -> str:
        """Why a peer cannot be reached now; empty if its link is up, or not tried yet."""
        ...

    def answer(self, link: tuple[Incarnation, str], message: ToSender) -> None:
        """Queue on an incoming link, back to its sender. Dropped if that link is gone."""
        ...

    def forget(self, peer: Incarnation) -> None:
        """The peer's record is gone: lose its links both ways, take no frame from it (I1b)."""
        ...

    def connected(self, peer: Incarnation) -> bool:
        """Whether the dialled link to a peer has a live connection now."""
        ...

    def pending(self) -> bool:
        """Whether anything sent is still unacknowledged (H14)."""
        ...

    def abort(self) -> None:
        """This incarnation is fenced: close everything, send nothing more (L4)."""
        ...
