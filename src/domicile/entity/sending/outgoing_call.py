"""One call of this process on its way: the core's pending message with what the shell adds to it.

Only `outbound` makes one; `ask_timeouts` reads until when its caller waits.
"""

from __future__ import annotations

import asyncio

from domicile.core.handoff.pending import Pending
from domicile.core.handoff.sender import Sender
from domicile.core.wire import Request


class OutgoingCall(Pending, eq=False, kw_only=True):
    """A pending message with its request, its deadline and the future that its caller awaits."""

    request: Request
    """The request as first made; epoch and change are set again each time it is written."""
    sender: CallSender
    expires_at: float
    future: asyncio.Future[bytes] | None
    """What the caller of an ask awaits; None for a tell."""


CallSender = Sender[OutgoingCall]
