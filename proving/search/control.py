"""One state of a small cluster, second half: the store, its watches, and who coordinates.

Commits travel to the store and their outcomes back, watches bring one commit at a time, and a
coordinator's clock moves on only when it takes a `Tick`. Called by `world` only.
"""

from __future__ import annotations

from typing import Any

from domicile.core.coordinator.events import Commit
from domicile.core.state.keys import LEADER_KEY, NODES, drain_key, node_key, release_key, wish_key
from domicile.core.state.records import LeaderRecord, NodeRecord, encode_record
from domicile.core.state.shardmap import decode_block, term_of
from domicile.core.state.txn import (
    Absent,
    Change,
    Committed,
    Condition,
    Conflict,
    Delete,
    Item,
    Outcome,
    Present,
    Put,
    Unknown,
    Write,
)
from proving.search.machines import Asked, Effect, Landing
from proving.search.scenario import NEVER_S, Violation, inc, process_of, shard_key
from proving.search.store import BLOCK, Snapshot
from proving.search.traffic import Traffic, put

# A leader: process, leader revision, machine, listed, ticks, commits, answers, reads.
PROCESS, REVISION, MACHINE, LISTED, TICKS, COMMITS, ANSWERS, READS = range(8)


def node_record(node: int, status: str = "up") -> bytes:
    """The stored record of a node."""
    return encode_record(NodeRecord(f"n{node}", inc(node), "x", ("r",), (), 6.0, status=status))


