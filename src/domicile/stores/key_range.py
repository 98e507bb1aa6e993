"""Keys with a prefix, as a range of keys in byte order, for stores that read by an index."""

from __future__ import annotations


def above(prefix: bytes) -> bytes | None:
    """The smallest key that is greater than all keys with a prefix; None if there is none."""
    head = prefix.rstrip(b"\xff")
    return head[:-1] + bytes([head[-1] + 1]) if head else None
