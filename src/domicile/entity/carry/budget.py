"""A limit on bytes that several parts of a node share."""

from __future__ import annotations


class Budget:
    """I6: a limit on the bytes of all shards of a node together."""

    __slots__ = ("most_bytes", "used_bytes")

    def __init__(self, most_bytes: int) -> None:
        self.most_bytes = most_bytes
        self.used_bytes = 0
