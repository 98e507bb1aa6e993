"""Which writes go together, and what becomes of them when answers get lost."""

from __future__ import annotations

from collections.abc import Coroutine, Iterable
from random import Random
from typing import Any, TypeVar

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from domicile.core.ids import EntityKey, Incarnation, ShardKey
from domicile.journals.memory import MemoryJournal
from domicile.persist import batches as machine
from domicile.persist.batches import (
    BATCHES,
    TRIES,
    Batches,
    LineChecked,
    LineFenced,
    PendingWrite,
    SendBatch,
    SettleBatch,
    ShardLine,
    Unsettled,
    WriteDone,
    WriterEffect,
)
from domicile.ports.journal import (
    BLIND,
    Batch,
    Claim,
    JournalWrite,
    Wanted,
    WriteRefused,
    Written,
    counted,
)

T = TypeVar("T")

ME, THIEF = Incarnation("a" * 32), Incarnation("b" * 32)


def claim_of(shard: int, epoch: int = 1) -> Claim:
    return Claim(ShardKey("default", shard), 0, epoch, ME)


def pending(shard: int, id: str, expected: int, *events: bytes, **keys: Any) -> PendingWrite:
    entity = EntityKey("T", id)
    return PendingWrite(JournalWrite(ShardKey("default", shard), entity, expected, events, **keys))


class Desk:
    """A machine with the effects of its last step."""

    def __init__(self) -> None:
        self.batches = Batches()
        self.effects: list[WriterEffect] = []
        self.lines: dict[int, ShardLine] = {}

    def line(self, shard: int) -> ShardLine:
        if shard not in self.lines:
            line, effects = self.batches.open(claim_of(shard))
            assert line is not None
            assert effects == []
            self.lines[shard] = line
        return self.lines[shard]

    def submit(self, shard: int, id: str, expected: int, *events: bytes, **keys: Any) -> Any:
        one = pending(shard, id, expected, *events, **keys)
        self.effects = [*self.batches.submit(self.line(shard), one), *self.batches.depart()]
        return one

    def sent(self) -> list[Batch]:
        return [effect.batch for effect in self.effects if isinstance(effect, SendBatch)]

    def to_settle(self) -> list[Batch]:
        return [effect.batch for effect in self.effects if isinstance(effect, SettleBatch)]

    def answer(self, batch: Batch, *outcomes: Written | WriteRefused) -> None:
        self.effects = self.batches.answered(batch, outcomes)

    def lose(self, batch: Batch) -> None:
        self.effects = self.batches.lost(batch)

    def full(self) -> list[Batch]:
        """As many batches on their way as there may be, of shards 100 and up."""
        sent: list[Batch] = []
        for number in range(BATCHES):
            self.submit(100 + number, f"full {number}", 0, b"x")
            sent += self.sent()
        assert len(sent) == BATCHES
        return sent


def ids(batch: Batch) -> list[str]:
    return [write.entity.id for write in batch.writes]


# grouping


def test_a_lone_write_goes_out_at_once_as_it_is() -> None:
    desk = Desk()
    one = desk.submit(1, "a", 0, b"1")
    assert desk.effects == [SendBatch(Batch(1, (claim_of(1),), (one.write,)))]
    desk.answer(desk.sent()[0], Written(1, 1))
    assert desk.effects == [WriteDone(one)]
    assert one.outcome == Written(1, 1)
    assert desk.batches.on_their_way == 0


def test_what_waits_behind_a_batch_of_its_shard_goes_together() -> None:
    desk = Desk()
    desk.submit(1, "a", 0, b"1")
    [first] = desk.sent()
    for id in ("b", "c"):
        desk.submit(1, id, 0, b"1")
        assert desk.sent() == []
    desk.submit(2, "d", 0, b"1")
    assert [ids(batch) for batch in desk.sent()] == [["d"]], "another shard does not wait"
    desk.answer(first, Written(1, 1))
    [second] = desk.sent()
    assert ids(second) == ["b", "c"]
    assert second.number == 3


