"""C1, leading: a process whose leader key is gone, or is another's, soon leads no more."""

from __future__ import annotations

from math import inf

from domicile.core.state.keys import LEADER_KEY
from domicile.core.state.records import LeaderRecord, decode_record
from domicile.testing.checkers.reading import Reading, Spans, read
from domicile.testing.checkers.verdict import Findings, Violation
from domicile.testing.history import Event, History
from domicile.testing.processes.history import RealHistory

NOTICE_S = 2.0
"""Seconds in which a process that runs and reaches the store learns that its key is gone: a watch
may lag, and break, and then a listing takes a while."""


def check_leading(history: History) -> list[Violation]:
    """C1: a leader that runs and reaches the store stops within 2 s after it lost the leader key.

    Not judged: a time in which answers of the store get lost, or in which it went back (S5); and
    real processes, because a handler may block the loop of one, and no event says so."""
    reading = read(history)
    if isinstance(history, RealHistory):
        return []
    found = Findings("C1")
    leading: dict[str, Event] = {}
    lost: dict[str, Event] = {}
    holder = ""
    excuses = _Excuses(history, reading)
    for event in history.events:
        kind, fields = event.kind, event.fields
        if kind == "leading":
            leading[fields["inc"]] = event
            if fields["inc"] == holder:
                lost.pop(fields["inc"], None)
        elif kind in ("deposed", "fenced", "ended"):
            _judge(found, reading, excuses, lost.pop(fields["inc"], None), event.at, fields["inc"])
            leading.pop(fields["inc"], None)
        elif kind == "fault" and fields["fault"] == "crash":
            lost.pop(fields["inc"], None)
            leading.pop(fields["inc"], None)
        elif kind == "rewound":
            leading.clear()
            lost.clear()
        elif kind in ("commit", "expire"):
            puts = [put[1] for put in fields.get("puts", ()) if put[0] == LEADER_KEY]
            if puts:
                holder = decode_record(puts[-1], LeaderRecord).incarnation
            elif LEADER_KEY in fields.get("deletes", ()):
                holder = ""
            else:
                continue
            for inc in leading:
                if inc != holder:
                    lost.setdefault(inc, event)
    for inc, event in lost.items():
        if not reading.dead(inc, reading.end):
            _judge(found, reading, excuses, event, reading.end, inc)
    return found.violations


def _judge(
    found: Findings, reading: Reading, excuses: _Excuses, lost: Event | None, at: float, inc: str
) -> None:
    if lost is None or excuses.of(inc).outside(lost.at, at) <= NOTICE_S + reading.slack_s:
        return
    message = (
        f"{reading.name(inc)} still led {at - lost.at:.3f} s after it had lost the leader key, "
        "though it ran and reached the store"
    )
    found.add(at, message, lost)


class _Excuses:
    """When a process could not learn anything from the store."""

    def __init__(self, history: History, reading: Reading) -> None:
        self._freezes = reading.freezes
        self._outages: dict[str, list[tuple[float, float]]] = {"": []}
        away: dict[str, float] = {}
        for event in history.of("fault", "quiet"):
            fault, inc = event.fields.get("fault"), event.fields.get("inc") or ""
            if fault in ("outage", "full", "lag", "slow", "delay", "loss", "starved"):
                away.setdefault(inc, event.at)
            elif fault == "lost replies":
                # Some listings and commits get no answer, until the calm.
                self._outages[""].append((event.at, reading.quiet_at or inf))
            elif event.kind == "quiet" or fault in ("back", "fast", "free", "heal"):
                for whose in [inc] if fault in ("back", "fast", "free") else list(away):
                    if whose in away and (whose or fault != "heal"):
                        span = (away.pop(whose), event.at)
                        self._outages.setdefault(whose, []).append(span)
        for whose, since in away.items():
            self._outages.setdefault(whose, []).append((since, inf))

    def of(self, inc: str) -> Spans:
        """The times of one process."""
        own = self._outages.get(inc, []) if inc else []
        return Spans([*self._outages[""], *own, *self._freezes.get(inc, ())])
