"""The driver of Valkey and Redis, for the agent's process. Implements `ReplicaDriver`.

A replica of these servers follows an *address*, and takes a copy of whatever it finds there. So a
primary has a user for its followers, with a password that belongs to this run and history of it. A
follower gets that password when it is told to follow. Another server may answer at
the address later: one that came back without data, or that follows another primary now. It refuses
the follower, which then keeps what it has (F10).
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
from collections.abc import AsyncGenerator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, cast

from domicile.failover.driver import SavedLoss, ServerFacts
from domicile.failover.drivers.valkey.pause_probe import PauseProbe
from domicile.failover.drivers.valkey.server import (
    ANSWER_S,
    DEAD_ADDRESS,
    FOR_EVER_MS,
    SelfSyncs,
    ValkeyServer,
    encode_command,
    read_opened,
    read_self_syncs,
    write_self_syncs,
)
from domicile.failover.records import Resyncs

log = logging.getLogger("domicile")

POLL_S = 0.05

MOST_LOST_BYTES = 1 << 30
"""I6: the most that is saved of what a server has beyond its primary."""

NO_WRITES = (b"PING", b"SELECT", b"PUBLISH", b"MULTI", b"EXEC", b"REPLCONF")
"""What a replication stream has besides writes."""


FOLLOWER = "domicile-follower"
"""The user of a primary as whom its replicas log in."""

FOLLOWER_MAY = ("+psync", "+sync", "+replconf", "+ping")


class ValkeyDriver:
    """One server, by its URL: `redis://user:password@host:port`. `folder` takes what is saved."""

    def __init__(self, url: str, folder: Path, answer_s: float = ANSWER_S) -> None:
        self._server = ValkeyServer(url, answer_s)
        self._probe = PauseProbe(self._server)
        self._folder = folder
        self._prepared = ""
        self._self_syncs: SelfSyncs | None = None
        self._syncs_itself = False
        """Whether the server may count the driver as a follower just now."""
        self._resyncs: Resyncs | None = None
        self._users = asyncio.Lock()
        """Held by a call that changes the user of followers, or decides that it must be there."""

    # the port

    async def look(self) -> ServerFacts:
        """As `ReplicaDriver.look`."""
        own, unsure = self._known_self_syncs(), self._syncs_itself
        try:
            try:
                info = await self._server.info()
            except ConnectionError:
                # The guard ends all sessions when it closes the server; this one was among them.
                info = await self._server.info()
            refuses = info["role"] != "master" or await self._holds_back(info)
        except (OSError, TimeoutError):
            return ServerFacts(up=False, why="it does not answer")
        if self._self_syncs is own and not (unsure or self._syncs_itself):
            self._resyncs = _followers_syncs(info, own)
        facts = self._facts(info, refuses=refuses)
        if facts.open_epoch > 0:
            await self._admit_again(info)
        return facts

    async def stand(self) -> None:
        """As `ReplicaDriver.stand`. What a replica has received is applied, or counts as not."""
        await self._prepare()
        if (await self._server.info())["role"] == "master":
            await self._refuse()
        else:
            await self._ask("REPLICAOF", *DEAD_ADDRESS)
            await self._end_sessions()

    async def get_ready(self) -> None:
        """As `ReplicaDriver.get_ready`. A promotion is quick, and needs nothing before it."""

    async def drain(self) -> None:
        """As `ReplicaDriver.drain`. Clients' writes wait, and go on if the switch is not made."""
        await self._ask("CLIENT", "PAUSE", FOR_EVER_MS, "WRITE")

    async def dismiss(self) -> None:
        """As `ReplicaDriver.dismiss`. A replica answers READONLY, also to what was held back."""
        # In one transaction: what was held back is looked at after it.
        await self._server.together(("REPLICAOF", *DEAD_ADDRESS), ("CLIENT", "UNPAUSE"))

    async def save(self, kept: int) -> SavedLoss:
        """As `ReplicaDriver.save`."""
        info = await self._server.info()
        replication_id, offset = str(info["master_replid"]), _offset(info)
        await self._ask("CLIENT", "PAUSE", FOR_EVER_MS, "WRITE")
        if info["role"] != "master":
            # A replica without its primary feeds nobody, not even us. From here on it has another
            # history, and who still follows it would take that over.
            async with self._users:
                await self._ask("ACL", "DELUSER", FOLLOWER)
                await self._ask("REPLICAOF", "NO", "ONE")
        self._folder.mkdir(parents=True, exist_ok=True)
        path = self._folder / f"lost-{replication_id[:8]}-{kept}-{offset}"
        commands = await self._beyond(info, kept, offset, path)
        if commands is None:
            return SavedLoss(-1, str(path.with_suffix(".rdb")))
        await asyncio.to_thread(path.with_suffix(".resp").write_bytes, commands)
        return SavedLoss(count_writes(commands), str(path.with_suffix(".resp")))

    async def follow(self, address: str, kept: int) -> None:
        """As `ReplicaDriver.follow`. The server itself decides how much it must copy."""
        host, _, port = address.rpartition(":")
        await self._prepare()
        primary = self._server.connect(host, int(port))
        try:
            found = await self._server.info(primary)
            if found["role"] != "master":
                raise ConnectionError(f"{address} is a replica: nobody can follow it yet")
            goal = _offset(found)
            async with self._users:
                # Who follows feeds nobody: not those either that followed it before.
                await self._ask("ACL", "DELUSER", FOLLOWER)
                await self._ask("CONFIG", "SET", "masteruser", FOLLOWER)
                await self._ask("CONFIG", "SET", "masterauth", self._follower_password(found))
                await self._ask("REPLICAOF", host, port)
            # A replica refuses writes by itself; those that were held back learn it now.
            await self._ask("CLIENT", "UNPAUSE")
            while True:
                info = await self._server.info()
                if _in_sync(info) and _offset(info) >= goal:
                    return
                await asyncio.sleep(POLL_S)
        finally:
            await primary.aclose()

    async def promote(self, epoch: int) -> None:
        """As `ReplicaDriver.promote`."""
        await self._prepare()
        info = await self._server.info()
        if not int(info["repl_backlog_active"]):
            await self._begin_backlog(str(info["run_id"]))
        # By way of a replica, which refuses writes, so that the pause may end for the mark.
        await self._ask("REPLICAOF", *DEAD_ADDRESS)
        await self._ask("CLIENT", "UNPAUSE")
        await self._server.together(
            ("REPLICAOF", "NO", "ONE"),
            ("PUBLISH", "domicile:epoch", str(epoch)),
            ("CLIENT", "PAUSE", FOR_EVER_MS, "WRITE"),
        )
        async with self._users:
            await self._ask("ACL", "DELUSER", FOLLOWER)
            await self._admit(await self._server.info())

    async def close(self) -> None:
        """As `ReplicaDriver.close`."""
        self._probe.close()
        await self._server.close()

    # inside

    async def _ask(self, *words: Any) -> Any:
        return await self._server.ask(*words)

    async def _admit(self, info: Mapping[str, Any]) -> None:
        password = self._follower_password(info)
        await self._ask(
            "ACL", "SETUSER", FOLLOWER, "on", "resetpass", f">{password}", *FOLLOWER_MAY
        )

    async def _admit_again(self, info: Mapping[str, Any]) -> None:
        """An open primary's followers log in, also after `ACL LOAD` has removed their user or has
        brought back that of an earlier run, and at a server that was promoted before there was
        one."""
        try:
            async with self._users:
                if not await self._admits(info):
                    info = await self._server.info()
                    if info["role"] == "master":
                        await self._admit(info)
        except (OSError, TimeoutError) as error:
            log.debug("whether followers may log in is not known: %s", error)

    async def _admits(self, info: Mapping[str, Any]) -> bool:
        """Whether the followers of this primary can log in, as far as we may know."""
        try:
            found: Any = await self._ask("ACL", "GETUSER", FOLLOWER)
        except ConnectionError:
            # That is a right of its own.
            return FOLLOWER.encode() in await self._ask("ACL", "USERS")
        if not found:
            return False
        wanted = hashlib.sha256(self._follower_password(info).encode()).hexdigest()
        # Names and values in turn; a map in the newer protocol.
        in_turn = not hasattr(found, "keys")
        values: Any = dict(zip(found[::2], found[1::2], strict=True)) if in_turn else found
        return wanted.encode() in values[b"passwords"]

    async def _refuse(self) -> None:
        """Hold clients' writes back. A killed session of the gate's may still try to open (F2)."""
        await self._ask("CLIENT", "PAUSE", FOR_EVER_MS, "WRITE")
        await self._end_sessions()

    async def _end_sessions(self) -> None:
        for kind in ("normal", "pubsub"):
            await self._ask("CLIENT", "KILL", "TYPE", kind)

    async def _prepare(self) -> None:
        """Once in each run: a replica must refuse writes, and a backlog must not be dropped."""
        run = str((await self._server.info())["run_id"])
        if self._prepared != run:
            await self._ask("CONFIG", "SET", "replica-read-only", "yes")
            await self._ask("CONFIG", "SET", "repl-backlog-ttl", "0")
            if (await self._server.info())["role"] != "master":
                # A file may have kept it, with the password of an earlier run: see above.
                await self._ask("ACL", "DELUSER", FOLLOWER)
            self._prepared = run

    def _follower_password(self, primary: Mapping[str, Any]) -> str:
        """What followers of this primary log in with; no secret if the servers have none.

        All servers of a group take the same password, so each driver can tell this one.
        """
        parts = (self._server.password, str(primary["run_id"]), str(primary["master_replid"]))
        return hashlib.sha256(":".join(parts).encode()).hexdigest()

    async def _holds_back(self, info: Mapping[str, Any]) -> bool:
        """Whether clients' writes wait at a primary. A server that does not say so is asked."""
        if "paused_actions" in info:
            return bool(info["paused_actions"] != "none")
        return await self._probe.holds()

    def _facts(self, info: Mapping[str, Any], *, refuses: bool) -> ServerFacts:
        run, replica = str(info["run_id"]), info["role"] != "master"
        follows = ""
        if replica and (info["master_host"], str(info["master_port"])) != DEAD_ADDRESS:
            follows = f"{info['master_host']}:{info['master_port']}"
        open_epoch = 0
        if not refuses:
            # Open, and not by a guard of ours in this run: nobody's epoch.
            opened = read_opened(self._folder)
            open_epoch = opened.epoch if opened is not None and opened.run == run else -1
        why = ""
        if int(info.get("loading", 0)):
            why = "it is loading its data"
        elif replica and int(info.get("master_sync_in_progress", 0)):
            why = "it is being synchronized"
        databases = [name for name in info if name.startswith("db") and name[2:].isdigit()]
        return ServerFacts(
            up=True, run=run, open_epoch=open_epoch, follows=follows, offset=_offset(info),
            empty=not databases and not _offset(info), native=str(info["master_replid"]),
            fit=not why, why=why, acknowledged=_followers(info), resyncs=self._resyncs,
        )  # fmt: skip

    def _known_self_syncs(self) -> SelfSyncs:
        if self._self_syncs is None:
            self._self_syncs = read_self_syncs(self._folder)
        return self._self_syncs

    # as a replica of its own server

    @asynccontextmanager
    async def _follower_of_itself(
        self, run: str, *words: str
    ) -> AsyncGenerator[tuple[bytes, asyncio.StreamReader], None]:
        """The server's answer to a follower that asks so, and what it sends then."""
        self._syncs_itself = True
        try:
            async with self._raw() as (reader, writer):
                writer.write(encode_command("PSYNC", *words))
                async with asyncio.timeout(10 * ANSWER_S):
                    answer = await _answer(reader)
                await self._note_self_sync(run, answer, refusable=words[0] != "?")
                yield answer, reader
        finally:
            self._syncs_itself = False

    async def _note_self_sync(self, run: str, answer: bytes, *, refusable: bool) -> None:
        """What the server has just counted."""
        before = self._known_self_syncs()
        if before.run != run:
            before = SelfSyncs(run)
        full = answer.startswith(b"+FULLRESYNC")
        self._self_syncs = SelfSyncs(
            run, before.full + full, before.partial + answer.startswith(b"+CONTINUE"),
            before.refused + (full and refusable),
        )  # fmt: skip
        await asyncio.to_thread(write_self_syncs, self._folder, self._self_syncs)

    @asynccontextmanager
    async def _raw(self) -> AsyncGenerator[tuple[asyncio.StreamReader, asyncio.StreamWriter], None]:
        reader, writer = await self._server.open_stream()
        try:
            yield reader, writer
        finally:
            writer.close()

    async def _begin_backlog(self, run: str) -> None:
        """A server counts its writes only once it has a backlog, which the first replica brings.

        It has never had a replica, so nobody minds that its replication id changes once more.
        """
        await self._ask("CLIENT", "PAUSE", FOR_EVER_MS, "WRITE")
        await self._ask("REPLICAOF", "NO", "ONE")
        async with self._follower_of_itself(run, "?", "-1") as (answer, _):
            if not answer.startswith(b"+FULLRESYNC"):
                raise ConnectionError(f"the server did not begin a backlog: {answer!r}")

    async def _beyond(
        self, info: Mapping[str, Any], kept: int, offset: int, path: Path
    ) -> bytes | None:
        """The commands after `kept`; None if only the whole data set could be saved."""
        asked = (str(info["master_replid"]), str(kept + 1))
        async with self._follower_of_itself(str(info["run_id"]), *asked) as (answer, reader):
            if answer.startswith(b"+CONTINUE"):
                if offset - kept > MOST_LOST_BYTES:
                    raise ConnectionError(f"{offset - kept} bytes would be lost: save them")
                async with asyncio.timeout(10 * ANSWER_S):
                    return await reader.readexactly(offset - kept)
            if not answer.startswith(b"+FULLRESYNC"):
                raise ConnectionError(f"the server does not give what it has: {answer!r}")
            await _save_snapshot(reader, path.with_suffix(".rdb"))
            return None


def _followers_syncs(info: Mapping[str, Any], own: SelfSyncs) -> Resyncs | None:
    """As the server counts them, without those of the driver itself; None: it does not say."""
    if own.run != str(info["run_id"]):
        own = SelfSyncs()
    try:
        return Resyncs(
            full=max(0, int(info["sync_full"]) - own.full),
            partial=max(0, int(info["sync_partial_ok"]) - own.partial),
            refused=max(0, int(info["sync_partial_err"]) - own.refused),
        )
    except KeyError:
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
