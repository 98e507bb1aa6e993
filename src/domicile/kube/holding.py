"""Holding a Lease of Kubernetes: taking it, renewing it, giving it back, knowing when it is lost.

The instances of a ring and the acting sharder hold theirs by this. Validity is that of L1: counted
from when a renewal was sent, less a margin, on our own clock. A Lease that somebody else holds is
free once its holder gave it back, or once it was not seen to change for its duration (K1). An
absent Lease proves nothing: somebody may have deleted it, and its holder acts until it learns that,
or until its time is over. So the process that makes a Lease acts one duration later. Each write
names the resourceVersion that was read. What is lost stays lost (L5).
"""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import threading
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from dataclasses import replace
from math import inf
from random import Random
from typing import Any, Protocol

from domicile.core.lease.keeper import LeaseKeeper, Renewal
from domicile.core.lease.lease import Lease, LeaseState
from domicile.errors import ConfigError, Fenced
from domicile.kube.conventions import (
    ABSENT,
    DEFAULT_DURATION_S,
    INCARNATION,
    MAX_DURATION_S,
)
from domicile.kube.leases import observed
from domicile.kubeapi.client import KubeClient
from domicile.kubeapi.errors import (
    KubeConflict,
    KubeError,
    KubeNotFound,
    KubeUnanswered,
    KubeUnavailable,
)
from domicile.kubeapi.exchange import ApiAnswer, ApiExchange, ApiRequest
from domicile.kubeapi.kinds import LEASES
from domicile.kubeapi.objects import KubeLease, is_object_name, micro_time
from domicile.membership.clock import SystemClock
from domicile.ports.clock import Clock

log = logging.getLogger("domicile.kube")

POLL_S = 1.0

LEAVE_S = 10.0
"""How long a leaving holder tries to give its Lease back."""


WATCHDOG = "domicile-watchdog"
"""The name of the thread that ends the process."""


