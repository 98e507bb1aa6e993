"""A watch of etcd asks for a sign of life only where silence may be wrong (I8), in virtual time."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("grpc", reason="no gRPC: install domicile[etcd]")
pytest.importorskip("google.protobuf", reason="no protobuf: install domicile[etcd]")

from domicile.core.state.txn import Changes
from domicile.errors import StoreUnavailable
from domicile.stores.etcd import history as etcd_history
from domicile.stores.etcd import rpc_pb2 as pb
from domicile.stores.etcd import watch as etcd_watch
from domicile.stores.etcd.history import EtcdHistory
from domicile.stores.etcd.watch import EtcdWatch
from domicile.testing.sim.loop import World

OP_TIMEOUT_S = 1.5
RENEW_S = 1.5
SILENCE_S = 2 * OP_TIMEOUT_S
CLUSTER = 7
WITHIN_S = RENEW_S + 2 * OP_TIMEOUT_S
"""From a lost event until the watch is given up: a renewal, a look at it, and an answer that does
not come."""


@dataclass
class Member:
    """A member of etcd that serves one watch, and the majority, which may know more than it."""

    newest: int = 10
    """What a majority has."""
    applied: int | None = None
    """What this member has, if it lags behind."""
    passes: bool = True
    """Whether what it sends gets through."""
    questions: list[float] = field(default_factory=list[float])
    streams: int = 0

    def header(self) -> pb.ResponseHeader:
        revision = self.newest if self.applied is None else self.applied
        return pb.ResponseHeader(cluster_id=CLUSTER, revision=revision)


class Stream:
    """One stream of a watch."""

    def __init__(self, member: Member) -> None:
        self._member = member
        self._answers: asyncio.Queue[pb.WatchResponse] = asyncio.Queue()
        member.streams += 1

    async def write(self, request: pb.WatchRequest) -> None:
        created = request.HasField("create_request")
        if not created:
            self._member.questions.append(asyncio.get_running_loop().time())
        self.send(pb.WatchResponse(header=self._member.header(), created=created))

    async def read(self) -> pb.WatchResponse:
        return await self._answers.get()

    def send(self, answer: pb.WatchResponse) -> None:
        if self._member.passes:
            self._answers.put_nowait(answer)

    def cancel(self) -> None:
        pass


class Connections:
    """What a watch asks of its client's connections."""

    op_timeout_s = OP_TIMEOUT_S
    address = SimpleNamespace(shown="etcd://here")

    def __init__(self, member: Member) -> None:
        self._member = member
        self.stream_now: Stream | None = None

    def deadline(self) -> float:
        return asyncio.get_running_loop().time() + OP_TIMEOUT_S

    async def session(self, until: float) -> Any:
        async def end() -> None:
            pass

        return SimpleNamespace(begin=lambda: None, end=end)

    def stream(self, session: Any, method: Any) -> Callable[..., Stream]:
        def opened(metadata: Any) -> Stream:
            self.stream_now = Stream(self._member)
            return self.stream_now

        return opened

    def metadata(self) -> tuple[()]:
        return ()


class Etcd:
    """A process that watches, and renews through a majority unless a test says otherwise."""

    def __init__(self) -> None:
        self.member = Member()
        self.history = EtcdHistory("etcd://here", lambda: None)
        self.connections = Connections(self.member)
        self.client = SimpleNamespace(connections=self.connections)
        self.data = b"domicile/clusters/"
        self.found: list[Changes] = []
        self.watch = EtcdWatch(self, b"", 10)  # type: ignore[arg-type]

    def wait(self, watch: EtcdWatch) -> None:
        pass

    def leave(self, watch: EtcdWatch) -> None:
        pass

    def read(self) -> None:
        """A renewal's read by a majority."""
        sent = self.history.now()
        self.history.check(pb.ResponseHeader(cluster_id=CLUSTER, revision=self.member.newest), sent)

    async def renewals(self) -> None:
        while True:
            self.read()
            await asyncio.sleep(RENEW_S)

    async def follow(self) -> None:
        async for changes in self.watch:
            self.found.append(changes)

    def commit(self, *, seen: bool) -> None:
        """A commit; `seen`: under the watch's prefix."""
        self.member.newest += 1
        stream = self.connections.stream_now
        if seen and stream is not None:
            kv = pb.KeyValue(key=self.data + b"k", mod_revision=self.member.newest)
            stream.send(pb.WatchResponse(header=self.member.header(), events=[pb.Event(kv=kv)]))


