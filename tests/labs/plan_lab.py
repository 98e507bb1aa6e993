"""Hand-made views for the planner's tests, and a cluster that carries out what it plans."""

from __future__ import annotations

from collections.abc import Mapping

from msgspec.structs import replace

from domicile.core.ids import NOBODY, EntityKey, Incarnation, ShardKey
from domicile.core.placement.model import Move, Own, Plan, PlanInput, Revert, RoleInput
from domicile.core.placement.plan import plan
from domicile.core.state.records import NodeRecord
from domicile.core.state.shardmap import Entry, Suspicion
from domicile.settings import Settings

A, B, C, D = (Incarnation(name) for name in "abcd")
NOW = 100.0
SETTINGS = Settings()

Part = (
    Mapping[int, int]
    | Mapping[int, str]
    | Mapping[int, float]
    | Mapping[int, tuple[str, ...]]
    | Mapping[int, EntityKey | None]
    | tuple[int, ...]
    | bool
    | None
)


def node(
    inc: Incarnation,
    status: str = "up",
    roles: tuple[str, ...] = ("r",),
    version: str = "",
    capacity: float = 1.0,
    types: tuple[str, ...] = (),
) -> NodeRecord:
    return NodeRecord(
        f"node-{inc}", inc, f"{inc}:1", roles, types, 6.0, True, capacity, version, status
    )


def serving(owner: Incarnation, epoch: int = 1) -> Entry:
    return Entry(owner, epoch, "serving", NOBODY, epoch, f"node-{owner}")


def moving(owner: Incarnation, to: Incarnation, epoch: int = 1) -> Entry:
    return Entry(owner, epoch, "moving", to, epoch + 1, f"node-{owner}")


def seen(
    entries: list[Entry],
    *nodes: NodeRecord,
    unheard: tuple[Incarnation, ...] = (),
    drains: tuple[str, ...] = (),
    balance: bool = False,
    strategy: str = "least_shards",
    target: str = "",
    known_since: dict[Incarnation, float] | None = None,
    departing_since: dict[Incarnation, float] | None = None,
    **part: Part,
) -> PlanInput:
    records = {record.incarnation: record for record in nodes}
    heard_at = {inc: NOW - (2.5 if inc in unheard else 0.5) for inc in records}
    role = RoleInput(tuple(entries), **part)  # type: ignore[arg-type]
    return PlanInput(
        Incarnation("me"), records, heard_at, drains, {"r": role}, balance, strategy, target,
        known_since or {}, departing_since or {},
    )  # fmt: skip


def decide(
    entries: list[Entry],
    *nodes: NodeRecord,
    unheard: tuple[Incarnation, ...] = (),
    drains: tuple[str, ...] = (),
    balance: bool = False,
    strategy: str = "least_shards",
    target: str = "",
    settings: Settings = SETTINGS,
    known_since: dict[Incarnation, float] | None = None,
    departing_since: dict[Incarnation, float] | None = None,
    **part: Part,
) -> Plan:
    view = seen(
        entries,
        *nodes,
        unheard=unheard,
        drains=drains,
        balance=balance,
        strategy=strategy,
        target=target,
        known_since=known_since,
        departing_since=departing_since,
        **part,
    )
    return plan(view, NOW, settings)


def own(shard: int, owner: Incarnation, gone: bool = False, deaths: int | None = None) -> Own:
    """A death is a strike; a release is none."""
    count = int(gone) if deaths is None else deaths
    return Own(ShardKey("r", shard), owner, gone, Suspicion(count))


def move(shard: int, to: Incarnation) -> Move:
    return Move(ShardKey("r", shard), to)


def revert(shard: int) -> Revert:
    return Revert(ShardKey("r", shard))


class World:
    """Carries out plans as a coordinator would: entries, moves, releases, and who moved how often.

    Every plan is held to C4 and to one decision for a shard.
    """

    def __init__(
        self,
        entries: list[Entry],
        nodes: list[NodeRecord],
        *,
        strategy: str = "least_shards",
        settings: Settings = SETTINGS,
    ) -> None:
        self.entries = list(entries)
        self.nodes = {record.incarnation: record for record in nodes}
        self.strategy, self.settings = strategy, settings
        self.target = ""
        self.drains: tuple[str, ...] = ()
        self.silent: tuple[Incarnation, ...] = ()
        self.needs: dict[int, tuple[str, ...]] = {}
        self.wishes: dict[int, str] = {}
        self.released: dict[int, int] = {}
        self.changes = [0] * len(entries)
        """By shard: how often it got another owner."""
        self.moves = [0] * len(entries)
        """By shard: how often it was asked to move."""
        self.peak: dict[Incarnation, int] = {}
        """The most shards that each node ever had."""

    def plan(self, *, balance: bool = True) -> Plan:
        """Decide, check and carry out."""
        part = RoleInput(
            tuple(self.entries), wishes=self.wishes, released=dict(self.released), needs=self.needs
        )
        heard_at = {inc: NOW - (9.0 if inc in self.silent else 0.1) for inc in self.nodes}
        view = PlanInput(
            NOBODY,
            self.nodes,
            heard_at,
            self.drains,
            {"r": part},
            balance,
            self.strategy,
            self.target,
        )
        result = plan(view, NOW, self.settings)
        shards = [one.shard for one in result.decisions]
        assert len(shards) == len(dict.fromkeys(shards)), "one decision for a shard"
        for one in result.owns:
            self._own(one.shard.shard, one.owner)
        for one in result.moves:
            shard, entry = one.shard.shard, self.entries[one.shard.shard]
            assert entry.state == "serving"
            assert one.to != entry.owner
            self.moves[shard] += 1
            self.entries[shard] = replace(entry, state="moving", to=one.to)
        for one in result.reverts:
            shard = one.shard.shard
            self.entries[shard] = replace(self.entries[shard], state="serving", to=NOBODY)
        for node, count in self.loads().items():
            self.peak[node] = max(count, self.peak.get(node, 0))
        return result

    def _own(self, shard: int, owner: Incarnation) -> None:
        entry = self.entries[shard]
        gone = entry.owner not in self.nodes
        assert gone or self.released.get(shard) == entry.epoch, "C4: released, or the owner is gone"
        assert self.nodes[owner].status == "up"
        assert owner not in self.silent
        self.changes[shard] += owner != entry.owner
        self.released.pop(shard, None)
        record = self.nodes[owner]
        self.entries[shard] = Entry(
            owner, entry.epoch + 1, "serving", NOBODY, entry.change + 1, record.node
        )

    def release(self, *shards: int) -> None:
        """The owners of these moving shards let go; without any, all do."""
        for shard in shards or range(len(self.entries)):
            entry = self.entries[shard]
            if entry.state == "moving" and entry.owner in self.nodes:
                self.released[shard] = entry.epoch

    def rest(self, rounds: int = 1_000) -> int:
        """Go on until a plan wants nothing and nothing moves; how many rounds that took."""
        for count in range(rounds):
            result = self.plan()
            if not result.decisions and not self.released:
                return count
            self.release()
        raise AssertionError("it never comes to rest")

    def stop(self, node: Incarnation) -> None:
        """A node leaves: it is emptied, then its record goes."""
        self.nodes[node] = replace(self.nodes[node], status="leaving")
        self.rest()
        assert node not in [entry.owner for entry in self.entries]
        del self.nodes[node]
        self.rest()

    def loads(self) -> dict[Incarnation, int]:
        """Shards by owner."""
        counts = dict.fromkeys(self.nodes, 0)
        for entry in self.entries:
            if entry.owner in counts:
                counts[entry.owner] += 1
        return counts
