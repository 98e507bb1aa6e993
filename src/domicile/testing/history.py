"""What happened in a run, as checkers judge it.

A history is a list of events with their virtual time. The runtime reports what it does through
the meter port; the simulator adds what the store, the journal, the network and the faults did.
The checkers in `domicile.testing.checkers` read nothing else.

Names used below: `inc` is the incarnation that acts; `role`, `shard` name a shard; `sender`, `n`
name a message: the sending incarnation and its number in that shard (H1); `type`, `id` name an
entity.

=============  ==================================================================================
kind           fields
=============  ==================================================================================
**processes**
life           inc, node, hosts (bool: a node, not a client), limits (dict: buffer, window,
               mailbox, chain, stop: seconds for which a fenced process may clean up, L4)
renewed        inc, sent_at, ttl, margin — an acknowledged renewal (L1), on the process's clock
fenced         inc, reason — admits nothing from here on (L4)
ended          inc — left in an orderly way (H14)
gone           inc, peer — `inc` learned that `peer`'s record is gone
probed         inc, node, reached (bool) — whether a member reaches a node that a leader lost (C6)
taken          inc, peer, link, session, no — a frame was accepted from a peer
handed         bytes — this many were handed to the kernel (TCP alone)
**store**
commit         by, revision, puts (list of (key, value, lease)), deletes (list of keys): applied
expire         revision, deletes (list of keys): a lease ran out or was revoked
rewound        revision, history, items (list of (key, value)): all that is left of it (S5)
**journal**
claim          role, shard, epoch, owner, ok
append         role, shard, epoch, owner, type, id, seq (events before it), count, keys (of asks,
               new ones), batch (number), ok, why ("fenced", "busy", "seq", "key", or "" if ok)
settle         role, shard, epoch, owner, batch, how ("there", "void": it never wrote and never
               will, "fenced") — what became of a batch without an answer (J4)
**coordinator**
leading        inc, revision (of the leader key) — won the election
deposed        inc
told           inc, to, role, shard, owner, epoch, state, change — an entry sent to a node (C3)
**owner**
open           inc, role, shard, epoch
draining       inc, role, shard, epoch
released       inc, role, shard, epoch
closed         inc, role, shard, epoch — dropped without a release
accept         inc, role, shard, epoch, sender, n, type, id, depth (mailbox length after it)
return         inc, role, shard, epoch, sender, n
flushed        inc, role, shard, sender, id — a flush arrived, and what had not started was
               returned before this (H8)
dropped        inc, role, shard, sender, n, why — a message of a lost link, never to run
waking         inc, role, shard, epoch, sender, n, type, id — its entity starts first
start          inc, role, shard, epoch, sender, n, type, id, method, shared (bool)
resume         inc, role, shard, epoch, sender, n, type, id — a suspended handler continues
unwind         inc, role, shard, epoch, sender, n, type, id — a suspended handler continues with an
               error, perhaps to clean up after its cancellation (L4)
stopped        inc, role, shard, epoch, sender, n, type, id — `on_stop` ended, not interrupted
finish         inc, role, shard, epoch, sender, n, type, id, how ("ok", "rejected", "failed",
               "cancelled", "abandoned": never to be resumed)
staged         inc, role, shard, epoch, type, id, upto — a durable entity shows its events up to
               this number, committed or not (J5); None: it does not know how many it has
unstaged       inc, role, shard, epoch, type, id, upto — those after this number never were
withheld       inc, role, shard, epoch, sender, n, type, id, why ("fenced", "unknown") — what the
               answer depends on did not commit, or nobody knows: the caller is told maybe executed
reply          inc, sender, role, shard, n — handed to the connection
**sender**
made           inc, call (number), type, id, gate (number of the output gate of the durable entity
               that makes it, or None), hook (bool: by an `after_commit` hook) — a call to that
               entity was made that may wait before it is submitted
submit         inc, role, shard, n, type, id, method, ask (bool), chain (list of (type, id)),
               held (messages queued for that shard after it), timeout (seconds), by (type and id of
               the entity whose handler sends it, or None), seen (the last event of that entity
               that the sender may have seen when it made the call, if the entity goes on beside
               it: in a hook, or in a task that a handler left; None: all that it shows), call
               (as in `made`; None: it did not wait)
write          inc, role, shard, n, to, epoch, finishing (bool), open (unstarted on that link and
               shard after it), beyond (bool: past the window, for a waiting handler)
flush          inc, role, shard, to, id — behind everything written to that owner (H4)
outcome        inc, role, shard, n, outcome ("ok", "rejected", "failed", "not_executed",
               "maybe_executed"), cancelled (bool: its caller no longer waits) — exactly one for
               each ask, at most one for a tell (refused)
lost           inc, role, shard, n — a tell of unknown outcome; the sender was told
**replica groups**
electing       inc, epoch, why — runs this election (F5)
promoted       inc, server, epoch — its server is the primary of this epoch (F9)
loss           inc, server, epoch, bytes, writes (-1: not counted) — a receipt is stored (F10)
**workload**
acked          type, id, seq, value — a durable entity answered that `value` (None: of an earlier
               ask with that key) is its event number `seq` (None: any)
unanswered     type, id, key — a key has an effect and no reply, though its handler sends nothing
kept           type, id, values — what its journal holds in the end
woke           type, id, epoch, count — a counting entity begins at a home, with this count
increased      type, id, epoch, count — it counted, up to this
armed          type, id, epoch, delay, token — it has set its timer, instead of an earlier one
rang           type, id, epoch, token — that timer fired
**faults**
fault          fault (crash, freeze, thaw, partition, heal, cut, ...), node (index or None), inc
stepped        node (index, or None: the store), by — its wall clock was set; no fault (S4)
quiet          from here on no fault is active or will be injected
=============  ==================================================================================

Timers of entities (`self.after`) run as messages of the owner itself: `sender` is "" and `n`
counts down from -1.
"""

