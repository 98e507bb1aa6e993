"""One Valkey or Redis server as its driver and its gate reach it: URL, connections, calls.

Errors of the client library become those that the ports know. Nothing here decides.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, cast
from urllib.parse import unquote, urlsplit

import msgspec

from domicile.errors import ConfigError

try:
    from redis.asyncio import Redis
    from redis.asyncio.retry import Retry
    from redis.backoff import NoBackoff
    from redis.exceptions import AuthenticationError, RedisError
    from redis.exceptions import ConnectionError as ConnectionLost
except ImportError as error:
    raise ConfigError(
        "a Valkey or Redis server needs the client library: pip install 'domicile[redis]'"
    ) from error

DEAD_ADDRESS = ("127.0.0.1", "1")
"""Nobody listens there. A replica of it refuses writes and keeps what it has (F3)."""

FOR_EVER_MS = 10**12
"""Thirty years: a pause ends when the gate opens or with the process."""

ANSWER_S = 1.0
"""A server that does not answer within this time counts as down."""

OPENED_FILE = "opened.json"


class PasswordRefused(ConnectionError):
    """A server does not take the user or the password of its URL."""


class OpenedNote(msgspec.Struct, frozen=True):
    """Which run of the server the gate opened last, and for which epoch.

    The gate writes it, the driver reads it: they are in different processes, and the server has no
    place for it. A server that refuses writes is closed, whatever the note says.
    """

    run: str
    epoch: int


def read_opened(folder: Path) -> OpenedNote | None:
    """The note, if there is one."""
    try:
        return msgspec.json.decode((folder / OPENED_FILE).read_bytes(), type=OpenedNote)
    except (FileNotFoundError, msgspec.MsgspecError):
        return None


def write_opened(folder: Path, note: OpenedNote) -> None:
    """Replace the note. It need not survive the machine: no run of the server does."""
    _replace(folder / OPENED_FILE, msgspec.json.encode(note))


SELF_SYNCS_FILE = "self-syncs.json"


class SelfSyncs(msgspec.Struct, frozen=True):
    """How often the driver itself was a follower in one run of the server, to read what it has.

    The server counts these among those of its followers.
    """

    run: str = ""
    full: int = 0
    partial: int = 0
    refused: int = 0


def read_self_syncs(folder: Path) -> SelfSyncs:
    """The note; an empty one if there is none."""
    try:
        return msgspec.json.decode((folder / SELF_SYNCS_FILE).read_bytes(), type=SelfSyncs)
    except (FileNotFoundError, msgspec.MsgspecError):
        return SelfSyncs()


def write_self_syncs(folder: Path, note: SelfSyncs) -> None:
    """Replace the note. It need not survive the machine: no run of the server does."""
    _replace(folder / SELF_SYNCS_FILE, msgspec.json.encode(note))


def _replace(file: Path, content: bytes) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    new = file.with_name(f"{file.name}.new")
    new.write_bytes(content)
    new.replace(file)


class ValkeyServer:
    """One server, by its URL: `redis://user:password@host:port`."""

    def __init__(self, url: str, answer_s: float = ANSWER_S) -> None:
        parts = urlsplit(url)
        if parts.scheme not in ("redis", "valkey") or not parts.hostname:
            raise ConfigError(
                "the server's URL must look like redis://host:port; TLS is not supported here yet"
            )
        self.host, self.port = parts.hostname, parts.port or 6379
        self.user = unquote(parts.username or "")
        self.password = unquote(parts.password or "")
        self.answer_s = answer_s
        self._client = self.connect(self.host, self.port)

    def connect(self, host: str, port: int) -> Redis:
        """A client of this server, or of another one that takes the same password."""
        return Redis(
            host=host, port=port, username=self.user or None, password=self.password or None,
            socket_timeout=self.answer_s, socket_connect_timeout=self.answer_s,
            # Whoever closes the server ends all sessions, also idle ones of ours: once again then.
            retry=Retry(NoBackoff(), 1, supported_errors=(ConnectionLost,)),
            single_connection_client=False,
        )  # fmt: skip

    @asynccontextmanager
    async def answered(self) -> AsyncGenerator[None, None]:
        """Errors of the client library become those that the port knows."""
        try:
            async with asyncio.timeout(2 * self.answer_s):
                yield
        except AuthenticationError as error:
            given = "the password" if self.password else "no password: there is no password_file"
            raise PasswordRefused(
                f"the server at {self.host}:{self.port} refuses the user "
                f"{self.user or 'default'!r} with {given} ({error})"
            ) from error
        except RedisError as error:
            raise ConnectionError(f"{self.host}:{self.port}: {error}") from error

    async def ask(self, *words: Any) -> Any:
        """One command."""
        async with self.answered():
            client: Any = self._client  # its methods have no types
            return await client.execute_command(*words)

    async def together(self, *commands: tuple[Any, ...]) -> None:
        """Some commands in one transaction."""
        client: Any = self._client
        async with client.pipeline(transaction=True) as pipeline, self.answered():
            for command in commands:
                pipeline.execute_command(*command)
            await pipeline.execute()

    async def info(self, client: Redis | None = None) -> Mapping[str, Any]:
        """All that the server tells about itself."""
        async with self.answered():
            asked: Any = client or self._client
            return cast("Mapping[str, Any]", await asked.info("everything"))

    async def open_stream(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """A connection without a client library; the caller closes it."""
        async with asyncio.timeout(self.answer_s):
            reader, writer = await asyncio.open_connection(self.host, self.port)
            if self.password:
                try:
                    secret = [self.user, self.password] if self.user else [self.password]
                    writer.write(encode_command("AUTH", *secret))
                    if not (await reader.readline()).startswith(b"+"):
                        raise ConnectionError("the server refused the password")
                except BaseException:
                    writer.close()
                    raise
        return reader, writer

    async def close(self) -> None:
        """Let go of connections."""
        await self._client.aclose()


def encode_command(*words: str | bytes) -> bytes:
    """A command as it is sent."""
    parts = [word.encode() if isinstance(word, str) else word for word in words]
    body = b"".join(b"$%d\r\n%s\r\n" % (len(part), part) for part in parts)
    return b"*%d\r\n%s" % (len(parts), body)
