"""The calls of a store to the API server, on one event loop: read, commit, keep leases (S8).

The store has one on its own loop and one on the thread that renews beside it (L1). A commit writes
one ConfigMap with the resourceVersion that was read, or makes it. A renewal patches a Lease with
its resourceVersion and never makes one: so the end of a Lease is final.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Sequence
from datetime import UTC, datetime
from math import isfinite
from secrets import token_hex
from typing import Any, TypeVar

from domicile.core.state.txn import (
    Absent,
    At,
    Committed,
    Condition,
    Conflict,
    Delete,
    Item,
    Listing,
    Outcome,
    Put,
    Unknown,
    Write,
    check_limits,
    check_one_key,
)
from domicile.errors import StoreRewound, StoreUnavailable
from domicile.kubeapi.client import KubeClient
from domicile.kubeapi.errors import KubeConflict, KubeError, KubeNotFound, KubeUnanswered
from domicile.kubeapi.kinds import CONFIG_MAPS, LEASES
from domicile.kubeapi.objects import ConfigMap, KubeLease, micro_time
from domicile.ports.store import Kept
from domicile.stores.kubernetes.address import KubernetesAddress
from domicile.stores.kubernetes.objects import (
    LEASE_LABEL,
    GrantedLease,
    key_labels,
    key_name,
    key_object,
    lease_name,
    lease_object,
    leased_labels,
    read_item,
    read_key,
    read_lease,
    revision_of,
)

T = TypeVar("T")

REMEMBERED = 4_096
"""I6: keys of which a client remembers when they were made: that saves a read for each write."""

TRIES = 20
"""I6: how often a write that depends on no revision, or a renewal, meets another one."""


class KubernetesHistory:
    """What the clients of one process know of the store's revisions (S5).

    etcd counts them. A lower one than was seen before means that etcd was put back to a backup.
    """

    def __init__(self, shown: str) -> None:
        self._shown = shown
        self.newest = 0
        self.generation = 0
        """How many rewinds were seen."""

    def saw(self, revision: int, at_least: int, generation: int) -> int:
        """A revision of the whole store, which can't be below one that was known before.

        Raises `StoreRewound`, also for a client of an earlier generation.
        """
        self.check(generation)
        if revision < at_least:
            self.generation += 1
            self.newest = revision
            raise self.error()
        self.newest = max(self.newest, revision)
        return revision

    def check(self, generation: int) -> None:
        """Raise `StoreRewound` for a client that was made before a rewind."""
        if generation != self.generation:
            raise self.error()

    def error(self) -> StoreRewound:
        """What every client of the lost history is told."""
        return StoreRewound(
            f"the revisions of {self._shown} went back: its etcd was restored from a backup; drop "
            "what was learned from it and list again"
        )


class KubernetesClient:
    """Implements the calls of `Store` and `LeaseClient`. It belongs to one event loop."""

    def __init__(
        self,
        kube: KubeClient,
        address: KubernetesAddress,
        history: KubernetesHistory,
        op_timeout_s: float,
        *,
        by: str = "",
        fixed: bool = False,
    ) -> None:
        self.kube, self.address, self.history = kube, address, history
        self._by, self._op_timeout_s = by, op_timeout_s
        self._closed = False
        self._made_in = history.generation
        self._fixed = fixed
        """Whether this client ends with the history that it was made in."""
        self._created: dict[bytes, tuple[int, int]] = {}
        self._leases: dict[str, GrantedLease] = {}

    @property
    def generation(self) -> int:
        """The history that the client speaks of."""
        return self._made_in if self._fixed else self.history.generation

    # reading

    async def get(self, key: bytes) -> Item | None:
        """As `Store.get`: not from a cache, so absence is the truth of this moment (C4)."""
        self.history.check(self.generation)
        return await self._answered(self._read(key))

    async def list(self, prefix: bytes) -> Listing:
        """As `Store.list`."""
        generation, known = self.generation, self.history.newest
        self.history.check(generation)
        space, labels = self.address.namespace, key_labels(self.address.store, prefix)
        page = await self._answered(self.kube.list(CONFIG_MAPS, space, labels=labels))
        revision = self.history.saw(int(page.resource_version), known, generation)
        items = [item for found in page.items if (item := read_item(found)) is not None]
        for item in items:
            self._remember(item)
        wanted = [item for item in items if item.key.startswith(prefix)]
        return Listing(revision, tuple(sorted(wanted, key=lambda item: item.key)))

    async def revision(self) -> int:
        """The revision of the store now."""
        generation, known = self.generation, self.history.newest
        nothing = leased_labels(self.address.store, "none")
        space = self.address.namespace
        page = await self._answered(self.kube.list(CONFIG_MAPS, space, labels=nothing))
        return self.history.saw(int(page.resource_version), known, generation)

    async def _read(self, key: bytes) -> Item | None:
        name = key_name(self.address.store, key)
        try:
            found = await self.kube.get(CONFIG_MAPS, name, self.address.namespace)
        except KubeNotFound as error:
            _absent(error)
            return None
        item = read_item(found)
        if item is None:
            raise StoreUnavailable(
                f"the ConfigMap {name} of {self.address.shown} can't be read as the key {key!r}: "
                "it was changed from outside; restore or delete it"
            )
        self._remember(item)
        return item

    def _remember(self, item: Item) -> None:
        self._created.pop(item.key, None)
        self._created[item.key] = (item.revision, item.created)
        if len(self._created) > REMEMBERED:
            del self._created[next(iter(self._created))]

    # commits

    async def commit(self, conditions: Sequence[Condition], writes: Sequence[Write]) -> Outcome:
        """As `Store.commit`, of one key. A deletion tells the newest revision that is known."""
        check_limits(conditions, writes)
        check_one_key(conditions, writes)
        generation, known = self.generation, self.history.newest
        self.history.check(generation)
        try:
            async with asyncio.timeout(self._op_timeout_s):
                outcome = await self._commit(conditions, writes)
        except (KubeUnanswered, TimeoutError):
            return Unknown()
        except KubeError as error:
            raise StoreUnavailable(str(error)) from error
        except RuntimeError:
            if not self._closed:
                raise
            return Unknown()  # closed under way
        if isinstance(outcome, Committed) and writes and isinstance(writes[0], Put):
            self.history.saw(outcome.revision, known, generation)
        return outcome

    async def _commit(self, conditions: Sequence[Condition], writes: Sequence[Write]) -> Outcome:
        key = writes[0].key if writes else None
        lease = writes[0].lease if writes and isinstance(writes[0], Put) else None
        looked_up = [one for one in conditions if one.key != key]
        # S8: before the write, not with it. What is final stays so.
        async with asyncio.TaskGroup() as tasks:
            found = [tasks.create_task(_quietly(self._read(one.key))) for one in looked_up]
            leased = None if lease is None else tasks.create_task(_quietly(self._stored(lease)))
        for condition, task in zip(looked_up, found, strict=True):
            if not _holds(condition, _result(task)):
                return Conflict(condition.key)
        if leased is not None and key is not None and _result(leased) is None:
            return Conflict(key)
        if not writes:
            return Committed(self.history.newest)
        own = [one for one in conditions if one.key == key]
        write = writes[0]
        return await (self._put(own, write) if isinstance(write, Put) else self._delete(own, write))

    async def _put(self, own: Sequence[Condition], put: Put) -> Outcome:
        store, space = self.address.store, self.address.namespace
        name = key_name(store, put.key)
        for _ in range(TRIES):
            item = await self._known(own, put.key)
            if _failed(own, item):
                return Conflict(put.key)
            created, base = (0, 0) if item is None else (item.created, item.revision)
            write = f"{self._by} {token_hex(8)}".strip()
            made = key_object(store, put.key, put.value, put.lease, created, base, write)
            try:
                if item is None:
                    stored = await self._create_key(made)
                else:
                    stored = await self.kube.replace(CONFIG_MAPS, name, made, space)
            except (KubeConflict, KubeNotFound) as error:
                _absent(error)
                self._created.pop(put.key, None)
                if any(isinstance(one, Absent | At) for one in own):
                    return Conflict(put.key)
                continue
            revision = revision_of(stored)
            self._remember(Item(put.key, b"", created or revision, revision))
            return Committed(revision)
        return Conflict(put.key)

    async def _create_key(self, made: dict[str, Any]) -> ConfigMap:
        try:
            return await self.kube.create(CONFIG_MAPS, made, self.address.namespace)
        except KubeNotFound as error:
            raise self._no_namespace(error) from error

    def _no_namespace(self, error: KubeNotFound) -> StoreUnavailable:
        return StoreUnavailable(
            f"nothing can be made in namespace {self.address.namespace}: {error}; make the "
            f"namespace first: kubectl create namespace {self.address.namespace}"
        )

    async def _known(self, own: Sequence[Condition], key: bytes) -> Item | None:
        """What the conditions can be compared with, read only if it is not known."""
        if len(own) == 1 and isinstance(own[0], Absent):
            return None  # the server compares: an object is made only if there is none
        revision, created = self._created.get(key, (0, 0))
        if revision and len(own) == 1 and isinstance(own[0], At) and own[0].revision == revision:
            return Item(key, b"", created, revision)
        return await self._read(key)

    async def _delete(self, own: Sequence[Condition], delete: Delete) -> Outcome:
        name, space = key_name(self.address.store, delete.key), self.address.namespace
        for _ in range(TRIES):
            item = await self._known(own, delete.key) if own else None
            if _failed(own, item):
                return Conflict(delete.key)
            version = "" if item is None else str(item.revision)
            try:
                if not own or item is not None:
                    await self.kube.delete(CONFIG_MAPS, name, space, resource_version=version)
            except (KubeConflict, KubeNotFound) as error:
                _absent(error)
                self._created.pop(delete.key, None)
                if any(isinstance(one, At) for one in own):
                    return Conflict(delete.key)
                if own:
                    continue
            self._created.pop(delete.key, None)
            return Committed(self.history.newest)
        return Conflict(delete.key)

    # leases

    async def grant(self, lease: str, ttl_s: float) -> float:
        """As `Store.grant`."""
        if not (isfinite(ttl_s) and ttl_s > 0):
            raise ValueError(f"the ttl of lease {lease!r} is {ttl_s} s; it must be above 0")
        self.history.check(self.generation)
        return await self._answered(self._grant(lease, ttl_s))

    async def _grant(self, lease: str, ttl_s: float) -> float:
        for _ in range(TRIES):
            try:
                made = self._lease_object(lease, ttl_s)
                stored = await self.kube.create(LEASES, made, self.address.namespace)
            except KubeConflict:
                renewed = await self._renew(lease, ttl_s)
                if renewed is None:
                    continue
                return renewed
            except KubeNotFound as error:
                raise self._no_namespace(error) from error
            self._keep(lease, stored)
            return ttl_s
        raise StoreUnavailable(f"lease {lease!r} ended again and again while it was granted")

    async def renew(self, lease: str) -> float | None:
        """As `Store.renew`. It changes the Lease and never makes one (S8)."""
        generation, known = self.generation, self.history.newest
        self.history.check(generation)
        ttl_s = await self._answered(self._renew(lease))
        if ttl_s is not None:
            self.history.saw(int(self._leases[lease].version), known, generation)
        return ttl_s

    async def _renew(self, lease: str, ttl_s: float | None = None) -> float | None:
        name, space = lease_name(self.address.store, lease), self.address.namespace
        known = self._leases.get(lease)
        for _ in range(TRIES):
            if known is None:
                known = await self._stored(lease)
            if known is None:
                self._leases.pop(lease, None)
                return None
            wanted_s = known.ttl_s if ttl_s is None else ttl_s
            change = self._lease_object(lease, wanted_s)
            try:
                # A patch: an API server makes a Lease that is gone anew if it is replaced (PUT),
                # also with a resourceVersion, and its end would not be final.
                stored = await self.kube.patch(
                    LEASES, name, space, merge=change, resource_version=known.version
                )
            except KubeConflict:
                known = None
                continue
            except KubeNotFound as error:
                self._leases.pop(lease, None)
                _absent(error)
                return None
            self._keep(lease, stored)
            return wanted_s
        raise StoreUnavailable(f"lease {lease!r} was changed {TRIES} times while it was renewed")

    async def revoke(self, lease: str) -> None:
        """As `Store.revoke`: the Lease goes first, then its keys, one after the other."""
        self.history.check(self.generation)
        name, space = lease_name(self.address.store, lease), self.address.namespace
        self._leases.pop(lease, None)
        try:
            await self._answered(self.kube.delete(LEASES, name, space))
        except KubeNotFound as error:
            _absent(error)
        await self.delete_keys_of(name)

    async def keep(self, lease: str, key: bytes) -> Kept:
        """As `LeaseClient.keep`."""
        ttl_s = await self.renew(lease)
        return Kept(ttl_s, await self.get(key))

    async def end_lease(self, lease: GrantedLease) -> bool:
        """Delete a Lease that was seen unchanged for its ttl, if it is still that version."""
        try:
            await self._answered(
                self.kube.delete(
                    LEASES, lease.name, self.address.namespace, resource_version=lease.version
                )
            )
        except KubeNotFound as error:
            _absent(error)
        except KubeConflict:
            return False
        return True

    async def delete_keys_of(self, name: str) -> None:
        """Delete the keys under a Lease that is gone; with an empty name, under any such one.

        What is listed first can't have come back under a new Lease of that name unnoticed: each
        key is deleted with the resourceVersion that was listed.
        """
        space, labels = self.address.namespace, leased_labels(self.address.store, name)
        page = await self._answered(self.kube.list(CONFIG_MAPS, space, labels=labels))
        there: dict[str, bool] = {}
        for found in page.items:
            metadata = found.metadata
            of = metadata.label(LEASE_LABEL)
            if of not in there:
                there[of] = await self._answered(self._exists(of))
            if there[of]:
                continue
            try:
                version = metadata.resource_version
                await self._answered(
                    self.kube.delete(CONFIG_MAPS, metadata.name, space, resource_version=version)
                )
            except (KubeConflict, KubeNotFound) as error:
                _absent(error)
            key = read_key(found)
            if key is not None:
                self._created.pop(key, None)

    async def close(self) -> None:
        """Close the connections."""
        self._closed = True
        await self.kube.close()

    async def _exists(self, name: str) -> bool:
        try:
            await self.kube.get(LEASES, name, self.address.namespace)
        except KubeNotFound as error:
            _absent(error)
            return False
        return True

    async def _stored(self, lease: str) -> GrantedLease | None:
        name = lease_name(self.address.store, lease)
        try:
            return read_lease(await self.kube.get(LEASES, name, self.address.namespace))
        except KubeNotFound as error:
            _absent(error)
            return None

    def _lease_object(self, lease: str, ttl_s: float) -> dict[str, Any]:
        now = micro_time(datetime.now(UTC))
        write = token_hex(8)
        return lease_object(self.address.store, lease, ttl_s, now, write, self._by)

    def _keep(self, lease: str, stored: KubeLease) -> None:
        read = read_lease(stored)
        if read is not None:
            self._leases[lease] = read

    async def _answered(self, call: Awaitable[T]) -> T:
        """A call in time, with the errors of the port; refusals that mean something go through."""
        try:
            async with asyncio.timeout(self._op_timeout_s):
                return await call
        except (KubeConflict, KubeNotFound):
            raise
        except KubeError as error:
            raise StoreUnavailable(str(error)) from error
        except TimeoutError as error:
            raise StoreUnavailable(
                f"{self.address.shown} did not answer within {self._op_timeout_s:g} s"
            ) from error
        except RuntimeError as error:
            # The library for HTTP says it so. A call of several requests may be under way here.
            if not self._closed:
                raise
            raise StoreUnavailable(
                f"the store's client {self.address.shown} was closed during a call"
            ) from error


def _absent(error: KubeConflict | KubeNotFound) -> None:
    """Nothing, if it is the API server that says so: a 404 of something between us proves no
    absence, and absence frees shards (C4)."""
    if isinstance(error, KubeNotFound) and error.reason != "NotFound":
        raise StoreUnavailable(f"an answer that is not the API server's: {error}") from error


async def _quietly(call: Awaitable[T]) -> T | Exception:
    """An error as a value, so that a group of reads raises one error and not a group."""
    try:
        return await call
    except (KubeError, StoreUnavailable) as error:
        return error


def _result(task: asyncio.Task[T | Exception]) -> T:
    found = task.result()
    if isinstance(found, Exception):
        raise found
    return found


def _holds(condition: Condition, item: Item | None) -> bool:
    if isinstance(condition, At):
        return item is not None and item.revision == condition.revision
    return (item is None) == isinstance(condition, Absent)


def _failed(own: Sequence[Condition], item: Item | None) -> bool:
    return not all(_holds(one, item) for one in own)
