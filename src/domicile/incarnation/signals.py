"""The operating system's process around a life: a name for it, and signals that ask it to leave.

Used by `process`, and by programs whose process is Domicile's own. It must never touch signals
outside the main thread: there they are the host program's own business.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import threading
from types import TracebackType
from typing import Self

from domicile.incarnation.supervisor import Supervisor

SIGNALS = (signal.SIGTERM, signal.SIGINT)
"""The signals that ask a process to leave."""


def default_node_id() -> str:
    """A name that no other process on any machine is likely to have."""
    return f"{socket.gethostname()}-{os.getpid()}-{os.urandom(2).hex()}"


class LeaveSignals:
    """While entered, the first SIGTERM or SIGINT asks to leave; the next one ends the process.

    One object holds the signals from before the start until the end. If it passed them on to
    another one, a signal that the event loop has noticed and not reported yet would be lost. With
    `at_once` the second signal ends the process by its default action, and no Python code runs.
    """

    def __init__(self, *, at_once: bool = False) -> None:
        self.asked = asyncio.Event()
        """Set by the first signal."""
        self.heard: signal.Signals | None = None
        """The first signal."""
        self._at_once = at_once
        self._holding = False

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            loop = asyncio.get_running_loop()
            try:
                for kind in SIGNALS:
                    loop.add_signal_handler(kind, self._hear, kind)
            except NotImplementedError:  # Windows
                return self
            self._holding = True
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._let_go()

    def _hear(self, kind: signal.Signals) -> None:
        self.heard = kind
        self._let_go()
        if self._at_once:
            for one in SIGNALS:
                signal.signal(one, signal.SIG_DFL)
        self.asked.set()

    def _let_go(self) -> None:
        if self._holding:
            self._holding = False
            for kind in SIGNALS:
                asyncio.get_running_loop().remove_signal_handler(kind)


async def until_asked(lives: Supervisor, asked: asyncio.Event) -> None:
    """Until cancelled, until `asked` is set, or until the lives end with an error."""
    loop = asyncio.get_running_loop()
    serving, waiting = loop.create_task(lives.wait()), loop.create_task(asked.wait())
    try:
        await asyncio.wait((serving, waiting), return_when=asyncio.FIRST_COMPLETED)
        if serving.done():
            serving.result()
    finally:
        serving.cancel()
        waiting.cancel()