def test_when_all_places_are_taken_all_shards_wait_for_one_batch() -> None:
    desk = Desk()
    full = desk.full()
    for shard in (3, 1, 2):
        desk.submit(shard, f"e{shard}", 0, b"1")
        assert desk.sent() == []
    desk.answer(full[0], Written(1, 1))
    [batch] = desk.sent()
    assert [claim.shard.shard for claim in batch.claims] == [1, 2, 3], "sorted by shard"
    assert ids(batch) == ["e1", "e2", "e3"]


def test_the_writes_of_one_entity_join() -> None:
    desk = Desk()
    desk.submit(1, "z", 0, b"1")
    [first] = desk.sent()
    one = desk.submit(1, "a", 5, b"1", b"2", inbox=(("k", None),), replies=(("j", b"J"),))
    two = desk.submit(1, "a", 7, b"3", inbox=(("l", b"L"),), replies=(("k", b"K"),))
    other = desk.submit(1, "b", 0, b"b")
    blind = desk.submit(1, "a", BLIND, b"4")
    desk.answer(first, Written(1, 1))
    [batch] = desk.sent()
    joined, beside = batch.writes
    assert joined.expected == 5
    assert joined.events == (b"1", b"2", b"3", b"4")
    assert joined.inbox == (("k", b"K"), ("l", b"L"))
    assert joined.replies == (("j", b"J"),)
    assert beside is other.write
    desk.answer(batch, Written(9, 30), Written(1, 31))
    assert [one.outcome, two.outcome, blind.outcome] == [
        Written(7, 28), Written(8, 29), Written(9, 30),
    ]  # fmt: skip
    assert other.outcome == Written(1, 31)


@pytest.mark.parametrize(
    ("first", "second"), [((0, {}), (0, {})), ((BLIND, {}), (1, {})), ((0, {}), (2, {}))]
)
def test_writes_that_do_not_continue_each_other_do_not_join(first: Any, second: Any) -> None:
    desk = Desk()
    desk.submit(1, "z", 0, b"1")
    [out] = desk.sent()
    desk.submit(1, "a", first[0], b"1")
    desk.submit(1, "a", second[0], b"2")
    desk.answer(out, Written(1, 1))
    [batch] = desk.sent()
    assert [write.events for write in batch.writes] == [(b"1",)]
    desk.answer(batch, Written(1, 2))
    assert [write.events for write in desk.sent()[0].writes] == [(b"2",)]


def test_the_same_key_twice_does_not_join() -> None:
    desk = Desk()
    desk.submit(1, "z", 0, b"1")
    [out] = desk.sent()
    desk.submit(1, "a", 0, b"1", inbox=(("k", None),))
    desk.submit(1, "a", 1, b"2", inbox=(("k", b"r"),))
    desk.answer(out, Written(1, 1))
    assert [write.events for write in desk.sent()[0].writes] == [(b"1",)]


