"""Histories that break the rules about returns, flushes, leaders, floors and what is carried."""

from __future__ import annotations

import pytest
from test_checkers import LIMITS, A, B, C, Tape, accepted, entry, rejected

from domicile.core.ids import Incarnation
from domicile.core.state.keys import LEADER_KEY, node_key

D = Incarnation("d" * 32)

# --- H8


def _flush(tape: Tape, id: int, to: str = A) -> Tape:
    return tape.note("flush", inc=C, role="r", shard=0, to=to, id=id)


def _flushed(tape: Tape, id: int, inc: str = A) -> Tape:
    return tape.note("flushed", inc=inc, role="r", shard=0, sender=C, id=id)


def _returned(tape: Tape, *numbers: int) -> Tape:
    for n in numbers:
        tape.submit(n, ask=False).write(n)
    for n in numbers:
        tape.message("return", n)
    return tape


def _run(tape: Tape, *numbers: int) -> Tape:
    for n in numbers:
        tape.accept(n).start(n).finish(n)
    return tape


def test_mail_that_came_back_goes_behind_a_flush() -> None:
    tape = _flushed(_flush(_returned(Tape(), 1, 2), 1), 1)
    accepted(_run(tape.write(1).write(2), 1, 2))


def test_a_flush_that_was_out_before_the_return_is_enough() -> None:
    tape = Tape().submit(1, ask=False).write(1)
    _flushed(_flush(tape, 1).message("return", 1), 1)
    accepted(_run(tape.write(1), 1))


def test_mail_that_came_back_and_goes_there_again_without_a_flush_is_rejected() -> None:
    violation = rejected(
        _returned(Tape(), 1).write(1).message("return", 1), "H8", "without a flush"
    )
    assert [event.kind for event in violation.events] == ["write", "return", "write"]


def test_mail_that_came_back_may_go_to_another_epoch_at_once() -> None:
    tape = _returned(Tape(), 1).move()
    tape.write(1, to=B, epoch=2).accept(1, inc=B, epoch=2).start(1, inc=B, epoch=2)
    accepted(tape.finish(1, inc=B, epoch=2))


def test_mail_accepted_behind_a_return_is_rejected() -> None:
    tape = _returned(Tape(), 1).submit(2, ask=False).write(2)
    violation = rejected(_run(tape, 2), "H8", "accepted message 2 of cccccccc for r/0 on a link")
    assert "it had returned message 1, before a flush (H7)" in violation.message


def test_a_new_link_was_never_refused() -> None:
    tape = Tape().note("taken", inc=A, peer=C, link="old", session=1, no=1)
    _returned(tape, 1).note("taken", inc=A, peer=C, link="new", session=2, no=1)
    accepted(_run(tape.submit(2, ask=False).write(2), 2))


def test_the_same_link_stays_refused() -> None:
    tape = Tape().note("taken", inc=A, peer=C, link="old", session=1, no=1)
    _returned(tape, 1).note("taken", inc=A, peer=C, link="old", session=2, no=2)
    rejected(_run(tape.submit(2, ask=False).write(2), 2), "H8", "(H7)")


def test_a_refused_link_says_nothing_about_other_shards() -> None:
    tape = _returned(Tape(), 1).submit(2, shard=1, ask=False).write(2, shard=1, to=B)
    accepted(tape.accept(2, inc=B, shard=1).start(2, inc=B, shard=1).finish(2, inc=B, shard=1))


@pytest.mark.parametrize("kind", ["return", "accept"])
def test_mail_that_a_flush_left_behind_is_rejected(kind: str) -> None:
    tape = _flushed(_flush(Tape().submit(1, ask=False).write(1), 1), 1)
    tape.message(kind, 1, depth=1).start(1).finish(1)
    also = ("I5",) if kind == "return" else ()
    rejected(tape, "H8", "after it had answered a flush that was sent behind it (H8)", *also)


def test_mail_written_behind_a_flush_arrives_behind_it() -> None:
    tape = _flush(Tape().submit(1, ask=False).write(1).accept(1).start(1).finish(1), 1)
    accepted(_run(_flushed(tape.submit(2, ask=False).write(2), 1), 2))


# --- C1


def _leads() -> Tape:
    return Tape().note("leading", inc=A, revision=4)


def _deposed(tape: Tape) -> Tape:
    tape.lead(B, "node-b")
    return tape


