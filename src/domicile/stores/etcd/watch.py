"""A watch of etcd: one stream, read by its caller's own task.

Only `store` makes it. It begins at the last revision that its caller has seen and drops what comes
again of it. Some versions of etcd lose a deletion at exactly the revision they compacted to; so a
watch that would begin behind such a revision ends with `WatchCompacted` instead. The revision in a
header is never a place to resume: it may be ahead of events that are still to come.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from itertools import groupby
from time import monotonic
from typing import Any, Protocol

import grpc
import grpc.aio

from domicile.core.state.txn import Change, Changes
from domicile.errors import ConfigError, StoreError, StoreRewound, StoreUnavailable, WatchCompacted
from domicile.stores.etcd import rpc_pb2 as pb
from domicile.stores.etcd.client import EtcdClient, etcd_item, prefix_end
from domicile.stores.etcd.connection import WATCH, EtcdSession, stream_error
from domicile.stores.etcd.failures import Fate, fate
from domicile.stores.etcd.history import EtcdHistory, KnownAtSending
from domicile.stores.etcd.watch_pulse import WatchPulse


class WatchOwner(Protocol):
    """The store that made a watch."""

    client: EtcdClient
    history: EtcdHistory
    data: bytes

    def wait(self, watch: EtcdWatch) -> None:
        """A caller waits in this watch; break it off if it must end."""
        ...

    def leave(self, watch: EtcdWatch) -> None:
        """Nobody waits any more."""
        ...


class EtcdWatch:
    """Every change under a prefix after a revision. Ends for good with its first error."""

    def __init__(self, owner: WatchOwner, prefix: bytes, seen: int) -> None:
        self._owner = owner
        self._prefix, self._seen = owner.data + prefix, seen
        self._sent: KnownAtSending = owner.history.now()
        self._found: deque[Changes] = deque()
        self._events: list[pb.Event] = []
        self._stream: Any = None
        self._session: EtcdSession | None = None
        self._reading: asyncio.Task[Any] | None = None
        self._error: StoreError | None = None
        self._read = False
        self._pulse = self._new_pulse()
        self.following = False
        """Whether the server has begun it, and its changes come as they happen."""

    def __aiter__(self) -> AsyncIterator[Changes]:
        return self

    async def __anext__(self) -> Changes:
        if self._read:
            raise RuntimeError("this watch is already being read; start a second watch instead")
        self._read = True
        self._owner.wait(self)
        try:
            while not self._found:
                await self._look()
        except StoreError as error:
            self._error = self._error or error
            await self.aclose()
            raise
        except grpc.aio.AioRpcError as error:
            self._error = await self._broken(error)
            await self.aclose()
            raise self._error from error
        except asyncio.CancelledError:
            # Another call begins again after what was handed out.
            await self.aclose()
            raise
        finally:
            self._read = False
            self._owner.leave(self)
        found = self._found.popleft()
        self._seen = found.revision
        return found

    async def aclose(self) -> None:
        """End the stream. Changes that were not handed out come again, if the watch goes on."""
        stream, self._stream = self._stream, None
        reading, self._reading = self._reading, None
        session, self._session = self._session, None
        self.following = False
        self._found.clear()
        self._events.clear()
        if reading is not None:
            reading.cancel()
        if stream is not None:
            stream.cancel()
        if session is not None:
            await session.end()

    def break_off(self, error: StoreError) -> None:
        """End with an error, now and at every later call."""
        self._error = self._error or error
        # What was found belongs to a lost history (S5), or the next watch finds it again.
        self._found.clear()
        if self._reading is not None:
            self._reading.cancel()

    async def _look(self) -> None:
        """Take one answer of the stream; it may hold no changes."""
        self._check()
        if self._stream is None:
            await self._open()
        timeout_s = self._owner.client.connections.op_timeout_s
        while True:
            reply = await self._answer(self._pulse.wait_s(monotonic()))
            if reply is not None:
                break
            newest, read_at = self._owner.history.newest()
            if self._pulse.must_ask(monotonic(), newest, read_at):
                # Silent: is there nothing new, or is the server frozen or cut off?
                self._pulse.asks(newest)
                await self._ask_for_progress(timeout_s)
                reply = await self._answer(timeout_s)
                break
        if reply is None:
            raise StoreUnavailable(
                f"a watch of the store {self._shown} is silent for {3 * timeout_s:g} s or more; it "
                "is begun again elsewhere"
            )
        self._pulse.heard(monotonic())
        self._take(reply)
        if not reply.events and not self._pulse.told(reply.header.revision):
            raise StoreUnavailable(
                f"a member of the store {self._shown} has lagged behind the others for "
                f"{2 * timeout_s:g} s; the watch is begun again elsewhere"
            )

    async def _open(self) -> None:
        connections = self._owner.client.connections
        until = connections.deadline()
        request = pb.WatchCreateRequest(
            key=self._prefix, range_end=prefix_end(self._prefix),
            start_revision=max(self._seen, 1), fragment=True,
        )  # fmt: skip
        for again in (True, False):
            session = self._session = await connections.session(until)
            session.begin()
            self._stream = connections.stream(session, WATCH)(metadata=connections.metadata())
            try:
                self._reading = asyncio.ensure_future(_begun(self._stream, request))
                reply = await self._answer(max(until - monotonic(), 0.001))
            except grpc.aio.AioRpcError as error:
                if not again or fate(error.code(), error.details() or "") is not Fate.TOKEN:
                    raise
            else:
                if reply is None:
                    await connections.retire(session)
                    raise StoreUnavailable(
                        f"the store {self._shown} did not begin a watch within "
                        f"{connections.op_timeout_s:g} s; look at the servers and the network"
                    )
                # A login that is too old is told as a missing right here.
                if not (again and reply.canceled and not reply.compact_revision and _login(reply)):
                    self._take(reply)
                    if reply.header.revision < self._seen:
                        await self._see_whether_rewound(until)
                    self._pulse = self._new_pulse()
                    self.following = True
                    return
            await self.aclose()
            connections.forget_token()

    def _new_pulse(self) -> WatchPulse:
        return WatchPulse(2 * self._owner.client.connections.op_timeout_s, monotonic())

    async def _broken(self, error: grpc.aio.AioRpcError) -> StoreError:
        """What a connection that broke means: the server may have been restored meanwhile (S5)."""
        connections = self._owner.client.connections
        if self._session is not None:
            await connections.retire(self._session)
        try:
            await connections.session(connections.deadline())
            self._owner.history.check_generation(self._sent.generation)
        except StoreRewound as rewound:
            return StoreRewound(*rewound.args)
        except (StoreUnavailable, ConfigError):
            pass
        return StoreUnavailable(connections.explain(error))

    async def _see_whether_rewound(self, until: float) -> None:
        """This member is behind the revision that the caller has seen; is the whole store? (S5)"""
        newest = await self._owner.client.newest(until)
        if newest < self._seen:
            raise StoreRewound(
                f"the store {self._shown} is at revision {newest}, {self._seen} had been seen; "
                "drop what was learned from it and list again"
            )

    async def _ask_for_progress(self, timeout_s: float) -> None:
        request = pb.WatchRequest(progress_request=pb.WatchProgressRequest())
        try:
            async with asyncio.timeout(timeout_s):
                await self._stream.write(request)
        except asyncio.InvalidStateError:
            raise await stream_error(self._stream) from None
        except TimeoutError:
            raise StoreUnavailable(f"a watch of the store {self._shown} is stuck") from None

    async def _answer(self, timeout_s: float) -> pb.WatchResponse | None:
        """The stream's next answer; None if it does not come in time."""
        reading = self._reading
        if reading is None:
            reading = self._reading = asyncio.ensure_future(self._stream.read())
        await asyncio.wait((reading,), timeout=timeout_s)
        if not reading.done():
            return None
        self._reading = None
        if reading.cancelled():
            self._check()
            raise StoreUnavailable(f"the store's client {self._shown} is closed")
        error = reading.exception()
        if error is not None:
            raise error
        reply = reading.result()
        if reply is grpc.aio.EOF:
            raise await stream_error(self._stream)
        assert isinstance(reply, pb.WatchResponse)
        return reply

    def _take(self, reply: pb.WatchResponse) -> None:
        self._owner.history.check(reply.header, self._sent, linearizable=False)
        if reply.compact_revision:
            raise WatchCompacted(
                f"the store {self._shown} no longer keeps the changes after revision "
                f"{self._seen}, the oldest are of {reply.compact_revision}; list again"
            )
        if reply.canceled:
            raise StoreUnavailable(
                f"the store {self._shown} ended a watch: {reply.cancel_reason or 'no reason given'}"
            )
        self._events.extend(reply.events)
        if reply.fragment:
            return
        for revision, events in groupby(self._events, lambda event: event.kv.mod_revision):
            if revision > self._seen:
                self._found.append(Changes(revision, tuple(map(self._change, events))))
        self._events = []

    def _change(self, event: pb.Event) -> Change:
        data, kv = self._owner.data, event.kv
        if event.type == pb.Event.DELETE:
            return Change(kv.key[len(data) :], None)
        self._owner.history.saw(self._sent, kv.key, kv.value, kv.mod_revision)
        return Change(kv.key[len(data) :], etcd_item(data, kv))

    def _check(self) -> None:
        if self._error is not None:
            # A new object each time: raising one twice would chain its tracebacks.
            raise type(self._error)(*self._error.args)
        self._owner.history.check_generation(self._sent.generation)

    @property
    def _shown(self) -> str:
        return self._owner.client.connections.address.shown


def _login(reply: pb.WatchResponse) -> bool:
    refused = fate(grpc.StatusCode.UNKNOWN, reply.cancel_reason)
    return refused is Fate.TOKEN or "permission denied" in reply.cancel_reason


async def _begun(stream: Any, request: pb.WatchCreateRequest) -> Any:
    """The first answer of a stream."""
    try:
        await stream.write(pb.WatchRequest(create_request=request))
    except asyncio.InvalidStateError:
        raise await stream_error(stream) from None
    return await stream.read()
