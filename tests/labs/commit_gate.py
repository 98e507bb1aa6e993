"""Holds an agent at one step of a change of primary, so that a test can strike exactly there.

An agent opens its store behind `gated://FOLDER?URL`, a backend of another package that a test
installs. Everything passes, but a commit that writes a phase of a group's state is held at a
*point* for as long as the file `hold` of the folder names that point:

- `before PHASE`: it is on its way. It arrives once it is let go, also if its sender has given it up
  by then, as a packet that the network has kept.
- `after PHASE`: it was carried out. The whole agent stands still before it can learn that.

The test's half is `CommitGate`, on the same folder. Imports nothing of the tests.
"""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from domicile.backends import Backend, OpenOptions
from domicile.backends.registry import store_backend
from domicile.core.state.txn import Committed, Condition, Outcome, Put, Write
from domicile.ports.store import Store

SCHEME = "gated"
POLL_S = 0.005

Commits = Callable[[Sequence[Condition], Sequence[Write]], Awaitable[Outcome]]


class CommitGate:
    """One agent's gate, as a test has it."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        folder.mkdir(parents=True, exist_ok=True)

    def url(self, store: str) -> str:
        """The URL of a store behind this gate."""
        return f"{SCHEME}://{self._folder}?{store}"

    def hold(self, *points: str) -> None:
        """Hold commits at these points from now on, and let go those at others."""
        new = self._folder / "hold.new"
        new.write_text("\n".join(points))
        new.replace(self._folder / "hold")

    def release(self) -> None:
        """Let everything pass."""
        self.hold()

    def has(self, point: str, pid: int) -> bool:
        """Whether a commit of this process is held at a point."""
        try:
            return bool(pid) and int((self._folder / point).read_text()) == pid
        except (FileNotFoundError, ValueError):
            return False

    def told(self, point: str) -> list[str]:
        """What became of the commits that were held at a point."""
        try:
            lines = (self._folder / "told").read_text().splitlines()
        except FileNotFoundError:
            return []
        return [line.removeprefix(f"{point}: ") for line in lines if line.startswith(f"{point}: ")]


# In the agent's process


class GatedBackend(Backend):
    """Any other store, behind a gate."""

    scheme = SCHEME
    stores = f"{SCHEME}:///folder?sqlite:////file.db (a test)"

    def open_store(self, url: str, options: OpenOptions) -> Store:
        folder, _, real = url.removeprefix(f"{SCHEME}://").partition("?")
        store: Any = store_backend(real).open_store(real, replace(options, store=real))
        store.commit = _Gate(Path(folder), store.commit).commit
        opened: Store = store
        return opened


class _Gate:
    def __init__(self, folder: Path, commit: Commits) -> None:
        self._folder, self._commit = folder, commit
        self._late: set[asyncio.Task[Outcome]] = set()

    async def commit(self, conditions: Sequence[Condition], writes: Sequence[Write]) -> Outcome:
        phase = _phase(writes)
        if not phase:
            return await self._commit(conditions, writes)
        before, after = f"before {phase}", f"after {phase}"
        if self._holds(before):
            late = asyncio.create_task(self._arrive(before, conditions, writes))
            self._late.add(late)
            late.add_done_callback(self._late.discard)
            outcome = await asyncio.shield(late)
        else:
            outcome = await self._commit(conditions, writes)
        if isinstance(outcome, Committed) and self._holds(after):
            self._mark(after)
            while self._holds(after):
                # The whole loop stands still: its watch would tell the agent what it has done.
                time.sleep(POLL_S)  # noqa: ASYNC251
            self._unmark(after)
        return outcome

    async def _arrive(
        self, point: str, conditions: Sequence[Condition], writes: Sequence[Write]
    ) -> Outcome:
        self._mark(point)
        while self._holds(point):  # noqa: ASYNC110
            await asyncio.sleep(POLL_S)
        self._unmark(point)
        try:
            outcome = await self._commit(conditions, writes)
        except Exception as error:
            self._tell(point, type(error).__name__)
            raise
        self._tell(point, type(outcome).__name__)
        return outcome

    def _holds(self, point: str) -> bool:
        with suppress(FileNotFoundError):
            return point in (self._folder / "hold").read_text().splitlines()
        return False

    def _mark(self, point: str) -> None:
        (self._folder / point).write_text(str(os.getpid()))

    def _unmark(self, point: str) -> None:
        (self._folder / point).unlink(missing_ok=True)

    def _tell(self, point: str, what: str) -> None:
        with (self._folder / "told").open("a") as file:
            file.write(f"{point}: {what}\n")


def _phase(writes: Sequence[Write]) -> str:
    """The phase that a commit writes into a group's state; empty if it writes none."""
    for one in writes:
        if isinstance(one, Put) and one.key.endswith(b"/state"):
            return str(json.loads(one.value)["phase"])
    return ""


BACKEND = GatedBackend()
