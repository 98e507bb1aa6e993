"""Every rule has a history that breaks it, and a checker that says so."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest

from domicile.core.ids import Incarnation, ShardKey
from domicile.core.state.keys import LEADER_KEY, block_key, node_key, release_key
from domicile.core.state.records import LeaderRecord, NodeRecord, encode_record
from domicile.core.state.shardmap import (
    BLOCK_SIZE,
    FREE,
    Block,
    Entry,
    ShardState,
    encode_block,
    leader_txn,
)
from domicile.testing.checkers import CHECKERS, Violation, check
from domicile.testing.checkers.verdict import LIMIT
from domicile.testing.history import History

A, B, C = (Incarnation(letter * 32) for letter in "abc")
LIMITS = {"buffer": 4, "window": 4, "mailbox": 3, "chain": 2}


class Tape:
    """A history written by hand: two nodes, one client, shards 0 (at A) and 1 (at B) opened."""

    def __init__(self, *, opened: bool = True) -> None:
        self.now = 1000.0
        self.history = History(lambda: self.now)
        self.revision = 0
        self.entries = [FREE] * BLOCK_SIZE
        for inc, node in ((A, "node-a"), (B, "node-b"), (C, "client")):
            self.note("life", inc=inc, node=node, hosts=inc != C, limits=LIMITS)
            self.renew(inc)
            if inc != C:
                self.register(inc, node)
        self.lead(A, "node-a")
        if opened:
            self.store({0: entry(A, 1), 1: entry(B, 1)})
            self.note("open", inc=A, role="r", shard=0, epoch=1)
            self.note("open", inc=B, role="r", shard=1, epoch=1)

    def note(self, kind: str, **fields: Any) -> Tape:
        self.history.event(kind, **fields)
        return self

    def wait(self, seconds: float, *, renew: bool = True) -> Tape:
        self.now += seconds
        if renew:
            for inc in (A, B, C):
                self.renew(inc)
        return self

    def renew(self, inc: str) -> None:
        self.note("renewed", inc=inc, sent_at=self.now, ttl=6.0, margin=1.0)

    def commit(
        self, by: str, puts: list[tuple[bytes, bytes]], deletes: tuple[bytes, ...] = ()
    ) -> None:
        self.revision += 1
        listed = [(key, value, "") for key, value in puts]
        self.note("commit", by=by, revision=self.revision, puts=listed, deletes=list(deletes))

    def register(self, inc: Incarnation, node: str) -> None:
        record = NodeRecord(node, inc, f"{node}:1", ("r",), ("T",), 6.0)
        self.commit(node, [(node_key(inc), encode_record(record))])

    def lead(self, inc: Incarnation, node: str) -> None:
        self.commit(node, [(LEADER_KEY, encode_record(LeaderRecord(inc, node)))])

    def expire(self, *keys: bytes) -> None:
        self.revision += 1
        self.note("expire", revision=self.revision, deletes=list(keys))

    def store(self, entries: dict[int, Entry], by: str = "node-a", txn: str = "t") -> None:
        for shard, changed in entries.items():
            self.entries[shard] = changed
        value = encode_block(Block(txn, tuple(self.entries)))
        self.commit(by, [(block_key("r", 0), value)])

    def message(self, kind: str, n: int, *, inc: str = A, **fields: Any) -> Tape:
        known = {"sender": C, "role": "r", "shard": 0, "epoch": 1, "type": "T", "id": "x"}
        return self.note(kind, **{"inc": inc, "n": n, **known, **fields})

    def submit(self, n: int, **fields: Any) -> Tape:
        known = {"inc": C, "role": "r", "shard": 0, "type": "T", "id": "x", "method": "m"}
        more = {"ask": True, "chain": [], "held": 1, "timeout": 10.0}
        return self.note("submit", **{"n": n, **known, **more, **fields})

    def write(self, n: int, **fields: Any) -> Tape:
        known = {"inc": C, "role": "r", "shard": 0, "to": A, "epoch": 1}
        return self.note("write", **{"n": n, **known, "finishing": False, "open": 1, **fields})

    def flush(self, id: int = 1, *, to: str = A) -> Tape:
        """The client's flush of shard 0, which arrives at once."""
        self.note("flush", inc=C, role="r", shard=0, to=to, id=id)
        return self.note("flushed", inc=to, role="r", shard=0, sender=C, id=id)

    def accept(self, n: int, **fields: Any) -> Tape:
        return self.message("accept", n, **{"depth": 1, **fields})

    def start(self, n: int, **fields: Any) -> Tape:
        return self.message("start", n, **{"method": "m", "shared": False, **fields})

    def finish(self, n: int, how: str = "ok", **fields: Any) -> Tape:
        return self.message("finish", n, how=how, **fields)

    def outcome(self, n: int, outcome: str = "ok", **fields: Any) -> Tape:
        return self.note(
            "outcome", **{"inc": C, "role": "r", "shard": 0, "n": n, "outcome": outcome, **fields}
        )

    def lost(self, n: int) -> Tape:
        return self.note("lost", inc=C, role="r", shard=0, n=n)

    def fault(self, fault: str, inc: str | None = None) -> Tape:
        return self.note("fault", fault=fault, node=None, inc=inc)

    def ask(self, n: int, outcome: str = "ok") -> Tape:
        """A whole ask from the client to x at A."""
        self.submit(n).write(n).accept(n).start(n).finish(n, outcome)
        self.note("reply", inc=A, sender=C, role="r", shard=0, n=n)
        return self.outcome(n, outcome)

    def phase(self, kind: str, inc: str, epoch: int, shard: int = 0) -> Tape:
        return self.note(kind, inc=inc, role="r", shard=shard, epoch=epoch)

    def move(self) -> Tape:
        """A planned move of shard 0 from A to B."""
        self.store({0: entry(A, 1, "moving", change=2)})
        self.phase("draining", A, 1).phase("released", A, 1)
        self.store({0: entry(B, 2, change=3)})
        return self.phase("open", B, 2)

    def settle(self) -> Tape:
        """No more faults, and the grace after them is over."""
        self.note("quiet")
        return self.wait(16.0)


