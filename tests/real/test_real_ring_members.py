"""Real processes: members of rings whose calls block the event loop, or work in threads (L4)."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = Path(__file__).parent.parent / "labs" / "ring_member_program.py"
KINDS = ("member", "ranges")
LONG_S = 120.0
PAST = "a is past the end of its Lease: the process ends at once"


def run(kind: str, what: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(PROGRAM), kind, what],
        capture_output=True,
        text=True,
        timeout=LONG_S,
        check=False,
    )


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("what", ["block", "thread"])
def test_a_call_that_nobody_can_stop_ends_the_process(kind: str, what: str) -> None:
    ended = run(kind, what)
    assert PAST in ended.stderr, ended
    assert ended.returncode == 1
    if what == "thread":
        # Others wait for the end of the Lease, and by then the process is over.
        assert ended.stdout == "held by a\n"


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("what", ["slow-thread", "async"])
def test_a_lease_is_given_back_after_calls_and_their_threads(kind: str, what: str) -> None:
    ended = run(kind, what)
    assert ended.stdout == "held by nobody\n", ended
    assert ended.returncode == 0
