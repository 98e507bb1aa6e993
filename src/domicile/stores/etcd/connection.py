"""The connections of one client to an etcd cluster: which server is asked, logged in, until when.

`client` and `watch` use it, on one event loop. An `EtcdSession` is one channel to one server. It is
used only after a read has shown that the server works and has the known history (S5). After a
failure it is retired: calls under way may end, new ones get another server, or the same one by a
new channel. No request that may have run is ever sent twice, unless its caller says that this does
no harm.
"""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from time import monotonic
from typing import Any, Generic, Protocol, TypeVar

import grpc
import grpc.aio

from domicile.errors import ConfigError, StoreError, StoreUnavailable
from domicile.stores.etcd import rpc_pb2 as pb
from domicile.stores.etcd.address import EtcdAddress
from domicile.stores.etcd.failures import Fate, explanation, fate, is_settings_error
from domicile.stores.etcd.history import EtcdHistory, KnownAtSending

PING_S = 10.0
"""Seconds without traffic before gRPC pings; etcd takes pings more often than 5 s for abuse."""

PAUSE_S = 0.05
"""Seconds before servers that know no leader are asked again."""

LEAST_SHARE_S = 0.05
"""Seconds that a server gets at least, if several share the time of one call."""


class _Answer(Protocol):
    """An answer of etcd; each has a header."""

    @property
    def header(self) -> pb.ResponseHeader:
        """Which cluster answers, at which revision."""
        ...

    @classmethod
    def FromString(cls, s: bytes) -> Any:  # noqa: N802
        """Read an answer."""
        ...


A = TypeVar("A", bound=_Answer)


class _Request(Protocol):
    """A message for etcd."""

    def SerializeToString(self) -> bytes:  # noqa: N802
        """Its bytes."""
        ...


@dataclass(frozen=True, slots=True)
class EtcdMethod(Generic[A]):
    """One procedure of etcd's API."""

    path: str
    answer: type[A]
    linearizable: bool = True
    """Whether its answer has a revision that is not older than what was known before."""


RANGE = EtcdMethod("/etcdserverpb.KV/Range", pb.RangeResponse)
TXN = EtcdMethod("/etcdserverpb.KV/Txn", pb.TxnResponse)
GRANT = EtcdMethod("/etcdserverpb.Lease/LeaseGrant", pb.LeaseGrantResponse)
REVOKE = EtcdMethod("/etcdserverpb.Lease/LeaseRevoke", pb.LeaseRevokeResponse)
# A member that lags behind asks the leader, and answers with its own revision.
TIME_TO_LIVE = EtcdMethod(
    "/etcdserverpb.Lease/LeaseTimeToLive", pb.LeaseTimeToLiveResponse, linearizable=False
)
KEEP_ALIVE = EtcdMethod("/etcdserverpb.Lease/LeaseKeepAlive", pb.LeaseKeepAliveResponse)
WATCH = EtcdMethod("/etcdserverpb.Watch/Watch", pb.WatchResponse)
MEMBERS = EtcdMethod("/etcdserverpb.Cluster/MemberList", pb.MemberListResponse)
STATUS = EtcdMethod("/etcdserverpb.Maintenance/Status", pb.StatusResponse)
ALARM = EtcdMethod("/etcdserverpb.Maintenance/Alarm", pb.AlarmResponse)
AUTHENTICATE = EtcdMethod("/etcdserverpb.Auth/Authenticate", pb.AuthenticateResponse)


class EtcdRefusal(StoreError):
    """etcd did not run a request, and would not run it now. The client makes its answer of it."""

    def __init__(self, text: str, code: grpc.StatusCode, details: str) -> None:
        super().__init__(text)
        self.code, self.details = code, details


class EtcdUnsure(StoreUnavailable):
    """A request was sent, and whether it ran is not known."""


class EtcdSession:
    """One channel to one server. Whoever uses it says so, so that a retired one closes in time."""

    def __init__(self, endpoint: str, channel: grpc.aio.Channel, since: KnownAtSending) -> None:
        self.endpoint = endpoint
        self.channel = channel
        self.generation = since.generation
        self.retired = False
        self._uses = 0

    def usable(self, generation: int) -> bool:
        """Whether it still is the connection that was looked at when it was made."""
        state = self.channel.get_state()
        ready = state is grpc.ChannelConnectivity.READY
        return ready and not self.retired and generation == self.generation

    def begin(self) -> None:
        """A call or watch begins to use it."""
        self._uses += 1

    async def end(self) -> None:
        """A call or watch has ended."""
        self._uses -= 1
        await self.close_if_done()

    async def close_if_done(self) -> None:
        """Close it if it is retired and nothing uses it."""
        if self.retired and not self._uses:
            await self.channel.close()


