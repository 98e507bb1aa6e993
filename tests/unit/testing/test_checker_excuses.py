"""Histories that no excuse covers, though one is near: each beside its twin that is covered."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from math import inf

import pytest
from test_checkers import A, B, C, Tape, accepted, entry, rejected

from domicile.core.state.keys import client_key, node_key
from domicile.testing.checkers import check
from domicile.testing.checkers.reading import STARVED, Spans
from domicile.testing.history import Event
from domicile.testing.processes.history import RealHistory

D = "d" * 32


def real(tape: Tape) -> list[str]:
    """What is wrong with a tape as a history of real processes."""
    history = RealHistory(sorted(tape.history.events, key=lambda event: event.at), Counter())
    return [str(violation) for violation in check(history)]


def convicted(tape: Tape, rule: str, text: str) -> None:
    """A tape of real processes breaks one rule, once."""
    [message] = real(tape)
    assert message.startswith(f"{rule} broken")
    assert text in message


def starve(tape: Tape, since: float, until: float) -> Tape:
    fields = {"fault": STARVED, "node": None, "inc": None, "until": until}
    tape.history.events.append(Event(since, "fault", fields))
    return tape


# --- what a pause explains: L3


def asleep(tape: Tape, heard_s: float = 1.0) -> Tape:
    """A stood still past its deadline, which was 1005."""
    tape.wait(heard_s, renew=False).note("probed", inc=A, node=B, reached=True)
    return tape.fault("freeze", A).wait(7.0 - heard_s, renew=False).fault("thaw", A)


def woken(heard_s: float = 1.0, late_s: float = 0.01) -> Tape:
    """A stood still past its deadline, and then did one thing."""
    return asleep(Tape().accept(2), heard_s).wait(late_s, renew=False).start(2)


def test_a_pause_explains_a_late_start() -> None:
    assert real(woken()) == []


def test_a_pause_explains_a_late_start_that_was_noted_as_accepted_just_before() -> None:
    """A message that begins as it comes is accepted and started behind one guard."""
    assert real(asleep(Tape()).accept(2).start(2)) == []
    assert real(asleep(Tape()).accept(2).message("waking", 2).start(2)) == []
    assert real(asleep(Tape().accept(2)).message("waking", 2).start(2)) == []


def test_two_pauses_explain_a_late_start_that_was_noted_as_accepted_between_them() -> None:
    again = asleep(Tape()).accept(2).fault("freeze", A).wait(1.0, renew=False).fault("thaw", A)
    assert real(again.start(2)) == []


def test_a_pause_explains_a_late_start_of_what_runs_within_its_call() -> None:
    """All of a local ask is noted behind one guard, and its number is the caller's own."""
    within = asleep(Tape()).submit(1, inc=A).write(1, inc=A)
    assert real(within.accept(1, sender=A).start(1, sender=A)) == []


def test_a_pause_explains_a_late_start_beside_a_renewal() -> None:
    """They are noted by another thread."""
    tape = asleep(Tape().accept(2)).note("renewed", inc=A, sent_at=999.0, ttl=6.0, margin=1.0)
    assert real(tape.start(2)) == []


def test_a_pause_explains_no_late_start_behind_another_message() -> None:
    other = {"sender": B, "id": "y"}
    convicted(asleep(Tape().accept(2)).accept(1, **other).start(2), "L3", "(T/x)")
    convicted(asleep(Tape().accept(1, **other)).accept(2).start(1, **other), "L3", "(T/y)")
    convicted(asleep(Tape()).accept(2).accept(1, **other).start(2), "L3", "(T/x)")


def test_a_pause_explains_no_second_start() -> None:
    tape = asleep(Tape()).accept(2).start(2).finish(2)
    convicted(tape.accept(1, sender=B, id="y").start(1, sender=B, id="y"), "L3", "(T/y)")