def entry(owner: Incarnation, epoch: int, state: ShardState = "serving", change: int = 1) -> Entry:
    return Entry(owner, epoch, state, B if state == "moving" else Incarnation(""), change, "")


def rejected(tape: Tape, rule: str, text: str, *also: str) -> Violation:
    """The one rule (and those it must also break) that rejects the tape; its first violation."""
    violations = check(tape.history)
    assert sorted({violation.rule for violation in violations}) == sorted({rule, *also})
    first = next(violation for violation in violations if violation.rule == rule)
    assert text in first.message
    assert str(first).startswith(f"{rule} broken at ")
    assert CHECKERS[rule](tape.history)[0] == first
    return first


def accepted(tape: Tape) -> None:
    assert [str(violation) for violation in check(tape.history)] == []


# --- what all accept


def test_a_history_in_which_all_goes_well_is_accepted() -> None:
    tape = Tape()
    tape.note("gone", inc=A, peer="d" * 32)
    for no in (1, 2):
        tape.note("taken", inc=A, peer=C, link="l", session=no, no=no)
    tape.ask(1).ask(2, "rejected").ask(3, "failed")
    tape.submit(4, ask=False).accept(4).start(4).finish(4)
    tape.message("start", -1, sender="", method="tick", shared=False)
    tape.message("finish", -1, sender="", how="ok")
    tape.start(5, shared=True).start(6, shared=True).finish(5).finish(6)
    tape.note("claim", role="r", shard=0, epoch=1, owner=A, ok=True)
    append(tape, 1, A, seq=0, count=2, batch=1)
    settle(tape, 1, A, batch=1, how="there")
    settle(tape, 1, A, batch=2, how="void")
    append(tape, 1, A, seq=2, count=1, batch=3)
    tape.wait(1.0).submit(7).write(7).accept(7).message("return", 7)
    tape.move()
    told(tape, B, 2, "serving", 3)
    tape.note("claim", role="r", shard=0, epoch=2, owner=B, ok=True)
    append(tape, 1, A, seq=3, count=1, batch=4, ok=False, why="fenced")
    settle(tape, 1, A, batch=5, how="fenced")
    append(tape, 2, B, seq=3, count=1, batch=1)
    tape.write(7, to=B, epoch=2).accept(7, inc=B, epoch=2)
    tape.start(7, inc=B, epoch=2).wait(0.5).message("resume", 7, inc=B, epoch=2)
    tape.finish(7, inc=B, epoch=2).outcome(7)
    tape.submit(8, shard=1, id="y").write(8, shard=1, to=B).fault("crash", B)
    tape.wait(8.0).expire(node_key(B))
    tape.store({0: entry(A, 3, change=4), 1: entry(A, 2, change=2)})
    tape.phase("open", A, 3).phase("open", A, 2, shard=1)
    tape.outcome(8, "maybe_executed", shard=1)
    tape.settle()
    tape.submit(9).start(9, epoch=3).finish(9, epoch=3).outcome(9).wait(20.0)
    accepted(tape)


