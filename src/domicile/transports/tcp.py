"""Connections over TCP and Unix sockets, between processes of one machine or of many.

`TcpTransport` listens and dials; `domicile.transports.tcp_connection` handles an open socket. Each
node or client has its own transport. Sockets never block, and no forked child keeps one. Nothing
here may block the event loop or wait for the network: names are looked up in a thread, and numeric
hosts need no look-up.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import socket
import sys
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

from domicile.errors import ConfigError
from domicile.ports.meter import Meter, NoMeter
from domicile.ports.transport import ConnectionHandler
from domicile.transports.addresses import (
    ANYWHERE,
    Address,
    is_loopback,
    is_numeric,
    parse,
    parse_advertised,
    primary_host,
    written,
)
from domicile.transports.framing import MAX_FRAME_BYTES
from domicile.transports.tcp_connection import Shared
from domicile.transports.tls import Certificates
from domicile.transports.tls_connection import dial_tls
from domicile.transports.unix import PREFIX, bind_path, is_unix, path_of, remover

log = logging.getLogger("domicile")

DIAL_TIMEOUT_S = 3.0
"""Seconds after which a dial has failed, name look-up included."""

LOOK_UP_S = 10.0
"""Seconds that looking up the host to listen at may take."""

BACKLOG = 512
ACCEPT_AT_ONCE = 32
ACCEPT_PAUSE_S = 0.5
"""Connections accepted in one turn, and the seconds of pause after one could not be accepted."""

_EXHAUSTED = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)

Resolved = tuple[int, Any]
"""A family and the socket address in it."""

_LISTEN = "the address to listen at"
_CLOSED = "this transport is closed and cannot listen again: make a new one"


class TcpTransport:
    """A `Transport` over TCP and Unix sockets.

    `listen` is `host:port`, or `host:first-last` for the first free port of a range; an IPv6 host
    is in brackets, port 0 is any. `unix:/path` is a file, or a new one in a directory. `advertise`
    is what peers dial instead, `host` or `host:port`: give it if peers cannot dial the bound
    address. The first packet may have `first_bytes`, and a packet that makes no progress for
    `stall_s` ends its connection. With `certificates` everything travels under TLS. `only_here`
    refuses to listen where other machines could connect.
    """

    def __init__(
        self,
        listen: str = "127.0.0.1:0",
        *,
        advertise: str | None = None,
        max_frame_bytes: int = MAX_FRAME_BYTES,
        first_bytes: int | None = None,
        stall_s: float | None = None,
        meter: Meter | None = None,
        certificates: Certificates | None = None,
        only_here: bool = False,
    ) -> None:
        if not 0 < max_frame_bytes < 2**31:
            raise ConfigError(f"max_frame_bytes must be from 1 to 2³¹ − 1, it is {max_frame_bytes}")
        _refuse_blind(_running())
        self._only_here = only_here
        self._listen: Address | Path
        if is_unix(listen):
            self._listen = path_of(listen, _LISTEN)
        else:
            self._listen = parse(listen, _LISTEN, ranges=True)
            if is_numeric(self._listen.host):
                self._refuse_strangers(self._listen.host, self._listen.host)
        self._advertise = advertise
        if advertise is not None:
            parse_advertised(advertise, 1)
        meter = NoMeter() if meter is None else meter
        self._shared = Shared(max_frame_bytes, meter, certificates, first_bytes, stall_s)
        self._listeners: list[_Listener] = []
        self._dials: dict[_Dial, None] = {}
        self._closed = False

    async def listen(self, accept: Callable[[], ConnectionHandler]) -> str:
        """Start to accept; the address that peers can dial. Raises `ConfigError`."""
        _refuse_blind(asyncio.get_running_loop())
        if isinstance(self._listen, Path):
            sock, path = await bind_path(self._listen, BACKLOG)
            own(sock)
            here = f"{PREFIX}{path}"
            self._keep(sock, accept, here, remover(path))
            return here if self._advertise is None else parse_advertised(self._advertise, 0)
        span = self._listen
        try:
            family, where = await _look_up_own(span.host)
        except (OSError, UnicodeError) as error:
            # This includes `TimeoutError`.
            why = str(error) or f"it could not be looked up within {LOOK_UP_S:g} s"
            raise ConfigError(
                f"cannot listen at {span.host!r}: this host is not known here ({why}). Name an "
                "address of this machine, or 0.0.0.0 for all of them"
            ) from error
        self._refuse_strangers(span.host, str(where[0]))
        if self._closed:
            raise ConfigError(_CLOSED)
        sock = bind_port(span, family, where, BACKLOG)
        self._keep(sock, accept)
        return self._dialable(sock)

    def dial(self, address: str, handler: ConnectionHandler) -> None:
        """Connect to an address; `handler.opened` or `handler.closed` follows in a later turn."""
        if not self._closed:
            _Dial(self._shared, self._dials, address, handler).start()

    async def close(self) -> None:
        """Stop accepting and close every connection; this end's handlers are not called."""
        self._closed = True
        for listener in self._listeners:
            listener.close()
        self._listeners.clear()
        dials = list(self._dials)
        for dial in dials:
            dial.cancel()
        for connection in list(self._shared.connections):
            connection.abandon()
        looking = [dial.looking for dial in dials if dial.looking is not None]
        if looking:
            await asyncio.wait(looking)

    def _keep(
        self,
        sock: socket.socket,
        accept: Callable[[], ConnectionHandler],
        name: str = "",
        remove: Callable[[], None] | None = None,
    ) -> None:
        listener = _Listener(self._shared, sock, accept, name, remove)
        self._listeners.append(listener)
        if self._closed:
            listener.close()
            raise ConfigError(_CLOSED)

    def _refuse_strangers(self, name: str, host: str) -> None:
        """Raise `ConfigError` if other machines could connect and must not."""
        if self._only_here and not is_loopback(host):
            raise ConfigError(
                f"cannot listen at {name!r}: other machines could connect, and this process has "
                "neither a token nor certificates to tell who belongs to the cluster. Give all "
                "processes the same token= (or DOMICILE_TOKEN), or tls_cert, tls_key and tls_ca; "
                "or listen at 127.0.0.1. Settings(insecure=True) trusts whoever can connect"
            )

    def _dialable(self, sock: socket.socket) -> str:
        host, port = sock.getsockname()[:2]
        if self._advertise is not None:
            return parse_advertised(self._advertise, port)
        return written(primary_host(sock.family) if host in ANYWHERE else host, port)