@pytest.mark.parametrize("later_s", [0.06, 0.45, 0.6])
def test_a_pause_explains_no_start_some_time_after_what_was_noted_before_it(later_s: float) -> None:
    """An entity that suspends while it starts has another guard, of which nothing is noted."""
    tape = asleep(Tape()).accept(2).wait(later_s, renew=False)
    convicted(tape.start(2), "L3", "past its deadline")
    tape = asleep(Tape().accept(2)).message("waking", 2).wait(later_s, renew=False)
    convicted(tape.start(2), "L3", "past its deadline")


def test_a_pause_explains_nothing_that_has_a_guard_of_its_own() -> None:
    """Each resumption and each frame of replies has."""
    tape = asleep(Tape().accept(2).start(2)).accept(2)
    convicted(tape.message("resume", 2), "L3", "resumed a handler")
    reply = {"inc": A, "sender": C, "role": "r", "shard": 0}
    convicted(asleep(Tape()).accept(2).note("reply", n=2, **reply), "L3", "answered")


def test_a_pause_explains_nothing_long_after_its_end() -> None:
    convicted(woken(late_s=0.6), "L3", "past its deadline")


def test_a_pause_that_began_past_the_deadline_explains_nothing() -> None:
    assert any("started a handler (T/x)" in message for message in real(woken(heard_s=5.2)))


def test_a_pause_explains_no_handler_at_a_client_nor_without_a_lease() -> None:
    paused = Tape().fault("freeze", C).wait(1.0).fault("thaw", C).start(1, inc=C)
    convicted(paused, "L3", "it is a client")
    paused = Tape().note("life", inc=D, node="node-d", hosts=True, limits={})
    paused.fault("freeze", D).wait(1.0).fault("thaw", D).start(1, inc=D)
    convicted(paused, "L3", "without ever holding a lease")


def test_a_starved_machine_explains_a_late_start_of_who_stood_still() -> None:
    def tape() -> Tape:
        return starve(Tape().accept(1).wait(7.0, renew=False), 1001.0, 1007.0)

    assert real(tape().start(1)) == []
    for at in (1001.5, 1006.95):
        # Either it went on to its deadline, or for longer than that.
        ran = tape()
        ran.history.events.append(Event(at, "gone", {"inc": A, "peer": "e" * 32}))
        told = real(ran.start(1))
        assert bool(told) == (at > 1005.0)


def test_a_starved_machine_does_not_delay_the_fence_of_who_runs() -> None:
    def tape(*heard: float) -> Tape:
        tape = starve(Tape().wait(7.0, renew=False), 1001.0, 1007.0)
        tape.history.events += [Event(at, "gone", {"inc": A, "peer": "e" * 32}) for at in heard]
        return tape.note("fenced", inc=A, reason="deadline passed")

    assert real(tape()) == []
    assert real(tape(1002.0, 1004.0)) == []
    convicted(tape(*(1004.0 + 0.05 * n for n in range(60))), "L3", "still stood 2.0")


def test_stretches_of_a_starved_machine_with_hardly_anything_between_them_are_one() -> None:
    """Each begins when the one before it was felt, a moment after its end."""

    def tape(gap_s: float) -> Tape:
        tape = starve(Tape().wait(8.0, renew=False), 1004.0, 1006.0)
        starve(tape, 1006.0 + gap_s, 1007.9)
        return tape.note("fenced", inc=A, reason="deadline passed")

    assert real(tape(0.0001)) == []
    assert real(tape(0.4)) == []
    convicted(tape(0.6), "L3", "still stood 2.0")


@pytest.mark.parametrize("kind", ["submit", "write", "accept"])
def test_whoever_goes_on_past_its_deadline_need_not_fence_to_be_seen(kind: str) -> None:
    def tape(seconds: float) -> Tape:
        tape = Tape().wait(seconds, renew=False)
        if kind == "accept":
            return tape.accept(1)
        return tape.submit(1) if kind == "submit" else tape.write(1)

    accepted(tape(5.0))
    rejected(tape(5.01), "L3", "still stood 0.01")


