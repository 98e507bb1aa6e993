"""What nodes reported to the coordinator and the store does not hold: answers, releases, reverts.

Only the coordinator calls this module. Everything here may be lost with a leadership: owners repeat
a release until the shard's entry changes (H10), and nodes answer the next ping. So nothing here may
be the only copy of a decision.
"""

from __future__ import annotations

from collections.abc import Sequence

from domicile.core.ids import Incarnation, ShardKey
from domicile.core.placement.model import RoleInput, departing
from domicile.core.state.cluster_view import ClusterView
from domicile.core.state.shardmap import Entry

EARLY = 16_384
"""I6: reports of one kind that are kept. Owners repeat what is dropped (H10)."""

OwnerEpoch = tuple[Incarnation, int]
"""An owner and its epoch."""


class Reports:
    """Reports of nodes, kept while they concern the present owner and epoch of a shard."""

    def __init__(self) -> None:
        self.heard_at: dict[Incarnation, float] = {}
        self._known_since: dict[Incarnation, float] = {}
        self._departing_since: dict[Incarnation, float] = {}
        self.released: dict[ShardKey, OwnerEpoch] = {}
        self.asked: dict[ShardKey, OwnerEpoch] = {}
        self.floors: dict[ShardKey, int] = {}
        """Epochs that journals have seen and that are newer than the stored ones (J1)."""
        self._claimed: dict[ShardKey, tuple[OwnerEpoch, int]] = {}
        """Such epochs as their senders reported them; the senders may not be the owners."""
        self._wished: dict[ShardKey, int] = {}
        self._resting: dict[ShardKey, tuple[int, float]] = {}

    def release(self, shard: ShardKey, word: OwnerEpoch, floor: int = 0) -> bool:
        """Note a release; False if it is known already or does not fit.

        `floor` is the epoch that the sender's journal has seen, or 0. `prove` decides if it counts.
        """
        known = self.released.get(shard)
        if known is None and len(self.released) >= EARLY:
            return False
        if floor:
            self._claimed[shard] = (word, floor)
        self.released[shard] = word
        return known != word

    def prove(self, view: ClusterView) -> None:
        """Take the epochs of journals whose senders are owners in the store; of no other sender.

        A release may come before the leader knows its shard's entry, so this can be later."""
        for shard, (word, floor) in tuple(self._claimed.items()):
            entry = view.entry(shard)
            if (entry.owner, entry.epoch) == word:
                del self._claimed[shard]
                self.floor(shard, floor)

    def floor(self, shard: ShardKey, epoch: int) -> None:
        """Note an epoch that a journal has seen; the shard's next epoch must be newer (J1)."""
        if epoch and (shard in self.floors or len(self.floors) < EARLY):
            self.floors[shard] = max(epoch, self.floors.get(shard, 0))

    def ask_revert(self, shard: ShardKey, word: OwnerEpoch) -> None:
        """Note that an owner asks to keep a shard."""
        if shard in self.asked or len(self.asked) < EARLY:
            self.asked[shard] = word

    def reverted(self, shard: ShardKey, entry: Entry, until: float) -> None:
        """A move was reverted. If its owner asked for that, the shard stays there until `until`."""
        if self.asked.get(shard) == (entry.owner, entry.epoch):
            del self.asked[shard]
            self._resting[shard] = (entry.epoch, until)

    def move(self, view: ClusterView, shard: ShardKey, to: Incarnation) -> None:
        """A shard starts to move; remember whether an operator's wish is the reason."""
        record = view.nodes.get(to)
        if record is not None and view.wishes.get(shard) == record.node:
            self._wished[shard] = view.entry(shard).epoch

    def known_since(self, view: ClusterView, now: float) -> dict[Incarnation, float]:
        """When this leadership first saw each record."""
        self._known_since = {node: self._known_since.get(node, now) for node in view.nodes}
        return self._known_since

    def departing_since(self, view: ClusterView, now: float) -> dict[Incarnation, float]:
        """When this leadership first saw each leaving or drained node as departing."""
        leaving = departing(view.nodes, view.drains)
        self._departing_since = {node: self._departing_since.get(node, now) for node in leaving}
        return self._departing_since

    def prune(self, view: ClusterView, now: float) -> None:
        """Forget reports about nodes, owners and epochs that are no longer stored."""
        for node in [node for node in self.heard_at if node not in view.nodes]:
            del self.heard_at[node]
        for shard, word in tuple(self.released.items()):
            if _is_past(view.entry(shard), word):
                del self.released[shard]
        for shard, (word, _) in tuple(self._claimed.items()):
            if _is_past(view.entry(shard), word):
                del self._claimed[shard]
        for shard, floor in tuple(self.floors.items()):
            if view.entry(shard).epoch > floor:
                del self.floors[shard]
        for shard, word in tuple(self.asked.items()):
            entry = view.entry(shard)
            if entry.state != "moving" or (entry.owner, entry.epoch) != word:
                del self.asked[shard]
        for shard, (epoch, until) in tuple(self._resting.items()):
            if now >= until or view.entry(shard).epoch != epoch:
                del self._resting[shard]

    def resting(self, now: float) -> tuple[ShardKey, ...]:
        """The shards that stay where they are for now, after a revert."""
        return tuple(shard for shard, (_, until) in self._resting.items() if now < until)

    def role_view(self, view: ClusterView, role: str, entries: Sequence[Entry]) -> RoleInput:
        """One role for the planner. `entries` may contain drafts that are not stored yet."""
        released = {
            release.shard.shard: release.epoch
            for release in view.releases
            if _current(release.shard, (release.owner, release.epoch), role, entries)
        }
        for shard, word in self.released.items():
            if _current(shard, word, role, entries):
                released[shard.shard] = word[1]
        return RoleInput(
            tuple(entries),
            {shard.shard: node for shard, node in view.wishes.items() if shard.role == role},
            released,
            {
                shard.shard: word[1]
                for shard, word in self.asked.items()
                if _current(shard, word, role, entries)
            },
            self._moves_for_wishes(view, role, entries),
            {
                shard.shard: until
                for shard, (_, until) in self._resting.items()
                if shard.role == role
            },
            needs={shard.shard: types for shard, types in view.needs.items() if shard.role == role},
        )

    def _moves_for_wishes(
        self, view: ClusterView, role: str, entries: Sequence[Entry]
    ) -> dict[int, int]:
        """Epochs of moves to a node that a wish names or named; removing the wish reverts them."""
        wished: dict[int, int] = {}
        for shard in tuple(self._wished):
            if shard.role == role and entries[shard.shard].state != "moving":
                del self._wished[shard]
        for number, entry in enumerate(entries):
            if entry.state != "moving":
                continue
            shard = ShardKey(role, number)
            self.move(view, shard, entry.to)
            if shard in self._wished:
                wished[number] = self._wished[shard]
        return wished


def _is_past(entry: Entry, word: OwnerEpoch) -> bool:
    """Whether a report is by an owner before the present one, or by a process that is no owner."""
    owner, epoch = word
    return entry.epoch > epoch or (entry.epoch == epoch and entry.owner != owner)


def _current(shard: ShardKey, word: OwnerEpoch, role: str, entries: Sequence[Entry]) -> bool:
    """Whether an owner's report is about the shard's present owner and epoch (C4)."""
    if shard.role != role or not 0 <= shard.shard < len(entries):
        return False
    entry = entries[shard.shard]
    return (entry.owner, entry.epoch) == word
