"""Control planes: what decides who owns what, as one incarnation sees it.

All planes produce the same thing: a shard map with epochs in the store, which every process watches
and caches. The message path knows none of them. An incarnation makes one plane, feeds it what the
store and the peers say, reports to it as an owner, and asks it when it may go. A plane commits and
tells entries; it must never open or close a shard itself.

The words fit a plane without a leader, too. Where a plane `leases` would differ (each owner claims
its shards itself, and the lowest member does what must be done once), a method says how.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from random import Random
from typing import Protocol

from domicile.core.ids import Incarnation, ShardKey
from domicile.core.placement.strategies import Strategy
from domicile.core.state.cluster_view import ClusterView
from domicile.core.state.shardmap import Entry
from domicile.core.state.txn import Changes, Listing
from domicile.core.wire import ToOwner
from domicile.ports.clock import Clock
from domicile.ports.meter import Meter
from domicile.ports.store import Store
from domicile.ports.threads import Threads
from domicile.ports.transport import AnswerTakers, RequestTakers
from domicile.settings import Settings


class OwnerControl(Protocol):
    """What the owner of shards reports to its plane and asks it."""

    def released(self, shard: ShardKey, epoch: int, floor: int) -> None:
        """This process is done with an epoch, finally (H10). Repeated until the store shows it.

        `floor` is the highest epoch that a journal has seen. With a leader the plane tells the
        leader; `leases` would write the release into the shard's own record.
        """
        ...

    def ask_revert(self, shard: ShardKey, epoch: int) -> None:
        """This process could not empty a shard in time and asks to keep it (H10). May get lost.

        `leases` would take the move back itself, by a commit on the shard's own record.
        """
        ...

    def may_place(self, role: str) -> bool:
        """Whether a shard of a role can get its next home soon, or the word that there is none.

        `leases`: whether another node could claim it.
        """
        ...


class ControlPlane(OwnerControl, Protocol):
    """One incarnation's part in the control of its cluster. On its event loop only.

    A client only reports to it and takes entries by it: it feeds no listing and never runs it.
    """

    @property
    def requests(self) -> RequestTakers:
        """The rows for what peers that dialled this process say about control.

        All messages of control need one. A plane without use for a message counts it.
        """
        ...

    @property
    def answers(self) -> AnswerTakers:
        """The rows for what peers that this process dialled say about control."""
        ...

    @property
    def leading(self) -> bool:
        """Whether this process decides for the whole cluster now; never in `leases`."""
        ...

    @property
    def status(self) -> str:
        """What this process does for control now, for people and for tallies."""
        ...

    @property
    def decides(self) -> bool:
        """Whether a decision about any shard can come now. With a leader: whether one is known.

        `leases`: whether another node is there that could claim.
        """
        ...

    @property
    def owed(self) -> Iterable[str]:
        """Leases of the plane's own that the store was not told are over (L5).

        With a leader the leader's; in `leases` that of the member number.
        """
        ...

    # what the store says; the members' view has it already

    def on_listing(self, listing: Listing) -> None:
        """The member listed the store, at first or again."""
        ...

    def on_changes(self, changes: Changes) -> None:
        """The member's watch brought a commit."""
        ...

    # what peers say

    def heard(self, peer: Incarnation) -> None:
        """A peer said something, whatever it was (C7). Once for each batch: must be quick."""
        ...

    def suspect(self, node: Incarnation) -> None:
        """The link to a registered node is lost.

        With a leader the plane tells the leader; `leases` would change its own reach vector.
        """
        ...

    def speaks_for_map(self, peer: Incarnation) -> bool:
        """Whether entries that a peer tells may be taken (C3): the leader's, where there is one.

        `leases`: those of any registered node, which tells only entries it has read or committed.
        """
        ...

    # its time

    async def run(self) -> None:
        """Take part until cancelled or fenced. Start it once the process has joined."""
        ...

    def stand_aside(self) -> None:
        """This node is about to leave (H14): it takes on nothing that another node could do."""
        ...

    def must_stay(self, since: float) -> bool:
        """Whether this node, which announced at `since` that it leaves, must stay for others.

        With a leader: as the last that could lead. `leases`: as the last that could remove the
        records of evicted members.
        """
        ...

    async def resign(self) -> None:
        """Give back what this process holds for control, at once (H14). Harmless if nothing."""
        ...

    async def close(self) -> None:
        """The incarnation ends: no task or timer of its reports is left. `resign` comes after."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class ControlWiring:
    """What a plane is made of: the ports of the process, who it is, and its ways to the others."""

    store: Store
    clock: Clock
    meter: Meter
    settings: Settings
    random: Random
    threads: Threads | None
    """For a user's allocation function."""
    me: Incarnation
    node_id: str
    candidate: bool
    """Whether this process may decide for the cluster."""
    strategy: str | Strategy
    members: ClusterView
    """What the store says, as far as this process knows. To be read only."""
    guard: Callable[[], bool]
    """Whether this incarnation may act (L3)."""
    send: Callable[[Incarnation, ToOwner], None]
    """Say something to another node, ahead of messages; lost if the node is not known."""
    connected: Callable[[Incarnation], bool]
    """Whether a link to a node has a live connection."""
    learn: Callable[[ShardKey, tuple[Entry, ...]], None]
    """Stored entries for this process itself: from the given shard on, one after the other."""
    check_alive: Callable[[Incarnation], None]
    """Have the health port asked whether a node lives (SM-08)."""


PlaneTable = Mapping[str, Callable[[ControlWiring], ControlPlane]]
