"""Events on disk: whole, in order, and there to the last one when their writer is killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from domicile.membership.clock import SystemClock
from domicile.testing.processes.recorder import FileRecorder, RecordReader, read_records


class Ticker:
    """A clock that only moves when told."""

    def __init__(self) -> None:
        self.at = 100.0

    def __call__(self) -> float:
        return self.at


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "some.events"


def test_events_come_back_in_order_with_their_time_and_fields(path: Path) -> None:
    now = Ticker()
    recorder = FileRecorder(path, now=now)
    recorder.event("start", inc="a", n=1, shared=False, key=b"\0\xff", chain=[("x", "y")])
    now.at = 101.5
    recorder.event("lost", inc="a", limits={"window": 3}, timeout=None)
    recorder.close()
    first, second = read_records(path)
    assert (first.at, first.kind) == (100.0, "start")
    assert first.fields == {
        **{"inc": "a", "n": 1, "shared": False, "key": b"\0\xff"},
        "chain": [["x", "y"]],
    }
    assert (second.at, second.kind) == (101.5, "lost")
    assert second.fields == {"inc": "a", "limits": {"window": 3}, "timeout": None}


def test_the_time_is_that_of_leases(path: Path) -> None:
    clock = SystemClock()
    before = clock.now()
    recorder = FileRecorder(path)
    recorder.event("start")
    recorder.close()
    [event] = read_records(path)
    assert before <= event.at <= clock.now()


def test_an_event_is_in_the_file_at_once(path: Path) -> None:
    recorder = FileRecorder(path)
    for number in range(3):
        recorder.event("start", n=number)
        assert [event.fields["n"] for event in read_records(path)] == list(range(number + 1))
    recorder.close()


def test_a_value_that_has_no_encoding_is_written_as_text(path: Path) -> None:
    recorder = FileRecorder(path)
    recorder.event("start", odd=object)
    recorder.close()
    [event] = read_records(path)
    assert event.fields == {"odd": "<class 'object'>"}


def test_counts_are_totals_and_come_rarely_but_for_the_urgent_ones(path: Path) -> None:
    now = Ticker()
    recorder, reader = FileRecorder(path, now=now), RecordReader(path)

    def seen() -> dict[str, int]:
        assert reader.more() == []
        return dict(reader.counts)

    recorder.count("a")
    assert seen() == {"a": 1}
    recorder.count("a", 2)
    assert seen() == {"a": 1}, "it is too early"
    now.at += 0.19
    recorder.count("a")
    assert seen() == {"a": 1}
    now.at += 0.02
    recorder.count("b")
    assert seen() == {"a": 4, "b": 1}
    for name in ("guard.refused", "lease.fenced", "tcp.withheld_bytes"):
        recorder.count(name, 7)
        assert seen()[name] == 7
    recorder.count("b")
    recorder.flush()
    assert seen()["b"] == 2
    size_bytes = path.stat().st_size
    recorder.flush()
    assert path.stat().st_size == size_bytes, "nothing new to say"
    recorder.count("b")
    recorder.close()
    assert seen()["b"] == 3


def test_an_event_brings_old_counts_along(path: Path) -> None:
    now = Ticker()
    recorder, reader = FileRecorder(path, now=now), RecordReader(path)
    recorder.count("a")
    recorder.count("a")
    now.at += 1
    recorder.event("start")
    assert [event.kind for event in reader.more()] == ["start"]
    assert reader.counts == {"a": 2}
    recorder.close()


def test_half_a_record_waits_for_its_other_half(path: Path) -> None:
    recorder = FileRecorder(path)
    recorder.event("start", n=1)
    recorder.event("start", n=2)
    recorder.close()
    whole = path.read_bytes()
    for size_bytes in range(len(whole)):
        path.write_bytes(whole[:size_bytes])
        reader = RecordReader(path)
        early = reader.more()
        assert [event.fields["n"] for event in early] == [1, 2][: len(early)]
        assert len(early) == (size_bytes >= len(whole) // 2)
        path.write_bytes(whole)
        assert [event.fields["n"] for event in [*early, *reader.more()]] == [1, 2]


def test_a_file_that_is_not_there_has_no_events(path: Path) -> None:
    assert list(read_records(path)) == []


def test_a_recorder_that_cannot_write_is_silent(path: Path) -> None:
    """And the events before that remain readable."""
    recorder = FileRecorder(path)
    recorder.event("start", n=1)
    target = os.open("/dev/full", os.O_WRONLY)
    os.dup2(target, recorder._file)  # type: ignore[arg-type]
    os.close(target)
    recorder.event("start", n=2)
    recorder.event("start", n=3)
    recorder.count("lease.fenced")
    recorder.close()
    recorder.close()
    recorder.event("start", n=4)
    assert [event.fields["n"] for event in read_records(path)] == [1]


def test_threads_lose_nothing_and_do_not_mix_their_records(path: Path) -> None:
    recorder = FileRecorder(path)

    def work(number: int) -> None:
        for turn in range(500):
            recorder.event("start", thread=number, turn=turn, load="x" * number * 50)
            recorder.count("done")

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    recorder.close()
    reader = RecordReader(path)
    turns: dict[int, list[int]] = {}
    for event in reader.more():
        turns.setdefault(event.fields["thread"], []).append(event.fields["turn"])
    assert turns == {number: list(range(500)) for number in range(4)}
    assert reader.counts == {"done": 2000}


KILLED = """
import sys
from pathlib import Path
from domicile.testing.processes.recorder import FileRecorder
recorder = FileRecorder(Path(sys.argv[1]))
for n in range(10_000_000):
    recorder.event("start", n=n)
    if n == 1_000:
        print("here", flush=True)
"""


def test_a_killed_process_leaves_everything_up_to_its_last_event(path: Path) -> None:
    process = subprocess.Popen([sys.executable, "-c", KILLED, str(path)], stdout=subprocess.PIPE)
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == b"here\n"
    finally:
        process.send_signal(signal.SIGKILL)
        process.communicate()
    numbers = [event.fields["n"] for event in read_records(path)]
    assert numbers == list(range(len(numbers)))
    assert len(numbers) > 1_000
