"""The calls of `reconcile` that run for one controller, and how they end.

Each is a task of its own. An instance that leaves lets them end, then cancels what is left. One
that has lost its Lease cancels them at once (L4). Cancelling does not end a thread, so threads are
looked at, too: while one is at work, the Lease is not given back. Controllers call this; it must
never start a call by itself.
"""

from __future__ import annotations

import asyncio
import logging
import sys
import threading
from collections.abc import Awaitable, Callable
from concurrent.futures import thread as pools
from contextlib import suppress
from types import FrameType
from typing import Any

from domicile.kube.holding import WATCHDOG, KubeLeaseHolder
from domicile.kubeapi.client import KubeClient
from domicile.kubeapi.objects import PartialObject

log = logging.getLogger("domicile.kube")

SETTLE_S = 5.0
"""How long an instance that leaves lets calls end before it cancels them, and then waits for their
threads."""

LOOK_S = 0.1
"""How often threads are looked at."""

Reconcile = Callable[[KubeClient, Any], Awaitable["float | None"]]
"""What a controller does with an object. It returns the seconds after which it wants to see the
object again, or None."""


class RunningCalls:
    """The calls of one controller. Bounded by the number of its workers."""

    def __init__(self, member: KubeLeaseHolder, settle_s: float) -> None:
        self._member, self._settle_s = member, settle_s
        self._running: dict[asyncio.Task[float | None], None] = {}
        self._before = frozenset(threading.enumerate())

    async def run(
        self,
        reconcile: Reconcile,
        client: KubeClient,
        one: PartialObject,
        over: Callable[[], None] | None = None,
    ) -> float | None:
        """Call it. A caller that is cancelled leaves the call to `end`; `over` follows the call."""

        async def call() -> float | None:
            return await reconcile(client, one)

        metadata = one.metadata
        task = asyncio.get_running_loop().create_task(
            call(), name=f"reconcile {metadata.namespace}/{metadata.name}"
        )
        if over is not None:
            task.add_done_callback(lambda _: over())
        self._running[task] = None
        await asyncio.wait((task,))
        del self._running[task]
        if task.cancelled():
            raise RuntimeError(f"the call {task.get_name()} cancelled itself")
        return task.result()

    async def end(self) -> None:
        """Leave nothing at work, as far as that can be done."""
        try:
            if self._member.valid:
                await self._settle()
        finally:
            await self._cancel()

    async def _settle(self) -> None:
        """The Lease is renewed meanwhile, so the calls may act."""
        lost = asyncio.ensure_future(self._member.wait_lost())
        try:
            async with asyncio.timeout(self._settle_s):
                while (left := self._left()) and not lost.done():
                    await asyncio.wait((*left, lost), return_when=asyncio.FIRST_COMPLETED)
        except TimeoutError:
            pass
        finally:
            lost.cancel()

    async def _cancel(self) -> None:
        left = self._left()
        if not left:
            return
        # Noted first: this, too, may be cancelled.
        said = f"{', '.join(task.get_name() for task in left)} did not end in time"
        self._member.work_goes_on(said)
        for task in left:
            task.cancel()
        _, pending = await asyncio.wait(left, timeout=self._member.hard_left_s)
        with suppress(TimeoutError):
            async with asyncio.timeout(min(self._settle_s, self._member.hard_left_s)):
                while self._threads_at_work():  # noqa: ASYNC110 - a thread tells nobody
                    await asyncio.sleep(LOOK_S)
        if not pending and not self._threads_at_work():
            self._member.work_ended(said)

    def _left(self) -> tuple[asyncio.Task[float | None], ...]:
        for task in [task for task in self._running if task.done()]:
            del self._running[task]
            error = None if task.cancelled() else task.exception()
            if error is not None:
                log.warning("%s failed: %r", task.get_name(), error)
        return tuple(self._running)

    def _threads_at_work(self) -> bool:
        """Whether a thread may still work for a call: one that was started since, or one of a pool.
        A pool's thread that has no work stands in the pool's own loop."""
        frames = sys._current_frames()  # pyright: ignore[reportPrivateUsage]
        for thread in threading.enumerate():
            frame = frames.get(thread.ident or 0)
            ours = thread is threading.current_thread() or thread.name == WATCHDOG
            if frame is None or ours or _is_pool_loop(frame):
                continue
            if thread not in self._before or _is_pooled(frame):
                return True
        return False


def _is_pool_loop(frame: FrameType) -> bool:
    code = frame.f_code
    return code.co_name == "_worker" and code.co_filename == pools.__file__


def _is_pooled(frame: FrameType | None) -> bool:
    while frame is not None:
        if _is_pool_loop(frame):
            return True
        frame = frame.f_back
    return False
