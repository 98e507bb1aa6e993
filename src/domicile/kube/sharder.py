"""What the sharder changes, and when: one machine for each ring (K1, K2, K3).

`step(event, now)` takes what was seen or done and returns effects. `sharding` carries them out and
reports back. The machine holds the Leases of the ring, no objects: what it notes of single objects
is bounded (I6).

A *walk* looks at objects and decides about each by itself. A full walk sees all objects of the
ring, main objects before those that they control. A short walk sees only objects that are asked to
let go or have no instance. A change of the instances ends the walk and begins another one, so that
every decision of one walk is made with the same ring.

Whose object may be moved:

- of an available instance: nobody's but its own. It is asked to let go by the drain label (K3);
- of any other instance: everyone's while the sharder holds the instance's Lease (K2). The Lease is
  taken by its resourceVersion, which proves that the instance has not renewed it and that the API
  server works. Holding it keeps the instance from coming back to objects that are being moved. It
  is given back once no object is left, or when there is no instance to move objects to.

An object that another one controls goes where its owner is. It leaves an available instance only
after its owner has (K3). A list may be older than the owner's label, and does not show an owner
that was made after it. So the owner is read by itself before such an object is moved or assigned;
that a walk has not seen it says nothing.

A Lease that somebody deleted ends nothing: its holder acts until its own time is over. So objects
wait for the duration that the Lease had, from when it was seen to be gone; for the longest duration
that an instance may ask for, if no Lease was ever seen.

The sharder holds a Lease by the arithmetic of L1: from when the write was sent, with a margin.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from enum import Enum
from math import inf

from domicile.core.machines import Arm
from domicile.kube.admission import RingView, instance_beside, key_of, role_in
from domicile.kube.conventions import (
    DEFAULT_DURATION_S,
    HASH,
    MAX_DURATION_S,
    GroupResource,
    ObjectName,
    drain_label,
    shard_label,
)
from domicile.kube.hashring import BoundedRing, HashRing, Instances
from domicile.kube.leases import InstanceState, ObservedLease, observed
from domicile.kubeapi.objects import (
    ControllerRing,
    KubeLease,
    OwnerReference,
    PartialObject,
    is_object_name,
)

TAKEN_DURATION_S = 2 * DEFAULT_DURATION_S
"""The duration of a Lease that the sharder has taken."""

TAKEN_MARGIN_S = TAKEN_DURATION_S / 3
"""No move is sent in the last part of it: the answer may take as long as a call may."""

TAKE_AGAIN_S = 2.0
"""After a refused or unanswered take."""

SYNC_S = 300.0
"""A full walk comes at least so often, for objects that the webhook has missed."""

NAMESPACES_S = 1.0
"""After the ring's namespaces changed. Many often change together."""

DRAIN_POLL_S = 2.0
DRAIN_POLL_MOST_S = 15.0

FOLLOW_S = 10.0
"""While owners are waited for, a full walk follows those that were let go of not more often."""

FOLLOW_WALKS = 10
"""Nor more often than so many times as long as the last full walk took."""

RETRY_S = 1.0
RETRY_MOST_S = 30.0

MAX_NOTED = 10_000
"""I6: objects that one walk notes by name: those that wait to be let go."""

MAX_TAKEN = 1_000
"""I6: Leases that the sharder holds at a time."""


class Walk(Enum):
    """Which objects a walk looks at."""

    FULL = "all objects of the ring"
    SHORT = "objects that wait to be let go, and objects without an instance"


class MoveReason(Enum):
    """MoveReason an object's labels are changed."""

    ASSIGN = "it has no instance"
    MOVE = "its instance is gone"
    FOLLOW = "its owner has moved"
    DRAIN = "it belongs to another instance now"
    KEEP = "it belongs to its instance again"


class PatchOutcome(Enum):
    """What became of a change."""

    DONE = "done"
    CONFLICT = "the object has changed since it was read"
    FAILED = "not done, or nobody knows"


# Events.


@dataclass(frozen=True, slots=True)
class LeadingChanged:
    """This sharder acts from now on, or no longer."""

    acting: bool


@dataclass(frozen=True, slots=True)
class RingSeen:
    """The ring's resource, at first and after each change."""

    ring: ControllerRing