class _Listener:
    """A socket that accepts."""

    def __init__(
        self,
        shared: Shared,
        sock: socket.socket,
        accept: Callable[[], ConnectionHandler],
        name: str,
        remove: Callable[[], None] | None,
    ) -> None:
        self._shared = shared
        self._sock = sock
        self._accept = accept
        self._name = name
        self._remove = remove
        self._loop = asyncio.get_running_loop()
        self._pause: asyncio.TimerHandle | None = None
        self._watch()

    def close(self) -> None:
        """Stop accepting."""
        if self._pause is not None:
            self._pause.cancel()
        if not self._loop.is_closed():
            self._loop.remove_reader(self._sock.fileno())
        if self._remove is not None:
            self._remove()
        self._sock.close()

    def _watch(self) -> None:
        self._pause = None
        self._loop.add_reader(self._sock.fileno(), self._on_readable)

    def _on_readable(self) -> None:
        for _ in range(ACCEPT_AT_ONCE):
            if self._sock.fileno() < 0:
                return
            try:
                sock, where = self._sock.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as error:
                self._hold_back(error)
                return
            peer = written(*where[:2]) if where else "a peer that is gone"
            self._welcome(sock, self._name or peer)

    def _hold_back(self, error: OSError) -> None:
        """Pause accepting: without a free descriptor the listener would be ready again and
        again."""
        if error.errno in _EXHAUSTED:
            log.error("no connection can be accepted for now: %s", error)
            self._shared.meter.count("tcp.exhausted")
            self._loop.remove_reader(self._sock.fileno())
            self._pause = self._loop.call_later(ACCEPT_PAUSE_S, self._watch)
        else:
            log.warning("a connection could not be accepted: %s", error)

    def _welcome(self, sock: socket.socket, peer: str) -> None:
        try:
            prepare(sock)
            handler = self._accept()
        except OSError:
            sock.close()
        except Exception:
            log.exception("no handler could be made for the connection from %s", peer)
            sock.close()
        else:
            dial_tls(self._shared, sock, handler, peer, accepts=True)


