"""Asks a user's allocation function, in bounded time and whatever it does (RG-14).

Used by a leadership. A plain function runs in a thread of its own, an async one on the loop;
what it raises or how long it hangs costs at most `timeout_s` of one round.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
from collections.abc import Mapping
from typing import cast

from domicile.control.threads import DaemonThreads
from domicile.core.strategies import Situation, Strategy, Wanted
from domicile.ports.meter import Meter
from domicile.ports.threads import Threads

log = logging.getLogger("domicile")


class Advisor:
    """One process's user function."""

    def __init__(
        self, strategy: Strategy, timeout_s: float, meter: Meter, threads: Threads | None = None
    ) -> None:
        self._strategy, self._timeout_s, self._meter = strategy, timeout_s, meter
        self._threads = DaemonThreads() if threads is None else threads
        self._failing = False

    async def ask(self, situation: Situation) -> Wanted | None:
        """Where it wants the shards; None if it failed, in which case the log says why, once."""
        try:
            async with asyncio.timeout(self._timeout_s):
                wanted = await self._call(situation)
            answer = _checked(wanted, situation)
        except TimeoutError:
            self._complain(f"it took longer than strategy_timeout_s = {self._timeout_s:g}")
            return None
        except Exception as error:
            self._complain(f"{type(error).__name__}: {error}")
            return None
        self._failing = False
        return answer

    async def _call(self, situation: Situation) -> Wanted:
        if inspect.iscoroutinefunction(self._strategy):
            return cast("Wanted", await self._strategy(situation))
        result = await self._threads.run(lambda: self._strategy(situation))
        return await result if inspect.isawaitable(result) else result

    def _complain(self, why: str) -> None:
        self._meter.count("strategy.failed")
        if not self._failing:
            self._failing = True
            log.error(
                "the allocation function failed (%s): shards stay where they are, homeless ones "
                "go where the fewest are; it is asked again in the next round", why,
            )  # fmt: skip


def _checked(wanted: object, situation: Situation) -> Wanted:
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
