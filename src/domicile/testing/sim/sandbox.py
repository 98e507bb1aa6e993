"""Keeps the real world out of a simulation.

`sandbox()` makes the interpreter refuse sockets, threads, child processes and blocking sleeps in
the current thread. In virtual time each of them is a mistake that would otherwise show as a seed
that does not replay. `World.run` enters it; tests may too. It must never affect other threads, nor
this one outside of the `with` block. `LOOP_REFUSALS` says what a simulated process's event loop
refuses by itself.
"""

from __future__ import annotations

import _thread
import sys
import threading
import time
from _thread import get_ident
from collections.abc import Callable, Generator
from contextlib import contextmanager
from functools import wraps
from types import ModuleType
from typing import Any, NoReturn


class SimulationError(Exception):
    """The simulated program did something that is impossible in virtual time."""


_NETWORK = "use the simulated network: a transport made for the sim"
_THREAD = "run it on the event loop: simulated processes have no threads"
_CHILD = "start another simulated process with World.process()"

_REFUSED = {
    "socket.__new__": ("creating a socket", _NETWORK),
    "socket.bind": ("binding a socket", _NETWORK),
    "socket.connect": ("connecting a socket", _NETWORK),
    "_thread.start_new_thread": ("starting a thread", _THREAD),
    "_thread.start_joinable_thread": ("starting a thread", _THREAD),
    "subprocess.Popen": ("starting a child process", _CHILD),
    "os.fork": ("forking", _CHILD),
    "os.forkpty": ("forking", _CHILD),
    "os.posix_spawn": ("starting a child process", _CHILD),
    "os.system": ("starting a child process", _CHILD),
    "time.sleep": ("time.sleep", "use await asyncio.sleep(), which takes no real time here"),
}

_depth_by_thread: dict[int, int] = {}
_installed: list[bool] = []


def _audit(event: str, _args: tuple[Any, ...]) -> None:
    # Called for every audited event of the interpreter from now on: hooks cannot be removed.
    if _depth_by_thread and event in _REFUSED and get_ident() in _depth_by_thread:
        what, instead = _REFUSED[event]
        raise SimulationError(
            f"{what} is real I/O, which a simulation in virtual time refuses; {instead}"
        )


def _guard(module: ModuleType, name: str, event: str) -> None:
    """Replaces an audit event that this version of Python does not raise yet."""
    real = getattr(module, name)

    @wraps(real)
    def guarded(*args: Any, **kwargs: Any) -> Any:
        _audit(event, args)
        return real(*args, **kwargs)

    setattr(module, name, guarded)


def _install() -> None:
    _installed.append(True)
    sys.addaudithook(_audit)
    if sys.version_info < (3, 13):
        _guard(time, "sleep", "time.sleep")
    if sys.version_info < (3, 12):
        _guard(_thread, "start_new_thread", "_thread.start_new_thread")
        _guard(threading, "_start_new_thread", "_thread.start_new_thread")


@contextmanager
def sandbox() -> Generator[None, None, None]:
    """Refuse real I/O in this thread within the block. May be nested."""
    if not _installed:
        _install()
    thread = get_ident()
    _depth_by_thread[thread] = _depth_by_thread.get(thread, 0) + 1
    try:
        yield
    finally:
        _depth_by_thread[thread] -= 1
        if not _depth_by_thread[thread]:
            del _depth_by_thread[thread]


_LOOP_REFUSALS = {
    "is driving one loop alone; use World.run()": "run_forever run_until_complete stop",
    "would replace the world's numbered tasks; use create_task()": "set_task_factory",
    f"is real I/O on a socket; {_NETWORK}": (
        "create_connection create_server create_unix_connection create_unix_server start_tls "
        "create_datagram_endpoint connect_accepted_socket sendfile sock_recv sock_recv_into "
        "sock_recvfrom sock_recvfrom_into sock_sendto sock_sendall sock_connect sock_accept "
        "sock_sendfile getaddrinfo getnameinfo"
    ),
    "is real I/O on a file descriptor; use SimLoop.post() for a simulated event": (
        "add_reader remove_reader add_writer remove_writer connect_read_pipe connect_write_pipe"
    ),
    f"is real I/O in a thread; {_THREAD}": "run_in_executor set_default_executor",
    f"is real I/O with a child process; {_CHILD}": "subprocess_exec subprocess_shell",
    "is real I/O with the operating system; use SimLoop.freeze(), thaw() or kill()": (
        "add_signal_handler remove_signal_handler"
    ),
}

LOOP_REFUSALS = {name: why for why, names in _LOOP_REFUSALS.items() for name in names.split()}


def refusal(name: str, why: str) -> Callable[..., NoReturn]:
    """A method that refuses to be called."""

    def refused(self: Any, *_args: Any, **_kwargs: Any) -> NoReturn:
        raise SimulationError(f"{name}() on simulated process {self.name!r} {why}")

    refused.__name__ = name
    return refused
