"""Is an instance there? Its Lease, as the sharder has seen it change (K1).

A Lease counts as renewed when its spec was seen to change. The time of that is read on the
sharder's own clock; `renewTime` is only compared with itself. The sharder's own changes of labels
are no renewals. Pure.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from domicile.kube.conventions import ABSENT, DEFAULT_DURATION_S, SHARDER, STATE_LABEL
from domicile.kubeapi.objects import KubeLease

ORPHANED_S = 60.0
"""A Lease that has been dead for so long is deleted."""


class InstanceState(Enum):
    """The state of an instance, as its Lease shows it. The values are those of the label."""

    READY = "ready"
    EXPIRED = "expired"
    UNCERTAIN = "uncertain"
    DEAD = "dead"
    ORPHANED = "orphaned"

    @property
    def available(self) -> bool:
        """Whether objects may belong to it. An instance that is late is still there (K2)."""
        return self in (InstanceState.READY, InstanceState.EXPIRED, InstanceState.UNCERTAIN)


Fingerprint = tuple[object, ...]


@dataclass(frozen=True, slots=True)
class ObservedLease:
    """A Lease and when it was seen to change."""

    name: str
    resource_version: str
    holder: str
    duration_s: int
    shown: str
    """The state in its label."""
    was_absent: bool
    """The sharder made it, because there was none."""
    fingerprint: Fingerprint
    changed_at: float

    @property
    def uid(self) -> str:
        """The uid of the Lease; another one of the same name has another uid."""
        return str(self.fingerprint[0])

    @property
    def sharders(self) -> bool:
        """Whether a sharder has taken it."""
        return self.holder == SHARDER

    @property
    def expires_at(self) -> float:
        """When it ends unless it is renewed."""
        return self.changed_at + self.duration_s

    @property
    def uncertain_at(self) -> float:
        """From when on the sharder takes it."""
        return self.expires_at + self.duration_s

    def state(self, now: float) -> InstanceState:
        """The state at a time."""
        if self.holder != self.name:
            orphaned = now >= self.changed_at + ORPHANED_S
            return InstanceState.ORPHANED if orphaned else InstanceState.DEAD
        if now < self.expires_at:
            return InstanceState.READY
        return InstanceState.EXPIRED if now < self.uncertain_at else InstanceState.UNCERTAIN

    def next_change(self, now: float) -> float | None:
        """When its state changes by itself; None if it never does."""
        times = (
            (self.expires_at, self.uncertain_at)
            if self.holder == self.name
            else (self.changed_at + ORPHANED_S,)
        )
        return next((time for time in times if time > now), None)


def observed(lease: KubeLease, before: ObservedLease | None, now: float) -> ObservedLease:
    """What is known of a Lease after it was seen once more."""
    spec = lease.spec
    fingerprint: Fingerprint = (
        lease.metadata.uid,
        spec.holder_identity,
        spec.renew_time,
        spec.acquire_time,
        spec.lease_transitions,
        spec.lease_duration_seconds,
    )
    changed = before is None or before.fingerprint != fingerprint
    return ObservedLease(
        name=lease.metadata.name,
        resource_version=lease.metadata.resource_version,
        holder=spec.holder_identity or "",
        # In full: its holder believes in it, however long it is.
        duration_s=max(spec.lease_duration_seconds or DEFAULT_DURATION_S, 1),
        shown=lease.metadata.label(STATE_LABEL),
        was_absent=bool(lease.metadata.annotation(ABSENT)),
        fingerprint=fingerprint,
        changed_at=now if changed or before is None else before.changed_at,
    )