def test_a_leader_that_hears_of_the_next_one_stops() -> None:
    accepted(_deposed(_leads()).wait(1.9).note("deposed", inc=A, reason="deposed"))


@pytest.mark.parametrize("heard", [True, False])
def test_a_leader_that_leads_on_is_rejected(heard: bool) -> None:
    tape = _deposed(_leads()).wait(2.1)
    if heard:
        tape.note("deposed", inc=A, reason="deposed")
    rejected(tape, "C1", "node-a (aaaaaaaa) still led 2.100 s after it had lost the leader key")


def test_a_leader_whose_key_is_gone_is_rejected_too() -> None:
    tape = _leads()
    tape.expire(LEADER_KEY)
    rejected(tape.wait(2.1), "C1", "still led")


def test_a_leader_that_keeps_its_key_may_lead_on() -> None:
    tape = _leads()
    tape.lead(A, "node-a")
    accepted(tape.wait(5.0))


def test_a_leader_that_could_not_hear_of_it_has_time() -> None:
    accepted(_deposed(_leads().fault("outage", A)).wait(9.0).fault("heal").wait(1.9))
    accepted(_deposed(_leads().fault("outage")).wait(9.0).fault("back").wait(1.9))
    rejected(_deposed(_leads().fault("outage", B)).wait(4.0), "C1", "still led")
    rejected(_deposed(_leads().fault("outage", A)).fault("heal").wait(2.1), "C1", "still led")


def test_a_leader_that_died_leads_no_more() -> None:
    accepted(_deposed(_leads().fault("crash", A)).wait(9.0))


# --- L4


def _budget() -> Tape:
    tape = Tape()
    tape.note("life", inc=D, node="node-d", hosts=True, limits={**LIMITS, "stop": 0.5})
    tape.renew(D)
    tape.register(D, "node-d")
    tape.store({2: entry(D, 1)})
    tape.phase("open", D, 1, shard=2)
    return tape.start(1, inc=D, shard=2, id="z")


def _unwind(tape: Tape) -> Tape:
    return tape.message("unwind", 1, inc=D, shard=2, id="z")


def test_a_cancelled_handler_cleans_up_within_the_budget_of_the_fence() -> None:
    tape = _budget().wait(1.0).note("fenced", inc=D, reason="evicted").wait(0.49)
    accepted(_unwind(tape).finish(1, "cancelled", inc=D, shard=2, id="z"))


def test_a_cancelled_handler_that_cleans_up_for_longer_is_rejected() -> None:
    tape = _budget().wait(1.0).note("fenced", inc=D, reason="evicted").wait(0.6)
    rejected(_unwind(tape), "L3", "0.600000 s after it was over, and its stop budget is 0.5 s (L4)")


def test_the_budget_begins_at_the_deadline_if_nobody_fenced_before() -> None:
    rejected(_unwind(_budget().wait(5.6)), "L3", "(L4)")


def test_an_error_before_that_is_nobodys_business() -> None:
    accepted(_unwind(_budget().wait(4.9)).finish(1, "failed", inc=D, shard=2, id="z"))


def test_a_fenced_process_that_takes_messages_is_rejected() -> None:
    tape = Tape().wait(1.0).note("fenced", inc=A, reason="evicted")
    rejected(tape.submit(1, inc=A, ask=False), "L3", "still took messages after it had fenced (L4)")


# --- J1


def _outrun(tape: Tape, *, moving: bool = False) -> Tape:
    """A's journal knows epoch 4, and A has learned that."""
    tape.note("claim", role="r", shard=0, epoch=4, owner=D, ok=True)
    tape.note("claim", role="r", shard=0, epoch=1, owner=A, ok=False)
    if moving:
        tape.store({0: entry(A, 1, "moving", change=2)})
    return tape.phase("draining", A, 1).phase("released", A, 1)


def test_the_epoch_after_a_refused_claim_is_above_the_fence() -> None:
    tape = _outrun(Tape())
    tape.store({0: entry(B, 5, change=3)})
    accepted(tape.phase("open", B, 5))


@pytest.mark.parametrize("epoch", [2, 4])
def test_an_epoch_at_or_below_the_fence_is_rejected(epoch: int) -> None:
    tape = _outrun(Tape())
    tape.store({0: entry(B, epoch, change=3)})
    rejected(tape, "I2", f"r/0 got epoch {epoch} after node-a (aaaaaaaa) had found epoch 4")


