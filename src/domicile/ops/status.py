"""What a cluster looks like from its store alone: nodes, clients, shards, wishes, late handlers.

Used by `domicile status` and `domicile where`. It asks no node and writes nothing; it must never
create a missing store. A manager is a node without roles.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from domicile.backends.registry import Backend, shown_url, store_backend
from domicile.backends.wiring import WholeStore, open_whole_store
from domicile.core.hashing import NAMED, shard_of
from domicile.core.ids import EntityKey, Incarnation, ShardKey
from domicile.core.placement.suspicion import loses_owners, pause_s
from domicile.core.state.agreement import type_gaps
from domicile.core.state.cluster_view import ClusterView
from domicile.core.state.records import ConfigRecord, MoveRecord, NodeRecord
from domicile.core.state.shardmap import Entry
from domicile.core.state.txn import Item, Listing
from domicile.errors import ConfigError, StoreError
from domicile.failover.records import GROUPS
from domicile.membership.clock import SystemClock
from domicile.ops.operator_commits import AuditRecord, StoreSnapshot
from domicile.ops.stuck_seen import StuckSeen, stuck_record, stuck_seen
from domicile.ops.waiting import told_if_slow
from domicile.ports.health import TellsAge, Verdict

READ_S = 5.0


class NoCluster(Exception):
    """Nothing can be shown: no file, no such cluster, or the store does not answer."""


@dataclass(frozen=True, slots=True)
class NodeSeen:
    """One registered incarnation."""

    node: str
    incarnation: str
    address: str
    status: str
    coordinator: bool
    candidate: bool
    manager: bool
    version: str
    roles: tuple[str, ...]
    types: tuple[str, ...]
    serving: int
    moving: int
    age_s: float | None
    residents: int | None = None
    """From here on what the node itself said when it was asked; None if it was not or did not."""
    turns_per_s: float | None = None
    queued: int | None = None
    open_asks: int | None = None
    loop_lag_s: float | None = None
    lease_left_s: float | None = None
    """None also if its lease has no end."""
    unanswered: str = ""
    """Why it said nothing, if it was asked."""


@dataclass(frozen=True, slots=True)
class ClientSeen:
    """One connected client."""

    incarnation: str
    status: str
    age_s: float | None


@dataclass(frozen=True, slots=True)
class RoleSeen:
    """The shards of one role. `lost` ones name an owner that is gone."""

    role: str
    shards: int
    serving: int = 0
    moving: int = 0
    lost: int = 0
    free: int = 0
    quarantined: int = 0


@dataclass(frozen=True, slots=True)
class WishSeen:
    """An operator's wish for a shard's home."""

    role: str
    shard: int
    node: str


@dataclass(frozen=True, slots=True)
class QuarantineSeen:
    """A shard that is put away, or an entity of a shard that is served (DX-20).

    It is tried again `pause_s` after it was put away, or after the coordinator changed.
    """

    role: str
    shard: int
    deaths: int
    type: str | None = None
    id: str | None = None
    tries: int = 0
    pause_s: float = 0.0


@dataclass(frozen=True, slots=True)
class OwnersLostSeen:
    """A shard that lost three owners in a row or more, while no entity can be blamed (DX-24)."""

    role: str
    shard: int
    deaths: int


@dataclass(frozen=True, slots=True)
class TypeGapSeen:
    """An entity type that some nodes of its role lack (DX-26).

    `needing` shards had messages for it at a node that lacks it; `waiting` ones are still there.
    """

    role: str
    type: str
    present_at: tuple[str, ...]
    missing_at: tuple[str, ...]
    needing: int
    waiting: int


@dataclass(frozen=True, slots=True)
class ClusterStatus:
    """A cluster at one revision of its store."""

    store: str
    cluster: str
    revision: int
    served: bool
    coordinator: str | None
    nodes: list[NodeSeen] = field(default_factory=list[NodeSeen])
    clients: list[ClientSeen] = field(default_factory=list[ClientSeen])
    roles: list[RoleSeen] = field(default_factory=list[RoleSeen])
    wishes: list[WishSeen] = field(default_factory=list[WishSeen])
    drains: list[str] = field(default_factory=list[str])
    quarantined: list[QuarantineSeen] = field(default_factory=list[QuarantineSeen])
    losing_owners: list[OwnersLostSeen] = field(default_factory=list[OwnersLostSeen])
    type_gaps: list[TypeGapSeen] = field(default_factory=list[TypeGapSeen])
    stuck: list[StuckSeen] = field(default_factory=list[StuckSeen])
    more_stuck: int = 0
    target: str | None = None
    audit: AuditRecord | None = None
    moved: str = ""
    """Why processes refuse this store: the cluster was copied; empty if they do not."""


@dataclass(frozen=True, slots=True)
class EntityPlace:
    """The home of an entity."""

    type: str
    id: str
    role: str
    shard: int
    shards: int
    state: str
    served: bool
    epoch: int
    node: str | None
    incarnation: str | None
    address: str | None
    to: str | None


class ClusterReader:
    """Reads one cluster in one store, as often as needed. Close it afterwards."""

    def __init__(self, whole: WholeStore, cluster: str) -> None:
        self.url, self.cluster = shown_url(whole.url), cluster
        self._whole = whole
        self._clock = SystemClock()

    async def picture(self) -> StoreSnapshot:
        """The cluster as stored now; raises `NoCluster`."""
        existing(self._whole.backend, self._whole.url)
        try:
            with told_if_slow(self.url):
                listing = await self._whole.store.list(b"")
        except (ConfigError, StoreError) as error:
            raise NoCluster(str(error)) from error
        picture = StoreSnapshot(part(listing, self.url, self.cluster))
        if picture.members.config is None and not picture.members.nodes:
            groups = bool(picture.under(GROUPS))
            hint = "; it has replica groups: domicile replica status" if groups else ""
            raise NoCluster(
                f"cluster {self.cluster!r} in {shown_url(self.url)} has no nodes yet and never had "
                f"any{hint or '; start one with `domicile run`'}"
            )
        return picture

    async def members(self) -> ClusterView:
        """Members and shard map, as stored now; raises `NoCluster`."""
        return (await self.picture()).members

    async def status(self) -> ClusterStatus:
        """Everything `domicile status` shows."""
        picture, now_s = await self.picture(), self.now_s()
        return summed_up(picture, self.url, self.cluster, self.dead, self.age, now_s)

    async def where(self, kind: str, id: str, role: str | None = None) -> EntityPlace:
        """The home of an entity; raises `NoCluster` or `LookupError`."""
        return place_of(await self.members(), EntityKey(kind, id), role, self.dead)

    async def close(self) -> None:
        """Let go of the store."""
        await self._whole.store.close()

    def now_s(self) -> float | None:
        """The time on the nodes' clock; None if they may be on other machines."""
        return None if self._whole.backend.reach == "network" else self._clock.now()

    def dead(self, incarnation: Incarnation) -> bool:
        """Whether the backend's health port proves that an incarnation is dead (L6)."""
        health = self._whole.health
        return health is not None and health.verdict(incarnation) is Verdict.DEAD

    def age(self, incarnation: Incarnation) -> float | None:
        """The age of an incarnation in seconds, if that can be known here."""
        health = self._whole.health
        return health.age_s(incarnation) if isinstance(health, TellsAge) else None


