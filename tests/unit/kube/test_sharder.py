"""The sharder's machine, event by event."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import msgspec
import pytest

from domicile.kube.conventions import ABSENT, MAX_DURATION_S, SHARDER, GroupResource
from domicile.kube.hashring import HashRing, object_key
from domicile.kube.sharder import (
    DRAIN_POLL_MOST_S,
    DRAIN_POLL_S,
    FOLLOW_S,
    FOLLOW_WALKS,
    RETRY_S,
    BeginWalk,
    DeleteOrphan,
    Effect,
    Event,
    LeadingChanged,
    LeaseGone,
    LeaseNameTooLong,
    LeaseSeen,
    LeasesSeen,
    LeaseTaken,
    LeaseTooLong,
    MoveReason,
    ObjectFound,
    Overdue,
    OwnerRead,
    PatchOutcome,
    ReadOwner,
    Relabel,
    Relabelled,
    ReturnLease,
    RingSeen,
    SharderMachine,
    TakeLease,
    TimePassed,
    Walk,
    WalkEnded,
)
from domicile.kubeapi.objects import ControllerRing, KubeLease, PartialObject

SHARD = "shard.alpha.sharding.timebertt.dev/sites"
DRAIN = "drain.alpha.sharding.timebertt.dev/sites"
SECRETS, PODS = GroupResource("", "secrets"), GroupResource("", "pods")
RING = msgspec.convert(
    {
        "metadata": {"name": "sites"},
        "spec": {
            "resources": [
                {
                    "resource": "secrets",
                    "controlledResources": [{"resource": "pods"}],
                }
            ]
        },
    },
    ControllerRing,
)


def lease(
    name: str,
    holder: str | None = None,
    version: int = 1,
    renewed: str = "x",
    *,
    duration_s: int = 15,
    absent: bool = False,
) -> KubeLease:
    spec: dict[str, Any] = {
        "holderIdentity": name if holder is None else holder,
        "renewTime": renewed,
        "leaseDurationSeconds": duration_s,
    }
    metadata: dict[str, Any] = {"name": name, "resourceVersion": str(version)}
    if absent:
        metadata["annotations"] = {ABSENT: "true"}
    return msgspec.convert({"metadata": metadata, "spec": spec}, KubeLease)


class Ring:
    """A machine that acts, and its last walk."""

    def __init__(self, *instances: str) -> None:
        self.machine = SharderMachine(RING)
        self.do(LeasesSeen(tuple(lease(name) for name in instances)), 100.0)
        self.walk = self.begun(self.do(LeadingChanged(True), 100.0))

    def do(self, event: Event, now: float) -> list[Effect]:
        effects = list(self.machine.step(event, now))
        for effect in effects:
            if isinstance(effect, BeginWalk):
                self.walk = effect.walk
        return effects

    def begun(self, effects: list[Effect]) -> int:
        return next(one.walk for one in effects if isinstance(one, BeginWalk))

    def found(
        self,
        shard: str,
        now: float,
        *,
        name: str = "foo",
        drain: bool = False,
        pod: bool = False,
        namespace: str = "default",
    ) -> list[Effect]:
        labels = {**({SHARD: shard} if shard else {}), **({DRAIN: ""} if drain else {})}
        metadata: dict[str, Any] = {
            "name": name, "namespace": namespace, "resourceVersion": "7", "labels": labels,
        }  # fmt: skip
        if pod:
            owner = {"apiVersion": "v1", "kind": "Secret", "name": "foo", "controller": True}
            metadata["ownerReferences"] = [owner]
        one = msgspec.convert({"metadata": metadata}, PartialObject)
        resource, kind = (PODS, "Pod") if pod else (SECRETS, "Secret")
        return self.do(ObjectFound(self.walk, resource, "", kind, one), now)

    def read(self, asked: ReadOwner, shard: str | None, now: float) -> list[Effect]:
        """The owner as it is now; None if there is none."""
        metadata = {"name": asked.owner.name, "labels": {SHARD: shard} if shard else {}}
        owner = None
        if shard is not None:
            owner = msgspec.convert({"metadata": metadata}, PartialObject)
        return self.do(OwnerRead(asked, owner), now)


def kinds(effects: list[Effect], kind: type[Any]) -> list[Any]:
    return [one for one in effects if isinstance(one, kind)]


def test_objects_of_a_living_instance_are_drained_and_what_they_control_waits() -> None:
    ring = Ring("a", "b", "c")  # foo belongs to b
    (change,) = kinds(ring.found("a", 101.0), Relabel)
    assert (change.reason, change.shard, change.drain) == (MoveReason.DRAIN, None, True)
    assert ring.found("a", 101.0, name="child", pod=True) == []
    (effect,) = kinds(ring.do(WalkEnded(ring.walk, True), 102.0), type(None)) or [None]
    assert effect is None
    assert kinds(ring.do(TimePassed(), 104.0), BeginWalk)[0].kind is Walk.SHORT
    # The instance has let go: the next walk is full, and the pod follows.
    assert kinds(ring.do(WalkEnded(ring.walk, True), 105.0), BeginWalk)[0].kind is Walk.FULL
    assert ring.found("b", 105.0) == []
    (asked,) = kinds(ring.found("a", 105.0, name="child", pod=True), ReadOwner)
    (change,) = kinds(ring.read(asked, "b", 105.1), Relabel)
    assert (change.reason, change.shard) == (MoveReason.FOLLOW, "b")


def others_at(ring: Ring, instance: str, count: int) -> list[str]:
    """Names of objects that belong to another instance than the one that has them."""
    names = (f"other-{number}" for number in range(100))
    owner = ring.machine.instances.owner
    found = [name for name in names if owner(object_key("", "Secret", "default", name)) != instance]
    return found[:count]


def begun(ring: Ring, at: float) -> list[BeginWalk]:
    """The walk that begins now, if one does. All instances renew."""
    effects: list[Effect] = []
    for name in ("a", "b", "c"):
        effects += ring.do(LeaseSeen(lease(name, version=int(10 * at), renewed=str(at))), at)
    return kinds([*effects, *ring.do(TimePassed(), at)], BeginWalk)


@pytest.mark.scenario("KR-08", partial=True)
def test_what_a_moved_owner_controls_does_not_wait_for_owners_that_are_not_let_go_of() -> None:
    """While it waits, nobody acts on it."""
    ring = Ring("a", "b", "c")
    ring.found("a", 101.0)
    (stuck,) = others_at(ring, "a", 1)
    ring.found("a", 101.0, name=stuck)
    ring.do(WalkEnded(ring.walk, True), 101.0)
    walks: list[tuple[float, Walk]] = []
    for at in range(102, 200):
        for one in begun(ring, at):
            walks.append((at, one.kind))
            ring.found("a", at, name=stuck, drain=True)
            ring.do(WalkEnded(ring.walk, True), at)
    full = [at for at, kind in walks if kind is Walk.FULL]
    assert full, "foo was let go of: what it controls follows"
    assert full[0] <= 101 + FOLLOW_S + DRAIN_POLL_MOST_S
    assert len(full) == 1, "nothing else was let go of"


def test_full_walks_for_owners_that_move_one_by_one_keep_their_distance() -> None:
    ring = Ring("a", "b", "c")
    names = others_at(ring, "a", 40)
    for name in names:
        ring.found("a", 101.0, name=name)
    ring.do(WalkEnded(ring.walk, True), 101.0)
    full, at = [101.0], 101.0
    on_its_way: list[BeginWalk] = []
    while at < 200.0:
        at += 1.5
        for one in begun(ring, at) or on_its_way:
            for name in names[int(at - 101) // 3 :]:
                ring.found("a", at, name=name, drain=True)
            if one.kind is Walk.FULL:
                full.append(at)
            at += 1.5
            on_its_way = kinds(ring.do(WalkEnded(ring.walk, True), at), BeginWalk)
    assert len(full) > 3
    assert min(b - a for a, b in pairwise(full[1:])) > 1.5 * FOLLOW_WALKS


def test_a_ring_that_shares_out_owners_alone_walks_no_more_often() -> None:
    plain = msgspec.convert(
        {"metadata": {"name": "sites"}, "spec": {"resources": [{"resource": "secrets"}]}},
        ControllerRing,
    )
    ring = Ring("a", "b", "c")
    ring.do(RingSeen(plain), 100.5)
    for name in others_at(ring, "a", 2):
        ring.found("a", 101.0, name=name)
    ring.do(WalkEnded(ring.walk, True), 101.0)
    (stuck,) = others_at(ring, "a", 1)
    for at in range(102, 200):
        for one in begun(ring, at):
            assert one.kind is Walk.SHORT
            ring.found("a", at, name=stuck, drain=True)
            ring.do(WalkEnded(ring.walk, True), at)


@pytest.mark.scenario("KR-06", partial=True)
def test_objects_that_the_webhook_missed_in_a_drain_are_looked_for_soon_again() -> None:
    ring = Ring("a", "b", "c")
    missed, stuck = others_at(ring, "a", 2)
    for name in (missed, stuck):
        ring.found("a", 101.0, name=name)
    ring.do(WalkEnded(ring.walk, True), 101.0)
    began: list[float] = []
    for tenth in range(1010, 1500):
        at = tenth / 10
        for one in begun(ring, at):
            if one.kind is Walk.SHORT:
                began.append(at)
            ring.found("a", at, name=stuck, drain=True)
            if len(began) == 5:  # later than that, a poll comes seldom
                for change in kinds(ring.found("", at, name=missed), Relabel):
                    ring.do(Relabelled(ring.walk, change, PatchOutcome.DONE), at)
            ring.do(WalkEnded(ring.walk, True), at)
    pauses = [b - a for a, b in pairwise(began)]
    assert pauses[3] > 5
    assert pauses[4] < 2 * DRAIN_POLL_S


def test_an_owner_that_the_walk_did_not_see_keeps_what_it_controls() -> None:
    """K3: the list is older than the owner's label, or than the owner."""
    ring = Ring("a", "b", "c")  # foo belongs to b, and is at a
    (asked,) = kinds(ring.found("a", 101.0, name="child", pod=True), ReadOwner)
    assert (asked.owner.kind, asked.owner.name) == ("Secret", "foo")
    assert ring.read(asked, "a", 101.1) == []
    ring.do(WalkEnded(ring.walk, True), 102.0)
    assert kinds(ring.do(TimePassed(), 103.0), BeginWalk)[0].kind is Walk.FULL, "it looks again"


