"""One incarnation after another: after a fence a node or client begins the next one (L5).

Made by `process` and `client`. An incarnation that ends by an unexpected error is followed by
another, too, because most such errors pass. An error that comes back at once, several times, ends
the process, so that its operator sees it. Only the current incarnation may be reached from here.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, NoReturn, cast

from domicile.entity.model.ref import Call
from domicile.errors import ConfigError, StoreError, StoreRewound, Unavailable
from domicile.failover.following import GroupReach
from domicile.incarnation.context import Backends, Identity
from domicile.incarnation.incarnation import RunningIncarnation
from domicile.taglog import TaggedLog

MOST_FAILED = 3
STEADY_S = 60.0
"""So many incarnations in a row may end by an unexpected error, each after less than `STEADY_S`
seconds. With one more the process stops permanently."""


class FailureCount:
    """Lives that ended unexpectedly, one right after the other."""

    __slots__ = ("_count",)

    def __init__(self) -> None:
        self._count = 0

    def again(self, lasted_s: float) -> bool:
        """One more, after so long; whether another life may begin."""
        self._count = self._count + 1 if lasted_s < STEADY_S else 1
        return self._count <= MOST_FAILED


log = TaggedLog()

REJOIN_S = 1.0
"""How long a node that could not rejoin waits before it tries again."""


class Supervisor:
    """One life after another, until stopped: what a fence ends, this begins anew (L5).

    Calls go out from the current life (the `Outbound` of a node's or client's refs).
    """

    def __init__(self) -> None:
        self.current: RunningIncarnation | None = None
        self._supervisor: asyncio.Task[None] | None = None
        self._stopping = False
        self._reach: GroupReach | None = None
        self.joined = False
        """Whether any life of it was ever registered."""

    @property
    def started(self) -> bool:
        """Whether `start` was ever called."""
        return self._supervisor is not None

    @property
    def stopping(self) -> bool:
        """Whether it was asked to leave."""
        return self._stopping

    @property
    def failed(self) -> str:
        """Why this process stopped permanently after it had joined; empty while it runs or
        leaves."""
        supervisor = self._supervisor
        if supervisor is None or not supervisor.done() or supervisor.cancelled():
            return ""
        error = supervisor.exception()
        return "" if error is None else _why(error)

    async def start(self, backends: Backends, plan: Identity) -> None:
        """Join; returns once the first life is registered."""
        loop = asyncio.get_running_loop()
        joined: asyncio.Future[None] = loop.create_future()
        settings = plan.settings
        self._reach = GroupReach(
            backends.store, backends.clock, settings.op_timeout_s, settings.ask_timeout_s
        )
        self._supervisor = loop.create_task(
            self._supervise(backends, plan, joined), name=f"domicile-{plan.node_id or 'client'}"
        )
        try:
            await joined
        except BaseException:
            if self.joined:
                # It was cancelled at the very moment: peers know it already.
                await self.stop()
            else:
                self._supervisor.cancel()
                await self._ended()
            raise

    async def stop(self) -> None:
        """Leave in an orderly way (H14)."""
        self._stopping = True
        left = False
        try:
            if self.current is not None:
                await self.current.leave()
                left = True
        finally:
            if self._supervisor is not None and not left:
                self._supervisor.cancel()
            await self._ended()

    async def wait(self) -> None:
        """Until stopped by someone else."""
        if self._supervisor is not None:
            await asyncio.shield(self._supervisor)

    def ask(self, call: Call) -> Coroutine[Any, Any, Any]:
        """For refs. Whatever is wrong is raised by the await, never by the call."""
        life = self.current
        return _raised(self._away()) if life is None else life.runtime.sending.ask(call)

    def tell(self, call: Call) -> Coroutine[Any, Any, None]:
        """For refs, as `ask`."""
        life = self.current
        return _raised(self._away()) if life is None else life.runtime.sending.tell(call)

    def group_reach(self) -> GroupReach:
        """What a replica group is followed with; it needs no incarnation, only the store."""
        if self._reach is None:
            raise self._away()
        return self._reach

    @property
    def standing(self) -> str:
        """How this process stands to its cluster, in a word or two."""
        if self.failed:
            return "failed"
        if self.stopping:
            return "leaving" if self.current is not None else "left"
        if self.current is not None:
            return "joined"
        return "joining" if self.started else "not started"

    def _away(self) -> Unavailable:
        if self.failed:
            return Unavailable(
                f"this process stopped permanently after an error ({self.failed}); look "
                "at its log and start it anew"
            )
        return Unavailable(
            "this process is not part of a cluster now: enter it with `async with` first, or "
            "retry soon if it is rejoining after losing its lease"
        )

    async def _supervise(
        self, backends: Backends, plan: Identity, joined: asyncio.Future[None]
    ) -> None:
        now = backends.clock.now
        rewound, again, owed, failures = False, False, tuple[str, ...](), FailureCount()
        try:
            while not self._stopping:
                life, since = RunningIncarnation(backends, plan, rewound=rewound, owed=owed), now()
                pause_s = 0.0
                try:
                    began = await life.begin()
                except (StoreError, ConfigError, OSError) as error:
                    # Once joined, nothing of this is final: a port or a descriptor gets free, and
                    # a store that was rewound once more has a newest commit again.
                    # Nor is it if an earlier try got as far as being fenced: the store was there.
                    if not joined.done() and not (again and isinstance(error, StoreError)):
                        raise
                    log.warning("can't rejoin yet: %s", error, extra=life.tags)
                    rewound, owed = life.rewound or isinstance(error, StoreRewound), life.owed
                    await asyncio.sleep(REJOIN_S)
                    continue
                if began:
                    self.current = life
                    self.joined = True
                    if not joined.done():
                        joined.set_result(None)
                try:
                    await life.run()
                except Exception as error:
                    # It ends this incarnation (L5). Whatever it was, most likely it passes.
                    lives_on = failures.again(now() - since)
                    if not joined.done() or not lives_on or self._stopping:
                        raise
                    self._report(error, life)
                    pause_s = REJOIN_S
                finally:
                    self.current = None
                    rewound, again, owed = life.rewound, True, life.owed
                if pause_s:
                    await asyncio.sleep(pause_s)
        except Exception as error:
            if joined.done():
                if not self._stopping:
                    log.error("stopped permanently, start it anew: %s", _why(error))
                raise
            joined.set_exception(error)
        finally:
            self._reach = None
            try:
                await backends.close()
            finally:
                if not joined.done():
                    joined.set_exception(Unavailable("it was ended before it had joined"))

    def _report(self, error: Exception, life: RunningIncarnation) -> None:
        """What nobody expected must not pass unseen: not in a log, not in a simulation."""
        log.error("this incarnation failed, rejoining: %s", _why(error), extra=life.tags)
        context = {"message": "an incarnation failed", "exception": error}
        asyncio.get_running_loop().call_exception_handler(context)

    async def _ended(self) -> None:
        supervisor, me = self._supervisor, asyncio.current_task()
        if supervisor is not None and me is not None:
            wanted = me.cancelling()
            try:
                await supervisor
            except asyncio.CancelledError:
                if not supervisor.cancelled() or me.cancelling() > wanted:
                    raise


def _why(error: BaseException) -> str:
    """The first leaf of an exception group, as text."""
    while isinstance(error, BaseExceptionGroup):
        error = cast("BaseExceptionGroup[BaseException]", error).exceptions[0]
    return f"{type(error).__name__}: {error}"


async def _raised(error: Exception) -> NoReturn:
    """What the caller of a message that can't be sent awaits."""
    # A caller that repeats at once must not keep the loop from joining again.
    await asyncio.sleep(0)
    raise error