from __future__ import annotations

import hashlib
import re
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple


class Event(NamedTuple):
    """One event of a run."""

    at: float
    kind: str
    fields: dict[str, Any]


_make_event = Event._make

_HASHED = ("commit", "expire", "start", "claim", "append", "settle")

_OWN_FRAME = re.compile(r"domicile/[\w/]+\.py [\w.]+")
"""A line of a stored stack. It names modules of this package, which may move without a run
changing."""


class History:
    """Collects events; a `Meter`. The digest covers every frame, commit and handler start."""

    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now
        self._hash = hashlib.blake2b(digest_size=16)
        self.events: list[Event] = []
        self.counts: Counter[str] = Counter()
        self.closed = False
        self.one_key = False
        """Whether the store writes one key at a time, so that leaders seal blocks (S8)."""
        self._listeners: dict[str, list[Callable[[Event], None]]] = {}

    def subscribe(self, listener: Callable[[Event], None], *kinds: str) -> None:
        """Call `listener` for every event of some kinds as it happens, to inject a fault at an
        exact moment."""
        for kind in kinds:
            self._listeners.setdefault(kind, []).append(listener)

    def count(self, name: str, value: int = 1) -> None:
        """Add to a counter."""
        self.counts[name] += value

    def event(self, kind: str, /, **fields: Any) -> None:
        """Note an event at the current virtual time."""
        if self.closed:
            return
        at = self._now()
        event = _make_event((at, kind, fields))
        self.events.append(event)
        if kind in _HASHED:
            text = f"{at:.9f} {kind} {fields!r}\n"
            if "stuck/" in text:
                text = _OWN_FRAME.sub("domicile", text)
            self._hash.update(text.encode())
        if kind in self._listeners:
            for listener in self._listeners[kind]:
                listener(event)

    def frame(self, source: str, target: str, data: bytes) -> None:
        """Note a packet put on the network: in the digest only, there are too many to keep."""
        if not self.closed:
            self._hash.update(f"{self._now():.9f} {source} {target} ".encode() + data)

    def digest(self) -> str:
        """The same seed gives the same digest, on every Python and under every hash seed."""
        return self._hash.hexdigest()

    def of(self, *kinds: str) -> Iterator[Event]:
        """The events of some kinds, in order."""
        return (event for event in self.events if event.kind in kinds)
