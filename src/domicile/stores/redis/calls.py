"""One run of the script: how a call becomes arguments, and what its answer means.

`ScriptCalls` keeps the history that its calls show to the server (S5). The store and its second
client have one each. Nothing here holds a connection.
"""

from __future__ import annotations

import hashlib
import logging
import secrets
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, NoReturn, Protocol

from domicile.core.state.txn import (
    Absent,
    At,
    Change,
    Changes,
    Committed,
    Condition,
    Conflict,
    Item,
    Outcome,
    Put,
    Unknown,
    Write,
    check_limits,
)
from domicile.errors import ConfigError, StoreRewound, StoreUnavailable, WatchCompacted

log = logging.getLogger("domicile")

_SOURCE = Path(__file__).with_name("store.lua").read_text(encoding="utf-8")

FORMAT = 1
KEPT_COMMITS = 10_000
KEPT_BYTES = 64 * 1024 * 1024
KEPT_S = 3600.0
"""I6: the change log keeps this many commits, bytes and seconds of store time, the first limit
counts. A watch from before must list again."""

READING = ("get", "list", "log", "state")
"""Operations that find nothing where no store is."""

PARTS = ("meta", "item", "index", "ttl", "due", "held", "log", "tag")
US = 1_000_000


class Script(NamedTuple):
    """A script with the name under which the server caches it."""

    text: str
    sha: str
    run: str
    """The command that runs it by name, and after `loading` the one that brings the text along."""
    bring: str

    @classmethod
    def of(cls, *, reads_only: bool) -> Script:
        """The script that reads and writes, or the one for users that may only read."""
        flags = " flags=no-writes" if reads_only else ""
        # Without `#!`, the server would notice only in the middle that its memory is full.
        text = f"#!lua{flags}\nlocal READS_ONLY = {str(reads_only).lower()}\n{_SOURCE}"
        sha = hashlib.sha1(text.encode(), usedforsecurity=False).hexdigest()
        suffix = "_RO" if reads_only else ""
        return cls(text, sha, f"EVALSHA{suffix}", f"EVAL{suffix}")


WRITES = Script.of(reads_only=False)
READS = Script.of(reads_only=True)


class CallUnknown(Exception):
    """A call was sent and its answer did not come: it may have run, or may run later (S1)."""


class ScriptAnswer(NamedTuple):
    """What every run reports, and the results of the operation."""

    status: str
    history: str
    revision: int
    tag: str
    age_s: float
    """Seconds since store time last advanced, by the server's wall clock."""
    now_s: float
    """Store time."""
    results: Sequence[Any]


class Server(Protocol):
    """What runs a script: the connections of one client."""

    @property
    def shown(self) -> str:
        """The server for people, without a password."""
        ...

    async def run(self, script: Script, arguments: Sequence[Any], *, again: bool) -> Any:
        """One run. `StoreUnavailable`: it did not run. `CallUnknown`: perhaps.

        `again`: it may run twice.
        """
        ...


