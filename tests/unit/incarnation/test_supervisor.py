"""Nodes that come back, and leave nothing behind, under awkward circumstances."""

from __future__ import annotations

import asyncio
import os
import socket
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from domicile import ConfigError, Entity, Node, Settings, connect, handler
from domicile.control.elected import Elected
from domicile.core.ids import Incarnation
from domicile.entity.runtime import Runtime
from domicile.errors import MaybeExecuted, Overloaded, Unavailable
from domicile.incarnation.incarnation import RunningIncarnation
from domicile.incarnation.store_tasks import StoreTasks
from domicile.incarnation.supervisor import MOST_FAILED
from domicile.ports.health import Verdict
from domicile.ports.transport import ConnectionHandler
from domicile.stores.file_locks import FileLocks
from domicile.transports.memory import MemoryTransport

SETTINGS = Settings(shards=4, settle_s=0.05)


async def another_life(node: Node, first: RunningIncarnation) -> None:
    async with asyncio.timeout(20):
        while node.life in (None, first):  # noqa: ASYNC110
            await asyncio.sleep(0.02)


class Steady(Entity, name="steady"):
    @handler
    async def see(self) -> int:
        return 1


def test_a_caller_that_repeats_at_once_does_not_keep_its_node_from_rejoining() -> None:
    async def main() -> None:
        async with Node("memory://eager", entities=[Steady], settings=SETTINGS) as node:
            ref, refused = node.ref(Steady, "s"), 0
            assert await ref.ask(Steady.see) == 1
            assert node.life is not None
            node.life.member.fence("test")
            while refused < 1_000_000:
                try:
                    await ref.ask(Steady.see)
                except (Unavailable, MaybeExecuted):
                    refused += 1
                else:
                    if refused:
                        break
            assert 0 < refused < 1_000_000

    asyncio.run(main())


def test_a_rejoin_that_fails_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """L5: a port or a descriptor gets free again; nobody else would bring the node back."""
    listen = MemoryTransport.listen
    tries: list[None] = []

    async def second_fails(self: MemoryTransport, accept: Callable[[], ConnectionHandler]) -> str:
        tries.append(None)
        if len(tries) == 2:
            raise ConfigError("the port is taken")
        return await listen(self, accept)

    monkeypatch.setattr(MemoryTransport, "listen", second_fails)
    monkeypatch.setattr("domicile.incarnation.supervisor.REJOIN_S", 0.01)

    async def main() -> None:
        async with Node("memory://rejoin", settings=SETTINGS) as node:
            first = node.life
            assert first is not None
            first.member.fence("test")
            await another_life(node, first)
        assert len(tries) == 3

    asyncio.run(main())


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_forked_child_does_not_keep_the_port(tmp_path: Path) -> None:
    async def main() -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        node = Node(f"sqlite:///{tmp_path}/s.db", listen=f"127.0.0.1:{port}", settings=SETTINGS)
        async with node:
            hold, let_go = os.pipe()
            child = os.fork()
            if child == 0:
                os.close(let_go)
                os.read(hold, 1)
                os._exit(0)
            try:
                first = node.life
                assert first is not None
                first.member.fence("test")
                await another_life(node, first)
            finally:
                os.close(let_go)
                os.close(hold)
                os.waitpid(child, 0)  # noqa: ASYNC222

    asyncio.run(main())


@pytest.mark.parametrize("turns", range(0, 60, 3))
def test_a_second_cancellation_leaves_no_lock_held(tmp_path: Path, turns: int) -> None:
    async def main() -> None:
        node = Node(f"sqlite:///{tmp_path}/s.db", settings=SETTINGS)

        async def live() -> None:
            async with node:
                await asyncio.sleep(60)

        task = asyncio.create_task(live())
        await asyncio.sleep(0.001 * turns)
        task.cancel()
        await asyncio.sleep(0.0005 * (turns % 7))
        task.cancel()
        await asyncio.wait([task], timeout=20)
        assert task.done()
        locks = tmp_path / "s.db.d"
        # A file that stays behind unlocked proves that its incarnation is dead (L6).
        for path in locks.iterdir() if locks.exists() else ():
            assert FileLocks(locks).verdict(Incarnation(path.name)) is Verdict.DEAD
        assert node.life is None

    asyncio.run(main())


@pytest.mark.parametrize("how", ["fenced", "cancelled"])
def test_a_leader_that_ends_keeps_nobody_waiting_for_its_lease(how: str) -> None:
    """L5: the next one would lead only after the ttl, and free shards would have no home."""
    settings = Settings(shards=4, settle_s=0.05, ttl_s=120)

    async def main() -> None:
        first, second = (Node(f"memory://lead-{how}", settings=settings) for _ in range(2))
        async with first, second, asyncio.timeout(20):
            life = first.life
            assert life is not None
            while not life.control.leading:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
            if how == "fenced":
                life.member.fence("test")
            else:
                assert first._lives._supervisor is not None
                first._lives._supervisor.cancel()
            lives = (first.life, second.life)
            while not any(one not in (None, life) and one.control.leading for one in lives):
                lives = (first.life, second.life)
                await asyncio.sleep(0.01)

    asyncio.run(main())


class Patient(Entity):
    waiting = 0

    @handler
    async def wait(self) -> None:
        Patient.waiting += 1
        try:
            await asyncio.sleep(3600)
        finally:
            Patient.waiting -= 1