@pytest.mark.parametrize("owner", ["", "gone", None])
def test_what_an_owner_without_an_instance_controls_goes_where_the_owner_will(
    owner: str | None,
) -> None:
    ring = Ring("a", "b", "c")
    (asked,) = kinds(ring.found("a", 101.0, name="child", pod=True), ReadOwner)
    (change,) = kinds(ring.read(asked, owner, 101.1), Relabel)
    assert (change.reason, change.shard, change.former) == (MoveReason.FOLLOW, "b", "a")


def test_an_owner_that_nobody_could_read_keeps_what_it_controls() -> None:
    ring = Ring("a", "b", "c")
    (asked,) = kinds(ring.found("a", 101.0, name="child", pod=True), ReadOwner)
    assert ring.do(OwnerRead(asked, None, answered=False), 101.1) == []
    ring.do(WalkEnded(ring.walk, True), 102.0)
    assert kinds(ring.do(TimePassed(), 105.0), BeginWalk)[0].kind is Walk.FULL


@pytest.mark.parametrize("seen", [True, False])
@pytest.mark.parametrize("gone", [True, False])
def test_what_a_waiting_owner_controls_goes_to_it(seen: bool, gone: bool) -> None:
    """K3: without an instance, or from one that is gone: to where the owner waits, not to where the
    ring wants it."""
    ring = Ring("a", "b")
    ring.do(LeaseSeen(lease("c", "", 3)), 100.5)
    if gone:
        (take,) = kinds(ring.found("c", 100.6, name="child", pod=True), TakeLease)
        ring.do(LeaseTaken(take.instance, lease("c", SHARDER, 9), 101.0), 101.1)
    if seen:
        assert kinds(ring.found("a", 101.2), Relabel)[0].reason is MoveReason.DRAIN
    effects = ring.found("c" if gone else "", 101.3, name="child", pod=True)
    if not seen:
        (asked,) = kinds(effects, ReadOwner)
        effects = ring.read(asked, "a", 101.4)
    (change,) = kinds(effects, Relabel)
    assert change.reason is (MoveReason.MOVE if gone else MoveReason.ASSIGN)
    assert change.shard == "a"
    assert ring.machine.may_send(change, 101.5)


