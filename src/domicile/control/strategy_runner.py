"""Asks a user's allocation function, in bounded time and whatever it does (RG-14).

Used by a leadership. A plain function runs in one of a few threads, an async one in a task of its
own; what it raises, swallows or how long it hangs costs at most `timeout_s` of one round.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import cast

from domicile.concurrency.daemon_threads import DaemonThreads, ThreadsBusy
from domicile.concurrency.task_set import TaskSet
from domicile.core.placement.strategies import Situation, Strategy, WantedHomes
from domicile.ports.meter import Meter
from domicile.ports.threads import Threads

MOST = 4
"""I6: functions that may be stuck at once; one more is refused until one of them ends."""

log = logging.getLogger("domicile")


@dataclass(frozen=True, slots=True)
class _Failure:
    why: str


class StrategyRunner:
    """One process's user function."""

    def __init__(
        self, strategy: Strategy, timeout_s: float, meter: Meter, threads: Threads | None = None
    ) -> None:
        self._strategy, self._timeout_s, self._meter = strategy, timeout_s, meter
        if threads is None:
            threads = DaemonThreads(MOST, "domicile-strategy", waits=False)
        self._threads = threads
        self._failing = False
        self._calls: TaskSet[WantedHomes | _Failure] = TaskSet("domicile-strategy")

    async def ask(self, situation: Situation) -> WantedHomes | None:
        """Where it wants the shards; None if it failed, in which case the log says why, once."""
        # A task of its own: one that swallows its cancellation must not hold up the leadership.
        call = self._calls.spawn(self._call(situation))
        try:
            await asyncio.wait((call,), timeout=self._timeout_s)
        finally:
            call.cancel()
        if not call.done():
            self._complain(f"it took longer than strategy_timeout_s = {self._timeout_s:g}")
            return None
        answer = call.result()
        if isinstance(answer, _Failure):
            self._complain(answer.why)
            return None
        self._failing = False
        return answer

    async def _call(self, situation: Situation) -> WantedHomes | _Failure:
        """Its answer; whatever it raises, be it `CancelledError` or `SystemExit`, is a failure."""
        try:
            if len(self._calls) > MOST:
                raise ThreadsBusy("earlier calls of this function have not come back")
            if inspect.iscoroutinefunction(self._strategy):
                wanted = await self._strategy(situation)
            else:
                wanted = await self._threads.run(lambda: _attempt(self._strategy, situation))
                if inspect.isawaitable(wanted):
                    wanted = await wanted
            return wanted if isinstance(wanted, _Failure) else _checked(wanted, situation)
        except (KeyboardInterrupt, GeneratorExit):
            raise
        except BaseException as error:
            return _Failure(_told(error))

    def _complain(self, why: str) -> None:
        self._meter.count("strategy.failed")
        if not self._failing:
            self._failing = True
            log.error(
                "the allocation function failed (%s): shards stay where they are, homeless ones "
                "go where the fewest are; it is asked again in the next round", why,
            )  # fmt: skip


def _attempt(strategy: Strategy, situation: Situation) -> object:
    """In the thread: what no future can carry is a failure there already."""
    try:
        return strategy(situation)
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        return _Failure(_told(error))


def _told(error: BaseException) -> str:
    try:
        return f"{type(error).__name__}: {error}"
    except Exception:
        return type(error).__name__  # its own text fails, too


def _checked(wanted: object, situation: Situation) -> WantedHomes:
    """`TypeError` or `ValueError` unless it is a mapping of shard numbers to node ids."""
    if not isinstance(wanted, Mapping):
        raise TypeError(f"it must return a mapping of shard numbers to node ids, not {wanted!r}")
    answer: dict[int, str] = {}
    for shard, node in cast("Mapping[object, object]", wanted).items():
        if not isinstance(shard, int) or not 0 <= shard < len(situation.homes):
            raise ValueError(f"{shard!r} is no shard of role {situation.role!r}")
        if not isinstance(node, str):
            raise TypeError(f"shard {shard} must go to a node id, not to {node!r}")
        answer[shard] = node
    return answer
