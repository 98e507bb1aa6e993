"""What a turn has staged for the journal, as the message runtime sees it.

Durable entities implement this. `entity.hosting` and `entity.sending` call it before something
leaves the entity, and when its handler ends. They know nothing of events and batches. They must not
answer or send before the unit of work says that it is stored.
"""

from __future__ import annotations

from typing import Protocol


class UnitOfWork(Protocol):
    """What one turn of a durable entity has staged: all of it is stored, or none."""

    async def recall(self) -> bytes | None:
        """The stored reply, if the same ask had its effect before; then its handler must not run.

        If there is an effect and no reply, it raises the error for the caller.
        """
        ...

    async def flush(self) -> None:
        """Store what is staged so far: something is about to leave the entity (I4)."""
        ...

    async def finish(self, reply: bytes) -> None:
        """Store the rest with the reply: the handler has ended, and its caller is answered next."""
        ...

    def abort(self) -> None:
        """Drop what is not stored: the turn has ended. After `finish` nothing is left to drop."""
        ...


class Durability(Protocol):
    """The writer of one incarnation's durable entities. The runtime ends it."""

    def fence(self) -> None:
        """L4: this process lost its lease. What was not sent to the journal is never sent."""
        ...

    async def close(self) -> None:
        """End all writes under way; none of them is left running."""
        ...
