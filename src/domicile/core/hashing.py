"""From an entity to its shard: the default function, and the functions of other systems.

Senders, entity definitions and status call this module. The functions are a wire contract: golden
vectors in the tests keep each result the same on every platform and Python. Nothing here may use
`hash()` or depend on the process.
"""

from __future__ import annotations

from collections.abc import Callable

import xxhash

from domicile.core.ids import EntityKey
from domicile.errors import NotExecuted

ShardFunction = Callable[[str, int], int]
"""A user's function from an entity id and the number of shards to a shard, counted from 0."""

FindShard = Callable[[EntityKey, int], int]
"""How a sender finds an entity's shard: a number below the given count, or `NotExecuted`."""

_WORD = 0xFFFF_FFFF
_SIGN = 0x8000_0000
_KAFKA_SEED = 0x9747_B28C
_KAFKA_MIX = 0x5BD1_E995


def shard_of(entity: EntityKey, shards: int) -> int:
    """`xxh3_64(type ‖ 0x00 ‖ id) % shards`, the same on every platform and Python."""
    data = b"%b\x00%b" % (entity.type.encode(), entity.id.encode())
    return int(xxhash.xxh3_64_intdigest(data)) % shards


def xxh3(entity_id: str, shards: int, *, type: str = "") -> int:
    """The default for entities. They also pass their type name; see `shard_of`."""
    return shard_of(EntityKey(type, entity_id), shards)


def murmur2(entity_id: str, shards: int) -> int:
    """The partition that Kafka's own partitioner gives a record with this key."""
    return (kafka_hash(entity_id.encode()) & 0x7FFF_FFFF) % shards


def shardcake(entity_id: str, shards: int) -> int:
    """Shardcake's shard of an entity, counted from 0. Shardcake's own number is this plus 1."""
    return shardcake_number(entity_id, shards) - 1


def shardcake_number(entity_id: str, shards: int) -> int:
    """`abs(hash % shards) + 1` as a JVM computes it: the number that Shardcake shows, from 1."""
    # The JVM's remainder has the sign of the dividend, so abs() may come before or after it.
    return abs(java_hash(entity_id)) % shards + 1


def by_message(entity_id: str, shards: int) -> int:
    """For a type whose messages name the shard: only a region with a `shard_id` can send to it."""
    raise LookupError(
        "the shard of this type is not found by its id; send through "
        "region(..., entity_id=..., shard_id=...)"
    )


NAMED: dict[str, ShardFunction] = {
    "message": by_message,
    "murmur2": murmur2,
    "shardcake": shardcake,
    "xxh3": xxh3,
}
"""The functions that every process knows, by the name that `config` holds."""


def place_by(function: ShardFunction, name: str) -> FindShard:
    """A type's function for its senders. An error in it raises `NotExecuted` at the call (I9)."""
    if function is xxh3:
        return shard_of

    def place(entity: EntityKey, shards: int) -> int:
        try:
            number = function(entity.id, shards)
        except Exception as error:
            raise NotExecuted(
                f"shard_id={name} failed for {entity.type} {entity.id[:64]!r}, so nothing was "
                f"sent: {type(error).__name__}: {error}"
            ) from error
        whole = isinstance(number, int) and not isinstance(number, bool)  # pyright: ignore[reportUnnecessaryIsInstance]
        if whole and 0 <= number < shards:
            return int(number)
        raise NotExecuted(
            f"shard_id={name} gave {number!r} for {entity.type} {entity.id[:64]!r}, so nothing was "
            f"sent: it must be a whole number from 0 to {shards - 1}, and the same for one entity "
            "in every process"
        )

    return place


def kafka_hash(data: bytes) -> int:
    """Kafka's 32-bit murmur2 of bytes, signed."""
    value = (_KAFKA_SEED ^ len(data)) & _WORD
    whole = len(data) & ~3
    for start in range(0, whole, 4):
        part = int.from_bytes(data[start : start + 4], "little") * _KAFKA_MIX & _WORD
        part = (part ^ part >> 24) * _KAFKA_MIX & _WORD
        value = (value * _KAFKA_MIX & _WORD) ^ part
    if whole != len(data):
        value = (value ^ int.from_bytes(data[whole:], "little")) * _KAFKA_MIX & _WORD
    value = (value ^ value >> 13) * _KAFKA_MIX & _WORD
    return _signed(value ^ value >> 15)


def java_hash(text: str) -> int:
    """`String.hashCode` of a JVM: over UTF-16 units, reduced to 32 bits, signed."""
    units = text.encode("utf-16-le", "surrogatepass")
    value = 0
    for start in range(0, len(units), 2):
        value = value * 31 + (units[start] | units[start + 1] << 8) & _WORD
    return _signed(value)


def _signed(word: int) -> int:
    return word - (_WORD + 1) if word & _SIGN else word
