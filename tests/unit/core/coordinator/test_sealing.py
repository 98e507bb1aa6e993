"""A leader on a store that commits one key at a time seals blocks with its term (S8)."""

from __future__ import annotations

from random import Random

from tiny_store import BLOCK, TinyStore

from domicile.core.coordinator.events import (
    Changed,
    Commit,
    CommitDone,
    CoordinatorEffect,
    CoordinatorEvent,
    Heard,
    Listed,
    ReadBack,
    ReleasedBy,
    Reread,
    Resign,
    Tick,
)
from domicile.core.coordinator.machine import Coordinator
from domicile.core.ids import NOBODY, Incarnation, ShardKey
from domicile.core.state.keys import node_key, release_key
from domicile.core.state.shardmap import (
    Block,
    Entry,
    decode_block,
    encode_block,
    leader_txn,
    term_of,
)
from domicile.core.state.txn import Absent, At, Conflict, Delete, Put, Unknown, check_one_key
from domicile.settings import Settings

A, B = Incarnation("a"), Incarnation("b")
S0 = ShardKey("r", 0)


class Rig:
    """A leader on one block of two nodes, which an earlier leader has written."""

    def __init__(self, *entries: Entry, txn: str = "", gone: bool = False) -> None:
        self.store, self.now, self.seen = TinyStore(len(entries)), 100.0, 0
        for node in (A, B):
            self.store.join(node)
        if entries[0].change:
            self.store.commit([], [Put(BLOCK, encode_block(Block(txn, entries)))])
        if gone:
            self.store.commit([], [Delete(node_key(B))])
        self.term = self.store.lead(A)
        self.machine = Coordinator(A, self.term, Settings(), Random(1), sealing=True)

    def step(self, event: CoordinatorEvent) -> list[CoordinatorEffect]:
        return list(self.machine.step(event, self.now))

    def start(self) -> list[CoordinatorEffect]:
        self.step(Heard(B))
        self.seen = self.store.revision
        return self.step(Listed(self.store.listing()))

    def settle(self, effects: list[CoordinatorEffect]) -> list[Commit]:
        """Land all commits, and what follows from them, as the store takes them."""
        made: list[Commit] = []
        for _ in range(8):
            found = [effect for effect in effects if isinstance(effect, Commit)]
            made += found
            effects = []
            for commit in found:
                check_one_key(commit.conditions, commit.writes)
                outcome = self.store.commit(commit.conditions, commit.writes)
                effects += self.step(CommitDone(commit.txn, outcome))
            for changes in [one for one in self.store.log if one.revision > self.seen]:
                self.seen = changes.revision
                effects += self.step(Changed(changes))
            self.now += 0.6
            effects += self.step(Tick())
        return made


def serving(owner: Incarnation, epoch: int = 1) -> Entry:
    return Entry(owner, epoch, "serving", NOBODY, 1, f"node-{owner}")


def block_of(commit: Commit) -> Block:
    (put,) = (write for write in commit.writes if isinstance(write, Put))
    return decode_block(put.value)


def test_a_term_is_read_from_what_a_leader_wrote() -> None:
    assert term_of(leader_txn(A, 17, 3)) == 17
    for other in ("", "seed", "reset-2026-11-19T05:30:00.000Z-12ab", "copy", "a-b-3", "a-7-"):
        assert term_of(other) == 0


def test_a_leader_seals_a_block_and_then_decides_in_it() -> None:
    rig = Rig(serving(A), serving(B), txn=leader_txn(B, 2, 1), gone=True)
    seal, takeover = rig.settle(rig.start())
    block = block_of(seal)
    assert (term_of(block.txn), block.entries) == (rig.term, (serving(A), serving(B)))
    (at,) = seal.conditions
    assert isinstance(at, At)
    assert term_of(block_of(takeover).txn) == rig.term
    assert takeover.conditions[1:] == (Absent(node_key(B)),)
    assert rig.store.entry(1).owner == A
    assert rig.store.entry(1).epoch == 2


def test_a_new_block_is_made_with_the_term() -> None:
    rig = Rig(Entry())
    (first,) = rig.settle(rig.start())
    assert first.conditions == (Absent(BLOCK),)
    assert term_of(block_of(first).txn) == rig.term


def test_a_block_with_a_higher_term_deposes() -> None:
    rig = Rig(serving(A), serving(B), txn=leader_txn(B, 1_000, 1))
    (resigned,) = [effect for effect in rig.start() if isinstance(effect, Resign)]
    assert "sealed by a later leader (term 1000" in resigned.reason


def test_a_block_that_is_read_again_with_a_higher_term_deposes() -> None:
    """The outcome of its seal is unknown, and its watch has not shown that another one leads."""
    rig = Rig(serving(A), serving(B), txn=leader_txn(B, 2, 1))
    (seal,) = [effect for effect in rig.start() if isinstance(effect, Commit)]
    effects = rig.step(CommitDone(seal.txn, Unknown()))
    assert ReadBack(seal.txn, BLOCK) in effects
    entries = (serving(A), serving(B))
    theirs = Put(BLOCK, encode_block(Block(leader_txn(B, 1_000, 1), entries)))
    rig.store.commit([], [theirs])
    found = {item.key: item for item in rig.store.listing().items}[BLOCK]
    (resigned,) = rig.step(Reread(seal.txn, found))
    assert isinstance(resigned, Resign)


def test_a_refused_seal_is_made_again_from_the_content_that_refused_it() -> None:
    rig = Rig(serving(A), serving(B), txn=leader_txn(B, 2, 1))
    (seal,) = [effect for effect in rig.start() if isinstance(effect, Commit)]
    moved = Entry(B, 2, "serving", NOBODY, 3, "node-b")
    deposed = Put(BLOCK, encode_block(Block(leader_txn(B, 2, 2), (moved, serving(B)))))
    rig.store.commit([], [deposed])
    assert rig.store.commit(seal.conditions, seal.writes) == Conflict(BLOCK)
    again = rig.settle(rig.step(CommitDone(seal.txn, Conflict(BLOCK))))
    assert block_of(again[0]).entries == (moved, serving(B))
    assert (rig.store.entry(0).owner, rig.store.entry(0).epoch) == (B, 2)


def test_an_obsolete_release_is_deleted_by_a_commit_of_its_own() -> None:
    rig = Rig(serving(B), serving(B), txn=leader_txn(B, 2, 1), gone=True)
    rig.store.commit([], [Put(release_key(B, S0, 1), b"")])
    made = rig.settle([*rig.start(), *rig.step(ReleasedBy(B, S0, 1))])
    assert (Delete(release_key(B, S0, 1)),) in [commit.writes for commit in made]
    assert rig.store.entry(0) == Entry(A, 2, "serving", NOBODY, 2, "node-a")
