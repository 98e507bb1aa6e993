"""The postmaster as a child of the guard. Implements `ServerProcess`."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
from typing import ClassVar

from domicile.failover.database_kinds import ServerPlace
from domicile.failover.drivers.child_process import ChildProcess
from domicile.failover.drivers.postgres import server_family
from domicile.failover.drivers.postgres.local_server import LocalServer, ServerRefused

START_S = 60.0
"""How long a start may take before it counts as failed. It is waited for again after that."""


STRANGER_S = 1.0
"""How long it is tried to connect to a server that should not be there."""


class PostgresProcess(ChildProcess):
    """One server. It starts in recovery (F3), and not while its data is being replaced."""

    asks_again: ClassVar[bool] = True

    def __init__(self, place: ServerPlace) -> None:
        self._server = LocalServer(place)
        self._watcher: subprocess.Popen[bytes] | None = None
        super().__init__(
            ["postgres"], log=self._server.folder / "server.log", ready=self._answers,
            start_s=START_S, orderly=signal.SIGINT, immediate=signal.SIGQUIT,
        )  # fmt: skip

    async def start(self) -> None:
        """As `ServerProcess.start`. Does nothing without data that can be started with."""
        if self.pid is None:
            server = self._server
            if not server.may_start:
                return
            try:
                with server.hold_data():
                    if server.postmaster() is not None:
                        raise OSError(
                            f"somebody else has started the server of {server.data}: stop it, "
                            "Domicile starts it"
                        )
                    # Of a run before this one, or the server would not start beside them.
                    await server.end_all()
                    if why := server.without_settings():
                        raise OSError(why)
                    server.prepare()
                    server.start_fenced()
                    self._command = tuple(server.start_command())
                    self._process = self._spawn()
                    self._watch(self._process.pid)
            except BlockingIOError:
                return
        await super().start()

    async def stop(self, *, immediate: bool) -> None:
        """As `ServerProcess.stop`. At once means with all sessions: they outlive a postmaster."""
        if immediate:
            await self._server.stop_now()
        await super().stop(immediate=immediate)
        if self._process is not None:
            await self._server.end_all()
        self._end_watcher()

    def kill(self) -> None:
        """As `ServerProcess.kill`. First the main process: it starts no other from then on."""
        postmaster = self.pid or 0
        super().kill()
        self._server.kill_left(postmaster)

    def _watch(self, postmaster: int) -> None:
        """Have the server's processes ended when this one is gone, whatever became of the first."""
        self._end_watcher()
        # Its input has no other holder than this process, so it ends with it.
        self._watcher = subprocess.Popen(
            [sys.executable, "-I", "-S", server_family.__file__, str(self._server.data),
             str(postmaster)],
            stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, cwd="/",
            start_new_session=True,
        )  # fmt: skip

    def _end_watcher(self) -> None:
        if self._watcher is not None:
            self._watcher.kill()
            self._watcher.communicate()
            self._watcher = None

    async def stranger(self) -> str:
        """As `ServerProcess.stranger`. A server of the same data is told when it is started."""
        if self._server.postmaster() is not None:
            return ""
        login = self._server.login
        try:
            async with asyncio.timeout(STRANGER_S):
                _, writer = await asyncio.open_connection(login.host, login.port)
        except (OSError, TimeoutError):
            return ""
        writer.close()
        return f"another server answers at {login.host}:{login.port} already"

    async def _answers(self) -> bool:
        # Its own word: a server that can't have its port ends in a moment, and another one answers.
        postmaster = self._server.postmaster()
        if postmaster is None or not self.started(postmaster):
            return False
        try:
            (await self._server.connect("guard")).terminate()
        except ServerRefused as refused:
            # Its primary's log lets it answer, and following is not the guard's affair.
            return refused.forbidden or (refused.starting and self._server.replacing.exists())
        except (OSError, TimeoutError):
            return False
        return True