class ScriptCalls:
    """The calls of one client. `rewound` is called once for each rewind that it notices."""

    def __init__(
        self,
        server: Server,
        keys: Sequence[str],
        *,
        by: str = "",
        kept_commits: int = KEPT_COMMITS,
        reads_only: bool = False,
        creates: bool = True,
        seen: Callable[[ScriptAnswer], None] = lambda answer: None,
        rewound: Callable[[StoreRewound], None] = lambda error: None,
    ) -> None:
        self.generation = 0
        """How many rewinds were noticed: a call of an earlier generation gets `StoreRewound`."""
        self._server, self._keys = server, keys
        self._by = by
        self._limits = (str(kept_commits), str(KEPT_BYTES), str(round(KEPT_S * US)))
        self._script = READS if reads_only else WRITES
        self._reads_only, self._creates = reads_only, creates and not reads_only
        self._seen, self._rewound = seen, rewound
        self._history, self._revision, self._tag = "", 0, ""

    @property
    def known(self) -> tuple[str, int, str]:
        """The newest history, revision and tag that an answer had."""
        return self._history, self._revision, self._tag

    def adopt(self, known: tuple[str, int, str]) -> None:
        """Begin with what another client knows."""
        self._history, self._revision, self._tag = known

    async def ask(
        self, operation: str, *values: Any, generation: int | None = None
    ) -> ScriptAnswer:
        """Run one operation; `StoreRewound` if the store lost commits that this client knows."""
        generation = self.generation if generation is None else generation
        self._check(generation)
        history, revision, tag = self.known
        fresh = secrets.token_hex(16) if self._creates else ""
        arguments = (
            len(self._keys), *self._keys, operation, history, str(revision), tag, fresh,
            secrets.token_hex(8), self._by, *self._limits, *values,
        )  # fmt: skip
        raw = await self._server.run(self._script, arguments, again=operation != "commit")
        self._check(generation)
        status = raw[0].decode()
        if status == "rewound":
            self._went_back(raw[1].decode())
        if status == "format":
            raise ConfigError(
                f"the store {self._server.shown} has format {raw[1].decode()}, this version of "
                f"Domicile reads {FORMAT}; run the version that made it, or name another prefix"
            )
        if status == "absent":
            if self._history:
                self._went_back("it is empty")
            if operation not in READING:
                raise ConfigError(
                    f"there is no store at {self._server.shown}: start a node with it first, or "
                    "name another"
                )
            return ScriptAnswer(status, "", 0, "", 0.0, 0.0, ())
        answer = ScriptAnswer(
            status, raw[1].decode(), raw[2], raw[3].decode(),
            max(0.0, int(raw[4]) / US), int(raw[5]) / US, raw[6:],
        )  # fmt: skip
        self._note(answer)
        self._seen(answer)
        return answer

    def lost(self, why: str) -> NoReturn:
        """The caller saw by itself that the store lost commits."""
        self._went_back(why)

    def _note(self, answer: ScriptAnswer) -> None:
        if not self._history:
            self._history = answer.history
        if answer.history != self._history:
            self._went_back("it has another history")
        # Answers of several connections may come in another order than they were made in.
        if answer.revision > self._revision:
            self._revision, self._tag = answer.revision, answer.tag

    def _check(self, generation: int) -> None:
        if generation != self.generation:
            raise self._error("a call before noticed it")

    def _went_back(self, why: str) -> NoReturn:
        error = self._error(why)
        self.generation += 1
        self._history, self._revision, self._tag = "", 0, ""
        self._rewound(error)
        raise error

    def _error(self, why: str) -> StoreRewound:
        return StoreRewound(
            f"the store {self._server.shown} lost commits ({why}): it was restored, emptied, or "
            "failed over to a replica; drop what was learned from it and list again"
        )

    # the operations of the port

    async def commit(
        self,
        conditions: Sequence[Condition],
        writes: Sequence[Write],
        generation: int | None = None,
    ) -> Outcome:
        """As `Store.commit`."""
        check_limits(conditions, writes)
        operations = _operations(conditions, writes)
        try:
            answer = await self.ask("commit", *operations, generation=generation)
        except CallUnknown as error:
            log.warning("whether a commit happened is unknown: %s", error)
            return Unknown()
        if answer.status == "conflict":
            number: int = answer.results[0]
            keys = [operation.key for operation in (*conditions, *writes)]
            return Conflict(keys[number])
        return Committed(answer.revision)

    async def sure(
        self, operation: str, *values: Any, generation: int | None = None
    ) -> ScriptAnswer:
        """As `ask`, for calls that may be repeated: an unknown outcome is `StoreUnavailable`."""
        try:
            return await self.ask(operation, *values, generation=generation)
        except CallUnknown as error:
            raise StoreUnavailable(str(error)) from error

    async def entries_after(
        self, revision: int, most: int, generation: int | None = None
    ) -> tuple[list[LogEntry], int]:
        """The entries of the log after a revision, and the revision up to which these are all."""
        answer = await self.sure("log", str(revision), str(most), generation=generation)
        if answer.status == "absent":
            return [], revision
        if answer.status == "future":
            raise StoreRewound(
                f"a watch from revision {revision} is ahead of the store {self._server.shown} at "
                f"{answer.revision}: its history went back; drop what was learned from it and "
                "list again"
            )
        if answer.status == "compacted":
            raise WatchCompacted(
                f"changes after revision {revision} are kept only from {answer.results[0] + 1} "
                "on; list again and watch from the listing's revision"
            )
        found = [entry_of(*raw) for raw in answer.results[0]]
        return found, found[-1].changes.revision if len(found) >= most else answer.revision