@dataclass(frozen=True, slots=True)
class LeasesSeen:
    """All Leases of the ring."""

    leases: tuple[KubeLease, ...]


@dataclass(frozen=True, slots=True)
class LeaseSeen:
    """One Lease, new or changed."""

    lease: KubeLease


@dataclass(frozen=True, slots=True)
class LeaseGone:
    """One Lease was deleted."""

    name: str
    resource_version: str


@dataclass(frozen=True, slots=True)
class NamespacesChanged:
    """The ring's namespaces are others than before."""


@dataclass(frozen=True, slots=True)
class LeaseTaken:
    """A take of a Lease has ended: the Lease as it is now, or None if it was not taken."""

    instance: str
    lease: KubeLease | None
    sent_at: float


@dataclass(frozen=True, slots=True)
class ObjectFound:
    """A walk has come to an object."""

    walk: int
    resource: GroupResource
    group: str
    kind: str
    object: PartialObject


@dataclass(frozen=True, slots=True)
class OwnerRead:
    """The owner of an object was read: as it is now, or None if the ring shares out no such object.
    Without an answer nobody knows."""

    asked: ReadOwner
    owner: PartialObject | None
    answered: bool = True


@dataclass(frozen=True, slots=True)
class Relabelled:
    """A change of labels has ended."""

    walk: int
    change: Relabel
    outcome: PatchOutcome


@dataclass(frozen=True, slots=True)
class WalkEnded:
    """A walk is over, and all its changes have ended."""

    walk: int
    complete: bool


@dataclass(frozen=True, slots=True)
class TimePassed:
    """The time asked for by `Arm` has come."""


Event = (
    LeadingChanged | RingSeen | LeasesSeen | LeaseSeen | LeaseGone | NamespacesChanged
    | LeaseTaken | ObjectFound | OwnerRead | Relabelled | WalkEnded | TimePassed
)  # fmt: skip


# Effects.


@dataclass(frozen=True, slots=True)
class TakeLease:
    """Make the sharder the holder of a Lease, if its version is still this one. An empty version
    means that there is none: make it."""

    instance: str
    resource_version: str


@dataclass(frozen=True, slots=True)
class ReturnLease:
    """Leave a Lease that the sharder holds without a holder."""

    instance: str
    resource_version: str


@dataclass(frozen=True, slots=True)
class DeleteOrphan:
    """Delete an orphaned Lease, if its version is still this one."""

    instance: str
    resource_version: str


@dataclass(frozen=True, slots=True)
class ShowState:
    """Write the state of an instance into the label of its Lease."""

    instance: str
    resource_version: str
    state: InstanceState


@dataclass(frozen=True, slots=True)
class BeginWalk:
    """BeginWalk a walk; a walk before it ends."""

    walk: int
    kind: Walk


@dataclass(frozen=True, slots=True)
class ReadOwner:
    """Read the owner of an object that was found, not from a list and not from a cache (K3)."""

    found: ObjectFound
    owner: OwnerReference


@dataclass(frozen=True, slots=True)
class Relabel:
    """Change an object's labels, if its version is still this one. `shard` None leaves the label
    alone. Ask `may_send` directly before it is sent."""

    walk: int
    name: ObjectName
    resource_version: str
    reason: MoveReason
    shard: str | None
    drain: bool
    former: str = ""
    """The instance that the object belonged to."""


@dataclass(frozen=True, slots=True)
class Overdue:
    """An instance has not let go of an object in time. People have to look (K3)."""

    name: ObjectName
    instance: str
    waited_s: float


@dataclass(frozen=True, slots=True)
class LeaseTooLong:
    """An instance asks for more time than ours may. It is given; people should know."""

    instance: str
    duration_s: int


@dataclass(frozen=True, slots=True)
class LeaseNameTooLong:
    """No label can name this Lease, so no object can belong to its instance. It is left out."""

    instance: str


@dataclass(frozen=True, slots=True)
class CountsChanged:
    """The numbers of the ring's status have changed."""

    shards: int
    available: int


Effect = (
    TakeLease
    | ReturnLease
    | DeleteOrphan
    | ShowState
    | BeginWalk
    | ReadOwner
    | Relabel
    | Overdue
    | LeaseTooLong
    | LeaseNameTooLong
    | CountsChanged
    | Arm
)

