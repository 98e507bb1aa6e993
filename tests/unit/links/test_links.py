"""The link layer on the simulated network: one situation a test."""

from __future__ import annotations

import asyncio

import pytest
from links_lab import Lab, request, simulate

from domicile.core.ids import Incarnation, LinkKey
from domicile.core.wire import Ping, Pong
from domicile.links.session import ACK_DELAY_S, MANY_MESSAGES, SOON_MESSAGES
from domicile.ports.transport import Peer
from domicile.settings import Settings

FEW = SOON_MESSAGES - 1


def test_asks_and_answers_in_order_with_one_frame_a_turn() -> None:
    async def test(lab: Lab) -> None:
        p, q = await lab.pair()
        p.send(q, *range(FEW))
        await asyncio.sleep(0.02)
        assert q.all_requests() == list(range(FEW))
        assert p.all_heard() == list(range(FEW))
        assert (lab.taken(p), lab.taken(q)) == (1, 1)
        assert p.layer.connected(q.inc)
        assert not q.layer.connected(p.inc)
        replies = [event.fields for event in lab.history.of("reply")]
        assert [reply["n"] for reply in replies] == list(range(FEW))
        assert replies[0] == {"inc": q.inc, "sender": p.inc, "role": "r", "shard": 0, "n": 0}
        (taken,) = [e.fields for e in lab.history.of("taken") if e.fields["inc"] == q.inc]
        link = p.link_to(q)
        assert taken == {"inc": q.inc, "peer": p.inc, "link": link, "session": 1, "no": 1}

    simulate(test)


def test_many_do_not_wait_for_the_end_of_the_turn() -> None:
    async def test(lab: Lab) -> None:
        p, q = await lab.pair()
        p.send(q, 0)
        await asyncio.sleep(0.02)
        began = lab.taken(q)
        p.do(lambda: [p.layer.post(q.inc, request(n)) for n in range(1, 101)])
        await asyncio.sleep(0.02)
        assert q.all_requests() == list(range(101))
        assert p.all_heard() == list(range(101))
        assert lab.taken(q) - began == 2, "the first ones at once, the others together"

    simulate(test)


def test_what_is_sent_at_once_does_not_wait_for_the_end_of_the_turn() -> None:
    async def test(lab: Lab) -> None:
        p, q = await lab.pair()
        p.send(q, 0)
        await asyncio.sleep(0.02)
        began = lab.taken(q)
        p.do(lambda: [p.layer.post(q.inc, request(n), at_once=n < 3) for n in range(1, 6)])
        await asyncio.sleep(0.02)
        assert q.all_requests() == list(range(6))
        assert lab.taken(q) - began == 3

    simulate(test)


def test_a_flood_within_one_turn_travels_in_larger_frames() -> None:
    async def test(lab: Lab) -> None:
        p, q = await lab.pair()
        p.send(q, 0)
        await asyncio.sleep(0.02)
        q.answers = False
        for first in (1, 10_001):
            # From the start again in the next turn.
            began = lab.taken(q)
            numbers = range(first, first + SOON_MESSAGES + 3 * MANY_MESSAGES)
            p.do(lambda numbers=numbers: [p.layer.post(q.inc, request(n)) for n in numbers])
            await asyncio.sleep(0.02)
            assert q.all_requests()[-len(numbers) :] == list(numbers)
            assert lab.taken(q) - began == 1 + 3
            p.send(q, first + 5_000)
            await asyncio.sleep(0.02)

    simulate(test)


def test_an_acknowledgement_comes_by_itself_after_a_while() -> None:
    async def test(lab: Lab) -> None:
        p, q = await lab.pair()
        q.answers = False
        p.send(q, 1)
        await asyncio.sleep(0.02)
        assert q.all_requests() == [1]
        assert p.layer.pending()
        await asyncio.sleep(ACK_DELAY_S)
        assert not p.layer.pending()
        assert not q.layer.pending()
        assert lab.taken(p) == 0, "a bare acknowledgement has no number"

    simulate(test)


def test_a_busy_link_is_acknowledged_before_its_window_is_full() -> None:
    async def test(lab: Lab) -> None:
        p = await lab.host("p", Settings(link_frames=8))
        q = await lab.host("q", Settings(link_frames=8))
        q.answers = False
        p.send(q, 0)
        await asyncio.sleep(0.1)
        start = lab.world.now
        for n in range(1, 40):
            p.send(q, n)
            await asyncio.sleep(0.0005)
        await asyncio.sleep(0.02)
        assert q.all_requests() == list(range(40))
        assert lab.world.now - start < 0.05

    simulate(test)


