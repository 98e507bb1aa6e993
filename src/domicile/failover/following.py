"""Which server of a group is the primary, for programs that use it: `Group`, and what it stands on.

`GroupFollower` keeps a group's records up to date, and knows until when they were true: it watches
the store, and confirms what it knows by reading the state anew each second. An answer from memory
is given only while no more than the primary's ttl has passed since. `Group` is what clients make.
Nothing here writes, and nothing here keeps a server open: an announced primary may be replaced at
any moment, and then its guard has ended its sessions.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from datetime import datetime, timedelta

from domicile.core.state.txn import Changes
from domicile.errors import StoreError, StoreRewound, StoreUnavailable, Unavailable, WatchCompacted
from domicile.failover.records import ServerRecord, group_prefix, state_key
from domicile.failover.view import GroupRecords, announced, followers, group_view
from domicile.membership.store_calls import StoreCalls
from domicile.ports.clock import Clock
from domicile.ports.store import Store

log = logging.getLogger("domicile")

CONFIRM_S = 1.0
"""How often a follower asks the store whether what it knows is still true."""

RETRY_S = 0.1
"""How soon a store that did not answer is asked again."""

STALE_S = 3.0
"""How old an answer from memory may be at most, where no primary says its ttl."""


@dataclass(frozen=True, slots=True)
class Primary:
    """The primary of a group, as the store announced it."""

    group: str
    server: str
    """The server's id."""
    address: str
    """Where it accepts connections, as `host:port`."""
    epoch: int
    """Grows with each change of primary."""
    known_until: datetime
    """The latest time at which this is known to have been true. It may be over by now."""

    @property
    def host(self) -> str:
        """The host of its address."""
        return split_host(self.address)[0]

    @property
    def port(self) -> int:
        """The port of its address."""
        return split_host(self.address)[1]


def split_host(address: str) -> tuple[str, int]:
    """Host and port of a server's address. An IPv6 host may be in brackets."""
    host, _, port = address.rpartition(":")
    return host.removeprefix("[").removesuffix("]"), int(port)


class GroupFollower:
    """Keeps the records of one group. `run` it in a task of yours; ask it at any time."""

    def __init__(
        self,
        group: str,
        store: Store,
        clock: Clock,
        *,
        op_timeout_s: float = 5.0,
        confirm_s: float = CONFIRM_S,
    ) -> None:
        self.records = GroupRecords(group)
        self.version = 0
        """Grows with everything new. For `after`."""
        self.confirmed_at: float | None = None
        """When the newest read began that found the state as it is known here; on the clock."""
        self.problem = ""
        """Why the store could not be read the last time; empty if it could."""
        self._calls = StoreCalls(store, op_timeout_s)
        self._clock, self._confirm_s = clock, confirm_s
        self._confirmed_state = 0
        self._news, self._doubt = asyncio.Event(), asyncio.Event()
        self._failure: BaseException | None = None
        self._to_list = True

    # what it knows

    def now(self) -> float:
        """The time on its clock, for `after`."""
        return self._clock.now()

    @property
    def stale_s(self) -> float:
        """How old its knowledge may be: an agent that dies now has closed its server after that."""
        found = announced(self.records)
        return found.ttl_s if found is not None and found.ttl_s else STALE_S

    @property
    def fresh(self) -> bool:
        """Whether the state that it knows was confirmed by a read, within `stale_s`.

        A watch alone does not tell how old its news are: this process may have been frozen.
        """
        at = self.confirmed_at
        known = self.records.state_revision == self._confirmed_state
        return at is not None and known and self._clock.now() - at <= self.stale_s

    def announced(self) -> ServerRecord | None:
        """The primary that clients may use; None if there is none, or it is not known any more."""
        return announced(self.records) if self.fresh else None

    def primary(self) -> Primary | None:
        """The same for programs, with its epoch."""
        found, state, at = self.announced(), self.records.state, self.confirmed_at
        if found is None or state is None or at is None:
            return None
        age = timedelta(seconds=self._clock.now() - at)
        known_until = self._clock.wall() - age
        return Primary(self.records.group, found.server, found.address, state.epoch, known_until)

    def replicas(self) -> list[ServerRecord]:
        """The servers that follow the primary and are fit; none if that is not known any more."""
        return followers(self.records) if self.fresh else []

    async def after(self, version: int, until: float | None = None) -> int:
        """Wait for a version later than this one, at most until a time; the newest version.

        Raises what ended `run`, if that was an error.
        """
        while self.version == version and self._failure is None:
            left_s = None if until is None else max(0.0, until - self._clock.now())
            if left_s == 0.0:
                break
            try:
                async with asyncio.timeout(left_s):
                    await self._news.wait()
            except TimeoutError:
                break
        if self._failure is not None:
            raise self._failure
        return self.version

    # how it knows it

    async def run(self) -> None:
        """Follow the group until cancelled. A store that is away is asked again."""
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._keep_confirming(), name="domicile-group-confirm")
                tasks.create_task(self._keep_watching(), name="domicile-group-watch")
        except BaseExceptionGroup as errors:
            failure: BaseException = errors
            while isinstance(failure, BaseExceptionGroup):
                failure = failure.exceptions[0]  # pyright: ignore[reportUnknownMemberType,reportUnknownVariableType]
            self._failure = failure
            self._tell()
            raise

    def _listed(self) -> bool:
        return not self._to_list

    def _tell(self) -> None:
        self.version += 1
        self._news.set()
        self._news = asyncio.Event()

    async def _keep_confirming(self) -> None:
        while True:
            self._doubt.clear()
            try:
                await self._confirm()
                if self.problem:
                    log.info("group %s: the store answers again", self.records.group)
                self.problem = ""
            except StoreError as error:
                if isinstance(error, StoreRewound):
                    self._to_list = True
                if not self.problem:
                    log.warning("group %s can't be read: %s", self.records.group, error)
                self.problem = str(error)
                await asyncio.sleep(RETRY_S)
                continue
            try:
                async with asyncio.timeout(self._confirm_s):
                    await self._doubt.wait()
            except TimeoutError:
                pass

    async def _confirm(self) -> None:
        began, records = self._clock.now(), self.records
        if not self._to_list:
            item = await self._calls.bounded(self._calls.store.get(state_key(records.group)))
            if (0 if item is None else item.revision) == records.state_revision:
                before = self.fresh
                self.confirmed_at, self._confirmed_state = began, records.state_revision
                if not before:
                    self._tell()
                return
        await self._list(began)

    async def _list(self, began: float) -> None:
        records = self.records
        listing = await self._calls.bounded(self._calls.store.list(group_prefix(records.group)))
        if listing.revision < records.revision and not self._to_list:
            # Older than what the watch has brought meanwhile: asked again at once.
            return
        self._to_list = False
        records.load(listing)
        self.confirmed_at, self._confirmed_state = began, records.state_revision
        self._tell()

    async def _keep_watching(self) -> None:
        prefix = group_prefix(self.records.group)
        while True:
            while not self._listed():
                await self._news.wait()
            changes = self._calls.store.watch(prefix, self.records.revision)
            try:
                async for change in changes:
                    if change.revision > self.records.revision:
                        self.records.apply(change)
                        if self.records.state_revision != self._confirmed_state:
                            self._doubt.set()
                        self._tell()
                    if not self._listed():
                        break
            except WatchCompacted:
                self._to_list = True
            except StoreRewound:
                self._to_list = True
            except StoreUnavailable:
                pass
            finally:
                await _close(changes)
            await asyncio.sleep(RETRY_S)


