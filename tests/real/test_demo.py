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
from domicile.ops.demo.bank import Account, Booked, bookings_in, journal_of
from domicile.ops.demo.ledger import BankAudit
from domicile.ops.demo.report import Recovery, Report, own_fonts, report_view, write_svg
from domicile.ops.demo.run import DemoOptions, late_replies, victims
from domicile.ops.demo.view import DemoMoment, DemoPicture, Lines
from domicile.testing import Event
from domicile.testing.processes.history import RealHistory

PLANTED = """
import sys
from pathlib import Path
from domicile.ops.demo import run as demo
from domicile.testing.checkers.verdict import Violation

demo.check = lambda history: [Violation("I5", at, "planted") for at in range(5)]
sys.exit(demo.run_demo(demo.DemoOptions(seconds=1, plain=True)))
"""

WRONG_BOOKS = """
import sys
from domicile.ops.demo import run as demo
from domicile.ops.demo.bank import Account
from domicile.ops.demo.load import Load

opened, bank_audit = Load.open_accounts, demo.bank_audit

async def forged(load, client):
    await opened(load, client)
    account = client.ref(Account, "account-3").options(key="forged")
    await account.ask(Account.deposit, "forged", 1, 1)

def misled(ledger, balances, journal):
    transfer = ledger.transfer("invented", "account-1", "account-2", 7)
    transfer.taken.is_answered = transfer.given.is_answered = True
    return bank_audit(ledger, balances, journal)

Load.open_accounts, demo.bank_audit = forged, misled
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
        "seed": 1, "nodes": 3, "senders": 3, "seconds": 20.0, "asks": 30, "reads": 4,
        "repeats": Counter({"not executed": 1, "maybe executed": 2}), "had_run": 1, "twice": 3,
        "same": 3, "failed": 0, "unanswered": 0, "refused": 2, "stale": 0,
        "audit": BankAudit(4_800, 4_800, 10), "refusals": 3, "late_replies": 0, "violations": [],
        "events": 1_000, "recoveries": [Recovery("kill -9", "node-1 dies", 0.25)],
    }  # fmt: skip
    return Report(**{**fields, **changes})  # type: ignore[arg-type]


def drawn(value: Report, width: int = 80) -> str:
    console = Console(file=io.StringIO(), width=width)
    console.print(report_view(value))
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_a_good_report_breaks_nothing() -> None:
    text = drawn(report())
    assert report().broken() == []
    assert "All 4,800 coins are there, and every answered transfer, once." in text
    assert "Every promise was kept." in text
    assert re.search(r"kill -9 +node-1 dies +0\.25 s", text)
    assert re.search(r"transfers answered +10 +> 0 +kept", text)
    assert re.search(r"coins in all accounts +4,800 +4,800 +kept", text)
    assert "BROKEN" not in text
    assert "WRONG" not in text


@pytest.mark.parametrize("width", [60, 80, 160])
def test_a_report_fits_the_terminal(width: int) -> None:
    for value in (report(), report(audit=BankAudit(4_800, 4_801, 10), violations=["I5"] * 5)):
        text = drawn(value, width)
        assert "…" not in text
        assert max(map(len, text.splitlines())) <= width
        for line in value.lines():
            assert all(word in text for word in (*line.what.split(), *line.why.split()))


def test_a_report_says_what_maybe_executed_means() -> None:
    words = "nobody can know whether the handler ran (I9); the key makes the repeat safe"
    assert words in " ".join(drawn(report()).split())


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"unanswered": 1}, "asks never answered, of 30: 1, must be 0"),
        ({"failed": 1}, "failed in the handler: 1, must be 0"),
        ({"same": 2}, "repeats after an answer, same reply: 2, must be 3"),
        ({"stale": 1}, "reads that missed an answered transfer: 1, must be 0"),
        ({"audit": BankAudit(4_800, 4_800, 0)}, "transfers answered: 0, must be > 0"),
        ({"audit": BankAudit(4_800, 4_801, 10)}, "coins in all accounts: 4,801, must be 4,800"),
        (
            {"audit": BankAudit(4_800, 4_800, 10, lost=["t1"])},
            "answered transfers in the journal, once: 9, must be 10",
        ),
        (
            {"audit": BankAudit(4_800, 4_800, 10, wrong=["t1"])},
            "bookings doubled, halved or not ordered: 1, must be 0",
        ),
        (
            {"audit": BankAudit(4_800, 4_800, 10, differing=["a", "b"])},
            "accounts that differ from their bookings: 2, must be 0",
        ),
        (
            {"audit": BankAudit(4_800, 4_800, 10, overdrawn=["a"])},
            "balances below zero: 1, must be 0",
        ),
        ({"late_replies": 1}, "past the deadline: 1, must be 0"),
        ({"refusals": 0}, "fences and refusals after the thaw: 0, must be > 0"),
        ({"violations": ["I5 broken"]}, "violations found in 1,000 events: 1, must be 0"),
    ],
)
def test_a_broken_promise_is_named(changes: dict[str, object], words: str) -> None:
    value = report(**changes)
    assert any(words in reason for reason in value.broken()), value.broken()
    text = drawn(value)
    assert "BROKEN" in text
    assert "Every promise was kept." not in text
    assert ("THE BANK'S BOOKS ARE WRONG." in text) == bool(value.audit.faults)


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


def test_an_account_keeps_its_refusals_and_its_bookings(tmp_path: Path) -> None:
    store = f"sqlite:///{tmp_path / 'bank.db'}"

    async def run() -> None:
        async with Node(
            store, entities=[Account], settings=Settings(settle_s=0.01, shards=4)
        ) as node:
            account = node.ref(Account, "a")
            await account.options(key="in").ask(Account.deposit, "in", 5, 1)
            refused = await account.options(key="out").ask(Account.withdraw, "out", 6, 1)
            assert (refused.is_refused, refused.balance) == (True, 5)
            await account.options(key="more").ask(Account.deposit, "more", 5, 1)
            again = await account.options(key="out").ask(Account.withdraw, "out", 6, 2)
            assert again == refused, "a refusal is final, even if there is enough now"
            taken = await account.options(key="rest").ask(Account.withdraw, "rest", 10, 1)
            assert (taken.is_refused, taken.balance, taken.bookings) == (False, 0, 3)
            other = await node.ref(Account, "b").ask(Account.deposit, "other", 1, 1)
            assert other.balance == 1
        found = await bookings_in(journal_of(store, tmp_path), "domicile", 4)
        assert found == {
            "a": [Booked("in", 5), Booked("more", 5), Booked("rest", -10)],
            "b": [Booked("other", 1)],
        }

    asyncio.run(run())


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
    assert "300 asks/s, 900 transfers, 880 reads, 5 repeats" in text
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
        [sys.executable, "-m", "domicile", *arguments], capture_output=True, text=True, timeout=300
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    killed, frozen, drained = victims(DemoOptions(seed=3))
    for words in (
        f"kill -9 node-{killed}", f"SIGSTOP node-{frozen}", "SIGCONT", "node-3, joins",
        f"SIGTERM to node-{drained}", "Every promise was kept.",
    ):  # fmt: skip
        assert words in ran.stdout
    assert re.search(r"coins in all accounts +4,800 +4,800 +kept", ran.stdout)
    assert re.search(r"asks never answered, of [\d,]+ +0 +0 +kept", ran.stdout)
    transfers = re.findall(r"transfers (?:answered|in the journal, once) +([\d,]+)", ran.stdout)
    assert len(transfers) == 2
    assert transfers[0] == transfers[1] != "0"
    assert len(re.findall(r"all well after \d+\.\d\d s", ran.stdout)) == 5
    assert ran.stderr == ""
    assert picture.exists()
    assert list(temporary.iterdir()) == []
    assert processes_of(temporary) == []


def test_a_violation_fails_the_demo_and_keeps_what_shows_it(temporary: Path) -> None:
    ran = subprocess.run(
        [sys.executable, "-c", PLANTED], capture_output=True, text=True, timeout=300
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


def test_wrong_books_fail_the_demo_loudly(temporary: Path) -> None:
    """A coin that nobody ordered, and a transfer that a sender has down but no account has."""
    ran = subprocess.run(
        [sys.executable, "-c", WRONG_BOOKS], capture_output=True, text=True, timeout=300
    )
    assert ran.returncode == 1, ran.stdout + ran.stderr
    assert "THE BANK'S BOOKS ARE WRONG." in ran.stdout
    assert "coins in all accounts: 4,801, must be 4,800" in ran.stdout
    assert re.search(r"answered transfers in the journal, once: [\d,]+, must be", ran.stdout)
    assert "bookings doubled, halved or not ordered: 1, must be 0" in ran.stdout
    for words in (
        "the accounts have 4,801 coins instead of 4,800",
        "invented was answered; the journal has it 0 times at account-1 and 0 times at account-2",
        "account-3 has +1 of forged, which nobody ordered",
    ):
        assert words in ran.stdout
    (kept,) = temporary.iterdir()
    assert "forged" in (kept / "violations.txt").read_text()
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
