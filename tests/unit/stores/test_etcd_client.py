"""The etcd client and a server that answers as a test wants: what no real one does on demand."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from typing import Any

import pytest

pytest.importorskip("grpc", reason="no gRPC: install domicile[etcd]")
pytest.importorskip("google.protobuf", reason="no protobuf: install domicile[etcd]")

import grpc
import grpc.aio

from domicile.core.state.txn import Committed, Put, Unknown
from domicile.errors import StoreRewound, StoreUnavailable
from domicile.stores.etcd import rpc_pb2 as pb
from domicile.stores.etcd.address import parse_etcd_url
from domicile.stores.etcd.client import prefix_end
from domicile.stores.etcd.failures import Fate, explanation, fate
from domicile.stores.etcd.leases import KEPT_NUMBERS, LeaseNumbers, lease_number
from domicile.stores.etcd.store import EtcdStore

CODE = grpc.StatusCode
Plan = Callable[[Any, Any], Awaitable[Any]]


class FakeEtcd:
    """Answers each procedure by a function of the test."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.term, self.revision, self.cluster = 5, 10, 77
        self.kvs: list[pb.KeyValue] = []
        self.txn: Plan | None = None
        self.events: asyncio.Queue[pb.WatchResponse] = asyncio.Queue()
        self.created = 10
        self.port = 0

    @property
    def header(self) -> pb.ResponseHeader:
        return pb.ResponseHeader(
            cluster_id=self.cluster, revision=self.revision, raft_term=self.term
        )

    async def range(self, request: pb.RangeRequest, context: Any) -> pb.RangeResponse:
        self.asked.append("range")
        kvs = [kv for kv in self.kvs if kv.key == request.key]
        return pb.RangeResponse(header=self.header, kvs=kvs)

    async def transact(self, request: pb.TxnRequest, context: Any) -> Any:
        self.asked.append("txn")
        if self.txn is not None:
            return await self.txn(request, context)
        self.revision += 1
        return pb.TxnResponse(header=self.header, succeeded=True)

    async def keep_alive(self, requests: AsyncIterator[Any], context: Any) -> AsyncIterator[Any]:
        async for request in requests:
            self.asked.append("keep")
            yield pb.LeaseKeepAliveResponse(header=self.header, ID=request.ID, TTL=6)
            self.after_keep()

    def after_keep(self) -> None:
        """What happens after a renewal."""

    async def watch(self, requests: AsyncIterator[Any], context: Any) -> AsyncIterator[Any]:
        async for request in requests:
            if request.HasField("create_request"):
                self.asked.append("watch")
                header = pb.ResponseHeader(cluster_id=self.cluster, revision=self.created)
                yield pb.WatchResponse(header=header, created=True)
                yield await self.events.get()
            else:
                self.asked.append("progress")

    async def start(self) -> Any:
        """Serve at a free port."""

        def unary(behaviour: Any, request: Any, answer: Any) -> Any:
            return grpc.unary_unary_rpc_method_handler(
                behaviour, request.FromString, answer.SerializeToString
            )

        def stream(behaviour: Any, request: Any, answer: Any) -> Any:
            return grpc.stream_stream_rpc_method_handler(
                behaviour, request.FromString, answer.SerializeToString
            )

        services = {
            "KV": {
                "Range": unary(self.range, pb.RangeRequest, pb.RangeResponse),
                "Txn": unary(self.transact, pb.TxnRequest, pb.TxnResponse),
            },
            "Lease": {
                "LeaseKeepAlive": stream(
                    self.keep_alive, pb.LeaseKeepAliveRequest, pb.LeaseKeepAliveResponse
                )
            },
            "Watch": {"Watch": stream(self.watch, pb.WatchRequest, pb.WatchResponse)},
        }
        server = grpc.aio.server()
        for name, methods in services.items():
            handler = grpc.method_handlers_generic_handler(f"etcdserverpb.{name}", methods)
            server.add_generic_rpc_handlers((handler,))
        self.port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        return server


@asynccontextmanager
async def served(*fakes: FakeEtcd, op_timeout_s: float = 30.0) -> AsyncIterator[EtcdStore]:
    servers = [await fake.start() for fake in fakes]
    hosts = ",".join(f"127.0.0.1:{fake.port}" for fake in fakes)
    # The name decides that the first server is asked first.
    by = next(name for name in "abcdefgh" if _first(name, len(fakes)))
    store = EtcdStore(parse_etcd_url(f"etcd://{hosts}"), by=by, op_timeout_s=op_timeout_s)
    try:
        yield store
    finally:
        await store.close()
        for server in servers:
            await server.stop(None)