def existing(backend: Backend, url: str) -> None:
    """Raise `NoCluster` if it is clear at once that a store cannot be read. Creates nothing."""
    why = backend.missing(url)
    if why is not None:
        raise NoCluster(why)


def open_existing(url: str, by: str, *, reads_only: bool = False) -> WholeStore:
    """A store for a tool that `by` names in the store's history; raises `NoCluster`."""
    existing(store_backend(url), url)
    return open_whole_store(url, by=by, op_timeout_s=READ_S, reads_only=reads_only, creates=False)


def part(listing: Listing, url: str, cluster: str) -> Listing:
    """One cluster's part of a whole store, with keys without the cluster's prefix."""
    prefix = cluster.encode() + b"/"
    items = tuple(
        Item(item.key.removeprefix(prefix), item.value, item.created, item.revision)
        for item in listing.items
        if item.key.startswith(prefix)
    )
    if items:
        return Listing(listing.revision, items)
    others = sorted(
        {item.key.partition(b"/")[0].decode(errors="replace") for item in listing.items}
    )
    hint = f"it holds {', '.join(others)}: say --cluster {others[0]}" if others else "it is empty"
    raise NoCluster(f"no cluster {cluster!r} in {shown_url(url)}: {hint}")


def summed_up(
    picture: StoreSnapshot,
    url: str,
    cluster: str,
    dead: Callable[[Incarnation], bool],
    age: Callable[[Incarnation], float | None],
    now_s: float | None = None,
) -> ClusterStatus:
    """The status according to the store; a verdict of `dead` outweighs a record that has not
    expired.

    `now_s` is the time on the nodes' own clock, if it can be read here: then they run on this
    machine.
    """
    members = picture.members
    gone = {one: dead(one) for one in (*members.nodes, *members.clients)}
    living = [one for one in members.nodes if not gone[one]]
    roles, serving, moving = _shards(members, living)
    leader = members.leader
    nodes = [
        NodeSeen(
            record.node, inc, record.address, _standing(members, record, gone[inc]),
            leader is not None and leader.incarnation == inc, record.candidate,
            not record.roles, record.version, record.roles, record.types,
            serving[inc], moving[inc], age(inc),
        )
        for inc, record in members.nodes.items()
    ]  # fmt: skip
    late = {one: record for one in living if (record := stuck_record(picture, one)) is not None}
    clients = [ClientSeen(inc, "dead" if gone[inc] else "up", age(inc)) for inc in members.clients]
    return ClusterStatus(
        store=shown_url(url),
        cluster=cluster,
        revision=members.revision,
        served=bool(roles) and all(role.serving == role.shards for role in roles),
        coordinator=None if leader is None or gone.get(leader.incarnation, True) else leader.node,
        nodes=sorted(nodes, key=lambda seen: (seen.node, seen.incarnation)),
        clients=clients,
        roles=roles,
        wishes=[WishSeen(shard.role, shard.shard, node) for shard, node in members.wishes.items()],
        drains=list(members.drains),
        quarantined=_quarantined(members),
        losing_owners=[
            OwnersLostSeen(*shard, entry.deaths)
            for shard, entry in sorted(members.map)
            if loses_owners(entry)
        ],
        type_gaps=_type_gaps(members, living),
        stuck=[
            seen for one, record in late.items() for seen in stuck_seen(members, one, record, now_s)
        ],
        more_stuck=sum(record.more for record in late.values()),
        target=picture.target or None,
        audit=picture.last_audit(),
        moved=moved_text(members.moved),
    )


