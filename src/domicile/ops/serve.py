"""One node or manager in a process of its own, until it has left: `domicile run`, `manager`.

Called by the command line. The process is Domicile's own here, so this module may take signals, arm
the watchdog (L4) and choose the loop. A node inside a host program must do none of that.
"""

from __future__ import annotations

import asyncio
import gc
import importlib
from collections.abc import Callable, Coroutine
from contextlib import AsyncExitStack
from typing import Any, Literal

from domicile.backends.registry import OpenOptions, shown_url, store_backend
from domicile.core.coordinator.departures import late_s
from domicile.core.state.records import NodeRecord
from domicile.errors import ConfigError
from domicile.incarnation.signals import LeaveSignals
from domicile.ports.health import Verdict
from domicile.process import Process
from domicile.taglog import TaggedLog

log = TaggedLog()

LoopKind = Literal["auto", "asyncio", "uvloop"]

PATIENCE_S = 3.0
"""Seconds of joining after which the log says that it still waits."""

GARBAGE = 20_000
"""New objects after which the collector looks for garbage, instead of Python's 700 or 2,000."""

FIRST = asyncio.FIRST_COMPLETED


def serve(node: Process, loop: LoopKind) -> None:
    """Run a member until it is asked to leave and has left; raises any other error that ended
    it."""
    with asyncio.Runner(loop_factory=loop_factory(loop)) as runner:
        runner.run(_serve(node))


def collect_rarely() -> None:
    """Have Python look for cyclic garbage less often, and never at what was there at the start.

    Messages on their way are many objects that live for milliseconds. Python's default looks at
    them again and again: a quarter of the CPU time of a durable ask with 1,000 in flight. A program
    that turned its collector off, or set a larger number, keeps that.
    """
    young, *older = gc.get_threshold()
    if gc.isenabled() and 0 < young < GARBAGE:
        gc.set_threshold(GARBAGE, *older)
    gc.freeze()


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
    with LeaveSignals(at_once=True) as signals:
        async with AsyncExitStack() as stack:
            log.info("joining cluster %s in %s", node.cluster, shown_url(node.store))
            if not await _joined(stack.enter_async_context(node), signals.asked):
                assert signals.heard is not None, "nothing else asks"
                log.info("%s came before it had joined: nothing to hand over", signals.heard.name)
                return
            _say_where(node)
            collect_rarely()
            await node.run_until(signals.asked)
            log.info(
                "asked to leave: this takes at most %g s; a second signal ends this process at "
                "once",
                node.settings.drain_deadline_s + late_s(node.settings) + node.settings.linger_s,
            )


async def _joined(entering: Coroutine[Any, Any, Any], asked: asyncio.Event) -> bool:
    """Wait until it has joined; False if it was asked to leave before. Logs that it still waits."""
    loop = asyncio.get_running_loop()
    joining, asking = loop.create_task(entering), loop.create_task(asked.wait())
    waited_s = PATIENCE_S
    try:
        while not (await asyncio.wait((joining, asking), timeout=waited_s, return_when=FIRST))[0]:
            log.warning("not joined yet: the store is away, locked or slow; waiting on")
            waited_s *= 2
        if not joining.done():
            joining.cancel()
            await asyncio.wait((joining,))
    finally:
        joining.cancel()
        asking.cancel()
    if joining.cancelled():
        return False
    joining.result()
    return True


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
