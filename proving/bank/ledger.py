"""The ledger that callers keep outside the cluster, and what it says about the journal in the end.

Filled by `tellers`, judged by `proving.bank.round`. Pure: what was asked and answered comes in, and
so do the events that the journal holds; complaints go out. It knows nothing of processes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import inf

from proving.bank.account import EMPTY, Booked, Slip, booked, parts_of

SHOWN = 4
"""Events on each side of the place that a complaint is about."""


@dataclass(slots=True)
class Leg:
    """One half of a transfer: one keyed ask, repeated until it is answered."""

    name: str
    """Also the key of the ask."""
    account: str
    amount: int
    """Below zero: a withdrawal."""
    answers: list[Slip] = field(default_factory=list[Slip])
    answered_at: float = inf
    """When the first answer was there."""
    refusals: int = 0
    """A refusal is not kept: a key that was refused may be carried out when it is sent again."""

    @property
    def is_refused(self) -> bool:
        """Whether it ended as a refusal."""
        return self.refusals > 0 and not self.answers

    @property
    def is_open(self) -> bool:
        """Whether nobody knows yet what became of it."""
        return not self.refusals and not self.answers


@dataclass(frozen=True, slots=True)
class Sight:
    """One answer that somebody saw, of whatever kind, and when it was asked for."""

    account: str
    what: str
    slip: Slip
    begun: float
    ended: float


@dataclass(frozen=True, slots=True)
class Complaint:
    """What is wrong, by which rule, and with which account; no account: with the whole."""

    rule: str
    account: str
    text: str

    def __str__(self) -> str:
        return f"{self.rule}: {self.account or 'bank'}: {self.text}"


@dataclass(slots=True)
class Ledger:
    """What callers did and saw."""

    legs: dict[str, Leg] = field(default_factory=dict[str, Leg])
    sights: list[Sight] = field(default_factory=list[Sight])
    failures: list[Complaint] = field(default_factory=list[Complaint])
    """Answers that a keyed ask may never have."""

    def begin(self, name: str, account: str, amount: int) -> Leg:
        """A leg is about to be asked for."""
        leg = self.legs[name] = Leg(name, account, amount)
        return leg

    def answered(self, leg: Leg, slip: Slip, begun: float, ended: float) -> None:
        """A leg was carried out, now or earlier."""
        leg.answers.append(slip)
        leg.answered_at = min(leg.answered_at, ended)
        # The reply of a repeated key is the stored one: it is not about now.
        if len(leg.answers) == 1:
            what = "withdrawal" if leg.amount < 0 else "deposit"
            self.sights.append(Sight(leg.account, f"{what} {leg.name}", slip, begun, ended))

    def refused(self, leg: Leg, slip: Slip, begun: float, ended: float) -> None:
        """A leg was refused: there was too little."""
        leg.refusals += 1
        if leg.answered_at < begun:
            text = f"{leg.name} was carried out, and was refused when it was sent again"
            self.failures.append(Complaint("key", leg.account, text))
        self.saw(leg.account, f"refusal of {leg.name}", slip, begun, ended)
        if -leg.amount <= slip.balance:
            text = f"{leg.name} over {-leg.amount} was refused with a balance of {slip.balance}"
            self.failures.append(Complaint("refusal", leg.account, text))

    def saw(self, account: str, what: str, slip: Slip, begun: float, ended: float) -> None:
        """Somebody saw an account's state."""
        self.sights.append(Sight(account, what, slip, begun, ended))

    def failed(self, leg: Leg, error: Exception) -> None:
        """A leg ended by an error that says that its handler ran."""
        text = f"{leg.name} failed by {type(error).__name__}: {error}"
        self.failures.append(Complaint("error", leg.account, text))


def judge(
    ledger: Ledger, journal: Mapping[str, Sequence[Booked]], served: Mapping[str, Slip]
) -> list[Complaint]:
    """All complaints. `journal` has the events of every account, `served` its last answers."""
    found = list(ledger.failures)
    prefixes = {account: _prefixes(events) for account, events in journal.items()}
    for account, events in journal.items():
        found += _booked_once(ledger, account, events)
        found += _never_below_zero(account, prefixes[account], events)
    places = {
        (account, event.leg): number
        for account, events in journal.items()
        for number, event in enumerate(events, 1)
    }
    for leg in ledger.legs.values():
        events, slips = journal.get(leg.account, ()), prefixes.get(leg.account, [EMPTY])
        found += _kept(leg, places.get((leg.account, leg.name), 0), events, slips)
    for sight in ledger.sights:
        known = prefixes.get(sight.account, [EMPTY])
        found += _is_prefix(sight, known, journal.get(sight.account, ()))
    found += _in_order(ledger.sights)
    for account, slip in served.items():
        last = prefixes.get(account, [EMPTY])[-1]
        if slip != last:
            text = f"in the end it answers {_said(slip)}, the journal has {_said(last)}"
            found.append(Complaint("state", account, text))
    found += _total(ledger, prefixes)
    return found


def _prefixes(events: Sequence[Booked]) -> list[Slip]:
    """The account after each number of events."""
    slips = [EMPTY]
    for event in events:
        slips.append(booked(slips[-1], event))
    return slips


