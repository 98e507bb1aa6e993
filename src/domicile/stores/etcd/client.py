"""The calls of the store port as requests to etcd, on one event loop.

`store` makes one client for the main loop and one for each thread that keeps a lease (L1); they
share what the process knows of the history and of lease numbers, and no connection. A commit is one
transaction, sent once. What only reads, and what may be done twice, is sent again to another server
while there is time.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil, isfinite

import grpc
import grpc.aio
import msgspec

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
)
from domicile.errors import StoreError, StoreRewound, StoreUnavailable
from domicile.ports.meter import Meter
from domicile.ports.store import Kept
from domicile.stores.etcd import rpc_pb2 as pb
from domicile.stores.etcd.address import EtcdAddress
from domicile.stores.etcd.connection import (
    GRANT,
    KEEP_ALIVE,
    RANGE,
    REVOKE,
    TIME_TO_LIVE,
    TXN,
    EtcdConnections,
    EtcdRefusal,
    EtcdSession,
    EtcdUnsure,
    stream_error,
)
from domicile.stores.etcd.failures import is_full
from domicile.stores.etcd.history import EtcdHistory, KnownAtSending
from domicile.stores.etcd.leases import HASHES, LeaseNumbers, lease_number

log = logging.getLogger("domicile")

PAGE = 2_000
"""Items that a listing asks for at a time; all pages are of one revision."""

RENEWALS = 3
"""How often one call renews a lease if etcd's leader changes meanwhile."""

LISTINGS = 3
"""How often one call begins a listing again, because etcd forgot its revision meanwhile."""


class LogLine(msgspec.Struct, frozen=True):
    """Who commits, and when it was sent, by a clock of its machine that is never stepped."""

    by: str
    at: float


@dataclass(slots=True)
class EtcdProcess:
    """What the clients of one process share."""

    address: EtcdAddress
    history: EtcdHistory
    numbers: LeaseNumbers
    meter: Meter
    by: str
    look_at: bytes
    op_timeout_s: float


