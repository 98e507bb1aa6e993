"""Valkey and Redis servers as members of a replica group. Implements `ReplicaDriver`.

How the port's words map to a server (F3, F8-F10):

- It *refuses writes*: as a replica, it answers READONLY; else `CLIENT PAUSE ... WRITE`, which holds
  writes back. Sessions are ended by `CLIENT KILL`. `unlock` is for the guard alone (F2).
- It *follows nobody*: a replica is made one of a dead address, which keeps its data, its offset and
  its replication id. A server that is no replica stays as it is.
- *Promotion*: `REPLICAOF NO ONE`, a mark and the pause in one transaction, so that no client's
  write comes in between. It always begins a new replication id. The mark is a PUBLISH: replicated,
  and no data.
- What a server *has beyond* its next primary is read from its own backlog, as a replica would read
  it: the exact commands. If the backlog does not reach back that far, it is the whole data set.

Asynchronous mode only: the server itself cannot wait for a quorum before it answers.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, cast
from urllib.parse import unquote, urlsplit

from domicile.errors import ConfigError
from domicile.failover.driver import SavedLoss, ServerFacts

try:
    from redis.asyncio import Redis
    from redis.asyncio.retry import Retry
    from redis.backoff import NoBackoff
    from redis.exceptions import RedisError
except ImportError as error:
    raise ConfigError(
        "a Valkey or Redis server needs the client library: pip install 'redis>=5'"
    ) from error

DEAD_ADDRESS = ("127.0.0.1", "1")
"""Nobody listens there. A replica of it refuses writes and keeps what it has (F3)."""

FOR_EVER_MS = 10**12
"""Thirty years: a pause ends by `unlock` or with the process."""

ANSWER_S = 1.0
"""A server that does not answer within this time counts as down."""

POLL_S = 0.05

MOST_LOST_BYTES = 1 << 30
"""I6: the most that is saved of what a server has beyond its primary."""

NO_WRITES = (b"PING", b"SELECT", b"PUBLISH", b"MULTI", b"EXEC", b"REPLCONF")
"""What a replication stream has besides writes."""


class ValkeyDriver:
    """One server, by its URL: `redis://user:password@host:port`. `folder` takes what is saved."""

    def __init__(self, url: str, folder: Path) -> None:
        parts = urlsplit(url)
        if parts.scheme not in ("redis", "valkey") or not parts.hostname:
            raise ConfigError(
                "the server's URL must look like redis://host:port; TLS is not supported here yet"
            )
        self._host, self._port = parts.hostname, parts.port or 6379
        self._user = unquote(parts.username or "")
        self._password = unquote(parts.password or "")
        self._folder = folder
        self._client = self._connect(self._host, self._port)
        self._opened = ("", 0)
        self._prepared = ""

    # the port

    async def look(self) -> ServerFacts:
        """As `ReplicaDriver.look`."""
        try:
            return self._facts(await self._info())
        except (OSError, TimeoutError):
            return ServerFacts(up=False, why="it does not answer")

    async def stand(self) -> None:
        """As `ReplicaDriver.stand`. What a replica has received is applied, or counts as not."""
        await self._prepare()
        if (await self._info())["role"] == "master":
            await self.lock()
        else:
            await self._ask("REPLICAOF", *DEAD_ADDRESS)
            await self._end_sessions()

    async def drain(self) -> None:
        """As `ReplicaDriver.drain`. Clients' writes wait: they fail only if the switch is made."""
        await self._ask("CLIENT", "PAUSE", FOR_EVER_MS, "WRITE")

    async def save(self, kept: int) -> SavedLoss:
        """As `ReplicaDriver.save`."""
        info = await self._info()
        replication_id, offset = str(info["master_replid"]), _offset(info)
        await self._ask("CLIENT", "PAUSE", FOR_EVER_MS, "WRITE")
        if info["role"] != "master":
            # A replica without its primary feeds nobody, not even us.
            await self._ask("REPLICAOF", "NO", "ONE")
        self._folder.mkdir(parents=True, exist_ok=True)
        path = self._folder / f"lost-{replication_id[:8]}-{kept}-{offset}"
        commands = await self._beyond(replication_id, kept, offset, path)
        if commands is None:
            return SavedLoss(-1, str(path.with_suffix(".rdb")))
        await asyncio.to_thread(path.with_suffix(".resp").write_bytes, commands)
        return SavedLoss(count_writes(commands), str(path.with_suffix(".resp")))

    async def follow(self, address: str, kept: int) -> None:
        """As `ReplicaDriver.follow`. The server itself decides how much it must copy."""
        host, _, port = address.rpartition(":")
        await self._prepare()
        primary = self._connect(host, int(port))
        try:
            goal = _offset(await self._info(primary))
            await self._ask("REPLICAOF", host, port)
            # A replica refuses writes by itself; those that were held back learn it now.
            await self._ask("CLIENT", "UNPAUSE")
            while True:
                info = await self._info()
                if _in_sync(info) and _offset(info) >= goal:
                    return
                await asyncio.sleep(POLL_S)
        finally:
            await primary.aclose()

    async def promote(self, epoch: int) -> None:
        """As `ReplicaDriver.promote`."""
        await self._prepare()
        info = await self._info()
        if not int(info["repl_backlog_active"]):
            await self._begin_backlog()
        # By way of a replica, which refuses writes, so that the pause may end for the mark.
        await self._ask("REPLICAOF", *DEAD_ADDRESS)
        await self._ask("CLIENT", "UNPAUSE")
        client: Any = self._client
        async with client.pipeline(transaction=True) as together:
            together.execute_command("REPLICAOF", "NO", "ONE")
            together.execute_command("PUBLISH", "domicile:epoch", str(epoch))
            together.execute_command("CLIENT", "PAUSE", FOR_EVER_MS, "WRITE")
            async with self._answered():
                await together.execute()

    async def close(self) -> None:
        """As `ReplicaDriver.close`."""
        await self._client.aclose()

    # for the guard

    async def unlock(self, epoch: int) -> None:
        """Accept writes in this epoch. Only a guard may call this, after it compared (F2)."""
        info = await self._info()
        if info["role"] != "master":
            raise ConnectionError("the server is a replica; it is not opened")
        await self._ask("CLIENT", "UNPAUSE")
        self._opened = (str(info["run_id"]), epoch)

    async def lock(self) -> None:
        """Refuse writes and end open sessions."""
        self._opened = ("", 0)
        await self._ask("CLIENT", "PAUSE", FOR_EVER_MS, "WRITE")
        await self._end_sessions()

    # inside

    def _connect(self, host: str, port: int) -> Redis:
        return Redis(
            host=host, port=port, username=self._user or None, password=self._password or None,
            socket_timeout=ANSWER_S, socket_connect_timeout=ANSWER_S, retry=Retry(NoBackoff(), 0),
            single_connection_client=False,
        )  # fmt: skip

    @asynccontextmanager
    async def _answered(self) -> AsyncGenerator[None, None]:
        """Errors of the client library become those that the port knows."""
        try:
            async with asyncio.timeout(2 * ANSWER_S):
                yield
        except RedisError as error:
            raise ConnectionError(f"{self._host}:{self._port}: {error}") from error

    async def _ask(self, *words: Any) -> Any:
        async with self._answered():
            client: Any = self._client  # its methods have no types
            return await client.execute_command(*words)

    async def _info(self, client: Redis | None = None) -> Mapping[str, Any]:
        async with self._answered():
            asked: Any = client or self._client
            return cast("Mapping[str, Any]", await asked.info("everything"))

    async def _end_sessions(self) -> None:
        for kind in ("normal", "pubsub"):
            await self._ask("CLIENT", "KILL", "TYPE", kind)

    async def _prepare(self) -> None:
        """Once in each run: a replica must refuse writes, and a backlog must not be dropped."""
        run = str((await self._info())["run_id"])
        if self._prepared != run:
            await self._ask("CONFIG", "SET", "replica-read-only", "yes")
            await self._ask("CONFIG", "SET", "repl-backlog-ttl", "0")
            self._prepared = run

    def _facts(self, info: Mapping[str, Any]) -> ServerFacts:
        run, replica = str(info["run_id"]), info["role"] != "master"
        follows = ""
        if replica and (info["master_host"], str(info["master_port"])) != DEAD_ADDRESS:
            follows = f"{info['master_host']}:{info['master_port']}"
        open_epoch = 0
        if not replica and info.get("paused_actions", "none") == "none":
            # Open, and not by a guard of ours in this run: nobody's epoch.
            open_epoch = self._opened[1] if self._opened[0] == run else -1
        why = ""
        if int(info.get("loading", 0)):
            why = "it is loading its data"
        elif replica and int(info.get("master_sync_in_progress", 0)):
            why = "it is being synchronized"
        databases = [name for name in info if name.startswith("db") and name[2:].isdigit()]
        return ServerFacts(
            up=True, run=run, open_epoch=open_epoch, follows=follows, offset=_offset(info),
            empty=not databases and not _offset(info), native=str(info["master_replid"]),
            fit=not why, why=why, acknowledged=_followers(info),
        )  # fmt: skip

    # as a replica of its own server

    @asynccontextmanager
    async def _raw(self) -> AsyncGenerator[tuple[asyncio.StreamReader, asyncio.StreamWriter], None]:
        async with asyncio.timeout(ANSWER_S):
            reader, writer = await asyncio.open_connection(self._host, self._port)
        try:
            if self._password:
                secret = [self._user, self._password] if self._user else [self._password]
                writer.write(_command("AUTH", *secret))
                async with asyncio.timeout(ANSWER_S):
                    if not (await reader.readline()).startswith(b"+"):
                        raise ConnectionError("the server refused the password")
            yield reader, writer
        finally:
            writer.close()

    async def _begin_backlog(self) -> None:
        """A server counts its writes only once it has a backlog, which the first replica brings.

        It has never had a replica, so nobody minds that its replication id changes once more.
        """
        await self._ask("CLIENT", "PAUSE", FOR_EVER_MS, "WRITE")
        await self._ask("REPLICAOF", "NO", "ONE")
        async with self._raw() as (reader, writer):
            writer.write(_command("PSYNC", "?", "-1"))
            async with asyncio.timeout(10 * ANSWER_S):
                answer = await _answer(reader)
            if not answer.startswith(b"+FULLRESYNC"):
                raise ConnectionError(f"the server did not begin a backlog: {answer!r}")

    async def _beyond(
        self, replication_id: str, kept: int, offset: int, path: Path
    ) -> bytes | None:
        """The commands after `kept`; None if only the whole data set could be saved."""
        async with self._raw() as (reader, writer):
            writer.write(_command("PSYNC", replication_id, str(kept + 1)))
            async with asyncio.timeout(10 * ANSWER_S):
                answer = await _answer(reader)
                if answer.startswith(b"+CONTINUE"):
                    if offset - kept > MOST_LOST_BYTES:
                        raise ConnectionError(f"{offset - kept} bytes would be lost: save them")
                    return await reader.readexactly(offset - kept)
            if not answer.startswith(b"+FULLRESYNC"):
                raise ConnectionError(f"the server does not give what it has: {answer!r}")
            await _save_snapshot(reader, path.with_suffix(".rdb"))
            return None