class KubeLeaseHolder:
    """One holder of one Lease, for one use: `join`, then `leave`, or a context manager."""

    def __init__(
        self,
        client: KubeClient,
        lease: str,
        identity: str,
        namespace: str,
        *,
        labels: Mapping[str, str],
        duration_s: int = DEFAULT_DURATION_S,
        unique_name: bool = False,
        ends_process: bool = False,
        clock: Clock | None = None,
        random: Random | None = None,
    ) -> None:
        if not is_object_name(lease):
            raise ConfigError(f"no Lease can be called {lease!r}: lower-case letters, digits, -")
        if duration_s < 3:
            raise ConfigError(f"duration_s={duration_s} is too short: 3 seconds are the least")
        if duration_s > MAX_DURATION_S:
            raise ConfigError(
                f"duration_s={duration_s} is too long: {MAX_DURATION_S} seconds are the most; the "
                "objects of an instance that dies wait for twice its duration"
            )
        self.lease_name, self.identity, self.namespace = lease, identity, namespace
        self.duration_s = duration_s
        self.unique_name = unique_name
        """Whether no other running process can have held this Lease. Then an absent one is taken
        without waiting."""
        self.ends_process = ends_process
        """Whether a thread ends the process if it has not left by the end of its Lease (L4)."""
        self._labels = dict(labels)
        # L2: the defaults of a node's lease.
        margin_s = max(0.6, duration_s / 6)
        self._renew_s = min(duration_s / 4, (duration_s - margin_s) / 3)
        self._lease = Lease(margin_s, margin_s / 2)
        self._clock: Clock = SystemClock() if clock is None else clock
        self._random = Random() if random is None else random
        self.incarnation = secrets.token_hex(8) if random is None else f"{random.getrandbits(64):x}"
        self._client = client
        self.client = client.through(lambda exchange: GuardedExchange(exchange, self))
        """The same API server; a write is refused once the Lease is not valid (K7)."""
        self._version = ""
        self._unproven = False  # an earlier holder may act, though no Lease says so
        self._acts_from = -inf
        # Two controllers may say the same, of objects of one name. Bounded by their number.
        self._going_on: list[str] = []
        self._watchdog: _Watchdog | None = None
        self._keeping: asyncio.Task[None] | None = None
        self._lost = asyncio.Event()
        self.reason = ""
        """Why the holder is over; empty before that."""

    @property
    def valid(self) -> bool:
        """Whether the holder may act now (L3)."""
        now = self._clock.now()
        return now >= self._acts_from and self._lease.valid(now)

    @property
    def valid_until(self) -> float:
        """When that ends unless the Lease is renewed, on the holder's own clock."""
        return self._lease.valid_until

    @property
    def hard_until(self) -> float:
        """Until when cancelled work may clean up (L4)."""
        return self._lease.hard_until

    @property
    def hard_left_s(self) -> float:
        """Seconds until then; 0 if it is over."""
        return max(0.0, self.hard_until - self._clock.now())

    def guard(self) -> None:
        """Raise `Fenced` unless the holder may act now. To be called before every write."""
        if not self.valid:
            raise Fenced(
                f"{self.identity} does not hold the Lease {self.namespace}/{self.lease_name}"
                + (f": {self.reason}" if self.reason else "")
                + "; nothing was written, somebody else may act now"
            )

    async def wait_lost(self) -> None:
        """Wait until the Lease is lost or given back."""
        await self._lost.wait()

    # Joining and leaving.

    async def join(self) -> None:
        """Take the Lease, waiting until it is free if somebody else holds it.

        If it was absent, it is made, and this returns one duration later, unless `unique_name`. If
        it is lost meanwhile, this returns, too: `guard` says why.
        """
        if self._keeping is not None:
            raise RuntimeError("a member is for one use; make a new one")
        while not await self._try_to_take():
            pass
        self._keeping = asyncio.get_running_loop().create_task(
            self._keep(), name=f"kube-lease-{self.lease_name}"
        )
        try:
            await self._wait_for_earlier_holders()
        except BaseException:
            # Given back, it would tell the next holder that nobody acts any more.
            await self.abandon()
            raise
        if self.valid:
            if self.ends_process:
                self._watchdog = _Watchdog(self)
                self._watchdog.start()
            log.info("%s holds the Lease %s/%s", self.identity, self.namespace, self.lease_name)

    async def _wait_for_earlier_holders(self) -> None:
        left_s = self._acts_from - self._clock.now()
        if left_s > 0:
            log.info(
                "there was no Lease %s/%s: %s acts in %.1f s, because somebody may have deleted "
                "the Lease of an earlier holder",
                self.namespace,
                self.lease_name,
                self.identity,
                left_s,
            )
        while (left_s := self._acts_from - self._clock.now()) > 0:
            with suppress(TimeoutError):
                async with asyncio.timeout(left_s):
                    await self._lost.wait()
                    return

    async def abandon(self) -> None:
        """Renew no longer, and give nothing back: work goes on that nobody can stop. Others wait
        until the Lease has run out."""
        keeping, self._keeping = self._keeping, None
        if keeping is not None:
            keeping.cancel()
            with suppress(asyncio.CancelledError):
                await keeping
        self.reason = self.reason or "it was abandoned"
        self._lost.set()

    def work_goes_on(self, what: str) -> None:
        """Note work that nobody can stop: then the Lease is not given back, it has to run out."""
        self._going_on.append(what)

    def work_ended(self, what: str) -> None:
        """It has ended all the same: what was noted once in these words."""
        self._going_on.remove(what)

    async def leave(self) -> None:
        """Give the Lease back, after all work has ended. Objects move to others at once."""
        if self._going_on:
            # The process has to be over when others get its objects; see `_Watchdog`.
            log.error(
                "%s gives nothing back: its Lease %s has to run out, because %s",
                self.identity,
                self.lease_name,
                "; ".join(self._going_on),
            )
            await self.abandon()
            return
        if self._watchdog is not None:
            self._watchdog.stop()
        keeping, self._keeping = self._keeping, None
        if keeping is not None:
            keeping.cancel()
            with suppress(asyncio.CancelledError):
                await keeping
        held = self._lease.state is LeaseState.HELD
        self._lease.left(self._clock.now())
        self.reason = self.reason or "it has left"
        self._lost.set()
        try:
            if held and keeping is not None:
                async with asyncio.timeout(LEAVE_S):
                    await self._give_back()
        except (KubeError, TimeoutError) as error:
            log.warning(
                "%s could not give its Lease back, so it has to run out: %s", self.lease_name, error
            )

    async def _give_back(self) -> None:
        while True:
            with suppress(KubeConflict, KubeUnanswered):
                with suppress(KubeNotFound):
                    await self._client.patch(
                        LEASES,
                        self.lease_name,
                        self.namespace,
                        merge={"spec": {"holderIdentity": "", "leaseDurationSeconds": 1}},
                        resource_version=self._version,
                    )
                return
            # Somebody else labelled it, or the answer was lost.
            lease = await self._client.get(LEASES, self.lease_name, self.namespace)
            if not self._is_ours(lease):
                return
            self._version = lease.metadata.resource_version

    async def _try_to_take(self) -> bool:
        try:
            lease = await self._client.get(LEASES, self.lease_name, self.namespace)
        except KubeNotFound:
            return await self._make()
        except KubeUnavailable as error:
            log.warning("%s waits for the API server: %s", self.lease_name, error)
            await asyncio.sleep(POLL_S)
            return False
        for label, value in self._labels.items():
            if lease.metadata.label(label) != value:
                raise ConfigError(
                    f"the Lease {self.namespace}/{self.lease_name} exists and is no such one: its "
                    f"label {label} is {lease.metadata.label(label)!r}, not {value!r}; choose "
                    "another name"
                )
        # Not from when it was asked for: the holder may have renewed since.
        seen = observed(lease, None, self._clock.now())
        while lease.spec.holder_identity and not self._is_ours(lease):
            # Somebody has it, or had it until it died: only our own clock tells (K1).
            if self._clock.now() >= seen.expires_at:
                break
            await asyncio.sleep(min(POLL_S, max(0.0, seen.expires_at - self._clock.now())))
            try:
                lease = await self._client.get(LEASES, self.lease_name, self.namespace)
            except KubeNotFound:
                return await self._make()
            except KubeUnavailable:
                continue
            seen = observed(lease, seen, self._clock.now())
        if not self._is_ours(lease):
            self._unproven = seen.was_absent
        return await self._take(lease)

    async def _make(self) -> bool:
        self._unproven = True
        sent_at = self._clock.now()
        metadata = {
            "name": self.lease_name,
            "labels": self._labels,
            "annotations": {INCARNATION: self.incarnation},
        }
        body = {"metadata": metadata, "spec": self._spec(0)}
        try:
            lease = await self._client.create(LEASES, body, self.namespace)
        except (KubeConflict, KubeUnanswered, KubeUnavailable):
            await asyncio.sleep(POLL_S * self._random.random())
            return False
        return self._granted(lease, sent_at)

    async def _take(self, lease: KubeLease) -> bool:
        sent_at = self._clock.now()
        change = {
            "metadata": {
                "labels": self._labels,
                "annotations": {INCARNATION: self.incarnation, ABSENT: None},
            },
            "spec": self._spec((lease.spec.lease_transitions or 0) + 1),
        }
        try:
            lease = await self._client.patch(
                LEASES,
                self.lease_name,
                self.namespace,
                merge=change,
                resource_version=lease.metadata.resource_version,
            )
        except (KubeConflict, KubeNotFound, KubeUnanswered, KubeUnavailable):
            await asyncio.sleep(POLL_S * self._random.random())
            return False
        return self._granted(lease, sent_at)

    def _granted(self, lease: KubeLease, sent_at: float) -> bool:
        self._version = lease.metadata.resource_version
        now = self._clock.now()
        self._lease.granted(sent_at, self.duration_s, now)
        if self._unproven and not self.unique_name:
            self._acts_from = now + self.duration_s
        return self._lease.valid(now)

    def _spec(self, transitions: int) -> dict[str, Any]:
        now = micro_time(self._clock.wall())
        return {
            "holderIdentity": self.identity,
            "leaseDurationSeconds": self.duration_s,
            "acquireTime": now,
            "renewTime": now,
            "leaseTransitions": transitions,
        }

    def _is_ours(self, lease: KubeLease) -> bool:
        return (
            lease.spec.holder_identity == self.identity
            and lease.metadata.annotation(INCARNATION) == self.incarnation
        )

    # Keeping.

    async def _keep(self) -> None:
        keeper = LeaseKeeper(self._renew_s, self._random, self._clock.now())
        while True:
            now = self._clock.now()
            if self._lease.check(now) is not LeaseState.HELD:
                break
            if now < keeper.due:
                await asyncio.sleep(min(keeper.due, self._lease.valid_until) - now)
                continue
            renewal = await self._renew(now)
            keeper.ended(renewal, now, self._clock.now())
        self.reason = self._lease.reason
        log.error("%s has lost the Lease %s: %s", self.identity, self.lease_name, self.reason)
        self._lost.set()

    async def _renew(self, sent_at: float) -> Renewal:
        change = {"spec": {"renewTime": micro_time(self._clock.wall())}}
        try:
            async with asyncio.timeout(
                min(self._renew_s, max(0.0, self._lease.valid_until - sent_at))
            ):
                lease = await self._client.patch(
                    LEASES,
                    self.lease_name,
                    self.namespace,
                    merge=change,
                    resource_version=self._version,
                )
        except KubeConflict:
            return await self._reread()
        except KubeNotFound:
            self._lease.refused(self._clock.now(), "the Lease was deleted")
            return Renewal.REFUSED
        except (KubeError, TimeoutError) as error:
            log.warning("%s could not renew its Lease: %s", self.lease_name, error or "no answer")
            return Renewal.UNANSWERED
        self._version = lease.metadata.resource_version
        self._lease.acknowledged(sent_at, self.duration_s, self._clock.now())
        return Renewal.ACKNOWLEDGED

    async def _reread(self) -> Renewal:
        """The Lease has changed: by the label of its state, by a renewal without an answer, or
        because somebody else has it now."""
        try:
            async with asyncio.timeout(self._renew_s):
                lease = await self._client.get(LEASES, self.lease_name, self.namespace)
        except KubeNotFound:
            self._lease.refused(self._clock.now(), "the Lease was deleted")
            return Renewal.REFUSED
        except (KubeError, TimeoutError):
            return Renewal.UNANSWERED
        if not self._is_ours(lease):
            holder = lease.spec.holder_identity or "nobody"
            self._lease.refused(self._clock.now(), f"{holder} holds the Lease")
            return Renewal.REFUSED
        self._version = lease.metadata.resource_version
        return Renewal.UNANSWERED  # nothing was renewed: it is repeated soon


