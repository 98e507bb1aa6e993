"""A plain controller for one instance of a ring: a small reflector and a queue of keys.

`RingMember.run` makes one. It watches the objects that belong to the instance, and calls
`reconcile` for each that is new or has changed: one call at a time for one object, several objects
at a time. A call that raises is repeated after a growing pause. When the sharder asks to let go of
an object, the running call ends first, then the object is given up (K3). It must never act on an
object whose label names another instance.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from contextlib import ExitStack, aclosing
from typing import TYPE_CHECKING, Any, NoReturn

from domicile.errors import Fenced
from domicile.kube.calls import SETTLE_S, Reconcile, RunningCalls
from domicile.kube.hashring import object_key
from domicile.kubeapi.errors import KubeError
from domicile.kubeapi.follow import ObjectChanged, ObjectRemoved, ObjectsListed, follow
from domicile.kubeapi.kinds import ApiKind
from domicile.kubeapi.objects import ObjectMeta, OwnerReference, PartialObject

if TYPE_CHECKING:
    from domicile.kube.member import RingMember

log = logging.getLogger("domicile.kube")

FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.2, 60.0

LET_GO_AT_A_TIME = 16
"""I6: objects that one controller lets go of at a time, beside the calls of its workers. The
sharder asks for as many at a time."""


class AnyObject(PartialObject, frozen=True):
    """An object of a user's kind."""

    spec: Any = None
    status: Any = None
    data: Any = None


Key = tuple[str, str]


class KeyedQueue:
    """Keys that wait for a worker. A key is there once; one that is being worked on waits until
    that has ended. Its size is bounded by the number of objects of the instance.

    `comes_first` says of a key whether it waits apart, for `take_first`. It is asked when the key
    is added, so a key has to be added again when the answer changes.
    """

    def __init__(self, comes_first: Callable[[Key], bool] = lambda key: False) -> None:
        self._comes_first = comes_first
        self._waiting, self._first = _Waiting(), _Waiting()
        self._running: dict[Key, bool] = {}
        self._timers: dict[Key, asyncio.TimerHandle] = {}

    def add(self, key: Key) -> None:
        """Have a key worked on, again if it is being worked on now."""
        timer = self._timers.pop(key, None)
        if timer is not None:
            timer.cancel()
        if key in self._running:
            self._running[key] = True
        elif self._comes_first(key):
            self._waiting.drop(key)
            self._first.add(key)
        else:
            self._first.drop(key)
            self._waiting.add(key)

    def add_later(self, key: Key, seconds: float) -> None:
        """Add a key after some time, unless it is added before."""
        timer = self._timers.pop(key, None)
        if timer is not None:
            timer.cancel()
        self._timers[key] = asyncio.get_running_loop().call_later(seconds, self.add, key)

    async def take(self) -> Key:
        """The next key; `done` has to follow."""
        return await self._take(self._waiting)

    async def take_first(self) -> Key:
        """The next key of those that come first; `done` has to follow."""
        return await self._take(self._first)

    async def _take(self, waiting: _Waiting) -> Key:
        key = await waiting.take()
        self._running[key] = False
        return key

    def done(self, key: Key) -> None:
        """The work on a key has ended."""
        if self._running.pop(key):
            self.add(key)

    def close(self) -> None:
        """Forget all timers."""
        for timer in self._timers.values():
            timer.cancel()
        self._timers.clear()


class _Waiting:
    """Keys in the order in which they came."""

    def __init__(self) -> None:
        self._keys: dict[Key, None] = {}
        self._wake = asyncio.Event()

    def add(self, key: Key) -> None:
        self._keys[key] = None
        self._wake.set()

    def drop(self, key: Key) -> None:
        self._keys.pop(key, None)

    async def take(self) -> Key:
        while not self._keys:
            self._wake.clear()
            await self._wake.wait()
        key = next(iter(self._keys))
        del self._keys[key]
        return key