def _booked_once(ledger: Ledger, account: str, events: Sequence[Booked]) -> Iterator[Complaint]:
    """Every event belongs to a leg of this account; a leg is there once, whole and in one piece."""
    times: Counter[str] = Counter()
    at = 0
    while at < len(events):
        name = events[at].leg
        leg = ledger.legs.get(name)
        if leg is None or leg.account != account:
            where = "nobody asked for" if leg is None else f"was for {leg.account}"
            yield Complaint("stray", account, f"event {at + 1} is of {name}, which {where}")
            at += 1
            continue
        wanted = parts_of(leg.amount, name)
        if tuple(events[at : at + len(wanted)]) != wanted:
            text = f"{name} over {leg.amount} is not whole at event {at + 1}"
            yield Complaint("torn", account, f"{text}: {_around(events, at)}")
            at += 1
            continue
        times[name] += 1
        if times[name] == 2:
            text = f"{name} is there again at event {at + 1}: {_around(events, at)}"
            yield Complaint("twice", account, text)
        at += len(wanted)


def _never_below_zero(
    account: str, slips: Sequence[Slip], events: Sequence[Booked]
) -> Iterator[Complaint]:
    for slip in slips:
        if slip.balance < 0 and events[slip.count - 1].part == events[slip.count - 1].parts:
            text = f"{slip.balance} after event {slip.count}: {_around(events, slip.count - 1)}"
            yield Complaint("overdraft", account, text)
            return


def _kept(
    leg: Leg, last: int, events: Sequence[Booked], slips: Sequence[Slip]
) -> Iterator[Complaint]:
    """What was answered is there, what was refused is not, and every answer was the same.

    `last` is the number of the leg's last event, 0 if there is none.
    """
    if leg.is_refused and last:
        text = f"{leg.name} was refused, and is at event {last}"
        yield Complaint("refusal", leg.account, text)
    if not leg.answers:
        return
    first = leg.answers[0]
    for other in leg.answers[1:]:
        if other != first:
            text = f"{leg.name} was answered by {_said(first)}, and by {_said(other)}"
            yield Complaint("key", leg.account, text)
            break
    if not last:
        text = f"{leg.name} was answered by {_said(first)}, and is not in the journal"
        yield Complaint("lost", leg.account, f"{text}: {_around(events, first.count - 1)}")
    elif slips[last] != first:
        text = f"{leg.name} was answered by {_said(first)}, the journal has {_said(slips[last])}"
        yield Complaint("answer", leg.account, text)


def _is_prefix(
    sight: Sight, slips: Sequence[Slip], events: Sequence[Booked]
) -> Iterator[Complaint]:
    """An answer rests on events that are in the journal, all of them and no other."""
    slip = sight.slip
    if slip.count >= len(slips):
        text = f"{sight.what} saw {_said(slip)}, the journal has {len(slips) - 1} events"
        yield Complaint("escaped", sight.account, text)
    elif slips[slip.count] != slip:
        text = f"{sight.what} saw {_said(slip)}, the journal has {_said(slips[slip.count])}"
        yield Complaint("escaped", sight.account, f"{text}: {_around(events, slip.count - 1)}")


def _in_order(sights: Sequence[Sight]) -> Iterator[Complaint]:
    """Who asks after an answer was there sees no less than that answer."""
    by_account: dict[str, list[Sight]] = {}
    for sight in sights:
        by_account.setdefault(sight.account, []).append(sight)
    for account, seen in by_account.items():
        ended = sorted(seen, key=lambda sight: sight.ended)
        newest: Sight | None = None
        at = 0
        for sight in sorted(seen, key=lambda sight: sight.begun):
            while at < len(ended) and ended[at].ended < sight.begun:
                if newest is None or ended[at].slip.count > newest.slip.count:
                    newest = ended[at]
                at += 1
            # The first answer of a leg may be a stored one, if an earlier try was carried out.
            is_old = sight.what.startswith(("deposit", "withdrawal"))
            if newest is not None and not is_old and sight.slip.count < newest.slip.count:
                text = f"{sight.what} saw {_said(sight.slip)} after {newest.what} had seen "
                yield Complaint("stale", account, f"{text}{_said(newest.slip)}")
                break


def _total(ledger: Ledger, prefixes: Mapping[str, Sequence[Slip]]) -> Iterator[Complaint]:
    """The balances are worth what the answered legs are worth."""
    if any(leg.is_open for leg in ledger.legs.values()):
        return  # then nobody can know; that callers did not end is told elsewhere
    wanted = sum(leg.amount for leg in ledger.legs.values() if leg.answers)
    found = sum(slips[-1].balance for slips in prefixes.values())
    if wanted != found:
        yield Complaint("total", "", f"all accounts have {found}, callers count {wanted}")


def _said(slip: Slip) -> str:
    return f"{slip.balance} after {slip.count} events (mark {slip.mark or 'none'})"


def _around(events: Sequence[Booked], at: int) -> str:
    """The events around a place, for a complaint."""
    first = max(0, at - SHOWN)
    listed = [
        f"{number}: {event.amount:+d} {event.leg} {event.part}/{event.parts}"
        for number, event in enumerate(events[first : at + SHOWN + 1], first + 1)
    ]
    return "journal there: " + ("; ".join(listed) if listed else "no events")