class EtcdConnections:
    """Asks an etcd cluster. `by` decides which server is asked first, `look_at` is a key that the
    user may read."""

    def __init__(
        self,
        address: EtcdAddress,
        history: EtcdHistory,
        *,
        by: str,
        look_at: bytes,
        op_timeout_s: float,
    ) -> None:
        self.address = address
        self.history = history
        self.op_timeout_s = op_timeout_s
        self._look_at = look_at
        self._next = zlib.crc32(by.encode()) % len(address.endpoints)
        self._session: EtcdSession | None = None
        self._opening = asyncio.Lock()
        self._token = ""
        self._no_login = False
        self._closed = False

    def deadline(self) -> float:
        """When a call that begins now must end, by `time.monotonic`."""
        return monotonic() + self.op_timeout_s

    async def ask(
        self,
        method: EtcdMethod[A],
        request: _Request,
        until: float,
        *,
        repeatable: bool,
        began: KnownAtSending | None = None,
    ) -> A:
        """The answer to a request. `began`: what was known when the call began that it is part of;
        after a rewind since then it is not sent.

        Raises `EtcdRefusal` or `StoreUnavailable` if it did not run, `EtcdUnsure` if it may have.
        """

        async def call(session: EtcdSession) -> A:
            reply: A = await self.unary(session, method)(request, metadata=self.metadata())
            return reply

        return await self.run(
            call, until, repeatable=repeatable, linearizable=method.linearizable, began=began
        )

    async def run(
        self,
        call: Callable[[EtcdSession], Awaitable[A]],
        until: float,
        *,
        repeatable: bool,
        linearizable: bool = True,
        began: KnownAtSending | None = None,
    ) -> A:
        """As `ask`, for a call that is more than one request and its answer."""
        generation = self.history.generation if began is None else began.generation
        attempts, tokens = len(self.address.endpoints), 1
        while True:
            session = await self.session(until)
            self.history.check_generation(generation)
            sent = self.history.now()
            left_s = self._left(until)
            if repeatable and attempts > 1:
                left_s = max(left_s / 2, LEAST_SHARE_S)
            session.begin()
            try:
                async with in_time(left_s):
                    reply = await call(session)
            except grpc.aio.AioRpcError as error:
                details = error.details() or ""
                found, said = fate(error.code(), details), self.explain(error)
                if found is Fate.TOKEN and tokens and self.address.user:
                    tokens -= 1
                    self._token = ""
                    continue
                if found in (Fate.REFUSED, Fate.TOKEN):
                    raise EtcdRefusal(said, error.code(), details) from error
                await self.retire(session)
                if found is Fate.UNSURE:
                    if not repeatable or not attempts or monotonic() >= until:
                        raise EtcdUnsure(said) from error
                    attempts -= 1
                elif self._left(until) < 2 * PAUSE_S:
                    raise StoreUnavailable(said) from error
                else:
                    # Soon there may be a leader, which all servers learn of.
                    await asyncio.sleep(PAUSE_S)
            except asyncio.CancelledError:
                if not self._closed or _is_cancelled():
                    raise
                raise EtcdUnsure(self._closed_text()) from None
            else:
                self.history.check(reply.header, sent, linearizable=linearizable)
                return reply
            finally:
                await session.end()

    @asynccontextmanager
    async def only(self, endpoint: str) -> AsyncGenerator[EtcdSession, None]:
        """A channel to one server, which need not know a leader or the known history. For tools."""
        session = EtcdSession(endpoint, await self._channel(endpoint), self.history.now())
        try:
            async with in_time(self.op_timeout_s):
                if not self._logged_in():
                    await self._log_in(session)
                yield session
        finally:
            await session.channel.close()

    @property
    def login(self) -> tuple[tuple[str, str], ...]:
        """What goes with a request that a server without a leader may answer."""
        return self.metadata()[1:]

    @property
    def auth(self) -> bool | None:
        """Whether etcd asks for a login; None: nobody has logged in."""
        return False if self._no_login else True if self._token else None

    def unary(self, session: EtcdSession, method: EtcdMethod[A]) -> Any:
        """What calls a procedure of etcd with one request."""
        return session.channel.unary_unary(
            method.path,
            request_serializer=_serialized,
            response_deserializer=method.answer.FromString,
        )

    def stream(self, session: EtcdSession, method: EtcdMethod[A]) -> Any:
        """What begins a procedure of etcd that takes and gives any number of messages."""
        return session.channel.stream_stream(
            method.path,
            request_serializer=_serialized,
            response_deserializer=method.answer.FromString,
        )

    def metadata(self) -> tuple[tuple[str, str], ...]:
        """What goes with each request: a server without a leader must say so at once."""
        token = (("token", self._token),) if self._token else ()
        return (("hasleader", "true"), *token)

    def forget_token(self) -> None:
        """The server refused the login: ask for a new one with the next session."""
        self._token = ""
        if self._session is not None:
            self._session.retired = True

    async def session(self, until: float) -> EtcdSession:
        """A connection that works and has the known history; `StoreUnavailable` if there is none.

        Nothing was sent for the caller if this raises.
        """
        session = self._session
        if session is not None and session.usable(self.history.generation) and self._logged_in():
            return session
        try:
            async with asyncio.timeout(max(until - monotonic(), 0.0)), self._opening:
                return await self._open(until)
        except TimeoutError:
            raise StoreUnavailable(
                f"the store {self.address.shown} can't be reached within {self.op_timeout_s:g} s; "
                "look at the servers and the network"
            ) from None

    async def retire(self, session: EtcdSession) -> None:
        """Ask another server from now on, or the same one by a new connection."""
        session.retired = True
        if self._session is session:
            self._session = None
            self._next = (self._next + 1) % len(self.address.endpoints)

    async def close(self) -> None:
        """End all calls and close the channel."""
        self._closed = True
        session, self._session = self._session, None
        if session is not None:
            session.retired = True
            await session.channel.close()

    @property
    def closed(self) -> bool:
        """Whether `close` was called."""
        return self._closed

    def explain(self, error: grpc.aio.AioRpcError) -> str:
        """An error as a sentence."""
        address = self.address
        said = explanation(error.code(), error.details() or "", tls=address.tls, user=address.user)
        return f"the store {address.shown} {said}"

    async def _open(self, until: float) -> EtcdSession:
        """A session of the first server that answers."""
        old = self._session
        if old is not None:
            if old.usable(self.history.generation) and self._logged_in():
                return old
            old.retired = True
            await old.close_if_done()
            self._session = None
        count = len(self.address.endpoints)
        tried = 0
        while True:
            if self._closed:
                raise StoreUnavailable(self._closed_text())
            share_s = max(self._left(until) / (count - tried % count), LEAST_SHARE_S)
            try:
                session = await self._connected(self.address.endpoints[self._next], share_s)
            except grpc.aio.AioRpcError as error:
                tried += 1
                self._next = (self._next + 1) % count
                if tried % count == 0:
                    await self._after_round(error, until)
            else:
                if self.closed:
                    await session.channel.close()
                    raise StoreUnavailable(self._closed_text())
                self._session = session
                return session

    async def _after_round(self, error: grpc.aio.AioRpcError, until: float) -> None:
        """No server could be used. Raise, unless another round may help."""
        details = error.details() or ""
        if "no leader" in details and self._left(until) > 2 * PAUSE_S:
            await asyncio.sleep(PAUSE_S)
            return
        settings = is_settings_error(error.code(), details)
        # What has worked may work again: another login may be on its way to this process.
        kind = ConfigError if settings and not self.history.has_answered else StoreUnavailable
        raise kind(self.explain(error)) from error

    async def _connected(self, endpoint: str, share_s: float) -> EtcdSession:
        """A session that has shown that it works and has the known history."""
        session = EtcdSession(endpoint, await self._channel(endpoint), self.history.now())
        try:
            async with in_time(share_s):
                await self._begin(session)
        except asyncio.CancelledError:
            await session.channel.close()
            if not self._closed or _is_cancelled():
                raise
            raise StoreUnavailable(self._closed_text()) from None
        except BaseException:
            await session.channel.close()
            raise
        return session

    async def _begin(self, session: EtcdSession) -> None:
        for again in (True, False):
            if not self._logged_in():
                await self._log_in(session)
            try:
                await self._look(session)
            except grpc.aio.AioRpcError as error:
                if not again or fate(error.code(), error.details() or "") is not Fate.TOKEN:
                    raise
                self._token = ""
            else:
                return

    async def _look(self, session: EtcdSession) -> None:
        """Read what is known to have been written; `StoreRewound` if it is not there (S5)."""
        ask = self.unary(session, RANGE)
        sent, witness = self.history.now(), self.history.witness
        if witness is not None:
            request = pb.RangeRequest(key=witness.key, revision=witness.revision)
            try:
                reply = await ask(request, metadata=self.metadata())
            except grpc.aio.AioRpcError as error:
                details = error.details() or ""
                if "future revision" in details:
                    raise self.history.rewound(
                        sent, f"revision {witness.revision} had been seen and is to come"
                    ) from error
                if "compacted" not in details:
                    raise
            else:
                self.history.check(reply.header, sent)
                found = reply.kvs[0] if reply.kvs else pb.KeyValue()
                if (found.mod_revision, found.value) != (witness.revision, witness.value):
                    raise self.history.rewound(
                        sent, f"revision {witness.revision} is not the commit that had been seen"
                    )
                return
        request = pb.RangeRequest(key=self._look_at, keys_only=True)
        reply = await ask(request, metadata=self.metadata())
        self.history.check(reply.header, sent)

    async def _log_in(self, session: EtcdSession) -> None:
        address = self.address
        password = address.password
        if address.password_file:
            path = Path(address.password_file)
            try:
                text = await asyncio.to_thread(path.read_text, "utf-8")
            except (OSError, UnicodeDecodeError) as error:
                kind = StoreUnavailable if self.history.has_answered else ConfigError
                raise kind(
                    f"the password file {path} of the store {address.shown} can't be read: {error}"
                ) from error
            password = text.rstrip("\r\n")
        request = pb.AuthenticateRequest(name=address.user, password=password)
        try:
            reply = await self.unary(session, AUTHENTICATE)(request)
        except grpc.aio.AioRpcError as error:
            if "authentication is not enabled" not in (error.details() or ""):
                raise
            self._no_login = True
        else:
            self._token = reply.token

    def _logged_in(self) -> bool:
        return not self.address.user or bool(self._token) or self._no_login

    async def _channel(self, endpoint: str) -> grpc.aio.Channel:
        wait_ms = max(int(self.op_timeout_s * 1000), 100)
        options: list[tuple[str, int | str]] = [
            # A new channel is a new connection; only it may try again, and soon.
            ("grpc.use_local_subchannel_pool", 1),
            ("grpc.enable_retries", 0),
            ("grpc.initial_reconnect_backoff_ms", 100),
            ("grpc.min_reconnect_backoff_ms", wait_ms),
            ("grpc.max_reconnect_backoff_ms", 1000),
            ("grpc.keepalive_time_ms", int(PING_S * 1000)),
            ("grpc.keepalive_timeout_ms", wait_ms),
            # An idle watch sends nothing for hours, and gRPC would soon stop to ping.
            ("grpc.http2.max_pings_without_data", 0),
            ("grpc.max_receive_message_length", -1),
            ("grpc.max_send_message_length", -1),
            # The servers are named: what the environment says of proxies is for the web.
            ("grpc.enable_http_proxy", 0),
        ]
        if not self.address.tls:
            return grpc.aio.insecure_channel(endpoint, options=options)
        if self.address.server_name:
            options.append(("grpc.ssl_target_name_override", self.address.server_name))
        credentials = await asyncio.to_thread(self._credentials)
        return grpc.aio.secure_channel(endpoint, credentials, options=options)

    def _credentials(self) -> grpc.ChannelCredentials:
        # Read for each connection, so that renewed certificates are taken without a restart.
        return grpc.ssl_channel_credentials(
            root_certificates=self._file("ca", self.address.ca),
            private_key=self._file("key", self.address.key),
            certificate_chain=self._file("cert", self.address.cert),
        )

    def _file(self, name: str, path: str) -> bytes | None:
        try:
            return Path(path).read_bytes() if path else None
        except OSError as error:
            kind = StoreUnavailable if self.history.has_answered else ConfigError
            raise kind(
                f"{name}= of the store {self.address.shown} can't be read: {error}"
            ) from error

    def _left(self, until: float) -> float:
        return max(until - monotonic(), 0.001)

    def _closed_text(self) -> str:
        return f"the store's client {self.address.shown} is closed; make another one"


@asynccontextmanager
async def in_time(seconds: float) -> AsyncGenerator[None, None]:
    """Give a call that long, and let it fail as gRPC lets a call fail.

    gRPC's own timeouts are counted by the wall clock, which may be stepped.
    """
    try:
        async with asyncio.timeout(seconds):
            yield
    except TimeoutError:
        nothing = grpc.aio.Metadata()
        code = grpc.StatusCode.DEADLINE_EXCEEDED
        raise grpc.aio.AioRpcError(code, nothing, nothing, "") from None


def _serialized(request: _Request) -> bytes:
    return request.SerializeToString()


def _is_cancelled() -> bool:
    """Whether the running task is to end; otherwise only its call was ended."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


async def stream_error(call: Any) -> grpc.aio.AioRpcError:
    """The error with which a stream ended, for one that gave no message."""
    code, details = grpc.StatusCode.UNAVAILABLE, "the stream ended"
    with suppress(asyncio.CancelledError):
        ended = await call.code()
        if ended is not grpc.StatusCode.OK:
            code, details = ended, await call.details()
    return grpc.aio.AioRpcError(code, grpc.aio.Metadata(), grpc.aio.Metadata(), details)