async def _answer(reader: asyncio.StreamReader) -> bytes:
    # Before a full synchronization a server sends empty lines, to show that it is alive.
    while not (line := await reader.readline()).strip():
        if not line:
            raise ConnectionError("the server closed the connection")
    return line


async def _save_snapshot(reader: asyncio.StreamReader, path: Path) -> None:
    head = (await _answer(reader)).strip()
    if not head.startswith(b"$"):
        raise ConnectionError(f"not a snapshot: {head!r}")
    with await asyncio.to_thread(path.open, "wb") as file:
        if head.startswith(b"$EOF:"):
            end, tail = head[5:], b""
            while not tail.endswith(end):
                piece = await reader.read(1 << 16)
                if not piece:
                    raise ConnectionError("the snapshot broke off")
                tail += piece
                await asyncio.to_thread(file.write, tail[: -len(end)])
                tail = tail[-len(end) :]
            return
        left = int(head[1:])
        while left:
            piece = await reader.read(min(left, 1 << 16))
            if not piece:
                raise ConnectionError("the snapshot broke off")
            left -= len(piece)
            await asyncio.to_thread(file.write, piece)


def count_writes(commands: bytes) -> int:
    """How many writes a part of a replication stream has."""
    count = at = 0
    while at < len(commands):
        end = commands.index(b"\r\n", at)
        words = int(commands[at + 1 : end])
        at = end + 2
        for number in range(words):
            end = commands.index(b"\r\n", at)
            size = int(commands[at + 1 : end])
            if not number:
                count += commands[end + 2 : end + 2 + size].upper() not in NO_WRITES
            at = end + 2 + size + 2
    return count


def _command(*words: str) -> bytes:
    parts = [word.encode() for word in words]
    body = b"".join(b"$%d\r\n%s\r\n" % (len(part), part) for part in parts)
    return b"*%d\r\n%s" % (len(parts), body)


def _offset(info: Mapping[str, Any]) -> int:
    """All that the server has applied."""
    return int(info["master_repl_offset"])


def _in_sync(info: Mapping[str, Any]) -> bool:
    return info.get("master_link_status") == "up" and not int(
        info.get("master_sync_in_progress", 0)
    )


def _followers(info: Mapping[str, Any]) -> dict[str, int]:
    found: dict[str, int] = {}
    for number in range(int(info.get("connected_slaves", 0))):
        one = cast("Mapping[str, Any] | None", info.get(f"slave{number}"))
        if one is not None and one["state"] == "online":
            found[f"{one['ip']}:{one['port']}"] = int(one["offset"])
    return found