class _Dial:
    """An attempt to connect: to each address of a host in turn, within one time limit."""

    def __init__(
        self,
        shared: Shared,
        dials: dict[_Dial, None],
        address: str,
        handler: ConnectionHandler,
    ) -> None:
        self.looking: asyncio.Task[None] | None = None
        self._shared = shared
        self._dials = dials
        self._address = address
        self._handler = handler
        self._loop = asyncio.get_running_loop()
        self._deadline = self._loop.time() + DIAL_TIMEOUT_S
        self._targets: list[Resolved] = []
        self._sock: socket.socket | None = None
        self._timer: asyncio.Handle | None = None
        self._over = False

    def start(self) -> None:
        """Begin; the handler is not called before a later turn."""
        self._dials[self] = None
        try:
            _refuse_blind(self._loop)
            if is_unix(self._address):
                path = str(path_of(self._address, "the address to dial"))
                self._targets = [(socket.AF_UNIX, path)]
                self._next("nothing to dial")
                return
            address = parse(self._address, "the address to dial")
        except ConfigError as error:
            self._fail_soon(str(error))
            return
        try:
            flags = socket.AI_NUMERICHOST | socket.AI_NUMERICSERV
            found = socket.getaddrinfo(*address[:2], type=socket.SOCK_STREAM, flags=flags)
        except (OSError, UnicodeError):
            self.looking = self._loop.create_task(self._look_up(address), name="domicile-dial")
        else:
            self._targets = [(family, where) for family, *_, where in found]
            self._next("nothing to dial")

    def cancel(self) -> None:
        """Give up without calling the handler."""
        self._finish()
        if self.looking is not None:
            self.looking.cancel()

    async def _look_up(self, address: Address) -> None:
        try:
            async with asyncio.timeout_at(self._deadline):
                found = await self._loop.getaddrinfo(*address[:2], type=socket.SOCK_STREAM)
        except TimeoutError:
            self._fail(f"looking up {address.host!r} took too long")
        except (OSError, UnicodeError) as error:
            self._fail(f"the host {address.host!r} is not known: {error}")
        else:
            self._targets = [(family, where) for family, *_, where in found]
            self._next("nothing to dial")

    def _next(self, reason: str) -> None:
        """Try the next address, or fail in a later turn for the last one's reason."""
        self._let_go()
        left_s = self._deadline - self._loop.time()
        if self._over:
            return
        if not self._targets or left_s <= 0:
            self._fail_soon(reason)
            return
        patience_s = left_s / len(self._targets)
        family, where = self._targets.pop(0)
        try:
            self._sock = sock = socket.socket(family, socket.SOCK_STREAM)
            prepare(sock)
            failure = sock.connect_ex(where)
        except (OSError, OverflowError) as error:
            self._let_go()
            self._timer = self._loop.call_soon(self._next, str(error))
            return
        # A Unix socket connects at once or fails now, if too many wait at its listener.
        begun = (0,) if isinstance(where, str) else (0, errno.EINPROGRESS, errno.EWOULDBLOCK)
        if failure in begun:
            self._timer = self._loop.call_later(patience_s, self._next, "timed out")
            self._loop.add_writer(sock.fileno(), self._on_writable)
        else:
            self._timer = self._loop.call_soon(self._next, os.strerror(failure))

    def _on_writable(self) -> None:
        sock = self._sock
        assert sock is not None, "nothing is watched without a socket"
        failure = sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if failure:
            self._next(os.strerror(failure))
        elif meets_itself(sock):
            self._next("nobody listens there")
        else:
            self._loop.remove_writer(sock.fileno())
            self._sock = None
            self._finish()
            dial_tls(self._shared, sock, self._handler, self._address, accepts=False)

    def _fail_soon(self, reason: str) -> None:
        self._let_go()
        self._timer = self._loop.call_soon(self._fail, reason)

    def _fail(self, reason: str) -> None:
        if self._over:
            return
        self._finish()
        try:
            self._handler.closed(f"cannot connect to {self._address}: {reason}")
        except Exception:
            log.exception("a handler failed to hear that %s was not reached", self._address)

    def _let_go(self) -> None:
        """Close the socket of the current attempt, if any."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._sock is not None:
            if not self._loop.is_closed():
                self._loop.remove_writer(self._sock.fileno())
            self._sock.close()
            self._sock = None

    def _finish(self) -> None:
        self._over = True
        self._let_go()
        self._dials.pop(self, None)


async def _look_up_own(host: str) -> Resolved:
    """The first address of a host to listen at; raises `OSError` or `UnicodeError`."""
    if is_numeric(host):
        # Not in the loop's threads, which the program may keep busy while its node rejoins.
        flags = socket.AI_NUMERICHOST
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM, flags=flags)
    else:
        async with asyncio.timeout(LOOK_UP_S):
            loop = asyncio.get_running_loop()
            found = await loop.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    family, *_, where = found[0]
    return family, where


def _running() -> asyncio.AbstractEventLoop | None:
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        return None


def _refuse_blind(loop: asyncio.AbstractEventLoop | None) -> None:
    """Raise `ConfigError` for an event loop that cannot watch sockets, such as the default one of
    Windows."""
    if loop is not None and type(loop).add_reader is asyncio.AbstractEventLoop.add_reader:
        raise ConfigError(
            f"{type(loop).__name__} cannot watch sockets, which TCP connections need: run on "
            "another loop, as in asyncio.Runner(loop_factory=asyncio.SelectorEventLoop)"
        )


_KEEPALIVE = {"TCP_KEEPIDLE": 10, "TCP_KEEPALIVE": 10, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 3}
"""Seconds of silence (twice, because macOS has its own name for it), seconds between two probes,
and the number of probes."""

_owned: weakref.WeakSet[socket.socket] = weakref.WeakSet()


def own(sock: socket.socket) -> None:
    """Have a socket closed in forked children."""
    _owned.add(sock)


def _close_in_child() -> None:
    # A forked child would keep the port and the connections open after this process has closed
    # them. The kernel would also go on sending what `_withhold` means to drop (L3).
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
    """Make a socket non-blocking and without delay, and have it notice a peer that disappears."""
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
    """Whether a dial to a port without a listener was given that same port as its own."""
    try:
        return bool(sock.getsockname() == sock.getpeername())
    except OSError:
        return False
