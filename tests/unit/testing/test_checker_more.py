"""Histories that break the rules about drains, durability, prompt fences and records, one by one.

Each bad history has a twin in good form, so that a checker that rejects everything fails too.
"""

from __future__ import annotations

import pytest
from test_checkers import LIMITS, A, B, C, Tape, accepted, append, entry, rejected, settle

from domicile.core.state.keys import node_key

# --- H9


def _moving(tape: Tape) -> Tape:
    """Shard 0 is to leave A, and A knows."""
    tape.store({0: entry(A, 1, "moving", change=2)})
    return tape.phase("draining", A, 1)


def _box(*mail: tuple[int, bool]) -> Tape:
    """A runs message 1 for x while these wait behind it, finishing or not."""
    tape = Tape().write(1).accept(1).start(1)
    for n, finishing in mail:
        tape.write(n, finishing=finishing).accept(n)
    return tape


def _run(tape: Tape, *numbers: int, id: str = "x") -> Tape:
    for n in numbers:
        tape.start(n, id=id).finish(n, id=id)
    return tape


def test_mail_that_waits_when_its_shard_moves_does_not_run_there() -> None:
    tape = _run(_moving(_box((2, False))).finish(1), 2)
    violation = rejected(tape, "H9", "nothing that must finish was behind it")
    assert "node-a (aaaaaaaa) started message 2 of cccccccc for r/0" in violation.message
    assert [event.kind for event in violation.events] == ["draining", "start"]


def test_mail_that_goes_back_and_runs_at_the_new_home_is_accepted() -> None:
    tape = _moving(_box((2, False))).finish(1).message("return", 2).phase("released", A, 1)
    tape.store({0: entry(B, 2, change=3)})
    tape.phase("open", B, 2).write(2, to=B, epoch=2).accept(2, inc=B, epoch=2)
    accepted(tape.start(2, inc=B, epoch=2))


def test_finishing_mail_and_what_is_before_it_runs_but_nothing_behind() -> None:
    tape = _moving(_box((2, False), (3, True), (4, False))).finish(1)
    accepted(_run(tape, 2, 3))
    rejected(_run(tape, 4), "H9", "started message 4")


def test_the_last_finishing_message_counts() -> None:
    accepted(_run(_moving(_box((2, True), (3, False), (4, True))).finish(1), 2, 3, 4))


def test_finishing_mail_of_another_entity_excuses_nothing() -> None:
    tape = _box((2, False)).write(3, finishing=True).accept(3, id="y")
    _moving(tape).finish(1)
    accepted(_run(tape, 3, id="y"))
    rejected(_run(tape, 2), "H9", "started message 2")


def test_finishing_mail_that_has_run_already_excuses_nothing() -> None:
    tape = _run(_box((2, True), (3, False)).finish(1), 2)
    rejected(_run(_moving(tape), 3), "H9", "started message 3")


@pytest.mark.parametrize("kind", ["return", "dropped"])
def test_finishing_mail_that_left_the_mailbox_excuses_nothing(kind: str) -> None:
    tape = _box((2, False), (3, True)).message(kind, 3, why="link")
    rejected(_run(_moving(tape).finish(1), 2), "H9", "started message 2")


def test_a_drained_shard_says_nothing_about_the_others() -> None:
    tape = Tape().accept(1, inc=B, shard=1, id="y")
    accepted(_moving(tape).start(1, inc=B, shard=1, id="y"))


def test_mail_may_run_once_the_move_is_reverted() -> None:
    tape = _moving(_box((2, False))).finish(1)
    tape.store({0: entry(A, 1, change=3)})
    accepted(_run(tape.phase("open", A, 1), 2))


def test_mail_sent_again_as_finishing_may_run() -> None:
    tape = _moving(_box((2, False))).finish(1).message("return", 2).flush()
    accepted(_run(tape.write(2, finishing=True).accept(2), 2))


def test_timers_are_nobodys_mail() -> None:
    tape = _box().message("accept", -1, sender="", depth=1)
    _moving(tape).finish(1)
    accepted(tape.start(-1, sender="").finish(-1, sender=""))


def test_an_entity_that_stops_after_the_release_is_rejected() -> None:
    tape = _moving(Tape()).phase("released", A, 1).message("stopped", 1)
    violation = rejected(tape, "H9", "released r/0 before T/x had stopped (H10)")
    assert [event.kind for event in violation.events] == ["released", "stopped"]


def test_an_entity_that_stops_before_the_release_is_accepted() -> None:
    accepted(_moving(Tape()).message("stopped", 1).phase("released", A, 1))