def _first(name: str, count: int) -> bool:
    store = EtcdStore(parse_etcd_url("etcd://" + ",".join(["x"] * count)), by=name)
    return store.client.connections._next == 0


def run(main: Callable[[], Awaitable[None]]) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(60):
            await main()

    asyncio.run(bounded())


def bound(lease: str) -> pb.KeyValue:
    number = lease_number("domicile", lease, 0)
    key = b"domicile/leases/%016x" % number
    return pb.KeyValue(key=key, value=lease.encode(), mod_revision=3)


def test_a_renewal_by_a_leader_that_is_none_any_more_does_not_count() -> None:
    """A frozen leader that goes on renews before it learns of its successor."""
    fake = FakeEtcd()
    fake.kvs = [bound("l")]
    successions = iter([6, 7])

    def succeed() -> None:
        fake.term = next(successions, fake.term)

    fake.after_keep = succeed  # type: ignore[method-assign]

    async def main() -> None:
        async with served(fake) as store:
            assert await store.renew("l") == 6.0
            assert fake.asked.count("keep") == 3

    run(main)


def test_a_renewal_whose_leaders_change_for_ever_is_not_acknowledged() -> None:
    fake = FakeEtcd()
    fake.kvs = [bound("l")]

    def succeed() -> None:
        fake.term += 1

    fake.after_keep = succeed  # type: ignore[method-assign]

    async def main() -> None:
        async with served(fake) as store:
            with pytest.raises(StoreUnavailable, match="changes again and again"):
                await store.renew("l")

    run(main)


@pytest.mark.parametrize(
    ("code", "text"),
    [
        (CODE.UNAVAILABLE, "etcdserver: request timed out"),
        (CODE.UNAVAILABLE, "etcdserver: leader changed"),
        (CODE.UNAVAILABLE, "etcdserver: server stopped"),
        (CODE.UNKNOWN, "what is this?"),
        (CODE.INTERNAL, "stream error"),
        (CODE.CANCELLED, ""),
    ],
)
def test_a_commit_that_may_have_run_is_unknown_and_sent_once(code: Any, text: str) -> None:
    fakes = [FakeEtcd(), FakeEtcd()]

    async def fail(request: Any, context: Any) -> Any:
        await context.abort(code, text)

    fakes[0].txn = fail

    async def main() -> None:
        async with served(*fakes) as store:
            assert await store.commit([], [Put(b"k", b"")]) == Unknown()
            assert [fake.asked.count("txn") for fake in fakes] == [1, 0]
            # The next one goes elsewhere.
            assert isinstance(await store.commit([], [Put(b"k", b"")]), Committed)
            assert [fake.asked.count("txn") for fake in fakes] == [1, 1]

    run(main)


def test_a_commit_that_did_not_run_is_sent_to_another_server() -> None:
    fakes = [FakeEtcd(), FakeEtcd()]

    async def fail(request: Any, context: Any) -> Any:
        await context.abort(CODE.UNAVAILABLE, "etcdserver: no leader")

    fakes[0].txn = fail

    async def main() -> None:
        async with served(*fakes) as store:
            assert await store.commit([], [Put(b"k", b"")]) == Committed(11)
            assert [fake.asked.count("txn") for fake in fakes] == [1, 1]

    run(main)


def test_a_member_that_lags_behind_is_no_rewind() -> None:
    fake = FakeEtcd()
    fake.created = 4

    async def main() -> None:
        async with served(fake) as store:
            key = b"domicile/clusters/k"
            kv = pb.KeyValue(key=key, value=b"", create_revision=11, mod_revision=11)
            events = [pb.Event(kv=pb.KeyValue(key=key, mod_revision=10)), pb.Event(kv=kv)]
            fake.events.put_nowait(pb.WatchResponse(header=fake.header, events=events))
            changes = await anext(store.watch(b"", 10))
            assert (changes.revision, len(changes.changes)) == (11, 1)
            with pytest.raises(StoreRewound, match="is at revision 10, 12 had been seen"):
                await anext(store.watch(b"", 12))

    run(main)


