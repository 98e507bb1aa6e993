"""Connections to a Redis or Valkey server, what that server must be, and what its errors mean.

`RedisServer` belongs to one event loop. It runs scripts and waits for the change log. The first
call after each lost connection looks at the server's settings: a server that can't keep the store
is refused, one that may lose acknowledged commits is named loudly. Nothing here knows the
operations of a store.
"""

from __future__ import annotations

import asyncio
import logging
import ssl
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, unquote, urlsplit

from redis.asyncio.connection import (
    BlockingConnectionPool,
    Connection,
    SSLConnection,
    UnixDomainSocketConnection,
)
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.credentials import CredentialProvider
from redis.exceptions import (
    AuthenticationError,
    BusyLoadingError,
    InvalidResponse,
    MovedError,
    NoPermissionError,
    NoScriptError,
    ReadOnlyError,
    RedisError,
    ResponseError,
)

from domicile.errors import ConfigError, StoreUnavailable
from domicile.stores.redis.calls import PARTS, CallUnknown, Script

log = logging.getLogger("domicile")

CONNECTIONS = 8
"""I6: connections for calls; further calls wait for one of them."""

PORT = 6379
PREFIX = "domicile"
OLDEST = (7, 0)
"""The oldest Redis whose scripts can say that they write; Valkey begins after it."""

_OPTIONS = ("prefix", "db", "ca", "cert", "key", "password_file")


@dataclass(frozen=True, slots=True)
class RedisAddress:
    """Where a store is: a server, a database of it, and the prefix of the keys."""

    shown: str
    host: str = ""
    port: int = PORT
    path: str = ""
    """A Unix socket; then host and port do not count."""
    db: int = 0
    user: str | None = field(default=None, repr=False)
    password: str | None = field(default=None, repr=False)
    password_file: str = ""
    """A file with the password, read for each new connection."""
    tls: bool = False
    ca: str | None = None
    cert: str | None = None
    key: str | None = None
    prefix: str = PREFIX

    @classmethod
    def parse(cls, url: str, shown: str) -> RedisAddress:
        """A URL's parts; `ConfigError` with the correct form if it has none."""
        try:
            parts = urlsplit(url)
            port = parts.port
        except ValueError as error:
            raise ConfigError(f"{shown!r} can't be read ({error}); {_FORM}") from error
        options = dict(parse_qsl(parts.query, keep_blank_values=True))
        unknown = [name for name in options if name not in _OPTIONS]
        if unknown:
            raise ConfigError(
                f"{shown!r} has the unknown option {unknown[0]!r}; known are {', '.join(_OPTIONS)}"
            )
        path = "" if parts.hostname else unquote(parts.path)
        db = options.get("db", "" if path else parts.path.strip("/")) or "0"
        if not db.isdecimal() or not (parts.hostname or len(path) > 1):
            raise ConfigError(f"{shown!r} names no server; {_FORM}")
        prefix = options.get("prefix", PREFIX)
        if not prefix or "{" in prefix or "}" in prefix or not prefix.isprintable():
            raise ConfigError(
                f"{shown!r} has prefix={prefix!r}; write printable characters without braces"
            )
        password_file = options.get("password_file", "")
        if password_file and parts.password:
            raise ConfigError(f"{shown!r} has a password and a password_file; give it one of them")
        return cls(
            shown=shown, host=parts.hostname or "", port=port or PORT, path=path, db=int(db),
            user=unquote(parts.username) if parts.username else None,
            password=unquote(parts.password) if parts.password else None,
            password_file=password_file,
            tls=parts.scheme == "rediss", ca=options.get("ca"), cert=options.get("cert"),
            key=options.get("key"), prefix=prefix,
        )  # fmt: skip

    @property
    def keys(self) -> tuple[str, ...]:
        """The names of the store's keys. The braces put all of them into one slot."""
        return tuple(f"{{{self.prefix}}}:{part}" for part in PARTS)


_FORM = (
    "write redis://host:6379/0, rediss://user:password@host:6379/0 for TLS, or "
    "redis:///run/valkey/valkey.sock for a Unix socket"
)


