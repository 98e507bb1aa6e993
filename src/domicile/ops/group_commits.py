"""What an operator's commands commit to a replica group, and what the store shows of it.

Called by `ops.replica`. Every commit is decided from one listing and conditional on what was read
(F5): a group that has moved on since refuses it. The rules for changes of the state are those of
the group's machine; a group's agents heed what is written.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import isfinite

import msgspec

from domicile.core.state.txn import At, Delete, Listing, Put
from domicile.errors import ConfigError
from domicile.failover.chains import BEFORE_THE_GROUP
from domicile.failover.choice import FORCIBLE, Choice, NoChoice, choose
from domicile.failover.machine import forced, switching
from domicile.failover.records import (
    GROUPS,
    MAX_SERVERS,
    GroupPhase,
    GroupState,
    LossReceipt,
    LossSum,
    PastPrimary,
    WriteQuorum,
    config_key,
    encode_group_record,
    group_prefix,
    state_key,
)
from domicile.failover.view import (
    GroupRecords,
    GroupView,
    announced,
    bytes_text,
    forced_view,
    group_names,
    group_view,
)
from domicile.ops.operator_commits import AuditRecord, OperatorCommit, StoreSnapshot
from domicile.ops.status import NoCluster

LEVEL_S = 1.0
"""Seconds that a server may be behind when a switchover to it begins: writes wait about so long."""

MOST_REMOVED = 32
"""S7: receipts that one commit deletes."""


def group_records(picture: StoreSnapshot, group: str) -> GroupRecords:
    """A group as stored; raises `LookupError` if there is none of that name."""
    found = picture.under(group_prefix(group))
    records = GroupRecords(group)
    records.load(Listing(picture.members.revision, tuple(found)))
    if not found:
        names = group_names(picture.under(GROUPS))
        known = f"groups there: {', '.join(names)}" if names else "there is none yet"
        raise LookupError(
            f"there is no group {group!r}; {known}. An agent founds one: domicile replica run"
        )
    return records


def _state(records: GroupRecords) -> GroupState:
    if records.state is None:
        raise LookupError(
            f"group {records.group!r} has no state yet: {group_view(records).waits}; "
            f"look again: domicile replica status {records.group}"
        )
    return records.state


def switch_target(records: GroupRecords, to: str | None) -> str:
    """The server of a switchover; None: the most advanced one that is fit.

    Choose once and keep to it: under load another one may be ahead at the next look.
    """
    _may_switch(records)
    return _most_advanced(records) if to is None else to


def switch_commit(records: GroupRecords, to: str) -> OperatorCommit:
    """F11: ask for a switchover to a server."""
    state = _may_switch(records)
    if to == state.primary_server and state.phase is GroupPhase.SERVING:
        raise LookupError(f"{to} is the primary already")
    try:
        wanted = switching(state, records.members, to)
    except ValueError as error:
        raise LookupError(str(error)) from error
    return OperatorCommit(
        f"{records.group} from {state.primary_server} to {to}, epoch {state.epoch}",
        (At(state_key(records.group), records.state_revision),),
        (Put(state_key(records.group), encode_group_record(wanted)),),
    )


def _may_switch(records: GroupRecords) -> GroupState:
    state, config = _state(records), records.config
    if config is not None and config.paused:
        raise LookupError(
            f"group {records.group!r} is paused, so no change of primary begins: domicile replica "
            f"resume {records.group}"
        )
    return state


def _most_advanced(records: GroupRecords) -> str:
    able = [one for one in group_view(records).servers if one.would_lose is not None]
    if not able:
        raise LookupError(
            f"no server of group {records.group!r} could become primary now; see why: domicile "
            f"replica status {records.group}"
        )
    return min(able, key=lambda one: (one.lag, one.server)).server


def not_level(view: GroupView, to: str, behind_s: float | None) -> str:
    """Why a switchover to a server would hold writes back for long; empty if it is level.

    `behind_s`: seconds since the primary had no more than the server; None if that is not known.
    Empty, too, if there can be no switchover to it: `switch_commit` says why.
    """
    found = [one for one in view.servers if one.server == to and one.incarnation]
    if view.primary is None or not found:
        return ""
    server = found[-1]
    if server.state != f"follows {view.primary}":
        return f"{to}: {server.state}" + (f" ({server.why})" if server.why else "")
    if server.lag and (behind_s is None or behind_s > LEVEL_S):
        return f"{to} lacks {bytes_text(server.lag)} that {view.primary} has"
    return ""


@dataclass(frozen=True, slots=True)
class Forcing:
    """What `failover --force` would do."""

    commit: OperatorCommit
    loss: str
    """What a person has to accept, in some lines."""


def force_commit(records: GroupRecords) -> Forcing:
    """F7, F8: accept the loss for which an election waits; raises `LookupError` if none does."""
    state, config, group = _state(records), records.config, records.group
    view = group_view(records)
    if state.phase is not GroupPhase.ELECTING or config is None:
        raise LookupError(_nothing_to_force(view))
    found = choose(state, config, records.members, patient=False)
    if isinstance(found, Choice):
        raise LookupError(f"the election needs no force: {view.waits}")
    accepted = choose(forced_view(state), config, records.members, patient=False)
    if found.obstacle not in FORCIBLE or isinstance(accepted, NoChoice):
        raise LookupError(
            f"force would not help: the election waits, because {view.waits}. Next: "
            f"{view.next_step}"
        )
    wanted = forced(state)
    return Forcing(
        OperatorCommit(
            f"{group}, epoch {state.epoch}: {accepted.server} at {accepted.position}",
            (At(state_key(group), records.state_revision),),
            (Put(state_key(group), encode_group_record(wanted)),),
        ),
        _loss_of(state, found, accepted, sync=config.sync),
    )


def _loss_of(state: GroupState, found: NoChoice, accepted: Choice, *, sync: bool) -> str:
    promised = " The group is synchronous, and this breaks its promise." if sync else ""
    begin = next((one.begin for one in state.chain if one.epoch == state.served), 0)
    epoch, offset = accepted.position
    if epoch == state.served:
        least = f"everything after byte {offset:,} of epoch {epoch}"
    elif epoch == BEFORE_THE_GROUP:
        least = "everything that the group has ever accepted"
    else:
        least = f"all of epoch {state.served}, which began at byte {begin:,}"
    others = [
        f"{one.server} at {one.epoch}:{one.offset}"
        for one in accepted.positions
        if one.server != accepted.server
    ]
    compared = f" Compared with {', '.join(others)}." if others else ""
    return (
        f"The election of epoch {state.epoch} waits: {found}.\n"
        f"Forced, {accepted.server} becomes primary, at {accepted.position}.{compared}\n"
        f"LOST is {least}: how much that is, only servers that are away know.{promised}\n"
        "When one of them comes back, what it has beyond is saved, counted in a receipt, and given "
        "up.\nIf its machine can be started, start it instead: then nothing may be lost."
    )


def _nothing_to_force(view: GroupView) -> str:
    group = view.group
    if view.phase == GroupPhase.SERVING.value and view.primary is not None:
        if view.waits:
            return f"nothing to force: {view.waits}. " + (
                f"Next: {view.next_step}" if view.next_step else "An election begins by itself"
            )
        return (
            f"group {group!r} serves: {view.primary} is its primary. To move it without loss: "
            f"domicile replica switchover {group} --to SERVER. To replace a primary that hangs, "
            "stop its agent: an election begins once its record is gone"
        )
    step = f". Next: {view.next_step}" if view.next_step else ""
    return (
        f"only an election can be forced; the group is {view.phase}, and waits: {view.waits}{step}"
    )


def pause_commit(picture: StoreSnapshot, group: str, *, paused: bool) -> OperatorCommit:
    """Maintenance: no change of primary begins; or its end."""
    records = group_records(picture, group)
    item = picture.item(config_key(group))
    if records.config is None or item is None:
        raise LookupError(
            f"group {group!r} has no configuration yet; an agent writes it: domicile replica run"
        )
    if records.config.paused == paused:
        raise LookupError(f"group {group!r} is {'paused already' if paused else 'not paused'}")
    wanted = msgspec.structs.replace(records.config, paused=paused)
    return OperatorCommit(
        group, (At(item.key, item.revision),), (Put(item.key, encode_group_record(wanted)),)
    )


CONFIGURABLE = ("freeze_s", "restart_s", "switch_s", "sync_count")
"""What a group's configuration may change to while it lives. Driver and mode are for ever."""


