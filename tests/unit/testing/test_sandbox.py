"""The sandbox refuses the real world in its own thread and block, and nowhere else."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable

import pytest

from domicile.testing.sim.loop import World
from domicile.testing.sim.sandbox import SimulationError, sandbox


def start_thread() -> None:
    threading.Thread(target=int, daemon=True).start()


def spawn() -> None:
    os.posix_spawn(sys.executable, [sys.executable, "-c", ""], {})


REFUSED: list[tuple[Callable[[], object], str]] = [
    (socket.socket, "simulated network"),
    (start_thread, "event loop"),
    (lambda: subprocess.Popen([sys.executable, "-c", ""]), "World.process"),
    (lambda: os.system("true"), "World.process"),
    (lambda: time.sleep(0), "asyncio.sleep"),
]
if hasattr(os, "fork"):
    REFUSED += [(os.fork, "World.process"), (spawn, "World.process")]


@pytest.mark.parametrize(("act", "instead"), REFUSED)
def test_real_io_is_refused_and_the_message_says_what_to_use(
    act: Callable[[], object], instead: str
) -> None:
    with sandbox(), pytest.raises(SimulationError, match=instead):
        act()


def test_a_socket_made_before_cannot_be_used_inside() -> None:
    with socket.socket() as made_before:
        with sandbox():
            with pytest.raises(SimulationError, match="binding"):
                made_before.bind(("127.0.0.1", 0))
            with pytest.raises(SimulationError, match="connecting"):
                made_before.connect(("127.0.0.1", 9))
        made_before.bind(("127.0.0.1", 0))


def test_everything_works_again_after_the_block_even_if_it_failed() -> None:
    with pytest.raises(KeyError), sandbox():
        raise KeyError
    time.sleep(0)
    socket.socket().close()


def test_blocks_nest() -> None:
    with sandbox():
        with sandbox():
            pass
        with pytest.raises(SimulationError):
            time.sleep(0)
    time.sleep(0)


def test_other_threads_are_free() -> None:
    go, done = threading.Event(), threading.Event()
    problems: list[BaseException] = []

    def other() -> None:
        go.wait(10)
        try:
            socket.socket().close()
            time.sleep(0)
        except SimulationError as error:
            problems.append(error)
        done.set()

    thread = threading.Thread(target=other)
    thread.start()
    with sandbox():
        go.set()
        assert done.wait(10)
    thread.join()
    assert problems == []


def test_files_are_allowed(tmp_path: os.PathLike[str]) -> None:
    path = os.path.join(tmp_path, "file")
    with sandbox():
        with open(path, "w") as file:
            file.write("kept")
        with open(path) as file:
            assert file.read() == "kept"


def test_a_world_is_sandboxed_only_while_it_runs() -> None:
    world = World(1)
    driver = world.process("driver")

    async def main() -> None:
        with pytest.raises(SimulationError):
            time.sleep(0)  # noqa: ASYNC251
        with pytest.raises(SimulationError):
            socket.socket()

    world.run(main(), driver)
    time.sleep(0)
    world.close()
