"""A coordinator's commits beside the map: evictions, burials, and keys that are done with.

Called by the coordinator. Each is conditional on the leader's revision, one per key at a time;
whatever becomes of it, the watch shows it, so an outcome only ends the wait.
"""

from __future__ import annotations

import msgspec

from domicile.core.coordination import Commit
from domicile.core.ids import REWOUND_KEY, Incarnation, node_key, node_lease, pardon_key
from domicile.core.records import encode_record
from domicile.core.txn import MAX_OPERATIONS, At, Delete, Put, Write
from domicile.core.view import StoreView

HOLD_S = 0.2
"""How soon a chore that was done or refused may be tried again."""

SWEEP = b""
"""The key under which sweeping counts as one chore."""


class Chores:
    """Which chores are under way, by the key they are about."""

    def __init__(self, leader: At) -> None:
        self._leader = leader
        self._busy: dict[bytes, str] = {}
        self._after: dict[bytes, float] = {}

    def done(self, txn: str, now: float) -> bool:
        """An outcome came; True if it was one of these."""
        for key, mine in self._busy.items():
            if mine == txn:
                del self._busy[key]
                self._after[key] = now + HOLD_S
                return True
        return False

    def evict(self, view: StoreView, node: Incarnation, txn: str, now: float) -> Commit | None:
        """Mark a node that nobody reaches (C6); it stops by itself when it sees that (L1)."""
        record = view.nodes[node]
        value = encode_record(msgspec.structs.replace(record, status="evicted"))
        return self._begin(view, node, Put(node_key(node), value, node_lease(node)), txn, now)

    def bury(self, view: StoreView, node: Incarnation, txn: str, now: float) -> Commit | None:
        """Remove an evicted node's record once it must have stopped (C5)."""
        return self._begin(view, node, Delete(node_key(node)), txn, now)

    def sweep(self, view: StoreView, txn: str, now: float, rewind_over: bool) -> Commit | None:
        """Delete words about epochs that are over, pardons that were granted, and so on."""
        if not self._free(SWEEP, now):
            return None
        obsolete = [
            key
            for words in (view.releases, view.started)
            for key, word in words.items()
            if view.entry(word.shard).epoch > word.epoch
        ]
        obsolete += [
            pardon_key(shard) for shard in view.pardons if view.entry(shard).state != "quarantined"
        ]
        if view.rewound and rewind_over:
            obsolete.append(REWOUND_KEY)
        if not obsolete:
            return None
        self._busy[SWEEP] = txn
        writes = tuple(map(Delete, obsolete[: MAX_OPERATIONS - 1]))
        return Commit(txn, (self._leader,), writes)

    def _begin(
        self, view: StoreView, node: Incarnation, write: Write, txn: str, now: float
    ) -> Commit | None:
        if not self._free(write.key, now):
            return None
        self._busy[write.key] = txn
        at = At(write.key, view.node_revisions[node])
        return Commit(txn, (self._leader, at), (write,))

    def _free(self, key: bytes, now: float) -> bool:
        if key in self._busy or now < self._after.get(key, float("-inf")):
            return False
        self._after.pop(key, None)
        return True