@pytest.mark.parametrize("step_s", [3600.0, -3600.0])
def test_timeouts_are_not_counted_by_the_wall_clock(
    step_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """gRPC's own are: a stepped clock would end calls at once, or never."""
    fake = FakeEtcd()
    fake.kvs = [bound("l")]
    hung = asyncio.Event()

    async def hang(request: Any, context: Any) -> Any:
        await hung.wait()

    fake.txn = hang
    real = time.time
    monkeypatch.setattr(time, "time", lambda: real() + step_s)

    async def main() -> None:
        async with served(fake, op_timeout_s=1.0) as store:
            while True:
                with suppress(StoreUnavailable):
                    assert await store.renew("l") == 6.0
                    break
            assert await store.commit([], [Put(b"k", b"")]) == Unknown()
            hung.set()

    run(main)


@pytest.mark.parametrize("lower", ["revision", "cluster"])
def test_an_answer_of_another_history_ends_the_thread_side_too(lower: str) -> None:
    fake = FakeEtcd()
    fake.kvs = [bound("l")]

    async def main() -> None:
        async with served(fake) as store:
            beside = store.beside()
            assert (await asyncio.wrap_future(beside.keep("l", b"k"))).ttl_s == 6.0
            watching = asyncio.ensure_future(anext(store.watch(b"", 10)))
            while "watch" not in fake.asked:  # noqa: ASYNC110
                await asyncio.sleep(0.001)
            if lower == "revision":
                fake.revision = 9
            else:
                fake.cluster = 78
            with pytest.raises(StoreRewound):
                await asyncio.wrap_future(beside.keep("l", b"k"))
            with pytest.raises(StoreRewound):
                await watching
            with pytest.raises(StoreRewound):
                await asyncio.wrap_future(beside.rewrite(b"k", 0, b"", "l"))
            assert await store.get(b"k") is None, "the store itself goes on in the new history"
            assert store.beside() is not beside
            assert (await asyncio.wrap_future(store.beside().keep("l", b"k"))).ttl_s == 6.0

    run(main)


@pytest.mark.parametrize(
    ("code", "text", "expected"),
    [
        (CODE.UNAUTHENTICATED, "etcdserver: invalid auth token", Fate.TOKEN),
        (CODE.INVALID_ARGUMENT, "etcdserver: revision of auth store is old", Fate.TOKEN),
        (CODE.INVALID_ARGUMENT, "etcdserver: request is too large", Fate.REFUSED),
        (CODE.RESOURCE_EXHAUSTED, "etcdserver: mvcc: database space exceeded", Fate.REFUSED),
        (CODE.RESOURCE_EXHAUSTED, "etcdserver: too many requests", Fate.REFUSED),
        (CODE.NOT_FOUND, "etcdserver: requested lease not found", Fate.REFUSED),
        (CODE.PERMISSION_DENIED, "etcdserver: permission denied", Fate.REFUSED),
        (CODE.UNAVAILABLE, "etcdserver: no leader", Fate.ELSEWHERE),
        (CODE.UNAVAILABLE, "failed to connect to all addresses; last error: …", Fate.ELSEWHERE),
        (CODE.UNAVAILABLE, "etcdserver: request timed out, possibly due to …", Fate.UNSURE),
        (CODE.UNAVAILABLE, "Socket closed", Fate.UNSURE),
        (CODE.DEADLINE_EXCEEDED, "Deadline Exceeded", Fate.UNSURE),
        (CODE.DATA_LOSS, "etcdserver: corrupt cluster", Fate.UNSURE),
    ],
)
def test_what_becomes_of_a_request(code: Any, text: str, expected: Fate) -> None:
    assert fate(code, text) is expected


@pytest.mark.parametrize(
    ("code", "text", "tls", "words"),
    [
        (CODE.UNAVAILABLE, "Connection refused", False, "see that etcd runs there"),
        (CODE.UNAVAILABLE, "Connection refused", False, "as ?ca= in the URL"),
        (CODE.UNAVAILABLE, "Connection refused", True, "see that etcd runs there"),
        (CODE.UNIMPLEMENTED, "Received http2 header with status: 404", False, "no etcd server"),
        (CODE.UNAVAILABLE, "Failed parsing HTTP/2 (Expected SETTINGS", False, "no etcd server"),
        (CODE.INTERNAL, "something", False, "look at etcd's log"),
    ],
)
def test_an_error_says_what_to_do_next(code: Any, text: str, tls: bool, words: str) -> None:
    assert words in explanation(code, text, tls=tls, user="")


def test_a_prefix_ends_before_its_successor() -> None:
    assert prefix_end(b"a/") == b"a0"
    assert prefix_end(b"a\xff\xff") == b"b"


def test_numbers_of_leases_are_few_and_fit() -> None:
    assert all(0 < lease_number("r", f"l{n}", 0) < 1 << 63 for n in range(1000))
    assert lease_number("r", "l", 0) != lease_number("r", "l", 1)
    assert lease_number("r", "l", 0) != lease_number("s", "l", 0)
    numbers = LeaseNumbers()
    for n in range(KEPT_NUMBERS + 1):
        numbers.keep(f"l{n}", n)
    assert numbers.get("l0") is None
    assert numbers.get("l1") == 1
    numbers.forget("l1")
    numbers.clear()
    assert numbers.get("l2") is None