class _Watchdog(threading.Thread):
    """Ends the process when the Lease is over, also while a handler blocks the event loop."""

    def __init__(self, holder: KubeLeaseHolder) -> None:
        super().__init__(name=WATCHDOG, daemon=True)
        self._holder = holder
        self._stopped = threading.Event()

    def run(self) -> None:
        while (left_s := self._holder.hard_left_s) > 0:
            if self._stopped.wait(left_s):
                return
        said = f"{self._holder.identity} is past the end of its Lease: the process ends at once\n"
        with suppress(OSError):
            os.write(2, said.encode())
        os._exit(1)

    def stop(self) -> None:
        """The Lease is being given back, after all work."""
        self._stopped.set()


class WriteGuard(Protocol):
    """Says whether writing is allowed now."""

    def guard(self) -> None:
        """Raise `Fenced` if it is not."""
        ...


class GuardedExchange:
    """An exchange that asks a guard before each write (K7), and again directly before it is sent:
    a token and a connection may have taken seconds."""

    def __init__(self, exchange: ApiExchange, guard: WriteGuard) -> None:
        self._exchange = exchange
        self._guard = guard
        self.server = exchange.server

    def open(self, request: ApiRequest) -> AbstractAsyncContextManager[ApiAnswer]:
        """As `ApiExchange.open`."""
        return self._guarded(request)

    @asynccontextmanager
    async def _guarded(self, request: ApiRequest) -> AsyncGenerator[ApiAnswer, None]:
        if request.writes:
            self._guard.guard()
            request = replace(request, before_sending=self._before(request.before_sending))
        async with self._exchange.open(request) as answer:
            yield answer

    def _before(self, told: Callable[[], None] | None) -> Callable[[], None]:
        def check() -> None:
            self._guard.guard()
            if told is not None:
                told()

        return check

    async def close(self) -> None:
        """The connections belong to the client without the guard."""
