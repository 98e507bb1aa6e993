"""The log of records that are about one node or one shard: the message itself says which.

Any module may use it. A record keeps its tags as fields (`extra=`) for formatters that want them,
and carries them in its text for all others, as for plain `logging.basicConfig()`. Nothing here
configures logging: that is up to the program.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, MutableMapping
from typing import Any


class TaggedLog(logging.LoggerAdapter[logging.Logger]):
    """The logger `domicile`; messages begin with their place, as in `node-1 default/17@4: …`."""

    def __init__(self) -> None:
        super().__init__(logging.getLogger("domicile"))

    def process(
        self, msg: Any, kwargs: MutableMapping[str, Any]
    ) -> tuple[Any, MutableMapping[str, Any]]:
        """As `LoggerAdapter.process`: the place of the tags, then the message."""
        # The place becomes part of a format string.
        place = place_in(kwargs.get("extra") or {}).replace("%", "%%")
        return (f"{place}: {msg}" if place else msg), kwargs


def place_in(tags: Mapping[str, object]) -> str:
    """Node, shard and epoch, as far as they are known: `node-1 default/17@4`."""
    node, shard, epoch = (tags.get(name) for name in ("node", "shard", "epoch"))
    where = f"{shard}@{epoch}" if shard and epoch is not None else shard
    return " ".join(str(part) for part in (node, where) if part)