def ttl_us(lease: str, ttl_s: float) -> str:
    """A ttl as the script takes it."""
    if not 0 < ttl_s < float("inf"):
        raise ValueError(f"the ttl of lease {lease!r} is {ttl_s} s; it must be above 0")
    if not lease:
        raise ValueError("a lease needs an id of at least one character")
    return str(max(1, round(ttl_s * US)))


def ttl_s(raw: bytes) -> float:
    """The inverse of `ttl_us`."""
    return int(raw) / US


def _operations(conditions: Sequence[Condition], writes: Sequence[Write]) -> list[Any]:
    found: list[Any] = []
    for condition in conditions:
        if isinstance(condition, At):
            found += ("at", condition.key, str(condition.revision), "")
        else:
            found += (
                "absent" if isinstance(condition, Absent) else "present",
                condition.key,
                "",
                "",
            )
    for write in writes:
        if isinstance(write, Put):
            found += ("put", write.key, write.value, write.lease or "")
        else:
            found += ("delete", write.key, "", "")
    return found


def item_of(key: bytes, raw: bytes) -> Item:
    """An item as the script stores it."""
    created, revision, length, rest = raw.split(b" ", 3)
    value = rest if length == b"-" else rest[int(length) :]
    return Item(key, value, int(created), int(revision))


def _lease_of(raw: bytes) -> str | None:
    """The lease of an item as the script stores it."""
    _, _, length, rest = raw.split(b" ", 3)
    return None if length == b"-" else rest[: int(length)].decode()


class LogEntry(NamedTuple):
    """One revision as the log keeps it."""

    changes: Changes
    before: str
    """The tag of the revision before."""
    tag: str
    at_s: float
    """Store time of the commit."""
    by: str
    expiry: bool
    size_bytes: int
    wall_s: float = 0.0
    """The server's clock."""
    leases: tuple[str | None, ...] = ()
    """That of each change."""


def entry_of(id: bytes, fields: Sequence[bytes]) -> LogEntry:
    """An entry of the stream."""
    revision = int(id.partition(b"-")[0])
    _, before, _, tag, _, at, _, _, _, wall, _, expiry, _, by, _, blob = fields
    changes: list[Change] = []
    leases: list[str | None] = []
    place = 0
    while place < len(blob):
        key, place = _piece(blob, place)
        raw, place = _piece(blob, place)
        changes.append(Change(key, item_of(key, raw) if raw else None))
        leases.append(_lease_of(raw) if raw else None)
    return LogEntry(
        Changes(revision, tuple(changes)), before.decode(), tag.decode(), int(at) / US,
        by.decode(), expiry == b"1", len(blob), int(wall) / US, tuple(leases),
    )  # fmt: skip


def _piece(blob: bytes, place: int) -> tuple[bytes, int]:
    colon = blob.index(b":", place)
    end = colon + 1 + int(blob[place:colon])
    return blob[colon + 1 : end], end


def bounds(prefix: bytes) -> tuple[bytes, bytes]:
    """The range of the sorted index that has the keys with a prefix."""
    head = prefix.rstrip(b"\xff")
    end = b"(" + head[:-1] + bytes([head[-1] + 1]) if head else b"+"
    return b"[" + prefix, end
