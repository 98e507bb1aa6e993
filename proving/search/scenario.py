"""What may happen in one search: a small cluster, its messages, its operator and its faults.

Made by whoever starts a search. Data only: a scenario knows nothing of how it is searched.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

from domicile.core.coordinator.machine import Coordinator
from domicile.core.handoff.owner import Owner
from domicile.core.handoff.sender import Sender
from domicile.core.ids import EntityKey, Incarnation, ShardKey
from domicile.settings import Settings

ROLE = "r"
NEVER_S = 1e8
"""A pause that no search waits for: keeps periodic work of a coordinator out of it."""

SETTINGS = Settings(balance_interval_s=NEVER_S, evict_after_s=NEVER_S)

FAULTS = (
    "commit unknown, landed", "commit unknown, lands later", "commit unknown, lost", "crash",
    "leader deposed", "leader dies", "link lost", "overdue Flushed", "Released again",
    "Told lost", "watch broken",
)  # fmt: skip
"""The kinds of faults, of which a search allows one at a time unless its scenario says more."""


class Violation(AssertionError):
    """A step that a rule forbids, or a state from which nothing leads on."""


class Msg(NamedTuple):
    """One message: to which entity, from which process (roots) or within which message."""

    entity: int
    by: int = -1
    parent: int = -1
    ask: bool = False


@dataclass(frozen=True)
class Scenario:
    """Processes are numbered: first nodes, then clients, then managers."""

    name: str
    messages: tuple[Msg, ...]
    entities: tuple[int, ...] = (0,)
    """The shard of each entity."""
    homes: tuple[int, ...] = (0,)
    """The first owner of each shard; -1: it is free at first."""
    nodes: int = 2
    clients: int = 1
    managers: int = 0
    leader: int = 0
    """The process that coordinates at first."""
    candidates: tuple[int, ...] = (0, 1)
    """Processes that campaign once the leader key is gone."""
    running: tuple[int, ...] = ()
    """Root messages that run from the beginning."""
    wishes: tuple[tuple[int, int], ...] = ((0, 1),)
    """What an operator wants in turn: a shard, and its node; -1 takes the wish back."""
    drained: int = -1
    """A node that the operator wants empty at last, if any."""
    reverts: int = 0
    """How often an owner misses its drain deadline and asks for its shard back (H10)."""
    notes: int = 0
    """How often an owner leaves its release in the store (H10)."""
    withdrawals: int = 0
    """How often a caller of an ask waits no more."""
    faults: tuple[str, ...] = ()
    most_faults: int = 1
    window: int = 100
    starts_travel: bool = False
    """Whether `Started` takes its time, too; otherwise a sender knows at once."""
    swift: bool = False
    """Whether a manager does at once all it can do, so that only nodes and clients interleave."""
    flush_overtakes: bool = False
    one_key: bool = False
    """Whether the store commits one key at a time, so that leaders seal blocks (S8)."""
    owner: type[Owner[Any]] = Owner
    sender: type[Sender[Any]] = Sender
    coordinator: type[Coordinator] = Coordinator
    settings: Settings = SETTINGS

    def __post_init__(self) -> None:
        unknown = [fault for fault in self.faults if fault not in FAULTS]
        if unknown:
            raise ValueError(f"{self.name}: no fault is called {unknown[0]!r}; see FAULTS")
        if self.swift and self.leader < self.senders:
            raise ValueError(f"{self.name}: only a manager can be swift; a node has its own watch")

    @property
    def processes(self) -> int:
        """Everyone who watches the store."""
        return self.nodes + self.clients + self.managers

    @property
    def operations(self) -> int:
        """How often the operator does something."""
        return len(self.wishes) + (self.drained >= 0)

    @property
    def senders(self) -> int:
        """Processes that send: all but managers."""
        return self.nodes + self.clients

    @cached_property
    def shards(self) -> int:
        """How many shards there are."""
        return len(self.homes)

    @cached_property
    def nested(self) -> bool:
        """Whether handlers ask others."""
        return any(message.parent >= 0 for message in self.messages)

    def shard(self, message: int) -> int:
        """The shard to which a message goes."""
        return self.entities[self.messages[message].entity]

    def children(self, message: int) -> list[int]:
        """What a message's handler sends."""
        return [m for m, msg in enumerate(self.messages) if msg.parent == message]

    def chain(self, message: int) -> tuple[ShardKey, ...]:
        """The shards of the handlers that wait for an ask (N1)."""
        shards: list[ShardKey] = []
        parent = self.messages[message].parent
        while parent >= 0:
            shards.append(shard_key(self.shard(parent)))
            parent = self.messages[parent].parent
        return tuple(reversed(shards))


def shard_key(shard: int) -> ShardKey:
    """The key of a numbered shard."""
    return ShardKey(ROLE, shard)


def inc(process: int) -> Incarnation:
    """The incarnation of a numbered process."""
    return Incarnation(f"p{process}")


def process_of(incarnation: str) -> int:
    """The inverse of `inc`."""
    return int(incarnation[1:])


def entity_key(entity: int) -> EntityKey:
    """The key of a numbered entity."""
    return EntityKey("t", str(entity))
