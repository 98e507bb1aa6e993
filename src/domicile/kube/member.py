"""One instance of a ring: its Lease, its selector, its right to write (K7).

    async with Ring("websites").member() as member:
        await member.run(reconcile, "example.com", "websites")

A member announces itself by a Lease of its own name. It acts only on objects whose label names it,
and only while the Lease is valid; `member.client` checks that before each write. When the Lease is
lost the member is over (L5): its work is cancelled, and the process starts a new one or ends. A
member that leaves gives the Lease back, and its objects move at once.

What an object of the ring controls follows it without being asked for. So a member acts on such an
object only while the owner is its own, and lets go of an owner after its calls for what that
controls have ended (K3).
"""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass
from random import Random
from typing import TYPE_CHECKING, Any, NoReturn

from domicile.errors import ConfigError
from domicile.kube.calls import SETTLE_S
from domicile.kube.calls import Reconcile as Reconcile
from domicile.kube.conventions import (
    DEFAULT_DURATION_S,
    RING_LABEL,
    drain_label,
    is_generated_name,
    shard_label,
)
from domicile.kube.hashring import object_key
from domicile.kube.holding import KubeLeaseHolder
from domicile.kube.owner_calls import OwnerCalls
from domicile.kube.ranges import RANGES
from domicile.kubeapi.client import KubeClient
from domicile.kubeapi.errors import KubeConflict, KubeNotFound
from domicile.kubeapi.kinds import RINGS, ApiKind
from domicile.kubeapi.objects import ObjectMeta, OwnerReference, PartialObject, is_object_name
from domicile.ports.clock import Clock

if TYPE_CHECKING:
    from domicile.kube.controller import RingController
    from domicile.kube.range_member import RangeMember

SHARED_FOR_S = 60.0
"""How long a member goes by what it has read of its ring: which kinds the ring shares out."""


@dataclass(frozen=True, slots=True)
class Ring:
    """A ring, by the name of its `ControllerRing`."""

    name: str

    def __post_init__(self) -> None:
        if not is_object_name(self.name):
            raise ConfigError(f"{self.name!r} is no name of a ring: lower-case letters, digits, -")

    @property
    def shard_label(self) -> str:
        """The label that names an object's instance."""
        return shard_label(self.name)

    @property
    def drain_label(self) -> str:
        """The label that asks an instance to let go."""
        return drain_label(self.name)

    def member(
        self,
        client: KubeClient | None = None,
        *,
        instance: str | None = None,
        namespace: str | None = None,
        duration_s: int = DEFAULT_DURATION_S,
        unique_name: bool | None = None,
        ends_process: bool | None = None,
        clock: Clock | None = None,
        random: Random | None = None,
    ) -> RingMember:
        """An instance of this ring. Its name is the pod's unless another one is given; the server
        and the namespace are those of the pod or of the kubeconfig.

        An instance that finds no Lease of its name acts one duration after it made one: somebody
        may have deleted the Lease of a process that still acts. `unique_name` says that no other
        running process can have this name, and it need not wait. So it is by default for a pod
        whose name was generated, as those of a Deployment are.

        With `ends_process` a thread ends the process if the member has not left by the end of its
        Lease: a call may block the event loop, or work in a thread. So it is by default for a
        member that connects by itself; a host program that passes a client decides.
        """
        owned = client is None
        if client is None:
            # Imported late: it needs the extra.
            from domicile.kubeapi.http_exchange import connect_to_kubernetes

            client, credentials = connect_to_kubernetes()
            namespace = namespace or credentials.namespace
        return RingMember(
            self,
            client,
            instance or _own_name(),
            namespace or "default",
            duration_s=duration_s,
            unique_name=_is_unique(instance) if unique_name is None else unique_name,
            ends_process=owned if ends_process is None else ends_process,
            clock=clock,
            random=random,
            closes=owned,
        )

    def ranges(
        self,
        client: KubeClient | None = None,
        *,
        instance: str | None = None,
        namespace: str | None = None,
        count: int = RANGES,
        duration_s: int = DEFAULT_DURATION_S,
        unique_name: bool | None = None,
        ends_process: bool | None = None,
        clock: Clock | None = None,
        random: Random | None = None,
    ) -> RangeMember:
        """An instance that shares objects by ranges of their uids' hashes, not by labels (K8): no
        sharder, no write for an object. The API server has to filter by `shardSelector`. All
        instances need the same `count` and the same namespace."""
        from domicile.kube.range_member import RangeMember

        owned = client is None
        if client is None:
            from domicile.kubeapi.http_exchange import connect_to_kubernetes

            client, credentials = connect_to_kubernetes()
            namespace = namespace or credentials.namespace
        return RangeMember(
            self,
            client,
            instance or _own_name(),
            namespace or "default",
            count=count,
            duration_s=duration_s,
            unique_name=_is_unique(instance) if unique_name is None else unique_name,
            ends_process=owned if ends_process is None else ends_process,
            clock=clock,
            random=random,
            closes=owned,
        )


def _own_name() -> str:
    return os.environ.get("POD_NAME") or socket.gethostname().lower()


