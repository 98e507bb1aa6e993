"""The guard of a server: its deadline, its orders, and what it does to a server that hangs (F2)."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from domicile.errors import ConfigError
from domicile.failover.guard import server_guard
from domicile.failover.guard.kernel_timer import NoTimer
from domicile.failover.guard.line import GuardLine
from domicile.failover.guard.server_guard import ServerGuard
from domicile.failover.records import WriteQuorum
from domicile.failover.state_folder import StateFolder
from domicile.membership.clock import SystemClock

PATIENCE_S = 60.0
LONG_S = 600.0
OWN = 7


class Gate:
    """A server without data: open or not; it may hang."""

    def __init__(self) -> None:
        self.open_epoch = 0
        self.said: list[str] = []
        self.hangs = False
        self.pid = OWN

    async def process_id(self, run: str) -> int:
        return self.pid

    async def unlock(self, epoch: int, run: str, quorum: WriteQuorum | None) -> None:
        self.said.append(f"unlock {epoch}")
        if self.hangs:
            await asyncio.sleep(LONG_S)
        if run != "run":
            raise ConnectionError("another run")
        self.open_epoch = epoch

    async def lock(self) -> None:
        self.said.append("lock")
        if self.hangs:
            await asyncio.sleep(LONG_S)
        self.open_epoch = 0


class Child:
    """The server's process."""

    def __init__(self, gate: Gate) -> None:
        self._gate = gate
        self.lives = False
        self.killed = self.stopped = 0
        self.goes = asyncio.Event()
        """Whether it ends once it is killed."""
        self.goes.set()

    async def start(self) -> None:
        self.lives, self._gate.hangs = True, False

    async def stop(self, *, immediate: bool) -> None:
        await self.goes.wait()
        self.killed += immediate
        self.stopped += not immediate
        self.lives = self._gate.hangs = False
        self._gate.open_epoch = 0

    def kill(self) -> None:
        self._gate.open_epoch = 0

    async def running(self) -> bool:
        return self.lives

    async def stranger(self) -> str:
        return ""

    def outlives(self, pid: int) -> str:
        return "" if pid == OWN else f"it is process {pid}"


class Timer:
    def __init__(self) -> None:
        self.at = 0.0

    def arm(self, at: float) -> None:
        self.at = at

    def disarm(self) -> None:
        self.at = 0.0


class Guarded:
    """A guard in this process."""

    def __init__(self, socket: Path, *, child: bool = True) -> None:
        self.gate, self.clock, self.timer = Gate(), SystemClock(), Timer()
        self.child = Child(self.gate)
        self.socket = socket
        self.guard = ServerGuard(
            self.gate, self.child if child else None, socket=socket, clock=self.clock,
            stop_budget_s=0.3, timer=self.timer,
        )  # fmt: skip
        self._tasks: list[asyncio.Task[None]] = []

    async def agent(self) -> GuardLine:
        line = await GuardLine.connected(self.socket)
        self._tasks.append(asyncio.create_task(line.keep_reading()))
        return line

    def leave(self, number: int = 0) -> None:
        """The connection of an agent ends."""
        self._tasks[number].cancel()

    async def until(self, met: Callable[[], bool]) -> None:
        async with asyncio.timeout(PATIENCE_S):
            while not met():  # noqa: ASYNC110
                await asyncio.sleep(0.005)

    async def end(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)


@asynccontextmanager
async def guarded(*, child: bool = True) -> AsyncIterator[Guarded]:
    home = Path(tempfile.mkdtemp(prefix="domicile-guard-"))
    one = Guarded(home / "guard.sock", child=child)
    running = asyncio.create_task(one.guard.run())
    try:
        await one.until(lambda: one.socket.exists() and "lock" in one.gate.said)
        yield one
    finally:
        await one.end()
        running.cancel()
        await asyncio.wait([running])
        shutil.rmtree(home)
        assert running.cancelled()


