"""What a group looks like from its records alone: for commands, HTTP answers, proxies and clients.

`GroupRecords` keeps what the store has of one group; `group_view` says what that means for people,
and `announced` which server clients may use. Pure, and nothing here changes anything: whoever wants
to decide asks the machine.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import msgspec

from domicile.core.ids import Incarnation
from domicile.core.state.txn import Changes, Item, Listing
from domicile.failover.chains import common_offset
from domicile.failover.choice import NoChoice, Obstacle, choose, foreign, loss_ahead
from domicile.failover.records import (
    GROUPS,
    GroupConfig,
    GroupPhase,
    GroupState,
    LossReceipt,
    LossSum,
    PastPrimary,
    ServerRecord,
    config_key,
    decode_group_record,
    loss_sum_key,
    parse_group,
    parse_server_key,
    past_prefix,
    receipts_prefix,
    servers_prefix,
    state_key,
)

MAX_SAMPLES = 600
"""I6: the most positions of a primary that a `LagClock` remembers."""


class GroupRecords:
    """What a store has of one group, from a listing on. Keys of other groups are ignored."""

    def __init__(self, group: str) -> None:
        self.group = group
        self._state_key, self._config_key = state_key(group), config_key(group)
        self._servers, self._receipts = servers_prefix(group), receipts_prefix(group)
        self._past, self._sum = past_prefix(group), loss_sum_key(group)
        self._forget()

    def _forget(self) -> None:
        self.revision = 0
        """The store's revision up to which these records are known; 0: nothing was read yet."""
        self.config: GroupConfig | None = None
        self.state: GroupState | None = None
        self.state_revision = 0
        self.members: dict[Incarnation, ServerRecord] = {}
        self.receipts: dict[bytes, LossReceipt] = {}
        self.lost_before: LossSum | None = None
        """The receipts that are no longer there one by one."""
        self.past: dict[bytes, PastPrimary] = {}
        self.unreadable: dict[bytes, str] = {}

    @property
    def known(self) -> bool:
        """Whether the store has anything of this group."""
        return bool(self.config or self.state or self.members or self.unreadable)

    def load(self, listing: Listing) -> None:
        """Replace everything by what a listing of the group, or of more, has."""
        self._forget()
        for item in listing.items:
            self._take(item.key, item)
        self.revision = listing.revision

    def apply(self, changes: Changes) -> None:
        """Take later changes."""
        for change in changes.changes:
            self._take(change.key, change.item)
        self.revision = max(self.revision, changes.revision)

    def _take(self, key: bytes, item: Item | None) -> None:
        self.unreadable.pop(key, None)
        try:
            self._read(key, item)
        except ValueError as error:
            self.unreadable[key] = str(error)

    def _read(self, key: bytes, item: Item | None) -> None:
        if key == self._state_key:
            self.state, self.state_revision = None, 0 if item is None else item.revision
            if item is not None:
                self.state = decode_group_record(item.value, GroupState)
        elif key == self._config_key:
            self.config = None
            if item is not None:
                self.config = decode_group_record(item.value, GroupConfig)
        elif key.startswith(self._servers):
            self._read_member(key, item)
        elif key.startswith(self._receipts):
            self.receipts.pop(key, None)
            if item is not None:
                self.receipts[key] = decode_group_record(item.value, LossReceipt)
        elif key == self._sum:
            self.lost_before = None if item is None else decode_group_record(item.value, LossSum)
        elif key.startswith(self._past):
            self.past.pop(key, None)
            if item is not None:
                self.past[key] = decode_group_record(item.value, PastPrimary)

    def _read_member(self, key: bytes, item: Item | None) -> None:
        server, incarnation = parse_server_key(self.group, key)
        self.members.pop(incarnation, None)
        if item is None:
            return
        try:
            self.members[incarnation] = decode_group_record(item.value, ServerRecord)
        except ValueError as error:
            # It is there, which is what elections ask; but nobody knows what it has.
            self.members[incarnation] = ServerRecord(
                server=server, incarnation=incarnation, address="", ttl_s=0.0, role="fenced",
                fit=False, why=f"its record cannot be read: {error}",
            )  # fmt: skip


