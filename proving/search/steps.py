"""What can happen next in a state, listed. Called by the search; changes nothing."""

from __future__ import annotations

from typing import Any

from domicile.core.handoff.tables import Phase, SenderState
from domicile.core.state.keys import LEADER_KEY, node_key
from proving.search.control import (
    ANSWERS,
    COMMITS,
    LISTED,
    PROCESS,
    READS,
    REVISION,
    TICKS,
    Control,
)
from proving.search.scenario import inc, process_of
from proving.search.traffic import Action

PATIENCE = 2
"""Ticks that a coordinator takes while a watch has something for it: a refused commit is tried
again and again until the reason arrives, which changes nothing but a counter."""


class Steps(Control):
    """The steps of one state."""

    def enabled(self) -> list[Action]:
        """What can happen next; faults come last."""
        return [*self._traffic_steps(), *self._control_steps(), *self._fault_steps()]

    def _traffic_steps(self) -> list[Action]:
        sc, out = self.sc, list[Action]()
        for index, number in enumerate(self.owners):
            node, shard = divmod(index, sc.shards)
            owner = self.machines.owners[number]
            if not self.alive[node]:
                continue
            if owner.phase is Phase.DRAINING and not owner.mailboxes:
                out.append(("empty", node, shard))
            if owner.admits:
                out += [
                    ("start", node, int(entity.id))
                    for entity, mailbox in owner.mailboxes.items()
                    if mailbox.ready()
                ]
            if owner.parked and owner.entry.change < self.current(shard).change:
                out.append(("read", node, shard))
        for message, node in self.running:
            if all(not sc.messages[c].ask or self.answered >> c & 1 for c in sc.children(message)):
                out.append(("finish", node, message))
        for process in range(sc.senders):
            if not self.alive[process]:
                continue
            if self.scripts[process]:
                out.append(("submit", process))
            for node in range(sc.nodes):
                if self.down[process * sc.nodes + node]:
                    out.append(("down", process, node))
        for index, lane in enumerate(self.up):
            process, node = divmod(index, sc.nodes)
            if lane and self.alive[node]:
                out.append(("up", process, node))
        out += [("notice", *gone) for gone in self.unnoticed if self.alive[gone[1]]]
        out += self._sender_steps()
        return out

    def _sender_steps(self) -> list[Action]:
        out: list[Action] = []
        for index, number in enumerate(self.senders):
            process, shard = divmod(index, self.sc.shards)
            sender = self.machines.senders[number]
            if not self.alive[process]:
                continue
            if sender.key is not None and not self.alive[process_of(sender.key.owner)]:
                out.append(("sever", process, process_of(sender.key.owner)))
            if 0 < sender.wave_at < 1e6:
                out.append(("wave", process, shard))
            if self.budget[3]:
                messages = [*sender.queue, *sender.written.values()]
                out += [
                    ("withdraw", process, shard, pending.n)
                    for pending in messages
                    if pending.ask and not pending.resolved
                ]
        return out

    def _control_steps(self) -> list[Action]:
        """Steps of the store and the coordinators that need no fault."""
        out: list[Action] = []
        store = self.machines.stores[self.store]
        for process, alive in enumerate(self.alive):
            if alive and self.behind(process):
                out.append(("watch", process))
        for node, tolds in enumerate(self.tolds):
            if tolds and self.alive[node]:
                out.append(("tell", node))
        for index, leader in enumerate(self.leaders):
            out += self._leader_steps(index, leader)
        out += [("late", which) for which in range(len(self.zombies))]
        if LEADER_KEY not in store.items:
            busy = {leader[PROCESS]: None for leader in self.leaders}
            out += [
                ("campaign", process)
                for process in self.sc.candidates
                if self.alive[process] and self.keyless[process] and process not in busy
                and (process >= self.sc.nodes or node_key(inc(process)) in store.items)
            ]  # fmt: skip
        elif not any(
            leader[REVISION] == store.items[LEADER_KEY].revision for leader in self.leaders
        ):
            out.append(("lapse",))
        for node in range(self.sc.nodes):
            if not self.alive[node] and node_key(inc(node)) in store.items:
                out.append(("expire", node))
        if self.operated < self.sc.operations:
            out.append(("operate",))
        if self.budget[2]:
            out += [("note", *word) for word in self._words()]
        return out

    def _leads(self, leader: tuple[Any, ...]) -> bool:
        item = self.machines.stores[self.store].items.get(LEADER_KEY)
        return item is not None and item.revision == leader[REVISION]

    def _leader_steps(self, index: int, leader: tuple[Any, ...]) -> list[Action]:
        out: list[Action] = []
        if not leader[LISTED]:
            out.append(("list", index))
        out += [("land", index, which) for which in range(len(leader[COMMITS]))]
        if leader[ANSWERS]:
            out.append(("answer", index))
        if leader[READS]:
            out.append(("reread", index))
        if self.can_tick(leader) and leader[TICKS] < PATIENCE:
            out.append(("tick", index))
        out += [("release", index, *word) for word in self._words()]
        if self.budget[1]:
            out += [("revert", index, *word) for word in self._words(Phase.DRAINING)]
        return out

    def _words(self, phase: Phase = Phase.RELEASED) -> list[tuple[int, int, int]]:
        """What owners have to say to the coordinator: node, shard, epoch."""
        out: list[tuple[int, int, int]] = []
        for index, number in enumerate(self.owners):
            owner = self.machines.owners[number]
            node, shard = divmod(index, self.sc.shards)
            if owner.phase is phase and self.alive[node]:
                entry = owner.entry
                if entry.owner == owner.me and entry.epoch <= owner.epoch:
                    out.append((node, shard, owner.epoch))
        return out

    def _fault_steps(self) -> list[Action]:
        sc, out = self.sc, list[Action]()
        if not self.budget[0]:
            return out
        if "crash" in sc.faults:
            out += [("crash", node) for node in range(sc.nodes) if self.alive[node]]
        for index, leader in enumerate(self.leaders):
            for how in ("landed", "lands later", "lost"):
                if f"commit unknown, {how}" in sc.faults:
                    out += [("unknown", index, which, how) for which in range(len(leader[COMMITS]))]
            if "Released again" in sc.faults:
                out += [("again", index, node, shard, e) for shard, node, e in self.released]
            if self._leads(leader):
                if "leader dies" in sc.faults:
                    out.append(("die", index))
                if "leader deposed" in sc.faults:
                    out.append(("deposed",))
        if "watch broken" in sc.faults:
            revision = self.machines.stores[self.store].revision
            out += [
                ("relist", process)
                for process, pos in enumerate(self.pos)
                if self.alive[process] and pos < revision - 1
            ]
        if "Told lost" in sc.faults:
            out += [("untold", node) for node, tolds in enumerate(self.tolds) if tolds]
        for index, number in enumerate(self.senders):
            process, shard = divmod(index, sc.shards)
            sender = self.machines.senders[number]
            if "overdue Flushed" in sc.faults and sender.state is SenderState.FLUSHING:
                out.append(("hold", process, shard))
            if "link lost" in sc.faults and sender.key is not None:
                node = process_of(sender.key.owner)
                if node != process and self.alive[node]:
                    out += [("lose", process, node, 0), ("lose", process, node, 1)]
        return out
