"""What a group keeps in the store: its configuration, its members, its state, receipts of losses.

Everything in `failover` uses these types; nothing here decides. A group's keys lie under
`group/<name>/`:

- `config`: what all members must agree on, and whether failovers are paused
- `server/<server id>/<agent incarnation>`: a member, under its agent's lease
- `state`: who serves, or how far a change of primary is; no lease (S6), changed by CAS only
- `receipt/<epoch>/<server id>`: what a server had beyond its new primary's history (F10)
- `lost`: the sum of the oldest receipts, which are deleted once there are too many
- `past/<epoch>`: who became primary of an epoch, when and why, and the history that it began: the
  group decides nothing by it, but a server that comes back learns by it what data it has

Primary, candidate and orchestrator are named by the *incarnation of their agent*, so that the
absence of a record is final. Values are JSON with a format number: a reader refuses a newer format
instead of guessing.
"""

from __future__ import annotations

from enum import Enum
from typing import Literal, TypeVar
from urllib.parse import quote, unquote

import msgspec

from domicile.core.ids import NOBODY, Incarnation
from domicile.failover.chains import ORIGIN, Chain, Position, position_of

GROUPS = b"group/"

FORMAT = 1
"""The format of all records here. A reader takes this one and older ones."""

MAX_SERVERS = 32
"""I6: the most servers of one group."""

MAX_RECEIPTS = 100
"""I6: so many loss receipts of a group stay whole; older ones are added up (F10)."""

MAX_QUORUMS = 8
"""I6: the most write quorums that a state lists; with more, changes of the set wait (F12)."""


class FormatTooNew(ValueError):
    """A record was written by a later version. Update this process."""


class GroupPhase(Enum):
    """What a group's state says. The names are stored."""

    VACANT = "vacant"
    """There is no state yet. Never stored."""
    SERVING = "serving"
    ELECTING = "electing"
    CHOSEN = "chosen"
    SWITCHING = "switching"


class WriteQuorum(msgspec.Struct, frozen=True, array_like=True):
    """A write is acknowledged once the primary and `count` of `members` have it (F7, F12).

    All are server ids. Servers persist, agents do not.
    """

    primary: str
    members: tuple[str, ...]
    count: int = 1

    def __str__(self) -> str:
        return f"{self.primary} + any {self.count} of ({', '.join(self.members)})"


class GroupConfig(msgspec.Struct, frozen=True, omit_defaults=True):
    """What all members of a group agree on."""

    driver: str
    mode: Literal["async", "sync"] = "async"
    sync_count: int = 1
    """In synchronous mode: how many replicas must have a write before it is acknowledged."""
    freeze_s: float = 1.0
    """F7: how long an orchestrator waits for final positions of live members."""
    restart_s: float = 0.0
    """F4: how long the primary's agent waits for its server to come back before it releases."""
    switch_s: float = 10.0
    """F11: how long a switchover may hold writes back before the primary reverts it."""
    paused: bool = False
    """Maintenance: no change of primary begins. What has begun is finished."""
    format: int = FORMAT

    @property
    def sync(self) -> bool:
        """Whether no acknowledged write may be lost."""
        return self.mode == "sync"


class Resyncs(msgspec.Struct, frozen=True, omit_defaults=True):
    """How often servers came to follow a primary again, by what that took.

    Each database counts on the side that knows: Valkey and Redis at the primary, for all its
    followers and since that server was started; PostgreSQL at the follower, since its state folder
    was made.
    """

    full: int = 0
    """Everything was copied."""
    partial: int = 0
    """What was missing, and nothing else, was copied."""
    rewound: int = 0
    """What the primary does not have was taken back, and then only what was missing was copied."""
    refused: int = 0
    """What was missing was asked for, and the primary did not have it any more."""


