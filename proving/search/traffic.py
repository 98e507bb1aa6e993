"""One state of a small cluster, first half: owners, senders, and the links between them.

A state is a tuple of numbers and tuples, in the attributes that `FIELDS` names. Steps change it
in place, on a copy. Every delivery, start and end is a step of its own, so that a search reaches
every interleaving. Called by `world` only.
"""

from __future__ import annotations

from typing import Any, TypeVar

from domicile.core.handoff.tables import Phase
from domicile.core.state.shardmap import Entry
from proving.search.machines import Effect, Machines
from proving.search.scenario import Scenario, Violation, process_of

T = TypeVar("T")
Action = tuple[Any, ...]
Lane = tuple[tuple[Any, ...], ...]

FIELDS = (
    "store", "log", "pos", "alive", "keyless", "registered", "known", "owners", "senders", "up",
    "down", "link", "unnoticed", "scripts", "running", "started", "answered", "told", "withdrawn",
    "last", "released", "leaders", "zombies", "tolds", "operated", "budget",
)  # fmt: skip


def put(items: tuple[T, ...], index: int, item: T) -> tuple[T, ...]:
    """The same with one item replaced."""
    return (*items[:index], item, *items[index + 1 :])


class Traffic:
    """Messages and hand-offs of one state."""

    machines: Machines
    sc: Scenario
    store: int
    log: tuple[int, ...]
    """Commits that some process has not seen yet, oldest first."""
    pos: tuple[int, ...]
    """Of each process: the revision up to which it has seen the store."""
    alive: tuple[bool, ...]
    keyless: tuple[bool, ...]
    """Of each process: whether it knows that nobody leads."""
    registered: tuple[int, ...]
    """Of each process: the nodes whose records it knows, as a bit set."""
    known: tuple[int, ...]
    """The newest entry that a process knows of a shard."""
    owners: tuple[int, ...]
    senders: tuple[int, ...]
    up: tuple[Lane, ...]
    down: tuple[Lane, ...]
    link: tuple[int, ...]
    """How many links a process had to a node before this one."""
    unnoticed: tuple[tuple[int, int, int], ...]
    scripts: tuple[tuple[int, ...], ...]
    running: tuple[tuple[int, int], ...]
    started: int
    answered: int
    told: int
    withdrawn: int
    last: tuple[int, ...]
    """The newest message that ran, of each process to each entity."""
    released: tuple[tuple[int, int, int], ...]
    """Shard, node and epoch of everything that was ever released."""
    leaders: tuple[tuple[Any, ...], ...]
    zombies: tuple[int, ...]
    tolds: tuple[tuple[tuple[int, int], ...], ...]
    operated: int
    budget: tuple[int, int, int, int]
    """Left: faults, reverts, notes in the store, withdrawals."""

    # entries

    def entry(self, process: int, shard: int) -> Entry:
        """The newest entry that a process knows."""
        return self.machines.entries[self.known[process * self.sc.shards + shard]]

    def current(self, shard: int) -> Entry:
        """The stored entry."""
        return self.machines.stores[self.store].entries(self.sc.shards)[shard]

    def learn(self, process: int, shard: int, entry: int) -> None:
        """An entry reaches a process, from wherever: merged if newer (C3)."""
        index = process * self.sc.shards + shard
        if self.machines.entries[entry].change <= self.entry(process, shard).change:
            return
        self.known = put(self.known, index, entry)
        if process < self.sc.nodes:
            news = tuple(told for told in self.tolds[process] if self._news(told, process))
            self.tolds = put(self.tolds, process, news)
            self.as_owner(process, shard, "see", entry)
        if process < self.sc.senders:
            self.as_sender(process, shard, "see", entry)
            self.look(process, but=shard)

    def _news(self, told: tuple[int, int], process: int) -> bool:
        shard, entry = told
        return self.machines.entries[entry].change > self.entry(process, shard).change

    def look(self, process: int, but: int = -1) -> None:
        """Something changed that other senders of a process may wait for (N3)."""
        for shard in range(self.sc.shards):
            number = self.senders[process * self.sc.shards + shard]
            if shard != but and self.machines.senders[number].queue:
                self.as_sender(process, shard, "look")

    # owners

    def as_owner(self, node: int, shard: int, does: str, *args: Any) -> None:
        """One step of an owner, with what it causes."""
        index = node * self.sc.shards + shard
        after, effects = self.machines.owner(self.owners[index], does, *args)
        self.owners = put(self.owners, index, after)
        for effect in effects:
            match effect:
                case "back", sender, link, kind, what, entry, released:
                    self._answer(
                        node, process_of(sender), link, (kind, shard, what, entry, released)
                    )
                case "discard", sender, link, n:
                    if link == str(self.link[process_of(sender) * self.sc.nodes + node]):
                        raise Violation(f"H8: mail {n} of a living link was discarded")
                case "phase", phase, epoch, _:
                    self._phase(node, shard, phase, epoch)
                case "start", sender, _, n, epoch, message:
                    self._began(node, shard, process_of(sender), n, epoch, message)
                case _:
                    pass

    def _answer(self, node: int, process: int, link: str, item: tuple[Any, ...]) -> None:
        index = process * self.sc.nodes + node
        if link == str(self.link[index]) and self.alive[process]:
            self.down = put(self.down, index, (*self.down[index], item))

    def _phase(self, node: int, shard: int, phase: str, epoch: int) -> None:
        if phase == Phase.RELEASED.value and (shard, node, epoch) not in self.released:
            self.released = tuple(sorted((*self.released, (shard, node, epoch))))
        if phase == Phase.OPEN.value:
            for peer in range(self.sc.nodes):
                number = self.owners[peer * self.sc.shards + shard]
                if peer != node and self.alive[peer] and self.machines.owners[number].admits:
                    raise Violation(f"I1: node {node} opens shard {shard} while {peer} has it open")

    def _began(self, node: int, shard: int, process: int, n: int, epoch: int, message: int) -> None:
        if self.started >> message & 1:
            raise Violation(f"I5: message {message} runs twice")
        if self.withdrawn >> message & 1:
            raise Violation(f"I9: message {message} was withdrawn unwritten and runs")
        slot = process * len(self.sc.entities) + self.sc.messages[message].entity
        if n <= self.last[slot]:
            raise Violation(f"I5: reordered: {n} runs after {self.last[slot]}")
        entry = self.current(shard)
        if epoch != entry.epoch or process_of(entry.owner) != node:
            raise Violation(f"I1: message {message} runs under epoch {epoch}, stored is {entry}")
        for other, peer in self.running:
            if self.sc.shard(other) == shard and peer != node:
                raise Violation(f"I1: shard {shard} runs at nodes {peer} and {node}")
        self.last = put(self.last, slot, n)
        self.started |= 1 << message
        self.running = tuple(sorted((*self.running, (message, node))))
        if self.sc.starts_travel:
            link = str(self.link[process * self.sc.nodes + node])
            self._answer(node, process, link, ("s", shard, n))
        elif self.alive[process]:
            self.as_sender(process, shard, "begun", node, n)
        for child in self.sc.children(message):
            self.submit(node, child)

    def do_start(self, node: int, entity: int) -> None:
        """The head of a mailbox begins to run."""
        self.as_owner(node, self.sc.entities[entity], "start", entity)

    def do_finish(self, node: int, message: int) -> None:
        """A handler ends; an ask's answer is immediate, which leaves out nothing that matters."""
        shard = self.sc.shard(message)
        self.running = tuple(job for job in self.running if job[0] != message)
        self.as_owner(node, shard, "finish", self.sc.messages[message].entity)
        if not self.sc.messages[message].ask:
            return
        for process in range(self.sc.senders):
            sender = self.machines.senders[self.senders[process * self.sc.shards + shard]]
            pending = next((m for m in sender.written.values() if m.message == message), None)
            if self.alive[process] and pending is not None and pending.to == f"p{node}":
                self.answered |= 1 << message
                self.as_sender(process, shard, "answered", node, pending.n)

    def do_empty(self, node: int, shard: int) -> None:
        """A draining shard has nothing left (H10)."""
        self.as_owner(node, shard, "empty")

    def do_read(self, node: int, shard: int) -> None:
        """An owner that was told of more than it knows reads the record (H7)."""
        self.learn(node, shard, self.machines.entries.of(self.current(shard)))

    def do_notice(self, process: int, node: int, link: int) -> None:
        """An owner notices that a link is gone."""
        self.unnoticed = tuple(gone for gone in self.unnoticed if gone != (process, node, link))
        for shard in range(self.sc.shards):
            self.as_owner(node, shard, "gone", process, str(link))

    # senders

    def as_sender(self, process: int, shard: int, does: str, *args: Any) -> None:
        """One step of a sender, with what it causes."""
        index = process * self.sc.shards + shard
        moving = 0
        if self.sc.nested:
            for other in range(self.sc.shards):
                moving |= (self.entry(process, other).state == "moving") << other
        up = self.registered[process]
        after, effects = self.machines.sender(self.senders[index], up, moving, does, *args)
        self.senders = put(self.senders, index, after)
        for effect in effects:
            self._carry_out(process, shard, effect)

    def _carry_out(self, process: int, shard: int, effect: Effect) -> None:
        match effect:
            case "send", node, (kind, *rest):
                index = process * self.sc.nodes + node
                item, lane = (kind, shard, *rest), self.up[index]
                first = self.sc.flush_overtakes and kind == "f"
                self.up = put(self.up, index, (item, *lane) if first else (*lane, item))
            case "told", message:
                if self.budget[0] == self.sc.most_faults or not self.sc.faults:
                    raise Violation(f"I5: message {message} was given up without a fault")
                self.told |= 1 << message
            case "withdrawn", message, unwritten:
                self.told |= 1 << message
                self.withdrawn |= unwritten << message
            case _:
                pass

    def submit(self, process: int, message: int) -> None:
        """A process calls."""
        self.as_sender(process, self.sc.shard(message), "submit", message)

    def do_submit(self, process: int) -> None:
        """The next call of a process's script."""
        message, *rest = self.scripts[process]
        self.scripts = put(self.scripts, process, tuple(rest))
        self.submit(process, message)

    def do_up(self, process: int, node: int) -> None:
        """A node takes a request or a flush from a link."""
        index = process * self.sc.nodes + node
        (kind, shard, *rest), left = self.up[index][0], self.up[index][1:]
        self.up = put(self.up, index, left)
        link = str(self.link[index])
        does = "flush" if kind == "f" else "request"
        self.as_owner(node, shard, does, process, link, *rest)

    def do_down(self, process: int, node: int) -> None:
        """A sender takes an answer from a link."""
        index = process * self.sc.nodes + node
        (kind, shard, *rest), left = self.down[index][0], self.down[index][1:]
        self.down = put(self.down, index, left)
        if kind == "s":
            self.as_sender(process, shard, "begun", node, *rest)
            return
        what, entry, released = rest
        self.learn(process, shard, entry)
        does = "returned" if kind == "r" else "flushed"
        self.as_sender(process, shard, does, node, what, entry, released)

    def do_wave(self, process: int, shard: int) -> None:
        """Queued asks that handlers wait for become finishing (N5)."""
        self.as_sender(process, shard, "wave")

    def do_withdraw(self, process: int, shard: int, n: int) -> None:
        """The caller of an ask waits no more."""
        faults, reverts, notes, withdrawals = self.budget
        self.budget = (faults, reverts, notes, withdrawals - 1)
        self.as_sender(process, shard, "withdraw", n)

    def lose(self, process: int, node: int, unsent: tuple[tuple[int, int], ...] = ()) -> None:
        """A link is no more: what travelled on it is gone, and its sender knows (H6)."""
        index = process * self.sc.nodes + node
        self.up, self.down = put(self.up, index, ()), put(self.down, index, ())
        if self.alive[node]:
            self.unnoticed = (*self.unnoticed, (process, node, self.link[index]))
        self.link = put(self.link, index, self.link[index] + 1)
        for shard in range(self.sc.shards):
            ns = tuple(n for which, n in unsent if which == shard)
            self.as_sender(process, shard, "lost", node, ns)
