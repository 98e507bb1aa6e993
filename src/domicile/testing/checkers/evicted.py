"""C6, evicted: a silent node is evicted only if half of the other members do not reach it
either."""

from __future__ import annotations

from domicile.core.state.keys import LEADER_KEY, NODES
from domicile.core.state.records import LeaderRecord, NodeRecord, decode_record
from domicile.testing.checkers.reading import Reading, read
from domicile.testing.checkers.verdict import Findings, Violation
from domicile.testing.history import Event, History

WORD_S = 15.0
"""Seconds that a member's report may be old when the eviction is stored: it counts for a few
seconds, and the commit may arrive late (S1)."""

KNOWN_S = 5.0
"""Seconds since registration from which a member's missing report counts: a leader that does not
know the member yet cannot ask it."""


def check_evicted(history: History) -> list[Violation]:
    """C6: a node is marked `evicted` only after half of the other members did not reach it."""
    judge = _Judge(read(history))
    for event in history.of("probed", "commit", "expire", "rewound"):
        fields = event.fields
        if event.kind == "probed":
            if not fields["reached"]:
                judge.unreached.setdefault(fields["node"], {})[fields["inc"]] = event
            continue
        if event.kind == "rewound":
            judge.since.clear()
            judge.evicted.clear()
            puts = fields["items"]
        else:
            puts = fields.get("puts", ())
        for put in puts:
            judge.put(event, put[0], put[1])
        for key in fields.get("deletes", ()):
            judge.since.pop(key[len(NODES) :].decode() if key.startswith(NODES) else "", None)
    return judge.found.violations


class _Judge:
    def __init__(self, reading: Reading) -> None:
        self.found = Findings("C6")
        self.since: dict[str, float] = {}
        self.evicted: dict[str, None] = {}
        self.unreached: dict[str, dict[str, Event]] = {}
        self._reading = reading
        self._leader = ""

    def put(self, event: Event, key: bytes, value: bytes) -> None:
        """A value is stored; an eviction that a backup brought back is not judged again (S5)."""
        if key == LEADER_KEY:
            self._leader = decode_record(value, LeaderRecord).incarnation
        elif key.startswith(NODES):
            inc = key[len(NODES) :].decode()
            self.since.setdefault(inc, event.at)
            if decode_record(value, NodeRecord).status == "evicted" and inc not in self.evicted:
                self.evicted[inc] = None
                if event.kind == "commit":
                    self._judge(event, inc)

    def _judge(self, event: Event, inc: str) -> None:
        out = (self._leader, *self.evicted)
        others = [
            other
            for other, at in self.since.items()
            if other not in out and event.at - at >= KNOWN_S
        ]
        words = self.unreached.get(inc, {}).values()
        against = [word for word in words if event.at - word.at <= WORD_S]
        if 2 * len(against) < len(others):
            message = (
                f"{self._reading.name(inc)} was evicted though only {len(against)} of the "
                f"{len(others)} other members did not reach it"
            )
            self.found.add(event.at, message, *against, event)