def test_control_passes_requests_that_wait_for_a_connection() -> None:
    async def test(lab: Lab) -> None:
        p, q = await lab.pair()
        lab.network.partition([["p"], ["q"]])
        p.send(q, 1, 2)
        p.do(lambda: p.layer.send(q.peer, Ping(1), control=True))
        await asyncio.sleep(0.5)
        lab.network.heal()
        await asyncio.sleep(1)
        assert q.order == ["ping 1", "request 1", "request 2"]

    simulate(test)


@pytest.mark.parametrize("seed", range(5))
def test_a_cut_is_survived_without_loss_or_repetition(seed: int) -> None:
    async def test(lab: Lab) -> None:
        p, q = await lab.pair()
        for n in range(200):
            p.send(q, n)
            if n % 20 == 10:
                lab.network.cut("p", "q")
            await asyncio.sleep(0.002)
        await asyncio.sleep(3)
        assert q.all_requests() == list(range(200))
        assert p.all_heard() == list(range(200))
        assert p.lost == []
        assert q.gone == []
        assert not p.layer.pending()
        assert not q.layer.pending()

    lab = simulate(test, seed)
    assert max(event.fields["session"] for event in lab.history.of("taken")) > 1


def test_silence_makes_a_new_session() -> None:
    async def test(lab: Lab) -> None:
        p, q = await lab.pair()
        p.send(q, 1)
        await asyncio.sleep(0.1)
        lab.network.block("q", "p")
        p.send(q, 2)
        await asyncio.sleep(1.9)
        assert p.layer.connected(q.inc)
        await asyncio.sleep(0.2)
        assert not p.layer.connected(q.inc)
        lab.network.heal()
        await asyncio.sleep(1)
        assert q.all_requests() == [1, 2]
        assert p.all_heard() == [1, 2]
        assert lab.history.counts["link.silent"] >= 1
        assert p.lost == []

    simulate(test)


def test_a_peer_with_a_blocked_loop_is_dialled_until_it_answers() -> None:
    """DX-10: what it has read is answered, once and in order, however long it was silent."""

    async def test(lab: Lab) -> None:
        p, q = await lab.pair()
        p.send(q, 1)
        await asyncio.sleep(0.1)
        q.loop.freeze()
        p.stalled.append(q.inc)
        p.send(q, 2, 3)
        await asyncio.sleep(9)
        p.send(q, 4)
        await asyncio.sleep(9)
        assert p.lost == []
        q.loop.thaw()
        p.stalled.clear()
        await asyncio.sleep(2)
        assert q.all_requests() == p.all_heard() == [1, 2, 3, 4]
        assert p.lost == []
        assert q.gone == []

    simulate(test)


def test_a_peer_that_is_silent_and_not_blocked_is_lost_as_before() -> None:
    async def test(lab: Lab) -> None:
        p, q = await lab.pair()
        p.send(q, 1)
        await asyncio.sleep(0.1)
        q.loop.freeze()
        p.stalled.append(q.inc)
        p.send(q, 2)
        await asyncio.sleep(9)
        assert p.lost == []
        p.stalled.clear()
        await asyncio.sleep(5.1)
        assert [peer for peer, _ in p.lost] == [q.inc]
        p.stalled.append(q.inc)
        p.send(q, 3)
        await asyncio.sleep(9)
        p.do(lambda: p.layer.forget(q.inc))
        await asyncio.sleep(0.1)
        assert len(p.lost) == 2, "the end of its record ends every wait"

    simulate(test)


def test_an_idle_link_is_left_alone() -> None:
    async def test(lab: Lab) -> None:
        p, q = await lab.pair()
        p.send(q, 1)
        await asyncio.sleep(60)
        p.send(q, 2)
        await asyncio.sleep(0.1)
        assert p.all_heard() == [1, 2]
        assert lab.history.counts["link.silent"] == 0
        assert {event.fields["session"] for event in lab.history.of("taken")} == {1}

    simulate(test)