def test_an_entity_may_stop_late_where_no_release_was_promised() -> None:
    accepted(Tape().phase("closed", A, 1).message("stopped", 1))
    accepted(Tape().move().message("stopped", 1, shard=1, id="y", inc=B))


def test_an_entity_of_a_later_stay_may_stop() -> None:
    tape = Tape().move()
    tape.store({0: entry(B, 2, "moving", change=4)})
    tape.phase("draining", B, 2).phase("released", B, 2)
    tape.store({0: entry(A, 3, change=5)})
    accepted(tape.message("stopped", 1, epoch=3).phase("open", A, 3))


@pytest.mark.parametrize("draining", [False, True])
def test_a_node_that_leaves_without_releasing_is_rejected(draining: bool) -> None:
    tape = _moving(Tape()) if draining else Tape()
    rejected(tape.note("ended", inc=A), "H9", "node-a (aaaaaaaa) left without releasing r/0 (H14)")


def test_a_node_that_leaves_empty_is_accepted() -> None:
    accepted(Tape().move().note("ended", inc=A))
    accepted(Tape().phase("closed", A, 1).note("ended", inc=A))
    accepted(Tape().note("ended", inc=C))


def test_a_node_that_leaves_in_a_storm_may_leave_its_shards() -> None:
    accepted(Tape().fault("cut").wait(14.9).note("ended", inc=A))
    rejected(Tape().fault("cut").wait(15.1).note("ended", inc=A), "H9", "(H14)")


def test_a_write_that_is_stored_after_the_release_is_rejected() -> None:
    def stored(tape: Tape, epoch: int = 1) -> Tape:
        tape.note("claim", role="r", shard=0, epoch=epoch, owner=A, ok=True)
        return append(tape.phase("released", A, 1), epoch, A)

    rejected(stored(Tape()), "H9", "before the journal had answered its batch 1 (H10, J5)")
    # It was given up: the journal had not answered for long.
    home = {"inc": A, "role": "r", "shard": 0, "epoch": 1, "type": "T", "id": "x"}
    accepted(stored(Tape().note("unstaged", **home, upto=0)))
    accepted(stored(Tape(), epoch=2))


# --- I4


def _journal() -> Tape:
    """A claimed shard 0; nothing is stored yet."""
    return Tape().note("claim", role="r", shard=0, epoch=1, owner=A, ok=True)


def _acked(tape: Tape, seq: int | None, value: int | None, id: str = "x") -> Tape:
    return tape.note("acked", type="T", id=id, seq=seq, value=value)


def _kept(tape: Tape, *values: int) -> Tape:
    return tape.note("kept", type="T", id="x", values=list(values))


def test_what_is_acknowledged_stored_and_kept_is_accepted() -> None:
    tape = append(_journal(), 1, A, seq=0, count=2, key="k")
    _acked(_acked(tape, 1, 10), 2, None)
    append(tape, 1, A, seq=2, count=1, key="l")
    _acked(tape, 3, 12)
    accepted(_kept(tape, 10, 11, 12, 13))


def test_an_acknowledgement_before_the_append_is_rejected() -> None:
    tape = _acked(_journal(), 1, 10)
    append(tape, 1, A)
    violation = rejected(tape, "I4", "event 1 of T/x was acknowledged before it was stored")
    assert [event.kind for event in violation.events] == ["acked"]


@pytest.mark.parametrize("seq", [1, 2, 3])
def test_an_acknowledgement_beyond_the_appended_is_rejected(seq: int) -> None:
    tape = _acked(append(_journal(), 1, A, count=2), seq, None)
    if seq <= 2:
        accepted(tape)
    else:
        rejected(tape, "I4", "event 3 of T/x was acknowledged before")


def test_a_refused_append_and_one_of_another_entity_store_nothing() -> None:
    refused = append(_journal(), 1, A, ok=False)
    rejected(_acked(refused, 1, 10), "I4", "before it was stored")
    other = append(_journal(), 1, A, id="y")
    rejected(_acked(other, 1, 10), "I4", "before it was stored")
    accepted(_acked(append(_journal(), 1, A, id="y"), 1, 10, id="y"))


def test_an_acknowledged_value_that_is_not_kept_is_rejected() -> None:
    tape = _acked(append(_journal(), 1, A), 1, 10)
    rejected(_kept(tape), "I4", "T/x acknowledged value 10 as event 1, but does not hold it")


def test_an_acknowledged_value_that_is_kept_elsewhere_is_rejected() -> None:
    tape = append(_journal(), 1, A, count=2)
    rejected(_kept(_acked(tape, 1, 10), 11, 10), "I4", "acknowledged value 10 as event 1")


