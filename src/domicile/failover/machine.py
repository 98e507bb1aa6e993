"""The machine that every agent of a replica group runs (F1-F13). Pure.

It sees the group's records, its own server and the time, and says two things: which change of the
state record to commit, and what its own server shall be. It never gives orders to other servers:
each agent reconciles its own one to the record (F13), so nothing that is queued can be executed
later, and an orchestrator that dies is replaced at any step (F5).

Four rules run through the code. An agent acts on no state that it saw before its own record (F1).
Whatever it issued once for a revision of the state, it repeats until that revision is over: a
commit without an answer may still happen (S1). It publishes a final position, confirms a promotion
or releases an epoch only when the server has carried out its *present* wish. And opening is only
asked for: the guard compares the deadline and opens (F2).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

import msgspec

from domicile.core.coordinator.events import (
    Changed,
    Commit,
    CommitDone,
    Listed,
    ReadBack,
    Reread,
    Tick,
)
from domicile.core.ids import NOBODY, Incarnation
from domicile.core.lease.lease import Lease
from domicile.core.machines import Arm
from domicile.core.state.txn import Absent, At, Committed, Conflict, Item, Outcome, Put
from domicile.failover.chains import ORIGIN, Chain, own_chain, position_of
from domicile.failover.choice import Choice, NoChoice, choose, foreign
from domicile.failover.records import (
    GroupConfig,
    GroupPhase,
    GroupState,
    Resyncs,
    ServerRecord,
    WriteQuorum,
    as_position,
    config_key,
    decode_group_record,
    encode_group_record,
    parse_server_key,
    ranked,
    servers_prefix,
    state_key,
)
from domicile.failover.sync_set import InUse, SyncMove, next_step, wanted_quorum
from domicile.failover.tables import (
    WISHES,
    GroupAction,
    GroupEvent,
    Place,
    ServerWish,
    transition,
)

RETRY_S = 0.1
"""How soon a commit without an answer is issued again."""


# What goes in and comes out beside the events and effects of every driver


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerSeen:
    """What the agent has just found out about its own server."""

    up: bool
    run: str = ""
    """Id of the server process's run: another one means that it restarted."""
    open_epoch: int = 0
    """The epoch in which it accepts writes; 0: it refuses them."""
    promoted: int = 0
    """The epoch for which this run of it was promoted; 0: for none."""
    follows: str = ""
    """The server id of the primary that it follows now."""
    offset: int = 0
    """Everything that it has applied."""
    chain: Chain = ORIGIN
    native: str = ""
    """The database's own id of its history."""
    origin: str = ""
    fit: bool = True
    why: str = ""
    in_use: InUse | None = None
    """The write quorum that it waits for."""
    acknowledged: Mapping[str, int] = field(default_factory=lambda: dict[str, int]())
    """Up to where each replica has confirmed that it has the data."""
    resyncs: Resyncs | None = None
    done: int = 0
    """The number of the last wish that was fully carried out; nothing is under way (F6)."""


GroupMachineEvent = Listed | Changed | CommitDone | Reread | Tick | ServerSeen


@dataclass(frozen=True, slots=True)
class Want:
    """What the agent's own server shall be from now on; replaces the wish before it (F13)."""

    number: int
    wish: ServerWish
    epoch: int = 0
    """OPEN: in which it accepts writes. PROMOTED: which it begins. Else that of the state."""
    run: str = ""
    """OPEN: only this run of the server may be opened (F1)."""
    primary: str = ""
    """FOLLOWING, READY: the server id to follow."""
    address: str = ""
    chain: Chain = ()
    """FOLLOWING, READY: the primary's. What the server has beyond it is saved and counted (F10)."""
    native: str = ""
    """FOLLOWING, READY: the database's own id of the primary's history."""
    origin: str = ""
    """PROMOTED, FOLLOWING, READY: the group's, which the server's data has from then on."""
    quorum: WriteQuorum | None = None
    """OPEN in synchronous mode: what the server waits for before it acknowledges (F12)."""

    def same(self, other: Want | None) -> bool:
        """Whether both ask for the same."""
        return other is not None and replace(other, number=self.number) == self


@dataclass(frozen=True, slots=True)
class PublishRecord:
    """Write the own record, under the agent's lease."""

    record: ServerRecord


GroupEffect = Commit | ReadBack | Arm | Want | PublishRecord