def test_a_lease_that_no_label_can_name_is_no_instance_and_is_named_once() -> None:
    """K4: a label of such a value would make the API server refuse the user's object."""
    long = "x" * 64
    ring = Ring("a", long)
    assert ring.machine.instances.instances == ("a",)
    ring.do(LeaseSeen(lease("y" * 70, version=2)), 101.0)
    assert ring.machine.instances.instances == ("a",)
    assert list(ring.machine.leases) == ["a"]
    machine = SharderMachine(RING)
    machine.step(LeasesSeen((lease("a"), lease(long))), 100.0)
    told = kinds(list(machine.step(LeadingChanged(True), 100.0)), LeaseNameTooLong)
    again = kinds(list(machine.step(LeaseSeen(lease(long, version=2)), 101.0)), LeaseNameTooLong)
    assert (told, again) == ([LeaseNameTooLong(long)], [])


def test_a_drain_is_asked_for_once_however_many_walks_find_it() -> None:
    ring = Ring("a", "b", "c")
    assert len(kinds(ring.found("a", 101.0), Relabel)) == 1
    ring.do(WalkEnded(ring.walk, True), 101.0)
    walks = {ring.walk: None}
    for at in range(103, 300, 10):
        for name in ("a", "b", "c"):
            ring.do(LeaseSeen(lease(name, version=at, renewed=str(at))), at)
        ring.do(TimePassed(), at)
        walks[ring.walk] = None
        assert kinds(ring.found("a", at, drain=True), Relabel) == []
        ring.do(WalkEnded(ring.walk, True), at)
    assert len(walks) > 5


