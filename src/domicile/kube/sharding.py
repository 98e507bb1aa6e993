"""The sharder as a process: it drives a `SharderMachine` for each ring, and answers the webhook.

All replicas follow the rings and their Leases and answer the webhook. One replica acts: it holds
the Lease `domicile-sharder`, and each of its writes is refused once that is not valid. It follows
the ring's Leases and the namespaces, and no object that is shared (KR-09). Objects are listed by a
walk, as a stream of metadata.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from contextlib import aclosing, suppress
from functools import partial
from random import Random
from typing import Any

from domicile.core.machines import Arm
from domicile.errors import Fenced
from domicile.kube.admission import OwnerNeeded, answer, answer_beside
from domicile.kube.conventions import (
    ABSENT,
    RING_LABEL,
    SHARDER,
    STATE_LABEL,
    WEBHOOK_PATH,
    GroupResource,
    drain_label,
    shard_label,
    webhook_name,
)
from domicile.kube.holding import KubeLeaseHolder
from domicile.kube.ring_metrics import RingMetrics, ShownInstance, ShownRing
from domicile.kube.ring_reports import RingReports
from domicile.kube.sharder import (
    TAKEN_DURATION_S,
    BeginWalk,
    CountsChanged,
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
    NamespacesChanged,
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
    ShowState,
    TakeLease,
    TimePassed,
    Walk,
    WalkEnded,
)
from domicile.kubeapi.client import KubeClient
from domicile.kubeapi.errors import KubeConflict, KubeError, KubeNotFound, KubeRefused
from domicile.kubeapi.follow import ObjectChanged, ObjectRemoved, ObjectsListed, follow
from domicile.kubeapi.kinds import LEASES, NAMESPACES, RINGS, WEBHOOKS, ApiKind
from domicile.kubeapi.objects import (
    ControllerRing,
    KubeLease,
    LabelRequirement,
    LabelSelector,
    OwnerReference,
    PartialObject,
    micro_time,
)
from domicile.membership.clock import SystemClock
from domicile.ports.clock import Clock, Timer

log = logging.getLogger("domicile.kube")

LEADER = "domicile-sharder"
LEADER_LABEL = {"app.kubernetes.io/name": "domicile-sharder"}

CHANGES_AT_A_TIME = 16

OWNER_READ_S = 1.0
"""How long the webhook may wait for the owner of an object. The API server waits for 5 s."""

CONDITIONS_SINCE = (1, 30)
"""The version of Kubernetes in which webhooks have `matchConditions` for good."""

WATCH_S = 60
"""A watch of Leases is made anew so often: a silent dead connection costs no more."""

ClientConfig = Callable[[str], Mapping[str, Any]]
"""Where the API server finds the webhook, by its path: the `clientConfig` of a webhook."""


class RingSharder:
    """One ring: carries out what its machine wants. Owned by a `Sharder`."""

    def __init__(
        self,
        ring: ControllerRing,
        client: KubeClient,
        namespace: str,
        metrics: RingMetrics,
        *,
        client_config: ClientConfig | None,
        clock: Clock,
        random: Random,
        drain_deadline_s: float,
    ) -> None:
        self.name = ring.metadata.name
        self.machine = SharderMachine(ring, drain_deadline_s=drain_deadline_s)
        self._client = client
        self._acting: KubeClient | None = None
        self._namespace = namespace
        self._metrics = metrics
        self._client_config = client_config
        self._clock, self._random = clock, random
        self._where: dict[str, str] = {}
        self._namespaces: dict[str, dict[str, str]] = {}
        self._namespaces_known = asyncio.Event()
        self._kinds: dict[GroupResource, ApiKind[PartialObject]] = {}
        self._timer: Timer | None = None
        self._tasks: asyncio.TaskGroup | None = None
        self._walk: asyncio.Task[None] | None = None
        self._reports = RingReports(self.machine, clock)
        self._rings_made = 0
        self._has_conditions = False
        self._unread = ""  # why the walk did not get to know an owner

    async def run(self) -> None:
        """Follow the ring's Leases and act on them until cancelled."""
        self._metrics.show(self.name, self._shown)
        try:
            async with asyncio.TaskGroup() as tasks:
                self._tasks = tasks
                tasks.create_task(self._follow_leases())
                tasks.create_task(self._follow_namespaces())
                tasks.create_task(self._reports.run())
        finally:
            self._tasks = None
            if self._timer is not None:
                self._timer.cancel()
            self._metrics.forget(self.name)

    def lead(self, client: KubeClient | None) -> None:
        """Act from now on, by a client that checks that we may; or no longer (None)."""
        self._acting = client
        self._reports.lead(client)
        self.feed(LeadingChanged(client is not None))

    def see(self, ring: ControllerRing) -> None:
        """The ring's resource has changed."""
        before = self.machine.ring
        self.feed(RingSeen(ring))
        self._reports.look_again()
        if before.spec != ring.spec:
            self._spawn(self.configure())

    def feed(self, event: Event) -> None:
        """Tell the machine, and carry out what it wants."""
        for effect in self.machine.step(event, self._clock.now()):
            self._carry_out(effect)
        if self.machine.rings_made != self._rings_made:
            self._rings_made = self.machine.rings_made
            self._metrics.count("ring_calculations", (("controllerring", self.name),))

    # Following.

    async def _follow_leases(self) -> None:
        changes = follow(
            self._client,
            LEASES,
            labels=f"{RING_LABEL}={self.name}",
            seconds=WATCH_S,
            random=self._random,
        )
        async with aclosing(changes) as seen:
            async for change in seen:
                match change:
                    case ObjectsListed(items):
                        self._where.clear()
                        self.feed(LeasesSeen(tuple(one for one in items if self._is_first(one))))
                    case ObjectChanged(lease):
                        if self._is_first(lease):
                            self.feed(LeaseSeen(lease))
                    case ObjectRemoved(lease):
                        if self._is_first(lease):
                            gone = lease.metadata
                            self.feed(LeaseGone(gone.name, gone.resource_version))

    def _is_first(self, lease: KubeLease) -> bool:
        """Two Leases of one name in two namespaces would be one instance: the first one counts."""
        metadata = lease.metadata
        where = self._where.setdefault(metadata.name, metadata.namespace)
        if where != metadata.namespace:
            log.warning(
                "ring %s: the Lease %s/%s is ignored, because there is one of that name in %s",
                self.name,
                metadata.namespace,
                metadata.name,
                where,
            )
        return where == metadata.namespace

    async def _follow_namespaces(self) -> None:
        changes = follow(self._client, NAMESPACES, random=self._random)
        async with aclosing(changes) as seen:
            async for change in seen:
                before = dict(self._namespaces)
                match change:
                    case ObjectsListed(items):
                        self._namespaces = {
                            one.metadata.name: labels_of_namespace(one) for one in items
                        }
                    case ObjectChanged(one):
                        self._namespaces[one.metadata.name] = labels_of_namespace(one)
                    case ObjectRemoved(one):
                        self._namespaces.pop(one.metadata.name, None)
                known = self._namespaces_known.is_set()
                self._namespaces_known.set()
                if known and self._have_others(before):
                    self.feed(NamespacesChanged())

    def _have_others(self, before: Mapping[str, Mapping[str, str]]) -> bool:
        """Whether the ring's namespaces are others than before. The objects of one that was deleted
        are gone with it."""
        selector, now = self._selector(), self._namespaces
        changed = [name for name, labels in now.items() if before.get(name) != labels]
        return any(
            (name in before and selector.matches(dict(before[name]))) != selector.matches(now[name])
            for name in changed
        )

    def _is_meant(self, namespace: str) -> bool:
        labels = self._namespaces.get(namespace)
        return not namespace or (labels is not None and self._selector().matches(labels))

    def _selector(self) -> LabelSelector:
        own = self.machine.ring.spec.namespace_selector
        return default_namespaces(self._namespace) if own is None else own

    # Effects.

    def _carry_out(self, effect: Effect) -> None:
        match effect:
            case Arm(at):
                if self._timer is not None:
                    self._timer.cancel()
                self._timer = self._clock.call_at(at, partial(self.feed, TimePassed()))
            case TakeLease():
                self._spawn(self._take(effect))
            case ReturnLease(instance, version):
                merge = {"spec": {"holderIdentity": "", "leaseDurationSeconds": 1}}
                self._spawn(self._patch_lease(instance, version, merge))
            case ShowState(instance, version, state):
                merge = {"metadata": {"labels": {STATE_LABEL: state.value}}}
                self._spawn(self._patch_lease(instance, version, merge))
            case DeleteOrphan(instance, version):
                self._spawn(self._delete_lease(instance, version))
            case BeginWalk(walk, kind):
                if self._walk is not None:
                    self._walk.cancel()
                self._walk = self._spawn(self._run_walk(walk, kind))
                if kind is Walk.FULL:
                    self._spawn(self._restore_webhook())
            case Overdue():
                self._tell_overdue(effect)
            case LeaseTooLong(instance, duration_s):
                self._reports.warn(
                    "LeaseTooLong",
                    f"the Lease of {instance} lasts {duration_s} s; if it dies, its objects wait "
                    "for twice as long",
                )
            case LeaseNameTooLong(instance):
                self._reports.warn(
                    "LeaseNameTooLong",
                    f"the Lease {instance} is ignored: its name has {len(instance)} characters, "
                    "and a label that names an instance can have 63",
                )
            case CountsChanged():
                self._reports.counted()
            case Relabel() | ReadOwner():
                raise AssertionError("only a walk changes labels")

    def _spawn(self, work: Any) -> asyncio.Task[None] | None:
        if self._tasks is None:
            work.close()
            return None
        return self._tasks.create_task(work)

    def _lease_namespace(self, instance: str) -> str:
        known = self._where.get(instance)
        return known or next(iter(self._where.values()), self._namespace)

    async def _take(self, effect: TakeLease) -> None:
        instance, client = effect.instance, self._acting
        sent_at = self._clock.now()
        now = micro_time(self._clock.wall())
        spec = {
            "holderIdentity": SHARDER,
            "leaseDurationSeconds": TAKEN_DURATION_S,
            "acquireTime": now,
            "renewTime": now,
        }
        lease: KubeLease | None = None
        try:
            if client is None:
                return
            namespace = self._lease_namespace(instance)
            if effect.resource_version:
                lease = await client.patch(
                    LEASES,
                    instance,
                    namespace,
                    merge={"spec": spec},
                    resource_version=effect.resource_version,
                )
            else:
                metadata = {
                    "name": instance,
                    "labels": {RING_LABEL: self.name},
                    "annotations": {ABSENT: "true"},
                }
                lease = await client.create(LEASES, {"metadata": metadata, "spec": spec}, namespace)
                self._where.setdefault(instance, namespace)
        except (KubeError, Fenced) as error:
            log.info("ring %s: the Lease of %s was not taken: %s", self.name, instance, error)
        finally:
            self.feed(LeaseTaken(instance, lease, sent_at))

    async def _patch_lease(self, instance: str, version: str, merge: Mapping[str, Any]) -> None:
        if self._acting is not None:
            # Whatever went wrong, the machine goes on with what it sees next.
            with suppress(KubeError, Fenced):
                await self._acting.patch(
                    LEASES,
                    instance,
                    self._lease_namespace(instance),
                    merge=merge,
                    resource_version=version,
                )

    async def _delete_lease(self, instance: str, version: str) -> None:
        if self._acting is not None:
            with suppress(KubeError, Fenced):
                await self._acting.delete(
                    LEASES, instance, self._lease_namespace(instance), resource_version=version
                )

    # Walking.

    async def _run_walk(self, walk: int, kind: Walk) -> None:
        complete, self._unread = False, ""
        try:
            await self._namespaces_known.wait()
            async with asyncio.TaskGroup() as changes:
                places = asyncio.Semaphore(CHANGES_AT_A_TIME)
                for resource, labels in self._stages(kind):
                    await self._list(walk, resource, labels, changes, places)
            complete = True
            self._reports.say("walk", self._unread)
        except* KubeError as errors:
            self._reports.say("walk", f"a walk broke off: {errors.exceptions[0]}")
        self.feed(WalkEnded(walk, complete))
        self._reports.look_again()

    def _stages(self, kind: Walk) -> list[tuple[GroupResource, str]]:
        """What is listed, in order: objects that control others come first (K3)."""
        main: dict[GroupResource, None] = {}
        controlled: dict[GroupResource, None] = {}
        for one in self.machine.ring.spec.resources:
            main[GroupResource(one.group, one.resource)] = None
            for other in one.controlled_resources:
                controlled[GroupResource(other.group, other.resource)] = None
        both = {**main, **controlled}
        if kind is Walk.FULL:
            return [(resource, "") for resource in both]
        drain, shard = drain_label(self.name), shard_label(self.name)
        asked = [(resource, drain) for resource in main]
        return [*asked, *((resource, f"!{shard},!{drain}") for resource in both)]

    async def _list(
        self,
        walk: int,
        resource: GroupResource,
        labels: str,
        changes: asyncio.TaskGroup,
        places: asyncio.Semaphore,
    ) -> None:
        served = await self._served(resource)
        try:
            async with aclosing(self._client.stream_metadata(served, labels=labels)) as objects:
                async for one in objects:
                    if not self._is_meant(one.metadata.namespace):
                        continue
                    found = ObjectFound(walk, resource, served.group, served.kind, one)
                    for effect in self.machine.step(found, self._clock.now()):
                        if isinstance(effect, Relabel | ReadOwner):
                            await places.acquire()
                            changes.create_task(self._change(served, effect, places))
                        else:
                            self._carry_out(effect)
        except KubeNotFound:
            self._kinds.pop(resource, None)  # served by another version now
            raise

    async def _served(self, resource: GroupResource) -> ApiKind[PartialObject]:
        served = self._kinds.get(resource)
        if served is None:
            served = await self._client.discover(resource.group, resource.resource)
            self._kinds[resource] = served
        return served

    async def _change(
        self,
        served: ApiKind[PartialObject],
        effect: Relabel | ReadOwner,
        places: asyncio.Semaphore,
    ) -> None:
        try:
            if isinstance(effect, Relabel):
                await self._relabel(served, effect)
                return
            read = await self._read_for_walk(effect)
            for after in self.machine.step(read, self._clock.now()):
                assert isinstance(after, Relabel)
                await self._relabel(served, after)
        finally:
            places.release()

    async def _read_for_walk(self, effect: ReadOwner) -> OwnerRead:
        namespace = effect.found.object.metadata.namespace
        try:
            owner = await self.read_owner(effect.owner, namespace)
        except KubeError as error:
            self._unread = f"an owner could not be read: {error}"
            return OwnerRead(effect, None, answered=False)
        return OwnerRead(effect, owner)

    async def read_owner(self, named: OwnerReference, namespace: str) -> PartialObject | None:
        """The owner of an object, as it is now; None if the ring shares out no such object."""
        for one in self.machine.ring.spec.resources:
            if one.group != named.group:
                continue
            resource = GroupResource(one.group, one.resource)
            served = await self._served(resource)
            if served.kind != named.kind:
                continue
            if served.namespaced != bool(namespace):
                return None  # on the wire, its key is another one
            try:
                return await self._client.get_metadata(served, named.name, namespace)
            except KubeNotFound:
                self._kinds.pop(resource, None)
                again = await self._served(resource)
                if again.version == served.version:
                    return None
                return await self._client.get_metadata(again, named.name, namespace)
        return None

    async def _relabel(self, served: ApiKind[PartialObject], change: Relabel) -> None:
        labels: dict[str, Any] = {drain_label(self.name): "true" if change.drain else None}
        if change.shard is not None:
            labels[shard_label(self.name)] = change.shard
        outcome = PatchOutcome.FAILED
        try:
            client = self._acting
            if client is None or not self.machine.may_send(change, self._clock.now()):
                return
            await client.patch(
                served,
                change.name.name,
                change.name.namespace,
                merge={"metadata": {"labels": labels}},
                resource_version=change.resource_version,
            )
            outcome = PatchOutcome.DONE
            self._count(change)
        except KubeNotFound:
            outcome = PatchOutcome.DONE
        except KubeConflict:
            outcome = PatchOutcome.CONFLICT
        except (KubeError, Fenced) as error:
            log.info("ring %s: %s was not changed: %s", self.name, change.name, error)
        finally:
            self.feed(Relabelled(change.walk, change, outcome))

    def _count(self, change: Relabel) -> None:
        labels = (
            ("controllerring", self.name),
            ("group", change.name.resource.group),
            ("resource", change.name.resource.resource),
        )
        if change.reason is MoveReason.DRAIN:
            self._metrics.count("drains", labels)
        elif change.reason is MoveReason.ASSIGN:
            self._metrics.count("assignments", labels)
        elif change.reason in (MoveReason.MOVE, MoveReason.FOLLOW):
            self._metrics.count("movements", labels)

    # What people see.

    def _tell_overdue(self, overdue: Overdue) -> None:
        name, instance = overdue.name, overdue.instance
        served = self._kinds.get(name.resource)
        about: dict[str, str] | None = None
        if served is not None:
            about = {
                "apiVersion": served.api_version,
                "kind": served.kind,
                "namespace": name.namespace,
                "name": name.name,
            }
        said = (
            f"{instance} was asked {overdue.waited_s:.0f} s ago to let go of {name} and has not; "
            "it is not moved while that instance lives"
        )
        self._reports.warn("DrainOverdue", said, about)

    async def configure(self) -> None:
        """Make the ring's webhook known to the API server, trying until it is."""
        pause_s = 0.5
        while self._acting is not None and not await self._apply_webhook():
            await asyncio.sleep(pause_s)
            pause_s = min(pause_s * 2, 30.0)

    async def _restore_webhook(self) -> None:
        """Somebody may have deleted it, or changed it."""
        await self._apply_webhook()

    async def _apply_webhook(self) -> bool:
        """Make it what it should be, whatever others made of it."""
        client = self._acting
        if client is None or self._client_config is None:
            return True
        try:
            self._has_conditions = await self._know_conditions(client)
            await client.apply(WEBHOOKS, self.webhook_configuration(), manager=LEADER, force=True)
        except Fenced:
            return True
        except KubeError as error:
            self._reports.say("webhook", f"the webhook could not be configured: {error}")
            return False
        self._reports.say("webhook", "")
        return True

    async def _know_conditions(self, client: KubeClient) -> bool:
        """Whether the API server knows `matchConditions`. An older one refuses what it does not
        know."""
        if self._has_conditions:
            return True
        try:
            return await client.version() >= CONDITIONS_SINCE
        except KubeRefused:
            return False

    def webhook_configuration(self) -> dict[str, Any]:
        """The ring's MutatingWebhookConfiguration (KR-05, KR-06)."""
        assert self._client_config is not None
        rules: list[dict[str, Any]] = []
        for resource, _ in self._stages(Walk.FULL):
            rules.append(
                {
                    "operations": ["CREATE", "UPDATE"],
                    "apiGroups": [resource.group],
                    "apiVersions": ["*"],
                    "resources": [resource.resource],
                    "scope": "*",
                }
            )
        ring = self.machine.ring
        owner = {
            "apiVersion": RINGS.api_version,
            "kind": RINGS.kind,
            "name": ring.metadata.name,
            "uid": ring.metadata.uid,
            "controller": True,
        }
        label = shard_label(self.name)
        hook: dict[str, Any] = {
            "name": "sharder.sharding.timebertt.dev",
            "admissionReviewVersions": ["v1"],
            "sideEffects": "None",
            "failurePolicy": "Ignore",
            "timeoutSeconds": 5,
            "matchPolicy": "Equivalent",
            "reinvocationPolicy": "Never",
            "clientConfig": dict(self._client_config(WEBHOOK_PATH + self.name)),
            "rules": rules,
            "namespaceSelector": _selector_fields(self._selector()),
            "objectSelector": {"matchExpressions": [{"key": label, "operator": "DoesNotExist"}]},
        }
        if self._has_conditions:
            # The selector asks about the object before the change, too: each object that a walk
            # assigns would be reviewed.
            without = f"!has(object.metadata.labels) || !('{label}' in object.metadata.labels)"
            hook["matchConditions"] = [{"name": "no-instance", "expression": without}]
        name = webhook_name(self.name)
        return {"metadata": {"name": name, "ownerReferences": [owner]}, "webhooks": [hook]}

    def _shown(self) -> ShownRing:
        now = self._clock.now()
        instances = [
            ShownInstance(name, self._where.get(name, ""), lease.uid, lease.state(now))
            for name, lease in sorted(self.machine.leases.items())
        ]
        return self.machine.ring, instances