def test_of_states_snapshots_and_flags_the_last_one_counts_and_every_save_does() -> None:
    desk = Desk()
    desk.submit(1, "z", 0, b"1")
    [out] = desk.sent()
    saves = [
        desk.submit(1, "a", 3, state=b"one", remember=True, inbox=(("k", b"K"),)),
        desk.submit(1, "a", 4, snapshot=(4, b"early")),
        desk.submit(1, "a", 4, state=b"two", snapshot=(5, b"late")),
        desk.submit(1, "a", 5, remember=False, snapshot=(2, b"old")),
        desk.submit(1, "a", 5, state=b"three", delete=True),
    ]
    later = desk.submit(1, "a", 7, state=b"four")
    desk.answer(out, Written(1, 1))
    [batch] = desk.sent()
    [joined] = batch.writes
    assert (joined.expected, joined.state, joined.saves, joined.delete) == (3, b"three", 3, True)
    assert (joined.snapshot, joined.remember) == ((5, b"late"), False)
    assert joined.inbox == (("k", b"K"),)
    desk.answer(batch, Written(7, 2))
    assert [save.outcome for save in saves] == [
        Written(4, 1), Written(4, 1), Written(5, 1), Written(5, 1), Written(7, 2),
    ]  # fmt: skip
    assert [write.state for write in desk.sent()[0].writes] == [b"four"], "behind the deletion"
    assert later.outcome is None


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ({"events": (b"1",)}, {"state": b"s"}),
        ({"state": b"s"}, {"events": (b"1",)}),
        ({"delete": True}, {"snapshot": (1, b"s")}),
    ],
)
def test_events_do_not_join_a_state_and_nothing_joins_a_deletion(first: Any, second: Any) -> None:
    desk = Desk()
    desk.submit(1, "z", 0, b"1")
    [out] = desk.sent()
    shard, entity = ShardKey("default", 1), EntityKey("T", "a")
    one = JournalWrite(shard, entity, 0, **first)
    two = JournalWrite(shard, entity, 1, **second)
    for write in (one, two):
        desk.batches.submit(desk.line(1), PendingWrite(write))
    desk.answer(out, Written(1, 1))
    [batch] = desk.sent()
    assert batch.writes == (one,)
    desk.answer(batch, Written(1, 2))
    assert desk.sent()[0].writes == (two,)


def test_states_and_snapshots_count_in_the_size_of_a_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "BATCH_BYTES", 10)
    desk = Desk()
    desk.submit(1, "z", 0, b"1")
    [out] = desk.sent()
    desk.submit(1, "a", 0, state=b"x" * 6)
    desk.submit(1, "b", 0, b"1", snapshot=(1, b"x" * 6))
    desk.answer(out, Written(1, 1))
    assert ids(desk.sent()[0]) == ["a"]


@settings(max_examples=100, deadline=None)
@given(seed=st.integers(0, 10**9), states=st.booleans())
def test_what_joins_leaves_the_same_as_write_by_write(seed: int, states: bool) -> None:
    random = Random(seed)
    together, apart = MemoryJournal(), MemoryJournal()
    claim, entity = claim_of(1), EntityKey("T", "a")
    for journal in (together, apart):
        _at_once(journal.claim([claim]))
    desk = Desk()
    desk.submit(1, "z", 0, b"1")
    [out] = desk.sent()
    _at_once(together.write(out))
    _at_once(apart.write(out))
    seq, writes, single = 0, list[PendingWrite](), list[Written | WriteRefused]()
    for number in range(2, 12):
        write = JournalWrite(
            claim.shard, entity, seq,
            tuple(random.randbytes(2) for _ in range(0 if states else random.randrange(3))),
            ((f"k{number}", random.choice((None, b"r"))),) if random.random() < 0.5 else (),
            state=random.randbytes(2) if states and random.random() < 0.7 else None,
            remember=random.choice((None, None, True, False)), delete=random.random() < 0.15,
        )  # fmt: skip
        seq += counted(write)
        if random.random() < 0.3 and not states:
            write = msgspec.structs.replace(
                write, snapshot=(random.randrange(seq + 1), b"%d" % seq)
            )
        single += _at_once(apart.write(Batch(number, (claim,), (write,))))
        writes.append(PendingWrite(write))
        desk.batches.submit(desk.line(1), writes[-1])
    desk.answer(out, Written(1, 1))
    while desk.sent():
        [batch] = desk.sent()
        desk.answer(batch, *_at_once(together.write(batch)))
    assert [one.outcome for one in writes] == single
    for wanted in (Wanted(entity), Wanted(entity, snapshot=False)):
        assert _at_once(together.recover([wanted], 1 << 20)) == _at_once(
            apart.recover([wanted], 1 << 20)
        )
    assert _at_once(together.scan(claim.shard, 0, 99)) == _at_once(apart.scan(claim.shard, 0, 99))
    assert [one.entity for one in _at_once(together.remembered(claim.shard, None, 9))] == [
        one.entity for one in _at_once(apart.remembered(claim.shard, None, 9))
    ]


