"""Servers as children of the process that guards them."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from domicile.failover.drivers.child_process import ChildProcess

PATIENCE_S = 60.0

SLEEPER = "import pathlib, sys, time; pathlib.Path(sys.argv[1]).touch(); time.sleep(600)"
STUBBORN = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); " + SLEEPER

needs_linux = pytest.mark.skipif(sys.platform != "linux", reason="only Linux has PDEATHSIG")


def child(tmp_path: Path, code: str = SLEEPER, *, stop_s: float = PATIENCE_S) -> ChildProcess:
    mark = tmp_path / "ready"

    async def ready() -> bool:
        return mark.exists()

    return ChildProcess(
        [sys.executable, "-c", code, str(mark)], log=tmp_path / "log", ready=ready,
        start_s=PATIENCE_S, stop_s=stop_s,
    )  # fmt: skip


async def wait_for(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.01)


def lives(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def runs(pid: int | None) -> str:
    """The name of the program."""
    return Path(f"/proc/{pid}/comm").read_text().strip()


@pytest.mark.parametrize("immediate", [True, False])
def test_a_server_is_started_once_and_stopped(tmp_path: Path, immediate: bool) -> None:
    async def scenario() -> None:
        server = child(tmp_path)
        assert not await server.running()
        await server.start()
        pid = server.pid
        await server.start()
        assert server.pid == pid
        assert pid is not None
        assert os.getsid(pid) == pid
        await server.stop(immediate=immediate)
        assert not await server.running()
        await server.stop(immediate=immediate)
        await server.start()
        assert server.pid not in (pid, None)
        await server.stop(immediate=True)

    asyncio.run(scenario())


def test_a_server_that_ignores_an_orderly_stop_is_killed(tmp_path: Path) -> None:
    async def scenario() -> None:
        server = child(tmp_path, STUBBORN, stop_s=0.1)
        await server.start()
        await server.stop(immediate=False)
        assert not await server.running()

    asyncio.run(scenario())


def test_a_server_that_was_stopped_by_a_signal_is_killed_too(tmp_path: Path) -> None:
    async def scenario() -> None:
        server = child(tmp_path)
        await server.start()
        assert server.pid is not None
        os.kill(server.pid, signal.SIGSTOP)
        await server.stop(immediate=True)
        assert not await server.running()

    asyncio.run(scenario())


def test_a_server_that_fails_says_how(tmp_path: Path) -> None:
    async def scenario() -> None:
        (tmp_path / "log").write_text("of an earlier start\n")
        failing = child(tmp_path, "import sys; print('no room'); sys.exit(3)")
        for _ in range(2):
            with pytest.raises(ConnectionError, match=r"exit code 3") as raised:
                await failing.start()
            # What earlier starts have written is not told once more.
            _, *lines = str(raised.value).splitlines()
            assert lines == ["    no room"]
        absent = ChildProcess(
            ["no-such-program"], log=tmp_path / "log", ready=failing.running, start_s=PATIENCE_S
        )
        with pytest.raises(FileNotFoundError, match="no-such-program"):
            await absent.start()

    asyncio.run(scenario())


@needs_linux
def test_only_the_child_itself_ends_with_its_parent(tmp_path: Path) -> None:
    """F2: what the kernel would not end is told, with both process ids."""

    async def scenario() -> None:
        server = child(tmp_path)
        assert f"process {os.getpid()} answers" in server.outlives(os.getpid())
        await server.start()
        assert server.pid is not None
        assert server.outlives(server.pid) == ""
        why = server.outlives(os.getpid())
        assert f"process {os.getpid()} answers" in why
        assert f"is {server.pid}." in why
        await server.stop(immediate=True)

    asyncio.run(scenario())


@needs_linux
@pytest.mark.skipif(os.getuid() != 0, reason="only root may change the user")
def test_a_child_that_changes_its_user_is_told(tmp_path: Path) -> None:
    """The kernel forgets then that the child ends with its parent."""

    async def scenario() -> None:
        async def ready() -> bool:
            return runs(server.pid) == "sleep"

        server = ChildProcess(
            ["setpriv", "--reuid=nobody", "--regid=nogroup", "--clear-groups", "sleep", "600"],
            log=tmp_path / "log", ready=ready,
        )  # fmt: skip
        await server.start()
        assert server.pid is not None
        assert "another user" in server.outlives(server.pid)
        await server.stop(immediate=True)

    asyncio.run(scenario())


PARENT = """
import asyncio, pathlib, sys
from domicile.failover.drivers.child_process import ChildProcess

async def main(mark):
    async def ready():
        return mark.exists()

    server = ChildProcess(
        [sys.executable, "-c", sys.argv[2], str(mark)], log=mark.with_name("log"), ready=ready,
        start_s=60.0,
    )
    await server.start()
    print(server.pid, flush=True)
    await asyncio.sleep(600)

asyncio.run(main(pathlib.Path(sys.argv[1])))
"""


@needs_linux
def test_a_killed_parent_takes_its_server_along(tmp_path: Path) -> None:
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT, str(tmp_path / "ready"), SLEEPER], stdout=subprocess.PIPE
    )
    try:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        assert lives(pid)
    finally:
        parent.kill()
        parent.communicate()
    asyncio.run(wait_for(lambda: not lives(pid)))
