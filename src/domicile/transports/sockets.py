"""Sockets as this project wants them: they never block, and no forked child keeps one.

Used by `domicile.transports.tcp`. Nothing here may wait for the network.
"""

from __future__ import annotations

import errno
import os
import socket
import sys
import weakref
from typing import Any

from domicile.errors import ConfigError
from domicile.transports.addresses import ANYWHERE, Address, written

_KEEPALIVE = {"TCP_KEEPIDLE": 10, "TCP_KEEPALIVE": 10, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 3}
"""Seconds of silence, twice, because macOS has its own name for it; seconds; attempts."""

_owned: weakref.WeakSet[socket.socket] = weakref.WeakSet()


def own(sock: socket.socket) -> None:
    """Have a socket closed in forked children."""
    _owned.add(sock)


def _close_in_child() -> None:
    # A forked child would keep the port taken and connections standing after this process has
    # closed them, and the kernel sending what `_withhold` means to drop (L3).
    for sock in list(_owned):
        sock.close()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_close_in_child)


def bind_port(span: Address, family: int, where: tuple[Any, ...], backlog: int) -> socket.socket:
    """A socket that listens at the first free port of a span."""
    host, rest = where[0], where[2:]
    for port in range(span.first, span.last + 1):
        sock = socket.socket(family, socket.SOCK_STREAM)
        own(sock)
        try:
            sock.setblocking(False)
            if sys.platform != "win32":
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if family == socket.AF_INET6:
                only = int(host not in ANYWHERE)
                sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, only)
            sock.bind((host, port, *rest))
            sock.listen(backlog)
        except OSError as error:
            sock.close()
            if error.errno != errno.EADDRINUSE:
                raise ConfigError(
                    f"cannot listen at {written(span.host, port)}: {error.strerror}. Name an "
                    "address of this machine and a port that this user may open"
                ) from error
        else:
            return sock
    if span.first == span.last:
        raise ConfigError(
            f"cannot listen at {written(span.host, span.first)}: another process listens there. "
            f"Stop it, or listen at another port; {written(span.host, 0)} takes any"
        )
    raise ConfigError(
        f"cannot listen at {written(span.host, span.first)}-{span.last}: every port of this range "
        f"is in use. Widen it, or stop a process that listens there"
    )


def prepare(sock: socket.socket) -> None:
    """Never block, send at once, and notice a peer that is gone without a word."""
    own(sock)
    sock.setblocking(False)
    if sock.family not in (socket.AF_INET, socket.AF_INET6):
        return
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in _KEEPALIVE.items():
        option = getattr(socket, name, None)
        if option is not None:
            sock.setsockopt(socket.IPPROTO_TCP, option, value)


def meets_itself(sock: socket.socket) -> bool:
    """Whether a dial to a port that nobody listens at was given that very port as its own."""
    try:
        return bool(sock.getsockname() == sock.getpeername())
    except OSError:
        return False