def test_an_object_of_no_namespace_is_moved_as_any_other() -> None:
    ring = Ring("a", "b", "c")
    mine = HashRing(("a", "b", "c")).owner(object_key("", "Secret", "", "foo"))
    other = next(name for name in ("a", "b", "c") if name != mine)
    (change,) = kinds(ring.found(other, 101.0, namespace=""), Relabel)
    assert change.reason is MoveReason.DRAIN
    assert change.name.namespace == ""


def test_a_drain_that_takes_too_long_is_named_once() -> None:
    ring = Ring("a", "b", "c")
    ring.found("a", 101.0)
    ring.do(WalkEnded(ring.walk, True), 101.0)
    told: list[Overdue] = []
    for at in range(103, 300, 10):
        ring.do(LeaseSeen(lease("a", version=at, renewed=str(at))), at)
        for name in ("b", "c"):
            ring.do(LeaseSeen(lease(name, version=at, renewed=str(at))), at)
        ring.do(TimePassed(), at)
        told += kinds(ring.found("a", at, drain=True), Overdue)
        ring.do(WalkEnded(ring.walk, True), at)
    assert [(one.instance, str(one.name)) for one in told] == [("a", "secrets default/foo")]
    assert told[0].waited_s >= 60
    assert [instance for _, instance, _ in ring.machine.overdue(300.0)] == ["a"]


def test_an_instance_that_is_gone_loses_its_lease_before_its_objects() -> None:
    ring = Ring("a", "b", "c")
    for at in (110.0, 125.0, 129.0):
        for name in ("b", "c"):
            ring.do(LeaseSeen(lease(name, version=int(at), renewed=str(at))), at)
    (take,) = kinds(ring.do(TimePassed(), 131.0), TakeLease)
    assert (take.instance, take.resource_version) == ("a", "1")
    taken = lease("a", SHARDER, 140)
    effects = ring.do(LeaseTaken("a", taken, 131.0), 131.2)
    assert kinds(effects, BeginWalk)
    (change,) = kinds(ring.found("a", 131.3), Relabel)
    assert (change.reason, change.shard) == (MoveReason.MOVE, "b")
    assert ring.machine.may_send(change, 131.4)
    # Held by L1's arithmetic, from when the write was sent.
    assert not ring.machine.may_send(change, 131.0 + 20.1)