class Control(Traffic):
    """Store and coordinators of one state."""

    # the store

    def write(self, conditions: tuple[Condition, ...], *writes: Write) -> Outcome:
        """A commit of a node, an operator or the store itself."""
        commit = Commit("", conditions, writes)
        return self.land(self.machines.commits.of(Asked(commit, 0)))

    def land(self, commit: int) -> Outcome:
        """A commit reaches the store, which takes or refuses it."""
        before = self.machines.stores[self.store]
        landing = self.machines.land(self.store, commit)
        if not isinstance(landing.outcome, Committed):
            return landing.outcome
        leader_revision = self.machines.commits[commit].leader_revision
        if leader_revision and self.sc.one_key:
            self._judge_term(before, landing, leader_revision)
        elif leader_revision and landing.entries:
            leader = before.items.get(LEADER_KEY)
            if leader is None or leader.revision != leader_revision:
                raise Violation(f"C1: leadership {leader_revision} is over and changed the map")
        for shard, old, new in landing.entries:
            self._judge(shard, old, new)
        self.store = landing.store
        self.log = (*self.log, landing.changes)
        for process in range(self.sc.processes):
            self._skip(process)
        self.forget_log()
        return landing.outcome

    def _judge_term(self, before: Snapshot, landing: Landing, term: int) -> None:
        """S8: a leader changes a block only over a lower term, and decides only over its own."""
        if BLOCK not in before.items:
            return
        sealed = term_of(decode_block(before.items[BLOCK].value).txn)
        after = self.machines.stores[landing.store].items[BLOCK]
        if sealed > term and after != before.items[BLOCK]:
            raise Violation(f"S8: the leader of term {term} changed a block of term {sealed}")
        if landing.entries and sealed != term:
            raise Violation(f"S8: the leader of term {term} decided in a block of term {sealed}")

    def _judge(self, shard: int, old_number: int, new_number: int) -> None:
        """I1(a), C4: what may follow what in the stored map."""
        old, new = self.machines.entries[old_number], self.machines.entries[new_number]
        items = self.machines.stores[self.store].items
        if new.change != old.change + 1:
            raise Violation(f"I1: change {new.change} of shard {shard} follows {old.change}")
        if (new.owner, new.epoch) == (old.owner, old.epoch):
            return
        if new.epoch != old.epoch + 1:
            raise Violation(f"I1: shard {shard} goes from {old} to {new}")
        if node_key(new.owner) not in items and not self.sc.one_key:
            raise Violation(f"C4: shard {shard} goes to {new.owner}, whose record is gone")
        released = bool(old.owner) and ((shard, process_of(old.owner), old.epoch) in self.released)
        if not released and node_key(old.owner) in items:
            raise Violation(f"C4: {old.owner} neither released shard {shard} nor is it gone")

    def behind(self, process: int) -> bool:
        """Whether a watch has something for a process."""
        return self.pos[process] < self.machines.stores[self.store].revision

    def do_watch(self, process: int) -> None:
        """A watch brings the next commit to a process and, if it leads, to its coordinator."""
        revision = self.pos[process] + 1
        base = self.machines.stores[self.store].revision - len(self.log)
        number = self.log[revision - base - 1]
        self.pos = put(self.pos, process, revision)
        for change in self.machines.changes[number].changes:
            if change.key == LEADER_KEY:
                self.keyless = put(self.keyless, process, change.item is None)
            elif change.key.startswith(NODES):
                self._see_node(process, process_of(change.key[len(NODES) :].decode()), change.item)
            elif change.key == BLOCK and change.item is not None:
                self._see_block(process, change.item)
        for index, leader in enumerate(self.leaders):
            if leader[PROCESS] == process and leader[LISTED]:
                self.set_leader(index, TICKS, 0)
                self.as_coordinator(index, "change", number)
                break
        self._skip(process)
        self.forget_log()

    def relist(self, process: int) -> None:
        """A process lists the store anew: what happened in between it never sees."""
        store = self.machines.stores[self.store]
        self.pos = put(self.pos, process, store.revision)
        self.keyless = put(self.keyless, process, LEADER_KEY not in store.items)
        for node in range(self.sc.nodes):
            if node_key(inc(node)) not in store.items and self.registered[process] >> node & 1:
                self._see_node(process, node, None)
        if BLOCK in store.items:
            self._see_block(process, store.items[BLOCK])
        self.forget_log()
        for index, leader in enumerate(self.leaders):
            if leader[PROCESS] == process and leader[LISTED]:
                self.set_leader(index, TICKS, 0)
                self.as_coordinator(index, "list", self.store)
                return

    def _skip(self, process: int) -> None:
        """A commit that says nothing to a process needs no step of its own."""
        if not self.alive[process] or any(leader[PROCESS] == process for leader in self.leaders):
            return
        pos = self.pos[process]
        base = self.machines.stores[self.store].revision - len(self.log)
        while pos < base + len(self.log):
            changes = self.machines.changes[self.log[pos - base]].changes
            if any(self._concerns(process, change) for change in changes):
                break
            pos += 1
        self.pos = put(self.pos, process, pos)

    def _concerns(self, process: int, change: Change) -> bool:
        if change.key == LEADER_KEY:
            return process in self.sc.candidates
        if change.key != BLOCK or change.item is None:
            return change.key.startswith(NODES)
        return any(
            entry.change > self.entry(process, shard).change
            for shard, entry in enumerate(decode_block(change.item.value).entries)
        )

    def forget_log(self) -> None:
        """Drop commits that everybody alive has seen."""
        revision = self.machines.stores[self.store].revision
        seen = min([pos for pos, alive in zip(self.pos, self.alive, strict=True) if alive])
        self.log = self.log[len(self.log) - (revision - seen) :]

    def _see_block(self, process: int, item: Item) -> None:
        for shard, entry in enumerate(decode_block(item.value).entries):
            self.learn(process, shard, self.machines.entries.of(entry))

    def _see_node(self, process: int, node: int, item: Item | None) -> None:
        before = self.registered[process]
        after = before | 1 << node if item is not None else before & ~(1 << node)
        self.registered = put(self.registered, process, after)
        if item is not None or process == node:
            return
        if process < self.sc.senders:
            self.lose(process, node)
            self.look(process)
        if process < self.sc.nodes:
            self.hang_up(node, process)

    def hang_up(self, process: int, node: int) -> None:
        """A node takes no more frames from a process that is gone (I1b)."""
        index = process * self.sc.nodes + node
        self.up, self.down = put(self.up, index, ()), put(self.down, index, ())
        for shard in range(self.sc.shards):
            self.as_owner(node, shard, "gone", process, str(self.link[index]))
        self.link = put(self.link, index, self.link[index] + 1)

    # coordinators

    def set_leader(self, index: int, field: int, value: Any) -> None:
        """Change one field of a leader."""
        self.leaders = put(self.leaders, index, put(self.leaders[index], field, value))

    def as_coordinator(self, index: int, does: str, *args: Any) -> None:
        """One step of a coordinator, with what it causes. Pings are answered by all who live."""
        heard = sum(1 << node for node in range(self.sc.nodes) if self.alive[node])
        machine = self.leaders[index][MACHINE]
        after, effects = self.machines.coordinator(machine, heard, does, *args)
        self.set_leader(index, MACHINE, after)
        for effect in effects:
            self._perform(index, effect)
        if ("resign",) in effects:
            self.end_leader(index)

    def _perform(self, index: int, effect: Effect) -> None:
        leader = self.leaders[index]
        match effect:
            case "commit", commit:
                number = self.machines.commits.of(Asked(commit, leader[REVISION]))
                self.set_leader(index, COMMITS, (*leader[COMMITS], number))
            case "read", txn, key:
                self.set_leader(index, READS, (*leader[READS], (txn, key)))
            case "tell", node, shard, entry:
                self._tell(node, shard, entry)
            case _:
                pass

    def _tell(self, node: int, shard: int, number: int) -> None:
        """C3: only what is stored may be told (I3); what a node knows already is no news."""
        entry, stored = self.machines.entries[number], self.current(shard)
        if entry.change > stored.change or (entry.change == stored.change and entry != stored):
            raise Violation(f"I3: node {node} is told of {entry}, which is not stored")
        if not self.alive[node] or entry.change <= self.entry(node, shard).change:
            return
        if (shard, number) not in self.tolds[node]:
            self.tolds = put(self.tolds, node, (*self.tolds[node], (shard, number)))

    def end_leader(self, index: int) -> None:
        """A coordinator is no more; what it asked of the store is still on its way."""
        self.zombies = tuple(sorted((*self.zombies, *self.leaders[index][COMMITS])))
        self.leaders = (*self.leaders[:index], *self.leaders[index + 1 :])

    def do_tell(self, node: int) -> None:
        """A node hears from the coordinator."""
        (shard, entry), *rest = self.tolds[node]
        self.tolds = put(self.tolds, node, tuple(rest))
        self.learn(node, shard, entry)
        self._skip(node)
        self.forget_log()

    def do_land(self, index: int, which: int) -> None:
        """A coordinator's commit reaches the store; the outcome is on its way back."""
        number = self._take_commit(index, which)
        outcome = self.land(number)
        self._send_outcome(index, number, outcome)

    def _take_commit(self, index: int, which: int) -> int:
        commits: tuple[int, ...] = self.leaders[index][COMMITS]
        self.set_leader(index, COMMITS, (*commits[:which], *commits[which + 1 :]))
        return commits[which]

    def _send_outcome(self, index: int, number: int, outcome: Outcome) -> None:
        txn = self.machines.commits[number].commit.txn
        answers = self.leaders[index][ANSWERS]
        self.set_leader(index, ANSWERS, (*answers, (txn, *_plain(outcome))))

    def do_unknown(self, index: int, which: int, how: str) -> None:
        """Nobody answers: it landed, it is lost, or it lands whenever it likes (S1)."""
        number = self._take_commit(index, which)
        if how == "landed":
            self.land(number)
        elif how == "lands later":
            self.zombies = tuple(sorted((*self.zombies, number)))
        self._send_outcome(index, number, Unknown())

    def do_late(self, which: int) -> None:
        """A commit lands that nobody waits for."""
        number = self.zombies[which]
        self.zombies = (*self.zombies[:which], *self.zombies[which + 1 :])
        self.land(number)

    def do_answer(self, index: int) -> None:
        """A coordinator learns what became of a commit."""
        (txn, kind, what), *rest = self.leaders[index][ANSWERS]
        self.set_leader(index, ANSWERS, tuple(rest))
        self.as_coordinator(index, "done", txn, _outcome(kind, what))

    def do_reread(self, index: int) -> None:
        """A coordinator reads a block again, after an unknown outcome."""
        (txn, key), *rest = self.leaders[index][READS]
        self.set_leader(index, READS, tuple(rest))
        item = self.machines.stores[self.store].items.get(key)
        self.as_coordinator(index, "reread", txn, item)

    def do_tick(self, index: int) -> None:
        """A coordinator's armed time comes."""
        leader = self.leaders[index]
        revision, before, ticks = leader[REVISION], leader[MACHINE], int(leader[TICKS])
        self.as_coordinator(index, "tick")
        for index, leader in enumerate(self.leaders):
            if leader[REVISION] == revision and leader[MACHINE] != before:
                waits = self.behind(leader[PROCESS])
                self.set_leader(index, TICKS, (ticks + 1) * waits)

    def can_tick(self, leader: tuple[Any, ...]) -> bool:
        """Whether a coordinator waits for a time that comes."""
        led = self.machines.coordinators[leader[MACHINE]]
        return led.tick_at < led.now + NEVER_S / 100

    def hurry(self) -> None:
        """Let the leader do all it can do by itself."""
        while self.leaders:
            leader = self.leaders[0]
            led = self.machines.coordinators[leader[MACHINE]]
            if self.behind(leader[PROCESS]):
                self.do_watch(leader[PROCESS])
            elif leader[COMMITS]:
                self.do_land(0, 0)
            elif leader[ANSWERS]:
                self.do_answer(0)
            elif led.tick_at < led.now + 1.0:
                self.do_tick(0)
            else:
                return

    def do_list(self, index: int) -> None:
        """A new leader has listed the store (C2)."""
        self.set_leader(index, LISTED, 1)
        self.as_coordinator(index, "list", self.store)

    def do_release(self, index: int, node: int, shard: int, epoch: int) -> None:
        """A coordinator hears `Released`, for the first time or again (H10)."""
        self.as_coordinator(index, "released", node, shard, epoch)

    def do_revert(self, index: int, node: int, shard: int, epoch: int) -> None:
        """A draining owner is overdue and asks for its shard back (H10)."""
        faults, reverts, notes, withdrawals = self.budget
        self.budget = (faults, reverts - 1, notes, withdrawals)
        self.as_coordinator(index, "asked", node, shard, epoch)

    def do_note(self, node: int, shard: int, epoch: int) -> None:
        """An owner that does not reach the leader leaves its release in the store (H10)."""
        faults, reverts, notes, withdrawals = self.budget
        self.budget = (faults, reverts, notes - 1, withdrawals)
        self.write((), Put(release_key(inc(node), shard_key(shard), epoch), b""))

    def do_lapse(self) -> None:
        """The leader key runs out."""
        self.write((), Delete(LEADER_KEY))

    def do_expire(self, node: int) -> None:
        """A dead node's record runs out."""
        self.write((), Delete(node_key(inc(node))))

    def do_campaign(self, process: int) -> None:
        """A candidate takes the leader key (C1)."""
        record = encode_record(LeaderRecord(inc(process), f"n{process}"))
        outcome = self.write((Absent(LEADER_KEY), *self._alive(process)), Put(LEADER_KEY, record))
        if isinstance(outcome, Committed):
            machine = self.machines.new_coordinator(process, outcome.revision)
            leader = (process, outcome.revision, machine, 0, 0, (), (), ())
            self.leaders = (*self.leaders, leader)

    def _alive(self, process: int) -> tuple[Condition, ...]:
        return (Present(node_key(inc(process))),) if process < self.sc.nodes else ()

    def do_operate(self) -> None:
        """What the operator wants next."""
        which, self.operated = self.operated, self.operated + 1
        if which == len(self.sc.wishes):
            self.write((), Put(drain_key(f"n{self.sc.drained}"), b""))
            return
        shard, node = self.sc.wishes[which]
        key = wish_key(shard_key(shard))
        self.write((), Put(key, f"n{node}".encode()) if node >= 0 else Delete(key))


def _plain(outcome: Outcome) -> tuple[str, Any]:
    match outcome:
        case Committed(revision):
            return "committed", revision
        case Conflict(key):
            return "conflict", key
        case Unknown():
            return "unknown", None


def _outcome(kind: str, what: Any) -> Outcome:
    if kind == "committed":
        return Committed(what)
    return Conflict(what) if kind == "conflict" else Unknown()
