"""The port below the client: one HTTP request, and its answer as a stream of bytes.

Two things implement it: `http_exchange` over a connection, `domicile.testing.kube` in memory. It
knows nothing of Kubernetes, retries nothing, and never interprets a status.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from typing import Protocol


@dataclass(frozen=True, slots=True)
class ApiRequest:
    """One request."""

    method: str
    path: str
    query: Mapping[str, str] = field(default_factory=dict[str, str])
    headers: Mapping[str, str] = field(default_factory=dict[str, str])
    body: bytes = b""
    before_sending: Callable[[], None] | None = None
    """Called directly before the first byte is sent, after a token and a connection have been
    waited for. What it raises, `open` raises, and nothing is sent. By it a client knows whether a
    request may have run: an exchange that wraps another one must keep it."""

    @property
    def writes(self) -> bool:
        """Whether it may change something."""
        return self.method != "GET"


class ApiAnswer(Protocol):
    """The answer, whose body is still to be read."""

    status: int
    headers: Mapping[str, str]

    def chunks(self) -> AsyncIterator[bytes]:
        """The body, in the pieces that arrive. Raises `BrokenExchange` if it breaks off."""
        ...


class BrokenExchange(Exception):
    """The connection failed. `sent` says whether the request may have reached the server."""

    def __init__(self, message: str, *, sent: bool) -> None:
        super().__init__(message)
        self.sent = sent


class ApiExchange(Protocol):
    """Sends requests."""

    server: str
    """The address, for messages."""

    def open(self, request: ApiRequest) -> AbstractAsyncContextManager[ApiAnswer]:
        """Send a request; the answer is read inside the block. Raises `BrokenExchange`."""
        ...

    async def close(self) -> None:
        """Close all connections."""
        ...
