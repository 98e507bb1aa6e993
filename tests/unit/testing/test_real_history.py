"""Histories of real processes: what is in them when, and what checkers grant them."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from domicile.core.state.keys import NODES
from domicile.stores.sqlite.store import QueuedCommit
from domicile.testing.checkers import check
from domicile.testing.history import Event, History
from domicile.testing.processes.history import RealHistory, before, merge

ROLE = "default"


def test_commits_that_waited_for_one_lock_are_told_in_the_order_of_their_revisions() -> None:
    log = [
        QueuedCommit(1, 3.0, "node-0", [], [b"one/a"], False),
        QueuedCommit(2, 1.0, "node-1", [], [b"one/b"], False),
        QueuedCommit(3, 4.0, "node-1", [], [b"one/c"], False),
    ]
    history = merge(log, [Event(2.0, "start", {})], Counter(), "one", 5.0)
    told = [(event.at, event.kind, event.fields.get("revision")) for event in history.events]
    assert told == [
        (2.0, "start", None),
        (3.0, "commit", 1),
        (3.0, "commit", 2),
        (4.0, "commit", 3),
    ]
    assert [event.at for event in before(history, 1.0).events] == [2.0, 3.0, 3.0]


def test_a_record_that_its_own_node_removed_did_not_go_before_that_node_ended() -> None:
    """As on etcd, whose log has no time of that: the next commit may have been sent before."""

    def told(seen_at: float) -> list[str]:
        log = [
            QueuedCommit(1, 1.0, "node-0", [], [b"one/a"], False),
            QueuedCommit(2, 1.9, "", [], [b"one/" + NODES + b"x"], True, guessed=True),
            QueuedCommit(3, 1.9, "node-1", [], [b"one/d"], False),
        ]
        ended = Event(2.0, "ended", {"inc": "x"})
        history = merge(log, [ended], Counter(), "one", 5.0, {2: seen_at})
        return [event.kind for event in history.events]

    assert told(2.1) == ["commit", "ended", "expire", "commit"]
    assert told(1.95) == ["commit", "expire", "commit", "ended"], "checkers shall see that"


def test_no_record_went_while_the_server_of_the_store_stood_still() -> None:
    """The next commit was sent meanwhile and had to wait; its time is no time of an expiry."""

    def told(at: float, seen: dict[int, float]) -> list[str]:
        log = [
            QueuedCommit(1, 1.0, "node-0", [], [b"one/a"], False),
            QueuedCommit(2, at, "", [], [b"one/" + NODES + b"x"], True, guessed=True),
            QueuedCommit(3, at, "node-1", [], [b"one/d"], False),
        ]
        deeds = [Event(2.5, "accept", {"inc": "x"}), Event(4.5, "fenced", {"inc": "x"})]
        history = merge(log, deeds, Counter(), "one", 5.0, seen, [(2.0, 4.0)])
        return [event.kind for event in history.events]

    after = ["commit", "accept", "expire", "commit", "fenced"]
    assert told(2.2, {2: 4.1}) == after
    assert told(1.99, {2: 4.1}) == after, "sent just before, and answered after it"
    before_it = ["commit", "expire", "commit", "accept", "fenced"]
    assert told(1.99, {2: 1.995}) == before_it, "checkers shall see that"


def test_a_late_view_after_a_standstill_dates_no_record_by_a_node_that_woke_later() -> None:
    log = [
        QueuedCommit(1, 1.0, "node-0", [], [b"one/a"], False),
        QueuedCommit(2, 2.2, "", [], [b"one/" + NODES + b"x"], True, guessed=True),
        QueuedCommit(3, 2.2, "node-1", [], [b"one/d"], False),
    ]
    deeds = [Event(4.5, "open", {"inc": "y"}), Event(5.5, "fenced", {"inc": "x"})]
    history = merge(log, deeds, Counter(), "one", 9.0, {2: 5.6}, [(2.0, 4.0)])
    told = [event.kind for event in history.events]
    assert told == ["commit", "expire", "commit", "open", "fenced"]


# what a pause may leave: one deed, begun before it


def after_a_pause(deeds: list[Event]) -> History:
    lease: dict[str, Any] = {"inc": "a", "sent_at": 0.0, "ttl": 3.0, "margin": 1.0}
    life = {"inc": "a", "node": "node-0", "hosts": True, "limits": {}}
    fault = {"node": 0, "inc": "a"}
    return RealHistory(
        [
            Event(0.0, "life", life),
            Event(0.1, "renewed", lease),
            Event(1.0, "fault", {"fault": "freeze", **fault}),
            Event(5.0, "fault", {"fault": "thaw", **fault}),
            *deeds,
            Event(5.1, "fenced", {"inc": "a", "reason": "deadline passed"}),
        ],
        Counter(),
    )


def deed(kind: str, at: float, n: int, sender: str = "b") -> Event:
    where = {"inc": "a", "role": ROLE, "shard": 0, "sender": sender, "n": n}
    if kind == "reply":
        return Event(at, kind, where)
    return Event(at, kind, {**where, "epoch": 1, "type": "bell", "id": f"x{n}", "shared": True})


def late(*deeds: Event) -> list[str]:
    return [v.message for v in check(after_a_pause([*deeds])) if v.rule == "L3"]


@pytest.mark.parametrize("kind", ["start", "resume"])
def test_a_pause_between_a_guard_and_its_deed_excuses_that_deed_alone(kind: str) -> None:
    assert late(deed(kind, 5.01, 1)) == []
    assert len(late(deed(kind, 5.01, 1), deed(kind, 5.02, 2))) == 1
    assert len(late(deed("finish", 5.005, 9), deed(kind, 5.01, 1))) == 1


def test_a_pause_excuses_the_replies_of_one_frame() -> None:
    assert late(deed("reply", 5.01, 1), deed("reply", 5.0101, 2)) == []
    assert len(late(deed("reply", 5.01, 1), deed("reply", 5.0101, 2, sender="c"))) == 1
    assert len(late(deed("reply", 5.01, 1), deed("reply", 5.02, 2))) == 1
    assert len(late(deed("reply", 5.01, 1), deed("start", 5.0101, 2))) == 1
    assert len(late(deed("start", 5.01, 1), deed("reply", 5.0101, 2))) == 1


# what a busy machine may leave: one deed that is noted just past the deadline


def test_one_deed_may_be_noted_just_past_the_deadline() -> None:
    def told(*deeds: Event) -> list[str]:
        events = [event for event in after_a_pause([]).events if event.kind in ("life", "renewed")]
        history = RealHistory([*events, *deeds], Counter())
        return [violation.message for violation in check(history) if violation.rule == "L3"]

    assert told(deed("start", 2.01, 1)) == []
    assert len(told(deed("start", 2.06, 1))) == 1
    assert len(told(deed("start", 2.01, 1), deed("start", 2.011, 2))) == 1
    assert told(deed("reply", 2.01, 1), deed("reply", 2.011, 2)) == []
    assert len(told(deed("reply", 2.01, 1), deed("reply", 2.02, 2))) == 1