_Relabel = Callable[[MoveReason, "str | None", bool], Relabel]


@dataclass(slots=True)
class _Held:
    """A Lease that the sharder holds."""

    resource_version: str
    sent_at: float
    may_move_at: float
    taken_at: float

    @property
    def renew_at(self) -> float:
        return self.sent_at + TAKEN_DURATION_S / 3

    @property
    def until(self) -> float:
        return self.sent_at + TAKEN_DURATION_S - TAKEN_MARGIN_S


@dataclass(slots=True)
class _Round:
    """The walk that is on its way, with what it has seen."""

    number: int
    kind: Walk
    instances: Instances
    began_at: float
    waiting: dict[str, str] = field(default_factory=dict[str, str])
    """Key of a main object that has to be let go, to the instance that still has it (K3)."""
    waiting_count: int = 0
    noted: dict[ObjectName, None] = field(default_factory=dict[ObjectName, None])
    objects: dict[str, int] = field(default_factory=dict[str, int])
    changed: int = 0
    failed: int = 0
    assigned: int = 0
    left: int = 0
    """Objects that this walk could not deal with: a later one has to."""
    again_at: float = inf
    """When the first instance is surely over whose objects this walk had to leave."""


@dataclass(slots=True)
class Counted:
    """What the last full walk has counted, for people."""

    objects: dict[str, int] = field(default_factory=dict[str, int])
    unassigned: int = 0
    draining: int = 0