@dataclass(frozen=True, slots=True)
class RedisFacts:
    """What a server says about itself; None where this user may not ask."""

    info: Mapping[str, str]
    appendfsync: str | None

    def number(self, name: str) -> int:
        """A whole number of INFO; 0 if the server does not report it."""
        value = self.info.get(name, "0")
        return int(value) if value.isdecimal() else 0

    @property
    def version(self) -> str:
        """Kind and version of the server."""
        valkey = self.info.get("valkey_version")
        return f"Valkey {valkey}" if valkey else f"Redis {self.info.get('redis_version', '?')}"

    @property
    def appends(self) -> bool | None:
        """Whether the server keeps an append-only file."""
        return None if "aof_enabled" not in self.info else self.info["aof_enabled"] == "1"

    @property
    def evicts(self) -> bool:
        """Whether the server may remove keys of the store when its memory is full."""
        policy = self.info.get("maxmemory_policy", "noeviction")
        return policy.startswith("allkeys") and self.number("maxmemory") > 0

    def losses(self) -> list[tuple[str, str]]:
        """What can be lost on this server although it was acknowledged, and the next step."""
        if self.appends is None or (self.appends and self.appendfsync is None):
            return [
                (
                    "this user may not read whether it keeps what it acknowledged",
                    "see that `appendonly yes` and `appendfsync always` are set there",
                )
            ]
        if not self.appends:
            return [
                (
                    "it keeps no append-only file: a restart loses every commit since the last "
                    "snapshot",
                    "set `appendonly yes` and `appendfsync always`",
                )
            ]
        if self.appendfsync != "always":
            return [
                (
                    f"it has `appendfsync {self.appendfsync}`: a crash of its machine loses the "
                    "acknowledged commits of the last seconds",
                    "set `appendfsync always`",
                )
            ]
        return []


class _ConnectionLost(Exception):
    """The connection broke after a call was sent."""


class _Call:
    """How far a call came."""

    __slots__ = ("sent",)

    def __init__(self) -> None:
        self.sent = False


