"""I1, one home: the store names one owner per epoch, links are exact, handlers never overlap.

Three checkers: what is stored (a), what peers accept from each other (b), what runs (c).
"""

from __future__ import annotations

from math import inf

from domicile.core.ids import NOBODY, ShardKey
from domicile.core.state.keys import LEADER_KEY, MAP, NODES
from domicile.core.state.records import LeaderRecord, decode_record
from domicile.core.state.shardmap import decode_block, term_of
from domicile.testing.checkers.reading import Message, Reading, Stored, read
from domicile.testing.checkers.verdict import Findings, Violation
from domicile.testing.history import Event, History

_SIGNS = ("accept", "reply", "resume", "start", "submit", "write")
"""Events that only a process that still acts can cause."""


def check_stored(history: History) -> list[Violation]:
    """I1a: epochs and changes only rise, one owner each, new owners only by C4, one writer.

    A node's record is removed only after the node stopped, or after its deadline (C5); one without
    a deadline (C9) only after it stopped. A node that acts later had not stopped.

    On a store that writes one key at a time, terms stand for the leader key (S8): no block goes
    back to a lower term, and a leader decides only in blocks that it has sealed. A new owner may be
    gone.
    """
    reading = read(history)
    found = Findings("I1a")
    nodes: dict[str, None] = {}
    released: dict[tuple[str, ShardKey, int], None] = {}
    leader: LeaderRecord | None = None
    terms = _Terms(reading, found)
    stopped: dict[str, None] = {}
    removed: dict[str, Event] = {}
    valid_until: dict[str, float] = {}
    for position, event in enumerate(history.events):
        kind, fields = event.kind, event.fields
        if removed and kind in _SIGNS:
            inc = fields["inc"]
            early = None if inc in stopped else removed.get(inc)
            if early is not None and event.at > early.at + reading.slack_s:
                del removed[inc]
                message = f"the record of {reading.name(inc)} went while it lived (C5)"
                found.add(early.at, message, early, event)
        if kind == "released":
            shard = ShardKey(fields["role"], fields["shard"])
            released[fields["inc"], shard, fields["epoch"]] = None
        elif kind in ("fenced", "ended") or (kind == "fault" and fields["fault"] == "crash"):
            stopped[str(fields["inc"])] = None
            early = removed.get(str(fields["inc"]))
            if early is not None and kind != "fault":
                message = f"the record of {reading.name(fields['inc'])} went before it stopped (C5)"
                found.add(early.at, message, early, event)
        elif kind == "renewed":
            until = fields["sent_at"] + fields["ttl"] - fields["margin"]
            valid_until[fields["inc"]] = max(until, valid_until.get(fields["inc"], until))
        elif kind == "rewound":
            # S5: a new history begins with the restored state.
            held = dict(fields["items"])
            nodes = {key[len(NODES) :].decode(): None for key in held if key.startswith(NODES)}
            kept = held.get(LEADER_KEY)
            leader = None if kept is None else decode_record(kept, LeaderRecord)
            valid_until.clear()
            terms.rewound(held)
        elif kind in ("commit", "expire"):
            # Conditions are about the state before the commit, so it is judged before it is
            # applied.
            puts = fields.get("puts", ())
            if any(put[0].startswith(MAP) for put in puts):
                changed = reading.stored.get(position, [])
                if history.one_key:
                    terms.judge(event, changed)
                else:
                    _judge_writer(found, event, leader)
                for stored in changed:
                    _judge_entry(found, reading, stored, nodes, released, history.one_key)
            for put in puts:
                key, value = put[0], put[1]
                if key.startswith(NODES):
                    nodes[key[len(NODES) :].decode()] = None
                elif key == LEADER_KEY:
                    leader = decode_record(value, LeaderRecord)
                    terms.acquired(fields["revision"], leader)
            for key in fields.get("deletes", ()):
                if key.startswith(NODES):
                    inc = key[len(NODES) :].decode()
                    nodes.pop(inc, None)
                    if inc not in stopped and event.at < valid_until.get(inc, event.at):
                        removed[inc] = event
                elif key == LEADER_KEY:
                    leader = None
                elif key.startswith(MAP):
                    message = f"map block {key.decode()} was deleted, and its epochs with it"
                    found.add(event.at, message, event)
    return found.violations


