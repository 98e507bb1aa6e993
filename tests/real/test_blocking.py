"""Blocking methods: marks, the gate in front of the threads, the threads, and turns that wait."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine
from contextvars import ContextVar
from functools import partial
from typing import Any, TypeVar

import pytest

from domicile import (
    ConfigError,
    Entity,
    HandlerFailed,
    MaybeExecuted,
    Node,
    Overloaded,
    Settings,
    blocking,
    handler,
)
from domicile.concurrency import daemon_threads
from domicile.concurrency.daemon_threads import DaemonThreads
from domicile.core.wire import Reply
from domicile.entity.model.entity import entity_type
from domicile.entity.model.handlers import in_thread
from domicile.entity.running.blocking import Blocking
from domicile.entity.running.exits import EXITS
from domicile.ports.meter import NoMeter
from domicile.testing import Sim, simulated

T = TypeVar("T")

WAIT_S = 90.0
FEW = Settings(shards=4)


def run(work: Coroutine[Any, Any, T]) -> T:
    async def bounded() -> T:
        async with asyncio.timeout(WAIT_S):
            return await work

    return asyncio.run(bounded())


async def until(condition: Callable[[], bool]) -> None:
    # What threads do has no event on this loop.
    while not condition():  # noqa: ASYNC110
        await asyncio.sleep(0.002)


def names() -> list[str]:
    return [thread.name for thread in threading.enumerate() if "blocking" in thread.name]


@pytest.fixture(autouse=True)
def short_lived(monkeypatch: pytest.MonkeyPatch) -> None:
    """Threads without work end soon."""
    monkeypatch.setattr(daemon_threads, "KEEP_S", 0.05)


class Waiter:
    """A turn, as far as the gate cares."""

    def __init__(self) -> None:
        self.threads = 0
        self.thread: int | None = None


class Meter(NoMeter):
    def __init__(self) -> None:
        self.counts: dict[str, int] = {}

    def count(self, name: str, value: int = 1) -> None:
        self.counts[name] = self.counts.get(name, 0) + value


def gate(most: int = 2, waiting: int = 2, *, guard: Callable[[], bool] = lambda: True) -> Blocking:
    return Blocking(
        DaemonThreads(most, "domicile-blocking"), Meter(), guard, most=most, most_waiting=waiting
    )


# marks


class Lab(Entity, name="blocking-lab"):
    def __init__(self) -> None:
        self.done: list[str] = []

    @blocking
    def add(self, one: int, two: int = 2) -> int:
        """Adds."""
        self.done.append(threading.current_thread().name)
        return one + two

    @handler
    async def both(self, one: int) -> int:
        return await self.add(one) + await self.add(one, two=0)

    @handler(name="sum", timeout_s=3)
    @blocking
    def total(self, parts: list[float]) -> float:
        return sum(parts)

    @blocking
    def fail(self) -> None:
        raise KeyError("no such sample")

    @blocking
    def quit(self) -> None:
        raise SystemExit(3)

    @blocking
    def late(self) -> None:
        self.after(1.0, self.tick)

    @blocking
    def who(self) -> tuple[str, int, bool]:
        return self.id, self.epoch, in_thread.get()

    @handler
    async def soon(self) -> None:
        self.after(0.5, self.add, 1)

    @handler
    async def seen(self) -> int:
        return len(self.done)

    @handler
    async def tick(self) -> None: ...


def test_a_blocking_method_is_a_handler_with_its_own_name_and_types() -> None:
    kind = entity_type(Lab)
    found = kind.find(Lab.add)
    assert (found.name, found.blocking, found.shared, found.timeout_s) == ("add", True, False, None)
    assert found.decode_args(found.encode_args((1,), {"two": 5})) == ((1, 5), {})
    assert Lab.add.__doc__ == "Adds."
    named = kind.find(Lab.total)
    assert (named.name, named.blocking, named.timeout_s) == ("sum", True, 3)
    assert not kind.find(Lab.both).blocking
    assert sorted(kind.handlers.keys() - kind.direct.keys()) == [
        "add", "fail", "late", "quit", "sum", "who",
    ]  # fmt: skip


def test_an_entity_made_by_hand_runs_it_on_the_spot() -> None:
    class Derived(Lab, name="derived-lab"):
        @handler
        async def doubled(self, one: int) -> int:
            return 2 * await super().add(one)

    assert run(Lab().add(1)) == 3
    assert run(Derived().doubled(1)) == 6


def test_misuse_is_refused_where_the_class_is_written() -> None:
    async def suspends(self: Lab) -> None: ...

    def yields(self: Lab) -> Any:
        yield 1

    def plain(self: Lab) -> None: ...

    with pytest.raises(TypeError, match=r"suspends is `async def`.*write @handler"):
        blocking(suspends)
    with pytest.raises(TypeError, match=r"yields must be a plain `def` method"):
        blocking(yields)
    with pytest.raises(TypeError, match="must be a plain `def` method"):
        blocking(3)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"plain must be an `async def` method.*or @blocking"):
        handler(plain)  # type: ignore[type-var]
    with pytest.raises(ConfigError, match=r"plain is @blocking.*leave shared out"):
        handler(shared=True)(blocking(plain))


# the gate


def test_the_gate_returns_what_the_function_does_and_raises_what_it_does() -> None:
    async def body() -> None:
        closed = gate()
        assert await closed.run("f", lambda: 7) == 7
        with pytest.raises(KeyError, match="seven"):
            await closed.run("f", partial({}.__getitem__, "seven"))
        for bad in (*EXITS, StopIteration, asyncio.CancelledError):

            def leave(kind: type[BaseException] = bad) -> None:
                raise kind("x")

            with pytest.raises(RuntimeError, match=f"raised {bad.__name__}"):
                await closed.run("f", leave)
        assert closed.running == 0
        assert await closed.close(1.0) == 0

    run(body())


def test_so_many_run_so_many_wait_in_order_and_the_rest_is_refused() -> None:
    async def body() -> None:
        full = gate(most=2, waiting=2)
        go = threading.Event()
        most_at_once, now, order = 0, 0, list[int]()
        lock = threading.Lock()

        def work(number: int) -> int:
            nonlocal most_at_once, now
            with lock:
                now += 1
                most_at_once = max(most_at_once, now)
                order.append(number)
            go.wait(WAIT_S)
            with lock:
                now -= 1
            return number

        tasks = [asyncio.ensure_future(full.run("f", partial(work, n))) for n in range(4)]
        await until(lambda: full.running == 2 and full.waiting == 2)
        assert full.full
        with pytest.raises(Overloaded, match="2 blocking methods run and 2 wait"):
            full.check("f")
        with pytest.raises(Overloaded):
            await full.run("f", lambda: None)
        go.set()
        assert await asyncio.gather(*tasks) == [0, 1, 2, 3]
        assert most_at_once == 2
        assert sorted(order[:2]) == [0, 1]
        assert sorted(order[2:]) == [2, 3]
        assert not full.full
        assert await full.close(1.0) == 0
        await until(lambda: not names())

    run(body())


def test_a_place_in_line_that_is_given_up_goes_to_the_next() -> None:
    async def body() -> None:
        full = gate(most=1, waiting=3)
        go = threading.Event()
        first = asyncio.ensure_future(full.run("f", lambda: go.wait(WAIT_S)))
        await until(lambda: full.running == 1)
        ran: list[str] = []
        gives_up = asyncio.ensure_future(full.run("f", lambda: ran.append("gone")))
        called_up = asyncio.ensure_future(full.run("f", lambda: ran.append("called up")))
        last = asyncio.ensure_future(full.run("f", lambda: ran.append("last")))
        await until(lambda: full.waiting == 3)
        gives_up.cancel()
        await asyncio.wait([gives_up])
        assert full.waiting == 2
        # Right after the gate has called it up, and before it can resume.
        [inner] = full._tasks
        inner.add_done_callback(lambda _: called_up.cancel())
        go.set()
        await asyncio.wait([first, called_up, last])
        assert called_up.cancelled()
        assert ran == ["last"]
        assert (full.running, full.waiting, full.full) == (0, 0, False)
        await full.close(1.0)

    run(body())


def test_a_cancellation_waits_until_the_function_is_over() -> None:
    async def body() -> None:
        patient, waiter = gate(), Waiter()
        go, over = threading.Event(), list[bool]()

        def work() -> None:
            assert waiter.thread == threading.get_ident()
            go.wait(WAIT_S)
            over.append(True)

        task = asyncio.ensure_future(patient.run("f", work, waiter))
        await until(lambda: waiter.threads == 1)
        for _ in range(3):
            task.cancel()
            await asyncio.sleep(0.01)
        assert not task.done()
        go.set()
        await asyncio.wait([task])
        assert task.cancelled()
        assert over == [True]
        assert waiter.threads == 0
        assert waiter.thread is None
        await patient.close(1.0)

    run(body())


def test_once_closed_nobody_waits_and_what_still_runs_is_counted() -> None:
    async def body() -> None:
        closed, go = gate(most=1), threading.Event()
        running = asyncio.ensure_future(closed.run("f", lambda: go.wait(WAIT_S)))
        waiting = asyncio.ensure_future(closed.run("f", lambda: None))
        await until(lambda: closed.running == 1 and closed.waiting == 1)
        closed.shut()
        running.cancel()
        await asyncio.wait([running, waiting])
        assert running.cancelled()
        assert waiting.cancelled()
        assert await closed.close(0.01) == 1
        go.set()
        assert await closed.close(WAIT_S) == 0
        await until(lambda: not names())

    run(body())


def test_nothing_begins_past_the_deadline() -> None:
    async def body() -> None:
        ran: list[int] = []
        fenced = gate(guard=lambda: False)
        with pytest.raises(asyncio.CancelledError):
            await fenced.run("f", lambda: ran.append(1))
        assert ran == []
        await fenced.close(1.0)

    run(body())


def test_the_caller_s_context_is_seen_in_the_thread_and_not_changed_by_it() -> None:
    name: ContextVar[str] = ContextVar("name", default="nobody")

    async def body() -> None:
        there = gate()
        name.set("alice")

        def look() -> tuple[str, bool]:
            before = name.get()
            name.set("bob")
            return before, in_thread.get()

        assert await there.run("f", look) == ("alice", True)
        assert name.get() == "alice"
        assert not in_thread.get()
        await there.close(1.0)

    run(body())


# the threads


def test_threads_are_used_again_and_end_by_themselves() -> None:
    async def body() -> None:
        threads = DaemonThreads(4, "domicile-blocking")
        seen = {await threads.run(threading.get_ident) for _ in range(50)}
        assert len(seen) <= 4, "threads are used again, however late a busy machine notices them"
        go = threading.Event()
        many = [asyncio.ensure_future(threads.run(lambda: go.wait(WAIT_S))) for _ in range(9)]
        await until(lambda: len(names()) == 4)
        go.set()
        await asyncio.gather(*many)
        await until(lambda: not names())
        assert await threads.run(lambda: 1) == 1
        await until(lambda: not names())

    run(body())


def test_threads_rest_and_start_again() -> None:
    async def body() -> None:
        threads = DaemonThreads(2, "domicile-blocking")
        for _ in range(3):
            await asyncio.gather(*(threads.run(lambda: 1) for _ in range(5)))
            await until(lambda: len(names()) <= 2)
            await asyncio.sleep(0.005)
            threads.rest()
            await until(lambda: not names())

    run(body())


def test_a_closed_loop_does_not_matter_to_a_late_function() -> None:
    go = threading.Event()

    async def body() -> None:
        threads = DaemonThreads(1, "domicile-blocking")
        task = asyncio.ensure_future(threads.run(lambda: go.wait(WAIT_S)))
        await asyncio.sleep(0.01)
        task.cancel()

    run(body())
    go.set()


# in a cluster


@simulated(entities=[Lab], nodes=2, seeds=3, settings=FEW)
async def test_messages_invoke_blocking_methods(sim: Sim) -> None:
    lab = sim.ref(Lab, "a")
    assert await lab.ask(Lab.add, 1) == 3
    assert await lab.ask(Lab.add, 1, two=5) == 6
    assert await lab.ask(Lab.both, 4) == 10
    assert await lab.ask(Lab.total, [0.5, 1]) == 1.5
    id, epoch, inside = await lab.ask(Lab.who)
    assert (id, inside) == ("a", True)
    assert epoch >= 1
    await lab.tell(Lab.add, 1)
    await lab.ask(Lab.soon)
    await sim.advance(1.0)
    assert await lab.ask(Lab.seen) == 6


@simulated(entities=[Lab], nodes=2, seeds=1, settings=FEW)
async def test_what_a_blocking_method_raises_reaches_its_caller(sim: Sim) -> None:
    lab = sim.ref(Lab, "a")
    with pytest.raises(HandlerFailed, match="KeyError: 'no such sample'"):
        await lab.ask(Lab.fail)
    with pytest.raises(HandlerFailed, match="raised SystemExit: 3"):
        await lab.ask(Lab.quit)
    with pytest.raises(HandlerFailed, match="after cannot be used inside a @blocking method"):
        await lab.ask(Lab.late)
    assert await lab.ask(Lab.add, 1) == 3


GATES: dict[str, threading.Event] = {}
started: list[str] = []


class Slow(Entity, name="blocking-slow"):
    @handler(timeout_s=0.15)
    @blocking
    def hurried(self) -> None:
        self._stay("hurried")

    @blocking
    def patient(self) -> str:
        self._stay("patient")
        return self.id

    @handler
    async def ping(self) -> str:
        started.append(f"{self.id} ping")
        return self.id

    def _stay(self, name: str) -> None:
        started.append(f"{self.id} {name}")
        GATES[self.id].wait(WAIT_S)
        started.append(f"{self.id} over")


@pytest.fixture
def gates() -> dict[str, threading.Event]:
    GATES.clear()
    started.clear()
    GATES.update({id: threading.Event() for id in "abcdef"})
    return GATES


def _replies(node: Node) -> list[Any]:
    """What a node answers from now on."""
    assert node.life is not None
    runtime: Any = node.life.runtime
    found: list[Any] = []
    answer = runtime.answer

    def note(source: Any, message: Any) -> None:
        if isinstance(message, Reply):
            found.append(message)
        answer(source, message)

    runtime.answer = note
    return found


def test_after_a_timeout_the_caller_knows_but_the_entity_stays_busy(
    gates: dict[str, threading.Event],
) -> None:
    async def body() -> None:
        async with Node("memory://blocking-timeout", entities=[Slow], settings=FEW) as node:
            slow = node.ref(Slow, "a")
            replies = _replies(node)
            hurried = asyncio.ensure_future(slow.ask(Slow.hurried))
            await until(lambda: bool(started))
            pinged = asyncio.ensure_future(slow.ask(Slow.ping))
            with pytest.raises(HandlerFailed, match=r"ran for more than 0\.15 s"):
                await hurried
            assert await node.ref(Slow, "b").ask(Slow.ping) == "b"
            assert started == ["a hurried", "b ping"], "one at a time"
            gates["a"].set()
            assert await pinged == "a"
            assert started == ["a hurried", "b ping", "a over", "a ping"]
            assert len(replies) == 3, "it was told once"

    run(body())


def test_more_than_may_wait_is_refused_and_did_not_run(gates: dict[str, threading.Event]) -> None:
    settings = Settings(shards=4, blocking_threads=1, blocking_queue=1)

    async def body() -> None:
        async with Node("memory://blocking-full", entities=[Slow], settings=settings) as node:
            asks = {id: asyncio.ensure_future(node.ref(Slow, id).ask(Slow.patient)) for id in "ab"}
            await until(lambda: started == ["a patient"])
            with pytest.raises(Overloaded, match=r"blocking-slow\.patient did not run"):
                await node.ref(Slow, "c").ask(Slow.patient)
            assert await node.ref(Slow, "c").ask(Slow.ping) == "c", "others run on"
            for event in gates.values():
                event.set()
            assert [await asks[id] for id in "ab"] == ["a", "b"]
            assert "c patient" not in started

    run(body())


def test_a_leaving_node_waits_for_its_threads_before_it_gives_a_shard_away(
    gates: dict[str, threading.Event],
) -> None:
    async def body() -> None:
        store = "memory://blocking-leave"
        leave = asyncio.Event()

        async def live(node: Node) -> None:
            async with node:
                await leave.wait()

        async with Node(store, entities=[Slow], settings=FEW) as stays:
            leaves = Node(store, entities=[Slow], settings=FEW)
            living = asyncio.ensure_future(live(leaves))
            await until(lambda: leaves.life is not None)
            life = leaves.life
            assert life is not None
            id, *_ = [id for id in gates if await _home(leaves, id, stays)]
            started.clear()
            asked = asyncio.ensure_future(stays.ref(Slow, id).ask(Slow.patient))
            await until(lambda: started == [f"{id} patient"])
            leave.set()
            pinged = asyncio.ensure_future(stays.ref(Slow, id).ask(Slow.ping))
            await until(lambda: sum(host.unsettled for host in life.runtime.hosts.values()) == 1)
            assert started == [f"{id} patient"], "all others are released, this one is not"
            gates[id].set()
            assert await asked == id
            assert await pinged == id
            assert started == [f"{id} patient", f"{id} over", f"{id} ping"]
            await living

    run(body())


async def _home(node: Node, id: str, other: Node) -> bool:
    """Whether an entity is at home at a node, once that one has its share."""
    life, there = node.life, other.life
    assert life is not None
    assert there is not None
    await until(
        lambda: (
            sum(h.owner.phase.value == "open" for h in life.runtime.hosts.values()) == 2
            and sum(h.owner.phase.value == "open" for h in there.runtime.hosts.values()) == 2
        )
    )
    await other.ref(Slow, id).ask(Slow.ping)
    return any(key.id == id for host in life.runtime.hosts.values() for key in host.cells)


def test_past_the_drain_deadline_a_thread_that_stays_is_counted_as_stuck(
    gates: dict[str, threading.Event],
) -> None:
    settings = Settings(shards=4, drain_deadline_s=0.2, linger_s=0.2)
    meter = Meter()

    async def body() -> None:
        node = Node("memory://blocking-stuck", entities=[Slow], settings=settings, meter=meter)
        async with node:
            asked = asyncio.ensure_future(node.ref(Slow, "a").ask(Slow.patient))
            await until(lambda: bool(started))
        with pytest.raises(MaybeExecuted):
            await asked
        assert meter.counts["handler.stuck"] == 1
        gates["a"].set()
        await until(lambda: not names())

    run(body())