def config_changes(words: Sequence[str]) -> dict[str, float | int]:
    """The values of `name=value` words; `ConfigError` says which word is wrong."""
    found: dict[str, float | int] = {}
    for word in words:
        name, equals, text = word.partition("=")
        if not equals or name not in CONFIGURABLE or name in found:
            raise ConfigError(
                f"{word!r} is not one change: write NAME=VALUE, once for each of "
                f"{', '.join(CONFIGURABLE)}"
            )
        try:
            value = int(text) if name == "sync_count" else float(text)
        except ValueError:
            kind = "a whole number" if name == "sync_count" else "a number of seconds"
            raise ConfigError(f"{word!r}: {name} must be {kind}") from None
        least = 1 if name == "sync_count" else 0
        if not isfinite(value) or value < least or (not value and name != "restart_s"):
            raise ConfigError(f"{word!r}: {name} must be {'at least 1' if least else 'positive'}")
        found[name] = value
    return found


def configure_commit(
    picture: StoreSnapshot, group: str, changes: Mapping[str, float | int]
) -> OperatorCommit:
    """Change what all servers of a group agree on; raises `LookupError` if that can't be.

    Times count from the next step on. A new `sync_count` is a change of the write quorum: the
    primary lists it before its server uses it, and drops the old one once it has caught up (F12).
    """
    records = group_records(picture, group)
    item, config = picture.item(config_key(group)), records.config
    if config is None or item is None:
        raise LookupError(
            f"group {group!r} has no configuration yet; an agent writes it: domicile replica run"
        )
    count = changes.get("sync_count")
    if count is not None and not config.sync:
        raise LookupError(
            f"group {group!r} is asynchronous: no write waits for a replica, so sync_count has no "
            "effect"
        )
    others = len(dict.fromkeys(one.server for one in records.members.values())) - 1
    if count is not None and count > max(others, 1):
        raise LookupError(
            f"sync_count={count} needs {count} servers beside the primary, and {max(others, 0)} "
            f"are registered (a group has {MAX_SERVERS} at most): no write could be acknowledged. "
            "Add servers first: domicile replica run"
        )
    new = {name: value for name, value in changes.items() if getattr(config, name) != value}
    if not new:
        raise LookupError(f"group {group!r} has these values already")
    told = ", ".join(
        f"{name}={value:g} (was {getattr(config, name):g})" for name, value in new.items()
    )
    wanted = msgspec.structs.replace(config, **new)
    return OperatorCommit(
        f"{group} {told}",
        (At(item.key, item.revision),),
        (Put(item.key, encode_group_record(wanted)),),
    )