def test_checkers_are_sorted_by_name() -> None:
    assert list(CHECKERS) == sorted(CHECKERS)


def test_a_checker_returns_only_the_first_violations() -> None:
    tape = Tape()
    for n in range(1, 100):
        tape.outcome(n)
    assert len(check(tape.history)) == LIMIT


def test_an_empty_history_is_accepted() -> None:
    assert check(History(lambda: 0.0)) == []


def test_a_grown_history_is_judged_anew() -> None:
    tape = Tape()
    accepted(tape)
    tape.outcome(1)
    rejected(tape, "I5", "never started")


def test_a_long_history_is_judged_quickly() -> None:
    tape = Tape()
    for n in range(1, 3001):
        tape.ask(n)
    for change in range(2, 302):
        tape.store({0: entry(A, 1, "moving" if change % 2 else "serving", change)})
        tape.phase("draining" if change % 2 else "open", A, 1)
        tape.wait(0.01)
    tape.settle()
    assert len(tape.history.events) > 20_000
    begun = time.process_time()
    assert len(check(tape.history)) == 1, "the last entry is moving for too long"
    # Far above the usual cost: this fails when something is no longer linear.
    assert time.process_time() - begun < 1.0


# --- I1a


def test_an_epoch_that_goes_back_is_rejected() -> None:
    tape = Tape().move()
    tape.store({0: entry(B, 1, change=4)})
    rejected(tape, "I1a", "went back from epoch 2 to 1")


def test_two_owners_in_one_epoch_are_rejected() -> None:
    tape = Tape()
    tape.store({0: entry(B, 1, change=2)})
    rejected(tape, "I1a", "two owners in epoch 1")


def test_a_change_without_a_new_number_is_rejected() -> None:
    tape = Tape()
    tape.store({0: entry(A, 1, "moving", change=1)})
    rejected(tape, "I1a", "without a rise of its change number 1")


def test_a_new_owner_before_the_release_is_rejected() -> None:
    tape = Tape()
    tape.store({0: entry(A, 1, "moving", change=2)})
    tape.phase("draining", A, 1)
    tape.store({0: entry(B, 2, change=3)})
    tape.phase("released", A, 1)
    rejected(tape, "I1a", "neither released epoch 1 nor lost its record (C4)")


def test_a_release_of_another_epoch_or_shard_does_not_count() -> None:
    tape = Tape().phase("released", A, 0).phase("released", A, 1, shard=1)
    tape.store({0: entry(B, 2, change=2)})
    rejected(tape, "I1a", "neither released")


def test_a_takeover_is_accepted_only_once_the_record_is_gone() -> None:
    tape = Tape()
    tape.expire(node_key(B))
    tape.store({1: entry(A, 2, change=2)})
    accepted(tape)


def test_a_record_deleted_in_the_same_commit_is_not_gone_yet() -> None:
    tape = Tape()
    tape.entries[1] = entry(A, 2, change=2)
    value = encode_block(Block("t", tuple(tape.entries)))
    tape.commit("node-a", [(block_key("r", 0), value)], (node_key(B),))
    rejected(tape, "I1a", "nor lost its record")


def test_a_new_owner_without_a_record_is_rejected() -> None:
    tape = Tape().phase("released", A, 1)
    tape.expire(node_key(B))
    tape.store({0: entry(B, 2, change=2)})
    rejected(tape, "I1a", "has no record")


def test_a_deposed_coordinator_that_writes_is_rejected() -> None:
    tape = Tape()
    tape.expire(LEADER_KEY)
    tape.lead(B, "node-b")
    tape.store({0: entry(A, 1, "moving", change=2)}, by="node-a")
    rejected(tape, "I1a", "two coordinators")


class Sealed:
    """A block of a store that writes one key at a time; A leads, then B, and both act (S8)."""

    def __init__(self) -> None:
        self.tape = Tape(opened=False)
        self.tape.history.one_key = True
        self.terms = {"node-a": self.tape.revision}
        self.write("node-a", {0: entry(A, 1), 1: entry(B, 1)})
        self.tape.expire(LEADER_KEY)
        self.tape.lead(B, "node-b")
        self.terms["node-b"] = self.tape.revision

    def write(self, by: str, entries: dict[int, Entry], term: int = 0) -> Sealed:
        txn = leader_txn(A if by == "node-a" else B, term or self.terms[by], 1)
        self.tape.store(entries, by, txn)
        return self