def test_an_acknowledgement_of_an_earlier_ask_needs_its_event_only() -> None:
    tape = _acked(append(_journal(), 1, A), 1, None)
    accepted(_kept(tape, 99))
    rejected(_kept(_acked(append(_journal(), 1, A), 1, None)), "I4", "does not hold it")


def test_an_acknowledged_value_without_a_place_may_be_kept_anywhere() -> None:
    tape = _acked(append(_journal(), 1, A, count=2), None, 10)
    accepted(_kept(tape, 11, 10))
    tape = _acked(append(_journal(), 1, A), None, 10)
    rejected(_kept(tape, 11), "I4", "T/x acknowledged value 10, but does not hold it")


def test_a_key_whose_reply_is_lost_is_rejected() -> None:
    tape = append(_journal(), 1, A, keys=["k"])
    tape.note("unanswered", type="T", id="x", key="k")
    rejected(tape, "I4", "key 'k' of T/x has an effect, but its reply is lost")


def test_a_value_that_is_kept_twice_is_rejected() -> None:
    tape = append(_journal(), 1, A, count=3)
    rejected(_kept(tape, 10, 11, 10), "I4", "T/x holds value 10 twice, as events 1 and 3")


def test_a_key_with_two_effects_is_rejected() -> None:
    tape = append(_journal(), 1, A, keys=["k"])
    append(tape, 1, A, seq=1, keys=["j", "k"])
    violation = rejected(tape, "I4", "key 'k' had a second effect on T/x, by node-a")
    assert [event.fields["seq"] for event in violation.events] == [0, 1]


def test_a_key_has_its_second_effect_at_another_home_too() -> None:
    tape = append(_journal(), 1, A, keys=["k"]).move()
    tape.note("claim", role="r", shard=0, epoch=2, owner=B, ok=True)
    rejected(append(tape, 2, B, seq=1, keys=["k"]), "I4", "second effect on T/x, by node-b")


def test_a_key_that_comes_again_without_effect_is_accepted() -> None:
    tape = append(_journal(), 1, A, keys=["k"])
    append(tape, 1, A, seq=1, keys=["k"], ok=False, why="key")
    append(tape, 1, A, seq=1, count=0)
    append(tape, 1, A, keys=["k"], id="y")
    append(tape, 1, A, seq=1)
    accepted(append(tape, 1, A, seq=2))


def test_a_batch_that_is_stored_after_it_was_settled_as_lost_is_rejected() -> None:
    tape = settle(_journal(), 1, A, batch=4, how="void")
    rejected(append(tape, 1, A, batch=4), "I4", "stored on T/x after it had been settled as lost")
    tape = settle(_journal(), 1, A, batch=4, how="void")
    accepted(append(tape, 1, A, batch=5))


def test_a_batch_that_is_settled_otherwise_than_it_went_is_rejected() -> None:
    rejected(settle(_journal(), 1, A, batch=4, how="there"), "I4", "as stored, but it never was")
    tape = append(_journal(), 1, A, batch=4)
    rejected(settle(tape, 1, A, batch=4, how="void"), "I4", "batch 4 of node-a")
    tape = append(_journal(), 1, A, batch=4)
    accepted(settle(tape, 1, A, batch=4, how="fenced"))


def test_a_home_that_its_journal_fenced_may_drain_by_itself() -> None:
    """J1, J2: by its claim, by a write, or when it settles one."""
    for refuse in (
        lambda tape: tape.note("claim", role="r", shard=0, epoch=1, owner=A, ok=False),
        lambda tape: append(tape, 1, A, ok=False, why="fenced"),
        lambda tape: settle(tape, 1, A, batch=1, how="fenced"),
    ):
        tape = Tape()
        refuse(tape)
        accepted(tape.phase("draining", A, 1).phase("released", A, 1))
    clash = append(Tape(), 1, A, ok=False, why="seq").phase("draining", A, 1)
    rejected(clash, "I3", "before the store said moving")


# --- L3 and L4: the fence comes at the deadline


def _fenced(tape: Tape, inc: str = A) -> Tape:
    return tape.note("fenced", inc=inc, reason="its lease is over")


@pytest.mark.parametrize("inc", [A, C])
def test_a_fence_at_the_deadline_is_accepted_and_a_late_one_rejected(inc: str) -> None:
    accepted(_fenced(Tape(), inc))
    accepted(_fenced(Tape().wait(5.0, renew=False), inc))
    accepted(_fenced(Tape().wait(5.00005, renew=False), inc))
    late = _fenced(Tape().wait(5.001, renew=False), inc)
    violation = rejected(late, "L3", "still stood 0.001000 s past its deadline 1005.000000")
    assert [event.kind for event in violation.events] == ["renewed"]


