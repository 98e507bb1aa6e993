"""The same loss of a node done to casty, in processes of its own environment.

Every run has a fresh cluster. Used by `proving.benchmarks.recovery`.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from proving.benchmarks.environments import CACHE, PEERS, Missing, environment
from proving.benchmarks.processes import Part, PartFailed

NODES = 4
MODULE = "proving.benchmarks.peers.casty_recovery"
FAULTS = {
    "killed": ("casty, SIGKILL of a node", signal.SIGKILL),
    "frozen": ("casty, SIGSTOP of a node", signal.SIGSTOP),
}
ABSENT = (
    "It has no coordinator to lose: hashes place its keys, and its nodes gossip. After two of four "
    "were killed at once no key of theirs answered within 180 s (one run by hand of 0.30.2; it "
    "logged that the nodes did not agree on the owner), so there is no time to tell. Its network "
    "was not cut: the gates for that belong to a harness that starts Domicile's nodes only."
)
"""Why it has no rows for the other faults."""

FAILURES = (Missing, PartFailed)
"""What is raised where it cannot be measured."""


def measure(runs: int) -> tuple[list[dict[str, Any]], dict[str, str]]:
    """What was found, and what could not be measured and why."""
    found: list[dict[str, Any]] = []
    try:
        peer = next(one for one in PEERS if one.name == "casty")
        python = environment(peer, CACHE).python
        for name, (title, kind) in FAULTS.items():
            print(title, file=sys.stderr)
            answers = [_one(python, kind) for _ in range(runs)]
            found.append(
                {"fault": f"peer-{name}", "title": title, "ttl_s": None, "answered": answers,
                 "served": []}
            )  # fmt: skip
    except FAILURES as error:
        return found, {"casty": str(error)}
    return found, {}


def one(name: str) -> float:
    """One run of a fault."""
    peer = next(one for one in PEERS if one.name == "casty")
    return _one(environment(peer, CACHE).python, FAULTS[name][1])


def _one(python: str, kind: signal.Signals) -> float:
    """A fresh cluster loses its last node; seconds until a key of it answers elsewhere."""
    with ExitStack() as stack:
        place = Path(stack.enter_context(TemporaryDirectory(prefix="domicile-recovery-")))
        options: dict[str, Any] = {"where": "", "loop": "asyncio"}

        def part(name: str) -> Part:
            made = Part(python, MODULE, name, options, place)
            stack.callback(made.close)
            where = made.ready()
            options["where"] = options["where"] or where
            return made

        nodes = [part("node") for _ in range(NODES)]
        client = part("client")
        victim = nodes[-1].pid
        key = client.run(system="casty", what="find", pid=victim)["key"]
        struck_at = time.monotonic()
        os.kill(victim, kind)
        try:
            told = client.run(system="casty", what="answered", key=key, pid=victim)
        finally:
            if kind != signal.SIGKILL:
                os.kill(victim, signal.SIGKILL)
        took_s = float(told["at"]) - struck_at
        print(f"     answered {took_s:.3f} s", file=sys.stderr)
        return took_s