class RingController:
    """Runs `reconcile` for the objects of one instance."""

    def __init__(
        self,
        member: RingMember,
        reconcile: Reconcile,
        group: str,
        resource: str,
        *,
        namespace: str = "",
        workers: int = 4,
        settle_s: float = SETTLE_S,
    ) -> None:
        self._member = member
        self._reconcile, self._calls = reconcile, RunningCalls(member, settle_s)
        self._group, self._resource, self._namespace = group, resource, namespace
        self._workers = workers
        self.objects: dict[Key, AnyObject] = {}
        """What belongs to this instance, as last seen."""
        self._kind: ApiKind[AnyObject] | None = None
        self._failures: dict[Key, int] = {}

    def seen(self, owner: OwnerReference, namespace: str) -> ObjectMeta | None:
        """An owner, if it is an object of this controller that belongs to the instance."""
        kind = self._kind
        if kind is None or (kind.group, kind.kind) != (owner.group, owner.kind):
            return None
        found = self.objects.get((namespace, owner.name))
        return None if found is None else found.metadata

    async def run(self) -> NoReturn:
        """Run until cancelled; raises `Fenced` when the Lease is lost."""
        member = self._member
        member.guard()
        found = await self._discovered()
        kind = self._kind = ApiKind(
            found.group, found.version, found.plural, found.kind, found.namespaced, AnyObject
        )
        queue = KeyedQueue(self._is_asked_for)
        member.controllers.append(self)
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._reflect(kind, queue))
                for _ in range(self._workers):
                    group.create_task(self._work(kind, queue))
                for _ in range(LET_GO_AT_A_TIME):
                    group.create_task(self._let_go(kind, queue))
                await member.wait_lost()
                raise _Lost
        except* (_Lost, Fenced):
            pass
        finally:
            member.controllers.remove(self)
            queue.close()
            await self._calls.end()
        raise Fenced(
            f"{member.instance} lost its Lease of the ring {member.ring.name}: {member.reason}; "
            "its objects belong to others now. Make a new member, or end the process"
        )

    async def _discovered(self) -> ApiKind[PartialObject]:
        pause_s = FIRST_PAUSE_S
        while True:
            try:
                return await self._member.client.discover(self._group, self._resource)
            except KubeError as error:
                log.warning("%s; trying again in %.1f s", error, pause_s)
                await asyncio.sleep(pause_s)
                pause_s = min(pause_s * 2, LONGEST_PAUSE_S)

    async def _reflect(self, kind: ApiKind[AnyObject], queue: KeyedQueue) -> None:
        changes = follow(self._member.client, kind, self._namespace, labels=self._member.selector)
        async with aclosing(changes) as seen:
            async for change in seen:
                match change:
                    case ObjectsListed(items):
                        self.objects = {_key(one): one for one in items}
                        self._failures = {
                            key: count
                            for key, count in self._failures.items()
                            if key in self.objects
                        }
                        for one in items:
                            queue.add(_key(one))
                    case ObjectChanged(one):
                        self.objects[_key(one)] = one
                        queue.add(_key(one))
                    case ObjectRemoved(one):
                        self.objects.pop(_key(one), None)
                        self._failures.pop(_key(one), None)

    async def _work(self, kind: ApiKind[AnyObject], queue: KeyedQueue) -> None:
        while True:
            key = await queue.take()
            await self._work_on(kind, queue, key, self._look_at(key))

    async def _let_go(self, kind: ApiKind[AnyObject], queue: KeyedQueue) -> None:
        """Beside the workers: an object that another instance waits for must not wait for the calls
        of others."""
        while True:
            key = await queue.take_first()
            await self._work_on(kind, queue, key, self._give_up(kind, key))

    async def _work_on(
        self,
        kind: ApiKind[AnyObject],
        queue: KeyedQueue,
        key: Key,
        work: Coroutine[Any, Any, float | None],
    ) -> None:
        try:
            again_s = await work
            self._failures.pop(key, None)
        except Fenced:
            raise
        except _OwnerAway:
            again_s = self._pause(key)
        except Exception:
            again_s = self._pause(key)
            log.exception("%s %s/%s failed; again in %.1f s", kind.kind, *key, again_s)
        finally:
            queue.done(key)
        if again_s is not None and key in self.objects:
            queue.add_later(key, again_s)

    def _pause(self, key: Key) -> float:
        count = self._failures[key] = self._failures.get(key, 0) + 1
        pause_s: float = FIRST_PAUSE_S * 2 ** min(count - 1, 10)
        return min(pause_s, LONGEST_PAUSE_S)

    def _is_asked_for(self, key: Key) -> bool:
        one = self.objects.get(key)
        return one is not None and self._member.must_let_go(one.metadata)

    async def _give_up(self, kind: ApiKind[AnyObject], key: Key) -> float | None:
        one = self.objects.get(key)
        if one is None or not self._member.must_let_go(one.metadata):
            return 0.0
        # If it has changed since, the watch brings it again; the pause is for a slow watch.
        gone = await self._member.let_go(kind, one.metadata)
        if gone and self.objects.get(key) is one:
            # Else the watch was faster than the answer: the object may have come back.
            del self.objects[key]
        return None if gone else FIRST_PAUSE_S

    async def _look_at(self, key: Key) -> float | None:
        one = self.objects.get(key)
        if one is None or not self._member.owns(one.metadata):
            return None
        self._member.guard()
        if self._member.must_let_go(one.metadata):
            return 0.0
        owner = one.metadata.controller
        if owner is None or await self._member.shares(self._group, self._resource):
            return await self._call(key)
        owner_key = object_key(owner.group, owner.kind, one.metadata.namespace, owner.name)
        if not self._member.owner_calls.begin(owner_key):
            raise _OwnerAway
        with ExitStack() as held:
            held.callback(self._member.owner_calls.end, owner_key)
            if not await self._member.has_owner(owner, one.metadata.namespace):
                raise _OwnerAway
            return await self._call(key, held)

    async def _call(self, key: Key, held: ExitStack | None = None) -> float | None:
        """Call for an object as it was seen last: it may have changed while its owner was read.

        What is held is held until the call has ended, also if it outlives this controller.
        """
        one = self.objects.get(key)
        if one is None or not self._member.owns(one.metadata):
            return None
        if self._member.must_let_go(one.metadata):
            return 0.0
        self._member.guard()
        over = None if held is None else held.pop_all().close
        return await self._calls.run(self._reconcile, self._member.client, one, over)


class _OwnerAway(Exception):
    """The owner of an object is not this instance's own, or is being let go of."""


class _Lost(Exception):
    pass


def _key(one: PartialObject) -> Key:
    return one.metadata.namespace, one.metadata.name
