"""The exchange over HTTP/1.1 and TLS: a pool of connections. h11 knows the protocol, asyncio
carries the bytes.

A connection has one request at a time, and is kept for the next one. It costs a fifth of the
processor time of a general client of HTTP, and a sharder does little else. Nothing imports this
module before a connection is wanted, because h11 comes with the extra `domicile[kubernetes]`. It
adds the token to each request and must never log one.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import select
import socket
import ssl
import tempfile
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping
from pathlib import Path
from typing import cast
from urllib.parse import quote, urlencode, urlsplit

from domicile.errors import ConfigError
from domicile.kubeapi.client import KubeClient
from domicile.kubeapi.credentials import Credentials, find_credentials
from domicile.kubeapi.exchange import ApiAnswer, ApiRequest, BrokenExchange

try:
    import h11
except ImportError as missing:
    raise ConfigError(
        "talking to Kubernetes needs more packages: pip install 'domicile[kubernetes]'"
    ) from missing

CONNECT_S = 5.0
MAX_CONNECTIONS = 100

KEEP_S = 5.0
"""A connection that was idle for longer is not used again: its peer may have died silently."""

CLOSE_S = 1.0

MAX_HEAD_BYTES = 64 << 10
"""I6: the head of an answer."""

MAX_WAITING_BYTES = 256 << 10
"""I6: bytes of an answer that have arrived and were not read; then the server has to wait."""

PATH_SIGNS = "/:@!$&'()*+,;=~?%"
"""What a path and its query may have beside letters, digits and `-._`."""


class HttpExchange:
    """Implements `domicile.kubeapi.exchange.ApiExchange` over a pool of connections."""

    def __init__(self, credentials: Credentials) -> None:
        self._credentials = credentials
        self.server = credentials.server
        self._tls: ssl.SSLContext | None = None
        self._shown = b""
        if credentials.server.startswith("https://"):
            self._tls = tls_context(credentials)
            self._shown, _ = credentials.pair()
        where = urlsplit(credentials.server)
        try:
            self._host, port = where.hostname or "", where.port
            self._host.encode("idna")  # as when it is looked up
        except ValueError as error:
            raise ConfigError(f"{credentials.server} is no address: {error}") from error
        self._port = port or (80 if self._tls is None else 443)
        self._below = where.path.rstrip("/")
        """What precedes each path: a proxy may serve several clusters."""
        self._head = [
            ("Host", where.netloc.rpartition("@")[2]),
            ("User-Agent", "domicile"),
        ]
        self._places = asyncio.Semaphore(MAX_CONNECTIONS)
        self._idle: deque[_Connection] = deque()
        self._open: dict[_Connection, None] = {}
        self._closed = False

    @contextlib.asynccontextmanager
    async def open(self, request: ApiRequest) -> AsyncGenerator[ApiAnswer, None]:
        """As `ApiExchange.open`."""
        token = await self._token()
        async with self._places:
            connection = await self._connected()
            try:
                if request.before_sending is not None:
                    request.before_sending()
                connection.send(self._as_http(request, token), request.body)
                answer = await connection.answer()
                if answer.status == 401 and self._credentials.plugin is not None:
                    self._credentials.plugin.forget()
                yield answer
            finally:
                self._give_back(connection)

    def _as_http(self, request: ApiRequest, token: str) -> h11.Request:
        headers = {"Accept": "application/json", **request.headers}
        if token:
            headers["Authorization"] = f"Bearer {token}"
        if request.writes:
            headers["Content-Length"] = str(len(request.body))
        target = quote(self._below + request.path, PATH_SIGNS)
        if request.query:
            target += "?" + urlencode(request.query, quote_via=quote)
        try:
            return h11.Request(
                method=request.method, target=target, headers=[*self._head, *headers.items()]
            )
        except h11.LocalProtocolError:
            # What it says may be the token itself.
            raise ConfigError(
                f"{request.method} {request.path} can't be sent to {self.server}: no header may "
                "have a line break or a control character; look at the token"
            ) from None

    # Connections.

    async def _connected(self) -> _Connection:
        """A connection that is there, else a new one."""
        self._check_open()
        loop = asyncio.get_running_loop()
        while self._idle:
            connection = self._idle.pop()
            if loop.time() - connection.used_at < KEEP_S and connection.silent:
                return connection
            connection.abort()
        shown = self._shown
        try:
            async with asyncio.timeout(CONNECT_S):
                made = await self._dialled(loop)
        except OSError as error:
            why = str(error) or f"none within {CONNECT_S:.0f} s"
            raise BrokenExchange(f"no connection: {why}", sent=False) from error
        self._open[made], made.shown = None, shown
        try:
            self._check_open()
        except RuntimeError:
            made.abort()
            raise
        return made

    def _check_open(self) -> None:
        if self._closed:
            raise RuntimeError(f"the exchange with {self.server} was closed")

    async def _dialled(self, loop: asyncio.AbstractEventLoop) -> _Connection:
        """A name may stand for several addresses: each gets its part of the time that is left."""
        addresses = await self._addresses(loop)
        ends, failed = loop.time() + CONNECT_S, OSError(f"{self._host} has no address")
        name = None if self._tls is None else self._credentials.server_name or self._host
        for left, address in zip(range(len(addresses), 0, -1), addresses, strict=True):
            try:
                async with asyncio.timeout((ends - loop.time()) / left):
                    _, made = await loop.create_connection(
                        lambda: _Connection(self._lost),
                        address,
                        self._port,
                        ssl=self._tls,
                        server_hostname=name,
                    )
                    return made
            except OSError as error:
                failed = error
        raise failed

    async def _addresses(self, loop: asyncio.AbstractEventLoop) -> list[str]:
        found = await loop.getaddrinfo(self._host, self._port, type=socket.SOCK_STREAM)
        return list(dict.fromkeys(str(one[4][0]) for one in found))

    def _give_back(self, connection: _Connection) -> None:
        now = asyncio.get_running_loop().time()
        while self._idle and now - self._idle[0].used_at >= KEEP_S:
            self._idle.popleft().abort()
        if connection.ready_again() and connection.shown == self._shown:
            connection.used_at = now
            self._idle.append(connection)
        else:
            connection.abort()

    def _lost(self, connection: _Connection) -> None:
        self._open.pop(connection, None)
        with contextlib.suppress(ValueError):
            self._idle.remove(connection)

    def _drop_idle(self) -> None:
        while self._idle:
            self._idle.pop().abort()

    async def _token(self) -> str:
        credentials = self._credentials
        if credentials.plugin is None:
            return credentials.bearer()
        try:
            token, certificate, key = await credentials.shown_now()
        except ConfigError as error:
            # It worked before, and may work again: a later attempt asks once more.
            raise BrokenExchange(str(error), sent=False) from error
        if self._tls is not None and certificate != self._shown:
            # New connections show the new one; those that are in use end after their answer.
            try:
                load_pair(self._tls, certificate, key)
            except (ssl.SSLError, ValueError) as error:
                credentials.plugin.forget()
                said = f"the certificate for {self.server} can't be used: {error}"
                raise BrokenExchange(said, sent=False) from error
            self._shown = certificate
            self._drop_idle()
        return token

    async def close(self) -> None:
        """Close all connections."""
        self._closed = True
        ends = [connection.abort() for connection in self._open]
        if ends:
            await asyncio.wait(ends, timeout=CLOSE_S)


class _Connection(asyncio.Protocol):
    """One connection, with one request at a time."""

    def __init__(self, lost: Callable[[_Connection], None]) -> None:
        loop = asyncio.get_running_loop()
        self._http = h11.Connection(h11.CLIENT, max_incomplete_event_size=MAX_HEAD_BYTES)
        self._transport: asyncio.Transport | None = None
        self._lost = lost
        self._ended: asyncio.Future[None] = loop.create_future()
        self._why = "the server closed the connection"
        self._arrived: deque[bytes] = deque()
        self._waiting_bytes = 0
        self._paused = False
        self._news: asyncio.Future[None] | None = None
        self.used_at = loop.time()
        """When its last request ended."""
        self.shown = b""
        """The certificate that it showed."""

    # What the loop calls.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)  # uvloop's is no such class

    def data_received(self, data: bytes) -> None:
        if self._http.our_state is h11.IDLE:
            self.abort()  # an answer to no request: it would be taken for that to the next one
            return
        self._arrived.append(data)
        self._waiting_bytes += len(data)
        if self._waiting_bytes > MAX_WAITING_BYTES and not self._paused:
            assert self._transport is not None
            self._transport.pause_reading()
            self._paused = True
        self._wake()

    def connection_lost(self, exc: Exception | None) -> None:
        if exc is not None:
            self._why = f"{type(exc).__name__}: {exc}"
        if not self._ended.done():
            self._ended.set_result(None)
        self._wake()
        self._lost(self)

    def _wake(self) -> None:
        if self._news is not None and not self._news.done():
            self._news.set_result(None)

    # What an exchange calls.

    @property
    def silent(self) -> bool:
        """Whether it can take a request: it is open, and nothing has arrived on it since its last
        one, not even what the loop has not seen yet. That would be its end, or no answer to us."""
        transport = self._transport
        if transport is None or transport.is_closing():
            return False
        return not _readable(transport.get_extra_info("socket").fileno())

    def send(self, head: h11.Request, body: bytes) -> None:
        """Send a request. Nothing is waited for."""
        assert self._transport is not None
        parts = [self._http.send(head)]
        if body:
            parts.append(self._http.send(h11.Data(body)))
        parts.append(self._http.send(h11.EndOfMessage()))
        self._transport.write(b"".join(part for part in parts if part))

    async def answer(self) -> ApiAnswer:
        """The head of the answer."""
        while not isinstance(event := await self.event(), h11.Response):
            pass  # 1xx: the answer follows
        return _HttpAnswer(self, event)

    async def event(self) -> h11.Event:
        """The next part of the answer. Raises `BrokenExchange`."""
        while True:
            try:
                event = self._http.next_event()
                if isinstance(event, h11.Event):
                    return event
                self._http.receive_data(await self._piece())
            except h11.RemoteProtocolError as error:
                why = self._why if self._ended.done() else f"no HTTP: {error}"
                raise BrokenExchange(why, sent=True) from error

    async def _piece(self) -> bytes:
        """What has arrived next; nothing if the connection has ended."""
        while not self._arrived and not self._ended.done():
            self._news = asyncio.get_running_loop().create_future()
            if self._paused:
                assert self._transport is not None
                self._paused = False
                self._transport.resume_reading()
            await self._news
        if not self._arrived:
            return b""
        piece = self._arrived.popleft()
        self._waiting_bytes -= len(piece)
        return piece

    def ready_again(self) -> bool:
        """Whether the last exchange is over, to the end of its answer. A rest that has arrived is
        dropped."""
        http = self._http
        with contextlib.suppress(h11.RemoteProtocolError):
            while http.their_state is h11.SEND_BODY:
                event = http.next_event()
                if not isinstance(event, h11.Event):
                    if not self._arrived:
                        return False
                    http.receive_data(self._arrived.popleft())
        clean = not (self._ended.done() or self._arrived or http.trailing_data[0] or self._paused)
        if http.our_state is h11.DONE and http.their_state is h11.DONE and clean:
            http.start_next_cycle()
            self._waiting_bytes = 0
        return clean and http.our_state is h11.IDLE

    def abort(self) -> asyncio.Future[None]:
        """End it at once; what is returned is done when it has ended."""
        if self._transport is not None:
            self._transport.abort()
        return self._ended


def _readable(number: int) -> bool:
    if not hasattr(select, "poll"):
        return bool(select.select([number], [], [], 0)[0])
    poll = select.poll()
    poll.register(number, select.POLLIN)
    return bool(poll.poll(0))


class _HttpAnswer:
    def __init__(self, connection: _Connection, head: h11.Response) -> None:
        self._connection = connection
        self.status = head.status_code
        self.headers: Mapping[str, str] = {
            name.decode("latin-1"): value.decode("latin-1") for name, value in head.headers
        }

    async def chunks(self) -> AsyncIterator[bytes]:
        while isinstance(event := await self._connection.event(), h11.Data):
            yield bytes(event.data)


def tls_context(credentials: Credentials) -> ssl.SSLContext:
    """What trusts the server's authority and shows our certificate."""
    try:
        authority = credentials.ca.decode("ascii") if credentials.ca else None
        context = ssl.create_default_context(cadata=authority)
        if credentials.insecure:
            context.check_hostname = False
            context.verify_mode = ssl.CERT_NONE
        certificate, key = credentials.pair()
        if certificate:
            load_pair(context, certificate, key)
    except (ssl.SSLError, ValueError) as error:
        raise ConfigError(
            f"the certificates for {credentials.server} can't be used: {error}"
        ) from error
    return context


def load_pair(context: ssl.SSLContext, certificate: bytes, key: bytes) -> None:
    """Show a certificate. OpenSSL reads certificates of our own from files only."""
    with tempfile.TemporaryDirectory(prefix="domicile-") as folder:
        pair = Path(folder) / "pair.pem"
        opened = os.open(pair, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(opened, "wb") as file:
            file.write(certificate + b"\n" + key)
        context.load_cert_chain(pair)


def connect_to_kubernetes(
    kubeconfig: str | None = None, context: str | None = None, *, timeout_s: float = 10.0
) -> tuple[KubeClient, Credentials]:
    """A client for the server that `find_credentials` finds, and those credentials."""
    found = find_credentials(kubeconfig, context)
    return KubeClient(HttpExchange(found), timeout_s=timeout_s, account=found.account), found