async def _close(watch: AsyncIterator[Changes]) -> None:
    # The port asks only for an iterator; an iterator that holds a connection may offer this.
    close: Callable[[], Awaitable[None]] | None = getattr(watch, "aclose", None)
    if close is not None:
        await close()


@dataclass(frozen=True, slots=True)
class GroupReach:
    """What a `Group` needs of the client that made it."""

    store: Store
    clock: Clock
    op_timeout_s: float
    wait_s: float
    """How long `primary` waits at most, unless it is told."""


class Group:
    """One replica group, as programs see it. Made by `client.group(name)`."""

    def __init__(self, name: str, reach: Callable[[], GroupReach]) -> None:
        self.name = name
        self._reach = reach

    async def primary(self, *, wait_s: float | None = None) -> Primary:
        """The primary, read from the store by this call. `Unavailable` if there is none in time.

        While a change of primary is under way it waits for the next one, `wait_s` at most; without
        it, as long as an ask may take. The answer was true at some moment of this call.
        """
        reach = self._reach()
        patience_s = reach.wait_s if wait_s is None else wait_s
        follower = self._follower(reach)
        until = reach.clock.now() + patience_s
        running = asyncio.ensure_future(follower.run())
        try:
            while True:
                version = follower.version
                found = follower.primary()
                if found is not None:
                    return found
                # The first read is waited for, whatever the patience.
                end = until if version or follower.problem else max(until, _soon(reach))
                if await follower.after(version, end) == version:
                    raise _no_primary(follower, patience_s)
        finally:
            await _ended(running)

    async def primaries(self) -> AsyncGenerator[Primary]:
        """The primary now, then each one after it, with its epoch; never an older one again.

        While the store is away it waits. `Unavailable` once the client has left.
        """
        reach = self._reach()
        follower = self._follower(reach)
        running = asyncio.ensure_future(follower.run())
        told: tuple[int, str] | None = None
        try:
            while True:
                version = follower.version
                found = follower.primary()
                newer = told is None or (found is not None and found.epoch >= told[0])
                if found is not None and newer and (found.epoch, found.address) != told:
                    told = (found.epoch, found.address)
                    yield found
                    continue
                try:
                    await follower.after(version, reach.clock.now() + CONFIRM_S)
                finally:
                    # A client that has left has closed its store, which may raise anything.
                    self._reach()
        finally:
            await _ended(running)

    def _follower(self, reach: GroupReach) -> GroupFollower:
        return GroupFollower(self.name, reach.store, reach.clock, op_timeout_s=reach.op_timeout_s)

    def __repr__(self) -> str:
        return f"<Group {self.name!r}>"


def _soon(reach: GroupReach) -> float:
    return reach.clock.now() + reach.op_timeout_s


async def _ended(running: asyncio.Future[None]) -> None:
    running.cancel()
    await asyncio.wait([running])


def _no_primary(follower: GroupFollower, waited_s: float) -> Unavailable:
    records = follower.records
    if follower.problem:
        return Unavailable(
            f"the primary of group {records.group!r} is not known: the store did not answer "
            f"within {waited_s:g} s: {follower.problem}. Retry is safe"
        )
    if not records.known:
        return Unavailable(
            f"there is no group {records.group!r} in this store and cluster; check the name, or "
            "start its agents: domicile replica run"
        )
    view = group_view(records)
    step = f"; next: {view.next_step}" if view.next_step else ""
    since = f"had no primary within {waited_s:g} s" if waited_s else "has no primary now"
    return Unavailable(
        f"group {records.group!r} {since}: it is {view.phase} {view.epoch}"
        + (f", and waits: {view.waits}{step}" if view.waits else "")
    )
