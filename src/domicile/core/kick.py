"""An operator's wish to have the running handlers of one entity ended: `domicile kick` (DX-09).

The command writes it under a lease of its own, so a wish that nobody answers ends by itself. The
owner of the entity's shard ends the handlers and puts what came of it in the same place.
"""

from __future__ import annotations

import msgspec

from domicile.core.breakglass import Deed, Picture
from domicile.core.ids import EntityKey, ShardKey
from domicile.core.state.keys import kick_key, node_key
from domicile.core.state.txn import Absent, Present, Put
from domicile.errors import ConfigError

KICKED = "kicked by an operator"
"""What the caller of a handler that was ended so learns, beside that it may have run."""

MOST_KICKS = 64
"""I6: wishes that may wait at a time."""

KICK_TTL_S = 30.0
MOST_KEY_BYTES = 4_096


class KickOutcome(msgspec.Struct, frozen=True, omit_defaults=True):
    """What became of the turns of a kicked entity."""

    ended: int = 0
    """Handlers that were cancelled and are over."""
    dropped: int = 0
    """Handlers that ignored an earlier kick: never resumed; the entity starts anew."""
    ignoring: int = 0
    """Handlers that were cancelled and have not ended yet."""
    blocking: int = 0
    """Handlers in threads, which nothing can interrupt."""
    waiting: int = 0
    """Messages that wait for the entity."""

    @property
    def ran(self) -> bool:
        """Whether anything ran."""
        return bool(self.ended or self.dropped or self.ignoring or self.blocking)


class KickRecord(msgspec.Struct, frozen=True, omit_defaults=True):
    """A wish, and later its outcome, as stored."""

    by: str
    lease: str
    outcome: KickOutcome | None = None


def encode_kick(record: KickRecord) -> bytes:
    """The stored form."""
    return msgspec.json.encode(record)


def decode_kick(value: bytes) -> KickRecord:
    """A wish from its stored form; raises `msgspec.MsgspecError`."""
    return msgspec.json.decode(value, type=KickRecord)


def kick(picture: Picture, shard: ShardKey, entity: EntityKey, record: KickRecord) -> Deed:
    """Wish the handlers of an entity ended; raises `LookupError` if nobody could do it."""
    entry, name = picture.entry(shard), f"{shard.role}/{shard.shard}"
    shown = f"{entity.type} {entity.id!r}"
    if entry.owner not in picture.members.nodes:
        raise LookupError(f"nothing of {shown} runs: its shard {name} has no owner ({entry.state})")
    key = kick_key(shard, entity)
    if len(key) > MOST_KEY_BYTES:
        raise ConfigError(f"the id of {entity.type} is too long for a key in the store")
    if picture.item(key) is not None:
        raise LookupError(f"{shown} is being kicked by somebody else; look again in a moment")
    waiting = len(picture.members.kicks)
    if waiting >= MOST_KICKS:
        raise LookupError(f"{waiting} other kicks wait for their owners; try again in a moment")
    owner = picture.members.nodes[entry.owner].node
    return Deed(
        f"{shown} in {name} at {owner}",
        (Absent(key), Present(node_key(entry.owner))),
        (Put(key, encode_kick(record), record.lease),),
    )
