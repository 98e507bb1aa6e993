"""Which instance an object belongs to: consistent hashing, the same in every implementation.

`HashRing` is compatible on the wire: 100 tokens per instance, `xxh64(instance + decimal number)`;
an object belongs to the instance of the first token at or after its key's hash. `BoundedRing` (K6)
is for rings whose sharders are all ours: no instance has more than 1.05 times its part of the key
space. Both depend on nothing but the names of the instances. Pure.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable
from math import ceil
from typing import Protocol

import xxhash

TOKENS = 100

SLOTS = 16_384
"""Parts of the key space that a bounded ring gives out."""

LOAD = 1.05
"""The most that an instance of a bounded ring has, against the mean. Objects spread over its slots
by chance, so the limit for objects is 1.1."""


class Instances(Protocol):
    """A set of instances, and which one a key belongs to."""

    instances: tuple[str, ...]

    def owner(self, key: str) -> str:
        """The instance of a key; empty if there are no instances."""
        ...


def hashed(text: str) -> int:
    """The hash on the wire: xxh64 with seed 0."""
    return xxhash.xxh64_intdigest(text.encode())


def object_key(group: str, kind: str, namespace: str, name: str) -> str:
    """The key of an object. An object that another one controls has the key of that one, made with
    its own namespace. The version of the API is not part of it."""
    return f"{group}/{kind}/{namespace}/{name}"


class HashRing:
    """The ring on the wire."""

    def __init__(self, instances: Iterable[str], tokens: int = TOKENS) -> None:
        self.instances = tuple(sorted(dict.fromkeys(instances)))
        by_token: dict[int, str] = {}
        for instance in self.instances:
            for number in range(tokens):
                by_token.setdefault(hashed(f"{instance}{number}"), instance)
        self._tokens = sorted(by_token)
        self._owners = [by_token[token] for token in self._tokens]

    def owner(self, key: str) -> str:
        """As `Instances.owner`."""
        return self.at(hashed(key))

    def at(self, value: int) -> str:
        """The instance of the first token at or after a hash."""
        if not self._tokens:
            return ""
        return self._owners[self.index(value)]

    def index(self, value: int) -> int:
        """The place of that token."""
        return bisect_left(self._tokens, value) % len(self._tokens)

    def from_index(self, place: int) -> str:
        """The instance of the token at a place, counted around."""
        return self._owners[place % len(self._owners)]


class BoundedRing:
    """The ring with bounded load: slots of the key space, given out in order; an instance that has
    its full number is passed over."""

    def __init__(self, instances: Iterable[str], slots: int = SLOTS, load: float = LOAD) -> None:
        ring = HashRing(instances)
        self.instances = ring.instances
        self._slots: list[str] = []
        if not self.instances:
            return
        most = ceil(load * slots / len(self.instances))
        free = dict.fromkeys(self.instances, most)
        # Their order is that of hashes, not of numbers: neighbours on the ring would all meet the
        # same full instance, and pass their load on to the next one.
        self._slots = [""] * slots
        for slot in sorted(range(slots), key=lambda slot: hashed(f"slot {slot}")):
            place = ring.index(hashed(f"slot {slot}"))
            while not free[ring.from_index(place)]:
                place += 1
            owner = ring.from_index(place)
            free[owner] -= 1
            self._slots[slot] = owner

    def owner(self, key: str) -> str:
        """As `Instances.owner`."""
        return self._slots[hashed(key) % len(self._slots)] if self._slots else ""

    def slots(self) -> tuple[str, ...]:
        """The instance of each slot; empty if there are no instances."""
        return tuple(self._slots)

    def load(self) -> dict[str, int]:
        """How many slots each instance has."""
        counts = dict.fromkeys(self.instances, 0)
        for owner in self._slots:
            counts[owner] += 1
        return counts
