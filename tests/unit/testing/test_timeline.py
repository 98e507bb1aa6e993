"""The timeline of a run, as text and as a picture."""

from __future__ import annotations

import xml.etree.ElementTree as ET
from collections.abc import Iterator

import pytest

from domicile import Entity, Settings, handler
from domicile.core.ids import Incarnation, ShardKey
from domicile.core.state.keys import block_key, node_key
from domicile.core.state.records import NodeRecord, encode_record
from domicile.core.state.shardmap import Block, Entry, encode_block
from domicile.testing import History, Sim, Violation, check
from domicile.testing.timeline.picture import draw
from domicile.testing.timeline.trace import HOT, MESSAGES, Trace, trace
from domicile.testing.timeline.words import text

A, B = (Incarnation(sign * 32) for sign in "ab")
SVG = "{http://www.w3.org/2000/svg}"


class Told:
    """A history that is told by hand; time goes on by a second with every word."""

    def __init__(self) -> None:
        self.now = 100.0
        self.history = History(lambda: self.now)
        self._revision = 0

    def say(self, kind: str, **fields: object) -> None:
        self.now += 1
        self.history.event(kind, **fields)

    def life(self, inc: Incarnation, node: str) -> None:
        self.say("life", inc=inc, node=node, hosts=True, limits={})

    def put(self, key: bytes, value: bytes, by: str = "node-1") -> None:
        self._revision += 1
        self.say("commit", by=by, revision=self._revision, puts=[(key, value, None)], deletes=[])

    def record(self, inc: Incarnation, node: str, status: str = "up") -> None:
        record = NodeRecord(node, inc, "here:1", ("default",), (), 6.0, status=status)
        self.put(node_key(inc), encode_record(record))

    def map(self, *entries: Entry) -> None:
        self.put(block_key("default", 0), encode_block(Block("t", entries)))

    def phase(self, kind: str, inc: Incarnation, shard: int, epoch: int) -> None:
        self.say(kind, inc=inc, role="default", shard=shard, epoch=epoch)

    def fault(self, fault: str, node: int | None = None, inc: Incarnation | None = None) -> None:
        self.say("fault", fault=fault, node=node, inc=inc)

    def trace(self, *violations: Violation) -> Trace:
        return trace(self.history, violations, title="by hand")


def story() -> Told:
    """One shard goes from node 1 to node 2 by release, and back because node 2 froze."""
    told = Told()
    told.life(A, "node-1")  # 101
    told.record(A, "node-1")
    told.life(B, "node-2")
    told.record(B, "node-2")
    told.say("leading", inc=A, revision=3)  # 105
    told.map(Entry(A, 1, "serving", change=1))
    told.phase("open", A, 0, 1)
    told.map(Entry(A, 1, "moving", B, change=2))  # 108
    told.phase("draining", A, 0, 1)
    told.phase("released", A, 0, 1)
    told.map(Entry(B, 2, "serving", change=3))  # 111
    told.phase("open", B, 0, 2)
    told.fault("freeze", 2, B)  # 113
    told.record(B, "node-2", "evicted")
    told.fault("thaw", 2, B)
    told.say("fenced", inc=B, reason="its record is gone")  # 116
    told.say("expire", revision=9, deletes=[node_key(B)])
    told.map(Entry(A, 3, "serving", change=4))  # 118
    told.say("deposed", inc=A, reason="stopped")
    told.fault("crash", 1, A)  # 120
    told.fault("heal")
    told.say("quiet")
    return told


def lines(shown: str) -> Iterator[tuple[float, str, str]]:
    """Time, lanes and words of every line of the timeline."""
    for line in shown.partition("    time")[2].partition("\n\n")[0].splitlines()[1:]:
        at, signs, words = line.split("  ", 2) if line[0] != " " else line.strip().split("  ", 2)
        yield float(at), signs, words


def test_the_timeline_tells_the_story_with_the_state_of_each_node() -> None:
    shown = text(story().trace())
    assert shown.startswith("by hand\nlanes: 0 node-1, 1 node-2\n")
    assert list(lines(shown)) == [
        (101, "| .", "node-1 begins as aaaaaaaa"),
        (102, "| .", "node-1 registered"),
        (103, "| |", "node-2 begins as bbbbbbbb"),
        (104, "| |", "node-2 registered"),
        (105, "L |", "node-1 leads (leader revision 3)"),
        (106, "L |", "map r3 by node-1: default/0@1 serving at node-1"),
        (107, "L |", "default/0@1 open at node-1"),
        (108, "L |", "map r4 by node-1: default/0@1 moving node-1 to node-2"),
        (109, "L |", "default/0@1 draining at node-1"),
        (110, "L |", "default/0@1 released at node-1"),
        (111, "L |", "map r5 by node-1: default/0@2 serving at node-2"),
        (112, "L |", "default/0@2 open at node-2"),
        (113, "L z", "fault: freeze node-2"),
        (114, "L z", "node-2 is marked evicted"),
        (115, "L |", "fault: thaw node-2"),
        (116, "L x", "node-2 fenced: its record is gone"),
        (117, "L x", "record of node-2 (bbbbbbbb) expired"),
        (118, "L x", "map r7 by node-1: default/0@3 serving at node-1"),
        (119, "| x", "node-1 leads no more: stopped"),
        (120, ". x", "fault: crash node-1"),
        (121, ". x", "fault: heal"),
        (122, ". x", "quiet: no more faults from here on"),
    ]


