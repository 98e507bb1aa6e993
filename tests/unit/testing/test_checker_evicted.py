"""Histories of evictions: by agreement, and without it (C6)."""

from __future__ import annotations

import msgspec
import pytest
from test_checkers import B, Tape, accepted, rejected

from domicile.core.ids import Incarnation
from domicile.core.state.keys import node_key
from domicile.core.state.records import NodeRecord, encode_record

D, E, F = (Incarnation(letter * 32) for letter in "def")
OTHERS = {D: "node-d", E: "node-e", F: "node-f"}


def _cluster() -> Tape:
    """A leads; B is the one that A loses; the others may have a word about it."""
    tape = Tape()
    for inc, node in OTHERS.items():
        tape.register(inc, node)
    return tape.wait(6.0)


def _evict(tape: Tape, inc: Incarnation = B, node: str = "node-b") -> Tape:
    record = NodeRecord(node, inc, f"{node}:1", ("r",), ("T",), 6.0)
    evicted = msgspec.structs.replace(record, status="evicted")
    tape.commit("node-a", [(node_key(inc), encode_record(evicted))])
    return tape


def _word(tape: Tape, voter: Incarnation, *, reached: bool) -> Tape:
    return tape.note("probed", inc=voter, node=B, reached=reached)


def test_half_of_the_others_are_enough() -> None:
    tape = _word(_word(_cluster(), D, reached=False), E, reached=False)
    accepted(_evict(_word(tape, F, reached=True)))


@pytest.mark.parametrize("words", [(), (False, True, True), (True, True, True)])
def test_fewer_are_not(words: tuple[bool, ...]) -> None:
    tape = _cluster()
    for voter, reached in zip(OTHERS, words, strict=False):
        _word(tape, voter, reached=reached)
    rejected(_evict(tape), "C6", "of the 3 other members did not reach it")


def test_a_word_of_long_ago_does_not_count() -> None:
    tape = _word(_word(_cluster(), D, reached=False), E, reached=False).wait(16.0)
    rejected(_evict(tape), "C6", "only 0 of the 3")


def test_a_word_is_about_one_node() -> None:
    tape = _cluster()
    for voter in (B, E):
        tape.note("probed", inc=voter, node=D, reached=False)
    rejected(_evict(tape), "C6", "only 0 of the 3")
    tape = _cluster()
    for voter in (B, E):
        tape.note("probed", inc=voter, node=D, reached=False)
    accepted(_evict(tape, D, "node-d"))


def test_whoever_registered_just_now_need_not_be_asked() -> None:
    tape = Tape().wait(6.0)
    for inc, node in OTHERS.items():
        tape.register(inc, node)
    accepted(_evict(tape.wait(1.0)))


def test_whoever_left_need_not_be_asked() -> None:
    tape = _word(_cluster(), D, reached=False)
    tape.expire(node_key(E))
    accepted(_evict(tape))


def test_of_two_nodes_the_leader_decides_alone() -> None:
    accepted(_evict(Tape().wait(6.0)))


def test_an_eviction_that_a_backup_held_is_not_judged_again() -> None:
    tape = _word(_word(_cluster(), D, reached=False), E, reached=False)
    _evict(tape).wait(30.0)
    record = NodeRecord("node-b", B, "node-b:1", ("r",), ("T",), 6.0, status="evicted")
    items = [(node_key(B), encode_record(record)), *_others()]
    tape.note("rewound", revision=1, history=2, items=items)
    accepted(_evict(tape.wait(6.0)))


def _others() -> list[tuple[bytes, bytes]]:
    return [
        (node_key(inc), encode_record(NodeRecord(node, inc, f"{node}:1", ("r",), ("T",), 6.0)))
        for inc, node in OTHERS.items()
    ]