def test_a_server_is_open_until_the_deadline_and_no_longer() -> None:
    async def scenario() -> None:
        async with guarded() as one:
            agent = await one.agent()
            begin = one.clock.now()
            await agent.open(3, "run", begin + LONG_S, None)
            assert one.gate.open_epoch == 3
            assert one.timer.at == begin + LONG_S + 0.3
            await agent.shut()
            assert (one.gate.open_epoch, one.timer.at) == (0, 0.0)
            # The deadline is compared by the guard, and it moves along.
            with pytest.raises(ConnectionError, match="deadline"):
                await agent.open(3, "run", begin, None)
            assert "unlock 3" not in one.gate.said[-1:]
            until = one.clock.now() + 1.0
            await agent.open(4, "run", until, None)
            agent.extend(until + 0.5)
            await one.until(lambda: not one.gate.open_epoch)
            assert one.clock.now() >= until + 0.5
            # It has passed: a late extension does not open, and does not kill by the timer.
            agent.extend(one.clock.now() + LONG_S)
            await one.until(lambda: one.timer.at == 0.0)
            with pytest.raises(ConnectionError, match="another run"):
                await agent.open(4, "other", one.clock.now() + LONG_S, None)
            assert one.child.killed == 0

    asyncio.run(scenario())


def test_a_server_that_is_not_its_child_is_not_opened() -> None:
    async def scenario() -> None:
        async with guarded() as one:
            agent = await one.agent()
            one.gate.pid = 8
            with pytest.raises(ConnectionError, match="process 8"):
                await agent.open(3, "run", one.clock.now() + LONG_S, None)
            assert (one.gate.open_epoch, one.timer.at) == (0, 0.0)
            one.gate.pid = OWN
            await agent.open(3, "run", one.clock.now() + LONG_S, None)
            assert one.gate.open_epoch == 3
        # In attach mode nobody is its child.
        async with guarded(child=False) as one:
            agent = await one.agent()
            one.gate.pid = 8
            await agent.open(3, "run", one.clock.now() + LONG_S, None)
            assert one.gate.open_epoch == 3

    asyncio.run(scenario())


def test_the_same_failure_to_start_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    """Each try has a log of its own, and comes some seconds after the one before."""
    tries: list[int] = []

    async def scenario() -> None:
        async with guarded() as one:
            await one.until(lambda: told() == ["the server is started"])
            start = one.child.start

            async def fail() -> None:
                tries.append(len(tries))
                raise ConnectionError(f"no such option\n    at {len(tries)}")

            one.child.start = fail  # type: ignore[method-assign]
            one.child.lives = False
            await one.until(lambda: len(tries) == 3)
            one.child.start = start  # type: ignore[method-assign]
            await one.until(lambda: one.child.lives)
            await one.until(lambda: "the server is started" in told()[2:])

    def told() -> list[str]:
        return [one.message for one in caplog.records if "start" in one.message]

    with caplog.at_level("INFO", "domicile"):
        asyncio.run(scenario())
    assert told() == [
        "the server is started",
        "the server does not start, which is tried again: no such option\n    at 1",
        "the server is started",
    ]


def test_another_quorum_of_an_open_server_is_no_opening(caplog: pytest.LogCaptureFixture) -> None:
    async def scenario() -> None:
        async with guarded() as one:
            agent, until = await one.agent(), one.clock.now() + LONG_S
            for members in ((), ("s2",)):
                await agent.open(3, "run", until, WriteQuorum("s1", members, 1))
            await agent.shut()
            await agent.open(3, "run", until, None)

    with caplog.at_level("INFO", "domicile"):
        asyncio.run(scenario())
    told = [
        one.message for one in caplog.records if "writes in" in one.message or "wait" in one.message
    ]
    opened = "the server accepts writes in epoch 3"
    assert told == [opened, "commits wait for s1 + any 1 of (s2)", opened]


def test_a_server_whose_agent_is_gone_is_closed() -> None:
    async def scenario() -> None:
        async with guarded() as one:
            agent = await one.agent()
            await agent.open(3, "run", one.clock.now() + LONG_S, None)
            one.leave()
            await one.until(lambda: not one.gate.open_epoch)
            with pytest.raises(ConnectionError, match="gone"):
                await agent.shut()
            # A new one attaches; one that comes while another is there takes its place.
            second = await one.agent()
            await second.open(4, "run", one.clock.now() + LONG_S, None)
            third = await one.agent()
            await one.until(lambda: not one.gate.open_epoch)
            with pytest.raises(ConnectionError, match="gone"):
                await second.open(4, "run", one.clock.now() + LONG_S, None)
            await third.open(5, "run", one.clock.now() + LONG_S, None)
            assert one.gate.open_epoch == 5

    asyncio.run(scenario())