def run(
    monkeypatch: pytest.MonkeyPatch,
    scenario: Callable[[Etcd, asyncio.Task[None]], Coroutine[Any, Any, None]],
    *,
    renews: bool = True,
) -> Etcd:
    world = World(1)
    for module in (etcd_watch, etcd_history):
        monkeypatch.setattr(module, "monotonic", lambda: world.now)
    made: list[Etcd] = []

    async def main() -> None:
        etcd = Etcd()
        made.append(etcd)
        renewing = asyncio.create_task(etcd.renewals()) if renews else None
        following = asyncio.create_task(etcd.follow())
        try:
            await scenario(etcd, following)
        finally:
            for task in (renewing, following):
                if task is not None:
                    task.cancel()
                    await asyncio.wait((task,))

    try:
        world.run(main(), world.process("etcd"))
        assert not world.errors
    finally:
        world.close()
    return made[0]


def now() -> float:
    return asyncio.get_running_loop().time()


def test_an_idle_watch_asks_nothing_while_renewals_show_nothing_new(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def scenario(etcd: Etcd, following: asyncio.Task[None]) -> None:
        await asyncio.sleep(3600.0)
        assert len(etcd.member.questions) == 2, "until it knows that it has heard all"
        etcd.commit(seen=True)
        await asyncio.sleep(3600.0)
        assert len(etcd.member.questions) == 4
        assert [changes.revision for changes in etcd.found] == [11]
        assert not following.done()

    run(monkeypatch, scenario)


@pytest.mark.parametrize("idle_s", [1.0, 5.0, 100.2, 1000.9])
def test_a_watch_that_lost_an_event_is_found_by_the_next_renewal(
    monkeypatch: pytest.MonkeyPatch, idle_s: float
) -> None:
    async def scenario(etcd: Etcd, following: asyncio.Task[None]) -> None:
        await asyncio.sleep(idle_s)
        etcd.member.passes = False
        etcd.commit(seen=True)
        began = now()
        with pytest.raises(StoreUnavailable, match=r"silent for 4\.5 s or more"):
            await following
        assert now() - began <= WITHIN_S + 0.01
        assert etcd.found == []

    run(monkeypatch, scenario)


def test_a_watch_of_a_process_that_does_not_renew_asks_as_ever(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def scenario(etcd: Etcd, following: asyncio.Task[None]) -> None:
        await asyncio.sleep(300.0)
        assert len(etcd.member.questions) >= 99
        etcd.member.passes = False
        began = now()
        with pytest.raises(StoreUnavailable, match="silent"):
            await following
        assert now() - began <= 3 * OP_TIMEOUT_S + 0.01

    run(monkeypatch, scenario, renews=False)


def test_a_watch_whose_renewals_get_no_answer_any_more_asks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The store that is away may come back with another history (S5)."""

    async def scenario(etcd: Etcd, following: asyncio.Task[None]) -> None:
        etcd.read()
        await asyncio.sleep(100.0)
        assert len(etcd.member.questions) >= 30

    run(monkeypatch, scenario, renews=False)


def test_a_member_that_lags_behind_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario(etcd: Etcd, following: asyncio.Task[None]) -> None:
        await asyncio.sleep(100.0)
        etcd.member.applied = 10
        etcd.commit(seen=True)
        began = now()
        with pytest.raises(StoreUnavailable, match="lagged behind the others for 3 s"):
            await following
        assert now() - began <= WITHIN_S + 2 * SILENCE_S

    run(monkeypatch, scenario)


def test_a_member_that_catches_up_is_not_left(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario(etcd: Etcd, following: asyncio.Task[None]) -> None:
        for _ in range(100):
            etcd.member.applied = etcd.member.newest
            etcd.commit(seen=False)
            await asyncio.sleep(2.0)
            etcd.member.applied = None
            await asyncio.sleep(5.0)
        assert not following.done()

    run(monkeypatch, scenario)


def test_where_others_commit_all_the_time_a_watch_asks_no_more_often_than_ever(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def scenario(etcd: Etcd, following: asyncio.Task[None]) -> None:
        for _ in range(300):
            etcd.commit(seen=False)
            await asyncio.sleep(1.0)
        questions = etcd.member.questions
        assert 50 <= len(questions) <= 101
        assert all(b - a >= SILENCE_S for a, b in pairwise(questions))
        assert not following.done()

    run(monkeypatch, scenario)