class _Terms:
    """Who acquired which term, and with which term each block is sealed (S8)."""

    def __init__(self, reading: Reading, found: Findings) -> None:
        self._reading, self._found = reading, found
        self._leaders: dict[int, LeaderRecord] = {}
        self._sealed: dict[bytes, int] = {}
        self._is_rewound = False

    def acquired(self, revision: int, leader: LeaderRecord) -> None:
        """The leader key was taken; its revision is the term."""
        self._leaders[revision] = leader

    def rewound(self, items: dict[bytes, bytes]) -> None:
        """S5: revisions begin again."""
        self._is_rewound = True
        self._leaders.clear()
        self._sealed = {
            key: term_of(decode_block(value).txn)
            for key, value in items.items()
            if key.startswith(MAP)
        }

    def judge(self, event: Event, changed: list[Stored]) -> None:
        """A commit that writes a block."""
        by = event.fields["by"]
        for key, value, *_ in event.fields["puts"]:
            if not key.startswith(MAP):
                continue
            term, before = term_of(decode_block(value).txn), self._sealed.get(key)
            self._sealed[key] = term
            leader = self._leaders.get(term)
            if leader is None and not self._is_rewound:
                message = f"{by} wrote {key.decode()} in term {term}, which nobody acquired (S8)"
            elif leader is not None and by not in (leader.node, leader.incarnation):
                message = f"{by} wrote {key.decode()} in term {term} of {leader.node} (S8)"
            elif before is not None and term < before:
                message = (
                    f"{by} of term {term} wrote {key.decode()}, which is sealed with term "
                    f"{before}: two coordinators (S8)"
                )
            elif before is not None and changed and term != before:
                message = f"{by} decided in {key.decode()} before it had sealed it (S8)"
            else:
                continue
            self._found.add(event.at, message, event)


def _judge_writer(found: Findings, event: Event, leader: LeaderRecord | None) -> None:
    by = event.fields["by"]
    if leader is None:
        found.add(event.at, f"{by} wrote the map while nobody held the leader key", event)
    elif by not in (leader.node, leader.incarnation):
        message = f"{by} wrote the map while {leader.node} held the leader key: two coordinators"
        found.add(event.at, message, event)


def _judge_entry(
    found: Findings,
    reading: Reading,
    stored: Stored,
    nodes: dict[str, None],
    released: dict[tuple[str, ShardKey, int], None],
    one_key: bool,
) -> None:
    event, shard, before, after = stored
    where = f"shard {shard.role}/{shard.shard}"
    if after.epoch < before.epoch:
        message = f"{where} went back from epoch {before.epoch} to {after.epoch}"
    elif after.state == "quarantined" and before.owner in nodes:
        message = f"{where} was quarantined while {reading.name(before.owner)} had its record (C4)"
    elif (
        after.epoch == before.epoch
        and after.owner != before.owner
        and (after.state, after.owner) != ("quarantined", NOBODY)
    ):
        old, new = reading.name(before.owner), reading.name(after.owner)
        message = f"{where} has two owners in epoch {after.epoch}: {old}, then {new}"
    elif after.change <= before.change:
        message = f"{where} changed without a rise of its change number {before.change}"
    elif after.epoch > before.epoch and after.owner not in nodes and not one_key:
        message = f"{where} was given to {reading.name(after.owner)}, which has no record (C4)"
    elif (
        after.epoch > before.epoch
        and before.owner != NOBODY
        and before.owner in nodes
        and (before.owner, shard, before.epoch) not in released
    ):
        old, new = reading.name(before.owner), reading.name(after.owner)
        message = (
            f"{where} was given to {new} in epoch {after.epoch} while {old} neither released "
            f"epoch {before.epoch} nor lost its record (C4)"
        )
    else:
        return
    found.add(event.at, message, event)


