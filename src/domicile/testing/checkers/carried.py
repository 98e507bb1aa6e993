"""DX, carried: what an entity takes along on a planned move is the newest, and arrives once.

A campaign's entities note their counts and timers in the history; nothing else is known of them.
"""

from __future__ import annotations

from domicile.core.ids import ShardKey
from domicile.testing.checkers.reading import Reading, Stored, read
from domicile.testing.checkers.verdict import Findings, Violation
from domicile.testing.history import Event, History

EARLY = 0.002
"""By which share of its delay a timer may be early: clocks differ by a thousandth (A1)."""

EARLY_S = 0.005

LATE_S = 9.0
"""Seconds after which a due timer must have fired: its shard may be moving, its entity busy."""

YOUNG_S = 2.0
"""Seconds since a process began in which others may not know its record."""

_Entity = tuple[str, str]


def check_carried(history: History) -> list[Violation]:
    """DX: an entity begins at a new home with nothing or with its newest count, and without a
    fault with that (DX-13); a timer fires once, not early, not after it was replaced, and without a
    fault it does fire (DX-25). A move counts as a fault if it ended elsewhere than it was to go, or
    at a node that had just begun: its former home may not know that node yet."""
    reading = read(history)
    judge = _Judge(reading)
    verbs = {
        "woke": judge.woke,
        "increased": judge.increased,
        "armed": judge.armed,
        "rang": judge.rang,
    }
    for position, event in enumerate(history.events):
        verb = verbs.get(event.kind)
        if verb is not None:
            verb(event, (event.fields["type"], event.fields["id"]))
        elif event.kind == "submit":
            shard = ShardKey(event.fields["role"], event.fields["shard"])
            judge.shards[event.fields["type"], event.fields["id"]] = shard
        elif event.kind == "rewound":
            judge.forget()
        for stored in reading.stored.get(position, ()):
            judge.moved(stored)
    judge.end()
    return judge.found.violations


class _Judge:
    def __init__(self, reading: Reading) -> None:
        self.found = Findings("DX")
        self._reading = reading
        self._newest: dict[_Entity, Event] = {}
        self._pending: dict[_Entity, Event] = {}
        self._armed: dict[int, tuple[Event, Event | None]] = {}
        """Timers by their token, and by what each was replaced."""
        self._rang: dict[int, Event] = {}
        self.shards: dict[_Entity, ShardKey] = {}
        self._strayed: dict[ShardKey, list[float]] = {}
        """When a shard got a home that it was not on its way to."""

    def forget(self) -> None:
        """A3 failed: epochs begin again, and for a while there may be two homes (S5)."""
        self._newest.clear()
        self._pending.clear()
        self._armed.clear()

    def moved(self, stored: Stored) -> None:
        """A shard gets a new owner: the one that its last entry named, or another one."""
        before, after = stored.before, stored.after
        if after.epoch == before.epoch:
            return
        life = self._reading.lives.get(after.owner)
        is_young = life is None or stored.event.at - life.at < YOUNG_S
        if is_young or (before.state, before.to) != ("moving", after.owner):
            self._strayed.setdefault(stored.shard, []).append(stored.event.at)

    def _undisturbed(self, entity: _Entity, start: float, end: float) -> bool:
        """Whether nothing may have been lost in that time."""
        shard = self.shards.get(entity)
        strayed = [] if shard is None else self._strayed.get(shard, [])
        return not self._reading.disturbed.overlap(start, end) and not any(
            start <= at <= end for at in strayed
        )

    def increased(self, event: Event, entity: _Entity) -> None:
        self._newest[entity] = event

    def woke(self, event: Event, entity: _Entity) -> None:
        last, count = self._newest.get(entity), event.fields["count"]
        self._newest[entity] = event
        if last is None:
            return
        newest, where = last.fields["count"], f"{entity[0]}/{entity[1]}"
        if count not in (0, newest):
            message = f"{where} began with count {count}, but its newest was {newest} (DX-13)"
            self.found.add(event.at, message, last, event)
        elif count != newest and self._undisturbed(entity, last.at, event.at):
            message = f"{where} lost its count {newest} without a fault (DX-13)"
            self.found.add(event.at, message, last, event)

    def armed(self, event: Event, entity: _Entity) -> None:
        before = self._pending.get(entity)
        if before is not None:
            self._armed[before.fields["token"]] = (before, event)
        self._pending[entity] = event
        self._armed[event.fields["token"]] = (event, None)

    def rang(self, event: Event, entity: _Entity) -> None:
        token = event.fields["token"]
        again = self._rang.setdefault(token, event)
        known = self._armed.get(token)
        what = f"timer {token} of {entity[0]}/{entity[1]}"
        if again is not event:
            self.found.add(event.at, f"{what} fired twice (DX-25)", again, event)
        if known is None:
            return
        armed, instead = known
        delay_s = armed.fields["delay"]
        due_at = armed.at + delay_s - EARLY * delay_s - EARLY_S
        if event.at < due_at - self._reading.slack_s:
            early_s = armed.at + delay_s - event.at
            self.found.add(event.at, f"{what} fired {early_s:.6f} s early (DX-25)", armed, event)
        if instead is not None and instead.at < due_at:
            message = f"{what} fired though another had taken its place (DX-25)"
            self.found.add(event.at, message, armed, instead, event)
        if self._pending.get(entity) is armed:
            del self._pending[entity]

    def end(self) -> None:
        """Timers that should have fired."""
        for entity, armed in self._pending.items():
            late_at = armed.at + armed.fields["delay"] + LATE_S
            if late_at < self._reading.calm_until and self._undisturbed(entity, armed.at, late_at):
                message = f"timer {armed.fields['token']} of {entity[0]}/{entity[1]} never fired"
                self.found.add(late_at, f"{message} (DX-25)", armed)
