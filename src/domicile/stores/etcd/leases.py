"""The leases of Domicile have texts as ids, those of etcd have numbers of 63 bits.

The number is a hash of the root and the text: roots that share an etcd take no numbers from each
other. Two texts may have one hash, so a key under the lease itself, `<root>/leases/<number>`, holds
the text. If the key holds another one, the next hash is tried. The
key ends with its lease. Nothing here waits or talks to etcd.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from threading import Lock

HASHES = 4
"""How many numbers a text may have; a store in which all are taken by others refuses the lease."""

KEPT_NUMBERS = 256


def lease_number(root: str, lease: str, attempt: int) -> int:
    """The number of a root's lease; `attempt` counts the numbers that other leases have already."""
    # A root has no NUL: it is printable.
    text = f"{attempt}/{root}\0{lease}".encode()
    number = int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "big") >> 1
    return number or 1  # etcd chooses a number itself for 0


class LeaseNumbers:
    """The numbers that a process knows, for its clients on all event loops."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._numbers: OrderedDict[str, int] = OrderedDict()

    def get(self, lease: str) -> int | None:
        """The number of a lease, if it is known."""
        with self._lock:
            return self._numbers.get(lease)

    def keep(self, lease: str, number: int) -> None:
        """Know the number of a lease; the one that was kept first is forgotten for it (I6)."""
        with self._lock:
            self._numbers[lease] = number
            self._numbers.move_to_end(lease)
            if len(self._numbers) > KEPT_NUMBERS:
                self._numbers.popitem(last=False)

    def forget(self, lease: str) -> None:
        """The lease is gone."""
        with self._lock:
            self._numbers.pop(lease, None)

    def clear(self) -> None:
        """All leases may be gone (S5)."""
        with self._lock:
            self._numbers.clear()
