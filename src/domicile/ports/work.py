"""The output gate of a durable entity, as the message runtime sees it (J5).

Durable entities implement this. A handler of such an entity does not wait for the journal: what it
stores is staged, and its next handler sees it at once. What waits is everything that leaves the
entity: replies, rejections, asks, tells. `entity.hosting` and `entity.sending` ask the gate before
they let something out. They know nothing of events and batches.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from domicile.errors import DomicileError
from domicile.ports.journal import Remembered

HeldOutput = Callable[[DomicileError | None], None]
"""Something that waits at a gate. It is called once: with None when everything that it depends on
has committed, or with the reason why that is not so, or not known."""


class OutputGate(Protocol):
    """The gate of one resident entity.

    A turn that stores something is one unit: it commits as a whole, unless it asks, tells or awaits
    `committed()` in between. An exclusive turn goes through `begin`, then `end` or `abort`; a
    shared one only reads, and goes through `read`. `end`, `abort` and `read` say whether the turn's
    output must be given to `hold`.
    """

    @property
    def is_open(self) -> bool:
        """Whether something of this entity is staged, or sent and not committed."""
        ...

    @property
    def newest(self) -> int:
        """The number of the entity's last event that is sent, committed or not; 0 if not known."""
        ...

    @property
    def number(self) -> int:
        """For histories: which gate of its incarnation it is."""
        ...

    def may_begin(self, key: str) -> bool:
        """Whether a turn may begin without `prepare`: there is room, and its key is new."""
        ...

    def foresee(self, key: str) -> None:
        """A message with this key waits for its turn: find out meanwhile whether the key is new."""
        ...

    async def prepare(self, key: str) -> bytes | None:
        """Wait until a turn may begin; the stored reply, if its key was used before.

        Then the handler must not run. If there is an effect and no reply, it raises the error for
        the caller.
        """
        ...

    def begin(self, key: str) -> None:
        """An exclusive handler runs now, with the key of its ask or an empty one."""
        ...

    def end(self, reply: bytes) -> bool:
        """The handler has ended: send what it staged to the journal, with the reply if it has a
        key. True if something of this entity is not committed."""
        ...

    def abort(self) -> bool:
        """The handler has failed: drop what it staged and did not send. True as for `end`."""
        ...

    def read(self) -> bool:
        """A shared handler has ended. True as for `end`."""
        ...

    def hold(self, output: HeldOutput) -> None:
        """Keep an output until everything that is now staged or sent has committed."""
        ...

    async def flush(self, *, sends: bool, beside: bool = False) -> None:
        """Something is about to leave the entity: wait until what it depends on has committed.

        Outputs go on in the order of their calls (I5). A hook's output has its place when it no
        longer waits for another turn.

        `sends`: the running turn asks for it, or one that it waits for; what is staged so far is
        sent first. `beside`: a hook asks for it, so wait until another turn has sent or dropped
        what it staged.
        """
        ...


class Durability(Protocol):
    """The writer of one incarnation's durable entities. The runtime ends it."""

    async def remembered(
        self, host: Any, epoch: int, after: Remembered | None, limit: int
    ) -> list[Remembered]:
        """Entities of a shard that start again by themselves, those written last first.

        The shard is claimed before (J1). `DomicileError` if the journal does not answer, `Fenced`
        if the shard has a newer owner.
        """
        ...

    def fence(self) -> None:
        """L4: this process lost its lease. What was not sent to the journal is never sent."""
        ...

    async def close(self) -> None:
        """End all writes under way; none of them is left running."""
        ...
