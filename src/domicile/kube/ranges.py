"""Ranges of objects instead of labels: what an instance of a range ring takes and gives (K8).

The space of hashes is cut into a fixed number of ranges. Each has a Lease that names its instance
and the instance's incarnation. These Leases are never renewed: a range is held as long as the
instance's own Lease is, and that one is renewed. So a range is free when its Lease has no holder,
or when the holder's own Lease shows that the holder is over (L1, K1):

- it has no holder, because the instance left or another one took it after two durations of silence;
- it belongs to a later incarnation, which waited for the end of the one before;
- it was deleted, and the longest time that its holder could have had is over.

A range without a Lease of its own may have been deleted, too: its holder makes it again, and others
wait one duration.

Which range is whose follows from the names of the instances alone, so all come to the same answer.
Nobody takes a range that its holder still has: the holder gives it, after its work there has ended.
Pure.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from math import inf

from domicile.errors import ConfigError
from domicile.kube.conventions import INCARNATION
from domicile.kube.hashring import BoundedRing
from domicile.kube.leases import InstanceState, ObservedLease, observed
from domicile.kubeapi.objects import KubeLease

RANGES = 32
MOST_RANGES = 1024

SPACE = 1 << 64

RANGE_RING = "domicile.dev/range-ring"
"""Label of the Leases of a range ring, those of its instances and those of its ranges."""

RANGE = "domicile.dev/range"
"""Label of a range's Lease: which one it is."""

COUNT = "domicile.dev/ranges"
"""Annotation of a range ring's first Lease: into how many ranges it is cut."""

AGAIN_S = 1.0
"""After a write that failed, or whose answer was lost."""


def fnv1a(text: str) -> int:
    """The hash of the API server's `shardRange`: FNV-1a of 64 bits."""
    value = 0xCBF29CE484222325
    for byte in text.encode():
        value = (value ^ byte) * 0x100000001B3 % SPACE
    return value


@dataclass(frozen=True, slots=True)
class HashRange:
    """One of the ranges."""

    index: int
    count: int

    @property
    def begin(self) -> int:
        """The first hash in it."""
        return self.index * SPACE // self.count

    @property
    def end(self) -> int:
        """The first hash after it."""
        return (self.index + 1) * SPACE // self.count

    @property
    def selector(self) -> str:
        """As the API server's `shardSelector` wants it."""
        return f"shardRange(object.metadata.uid, '0x{self.begin:016x}', '0x{self.end:016x}')"

    def holds(self, uid: str) -> bool:
        """Whether an object lies in it."""
        return self.begin <= fnv1a(uid) < self.end


def check_count(count: int) -> None:
    """Refuse a number of ranges that is none."""
    if not 1 <= count <= MOST_RANGES:
        raise ConfigError(f"count={count}: a range ring has 1 to {MOST_RANGES} ranges")


def range_lease(ring: str, index: int) -> str:
    """The name of a range's Lease."""
    return f"{ring}-range-{index}"


@dataclass(frozen=True, slots=True)
class TakeRange:
    """Write us into a range's Lease, if its version is still this one; empty means to make it."""

    index: int
    resource_version: str


@dataclass(frozen=True, slots=True)
class GiveRange:
    """End the work in a range, then leave its Lease without a holder."""

    index: int


@dataclass(frozen=True, slots=True)
class EndInstance:
    """Take the holder out of the Lease of an instance that fell silent (K2)."""

    instance: str
    resource_version: str


@dataclass(frozen=True, slots=True)
class DropInstance:
    """Delete the Lease of an instance that has been gone for long."""

    instance: str
    resource_version: str


RangeStep = TakeRange | GiveRange | EndInstance | DropInstance


@dataclass(slots=True)
class _Instance:
    seen: ObservedLease
    incarnation: str
    made_at: float
    """When this Lease was first seen; minus infinity if it was taken, which shows the end of the
    incarnation before. One that was made shows nothing: somebody may have deleted the last one."""


