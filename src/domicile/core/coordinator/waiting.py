"""When a coordinator may give homes to shards whose owners are gone (C8, S5).

The coordinator calls this module. After a first start, a loss of most owners or a store outage,
nodes register one by one; the first node must not get all shards. Nothing here chooses a home.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from domicile.core.ids import Incarnation
from domicile.core.placement.model import PlanInput, heard, new, patient
from domicile.core.state.records import NodeRecord
from domicile.core.state.shardmap import Entry
from domicile.settings import CLOCK_DRIFT, Settings

NEVER = float("inf")


class StartupWait:
    """How long one leadership waits before it places shards. All times are of its own clock."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._joined_at = 0.0
        self._first_look: dict[str, float] = {}
        self._returned_at = float("-inf")
        self._rewound_at: float | None = None
        self.at = NEVER
        """When a role that waits may go on."""

    def joined(self, now: float) -> None:
        """A node registered."""
        self._joined_at = now

    def returned(self, now: float) -> None:
        """The store answers again after an outage: nodes may register again soon."""
        self._joined_at = self._returned_at = now

    def returned_recently(self, now: float) -> bool:
        """Whether the store was away and nodes may still have to register again."""
        return now - self._returned_at < self._settings.settle_max_s

    def after_rewind(self, rewound: bool, now: float) -> bool:
        """Whether the store lost commits so recently that a forgotten owner may still run (S5)."""
        if not rewound:
            self._rewound_at = None
            return False
        if self._rewound_at is None:
            self._rewound_at = now
        over_at = self._rewound_at + self._settings.ttl_s * (1 + CLOCK_DRIFT)
        if now < over_at:
            self.at = min(self.at, over_at)
            return True
        return False

    def settled(
        self,
        role: str,
        entries: Sequence[Entry],
        nodes: Mapping[Incarnation, NodeRecord],
        heard_at: Mapping[Incarnation, float],
        now: float,
    ) -> bool:
        """Whether a role's shards may get homes now; if not, `at` says when to ask again."""
        gone = sum(entry.owner not in nodes and entry.state != "quarantined" for entry in entries)
        if not gone or not (self.returned_recently(now) or 2 * gone > len(entries)):
            self._first_look.pop(role, None)
            return True
        ready = [
            node for node, record in nodes.items() if role in record.roles and record.status == "up"
        ]
        wanted = self._settings.min_nodes
        # C7: a node that has just registered gets no shard before the leader hears it.
        if wanted > 1 and sum(node in heard_at for node in ready) >= wanted:
            return True
        first = not any(entry.epoch for entry in entries)
        if first and len(ready) < wanted:
            return False
        first_look = self._first_look.setdefault(role, now)
        settled_at = min(
            self._joined_at + self._settings.settle_s, first_look + self._settings.settle_max_s
        )
        if now < settled_at:
            self.at = min(self.at, settled_at)
            return False
        return True


def patience_ends(view: PlanInput, now: float, settings: Settings) -> float:
    """When a departing node that waits for a new node goes on without it."""
    if not any(
        new(view, node, now, settings.heard_s) and not heard(view, node, now, settings.heard_s)
        for node in view.nodes
    ):
        return float("inf")
    return min(patient(view, now, settings).values(), default=float("inf"))


def silent(view: PlanInput, now: float, heard_s: float) -> bool:
    """Whether some node has not been heard yet; a new leader waits for it (C7)."""
    return any(
        record.status == "up" and not heard(view, node, now, heard_s)
        for node, record in view.nodes.items()
    )