def test_the_newest_renewal_sets_the_deadline() -> None:
    tape = Tape().wait(3.0)
    tape.note("renewed", inc=A, sent_at=tape.now - 2.0, ttl=6.0, margin=1.0)
    accepted(_fenced(tape.wait(5.0, renew=False)))
    rejected(_fenced(Tape().wait(3.0).wait(5.5, renew=False)), "L3", "still stood 0.5")


def test_a_process_that_stood_still_is_fenced_when_it_goes_on() -> None:
    tape = Tape().fault("freeze", A).wait(7.0, renew=False).fault("thaw", A)
    accepted(_fenced(tape))
    tape = Tape().fault("freeze", A).wait(7.0, renew=False).fault("thaw", A)
    tape.wait(0.01, renew=False)
    rejected(_fenced(tape), "L3", "though it did not stand still")


def test_pauses_in_a_row_delay_the_fence_until_the_last_one_ends() -> None:
    tape = Tape()
    for _ in range(3):
        tape.fault("freeze", A).wait(3.0, renew=False).fault("thaw", A)
    accepted(_fenced(tape))


def test_a_pause_that_ends_before_the_deadline_excuses_nothing() -> None:
    tape = Tape().fault("freeze", A).wait(4.0, renew=False).fault("thaw", A)
    rejected(_fenced(tape.wait(1.5, renew=False)), "L3", "still stood 0.5")


def test_a_pause_that_begins_after_the_deadline_excuses_nothing() -> None:
    tape = Tape().wait(5.5, renew=False).fault("freeze", A)
    tape.wait(2.0, renew=False).fault("thaw", A)
    rejected(_fenced(tape), "L3", "still stood 2.5")


@pytest.mark.parametrize(("fault", "inc"), [("freeze", B), ("partition", None), ("outage", A)])
def test_only_a_pause_of_its_own_delays_a_fence(fault: str, inc: str | None) -> None:
    tape = Tape().fault(fault, inc).wait(7.0, renew=False)
    rejected(_fenced(tape), "L3", "still stood 2.0")


def test_a_fence_without_a_lease_is_accepted() -> None:
    tape = Tape().note("life", inc="d" * 32, node="node-d", hosts=True, limits=LIMITS)
    accepted(_fenced(tape.wait(9.0), "d" * 32))


# --- I1a and C5: a record stays until its node has stopped


def _left(tape: Tape, kind: str) -> Tape:
    """A stops, in one way or another."""
    if kind == "crash":
        return tape.fault("crash", A)
    return tape.note(kind, inc=A, reason="")


@pytest.mark.parametrize("kind", ["fenced", "ended"])
@pytest.mark.parametrize("how", ["expire", "commit"])
def test_a_record_that_goes_before_its_node_stops_is_rejected(kind: str, how: str) -> None:
    tape = Tape().move()
    if how == "expire":
        tape.expire(node_key(A))
    else:
        tape.commit("node-b", [], (node_key(A),))
    tape.wait(0.5)
    violation = rejected(_left(tape, kind), "I1a", "node-a (aaaaaaaa) went before it stopped (C5)")
    assert [event.kind for event in violation.events] == [how, kind]
    assert violation.at == 1000.0


@pytest.mark.parametrize("kind", ["fenced", "ended", "crash"])
def test_a_record_that_goes_after_its_node_stopped_is_accepted(kind: str) -> None:
    tape = _left(Tape().move(), kind)
    tape.expire(node_key(A))
    accepted(tape)


def test_a_fenced_node_may_end_after_its_record_went() -> None:
    tape = _fenced(Tape().move())
    tape.expire(node_key(A))
    accepted(tape.wait(0.5).note("ended", inc=A))


def test_a_record_that_goes_at_the_deadline_is_accepted_and_before_it_rejected() -> None:
    tape = Tape().fault("freeze", A).wait(5.0, renew=False)
    tape.expire(node_key(A))
    accepted(_fenced(tape.wait(1.0, renew=False).fault("thaw", A)))
    tape = Tape().fault("freeze", A).wait(4.999, renew=False)
    tape.expire(node_key(A))
    rejected(_fenced(tape.wait(1.0, renew=False).fault("thaw", A)), "I1a", "(C5)")


def test_a_late_answer_to_an_old_renewal_does_not_let_a_record_go() -> None:
    tape = Tape().wait(3.0)
    tape.note("renewed", inc=A, sent_at=tape.now - 3.0, ttl=6.0, margin=1.0)
    tape.wait(3.0, renew=False).expire(node_key(A))
    rejected(_fenced(tape), "I1a", "(C5)")