class Sharder:
    """All rings of a cluster, one acting replica among several."""

    def __init__(
        self,
        client: KubeClient,
        *,
        namespace: str,
        identity: str,
        client_config: ClientConfig | None = None,
        clock: Clock | None = None,
        random: Random | None = None,
        drain_deadline_s: float = 60.0,
        lease_duration_s: int = 15,
    ) -> None:
        self._client = client
        self._namespace, self._identity = namespace, identity
        self._client_config = client_config
        self._clock: Clock = SystemClock() if clock is None else clock
        self._random = Random() if random is None else random
        self._drain_deadline_s = drain_deadline_s
        self._lease_duration_s = lease_duration_s
        self.metrics = RingMetrics()
        self.rings: dict[str, RingSharder] = {}
        self.acting: KubeClient | None = None
        """The client of the acting replica; None on the others."""
        self.listed = asyncio.Event()
        """Whether the rings have been read."""
        self._running: dict[str, asyncio.Task[None]] = {}

    async def run(self) -> None:
        """Follow the rings, and act whenever this replica holds the Lease. Ends by cancellation,
        which gives the Lease back."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._follow_rings(tasks))
            tasks.create_task(self._lead_again_and_again())

    async def answer(self, path: str, body: bytes) -> bytes:
        """The webhook's answer to a review. Never raises (K4)."""
        name = path.removeprefix(WEBHOOK_PATH) if path.startswith(WEBHOOK_PATH) else ""
        ring = self.rings.get(name)
        answered = answer(body, None if ring is None else ring.machine.view)
        if isinstance(answered, OwnerNeeded):
            assert ring is not None
            answered = answer_beside(answered, await self._owner(ring, answered))
        resource = answered.resource
        if resource is not None:
            labels = (
                ("controllerring", name),
                ("group", resource.group),
                ("resource", resource.resource),
            )
            self.metrics.count("assignments", labels)
        elif answered.failed:
            log.warning("the webhook of ring %s left an object alone: %s", name, answered.why_not)
        return answered.body

    async def _owner(self, ring: RingSharder, needed: OwnerNeeded) -> PartialObject | None:
        """The owner of a new object (KR-04). It is read each time: the writer of the object has
        seen the owner's label, and any replica may be asked, also one that knows of no drain."""
        owner = needed.owner
        try:
            async with asyncio.timeout(OWNER_READ_S):
                return await ring.read_owner(owner, needed.namespace)
        except (KubeError, TimeoutError) as error:
            log.warning(
                "the webhook of ring %s goes by the ring alone, because %s %s/%s was not read: %s",
                ring.name,
                owner.kind,
                needed.namespace,
                owner.name,
                error or f"no answer within {OWNER_READ_S:.0f} s",
            )
            return None

    async def _follow_rings(self, tasks: asyncio.TaskGroup) -> None:
        changes = follow(self._client, RINGS, random=self._random)
        async with aclosing(changes) as seen:
            async for change in seen:
                match change:
                    case ObjectsListed(items):
                        names = [one.metadata.name for one in items]
                        for gone in [name for name in self.rings if name not in names]:
                            self._end(gone)
                        for ring in items:
                            self._see(ring, tasks)
                        self.listed.set()
                    case ObjectChanged(ring):
                        self._see(ring, tasks)
                    case ObjectRemoved(ring):
                        self._end(ring.metadata.name)

    def _see(self, ring: ControllerRing, tasks: asyncio.TaskGroup) -> None:
        name = ring.metadata.name
        known = self.rings.get(name)
        if known is not None:
            known.see(ring)
            return
        made = self.rings[name] = RingSharder(
            ring,
            self._client,
            self._namespace,
            self.metrics,
            client_config=self._client_config,
            clock=self._clock,
            random=self._random,
            drain_deadline_s=self._drain_deadline_s,
        )
        self._running[name] = tasks.create_task(made.run())
        if self.acting is not None:
            tasks.create_task(self._start_leading(made, self.acting))

    def _end(self, name: str) -> None:
        self.rings.pop(name, None)
        running = self._running.pop(name, None)
        if running is not None:
            running.cancel()

    async def _start_leading(self, ring: RingSharder, client: KubeClient) -> None:
        ring.lead(client)
        await ring.configure()

    async def _lead_again_and_again(self) -> None:
        while True:
            holder = KubeLeaseHolder(
                self._client,
                LEADER,
                self._identity,
                self._namespace,
                labels=LEADER_LABEL,
                duration_s=self._lease_duration_s,
                clock=self._clock,
                random=Random(self._random.getrandbits(64)),
            )
            try:
                await holder.join()
                self.acting = holder.client
                async with asyncio.TaskGroup() as tasks:
                    for ring in list(self.rings.values()):
                        tasks.create_task(self._start_leading(ring, holder.client))
                    await holder.wait_lost()
            except KubeError as error:
                log.warning("the sharder could not take its Lease: %s", error)
                await asyncio.sleep(1.0)
            finally:
                self.acting = None
                for ring in list(self.rings.values()):
                    ring.lead(None)
                await holder.leave()


def labels_of_namespace(namespace: PartialObject) -> dict[str, str]:
    """A namespace's labels, with the one that the API server gives to each."""
    name = namespace.metadata.name
    return {"kubernetes.io/metadata.name": name, **(namespace.metadata.labels or {})}


def default_namespaces(own: str) -> LabelSelector:
    """Where a ring's objects live if the ring does not say: not beside Kubernetes, nor us."""
    names = tuple(dict.fromkeys(("kube-system", own)))
    if own == "default":
        names = ("kube-system",)
    one = LabelRequirement(key="kubernetes.io/metadata.name", operator="NotIn", values=names)
    return LabelSelector(match_expressions=(one,))


def _selector_fields(selector: LabelSelector) -> dict[str, Any]:
    found: dict[str, Any] = {}
    if selector.match_labels:
        found["matchLabels"] = dict(selector.match_labels)
    if selector.match_expressions:
        found["matchExpressions"] = [
            {
                "key": one.key,
                "operator": one.operator,
                **({"values": list(one.values)} if one.values else {}),
            }
            for one in selector.match_expressions
        ]
    return found