def test_every_hot_shard_has_a_story_of_its_own() -> None:
    shown = text(story().trace()).partition("\ndefault/0\n")[2].splitlines()
    assert shown == [
        " 106.000  node-1@1 serving (first home, open +1.000 s)",
        " 108.000  node-1@1 moving to node-2",
        " 111.000  node-2@2 serving (released by the one before, open +1.000 s, lost with its "
        "owner at 116.000)",
        " 118.000  node-1@3 serving (the owner before was gone, never opened, lost with its "
        "owner at 120.000)",
    ]


def test_a_move_that_is_taken_back_is_told_as_such() -> None:
    told = Told()
    told.life(A, "node-1")
    told.map(Entry(A, 1, "serving", change=1))
    told.map(Entry(A, 1, "moving", B, change=2))
    told.map(Entry(A, 1, "serving", change=3))
    shown = text(told.trace())
    assert "default/0@1 stays at node-1" in shown
    assert "serving again: the move was taken back" in shown


def test_a_violation_stands_where_it_happened() -> None:
    told = story()
    event = next(told.history.of("draining"))
    shown = text(told.trace(Violation("I1c", 109.5, "two homes\nand more", (event,))))
    found = [line for line in lines(shown) if line[2].startswith("!")]
    assert found == [(109.5, "L |", "! I1c broken: two homes")]


def test_many_changes_of_one_commit_are_counted_and_few_shards_are_shown() -> None:
    told = Told()
    told.life(A, "node-1")
    told.life(B, "node-10")
    told.life(Incarnation("c" * 32), "node-9")
    told.life(Incarnation("d" * 32), "manager-11")
    shards = 20
    told.map(*(Entry(A, 1, "serving", change=1) for _ in range(shards)))
    told.map(*(Entry((A, B)[n % 2], 1 + n % 2, "serving", change=2) for n in range(shards)))
    traced = told.trace()
    assert [lane.name for lane in traced.nodes] == ["node-1", "node-9", "node-10", "manager-11"]
    shown = text(traced)
    assert "20 shards: 20 serving at node-1" in shown
    assert "20 shards: 10 serving at node-1, 10 serving at node-10" in shown
    assert len(traced.shards) == HOT
    # Those that a violation is about come first, however quiet they were.
    told.phase("open", A, 18, 1)
    event = list(told.history.of("open"))[-1]
    traced = told.trace(Violation("I1a", 105, "bad", (event,)))
    assert ShardKey("default", 18) in [lane.shard for lane in traced.shards]


def test_phases_of_one_moment_share_a_line() -> None:
    told = Told()
    told.life(A, "node-1")
    told.map(*(Entry(A, 1, "serving", change=1) for _ in range(3)))
    for shard in range(3):
        told.now -= 0.9999
        told.phase("open", A, shard, 1)
    shown = text(told.trace())
    assert "default/0@1, default/1@1, default/2@1 open at node-1\n" in shown


def drawn(traced: Trace) -> ET.Element:
    return ET.fromstring(draw(traced))


def titles(picture: ET.Element) -> list[str]:
    return [one.text or "" for one in picture.iter(f"{SVG}title")]


def test_the_picture_shows_the_same_story() -> None:
    told = story()
    event = next(told.history.of("draining"))
    picture = drawn(told.trace(Violation("I1c", 109.5, "two <homes>", (event,))))
    shown = titles(picture)
    for words in (
        "node-1 leads, 105.000 to 119.000",
        "node-2 frozen, 113.000 to 115.000",
        "node-2 fenced, 116.000 to 122.000",
        "node-1@1 moving to node-2, 108.000 to 111.000",
        "node-2@2 serving, 111.000 to 118.000",
        "113.000 fault: freeze node-2",
        "109.500 I1c broken: two <homes>",
    ):
        assert words in shown, words
    texts = [one.text for one in picture.iter(f"{SVG}text")]
    for label in ("node-1", "node-2", "default/0", "freeze 2", "crash 1", "takeover, owner gone"):
        assert label in texts
    assert any("109.500  I1c broken: two <homes>" in (one or "") for one in texts)