def _at_once(call: Coroutine[Any, Any, T]) -> T:
    with pytest.raises(StopIteration) as stopped:
        call.send(None)
    return stopped.value.value  # type: ignore[no-any-return]


def test_a_batch_has_bounds_and_takes_at_least_one_write(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "BATCH_WRITES", 3)
    monkeypatch.setattr(machine, "BATCH_BYTES", 10)
    desk = Desk()
    full = desk.full()
    for number in range(5):
        desk.submit(1, f"a{number}", 0, b"1")
    desk.submit(2, "huge", 0, b"x" * 100)
    desk.submit(3, "b", 0, b"1" * 9)
    desk.submit(3, "c", 0, b"1" * 9)
    taken: list[list[str]] = []
    for batch in full:
        desk.answer(batch, Written(1, 1))
        taken += [ids(sent) for sent in desk.sent()]
    assert taken == [["a0", "a1", "a2"], ["huge"], ["b"]]
    # Shards 1 and 3 wait for their own batches, not for a place.
    assert desk.batches.on_their_way == 3


# outcomes


def test_a_fenced_shard_loses_what_waits_and_nobody_else_does() -> None:
    desk = Desk()
    full = desk.full()
    one, beside = desk.submit(1, "a", 0, b"1"), desk.submit(2, "b", 0, b"1")
    desk.answer(full[0], Written(1, 1))
    [batch] = desk.sent()
    behind = desk.submit(1, "c", 0, b"1")
    desk.answer(batch, WriteRefused("fenced", 7), Written(1, 1))
    line = desk.line(1)
    assert desk.effects == [
        WriteDone(one),
        WriteDone(behind),
        LineFenced(line, 7),
        WriteDone(beside),
    ]
    assert one.outcome == behind.outcome == WriteRefused("fenced", 7)
    assert beside.outcome == Written(1, 1)
    late = desk.submit(1, "d", 0, b"1")
    assert desk.effects == [WriteDone(late), LineFenced(line, 7)], "the journal is not asked again"
    assert late.outcome == WriteRefused("fenced", 7)


def test_a_refused_claim_fences_its_line() -> None:
    desk = Desk()
    line = desk.line(1)
    assert desk.batches.fence(line, 4) == [LineFenced(line, 4)]
    assert desk.submit(1, "a", 0, b"1").outcome == WriteRefused("fenced", 4)


def test_a_newer_epoch_of_the_same_owner_has_a_line_of_its_own() -> None:
    desk = Desk()
    desk.submit(1, "a", 0, b"1")
    [out] = desk.sent()
    waiting = desk.submit(1, "b", 0, b"1")
    old = desk.line(1)
    line, effects = desk.batches.open(claim_of(1, 3))
    assert line is not None
    assert effects == [WriteDone(waiting), LineFenced(old, 3)]
    assert desk.batches.open(claim_of(1, 3)) == (line, [])
    assert desk.batches.open(claim_of(1, 2)) == (None, [])
    one = pending(1, "b", 0, b"1")
    assert desk.batches.submit(line, one) == []
    [effect] = desk.batches.depart()
    assert isinstance(effect, SendBatch)
    assert effect.batch.claims == (claim_of(1, 3),)
    desk.answer(out, WriteRefused("fenced", 3))
    assert one.outcome is None


