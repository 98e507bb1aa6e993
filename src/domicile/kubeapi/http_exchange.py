"""The exchange over HTTP/1.1 and TLS, by httpx2, which comes with the extra `domicile[kubernetes]`.

Nothing else imports httpx2, and nothing imports this module before a connection is wanted. It adds
the token to each request and must never log one.
"""

from __future__ import annotations

import contextlib
import os
import ssl
import tempfile
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any

from domicile.errors import ConfigError
from domicile.kubeapi.client import KubeClient
from domicile.kubeapi.credentials import Credentials, find_credentials
from domicile.kubeapi.exchange import ApiAnswer, ApiRequest, BrokenExchange

try:
    import httpx2
except ImportError as missing:
    raise ConfigError(
        "talking to Kubernetes needs more packages: pip install 'domicile[kubernetes]'"
    ) from missing

CONNECT_S = 5.0
MAX_CONNECTIONS = 100


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
        self._client = httpx2.AsyncClient(
            base_url=credentials.server,
            verify=self._tls if self._tls is not None else False,
            trust_env=False,
            # Deadlines are the caller's: a watch is silent for minutes.
            timeout=httpx2.Timeout(None, connect=CONNECT_S),
            limits=httpx2.Limits(
                max_connections=MAX_CONNECTIONS, max_keepalive_connections=MAX_CONNECTIONS
            ),
        )

    @contextlib.asynccontextmanager
    async def open(self, request: ApiRequest) -> AsyncGenerator[ApiAnswer, None]:
        """As `ApiExchange.open`."""
        headers = {"Accept": "application/json", "User-Agent": "domicile", **request.headers}
        token = await self._token()
        if token:
            headers["Authorization"] = f"Bearer {token}"
        extensions: dict[str, Any] = {}
        if self._credentials.server_name:
            extensions["sni_hostname"] = self._credentials.server_name
        if request.before_sending is not None:
            extensions["trace"] = _before_sending(request.before_sending)
        try:
            async with self._client.stream(
                request.method,
                request.path,
                params=dict(request.query),
                headers=headers,
                content=request.body,
                extensions=extensions,
            ) as response:
                if response.status_code == 401 and self._credentials.plugin is not None:
                    self._credentials.plugin.forget()
                yield _HttpAnswer(response)
        except (httpx2.ConnectError, httpx2.ConnectTimeout, httpx2.PoolTimeout) as error:
            raise BrokenExchange(f"no connection: {error}", sent=False) from error
        except httpx2.TransportError as error:
            raise BrokenExchange(f"{type(error).__name__}: {error}", sent=True) from error

    async def _token(self) -> str:
        credentials = self._credentials
        if credentials.plugin is None:
            return credentials.bearer()
        try:
            token = await credentials.bearer_now()
        except ConfigError as error:
            # It worked before, and may work again: a later attempt asks once more.
            raise BrokenExchange(str(error), sent=False) from error
        certificate, key = credentials.pair()
        if self._tls is not None and certificate != self._shown:
            # New connections show the new one.
            load_pair(self._tls, certificate, key)
            self._shown = certificate
        return token

    async def close(self) -> None:
        """Close all connections."""
        await self._client.aclose()


def _before_sending(
    call: Callable[[], None],
) -> Callable[[str, Mapping[str, Any]], Awaitable[None]]:
    async def trace(event: str, _: Mapping[str, Any]) -> None:
        if event.endswith("send_request_headers.started"):
            call()

    return trace


class _HttpAnswer:
    def __init__(self, response: httpx2.Response) -> None:
        self._response = response
        self.status = response.status_code
        self.headers: Mapping[str, str] = response.headers

    async def chunks(self) -> AsyncIterator[bytes]:
        try:
            async for piece in self._response.aiter_bytes():
                yield piece
        except httpx2.TransportError as error:
            raise BrokenExchange(f"{type(error).__name__}: {error}", sent=True) from error


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
