"""A small world around the real owner and sender machines, to be walked through step by step.

Processes, FIFO links and a toy leader; every message start, finish, delivery and map entry is a
step of its own, so that an exploration reaches every interleaving. Machines are copied when a
step changes them; a state's `key` says all that its future depends on.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any, NamedTuple

from handoff_machines import (
    Violation,
    check_sender,
    clone_owner,
    clone_sender,
    owner_key,
    sender_key,
)

from domicile.core.handoff import Bond, OwnerEvent, Phase
from domicile.core.ids import EntityKey, Incarnation, ShardKey
from domicile.core.owner import (
    AnswerFlush,
    Discard,
    FlushAsked,
    Mail,
    Owner,
    PhaseChanged,
    SendBack,
    Source,
)
from domicile.core.owner import Effect as OwnerEffect
from domicile.core.sender import Effect as SenderEffect
from domicile.core.sender import GiveUp, Letter, Limits, Sender, SendFlush, Write
from domicile.core.shardmap import Entry

Action = tuple[Any, ...]


class Msg(NamedTuple):
    """One message: to which entity, from which process (roots) or within which message."""

    entity: int
    by: int = -1
    parent: int = -1
    ask: bool = False


@dataclass(frozen=True)
class Scenario:
    """What can happen. Process 0 … `nodes` - 1 are nodes, the others clients."""

    messages: tuple[Msg, ...]
    entities: tuple[int, ...] = (0,)
    """The shard of each entity."""
    homes: tuple[int, ...] = (0,)
    """The first owner of each shard."""
    moving: tuple[int, ...] = (0,)
    """The shards that may move."""
    nodes: int = 2
    clients: int = 1
    running: tuple[int, ...] = ()
    """Root messages that run from the beginning."""
    moves: int = 2
    reverts: int = 1
    losses: int = 0
    holds: int = 0
    withdrawals: int = 0
    window: int = 100
    mailbox: int = 100
    owner: type[Owner] = Owner
    sender: type[Sender] = Sender
    flush_overtakes: bool = False

    @property
    def processes(self) -> int:
        return self.nodes + self.clients

    @property
    def faulty(self) -> bool:
        return bool(self.losses or self.holds)

    def chain(self, message: int) -> tuple[ShardKey, ...]:
        shards: list[ShardKey] = []
        parent = self.messages[message].parent
        while parent >= 0:
            shards.append(shard_key(self.entities[self.messages[parent].entity]))
            parent = self.messages[parent].parent
        return tuple(reversed(shards))

    def children(self, message: int) -> list[int]:
        return [m for m, msg in enumerate(self.messages) if msg.parent == message]

    def shard(self, message: int) -> int:
        return self.entities[self.messages[message].entity]


def shard_key(shard: int) -> ShardKey:
    return ShardKey("r", shard)


def inc(process: int) -> Incarnation:
    return Incarnation(f"p{process}")


def process_of(incarnation: str) -> int:
    return int(incarnation[1:])


def entity_key(entity: int) -> EntityKey:
    return EntityKey("t", str(entity))


class World:
    """One state. `enabled` lists the steps, `take` makes one in place, `copy` comes first."""

    def __init__(self, scenario: Scenario) -> None:
        sc = self.sc = scenario
        shards, processes = len(sc.homes), sc.processes
        first = [Entry(inc(home), 1, "serving", change=1) for home in sc.homes]
        self.history: list[tuple[Entry, ...]] = [(entry,) for entry in first]
        self.known = [0] * (processes * shards)
        limits = Limits(100, 10_000, sc.window, 1.0 if sc.holds else 1e9)
        self.owners = [
            sc.owner(shard_key(s), inc(node), sc.mailbox)
            for node in range(sc.nodes)
            for s in range(shards)
        ]
        self.senders = [
            sc.sender(shard_key(s), limits, lambda _: False, lambda _: True)
            for _ in range(processes)
            for s in range(shards)
        ]
        self.keys: list[tuple[Any, ...] | None] = [None] * (len(self.owners) + len(self.senders))
        self.up: list[tuple[Any, ...]] = [()] * (processes * sc.nodes)
        self.down: list[tuple[Any, ...]] = [()] * (processes * sc.nodes)
        self.link = [0] * (processes * sc.nodes)
        self.unnoticed: tuple[tuple[int, int, int], ...] = ()
        self.scripts = [
            tuple(m for m, msg in enumerate(sc.messages) if msg.by == p and m not in sc.running)
            for p in range(processes)
        ]
        self.running: tuple[tuple[int, int], ...] = ()
        self.started: dict[int, None] = {}
        self.answered: dict[int, None] = {}
        self.told: dict[int, None] = {}
        self.withdrawn: dict[int, None] = {}
        self.last: dict[tuple[str, int], int] = {}
        self.released: tuple[tuple[int, int, int], ...] = ()
        self.budget = [sc.moves, sc.reverts, sc.losses, sc.holds, sc.withdrawals]
        for p in range(processes):
            for s in range(shards):
                self._tell(p, s, first[s])
        for message in sc.running:
            home = sc.homes[sc.shard(message)]
            self._submit(home, message)
            self._deliver_up(home, home)
            self._start(home, sc.messages[message].entity)
            while self.down[home * sc.nodes + home]:
                self._deliver_down(home, home)

    # machines, copied before they change

    def copy(self) -> World:
        new = object.__new__(type(self))
        new.sc = self.sc
        new.history, new.known = list(self.history), list(self.known)
        new.owners, new.senders, new.keys = list(self.owners), list(self.senders), list(self.keys)
        new.up, new.down, new.link = list(self.up), list(self.down), list(self.link)
        new.unnoticed, new.running, new.released = self.unnoticed, self.running, self.released
        new.scripts, new.budget = list(self.scripts), list(self.budget)
        new.started, new.answered = dict(self.started), dict(self.answered)
        new.told, new.withdrawn = dict(self.told), dict(self.withdrawn)
        new.last = dict(self.last)
        return new

    def owner(self, node: int, shard: int) -> Owner:
        index = node * len(self.history) + shard
        owner = self.owners[index] = clone_owner(self.owners[index])
        self.keys[index] = None
        return owner

    def sender(self, process: int, shard: int) -> Sender:
        index = process * len(self.history) + shard
        sender = self.senders[index] = clone_sender(self.senders[index])
        self.keys[len(self.owners) + index] = None
        sender.is_moving = lambda other: self._entry(process, other.shard).state == "moving"
        return sender

    def _entry(self, process: int, shard: int) -> Entry:
        return self.history[shard][self.known[process * len(self.history) + shard]]

    def key(self) -> tuple[Any, ...]:
        for index, known in enumerate(self.keys):
            if known is None:
                split = len(self.owners)
                self.keys[index] = (
                    owner_key(self.owners[index])
                    if index < split
                    else sender_key(self.senders[index - split])
                )
        return (
            tuple(self.history), tuple(self.known), tuple(self.keys), tuple(self.up),
            tuple(self.down), tuple(self.link), self.unnoticed, tuple(self.scripts), self.running,
            tuple(sorted(self.started)), tuple(sorted(self.answered)), tuple(sorted(self.told)),
            tuple(sorted(self.withdrawn)), self.released, tuple(self.budget),
        )  # fmt: skip

    # steps

    def enabled(self) -> list[Action]:
        sc = self.sc
        shards = len(self.history)
        out: list[Action] = []
        for s, entries in enumerate(self.history):
            entry = entries[-1]
            home = process_of(entry.owner)
            if (s, home, entry.epoch) in self.released:
                out.append(("commit", s))
            elif entry.state == "moving" and self.budget[1]:
                out.append(("revert", s))
            if entry.state == "serving" and self.budget[0] and s in sc.moving:
                out.append(("move", s))
            for p in range(sc.processes):
                known = self.known[p * shards + s]
                if known < len(entries) - 1:
                    out.append(("learn", p, s, known + 1))
                if known < len(entries) - 2:
                    out.append(("learn", p, s, len(entries) - 1))
        for index, owner in enumerate(self.owners):
            node, s = divmod(index, shards)
            if owner.phase is Phase.DRAINING and not owner.boxes:
                out.append(("empty", node, s))
            if owner.admits:
                out += [
                    ("start", node, int(entity.id))
                    for entity, box in owner.boxes.items()
                    if box.ready()
                ]
        for message, node in self.running:
            if all(not sc.messages[c].ask or c in self.answered for c in sc.children(message)):
                out.append(("finish", node, message))
        for p in range(sc.processes):
            if self.scripts[p]:
                out.append(("submit", p))
            for o in range(sc.nodes):
                if self.up[p * sc.nodes + o]:
                    out.append(("up", p, o))
                if self.down[p * sc.nodes + o]:
                    out.append(("down", p, o))
        out += [("notice", *gone) for gone in self.unnoticed]
        for index, sender in enumerate(self.senders):
            p, s = divmod(index, shards)
            if 0 < sender.wave_at < 1e6:
                out.append(("wave", p, s))
            if self.budget[3] and sender.bond is Bond.FLUSHING:
                out.append(("hold", p, s))
            if self.budget[2] and sender.key is not None and process_of(sender.key.owner) != p:
                out.append(("lose", p, process_of(sender.key.owner), False))
                out.append(("lose", p, process_of(sender.key.owner), True))
            if self.budget[4]:
                letters = [*sender.queue, *sender.written.values()]
                out += [
                    ("withdraw", p, s, letter.n)
                    for letter in letters
                    if letter.ask and not letter.resolved
                ]
        return out

    def take(self, action: Action) -> None:
        verb, *rest = action
        getattr(self, f"_{verb}")(*rest)

    # the leader

    def _store(self, s: int, **changes: Any) -> None:
        entry = self.history[s][-1]
        fields = {name: getattr(entry, name) for name in ("owner", "epoch", "state", "to")}
        self.history[s] = (
            *self.history[s], Entry(**{**fields, **changes}, change=entry.change + 1),
        )  # fmt: skip

    def _move(self, s: int) -> None:
        self.budget[0] -= 1
        home = process_of(self.history[s][-1].owner)
        self._store(s, state="moving", to=inc((home + 1) % self.sc.nodes))

    def _revert(self, s: int) -> None:
        self.budget[1] -= 1
        self._store(s, state="serving", to=inc(0))

    def _commit(self, s: int) -> None:
        entry = self.history[s][-1]
        home = process_of(entry.owner)
        to = process_of(entry.to) if entry.state == "moving" else (home + 1) % self.sc.nodes
        self._store(s, owner=inc(to), epoch=entry.epoch + 1, state="serving", to=inc(0))

    # map entries

    def _learn(self, p: int, s: int, index: int) -> None:
        self._tell(p, s, self.history[s][index])

    def _tell(self, p: int, s: int, entry: Entry) -> None:
        """An entry reaches a process: its owner machine, its sender, and who else waits (N3)."""
        index = p * len(self.history) + s
        self.known[index] = max(self.known[index], entry.change - 1)
        if p < self.sc.nodes:
            self._as_owner(p, s, lambda owner: owner.see(entry))
        self._as_sender(p, s, lambda sender: sender.see(entry, 0.0))
        for other in range(len(self.history)):
            if other != s and self.senders[p * len(self.history) + other].queue:
                self._as_sender(p, other, lambda sender: sender.look(0.0))

    # owners

    def _as_owner(self, node: int, s: int, do: Callable[[Owner], Iterable[OwnerEffect]]) -> None:
        owner = self.owner(node, s)
        for effect in do(owner):
            match effect:
                case SendBack(source, mails):
                    if len({m.source for m in mails}) != 1:
                        raise Violation("mail of several links in one Return")
                    ns = tuple(mail.n for mail in mails)
                    self._answer(node, source, ("r", s, ns, owner.entry, owner.released))
                case AnswerFlush(source, id):
                    self._answer(node, source, ("k", s, id, owner.entry, owner.released))
                case Discard(mails):
                    for mail in mails:
                        current = self.link[process_of(mail.source.sender) * self.sc.nodes + node]
                        if mail.source.link == str(current):
                            raise Violation(f"mail {mail.n} of a living link was discarded")
                case PhaseChanged(phase, epoch, does):
                    self._phase(node, s, phase, epoch, does)
                case _:
                    pass

    def _phase(self, node: int, s: int, phase: Phase, epoch: int, does: str) -> None:
        if phase is Phase.RELEASED and (s, node, epoch) not in self.released:
            self.released = (*self.released, (s, node, epoch))
        if phase is Phase.OPEN:
            for index, other in enumerate(self.owners):
                peer, shard = divmod(index, len(self.history))
                if shard == s and peer != node and other.admits:
                    raise Violation(f"two homes: {node} opens shard {s} while {peer} has it")

    def _answer(self, node: int, source: Source, item: tuple[Any, ...]) -> None:
        index = process_of(source.sender) * self.sc.nodes + node
        if source.link == str(self.link[index]):
            self.down[index] = (*self.down[index], item)

    def _empty(self, node: int, s: int) -> None:
        self._as_owner(node, s, lambda owner: owner.happen(OwnerEvent.EMPTY))

    def _notice(self, p: int, o: int, link: int) -> None:
        self.unnoticed = tuple(gone for gone in self.unnoticed if gone != (p, o, link))
        for s in range(len(self.history)):
            self.owner(o, s).link_gone(Source(inc(p), str(link)))

    def _start(self, node: int, entity: int) -> None:
        s = self.sc.entities[entity]
        mail = self.owner(node, s).start(entity_key(entity))
        assert mail is not None
        message: int = mail.load
        if message in self.started:
            raise Violation(f"message {message} runs twice")
        if message in self.withdrawn:
            raise Violation(f"message {message} was withdrawn and runs")
        who = (mail.source.sender, entity)
        if mail.n <= self.last.get(who, 0):
            raise Violation(f"reordered: {mail.n} after {self.last[who]}")
        entry = self.history[s][-1]
        if mail.epoch != entry.epoch or process_of(entry.owner) != node:
            raise Violation(f"message {message} runs under epoch {mail.epoch}, now {entry}")
        for other, peer in self.running:
            if self.sc.shard(other) == s and peer != node:
                raise Violation(f"two homes run shard {s}")
        self.last[who] = mail.n
        self.started[message] = None
        self.running = (*self.running, (message, node))
        self._answer(node, mail.source, ("s", s, mail.n))
        for child in self.sc.children(message):
            self._submit(node, child)

    def _finish(self, node: int, message: int) -> None:
        s = self.sc.shard(message)
        self.owner(node, s).finish(entity_key(self.sc.messages[message].entity), False)
        self.running = tuple(job for job in self.running if job[0] != message)
        self._reply(node, s, message)

    def _reply(self, node: int, s: int, message: int) -> None:
        """Replies of asks are immediate, which leaves out nothing that order depends on."""
        if not self.sc.messages[message].ask:
            return
        for index, sender in enumerate(self.senders):
            p, shard = divmod(index, len(self.history))
            letter = next((m for m in sender.written.values() if m.load == message), None)
            if shard == s and letter is not None and letter.to == inc(node):
                self._answered(p, s, node, letter.n)
                self.answered[message] = None

    def _answered(self, p: int, s: int, node: int, n: int) -> None:
        self._as_sender(p, s, lambda sender: sender.answered(inc(node), n, 0.0)[1])

    def _up(self, p: int, o: int) -> None:
        self._deliver_up(p, o)

    def _deliver_up(self, p: int, o: int) -> None:
        index = p * self.sc.nodes + o
        item, self.up[index] = self.up[index][0], self.up[index][1:]
        source = Source(inc(p), str(self.link[index]))
        if item[0] == "f":
            self._as_owner(o, item[1], lambda owner: owner.flush(FlushAsked(source, item[2])))
            return
        _, s, n, epoch, change, finishing, message = item
        entity = entity_key(self.sc.messages[message].entity)
        mail = Mail(source, n, entity, epoch, change, finishing, False, message)
        self._as_owner(o, s, lambda owner: owner.request(mail))

    # senders

    def _as_sender(self, p: int, s: int, do: Callable[[Sender], Iterable[SenderEffect]]) -> None:
        sender = self.sender(p, s)
        effects = tuple(do(sender))
        for effect in effects:
            match effect:
                case Write(letter, to, epoch, change, finishing):
                    item = ("q", s, letter.n, epoch, change, finishing, letter.load)
                    self._send(p, process_of(to), item)
                case SendFlush(to, id):
                    self._send(p, process_of(to), ("f", s, id))
                case GiveUp(letter):
                    if not self.sc.faulty:
                        raise Violation(f"message {letter.load} was given up without a fault")
                    self.told[letter.load] = None
                case _:
                    pass
        check_sender(sender)

    def _send(self, p: int, o: int, item: tuple[Any, ...]) -> None:
        index = p * self.sc.nodes + o
        if self.sc.flush_overtakes and item[0] == "f":
            self.up[index] = (item, *self.up[index])
        else:
            self.up[index] = (*self.up[index], item)

    def _submit(self, p: int, message: int = -1) -> None:
        sc = self.sc
        if message < 0:
            message, *rest = self.scripts[p]
            self.scripts[p] = tuple(rest)
        msg = sc.messages[message]

        def submit(sender: Sender) -> Iterable[SenderEffect]:
            chain = sc.chain(message) if msg.ask else ()
            letter = Letter(
                sender.number(), entity_key(msg.entity), msg.ask, chain, 1, message
            )  # fmt: skip
            return sender.submit(letter, 0.0)

        self._as_sender(p, sc.shard(message), submit)

    def _down(self, p: int, o: int) -> None:
        self._deliver_down(p, o)

    def _deliver_down(self, p: int, o: int) -> None:
        index = p * self.sc.nodes + o
        (kind, s, what, *entry), self.down[index] = self.down[index][0], self.down[index][1:]
        if kind == "s":
            self._as_sender(p, s, lambda sender: sender.begun(inc(o), (what,), 0.0))
            return
        self._tell(p, s, entry[0])
        if kind == "r":
            self._as_sender(p, s, lambda sender: sender.returned(inc(o), what, *entry, 0.0))
        else:
            self._as_sender(p, s, lambda sender: sender.flushed(inc(o), what, *entry, 0.0))

    def _wave(self, p: int, s: int) -> None:
        self._as_sender(p, s, lambda sender: sender.tick(sender.wave_at))

    # faults

    def _hold(self, p: int, s: int) -> None:
        self.budget[3] -= 1
        self._as_sender(p, s, lambda sender: sender.tick(sender.flush_at + 1.0))

    def _lose(self, p: int, o: int, kept: bool) -> None:
        """A link is lost; `kept`: what had not arrived had not even left the sender."""
        self.budget[2] -= 1
        index = p * self.sc.nodes + o
        unsent = [item for item in self.up[index] if kept and item[0] == "q"]
        self.up[index] = self.down[index] = ()
        self.unnoticed = (*self.unnoticed, (p, o, self.link[index]))
        self.link[index] += 1
        for s in range(len(self.history)):
            ns = tuple(item[2] for item in unsent if item[1] == s)
            self._as_sender(p, s, lambda sender, ns=ns: sender.link_lost(inc(o), ns, 0.0))  # type: ignore[misc]

    def _withdraw(self, p: int, s: int, n: int) -> None:
        self.budget[4] -= 1

        def withdraw(sender: Sender) -> Iterable[SenderEffect]:
            letters = [*sender.queue, *sender.written.values()]
            letter = next(letter for letter in letters if letter.n == n)
            unwritten, effects = sender.withdraw(letter, 0.0)
            if unwritten:
                self.withdrawn[letter.load] = None
            self.told[letter.load] = None
            return effects

        self._as_sender(p, s, withdraw)

    # verdicts

    def check_end(self) -> None:
        """Nothing can happen any more: is everything settled?"""
        for message in range(len(self.sc.messages)):
            if message not in self.started and message not in self.told:
                raise Violation(f"stuck: message {message} neither ran nor was given up")
        if self.running or any(sender.waiting() for sender in self.senders):
            raise Violation("stuck: something still runs or waits")
        if any(sender.bond is Bond.FLUSHING for sender in self.senders):
            raise Violation("stuck: a flush was never answered")
        for entries in self.history:
            if entries[-1].state != "serving":
                raise Violation(f"stuck: {entries[-1]}")


class Explored(NamedTuple):
    """What an exploration saw."""

    states: int
    ends: int
    complete: bool


def explore(scenario: Scenario, limit: int) -> Explored:
    """Breadth first, up to a number of states; raises `Violation` with the way that led there."""
    first = World(scenario)
    seen: dict[tuple[Any, ...], int] = {first.key(): 0}
    came: list[tuple[int, Action]] = [(-1, ("begin",))]
    todo: deque[tuple[int, World]] = deque([(0, first)])
    ends = 0
    while todo and len(came) < limit:
        number, world = todo.popleft()
        actions = world.enabled()
        try:
            if not actions:
                ends += 1
                world.check_end()
            for action in actions:
                after = world.copy()
                try:
                    after.take(action)
                except Violation as bad:
                    raise Violation(f"{action}: {bad}") from bad
                key = after.key()
                if key not in seen:
                    seen[key] = len(came)
                    todo.append((len(came), after))
                    came.append((number, action))
        except Violation as bad:
            raise Violation(f"{bad}\nafter:\n{_way(came, number)}") from bad
    return Explored(len(came), ends, not todo)


def walk(scenario: Scenario, seeds: Sequence[int]) -> Explored:
    """One random run to its end for each seed; raises `Violation` with the way that led there."""
    steps = 0
    for seed in seeds:
        random = Random(seed)
        world = World(scenario)
        way: list[Action] = []
        try:
            while actions := world.enabled():
                way.append(random.choice(actions))
                world.take(way[-1])
            world.check_end()
        except Violation as bad:
            shown = "\n".join(f"  {action}" for action in way)
            raise Violation(f"seed {seed}: {bad}\nafter:\n{shown}") from bad
        steps += len(way)
    return Explored(steps, len(seeds), False)


def _way(came: list[tuple[int, Action]], number: int) -> str:
    way: list[str] = []
    while number > 0:
        number, action = came[number]
        way.append(f"  {action}")
    return "\n".join(reversed(way))