@pytest.mark.parametrize("why", ["seq", "key"])
def test_a_clash_fails_its_entity_and_what_shared_its_shard_goes_again_alone(why: Any) -> None:
    desk = Desk()
    full = desk.full()
    guilty, innocent = desk.submit(1, "a", 0, b"1"), desk.submit(1, "b", 0, b"1")
    beside = desk.submit(2, "c", 0, b"1")
    desk.answer(full[0], Written(1, 1))
    [batch] = desk.sent()
    after = desk.submit(1, "a", 1, b"2")
    third = desk.submit(3, "d", 0, b"1")
    desk.answer(batch, WriteRefused(why, 1), WriteRefused("busy", 1), Written(1, 1))
    assert guilty.outcome == after.outcome == WriteRefused(why, 1)
    assert beside.outcome == Written(1, 1)
    assert [ids(sent) for sent in desk.sent()] == [["b"], ["d"]], "the busy shard goes by itself"
    assert innocent.outcome is third.outcome is None


def test_a_journal_that_is_busy_for_ever_is_not_asked_for_ever() -> None:
    desk = Desk()
    one = desk.submit(1, "a", 0, b"1")
    for _ in range(TRIES):
        [batch] = desk.sent()
        desk.answer(batch, WriteRefused("busy", 1))
        assert one.outcome is None
    desk.answer(desk.sent()[0], WriteRefused("busy", 1))
    assert one.outcome == WriteRefused("busy", 1)
    assert desk.sent() == []


def test_what_waits_for_a_row_takes_no_place() -> None:
    desk = Desk()
    full = desk.full()
    desk.lose(full[0])
    assert desk.to_settle() == [full[0]]
    one = desk.submit(1, "a", 0, b"1")
    [batch] = desk.sent()
    desk.submit(2, "b", 0, b"1")
    assert desk.sent() == []
    desk.answer(batch, WriteRefused("busy", 1))
    assert [ids(sent) for sent in desk.sent()] == [["a"], ["b"]]
    assert one.outcome is None


# unknown outcomes (J4)


def test_what_is_there_is_done_and_what_never_happened_goes_again() -> None:
    desk = Desk()
    full = desk.full()
    here, gone, lost = (desk.submit(n, f"e{n}", 0, b"1") for n in (1, 2, 3))
    desk.answer(full[0], Written(1, 1))
    [batch] = desk.sent()
    behind = desk.submit(2, "f", 0, b"1")
    desk.lose(batch)
    assert desk.to_settle() == [batch]
    assert not desk.line(1).is_clear
    desk.effects = desk.batches.settled(batch, [Written(1, 1), None, WriteRefused("fenced", 9)])
    assert here.outcome == Written(1, 1)
    assert lost.outcome == Unsettled(9), "it may have been there before the fence"
    assert LineFenced(desk.line(3), 9) in desk.effects
    assert LineChecked(desk.line(1)) in desk.effects
    [again] = desk.sent()
    assert again.number > batch.number
    assert ids(again) == ["e2", "f"]
    assert gone.outcome is behind.outcome is None
    assert desk.line(1).is_clear


def test_a_write_that_the_journal_cannot_take_fails_alone() -> None:
    """Such as a text that its database has no form for: each batch with it is lost, and settled as
    one that never happened."""
    desk = Desk()
    first = desk.submit(1, "a", 0, b"1")
    [out] = desk.sent()
    bad, beside = desk.submit(1, "bad", 0, b"1"), desk.submit(1, "b", 0, b"1")
    other = desk.submit(2, "c", 0, b"1")
    rounds, queue = 0, [out, *desk.sent()]
    while queue:
        rounds += 1
        assert rounds < 40, "it must come to an end"
        batch = queue.pop(0)
        if "bad" in ids(batch):
            desk.lose(batch)
            assert desk.to_settle() == [batch]
            desk.effects = desk.batches.settled(batch, [None] * len(batch.writes))
        else:
            desk.answer(batch, *[Written(1, 1)] * len(batch.writes))
        queue += desk.sent()
    assert bad.outcome == Unsettled()
    assert [one.outcome for one in (first, beside, other)] == [Written(1, 1)] * 3
    assert desk.batches.on_their_way == 0
    # Nothing of that is left behind.
    desk.submit(1, "a", 1, b"2")
    desk.submit(1, "b", 1, b"2")
    assert not desk.line(1).is_suspect


