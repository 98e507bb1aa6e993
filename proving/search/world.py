"""One state of a small cluster, whole: its steps, its faults, and what is demanded of it.

`enabled` lists the steps, `take` makes one in place, `copy` comes first, `key` says all that the
future depends on. Called by `explore`.
"""

from __future__ import annotations

from operator import attrgetter

import msgspec
from xxhash import xxh3_128_digest

from domicile.core.handoff.tables import Phase
from domicile.core.state.keys import CONFIG_KEY, LEADER_KEY, node_key
from domicile.core.state.records import ConfigRecord, LeaderRecord, encode_record
from domicile.core.state.shardmap import FREE, Block, Entry, encode_block
from domicile.core.state.txn import Delete, Put
from proving.search.control import MACHINE, PROCESS, node_record
from proving.search.machines import Machines
from proving.search.scenario import ROLE, Scenario, inc, process_of
from proving.search.steps import Steps
from proving.search.store import BLOCK, Snapshot
from proving.search.traffic import FIELDS, Action, put

_encode = msgspec.msgpack.Encoder().encode
_values = attrgetter(*FIELDS)

SELDOM = ("crash", "deposed", "die", "lose", "hold", "again", "relist", "untold", "unknown")
"""Steps that are faults: nothing may depend on them to go on."""


