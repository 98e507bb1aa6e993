"""What an agent needs of its server: the ports of a driver, a guard, and a place for notes.

A driver is how a third party brings another replicated database into a group;
`domicile.testing.suites.replica_driver` checks one. Every call may be cancelled at any moment and
may be repeated. A driver never decides anything, and never opens a server: only the guard does, who
compares the deadline itself (F2).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

import msgspec

from domicile.failover.chains import ORIGIN, Chain
from domicile.failover.records import Resyncs, WriteQuorum
from domicile.failover.sync_set import InUse


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerFacts:
    """What a driver finds out about its server."""

    up: bool
    run: str = ""
    """Id of this run of the server process."""
    open_epoch: int = 0
    """The epoch for which the guard opened it; 0: clients' writes are refused."""
    follows: str = ""
    """The address of the primary that it follows; empty if it follows nobody."""
    offset: int = 0
    """Everything that it has applied."""
    empty: bool = False
    """Whether it has no data at all."""
    native: str = ""
    """The database's own id of its history: a promotion begins a new one, a replica has that of
    the primary whose data it has."""
    fit: bool = True
    why: str = ""
    """Why it is not fit to become primary."""
    in_use: InUse | None = None
    acknowledged: Mapping[str, int] = field(default_factory=lambda: dict[str, int]())
    """What each follower has confirmed, by its address."""
    resyncs: Resyncs | None = None
    """How often servers came to follow again, as far as this server knows; None: not counted."""


@dataclass(frozen=True, slots=True)
class SavedLoss:
    """What a driver saved before it gave it up (F10)."""

    writes: int
    """How many; -1 if the driver can't count them."""
    where: str


class ReplicaDriver(Protocol):
    """One server. Errors of any call mean that it was not carried out; it is repeated."""

    async def look(self) -> ServerFacts:
        """What the server is now. A server that does not answer in time is not up."""
        ...

    async def stand(self) -> None:
        """Refuse writes, end open sessions, follow nobody; return once all received is applied.

        Keeps data and offset. Also for a server that just started, whatever it was before (F3, F6).
        """
        ...

    async def get_ready(self) -> None:
        """Do what a promotion needs and can be done while the server still follows.

        A switchover names this server. `follow` undoes it, if nothing comes of that. A driver that
        has nothing to do beforehand leaves this as it is.
        """

    async def drain(self) -> None:
        """Refuse clients' writes, and go on feeding the replicas (F11)."""
        ...

    async def dismiss(self) -> None:
        """Refuse the clients' writes that a drain holds back, so that they learn it (FO-15).

        Its epoch is over: a drained server is never opened again in this run without a promotion.
        """
        ...

    async def save(self, kept: int) -> SavedLoss:
        """Save what the server has beyond this offset (F10).

        The server may show another id of its history from then on; its data stays. Servers that
        still follow it must not take that over.
        """
        ...

    async def follow(self, address: str, kept: int) -> None:
        """Refuse writes, give up what is beyond `kept`, and follow the primary at this address.

        Return once the server has all that the primary had when this began (FO-02).
        """
        ...

    async def promote(self, epoch: int) -> None:
        """Become primary, and write one mark of this epoch; clients' writes are still refused."""
        ...

    async def close(self) -> None:
        """Let go of connections. Changes nothing at the server."""
        ...


class Guard(Protocol):
    """The process that holds the server's deadline and closes the server by itself (F2).

    Calls take effect in the order in which they were made, also those that were cancelled.
    """

    async def open(self, epoch: int, run: str, until: float, quorum: WriteQuorum | None) -> None:
        """Accept writes in this epoch, if the deadline lies ahead and the server still has this
        run. With a quorum: acknowledge only what it has (F12). Repeated to change the quorum."""
        ...

    def extend(self, until: float) -> None:
        """The agent's lease is valid until this time, on the clock that both share."""
        ...

    async def shut(self) -> None:
        """Forget the deadline and close the server now."""
        ...


class ServerGate(Protocol):
    """What a guard does to its server, by connections of its own. A driver brings one (F3).

    It runs in the guard's process. It must not need the agent, its driver, or the store.
    """

    async def process_id(self, run: str) -> int:
        """The main process of the server that has this run, by its own word; an error if the
        server that answers has another run."""
        ...

    async def unlock(self, epoch: int, run: str, quorum: WriteQuorum | None) -> None:
        """Accept writes in this epoch, if the server has this run and is promoted; an error if
        not. With a quorum: acknowledge only what it has (F12). Also to change the quorum."""
        ...

    async def lock(self) -> None:
        """Refuse writes and end open sessions, whatever the server is now. Repeated until it
        returns: a server that is down or gone is locked."""
        ...


class ServerProcess(Protocol):
    """The server's process. Its parent is the guard where Domicile starts it (F2)."""

    async def start(self) -> None:
        """Start the server if it does not run; it answers or has failed when this returns."""
        ...

    async def stop(self, *, immediate: bool) -> None:
        """Stop the server, and return when it is gone; `immediate`: no last word to anyone (F3)."""
        ...

    def kill(self) -> None:
        """Send SIGKILL to all that is left of the server, and do not wait for its end: nothing of
        it runs once this returns."""
        ...

    async def running(self) -> bool:
        """Whether the process lives."""
        ...

    async def stranger(self) -> str:
        """What answers at the server's address and was not started by this guard; empty if nothing
        does. A guard that closed it would close somebody else's server."""
        ...

    def outlives(self, pid: int) -> str:
        """Why the server's main process, which has this id, might outlive the guard; empty if it
        is the guard's own child and ends with it (F2)."""
        ...


class ServerNotes(msgspec.Struct, frozen=True, omit_defaults=True):
    """What an agent keeps beside its server's data."""

    server: str
    """The server's id, for ever (FO-01)."""
    folder: str = ""
    """Random, made with the folder that has these notes: two servers of one id differ in it."""
    origin: str = ""
    """The group whose data the server has."""
    chain: Chain = ORIGIN
    native: str = ""
    """The database's own id of the history that the chain ends with; empty: not known yet."""
    was: str = ""
    """The id before that: the server shows it until data of the new one arrives."""
    whole: bool = True
    """False while the data is being replaced: what the chain says is not true then."""
    saving: bool = False
    """While what is given up is saved: the data is still what the chain says, whatever id of its
    history the server shows by then."""
    format: int = 1


def noted(notes: ServerNotes, facts: ServerFacts) -> str:
    """Why the notes do not describe the server's data; empty if they do.

    A server may go on into another history without its agent: while the agent was stopped its
    primary was promoted again, or somebody gave the server orders by hand.
    """
    if not notes.whole:
        return "its data is being replaced"
    if facts.empty or not notes.native or notes.saving:
        return ""
    if facts.native in (notes.native, notes.was):
        return ""
    return f"it went over to history {facts.native} while nobody looked; it follows again first"


class NoteBook(Protocol):
    """Where notes are kept: they survive the agent, and are as durable as the data."""

    def load(self) -> ServerNotes:
        """The notes."""
        ...

    async def save(self, notes: ServerNotes) -> None:
        """Replace the notes; returns once they are durable."""
        ...
