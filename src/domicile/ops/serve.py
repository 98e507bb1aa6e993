"""One node or manager in a process of its own, until it has left: `domicile run`, `manager`.

Called by the command line. The process is Domicile's own here, so this module may take signals, arm
the watchdog (L4) and choose the loop. A node inside a host program must do none of that.
"""

from __future__ import annotations

import asyncio
import importlib
import signal
from collections.abc import Callable, Generator
from contextlib import AsyncExitStack, contextmanager
from typing import Any, Literal

from domicile.backends.registry import OpenOptions, store_backend
from domicile.core.coordinator.departures import late_s
from domicile.core.state.records import NodeRecord
from domicile.errors import ConfigError
from domicile.ports.health import Verdict
from domicile.process import Process
from domicile.taglog import TaggedLog

log = TaggedLog()

LoopKind = Literal["auto", "asyncio", "uvloop"]

PATIENCE_S = 3.0
"""Seconds of joining after which the log says that it still waits."""

SIGNALS = (signal.SIGTERM, signal.SIGINT)


def serve(node: Process, loop: LoopKind) -> None:
    """Run a member until it is asked to leave and has left; raises any other error that ended
    it."""
    with asyncio.Runner(loop_factory=loop_factory(loop)) as runner:
        runner.run(_serve(node))


def loop_factory(loop: LoopKind) -> Callable[[], asyncio.AbstractEventLoop] | None:
    """The function that makes the event loop; `auto` is uvloop if it is installed."""
    if loop == "asyncio":
        return None
    try:
        uvloop = importlib.import_module("uvloop")
    except ImportError:
        if loop == "auto":
            return None
        raise ConfigError(
            "uvloop is not installed here: pip install uvloop, or leave out --loop uvloop"
        ) from None
    factory: Callable[[], asyncio.AbstractEventLoop] = uvloop.new_event_loop
    return factory


async def _serve(node: Process) -> None:
    asked: list[signal.Signals] = []
    async with AsyncExitStack() as stack:
        joining: asyncio.Future[Any] = asyncio.ensure_future(stack.enter_async_context(node))
        # Kept until `run` installs its own handlers, so that no signal is missed between.
        with _signals(asked, joining.cancel):
            log.info("joining cluster %s in %s", node.cluster, node.store)
            try:
                await _joined(joining)
            except asyncio.CancelledError:
                if not asked:
                    raise
                log.info("%s came before it had joined: nothing to hand over", asked[0].name)
                return
            if not asked:
                _say_where(node)
                await node.run()
        for kind in SIGNALS:
            signal.signal(kind, signal.SIG_DFL)
        log.info(
            "asked to leave: this takes at most %g s; a second signal ends this process at once",
            node.settings.drain_deadline_s + late_s(node.settings) + node.settings.linger_s,
        )


async def _joined(joining: asyncio.Future[Any]) -> None:
    """Wait until it has joined; log from time to time that it still waits."""
    waited_s = PATIENCE_S
    try:
        while not (await asyncio.wait([joining], timeout=waited_s))[0]:
            log.warning("not joined yet: the store is away, locked or slow; waiting on")
            waited_s *= 2
    finally:
        joining.cancel()
    joining.result()


def _say_where(node: Process) -> None:
    record = None if node.life is None else node.life.member.record
    if isinstance(record, NodeRecord):
        tags = {"node": record.node, "incarnation": record.incarnation}
        log.info("listening at %s", record.address, extra=tags)
        for twin in _twins(node, record):
            log.warning(
                "the process at %s (%s) has the node id %r as well: a drain or a wish for that "
                "name means both, and other commands must name an incarnation; give each its own",
                twin.address, twin.incarnation[:8], twin.node, extra=tags,
            )  # fmt: skip


def _twins(node: Process, record: NodeRecord) -> list[NodeRecord]:
    """Other records with this node id whose processes run, if a health port can tell (L6)."""
    try:
        health = store_backend(node.store).health(node.store, OpenOptions(record.node))
    except ConfigError:
        return []  # the program brings backends of its own
    if node.life is None or health is None:
        return []
    return [
        other
        for one, other in node.life.member.members.nodes.items()
        if other.node == record.node
        and one != record.incarnation
        and health.verdict(one) is Verdict.ALIVE
    ]


@contextmanager
def _signals(asked: list[signal.Signals], then: Callable[[], object]) -> Generator[None]:
    loop = asyncio.get_running_loop()

    def heard(kind: signal.Signals) -> None:
        asked.append(kind)
        then()

    for kind in SIGNALS:
        loop.add_signal_handler(kind, heard, kind)
    try:
        yield
    finally:
        for kind in SIGNALS:
            loop.remove_signal_handler(kind)
