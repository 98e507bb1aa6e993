"""From an entity to its shard. A wire contract: golden vectors in the tests hold it still."""

from __future__ import annotations

import xxhash

from domicile.core.ids import EntityKey


def shard_of(entity: EntityKey, shards: int) -> int:
    """`xxh3_64(type ‖ 0x00 ‖ id) % shards`, the same on every platform and Python."""
    data = b"%b\x00%b" % (entity.type.encode(), entity.id.encode())
    return int(xxhash.xxh3_64_intdigest(data)) % shards