def test_no_connection_for_the_link_timeout_is_one_loss_and_then_a_new_link() -> None:
    async def test(lab: Lab) -> None:
        p, q = await lab.pair()
        p.send(q, 1)
        await asyncio.sleep(0.1)
        first = p.link_to(q)
        lab.network.partition([["p"], ["q"]])
        lab.network.cut("p", "q")
        await asyncio.sleep(4.9)
        assert p.lost == []
        p.send(q, 2)
        await asyncio.sleep(0.4)
        assert [peer for peer, _ in p.lost] == [q.inc]
        assert q.gone == []
        await asyncio.sleep(1)
        lab.network.heal()
        await asyncio.sleep(0.1)
        assert len(p.lost) == 1
        assert q.all_requests() == [1], "what the lost link carried never arrives"
        p.send(q, 3)
        await asyncio.sleep(0.5)
        assert p.link_to(q) != first
        assert q.gone == [LinkKey(p.inc, first)]
        assert q.order == ["request 1", "gone", "request 3"]
        assert p.heard[p.link_to(q)] == [3]

    simulate(test)


def test_an_incoming_link_is_dropped_after_twice_the_timeout_and_its_resumption_refused() -> None:
    async def test(lab: Lab) -> None:
        p, q = await lab.host("p", Settings(link_timeout_s=30)), await lab.host("q")
        p.send(q, 1)
        await asyncio.sleep(0.1)
        first = LinkKey(p.inc, p.link_to(q))
        lab.network.partition([["p"], ["q"]])
        lab.network.cut("p", "q")
        await asyncio.sleep(9.9)
        assert q.gone == []
        await asyncio.sleep(0.4)
        assert q.gone == [first]
        q.do(lambda: q.layer.answer(first, Pong(1)))
        p.send(q, 2)
        lab.network.heal()
        await asyncio.sleep(1)
        assert [peer for peer, _ in p.lost] == [q.inc]
        assert "resume refused" in p.lost[0][1]
        assert q.all_requests() == [1]
        p.send(q, 3)
        await asyncio.sleep(0.5)
        assert q.all_requests() == [1, 3]
        assert len(p.lost) == 1
        assert q.gone == [first]

    simulate(test)


def test_forgetting_a_peer_loses_both_ways_at_once_and_is_told_later() -> None:
    async def test(lab: Lab) -> None:
        p, q = await lab.pair()
        p.send(q, 1)
        q.send(p, 1)
        await asyncio.sleep(0.1)
        incoming = LinkKey(q.inc, q.link_to(p))
        before = lab.taken(p)
        p.do(lambda: p.layer.forget(q.inc))
        q.send(p, 2)
        await asyncio.sleep(0.1)
        assert [peer for peer, _ in p.lost] == [q.inc]
        assert p.gone == [incoming]
        assert lab.taken(p) == before, "I1b: nothing is taken from a forgotten incarnation"
        assert [peer for peer, _ in q.lost] == [p.inc]
        q.send(p, 3)
        p.send(q, 4, 5)
        await asyncio.sleep(10)
        assert lab.taken(p) == before
        assert [peer for peer, _ in p.lost] == [q.inc, q.inc], "told again, once for one turn"
        assert [peer for peer, _ in q.lost] == [p.inc, p.inc], "a new link is refused as well"
        assert q.all_requests() == [1]

    simulate(test)


def test_who_is_registered_is_not_gone_whatever_is_remembered() -> None:
    """Another one with its hash may be gone: without this, mail for it went round and round."""

    async def test(lab: Lab) -> None:
        p, q = await lab.pair()
        p.layer._forgotten.add(q.inc)
        p.layer._registered = {q.inc: None}.__contains__
        p.send(q, 1)
        q.send(p, 2)
        await asyncio.sleep(0.1)
        assert (q.all_requests(), p.all_requests()) == ([1], [2])
        assert p.lost == q.lost == []
        p.layer._registered = {}.__contains__
        p.do(lambda: p.layer.forget(q.inc))
        await asyncio.sleep(0.1)
        assert [peer for peer, _ in p.lost] == [q.inc], "and its end is seen"
        p.send(q, 3)
        await asyncio.sleep(10)
        assert q.all_requests() == [1]

    simulate(test)


def test_another_incarnation_at_the_address_is_the_wrong_door() -> None:
    async def test(lab: Lab) -> None:
        p, q = await lab.pair()
        stranger = Peer(Incarnation("0" * 32), q.layer.address)
        p.do(lambda: p.layer.send(stranger, request(1)))
        await asyncio.sleep(4.9)
        assert p.lost == []
        assert lab.history.counts["link.turned_away"] > 5
        await asyncio.sleep(0.2)
        assert [peer for peer, _ in p.lost] == [stranger.incarnation]
        assert q.all_requests() == []

    simulate(test)


def test_who_greets_too_early_comes_again_soon() -> None:
    """A record is seen before its process knows of its lease; silence cost 2 s then (SM-14)."""

    async def test(lab: Lab) -> None:
        p, q = await lab.pair()
        q.valid = False
        p.send(q, 1)
        await asyncio.sleep(0.02)
        assert q.all_requests() == []
        q.valid = True
        await asyncio.sleep(q.layer.settings.heard_s / 4)
        assert q.all_requests() == [1]
        assert p.lost == []

    simulate(test)


