"""One instance of a range ring: it works on the objects of its ranges, and labels none (K8).

    async with Ring("websites").ranges() as member:
        await member.run(reconcile, "example.com", "websites")

No sharder is needed: the instances see each other's Leases, and `ranges` says what each takes and
gives. The API server filters lists and watches by the hash of an object's uid. It must offer that:
`run` refuses a server that ignores the selector, which would show all objects to all instances.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from contextlib import aclosing, suppress
from random import Random
from typing import TYPE_CHECKING, NoReturn, TypeVar

from domicile.errors import ConfigError, Fenced
from domicile.kube.calls import SETTLE_S, Reconcile, RunningCalls
from domicile.kube.controller import FIRST_PAUSE_S, LONGEST_PAUSE_S, AnyObject, Key, KeyedQueue
from domicile.kube.conventions import DEFAULT_DURATION_S, INCARNATION
from domicile.kube.holding import KubeLeaseHolder
from domicile.kube.ranges import (
    AGAIN_S,
    COUNT,
    RANGE,
    RANGE_RING,
    DropInstance,
    EndInstance,
    GiveRange,
    HashRange,
    RangeView,
    TakeRange,
    check_count,
    range_lease,
)
from domicile.kubeapi.client import KubeClient
from domicile.kubeapi.errors import (
    KubeConflict,
    KubeError,
    KubeNotFound,
    KubeUnanswered,
    KubeUnavailable,
)
from domicile.kubeapi.follow import ObjectChanged, ObjectRemoved, ObjectsListed, follow
from domicile.kubeapi.kinds import LEASES, ApiKind
from domicile.kubeapi.objects import KubeLease, PartialObject
from domicile.ports.clock import Clock

if TYPE_CHECKING:
    from domicile.kube.member import Ring

log = logging.getLogger("domicile.kube")

T = TypeVar("T")

WATCH_S = 60
"""As the sharder's: a silent dead connection costs no more."""


class UnfilteredList(ConfigError):
    """The API server does not know `shardSelector`."""


class RangeMember(KubeLeaseHolder):
    """One run of an instance, for one controller."""

    def __init__(
        self,
        ring: Ring,
        client: KubeClient,
        instance: str,
        namespace: str,
        *,
        count: int,
        duration_s: int = DEFAULT_DURATION_S,
        unique_name: bool = False,
        ends_process: bool = False,
        clock: Clock | None = None,
        random: Random | None = None,
        closes: bool = False,
    ) -> None:
        check_count(count)
        super().__init__(
            client,
            instance,
            instance,
            namespace,
            labels={RANGE_RING: ring.name},
            duration_s=duration_s,
            unique_name=unique_name,
            ends_process=ends_process,
            clock=clock,
            random=random,
        )
        self.ring, self.instance, self.count = ring, instance, count
        self._closes = closes
        self._running = False
        self.held: dict[int, HashRange] = {}
        """The ranges whose objects this instance works on."""

    async def __aenter__(self) -> RangeMember:
        try:
            await self._agree()
            await self.join()
        except BaseException:
            await self._close()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        try:
            # Its ranges need no write: their holder is over with its own Lease.
            await self.leave()
        finally:
            await self._close()

    async def _close(self) -> None:
        if self._closes:
            await self._client.close()

    async def _agree(self) -> None:
        """All instances must cut the space into the same ranges: the first one's count stays."""
        name = f"{self.ring.name}-ranges"
        body = {"metadata": {"name": name, "annotations": {COUNT: str(self.count)}}}

        async def ask() -> KubeLease:
            with suppress(KubeConflict):
                return await self._client.create(LEASES, body, self.namespace)
            return await self._client.get(LEASES, name, self.namespace)

        found = await _answered(ask)
        there = found.metadata.annotation(COUNT)
        if there != str(self.count):
            raise ConfigError(
                f"the ring {self.ring.name} has {there or 'no'} ranges, not {self.count}, by the "
                f"Lease {self.namespace}/{name}: take that count, or stop all instances and delete "
                "the Lease"
            )

    async def run(
        self,
        reconcile: Reconcile,
        group: str,
        resource: str,
        *,
        namespace: str = "",
        workers: int = 4,
        settle_s: float = SETTLE_S,
    ) -> NoReturn:
        """Run a controller for the objects in this instance's ranges, as `RingMember.run`.

        It also ends with `UnfilteredList` if the API server does not filter.
        """
        if self._running:
            raise RuntimeError("a range member runs one controller; make another member")
        self._running = True
        self.guard()
        calls = RunningCalls(self, settle_s)
        controller = _RangeController(self, reconcile, namespace, workers, self._clock, calls)
        await controller.run(group, resource)


