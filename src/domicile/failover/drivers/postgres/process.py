"""The postmaster as a child of the guard. Implements `ServerProcess`."""

from __future__ import annotations

import signal
from typing import ClassVar

from domicile.failover.database_kinds import ServerPlace
from domicile.failover.drivers.child_process import ChildProcess
from domicile.failover.drivers.postgres.local_server import LocalServer, ServerRefused

START_S = 60.0
"""How long a start may take before it counts as failed. It is waited for again after that."""


class PostgresProcess(ChildProcess):
    """One server. It starts in recovery (F3), and not while its data is being replaced."""

    asks_again: ClassVar[bool] = True

    def __init__(self, place: ServerPlace) -> None:
        self._server = LocalServer(place)
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
                    server.prepare()
                    server.start_fenced()
                    self._command = tuple(server.start_command())
                    self._process = self._spawn()
            except BlockingIOError:
                return
        await super().start()

    async def stop(self, *, immediate: bool) -> None:
        """As `ServerProcess.stop`. At once means with all sessions: they outlive a postmaster."""
        if immediate:
            await self._server.stop_now()
        await super().stop(immediate=immediate)

    async def _answers(self) -> bool:
        try:
            (await self._server.connect("guard")).terminate()
        except ServerRefused as refused:
            # Its primary's log lets it answer, and following is not the guard's affair.
            return refused.forbidden or (refused.starting and self._server.replacing.exists())
        except (OSError, TimeoutError):
            return False
        return True
