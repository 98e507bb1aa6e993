"""Which history of etcd a process knows, and whether an answer belongs to it (S5).

etcd does not say that it was restored from a backup: a watch from a future revision succeeds and
stays silent. So each answer is compared with what was known when its request was sent. A restored
etcd may pass the known revision with other commits before a client comes back, with the same
cluster id. So a process also keeps a *witness*, a write that it has seen: each new connection is
asked for the value that its key had then.

Answers of one process come on two event loops (L1), so a lock guards what is known. Nothing here
talks to etcd.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from threading import Lock
from time import monotonic

from domicile.errors import StoreRewound
from domicile.stores.etcd import rpc_pb2 as pb


@dataclass(frozen=True, slots=True)
class Witness:
    """A write that was seen: the key got this value at this revision."""

    key: bytes
    value: bytes
    revision: int


@dataclass(frozen=True, slots=True)
class KnownAtSending:
    """What a process knew when it sent a request, and when that was."""

    generation: int
    floor: int
    at: float
    """By `time.monotonic`."""


class EtcdHistory:
    """What one process knows of the history; its clients on all event loops share it.

    `noticed` is called in any thread when a rewind was found, and must return at once.
    """

    def __init__(self, shown: str, noticed: Callable[[], None]) -> None:
        self._shown, self._noticed = shown, noticed
        self._lock = Lock()
        self._generation = 0
        self._cluster_id = 0
        self._floor = 0
        self._read_at = 0.0
        self._witness: Witness | None = None
        self._why = ""
        self._answered = False

    @property
    def generation(self) -> int:
        """How many rewinds were found."""
        return self._generation

    @property
    def has_answered(self) -> bool:
        """Whether etcd ever gave an answer to this process."""
        return self._answered

    @property
    def witness(self) -> Witness | None:
        """The newest write that was seen."""
        return self._witness

    def now(self) -> KnownAtSending:
        """What is known as a request is sent."""
        with self._lock:
            return KnownAtSending(self._generation, self._floor, monotonic())

    def newest(self) -> tuple[int, float]:
        """The newest revision that a majority told, and when the last such request was sent."""
        with self._lock:
            return self._floor, self._read_at

    def check_generation(self, generation: int) -> None:
        """Raise `StoreRewound` if a rewind was found since."""
        if generation != self._generation:
            raise self.error()

    def check(
        self, header: pb.ResponseHeader, sent: KnownAtSending, *, linearizable: bool = True
    ) -> None:
        """Raise `StoreRewound` unless an answer belongs to the known history.

        The revision of an answer that is not linearizable may be older: a member that lags behind
        gave it.
        """
        with self._lock:
            if sent.generation != self._generation:
                raise self.error()
            self._answered = True
            if not self._cluster_id:
                self._cluster_id = header.cluster_id
            if header.cluster_id != self._cluster_id:
                raise self._rewound(
                    f"it answers as cluster {header.cluster_id:x}, it was {self._cluster_id:x}"
                )
            if linearizable:
                if header.revision < sent.floor:
                    raise self._rewound(
                        f"it answers at revision {header.revision}, {sent.floor} had been seen"
                    )
                self._floor = max(self._floor, header.revision)
                self._read_at = max(self._read_at, sent.at)

    def saw(self, sent: KnownAtSending, key: bytes, value: bytes, revision: int) -> None:
        """A write was seen in an answer to a request."""
        newest = self._witness
        if newest is not None and newest.revision >= revision:
            return
        with self._lock:
            if sent.generation == self._generation:
                self._witness = Witness(key, value, revision)

    def rewound(self, sent: KnownAtSending, why: str) -> StoreRewound:
        """etcd lost commits: forget what was known, and the error to raise."""
        with self._lock:
            return self.error() if sent.generation != self._generation else self._rewound(why)

    def error(self) -> StoreRewound:
        """The error for calls that began before the last rewind was found."""
        return StoreRewound(
            f"the store {self._shown} lost commits ({self._why}): it was restored or replaced, or "
            "its URL names servers of several etcd clusters; drop what was learned from it and "
            "list again"
        )

    def _rewound(self, why: str) -> StoreRewound:
        self._generation += 1
        self._cluster_id = self._floor = 0
        self._read_at = 0.0
        self._witness = None
        self._why = why
        self._noticed()
        return self.error()