@dataclass(slots=True)
class _Issued:
    """The one commit that this agent issued for a revision of the state."""

    revision: int
    txn: str
    state: GroupState
    in_flight: bool = True
    refused: bool = False
    """The state has moved on; the watch will bring it."""
    again_at: float = 0.0


class GroupMachine:
    """One agent's machine. Feed it events; carry out its effects in their order."""

    def __init__(
        self,
        group: str,
        server: str,
        me: Incarnation,
        *,
        address: str,
        ttl_s: float,
        lease: Lease,
    ) -> None:
        self.group, self.server, self.me = group, server, me
        self._address, self._ttl_s, self._lease = address, ttl_s, lease
        self._state_key, self._config_key = state_key(group), config_key(group)
        self._servers = servers_prefix(group)
        self.config: GroupConfig | None = None
        self.state: GroupState | None = None
        self.state_revision = 0
        self.unreadable = ""
        """Why the state cannot be read; this agent then keeps its server closed."""
        self.members: dict[Incarnation, ServerRecord] = {}
        self.seen: ServerSeen | None = None
        self.want: Want | None = None
        self.waits: NoChoice | None = None
        """Why the election that this agent runs has chosen nobody yet."""
        self._published: ServerRecord | None = None
        self._issued: _Issued | None = None
        self._commits = self._wants = 0
        self._used: WriteQuorum | None = None
        self._since = (GroupPhase.VACANT, 0, NOBODY)
        self._since_at = 0.0
        self._down_at: float | None = None
        self._alarm: float | None = None

    @property
    def doing(self) -> str:
        """What the group does, for people."""
        state = self.state
        if state is None:
            return "no state yet"
        who = ""
        if state.phase in (GroupPhase.SERVING, GroupPhase.SWITCHING):
            who = f", primary {state.primary_server}"
        if state.candidate_server:
            who += f", candidate {state.candidate_server}"
        return f"{state.phase.value} {state.epoch}{who} ({state.why})"

    @property
    def phase(self) -> GroupPhase:
        """The state's phase; vacant if there is no state."""
        return GroupPhase.VACANT if self.state is None else self.state.phase

    def step(self, event: GroupMachineEvent, now: float) -> tuple[GroupEffect, ...]:
        """Take one event; what is to be done, in this order."""
        effects: list[GroupEffect] = []
        match event:
            case Listed(listing):
                self._forget()
                for item in listing.items:
                    self._take(item.key, item)
            case Changed(changes):
                for change in changes.changes:
                    self._take(change.key, change.item)
            case CommitDone(txn, outcome):
                effects += self._settle(txn, outcome, now)
            case Reread(txn, item):
                if item is not None:
                    self._take(self._state_key, item)
            case ServerSeen():
                self.seen = event
            case Tick():
                pass
        return (*effects, *self._decide(now))

    # what the store says

    def _forget(self) -> None:
        self.members.clear()
        self.config = None

    def _take(self, key: bytes, item: Item | None) -> None:
        if key == self._state_key:
            if item is not None and item.revision > self.state_revision:
                self._take_state(item)
        elif key == self._config_key:
            self.config = None if item is None else decode_group_record(item.value, GroupConfig)
        elif key.startswith(self._servers):
            self._take_member(key, item)

    def _take_state(self, item: Item) -> None:
        self.state_revision = item.revision
        try:
            self.state, self.unreadable = decode_group_record(item.value, GroupState), ""
        except ValueError as error:
            self.state, self.unreadable = None, str(error)

    def _take_member(self, key: bytes, item: Item | None) -> None:
        try:
            server, incarnation = parse_server_key(self.group, key)
        except ValueError:
            return
        if item is None:
            self.members.pop(incarnation, None)
            return
        try:
            self.members[incarnation] = decode_group_record(item.value, ServerRecord)
        except ValueError as error:
            # It is there, which is what elections ask; but nobody knows what it has.
            self.members[incarnation] = ServerRecord(
                server=server, incarnation=incarnation, address="", ttl_s=0.0, fit=False,
                why=f"its record cannot be read: {error}",
            )  # fmt: skip

    def _settle(self, txn: str, outcome: Outcome, now: float) -> list[GroupEffect]:
        issued = self._issued
        if issued is None or issued.txn != txn:
            return []
        issued.in_flight = False
        if isinstance(outcome, Committed):
            if outcome.revision > self.state_revision:
                self.state, self.state_revision = issued.state, outcome.revision
        elif isinstance(outcome, Conflict):
            issued.refused = True
        else:
            issued.again_at = now + RETRY_S
            return [ReadBack(txn, self._state_key)]
        return []

    # what follows from it

    def _decide(self, now: float) -> list[GroupEffect]:
        if self.me not in self.members or not self._lease.valid(now):
            # F1: a state from before the own registration; or no right to act (L1).
            return []
        self._alarm = None
        self._note_times(now)
        if self._issued is not None and self._issued.revision != self.state_revision:
            self._issued = None
        found = self._happened(now)
        effects = [*self._wish(), *self._publish(), *self._commit(found, now)]
        return [*effects, *self._ring()]

    def _ring(self) -> list[GroupEffect]:
        return [] if self._alarm is None else [Arm(self._alarm)]

    def _note_times(self, now: float) -> None:
        state = self.state
        since = (self.phase, 0, NOBODY)
        if state is not None:
            since = (state.phase, state.epoch, state.orchestrator)
        if since != self._since:
            self._since, self._since_at = since, now
            self._used = self.waits = None
        up = self.seen is not None and self.seen.up
        if up:
            self._down_at = None
        elif self._down_at is None:
            self._down_at = now

    def _due(self, at: float, now: float) -> bool:
        """Whether a time has come; if not, there will be a tick."""
        if now >= at:
            return True
        self._alarm = at if self._alarm is None else min(self._alarm, at)
        return False

    # which change of the state is due

    def _happened(self, now: float) -> tuple[GroupEvent, GroupState] | None:
        state, config = self.state, self.config
        if config is None or self.unreadable:
            return None
        if state is None:
            return GroupEvent.FOUNDED, GroupState(
                phase=GroupPhase.ELECTING, epoch=1, origin=self.me, orchestrator=self.me,
                why="the group begins",
            )  # fmt: skip
        match state.phase:
            case GroupPhase.SERVING:
                return self._serving(state, config, now)
            case GroupPhase.SWITCHING:
                return self._switching(state, config, now)
            case GroupPhase.ELECTING:
                return self._electing(state, config, now)
            case GroupPhase.CHOSEN:
                return self._chosen(state, now)
            case GroupPhase.VACANT:
                return None

    def _serving(
        self, state: GroupState, config: GroupConfig, now: float
    ) -> tuple[GroupEvent, GroupState] | None:
        if state.primary == self.me:
            why = self._cannot_serve(state, config, now)
            if why:
                # Paused: the server stays closed, and no change of primary begins.
                return None if config.paused or not self._closed() else self._release(state, why)
            return self._quorum_moved(state, config) if config.sync else None
        own = state.primary_server == self.server
        if own and self.seen is not None and not self._cannot_serve(state, config, now):
            # F1: a server has one agent at a time, so the one that the state names is gone.
            taken = msgspec.structs.replace(state, primary=self.me)
            return GroupEvent.TAKEN_OVER, taken
        if state.primary in self.members or (own and self.seen is None):
            return None
        if config.paused:
            return None
        return GroupEvent.PRIMARY_GONE, self._election(state, "the primary's record is gone")

    def _cannot_serve(self, state: GroupState, config: GroupConfig, now: float) -> str:
        """Why the own server can't be, or stay, open in the epoch that is served; empty if it can.

        F4: a restart ends the epoch. The restarted server competes by position like any other.
        """
        seen = self.seen
        if seen is None:
            return ""
        if not seen.up:
            assert self._down_at is not None
            overdue = self._due(self._down_at + config.restart_s, now)
            return "the primary's server does not run" if overdue else ""
        if seen.run != state.run:
            return "the primary's server restarted"
        if own_chain(seen.chain, seen.offset) != state.chain:
            return "the primary's server has another history than the state"
        if not seen.fit:
            return f"the primary's server is not fit: {seen.why}"
        return ""

    def _closed(self) -> bool:
        """Whether the own server refuses writes, and does so because it was to.

        One that does not answer may only be frozen, and open: the guard must have closed it too.
        """
        seen, want = self.seen, self.want
        if seen is None:
            return False
        refuses = want is not None and want.wish is not ServerWish.OPEN
        return refuses and self._done() and not seen.open_epoch

    def _done(self) -> bool:
        return (
            self.seen is not None and self.want is not None and (self.seen.done == self.want.number)
        )

    def _release(self, state: GroupState, why: str) -> tuple[GroupEvent, GroupState]:
        return GroupEvent.RELEASED, self._election(state, why)

    def _election(self, state: GroupState, why: str) -> GroupState:
        return msgspec.structs.replace(
            state, phase=GroupPhase.ELECTING, epoch=state.epoch + 1, orchestrator=self.me,
            candidate=NOBODY, candidate_server="", chosen=None, positions=(), force=False, why=why,
        )  # fmt: skip

    def _quorum_moved(
        self, state: GroupState, config: GroupConfig
    ) -> tuple[GroupEvent, GroupState] | None:
        seen = self.seen
        if seen is None or seen.in_use is None or not self._done() or self._issued is not None:
            return None
        # FO-02: a member counts once it has an entry of this epoch, so it is fully synchronized.
        followers = [
            one.server
            for one in self.members.values()
            if one.follows == self.server and one.fit and one.position.epoch == state.epoch
        ]
        wanted = wanted_quorum(self.server, followers, config.sync_count, seen.in_use.quorum)
        if wanted is None:
            return None
        step = next_step(state.quorums, seen.in_use, wanted, seen.acknowledged)
        if step is None:
            return None
        if step.move is SyncMove.USE:
            self._used = step.quorum
            return None
        return GroupEvent.QUORUM_MOVED, msgspec.structs.replace(state, quorums=step.listed)

    def _switching(
        self, state: GroupState, config: GroupConfig, now: float
    ) -> tuple[GroupEvent, GroupState] | None:
        if state.primary not in self.members:
            return GroupEvent.PRIMARY_GONE, self._election(state, "the primary's record is gone")
        if state.primary != self.me or self.seen is None:
            return None
        why = self._cannot_serve(state, config, now)
        if why:
            return self._release(state, why) if self._closed() else None
        overdue = self._due(self._since_at + config.switch_s, now)
        candidate = self.members.get(state.candidate)
        if candidate is None or overdue:
            why = (
                "the switchover took too long" if overdue else "the switchover's candidate is gone"
            )
            return GroupEvent.SWITCH_FAILED, msgspec.structs.replace(
                state, phase=GroupPhase.SERVING, candidate=NOBODY, candidate_server="", why=why
            )
        own = position_of(self.seen.chain, self.seen.offset)
        level = candidate.fit and candidate.position == own and candidate.origin == state.origin
        if not (level and self._closed()):
            return None
        return GroupEvent.CAUGHT_UP, msgspec.structs.replace(
            state, phase=GroupPhase.CHOSEN, epoch=state.epoch + 1,
            chosen=ranked(candidate.server, candidate.position),
            positions=(ranked(self.server, own), ranked(candidate.server, candidate.position)),
        )  # fmt: skip

    def _electing(
        self, state: GroupState, config: GroupConfig, now: float
    ) -> tuple[GroupEvent, GroupState] | None:
        if state.orchestrator not in self.members:
            taken = msgspec.structs.replace(state, orchestrator=self.me)
            return GroupEvent.ORCHESTRATOR_GONE, taken
        if state.orchestrator != self.me:
            return None
        patient = not self._due(self._since_at + config.freeze_s, now)
        choice = choose(state, config, self.members, patient=patient)
        if isinstance(choice, NoChoice):
            self.waits = choice
            return None
        return GroupEvent.DECIDED, self._decided(state, choice)

    def _decided(self, state: GroupState, choice: Choice) -> GroupState:
        accepted = f"; a person accepted the loss: {choice.loss}" if choice.loss else ""
        why = f"{state.why}{accepted}"
        return msgspec.structs.replace(
            state, phase=GroupPhase.CHOSEN, candidate=choice.incarnation,
            candidate_server=choice.server, chosen=ranked(choice.server, choice.position),
            positions=choice.positions, force=False, why=why,
        )  # fmt: skip

    def _chosen(self, state: GroupState, now: float) -> tuple[GroupEvent, GroupState] | None:
        if state.candidate not in self.members:
            why = f"candidate {state.candidate_server} is gone"
            return GroupEvent.CANDIDATE_GONE, self._election(state, why)
        seen = self.seen
        if state.candidate != self.me or seen is None:
            return None
        why = self._behind(state, seen)
        if why:
            return GroupEvent.CANDIDATE_BEHIND, self._election(state, why)
        if seen.promoted != state.epoch or not self._done() or seen.open_epoch:
            return None
        quorums = self._inherited(state)
        return GroupEvent.PROMOTED, msgspec.structs.replace(
            state, phase=GroupPhase.SERVING, primary=self.me, primary_server=self.server,
            run=seen.run, served=state.epoch, chain=own_chain(seen.chain, seen.offset),
            native=seen.native,
            quorums=quorums, candidate=NOBODY, candidate_server="", chosen=None, positions=(),
            orchestrator=NOBODY,
        )  # fmt: skip

    def _behind(self, state: GroupState, seen: ServerSeen) -> str:
        """Why the own server must not be promoted; empty if it may (F9)."""
        if not seen.up:
            return f"candidate {self.server} does not run"
        if not seen.fit:
            return f"candidate {self.server} is not fit: {seen.why}"
        if seen.promoted == state.epoch:
            return ""
        position = position_of(seen.chain, seen.offset)
        if position.epoch == state.epoch:
            return f"candidate {self.server} restarted after its promotion"
        assert state.chosen is not None
        if position < as_position(state.chosen):
            return f"candidate {self.server} stands at {position}, behind what was chosen"
        return ""

    def _inherited(self, state: GroupState) -> tuple[WriteQuorum, ...]:
        """F12: the quorums of the epochs before stay listed, and the own one is added.

        FO-02: that one is of servers that have an entry of the last served epoch. With too few of
        them, those of the quorum before stay: writes then wait until enough servers follow.
        """
        assert self.config is not None
        if not self.config.sync:
            return ()
        others = [one for one in self.members.values() if one.server != self.server]
        names = [
            one.server
            for one in others
            if one.origin == state.origin and one.position.epoch >= state.served
        ]
        if len(dict.fromkeys(names)) < self.config.sync_count:
            before = [name for one in state.quorums[-1:] for name in (one.primary, *one.members)]
            names += [name for name in before if name != self.server]
        # A group that begins has no member yet that has anything.
        members = tuple(sorted(dict.fromkeys(names or [one.server for one in others])))
        own = WriteQuorum(self.server, members, self.config.sync_count)
        return tuple(dict.fromkeys((*state.quorums, own)))

    # what the own server shall be

    def _wish(self) -> list[GroupEffect]:
        want = self._wanted()
        if want.same(self.want):
            return []
        self._wants += 1
        self.want = replace(want, number=self._wants)
        return [self.want]

    def _wanted(self) -> Want:
        state, seen = self.state, self.seen
        if state is None:
            return Want(0, ServerWish.CLOSED)
        # A server that may be opened again in its epoch keeps its history, so it stays as it is.
        closed = Want(0, ServerWish.AS_IS, state.epoch)
        if seen is None:
            return closed
        wish = WISHES[state.phase, self._place(state)].wish
        if wish is ServerWish.OPEN:
            return self._opened(state, seen) or closed
        if wish in (ServerWish.FOLLOWING, ServerWish.READY):
            return self._following(wish, state, closed)
        if wish is ServerWish.PROMOTED:
            if self._issued_epoch() > state.epoch or self._behind(state, seen):
                return closed
            return Want(0, wish, state.epoch, origin=state.origin)
        if wish is ServerWish.DRAINED and seen.run != state.run:
            return closed
        return Want(0, wish, state.epoch)

    def _place(self, state: GroupState) -> Place:
        if state.phase in (GroupPhase.SERVING, GroupPhase.SWITCHING) and state.primary == self.me:
            return Place.PRIMARY
        if state.candidate == self.me:
            return Place.CANDIDATE
        # F11: a switchover's primary is demoted when the next one serves; until then it is shut.
        chosen = state.phase is GroupPhase.CHOSEN and state.primary == self.me
        return Place.PRIMARY if chosen else Place.OTHER

    def _issued_epoch(self) -> int:
        """The epoch of the commit that may have happened at this revision of the state."""
        return 0 if self._issued is None else self._issued.state.epoch

    def _opened(self, state: GroupState, seen: ServerSeen) -> Want | None:
        # A release without an answer may have happened: never open again in its epoch (S1, F4).
        if self._issued_epoch() > state.epoch or not seen.up:
            return None
        same = seen.run == state.run and own_chain(seen.chain, seen.offset) == state.chain
        if not same or not seen.fit:
            return None
        quorum: WriteQuorum | None = None
        if self.config is not None and self.config.sync:
            quorum = self._used or self._quorum_in_use(state, seen)
            if quorum is None:
                return None
        return Want(0, ServerWish.OPEN, state.epoch, run=state.run, quorum=quorum)

    def _quorum_in_use(self, state: GroupState, seen: ServerSeen) -> WriteQuorum | None:
        """F12: only a quorum that the state lists may be used."""
        if seen.in_use is not None and seen.in_use.quorum in state.quorums:
            return seen.in_use.quorum
        own = [quorum for quorum in state.quorums if quorum.primary == self.server]
        return own[-1] if own else None

    def _following(self, wish: ServerWish, state: GroupState, closed: Want) -> Want:
        primary = self.members.get(state.primary)
        if state.primary_server == self.server:
            # Named by an earlier agent of the own server: it can't follow itself.
            return closed
        if primary is None:
            return closed
        return Want(
            0, wish, state.epoch, primary=primary.server, address=primary.address,
            chain=state.chain, native=state.native, origin=state.origin,
        )  # fmt: skip

    # the own record

    def _publish(self) -> list[GroupEffect]:
        seen = self.seen
        if seen is None:
            return []
        record = ServerRecord(
            server=self.server, incarnation=self.me, address=self._address, ttl_s=self._ttl_s,
            role=_role(seen), follows=seen.follows if seen.up else "", origin=seen.origin,
            chain=own_chain(seen.chain, seen.offset), offset=seen.offset,
            fit=seen.up and seen.fit, why=seen.why if seen.up else "it does not run",
            final=self._final(seen), resyncs=seen.resyncs,
        )  # fmt: skip
        if record == self._published:
            return []
        self._published = record
        return [PublishRecord(record)]

    def _final(self, seen: ServerSeen) -> int:
        """F6: the epoch for which the position can't change any more, 0 if it can."""
        state, want = self.state, self.want
        if state is None or state.phase is not GroupPhase.ELECTING or want is None:
            return 0
        stands = seen.up and not seen.follows and not seen.open_epoch
        still = want.wish is ServerWish.CLOSED and want.epoch == state.epoch and self._done()
        return state.epoch if stands and still else 0

    # commits

    def _commit(self, found: tuple[GroupEvent, GroupState] | None, now: float) -> list[GroupEffect]:
        issued = self._issued
        if issued is not None:
            if issued.in_flight or issued.refused or not self._due(issued.again_at, now):
                return []
            issued.in_flight = True
            return [self._write(issued)]
        if found is None:
            return []
        event, state = found
        row = transition(self.phase, event)
        assert row.does is not GroupAction.NOTHING, (self.phase, event)
        assert state.phase in row.to, (self.phase, event)
        self._commits += 1
        txn = f"{self.me}-{self._commits}"
        state = msgspec.structs.replace(state, txn=txn)
        self._issued = _Issued(self.state_revision, txn, state)
        return [self._write(self._issued)]

    def _write(self, issued: _Issued) -> Commit:
        key = self._state_key
        condition = At(key, issued.revision) if issued.revision else Absent(key)
        return Commit(issued.txn, (condition,), (Put(key, encode_group_record(issued.state)),))