# --- what a pause explains: I1c, I5


def overtaken(
    tape: Tape,
    *,
    after_s: float = 7.0,
    told: bool = True,
    by: Callable[[Tape], object] | None = None,
) -> Tape:
    """A stood still with message 1 while B took over and ran message 2; now it starts message 1."""
    tape.submit(1).write(1).accept(1).submit(2)
    tape.fault("freeze", A).wait(after_s, renew=False)
    tape.renew(B)
    tape.renew(C)
    tape.lead(B, "node-b")
    tape.expire(node_key(A))
    tape.store({0: entry(B, 2, change=2)}, by="node-b")
    tape.phase("open", B, 2)
    if told:
        tape.outcome(1, "maybe_executed")
    tape.write(2, to=B, epoch=2).accept(2, inc=B, epoch=2)
    tape.start(2, inc=B, epoch=2).finish(2, inc=B, epoch=2).outcome(2)
    tape.now += 0.01
    return tape.fault("thaw", A).start(1)


def rules(tape: Tape) -> list[str]:
    return sorted({message.split()[0] for message in real(tape)})


def test_a_pause_past_the_deadline_explains_one_start_after_the_new_homes() -> None:
    assert rules(overtaken(Tape())) == []


def test_a_pause_explains_no_start_of_which_the_sender_was_told_nothing() -> None:
    assert rules(overtaken(Tape(), told=False)) == ["I5"]


def test_a_pause_within_the_lease_explains_no_second_home() -> None:
    assert rules(overtaken(Tape(), after_s=4.0)) == ["I1c"]


def test_no_pause_of_a_real_process_explains_a_second_home_without_a_deadline() -> None:
    class Endless(Tape):
        def renew(self, inc: str) -> None:
            self.note("renewed", inc=inc, sent_at=self.now, ttl=inf, margin=1.0)

    assert rules(overtaken(Endless())) == ["I1c"]


def test_a_pause_explains_no_wrong_order_at_one_home() -> None:
    tape = Tape().submit(1).accept(1).submit(2).accept(2).start(2).finish(2).outcome(2)
    tape.fault("freeze", A).wait(1.0, renew=False).fault("thaw", A).start(1)
    convicted(tape, "I5", "started after message 2")


def test_what_a_pause_delayed_counts_for_the_order_of_what_comes_later() -> None:
    tape = Tape().accept(2).fault("freeze", A).wait(1.0, renew=False).fault("thaw", A)
    convicted(tape.start(2).finish(2).start(1), "I5", "started after message 2")


# --- what a fault explains: I5


def told_early(tape: Tape, to: str = A) -> Tape:
    return tape.submit(1).write(1, to=to).wait(1.0).outcome(1, "maybe_executed")


@pytest.mark.parametrize("fault", ["crash", "freeze", "stop"])
def test_what_happens_to_one_process_costs_others_no_message(fault: str) -> None:
    accepted(told_early(Tape().fault(fault, A)))
    accepted(told_early(Tape().fault(fault, C)))
    rejected(told_early(Tape().fault(fault, B)), "I5", "a gap without a fault")
    accepted(told_early(Tape().fault(fault, B), to=B))


@pytest.mark.parametrize("fault", ["cut", "duplicate", "linger", "outage", "full", "stall", "lag"])
def test_a_link_that_resumes_and_a_store_that_is_away_cost_no_message(fault: str) -> None:
    rejected(told_early(Tape().fault(fault)), "I5", "a gap without a fault")
    fenced = Tape().fault(fault).note("fenced", inc=A, reason="no store")
    accepted(told_early(fenced))
    # But a shard may find no home in time.
    accepted(Tape().fault(fault).submit(1, ask=False).wait(10.0).lost(1))


def test_a_fence_alone_explains_no_gap() -> None:
    fenced = Tape().note("fenced", inc=A, reason="its lease is over")
    rejected(told_early(fenced), "I5", "a gap without a fault")


