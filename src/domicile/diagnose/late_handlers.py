"""Handlers that run for too long, reported to the store; and operators' requests to end them
(DX-09).

An incarnation makes one. It must look at nothing while no handler is suspended (I8), write only
what is new, and leave no task or timer behind.
"""

from __future__ import annotations

import asyncio

import msgspec

from domicile.concurrency.task_set import TaskSet
from domicile.core.ids import Incarnation
from domicile.core.state.cluster_view import KickWished
from domicile.core.state.keys import stuck_key
from domicile.core.state.txn import At, Committed, Delete, Outcome, Put
from domicile.diagnose.inspect import Kick, stuck_turn, stuck_turns, turns_of
from domicile.diagnose.records import (
    REFRESH_S,
    Bulletin,
    KickOutcome,
    Publish,
    StuckRecord,
    Withdraw,
    decode_kick,
    encode_kick,
    encode_stuck,
)
from domicile.entity.hosting.cell import Turn
from domicile.entity.runtime import Runtime
from domicile.errors import StoreError
from domicile.membership.store_calls import StoreCalls
from domicile.ports.clock import Clock, Timer
from domicile.ports.meter import Meter
from domicile.ports.store import OffersThreads, Store, ThreadedStore
from domicile.settings import Settings
from domicile.taglog import TaggedLog

log = TaggedLog()

POLL_S = 0.02
KICK_S = 1.0
"""Seconds for a kicked handler to end; after that the operator is told that it has not."""


class StuckHandlers:
    """Reports the late handlers of one incarnation, and ends handlers when an operator says so."""

    def __init__(
        self,
        *,
        store: Store,
        clock: Clock,
        meter: Meter,
        settings: Settings,
        me: Incarnation,
        lease: str | None,
        runtime: Runtime,
    ) -> None:
        self._calls = StoreCalls(store, settings.op_timeout_s)
        self._clock, self._meter, self._settings = clock, meter, settings
        self._me, self._runtime = me, runtime
        self._lease = lease
        """None: the node's record has no lease (C9), so the report gets its own."""
        self._beside: ThreadedStore | None = None
        self._loop = asyncio.get_running_loop()
        if lease is not None and isinstance(store, OffersThreads):
            self._beside = store.beside()
        self._bulletin = Bulletin(settings.stuck_s)
        self._timer: Timer | None = None
        self._writing = False
        self._tasks: TaskSet[None] = TaskSet("domicile-late-handlers")
        self._closed = False

    def begin(self) -> None:
        """A handler suspended: check it later, unless a check is due anyway."""
        if self._timer is None and not self._closed:
            due = self._clock.now() + self._settings.stuck_s
            self._timer = self._clock.call_at(due, self._look)

    def held(self, turn: Turn, since_s: float, ident: int) -> None:
        """A handler blocks the loop: called in the thread that sees it.

        The store is written from that thread; once the loop turns again, it withdraws the report.
        """
        if self._beside is None or self._lease is None or self._closed:
            return
        late = stuck_turn(turn, since_s, held_by=ident)
        record = StuckRecord(self._clock.now(), (late,))
        self._beside.rewrite(stuck_key(self._me), 0, encode_stuck(record), self._lease)
        self._loop.call_soon_threadsafe(self._said_beside, Publish(record))

    def _said_beside(self, said: Publish) -> None:
        self._bulletin.unsure(said)
        if self._timer is not None:
            self._timer.cancel()
        self._look()

    def kick(self, wish: KickWished) -> None:
        """End the running handlers of an entity, if it is at home here, and store the outcome.

        A shard that moves meanwhile has ended its handlers; the request then expires by its lease.
        """
        host = self._runtime.hosts.get(wish.shard)
        if host is None or not host.owner.admits or not self._runtime.guard():
            return
        try:
            record = decode_kick(wish.item.value)
        except msgspec.MsgspecError:
            self._meter.count("kick.unreadable")
            return
        if record.outcome is not None:
            return
        turns = turns_of(self._runtime.suspended, wish.shard, wish.entity)
        log.warning(
            "kick: %s ends %d %s of %s %r", record.by, len(turns),
            "handler" if len(turns) == 1 else "handlers", *wish.entity, extra=host.tags(),
        )  # fmt: skip
        self._meter.count("handler.kicked", len(turns))
        self._tasks.spawn(self._see_kick(wish, Kick(turns)))

    async def close(self) -> None:
        """End all tasks that are under way."""
        self._closed = True
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        await self._tasks.close()

    # what is late

    def _look(self) -> None:
        self._timer = None
        if self._closed or not self._runtime.guard():
            return
        now, runtime = self._clock.now(), self._runtime
        found = stuck_turns(runtime.suspended, lambda since_s: self._bulletin.late(since_s, now))
        if not self._writing:
            residents = sum(len(host.cells) for host in runtime.hosts.values())
            wanted = self._bulletin.decide(found.turns, found.more, residents, now)
            if wanted is not None:
                self._writing = True
                self._tasks.spawn(self._write(wanted))
        oldest_s = next(iter(runtime.suspended.values()), None)
        due = self._bulletin.next_look(oldest_s, now)
        if due is None and self._writing:
            due = now + self._settings.stuck_s
        if due is not None:
            self._timer = self._clock.call_at(due, self._look)

    async def _write(self, wanted: Publish | Withdraw) -> None:
        self._bulletin.unsure(wanted)
        try:
            if isinstance(await self._calls.bounded(self._commit(wanted)), Committed):
                self._bulletin.written(wanted)
        except StoreError:
            self._meter.count("stuck.unwritten")
        finally:
            self._writing = False

    async def _commit(self, wanted: Publish | Withdraw) -> Outcome:
        key = stuck_key(self._me)
        write: Put | Delete = Delete(key)
        if isinstance(wanted, Publish):
            write = Put(key, encode_stuck(wanted.record), await self._leased())
        return await self._calls.store.commit((), (write,))

    async def _leased(self) -> str:
        """The lease that ends the record if this process cannot."""
        if self._lease is not None:
            return self._lease
        lease = f"stuck-{self._me}"
        await self._calls.store.grant(lease, 3 * REFRESH_S)
        return lease

    # kicks

    async def _see_kick(self, wish: KickWished, kick: Kick) -> None:
        deadline = self._clock.now() + KICK_S
        # Handlers end one by one without a common event, so this polls for a short time.
        await asyncio.sleep(POLL_S)
        while not kick.over and self._clock.now() < deadline:  # noqa: ASYNC110
            await asyncio.sleep(POLL_S)
        host = self._runtime.hosts.get(wish.shard)
        mailbox = None if host is None else host.owner.mailboxes.get(wish.entity)
        outcome = kick.outcome(0 if mailbox is None else len(mailbox.queue))
        if outcome.dropped or outcome.ignoring:
            log.warning("kick of %s %r: %s", *wish.entity, _told(outcome))
        record = msgspec.structs.replace(decode_kick(wish.item.value), outcome=outcome)
        key = wish.item.key
        commit = self._calls.store.commit(
            (At(key, wish.item.revision),), (Put(key, encode_kick(record), record.lease),)
        )
        try:
            await self._calls.bounded(commit)
        except StoreError:
            self._meter.count("kick.unanswered")


def _told(outcome: KickOutcome) -> str:
    parts = [
        f"{outcome.dropped} ignored their cancellation and are never resumed",
        f"{outcome.ignoring} ignore it so far",
    ]
    return ", ".join(part for part in parts if not part.startswith("0 "))