def test_a_journal_that_does_not_answer_leaves_a_doubt_that_comes_first() -> None:
    desk = Desk()
    full = desk.full()
    one, two = desk.submit(1, "a", 0, b"1"), desk.submit(2, "b", 0, b"1")
    desk.answer(full[0], Written(1, 1))
    [batch] = desk.sent()
    behind = desk.submit(1, "c", 0, b"1")
    for _ in range(TRIES):
        desk.lose(batch)
        assert desk.to_settle() == [batch]
        assert one.outcome is None
    desk.lose(batch)
    assert desk.to_settle() == []
    assert one.outcome == two.outcome == behind.outcome == Unsettled()
    line, other = desk.line(1), desk.line(2)
    assert {LineChecked(line), LineChecked(other)} <= {*desk.effects}
    assert not line.is_clear
    # The next write of that shard first has the late batch stopped; the other shard's is its own.
    late = desk.submit(1, "a", 0, b"again")
    [doubt] = desk.to_settle()
    assert desk.sent() == []
    assert (doubt.number, doubt.claims) == (batch.number, (claim_of(1),))
    assert ids(doubt) == ["a"]
    desk.effects = desk.batches.check(other)
    assert ids(desk.to_settle()[0]) == ["b"]
    desk.effects = desk.batches.settled(doubt, [None])
    assert [ids(sent) for sent in desk.sent()] == [["a"]]
    assert desk.sent()[0].writes == (late.write,)
    assert line.is_clear
    assert not other.is_clear


def test_after_the_end_nothing_is_sent() -> None:
    desk = Desk()
    one = desk.submit(1, "a", 0, b"1")
    [batch] = desk.sent()
    two = desk.submit(1, "b", 0, b"1")
    assert desk.batches.end() == [WriteDone(two)]
    assert two.outcome == Unsettled()
    assert desk.submit(2, "c", 0, b"1").outcome == Unsettled()
    desk.lose(batch)
    assert desk.to_settle() == desk.sent() == []
    assert one.outcome == Unsettled()


# whatever happens