class RedisServer:
    """The connections of one client on one event loop. With `tells` it logs what can be lost."""

    def __init__(self, address: RedisAddress, op_timeout_s: float, *, tells: bool = True) -> None:
        self._tells = tells
        self.opened = False
        """Whether the server was ever in order: then a fault of it may be temporary."""
        self.facts: RedisFacts | None = None
        self._address = address
        self._op_timeout_s = op_timeout_s
        self._pool: Any = None
        self._turns = asyncio.Semaphore(CONNECTIONS)
        self._checked = False
        self._check = asyncio.Lock()
        self._readers: dict[Any, asyncio.StreamReader | None] = {}
        """What each connection of the pool last read from."""
        self._told: list[str] = []
        self._closed = False

    @property
    def shown(self) -> str:
        """The server for people, without a password."""
        return self._address.shown

    async def run(self, script: Script, arguments: Sequence[Any], *, again: bool) -> Any:
        """One run of a script. `StoreUnavailable`: it did not run. `CallUnknown`: perhaps.

        `again`: it may run twice, so a lost connection is replaced once.
        """
        call = _Call()
        try:
            async with asyncio.timeout(self._op_timeout_s):
                try:
                    return await self._run(call, script, arguments)
                except _ConnectionLost:
                    if not again:
                        raise
                    return await self._run(call, script, arguments)
        except _ConnectionLost as error:
            raise CallUnknown(str(error)) from error
        except TimeoutError as error:
            said = self._explain(error)
            raise (CallUnknown(str(said)) if call.sent else said) from error

    async def _run(self, call: _Call, script: Script, arguments: Sequence[Any]) -> Any:
        try:
            found = await self._do(call, script.run, script.sha, *arguments)
        except NoScriptError:
            # It did not run: the server was restarted, or sees this version's script first.
            found = await self._do(call, script.bring, script.text, *arguments)
        self.opened = True
        return found

    async def look(self) -> RedisFacts:
        """Ask the server about itself now."""
        try:
            async with asyncio.timeout(self._op_timeout_s), self._connection() as connection:
                return await _facts(connection)
        except (RedisError, OSError, TimeoutError) as error:
            raise self._explain(error) from error

    @asynccontextmanager
    async def listen(self) -> AsyncGenerator[Any, None]:
        """A connection of its own, for commands that wait."""
        connection = self._connections().make_connection()
        try:
            async with asyncio.timeout(self._op_timeout_s):
                await connection.connect()
            yield connection
        except (RedisError, OSError, TimeoutError) as error:
            if not _answered(error):
                await self._drop_idle()
            raise self._explain(error) from error
        finally:
            await connection.disconnect(nowait=True)

    async def close(self) -> None:
        """Close all connections. Calls under way end with an error."""
        self._closed = True
        if self._pool is not None:
            with suppress(RedisError, OSError, TimeoutError):
                await self._pool.disconnect(inuse_connections=True)

    async def _do(self, call: _Call, *command: Any) -> Any:
        try:
            async with self._connection() as connection:
                if not self._checked:
                    await self._check_server(connection)
                call.sent = True
                await connection.send_command(*command, check_health=False)
                return await connection.read_response()
        except NoScriptError:
            raise
        except (RedisError, OSError) as error:
            if _inside(error):
                raise CallUnknown(str(self._explain(error))) from error
            if _answered(error):
                raise self._explain(error) from error
            await self._drop_idle()
            if call.sent:
                raise _ConnectionLost(str(self._explain(error))) from error
            raise self._explain(error) from error

    async def _drop_idle(self) -> None:
        """The connection of one call is lost: probably the server was restarted or replaced."""
        self._checked = False
        if self._pool is not None:
            with suppress(RedisError, OSError):
                await self._pool.disconnect(inuse_connections=False)

    @asynccontextmanager
    async def _connection(self) -> AsyncGenerator[Any, None]:
        pool = self._connections()
        # In the order of the calls: of its own the pool lets a new call pass those that wait.
        async with self._turns:
            connection = await pool.get_connection()
            try:
                if _ended(connection):
                    await connection.disconnect(nowait=True)
                    await connection.connect()
                reader = _reader(connection)
                if self._readers.setdefault(connection, reader) is not reader:
                    # The library has connected again; the server may be another one.
                    self._readers[connection], self._checked = reader, False
                if self._closed:
                    # While it connected; nothing would close it later.
                    raise self._closed_error()
                yield connection
            except BaseException as error:
                # An answer that nobody waits for must not be taken for the next call's.
                if not (isinstance(error, Exception) and _answered(error)):
                    await connection.disconnect(nowait=True)
                raise
            finally:
                await pool.release(connection)

    def _closed_error(self) -> StoreUnavailable:
        return StoreUnavailable(f"the store {self.shown} is closed; make another one")

    def _connections(self) -> Any:
        if self._closed:
            raise self._closed_error()
        if self._pool is None:
            self._pool = _pool(self._address, self._op_timeout_s)
        return self._pool

    async def _check_server(self, connection: Any) -> None:
        async with self._check:
            if self._checked:
                return
            facts = await _facts(connection)
            self._refuse(facts)
            told = [f"{self.shown}: {loss}; {step}" for loss, step in facts.losses()]
            if facts.number("connected_slaves"):
                told.append(
                    f"{self.shown}: it has replicas; a failover to one loses acknowledged commits, "
                    "and processes notice that only afterwards"
                )
            if told != self._told and self._tells:
                for text in told:
                    log.warning("the store may lose what it acknowledged. %s", text)
                self._told = told
            if not self.opened and self._tells:
                log.info(
                    "the store %s is on %s: consistent on this one server, never across a failover",
                    self.shown,
                    facts.version,
                )
            self.facts, self._checked = facts, True

    def _refuse(self, facts: RedisFacts) -> None:
        kind = StoreUnavailable if self.opened else ConfigError
        version = facts.info.get("redis_version", "")
        numbers = tuple(int(part) for part in version.split(".")[:2] if part.isdecimal())
        if numbers and numbers < OLDEST:
            raise kind(
                f"the store {self.shown} is on Redis {version}; Domicile needs Redis 7.0 or Valkey"
            )
        if facts.evicts:
            raise kind(
                f"the store {self.shown} is on a server that removes keys when its memory is full "
                f"(maxmemory-policy {facts.info['maxmemory_policy']}): shards would get two homes. "
                "Set `maxmemory-policy noeviction`, or name another server"
            )

    def _explain(self, error: BaseException) -> ConfigError | StoreUnavailable:
        """What to raise for an error: what happened, and the next step. Never a password."""
        shown, text = self.shown, str(error)
        wrong = _wrong_setup(error)
        if wrong is not None:
            kind = StoreUnavailable if self.opened else ConfigError
            return kind(f"the store {shown} refuses this process: {wrong}")
        if isinstance(error, TimeoutError | asyncio.TimeoutError) or "Timeout" in text:
            tls = not self.opened and self._address.tls
            plain = "; if it speaks no TLS, write redis://" if tls else ""
            return StoreUnavailable(
                f"the store {shown} did not answer within {self._op_timeout_s:g} s; look at the "
                f"load and the disk of its server, and at the network{plain}"
            )
        if isinstance(error, BusyLoadingError):
            return StoreUnavailable(
                f"the store {shown} is loading its data after a start; it is asked again"
            )
        if isinstance(error, ReadOnlyError) or text.startswith("READONLY"):
            return StoreUnavailable(
                f"the store {shown} is on a replica, which takes no writes; name its primary"
            )
        if isinstance(error, ResponseError):
            return StoreUnavailable(f"the store {shown} did not do that ({text}); {_step(text)}")
        if isinstance(error, InvalidResponse):
            return StoreUnavailable(
                f"what answers at {shown} is neither Redis nor Valkey ({text}); look at host and "
                "port in the URL"
            )
        other = ""
        if not self.opened and not self._address.tls and "closed by server" in text:
            other = ". It may be another program, or speak TLS: write rediss:// then"
        return StoreUnavailable(
            f"the store {shown} can't be reached ({text}); see that its server runs and that this "
            f"machine may connect to it{other}"
        )