def test_what_fails_at_the_end_of_a_life_leaves_no_handler_behind(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """I1: the lease is given back, so whatever ran under it must have stopped before."""

    async def fails(self: StoreTasks) -> None:
        raise asyncio.CancelledError

    async def main() -> None:
        async with Node("memory://ends", entities=[Patient], settings=SETTINGS) as node:
            life = node.life
            asked = asyncio.create_task(node.ref(Patient, "p").ask(Patient.wait))
            async with asyncio.timeout(20):
                while not Patient.waiting:  # noqa: ASYNC110
                    await asyncio.sleep(0.01)
            monkeypatch.setattr(StoreTasks, "close", fails)
            assert node._lives._supervisor is not None
            node._lives._supervisor.cancel()
            await asyncio.wait([node._lives._supervisor], timeout=20)
            assert not Patient.waiting
            assert life is not None
            assert not life.owed
            await asyncio.wait([asked], timeout=20)
            assert asked.exception() is not None

    asyncio.run(main())


class Failing:
    """Has the next so many lives fail by what nobody expected, as when no thread can be started."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.left = 0
        run = Elected.run

        async def fails(elected: Elected) -> None:
            if self.left:
                self.left -= 1
                raise RuntimeError("can't start new thread")
            await run(elected)

        monkeypatch.setattr(Elected, "run", fails)
        monkeypatch.setattr("domicile.incarnation.supervisor.REJOIN_S", 0.01)


@pytest.mark.parametrize("times", [1, MOST_FAILED])
def test_a_life_that_ends_by_something_unexpected_is_followed_by_another(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, times: int
) -> None:
    """L5: it costs the incarnation; nobody else would bring the node back."""
    failing = Failing(monkeypatch)

    async def main() -> None:
        async with Node(f"memory://fails-{times}", settings=SETTINGS) as node, asyncio.timeout(20):
            first = node.life
            assert first is not None
            failing.left = times
            first.member.fence("test")
            while failing.left or node.life is None or not node.life.control.leading:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
            assert node.health().ok
        assert caplog.text.count("this incarnation failed, rejoining") == times

    asyncio.run(main())


def test_lives_that_fail_one_after_the_other_end_for_good_and_say_so(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    failing = Failing(monkeypatch)

    async def main() -> None:
        node = Node("memory://fails-for-good", entities=[Patient], settings=SETTINGS)
        await node.__aenter__()
        first = node.life
        assert first is not None
        failing.left = MOST_FAILED + 1
        first.member.fence("test")
        with pytest.raises(ExceptionGroup):
            await asyncio.wait_for(node.run(), 20)
        assert not node.health().ok
        with pytest.raises(Unavailable, match="can't start new thread"):
            await node.ref(Patient, "p").ask(Patient.wait)
        with pytest.raises(ExceptionGroup):
            await node.__aexit__()
        assert "stopped permanently" in caplog.text

    asyncio.run(main())


def test_who_is_ended_before_it_has_joined_does_not_wait_for_ever(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def never(self: RunningIncarnation) -> bool:
        return await asyncio.get_running_loop().create_future()

    monkeypatch.setattr(RunningIncarnation, "begin", never)

    async def main() -> None:
        node = Node("memory://never", settings=SETTINGS)
        joining = asyncio.create_task(node.__aenter__())
        while node._lives._supervisor is None:  # noqa: ASYNC110
            await asyncio.sleep(0)
        await asyncio.sleep(0)
        node._lives._supervisor.cancel()
        await asyncio.wait([joining], timeout=20)
        with pytest.raises(Unavailable, match="before it had joined"):
            joining.result()

    asyncio.run(main())


def test_a_node_joins_and_leaves_while_the_programs_threads_are_all_busy(tmp_path: Path) -> None:
    """What a program's own functions block must not keep its node from coming back (L5)."""
    free = threading.Event()

    async def main() -> None:
        loop = asyncio.get_running_loop()
        loop.set_default_executor(ThreadPoolExecutor(1))
        busy = loop.run_in_executor(None, free.wait, 60)
        try:
            async with asyncio.timeout(20):
                async with Node(f"sqlite:///{tmp_path}/s.db", settings=SETTINGS) as node:
                    first = node.life
                    assert first is not None
                    first.member.fence("test")
                    await another_life(node, first)
        finally:
            free.set()
            assert await busy, "something waited for the thread that was busy"

    asyncio.run(main())


def test_a_fence_that_fails_halfway_ends_the_life_all_the_same(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fails(self: Runtime, reason: str) -> None:
        monkeypatch.undo()
        raise SystemError("bad argument to internal function")

    async def main() -> None:
        async with Node("memory://fence-fails", entities=[Patient], settings=SETTINGS) as node:
            first = node.life
            assert first is not None
            asked = asyncio.create_task(node.ref(Patient, "p").ask(Patient.wait))
            async with asyncio.timeout(20):
                while not Patient.waiting:  # noqa: ASYNC110
                    await asyncio.sleep(0.01)
            monkeypatch.setattr(Runtime, "fence", fails)
            with pytest.raises(SystemError):
                first.member.fence("test")
            await another_life(node, first)
            assert not Patient.waiting
            with pytest.raises(MaybeExecuted):
                await asked

    asyncio.run(main())


def test_a_caller_that_repeats_at_once_does_not_keep_a_full_queue_from_getting_empty() -> None:
    settings = Settings(shards=1, settle_s=0.05, window=8, buffer=8)

    async def main() -> None:
        store = "memory://eager-tells"
        async with (
            Node(store, entities=[Steady], settings=settings),
            connect(store, settings=settings) as client,
        ):
            ref, refused = client.ref(Steady, "s"), 0
            assert await ref.ask(Steady.see) == 1
            for _ in range(100):
                while refused < 1_000_000:
                    try:
                        await ref.tell(Steady.see)
                        break
                    except Overloaded:
                        refused += 1
            assert 0 < refused < 1_000_000

    asyncio.run(main())