def test_past_the_guard_nothing_is_sent_ever() -> None:
    async def test(lab: Lab) -> None:
        p, q = await lab.pair()
        p.send(q, 1)
        await asyncio.sleep(0.1)
        p.send(q, 2)
        await asyncio.sleep(0.0001)
        q.valid = False
        await asyncio.sleep(0.1)
        assert q.all_requests() == [1], "nothing is taken"
        q.do(lambda: q.layer.answer(LinkKey(p.inc, p.link_to(q)), Pong(1)))
        await asyncio.sleep(0.1)
        replies = len(list(lab.history.of("reply")))
        q.valid = True
        q.do(lambda: q.layer.answer(LinkKey(p.inc, p.link_to(q)), Pong(2)))
        await asyncio.sleep(0.1)
        assert len(list(lab.history.of("reply"))) == replies == 1
        assert p.all_heard() == [1]

    simulate(test)


def test_the_guard_is_compared_again_directly_before_a_send() -> None:
    async def test(lab: Lab) -> None:
        p, q = await lab.pair()
        p.send(q, 1)
        await asyncio.sleep(0.1)
        calls: list[bool] = []

        def guard() -> bool:
            calls.append(True)
            return len(calls) < 2

        p.layer._guard = guard
        p.send(q, 2)
        await asyncio.sleep(0.1)
        assert len(calls) == 2
        assert p.layer.aborted
        assert q.all_requests() == [1]

    simulate(test)


def test_abort_closes_everything_and_says_nothing() -> None:
    async def test(lab: Lab) -> None:
        p, q = await lab.pair()
        p.send(q, 1)
        q.send(p, 1)
        await asyncio.sleep(0.1)
        p.send(q, 2)
        p.do(p.layer.abort)
        await asyncio.sleep(0.1)
        assert not q.layer.connected(p.inc)
        assert q.all_requests() == [1]
        p.send(q, 3)
        p.do(lambda: p.layer.forget(q.inc))
        await asyncio.sleep(20)
        assert p.lost == p.gone == []
        assert not p.layer.pending()
        assert q.all_requests() == [1]
        assert [peer for peer, _ in q.lost] == [p.inc]
        assert len(q.gone) == 1

    simulate(test)


def test_a_frozen_peer_costs_nothing_once_it_thaws() -> None:
    async def test(lab: Lab) -> None:
        p, q = await lab.pair()
        p.send(q, 1)
        await asyncio.sleep(0.1)
        q.loop.freeze()
        p.send(q, 2)
        await asyncio.sleep(4)
        p.send(q, 3)
        q.loop.thaw()
        await asyncio.sleep(1)
        assert q.all_requests() == [1, 2, 3]
        assert p.all_heard() == [1, 2, 3]
        assert p.lost == q.gone == []

    simulate(test)


def test_once_the_doors_are_closed_links_go_on_but_none_begins() -> None:
    """H14: what no connection carried can go elsewhere when the record is gone."""

    async def test(lab: Lab) -> None:
        p, q = await lab.pair()
        p.send(q, 0)
        await asyncio.sleep(0.02)
        q.do(q.layer.close_doors)
        q.send(p, 1)
        p.send(q, 2)
        await asyncio.sleep(0.02)
        assert q.all_requests() == [0, 2]
        assert p.all_requests() == [1]
        stranger = await lab.host("stranger")
        stranger.send(q, 3)
        await asyncio.sleep(1.0)
        assert q.all_requests() == [0, 2]
        assert [link.sender for link in q.layer.incoming] == [p.inc]
        assert not stranger.layer.connected(q.inc)
        stranger.do(lambda: stranger.layer.forget(q.inc))
        await asyncio.sleep(0.02)
        assert stranger.unsent == [3]

    simulate(test)


def test_who_is_dialled_while_it_leaves_gets_its_acknowledgements_at_once() -> None:
    async def test(lab: Lab) -> None:
        p, q = await lab.pair()
        q.answers = False
        p.do(lambda: p.layer.hurry(q.inc))
        p.send(q, 0)
        await asyncio.sleep(0.02)
        q.do(lambda: q.layer.answer(LinkKey(p.inc, p.link_to(q)), Pong(1)))
        await asyncio.sleep(ACK_DELAY_S / 2)
        assert not q.layer.pending()

    simulate(test)
