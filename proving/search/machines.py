"""Every state of every machine that a search has met, by number, and every step once.

A world holds numbers only. A step of a machine from a known state with a known event is looked
up; a new one is made on a copy. So worlds are cheap to copy and compare, although the machines
in them are the real ones. Called by the search's worlds; must never change a state it has
numbered.
"""

from __future__ import annotations

from collections.abc import Hashable
from functools import partial
from typing import Any, Generic, NamedTuple, TypeVar

from domicile.core.coordinator.events import (
    Changed,
    Commit,
    CommitDone,
    CoordinatorEvent,
    Heard,
    Listed,
    ReadBack,
    ReleasedBy,
    Reread,
    Resign,
    RevertAsked,
    Tell,
    Tick,
)
from domicile.core.coordinator.machine import Coordinator
from domicile.core.handoff.mailbox import Queued
from domicile.core.handoff.owner import (
    AnswerFlush,
    Discard,
    FlushAsked,
    Owner,
    PhaseChanged,
    SendBack,
)
from domicile.core.handoff.pending import (
    GiveUp,
    HoldLimits,
    Pending,
    SenderEffect,
    SendFlush,
    WriteRequest,
)
from domicile.core.handoff.sender import Sender
from domicile.core.handoff.tables import OwnerEvent, SenderState
from domicile.core.ids import Incarnation, LinkKey, ShardKey
from domicile.core.machines import Arm
from domicile.core.state.shardmap import Entry
from domicile.core.state.txn import Changes, Outcome, check_one_key
from proving.search.scenario import Scenario, Violation, entity_key, inc, process_of, shard_key
from proving.search.store import Snapshot
from proving.search.values import EPOCH_S, SOON_S, Steady, clone, freeze

T = TypeVar("T")


class SentMessage(Pending, eq=False, kw_only=True):
    """A message of the scenario at its sender."""

    message: int


class QueuedMessage(Queued, kw_only=True):
    """A message of the scenario at its owner."""

    message: int


SearchedOwner = Owner[QueuedMessage]
SearchedSender = Sender[SentMessage]
Effect = tuple[Any, ...]

FLUSH_LIMIT = 12
"""No sender of these small worlds needs more flushes; more means that it runs in circles."""


PING_S = 1.0
AGE_S = 20.0
"""How much later a coordinator goes on that has nothing to do soon: what was recent is not."""


class Numbers(Generic[T]):
    """Things by number, each once."""

    def __init__(self) -> None:
        self.items: list[T] = []
        self._numbers: dict[Hashable, int] = {}

    def of(self, item: T, key: Hashable | None = None) -> int:
        """The number of a thing; `key` stands for it if it can not be hashed itself."""
        mark = item if key is None else key
        number = self._numbers.get(mark)
        if number is None:
            number = self._numbers[mark] = len(self.items)
            self.items.append(item)
        return number

    def __getitem__(self, number: int) -> T:
        return self.items[number]


class Led(NamedTuple):
    """A coordinator, its clock, and when it wants a `Tick`."""

    machine: Coordinator
    now: float
    tick_at: float


class Asked(NamedTuple):
    """A commit under way. `leader_revision` names the leadership; 0: somebody else's."""

    commit: Commit
    leader_revision: int


class Landing(NamedTuple):
    """What a commit does to a store."""

    store: int
    outcome: Outcome
    changes: int
    entries: tuple[tuple[int, int, int], ...]
    """Changed shards with their old and new entries."""