def group_names(items: Iterable[Item]) -> list[str]:
    """The names of all groups of which these items have a record."""
    keys = (item.key for item in items if item.key.startswith(GROUPS))
    return sorted(dict.fromkeys(parse_group(key) for key in keys))


def announced(records: GroupRecords) -> ServerRecord | None:
    """The primary that clients may use; None while there is none (I3).

    A state that switches has a primary that refuses writes, and a primary whose record is gone is
    about to be replaced.
    """
    state = records.state
    if state is None or state.phase is not GroupPhase.SERVING:
        return None
    found = records.members.get(state.primary)
    return found if found is not None and found.address else None


def caught_up(record: ServerRecord, state: GroupState) -> bool:
    """Whether a server has had everything that the primary of the served epoch began with (FO-02).

    It has an entry of that epoch then. One that still copies or waits for its copy has none.
    """
    return record.position.epoch >= state.served


def followers(records: GroupRecords) -> list[ServerRecord]:
    """The servers that follow the announced primary, have caught up and are fit; by server id."""
    primary, state = announced(records), records.state
    if primary is None or state is None:
        return []
    return sorted(
        (
            one
            for one in records.members.values()
            if one.role == "replica"
            and one.follows == primary.server
            and caught_up(one, state)
            and one.fit
            and one.address
            and not foreign(one, state)
        ),
        key=lambda one: one.server,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerView:
    """One server of a group, for people and tools."""

    server: str
    address: str
    role: str
    """primary, replica, candidate, or none."""
    state: str
    """What it does, in a few words."""
    why: str
    """Why it does not do more; empty if nothing is wrong."""
    healthy: bool
    """Whether it does what its group wants of it."""
    epoch: int
    """Of its last entry."""
    offset: int
    lag: int | None
    """Bytes that the primary has and this server has not, by their last reports."""
    would_lose: int | None
    """Bytes that a failover to this server would lose now; None if it may not become primary."""
    lag_s: float | None = None
    """Seconds since the primary had no more than this server; None: not observed long enough."""
    ttl_s: float | None
    """The most seconds that the agent's lease may have left; None: no agent is registered."""
    seen: str
    """When its agent last wrote what it saw, by the clock of its machine."""
    resyncs: dict[str, int] | None = None
    """How often servers came to follow again, by what that took; None: not known."""
    incarnation: str

    @property
    def position(self) -> str:
        """The epoch of the last entry, and the offset."""
        return f"{self.epoch}:{self.offset}"

    @property
    def seen_up(self) -> bool:
        """Whether its agent sees it run, and so knows its position."""
        return bool(self.incarnation) and self.state != "down"


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupView:
    """One group at one revision of its store."""

    group: str
    revision: int
    driver: str
    mode: str
    paused: bool
    phase: str
    epoch: int
    served: bool
    """Whether there is a primary that accepts writes, by its agent's last report."""
    primary: str | None
    """The server id of the announced primary."""
    address: str | None
    since: str
    """When the present primary became one, as an agent saw it; empty if that is not known."""
    began_by: str
    """Why that change of primary began."""
    why: str
    """The same, or what has come of a later change that was given up."""
    waits: str
    """What the group waits for; empty: for nothing."""
    next_step: str
    """What a person can do about it; empty: nothing is to be done."""
    loss: str
    """What failing over now would lose."""
    loss_bytes: int | None
    """The same as a number; None: nobody could become primary."""
    forcible: bool
    """Whether `failover --force` would end the wait."""
    quorums: tuple[str, ...]
    servers: tuple[ServerView, ...]
    unreadable: tuple[str, ...]
    moved: str = ""
    """Why agents refuse this store: the group was copied; empty if they do not. From its reader."""


def group_view(records: GroupRecords) -> GroupView:
    """What the records of a group mean."""
    state, config = records.state, records.config
    found = announced(records)
    waits, next_step, forcible = _waiting(records)
    loss, lost = _loss(records)
    begin = _begin(records)
    phase = GroupPhase.VACANT if state is None else state.phase
    return GroupView(
        group=records.group,
        revision=records.revision,
        driver="" if config is None else config.driver,
        mode="" if config is None else config.mode,
        paused=config is not None and config.paused,
        phase=phase.value,
        epoch=0 if state is None else state.epoch,
        served=found is not None and found.role == "primary",
        primary=None if found is None else found.server,
        address=None if found is None else found.address,
        since="" if begin is None else begin.at,
        began_by="" if begin is None else begin.why,
        why="" if state is None else state.why,
        waits=waits,
        next_step=next_step,
        loss=loss,
        loss_bytes=lost,
        forcible=forcible,
        quorums=() if state is None else tuple(map(str, state.quorums)),
        servers=tuple(_servers(records)),
        unreadable=tuple(
            f"{key.decode(errors='replace')}: {why}" for key, why in records.unreadable.items()
        ),
    )


def _begin(records: GroupRecords) -> PastPrimary | None:
    """The record of the epoch that is served."""
    state = records.state
    if state is None or state.phase not in (GroupPhase.SERVING, GroupPhase.SWITCHING):
        return None
    return next((one for one in records.past.values() if one.epoch == state.served), None)


# the servers


def _servers(records: GroupRecords) -> list[ServerView]:
    seen = [_server(records, one) for one in records.members.values()]
    named = dict.fromkeys(one.server for one in seen)
    gone = [name for name in _named(records.state) if name not in named]
    return sorted([*seen, *map(_absent, gone)], key=lambda one: (one.server, one.incarnation))


def _named(state: GroupState | None) -> list[str]:
    """The servers that a state names: those without a record have no agent now."""
    if state is None:
        return []
    names = [state.primary_server, state.candidate_server]
    for quorum in state.quorums:
        names += [quorum.primary, *quorum.members]
    return [name for name in dict.fromkeys(names) if name]


def _absent(server: str) -> ServerView:
    return ServerView(
        server=server, address="", role="none", state="no agent",
        why="its agent is not registered: start it, domicile replica run", healthy=False,
        epoch=0, offset=0, lag=None, would_lose=None, ttl_s=None, seen="", incarnation="",
    )  # fmt: skip


def _server(records: GroupRecords, record: ServerRecord) -> ServerView:
    state = records.state
    role = _role(state, record)
    text, why, healthy = _doing(records, record, role)
    lag = _lag(records, record)
    chosen = record.fit and (state is None or not foreign(record, state))
    sync = records.config is not None and records.config.sync
    return ServerView(
        server=record.server, address=record.address, role=role, state=text, why=why,
        healthy=healthy,
        epoch=record.position.epoch, offset=record.offset, lag=lag,
        would_lose=None if role == "primary" or not chosen or lag is None else 0 if sync else lag,
        ttl_s=record.ttl_s or None, seen=record.seen, incarnation=record.incarnation,
        resyncs=None if record.resyncs is None else msgspec.structs.asdict(record.resyncs),
    )  # fmt: skip


def _role(state: GroupState | None, record: ServerRecord) -> str:
    if state is not None:
        served = state.phase in (GroupPhase.SERVING, GroupPhase.SWITCHING)
        if served and record.incarnation == state.primary:
            return "primary"
        if state.candidate == record.incarnation:
            return "candidate"
    return "replica" if record.role == "replica" else "none"


def _doing(records: GroupRecords, record: ServerRecord, role: str) -> tuple[str, str, bool]:
    """What a server does, why not more, and whether that is what its group wants of it."""
    state = records.state
    phase = GroupPhase.VACANT if state is None else state.phase
    if record.role == "down":
        return "down", record.why or "it does not run", False
    if not record.fit:
        return "not fit", record.why or "its agent did not say why", False
    if state is not None and foreign(record, state):
        why = "it has data that is not of this group: empty it, or remove it from the group"
        return "foreign", why, False
    if role == "primary":
        if phase is GroupPhase.SWITCHING:
            return "holds writes", "", True
        open_now = record.role == "primary"
        return ("accepts writes", "", True) if open_now else ("refuses writes", "", False)
    if phase is GroupPhase.ELECTING:
        ready = state is not None and record.final == state.epoch
        return ("ready to elect" if ready else "stops following"), "", True
    if role == "candidate" and phase is GroupPhase.CHOSEN:
        return "is promoted", "", True
    if record.role == "replica":
        right = state is not None and record.follows == state.primary_server
        if right and state is not None and not caught_up(record, state):
            return f"catches up with {record.follows}", "", True
        return f"follows {record.follows}", "", right
    return "follows nobody", "", phase is GroupPhase.CHOSEN


def _lag(records: GroupRecords, record: ServerRecord) -> int | None:
    state = records.state
    primary = None if state is None else records.members.get(state.primary)
    if primary is None or state is None:
        return None
    if primary.incarnation == record.incarnation:
        return 0
    if not record.fit or foreign(record, state):
        return None
    return max(0, primary.offset - common_offset(record.chain, record.offset, primary.chain))


def _loss(records: GroupRecords) -> tuple[str, int | None]:
    """What failing over now would lose (F10, FO-19)."""
    state, config = records.state, records.config
    if state is None or config is None or state.phase is not GroupPhase.SERVING:
        return "", None
    ahead = loss_ahead(state, config, records.members)
    if not ahead.server:
        return "no other server could become primary now", None
    if ahead.excluded:
        return f"failing over now would choose {ahead.server}; no acknowledged write is lost", 0
    return (
        f"failing over now would choose {ahead.server} and lose {bytes_text(ahead.offset)}",
        ahead.offset,
    )


def bytes_text(number: int) -> str:
    """A number of bytes for people."""
    return "1 byte" if number == 1 else f"{number:,} bytes"


# what it waits for


def _waiting(records: GroupRecords) -> tuple[str, str, bool]:
    """What the group waits for, the next step, and whether a person's word would end the wait."""
    state, config, group = records.state, records.config, records.group
    if state_key(group) in records.unreadable or config_key(group) in records.unreadable:
        return "its records cannot be read here", "update this program", False
    if not records.members:
        return "no agent is registered", "start one beside each server: domicile replica run", False
    if config is None:
        return "it has no configuration", "an agent that starts anew writes it", False
    if state is None:
        return "an agent founds the group", "", False
    match state.phase:
        case GroupPhase.SERVING:
            return _serving(records, state, config)
        case GroupPhase.ELECTING:
            return _electing(records, state, config)
        case GroupPhase.SWITCHING:
            to = state.candidate_server
            late = f"after {config.switch_s:g} s {state.primary_server} serves on"
            return f"{to} gets everything that {state.primary_server} has; {late}", "", False
        case GroupPhase.CHOSEN:
            if state.candidate not in records.members:
                return (
                    f"{state.candidate_server} was chosen and is gone; another follows",
                    "",
                    False,
                )
            return f"{state.candidate_server} becomes primary", "", False
        case GroupPhase.VACANT:  # never stored
            return "an agent founds the group", "", False


def _serving(
    records: GroupRecords, state: GroupState, config: GroupConfig
) -> tuple[str, str, bool]:
    primary = records.members.get(state.primary)
    server = state.primary_server
    resume = f"end the pause: domicile replica resume {records.group}"
    if primary is None:
        waits = f"the agent of {server} is gone"
        if config.paused:
            return f"{waits}, and the group is paused: no election begins", resume, False
        return f"{waits}; an election begins", "", False
    if primary.role == "primary":
        return _too_few(records, state, config)
    waits = f"{server} refuses writes" + (f": {primary.why}" if primary.why else "")
    if config.paused:
        step = f"start {server}, or {resume}"
        return f"{waits}; the group is paused: no election begins", step, False
    return waits, "", False


def _too_few(
    records: GroupRecords, state: GroupState, config: GroupConfig
) -> tuple[str, str, bool]:
    """In synchronous mode: whether commits wait for replicas that the group has not."""
    if not config.sync:
        return "", "", False
    ready = dict.fromkeys(
        one.server
        for one in records.members.values()
        if one.role == "replica"
        and one.follows == state.primary_server
        and one.fit
        and caught_up(one, state)
    )
    if len(ready) >= config.sync_count:
        return "", "", False
    others = len(dict.fromkeys(one.server for one in records.members.values())) - 1
    waits = f"commits wait: sync_count is {config.sync_count}, and "
    if others >= config.sync_count:
        return f"{waits}{len(ready)} servers follow the primary yet", "", False
    waits += f"{others} servers are there beside the primary"
    start = "start more servers: domicile replica run"
    if others < 1:
        return waits, start, False
    lower = f"domicile replica configure {records.group} sync_count={others}"
    return waits, f"{start}; or {lower}", False


def _electing(
    records: GroupRecords, state: GroupState, config: GroupConfig
) -> tuple[str, str, bool]:
    if state.orchestrator not in records.members:
        return "another agent goes on with the election", "", False
    found = choose(state, config, records.members, patient=False)
    if not isinstance(found, NoChoice):
        waiting = choose(state, config, records.members, patient=True)
        if isinstance(waiting, NoChoice):
            return f"{waiting}; at most {config.freeze_s:g} s", "", False
        return f"{found.server} is being chosen", "", False
    slow = [one for one in records.members.values() if one.final != state.epoch and one.fit]
    if slow and found.obstacle is Obstacle.NOBODY:
        return str(choose(state, config, records.members, patient=True)), "", False
    return str(found), *_obstacle_step(
        records.group, found.obstacle, state, config, records.members
    )


def _obstacle_step(
    group: str,
    obstacle: Obstacle,
    state: GroupState,
    config: GroupConfig,
    members: Mapping[Incarnation, ServerRecord],
) -> tuple[str, bool]:
    force = f"accept the loss: domicile replica failover {group} --force"
    match obstacle:
        case Obstacle.QUORUM | Obstacle.LAST_EPOCH:
            # Forced, somebody must be there to be chosen.
            accepted = choose(forced_view(state), config, members, patient=False)
            start = "start the agents of the servers that are missing"
            if isinstance(accepted, NoChoice):
                return start, False
            return f"{start}; or {force}", True
        case Obstacle.ORIGINS:
            return "empty all servers but the one whose data the group shall have", False
        case Obstacle.NOBODY:
            return "start more servers of the group, or repair those that are not fit", False
        case Obstacle.FREEZING:
            return "", False


def forced_view(state: GroupState) -> GroupState:
    """The state as it would be with a person's word, to see what that would lose."""
    return msgspec.structs.replace(state, force=True)


# lag in seconds


class LagClock:
    """Knows how many seconds a server lags, from positions of the primary that it was shown."""

    def __init__(self) -> None:
        self._epoch = 0
        self._samples: deque[tuple[float, int]] = deque(maxlen=MAX_SAMPLES)

    def note(self, records: GroupRecords, now: float) -> None:
        """Take the primary's position as it is reported now."""
        state = records.state
        primary = None if state is None else records.members.get(state.primary)
        if primary is None or state is None:
            return
        if state.epoch != self._epoch:
            self._epoch = state.epoch
            self._samples.clear()
        if not self._samples or self._samples[-1][1] != primary.offset:
            self._samples.append((now, primary.offset))

    def behind_s(self, offset: int, now: float) -> float | None:
        """Seconds since the primary first reported more than this offset; 0: it has no more.

        None if that was before the first report that was seen.
        """
        if not self._samples:
            return None
        if offset >= self._samples[-1][1]:
            return 0.0
        if offset < self._samples[0][1]:
            return None
        first_beyond = next(at for at, reported in self._samples if reported > offset)
        return max(0.0, now - first_beyond)
