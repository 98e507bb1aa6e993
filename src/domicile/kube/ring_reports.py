"""What a sharder tells people about a ring: the ring's status, and events.

Only the acting sharder tells. What could not be written is written later: the status as it is by
then, events one by one. `RingSharder` says when there may be news; this module must never decide
about objects or Leases.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Any

from domicile.errors import Fenced
from domicile.kube.sharder import SharderMachine
from domicile.kubeapi.client import KubeClient
from domicile.kubeapi.errors import KubeError, KubeRefused
from domicile.kubeapi.kinds import EVENTS, RINGS
from domicile.kubeapi.objects import second_time
from domicile.ports.clock import Clock

log = logging.getLogger("domicile.kube")

PAUSE_S = 1.0
PAUSE_MOST_S = 30.0

MAX_EVENTS = 1_000
"""I6: events that wait to be written. Later ones are only in the log."""

SHOWN = 5
"""Objects that the status names."""


class RingReports:
    """The status and the events of one ring. `run` it; it is owned by the ring's sharder."""

    def __init__(self, machine: SharderMachine, clock: Clock) -> None:
        self._machine = machine
        self._clock = clock
        self._client: KubeClient | None = None
        self._troubles: dict[str, str] = {}
        self._events: list[dict[str, Any]] = []
        self._written: dict[str, Any] | None = None
        self._ready: tuple[str, str] | None = None
        self._counted = False
        self._news = asyncio.Event()

    def lead(self, client: KubeClient | None) -> None:
        """Tell from now on, or no longer."""
        self._client = client
        self._written, self._ready, self._counted = None, None, False
        self._troubles.clear()
        self._events.clear()

    def look_again(self) -> None:
        """The ring, or what is known of it, may have changed."""
        self._news.set()

    def counted(self) -> None:
        """The instances are known: from now on there is a status to write."""
        self._counted = True
        self._news.set()

    def say(self, what: str, trouble: str) -> None:
        """Something works, or why it does not."""
        before = self._troubles.get(what, "")
        if trouble == before:
            return
        self._troubles[what] = trouble
        if trouble:
            self.warn("ReconciliationFailed", trouble)
        self._news.set()

    def warn(self, reason: str, said: str, regarding: dict[str, str] | None = None) -> None:
        """Write an event about an object, or about the ring itself."""
        ring = self._machine.ring.metadata
        log.warning("ring %s: %s", ring.name, said)
        if self._client is None:
            return
        if len(self._events) >= MAX_EVENTS:
            log.warning("ring %s: too many events wait, so that is told only here", ring.name)
            return
        about = regarding or {
            "apiVersion": RINGS.api_version, "kind": RINGS.kind,
            "name": ring.name, "uid": ring.uid,
        }  # fmt: skip
        now = second_time(self._clock.wall())
        self._events.append(
            {
                "metadata": {"generateName": f"domicile-{reason.lower()}-"},
                "involvedObject": about,
                "reason": reason,
                "message": said[:1024],
                "type": "Warning",
                "source": {"component": "domicile-sharder"},
                "firstTimestamp": now,
                "lastTimestamp": now,
                "count": 1,
            }
        )
        self._news.set()

    async def run(self) -> None:
        """Write what there is to write, until cancelled."""
        pause_s = PAUSE_S
        while True:
            await self._news.wait()
            self._news.clear()
            try:
                await self._write()
                pause_s = PAUSE_S
            except Fenced:
                continue  # another sharder tells
            except KubeError as error:
                log.info("ring %s is told of later: %s", self._machine.ring.metadata.name, error)
                await asyncio.sleep(pause_s)
                pause_s = min(pause_s * 2, PAUSE_MOST_S)
                self._news.set()

    async def _write(self) -> None:
        failed: KubeError | None = None
        try:
            await self._write_status()
        except KubeError as error:
            failed = error
        while (client := self._client) is not None and self._events:
            event = self._events[0]
            try:
                await client.create(
                    EVENTS, event, event["involvedObject"].get("namespace") or "default"
                )
            except KubeRefused as error:
                log.info("an event could not be written: %s", error)
            if self._events and self._events[0] is event:
                self._events.pop(0)
        if failed is not None:
            raise failed

    async def _write_status(self) -> None:
        client = self._client
        if client is None or not (self._counted or any(self._troubles.values())):
            return
        status = self._status()
        if status == self._written:
            return
        name = self._machine.ring.metadata.name
        await client.patch(RINGS, name, merge={"status": status}, subresource="status")
        if self._client is client:
            self._written = status

    def _status(self) -> dict[str, Any]:
        machine, now = self._machine, self._clock.now()
        states = [lease.state(now) for lease in machine.leases.values()]
        trouble = "; ".join(said for said in self._troubles.values() if said)
        said = trouble or f"{len(states)} instances"
        overdue = [f"{name} at {instance}" for name, instance, _ in machine.overdue(now)]
        if overdue:
            said += f"; not let go of in time: {', '.join(overdue[:SHOWN])}"
            said += f" and {len(overdue) - SHOWN} more" if len(overdue) > SHOWN else ""
        ready = "False" if trouble else "True"
        if self._ready is None or self._ready[0] != ready:
            self._ready = ready, self._since(ready)
        generation = machine.ring.metadata.generation
        condition = {
            "type": "Ready",
            "status": ready,
            "reason": "ReconciliationFailed" if trouble else "ReconciliationSucceeded",
            "message": said[:1024],
            "observedGeneration": generation,
            "lastTransitionTime": self._ready[1],
        }
        return {
            "observedGeneration": generation,
            "shards": len(states),
            "availableShards": sum(state.available for state in states),
            "conditions": [condition],
        }

    def _since(self, ready: str) -> str:
        for one in self._machine.ring.status.conditions:
            if one.type == "Ready" and one.status == ready and one.last_transition_time:
                return one.last_transition_time
        return second_time(self._clock.wall())
