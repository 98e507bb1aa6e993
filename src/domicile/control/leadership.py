"""One leadership: a coordinator, its leader lease, and what it says to the nodes.

Made by the candidate of the elected control plane once the leader key is won, and thrown away with
everything it knows when it ends (C1). The driver steps the coordinator and keeps the lease; here is
what only a coordinator wants: nodes told, nodes pinged and probed, a user's function asked.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterable, Sequence
from contextlib import suppress
from operator import itemgetter
from random import Random
from typing import Any

from domicile.concurrency.cadence import Cadence
from domicile.control.driver import MachineDriver
from domicile.control.strategy_runner import StrategyRunner
from domicile.core.coordinator.custom_strategy import CUSTOM
from domicile.core.coordinator.events import (
    Announce,
    AskProbe,
    AskStrategy,
    ClusterEffect,
    ClusterEvent,
    CoordinatorEvent,
    OwnersLost,
    StrategyAnswered,
    Tell,
)
from domicile.core.coordinator.machine import Coordinator
from domicile.core.ids import Incarnation, ShardKey
from domicile.core.lease.lease import Lease
from domicile.core.placement.suspicion import pause_s
from domicile.core.wire import Ping, Probe, Told, ToOwner
from domicile.errors import StoreError
from domicile.membership.store_calls import StoreCalls
from domicile.ports.clock import Clock
from domicile.ports.meter import Meter
from domicile.ports.store import NeedsTicks, writes_one_key
from domicile.settings import Settings
from domicile.taglog import TaggedLog

log = TaggedLog()

PING_S = 1.0
"""How often a leader asks every node whether it is there (C7), unless silence means something
sooner."""


class Leadership(MachineDriver[ClusterEvent, ClusterEffect]):
    """Leads from construction until `end`."""

    _office = "leader"

    def __init__(
        self,
        *,
        calls: StoreCalls,
        clock: Clock,
        meter: Meter,
        settings: Settings,
        random: Random,
        me: Incarnation,
        guard: Callable[[], bool],
        send: Callable[[Incarnation, ToOwner], None],
        nodes: Callable[[], Sequence[Incarnation]],
        strategy: str | StrategyRunner,
        lease: Lease,
        lease_id: str,
        revision: int,
    ) -> None:
        named = strategy if isinstance(strategy, str) else CUSTOM
        super().__init__(
            Coordinator(
                me, revision, settings, random, named, sealing=writes_one_key(calls.store)
            ),
            calls=calls, clock=clock, meter=meter, settings=settings, random=random, guard=guard,
            lease=lease, lease_id=lease_id,
        )  # fmt: skip
        self._me, self._send, self._nodes = me, send, nodes
        self._advisor = None if isinstance(strategy, str) else strategy
        self._pings = 0
        meter.event("leading", inc=me, revision=revision)

    def ping(self, nodes: Sequence[Incarnation]) -> None:
        """Ask nodes whether they are there."""
        if not self.check():
            return
        self._pings += 1
        for node in nodes:
            if node != self._me:
                self._send(node, Ping(self._pings))

    def _carry_out(self, effect: ClusterEffect) -> None:
        match effect:
            case Tell():
                self._tell(effect)
            case Announce():
                announce(effect)
            case OwnersLost(shards):
                warn_of_lost_owners(shards, self._settings.poison_window_s)
            case AskProbe(voter, node):
                self._send(voter, Probe(node))
            case AskStrategy():
                self._spawn(self._consult(effect))

    def _more_tasks(self) -> Iterable[Coroutine[Any, Any, None]]:
        store = self._calls.store
        if isinstance(store, NeedsTicks) and store.tick_s > 0:
            return (self._keep_pinging(), self._keep_ticking(store))
        return (self._keep_pinging(),)

    def _unanswered(self) -> None:
        self._meter.count("leader.commit_unknown")

    def _failed(self, event: CoordinatorEvent) -> None:
        log.exception("the coordinator failed on %s and gives up", type(event).__name__)
        self._meter.count("leader.failed")

    def _ended(self, reason: str) -> None:
        self._meter.count("leader.ended")
        self._meter.event("deposed", inc=self._me, reason=reason)

    def _tell(self, tell: Tell) -> None:
        if not self.check():
            return
        (role, shard), entry = tell.shard, tell.entry
        self._meter.event(
            "told",
            inc=self._me,
            to=tell.to,
            role=role,
            shard=shard,
            owner=entry.owner,
            epoch=entry.epoch,
            state=entry.state,
            change=entry.change,
        )
        self._send(tell.to, Told(role, shard, entry))

    async def _consult(self, consult: AskStrategy) -> None:
        assert self._advisor is not None, "only a user's function is consulted"
        self.feed(StrategyAnswered(consult.situation, await self._advisor.ask(consult.situation)))

    async def _keep_ticking(self, store: NeedsTicks) -> None:
        """S4: the time of a store that has no clock of its own advances while somebody leads."""
        loop = asyncio.get_running_loop()
        cadence = Cadence(store.tick_s, loop.time())
        while self.check():
            # A store that does not answer, or went back, is noticed by those who need an answer.
            with suppress(StoreError):
                await self._calls.bounded(store.tick())
            await asyncio.sleep(cadence.wait_s(loop.time()))

    async def _keep_pinging(self) -> None:
        # Several pings in the shortest silence that has consequences (C6, C7).
        pause_s = min(PING_S, self._settings.evict_after_s / 4, self._settings.heard_s / 2)
        while self.check():
            self.ping(self._nodes())
            await asyncio.sleep(pause_s)


def announce(news: Announce) -> None:
    """Say in the log what was put away, what is tried again, and what is forgotten (DX-24)."""
    shard, before, after = f"{news.shard.role}/{news.shard.shard}", news.before, news.after
    tags = {"shard": shard, "epoch": after.epoch}
    entities = [entity for entity in after.barred if entity not in before.barred]
    if after.tries > before.tries:
        names = ", ".join(f"{entity.type} {entity.id!r}" for entity in entities)
        log.warning(
            "%s quarantined: %d owners of the shard died in a row, the last ones while it ran. "
            "Its messages are refused. It is tried again in %g s. See what it does; to serve it "
            "at once, run: domicile unquarantine %s",
            f"{names} (shard {shard}) is" if names else f"shard {shard} is",
            after.deaths, pause_s(after.tries), shard, extra=tags,
        )  # fmt: skip
    elif after.tries:
        log.info("shard %s: what was quarantined is served again, on trial", shard, extra=tags)
    else:
        log.info("shard %s: its quarantines are over and forgotten", shard, extra=tags)


def warn_of_lost_owners(shards: Sequence[tuple[ShardKey, int]], window_s: float) -> None:
    """Say in the log which shards lose owner after owner, while no entity can be blamed yet."""
    shard, deaths = max(shards, key=itemgetter(1))
    where = f"{shard.role}/{shard.shard}"
    several = f"{len(shards)} shards, for example " if len(shards) > 1 else ""
    log.warning(
        "%sshard %s lost %d owners in a row, each within %g s of the one before, and no entity "
        "can be blamed for it yet. All its runs are on trial. See the logs of the nodes that "
        "died; to see such shards, run: domicile status",
        several, where, deaths, window_s, extra={"shard": where},
    )  # fmt: skip