def moved_text(moved: MoveRecord | None) -> str:
    """Why processes refuse a store whose cluster was copied; empty if it was not."""
    if moved is None:
        return ""
    if moved.direction == "to":
        return f"to {moved.store}: processes refuse this store"
    return f"from {moved.store}, and not whole yet: processes refuse this store"


def _shards(
    members: ClusterView, living: Iterable[Incarnation]
) -> tuple[list[RoleSeen], Counter[str], Counter[str]]:
    homes = dict.fromkeys(living)
    config = {} if members.config is None else members.config.shards
    serving: Counter[str] = Counter()
    moving: Counter[str] = Counter()
    roles: list[RoleSeen] = []
    for role, shards in sorted(config.items()):
        states: Counter[str] = Counter()
        for number in range(shards):
            entry = members.map.get(ShardKey(role, number))
            state = _state(entry, entry.owner in homes)
            states[state] += 1
            if state == "serving":
                serving[entry.owner] += 1
            elif state == "moving":
                moving[entry.owner] += 1
        roles.append(
            RoleSeen(
                role,
                shards,
                states["serving"],
                states["moving"],
                states["lost"],
                states["free"],
                states["quarantined"],
            )
        )
    return roles, serving, moving


def _state(entry: Entry, lives: bool) -> str:
    """The state as stored, unless the owner is gone and no other is named yet."""
    return entry.state if entry.state in ("free", "quarantined") or lives else "lost"


