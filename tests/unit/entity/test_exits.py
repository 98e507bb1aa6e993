"""Handlers that raise what ends a program: it fails their call, and the node serves on (I9)."""

from __future__ import annotations

import asyncio
import logging
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from domicile import Entity, HandlerFailed, Node, Settings, Unavailable, handler
from domicile.entity.running.exits import is_ctrl_c
from domicile.testing import Sim, simulated

FEW = Settings(shards=4)
LOG: list[str] = []
EXITS: dict[str, type[BaseException]] = {
    "exit": SystemExit,
    "interrupt": KeyboardInterrupt,
    "close": GeneratorExit,
}


class Quitter(Entity, name="quitter"):
    """Tries to end its process in every way."""

    def __init__(self) -> None:
        self.count = 0
        if self.id.startswith("init"):
            raise SystemExit("from __init__")

    async def on_start(self) -> None:
        if self.id.startswith("start-"):
            await asyncio.sleep(0.1)
            raise EXITS[self.id.removeprefix("start-")]("from on_start")

    async def on_stop(self) -> None:
        if self.id.startswith("stop-"):
            LOG.append(self.id)
            await asyncio.sleep(0.1)
            raise EXITS[self.id.removeprefix("stop-")]("from on_stop")

    @handler
    async def add(self) -> int:
        self.count += 1
        return self.count

    @handler
    async def leave(self) -> None:
        self.passivate()

    @handler
    async def quit(self, how: str, after_s: float) -> None:
        self.count += 1
        if after_s:
            await asyncio.sleep(after_s)
        raise EXITS[how](3)

    @handler
    async def quit_later(self, how: str) -> None:
        self.after(0.1, self.quit, how, 0.0)


class Plain(Entity, name="plain-quitter"):
    """Has no hooks, so it is made within the call."""

    def __init__(self) -> None:
        raise SystemExit("from __init__")

    @handler
    async def add(self) -> int:
        raise NotImplementedError


@contextmanager
def own_sigint() -> Iterator[None]:
    """As under `node.run()`: no signal raises KeyboardInterrupt."""
    before = signal.signal(signal.SIGINT, lambda *_: None)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


@pytest.fixture(autouse=True)
def handled() -> Iterator[None]:
    LOG.clear()
    with own_sigint():
        yield


@pytest.mark.parametrize("how", EXITS)
@pytest.mark.parametrize("after_s", [0.0, 0.1])
def test_an_exit_in_a_handler_fails_its_call_only(
    how: str, after_s: float, caplog: pytest.LogCaptureFixture
) -> None:
    @simulated(entities=[Quitter], nodes=2, seeds=2, settings=FEW)
    async def scenario(sim: Sim) -> None:
        lives = [node.incarnation for node in sim.nodes]
        for id in ("a", "b", "c", "d"):
            quitter = sim.ref(Quitter, id)
            with pytest.raises(HandlerFailed, match=f"{EXITS[how].__name__}: 3"):
                await quitter.ask(Quitter.quit, how, after_s)
            await quitter.tell(Quitter.quit, how, after_s)
            assert await quitter.ask(Quitter.add) == 3, "the same entity goes on"
        assert [node.incarnation for node in sim.nodes] == lives

    with caplog.at_level(logging.WARNING, logger="domicile"):
        scenario()
    assert "does not end the node" in caplog.text
    assert "os.kill(os.getpid(), signal.SIGTERM)" in caplog.text


@pytest.mark.parametrize("how", EXITS)
def test_an_exit_in_a_hook_or_a_timer_is_as_any_other_failure_there(how: str) -> None:
    @simulated(entities=[Quitter, Plain], nodes=2, seeds=2, settings=FEW)
    async def scenario(sim: Sim) -> None:
        LOG.clear()
        lives = [node.incarnation for node in sim.nodes]
        starting = sim.ref(Quitter, f"start-{how}")
        with pytest.raises(Unavailable, match=rf"start.*{EXITS[how].__name__}"):
            await starting.ask(Quitter.add)
        for made in (sim.ref(Quitter, "init").ask(Quitter.add), sim.ref(Plain, "p").ask(Plain.add)):
            with pytest.raises(Unavailable, match=r"failed to start: SystemExit: from __init__"):
                await made
        stopping = sim.ref(Quitter, f"stop-{how}")
        assert await stopping.ask(Quitter.add) == 1
        await stopping.ask(Quitter.leave)
        assert await stopping.ask(Quitter.add) == 1, "a new one"
        assert [f"stop-{how}"] == LOG
        ticking = sim.ref(Quitter, "t")
        await ticking.ask(Quitter.quit_later, how)
        await sim.advance(0.2)
        assert await ticking.ask(Quitter.add) == 2, "the same entity goes on"
        assert [node.incarnation for node in sim.nodes] == lives

    scenario()


@pytest.mark.parametrize("how", EXITS)
def test_a_local_ask_learns_of_it_too(how: str) -> None:
    async def scenario() -> None:
        async with Node("memory://exits", entities=[Quitter], settings=FEW) as node:
            quitter = node.ref(Quitter, "a")
            assert await quitter.ask(Quitter.add) == 1
            for after_s in (0.0, 0.01):
                with pytest.raises(HandlerFailed, match=f"{EXITS[how].__name__}: 3"):
                    await quitter.ask(Quitter.quit, how, after_s)
            assert await quitter.ask(Quitter.add) == 4

    asyncio.run(scenario())


# Ctrl-C itself


def raised_by(raise_it: Callable[[], Any]) -> BaseException:
    try:
        raise_it()
    except BaseException as error:
        return error
    raise AssertionError("nothing was raised")


def quits() -> None:
    raise KeyboardInterrupt


def pressed() -> None:
    signal.raise_signal(signal.SIGINT)


def test_only_what_a_signal_handler_raises_is_ctrl_c() -> None:
    def loud(number: int, frame: object) -> None:
        raise KeyboardInterrupt

    signal.signal(signal.SIGINT, loud)
    assert is_ctrl_c(raised_by(pressed))
    assert not is_ctrl_c(raised_by(quits))
    assert not is_ctrl_c(SystemExit())
    # This one leaves no frame, so nobody can tell, and the process must be able to end.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    assert is_ctrl_c(raised_by(pressed))
    assert is_ctrl_c(raised_by(quits))
    for other in (signal.SIG_IGN, signal.SIG_DFL):
        signal.signal(signal.SIGINT, other)
        assert not is_ctrl_c(raised_by(quits)), "no signal raises"


def test_no_thread_but_the_main_one_gets_ctrl_c() -> None:
    signal.signal(signal.SIGINT, signal.default_int_handler)
    found: list[bool] = []
    thread = threading.Thread(target=lambda: found.append(is_ctrl_c(raised_by(quits))))
    thread.start()
    thread.join()
    assert found == [False]


def test_a_second_ctrl_c_ends_the_program_also_within_a_handler() -> None:
    class Presser(Entity, name="presser"):
        @handler
        async def press(self) -> None:
            for _ in range(2):
                signal.raise_signal(signal.SIGINT)
            raise AssertionError("the second one ends it")

    hasty = Settings(shards=4, drain_deadline_s=0.1, linger_s=0.1)

    async def scenario() -> None:
        async with Node("memory://ctrl-c", entities=[Presser], settings=hasty) as node:
            await node.ref(Presser, "p").ask(Presser.press)

    signal.signal(signal.SIGINT, signal.default_int_handler)
    with pytest.raises(KeyboardInterrupt):
        asyncio.run(scenario())
