"""The operating system's process around a life: a name for it, and signals that ask it to leave.

Used by `node` and `manager`. It must never touch signals outside the main thread: there they are
the host program's own business.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager

from domicile.incarnation.supervisor import Supervisor


def default_node_id() -> str:
    """A name that no other process on any machine is likely to have."""
    return f"{socket.gethostname()}-{os.getpid()}-{os.urandom(2).hex()}"


async def until_asked(lives: Supervisor) -> None:
    """Until cancelled, until a signal asks to leave, or until the lives end with an error."""
    over = asyncio.Event()
    serving = asyncio.get_running_loop().create_task(lives.wait())
    serving.add_done_callback(lambda _: over.set())
    try:
        with _signals(over.set):
            await over.wait()
        if serving.done():
            serving.result()
    finally:
        serving.cancel()


@contextmanager
def _signals(leave: Callable[[], object]) -> Generator[None]:
    """The first SIGTERM or SIGINT asks to leave; the next one has its usual effect."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    loop = asyncio.get_running_loop()
    kinds = (signal.SIGTERM, signal.SIGINT)

    def heard() -> None:
        for kind in kinds:
            loop.remove_signal_handler(kind)
        leave()

    try:
        for kind in kinds:
            loop.add_signal_handler(kind, heard)
    except NotImplementedError:  # Windows
        yield
        return
    try:
        yield
    finally:
        for kind in kinds:
            loop.remove_signal_handler(kind)