def _is_unique(instance: str | None) -> bool:
    """A name that was generated is never given again, and the containers of one pod run one after
    the other."""
    in_pod = bool(os.environ.get("KUBERNETES_SERVICE_HOST"))
    return not instance and in_pod and is_generated_name(_own_name())


class RingMember(KubeLeaseHolder):
    """One run of an instance."""

    def __init__(
        self,
        ring: Ring,
        client: KubeClient,
        instance: str,
        namespace: str,
        *,
        duration_s: int = DEFAULT_DURATION_S,
        unique_name: bool = False,
        ends_process: bool = False,
        clock: Clock | None = None,
        random: Random | None = None,
        closes: bool = False,
    ) -> None:
        super().__init__(
            client,
            instance,
            instance,
            namespace,
            labels={RING_LABEL: ring.name},
            duration_s=duration_s,
            unique_name=unique_name,
            ends_process=ends_process,
            clock=clock,
            random=random,
        )
        self.ring, self.instance = ring, instance
        self.owner_calls = OwnerCalls()
        self.controllers: list[RingController] = []
        """Those that run now. They know objects without asking the API server."""
        self._closes = closes
        self._shared: tuple[ApiKind[PartialObject], ...] = ()
        self._shared_until = float("-inf")

    async def __aenter__(self) -> RingMember:
        try:
            await self.join()
        except BaseException:
            await self._close()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        try:
            await self.leave()
        finally:
            await self._close()

    async def _close(self) -> None:
        if self._closes:
            await self._client.close()

    @property
    def selector(self) -> str:
        """The label selector of the objects that belong to this instance."""
        return f"{self.ring.shard_label}={self.instance}"

    def owns(self, metadata: ObjectMeta) -> bool:
        """Whether an object belongs to this instance."""
        return metadata.label(self.ring.shard_label) == self.instance

    def must_let_go(self, metadata: ObjectMeta) -> bool:
        """Whether this instance is asked to let go of an object of its own."""
        return self.owns(metadata) and metadata.has_label(self.ring.drain_label)

    async def let_go(self, kind: ApiKind[Any], metadata: ObjectMeta) -> bool:
        """Give up an object, after all work on it has ended. True if it is given up.

        It waits for calls that are at work for what the object controls. Both labels go in one
        patch with the version that was read; the webhook then names the next instance. False if
        the object has changed since: look at it again.
        """
        labels = {self.ring.shard_label: None, self.ring.drain_label: None}
        key = object_key(kind.group, kind.kind, metadata.namespace, metadata.name)
        async with self.owner_calls.stopped(key):
            self.guard()
            try:
                await self.client.patch(
                    kind,
                    metadata.name,
                    metadata.namespace,
                    merge={"metadata": {"labels": labels}},
                    resource_version=metadata.resource_version,
                )
            except KubeNotFound:
                return True
            except KubeConflict:
                return False
            return True

    async def shares(self, group: str, resource: str) -> bool:
        """Whether objects of a resource have an instance in their own right, not by their owner."""
        shared = await self._shared_kinds()
        return any((kind.group, kind.plural) == (group, resource) for kind in shared)

    async def has_owner(self, owner: OwnerReference, namespace: str) -> bool:
        """Whether the owner of an object in a namespace is this instance's own, and not asked for.
        An owner that no longer exists belongs to nobody, so what it controlled can be cleared up.

        Raises `ConfigError` for an owner that the ring does not share out.
        """
        for controller in self.controllers:
            seen = controller.seen(owner, namespace)
            if seen is not None:
                return self.owns(seen) and not self.must_let_go(seen)
        for kind in await self._shared_kinds():
            named = (kind.group, kind.kind) == (owner.group, owner.kind)
            if named and kind.namespaced == bool(namespace):
                break
        else:
            raise ConfigError(
                f"{owner.kind} {owner.name} controls the object, and the ring {self.ring.name} "
                "does not share it out in the object's namespace: nobody is asked before it "
                "moves, so this instance leaves it alone. Put its resource into the ring's "
                "resources, not into controlledResources"
            )
        try:
            found = await self.client.get_metadata(kind, owner.name, namespace)
        except KubeNotFound:
            return True
        return self.owns(found.metadata) and not self.must_let_go(found.metadata)

    async def _shared_kinds(self) -> tuple[ApiKind[PartialObject], ...]:
        if self._clock.now() >= self._shared_until:
            ring = await self.client.get(RINGS, self.ring.name)
            found = [await self.client.discover(r.group, r.resource) for r in ring.spec.resources]
            self._shared = tuple(found)
            self._shared_until = self._clock.now() + SHARED_FOR_S
        return self._shared

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
        """Run a controller for the objects of one resource that belong to this instance.

        It ends by cancellation, or with `Fenced` when the Lease is lost. Cancelled, it lets running
        calls end for `settle_s`, then cancels them. If a call or a thread of one still goes on
        after that, the Lease is not given back.
        """
        from domicile.kube.controller import RingController

        controller = RingController(
            self, reconcile, group, resource,
            namespace=namespace, workers=workers, settle_s=settle_s,
        )  # fmt: skip
        await controller.run()
