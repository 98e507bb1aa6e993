"""Why a message was not sent or not answered: errors that say what happened and what to do (I9).

Used by `outbound` alone. Nothing here decides.
"""

from __future__ import annotations

from domicile.core.ids import EntityKey
from domicile.core.wire import Request
from domicile.entity.model.ref import Call
from domicile.entity.sending.outgoing_call import CallSender
from domicile.errors import MaybeExecuted, NotExecuted, Overloaded, Unavailable


def too_large(call: Call, size_bytes: int, most_bytes: int) -> NotExecuted:
    """The message exceeds `Settings.message_bytes`."""
    return NotExecuted(
        f"the message to {call.entity.type} {call.entity.id[:64]!r} has {size_bytes:,} bytes "
        f"with its id; the limit is {most_bytes:,} (Settings.message_bytes)"
    )


def overloaded(sender: CallSender, entity: EntityKey) -> Overloaded:
    """Too many messages already wait for its shard (I6)."""
    shard = f"shard {sender.shard.role}/{sender.shard.shard}"
    waits = f"{len(sender.queue)} messages already wait for {shard}"
    if not sender.queue:
        waits = f"too much is already on its way to the home of {shard}"
    return Overloaded(f"{waits}, where {entity.type} {entity.id!r} lives; slow down and retry")


def quarantined(sender: CallSender, within_s: float) -> Unavailable:
    """Its shard is quarantined: it gets no home for a while (DX-20)."""
    shard = f"{sender.shard.role}/{sender.shard.shard}"
    deaths = sender.entry.deaths
    died = f"{deaths} owners died within {within_s:g} s of each other"
    return Unavailable(
        f"shard {shard} is quarantined: its last {died if deaths > 1 else 'owner died'}; it is "
        "tried again by itself. See what its entities do, then run "
        f"`domicile unquarantine {shard}`"
    )


def too_many_wait(call: Call, waiting: int) -> Overloaded:
    """Too many messages already wait for the first node of a role (I6)."""
    return Overloaded(
        f"{waiting} messages already wait for a node of role {call.kind.role!r}, which "
        f"{call.entity.type} {call.entity.id[:64]!r} needs; slow down and retry"
    )


def no_node(kind: str, role: str, *, alone: bool) -> Unavailable:
    """No node of the role was up while the caller waited; `alone` if no other node is, either."""
    text = (
        f"no node of role {role!r} is up, so {kind!r} has no home. The message did not run; retry "
        "is safe. Start a node with entities=[...] listing it"
    )
    if alone:
        text += (
            ". If a node runs, it has another store or cluster name; a relative sqlite:/// path "
            "begins in the directory of each process"
        )
    return Unavailable(text)


def expired(request: Request, unwritten: bool, trouble: str = "") -> Unavailable | MaybeExecuted:
    """The caller's time is up; `trouble` says why the home cannot be reached, if that is known."""
    where = f"{request.type} {request.id!r} (shard {request.role}/{request.shard})"
    why = f" ({trouble})" if trouble else ""
    if unwritten:
        return Unavailable(
            f"no home of {where} could be reached in time{why}. It did not run; retry is safe"
        )
    return MaybeExecuted(f"{where} did not answer in time{why}; {request.method!r} may have run")
