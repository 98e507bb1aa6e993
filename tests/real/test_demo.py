"""`domicile demo`, end to end, and what its report makes of numbers."""

from __future__ import annotations

import asyncio
import io
import os
import re
import signal
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from collections import Counter
from pathlib import Path

import pytest
from rich.console import Console
from run_lab import running

from domicile import Node, Settings
from domicile.ops.demo import DemoOptions, late_replies, victims
from domicile.ops.demo_load import Tally
from domicile.ops.demo_view import DemoMoment, DemoPicture, Lines
from domicile.ops.report import Recovery, Report, own_fonts, report_view, write_svg
from domicile.testing import Event
from domicile.testing.processes.history import RealHistory

PLANTED = """
import sys
from pathlib import Path
from domicile.ops import demo
from domicile.testing.checkers.verdict import Violation

demo.check = lambda history: [Violation("I5", at, "planted") for at in range(5)]
sys.exit(demo.run_demo(demo.DemoOptions(seconds=1, plain=True)))
"""

SHOWN = DemoMoment(64, [("node-0", "up", 40), ("node-1", "frozen", 24)], 300.0, 900, 880, 5)


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the demo's directory goes."""
    place = tmp_path / "temporary"
    place.mkdir()
    monkeypatch.setenv("TMPDIR", str(place))
    return place


def processes_of(place: Path) -> list[str]:
    """Command lines of processes that run in a place."""
    found: list[str] = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            line = path.read_bytes()
        except OSError:
            continue
        if os.fsencode(place) in line:
            found.append(line.replace(b"\0", b" ").decode(errors="replace"))
    return found


def report(**changes: object) -> Report:
    fields: dict[str, object] = {
        "seed": 1, "nodes": 3, "senders": 3, "seconds": 20.0, "asks": 10,
        "outcomes": Counter({"answered": 7, "not executed": 1, "maybe executed": 2}), "tells": 4,
        "out_of_order": 0, "restarted": 2, "refusals": 3, "late_replies": 0, "violations": [],
        "events": 1_000, "recoveries": [Recovery("kill -9", "node-1 dies", 0.25)],
    }  # fmt: skip
    return Report(**{**fields, **changes})  # type: ignore[arg-type]


def drawn(value: Report) -> str:
    console = Console(file=io.StringIO(), width=80)
    console.print(report_view(value))
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_a_good_report_breaks_nothing_and_fits_80_columns() -> None:
    text = drawn(report())
    assert report().broken() == []
    assert "Every promise was kept." in text
    assert re.search(r"kill -9 +node-1 dies +0\.25 s", text)
    assert re.search(r"asks sent +10\b", text)
    assert "BROKEN" not in text
    assert "…" not in text


def test_a_report_says_what_maybe_executed_means() -> None:
    words = "nobody can know whether the handler ran"
    assert words in " ".join(drawn(report()).split())
    assert words not in " ".join(drawn(report(outcomes=Counter(answered=10))).split())


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"asks": 11}, "asks without any outcome: 1, must be 0"),
        ({"outcomes": Counter()}, "answered: 0, must be > 0"),
        ({"outcomes": Counter({"answered": 9, "failed": 1})}, "failed in the handler: 1"),
        ({"out_of_order": 2}, "messages out of order or doubled: 2, must be 0"),
        ({"late_replies": 1}, "past the deadline: 1, must be 0"),
        ({"refusals": 0}, "fences and refusals after the thaw: 0, must be > 0"),
        ({"violations": ["I5 broken"]}, "violations found in 1,000 events: 1, must be 0"),
    ],
)
def test_a_broken_promise_is_named(changes: dict[str, object], words: str) -> None:
    value = report(**changes)
    assert any(words in reason for reason in value.broken()), value.broken()
    assert "BROKEN" in drawn(value)


def test_the_picture_needs_nothing_from_the_network(tmp_path: Path) -> None:
    path = tmp_path / "new" / "demo.svg"
    write_svg(report_view(report()), path, "domicile demo")
    text = path.read_text(encoding="utf-8")
    ElementTree.fromstring(text)
    assert "font-face" not in text
    assert "url(http" not in text
    assert "monospace" in text
    assert "Fira" not in text
    assert own_fonts(text) == text


def test_victims_are_chosen_by_the_seed() -> None:
    chosen = [victims(DemoOptions(seed=seed)) for seed in range(20)]
    assert chosen == [victims(DemoOptions(seed=seed)) for seed in range(20)]
    assert len(set(chosen)) > 1
    assert all(sorted(each) == [0, 1, 2] for each in chosen)
    assert all(len(set(victims(DemoOptions(nodes=9, seed=seed)))) == 3 for seed in range(20))


def test_a_tally_notices_what_comes_twice_or_out_of_turn() -> None:
    async def add(*numbers: int) -> int:
        async with Node(
            "memory://tally", entities=[Tally], settings=Settings(settle_s=0.01)
        ) as node:
            tally = node.ref(Tally, "t")
            for number in numbers:
                await tally.ask(Tally.add, "lane", number)
            await tally.ask(Tally.add, "another lane", 1)
            return (await tally.ask(Tally.look)).wrong

    assert asyncio.run(add(1, 2, 4, 7)) == 0
    assert asyncio.run(add(1, 3, 2, 4, 4)) == 2