def test_a_leader_that_seals_and_then_decides_is_accepted() -> None:
    sealed = Sealed()
    # The deposed one may still decide until it is sealed off.
    sealed.write("node-a", {1: entry(B, 1, "moving", change=2)})
    sealed.write("node-b", {}).write("node-b", {1: entry(B, 1, change=3)})
    accepted(sealed.tape)


def test_a_new_owner_without_a_record_is_accepted_where_nobody_can_demand_one() -> None:
    sealed = Sealed().write("node-b", {})
    sealed.tape.note("open", inc=A, role="r", shard=0, epoch=1)
    sealed.tape.phase("released", A, 1)
    sealed.tape.expire(node_key(B))
    sealed.write("node-b", {0: entry(B, 2, change=2)})
    assert CHECKERS["I1a"](sealed.tape.history) == []


def test_a_deposed_leader_that_writes_over_a_seal_is_rejected() -> None:
    sealed = Sealed().write("node-b", {})
    sealed.write("node-a", {1: entry(B, 1, "moving", change=2)})
    rejected(sealed.tape, "I1a", "two coordinators (S8)")


def test_a_decision_before_the_seal_is_rejected() -> None:
    sealed = Sealed().write("node-b", {1: entry(B, 1, "moving", change=2)})
    rejected(sealed.tape, "I1a", "before it had sealed it (S8)")


def test_a_term_that_is_not_the_writers_is_rejected() -> None:
    sealed = Sealed()
    rejected(sealed.write("node-b", {}, term=99).tape, "I1a", "which nobody acquired (S8)")
    sealed = Sealed()
    rejected(sealed.write("node-b", {}, sealed.terms["node-a"]).tape, "I1a", "of node-a (S8)")


def test_a_map_write_without_a_leader_is_rejected() -> None:
    tape = Tape()
    tape.expire(LEADER_KEY)
    tape.store({0: entry(A, 1, "moving", change=2)})
    rejected(tape, "I1a", "nobody held the leader key")


def test_a_deleted_map_block_is_rejected() -> None:
    tape = Tape()
    tape.commit("node-a", [], (block_key("r", 0),))
    rejected(tape, "I1a", "was deleted")


def test_other_keys_are_anybodys_to_write() -> None:
    tape = Tape()
    tape.commit("node-b", [(release_key(B, ShardKey("r", 1), 1), b"")])
    accepted(tape)


# --- I1b


def test_a_frame_of_the_gone_is_rejected() -> None:
    tape = Tape().note("gone", inc=A, peer=B)
    tape.note("taken", inc=A, peer=B, link="l", session=1, no=1)
    rejected(tape, "I1b", "after learning that it is gone")


@pytest.mark.parametrize("numbers", [(2,), (1, 1), (1, 3), (1, 2, 1)])
def test_frames_taken_twice_or_with_a_gap_are_rejected(numbers: tuple[int, ...]) -> None:
    tape = Tape()
    for no in numbers:
        tape.note("taken", inc=A, peer=B, link="l", session=1, no=no)
    rejected(tape, "I1b", "was due")


def test_a_frame_of_an_older_session_is_rejected() -> None:
    tape = Tape()
    for no, session in ((1, 1), (2, 2), (3, 1)):
        tape.note("taken", inc=A, peer=B, link="l", session=session, no=no)
    rejected(tape, "I1b", "after session 2")


# --- I1c


@pytest.mark.parametrize("kind", ["start", "resume"])
def test_an_old_owner_that_runs_after_the_new_one_is_rejected(kind: str) -> None:
    tape = Tape().start(1)
    tape.expire(node_key(A))
    tape.store({0: entry(B, 2, change=2)})
    tape.phase("open", B, 2).start(2, inc=B, epoch=2)
    if kind == "start":
        tape.finish(1).start(3)
    else:
        tape.message("resume", 1)
    rejected(tape, "I1c", "had started in epoch 2")


def test_a_shard_between_two_visits_of_one_owner_is_guarded_too() -> None:
    tape = Tape().move().start(1, inc=B, epoch=2)
    tape.start(2, epoch=3, id="y").start(3, epoch=1, id="z")
    rejected(tape, "I1c", "which it had released")