def kept(ring: Ring, instances: str, gone: str, since: float, until: float) -> None:
    """Instances go on renewing their Leases, and no walk moves an object of one that is gone."""
    at = since
    while at < until:
        at = min(at + 10.0, until)
        for name in instances:
            ring.do(LeaseSeen(lease(name, version=int(at * 10), renewed=str(at))), at)
        changes = kinds(ring.found(gone, at), Relabel)
        assert not [one for one in changes if one.reason is MoveReason.MOVE]
        ring.do(WalkEnded(ring.walk, True), at)


def test_objects_of_an_instance_that_never_had_a_lease_wait_for_the_longest_time() -> None:
    ring = Ring("b", "c")
    (take,) = kinds(ring.found("ghost", 101.0), TakeLease)
    assert take.resource_version == ""
    ring.do(LeaseTaken("ghost", lease("ghost", SHARDER, 50, absent=True), 101.0), 101.1)
    ring.do(WalkEnded(ring.walk, True), 101.2)
    assert kinds(ring.found("ghost", 101.3), Relabel) == []
    # It waits without walking again and again.
    assert kinds(ring.do(TimePassed(), 103.0), BeginWalk)
    assert kinds(ring.found("ghost", 103.1), Relabel) == []
    ring.do(WalkEnded(ring.walk, True), 103.2)
    assert not kinds(ring.do(TimePassed(), 106.0), BeginWalk)
    over_at = 101.0 + MAX_DURATION_S
    kept(ring, "bc", "ghost", 106.0, over_at - 5.0)
    ring.do(LeaseTaken("ghost", lease("ghost", SHARDER, 51), over_at - 3.0), over_at - 2.0)
    assert kinds(ring.found("ghost", over_at - 1.0), Relabel) == []
    ring.do(TimePassed(), over_at)
    (change,) = kinds(ring.found("ghost", over_at + 0.1), Relabel)
    assert change.reason is MoveReason.MOVE


@pytest.mark.parametrize("relisted", [False, True])
def test_objects_of_a_deleted_lease_wait_for_the_time_that_it_had(relisted: bool) -> None:
    """K2, K7: its holder renews every 30 s, and acts for up to 120 s when it is cut off."""
    ring = Ring("b", "c")
    ring.do(LeaseSeen(lease("a", version=2, duration_s=120)), 102.0)
    if relisted:
        effects = ring.do(LeasesSeen((lease("b"), lease("c"))), 110.0)
    else:
        effects = ring.do(LeaseGone("a", "3"), 110.0)
    (take,) = kinds(effects, TakeLease)
    assert (take.instance, take.resource_version) == ("a", "")
    ring.do(LeaseTaken("a", lease("a", SHARDER, 4, absent=True), 110.0), 110.1)
    kept(ring, "bc", "a", 110.2, 227.0)
    ring.do(LeaseTaken("a", lease("a", SHARDER, 5, absent=True), 228.0), 229.0)
    assert kinds(ring.found("a", 229.5), Relabel) == []
    ring.do(TimePassed(), 230.0)
    (change,) = kinds(ring.found("a", 230.1), Relabel)
    assert (change.reason, change.former) == (MoveReason.MOVE, "a")


def test_a_deleted_lease_that_was_given_back_still_has_its_time() -> None:
    """The sharder makes the Lease, leaves it to nobody because there is no other instance, and
    takes it again when one comes."""
    ring = Ring("a")
    ring.do(LeaseSeen(lease("a", version=2, duration_s=120)), 101.0)
    ring.do(LeaseGone("a", "3"), 110.0)
    ring.do(LeaseTaken("a", lease("a", SHARDER, 4, absent=True), 110.0), 110.1)
    ring.do(LeaseSeen(lease("a", "", 5, absent=True)), 110.2)
    ring.do(LeaseSeen(lease("b", version=6)), 111.0)
    ring.do(TimePassed(), 113.0)
    (take,) = kinds(ring.found("a", 114.0), TakeLease)
    assert take.resource_version == "5"
    ring.do(LeaseTaken("a", lease("a", SHARDER, 7, absent=True), 114.0), 114.1)
    assert kinds(ring.found("a", 114.2), Relabel) == []
    # It comes back by itself: nothing is known of an end any more.
    ring.do(LeaseSeen(lease("a", version=8, absent=True)), 115.0)
    ring.do(LeaseSeen(lease("a", "", 9, absent=True)), 116.0)
    ring.do(LeaseTaken("a", lease("a", SHARDER, 10), 116.0), 116.1)
    (change,) = kinds(ring.found("a", 116.2), Relabel)
    assert change.former == "a"


