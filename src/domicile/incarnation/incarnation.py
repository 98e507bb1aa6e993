"""One incarnation of a node or client, from registration to its end.

Wires store, transport and journal to the membership, the control plane and the message runtime,
and carries out leaving (H14) and fencing (L5). A `RunningIncarnation` is never used again: a node
that was fenced begins a new one. Made by `node` and `client` only.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from typing import Any

from domicile.control.planes import make_plane
from domicile.core.ids import Incarnation, ShardKey, new_incarnation
from domicile.core.lease.lease import FOREVER_S
from domicile.core.state.agreement import type_gaps
from domicile.core.state.cluster_view import (
    ClientGone,
    ClusterView,
    EntryChanged,
    KickWished,
    LeaderChanged,
    NodeChanged,
    NodeGone,
    NodeUp,
    ViewChange,
)
from domicile.core.state.keys import OffsetMark
from domicile.core.state.records import ClientRecord, NodeRecord
from domicile.core.state.shardmap import Entry
from domicile.core.state.txn import Changes, Listing
from domicile.core.wire import Figures, ToOwner
from domicile.diagnose.inspect import handler_of
from domicile.diagnose.late_handlers import StuckHandlers
from domicile.entity.hosting.cell import Turn
from domicile.entity.runtime import Runtime
from domicile.errors import StoreRewound, StoreUnavailable
from domicile.incarnation.context import Backends, Identity
from domicile.incarnation.dispatch import Dispatcher
from domicile.incarnation.shutdown import Shutdown, in_turn, stop_handlers, stop_leading
from domicile.incarnation.store_tasks import StoreTasks
from domicile.links.layer import LinkLayer
from domicile.links.token import fingerprints
from domicile.membership.clock import SystemClock
from domicile.membership.death_watch import DeathWatch, check_fencing, let_go
from domicile.membership.loopwatch import LoopPulse, LoopWatch, RunningHandler
from domicile.membership.member import Member
from domicile.membership.record_kinds import ProcessRecord, kind_of, marked_leaving, placed_at
from domicile.persist.journal_check import JournalCheck, check_of, compare_on_join
from domicile.persist.writer import JournalWriter
from domicile.ports.control import ControlWiring
from domicile.ports.health import Health, JudgesByPlace
from domicile.ports.journal import process_of
from domicile.ports.transport import Peer
from domicile.taglog import TaggedLog

log = TaggedLog()

LEAVE_OFFSETS_S = 1.0
"""Most seconds that an orderly stop waits for journal and store to say how far its shards are."""


class RunningIncarnation:
    """One incarnation. `begin`, then `run`; `leave` ends it in an orderly way."""

    def __init__(
        self,
        backends: Backends,
        plan: Identity,
        *,
        rewound: bool = False,
        owed: tuple[str, ...] = (),
    ) -> None:
        self._backends = backends
        self._plan = plan
        self._hosts = bool(plan.node_id)
        self.me: Incarnation = new_incarnation(backends.random)
        self._transport = backends.transport()
        self._links: LinkLayer | None = None
        self._over = asyncio.Event()
        self._deaths: DeathWatch | None = None
        self._journal_check: JournalCheck | None = None
        self.rewound = rewound
        """Whether the store was found to have lost commits: takeovers must wait (S5)."""
        self._owed = owed
        self._left = False
        self._revoked = False
        self._gone = False
        """Whether the own record is certainly gone from the store."""
        self.tags = {"node": plan.node_id or "client", "incarnation": self.me}
        self.loop_watch = self._watch_loop() if self._hosts else None
        """What looks whether the loop turns; its `reports` name what held it up (DX-10)."""

    async def begin(self) -> bool:
        """Read the store, open the port, register (SM-02). False if fenced meanwhile."""
        backends, plan = self._backends, self._plan
        settings = plan.settings
        shards = plan.role_shards()
        record: ProcessRecord
        if self._hosts:
            record = NodeRecord(
                plan.node_id, self.me, "", tuple(shards), tuple(sorted(plan.catalogue)),
                settings.ttl_s, plan.candidate, plan.capacity, plan.version,
                protocols=plan.protocols, process=process_of(backends.journal),
            )  # fmt: skip
        else:
            record = ClientRecord(self.me)
        self._record = record
        durable = sorted({kind.role: None for kind in plan.catalogue.values() if kind.durable})
        self._journal_check = check_of(
            backends.journal, durable, self._note_offsets, settings.op_timeout_s
        )
        self.member = Member(
            store=backends.store,
            clock=backends.clock,
            meter=backends.meter,
            settings=settings,
            random=backends.random,
            record=record,
            kind=kind_of(record),
            shards=shards,
            types=plan.types(),
            protocols=plan.protocols,
            tokens=fingerprints(plan.token, plan.cluster),
            events=self,
            turned_at=self._turned_at(),
            journals=partial(compare_on_join, self._journal_check, durable),
        )
        self._errands = StoreTasks(
            store=backends.store, meter=backends.meter, settings=settings, me=self.me,
            learn=self._learn_block, needs=self.member.members.needs,
        )  # fmt: skip
        self.control = make_plane(plan.control, self._control_wiring())
        self.runtime = Runtime(
            me=self.me,
            node_id=plan.node_id or "client",
            clock=backends.clock,
            meter=backends.meter,
            settings=settings,
            random=backends.random,
            members=self.member.members,
            guard=self.member.guard,
            lease=self.member.lease,
            may_clean_up=lambda: self.member.lease.may_resume(backends.clock.now()),
            control=self.control,
            read_record=self._errands.read_record,
            note_need=self._errands.note_need,
            store_trials=self._errands.store_trials,
            catalogue=plan.catalogue,
            shards=shards,
            resources=plan.resources,
            durability=None
            if backends.journal is None
            else JournalWriter(backends.journal, self.me, self._journal_check),
            threads=backends.blocking or backends.threads,
            tracer=backends.tracer,
        )
        self._stuck = StuckHandlers(
            store=backends.store, clock=backends.clock, meter=backends.meter, settings=settings,
            me=self.me, lease=self.member.lease_id if settings.fencing == "lease" else None,
            runtime=self.runtime,
        )  # fmt: skip
        self.runtime.on_suspended = self._stuck.begin
        self.dispatch = Dispatcher(
            runtime=self.runtime, control=self.control, members=self._members, parted=self._parted
        )
        self._links = LinkLayer(
            self._transport, backends.clock, settings, backends.random, backends.meter, self.me,
            plan.cluster, "", self.member.guard, self.dispatch, plan.protocols, plan.token,
            self._registered, self.figures, self._stalled,
        )  # fmt: skip
        backends.meter.event(
            "life", inc=self.me, node=plan.node_id, hosts=self._hosts,
            limits={
                "buffer": settings.buffer, "window": settings.window,
                "mailbox": settings.mailbox, "chain": settings.chain,
                "stop": settings.stop_budget_s,
            },
        )  # fmt: skip
        self.dispatch.start(self._links)
        self.runtime.start(self._links)
        try:
            if self._hosts:
                check_fencing(settings, backends.health)
            if backends.health is not None:
                if self._hosts:
                    await self._find_place(backends.health)
                backends.health.hold(self.me)
            await self._tidy_up()
            return await self.member.join(self._listen if self._hosts else None)
        except BaseException:
            await self._end()
            raise

    async def _find_place(self, health: Health) -> None:
        """C9: what others will judge this incarnation by goes into its record."""
        if not isinstance(health, JudgesByPlace):
            return
        try:
            place = await health.find_place()
        except StoreUnavailable as error:
            if self._plan.settings.fencing == "health":
                raise
            log.warning("%s; only its lease will show when this node dies", error, extra=self.tags)
            return
        self.member.amend(partial(placed_at, place))

    def _ask_for_proofs(self, group: asyncio.TaskGroup, health: Health) -> list[asyncio.Task[None]]:
        if self._deaths is None or not isinstance(health, JudgesByPlace):
            return []
        asking = health.run(self._deaths.look_soon, self._shards_here)
        return [group.create_task(asking, name="domicile-proofs")]

    def _shards_here(self) -> int:
        return sum(1 for _, entry in self._members.map if entry.owner == self.me)

    def _control_wiring(self) -> ControlWiring:
        backends, plan = self._backends, self._plan
        return ControlWiring(
            store=backends.store,
            clock=backends.clock,
            meter=backends.meter,
            settings=plan.settings,
            random=backends.random,
            threads=backends.threads,
            me=self.me,
            node_id=plan.node_id,
            candidate=self._hosts and plan.candidate,
            strategy=plan.strategy,
            members=self._members,
            guard=self.member.guard,
            send=partial(self._send, control=True),
            connected=self._connected,
            learn=self._learn_block,
            check_alive=self._suspected,
        )

    async def _tidy_up(self) -> None:
        """What earlier incarnations left to do in the store, before this one registers (L5, S5)."""
        try:
            await self._errands.revoke(self._owed)
            self._owed = ()
            if self.rewound:
                await self._errands.note_rewind()
                self.rewound = False
        except StoreRewound as error:
            # Once more from the start: the backup may hold those leases, too.
            self.rewound = True
            raise StoreUnavailable("the store was rewound meanwhile; it is asked again") from error

    async def _listen(self) -> str:
        assert self._links is not None
        self._links.address = address = await self._transport.listen(self._accept)
        return address

    async def run(self) -> None:
        """Until fenced or left; then nothing of this incarnation is left running."""
        if not self._over.is_set():
            log.info("joined the cluster %s", self._plan.cluster, extra=self.tags)
            self._tell_type_gaps()
        try:
            if self.loop_watch is not None:
                self.loop_watch.start()
            async with asyncio.TaskGroup() as group:
                watching = [group.create_task(self.member.run(), name="domicile-member")]
                if self._hosts:
                    watching.append(group.create_task(self.control.run(), name="domicile-control"))
                    if self._backends.health is not None:
                        self._deaths = deaths = self._look_out(self._backends.health)
                        watching.append(group.create_task(deaths.run(), name="domicile-deaths"))
                        watching += self._ask_for_proofs(group, self._backends.health)
                await self._over.wait()
                for task in watching:
                    task.cancel()
        finally:
            if self.loop_watch is not None:
                self.loop_watch.stop()
            await self._end()

    def _tell_type_gaps(self) -> None:
        """DX-26: say in which entity types the nodes of a role differ from this one."""
        record, config = self._record, self._members.config
        if not isinstance(record, NodeRecord):
            return
        known = {**({} if config is None else config.types), **self._plan.types()}
        gaps = [
            f"{gap.kind!r} is missing at {', '.join(gap.missing_at)}"
            for gap in type_gaps(known, {**self._members.nodes, self.me: record}.values())
            if gap.role in record.roles
        ]
        if gaps:
            log.info(
                "nodes of one role have different entity types: %s; messages for a missing type "
                "wait until the leader has moved their shard to a node that has it",
                "; ".join(gaps), extra=self.tags,
            )  # fmt: skip

    async def leave(self) -> None:
        """H14: release all, answer and hear everything, say goodbye, then give up the lease."""
        leaving = Shutdown(
            clock=self._backends.clock, settings=self._plan.settings, control=self.control,
            over=self._over, goodbyes=self.dispatch.goodbyes,
        )  # fmt: skip
        log.info("leaving: handing everything over (H14)", extra=self.tags)
        self.runtime.leaving = True
        if self._hosts:
            self.control.stand_aside()
            await self.member.rewrite(marked_leaving)
        leaving.said()
        await leaving.settle(self.runtime)
        await self._leave_offsets()
        if self._hosts:
            await leaving.see_off()
        leaving.linger()
        links = self._links
        if links is not None and self.member.guard():
            await leaving.part(links)
            if self._hosts:
                # Meanwhile nodes that could have led may have begun to leave, others to dial.
                await leaving.see_off()
                await leaving.part(links)
            links.close_doors()
        if self._hosts:
            await self.control.resign()
            await self._await_threads(leaving)
        self._left = True
        self.runtime.sending.fail_all("this process left the cluster")
        self._end_links()
        self._gone = await self.member.leave()
        self._revoked = True
        log.info("left the cluster %s", self._plan.cluster, extra=self.tags)
        self._over.set()

    def _note_offsets(self, marks: Mapping[ShardKey, OffsetMark]) -> None:
        self._errands.note_offsets(marks)

    async def _leave_offsets(self) -> None:
        """J11: an orderly stop leaves in the store how far its shards are in the journal."""
        if self._journal_check is not None and self.member.guard():
            with suppress(TimeoutError):
                async with asyncio.timeout(LEAVE_OFFSETS_S):
                    await self._errands.store_offsets(await self._journal_check.leave())

    def _watch_loop(self) -> LoopWatch | None:
        """A thread beside the loop, in real time only: in virtual time nothing ever blocks."""
        backends = self._backends
        if not isinstance(backends.clock, SystemClock):
            return None
        return LoopWatch(
            clock=backends.clock, meter=backends.meter, settings=self._plan.settings,
            running=lambda: self.runtime.running, describe=_described, tags=self.tags,
            stuck=self._holds_loop,
        )  # fmt: skip

    def _turned_at(self) -> Callable[[], float] | None:
        """What the thread that renews the lease asks about the loop; in real time only."""
        if self.loop_watch is not None:
            return self.loop_watch.turned_at
        clock = self._backends.clock
        return LoopPulse(clock).turned_at if isinstance(clock, SystemClock) else None

    def _holds_loop(self, turn: object, since_s: float, ident: int) -> None:
        assert isinstance(turn, Turn)
        self._stuck.held(turn, since_s, ident)

    async def _await_threads(self, leaving: Shutdown) -> None:
        """L4: a thread that is still at work must not outlive the lease that covers it."""
        threads, watchdog = self.runtime.blocking, self._backends.watchdog
        await leaving.until(lambda: not threads.running, self._plan.settings.stop_budget_s)
        if threads.running and watchdog is not None:
            watchdog.stuck(threads.running)

    def _look_out(self, health: Health) -> DeathWatch:
        return DeathWatch(
            store=self._backends.store, health=health, clock=self._backends.clock,
            meter=self._backends.meter, settings=self._plan.settings, members=self._members,
            me=self.me, lease=self.member.lease_id, guard=self.member.guard,
        )  # fmt: skip

    @property
    def links(self) -> LinkLayer | None:
        """The links of this incarnation, once it begins."""
        return self._links

    @property
    def lease_left_s(self) -> float:
        """For how long it may act from now on; 0 once it may not. Unlike `guard` it only looks."""
        lease, now = self.member.lease, self._backends.clock.now()
        return lease.valid_until - now if lease.valid(now) else 0.0

    def figures(self) -> Figures:
        """How busy this incarnation is, for a tool that asks. Only reads; as `gauges`, its cost
        does not grow with resident entities (I8)."""
        runtime, left_s, watch = self.runtime, self.lease_left_s, self.loop_watch
        hosts = runtime.hosts.values()
        return Figures(
            at_s=self._backends.clock.now(),
            turns=runtime.observer.turns,
            residents=sum(len(host.cells) for host in hosts),
            queued=sum(
                len(mailbox.queue) for host in hosts for mailbox in host.owner.mailboxes.values()
            ),
            open_asks=runtime.sending.open_asks,
            loop_lag_s=None if watch is None else watch.lag_s,
            lease_left_s=None if left_s == FOREVER_S else max(0.0, left_s),
        )

    @property
    def owed(self) -> tuple[str, ...]:
        """Leases of this and earlier incarnations that the store may still think alive (L5)."""
        mine = (self.member.lease_id,) if self.member.asked and not self._gone else ()
        return (*self._owed, *mine, *self.control.owed)

    async def _end(self) -> None:
        """Nothing of this incarnation runs afterwards; the store frees its shards at once (L5)."""
        health, watchdog = self._backends.health, self._backends.watchdog
        self._end_links()
        try:
            await in_turn(
                self.control.close,
                self._errands.close,
                self._stuck.close,
                partial(stop_handlers, self.runtime, watchdog),
                self._transport.close,
                partial(stop_leading, self.control, rewound=self.rewound),
                self._give_back,
            )
        finally:
            if health is not None:
                let_go(health, self.me, gone=self._gone)

    async def _give_back(self) -> None:
        if not self._revoked:
            self._gone = await self.member.leave()

    def _end_links(self) -> None:
        if self._links is not None:
            self._links.abort()

    # what the membership reports

    def on_fact(self, fact: ViewChange) -> None:
        """Something in the cluster is new."""
        match fact:
            case EntryChanged(shard, entry):
                self.runtime.on_entry(shard, entry)
            case NodeGone(incarnation) | ClientGone(incarnation):
                self._backends.meter.event("gone", inc=self.me, peer=incarnation)
                assert self._links is not None
                self._links.forget(incarnation)
                self.runtime.on_gone(incarnation)
                self.dispatch.goodbyes.pop(incarnation, None)
            case NodeUp():
                self.runtime.unserved.look()
            case NodeChanged(record) if record.status == "leaving":
                self._hurry(record.incarnation)
            case LeaderChanged():
                self.runtime.unreleased.repeat_all()
            case KickWished():
                self._stuck.kick(fact)
            case _:
                pass

    def _hurry(self, leaving: Incarnation) -> None:
        """H14: it goes once all that it sent is acknowledged."""
        if self._links is not None:
            self._links.hurry(leaving)

    def on_listing(self, listing: Listing) -> None:
        """The whole store."""
        self.runtime.on_map_changed()
        if self._hosts:
            self.control.on_listing(listing)

    def on_changes(self, changes: Changes) -> None:
        """One commit."""
        self.runtime.on_map_changed()
        if self._hosts:
            self.control.on_changes(changes)

    def on_renewed(self) -> None:
        """L4: from now on the watchdog would wait until the new hard deadline.

        Also called by the thread that renews beside the loop: a blocked loop feeds nobody.
        """
        hard_until = self.member.lease.hard_until
        # Without a deadline (C9) there is nothing that the process must not outlive.
        if self._backends.watchdog is not None and hard_until < FOREVER_S:
            self._backends.watchdog.feed(max(0.0, hard_until - self._backends.clock.now()))

    def on_fenced(self, reason: str) -> None:
        """L4, L5: this incarnation is over."""
        self.rewound = self.rewound or self.member.rewound
        if not self._left:
            log.warning("fenced, rejoining: %s", reason, extra=self.tags)
        self._over.set()  # first: whatever fails below must not keep this life from its end
        self.runtime.fence(reason)
        self._end_links()

    # what links ask and report

    def _accept(self) -> Any:
        assert self._links is not None, "nobody knows the address before the links stand"
        return self._links.accept()

    def _registered(self, peer: Incarnation) -> bool:
        return peer in self._members.nodes or peer in self._members.clients

    def _stalled(self, peer: Incarnation) -> bool:
        """DX-10: its record stands and says that its event loop is blocked."""
        node = self._members.nodes.get(peer)
        return node is not None and node.stalled

    def _parted(self, peer: Incarnation) -> None:
        """L6: a connection broke: perhaps its other end died."""
        if self._deaths is not None:
            self._deaths.parted(peer)

    # small errands

    @property
    def _members(self) -> ClusterView:
        return self.member.members

    def _send(self, to: Incarnation, message: ToOwner, *, control: bool = False) -> None:
        node = self._members.nodes.get(to)
        if node is not None and self._links is not None:
            self._links.send(Peer(to, node.address), message, control=control)

    def _connected(self, to: Incarnation) -> bool:
        return self._links is not None and self._links.connected(to)

    def _suspected(self, node: Incarnation) -> None:
        """SM-08: a sender gets no answer from a node; the health port knows whether it lives."""
        self._backends.meter.count("node.suspected")
        if self._deaths is not None:
            self._deaths.suspect(node)

    def _learn_block(self, first: ShardKey, entries: tuple[Entry, ...]) -> None:
        """Stored entries of shards that follow each other."""
        if self.member.guard():
            for index, entry in enumerate(entries):
                self.runtime.learn(ShardKey(first.role, first.shard + index), entry)
            self.runtime.on_map_changed()


def _described(turn: object) -> RunningHandler:
    assert isinstance(turn, Turn)
    return RunningHandler(*turn.entity, handler_of(turn))
