"""Which Leases have ended, as one process sees it (S8). Pure.

The process counts on its own clock from when *it* saw the last change: never from `renewTime`, and
never with a ttl of its own settings. Whoever finds one that has ended deletes it with the
resourceVersion that it saw: a renewal that it has not seen then wins.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from math import inf

from domicile.settings import CLOCK_DRIFT
from domicile.stores.kubernetes.objects import GrantedLease


@dataclass(frozen=True, slots=True)
class _Seen:
    lease: GrantedLease
    ends_at: float


class ObservedLeases:
    """All Leases of a store, and when each of them ends unless it changes."""

    def __init__(self) -> None:
        self._seen: dict[str, _Seen] = {}

    def __contains__(self, name: str) -> bool:
        return name in self._seen

    def listed(self, leases: Iterable[GrantedLease], now: float) -> list[str]:
        """All Leases there are; returns the names of those that are gone."""
        there = {lease.name: lease for lease in leases}
        gone = [name for name in self._seen if name not in there]
        for name in gone:
            del self._seen[name]
        for lease in there.values():
            self.changed(lease, now)
        return gone

    def changed(self, lease: GrantedLease, now: float) -> None:
        """A Lease was seen. Its time begins again, unless it is the version that is known."""
        known = self._seen.get(lease.name)
        if known is not None and known.lease.version == lease.version:
            return
        self._seen[lease.name] = _Seen(lease, now + lease.ttl_s * (1 + CLOCK_DRIFT))

    def gone(self, name: str) -> None:
        """A Lease was deleted."""
        self._seen.pop(name, None)

    def refused(self, lease: GrantedLease, now: float) -> None:
        """It has changed since: the watch will show how. Its time begins again."""
        self._seen[lease.name] = _Seen(lease, now + lease.ttl_s * (1 + CLOCK_DRIFT))

    def due(self, now: float) -> list[GrantedLease]:
        """The Leases that have ended, in the order in which they did."""
        ended = [one for one in self._seen.values() if one.ends_at <= now]
        return [one.lease for one in sorted(ended, key=lambda one: one.ends_at)]

    @property
    def versions(self) -> dict[str, str]:
        """The resourceVersions that were seen last, by name."""
        return {name: one.lease.version for name, one in self._seen.items()}

    @property
    def next_at(self) -> float:
        """When the next one ends."""
        return min([one.ends_at for one in self._seen.values()], default=inf)