def remove_commit(records: GroupRecords, server: str) -> OperatorCommit:
    """Forget a server that is gone for good: its receipts, or as many as fit into one commit.

    Raises `LookupError` if it may not be forgotten, and once there is no receipt any more.
    Its record went with its agent's lease, and write quorums are the primary's to change (F12).
    """
    state, group = records.state, records.group
    if any(one.server == server for one in records.members.values()):
        raise LookupError(
            f"{server} has an agent that is registered, and would go on. Stop it (`domicile "
            "replica run`); its record goes with its lease; then repeat this"
        )
    listed = [one for one in _quorums(state) if server in (one.primary, *one.members)]
    if listed and state is not None:
        raise LookupError(
            f"{server} is in a write quorum that may hold acknowledged writes: {listed[0]}. The "
            "primary drops it by itself once enough other replicas follow: add one, and wait. If "
            f"the group waits for it in an election: domicile replica failover {group} --force"
        )
    if state is not None and state.primary_server == server:
        raise LookupError(
            f"{server} is the last primary of group {group!r}; wait until another one serves"
        )
    keys = [key for key, one in records.receipts.items() if one.server == server]
    if not keys:
        raise LookupError(
            f"nothing of {server} is left in group {group!r}: its record went with its agent's "
            "lease, and there is no receipt of a loss. Nothing needs to be removed"
        )
    some = sorted(keys)[:MOST_REMOVED]
    what = f"{group}/{server}: {len(some)} of {len(keys)} receipts"
    if len(some) == len(keys):
        what = f"{group}/{server}: {len(keys)} receipts"
    return OperatorCommit(what, (), tuple(map(Delete, some)))


