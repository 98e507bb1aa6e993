"""Looks for incarnations that are proved dead and removes their records (C5, C9, L6).

Every node that has a health port runs it. It must act only on the verdict `DEAD`: silence, errors
and missing proof do not prove a death. A health port that raises does not stop the watch.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from contextlib import suppress

from domicile.core.ids import Incarnation
from domicile.core.lease.death_probes import PARTED_S, ProbeSchedule, removal
from domicile.core.state.cluster_view import ClusterView
from domicile.core.state.txn import Committed, Conflict, Outcome
from domicile.errors import ConfigError, StoreError
from domicile.membership.store_calls import StoreCalls
from domicile.ports.clock import Clock
from domicile.ports.health import Health, JudgesByPlace, SweepsProofs, Verdict
from domicile.ports.meter import Meter
from domicile.ports.store import Store, writes_one_key
from domicile.settings import Settings

log = logging.getLogger("domicile")

EVIDENCE_S = 86_400.0
"""Seconds for which evidence is kept if its finder has no lease to attach it to."""


SWEEP_EVERY_S = 600.0
"""Seconds between two sweeps of old proofs, each of which looks at a few."""


def check_fencing(settings: Settings, health: Health | None) -> None:
    """Raise `ConfigError` if a node with these settings needs a health port and has none (C9)."""
    if settings.fencing == "health" and health is None:
        raise ConfigError(
            "fencing='health' frees a node's shards only on proof that its process can never run "
            "again, and nothing here could prove that: use a store of the form "
            "sqlite:///path/to/file.db, whose file locks do, or in a pod health='kubernetes://', "
            "or fencing='lease'"
        )


def let_go(health: Health, incarnation: Incarnation, *, gone: bool) -> None:
    """Tell a health port that an incarnation has stopped; errors of the port are only logged."""
    try:
        health.let_go(incarnation, gone=gone)
    except Exception:
        log.exception("the health port failed to let go of %s", incarnation)


class DeathWatch:
    """One node's search for dead incarnations."""

    def __init__(
        self,
        *,
        store: Store,
        health: Health,
        clock: Clock,
        meter: Meter,
        settings: Settings,
        members: ClusterView,
        me: Incarnation,
        lease: str,
        guard: Callable[[], bool],
    ) -> None:
        self._calls = StoreCalls(store, settings.op_timeout_s)
        self._health, self._clock, self._meter = health, clock, meter
        self._settings, self._members = settings, members
        self._me, self._lease, self._guard = me, lease, guard
        self._buried: dict[Incarnation, None] = {}
        self._parted: dict[Incarnation, None] = {}
        self._failing = False
        self._sweep_at = clock.now() + SWEEP_EVERY_S
        self._schedule = ProbeSchedule(me)
        self._woken = asyncio.Event()

    def look_soon(self) -> None:
        """There is a sign of a death: start a full probe round."""
        self._schedule.alarm()
        self._woken.set()

    def parted(self, incarnation: Incarnation) -> None:
        """A connection broke: that may be the first sign of a death."""
        if incarnation in self._members.nodes:
            self.look_soon()
        elif incarnation in self._members.clients and incarnation not in self._parted:
            self._parted[incarnation] = None
            self._look_at(incarnation, PARTED_S)

    def suspect(self, incarnation: Incarnation) -> None:
        """A member gets no answer from this incarnation (SM-08): if it is dead, remove its record
        at once."""
        if self._known(incarnation) and self._verdict(incarnation) is Verdict.DEAD:
            self.look_soon()

    async def run(self) -> None:
        """Probe until cancelled, or until this incarnation may no longer act."""
        while self._guard():
            for incarnation in self._due():
                if self._verdict(incarnation) is Verdict.DEAD:
                    await self._record_death(incarnation)
            self._sweep()
            await self._rest()

    def _sweep(self) -> None:
        """From time to time, have old proofs of death removed that no record needs any more."""
        now = self._clock.now()
        if not isinstance(self._health, SweepsProofs) or now < self._sweep_at:
            return
        self._sweep_at = now + SWEEP_EVERY_S
        try:
            self._health.sweep()
        except Exception:
            self._meter.count("health.failed")
            log.exception("the health port failed to remove old proofs of death")

    def _look_at(self, client: Incarnation, after_s: tuple[float, ...]) -> None:
        """Probe a client later, if it has not left by then: most have, at no cost here (I8)."""
        at = self._clock.now() + after_s[0]
        self._clock.call_at(at, lambda: self._look_now(client, after_s[1:]))

    def _look_now(self, client: Incarnation, after_s: tuple[float, ...]) -> None:
        if client in self._members.clients and self._guard():
            if self._verdict(client) is Verdict.DEAD:
                self._schedule.suspect(client)
                self._woken.set()
            elif after_s:
                self._look_at(client, after_s)
                return
        self._parted.pop(client, None)

    def _verdict(self, incarnation: Incarnation) -> Verdict:
        record = self._members.nodes.get(incarnation)
        try:
            if record is not None and isinstance(self._health, JudgesByPlace):
                self._health.placed(incarnation, record.place)
            return self._health.verdict(incarnation)
        except Exception:
            if not self._failing:
                log.exception("the health port failed; until it judges, nobody counts as dead")
            self._failing = True
            self._meter.count("health.failed")
            return Verdict.UNKNOWN

    def _evidence(self, dead: Incarnation) -> str:
        try:
            return self._health.evidence(dead)
        except Exception as error:
            self._meter.count("health.failed")
            return f"its health port calls it dead, but can't say why ({error})"

    async def _rest(self) -> None:
        rest_s = self._schedule.next_rest_s(self._clock.now())
        self._woken.clear()
        with suppress(TimeoutError):
            async with asyncio.timeout(rest_s):
                await self._woken.wait()

    def _due(self) -> list[Incarnation]:
        members = self._members
        due = self._schedule.due(members.nodes, members.clients, self._clock.now())
        self._buried = {one: None for one in self._buried if self._registered(one)}
        return [one for one in due if one not in self._buried]

    def _known(self, one: Incarnation) -> bool:
        return one != self._me and one not in self._buried and self._registered(one)

    def _registered(self, one: Incarnation) -> bool:
        return one in self._members.nodes or one in self._members.clients

    async def _record_death(self, dead: Incarnation) -> None:
        record = self._members.nodes.get(dead)
        evidence = self._evidence(dead)
        try:
            outcome = await self._remove(dead, evidence)
        except StoreError:
            return  # the next round tries again
        if isinstance(outcome, Committed):
            self._buried[dead] = None
            if record is None or self._settings.fencing == "lease":
                # A store that goes back (S5) may know a node again. Its lease ends by itself; a
                # record without a lease needs the proof.
                let_go(self._health, dead, gone=True)
            self._meter.count("node.dead")
            if record is None:
                log.warning("a client is dead (%s)", evidence)
            else:
                log.warning(
                    "node %s is dead (%s); its shards are free at once", record.node, evidence
                )
        elif isinstance(outcome, Conflict):
            self._meter.count("node.dead.raced")

    async def _remove(self, dead: Incarnation, evidence: str) -> Outcome:
        lease = await self._evidence_lease(dead)
        conditions, writes = removal(self._members, dead, evidence, lease)
        if writes_one_key(self._calls.store):
            # The record goes last: while it is there, the next round does all of it again.
            writes = writes[::-1]
        return await self._calls.commit_each(conditions, writes)

    async def _evidence_lease(self, dead: Incarnation) -> str:
        if self._settings.fencing != "health":
            return self._lease
        lease = f"dead-{dead}"
        await self._calls.bounded(self._calls.store.grant(lease, EVIDENCE_S))
        return lease