def test_a_new_sharder_does_not_trust_a_lease_that_another_one_made() -> None:
    ring = Ring("b")
    ring.do(LeaseSeen(lease("a", SHARDER, 4, absent=True)), 101.0)
    ring.do(LeaseTaken("a", lease("a", SHARDER, 5, absent=True), 102.0), 102.1)
    kept(ring, "b", "a", 103.0, 198.0)
    ring.do(LeaseTaken("a", lease("a", SHARDER, 6, absent=True), 199.0), 200.0)
    assert kinds(ring.found("a", 200.1), Relabel) == []


def test_a_lease_of_too_long_a_duration_counts_in_full_and_is_named() -> None:
    ring = Ring("b")
    long = MAX_DURATION_S + 1
    told = kinds(ring.do(LeaseSeen(lease("a", version=2, duration_s=long)), 101.0), LeaseTooLong)
    assert told == [LeaseTooLong("a", long)]
    again = ring.do(LeaseSeen(lease("a", version=3, renewed="y", duration_s=long)), 102.0)
    assert not kinds(again, LeaseTooLong)
    kept(ring, "b", "a", 102.0, 102.0 + 2 * long - 1)
    assert "a" in ring.machine.instances.instances


def test_a_lease_is_given_back_when_nobody_is_left() -> None:
    ring = Ring("a")
    (take,) = kinds(ring.do(TimePassed(), 131.0), TakeLease)
    effects = ring.do(LeaseTaken(take.instance, lease("a", SHARDER, 9), 131.0), 131.1)
    assert [(one.instance, one.resource_version) for one in kinds(effects, ReturnLease)] == [
        ("a", "9")
    ]


def test_older_news_do_not_bring_an_instance_back() -> None:
    ring = Ring("a", "b")
    ring.do(LeaseSeen(lease("b", version=3, renewed="y")), 129.0)
    ring.do(TimePassed(), 131.0)
    ring.do(LeaseTaken("a", lease("a", SHARDER, 9), 131.0), 131.1)
    ring.do(LeaseSeen(lease("a", version=8, renewed="late")), 131.2)
    assert ring.machine.instances.instances == ("b",)


@pytest.mark.parametrize("acting", [True, False])
def test_only_the_acting_sharder_deletes_orphans(acting: bool) -> None:
    machine = SharderMachine(RING)
    machine.step(LeasesSeen((lease("a", ""), lease("b"))), 100.0)
    if acting:
        machine.step(LeadingChanged(True), 100.0)
    effects = list(machine.step(TimePassed(), 160.0))
    assert bool(kinds(effects, DeleteOrphan)) is acting
    assert bool(kinds(effects, TakeLease)) is acting


def broken_walks(*, changes: int) -> list[float]:
    """The pauses after walks that break off, each of which has changed so many objects."""
    ring = Ring("a", "b", "c")
    names = iter(others_at(ring, "a", 60))
    pauses: list[float] = []
    at = 101.0
    for _ in range(5):
        for _ in range(changes):
            (change,) = kinds(ring.found("a", at, name=next(names)), Relabel)
            ring.do(Relabelled(ring.walk, change, PatchOutcome.DONE), at)
        ring.do(WalkEnded(ring.walk, False), at)
        ended, walk = at, ring.walk
        while ring.walk == walk:
            at += 0.5
            begun(ring, at)
        pauses.append(at - ended)
    return pauses


def test_walks_that_break_off_go_on_soon_while_they_move_objects() -> None:
    """The API server ends a list after a minute, also one that is read as fast as objects are
    moved."""
    assert max(broken_walks(changes=1)) <= 2 * RETRY_S
    assert broken_walks(changes=0)[-1] > 10 * RETRY_S
