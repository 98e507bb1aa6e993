"""The health port of a Kubernetes cluster: an incarnation is dead if its pod is, with proof (C9).

A program chooses it by `health="kubernetes://"`. The pod of an incarnation stands in its node's
record (`NodeRecord.place`). One watch follows the pods of the own namespace; only what seems to be
missing is asked for, one by one. `pod_proof` says what counts. Errors, missing rights and a server
that does not answer leave a verdict `UNKNOWN`.

A container that is started again within its pod leaves no proof at the API server. With a directory
of locks on a volume of the pod (`emptyDir`), the process in the new container proves the death of
the one before it by the kernel's lock, as processes of one machine do (L6).
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from random import Random
from typing import TypeVar

from domicile.core.ids import Incarnation
from domicile.errors import ConfigError, DomicileError, StoreUnavailable
from domicile.kube.pod_proof import (
    PodPlace,
    parse_place,
    proof_in_machine,
    proof_in_pod,
    seems,
    shown_pod,
)
from domicile.kubeapi.client import KubeClient
from domicile.kubeapi.errors import KubeError, KubeForbidden, KubeNotFound, KubeRefused
from domicile.kubeapi.follow import ObjectRemoved, ObjectsListed, follow
from domicile.kubeapi.kinds import MACHINES, NAMESPACES, PODS
from domicile.kubeapi.objects import KubePod
from domicile.ports.health import Verdict
from domicile.stores.file_locks import FileLocks

log = logging.getLogger("domicile.kube")

K = TypeVar("K")
V = TypeVar("V")

REST_S = 1.0
"""Seconds between two rounds of questions about pods that seem to be missing."""

AGAIN_S = 5.0
"""Seconds before another try after a failure that concerns all pods."""

AT_ONCE = 32
"""I6: questions of one round."""

DELETION_COST = "controller.kubernetes.io/pod-deletion-cost"
COST_S = 10.0
"""Seconds between two writes of the deletion cost, while shards move."""

KEPT = 10_000
"""I6: proofs, and places of incarnations, that are remembered. The oldest is forgotten first."""

SYSTEM = "kube-system"


@dataclass(frozen=True, slots=True)
class OwnPod:
    """The pod that this process runs in, as its environment says."""

    namespace: str
    name: str
    uid: str


def own_pod(
    namespace: str = "", environment: Mapping[str, str] = os.environ
) -> Callable[[], OwnPod]:
    """Reads the pod from `POD_NAMESPACE`, `POD_NAME` and `POD_UID` when it is called."""

    def found() -> OwnPod:
        name, uid = environment.get("POD_NAME", ""), environment.get("POD_UID", "")
        where = environment.get("POD_NAMESPACE", "") or namespace
        if not (name and uid and where):
            raise ConfigError(
                "the health port kubernetes:// must know the pod of this process: set POD_NAME, "
                "POD_NAMESPACE and POD_UID by the downward API (`domicile kubernetes manifests` "
                "shows how), or leave health= out"
            )
        return OwnPod(where, name, uid)

    return found


class PodHealth:
    """Implements `Health` and `JudgesByPlace` by pods and machines of one Kubernetes cluster."""

    def __init__(
        self,
        client: KubeClient,
        own: Callable[[], OwnPod],
        *,
        labels: str = "",
        locks: FileLocks | None = None,
        random: Random | None = None,
    ) -> None:
        self._client, self._own = client, own
        self._labels, self._locks, self._random = labels, locks, random
        self._cluster = ""
        self._namespace = ""
        self._places: dict[Incarnation, PodPlace] = {}
        self._pods: dict[str, Verdict] = {}
        """What the watch shows of pods that have not ended, by uid."""
        self._proofs: dict[str, str] = {}
        """Evidence by a pod's uid. It stays true: no uid is used again."""
        self._missing: dict[PodPlace, None] = {}
        self._listed = False
        self._asked_for = asyncio.Event()
        self._said: dict[str, None] = {}

    # Health

    def hold(self, incarnation: Incarnation) -> None:
        """As `Health.hold`."""
        if self._locks is not None:
            self._locks.hold(incarnation)

    def let_go(self, incarnation: Incarnation, *, gone: bool = True) -> None:
        """As `Health.let_go`."""
        if gone:
            self._places.pop(incarnation, None)
        if self._locks is not None:
            self._locks.let_go(incarnation, gone=gone)

    def verdict(self, incarnation: Incarnation) -> Verdict:
        """As `Health.verdict`: what the server said last."""
        if self._locks is not None:
            found = self._locks.verdict(incarnation)
            if found is not Verdict.UNKNOWN:
                return found
        place = self._places.get(incarnation)
        if place is None or place.cluster != self._cluster:
            return Verdict.UNKNOWN
        if place.uid in self._proofs:
            return Verdict.DEAD
        seen = self._pods.get(place.uid)
        if seen is not None:
            return seen
        if self._listed or place.namespace != self._namespace:
            self._missing[place] = None
            self._asked_for.set()
        return Verdict.UNKNOWN

    def evidence(self, incarnation: Incarnation) -> str:
        """As `Health.evidence`."""
        place = self._places.get(incarnation)
        if place is not None and place.uid in self._proofs:
            return self._proofs[place.uid]
        assert self._locks is not None, "only a proof or a lock makes a verdict DEAD"
        return self._locks.evidence(incarnation)

    def sweep(self) -> int:
        """As `SweepsProofs.sweep`."""
        return 0 if self._locks is None else self._locks.sweep()

    # JudgesByPlace

    async def find_place(self) -> str:
        """As `JudgesByPlace.find_place`: the pod that the environment names, if it is ours."""
        own = self._own()
        try:
            cluster = (await self._client.get(NAMESPACES, SYSTEM)).metadata.uid
            pod = await self._client.get(PODS, own.name, own.namespace)
        except (KubeForbidden, KubeNotFound) as error:
            raise ConfigError(
                f"the health port can't find the pod of this process: {error}"
            ) from error
        except KubeError as error:
            raise StoreUnavailable(f"the health port can't ask for its pod: {error}") from error
        if pod.metadata.uid != own.uid:
            raise ConfigError(
                f"POD_UID is {own.uid}, but {shown_pod(pod)} is another one: set POD_NAME and "
                "POD_UID by the downward API"
            )
        place = PodPlace(cluster, pod.spec.node_name, own.namespace, own.name, own.uid)
        if parse_place(place.text()) != place:
            raise StoreUnavailable(f"{shown_pod(pod)} has no machine yet: its place is not known")
        self._cluster, self._namespace = cluster, own.namespace
        return place.text()

    def placed(self, incarnation: Incarnation, place: str) -> None:
        """As `JudgesByPlace.placed`."""
        if incarnation in self._places:
            return
        found = parse_place(place)
        if found is not None:
            _remember(self._places, incarnation, found)

    async def run(self, proved: Callable[[], None], shards: Callable[[], int]) -> None:
        """As `JudgesByPlace.run`."""
        while not self._cluster:
            # The own record has no place then, but others can be judged.
            try:
                await self.find_place()
            except (ConfigError, StoreUnavailable) as error:
                log.warning("no proof of death can be had yet: %s", error)
                await asyncio.sleep(AGAIN_S)
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._follow(proved), name="domicile-pods")
            tasks.create_task(self._ask(proved), name="domicile-missing-pods")
            tasks.create_task(self._tell_cost(shards), name="domicile-pod-cost")

    async def close(self) -> None:
        """As `JudgesByPlace.close`."""
        await self._client.close()

    # What the server says.

    async def _follow(self, proved: Callable[[], None]) -> None:
        while True:
            try:
                await self._follow_on(proved)
            except DomicileError as error:  # as a token file that is missing for a moment
                log.warning("the pods can't be followed: %s", error)
                await asyncio.sleep(AGAIN_S)

    async def _follow_on(self, proved: Callable[[], None]) -> None:
        news = follow(self._client, PODS, self._namespace, labels=self._labels, random=self._random)
        async for one in news:
            if isinstance(one, ObjectsListed):
                self._pods.clear()
                self._listed = True
                fresh = [self._saw(pod, there=True) for pod in one.items]
            else:
                fresh = [self._saw(one.object, there=not isinstance(one, ObjectRemoved))]
            if any(fresh):
                proved()

    def _saw(self, pod: KubePod, *, there: bool) -> bool:
        """A pod of the watch, `there` or with its last words; whether it is a new proof."""
        uid = pod.metadata.uid
        self._pods.pop(uid, None)
        proof = proof_in_pod(pod)
        if proof:
            return self._prove(uid, proof)
        if there:
            self._pods[uid] = seems(pod)
        return False

    async def _ask(self, proved: Callable[[], None]) -> None:
        while True:
            await self._asked_for.wait()
            self._asked_for.clear()
            some = list(self._missing)[:AT_ONCE]
            self._missing.clear()
            for place in some:
                try:
                    if await self._look_at(place):
                        proved()
                except DomicileError as error:
                    self._say_once(place, error)
            await asyncio.sleep(REST_S)

    async def _look_at(self, place: PodPlace) -> bool:
        """Ask for a pod that the watch does not show, and for its machine if it does not exist."""
        try:
            pod = await self._client.get(PODS, place.name, place.namespace)
        except KubeNotFound as error:
            if not _names(error, place.name):
                raise
        else:
            if pod.metadata.uid == place.uid:
                return self._prove(place.uid, proof_in_pod(pod))
        try:
            machine = await self._client.get(MACHINES, place.machine)
        except KubeNotFound as error:
            if not _names(error, place.machine):
                raise
            machine = None
        return self._prove(place.uid, proof_in_machine(place, machine))

    async def _tell_cost(self, shards: Callable[[], int]) -> None:
        """Keep the pod's deletion cost: a Deployment that shrinks ends the emptiest pods first."""
        own = self._own()
        told = -1
        while True:
            cost = shards()
            try:
                if cost != told:
                    change = {"metadata": {"annotations": {DELETION_COST: str(cost)}}}
                    await self._client.patch(PODS, own.name, own.namespace, merge=change)
                    told = cost
            except KubeForbidden as error:
                log.warning("the pod's deletion cost is not kept: %s", error)
                return
            except DomicileError as error:
                log.info("the pod's deletion cost could not be told: %s", error)
            await asyncio.sleep(COST_S)

    def _prove(self, uid: str, proof: str) -> bool:
        if not proof or uid in self._proofs:
            return False
        _remember(self._proofs, uid, proof)
        return True

    def _say_once(self, place: PodPlace, error: DomicileError) -> None:
        """A question that goes on failing is logged once per kind of failure."""
        kind = type(error).__name__
        if kind not in self._said:
            self._said[kind] = None
            log.warning(
                "can't learn whether pod %s/%s is gone, so its node does not count as dead: %s",
                place.namespace, place.name, error,
            )  # fmt: skip


def _names(error: KubeRefused, name: str) -> bool:
    """Whether the API server itself says that this object does not exist. A proxy in between, or a
    server that lacks the kind, answers 404 as well."""
    return error.reason == "NotFound" and f'"{name}" not found' in str(error)


def _remember(into: dict[K, V], key: K, value: V) -> None:
    into[key] = value
    while len(into) > KEPT:
        del into[next(iter(into))]