class EtcdClient:
    """Implements all of `Store` but the watches, and `LeaseClient`.

    With a `generation` it belongs to the history that was known then, for ever (S5).
    """

    def __init__(self, process: EtcdProcess, generation: int | None = None) -> None:
        self._process = process
        self._data = process.address.data
        self._history, self._numbers = process.history, process.numbers
        self._generation = generation
        self.connections = EtcdConnections(
            process.address,
            process.history,
            by=process.by,
            look_at=process.look_at,
            op_timeout_s=process.op_timeout_s,
        )

    async def get(self, key: bytes) -> Item | None:
        """As `Store.get`."""
        sent = self._begin()
        try:
            request = pb.RangeRequest(key=self._data + key)
            reply = await self.connections.ask(
                RANGE, request, self.connections.deadline(), repeatable=True
            )
        except StoreError as error:
            raise self._answered(error) from error
        if not reply.kvs:
            return None
        self._saw(sent, reply.kvs)
        return self._item(reply.kvs[0])

    async def list(self, prefix: bytes) -> Listing:
        """As `Store.list`, in pages of one revision."""
        until = self.connections.deadline()
        for again in range(LISTINGS, -1, -1):
            try:
                return await self._list(self._data + prefix, until)
            except EtcdRefusal as error:
                if error.code is not grpc.StatusCode.OUT_OF_RANGE or not again:
                    raise self._answered(error) from error
            except StoreError as error:
                raise self._answered(error) from error
        raise AssertionError("the last listing returned or raised")

    async def commit(self, conditions: Sequence[Condition], writes: Sequence[Write]) -> Outcome:
        """As `Store.commit`. A commit that changes nothing does not raise the revision."""
        check_limits(conditions, writes)
        sent = self._begin()
        until = self.connections.deadline()
        try:
            numbers = await self._lease_numbers(writes, until)
            if isinstance(numbers, Conflict):
                return numbers
            reply = await self.connections.ask(
                TXN, self._transaction(conditions, writes, numbers), until,
                repeatable=False, began=sent,
            )  # fmt: skip
        except EtcdUnsure as error:
            return self._unknown(error)
        except EtcdRefusal as error:
            if is_full(error.details):
                # etcd says so also of the commit that filled it, which it has done.
                return self._unknown(error)
            if error.code is grpc.StatusCode.NOT_FOUND:
                return await self._dead_lease(writes, until)
            raise self._answered(error) from error
        except StoreError as error:
            raise self._answered(error) from error
        if not reply.succeeded:
            return self._conflict(conditions, reply)
        revision = reply.header.revision
        for write in writes:
            if isinstance(write, Put):
                self._history.saw(sent, self._data + write.key, write.value, revision)
                break
        return Committed(revision)

    async def grant(self, lease: str, ttl_s: float) -> float:
        """As `Store.grant`. etcd counts whole seconds and has a least ttl; the answer is real."""
        if not (isfinite(ttl_s) and ttl_s > 0):
            raise ValueError(f"the ttl of lease {lease!r} is {ttl_s} s; it must be above 0")
        self._begin()
        until = self.connections.deadline()
        try:
            for attempt in range(HASHES):
                number = lease_number(self._process.address.root, lease, attempt)
                granted_s = await self._grant(lease, number, ceil(ttl_s), until)
                if granted_s is not None:
                    self._numbers.keep(lease, number)
                    return granted_s
                self._process.meter.count("store.lease_collisions")
        except StoreError as error:
            raise self._answered(error) from error
        raise StoreUnavailable(
            f"each of the {HASHES} numbers of lease {lease!r} belongs to another lease in "
            f"{self._process.address.shown}; see `etcdctl lease list`"
        )

    async def renew(self, lease: str) -> float | None:
        """As `Store.renew`."""
        return (await self._keep(lease, None)).ttl_s

    async def keep(self, lease: str, key: bytes) -> Kept:
        """As `LeaseClient.keep`. The read is proof that the leader which renewed was the leader."""
        return await self._keep(lease, self._data + key)

    async def revoke(self, lease: str) -> None:
        """As `Store.revoke`."""
        self._begin()
        until = self.connections.deadline()
        try:
            number = await self._number(lease, until)
            self._numbers.forget(lease)
            if number is None:
                return
            request = pb.LeaseRevokeRequest(ID=number)
            await self.connections.ask(REVOKE, request, until, repeatable=True)
        except EtcdRefusal as error:
            if error.code is not grpc.StatusCode.NOT_FOUND:
                raise self._answered(error) from error
        except StoreError as error:
            raise self._answered(error) from error

    async def newest(self, until: float) -> int:
        """The newest revision of the store."""
        try:
            request = pb.RangeRequest(key=self._process.look_at, keys_only=True)
            reply = await self.connections.ask(RANGE, request, until, repeatable=True)
        except StoreError as error:
            raise self._answered(error) from error
        return reply.header.revision

    async def close(self) -> None:
        """Close the connections."""
        await self.connections.close()

    def _begin(self) -> KnownAtSending:
        if self._generation is not None:
            self._history.check_generation(self._generation)
        return self._history.now()

    def _unknown(self, error: StoreError) -> Unknown:
        self._process.meter.count("store.unknown")
        log.warning("whether a commit happened is unknown: %s", error)
        return Unknown()

    def _answered(self, error: StoreError) -> StoreError:
        """The error for the caller."""
        if isinstance(error, StoreRewound):
            return StoreRewound(*error.args)
        return StoreUnavailable(str(error))

    async def _list(self, prefix: bytes, until: float) -> Listing:
        sent = self._begin()
        end = prefix_end(prefix)
        request = pb.RangeRequest(key=prefix, range_end=end, limit=PAGE)
        revision = 0
        items: list[Item] = []
        while True:
            reply = await self.connections.ask(RANGE, request, until, repeatable=True, began=sent)
            # A page of an old revision still answers with the newest one in its header.
            revision = revision or reply.header.revision
            items.extend(map(self._item, reply.kvs))
            self._saw(sent, reply.kvs)
            if not reply.more:
                return Listing(revision, tuple(items))
            after = reply.kvs[-1].key + b"\0"
            request = pb.RangeRequest(key=after, range_end=end, limit=PAGE, revision=revision)

    def _transaction(
        self,
        conditions: Sequence[Condition],
        writes: Sequence[Write],
        numbers: dict[str, int],
    ) -> pb.TxnRequest:
        compare: list[pb.Compare] = []
        for one in conditions:
            key = self._data + one.key
            if isinstance(one, At):
                # A key that does not exist has the revision 0.
                revision = one.revision or -1
                compare.append(pb.Compare(target=pb.Compare.MOD, key=key, mod_revision=revision))
            else:
                # Its create revision is 0, too.
                result = pb.Compare.EQUAL if isinstance(one, Absent) else pb.Compare.GREATER
                compare.append(
                    pb.Compare(result=result, target=pb.Compare.CREATE, key=key, create_revision=0)
                )
        success: list[pb.RequestOp] = []
        for write in writes:
            key = self._data + write.key
            if isinstance(write, Delete):
                op = pb.RequestOp(request_delete_range=pb.DeleteRangeRequest(key=key))
            else:
                lease = 0 if write.lease is None else numbers[write.lease]
                put = pb.PutRequest(key=key, value=write.value, lease=lease)
                op = pb.RequestOp(request_put=put)
            success.append(op)
        address = self._process.address
        if address.logged and writes:
            line = LogLine(self._process.by, time.monotonic())
            put = pb.PutRequest(key=address.log, value=msgspec.json.encode(line))
            success.append(pb.RequestOp(request_put=put))
        # The same revision says which condition did not hold.
        failure = [
            pb.RequestOp(request_range=pb.RangeRequest(key=self._data + one.key, keys_only=True))
            for one in conditions
        ]
        return pb.TxnRequest(compare=compare, success=success, failure=failure)

    def _conflict(self, conditions: Sequence[Condition], reply: pb.TxnResponse) -> Conflict:
        for condition, found in zip(conditions, reply.responses, strict=True):
            kvs = found.response_range.kvs
            revision = kvs[0].mod_revision if kvs else 0
            match condition:
                case At(_, wanted):
                    holds = revision == wanted > 0
                case Absent():
                    holds = not revision
                case _:
                    holds = revision > 0
            if not holds:
                return Conflict(condition.key)
        raise StoreUnavailable(
            f"the store {self._process.address.shown} refused a commit and names no condition"
        )

    async def _lease_numbers(
        self, writes: Sequence[Write], until: float
    ) -> dict[str, int] | Conflict:
        """The numbers of all leases of some writes; a lease that is gone is a conflict."""
        numbers: dict[str, int] = {}
        for write in writes:
            if isinstance(write, Put) and write.lease is not None and write.lease not in numbers:
                try:
                    number = await self._number(write.lease, until)
                except EtcdUnsure as error:
                    # Only this read: the commit was not sent.
                    raise StoreUnavailable(str(error)) from error
                if number is None:
                    return Conflict(write.key)
                numbers[write.lease] = number
        return numbers

    async def _dead_lease(self, writes: Sequence[Write], until: float) -> Outcome:
        """Which write had a lease that is gone. etcd did not run the commit."""
        leased = [write for write in writes if isinstance(write, Put) and write.lease is not None]
        for write in leased:
            assert write.lease is not None
            number = self._numbers.get(write.lease)
            request = pb.LeaseTimeToLiveRequest(ID=number or 0)
            try:
                reply = await self.connections.ask(TIME_TO_LIVE, request, until, repeatable=True)
            except StoreError:
                break
            if reply.TTL <= 0:
                self._numbers.forget(write.lease)
                return Conflict(write.key)
        return Conflict(leased[0].key)

    async def _grant(self, lease: str, number: int, ttl_s: int, until: float) -> float | None:
        """The real ttl; None if the number belongs to another lease."""
        request = pb.LeaseGrantRequest(ID=number, TTL=ttl_s)
        for _ in range(RENEWALS):
            granted_s, foreign = 0, False
            try:
                reply = await self.connections.ask(GRANT, request, until, repeatable=True)
                granted_s = reply.TTL
            except EtcdRefusal as error:
                if error.code is not grpc.StatusCode.FAILED_PRECONDITION:
                    raise
                foreign = await self._is_foreign(number, until)
            found = not foreign and await self._bind(lease, number, until)
            if found is False:
                return None
            if granted_s and found:
                return float(granted_s)
            if found and (kept := await self._renewed(lease, number, None, until)).ttl_s:
                return kept.ttl_s
            # It ended between these requests: it can be granted now.
        raise StoreUnavailable(
            f"lease {lease!r} ends as soon as {self._process.address.shown} grants it; is its ttl "
            "long enough for this network?"
        )

    async def _is_foreign(self, number: int, until: float) -> bool:
        """Whether another root, or another program, has a lease with this number."""
        request = pb.LeaseTimeToLiveRequest(ID=number, keys=True)
        try:
            reply = await self.connections.ask(TIME_TO_LIVE, request, until, repeatable=True)
        except EtcdRefusal as error:
            # This user must not even know the names of its keys.
            if error.code is grpc.StatusCode.PERMISSION_DENIED:
                return True
            raise
        return bool(reply.keys) and self._binding(number) not in reply.keys

    async def _bind(self, lease: str, number: int, until: float) -> bool | None:
        """Whether the key of a number holds this text now; None if the lease is gone."""
        key = self._binding(number)
        put = pb.PutRequest(key=key, value=lease.encode(), lease=number)
        request = pb.TxnRequest(
            compare=[pb.Compare(target=pb.Compare.CREATE, key=key, create_revision=0)],
            success=[pb.RequestOp(request_put=put)],
            failure=[pb.RequestOp(request_range=pb.RangeRequest(key=key))],
        )
        try:
            reply = await self.connections.ask(TXN, request, until, repeatable=True)
        except EtcdRefusal as error:
            if error.code is grpc.StatusCode.NOT_FOUND:
                return None
            raise
        if reply.succeeded:
            return True
        kvs = reply.responses[0].response_range.kvs
        return bool(kvs) and kvs[0].value == lease.encode()

    async def _number(self, lease: str, until: float) -> int | None:
        """The number of a lease that this process or another one was granted; None: it is gone."""
        known = self._numbers.get(lease)
        if known is not None:
            return known
        for attempt in range(HASHES):
            number = lease_number(self._process.address.root, lease, attempt)
            request = pb.RangeRequest(key=self._binding(number))
            reply = await self.connections.ask(RANGE, request, until, repeatable=True)
            # Without a key here the number may be another root's: then the lease has the next one.
            if reply.kvs and reply.kvs[0].value == lease.encode():
                self._numbers.keep(lease, number)
                return number
        return None

    async def _keep(self, lease: str, key: bytes | None) -> Kept:
        self._begin()
        until = self.connections.deadline()
        try:
            number = await self._number(lease, until)
            kept = (
                Kept(None, None)
                if number is None
                else await self._renewed(lease, number, key, until)
            )
        except StoreError as error:
            raise self._answered(error) from error
        if kept.ttl_s is None:
            self._numbers.forget(lease)
        return kept

    async def _renewed(self, lease: str, number: int, key: bytes | None, until: float) -> Kept:
        """Renew, and then read by a majority of etcd's members.

        A leader renews without asking the others. One that was stopped and goes on would renew a
        lease that its successor ends, before it learns of the successor. A read through a majority
        in the same term shows that there was none yet.
        """
        request = pb.LeaseKeepAliveRequest(ID=number)
        # No transaction: a database without space refuses those that only read, too.
        read = pb.RangeRequest(key=self._binding(number) if key is None else key)

        async def call(session: EtcdSession) -> pb.LeaseKeepAliveResponse:
            stream = self.connections.stream(session, KEEP_ALIVE)(
                metadata=self.connections.metadata()
            )
            try:
                await stream.write(request)
                reply = await stream.read()
                if reply is grpc.aio.EOF:
                    raise await stream_error(stream)
                assert isinstance(reply, pb.LeaseKeepAliveResponse)
                return reply
            finally:
                stream.cancel()

        began = self._begin()
        for _ in range(RENEWALS):
            reply = await self.connections.run(
                call, until, repeatable=True, linearizable=False, began=began
            )
            if reply.TTL <= 0:
                # A leader that was stopped, or that has just been elected, may not know the lease
                # yet. What a majority knows of it decides.
                if await self._bound(lease, number, until):
                    continue
                return Kept(None, None)
            proof = await self.connections.ask(RANGE, read, until, repeatable=True, began=began)
            found = proof.kvs[0] if proof.kvs else None
            if key is None and (found is None or found.value != lease.encode()):
                return Kept(None, None)
            if proof.header.raft_term == reply.header.raft_term:
                if key is None or found is None:
                    return Kept(float(reply.TTL), None)
                self._saw(began, proof.kvs)
                return Kept(float(reply.TTL), self._item(found))
        raise StoreUnavailable(
            f"the leader of {self._process.address.shown} changes again and again; see "
            "`etcdctl endpoint status --cluster`"
        )

    async def _bound(self, lease: str, number: int, until: float) -> bool:
        """Whether the key of a number holds this text: it ends with the lease."""
        request = pb.RangeRequest(key=self._binding(number))
        reply = await self.connections.ask(RANGE, request, until, repeatable=True)
        return bool(reply.kvs) and reply.kvs[0].value == lease.encode()

    def _binding(self, number: int) -> bytes:
        return self._process.address.leases + b"%016x" % number

    def _item(self, kv: pb.KeyValue) -> Item:
        return etcd_item(self._data, kv)

    def _saw(self, sent: KnownAtSending, kvs: Sequence[pb.KeyValue]) -> None:
        newest = max(kvs, key=lambda kv: kv.mod_revision, default=None)
        if newest is not None:
            self._history.saw(sent, newest.key, newest.value, newest.mod_revision)


def etcd_item(data: bytes, kv: pb.KeyValue) -> Item:
    """An item as callers see it, without what all keys begin with."""
    return Item(kv.key[len(data) :], kv.value, kv.create_revision, kv.mod_revision)


def prefix_end(prefix: bytes) -> bytes:
    """The end of the range of all keys under a prefix, which is never empty here."""
    stem = prefix.rstrip(b"\xff")
    return stem[:-1] + bytes([stem[-1] + 1])