def _role(seen: ServerSeen) -> Literal["primary", "replica", "fenced", "down"]:
    if not seen.up:
        return "down"
    if seen.open_epoch:
        return "primary"
    return "replica" if seen.follows else "fenced"


# What people ask for


def switching(
    state: GroupState, members: Mapping[Incarnation, ServerRecord], to: str
) -> GroupState:
    """The state of a switchover to a server; `ValueError` says why there can't be one (F11)."""
    if state.phase is not GroupPhase.SERVING:
        raise ValueError(
            f"a switchover begins from serving, and the group is {state.phase.value}; wait until "
            "it serves, `status` shows what it waits for"
        )
    found = [one for one in members.values() if one.server == to]
    if not found or to == state.primary_server:
        others = sorted(
            one.server for one in members.values() if one.server != state.primary_server
        )
        raise ValueError(
            f"{to!r} is not a live replica; choose one of {', '.join(others) or 'none'}"
        )
    target = found[-1]
    if not target.fit or foreign(target, state):
        raise ValueError(f"{to!r} may not become primary: {target.why or 'foreign data'}")
    return msgspec.structs.replace(
        state, phase=GroupPhase.SWITCHING, candidate=target.incarnation, candidate_server=to,
        why=f"an operator asked for {to}",
    )  # fmt: skip


def forced(state: GroupState) -> GroupState:
    """The state with a person's word that the stated loss is accepted (F7, F8)."""
    if state.phase is not GroupPhase.ELECTING:
        raise ValueError(f"only an election can be forced, and the group is {state.phase.value}")
    return msgspec.structs.replace(state, force=True)