def _quorums(state: GroupState | None) -> tuple[WriteQuorum, ...]:
    return () if state is None else state.quorums


# history


@dataclass(frozen=True, slots=True)
class PastEpoch:
    """One epoch of a group, as far as the store still tells."""

    epoch: int
    server: str
    at: str
    why: str
    begin: int | None
    lost: tuple[LossReceipt, ...] = ()


@dataclass(frozen=True, slots=True)
class GroupHistory:
    """The epochs of a group and the operators' commands, the newest last."""

    group: str
    epochs: tuple[PastEpoch, ...]
    commands: tuple[AuditRecord, ...]
    lost_before: LossSum | None = None
    """What older receipts told, which are no longer there one by one."""


def group_history(picture: StoreSnapshot, group: str) -> GroupHistory:
    """What the store still tells of a group's past."""
    records = group_records(picture, group)
    past = {one.epoch: one for one in records.past.values()}
    begins: dict[int, int] = {}
    state = records.state
    if state is not None:
        begins = {one.epoch: one.begin for one in state.chain if one.epoch != BEFORE_THE_GROUP}
        if state.served and state.served not in past:
            past[state.served] = PastPrimary(
                epoch=state.served, server=state.primary_server, at="",
                why=state.why if state.phase is GroupPhase.SERVING else "",
            )  # fmt: skip
    lost: dict[int, list[LossReceipt]] = {}
    for receipt in records.receipts.values():
        lost.setdefault(receipt.epoch, []).append(receipt)
    epochs: list[PastEpoch] = []
    for epoch in sorted({**past, **begins, **lost}):
        known = past.get(epoch)
        begin = begins.get(epoch) if known is None or not known.begin else known.begin
        epochs.append(
            PastEpoch(
                epoch, "" if known is None else known.server, "" if known is None else known.at,
                "" if known is None else known.why, begin, tuple(lost.get(epoch, ())),
            )
        )  # fmt: skip
    return GroupHistory(group, tuple(epochs), tuple(_commands(picture, group)), records.lost_before)


def _commands(picture: StoreSnapshot, group: str) -> list[AuditRecord]:
    found: list[AuditRecord] = []
    for record in picture.audit_records():
        named = record.what == group or record.what.startswith(
            (f"{group} ", f"{group},", f"{group}/")
        )
        if record.command.startswith("replica ") and named:
            found.append(record)
    return found


def loss_text(receipt: LossReceipt) -> str:
    """A receipt in one line."""
    counted = "" if receipt.writes < 0 else f" ({receipt.writes:,} writes)"
    saved = f", saved at {receipt.saved}" if receipt.saved else ""
    return f"{receipt.server}: {bytes_text(receipt.had - receipt.kept)}{counted}{saved}"


def reached(records: GroupRecords, epoch: int) -> bool:
    """Whether a primary of a later epoch is announced."""
    state = records.state
    return announced(records) is not None and state is not None and state.epoch > epoch


def existing_groups(picture: StoreSnapshot) -> list[GroupRecords]:
    """All groups of a cluster; raises `NoCluster` if there is none."""
    names = group_names(picture.under(GROUPS))
    if not names:
        raise NoCluster(
            "there is no replica group in this store and cluster yet; an agent founds one: "
            "domicile replica run FILE.toml"
        )
    return [group_records(picture, name) for name in names]