def test_late_replies_are_counted_beside_any_number_of_late_starts() -> None:
    mail = {"inc": "a", "role": "default", "shard": 0, "epoch": 1, "sender": "b", "n": 1}
    events = [
        Event(0.0, "life", {"inc": "a", "node": "node-0", "hosts": True, "limits": {}}),
        Event(0.0, "renewed", {"inc": "a", "sent_at": 0.0, "ttl": 2.0, "margin": 0.6}),
        Event(1.0, "reply", mail),
        *[Event(1.5, "start", {**mail, "type": "t", "id": "x"}) for _ in range(30)],
    ]
    assert late_replies(RealHistory(events, Counter())) == 0
    late = [*events, Event(1.6, "reply", mail), Event(1.7, "reply", mail)]
    assert late_replies(RealHistory(late, Counter())) == 2


def test_the_live_picture_shows_nodes_and_acts() -> None:
    console = Console(file=io.StringIO(), force_terminal=True, width=90, color_system=None)
    with DemoPicture(console) as picture:
        picture.show(SHOWN)
        picture.say("kill -9 node-1")
    assert isinstance(console.file, io.StringIO)
    text = console.file.getvalue()
    assert "node-1  frozen   24  ████████████" in text
    assert "300 asks/s, 900 sent, 880 answered, 5 told otherwise" in text
    assert "kill -9 node-1" in text


def test_lines_are_plain(monkeypatch: pytest.MonkeyPatch) -> None:
    console = Console(file=io.StringIO(), width=20)
    with Lines(console) as lines:
        lines.say("kill -9 node-1, which is a long line")
        lines.show(SHOWN)
    assert isinstance(console.file, io.StringIO)
    assert re.fullmatch(
        r" +0\.\d s  kill -9 node-1, which is a long line\n", console.file.getvalue()
    )


def test_the_demo_keeps_every_promise(tmp_path: Path, temporary: Path) -> None:
    picture = tmp_path / "demo.svg"
    arguments = ("demo", "--seconds", "1", "--seed", "3", "--plain", "--svg", str(picture))
    ran = subprocess.run(
        [sys.executable, "-m", "domicile", *arguments], capture_output=True, text=True, timeout=100
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    killed, frozen, drained = victims(DemoOptions(seed=3))
    for words in (
        f"kill -9 node-{killed}", f"SIGSTOP node-{frozen}", "SIGCONT", "node-3, joins",
        f"SIGTERM to node-{drained}", "Every promise was kept.",
    ):  # fmt: skip
        assert words in ran.stdout
    assert re.search(r"asks without any outcome +0 +0 +kept", ran.stdout)
    assert len(re.findall(r"all well after \d+\.\d\d s", ran.stdout)) == 5
    assert ran.stderr == ""
    assert picture.exists()
    assert list(temporary.iterdir()) == []
    assert processes_of(temporary) == []


def test_a_violation_fails_the_demo_and_keeps_what_shows_it(temporary: Path) -> None:
    ran = subprocess.run(
        [sys.executable, "-c", PLANTED], capture_output=True, text=True, timeout=100
    )
    assert ran.returncode == 1, ran.stdout + ran.stderr
    assert re.search(r"violations found in [\d,]+ events: 5, must be 0", ran.stdout)
    assert "I5 broken at 2.000000: planted" in ran.stdout
    assert "I5 broken at 3.000000" not in ran.stdout
    assert "... 2 more are in violations.txt" in ran.stdout
    (kept,) = temporary.iterdir()
    assert "I5 broken at 4.000000" in (kept / "violations.txt").read_text()
    assert f"logs, histories and the store are in {kept}" in ran.stdout
    assert len(list(kept.glob("*.events"))) >= 7
    assert (kept / "store.db").exists()
    assert processes_of(temporary) == []


def test_a_demo_whose_output_is_closed_ends_quietly(tmp_path: Path, temporary: Path) -> None:
    """As in `domicile demo | head -3`: nobody interrupted it, and nothing was judged."""
    with running(tmp_path, "demo", "--seconds", "1", "--plain") as demo:
        assert demo.process.stdout is not None
        for _ in range(3):
            demo.process.stdout.readline()
        demo.process.stdout.close()
        assert demo.ended() == 141
        assert demo.said == []
    assert list(temporary.iterdir()) == []
    assert processes_of(temporary) == []


@pytest.mark.parametrize(
    ("moment", "kind"),
    [
        ("starting", signal.SIGINT),
        ("every one of", signal.SIGTERM),
        ("SIGSTOP", signal.SIGINT),
    ],
)
def test_interrupting_the_demo_leaves_nothing_behind(
    tmp_path: Path, temporary: Path, moment: str, kind: signal.Signals
) -> None:
    with running(tmp_path, "demo", "--seconds", "1", "--plain") as demo:
        assert demo.process.stdout is not None
        for line in demo.process.stdout:
            if moment in line:
                break
        demo.signal(kind)
        assert demo.ended() == 130
        assert demo.said == []
        assert "interrupted" in demo.process.stdout.read()
    assert list(temporary.iterdir()) == []
    assert processes_of(temporary) == []
