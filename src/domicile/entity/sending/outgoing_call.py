"""One call of this process on its way: the core's pending message with what the shell adds to it.

Made by `outbound` and by nobody else; `ask_timeouts` reads until when its caller waits.
"""

from __future__ import annotations

import asyncio

from domicile.core.handoff.pending import Pending
from domicile.core.handoff.sender import Sender
from domicile.core.wire import Request


class OutgoingCall(Pending, eq=False, kw_only=True):
    """A pending message, what it says, who waits for it, and until when."""

    request: Request
    """As it was first written; its stamps are those of the time it is written at."""
    sender: CallSender
    expires_at: float
    future: asyncio.Future[bytes] | None
    """What its caller awaits; a tell has nobody who waits."""


CallSender = Sender[OutgoingCall]