def _wrong_setup(error: BaseException) -> str | None:
    """What somebody must set up in another way; None for a fault that may pass."""
    text = str(error)
    if isinstance(error, _UnreadPassword):
        return text
    if isinstance(error, AuthenticationError):
        return (
            "user or password are wrong or missing; write them as "
            "redis://user:password@host:6379/0, in DOMICILE_STORE for example, or as "
            "redis://user@host:6379/0?password_file=FILE"
        )
    if isinstance(error, NoPermissionError) or text.startswith("NOPERM"):
        return f"{text}; give its user what the page about Redis lists for ACL SETUSER"
    if isinstance(error, MovedError):
        place = text.rpartition(" ")[2]
        return (
            f"it is a node of a Redis cluster, and this store's keys lie on {place}; name that node"
        )
    if "unknown command" in text.lower() or "unexpected symbol near '#'" in text:
        return (
            f"it can't run scripts ({text}); Domicile needs Redis 7.0 or Valkey with EVAL and "
            "EVALSHA allowed"
        )
    if "WRONGTYPE" in text:
        return "another program has keys with this prefix; add ?prefix=NAME to the URL"
    if isinstance(error, ssl.SSLError) or "SSL" in text or "certificate" in text:
        return f"TLS failed ({text}); name the authority with ?ca=FILE, or use the right scheme"
    if "Invalid Database" in text or "DB index is out of range" in text:
        return "it has no database with that number; write redis://host:6379/0"
    return None