class World(Steps):
    """One state."""

    def __init__(self, machines: Machines) -> None:
        self.machines = machines
        sc = self.sc = machines.sc
        processes, nodes, shards = sc.processes, sc.nodes, sc.shards
        self.store = machines.stores.of(empty := Snapshot(0, {}), empty.key())
        self.log = ()
        self.pos = (0,) * processes
        self.alive = (True,) * processes
        self.owners = tuple(machines.new_owner(n, s) for n in range(nodes) for s in range(shards))
        self.senders = tuple(
            machines.new_sender(s) for _ in range(sc.senders) for s in range(shards)
        )
        self.up = self.down = ((),) * (sc.senders * nodes)
        self.link = (0,) * (sc.senders * nodes)
        self.unnoticed = self.running = self.released = self.leaders = ()
        self.zombies = ()
        self.scripts = tuple(
            tuple(m for m, msg in enumerate(sc.messages) if msg.by == p and m not in sc.running)
            for p in range(sc.senders)
        )
        self.started = self.answered = self.told = self.withdrawn = self.operated = 0
        self.last = (0,) * (sc.senders * len(sc.entities))
        self.tolds = ((),) * nodes
        self.budget = (sc.most_faults if sc.faults else 0, sc.reverts, sc.notes, sc.withdrawals)
        self.keyless = (False,) * processes
        self.registered = ((1 << nodes) - 1,) * processes
        self.known = (machines.entries.of(FREE),) * (processes * shards)
        self._found()
        for message in sc.running:
            self._run_already(message)

    def _found(self) -> None:
        """The cluster stands, and everybody knows it."""
        sc = self.sc
        self.write((), Put(CONFIG_KEY, encode_record(ConfigRecord({ROLE: sc.shards}))))
        for node in range(sc.nodes):
            self.write((), Put(node_key(inc(node)), node_record(node)))
        first = tuple(
            Entry(inc(home), 1, "serving", change=1, previous=f"n{home}") if home >= 0 else FREE
            for home in sc.homes
        )
        if any(home >= 0 for home in sc.homes):
            self._seed(Put(BLOCK, encode_block(Block("seed", first))))
        leader = encode_record(LeaderRecord(inc(sc.leader), f"n{sc.leader}"))
        self.write((), Put(LEADER_KEY, leader))
        revision = self.machines.stores[self.store].revision
        self.pos = (revision,) * sc.processes
        self.log = ()
        for process in range(sc.processes):
            for shard in range(sc.shards):
                self.learn(process, shard, self.machines.entries.of(first[shard]))
        machine = self.machines.new_coordinator(sc.leader, revision)
        self.leaders = ((sc.leader, revision, machine, 0, 0, (), (), ()),)
        self.do_list(0)
        if FREE not in first:
            self._age()

    def _age(self) -> None:
        """Time passes until the leader's first moments make no difference any more."""
        seen: dict[int, None] = {}
        while (before := self.leaders[0][MACHINE]) not in seen:
            seen[before] = None
            if self.can_tick(self.leaders[0]):
                self.do_tick(0)

    def _seed(self, block: Put) -> None:
        snapshot, _, _ = self.machines.stores[self.store].commit((), (block,))
        self.store = self.machines.stores.of(snapshot, snapshot.key())

    def _run_already(self, message: int) -> None:
        home = self.sc.homes[self.sc.shard(message)]
        self.submit(home, message)
        self.do_up(home, home)
        self.do_start(home, self.sc.messages[message].entity)
        while self.down[home * self.sc.nodes + home]:
            self.do_down(home, home)

    def copy(self) -> World:
        """The same state, to be changed."""
        new = object.__new__(World)
        new.__dict__.update(self.__dict__)
        return new

    def key(self) -> bytes:
        """A digest of the state."""
        return xxh3_128_digest(_encode(_values(self)))

    def take(self, action: Action) -> None:
        """Make one step in place."""
        verb, *args = action
        getattr(self, f"do_{verb}")(*args)
        if self.sc.swift:
            self.hurry()

    # faults

    def _spend(self) -> None:
        self.budget = (self.budget[0] - 1, *self.budget[1:])

    def do_crash(self, node: int) -> None:
        """A node is gone with all it held; its record stays until it runs out."""
        self._spend()
        self.alive = put(self.alive, node, False)
        self.running = tuple(job for job in self.running if job[1] != node)
        self.tolds = put(self.tolds, node, ())
        self.unnoticed = tuple(gone for gone in self.unnoticed if gone[1] != node)
        for process in range(self.sc.senders):
            self.up = put(self.up, process * self.sc.nodes + node, ())
        for peer in range(self.sc.nodes):
            self.down = put(self.down, node * self.sc.nodes + peer, ())
        for index in reversed(range(len(self.leaders))):
            if self.leaders[index][PROCESS] == node:
                self.end_leader(index)
        self._retire(node)

    def _retire(self, node: int) -> None:
        """What a dead process knew makes no difference any more."""
        sc = self.sc
        for shard in range(sc.shards):
            index = node * sc.shards + shard
            self.owners = put(self.owners, index, self.machines.new_owner(node, shard))
            self.senders = put(self.senders, index, self.machines.new_sender(shard))
            self.known = put(self.known, index, self.machines.entries.of(FREE))
        self.scripts = put(self.scripts, node, ())
        self.pos, self.keyless = put(self.pos, node, 0), put(self.keyless, node, False)
        self.registered = put(self.registered, node, 0)
        self.forget_log()

    def do_die(self, index: int) -> None:
        """A coordinator ends without a word; its key runs out later."""
        self._spend()
        self.end_leader(index)

    def do_deposed(self) -> None:
        """The leader key runs out while its holder, paused or cut off, goes on (C1)."""
        self._spend()
        self.write((), Delete(LEADER_KEY))

    def do_lose(self, process: int, node: int, kept: int) -> None:
        """A link is lost; `kept`: what had not arrived had not even left the sender."""
        self._spend()
        lane = self.up[process * self.sc.nodes + node]
        unsent = tuple((item[1], item[2]) for item in lane if kept and item[0] == "q")
        self.lose(process, node, unsent)

    def do_sever(self, process: int, node: int) -> None:
        """A dead node's link is given up before its record is gone (H6)."""
        self.lose(process, node)

    def do_hold(self, process: int, shard: int) -> None:
        """A `Flushed` is overdue, and its sender waits no more (H6)."""
        self._spend()
        self.as_sender(process, shard, "hold")

    def do_again(self, index: int, node: int, shard: int, epoch: int) -> None:
        """A `Released` arrives late, or once more."""
        self._spend()
        self.do_release(index, node, shard, epoch)

    def do_relist(self, process: int) -> None:
        """A watch breaks, and its process lists the store anew."""
        self._spend()
        self.relist(process)

    def do_untold(self, node: int) -> None:
        """A word of the coordinator is lost."""
        self._spend()
        self.tolds = put(self.tolds, node, self.tolds[node][1:])

    def do_unknown(self, index: int, which: int, how: str) -> None:
        """A commit without an answer (S1)."""
        self._spend()
        super().do_unknown(index, which, how)

    # verdicts

    def settled(self) -> str:
        """Empty if everything that was sent ran or was told, and every shard is served."""
        sc = self.sc
        for message, msg in enumerate(sc.messages):
            if (self.started | self.told) >> message & 1:
                continue
            if msg.by < 0 or self.alive[msg.by]:
                return f"message {message} neither ran nor was given up"
        if self.running:
            return f"{self.running[0]} still runs"
        for index, number in enumerate(self.senders):
            sender = self.machines.senders[number]
            if self.alive[index // sc.shards] and (sender.waiting() or sender.flush_id):
                return f"process {index // sc.shards} still waits"
        for shard in range(sc.shards):
            entry = self.current(shard)
            if entry.state != "serving":
                return f"shard {shard} is {entry.state}"
            home = process_of(entry.owner)
            owner = self.machines.owners[self.owners[home * sc.shards + shard]]
            if not self.alive[home] or (owner.phase, owner.epoch) != (Phase.OPEN, entry.epoch):
                return f"shard {shard} is not open at its home, node {home}"
        return ""


def begin(scenario: Scenario) -> World:
    """The first state of a scenario."""
    return World(Machines(scenario))