class Machines:
    """The numbered states of one search."""

    def __init__(self, scenario: Scenario) -> None:
        self.sc = scenario
        self.owners: Numbers[SearchedOwner] = Numbers()
        self.senders: Numbers[SearchedSender] = Numbers()
        self.coordinators: Numbers[Led] = Numbers()
        self.entries: Numbers[Entry] = Numbers()
        self.stores: Numbers[Snapshot] = Numbers()
        self.changes: Numbers[Changes] = Numbers()
        self.commits: Numbers[Asked] = Numbers()
        self._steps: dict[Hashable, Any] = {}
        self._random = Steady(0)

    # owners

    def new_owner(self, node: int, shard: int) -> int:
        """An owner that has seen nothing."""
        return self._number_owner(self.sc.owner(shard_key(shard), inc(node), 100))

    def _number_owner(self, owner: SearchedOwner) -> int:
        return self.owners.of(owner, freeze(owner, 0.0, ordered=False))

    def owner(self, number: int, does: str, *args: Any) -> tuple[int, tuple[Effect, ...]]:
        """One step of an owner: its next state, and the effects as plain tuples."""
        known = self._steps.get((number, does, args))
        if known is None:
            owner = clone(self.owners[number])
            effects = tuple(self._owner_effects(owner, _drive_owner(self, owner, does, args)))
            known = self._steps[number, does, args] = (self._number_owner(owner), effects)
        return known

    def _owner_effects(self, owner: SearchedOwner, effects: Any) -> list[Effect]:
        out: list[Effect] = []
        for effect in effects:
            match effect:
                case QueuedMessage():
                    out.append(("start", *effect.source, effect.n, effect.epoch, effect.message))
                case SendBack(source, messages):
                    if {queued.source: None for queued in messages} != {source: None}:
                        raise Violation("H8: mail of several links in one Return")
                    ns = tuple(queued.n for queued in messages)
                    entry = self.entries.of(owner.entry)
                    out.append(("back", *source, "r", ns, entry, owner.released))
                case AnswerFlush(source, id):
                    entry = self.entries.of(owner.entry)
                    out.append(("back", *source, "k", id, entry, owner.released))
                case Discard(messages):
                    out += [("discard", *queued.source, queued.n) for queued in messages]
                case PhaseChanged(phase, epoch, does):
                    out.append(("phase", phase.value, epoch, does))
                case _:
                    pass
        return out

    # senders

    def new_sender(self, shard: int) -> int:
        """A sender that has seen and sent nothing."""
        holds = "overdue Flushed" in self.sc.faults
        limits = HoldLimits(100, 10_000, self.sc.window, 1.0 if holds else 1e9)
        sender = self.sc.sender(shard_key(shard), limits, _no_shard, _no_shard)
        return self._number_sender(sender)

    def _number_sender(self, sender: SearchedSender) -> int:
        sender.is_moving = sender.is_up = _no_shard
        check_sender(sender)
        return self.senders.of(sender, freeze(sender, 0.0, ordered=False))

    def sender(
        self, number: int, up: int, moving: int, does: str, *args: Any
    ) -> tuple[int, tuple[Effect, ...]]:
        """One step of a sender that knows which nodes are up and which shards move (bit sets)."""
        known = self._steps.get((number, up, moving, does, args))
        if known is None:
            sender: SearchedSender = clone(self.senders[number])
            sender.is_up, sender.is_moving = partial(_is_up, up), partial(_is_moving, moving)
            effects = tuple(map(_sender_effect, _drive_sender(self, sender, does, args)))
            known = (self._number_sender(sender), tuple(filter(None, effects)))
            self._steps[number, up, moving, does, args] = known
        return known

    # coordinators

    def new_coordinator(self, process: int, leader_revision: int) -> int:
        """A leadership that has seen nothing."""
        made = self.sc.coordinator(
            inc(process), leader_revision, self.sc.settings, self._random, sealing=self.sc.one_key
        )
        return self._number_coordinator(Led(made, EPOCH_S, float("inf")))

    def _number_coordinator(self, led: Led) -> int:
        return self.coordinators.of(led, freeze(tuple(led), led.now))

    def coordinator(
        self, number: int, heard: int, does: str, *args: Any
    ) -> tuple[int, tuple[Effect, ...]]:
        """One step of a coordinator whose pings some nodes (a bit set) have just answered."""
        known = self._steps.get((number, heard, does, args))
        if known is None:
            machine, now, tick_at = self.coordinators[number]
            machine = clone(machine)
            out: list[Effect] = []
            until = now
            if does == "tick":
                until = max(now, tick_at) + (AGE_S if tick_at > now + SOON_S else 0.0)
                tick_at = float("inf")
            while True:
                now = min(until, now + PING_S)
                for node in range(self.sc.nodes):
                    if heard >> node & 1:
                        tick_at = self._coordinate(machine, Heard(inc(node)), now, tick_at, out)
                if now == until:
                    break
            event = _event(self, does, args)
            tick_at = self._coordinate(machine, event, now, tick_at, out)
            after = self._number_coordinator(Led(machine, now, tick_at))
            known = self._steps[number, heard, does, args] = (after, tuple(out))
        return known

    def _coordinate(
        self,
        machine: Coordinator,
        event: CoordinatorEvent,
        now: float,
        tick_at: float,
        out: list[Effect],
    ) -> float:
        for effect in machine.step(event, now):
            match effect:
                case Commit():
                    out.append(("commit", effect))
                case ReadBack(txn, key):
                    out.append(("read", txn, key))
                case Tell(to, shard, entry):
                    out.append(("tell", process_of(to), shard.shard, self.entries.of(entry)))
                case Arm(at):
                    tick_at = at
                case Resign():
                    out.append(("resign",))
                case _:  # what asks for nothing that this world has
                    pass
        return tick_at

    # the store

    def land(self, store: int, commit: int) -> Landing:
        """What a commit does to a store."""
        known = self._steps.get(("land", store, commit))
        if known is None:
            before, asked = self.stores[store], self.commits[commit].commit
            if self.sc.one_key:
                check_one_key(asked.conditions, asked.writes)
            after, outcome, changes = before.commit(asked.conditions, asked.writes)
            changed = tuple(
                (shard, self.entries.of(old), self.entries.of(new))
                for shard, (old, new) in enumerate(
                    zip(before.entries(self.sc.shards), after.entries(self.sc.shards), strict=True)
                )
                if old != new
            )
            known = Landing(
                self.stores.of(after, after.key()), outcome, self.changes.of(changes), changed
            )
            self._steps["land", store, commit] = known
        return known


def _is_up(up: int, node: Incarnation) -> bool:
    return bool(up >> process_of(node) & 1)


def _is_moving(moving: int, shard: ShardKey) -> bool:
    return bool(moving >> shard.shard & 1)