class _RangeController:
    """Takes and gives ranges, and runs `reconcile` for the objects in them."""

    def __init__(
        self,
        member: RangeMember,
        reconcile: Reconcile,
        namespace: str,
        workers: int,
        clock: Clock,
        calls: RunningCalls,
    ) -> None:
        self._member, self._reconcile, self._calls = member, reconcile, calls
        self._namespace, self._workers = namespace, workers
        self._clock = clock
        self._view = RangeView(
            member.ring.name, member.instance, member.incarnation, member.count, member.duration_s
        )
        self._queue = KeyedQueue()
        self._objects: dict[int, dict[Key, AnyObject]] = {}
        self._where: dict[Key, int] = {}
        self._working: dict[Key, int] = {}
        self._failures: dict[Key, int] = {}
        self._reflectors: dict[int, asyncio.Task[None]] = {}
        self._busy: dict[int, None] = {}
        self._wake = asyncio.Event()
        self._calm = asyncio.Event()

    async def run(self, group: str, resource: str) -> NoReturn:
        member = self._member
        client = member.client
        found = await _answered(lambda: client.discover(group, resource))
        kind = ApiKind(
            found.group, found.version, found.plural, found.kind, found.namespaced, AnyObject
        )
        # Asked of Leases: of custom resources the server filters without saying so.
        page = await _answered(lambda: client.list(LEASES, member.namespace, shard=_PROBE))
        if not page.filtered:
            raise UnfilteredList(
                f"{client.server} does not filter by shardSelector: it needs Kubernetes 1.36 or "
                "newer, started with --feature-gates=ShardedListAndWatch=true. Without it, share "
                "objects by labels: Ring(...).member() and a sharder"
            )
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._follow_leases())
                tasks.create_task(self._share(tasks, kind))
                for _ in range(self._workers):
                    tasks.create_task(self._work(kind))
                await member.wait_lost()
                raise _Over
        except* (_Over, Fenced):
            pass
        finally:
            self._queue.close()
            await self._calls.end()
            member.held.clear()
        raise Fenced(
            f"{member.instance} lost its Lease of the range ring {member.ring.name}: "
            f"{member.reason}; its ranges belong to others now. Make a new member, or end the "
            "process"
        )

    # Which ranges.

    async def _follow_leases(self) -> None:
        member, view = self._member, self._view
        changes = follow(
            member.client,
            LEASES,
            member.namespace,
            labels=f"{RANGE_RING}={member.ring.name}",
            seconds=WATCH_S,
        )
        async with aclosing(changes) as seen:
            async for change in seen:
                now = self._clock.now()
                match change:
                    case ObjectsListed(items):
                        view.listed(items, now)
                    case ObjectChanged(lease):
                        view.saw(lease, now)
                    case ObjectRemoved(lease):
                        view.removed(lease, now)
                self._wake.set()

    async def _share(self, tasks: asyncio.TaskGroup, kind: ApiKind[AnyObject]) -> None:
        while True:
            now = self._clock.now()
            self._wake.clear()
            for step in self._view.steps(self._member.held, now):
                match step:
                    case TakeRange(index, version) if index not in self._busy:
                        self._busy[index] = None
                        tasks.create_task(self._take(tasks, kind, index, version))
                    case GiveRange(index) if index not in self._busy:
                        self._busy[index] = None
                        tasks.create_task(self._give(index))
                    case EndInstance(instance, version):
                        tasks.create_task(self._end_instance(instance, version))
                    case DropInstance(instance, version):
                        tasks.create_task(self._drop_instance(instance, version))
                    case _:
                        pass
            with suppress(TimeoutError):
                async with asyncio.timeout(self._view.next_time(now) - now):
                    await self._wake.wait()

    async def _take(
        self, tasks: asyncio.TaskGroup, kind: ApiKind[AnyObject], index: int, version: str
    ) -> None:
        member = self._member
        name, spec = range_lease(member.ring.name, index), {
            "holderIdentity": member.instance,
            "leaseDurationSeconds": member.duration_s,
        }  # fmt: skip
        metadata = {
            "labels": {RANGE_RING: member.ring.name, RANGE: str(index)},
            "annotations": {INCARNATION: member.incarnation},
        }
        try:
            if version:
                lease = await member.client.patch(
                    LEASES,
                    name,
                    member.namespace,
                    merge={"metadata": metadata, "spec": spec},
                    resource_version=version,
                )
            else:
                body = {"metadata": {"name": name, **metadata}, "spec": spec}
                lease = await member.client.create(LEASES, body, member.namespace)
        except KubeError as error:
            log.info("range %d was not taken: %s", index, error)
            return
        finally:
            del self._busy[index]
            self._wake.set()
        self._view.saw(lease, self._clock.now())
        if index in member.held:
            return  # its Lease had been deleted, the work in it goes on
        member.held[index] = HashRange(index, member.count)
        self._reflectors[index] = tasks.create_task(self._reflect(kind, member.held[index]))

    async def _give(self, index: int) -> None:
        """End the work in a range, then let others have it."""
        member = self._member
        reflector = self._reflectors.pop(index)
        reflector.cancel()
        await asyncio.wait((reflector,))
        for key in self._objects.pop(index, {}):
            self._forget(key, index)
        while index in self._working.values():
            self._calm.clear()
            await self._calm.wait()
        try:
            await self._release(index)
        except KubeError as error:
            log.info("range %d could not be given yet: %s", index, error)
        finally:
            # Its Lease still names us if the write failed: then it is taken again, and given again.
            member.held.pop(index, None)
            del self._busy[index]
            self._wake.set()

    async def _release(self, index: int) -> None:
        member = self._member
        lease = self._view.ranges.get(index)
        while lease is not None and self._view.is_ours(lease):
            try:
                lease = await member.client.patch(
                    LEASES,
                    lease.metadata.name,
                    member.namespace,
                    merge={"spec": {"holderIdentity": ""}},
                    resource_version=lease.metadata.resource_version,
                )
            except KubeNotFound:
                return
            except KubeConflict:
                lease = await member.client.get(LEASES, lease.metadata.name, member.namespace)
            else:
                self._view.saw(lease, self._clock.now())

    async def _end_instance(self, instance: str, version: str) -> None:
        with suppress(KubeError):
            await self._member.client.patch(
                LEASES,
                instance,
                self._member.namespace,
                merge={"spec": {"holderIdentity": "", "leaseDurationSeconds": 1}},
                resource_version=version,
            )

    async def _drop_instance(self, instance: str, version: str) -> None:
        with suppress(KubeError):
            await self._member.client.delete(
                LEASES, instance, self._member.namespace, resource_version=version
            )

    # Which objects.

    async def _reflect(self, kind: ApiKind[AnyObject], part: HashRange) -> None:
        known = self._objects[part.index] = {}
        changes = follow(self._member.client, kind, self._namespace, shard=part.selector)
        async with aclosing(changes) as seen:
            async for change in seen:
                match change:
                    case ObjectsListed(items):
                        now = {_key(one): one for one in items if part.holds(one.metadata.uid)}
                        if len(now) < len(items):
                            log.warning(
                                "%d of %d objects of range %d are of others: an API server among "
                                "several does not filter; they are left alone here",
                                len(items) - len(now),
                                len(items),
                                part.index,
                            )
                        gone = [key for key in known if key not in now]
                        known.clear()
                        known.update(now)
                        for key in gone:
                            self._forget(key, part.index)
                        for key in now:
                            self._see(key, part.index)
                    case ObjectChanged(one) if part.holds(one.metadata.uid):
                        known[_key(one)] = one
                        self._see(_key(one), part.index)
                    case ObjectRemoved(one) if known.pop(_key(one), None) is not None:
                        self._forget(_key(one), part.index)
                    case _:
                        pass

    def _see(self, key: Key, index: int) -> None:
        self._where[key] = index
        self._queue.add(key)

    def _forget(self, key: Key, index: int) -> None:
        """An object is gone from a range. One of its name may be in another one: it was deleted and
        made anew, has another uid, and the watches of two ranges tell that in any order."""
        if self._where.get(key) != index:
            return
        del self._where[key]
        self._failures.pop(key, None)
        for other, known in self._objects.items():
            if key in known:
                self._see(key, other)

    async def _work(self, kind: ApiKind[AnyObject]) -> None:
        while True:
            key = await self._queue.take()
            again_s: float | None = None
            index = self._where.get(key)
            one = None if index is None else self._objects.get(index, {}).get(key)
            try:
                if one is not None and index is not None and index in self._member.held:
                    self._working[key] = index
                    self._member.guard()
                    again_s = await self._calls.run(self._reconcile, self._member.client, one)
                    self._failures.pop(key, None)
            except Fenced:
                raise
            except Exception:
                count = self._failures[key] = self._failures.get(key, 0) + 1
                again_s = min(FIRST_PAUSE_S * 2 ** min(count - 1, 10), LONGEST_PAUSE_S)
                log.exception("%s %s/%s failed; again in %.1f s", kind.kind, *key, again_s)
            finally:
                self._working.pop(key, None)
                self._calm.set()
                self._queue.done(key)
            if again_s is not None and key in self._where:
                self._queue.add_later(key, again_s)


class _Over(Exception):
    pass


async def _answered(ask: Callable[[], Awaitable[T]]) -> T:
    """Ask until the API server is there."""
    while True:
        try:
            return await ask()
        except (KubeUnavailable, KubeUnanswered) as error:
            log.warning("%s; trying again in %.1f s", error, AGAIN_S)
            await asyncio.sleep(AGAIN_S)


_PROBE = "shardRange(object.metadata.uid, '0x0000000000000000', '0x0000000000000001')"


def _key(one: PartialObject) -> Key:
    return one.metadata.namespace, one.metadata.name
