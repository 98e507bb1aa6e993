"""The rules about messages and progress: I5, I6 and liveness, each with histories that break it."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from test_checkers import A, B, C, Tape, accepted, entry, rejected

from domicile.testing.checkers.order import check_order
from domicile.testing.processes.history import RealHistory

# --- I5


def test_messages_that_run_out_of_order_are_rejected() -> None:
    tape = Tape().start(2).finish(2).start(1).finish(1)
    rejected(tape, "I5", "started after message 2 of the same sender")


def test_order_is_kept_across_owners() -> None:
    tape = Tape().start(2).finish(2).move().start(1, inc=B, epoch=2)
    rejected(tape, "I5", "started after message 2")


def test_other_entities_and_senders_have_their_own_order() -> None:
    tape = Tape().start(2).finish(2).start(1, id="y").start(1, sender=B).finish(1, sender=B)
    accepted(tape)


def made(tape: Tape, call: int, id: str = "x", gate: int | None = None, hook: bool = False) -> Tape:
    return tape.note("made", inc=C, call=call, type="T", id=id, gate=gate, hook=hook)


def test_a_call_that_is_overtaken_while_it_waits_is_rejected() -> None:
    tape = made(made(Tape(), 1), 2).submit(1, call=2).submit(2, call=1)
    violation = rejected(tape, "I5", "message 2 of cccccccc for r/0 was made before a call")
    assert [event.fields.get("call") for event in violation.events] == [1, 2, 1]
    rejected(made(Tape(), 1).submit(1).submit(2, call=1), "I5", "was made before a call")
    rejected(made(made(Tape(), 1, gate=7), 2, gate=7).submit(1, call=2).submit(2, call=1), "I5", "")


def test_calls_that_wait_may_be_given_up_and_keep_the_order_of_the_others() -> None:
    tape = made(made(made(Tape(), 1), 2), 3).submit(1, call=1).submit(2, call=3).submit(3)
    accepted(tape)


def test_each_durable_entity_its_hooks_and_each_target_have_their_own_order() -> None:
    tape = made(made(Tape(), 1, gate=1), 2, gate=2)
    made(made(made(tape, 3, gate=1, hook=True), 4, gate=1, id="y"), 5)
    tape.submit(1, call=5).submit(2, call=4, id="y").submit(3, call=3).submit(4, call=2)
    accepted(tape.submit(5, call=1).submit(6))


def test_a_message_that_starts_twice_is_rejected() -> None:
    tape = Tape().start(1).finish(1).move().start(1, inc=B, epoch=2)
    rejected(tape, "I5", "started twice")


def test_timers_repeat_their_numbers_at_will() -> None:
    tape = Tape()
    for n in (-1, -2, -1):
        tape.start(n, sender="").finish(n, sender="")
    accepted(tape)


def test_not_executed_after_a_start_is_rejected() -> None:
    rejected(Tape().submit(1).start(1).outcome(1, "not_executed"), "I5", "but it had started")


def test_a_start_after_not_executed_is_rejected() -> None:
    tape = Tape().submit(1).outcome(1, "not_executed").start(1)
    rejected(tape, "I5", "after its sender was told that it never will")


def test_a_tell_that_ran_but_was_called_not_executed_is_rejected() -> None:
    tape = Tape().submit(1, ask=False).start(1).finish(1).outcome(1, "not_executed")
    rejected(tape, "I5", "but it had started")


@pytest.mark.parametrize("outcome", ["ok", "rejected", "failed"])
def test_an_answer_without_a_finished_handler_is_rejected(outcome: str) -> None:
    rejected(Tape().submit(1).outcome(1, outcome), "I5", "but it never started")
    rejected(Tape().submit(1).start(1).outcome(1, outcome), "I5", "before its handler finished")


def test_success_of_a_handler_that_was_cut_short_is_rejected() -> None:
    tape = Tape().submit(1).start(1).finish(1, "cancelled").outcome(1)
    rejected(tape, "I5", "was cut short")


@pytest.mark.parametrize("kind", ["return", "dropped"])
def test_a_withdrawn_message_that_starts_is_rejected(kind: str) -> None:
    tape = Tape().accept(1).message(kind, 1, why="link").start(1)
    rejected(tape, "I5", "which had")
    again = Tape().accept(1).message(kind, 1, why="link").flush().accept(1).start(1)
    accepted(again)


def test_two_outcomes_are_rejected() -> None:
    rejected(Tape().ask(1).outcome(1), "I5", "two outcomes")
    tell = Tape().fault("partition").submit(1, ask=False).lost(1).outcome(1, "not_executed")
    rejected(tell, "I5", "two outcomes")


def _ask(tape: Tape) -> Tape:
    return tape.submit(1).accept(1).start(1).finish(1).outcome(1, "maybe_executed")


def _tell(tape: Tape) -> Tape:
    return tape.submit(1, ask=False).write(1).lost(1)


@pytest.mark.parametrize("send", [_ask, _tell])
def test_a_gap_without_a_fault_is_rejected(send: Any) -> None:
    rejected(send(Tape()), "I5", "a gap without a fault")
    healed = Tape().fault("partition").fault("heal").wait(15.1)
    rejected(send(healed), "I5", "a gap without a fault")


@pytest.mark.parametrize("send", [_ask, _tell])
def test_a_gap_after_a_fault_is_accepted(send: Any) -> None:
    accepted(send(Tape().fault("partition").fault("heal").wait(14.9)))


@pytest.mark.parametrize(("begin", "end"), [("freeze", "thaw"), ("partition", "heal")])
def test_a_lasting_fault_excuses_until_it_ends(begin: str, end: str) -> None:
    accepted(_tell(Tape().fault(begin, A).wait(100.0)))
    accepted(_tell(Tape().fault(begin, A).wait(100.0).fault(end, A).wait(14.0)))
    rejected(_tell(Tape().fault(begin, A).wait(9.0).fault(end, A).wait(16.0)), "I5", "gap")
    rejected(_tell(Tape().fault(begin, A).wait(9.0).note("quiet").wait(16.0)), "I5", "gap")


def test_a_later_fault_excuses_nothing() -> None:
    rejected(_tell(Tape()).wait(0.1).fault("crash", B), "I5", "a gap without a fault")


def test_a_timeout_in_a_running_handler_is_accepted() -> None:
    accepted(Tape().submit(1).start(1).wait(10.0).outcome(1, "maybe_executed"))
    early = Tape().submit(1).start(1).wait(9.0).outcome(1, "maybe_executed")
    rejected(early, "I5", "a gap without a fault")


def test_a_timeout_behind_a_running_handler_is_accepted_but_not_behind_nobody() -> None:
    busy = Tape().start(1).submit(2).accept(2).wait(10.0).outcome(2, "maybe_executed")
    accepted(busy)
    idle = Tape().submit(2).accept(2).wait(10.0).outcome(2, "maybe_executed")
    rejected(idle, "I5", "a gap without a fault")


def test_a_timeout_on_the_way_is_accepted_but_not_long_after_it_left() -> None:
    accepted(Tape().submit(1, timeout=0.001).write(1).wait(0.008).outcome(1, "maybe_executed"))
    accepted(Tape().submit(1).wait(9.99).write(1).wait(0.01).outcome(1, "maybe_executed"))
    late = Tape().submit(1).write(1).wait(10.0).outcome(1, "maybe_executed")
    rejected(late, "I5", "a gap without a fault")
    early = Tape().submit(1).write(1).wait(0.01).outcome(1, "maybe_executed")
    rejected(early, "I5", "a gap without a fault")
    there = Tape().submit(1, timeout=1.0).write(1).accept(1)
    rejected(there.wait(1.0).outcome(1, "maybe_executed"), "I5", "a gap without a fault")


@pytest.mark.parametrize("kind", ["return", "dropped"])
def test_a_timeout_on_the_way_back_is_accepted_but_not_long_after_it_left(kind: str) -> None:
    sent = Tape().submit(1).write(1).accept(1).wait(9.0)
    accepted(sent.wait(0.99).message(kind, 1, why="link").wait(0.01).outcome(1, "maybe_executed"))
    sent = Tape().submit(1).write(1).accept(1).wait(9.0).message(kind, 1, why="link").wait(1.0)
    rejected(sent.outcome(1, "maybe_executed"), "I5", "a gap without a fault")


def test_what_a_pause_kept_from_starting_is_out_of_order_in_real_time_only_once() -> None:
    def paused() -> Tape:
        tape = Tape().submit(0).submit(1).accept(1).fault("freeze", A).wait(1.0, renew=False)
        tape.outcome(1, "maybe_executed").submit(2).start(2, inc=B, epoch=2)
        return tape.wait(1.0, renew=False).fault("thaw", A).start(1)

    def judged(tape: Tape) -> list[str]:
        real = RealHistory(tape.history.events, Counter())
        return [found.message for found in check_order(real)]

    rejected(paused(), "I5", "started after message 2", "I1c")
    assert judged(paused()) == []
    [message] = judged(paused().start(0))
    assert "message 0" in message
    assert "started after message 2" in message


def test_a_tell_that_outlives_its_time_behind_a_running_handler_is_accepted() -> None:
    accepted(Tape().start(1).submit(2, ask=False).accept(2).wait(10.0).lost(2))
    early = Tape().start(1).submit(2, ask=False).accept(2).wait(9.0).lost(2)
    rejected(early, "I5", "a gap without a fault")
    idle = Tape().submit(2, ask=False).accept(2).wait(10.0).lost(2)
    rejected(idle, "I5", "a gap without a fault")


@pytest.mark.parametrize(("drained_s", "fine"), [(10.0, True), (3.0, False)])
def test_a_handler_cancelled_at_the_drain_deadline_is_a_reason(
    drained_s: float, fine: bool
) -> None:
    tape = Tape().submit(1, timeout=60.0).start(1).wait(1.0)
    tape.store({0: entry(A, 1, "moving", change=2)})
    tape.phase("draining", A, 1).wait(drained_s)
    tape.finish(1, "cancelled").phase("released", A, 1).outcome(1, "maybe_executed")
    if fine:
        accepted(tape)
    else:
        rejected(tape, "I5", "a gap without a fault")


def test_a_sender_that_leaves_at_its_drain_deadline_may_lose_what_it_sent() -> None:
    tape = Tape().submit(1, ask=False).write(1).wait(10.0).lost(1)
    rejected(tape, "I5", "a gap without a fault")
    accepted(tape.note("ended", inc=C))


# --- I6


def test_queues_within_their_limits_are_accepted() -> None:
    tape = Tape().submit(1, held=8, chain=[("T", "y"), ("T", "z")]).write(1, open=4)
    accepted(tape.accept(1, depth=3).start(1).finish(1).outcome(1))


def test_a_queue_over_its_limit_is_rejected() -> None:
    rejected(Tape().submit(1, held=9), "I6", "9 messages queued for r/0, its limit is 8")


def test_a_window_over_its_limit_is_rejected() -> None:
    rejected(Tape().write(1, open=5), "I6", "5 unstarted messages written")


def test_a_mailbox_over_its_limit_is_rejected() -> None:
    rejected(Tape().accept(1, depth=4), "I6", "4 messages in a mailbox")


def test_a_chain_over_its_limit_is_rejected_unless_refused() -> None:
    chain = [("T", "y"), ("T", "z"), ("T", "w")]
    tape = Tape().submit(1, chain=chain)
    rejected(tape, "I6", "on which 3 handlers wait")
    accepted(tape.outcome(1, "not_executed"))


@pytest.mark.parametrize("ask", [True, False])
def test_a_message_that_disappears_is_rejected(ask: bool) -> None:
    tape = Tape().submit(1, ask=ask).write(1).accept(1).wait(10.5)
    accepted(tape)
    rejected(tape.wait(1.0), "I6", "silent drop")


def test_an_ask_that_ran_but_was_never_answered_is_rejected() -> None:
    tape = Tape().submit(1).start(1).finish(1).wait(12.0)
    rejected(tape, "I6", "silent drop")


def test_a_tell_that_ran_or_waits_its_turn_is_no_silent_drop() -> None:
    accepted(Tape().submit(1, ask=False).start(1).finish(1).wait(12.0))
    accepted(Tape().start(1).submit(2, ask=False).accept(2).wait(12.0))


@pytest.mark.parametrize("kind", ["crash", "fenced", "ended"])
def test_dead_senders_are_told_nothing(kind: str) -> None:
    tape = Tape().submit(1)
    if kind == "crash":
        tape.fault("crash", C)
    else:
        tape.note(kind, inc=C, reason="")
    accepted(tape.wait(12.0))


def test_the_end_of_a_sender_excuses_nothing_that_was_due_before() -> None:
    silent = Tape().submit(1).wait(11.5).note("ended", inc=C)
    rejected(silent, "I6", "silent drop")
    stuck = Tape().settle().submit(1).wait(3.0).outcome(1, "not_executed")
    rejected(stuck.wait(0.1).note("ended", inc=C), "L", "not_executed")
    accepted(Tape().settle().submit(1).wait(3.0).note("ended", inc=C).outcome(1, "not_executed"))


def test_a_tell_whose_sender_is_gone_is_no_silent_drop() -> None:
    accepted(Tape().submit(1, ask=False).wait(11.5).note("ended", inc=C))
    accepted(Tape().submit(1, ask=False).accept(1).wait(11.5).note("ended", inc=C))
    rejected(Tape().submit(1, ask=False).wait(11.5), "I6", "silent drop")
    rejected(Tape().submit(1, ask=False).accept(1).wait(11.5), "I6", "silent drop")


def test_a_frozen_sender_is_told_after_its_thaw() -> None:
    tape = Tape().submit(1).fault("freeze", C).wait(20.0)
    accepted(tape)
    tape.fault("thaw", C).wait(0.5)
    accepted(tape)
    rejected(tape.wait(1.0), "I6", "silent drop")


# --- L


def test_an_ask_that_takes_long_in_quiet_is_stuck() -> None:
    tape = Tape().settle().submit(1).wait(9.5).start(1).finish(1).outcome(1)
    rejected(tape, "L", "stuck")


def test_the_same_ask_is_fine_while_faults_are_about() -> None:
    tape = Tape().submit(1).wait(9.5).start(1).finish(1).outcome(1).settle()
    accepted(tape)
    early = Tape().note("quiet").wait(14.0).submit(1).wait(9.5).start(1).finish(1).outcome(1)
    accepted(early)


def test_an_ask_given_up_in_quiet_is_stuck() -> None:
    rejected(Tape().settle().submit(1).wait(3.0).outcome(1, "not_executed"), "L", "not_executed")
    accepted(Tape().settle().submit(1, timeout=3.0).wait(3.0).outcome(1, "not_executed"))


def test_a_prompt_refusal_in_quiet_is_accepted() -> None:
    accepted(Tape().settle().submit(1).outcome(1, "not_executed"))


def test_an_ask_unanswered_at_the_end_is_stuck() -> None:
    tape = Tape().settle().submit(1).wait(8.9)
    accepted(tape)
    rejected(tape.wait(0.2), "L", "unanswered")


def test_a_slow_handler_explains_waiting() -> None:
    tape = Tape().settle().submit(1).start(1).wait(9.5).finish(1).outcome(1)
    accepted(tape)


def test_a_row_of_quick_handlers_explains_waiting() -> None:
    tape = Tape().settle().submit(50)
    for n in range(1, 50):
        tape.start(n).wait(0.1).finish(n)
    accepted(tape.start(50).finish(50).outcome(50))


def test_waiting_for_a_nested_ask_is_no_work_and_explains_nothing() -> None:
    tape = Tape().settle().submit(1).start(1)
    nested = {"inc": A, "shard": 1, "id": "y", "chain": [("T", "x")]}
    tape.submit(1, **nested).wait(9.5).start(1, inc=B, sender=A, shard=1, id="y")
    tape.finish(1, inc=B, sender=A, shard=1, id="y").outcome(1, inc=A, shard=1)
    tape.finish(1).outcome(1)
    rejected(tape, "L", "stuck")


def test_a_long_drain_in_quiet_is_stuck() -> None:
    tape = Tape().settle()
    tape.store({0: entry(A, 1, "moving", change=2)})
    tape.phase("draining", A, 1).wait(9.5).phase("released", A, 1)
    rejected(tape, "L", "drained r/0 for 9.500 s")


def test_a_long_drain_behind_a_slow_handler_is_accepted() -> None:
    tape = Tape().settle().start(1)
    tape.store({0: entry(A, 1, "moving", change=2)})
    tape.phase("draining", A, 1).wait(9.5).finish(1).phase("released", A, 1)
    accepted(tape)


def test_a_shard_that_stays_moving_is_stuck() -> None:
    tape = Tape()
    tape.store({0: entry(A, 1, "moving", change=2)})
    tape.phase("draining", A, 1).phase("released", A, 1)
    accepted(tape.wait(8.0))
    rejected(tape.settle(), "L", "has been moving for")


def test_a_home_that_is_never_opened_is_stuck() -> None:
    tape = Tape(opened=False)
    tape.store({0: entry(A, 1)})
    rejected(tape.settle(), "L", "it is not open there")


def test_a_home_that_was_released_but_stays_stored_is_stuck() -> None:
    tape = Tape()
    tape.store({0: entry(A, 1, "moving", change=2)})
    tape.phase("draining", A, 1).phase("released", A, 1)
    tape.store({0: entry(A, 1, change=3)})
    rejected(tape.settle(), "L", "it is not open there")


def test_a_dead_owner_opens_nothing() -> None:
    tape = Tape(opened=False)
    tape.store({0: entry(A, 1)})
    accepted(tape.fault("crash", A).settle())