class Mischief:
    """A machine, a real journal, and a network that loses, delays and reorders."""

    SHARDS = 3

    def __init__(self, random: Random) -> None:
        self.random = random
        self.journal = MemoryJournal()
        self.desk = Desk()
        self.sent: list[Batch] = []
        """Batches that may still arrive, at any time."""
        self.calls: list[tuple[str, Batch]] = []
        """What the writer waits for."""
        self.all: list[PendingWrite] = []
        self.waiting: dict[str, list[PendingWrite]] = {}
        self.events = 0
        self.fenced: list[int] = []
        for shard in range(self.SHARDS):
            self.now(self.journal.claim([claim_of(shard)]))

    def now(self, call: Coroutine[Any, Any, T]) -> T:
        with pytest.raises(StopIteration) as stop:
            call.send(None)
        return stop.value.value  # type: ignore[no-any-return]

    def take(self, effects: Iterable[WriterEffect]) -> None:
        for effect in effects:
            match effect:
                case SendBatch(batch):
                    for claim in batch.claims:
                        busy = [out for _, out in self.calls if claim in out.claims]
                        assert busy == [], "one batch per shard is on its way"
                    self.sent.append(batch)
                    self.calls.append(("write", batch))
                case SettleBatch(batch):
                    self.calls.append(("settle", batch))
                case WriteDone(done):
                    assert done.outcome is not None
                case _:
                    pass

    def step(self) -> None:
        random, desk = self.random, self.desk
        match random.choice(("submit", "submit", "submit", "arrive", "arrive", "call", "call",
                             "check", "thief")):  # fmt: skip
            case "submit":
                shard = random.randrange(self.SHARDS)
                id = f"{shard}-{random.randrange(2)}"
                mine = self.waiting.setdefault(id, [])
                open_ = [one for one in mine if one.outcome is None]
                if any(isinstance(one.outcome, Unsettled) for one in mine[-1:]) or not open_:
                    expected = len(self.journal.peek(EntityKey("T", id)))
                else:
                    last = open_[-1].write
                    expected = last.expected + len(last.events)
                if id.endswith("1"):
                    expected = BLIND
                count = random.randrange(1, 3)
                data = [b"%d" % (self.events + n) for n in range(count)]
                self.events += count
                one = pending(shard, id, expected, *data)
                self.all.append(one)
                mine.append(one)
                self.take(desk.batches.submit(desk.line(shard), one))
                if random.random() < 0.7:
                    self.take(desk.batches.depart())
            case "arrive" if self.sent:
                self.arrive(self.sent.pop(random.randrange(len(self.sent))), random.random() < 0.7)
            case "call" if self.calls:
                kind, batch = self.calls.pop(random.randrange(len(self.calls)))
                if kind == "write":
                    self.take(desk.batches.lost(batch))
                else:
                    self.settle(batch, random.random() < 0.7)
            case "check":
                self.take(desk.batches.check(desk.line(random.randrange(self.SHARDS))))
            case "thief" if random.random() < 0.05:
                shard = random.randrange(self.SHARDS)
                self.fenced.append(shard)
                self.now(self.journal.claim([Claim(ShardKey("default", shard), 0, 2, THIEF)]))
            case _:
                pass

    def arrive(self, batch: Batch, heard: bool) -> None:
        """A batch reaches the journal; its answer reaches the writer, if that still waits."""
        outcomes = self.now(self.journal.write(batch))
        if heard and ("write", batch) in self.calls:
            self.calls.remove(("write", batch))
            self.take(self.desk.batches.answered(batch, outcomes))

    def settle(self, batch: Batch, heard: bool) -> None:
        outcomes = self.now(self.journal.settle(batch))
        if heard:
            self.take(self.desk.batches.settled(batch, outcomes))
        else:
            self.take(self.desk.batches.lost(batch))

    def calm(self) -> None:
        """Everything still on its way comes to its end."""
        self.take(self.desk.batches.depart())
        while self.sent or self.calls:
            while self.sent:
                self.arrive(self.sent.pop(self.random.randrange(len(self.sent))), True)
            if self.calls:
                kind, batch = self.calls.pop(0)
                if kind == "write":
                    self.take(self.desk.batches.lost(batch))
                else:
                    self.settle(batch, True)

    def judge(self) -> None:
        stored = [
            event
            for shard in range(self.SHARDS)
            for entity in range(2)
            for event in self.journal.peek(EntityKey("T", f"{shard}-{entity}"))
        ]
        assert len(set(stored)) == len(stored), "an event is there twice"
        assert self.desk.batches.on_their_way == 0
        for one in self.all:
            there = [event in stored for event in one.write.events]
            assert one.outcome is not None
            match one.outcome:
                case Written(seq):
                    assert all(there)
                    events = self.journal.peek(one.write.entity)
                    assert events[seq - len(there) : seq] == one.write.events
                case WriteRefused():
                    assert not any(there)
                case _:
                    assert all(there) or not any(there)


@settings(max_examples=300, deadline=None)
@given(seed=st.integers(0, 10**9), steps=st.integers(1, 150))
def test_nothing_is_lost_doubled_or_said_wrongly(seed: int, steps: int) -> None:
    world = Mischief(Random(seed))
    for _ in range(steps):
        world.step()
    world.calm()
    world.judge()


@settings(max_examples=50, deadline=None)
@given(seed=st.integers(0, 10**9))
def test_a_line_in_doubt_is_settled_before_anything_else(seed: int) -> None:
    """What was given up and what follows it never both land, blind or not."""
    world = Mischief(Random(seed))
    for _ in range(40):
        world.step()
        # The journal is away: nothing is answered, and what was sent may come at any time.
        for kind, batch in list(world.calls):
            world.calls.remove((kind, batch))
            world.take(world.desk.batches.lost(batch))
    world.calm()
    world.judge()