def test_no_pause_explains_a_second_home_within_the_lease() -> None:
    tape = Tape().start(1).fault("freeze", A).wait(4.0, renew=False)
    tape.store({0: entry(B, 2, change=2)})
    tape.phase("open", B, 2).start(2, inc=B, epoch=2).fault("thaw", A).message("resume", 1)
    rejected(tape, "I1c", "had started in epoch 2", "I1a")


@pytest.mark.parametrize(("first", "second"), [(False, False), (False, True), (True, False)])
def test_overlapping_handlers_of_one_entity_are_rejected(first: bool, second: bool) -> None:
    tape = Tape().start(1, shared=first).start(2, shared=second)
    rejected(tape, "I1c", "ran at once")


def test_a_reopened_released_epoch_is_rejected() -> None:
    tape = Tape()
    tape.store({0: entry(A, 1, "moving", change=2)})
    tape.phase("draining", A, 1).phase("released", A, 1)
    tape.store({0: entry(A, 1, change=3)})
    tape.phase("open", A, 1)
    rejected(tape, "I1c", "again after releasing it")


def test_a_handler_that_runs_in_a_released_epoch_is_rejected() -> None:
    tape = Tape().start(1)
    tape.store({0: entry(A, 1, "moving", change=2)})
    tape.phase("draining", A, 1).phase("released", A, 1).message("resume", 1)
    rejected(tape, "I1c", "which it had released")


def test_an_abandoned_handler_that_goes_on_is_rejected() -> None:
    tape = Tape().start(1).finish(1, "abandoned").message("resume", 1)
    rejected(tape, "I1c", "whose handler was over")


def test_a_cancelled_handler_may_clean_up() -> None:
    accepted(Tape().start(1).finish(1, "cancelled").message("resume", 1))


# --- L3


def _deeds() -> dict[str, Callable[[Tape], object]]:
    return {
        "start": lambda tape: tape.start(2, id="y"),
        "resume": lambda tape: tape.message("resume", 1),
        "reply": lambda tape: tape.note("reply", inc=A, sender=C, role="r", shard=0, n=1),
    }


@pytest.mark.parametrize("deed", sorted(_deeds()))
def test_deeds_at_the_deadline_are_rejected_and_before_it_accepted(deed: str) -> None:
    tape = Tape().start(1).wait(4.999, renew=False)
    _deeds()[deed](tape)
    accepted(tape)
    tape = Tape().start(1).wait(5.0, renew=False)
    _deeds()[deed](tape)
    rejected(tape, "L3", "past its deadline")


@pytest.mark.parametrize("deed", sorted(_deeds()))
def test_deeds_after_the_fence_are_rejected(deed: str) -> None:
    tape = Tape().start(1).note("fenced", inc=A, reason="lost")
    _deeds()[deed](tape)
    rejected(tape, "L3", "after it had fenced")


def test_a_freeze_excuses_nothing_past_the_deadline() -> None:
    tape = Tape().start(1).fault("freeze", A).wait(6.0, renew=False)
    tape.fault("thaw", A).message("resume", 1)
    rejected(tape, "L3", "past its deadline")


def test_a_late_answer_to_an_old_renewal_does_not_shorten_the_lease() -> None:
    tape = Tape().wait(3.0)
    tape.note("renewed", inc=A, sent_at=tape.now - 2.0, ttl=6.0, margin=1.0)
    accepted(tape.wait(4.0, renew=False).start(1))


def test_a_handler_without_a_lease_is_rejected() -> None:
    tape = Tape()
    tape.note("life", inc="d" * 32, node="node-d", hosts=True, limits=LIMITS)
    tape.start(1, inc="d" * 32)
    rejected(tape, "L3", "without ever holding a lease")


def test_a_handler_at_a_client_is_rejected() -> None:
    rejected(Tape().start(1, inc=C), "L3", "it is a client")


# --- I2


def append(tape: Tape, epoch: int, owner: str, **fields: Any) -> Tape:
    known = {"role": "r", "shard": 0, "epoch": epoch, "owner": owner, "type": "T", "id": "x"}
    tape.history.count("batches")
    more = {"seq": 0, "count": 1, "batch": tape.history.counts["batches"], "ok": True, "why": ""}
    return tape.note("append", **{**known, **more, "keys": [], **fields})


def settle(tape: Tape, epoch: int, owner: str, *, batch: int, how: str) -> Tape:
    return tape.note("settle", role="r", shard=0, epoch=epoch, owner=owner, batch=batch, how=how)