def test_an_owner_that_moved_anyway_may_not_have_known() -> None:
    tape = _outrun(Tape(), moving=True)
    tape.store({0: entry(B, 2, change=3)})
    accepted(tape.phase("open", B, 2))


def test_what_a_lost_owner_knew_is_lost() -> None:
    tape = _outrun(Tape()).fault("crash", A).wait(8.0)
    tape.expire(node_key(A))
    tape.lead(B, "node-b")
    tape.store({0: entry(B, 2, change=3)}, by="node-b")
    accepted(tape.phase("open", B, 2))


# --- DX


def _clerk(tape: Tape, kind: str, epoch: int = 1, **fields: object) -> Tape:
    return tape.note(kind, type="T", id="x", epoch=epoch, **fields)


def _counted(*counts: int) -> Tape:
    tape = Tape().wait(3.0).submit(1).write(1).accept(1).start(1).finish(1).outcome(1)
    _clerk(tape, "woke", count=0)
    for count in counts:
        _clerk(tape, "increased", count=count)
    return tape


def test_a_count_that_moves_along_is_accepted() -> None:
    accepted(_clerk(_counted(1, 2).move(), "woke", 2, count=2))


def test_a_count_that_is_lost_without_a_fault_is_rejected() -> None:
    rejected(_clerk(_counted(1, 2).move(), "woke", 2, count=0), "DX", "lost its count 2")


def test_a_count_that_is_lost_by_a_fault_is_accepted() -> None:
    accepted(_clerk(_counted(1, 2).fault("cut").move(), "woke", 2, count=0))


def test_an_old_count_is_rejected_whatever_happened() -> None:
    tape = _clerk(_counted(1, 2).fault("cut").move(), "woke", 2, count=1)
    rejected(tape, "DX", "T/x began with count 1, but its newest was 2 (DX-13)")


def test_a_count_may_be_lost_if_its_shard_went_astray() -> None:
    tape = _counted(1, 2)
    tape.store({0: entry(A, 1, "moving", change=2)})
    tape.phase("draining", A, 1).phase("released", A, 1)
    tape.store({0: entry(A, 1, change=3)})
    tape.store({0: entry(B, 2, change=4)})
    accepted(_clerk(tape.phase("open", B, 2), "woke", 2, count=0))


def test_a_count_may_be_lost_on_its_way_to_a_node_that_has_just_begun() -> None:
    tape = Tape().submit(1).write(1).accept(1).start(1).finish(1).outcome(1)
    _clerk(_clerk(tape, "woke", count=0), "increased", count=1)
    accepted(_clerk(tape.move(), "woke", 2, count=0))


def _armed(tape: Tape, token: int = 1, delay: float = 2.0) -> Tape:
    return _clerk(tape, "armed", delay=delay, token=token)


def _rang(tape: Tape, token: int = 1, epoch: int = 1) -> Tape:
    return _clerk(tape, "rang", epoch, token=token)


def test_a_timer_that_fires_when_it_is_due_is_accepted() -> None:
    accepted(_rang(_armed(Tape()).wait(2.0)).wait(20.0))
    accepted(_rang(_armed(Tape()).wait(1.0).move().wait(1.0), epoch=2))


def test_a_timer_that_fires_early_is_rejected() -> None:
    rejected(_rang(_armed(Tape()).wait(1.9)), "DX", "timer 1 of T/x fired 0.100000 s early")


def test_a_timer_that_fires_twice_is_rejected() -> None:
    rejected(_rang(_rang(_armed(Tape()).wait(2.0))), "DX", "timer 1 of T/x fired twice")


def test_a_timer_that_was_replaced_and_fires_is_rejected() -> None:
    tape = _armed(_armed(Tape()).wait(1.0), token=2).wait(1.0)
    rejected(_rang(tape), "DX", "fired though another had taken its place")


def test_a_timer_that_was_due_when_it_was_replaced_may_fire() -> None:
    accepted(_rang(_rang(_armed(_armed(Tape()).wait(2.0), token=2)).wait(2.0), token=2))


def test_a_timer_that_never_fires_is_rejected() -> None:
    rejected(_armed(Tape()).wait(12.0), "DX", "timer 1 of T/x never fired (DX-25)")


def test_a_timer_may_be_lost_by_a_fault() -> None:
    accepted(_armed(Tape()).fault("cut").wait(12.0))