def _no_shard(_: object) -> bool:
    return False


def _drive_owner(machines: Machines, owner: SearchedOwner, does: str, args: tuple[Any, ...]) -> Any:
    match does, args:
        case "see", (entry,):
            return owner.see(machines.entries[entry])
        case "request", (sender, link, n, entity, epoch, change, finishing, message):
            source = LinkKey(inc(sender), link)
            key = entity_key(entity)
            return owner.request(
                QueuedMessage(source, n, key, epoch, change, finishing, False, message=message)
            )
        case "flush", (sender, link, id):
            return owner.flush(FlushAsked(LinkKey(inc(sender), link), id))
        case "gone", (sender, link):
            owner.link_gone(LinkKey(inc(sender), link))
            return ()
        case "start", (entity,):
            return (owner.start(entity_key(entity)),)
        case "finish", (entity,):
            owner.finish(entity_key(entity), False)
            return ()
        case _:
            return owner.happen(OwnerEvent.EMPTY)


def _drive_sender(
    machines: Machines, sender: SearchedSender, does: str, args: tuple[Any, ...]
) -> Any:
    sc = machines.sc
    match does, args:
        case "see", (entry,):
            return sender.see(machines.entries[entry], 0.0)
        case "submit", (message,):
            return sender.submit(_sent(sc, sender.number(), message), 0.0)
        case "returned", (node, ns, entry, released):
            return sender.returned(inc(node), ns, machines.entries[entry], released, 0.0)
        case "flushed", (node, id, entry, released):
            return sender.flushed(inc(node), id, machines.entries[entry], released, 0.0)
        case "begun", (node, n):
            return sender.begun(inc(node), n, 0.0)
        case "answered", (node, n):
            return sender.answered(inc(node), n, 0.0)[1]
        case "lost", (node, unsent):
            return sender.link_lost(inc(node), unsent, 0.0)
        case "wave", ():
            return sender.tick(sender.wave_at)
        case "hold", ():
            return sender.tick(sender.flush_at + sender.limits.hold_timeout_s)
        case "withdraw", (n,):
            messages = [*sender.queue, *sender.written.values()]
            pending = next(pending for pending in messages if pending.n == n)
            unwritten, effects = sender.withdraw(pending, 0.0)
            return (("withdrawn", pending.message, unwritten), *effects)
        case _:
            return sender.look(0.0)


def _sent(sc: Scenario, n: int, message: int) -> SentMessage:
    msg = sc.messages[message]
    chain = sc.chain(message) if msg.ask else ()
    return SentMessage(n, entity_key(msg.entity), msg.ask, chain, 1, message=message)


def _sender_effect(effect: SenderEffect[SentMessage] | Effect) -> Effect:
    match effect:
        case WriteRequest(pending, to, epoch, change, finishing):
            entity = int(pending.entity.id)
            item = ("q", pending.n, entity, epoch, change, finishing, pending.message)
            return ("send", process_of(to), item)
        case SendFlush(to, id):
            return ("send", process_of(to), ("f", id))
        case GiveUp(pending):
            return ("told", pending.message)
        case ("withdrawn", *_):
            return tuple(effect)
        case _:
            return ()


def _event(machines: Machines, does: str, args: tuple[Any, ...]) -> CoordinatorEvent:
    match does, args:
        case "list", (store,):
            return Listed(machines.stores[store].listing())
        case "change", (changes,):
            return Changed(machines.changes[changes])
        case "released", (node, shard, epoch):
            return ReleasedBy(inc(node), shard_key(shard), epoch)
        case "asked", (node, shard, epoch):
            return RevertAsked(inc(node), shard_key(shard), epoch)
        case "done", (txn, outcome):
            return CommitDone(txn, outcome)
        case "reread", (txn, item):
            return Reread(txn, item)
        case _:
            return Tick()


def check_sender(sender: SearchedSender) -> None:
    """What must hold of a sender between any two steps."""
    numbers = [pending.n for pending in sender.queue]
    if numbers != sorted(dict.fromkeys(numbers)):
        raise Violation(f"H3: the queue is out of order: {numbers}")
    if any(pending.to is not None or pending.resolved for pending in sender.queue):
        raise Violation("H1: a written or resolved message is queued")
    if sender.open != sum(not pending.started for pending in sender.written.values()):
        raise Violation("I6: the window does not count what is written and unstarted")
    # N4: what a running handler waits for is written although the window is full.
    within = sum(not pending.started and not pending.beyond for pending in sender.written.values())
    if within > sender.limits.window:
        raise Violation(f"I6: the window is overrun: {within}")
    if sender.held_bytes != sum(pending.size_bytes for pending in sender.queue):
        raise Violation("I6: held_bytes does not count what is queued")
    if (sender.state is SenderState.UNBOUND) != (sender.key is None):
        raise Violation(f"H2: {sender.state} with key {sender.key}")
    if (sender.state is SenderState.FLUSHING) != (sender.flush_id != 0):
        raise Violation(f"H4: {sender.state} with flush {sender.flush_id}")
    if sender.last_flush > FLUSH_LIMIT:
        raise Violation("H4: it flushes in circles")
