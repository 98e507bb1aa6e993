"""The history of a cluster of real processes, merged from the records that each of them wrote.

Made by `domicile.testing.processes.cluster`. All records use one clock of one machine, so their
times can be compared. An event is stamped before its effects leave its process, and a commit when
its statement is handed to the store. So no cause is stamped later than its effect.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from math import inf, nextafter

from domicile.core.state.keys import NODES
from domicile.stores.commit_log import QueuedCommit
from domicile.testing.history import Event, History

SLACK_S = 0.5
"""Seconds by which a timer of a busy machine may be late before checkers object."""

WAIT_S = 10.0
"""Seconds that a statement may wait for the store's lock; a longer wait gives the wrong time."""


VIEW_S = 5.0
"""Seconds after a standstill of the server in which the harness may see commits late."""

ANSWER_S = 1.0
"""Seconds after which a server that runs has carried out what it was asked for."""


class RealHistory(History):
    """A history in real time: complete when made, and nothing can be added.

    `slack_s` is what checkers allow besides the exact times of the rules.
    """

    def __init__(self, events: list[Event], counts: Counter[str], slack_s: float = SLACK_S) -> None:
        super().__init__(lambda: events[-1].at if events else 0.0)
        self.slack_s = slack_s
        self.events = events
        self.counts = counts
        self.closed = True


def before(history: History, seconds: float) -> RealHistory:
    """A history without its last seconds, of which something may not be written yet."""
    events = history.events
    until = (events[-1].at if events else 0.0) - seconds
    cut = RealHistory([event for event in events if event.at <= until], history.counts)
    cut.one_key = history.one_key
    return cut


def merge(
    commits: Iterable[QueuedCommit],
    recorded: Iterable[Event],
    counts: Counter[str],
    cluster: str,
    until: float,
    seen: Mapping[int, float] | None = None,
    stood: Sequence[tuple[float, float]] = (),
) -> RealHistory:
    """All events up to a time, in the order of their times; of equal times, commits come first.

    A cut by time contains every cause of each event in it. Commits come in the order of their
    revisions: of those that waited for one lock, the first in line need not have got it first.
    `seen` says when the harness saw them, for what a log has no time of; `stood`, from when to when
    the store's server did nothing at all.
    """
    recorded = list(recorded)
    stops = {
        event.fields["inc"]: event.at for event in recorded if event.kind in ("fenced", "ended")
    }
    seen = {} if seen is None else seen
    prefix = f"{cluster}/".encode()
    found: list[Event] = []
    at = float("-inf")
    for commit in commits:
        when = commit.at
        if commit.guessed:
            seen_at = seen.get(commit.revision, inf)
            when = _not_while_it_stood(when, stood, seen_at)
            if any(until <= when < until + VIEW_S for _, until in stood):
                # The harness, too, has yet to connect to the server again.
                seen_at = min(seen_at, when + ANSWER_S)
            when = max(when, _not_before_its_end(commit, prefix, stops, seen_at))
        at = max(at, when) if at - when < WAIT_S else when
        found.append(_stored(commit, prefix)._replace(at=at))
    found += recorded
    events = [event for event in found if event.at <= until]
    events.sort(key=lambda event: event.at)
    return RealHistory(events, counts)


def _not_before_its_end(
    commit: QueuedCommit, prefix: bytes, stops: Mapping[str, float], seen_at: float
) -> float:
    """When the records of incarnations went, of which each may have let go of its own by itself.

    The next commit may have been sent before that one. An incarnation whose record went while it
    ran stops later than that was seen. What the harness did not see as it happened proves nothing.
    """
    own = prefix + NODES
    names = [key.removeprefix(own).decode() for key in commit.deletes if key.startswith(own)]
    before = [stops[name] for name in names if stops.get(name, inf) <= seen_at]
    return max([commit.at, *(nextafter(at, inf) for at in before)])


def _not_while_it_stood(at: float, stood: Sequence[tuple[float, float]], seen_at: float) -> float:
    """When a commit happened that was guessed to be as early as the next one was sent.

    That one may have waited for a server that stood still, or was away. If the harness saw the
    commit only after that, the server made it after that.
    """
    for since, until in stood:
        if at < until and (since <= at if seen_at == inf else until <= seen_at):
            at = until
    return at


def _stored(commit: QueuedCommit, prefix: bytes) -> Event:
    """A commit of the store's log in the form in which the memory store reports it."""
    deletes = [key.removeprefix(prefix) for key in commit.deletes if key.startswith(prefix)]
    if commit.expiry:
        return Event(commit.at, "expire", {"revision": commit.revision, "deletes": deletes})
    puts = [
        (key.removeprefix(prefix), value, lease)
        for key, value, lease in commit.puts
        if key.startswith(prefix)
    ]
    fields = {"by": commit.by, "revision": commit.revision, "puts": puts, "deletes": deletes}
    return Event(commit.at, "commit", fields)
