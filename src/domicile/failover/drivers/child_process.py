"""A server that a command starts, as a child of this process. Implements `ServerProcess`.

For the guard's process, in its main thread only: on Linux the kernel kills the server when the
*thread* that started it ends, so a killed guard takes its server along (F2). Elsewhere a server
outlives a killed guard. The server has a session of its own, so that no Ctrl-C reaches it, and all
its output goes to a file.

A guard calls `start` again and again as long as the server does not run. A kind whose server must
stay down for a while, as during a repair, derives from this and lets `start` do nothing then.
"""

from __future__ import annotations

import asyncio
import logging
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import ClassVar

log = logging.getLogger("domicile")

LAUNCHER = Path(__file__).with_name("die_with_parent.py")

POLL_S = 0.01

MOST_LOG_BYTES = 16 << 20
"""I6: a larger log is put aside at the next start; one older log is kept."""

TAIL_BYTES, TAIL_LINES = 2_000, 8
"""How much of the log's end an error shows, of what this start has written."""

LONG_S = 5.0
"""A start that takes longer says so."""


class ChildProcess:
    """One command and at most one process of it."""

    asks_again: ClassVar[bool] = False
    """Whether the command changes its user, and then asks the kernel itself for its end."""

    def __init__(
        self,
        command: Sequence[str],
        *,
        log: Path,
        ready: Callable[[], Awaitable[bool]],
        cwd: Path | None = None,
        env: Mapping[str, str] | None = None,
        start_s: float = 30.0,
        stop_s: float = 30.0,
        orderly: signal.Signals = signal.SIGTERM,
        immediate: signal.Signals | None = None,
        immediate_s: float = 1.0,
    ) -> None:
        """`ready` says whether the server answers. `env` is added to this process's environment.

        `orderly` asks for a stop, which may take `stop_s`. `immediate` asks for one at once, which
        may take `immediate_s`. Then comes SIGKILL; without `immediate` it comes first.
        """
        self._command, self._log, self._ready = tuple(command), log, ready
        self._cwd, self._env = cwd, env
        self._start_s, self._stop_s = start_s, stop_s
        self._orderly, self._immediate, self._immediate_s = orderly, immediate, immediate_s
        self._process: subprocess.Popen[bytes] | None = None
        self._program = self._command[0]
        self._written = 0
        """The size of the log when the process was started."""

    @property
    def pid(self) -> int | None:
        """The process's id, while it lives."""
        process = self._process
        return None if process is None or process.poll() is not None else process.pid

    async def start(self) -> None:
        """As `ServerProcess.start`. `ConnectionError` says how it failed."""
        if self.pid is None:
            self._process = self._spawn()
        process = self._process
        assert process is not None
        loop = asyncio.get_running_loop()
        long_at = loop.time() + LONG_S
        try:
            async with asyncio.timeout(self._start_s):
                while process.poll() is None:
                    if await self._ready():
                        return
                    if loop.time() > long_at:
                        long_at = float("inf")
                        log.info(
                            "%s (pid %d) does not answer yet; its output is in %s",
                            self._program, process.pid, self._log,
                        )  # fmt: skip
                    await asyncio.sleep(POLL_S)
        except TimeoutError:
            raise ConnectionError(
                f"{self._program} (pid {process.pid}) runs and does not answer after "
                f"{self._start_s:g} s; its output is in {self._log}"
            ) from None
        raise ConnectionError(
            f"{self._program} ended at its start, {_how(process.returncode)}. The end of "
            f"{self._log}:{self._tail()}"
        )

    async def stop(self, *, immediate: bool) -> None:
        """As `ServerProcess.stop`."""
        process = self._process
        if process is None or process.poll() is not None:
            return
        first = self._immediate if immediate else self._orderly
        if first is not None:
            process.send_signal(first)
            try:
                async with asyncio.timeout(self._immediate_s if immediate else self._stop_s):
                    await _gone(process)
                    return
            except TimeoutError:
                pass
        process.kill()
        await _gone(process)

    def kill(self) -> None:
        """As `ServerProcess.kill`."""
        if self._process is not None and self._process.poll() is None:
            self._process.kill()

    async def running(self) -> bool:
        """As `ServerProcess.running`."""
        return self.pid is not None

    async def stranger(self) -> str:
        """As `ServerProcess.stranger`, for kinds that can tell."""
        return ""

    def started(self, pid: int) -> bool:
        """Whether a process is this child or comes from it, as far as the platform tells."""
        own = self.pid
        return own is not None and (sys.platform != "linux" or descends(pid, own))

    def outlives(self, pid: int) -> str:
        """As `ServerProcess.outlives`."""
        own = self.pid
        if own is None:
            return (
                f"process {pid} answers at its url, and the guard (pid {os.getpid()}) has no child "
                "that runs. Stop what else has that address, and let `command` stay in the "
                "foreground"
            )
        if pid != own:
            return (
                f"process {pid} answers at its url, and the child of the guard (pid "
                f"{os.getpid()}) is {own}. A process that is not the guard's child would outlive "
                "it: stop what else has that address, and let `command` be the server itself, not "
                "a program that starts it"
            )
        if sys.platform == "linux" and not self.asks_again and _user(pid) != _user(os.getpid()):
            return (
                f"its process {pid} has another user or group than the guard (pid {os.getpid()}), "
                "so the kernel would not end it with the guard: run the guard as that user"
            )
        return ""

    def _spawn(self) -> subprocess.Popen[bytes]:
        if shutil.which(self._command[0], path=self._path()) is None:
            raise FileNotFoundError(
                f"there is no program {self._command[0]!r}: install it, or write its whole path "
                "into the command"
            )
        self._log.parent.mkdir(parents=True, exist_ok=True)
        if self._log.exists() and self._log.stat().st_size > MOST_LOG_BYTES:
            self._log.replace(self._log.with_name(f"{self._log.name}.old"))
        env = None if self._env is None else {**os.environ, **self._env}
        with self._log.open("ab") as out:
            self._written = out.tell()
            return subprocess.Popen(
                with_parent(self._command), cwd=self._cwd, env=env, stdin=subprocess.DEVNULL,
                stdout=out, stderr=out, start_new_session=True,
            )  # fmt: skip

    def _path(self) -> str | None:
        return None if self._env is None else self._env.get("PATH")

    def _tail(self) -> str:
        with self._log.open("rb") as file:
            file.seek(max(self._written, file.seek(0, os.SEEK_END) - TAIL_BYTES))
            text = file.read().decode(errors="replace").strip() or "(empty)"
        return "".join(f"\n    {line}" for line in text.splitlines()[-TAIL_LINES:])


