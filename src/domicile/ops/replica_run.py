"""Commands that run a server of a replica group: `domicile replica run | guard | agent`.

`run` is the guard itself, which has the server and the agent as children. `guard` and `agent` are
the two halves, for service managers that keep them as two units. What they do is in
`domicile.failover.guard` and `domicile.failover.serve`.
"""

from __future__ import annotations

import asyncio
import logging
import signal
import subprocess
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from domicile.errors import ConfigError, DomicileError
from domicile.ops.console import (
    AWAY,
    FAILED,
    USAGE,
    FormName,
    LevelName,
    LogFormat,
    LogLevel,
    examples,
    fail,
    is_away,
)

if TYPE_CHECKING:
    from domicile.failover.replica_settings import ReplicaSettings
    from domicile.ports.store import Store

log = logging.getLogger("domicile")

AGAIN_S = 0.5
"""An agent that has ended is started again after this time."""

LEAVE_S = 20.0
"""An agent that was asked to leave and has not after this time is killed; its lease ends then."""

File = Annotated[
    Path,
    typer.Argument(metavar="FILE", show_default=False, help="The settings, as orders-1.toml."),
]


def add_run(group: typer.Typer) -> None:
    """Add these commands to the group `replica`."""
    for name, command, shown in (
        ("run", run_replica, ("run orders-1.toml", "run orders-1.toml --log-format json")),
        ("guard", run_guard, ("guard orders-1.toml",)),
        ("agent", run_agent, ("agent orders-1.toml",)),
    ):
        epilog = examples(*(f"domicile replica {example}" for example in shown))
        group.command(name, epilog=epilog)(command)


def run_replica(
    file: File,
    log_level: LogLevel = LevelName.info,
    log_format: LogFormat = FormName.text,
) -> None:
    """Run one server of a group: the server, its guard and its agent, until SIGTERM or Ctrl-C.

    This process is the guard. It starts the agent again if that ends. When this process ends,
    however it ends, server and agent end too. Without `command` in FILE somebody else runs the
    server, and this only watches over it.
    """
    settings = _settings(file, log_level, log_format)
    words = [
        sys.executable, "-m", "domicile", "replica", "agent", str(file),
        "--log-level", log_level.value, "--log-format", log_format.value,
    ]  # fmt: skip
    _ended(lambda asked: _guard(settings, asked, words))


def run_guard(
    file: File,
    log_level: LogLevel = LevelName.info,
    log_format: LogFormat = FormName.text,
) -> None:
    """Run only the guard of a server, and the server; start it before the agent."""
    settings = _settings(file, log_level, log_format)
    _ended(lambda asked: _guard(settings, asked, []))


def run_agent(
    file: File,
    log_level: LogLevel = LevelName.info,
    log_format: LogFormat = FormName.text,
) -> None:
    """Run only the agent of a server, whose guard runs already or will."""
    settings = _settings(file, log_level, log_format)
    _ended(lambda asked: _agent(settings, asked))


def _settings(file: Path, level: LevelName, form: FormName) -> ReplicaSettings:
    from domicile.failover.replica_settings import replica_settings
    from domicile.ops import logs

    logs.set_up(level.value, form.value)
    try:
        return replica_settings(file)
    except ConfigError as error:
        fail(str(error), USAGE)


def _ended(work: Callable[[asyncio.Event], Awaitable[None]]) -> None:
    """Run until asked to leave; errors become exit codes."""
    from domicile.incarnation.signals import LeaveSignals

    async def main() -> None:
        with LeaveSignals(at_once=True) as signals:
            await work(signals.asked)

    try:
        asyncio.run(main())
    except ConfigError as error:
        fail(str(error), USAGE)
    except DomicileError as error:
        fail(str(error), AWAY if is_away(error) else FAILED)


async def _guard(settings: ReplicaSettings, asked: asyncio.Event, agent: list[str]) -> None:
    """Be the guard; with an agent as a child, which leaves first, if its command is given."""
    from domicile.failover.serve import serve_guard

    if not agent:
        await serve_guard(settings, asked)
        return
    over = asyncio.Event()
    guarding = asyncio.create_task(serve_guard(settings, over), name="guard")
    guarding.add_done_callback(lambda _: asked.set())
    try:
        await _keep_agent(agent, asked)
    finally:
        over.set()
        await asyncio.wait((guarding,))
    guarding.result()


async def _agent(settings: ReplicaSettings, asked: asyncio.Event) -> None:
    from domicile.backends.registry import OpenOptions, store_backend
    from domicile.failover.serve import serve_agent
    from domicile.observe.metrics import Metrics
    from domicile.stores.namespace import Namespace

    backend, meter = store_backend(settings.store), Metrics()
    options = OpenOptions(
        settings.id, settings.cluster, settings.store, settings.lease().op_timeout_s, meter
    )

    def open_store() -> Store:
        return Namespace(backend.open_store(settings.store, options), settings.cluster)

    await serve_agent(settings, open_store, meter=meter, asked=asked)


async def _keep_agent(words: list[str], asked: asyncio.Event) -> None:
    """Keep an agent as a child until asked to leave; then let it leave the group first."""
    asking = asyncio.create_task(asked.wait(), name="asked to leave")
    try:
        while not asking.done():
            process = _start(words)
            ended = asyncio.create_task(_wait(process), name="agent's end")
            await asyncio.wait((ended, asking), return_when=asyncio.FIRST_COMPLETED)
            if not ended.done():
                process.send_signal(signal.SIGTERM)
                await asyncio.wait((ended,), timeout=LEAVE_S)
                if not ended.done():
                    process.kill()
                await ended
                return
            if process.returncode == USAGE:
                raise ConfigError("the agent refused its settings, see above")
            log.error("the agent ended with %s and is started again", process.returncode)
            await asyncio.wait((asking,), timeout=AGAIN_S)
    finally:
        asking.cancel()


def _start(words: list[str]) -> subprocess.Popen[bytes]:
    from domicile.failover.drivers.child_process import with_parent

    # A session of its own: Ctrl-C is for this process, which asks the agent to leave.
    return subprocess.Popen(with_parent(words), stdin=subprocess.DEVNULL, start_new_session=True)


async def _wait(process: subprocess.Popen[bytes]) -> None:
    while process.poll() is None:  # noqa: ASYNC110
        await asyncio.sleep(0.02)