def with_messages() -> Told:
    """The client sends three messages; one starts late, one never, and of one nobody knows."""
    told = story()
    client = Incarnation("c" * 32)
    told.say("life", inc=client, node="", hosts=False, limits={})  # 123
    for n, ask in ((1, True), (2, True), (3, False)):
        shard = {"role": "default", "shard": 0, "n": n}
        told.say("submit", inc=client, **shard, type="cart", id="a", method="add", ask=ask)
    ran = {"inc": A, "role": "default", "shard": 0, "epoch": 3, "sender": client, "n": 1}
    told.say("start", **ran)  # 127
    told.say("finish", **ran, how="ok")
    told.say("outcome", inc=client, role="default", shard=0, n=1, outcome="ok")
    told.say("outcome", inc=client, role="default", shard=0, n=2, outcome="not_executed")
    told.say("lost", inc=client, role="default", shard=0, n=3)
    return told


def test_few_messages_are_told_with_what_became_of_them() -> None:
    shown = [line for line in lines(text(with_messages().trace())) if "cart/a" in line[2]]
    assert shown == [
        (124, ". x", "ask cart/a add from the client, started at node-1 +3.000 s, ok +5.000 s"),
        (125, ". x", "ask cart/a add from the client, did not start, not executed +5.000 s"),
        (
            126,
            ". x",
            "tell cart/a add from the client, did not start, may have run or not +5.000 s",
        ),
    ]


def test_the_picture_draws_few_messages_and_names_their_entity() -> None:
    picture = drawn(with_messages().trace())
    dots = [one for one in picture.iter(f"{SVG}circle") if one.get("cy") != "1"]
    assert len(dots) == 3
    texts = [one.text or "" for one in picture.iter(f"{SVG}text")]
    assert "cart/a" in texts
    assert any("messages 3, started 1, started twice 0" in one for one in texts)


def test_many_messages_are_left_out() -> None:
    told = with_messages()
    for n in range(4, MESSAGES + 2):
        told.say("submit", inc="c" * 32, role="default", shard=0, n=n, type="cart", id="a",
                 method="add", ask=True)  # fmt: skip
    assert "cart/a" not in text(told.trace())


def test_a_timeline_can_begin_later_and_carry_notes() -> None:
    traced = trace(story().history, start=112.5, notes=[(113, "1. it freezes")])
    assert traced.start == 112.5
    assert next(lines(text(traced)))[0] == 113
    texts = [one.text for one in drawn(traced).iter(f"{SVG}text")]
    assert "1. it freezes" in texts
    assert "freeze 2" not in texts, "the note takes the place of the label"
    counted = ET.fromstring(draw(traced, zero=112.0))
    assert "1" in [one.text for one in counted.iter(f"{SVG}text")]


def test_everything_drawn_lies_within_the_picture() -> None:
    picture = drawn(story().trace())
    width, height = (float(picture.get(name, "0")) for name in ("width", "height"))
    boxes = list(picture.iter(f"{SVG}rect"))
    assert len(boxes) > 15
    for box in boxes:
        x, y, w, h = (float(box.get(name, "0")) for name in ("x", "y", "width", "height"))
        assert 0 <= x <= x + w <= width + 0.1
        assert 0 <= y <= y + h <= height + 0.1


def test_an_empty_history_has_a_timeline_and_a_picture_too() -> None:
    traced = trace(History(lambda: 0.0))
    assert "lanes:" in text(traced)
    assert drawn(traced).tag == f"{SVG}svg"


class Lamp(Entity, name="trace.lamp"):
    """Something to simulate."""

    @handler
    async def light(self) -> int:
        return self.epoch


@pytest.mark.parametrize("managers", [0, 1])
def test_a_simulated_run_can_be_traced(managers: int) -> None:
    sim = Sim(5, entities=[Lamp], nodes=3, managers=managers, settings=Settings(shards=4, ttl_s=3))

    async def main() -> None:
        async with sim:
            await sim.ref(Lamp, "a").ask(Lamp.light)
            sim.crash(sim.owner(Lamp, "a"))
            await sim.wait_until(sim.settled)

    try:
        sim.world.run(main(), sim.loop)
        traced = trace(sim.history, check(sim.history), title="seed 5")
    finally:
        sim.close()
    shown = text(traced)
    assert "fault: crash node-" in shown
    assert "the owner before was gone" in shown
    leader = "manager-3 leads" if managers else "node-"
    assert leader in shown
    assert any("takeover" in (one.text or "") for one in drawn(traced).iter(f"{SVG}text"))
