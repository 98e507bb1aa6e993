"""What a turn owes the journal, as the message runtime sees it.

Durable entities implement this; `entity.hosting` and `entity.sending` call it at the moments that
matter: before something leaves the entity, and when its handler ends. They know nothing of events
and batches, and they must not answer or send before the unit of work says that it is stored.
"""

from __future__ import annotations

from typing import Protocol


class UnitOfWork(Protocol):
    """What one turn of a durable entity has staged: all of it is stored, or it never was."""

    async def recall(self) -> bytes | None:
        """The stored reply, if the same ask had its effect before; then its handler must not run.

        Raises what its caller shall learn if there is an effect and no reply.
        """
        ...

    async def flush(self) -> None:
        """Store what is staged so far: something is about to leave the entity (I4)."""
        ...

    async def finish(self, reply: bytes) -> None:
        """Store the rest with the reply: the handler has ended, and its caller hears of it next."""
        ...

    def abort(self) -> None:
        """Forget what is not stored: the turn is over. After `finish` nothing is left to forget."""
        ...


class Durability(Protocol):
    """What the durable entities of one incarnation write through. The runtime ends it."""

    def fence(self) -> None:
        """L4: this process lost its lease. What was not sent to the journal never is."""
        ...

    async def close(self) -> None:
        """End what is under way; nothing of it is left running."""
        ...