@dataclass(slots=True)
class RangeView:
    """What one instance knows of its range ring."""

    ring: str
    me: str
    incarnation: str
    count: int
    duration_s: float
    instances: dict[str, _Instance] = field(default_factory=dict[str, _Instance])
    ranges: dict[int, KubeLease] = field(default_factory=dict[int, KubeLease])
    _known: bool = False
    _absent: dict[str, float] = field(default_factory=dict[str, float])
    _bare: dict[int, float] = field(default_factory=dict[int, float])
    """Ranges without a Lease: from when on they may be taken."""
    _asked: dict[str, float] = field(default_factory=dict[str, float])
    _shared: tuple[tuple[str, ...], tuple[str, ...]] = ((), ())

    def listed(self, leases: Collection[KubeLease], now: float) -> None:
        """All Leases there are."""
        gone = set(self.instances) - {one.metadata.name for one in leases}
        for name in gone:
            self._gone(name, now)
        self.ranges.clear()
        for lease in leases:
            self.saw(lease, now)
        for index in range(self.count):
            if index not in self.ranges:
                self._bare.setdefault(index, now + self.duration_s)
        self._known = True

    def saw(self, lease: KubeLease, now: float) -> None:
        """A Lease that is new or has changed."""
        metadata = lease.metadata
        index = metadata.label(RANGE)
        if index:
            if index.isdecimal() and int(index) < self.count:
                self._saw_range(int(index), lease)
            return
        before = self.instances.get(metadata.name)
        if before is not None and before.seen.uid == metadata.uid:
            made_at = before.made_at
        else:
            made_at = -inf if lease.spec.lease_transitions else now
        self._absent.pop(metadata.name, None)
        self.instances[metadata.name] = _Instance(
            observed(lease, None if before is None else before.seen, now),
            metadata.annotation(INCARNATION),
            made_at,
        )

    def _saw_range(self, index: int, lease: KubeLease) -> None:
        if not _older(lease, self.ranges.get(index)):
            self.ranges[index] = lease
            self._bare.pop(index, None)

    def removed(self, lease: KubeLease, now: float) -> None:
        """A Lease was deleted."""
        index = lease.metadata.label(RANGE)
        if index.isdecimal():
            if not _older(lease, self.ranges.get(int(index))):
                self.ranges.pop(int(index), None)
                longest_s = max(float(lease.spec.lease_duration_seconds or 0), self.duration_s)
                self._bare[int(index)] = now + longest_s
        elif not index:
            self._gone(lease.metadata.name, now)

    def _gone(self, name: str, now: float) -> None:
        self.instances.pop(name, None)
        self._absent[name] = now

    # Decisions.

    def available(self, now: float) -> tuple[str, ...]:
        """The instances that share the ranges."""
        return tuple(
            sorted(name for name, one in self.instances.items() if one.seen.state(now).available)
        )

    def wanted(self, now: float) -> tuple[str, ...]:
        """Which instance should have each range; empty texts if there is none."""
        available = self.available(now)
        if self._shared[0] != available or not self._shared[1]:
            ring = BoundedRing(available, slots=self.count)
            self._shared = available, ring.slots() or ("",) * self.count
        return self._shared[1]

    def is_ours(self, lease: KubeLease) -> bool:
        """Whether a range's Lease names this incarnation."""
        named = lease.metadata.annotation(INCARNATION)
        return lease.spec.holder_identity == self.me and named == self.incarnation

    def free_at(self, lease: KubeLease) -> float:
        """From when on a range may be taken; infinity while its holder has it."""
        holder = lease.spec.holder_identity or ""
        if not holder:
            return -inf
        longest_s = float(lease.spec.lease_duration_seconds or 0)
        instance = self.instances.get(holder)
        if instance is None:
            return self._absent.get(holder, inf) + longest_s
        if instance.incarnation != lease.metadata.annotation(INCARNATION):
            return instance.made_at + longest_s
        return inf if instance.seen.holder == holder else -inf

    def steps(self, held: Collection[int], now: float) -> list[RangeStep]:
        """What to do now. The same step comes again only after a pause."""
        if not self._known:
            return []
        for lease in self.ranges.values():
            holder = lease.spec.holder_identity or ""
            if holder and holder not in self.instances:
                self._absent.setdefault(holder, now)
        found: list[RangeStep] = []
        for name, one in self.instances.items():
            state = one.seen.state(now)
            version = one.seen.resource_version
            if name != self.me and state is InstanceState.UNCERTAIN:
                found.append(EndInstance(name, version))
            elif state is InstanceState.ORPHANED:
                found.append(DropInstance(name, version))
        wanted = self.wanted(now)
        for index, owner in enumerate(wanted):
            range = self.ranges.get(index)
            if index in held:
                # Only to one that is surely there: nobody would work in the range meanwhile.
                other = self.instances.get(owner)
                ready = other is not None and other.seen.state(now) is InstanceState.READY
                if range is None:
                    found.append(TakeRange(index, ""))
                elif (owner != self.me and ready) or not self.is_ours(range):
                    found.append(GiveRange(index))
            elif range is not None and self.is_ours(range):
                # Ours by a write whose answer was lost.
                found.append(TakeRange(index, range.metadata.resource_version))
            elif owner == self.me:
                free_at = self._bare.get(index, now) if range is None else self.free_at(range)
                if free_at <= now:
                    version = "" if range is None else range.metadata.resource_version
                    found.append(TakeRange(index, version))
        return [one for one in found if self._due(str(one), now)]

    def _due(self, step: str, now: float) -> bool:
        if now < self._asked.get(step, -inf):
            return False
        self._asked = {name: at for name, at in self._asked.items() if at > now}
        self._asked[step] = now + AGAIN_S
        return True

    def next_time(self, now: float) -> float:
        """When something changes by itself."""
        times = [one.seen.next_change(now) for one in self.instances.values()]
        found = [time for time in times if time is not None]
        found += [self.free_at(lease) for lease in self.ranges.values()]
        found += self._asked.values()
        found += self._bare.values()
        return min((time for time in found if now < time < inf), default=now + 10.0)


def _older(lease: KubeLease, known: KubeLease | None) -> bool:
    """Whether something newer is known. Resource versions of one kind grow."""
    if known is None:
        return False
    told, before = lease.metadata.resource_version, known.metadata.resource_version
    return told.isdecimal() and before.isdecimal() and int(told) < int(before)