def test_the_dead_cannot_tell_whether_their_record_went_first() -> None:
    tape = Tape()
    tape.expire(node_key(A))
    accepted(_left(tape, "crash"))


def test_each_record_is_its_own_nodes() -> None:
    tape = Tape()
    tape.expire(node_key(B))
    accepted(_fenced(tape))


# --- I5: reasons for a gap


def _gone_unanswered(tape: Tape, *, cancelled: bool) -> Tape:
    return tape.outcome(1, "maybe_executed", cancelled=cancelled)


def test_a_caller_that_gave_up_needs_no_other_reason() -> None:
    accepted(_gone_unanswered(Tape().submit(1).write(1), cancelled=True))
    rejected(_gone_unanswered(Tape().submit(1).write(1), cancelled=False), "I5", "a gap without")


def test_a_caller_that_gave_up_is_told_no_lie_either() -> None:
    tape = Tape().submit(1).start(1).outcome(1, "not_executed", cancelled=True)
    rejected(tape, "I5", "but it had started")
    tape = _gone_unanswered(Tape().submit(1), cancelled=True).outcome(1, "ok", cancelled=True)
    rejected(tape, "I5", "two outcomes")


@pytest.mark.parametrize("how", ["ok", "rejected", "failed", "cancelled", "abandoned"])
def test_only_a_handler_that_failed_explains_an_unknown_outcome(how: str) -> None:
    tape = Tape().submit(1).accept(1).start(1).finish(1, how).outcome(1, "maybe_executed")
    if how == "failed":
        accepted(tape)
    else:
        rejected(tape, "I5", "a gap without a fault")


def test_a_handler_that_fails_later_explains_nothing() -> None:
    tape = Tape().submit(1).accept(1).start(1).outcome(1, "maybe_executed").finish(1, "failed")
    rejected(tape, "I5", "a gap without a fault")


def test_another_messages_failure_explains_nothing() -> None:
    tape = Tape().start(1).finish(1, "failed").submit(2).accept(2).start(2).finish(2)
    rejected(tape.outcome(2, "maybe_executed"), "I5", "a gap without a fault")


# --- J5


def _shows(tape: Tape, upto: int, *, kind: str = "staged") -> Tape:
    """The entity x at A shows its events up to a number."""
    return tape.note(kind, inc=A, role="r", shard=0, epoch=1, type="T", id="x", upto=upto)


def _sends(tape: Tape, seen: int | None = None) -> Tape:
    """The entity x tells y; with `seen` from beside its handlers."""
    return tape.submit(1, inc=A, id="y", ask=False, by=("T", "x"), seen=seen)


def test_what_is_told_before_its_event_is_stored_is_rejected() -> None:
    tape = _sends(_shows(_journal(), 1))
    violation = rejected(tape, "J5", "T/x sent a message before its event 1 was stored")
    assert [event.kind for event in violation.events] == ["submit"]
    # A number that another entity has stored does not count.
    rejected(_sends(append(_shows(_journal(), 1), 1, A, id="y")), "J5", "before its event 1")
    rejected(_sends(append(_shows(_journal(), 1), 1, A, ok=False)), "J5", "before its event 1")


def test_what_is_told_after_its_event_is_stored_or_dropped_is_accepted() -> None:
    accepted(_sends(append(_shows(_journal(), 1), 1, A)))
    accepted(_sends(_shows(_shows(_journal(), 1), 0, kind="unstaged")))


def test_what_is_answered_before_its_event_is_stored_is_rejected() -> None:
    def answered(*, early: bool) -> Tape:
        tape = _shows(_journal().submit(1).write(1).accept(1).start(1), 1).finish(1)
        return append(tape.outcome(1), 1, A) if early else append(tape, 1, A).outcome(1)

    rejected(answered(early=True), "J5", "was answered before event 1 of T/x was stored")
    accepted(answered(early=False))


def test_a_hook_that_tells_before_what_it_had_seen_is_stored_is_rejected() -> None:
    tape = _shows(append(_shows(_journal(), 1), 1, A), 2)
    rejected(_sends(tape, seen=2), "J5", "T/x sent a message before its event 2 was stored")


def test_a_hook_that_tells_while_a_later_handler_stores_more_is_accepted() -> None:
    """Its message waited for what was sent when it made the call, and 2 was staged since."""
    tape = _shows(append(_shows(_journal(), 1), 1, A), 2)
    accepted(_sends(tape, seen=1))
    # A handler has its entity to itself: what it shows is what it has seen.
    rejected(_sends(tape), "J5", "before its event 2 was stored")