def check_links(history: History) -> list[Violation]:
    """I1b: nothing is taken from an incarnation known to be gone; frames of a link arrive once, in
    order."""
    reading = read(history)
    found = Findings("I1b")
    gone: dict[tuple[str, str], Event] = {}
    last: dict[tuple[str, str, str], Event] = {}
    for event in history.of("gone", "taken"):
        fields = event.fields
        inc, peer = fields["inc"], fields["peer"]
        if event.kind == "gone":
            gone[inc, peer] = event
            continue
        link = (inc, peer, fields["link"])
        previous = last.get(link)
        last[link] = event
        expected = previous.fields["no"] + 1 if previous else 1
        older = previous is not None and fields["session"] < previous.fields["session"]
        if fields["no"] == expected and not older and (inc, peer) not in gone:
            continue
        who = f"{reading.name(inc)} took frame {fields['no']} of {reading.name(peer)}"
        if (inc, peer) in gone:
            found.add(event.at, f"{who} after learning that it is gone", gone[inc, peer], event)
        if fields["no"] != expected:
            message = f"{who} on link {fields['link']} where {expected} was due"
            found.add(event.at, message, previous, event)
        elif previous and older:
            message = (
                f"{who} from session {fields['session']} of link {fields['link']} after session "
                f"{previous.fields['session']}"
            )
            found.add(event.at, message, previous, event)
    return found.violations


def check_handlers(history: History) -> list[Violation]:
    """I1c: no handler of an old owner after the new owner's first; one at a time per entity."""
    reading = read(history)
    found = Findings("I1c")
    handlers = _Handlers(reading, found)
    released: dict[tuple[str, str, int], Event] = {}
    for position, event in enumerate(history.events):
        kind, fields = event.kind, event.fields
        if kind in ("start", "resume", "unwind"):
            shard = (fields["role"], fields["shard"])
            final = released.get((fields["inc"], *shard))
            if final and fields["epoch"] <= final.fields["epoch"]:
                message = (
                    f"{reading.name(fields['inc'])} ran a handler of {fields['type']}/"
                    f"{fields['id']} in epoch {fields['epoch']} of {shard[0]}/{shard[1]}, which "
                    "it had released (H10)"
                )
                found.add(event.at, message, final, event)
            handlers.runs(event, shard, rest=position in reading.rest_of_turn)
            if kind == "start":
                handlers.start(event)
            else:
                handlers.resume(event)
        elif kind == "finish":
            handlers.finish(event)
        elif kind == "released":
            released[fields["inc"], fields["role"], fields["shard"]] = event
        elif kind == "open":
            final = released.get((fields["inc"], fields["role"], fields["shard"]))
            if final and fields["epoch"] <= final.fields["epoch"]:
                message = (
                    f"{reading.name(fields['inc'])} opened {fields['role']}/{fields['shard']} in "
                    f"epoch {fields['epoch']} again after releasing it (H11)"
                )
                found.add(event.at, message, final, event)
        elif kind == "renewed":
            handlers.renewed(event)
        elif kind == "rewound":
            handlers.rewound(event)
    return found.violations


_Entity = tuple[str, str, str]
_Key = tuple[str, str, int, int]
_Run = tuple[str, str, str, _Key]