def with_parent(command: Sequence[str]) -> tuple[str, ...]:
    """A command for a child that the kernel kills when the calling thread ends, on Linux."""
    if sys.platform != "linux":
        return tuple(command)
    assert threading.current_thread() is threading.main_thread(), "other threads end too early"
    return (sys.executable, "-I", "-S", str(LAUNCHER), str(os.getpid()), *command)


def descends(pid: int, ancestor: int) -> bool:
    """Whether a process is another one, or its child, or a child of that; Linux only."""
    while pid > 1 and pid != ancestor:
        try:
            text = Path(f"/proc/{pid}/stat").read_text()
        except OSError:
            return False
        # After the name in brackets, which may have any character: the state, and the parent.
        pid = int(text.rpartition(")")[2].split()[1])
    return pid == ancestor


def _user(pid: int) -> tuple[str, ...]:
    """The users and groups that a process acts as: the kernel forgets what a child that changes
    them has asked for."""
    try:
        status = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return ()
    found = {line.partition(":")[0]: line.split()[1:] for line in status}
    # Of four: the real, the effective, the saved one, and the one for files.
    return tuple(found[name][at] for name in ("Uid", "Gid") for at in (1, 3))


async def _gone(process: subprocess.Popen[bytes]) -> None:
    while process.poll() is None:  # noqa: ASYNC110
        await asyncio.sleep(POLL_S)


def _how(code: int) -> str:
    return f"by {signal.Signals(-code).name}" if code < 0 else f"with exit code {code}"
