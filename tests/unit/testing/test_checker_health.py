"""Histories under `fencing = "health"`, and of shards that nobody serves: good ones and bad ones.

Without a deadline (C9) nothing is late, but only the end of a process may free its shards.
"""

from __future__ import annotations

from math import inf

from test_checkers import A, B, Tape, accepted, entry, rejected

from domicile.core.ids import NOBODY
from domicile.core.state.keys import LEADER_KEY, node_key
from domicile.core.state.records import LeaderRecord, encode_record
from domicile.core.state.shardmap import Entry


class Endless(Tape):
    """Whoever renews here has no deadline."""

    def renew(self, inc: str) -> None:
        self.note("renewed", inc=inc, sent_at=self.now, ttl=inf, margin=1.0)


def _silent(tape: Tape) -> Tape:
    """A runs a handler, stands still for an hour and goes on with it."""
    tape.write(1).accept(1).start(1).fault("freeze", A).wait(3_600.0, renew=False)
    return tape


def _taken_over(tape: Tape) -> Tape:
    """B serves shard 0 in A's place."""
    record = encode_record(LeaderRecord(B, "node-b"))
    tape.commit("node-b", [(LEADER_KEY, record)], (node_key(A),))
    tape.store({0: entry(B, 2, change=2)}, by="node-b")
    return tape.phase("open", B, 2)


# --- L3, I1c: no deadline


def test_without_a_deadline_nothing_is_late() -> None:
    tape = _silent(Endless()).fault("thaw", A)
    accepted(tape.message("resume", 1).finish(1).start(2).finish(2))
    rejected(_silent(Tape()).fault("thaw", A).message("resume", 1), "L3", "past its deadline")


def test_a_fence_ends_it_all_the_same() -> None:
    tape = Endless().wait(3_600.0).note("fenced", inc=A, reason="its record is gone")
    accepted(tape)
    rejected(tape.start(1), "L3", "after it had fenced")


def test_a_pause_is_no_excuse_for_a_second_home() -> None:
    """With leases the rest of a turn is: there the record may have gone meanwhile."""
    tape = _taken_over(_silent(Endless())).start(2, inc=B, epoch=2).finish(2, inc=B, epoch=2)
    rejected(tape.fault("thaw", A).message("resume", 1), "I1c", "after node-b (bbbbbbbb) had")


# --- I1a: C5, and quarantine


def test_a_record_without_a_deadline_goes_only_after_its_holder() -> None:
    tape = _taken_over(_silent(Endless()))
    accepted(tape.fault("crash", A))
    tape = _taken_over(_silent(Endless())).fault("thaw", A)
    rejected(tape.note("fenced", inc=A, reason="its record is gone"), "I1a", "(C5)")


def _quarantined(tape: Tape) -> Tape:
    tape.store({0: Entry(NOBODY, 1, "quarantined", NOBODY, 2, "node-a", 3)}, by="node-b")
    return tape


def test_a_quarantine_takes_a_shard_from_the_dead_only() -> None:
    tape = Endless().fault("crash", A)
    record = encode_record(LeaderRecord(B, "node-b"))
    tape.commit("node-b", [(LEADER_KEY, record)], (node_key(A),))
    _quarantined(tape)
    accepted(tape)
    tape.store({0: entry(B, 2, change=3)}, by="node-b")
    accepted(tape.phase("open", B, 2))

    tape = Endless()
    tape.lead(B, "node-b")
    rejected(_quarantined(tape), "I1a", "quarantined while node-a (aaaaaaaa) had its record")


# --- L: shards that the dead keep


def _dead_at_the_end(tape: Tape, wait_s: float) -> Tape:
    tape.fault("crash", A).note("quiet")
    return tape.wait(wait_s, renew=False)


def test_a_shard_that_stays_with_the_dead_is_stuck() -> None:
    rejected(_dead_at_the_end(Endless(), 30.0).note("counted"), "L", "still stored as served by")
    accepted(_dead_at_the_end(Endless(), 20.0).note("counted"))


def test_a_lease_has_to_run_out_first() -> None:
    def long_lease() -> Tape:
        tape = Tape()
        tape.note("renewed", inc=A, sent_at=tape.now, ttl=60.0, margin=1.0)
        return tape

    accepted(_dead_at_the_end(long_lease(), 60.0).note("counted"))
    rejected(_dead_at_the_end(long_lease(), 80.0).note("counted"), "L", "node-a (aaaaaaaa)")


def test_nobody_is_blamed_if_nobody_is_left() -> None:
    tape = Endless().fault("crash", B)
    accepted(_dead_at_the_end(tape, 60.0).note("counted"))