def _quarantined(members: ClusterView) -> list[QuarantineSeen]:
    found: list[QuarantineSeen] = []
    for shard, entry in sorted(members.map):
        more = (entry.tries, pause_s(entry.tries))
        if entry.state == "quarantined":
            found.append(QuarantineSeen(*shard, entry.deaths, None, None, *more))
        else:
            found += [QuarantineSeen(*shard, entry.deaths, *one, *more) for one in entry.barred]
    return found


def _type_gaps(members: ClusterView, living: Iterable[Incarnation]) -> list[TypeGapSeen]:
    nodes = {inc: members.nodes[inc] for inc in living}
    types = {} if members.config is None else members.config.types
    needing: Counter[str] = Counter()
    waiting: Counter[str] = Counter()
    for shard, needed in members.needs.items():
        owner = nodes.get(members.map.get(shard).owner)
        for kind in needed:
            needing[kind] += 1
            waiting[kind] += owner is None or kind not in owner.types
    return [
        TypeGapSeen(*gap, needing[gap.kind], waiting[gap.kind])
        for gap in type_gaps(types, nodes.values(), needing)
    ]


def _standing(members: ClusterView, record: NodeRecord, dead: bool) -> str:
    if dead:
        return "dead"
    return "draining" if record.status == "up" and record.node in members.drains else record.status


def place_of(
    members: ClusterView, entity: EntityKey, role: str | None, dead: Callable[[Incarnation], bool]
) -> EntityPlace:
    """An entity's home according to the store; raises `LookupError` or `NoCluster`."""
    role = _role_of(members, entity.type, role)
    assert members.config is not None, "a role is known"
    shards = members.config.shards[role]
    shard = ShardKey(role, _shard_of(members.config, entity, shards))
    entry = members.map.get(shard)
    owner = members.nodes.get(entry.owner)
    lives = owner is not None and not dead(entry.owner)
    state = _state(entry, lives)
    to = members.nodes.get(entry.to)
    return EntityPlace(
        entity.type, entity.id, role, shard.shard, shards, state, state == "serving", entry.epoch,
        entry.previous or None if owner is None else owner.node, entry.owner or None,
        None if owner is None else owner.address, None if to is None else to.node,
    )  # fmt: skip


def _shard_of(config: ConfigRecord, entity: EntityKey, shards: int) -> int:
    known = config.types.get(entity.type)
    name = "xxh3" if known is None else known.shard_id
    function = NAMED.get(name)
    if function is None:
        raise LookupError(
            f"shards of {entity.type!r} are found by the program's own {name}, which is not known "
            "here; ask a process of that program"
        )
    return shard_of(entity, shards) if name == "xxh3" else function(entity.id, shards)


def _role_of(members: ClusterView, kind: str, role: str | None) -> str:
    if role is not None:
        known_roles = {} if members.config is None else members.config.shards
        if role not in known_roles:
            roles = ", ".join(sorted(known_roles)) or "none"
            raise LookupError(f"there is no role {role!r}; known ones: {roles}")
        return role
    serving = [record for record in members.nodes.values() if kind in record.types]
    if not serving:
        known = sorted({name: None for record in members.nodes.values() for name in record.types})
        if known:
            raise LookupError(
                f"no node serves entities of type {kind!r}; known ones: {', '.join(known)}"
            )
        # No node is registered, but the config still knows where the shards of a type are.
        stored = {} if members.config is None else members.config.types
        if kind not in stored:
            raise NoCluster(
                f"no node serves entities of type {kind!r}; no node is registered at all: start "
                "one with `domicile run`"
            )
        return stored[kind].role
    shared = [name for name in serving[0].roles if all(name in one.roles for one in serving)]
    if len(shared) != 1:
        raise LookupError(
            f"the nodes that serve {kind} have several roles; say which it is: "
            + " or ".join(f"--role {name}" for name in shared)
        )
    return shared[0]