def test_a_lease_that_ran_out_in_the_store_explains_a_gap_before_its_holder_knows() -> None:
    """Seeds 4493 and 4871 of health, where a client's lease sets it no deadline."""

    def tape(key: bytes, *faults: str) -> Tape:
        begun = Tape()
        for fault in faults:
            begun.fault(fault)
        begun.expire(key)
        return told_early(begun)

    for key in (client_key(C), node_key(A)):
        accepted(tape(key, "outage"))
        rejected(tape(key), "I5", "a gap without a fault")
    rejected(tape(node_key(B), "outage"), "I5", "a gap without a fault")
    rejected(tape(client_key(B), "outage"), "I5", "a gap without a fault")


@pytest.mark.parametrize(("begin", "end"), [("outage", "back"), ("slow", "fast")])
def test_faults_end_when_they_are_ended(begin: str, end: str) -> None:
    def late(tape: Tape) -> Tape:
        return tape.wait(16.0).submit(1, ask=False).wait(10.0).lost(1)

    accepted(late(Tape().fault(begin)))
    rejected(late(Tape().fault(begin).fault(end)), "I5", "a gap without a fault")


# --- other reasons for a gap: I5


def test_a_handler_that_its_dead_process_never_ended_keeps_nobody_busy() -> None:
    tape = Tape().start(1, sender=B).fault("crash", A).wait(16.0)
    tape.expire(node_key(A))
    tape.lead(B, "node-b")
    tape.store({0: entry(B, 2, change=2)}, by="node-b")
    tape.phase("open", B, 2).submit(2).write(2, to=B, epoch=2).accept(2, inc=B, epoch=2)
    rejected(tape.wait(10.0).outcome(2, "maybe_executed"), "I5", "a gap without a fault")


def _cut_short(tape: Tape) -> Tape:
    return tape.finish(1, "cancelled").outcome(1, "maybe_executed")


def test_a_move_that_was_taken_back_cuts_no_handler_short() -> None:
    def moving() -> Tape:
        tape = Tape().submit(1, timeout=60.0).start(1)
        tape.store({0: entry(A, 1, "moving", change=2)})
        return tape.phase("draining", A, 1).wait(5.0)

    accepted(_cut_short(moving().wait(5.0)))
    tape = moving()
    tape.store({0: entry(A, 1, change=3)})
    rejected(_cut_short(tape.phase("open", A, 1).wait(5.0)), "I5", "a gap without a fault")


def test_a_sender_that_leaves_much_later_has_no_reason_to_lose_anything_yet() -> None:
    def tape(seconds: float) -> Tape:
        tape = Tape().submit(1, ask=False, timeout=60.0).write(1).wait(10.0).lost(1)
        return tape.wait(seconds).note("ended", inc=C)

    accepted(tape(5.0))
    rejected(tape(7.0), "I5", "a gap without a fault")


def test_no_time_runs_out_half_a_second_early() -> None:
    def tape(seconds: float) -> Tape:
        tape = Tape().submit(1, timeout=1.0).write(1).accept(1).start(1)
        return tape.wait(seconds).outcome(1, "maybe_executed")

    assert real(tape(0.96)) == []
    convicted(tape(0.6), "I5", "a gap without a fault")


# --- I1a, and I1c after a rewind


def test_a_record_that_goes_while_its_node_goes_on_is_rejected() -> None:
    def tape() -> Tape:
        tape = Tape().move().wait(1.0)
        tape.expire(node_key(A))
        return tape.wait(1.0, renew=False)

    accepted(tape())
    rejected(tape().write(1, inc=A, shard=1, to=B), "I1a", "went while it lived (C5)")
    accepted(tape().fault("crash", A))