class _Handlers:
    """Which handlers run, and the newest epoch in which each incarnation started one."""

    def __init__(self, reading: Reading, found: Findings) -> None:
        self._reading = reading
        self._found = found
        self._newest: dict[tuple[str, int], Event] = {}
        self._firsts: dict[tuple[str, int], dict[str, Event]] = {}
        self._on: dict[_Entity, dict[_Key, Event]] = {}
        self._over: dict[_Run, Event] = {}
        self._valid_until: dict[str, float] = {}
        self._ttl_s: dict[str, float] = {}
        self._rewound_at = float("-inf")

    def renewed(self, event: Event) -> None:
        fields = event.fields
        until = fields["sent_at"] + fields["ttl"] - fields["margin"]
        self._ttl_s[fields["inc"]] = fields["ttl"]
        self._valid_until[fields["inc"]] = max(until, self._valid_until.get(fields["inc"], until))

    def rewound(self, event: Event) -> None:
        """A3 failed: epochs begin again. An earlier incarnation is not judged while it may not know
        that yet, which is at most until its lease ends (S5)."""
        self._newest.clear()
        self._firsts.clear()
        self._rewound_at = event.at

    def _of_this_history(self, inc: str, at: float) -> bool:
        life = self._reading.lives.get(inc)
        if life is None or life.at >= self._rewound_at:
            return True
        return at > self._rewound_at + self._ttl_s.get(inc, inf)

    def runs(self, event: Event, shard: tuple[str, int], *, rest: bool) -> None:
        """No start or resumption after a start of another incarnation in this or a higher epoch.

        Except the `rest` of a turn that a pause interrupted, if the other incarnation waited for
        this one's deadline (A4). Without a deadline (C9) no pause explains a second home.
        """
        fields = event.fields
        inc, epoch = fields["inc"], fields["epoch"]
        if not self._of_this_history(inc, event.at):
            return
        newest = self._newest.get(shard)
        if newest is None or epoch > newest.fields["epoch"]:
            if event.kind == "start":
                self._newest[shard] = event
                self._firsts.setdefault(shard, {})[inc] = event
            return
        if epoch == newest.fields["epoch"] and inc == newest.fields["inc"]:
            return
        until = self._valid_until.get(inc, inf)
        for other, first in self._firsts[shard].items():
            if other == inc or first.fields["epoch"] < epoch or (rest and first.at >= until):
                continue
            message = (
                f"{self._reading.name(inc)} ran {fields['type']}/{fields['id']} in epoch {epoch} "
                f"of {shard[0]}/{shard[1]} after {self._reading.name(other)} had started in epoch "
                f"{first.fields['epoch']}"
            )
            self._found.add(event.at, message, first, event)
            return

    def start(self, event: Event) -> None:
        """An exclusive handler runs alone; shared ones run only with each other."""
        fields = event.fields
        on = self._on.setdefault((fields["inc"], fields["type"], fields["id"]), {})
        for other in on.values():
            if not (fields["shared"] and other.fields["shared"]):
                message = (
                    f"two handlers of {fields['type']}/{fields['id']} ran at once on "
                    f"{self._reading.name(fields['inc'])}, not both shared"
                )
                self._found.add(event.at, message, other, event)
                break
        on[_message(event)] = event

    def resume(self, event: Event) -> None:
        """An abandoned handler is never resumed (L4); a cancelled one may still clean up."""
        fields = event.fields
        entity = (fields["inc"], fields["type"], fields["id"])
        message = _message(event)
        if message in self._on.get(entity, ()):
            return
        over = self._over.get((*entity, message))
        if over is None or over.fields["how"] != "cancelled":
            why = "was over" if over else "never started there"
            text = (
                f"{self._reading.name(fields['inc'])} resumed {fields['type']}/{fields['id']} for "
                f"{Message(*message)}, whose handler {why}"
            )
            self._found.add(event.at, text, over, event)

    def finish(self, event: Event) -> None:
        fields = event.fields
        entity = (fields["inc"], fields["type"], fields["id"])
        message = _message(event)
        self._on.get(entity, {}).pop(message, None)
        self._over[(*entity, message)] = event


def _message(event: Event) -> _Key:
    fields = event.fields
    return (fields["sender"], fields["role"], fields["shard"], fields["n"])