class SharderMachine:
    """The decisions for one ring. Made when its resource is first seen."""

    def __init__(self, ring: ControllerRing, *, drain_deadline_s: float = 60.0) -> None:
        self.ring = ring
        self._name = ring.metadata.name
        self._shard, self._drain = shard_label(self._name), drain_label(self._name)
        self._drain_deadline_s = drain_deadline_s
        self.acting = False
        self.leases: dict[str, ObservedLease] = {}
        self.instances: Instances = HashRing(())
        self.rings_made = 0
        self.counted = Counted()
        self._known = False  # the Leases were listed once
        self._held: dict[str, _Held] = {}
        self._over_at: dict[str, float] = {}  # of deleted Leases: when their holders are over
        self._long: dict[str, int] = {}
        self._nameless: dict[str, bool] = {}  # Leases that no label can name: whether it was told
        self._asked: dict[str, float] = {}  # takes: when they may be repeated
        self._taking: dict[str, None] = {}
        self._showing: dict[str, str] = {}  # the version that was labelled last
        self._discarding: dict[str, str] = {}
        self._giving: dict[str, str] = {}
        self._round: _Round | None = None
        self._walks = 0
        self._full_at = inf
        self._short_at = inf
        self._failures = 0
        self._polls = 0
        self._waited = 0  # owners that the last full walk had to wait for
        self._follow_at = -inf
        self._draining: dict[ObjectName, tuple[str, float, bool]] = {}
        self._reported: tuple[int, int] | None = None

    # What others ask.

    @property
    def view(self) -> RingView:
        """What the webhook assigns by."""
        return RingView(self._name, self.ring.spec, self.instances)

    def state(self, instance: str, now: float) -> InstanceState:
        """The state of an instance. One without a Lease is dead."""
        lease = self.leases.get(instance)
        return InstanceState.DEAD if lease is None else lease.state(now)

    def overdue(self, now: float) -> Iterator[tuple[ObjectName, str, float]]:
        """Objects that their instances have not let go of in time, and for how long."""
        for name, (instance, since, _) in self._draining.items():
            if now - since >= self._drain_deadline_s:
                yield name, instance, now - since

    def may_send(self, change: Relabel, now: float) -> bool:
        """Whether a change that was decided on may still be sent."""
        current = self._round is not None and self._round.number == change.walk
        if not self.acting or not current:
            return False
        return change.reason is not MoveReason.MOVE or self._may_move(change.former, now)

    # The machine.

    def step(self, event: Event, now: float) -> tuple[Effect, ...]:
        """Take in one event."""
        effects: list[Effect] = []
        match event:
            # Many of these: nothing but the object can have changed.
            case ObjectFound():
                return tuple(self._found(event, now))
            case OwnerRead():
                return tuple(self._owner_read(event))
            case Relabelled():
                self._relabelled(event)
                return ()
            case LeadingChanged(acting):
                self._lead(acting, now)
            case RingSeen(ring):
                changed = ring.spec != self.ring.spec or ring.metadata.annotations != (
                    self.ring.metadata.annotations
                )
                self.ring = ring
                if changed:
                    self.instances = HashRing(())  # made again below
                    self._round, self._full_at = None, now
            case LeasesSeen(leases):
                known, self.leases = self.leases, {}
                named = [lease for lease in leases if is_object_name(lease.metadata.name)]
                self._nameless = {
                    lease.metadata.name: self._nameless.get(lease.metadata.name, False)
                    for lease in leases
                    if not is_object_name(lease.metadata.name)
                }
                for lease in named:
                    self._saw(lease, known.get(lease.metadata.name), now)
                for name in known.keys() - self.leases.keys():
                    self._gone(known[name], now)
                self._known = True
            case LeaseSeen(lease) if not is_object_name(lease.metadata.name):
                self._nameless.setdefault(lease.metadata.name, False)
            case LeaseSeen(lease):
                name = lease.metadata.name
                before = self.leases.get(name)
                # The answer to a take may have come before the watch's older news.
                if not _older(lease.metadata.resource_version, before):
                    self._saw(lease, before, now)
            case LeaseGone(name, version):
                self._nameless.pop(name, None)
                before = self.leases.get(name)
                if before is not None and not _older(version, before):
                    del self.leases[name]
                    self._gone(before, now)
            case NamespacesChanged():
                self._full_at = min(self._full_at, now + NAMESPACES_S)
            case LeaseTaken():
                self._took(event, now)
            case WalkEnded():
                effects += self._walked(event, now)
            case TimePassed():
                pass
        effects += self._settle(now)
        return tuple(effects)

    def _saw(self, lease: KubeLease, before: ObservedLease | None, now: float) -> None:
        name = lease.metadata.name
        seen = self.leases[name] = observed(lease, before, now)
        if seen.holder == name:
            self._over_at.pop(name, None)
        elif before is None and seen.was_absent:
            # Another sharder made it. What the instance's own Lease said is not known here.
            self._over_at.setdefault(name, now + MAX_DURATION_S)

    def _gone(self, lease: ObservedLease, now: float) -> None:
        """Somebody deleted a Lease. Its holder learns it when it renews, or when its time is
        over; until then it acts (K7)."""
        name = lease.name
        for noted in (self._showing, self._discarding, self._giving, self._long):
            noted.pop(name, None)
        if len(self._over_at) >= 2 * MAX_TAKEN:
            self._over_at = {name: at for name, at in self._over_at.items() if at > now}
        free = not lease.holder or lease.sharders
        self._over_at.setdefault(name, now if free else now + lease.duration_s)

    def _lead(self, acting: bool, now: float) -> None:
        self.acting = acting
        self._round = None
        self._held.clear()
        self._taking.clear()
        self._draining.clear()
        self._full_at = now if acting else inf
        self._short_at = inf

    def _settle(self, now: float) -> Iterator[Effect]:
        """What follows from the state and the time, whatever event brought it about."""
        if not self._known:
            return
        for instance, held in list(self._held.items()):
            lease = self.leases.get(instance)
            if lease is None or not lease.sharders:
                del self._held[instance]  # given back, deleted, or somebody else has it
            elif now >= held.until and instance not in self._taking:
                del self._held[instance]
            else:
                held.resource_version = lease.resource_version  # our own label changes it, too
        yield from self._form_ring(now)
        states = {name: lease.state(now) for name, lease in self.leases.items()}
        numbers = (len(states), sum(state.available for state in states.values()))
        if self.acting:
            for name, state in states.items():
                yield from self._tend(self.leases[name], state, now)
            for name in [name for name, told in self._nameless.items() if not told]:
                self._nameless[name] = True
                yield LeaseNameTooLong(name)
            for instance in list(self._held):
                yield from self._renew(instance, now)
            if self._round is None:
                yield from self._begin(now)
            if numbers != self._reported:
                self._reported = numbers
                yield CountsChanged(*numbers)
        else:
            self._reported = None
        yield Arm(self._next_time(now))

    def _form_ring(self, now: float) -> Iterator[Effect]:
        available = tuple(
            sorted(name for name, lease in self.leases.items() if lease.state(now).available)
        )
        former = self.instances.instances
        if available == former:
            return
        bounded = self.ring.metadata.annotation(HASH) == "bounded"
        self.instances = BoundedRing(available) if bounded else HashRing(available)
        self.rings_made += 1
        self._round = None
        self._failures = self._polls = 0
        if self.acting:
            self._full_at = now
            for instance in former:
                if instance not in available:
                    yield from self._take(instance, now)

    def _tend(self, lease: ObservedLease, state: InstanceState, now: float) -> Iterator[Effect]:
        name = lease.name
        if lease.duration_s > MAX_DURATION_S and self._long.get(name) != lease.duration_s:
            self._long[name] = lease.duration_s
            yield LeaseTooLong(name, lease.duration_s)
        if state is InstanceState.UNCERTAIN:
            yield from self._take(name, now)
        if state is InstanceState.ORPHANED:
            free = name not in self._held and name not in self._taking
            if free and self._discarding.get(name) != lease.resource_version:
                self._discarding[name] = lease.resource_version
                yield DeleteOrphan(name, lease.resource_version)
        elif lease.shown != state.value and self._showing.get(name) != lease.resource_version:
            # Only for people, so it is never repeated for the same version.
            self._showing[name] = lease.resource_version
            yield ShowState(name, lease.resource_version, state)

    # Leases of instances that are gone.

    def _may_move(self, instance: str, now: float) -> bool:
        held = self._held.get(instance)
        return held is not None and held.may_move_at <= now < held.until

    def _take(self, instance: str, now: float) -> Iterator[Effect]:
        waits = now < self._asked.get(instance, -inf)
        if waits or instance in self._taking or instance in self._held:
            return
        if len(self._held) + len(self._taking) >= MAX_TAKEN or not is_object_name(instance):
            return
        lease = self.leases.get(instance)
        if lease is not None and lease.state(now) in (
            InstanceState.READY,
            InstanceState.EXPIRED,
        ):
            return
        if len(self._asked) >= 2 * MAX_TAKEN:
            self._asked = {name: at for name, at in self._asked.items() if at > now}
        self._taking[instance] = None
        self._asked[instance] = now + TAKE_AGAIN_S
        yield TakeLease(instance, "" if lease is None else lease.resource_version)

    def _took(self, event: LeaseTaken, now: float) -> None:
        self._taking.pop(event.instance, None)
        if event.lease is None or not self.acting:
            return
        before = self.leases.get(event.instance)
        held = self._held.get(event.instance)
        lease = observed(event.lease, before, now)
        self.leases[event.instance] = lease
        if held is None:
            free_at = self._free_at(event.instance, before, event.sent_at)
            held = _Held("", event.sent_at, free_at, now)
            self._held[event.instance] = held
            self._full_at = min(self._full_at, max(now, held.may_move_at))
        held.resource_version, held.sent_at = lease.resource_version, event.sent_at

    def _free_at(self, instance: str, before: ObservedLease | None, taken_at: float) -> float:
        """From when on no process can act for an instance whose Lease was taken."""
        if before is None:
            self._over_at.setdefault(instance, taken_at + MAX_DURATION_S)
        over_at = self._over_at.get(instance)
        if over_at is not None:
            return max(over_at, taken_at)
        if before is not None and before.holder and not before.sharders:
            return max(before.expires_at, taken_at)
        return taken_at

    def _renew(self, instance: str, now: float) -> Iterator[Effect]:
        held = self._held[instance]
        if instance in self._taking or self._giving.get(instance) == held.resource_version:
            return
        if not self.instances.instances:
            # There is nobody to move objects to: the instance itself may come back for them.
            self._giving[instance] = held.resource_version
            yield ReturnLease(instance, held.resource_version)
        elif now >= max(held.renew_at, self._asked.get(instance, -inf)):
            self._taking[instance] = None
            self._asked[instance] = now + TAKE_AGAIN_S
            yield TakeLease(instance, held.resource_version)

    # Walks.

    def _begin(self, now: float) -> Iterator[Effect]:
        if any(instance not in self._held for instance in self._taking):
            return  # what is found on these can be moved in a moment
        if now >= self._full_at:
            kind = Walk.FULL
            self._full_at = self._short_at = inf
        elif now >= self._short_at:
            kind = Walk.SHORT
            self._short_at = inf
        else:
            return
        self._walks += 1
        self._round = _Round(self._walks, kind, self.instances, now)
        yield BeginWalk(self._walks, kind)

    def _found(self, event: ObjectFound, now: float) -> Iterator[Effect]:
        round = self._round
        if not self.acting or round is None or round.number != event.walk:
            return
        metadata = event.object.metadata
        role = role_in(self.ring.spec, event.resource)
        key = key_of(role, event.group, event.kind, metadata.namespace, metadata.name, metadata)
        wanted = round.instances.owner(key) if key else ""
        shard = metadata.label(self._shard)
        round.objects[shard] = round.objects.get(shard, 0) + 1
        if not wanted:
            return  # it has no key, or there is no instance
        name = ObjectName(event.resource, metadata.namespace, metadata.name)
        draining = metadata.has_label(self._drain)
        version = metadata.resource_version

        def relabel(reason: MoveReason, to: str | None, drain: bool) -> Relabel:
            return Relabel(round.number, name, version, reason, to, drain, shard)

        if shard == wanted:
            self._draining.pop(name, None)
            if draining:
                yield relabel(MoveReason.KEEP, None, False)
        elif shard and shard not in round.instances.instances and not self._may_move(shard, now):
            yield from self._leave_for_later(round, shard, now)
        elif role == "controlled":
            yield from self._found_controlled(round, event, key, relabel)
        elif not shard:
            yield relabel(MoveReason.ASSIGN, wanted, False)
        elif shard not in round.instances.instances:
            yield relabel(MoveReason.MOVE, wanted, False)
        else:
            self._wait_for(round, key, shard)
            yield from self._drain_of(round, name, shard, draining, relabel, now)

    def _leave_for_later(self, round: _Round, shard: str, now: float) -> Iterator[Effect]:
        """An object of an instance that is gone, and that may still act (K2)."""
        held = self._held.get(shard)
        if held is not None and now < held.may_move_at:
            round.again_at = min(round.again_at, held.may_move_at)
        else:
            round.left += 1
            yield from self._take(shard, now)

    def _found_controlled(
        self, round: _Round, event: ObjectFound, key: str, relabel: _Relabel
    ) -> Iterator[Effect]:
        """An object that may be moved or assigned once it is known where its owner is (K3)."""
        metadata = event.object.metadata
        shard = metadata.label(self._shard)
        at = round.waiting.get(key)
        if shard in round.instances.instances:
            if at is not None or round.waiting_count > len(round.waiting):
                round.left += 1
                return
            if round.kind is not Walk.FULL:
                return
        elif at is not None:
            yield relabel(MoveReason.MOVE if shard else MoveReason.ASSIGN, at, False)
            return
        assert metadata.controller is not None, "it has a key"
        yield ReadOwner(event, metadata.controller)

    def _owner_read(self, event: OwnerRead) -> Iterator[Effect]:
        round, found = self._round, event.asked.found
        if not self.acting or round is None or round.number != found.walk:
            return
        if not event.answered:
            round.failed += 1
            return
        metadata = found.object.metadata
        key = key_of(
            "controlled", found.group, found.kind, metadata.namespace, metadata.name, metadata
        )
        shard, wanted = metadata.label(self._shard), round.instances.owner(key)
        to = instance_beside(event.owner, self._shard, round.instances, wanted)
        if to == shard:
            round.left += 1  # the owner was not seen in this walk, and has not been let go of
            return
        reason = MoveReason.ASSIGN
        if shard:
            present = shard in round.instances.instances
            reason = MoveReason.FOLLOW if present else MoveReason.MOVE
        name = ObjectName(found.resource, metadata.namespace, metadata.name)
        version = metadata.resource_version
        yield Relabel(round.number, name, version, reason, to, False, shard)

    def _wait_for(self, round: _Round, key: str, shard: str) -> None:
        round.waiting_count += 1
        if len(round.waiting) < MAX_NOTED:
            round.waiting[key] = shard

    def _drain_of(
        self,
        round: _Round,
        name: ObjectName,
        shard: str,
        draining: bool,
        relabel: _Relabel,
        now: float,
    ) -> Iterator[Effect]:
        instance, since, told = self._draining.get(name, (shard, now, False))
        if instance != shard:
            since, told = now, False
        if len(round.noted) < MAX_NOTED:
            round.noted[name] = None
            overdue = now - since >= self._drain_deadline_s
            self._draining[name] = (shard, since, told or overdue)
            if overdue and not told:
                yield Overdue(name, shard, now - since)
        if not draining:
            yield relabel(MoveReason.DRAIN, None, True)

    def _relabelled(self, event: Relabelled) -> None:
        round = self._round
        if round is None or round.number != event.walk:
            return
        change = event.change
        if event.outcome is not PatchOutcome.DONE:
            round.failed += 1
            return
        round.changed += 1
        if change.shard is not None:
            round.assigned += change.reason is MoveReason.ASSIGN
            round.objects[change.former] -= 1
            round.objects[change.shard] = round.objects.get(change.shard, 0) + 1

    def _walked(self, event: WalkEnded, now: float) -> Iterator[Effect]:
        round = self._round
        if round is None or round.number != event.walk:
            return
        self._round = None
        if not event.complete or round.failed:
            # The server ends a list after a minute, however fast objects are moved meanwhile.
            goes_on = not event.complete and round.changed
            self._failures = 1 if goes_on else self._failures + 1
            pause = min(RETRY_S * 2 ** min(self._failures, 8), RETRY_MOST_S)
            self._full_at = min(self._full_at, now + pause)
            return
        self._failures = 0
        self._full_at = min(self._full_at, max(now, round.again_at))
        self._draining = {
            name: noted for name, noted in self._draining.items() if name in round.noted
        }
        if round.kind is Walk.FULL:
            self._waited = round.waiting_count
            self._follow_at = now + max(FOLLOW_S, FOLLOW_WALKS * (now - round.began_at))
            self._full_at = min(self._full_at, now + SYNC_S)
            self.counted = Counted(
                {name: count for name, count in sorted(round.objects.items()) if name},
                round.objects.get("", 0),
                round.waiting_count,
            )
            yield from self._give_back(round)
        if round.waiting_count:
            if round.kind is Walk.SHORT:
                self._follow(round, now)
            pause = min(DRAIN_POLL_S * 1.5 ** min(self._polls, 8), DRAIN_POLL_MOST_S)
            self._polls += 1
            self._short_at = now + pause
        elif round.kind is Walk.SHORT:
            # All have let go: what they control follows, and the numbers are counted again.
            self._full_at = min(self._full_at, now)
        elif round.left:
            self._full_at = min(self._full_at, now + RETRY_S)

    def _follow(self, round: _Round, now: float) -> None:
        """Some have been let go of, others not yet, and nobody knows when these will be."""
        if round.assigned:
            self._polls = 0  # the webhook misses some
        controls = any(one.controlled_resources for one in self.ring.spec.resources)
        if controls and round.waiting_count < min(self._waited, MAX_NOTED + 1):
            # Until it follows, nobody acts on what an owner controls that was let go of.
            self._full_at = min(self._full_at, max(now, self._follow_at))

    def _give_back(self, round: _Round) -> Iterator[Effect]:
        for instance, held in self._held.items():
            emptied = not round.objects.get(instance) and held.taken_at <= round.began_at
            if emptied and instance not in self._taking:
                self._giving[instance] = held.resource_version
                yield ReturnLease(instance, held.resource_version)

    def _next_time(self, now: float) -> float:
        times = [lease.next_change(now) for lease in self.leases.values()]
        found = [time for time in times if time is not None]
        if self.acting:
            for held in self._held.values():
                found += [held.renew_at, held.until]
            if self._round is None:
                found += [self._full_at, self._short_at]
            found += self._asked.values()
        # What is due now has been done, or waits for an answer.
        return min((time for time in found if time > now), default=now + SYNC_S)


def _older(version: str, known: ObservedLease | None) -> bool:
    """Whether news of a Lease are older than what is known. Versions of one cluster are ordered."""
    if known is None or not (version.isdecimal() and known.resource_version.isdecimal()):
        return False
    return int(version) < int(known.resource_version)