def _step(text: str) -> str:
    if text.startswith("OOM") or "maxmemory" in text:
        return "its memory is full: raise `maxmemory` or remove what else it holds"
    if text.startswith("MISCONF"):
        return "it can't write to its disk: look at its log and free space there"
    if text.startswith("BUSY"):
        return "a script of another program keeps it busy; SCRIPT KILL ends that one"
    if text.startswith("NOREPLICAS"):
        return "too few of its replicas are there for `min-replicas-to-write`"
    return "look at its log"


def _answered(error: BaseException) -> bool:
    """Whether this error is the server's own answer: the connection is in order."""
    return isinstance(error, ResponseError | AuthenticationError | BusyLoadingError)


def _ended(connection: Any) -> bool:
    """Whether the server has closed an idle connection. The library looks only for unread bytes.

    Without this, the first commit after a restart of the server would be unknown.
    """
    reader = _reader(connection)
    return reader is not None and (reader.at_eof() or reader.exception() is not None)


def _reader(connection: Any) -> asyncio.StreamReader | None:
    found: asyncio.StreamReader | None = getattr(connection, "_reader", None)
    return found


def _inside(error: BaseException) -> bool:
    """Whether a script may have failed in its middle, which none of ours should."""
    return isinstance(error, ResponseError) and "script:" in str(error) and "OOM" not in str(error)


async def _facts(connection: Any) -> RedisFacts:
    info: dict[str, str] = {}
    with suppress(NoPermissionError):
        text = await _asked(connection, "INFO")
        lines = [line.partition(":") for line in text.decode(errors="replace").splitlines()]
        info = {
            name: value.strip() for name, _, value in lines if name and not name.startswith("#")
        }
    appendfsync: str | None = None
    # Hosted servers often refuse or rename CONFIG.
    with suppress(ResponseError):
        pair = await _asked(connection, "CONFIG", "GET", "appendfsync")
        appendfsync = pair[1].decode() if len(pair) == 2 else None
    return RedisFacts(info, appendfsync)


async def _asked(connection: Any, *command: str) -> Any:
    await connection.send_command(*command, check_health=False)
    return await connection.read_response()


class _UnreadPassword(AuthenticationError):
    """The file with the password can't be read."""


class _PasswordFile(CredentialProvider):
    """The login of each new connection: a password that was changed needs no restart."""

    def __init__(self, user: str | None, path: str) -> None:
        self._user, self._path = user, path

    def get_credentials(self) -> tuple[str] | tuple[str, str]:
        """Read the file."""
        try:
            password = Path(self._path).read_text(encoding="utf-8").rstrip("\r\n")
        except (OSError, UnicodeDecodeError) as error:
            raise _UnreadPassword(
                f"the password file {self._path} can't be read: {error}"
            ) from error
        return (password,) if self._user is None else (self._user, password)

    async def get_credentials_async(self) -> tuple[str] | tuple[str, str]:
        """As `get_credentials`, in a thread."""
        return await asyncio.to_thread(self.get_credentials)


def _pool(address: RedisAddress, op_timeout_s: float) -> Any:
    # Without a retry: a commit that is sent a second time is a second commit.
    settings: dict[str, Any] = {
        "db": address.db,
        # Callers have deadlines. Its own would use `wait_for`, which may swallow a cancellation.
        "socket_timeout": None, "socket_connect_timeout": op_timeout_s,
        "retry": Retry(NoBackoff(), 0), "protocol": 2, "driver_info": None,
    }  # fmt: skip
    if address.password_file:
        settings["credential_provider"] = _PasswordFile(address.user, address.password_file)
    else:
        settings |= {"username": address.user, "password": address.password}
    kind: type[Any] = Connection
    if address.path:
        kind = UnixDomainSocketConnection
        settings["path"] = address.path
    else:
        settings |= {"host": address.host, "port": address.port, "socket_keepalive": True}
    if address.tls:
        kind = SSLConnection
        settings |= {
            "ssl_ca_certs": address.ca, "ssl_certfile": address.cert, "ssl_keyfile": address.key,
        }  # fmt: skip
    return BlockingConnectionPool(
        max_connections=CONNECTIONS, timeout=op_timeout_s, connection_class=kind, **settings
    )