def test_a_server_that_hangs_is_killed_and_started_again() -> None:
    async def scenario() -> None:
        async with guarded() as one:
            await one.until(lambda: one.child.lives)
            agent = await one.agent()
            await agent.open(3, "run", one.clock.now() + 0.5, None)
            one.gate.hangs = True
            await one.until(lambda: one.child.killed == 1)
            await one.until(lambda: one.child.lives and one.timer.at == 0.0)
            assert not one.gate.open_epoch
        assert one.child.stopped == 1

    asyncio.run(scenario())


def test_a_guard_does_not_die_of_a_killed_server_that_is_late_to_go() -> None:
    """Else a busy machine loses the guard, and all below it, with each lease that ends."""

    async def scenario() -> None:
        async with guarded() as one:
            await one.until(lambda: one.child.lives)
            agent = await one.agent()
            await agent.open(3, "run", one.clock.now() + 0.5, None)
            one.gate.hangs = True
            one.child.goes.clear()
            try:
                await one.until(lambda: one.timer.at == 0.0)
                assert not one.gate.open_epoch
                assert (one.child.killed, one.child.lives) == (0, True)
            finally:
                one.child.goes.set()
            await one.until(lambda: one.child.killed == 1)

    asyncio.run(scenario())


def test_an_order_at_the_deadline_gives_a_server_that_hangs_no_more_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """An agent whose lease ends asks for that, and the timer would kill the guard meanwhile."""
    monkeypatch.setattr(server_guard, "LOCK_S", LONG_S)

    async def scenario() -> None:
        async with guarded() as one:
            await one.until(lambda: one.child.lives)
            agent = await one.agent()
            await agent.open(3, "run", one.clock.now() + 0.5, None)
            one.gate.hangs = True
            shutting = asyncio.create_task(agent.shut())
            try:
                await one.until(lambda: one.child.killed == 1)
            finally:
                monkeypatch.undo()
            await shutting

    asyncio.run(scenario())


def test_a_newer_order_ends_the_one_under_way() -> None:
    async def scenario() -> None:
        async with guarded(child=False) as one:
            agent = await one.agent()
            await agent.shut()
            one.gate.hangs = True
            until = one.clock.now() + LONG_S
            opening = asyncio.create_task(agent.open(3, "run", until, None))
            await one.until(lambda: one.gate.said[-1] == "unlock 3")
            one.gate.hangs = False
            await agent.shut()
            with pytest.raises(ConnectionError, match="newer order"):
                await opening
            assert not one.gate.open_epoch
            assert one.gate.said[-1] == "lock"

    asyncio.run(scenario())


SLEEPER = """
import os, signal, time
from domicile.failover.guard.kernel_timer import kernel_timer
from domicile.membership.clock import SystemClock

timer = kernel_timer()
timer.arm(SystemClock().now() + 600)
timer.disarm()
timer.arm(SystemClock().now() + 0.2)
os.kill(os.getpid(), signal.SIGSTOP)
time.sleep(600)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux has this timer")
def test_the_kernel_kills_a_stopped_process_at_the_deadline() -> None:
    process = subprocess.Popen([sys.executable, "-c", SLEEPER])
    try:
        assert process.wait(PATIENCE_S) == -signal.SIGKILL
    finally:
        process.kill()
    NoTimer().arm(0.0)
    NoTimer().disarm()


def test_the_state_folder_has_one_agent_and_keeps_the_id(tmp_path: Path) -> None:
    folder = StateFolder(tmp_path / "one" / "two")
    with folder.held("agent"), folder.held("guard"):
        with pytest.raises(ConfigError, match=f"pid {os.getpid()}"), folder.held("agent"):
            pass
        book = folder.notes("orders-1")
        assert book.load().server == "orders-1"
    with folder.held("agent"):
        pass
    with pytest.raises(ConfigError, match="belongs to server 'orders-1'"):
        folder.notes("orders-2")
    (folder.path / "notes.json").write_text("{")
    with pytest.raises(ConfigError, match="can't be read"):
        folder.notes("orders-1")
    with pytest.raises(ConfigError, match="too long"):
        StateFolder(tmp_path / ("x" * 100))


def test_notes_survive_a_cancellation(tmp_path: Path) -> None:
    async def scenario() -> None:
        folder = StateFolder(tmp_path / "state")
        folder.make()
        book = folder.notes("orders-1")
        first = book.load()
        changed = type(first)("orders-1", origin="data", native="abc")
        saving = asyncio.create_task(book.save(changed))
        await asyncio.sleep(0)
        saving.cancel()
        await asyncio.wait([saving])
        await book.save(first)
        assert folder.notes("orders-1").load() == first

    asyncio.run(scenario())
