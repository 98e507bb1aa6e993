"""One incarnation of an agent: it feeds the group's machine and makes of its server what is wanted.

An agent joins with a record under a lease, watches the group, looks at its server, and commits what
the machine decides. One task carries out wishes, one at a time; a new wish cancels the one under
way. It must never open its server itself: it asks the guard, with the deadline of its lease (F2).
After a fence the incarnation is over (L5): the guard has closed the server by then or does so now,
and a new agent begins.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine, Sequence
from dataclasses import replace
from random import Random
from typing import Any

import msgspec

from domicile.concurrency.task_set import TaskSet
from domicile.core.coordinator.events import (
    Changed,
    Commit,
    CommitDone,
    Listed,
    ReadBack,
    Reread,
    Tick,
)
from domicile.core.ids import NOBODY, Incarnation, new_incarnation
from domicile.core.machines import Arm
from domicile.core.state.cluster_view import ViewChange
from domicile.core.state.txn import (
    Absent,
    At,
    Changes,
    Committed,
    Conflict,
    Delete,
    Item,
    Listing,
    Put,
    Unknown,
)
from domicile.errors import ConfigError, StoreError
from domicile.failover.chains import Chain, common_offset, next_chain, own_chain, position_of
from domicile.failover.driver import (
    Guard,
    NoteBook,
    ReplicaDriver,
    ServerFacts,
    ServerNotes,
    noted,
)
from domicile.failover.machine import (
    GroupMachine,
    GroupMachineEvent,
    PublishRecord,
    ServerSeen,
    Want,
)
from domicile.failover.records import (
    MAX_RECEIPTS,
    MAX_SERVERS,
    GroupConfig,
    GroupPhase,
    GroupState,
    LossReceipt,
    LossSum,
    PastPrimary,
    ServerRecord,
    config_key,
    decode_group_record,
    encode_group_record,
    loss_sum_key,
    parse_server_key,
    past_key,
    past_prefix,
    receipt_key,
    receipts_prefix,
    server_key,
    servers_prefix,
)
from domicile.failover.tables import ServerWish
from domicile.membership.member import Member
from domicile.membership.record_kinds import RecordKind
from domicile.membership.store_calls import StoreCalls
from domicile.ports.clock import Clock, Timer
from domicile.ports.meter import Meter
from domicile.ports.store import Store
from domicile.settings import Settings

log = logging.getLogger("domicile")

LOOK_S = 0.1
"""How often an agent looks at its server."""

SWITCH_LOOK_S = 0.02
"""How often the two servers of a switchover are looked at: clients wait until both are level."""

KEPT_EPOCHS = 100
"""I6: of so many epochs it stays known who became primary."""

SKIPPED_EPOCHS = 10
"""So many elections in a row may end without a primary, and none of the old records stays."""

MOST_ADDED_UP = 24
"""S7: so many receipts one commit adds up, each with a condition of its own."""

RETRY_S = 0.1
"""How soon a call to the server or the store that failed is made again."""


NAMESAKE_S = 1.0
"""How often it is looked whether another server still has the own id."""


class ServerKind(RecordKind[ServerRecord]):
    """The record of a server of one group, as membership sees it."""

    def __init__(self, group: str, server: str) -> None:
        self._group, self._server = group, server

    def incarnation(self, record: ServerRecord) -> Incarnation:
        """As `RecordKind.incarnation`."""
        return record.incarnation

    def key(self, incarnation: Incarnation) -> bytes:
        """As `RecordKind.key`."""
        return server_key(self._group, self._server, incarnation)

    def lease_id(self, incarnation: Incarnation) -> str:
        """As `RecordKind.lease_id`."""
        return f"server-{incarnation}"

    def encode(self, record: ServerRecord) -> bytes:
        """As `RecordKind.encode`."""
        return encode_group_record(record)

    def decode(self, value: bytes) -> ServerRecord:
        """As `RecordKind.decode`."""
        return decode_group_record(value, ServerRecord)

    def granted(self, record: ServerRecord, ttl_s: float) -> ServerRecord:
        """As `RecordKind.granted`."""
        return msgspec.structs.replace(record, ttl_s=ttl_s)

    def longest_ttl_s(self, record: ServerRecord) -> float:
        """As `RecordKind.longest_ttl_s`: the ttl in the record."""
        return record.ttl_s


class Agent:
    """One incarnation beside one server. `run` until it is over, then make another one."""

    def __init__(
        self,
        group: str,
        config: GroupConfig,
        *,
        address: str,
        store: Store,
        driver: ReplicaDriver,
        guard: Guard,
        notes: NoteBook,
        clock: Clock,
        meter: Meter,
        settings: Settings,
        random: Random,
        probe_s: float = 1.0,
    ) -> None:
        """`probe_s`: a server that does not answer within this time counts as down."""
        if settings.fencing != "lease":
            raise ConfigError(
                "an agent of a replica group acts under a lease alone: use fencing='lease'"
            )
        self.group, self._config = group, config
        self._store, self._driver, self._guard, self._book = store, driver, guard, notes
        self._clock, self._meter, self._settings = clock, meter, settings
        self._notes, self._probe_s = notes.load(), probe_s
        self.incarnation = new_incarnation(random)
        record = ServerRecord(
            server=self._notes.server, folder=self._notes.folder, incarnation=self.incarnation,
            address=address, ttl_s=settings.ttl_s, fit=False, why="its agent has just started",
        )  # fmt: skip
        self.member: Member[ServerRecord] = Member(
            store=store,
            clock=clock,
            meter=meter,
            settings=settings,
            random=random,
            record=record,
            kind=ServerKind(group, self._notes.server),
            shards={},
            events=self,
        )
        self.machine = GroupMachine(
            group, self._notes.server, self.incarnation, address=address, ttl_s=settings.ttl_s,
            lease=self.member.lease,
        )  # fmt: skip
        self._calls = StoreCalls(store, settings.op_timeout_s)
        self._tasks: TaskSet[None] | None = None
        self._tick: Timer | None = None
        self._inbox: list[GroupMachineEvent] = []
        self._stepping = False
        self._over = False
        self.reason = ""
        """Why it ended."""
        self._done = 0
        self._promoted = ("", 0)
        self._opening = False
        """Whether an order to open may be under way: it was given up, or had no answer."""
        self._promoting = False
        """Whether what is seen of the server may be half of a promotion."""
        self._followed: Want | None = None
        """The last wish, if it was to follow and has been carried out."""
        self._wanted = asyncio.Event()
        self._look_now = asyncio.Event()
        self._said = ""
        self._remembered = self._elected = self._unserved = 0
        self._drained = 0
        """The epoch for which writes are held back; 0: for none."""
        self._record: ServerRecord | None = None
        self._to_publish = asyncio.Event()

    # one life

    async def run(self) -> None:
        """Join, then keep the server as the group wants it, until fenced or cancelled."""
        # F3: whatever the server was before, and whoever started it.
        await self._closed_first()
        await self._alone()
        if not await self.member.join():
            return
        try:
            await self._agree()
            if not await self._first_of_its_id():
                self.reason = "another server took the same id at the same time"
                return
            async with asyncio.TaskGroup() as group:
                tasks: TaskSet[None] = TaskSet(f"agent {self.group}", group)
                self._tasks = tasks
                for work in (self._keep_reconciling(), self._keep_looking(), self._keep_telling()):
                    tasks.spawn(work)
                try:
                    await self.member.run()
                finally:
                    self._over = True
                    tasks.cancel()
        finally:
            self._over = True
            if self._tick is not None:
                self._tick.cancel()
            # Closed first, revoked then: the next primary may come as soon as the record is gone.
            # Without the guard's word the lease just ends, which is after the guard's deadline.
            if await self._shut():
                await self.member.leave()

    async def _closed_first(self) -> None:
        while True:
            try:
                await self._guard.shut()
                return
            except (OSError, TimeoutError) as error:
                self._meter.count("server.unanswered")
                log.warning("group %s: the guard does not answer: %s", self.group, error)
            await asyncio.sleep(RETRY_S)

    async def _alone(self) -> None:
        """Wait while another server has this id: two of one id would be taken for one (F1).

        And while the group has as many servers as it may have (I6).
        """
        said = False
        while True:
            try:
                listing = await self._calls.bounded(self._store.list(servers_prefix(self.group)))
            except StoreError:
                await asyncio.sleep(RETRY_S)
                continue
            others = self._of_own_id(listing.items)
            full = not others and self._full(listing.items)
            if not others and not full:
                return
            if not said and full:
                log.error(
                    "group %s has %d servers, the most that a group may have: this one stays "
                    "closed until another one is gone",
                    self.group, MAX_SERVERS,
                )  # fmt: skip
            elif not said:
                log.error(
                    "group %s: another server, at %s, has the id %r: this one stays closed. Stop "
                    "the other one, or give this one an id and a state folder of its own",
                    self.group, _addresses(others), self._notes.server,
                )  # fmt: skip
            said = True
            await asyncio.sleep(NAMESAKE_S)

    async def _first_of_its_id(self) -> bool:
        """Whether no server with the same id has registered before, at the same time as this."""
        own_key = server_key(self.group, self._notes.server, self.incarnation)
        while self.member.guard():
            try:
                own = await self._calls.bounded(self._store.get(own_key))
                others = await self._namesakes()
            except StoreError:
                await asyncio.sleep(RETRY_S)
                continue
            return own is not None and not any(each.created < own.created for each in others)
        return False

    async def _namesakes(self) -> list[Item]:
        """Records of other servers with this id."""
        prefix = server_key(self.group, self._notes.server, NOBODY)
        listing = await self._calls.bounded(self._store.list(prefix))
        return self._of_own_id(listing.items)

    def _of_own_id(self, items: Sequence[Item]) -> list[Item]:
        prefix = server_key(self.group, self._notes.server, NOBODY)
        return [
            item
            for item in items
            if item.key.startswith(prefix) and _folder(item) != self._notes.folder
        ]

    def _full(self, items: Sequence[Item]) -> bool:
        """Whether as many other servers are registered as a group may have."""
        others = dict.fromkeys(_server_of(self.group, item) for item in items)
        others.pop(self._notes.server, None)
        return len(others) >= MAX_SERVERS

    async def _shut(self) -> bool:
        try:
            async with asyncio.timeout(self._settings.stop_budget_s):
                await self._guard.shut()
        except (OSError, TimeoutError) as error:
            log.warning(
                "group %s: the guard did not say that the server is closed, which it does at the "
                "lease's end: %s",
                self.group, str(error) or type(error).__name__,
            )  # fmt: skip
            return False
        return True

    async def _agree(self) -> None:
        """The group's configuration: written by the first agent, kept by all others."""
        key = config_key(self.group)
        while self.member.guard():
            try:
                item = await self._calls.bounded(self._store.get(key))
            except StoreError:
                await asyncio.sleep(RETRY_S)
                continue
            if item is None:
                put = Put(key, encode_group_record(self._config))
                await self._calls.try_commit([Absent(key)], [put])
                continue
            found = decode_group_record(item.value, GroupConfig)
            if (found.driver, found.mode) != (self._config.driver, self._config.mode):
                raise ConfigError(
                    f"group {self.group!r} is of driver {found.driver!r} in mode {found.mode!r}, "
                    f"this agent has {self._config.driver!r} and {self._config.mode!r}: they must "
                    "be the same for all servers of a group"
                )
            self._tell_differences(found)
            return

    def _tell_differences(self, found: GroupConfig) -> None:
        """The stored configuration holds for all servers; the one of this server's file does not.

        In asynchronous mode nobody reads `sync_count`.
        """
        for name in ("freeze_s", "restart_s", "switch_s", *(("sync_count",) if found.sync else ())):
            stored, own = getattr(found, name), getattr(self._config, name)
            if stored != own:
                log.warning(
                    "group %s: %s is %g in the group's stored configuration, which holds, and %g "
                    "in this server's settings, which is ignored: make them equal, or change the "
                    "group: domicile replica configure %s %s=%g",
                    self.group, name, stored, own, self.group, name, own,
                )  # fmt: skip

    # the member's events

    def on_fact(self, fact: ViewChange) -> None:
        """Facts about nodes and shards do not concern a group."""

    def on_listing(self, listing: Listing) -> None:
        """As `MemberEvents.on_listing`."""
        self._feed(Listed(listing))

    def on_changes(self, changes: Changes) -> None:
        """As `MemberEvents.on_changes`."""
        self._feed(Changed(changes))

    def on_renewed(self) -> None:
        """As `MemberEvents.on_renewed`: the guard's deadline moves along."""
        self._guard.extend(self.member.lease.valid_until)

    def on_fenced(self, reason: str) -> None:
        """As `MemberEvents.on_fenced`; `run` ends by it."""
        self.reason = reason

    # the machine

    def _feed(self, event: GroupMachineEvent) -> None:
        self._inbox.append(event)
        if self._stepping:
            return
        self._stepping = True
        try:
            while self._inbox and not self._over:
                for effect in self.machine.step(self._inbox.pop(0), self._clock.now()):
                    match effect:
                        case Commit():
                            self._spawn(self._commit(effect))
                        case ReadBack():
                            self._spawn(self._read_back(effect))
                        case Arm(at):
                            self._arm(at)
                        case Want():
                            self._wanted.set()
                        case PublishRecord(record):
                            self._record = record
                            self._to_publish.set()
        finally:
            self._stepping = False
        self._say()
        self._remember()

    def _say(self) -> None:
        """Log what the group does, once for each change."""
        machine = self.machine
        said = f"{machine.doing}{f': {machine.waits}' if machine.waits else ''}"
        if said != self._said:
            self._said = said
            log.info("group %s: %s", self.group, said)

    def _remember(self) -> None:
        """Report each election that this agent runs, and each epoch that its server serves.

        The second is written down, too, for people and for servers that come back.
        """
        state = self.machine.state
        if state is None:
            return
        self._remember_unserved(state)
        own = state.orchestrator == self.incarnation
        if state.phase is GroupPhase.ELECTING and own and state.epoch != self._elected:
            self._elected = state.epoch
            self._meter.count("group.election")
            self._meter.event("electing", inc=self.incarnation, epoch=state.epoch, why=state.why)
        if state.phase is not GroupPhase.SERVING or state.primary != self.incarnation:
            return
        if state.served != self._remembered:
            self._remembered = state.served
            self._meter.count("group.promotion")
            self._meter.event(
                "promoted", inc=self.incarnation, server=state.primary_server, epoch=state.served
            )
            self._spawn(self._write_past(self._past(state.chain, state.native, state.why)))

    def _remember_unserved(self, state: GroupState) -> None:
        """The own server was promoted for an epoch that is over, and that was never served.

        A replica without its agent may have gone along. Its agent learns by this what that was
        (F10).
        """
        notes, seen = self._notes, self.machine.seen
        if seen is None or not seen.up or not notes.whole or notes.origin != state.origin:
            return
        epoch, chain = notes.chain[-1].epoch, own_chain(notes.chain, seen.offset)
        over = state.served < epoch < state.epoch and epoch != self._unserved
        # Cut short, a promotion has left no id of its history in the notes.
        of_it = seen.native == notes.native if notes.native else seen.native != notes.was
        if over and of_it and chain == notes.chain and not notes.saving:
            self._unserved = epoch
            why = "it was promoted, and never served"
            self._spawn(self._write_past(self._past(chain, seen.native, why)))

    def _past(self, chain: Chain, native: str, why: str) -> PastPrimary:
        """The own server, which began the last history of this chain."""
        return PastPrimary(
            epoch=chain[-1].epoch, server=self._notes.server, why=why,
            at=self._clock.wall().isoformat(timespec="seconds"), begin=chain[-1].begin,
            by=self._notes.server, chain=chain, native=native,
        )  # fmt: skip

    async def _write_past(self, past: PastPrimary) -> None:
        key = past_key(self.group, past.epoch)
        last = past.epoch - KEPT_EPOCHS
        old = [
            Delete(past_key(self.group, epoch))
            for epoch in range(max(1, last - SKIPPED_EPOCHS), last + 1)
        ]
        while self.member.guard():
            # An agent that took the epoch over finds the record of its predecessor.
            outcome = await self._calls.try_commit(
                [Absent(key)], [Put(key, encode_group_record(past)), *old]
            )
            if not isinstance(outcome, Unknown):
                return
            await asyncio.sleep(RETRY_S)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        # Bounded: the machine has one commit or read under way, and an epoch one record.
        if self._tasks is None or self._over:
            work.close()
        else:
            self._tasks.spawn(work)

    def _arm(self, at: float) -> None:
        if self._tick is not None:
            self._tick.cancel()
        self._tick = self._clock.call_at(at, lambda: self._feed(Tick()))

    async def _commit(self, commit: Commit) -> None:
        if not self.member.guard():
            return
        outcome = await self._calls.try_commit(commit.conditions, commit.writes)
        self._feed(CommitDone(commit.txn, outcome))

    async def _read_back(self, read: ReadBack) -> None:
        try:
            item = await self._calls.bounded(self._store.get(read.key))
        except StoreError:
            item = None
        self._feed(Reread(read.txn, item))

    # the own record

    async def _keep_telling(self) -> None:
        while not self._over:
            await self._to_publish.wait()
            self._to_publish.clear()
            if not await self.member.rewrite(self._told):
                self._to_publish.set()
                await asyncio.sleep(RETRY_S)

    def _told(self, before: ServerRecord) -> ServerRecord:
        assert self._record is not None
        return msgspec.structs.replace(
            self._record,
            folder=before.folder,
            ttl_s=before.ttl_s,
            seen=self._clock.wall().isoformat(timespec="seconds"),
        )

    # the own server

    async def _keep_looking(self) -> None:
        # A cancellation may get lost in a client library at the moment when a deadline passes too.
        while not self._over:
            done, promoting = self._done, self._promoting
            try:
                async with asyncio.timeout(self._probe_s):
                    facts = await self._driver.look()
            except (OSError, TimeoutError):
                facts = ServerFacts(up=False)
            # A wish that was carried out meanwhile may not be in these facts.
            if done == self._done and not (promoting or self._promoting):
                if self._drifted(facts):
                    done = self._done = 0
                    self._followed = None
                    self._wanted.set()
                self._feed(self._seen(facts, done))
            try:
                async with asyncio.timeout(self._look_s):
                    await self._look_now.wait()
            except TimeoutError:
                pass
            self._look_now.clear()

    @property
    def _look_s(self) -> float:
        want = self.machine.want
        switches = want is not None and want.wish in (ServerWish.DRAINED, ServerWish.READY)
        return SWITCH_LOOK_S if switches else LOOK_S

    def _drifted(self, facts: ServerFacts) -> bool:
        """Whether the server is no longer what it was made: it restarted, or the guard shut it."""
        want = self.machine.want
        if want is None or not facts.up or self._done != want.number:
            return False
        if want.wish is ServerWish.OPEN:
            return facts.open_epoch != want.epoch and facts.run == want.run
        if want.wish in (ServerWish.FOLLOWING, ServerWish.READY):
            return facts.follows != want.address
        return want.wish is ServerWish.CLOSED and bool(facts.open_epoch or facts.follows)

    def _seen(self, facts: ServerFacts, done: int) -> ServerSeen:
        notes = self._notes
        why = facts.why if not facts.fit else noted(notes, facts)
        names = {one.address: one.server for one in self.machine.members.values()}
        run, promoted = self._promoted
        return ServerSeen(
            up=facts.up,
            run=facts.run,
            open_epoch=facts.open_epoch,
            promoted=promoted if facts.run == run else 0,
            follows=names.get(facts.follows, facts.follows),
            offset=facts.offset,
            chain=notes.chain,
            native=facts.native,
            origin=notes.origin or ("" if facts.empty else facts.native),
            fit=not why,
            why=why,
            in_use=facts.in_use,
            acknowledged={names.get(at, at): to for at, to in facts.acknowledged.items()},
            resyncs=facts.resyncs,
            done=done,
        )

    async def _keep_reconciling(self) -> None:
        """One wish at a time; a newer one ends the one under way (F13)."""
        assert self._tasks is not None
        under_way: asyncio.Task[None] | None = None
        while True:
            await self._wanted.wait()
            self._wanted.clear()
            if under_way is not None:
                under_way.cancel()
                await asyncio.wait([under_way])
            want = self.machine.want
            assert want is not None
            # A task of the agent's group: what a driver raises against its port ends the agent.
            under_way = self._tasks.spawn(self._make(want))

    async def _make(self, want: Want) -> None:
        said = ""
        while self.member.guard():
            try:
                await self._try_to_make(want)
            except (OSError, TimeoutError, StoreError) as error:
                self._meter.count("server.unanswered")
                what = str(error) or type(error).__name__
                if what != said:
                    log.info(
                        "group %s: the server is to %s, which is tried again: %s",
                        self.group, want.wish.value, what,
                    )  # fmt: skip
                said = what
                await asyncio.sleep(RETRY_S)
            else:
                self._done = want.number
                self._look_now.set()
                return

    async def _try_to_make(self, want: Want) -> None:
        if 0 < self._drained < want.epoch:
            await self._dismiss()
        followed, self._followed = self._followed, None
        match want.wish:
            case ServerWish.CLOSED:
                await self._shut_server()
                await self._driver.stand()
            case ServerWish.AS_IS:
                await self._shut_server()
            case ServerWish.DRAINED:
                if self._opening:
                    # F11: that order may still be under way, and would take effect after the drain.
                    await self._shut_server()
                self._drained = want.epoch
                await self._driver.drain()
            case ServerWish.FOLLOWING:
                await self._shut_server()
                await self._follow(want)
                self._followed = want
            case ServerWish.READY:
                if followed is None or not _follow_alike(followed, want):
                    await self._shut_server()
                    await self._follow(want)
                self._followed = want
                await self._driver.get_ready()
            case ServerWish.PROMOTED:
                await self._shut_server()
                await self._promote(want)
            case ServerWish.OPEN:
                self._drained = 0
                until = self.member.lease.valid_until
                self._opening = True
                await self._guard.open(want.epoch, want.run, until, want.quorum)
                self._opening = False

    async def _shut_server(self) -> None:
        await self._guard.shut()
        self._opening = False

    async def _dismiss(self) -> None:
        """Before the guard ends all sessions: those that wait learn that nothing came of it."""
        try:
            await self._driver.dismiss()
        except (OSError, TimeoutError) as error:
            # Only a courtesy: that the guard closes the server must not wait for it.
            log.info("group %s: writes that waited get no answer: %s", self.group, error)
        self._drained = 0

    async def _promote(self, want: Want) -> None:
        await self._driver.stand()
        facts = await self._facts()
        if self._promoted == (facts.run, want.epoch):
            return
        notes = self._notes
        if position_of(notes.chain, facts.offset).epoch == want.epoch:
            # An epoch is promoted for once: the machine sees this, and elects again (F9).
            return
        chain = next_chain(notes.chain, facts.offset, want.epoch)
        # F9: before the promotion, or a crash in between leaves entries of an unknown history.
        self._promoting = True
        try:
            await self._note(self._new_notes(want, chain, was=facts.native))
            await self._driver.promote(want.epoch)
            after = await self._facts()
            await self._note(msgspec.structs.replace(self._notes, native=after.native, was=""))
            self._promoted = (after.run, want.epoch)
        finally:
            self._promoting = False

    async def _follow(self, want: Want) -> None:
        """The chain is noted before data of it can arrive: what has none of it is left out."""
        facts = await self._facts()
        kept = facts.offset
        # The same address is not the same primary: its server may have come back with less.
        if facts.follows != want.address or self._notes.native != want.native:
            await self._driver.stand()
            facts = await self._facts()
            kept = await self._agreed(want, facts)
        await self._driver.follow(want.address, kept)
        facts = await self._facts()
        if facts.native != want.native:
            raise OSError(f"it follows history {facts.native}, and {want.native} is wanted")
        await self._note(self._new_notes(want, want.chain, native=want.native))

    async def _agreed(self, want: Want, facts: ServerFacts) -> int:
        """Up to where the data stays; what is beyond is saved, told and given up (F10)."""
        notes = self._notes
        found = await self._history_of(want, facts)
        chain = own_chain(notes.chain if found is None else found, facts.offset)
        kept = 0 if found is None else common_offset(chain, facts.offset, want.chain)
        if facts.offset > kept and notes.whole and not facts.empty:
            if found is not None:
                # Saving may change the id of the history, and be cut short: its data stays known.
                await self._note(
                    msgspec.structs.replace(
                        notes, origin=want.origin, chain=chain, native=facts.native, saving=True
                    )
                )
            await self._receipt(want, chain, kept, facts.offset)
        whole = found is not None and facts.offset == kept
        await self._note(
            self._new_notes(want, want.chain, native=want.native, was=facts.native, whole=whole)
        )
        return kept

    async def _history_of(self, want: Want, facts: ServerFacts) -> Chain | None:
        """The histories of the server's data; None if nobody knows them.

        A server may go on into another history while its agent is away: the database's own id of
        that history says which one it is.
        """
        notes = self._notes
        if notes.origin == want.origin and not noted(notes, facts):
            return notes.chain
        if facts.empty or not notes.whole or not facts.native:
            return None
        if facts.native == want.native:
            return want.chain
        listing = await self._calls.bounded(self._store.list(past_prefix(self.group)))
        for item in listing.items:
            past = decode_group_record(item.value, PastPrimary)
            if past.native == facts.native:
                return past.chain
        return None

    def _new_notes(
        self, want: Want, chain: Chain, *, native: str = "", was: str = "", whole: bool = True
    ) -> ServerNotes:
        return ServerNotes(
            self._notes.server, folder=self._notes.folder, origin=want.origin, chain=chain,
            native=native, was=was, whole=whole,
        )  # fmt: skip

    async def _facts(self) -> ServerFacts:
        facts = await self._driver.look()
        if not facts.up:
            raise OSError("the server does not run")
        return facts

    async def _note(self, notes: ServerNotes) -> None:
        if notes != self._notes:
            await self._book.save(notes)
            self._notes = notes

    async def _receipt(self, want: Want, chain: Chain, kept: int, had: int) -> None:
        """F10: what is given up is saved, and told, before it is given up."""
        saved = await self._driver.save(kept)
        receipt = LossReceipt(
            server=self._notes.server, epoch=want.epoch, chain=chain, kept=kept, had=had,
            writes=saved.writes, saved=saved.where,
        )  # fmt: skip
        key = receipt_key(self.group, want.epoch, self._notes.server)
        while True:
            outcome = await self._calls.try_commit([], [Put(key, encode_group_record(receipt))])
            if isinstance(outcome, Committed):
                self._meter.count("group.loss")
                self._tell_loss(receipt)
                await self._add_up()
                return
            assert isinstance(outcome, Unknown | Conflict)
            await asyncio.sleep(RETRY_S)

    def _tell_loss(self, receipt: LossReceipt) -> None:
        size = receipt.had - receipt.kept
        self._meter.event(
            "loss", inc=self.incarnation, server=receipt.server, epoch=receipt.epoch, bytes=size,
            writes=receipt.writes,
        )  # fmt: skip
        counted = f"{receipt.writes} writes" if receipt.writes >= 0 else "writes not counted"
        log.warning(
            "group %s: %s had %d bytes (%s) that epoch %d does not have: they are given up, and "
            "saved at %s",
            self.group, receipt.server, size, counted, receipt.epoch, receipt.saved,
        )  # fmt: skip

    async def _add_up(self) -> None:
        """I6: the oldest receipts beyond a limit become one sum; no count is lost.

        What can't be done now is done at the next receipt.
        """
        key = loss_sum_key(self.group)
        try:
            listing = await self._calls.bounded(self._store.list(receipts_prefix(self.group)))
            if len(listing.items) <= MAX_RECEIPTS:
                return
            item = await self._calls.bounded(self._store.get(key))
            whole = LossSum() if item is None else decode_group_record(item.value, LossSum)
            found = [(decode_group_record(one.value, LossReceipt), one) for one in listing.items]
        except (StoreError, ValueError) as error:
            log.info("group %s: old receipts stay as they are: %s", self.group, error)
            return
        found.sort(key=lambda one: (one[0].epoch, one[0].server))
        old = found[: min(len(found) - MAX_RECEIPTS, MOST_ADDED_UP)]
        for receipt, _ in old:
            whole = whole.plus(receipt)
        # One commit, and each receipt as it was read: nothing is counted twice, or not at all.
        await self._calls.try_commit(
            [Absent(key) if item is None else At(key, item.revision),
             *(At(one.key, one.revision) for _, one in old)],
            [Put(key, encode_group_record(whole)), *(Delete(one.key) for _, one in old)],
        )  # fmt: skip


def _follow_alike(one: Want, other: Want) -> bool:
    """Whether both have the server follow the same primary, in the same history."""
    return replace(one, number=other.number, wish=other.wish) == other


def _folder(item: Item) -> str | None:
    """The state folder of a record's agent; None if a later version wrote the record."""
    try:
        return decode_group_record(item.value, ServerRecord).folder
    except ValueError:
        return None


def _server_of(group: str, item: Item) -> str:
    try:
        return parse_server_key(group, item.key)[0]
    except ValueError:
        return ""


def _addresses(items: Sequence[Item]) -> str:
    found: dict[str, None] = {}
    for item in items:
        try:
            found[decode_group_record(item.value, ServerRecord).address] = None
        except ValueError:
            found["an address that can't be read"] = None
    return ", ".join(found)
