"""Looks into running handlers: which run for how long, and where they are (DX-09).

Called by an incarnation, on its event loop. It reads the runtime and changes nothing, except that
`kick` ends the handlers of one entity on an operator's command.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Generator, Mapping
from pathlib import PurePath
from types import AsyncGeneratorType, CoroutineType, FrameType, GeneratorType
from typing import Any, NamedTuple, cast

from domicile.core.ids import EntityKey, ShardKey
from domicile.diagnose.records import (
    KICKED,
    MOST_TURNS,
    KickOutcome,
    StuckTurn,
    bounded_stack,
    bounded_text,
)
from domicile.entity.hosting.cell import Turn

MOST_FRAMES = 200
"""I6: frames that are read of one stack."""

_OURS = "domicile"
_SUSPENDING: dict[type, tuple[str, str]] = {
    CoroutineType: ("cr_frame", "cr_await"),
    GeneratorType: ("gi_frame", "gi_yieldfrom"),
    AsyncGeneratorType: ("ag_frame", "ag_await"),
}


class Stuck(NamedTuple):
    """The handlers that are late: the oldest, and how many more."""

    turns: list[StuckTurn]
    more: int


def stuck_turns(suspended: Mapping[Turn, float], late: Callable[[float], bool]) -> Stuck:
    """The suspended turns that began too long ago, the oldest first; `suspended` is in that
    order."""
    turns: list[StuckTurn] = []
    more = 0
    for turn, since_s in suspended.items():
        if not late(since_s):
            break
        if len(turns) < MOST_TURNS:
            turns.append(stuck_turn(turn, since_s))
        else:
            more += 1
    return Stuck(turns, more)


def stuck_turn(turn: Turn, since_s: float, held_by: int | None = None) -> StuckTurn:
    """One turn as it is published. `held_by`: id of the event-loop thread, if the handler blocks
    the loop."""
    entity, ident = turn.entity, turn.thread if held_by is None else held_by
    mailbox = turn.host.owner.mailboxes.get(entity)
    waits = "waits" if ident is None else "blocking"
    return StuckTurn(
        *turn.host.shard,
        bounded_text(entity.type),
        bounded_text(entity.id),
        bounded_text(handler_of(turn)),
        since_s,
        waits if held_by is None else "runs",
        0 if mailbox is None else len(mailbox.queue),
        bounded_stack(task_stack(turn) if ident is None else thread_stack(ident)),
    )


def handler_of(turn: Turn) -> str:
    """The name of the method that a turn runs."""
    if turn.n == 0:
        return "on_stop"
    return turn.request.method if turn.began else "on_start"


def task_stack(turn: Turn) -> list[str]:
    """The stack of a suspended handler: its own frames and those of what it awaits."""
    task = turn.task
    if task is None:
        return []
    frames = list(_chain(task.get_coro()))
    own = [not _is_ours(frame) for frame in frames]
    first = own.index(True) if True in own else 0
    return [_line(frame) for frame in frames[first:]]


def thread_stack(ident: int) -> list[str]:
    """The stack of a thread now."""
    frame = sys._current_frames().get(ident)  # pyright: ignore[reportPrivateUsage]
    frames: list[FrameType] = []
    while frame is not None and len(frames) < MOST_FRAMES:
        frames.append(frame)
        frame = frame.f_back
    frames.reverse()
    # The frames above the function are those of the thread and of the pool.
    ours = [index for index, one in enumerate(frames) if _is_ours(one)]
    first = ours[-1] + 1 if ours and ours[-1] + 1 < len(frames) else 0
    return [_line(one) for one in frames[first:]]


def turns_of(suspended: Mapping[Turn, float], shard: ShardKey, entity: EntityKey) -> list[Turn]:
    """The suspended handlers of one entity."""
    return [turn for turn in suspended if turn.entity == entity and turn.host.shard == shard]


class Kick:
    """Ends all running handlers of one entity, on an operator's command.

    Handlers are cancelled; those that have ignored an earlier kick are never resumed.
    """

    def __init__(self, turns: list[Turn]) -> None:
        self._cancelled: list[Turn] = []
        self._dropped: list[Turn] = []
        self._blocking = 0
        for turn in turns:
            if turn.thread is not None:
                self._blocking += 1
            elif turn.cancel_reason == KICKED:
                turn.drop()
                self._dropped.append(turn)
            else:
                turn.cancel(KICKED, anew=True)
                self._cancelled.append(turn)

    @property
    def over(self) -> bool:
        """Whether all handlers that can end have ended."""
        return not any(turn.active for turn in (*self._cancelled, *self._dropped))

    def outcome(self, waiting: int) -> KickOutcome:
        """The outcome so far."""
        ignoring = sum(turn.active for turn in self._cancelled)
        ended = len(self._cancelled) - ignoring
        return KickOutcome(ended, len(self._dropped), ignoring, self._blocking, waiting)


def _chain(step: Any) -> Generator[FrameType]:
    """The frames from a coroutine down to what it finally waits for."""
    for _ in range(MOST_FRAMES):
        frame, then = _inside(step)
        if frame is None:
            # The object that `async for` awaits does not name its generator; only the garbage
            # collector knows it.
            found: list[Any] = [
                one for one in gc.get_referents(step) if type(one) is AsyncGeneratorType
            ]
            frame, then = _inside(found[0]) if found else (None, None)
        if frame is None:
            return
        yield frame
        if then is None:
            # Our own guard steps a coroutine by hand, so only its local variables lead to that
            # coroutine.
            then = next((one for one in frame.f_locals.values() if _suspended(one)), None)
        step = then


def _inside(step: object) -> tuple[FrameType | None, Any]:
    """The frame of anything that can suspend, and what it awaits."""
    names = _SUSPENDING.get(type(step))
    return (None, None) if names is None else (getattr(step, names[0]), getattr(step, names[1]))


def _suspended(value: object) -> bool:
    return isinstance(value, CoroutineType) and _inside(cast("object", value))[0] is not None


def _is_ours(frame: FrameType) -> bool:
    return str(frame.f_globals.get("__name__", "")).partition(".")[0] == _OURS


def _line(frame: FrameType) -> str:
    """A frame as its module's file, with a line number for the application's own code only. What is
    stored must be the same wherever the program is installed, or no seed would replay."""
    code = frame.f_code
    module = str(frame.f_globals.get("__name__", "?"))
    file = PurePath(code.co_filename)
    depth = len(module.split(".")) + (file.name == "__init__.py")
    place = "/".join(file.parts[-depth:])
    top = module.partition(".")[0]
    if top != _OURS and top not in sys.stdlib_module_names:
        place = f"{place}:{frame.f_lineno}"
    return f"{place} {code.co_qualname}"
