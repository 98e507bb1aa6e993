"""The sender machine: its table, when it writes, holds, flushes and gives up, and its bounds."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import product
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from domicile.core.handoff.pending import (
    GiveUp,
    HoldLimits,
    Home,
    Pending,
    SenderEffect,
    SendFlush,
    WriteRequest,
)
from domicile.core.handoff.sender import Sender
from domicile.core.handoff.tables import SENDER_TRANSITIONS, SenderEvent, SenderState
from domicile.core.ids import EntityKey, Incarnation, ShardKey
from domicile.core.machines import Arm
from domicile.core.state.shardmap import Entry
from proving.search.machines import check_sender

A, B = Incarnation("a"), Incarnation("b")
CART, DOOR = EntityKey("cart", "c"), EntityKey("door", "d")
SHARD, ELSEWHERE = ShardKey("r", 0), ShardKey("r", 1)
LIMITS = HoldLimits(buffer=10, hold_bytes=1_000, window=10, hold_timeout_s=10.0)


def entry(owner: Incarnation, epoch: int, state: Any, change: int) -> Entry:
    return Entry(owner, epoch, state, change=change)


SERVING = entry(A, 1, "serving", 1)
MOVING = entry(A, 1, "moving", 2)
REVERTED = entry(A, 1, "serving", 3)
MOVED = entry(B, 2, "serving", 3)


class Desk:
    """A sender with a map and members of its own, and short ways to use it."""

    def __init__(self, limits: HoldLimits = LIMITS, seen: Entry | None = SERVING) -> None:
        self.moving: list[ShardKey] = []
        self.up = [A, B]
        self.sender = Sender(
            SHARD, limits, lambda shard: shard in self.moving, lambda node: node in self.up
        )
        if seen is not None:
            self.sender.see(seen, 0.0)

    def pending(
        self,
        *,
        entity: EntityKey = CART,
        ask: bool = True,
        chain: tuple[ShardKey, ...] = (),
        size_bytes: int = 1,
    ) -> Pending:
        return Pending(self.sender.number(), entity, ask, chain, size_bytes)

    def send(self, count: int = 1, now: float = 0.0, **kind: Any) -> tuple[SenderEffect, ...]:
        out: list[SenderEffect] = []
        for _ in range(count):
            assert self.sender.room(1)
            out += self.sender.submit(self.pending(**kind), now)
        return tuple(out)

    @property
    def queued(self) -> list[int]:
        return [pending.n for pending in self.sender.queue]


def writes(effects: Iterable[SenderEffect]) -> list[tuple[int, str, int, int, bool]]:
    return [
        (effect.pending.n, effect.to, effect.epoch, effect.change, effect.finishing)
        for effect in effects
        if isinstance(effect, WriteRequest)
    ]


def written(effects: Iterable[SenderEffect]) -> list[int]:
    return [effect.pending.n for effect in effects if isinstance(effect, WriteRequest)]


def flushes(effects: Iterable[SenderEffect]) -> list[SendFlush]:
    return [effect for effect in effects if isinstance(effect, SendFlush)]


def given_up(effects: Iterable[SenderEffect]) -> list[int]:
    return [effect.pending.n for effect in effects if isinstance(effect, GiveUp)]


def armed(effects: Iterable[SenderEffect]) -> list[float]:
    return [effect.at for effect in effects if isinstance(effect, Arm)]


# the table


def test_every_bond_handles_every_event() -> None:
    assert set(SENDER_TRANSITIONS) == set(product(SenderState, SenderEvent))


def test_a_bond_leaves_flushing_only_by_its_answer_or_a_loss() -> None:
    """H5, H6: nothing else lets a sender write elsewhere."""
    leaving = {
        event
        for (state, event), transition in SENDER_TRANSITIONS.items()
        if state is SenderState.FLUSHING and transition.to != (SenderState.FLUSHING,)
    }
    assert leaving == {SenderEvent.FLUSHED, SenderEvent.LINK_LOST, SenderEvent.HOLD_TIMEOUT}


def test_each_transition_has_one_target_and_a_rule() -> None:
    for transition in SENDER_TRANSITIONS.values():
        assert len(transition.to) == 1
        assert transition.rule.startswith("H")


# H1, H2


def test_messages_are_written_to_the_home_with_its_stamp() -> None:
    desk = Desk()
    assert writes(desk.send(2)) == [(1, A, 1, 1, False), (2, A, 1, 1, False)]
    assert desk.sender.key == Home(A, 1)
    assert desk.sender.state is SenderState.BOUND


def test_without_a_known_home_everything_waits_in_order() -> None:
    desk = Desk(seen=None)
    assert desk.send(3) == ()
    assert written(desk.sender.see(SERVING, 1.0)) == [1, 2, 3]


def test_nothing_is_written_to_a_node_that_is_gone() -> None:
    desk = Desk()
    desk.up.remove(A)
    assert written(desk.send()) == []
    desk.up.append(A)
    assert written(desk.sender.look(1.0)) == [1]


def test_everything_queues_while_the_shard_moves() -> None:
    desk = Desk(seen=MOVING)
    assert written(desk.send(2)) == []
    assert written(desk.sender.see(MOVED, 1.0)) == [1, 2]


def test_an_entry_that_is_not_newer_changes_nothing() -> None:
    desk = Desk(seen=MOVED)
    assert desk.sender.see(MOVING, 0.0) == ()
    assert writes(desk.send()) == [(1, B, 2, 3, False)]


# H3, H4, H5


def test_moving_is_flushed_for_once_and_the_queue_waits_for_the_answer() -> None:
    desk = Desk()
    desk.send(2)
    effects = desk.sender.see(MOVING, 5.0)
    assert flushes(effects) == [SendFlush(A, 1)]
    assert armed(effects) == [15.0]
    assert written(desk.send()) == []
    assert desk.sender.see(MOVED, 6.0) == ()
    assert written(desk.sender.returned(A, (1, 2), MOVING, False, 6.0)) == []
    assert desk.queued == [1, 2, 3]
    assert writes(desk.sender.flushed(A, 1, MOVING, True, 7.0)) == [
        (1, B, 2, 3, False), (2, B, 2, 3, False), (3, B, 2, 3, False),
    ]  # fmt: skip


def test_a_move_seen_while_nothing_is_written_needs_no_flush() -> None:
    desk = Desk()
    assert flushes(desk.sender.see(MOVING, 0.0)) == []
    assert flushes(desk.send()) == []
    assert written(desk.sender.see(MOVED, 0.0)) == [1]


def test_a_home_that_changed_unseen_is_flushed_first() -> None:
    desk = Desk()
    desk.send()
    assert flushes(desk.sender.see(MOVED, 0.0)) == [SendFlush(A, 1)]
    assert written(desk.send()) == []
    assert written(desk.sender.flushed(A, 1, MOVED, True, 0.0)) == [2]


def test_a_return_is_reinserted_by_number_and_flushes() -> None:
    desk = Desk()
    desk.send(3)
    effects = desk.sender.returned(A, (2, 3), SERVING, False, 0.0)
    assert flushes(effects) == [SendFlush(A, 1)]
    assert written(effects) == []
    assert desk.queued == [2, 3]
    assert flushes(desk.sender.returned(A, (1,), SERVING, False, 0.0)) == []
    assert written(desk.sender.flushed(A, 1, SERVING, False, 0.0)) == [1, 2, 3]


def test_a_return_of_what_has_started_or_was_written_elsewhere_is_ignored() -> None:
    desk = Desk()
    desk.send(2)
    desk.sender.begun(A, 1, 0.0)
    assert desk.sender.returned(A, (1,), SERVING, False, 0.0) == ()
    assert desk.sender.returned(B, (2,), SERVING, False, 0.0) == ()
    assert desk.queued == []


def test_the_answer_to_another_flush_is_ignored() -> None:
    desk = Desk()
    desk.send()
    desk.sender.see(MOVING, 0.0)
    desk.send()
    for peer, id in ((A, 0), (A, 2), (B, 1)):
        assert written(desk.sender.flushed(peer, id, MOVED, True, 0.0)) == []
        assert desk.sender.state is SenderState.FLUSHING
    assert written(desk.sender.flushed(A, 1, MOVED, True, 0.0)) == [2]


def test_a_released_owner_is_not_written_to_again_under_that_epoch() -> None:
    """H3: as moving until a newer epoch, or it would be written and returned in circles."""
    desk = Desk()
    desk.send()
    desk.sender.returned(A, (1,), REVERTED, True, 0.0)
    assert writes(desk.sender.flushed(A, 1, REVERTED, True, 0.0)) == []
    assert writes(desk.sender.see(entry(B, 2, "serving", 4), 0.0)) == [(1, B, 2, 4, False)]


def test_a_late_return_of_an_earlier_home_says_nothing_of_a_later_one_at_the_same_node() -> None:
    """H3: A released epoch 1, long ago; now it is home again under epoch 3."""
    desk = Desk()
    desk.send()
    desk.sender.see(MOVING, 0.0)
    assert given_up(desk.sender.tick(10.0)) == [1]
    desk.sender.see(MOVED, 10.0)
    desk.sender.see(entry(A, 3, "serving", 5), 11.0)
    assert written(desk.send(now=11.0)) == [2]
    desk.sender.returned(A, (1,), MOVING, True, 12.0)
    assert written(desk.send(now=12.0)) == [3]


# H6


def test_a_lost_link_gives_up_what_it_had_and_keeps_the_queue() -> None:
    desk = Desk()
    desk.send(2)
    desk.sender.see(MOVING, 0.0)
    desk.send(2, ask=False)
    assert given_up(desk.sender.link_lost(A, (), 0.0)) == [1, 2]
    assert desk.sender.state is SenderState.UNBOUND
    assert written(desk.sender.see(MOVED, 0.0)) == [3, 4]


def test_what_never_left_the_process_is_written_again_in_order() -> None:
    desk = Desk()
    desk.send(3)
    effects = desk.sender.link_lost(A, (2, 3), 0.0)
    assert given_up(effects) == [1]
    assert written(effects) == [2, 3]


def test_the_loss_of_another_peers_link_changes_nothing() -> None:
    desk = Desk()
    desk.send()
    assert desk.sender.link_lost(B, (), 0.0) == ()
    assert desk.sender.state is SenderState.BOUND


def test_a_started_ask_is_given_up_with_its_link_and_a_started_tell_is_not() -> None:
    desk = Desk()
    desk.send(1, ask=True)
    desk.send(1, ask=False)
    desk.sender.begun(A, 1, 0.0)
    desk.sender.begun(A, 2, 0.0)
    assert given_up(desk.sender.link_lost(A, (), 0.0)) == [1]


def test_an_overdue_flush_counts_as_a_lost_link_for_what_has_not_started() -> None:
    desk = Desk()
    desk.send(2)
    desk.sender.begun(A, 1, 0.0)
    desk.sender.see(MOVED, 0.0)
    desk.send()
    assert desk.sender.tick(9.9) == (Arm(10.0),)
    effects = desk.sender.tick(10.0)
    assert given_up(effects) == [2]
    assert written(effects) == [3]
    pending, _ = desk.sender.answered(A, 1, 11.0)
    assert pending is not None, "its reply may still come"
    assert written(desk.sender.flushed(A, 1, MOVED, True, 11.0)) == []
    assert desk.sender.state is SenderState.BOUND


# answers


def test_a_reply_resolves_its_message_once() -> None:
    desk = Desk()
    desk.send()
    assert desk.sender.answered(B, 1, 0.0) == (None, ())
    pending, _ = desk.sender.answered(A, 1, 0.0)
    assert pending is not None
    assert pending.n == 1
    assert desk.sender.answered(A, 1, 0.0) == (None, ())
    assert not desk.sender.waiting()


def test_a_withdrawn_message_that_was_never_written_never_is() -> None:
    desk = Desk(seen=None)
    pending = desk.pending()
    desk.sender.submit(pending, 0.0)
    assert desk.sender.withdraw(pending, 0.0) == (True, ())
    assert written(desk.sender.see(SERVING, 0.0)) == []
    assert desk.sender.held_bytes == 0


def test_a_withdrawn_message_that_comes_back_is_not_written_again() -> None:
    desk = Desk()
    pending = desk.pending()
    desk.sender.submit(pending, 0.0)
    assert desk.sender.withdraw(pending, 0.0) == (False, ())
    desk.sender.returned(A, (1,), SERVING, False, 0.0)
    assert written(desk.sender.flushed(A, 1, SERVING, False, 0.0)) == []
    assert not desk.sender.waiting()


def test_withdrawing_the_head_lets_the_next_one_go() -> None:
    desk = Desk(LIMITS._replace(window=1))
    messages = [desk.pending() for _ in range(3)]
    for pending in messages:
        desk.sender.submit(pending, 0.0)
    assert desk.sender.withdraw(messages[1], 0.0)[0] is True
    assert written(desk.sender.begun(A, 1, 0.0)) == [3]


def test_waiting_means_queued_or_written_and_not_started() -> None:
    desk = Desk()
    desk.send()
    assert desk.sender.waiting()
    desk.sender.begun(A, 1, 0.0)
    assert not desk.sender.waiting()


def test_a_departing_peer_is_flushed_and_not_written_to_again() -> None:
    """H14."""
    desk = Desk()
    desk.send()
    assert flushes(desk.sender.departing(A, 0.0)) == [SendFlush(A, 1)]
    desk.sender.returned(A, (1,), SERVING, False, 0.0)
    assert written(desk.sender.flushed(A, 1, SERVING, False, 0.0)) == []
    assert written(desk.sender.see(entry(B, 2, "serving", 2), 0.0)) == [1]


# N3, N4, N5


def test_an_ask_that_the_shard_itself_waits_for_is_written_while_it_moves() -> None:
    desk = Desk(seen=MOVING)
    assert writes(desk.send(chain=(SHARD,))) == [(1, A, 1, 2, True)]


def test_an_ask_that_another_moving_shard_waits_for_is_written_once_that_is_known() -> None:
    desk = Desk(seen=MOVING)
    assert written(desk.send(chain=(ELSEWHERE,))) == []
    desk.moving.append(ELSEWHERE)
    assert writes(desk.sender.look(0.0)) == [(1, A, 1, 2, True)]


def test_a_tell_is_never_finishing() -> None:
    desk = Desk(seen=MOVING)
    assert written(desk.send(chain=(SHARD,), ask=False)) == []
    assert written(desk.sender.tick(100.0)) == []


def test_a_finishing_message_is_preceded_by_what_waits_for_the_same_entity() -> None:
    desk = Desk(seen=MOVING)
    desk.send(1, ask=False)
    desk.send(1, entity=DOOR)
    effects = desk.send(1, chain=(SHARD,))
    assert writes(effects) == [(1, A, 1, 2, True), (3, A, 1, 2, True)]
    assert desk.queued == [2]


def test_a_full_window_does_not_hold_finishing_messages_nor_split_their_order() -> None:
    desk = Desk(LIMITS._replace(window=1), seen=MOVING)
    desk.send(1, ask=False)
    assert written(desk.send(1, chain=(SHARD,))) == [1, 2]
    assert written(desk.send(1, chain=(SHARD,))) == [3]


def test_a_full_window_does_not_hold_what_a_running_handler_awaits() -> None:
    """The window may be full of mail that waits for that very handler."""
    desk = Desk(LIMITS._replace(window=1), seen=SERVING)
    assert written(desk.send(1)) == [1]
    assert written(desk.send(1, ask=False)) == [], "a root waits for room"
    assert written(desk.send(1, chain=(ELSEWHERE,))) == [2, 3], "and goes along if it must"
    assert written(desk.send(1)) == []
    assert written(desk.sender.begun(A, 1, 0.0)) == []
    assert written(desk.sender.begun(A, 2, 0.0)) == []
    assert written(desk.sender.begun(A, 3, 0.0)) == [4]


def test_who_waits_in_line_behind_a_handler_makes_its_asks_finishing() -> None:
    desk = Desk(seen=MOVING)
    line: list[ShardKey] = []
    pending = Pending(
        desk.sender.number(), EntityKey("t", "x"), True, (ELSEWHERE,), 1, lambda: line
    )
    assert written(desk.sender.submit(pending, 0.0)) == []
    line.append(SHARD)
    assert written(desk.sender.look(0.0)) == [pending.n]


def test_waves_make_chained_asks_finishing_at_growing_times_after_moving_was_seen() -> None:
    desk = Desk(seen=None)
    desk.sender.see(MOVING, 8.0)
    assert armed(desk.send(now=8.1, chain=(ELSEWHERE,))) == [8.25]
    assert written(desk.sender.tick(8.25)) == [1]
    assert armed(desk.send(now=8.3, chain=(ELSEWHERE,))) == [8.5]
    assert written(desk.sender.tick(8.5)) == [2]
    assert armed(desk.send(now=9.5, chain=(ELSEWHERE,))) == [10.0]
    assert armed(desk.send(now=9.6)) == [10.0]
    assert written(desk.sender.tick(10.0)) == [3], "a root waits for the new home"


def test_a_wave_does_not_displace_the_time_limit_of_a_flush() -> None:
    """H6: only one time is armed, the earlier; the later one is armed again when that has come."""
    desk = Desk()
    desk.send()
    effects = [*desk.sender.see(MOVING, 1.0), *desk.send(now=1.1, chain=(ELSEWHERE,))]
    assert sorted(armed(effects)) == [1.25, 11.0]
    assert 11.0 in armed(desk.sender.tick(1.25))
    assert given_up(desk.sender.tick(11.0)) == [1]


def test_a_later_move_has_waves_of_its_own() -> None:
    """N5: `serving` between the two may never have been seen."""
    desk = Desk(seen=None)
    desk.sender.see(MOVING, 0.0)
    desk.sender.see(entry(B, 2, "moving", 4), 60.0)
    assert armed(desk.send(now=60.0, chain=(ELSEWHERE,))) == [60.25]


def test_a_wave_ends_when_the_shard_serves() -> None:
    desk = Desk(seen=MOVING)
    desk.send(1, chain=(ELSEWHERE,))
    assert written(desk.sender.tick(0.25)) == [1]
    desk.sender.returned(A, (1,), MOVING, False, 0.3)
    assert [pending.urgent for pending in desk.sender.queue] == [True]
    assert written(desk.sender.see(REVERTED, 0.4)) == [], "the flush is out"
    assert [pending.urgent for pending in desk.sender.queue] == [False]


# I6


def test_the_buffer_bounds_what_waits() -> None:
    desk = Desk(LIMITS._replace(buffer=3), seen=None)
    desk.send(3)
    assert not desk.sender.room(1)
    desk.sender.see(SERVING, 0.0)
    assert desk.sender.room(1)


def test_hold_bytes_bounds_what_waits() -> None:
    desk = Desk(LIMITS._replace(hold_bytes=100), seen=None)
    assert desk.sender.room(100)
    assert not desk.sender.room(101)
    desk.sender.submit(desk.pending(size_bytes=60), 0.0)
    assert desk.sender.room(40)
    assert not desk.sender.room(41)
    desk.sender.see(SERVING, 0.0)
    assert desk.sender.room(100)


def test_the_window_bounds_what_is_written_and_not_started() -> None:
    desk = Desk(LIMITS._replace(window=2))
    assert written(desk.send(5)) == [1, 2]
    assert written(desk.sender.begun(A, 1, 0.0)) == [3]
    assert written(desk.sender.answered(A, 2, 0.0)[1]) == [4]
    assert desk.sender.open == 2


# properties

_ENTRIES = st.tuples(
    st.sampled_from((A, B)), st.integers(0, 1), st.sampled_from(("serving", "moving"))
)
_STEP = st.one_of(
    st.tuples(st.just("send"), st.sampled_from((CART, DOOR)), st.booleans(), st.integers(0, 2)),
    st.tuples(st.just("entry"), _ENTRIES),
    st.tuples(st.just("begun"), st.sampled_from((A, B)), st.integers(1, 12)),
    st.tuples(st.just("answer"), st.sampled_from((A, B)), st.integers(1, 12)),
    st.tuples(st.just("return"), st.sampled_from((A, B)), st.integers(1, 12), st.booleans()),
    st.tuples(st.just("flushed"), st.sampled_from((A, B)), st.integers(0, 3), st.booleans()),
    st.tuples(st.just("lost"), st.sampled_from((A, B)), st.integers(1, 12)),
    st.tuples(st.just("withdraw"), st.integers(1, 12)),
    st.tuples(st.just("departing"), st.sampled_from((A, B))),
    st.tuples(st.just("tick"), st.sampled_from((0.1, 0.5, 10.0))),
)


@given(st.lists(_STEP, max_size=50), st.integers(1, 4))
def test_whatever_peers_say_the_books_balance_and_bonds_follow_the_table(
    steps: list[tuple[Any, ...]], window: int
) -> None:
    """I6: nothing vanishes and no bound is passed, also with answers that make no sense."""
    desk = Desk(LIMITS._replace(window=window, buffer=6), seen=None)
    sender = desk.sender
    messages: dict[int, Pending] = {}
    done: dict[int, None] = {}
    seen, now = Entry(), 0.0
    for step in steps:
        effects: tuple[SenderEffect, ...] = ()
        match step:
            case ("send", entity, ask, depth) if sender.room(1):
                pending = desk.pending(entity=entity, ask=ask, chain=(ELSEWHERE, SHARD)[:depth])
                messages[pending.n] = pending
                effects = sender.submit(pending, now)
            case ("entry", (owner, newer, state)):
                epoch = max(1, seen.epoch + (newer or owner != seen.owner))
                seen = entry(owner, epoch, state, seen.change + 1)
                effects = sender.see(seen, now)
            case ("begun", peer, n):
                pending = sender.written.get(n)
                effects = sender.begun(peer, n, now)
                if pending is not None and pending.to == peer and not pending.ask:
                    done[n] = None
            case ("answer", peer, n):
                resolved, effects = sender.answered(peer, n, now)
                if resolved is not None:
                    done[resolved.n] = None
            case ("return", peer, n, released):
                effects = sender.returned(peer, (n,), seen, released, now)
            case ("flushed", peer, back, released):
                effects = sender.flushed(peer, sender.last_flush - back, seen, released, now)
            case ("lost", peer, n):
                effects = sender.link_lost(peer, (n,), now)
            case ("withdraw", n) if n in messages and messages[n].ask and not messages[n].resolved:
                _, effects = sender.withdraw(messages[n], now)
                done[n] = None
            case ("departing", peer):
                effects = sender.departing(peer, now)
            case ("tick", later_s):
                now += later_s
                effects = sender.tick(now)
            case _:
                pass
        for effect in effects:
            if isinstance(effect, GiveUp):
                assert effect.pending.n not in done, "an outcome was told twice"
                done[effect.pending.n] = None
            elif isinstance(effect, WriteRequest):
                assert effect.pending.n not in done, "a resolved message was written"
        check_sender(sender)
        held = {pending.n for pending in sender.queue} | {
            n for n, pending in sender.written.items() if not pending.resolved
        }
        assert held == set(messages) - set(done)
        assert len(sender.queue) <= 6 + window
