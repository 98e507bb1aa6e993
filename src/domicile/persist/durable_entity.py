"""What all kinds of durable entities offer to users, beside their state.

`EventSourced` and `Durable` derive from it; users do not. Nothing here knows how a state is stored.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any, ClassVar

from domicile.entity.hosting.cell import Alarm, Cell, current_turn
from domicile.entity.model.entity import Entity
from domicile.persist.entity_log import EntityLog
from domicile.persist.forgettable import Erasure, check_name


class DurableEntity(Entity):
    """An entity that keeps its state in a journal."""

    __domicile_durable__: ClassVar[bool] = True

    def __init_subclass__(cls, *, remember: bool = False, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        check_name(cls.__domicile_keywords__[0])
        cls.__domicile_remember__ = remember

    async def committed(self) -> None:
        """Wait until everything that this entity has stored so far is committed.

        Await it before an effect outside of Domicile, such as a payment or a mail. If it raises,
        the journal did not take the events, or does not say so.
        """
        self._domicile_log()
        turn = current_turn.get()
        assert turn is not None, "a log is for a turn that runs"
        await turn.before_output()

    def after_commit(self, hook: Callable[[], Coroutine[Any, Any, Any]], /) -> None:
        """Run a coroutine function after this message's events are committed, at most once.

        It runs beside later messages, with the time limit of a handler. It does not run if the
        message fails, and a crash in between loses it. If it reads the state while another message
        has changed it and still runs, it waits: what that message stored may yet be dropped.
        """
        self._domicile_log(writes=True).after_commit(hook)

    @asynccontextmanager
    async def fenced(self, connection: object, /) -> AsyncGenerator[None, None]:
        """A fenced transaction on an asyncpg connection to the journal's own database.

        It begins with the block and commits at its end: only if this home still has the shard, so a
        stale process never changes these tables. The block waits until all that the entity has
        stored is committed; what it stores inside is a transaction of its own, after it. Inside,
        `ask`, `tell` and `committed()` raise RuntimeError. If the block fails or is cancelled,
        nothing of it is committed; `MaybeExecuted` if nobody knows.
        """
        log = self._domicile_log(writes=True)
        turn = current_turn.get()
        assert turn is not None, "a log is for a turn that runs"
        async with log.fenced(turn, connection):
            yield

    async def forget(self) -> None:
        """No longer remember this entity: it starts again with its next message only.

        It commits with this message's events. With its next event the entity is remembered again.
        """
        log = self._domicile_log(writes=True)
        await log.claim()
        log.forget()

    async def delete(self) -> None:
        """Remove everything that this entity has stored, and forget it. Keys of asks stay.

        It commits with this message; an event or state that comes later is the first one again. If
        its type has `Forgettable` fields, the stored replies of its keys go, too, as with `erase`.
        """
        log = self._domicile_log(writes=True)
        await log.claim()
        log.delete()

    async def erase(self) -> Erasure:
        """Erase the values of all `Forgettable` fields that this entity has stored.

        With them go its snapshot and the stored replies of its keys, which may repeat them. Events
        stay: they and the state show `Forgettable` fields without a value from now on. It is sent
        to the journal at once, so a handler that fails later does not take it back. The receipt
        leaves the entity when it is committed.
        """
        log = self._domicile_log(writes=True)
        return await log.erase(self.now())

    def _domicile_log(self, *, writes: bool = False) -> EntityLog:
        """The log of this entity, for the handler that runs; `writes` unless it only reads."""
        context = self._domicile_context()
        turn = current_turn.get()
        if turn is None or not turn.active:
            raise RuntimeError("a durable entity reads and stores inside a running handler only")
        if writes and turn.shared:
            if isinstance(turn.request, Alarm):
                raise RuntimeError("an after_commit hook stores nothing: tell the entity instead")
            if turn.began:
                raise RuntimeError("a shared handler cannot persist: drop shared=True")
        assert isinstance(context, Cell)
        log = context.gate
        assert isinstance(log, EntityLog)
        turn.gate = log
        return log