def test_whoever_lived_before_a_rewind_is_judged_again_once_its_lease_is_over() -> None:
    def tape(seconds: float) -> Tape:
        tape = Tape().wait(1.0).note("rewound", revision=1, history="h", items=[])
        tape.note("life", inc=D, node="node-d", hosts=True, limits={}).renew(D)
        tape.start(1, inc=D, epoch=1).finish(1, inc=D, epoch=1)
        return tape.wait(seconds).start(2)

    accepted(tape(5.0))
    rejected(tape(6.5), "I1c", "after node-d (dddddddd) had started in epoch 1")


# --- L: what a slow handler explains


def slow(tape: Tape, seconds: float = 2.5) -> Tape:
    """Some handler elsewhere takes long."""
    tape.start(1, inc=B, shard=1, id="y").wait(seconds)
    return tape.finish(1, inc=B, shard=1, id="y")


def test_a_slow_handler_explains_no_more_waiting_than_its_own() -> None:
    accepted(slow(Tape().settle().submit(1, timeout=60.0)).wait(17.0).start(1).finish(1).outcome(1))
    late = slow(Tape().settle().submit(1, timeout=60.0)).wait(19.0).start(1).finish(1).outcome(1)
    rejected(late, "L", "stuck")


def test_a_slow_handler_explains_no_shard_without_a_home_in_the_end() -> None:
    def tape(seconds: float) -> Tape:
        tape = Tape()
        tape.store({0: entry(A, 1, "moving", change=2)})
        tape.phase("draining", A, 1).phase("released", A, 1)
        return slow(tape.note("quiet")).wait(seconds)

    accepted(tape(17.0))
    rejected(tape(19.0), "L", "has been moving for")


def test_a_slow_handler_explains_no_longer_drain_than_its_own() -> None:
    def tape(seconds: float) -> Tape:
        tape = Tape().settle()
        tape.store({0: entry(A, 1, "moving", change=2)})
        return slow(tape.phase("draining", A, 1)).wait(seconds).phase("released", A, 1)

    accepted(tape(17.0))
    rejected(tape(19.0), "L", "drained r/0 for 21.5")


def test_an_ask_from_before_the_calm_is_answered_in_the_calm() -> None:
    def tape(seconds: float) -> Tape:
        tape = Tape().note("quiet").wait(1.0).submit(1, timeout=60.0)
        return tape.wait(14.0 + seconds).start(1).finish(1).outcome(1)

    accepted(tape(8.9))
    rejected(tape(9.1), "L", "stuck")


def test_a_refusal_that_took_long_is_no_prompt_one() -> None:
    def tape(seconds: float) -> Tape:
        tape = Tape().settle().submit(1, timeout=60.0).wait(seconds).write(1)
        return tape.outcome(1, "not_executed")

    accepted(tape(8.9))
    rejected(tape(9.1), "L", "was not_executed")


def test_the_end_of_a_whole_cluster_hides_no_shard_without_a_home() -> None:
    def ended(tape: Tape) -> Tape:
        tape.fault("shutdown").wait(0.1)
        for inc in (A, B):
            for shard in (0, 1):
                tape.phase("closed", inc, 2, shard)
            tape.note("ended", inc=inc)
        return tape

    accepted(ended(Tape().settle()))
    closed = Tape().wait(1.0).phase("closed", A, 1).settle()
    rejected(ended(closed), "L", "it is not open there")
    dead = Tape().fault("crash", B).settle().wait(10.0)
    rejected(ended(dead), "L", "still stored as served by node-b")


# --- stretches of time


def test_what_lies_outside_of_all_stretches_is_counted() -> None:
    spans = Spans([(1.0, 2.0), (4.0, 5.0), (4.5, 6.0)])
    assert spans.outside(0.0, 10.0) == 7.0
    assert spans.outside(1.5, 4.5) == 2.0
    assert spans.outside(4.2, 5.5) == 0.0
    assert spans.outside(2.0, 4.0) == 2.0
    assert spans.outside(7.0, 6.0) == 0.0
    assert spans.outside(5.5, 1.5) == 0.0