class ServerRecord(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    """One server of a group as its agent sees it, under the agent's lease."""

    server: str
    """The server's id, which persists over restarts (FO-01)."""
    folder: str = ""
    """Of its state folder: who has the same id and another one is another server."""
    incarnation: Incarnation
    """Of the agent."""
    address: str
    ttl_s: float
    role: Literal["primary", "replica", "fenced", "down"] = "down"
    """What the server was when the agent last looked."""
    follows: str = ""
    """The server id of the primary that it follows."""
    origin: str = ""
    """The group whose data it has, or the native id of what it had before; empty if it is empty."""
    chain: Chain = ORIGIN
    """The histories of which it has an entry (F8)."""
    offset: int = 0
    fit: bool = True
    """Whether it may become primary."""
    why: str = ""
    """Why it is not fit."""
    final: int = 0
    """The epoch for whose election this position is final: the server follows nobody (F6)."""
    resyncs: Resyncs | None = None
    """None: its driver does not count them, or the server does not answer."""
    seen: str = ""
    """When the agent last looked, as a wall time for people. Nothing is decided by it."""
    format: int = FORMAT

    @property
    def position(self) -> Position:
        """The epoch of the last entry, and the offset."""
        return position_of(self.chain, self.offset)


class Ranked(msgspec.Struct, frozen=True, array_like=True):
    """A final position that an election saw."""

    server: str
    epoch: int
    offset: int


class GroupState(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    """Who serves, or how far a change of primary is. Every change is a CAS on its revision."""

    phase: GroupPhase
    epoch: int
    """serving, switching: of the primary. electing, chosen: the one that is being filled."""
    origin: str
    """Random id of the group's data: a server with another one is not of this group (F8)."""
    txn: str = ""
    """Of the commit that wrote it, to be recognized after an unknown outcome (S1)."""
    primary: Incarnation = NOBODY
    """The last primary's agent."""
    primary_server: str = ""
    run: str = ""
    """The run of the primary's server that may be open in this epoch (F1, F4)."""
    served: int = 0
    """The last epoch that was served."""
    chain: Chain = ()
    """Of the last primary (F9)."""
    native: str = ""
    """The database's own id of the last primary's history."""
    quorums: tuple[WriteQuorum, ...] = ()
    """Every write quorum that may hold acknowledged writes (F12)."""
    candidate: Incarnation = NOBODY
    candidate_server: str = ""
    chosen: Ranked | None = None
    """The position for which the candidate was chosen (F9)."""
    positions: tuple[Ranked, ...] = ()
    """All final positions that the choice saw (F8)."""
    orchestrator: Incarnation = NOBODY
    force: bool = False
    """A person has accepted the loss that the choice states (F7, F8)."""
    why: str = ""
    """Why this change began, for people."""
    format: int = FORMAT


class LossReceipt(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    """What a server had beyond the history that it follows now (F10)."""

    server: str
    epoch: int
    """The epoch in whose favour it was given up."""
    chain: Chain
    """Of the server before it followed."""
    kept: int
    """The offset up to which both agree."""
    had: int
    """The offset that the server had."""
    writes: int = 0
    """How many writes that were, if the driver can count them."""
    saved: str = ""
    """Where the driver has saved them."""
    format: int = FORMAT


class LossSum(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    """What the oldest loss receipts told, added up. Each receipt is counted here or still there."""

    receipts: int = 0
    size: int = 0
    """Bytes that they gave up."""
    writes: int = 0
    """Writes of those that could count them."""
    uncounted: int = 0
    """How many of them could not."""
    until: int = 0
    """The last epoch of one of them."""
    format: int = FORMAT

    def plus(self, receipt: LossReceipt) -> LossSum:
        """With one more."""
        known = receipt.writes >= 0
        return LossSum(
            receipts=self.receipts + 1, size=self.size + receipt.had - receipt.kept,
            writes=self.writes + (receipt.writes if known else 0),
            uncounted=self.uncounted + (not known), until=max(self.until, receipt.epoch),
        )  # fmt: skip


class PastPrimary(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    """Who became primary of an epoch, as an agent of the group saw it."""

    epoch: int
    server: str
    at: str
    """When an agent saw it, as a wall time."""
    why: str = ""
    """Why the change began."""
    begin: int = 0
    """The offset at which the epoch began."""
    by: str = ""
    """The server whose agent wrote this."""
    chain: Chain = ()
    """Of that primary, with this epoch."""
    native: str = ""
    """The database's own id of the history that the epoch began."""
    format: int = FORMAT


# keys


def group_prefix(group: str) -> bytes:
    """The prefix of everything that a group stores."""
    return GROUPS + quote(group, safe="").encode() + b"/"


def parse_group(key: bytes) -> str:
    """The group of a key of a group."""
    return unquote(key.removeprefix(GROUPS).partition(b"/")[0].decode())


def config_key(group: str) -> bytes:
    """The key of a group's configuration."""
    return group_prefix(group) + b"config"


def state_key(group: str) -> bytes:
    """The key of a group's state."""
    return group_prefix(group) + b"state"


def servers_prefix(group: str) -> bytes:
    """The prefix of a group's members."""
    return group_prefix(group) + b"server/"


def server_key(group: str, server: str, incarnation: Incarnation) -> bytes:
    """The key of a member's record."""
    return servers_prefix(group) + f"{quote(server, safe='')}/{incarnation}".encode()


def parse_server_key(group: str, key: bytes) -> tuple[str, Incarnation]:
    """The server id and the agent of a member's key; `ValueError` for another key."""
    server, incarnation = key.removeprefix(servers_prefix(group)).decode().split("/")
    server = unquote(server)
    if server_key(group, server, Incarnation(incarnation)) != key:
        raise ValueError(f"{key!r} is not the key of a server of group {group!r}")
    return server, Incarnation(incarnation)


def parse_agent(key: bytes) -> tuple[str, str] | None:
    """The group and the server id if this is the key of an agent's record; otherwise None.

    Such a record means that an agent may act. It ends with the agent's lease.
    """
    if not key.startswith(GROUPS):
        return None
    try:
        group = parse_group(key)
        return group, parse_server_key(group, key)[0]
    except ValueError:
        return None


def parse_state_group(key: bytes) -> str | None:
    """The group if this is the key of a group's state; otherwise None."""
    if not key.startswith(GROUPS):
        return None
    try:
        group = parse_group(key)
    except ValueError:
        return None
    return group if key == state_key(group) else None


def receipts_prefix(group: str) -> bytes:
    """The prefix of a group's loss receipts."""
    return group_prefix(group) + b"receipt/"


def receipt_key(group: str, epoch: int, server: str) -> bytes:
    """The key of a loss receipt."""
    return receipts_prefix(group) + f"{epoch}/{quote(server, safe='')}".encode()


def loss_sum_key(group: str) -> bytes:
    """The key of the sum of a group's oldest loss receipts."""
    return group_prefix(group) + b"lost"


def past_prefix(group: str) -> bytes:
    """The prefix of what is known of a group's past primaries."""
    return group_prefix(group) + b"past/"


def past_key(group: str, epoch: int) -> bytes:
    """The key of what is known of the primary of one epoch."""
    return past_prefix(group) + str(epoch).encode()


# values

GroupRecord = TypeVar(
    "GroupRecord", GroupConfig, ServerRecord, GroupState, LossReceipt, LossSum, PastPrimary
)


def encode_group_record(
    record: GroupConfig | ServerRecord | GroupState | LossReceipt | LossSum | PastPrimary,
) -> bytes:
    """The stored form: JSON, so that people can read it in any store's own tools."""
    return msgspec.json.encode(record)


def decode_group_record(value: bytes, kind: type[GroupRecord]) -> GroupRecord:
    """A record from its stored form; `FormatTooNew` if a later version wrote it in its own way."""
    try:
        record = msgspec.json.decode(value, type=kind)
    except msgspec.ValidationError as error:
        _check_format(msgspec.json.decode(value, type=_Format), kind, error)
        raise
    _check_format(_Format(record.format), kind, None)
    return record


class _Format(msgspec.Struct, frozen=True):
    format: int = FORMAT


def _check_format(found: _Format, kind: type[object], cause: Exception | None) -> None:
    if found.format > FORMAT:
        raise FormatTooNew(
            f"a {kind.__name__} of format {found.format} was written by a later version; this one "
            f"reads formats up to {FORMAT}. Update this process, or let the later one act"
        ) from cause


def ranked(server: str, position: Position) -> Ranked:
    """A position with its server, as a state stores it."""
    return Ranked(server, position.epoch, position.offset)


def as_position(rank: Ranked) -> Position:
    """The position that a state stores."""
    return Position(rank.epoch, rank.offset)