def claimed() -> Tape:
    """A claimed epoch 1 and appended once, then B claimed epoch 2."""
    tape = Tape().note("claim", role="r", shard=0, epoch=1, owner=A, ok=True)
    append(tape, 1, A)
    return tape.note("claim", role="r", shard=0, epoch=2, owner=B, ok=True)


def test_an_append_under_an_old_epoch_is_rejected() -> None:
    rejected(append(claimed(), 1, A, seq=1), "I2", "claimed epoch 2")


def test_an_append_in_anothers_epoch_is_rejected() -> None:
    rejected(append(claimed(), 2, A, seq=1), "I2", "in an epoch that node-b")


def test_an_append_before_its_claim_is_rejected() -> None:
    rejected(append(claimed(), 3, A, seq=1), "I2", "without a claim")
    rejected(append(Tape(), 1, A), "I2", "without a claim")


def test_a_claim_of_an_old_epoch_is_rejected() -> None:
    tape = claimed().note("claim", role="r", shard=0, epoch=1, owner=A, ok=True)
    rejected(tape, "I2", "claim of node-a")


@pytest.mark.parametrize("seq", [0, 2])
def test_an_append_that_overwrites_or_leaves_a_gap_is_rejected(seq: int) -> None:
    rejected(append(claimed(), 2, B, seq=seq), "I2", "but its journal ended at 1")


def test_a_batch_behind_a_later_one_is_rejected() -> None:
    tape = append(claimed(), 2, B, seq=1, batch=7)
    rejected(append(tape, 2, B, seq=2, batch=6), "I2", "batch 6 of that append of node-b")


def test_a_batch_may_hold_several_entities() -> None:
    tape = append(claimed(), 2, B, seq=1, batch=7)
    accepted(append(tape, 2, B, seq=0, batch=7, id="y"))


def test_refused_claims_and_appends_say_nothing() -> None:
    tape = append(claimed(), 1, A, seq=0, ok=False, why="fenced")
    accepted(tape.note("claim", role="r", shard=0, epoch=1, owner=A, ok=False))


def test_a_shard_whose_claim_holds_is_not_refused_because_of_another() -> None:
    tape = append(claimed(), 2, B, seq=1, ok=False, why="fenced")
    rejected(tape, "I2", "was refused as fenced, though its claim holds (J3)")
    accepted(append(claimed(), 2, B, seq=1, ok=False, why="busy"))


def test_a_batch_that_another_overtook_is_rejected_unless_it_was_settled() -> None:
    tape = append(claimed(), 2, B, seq=1, batch=7)
    append(tape, 2, B, seq=1, batch=6, ok=False, why="fenced")
    rejected(tape, "I2", "batch 6 of node-b (bbbbbbbb) for r/0 was neither answered nor settled")
    tape = settle(claimed(), 2, B, batch=6, how="void")
    append(tape, 2, B, seq=1, batch=7)
    accepted(append(tape, 2, B, seq=1, batch=6, ok=False, why="fenced"))


# --- I3


def told(tape: Tape, owner: str, epoch: int, state: str, change: int) -> Tape:
    fields = {"owner": owner, "epoch": epoch, "state": state, "change": change}
    return tape.note("told", inc=A, to=B, role="r", shard=0, **fields)


def test_an_entry_told_before_it_is_stored_is_rejected() -> None:
    tape = told(Tape(opened=False), A, 1, "serving", 1)
    tape.store({0: entry(A, 1)})
    rejected(tape, "I3", "which was not stored")


@pytest.mark.parametrize(
    ("owner", "epoch", "state", "change"),
    [(B, 1, "serving", 1), (A, 2, "serving", 1), (A, 1, "moving", 1), (A, 1, "serving", 2)],
)
def test_an_entry_told_otherwise_than_stored_is_rejected(
    owner: str, epoch: int, state: str, change: int
) -> None:
    rejected(told(Tape(), owner, epoch, state, change), "I3", "which was not stored")


def test_old_stored_entries_may_be_repeated() -> None:
    accepted(told(Tape().move(), A, 1, "serving", 1))


def test_opening_before_the_store_says_so_is_rejected() -> None:
    rejected(Tape().phase("open", B, 2), "I3", "before the store said serving")


def test_draining_before_the_store_says_so_is_rejected() -> None:
    rejected(Tape().phase("draining", A, 1), "I3", "before the store said moving")
