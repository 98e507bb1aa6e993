"""H8, flushed: a link that returned a message takes nothing before its flush, and a flush leaves
nothing behind."""

from __future__ import annotations

from domicile.testing.checkers.reading import Message, Reading, read
from domicile.testing.checkers.verdict import Findings, Violation
from domicile.testing.history import Event, History

_Key = tuple[str, str, int, int]
_Gate = tuple[str, str, str, int]
"""An owner, a sender, and their shard."""


def check_flushed(history: History) -> list[Violation]:
    """H8: what was written before a flush is neither accepted nor returned after it; H7: after a
    return the owner accepts nothing of that link until the sender's flush arrives; H4: a returned
    message goes to the same owner and epoch again only behind a flush."""
    judge = _Judge(read(history))
    for event in history.of("write", "flush", "flushed", "accept", "return", "taken"):
        getattr(judge, f"on_{event.kind}")(event)
    return judge.found.violations


class _Written:
    """The last write of a message: to which owner, and what was flushed and returned since."""

    __slots__ = ("event", "is_flushed", "returned")

    def __init__(self, event: Event) -> None:
        self.event = event
        self.is_flushed = False
        self.returned: Event | None = None


class _Judge:
    def __init__(self, reading: Reading) -> None:
        self.found = Findings("H8")
        self._reading = reading
        self._written: dict[_Gate, dict[int, _Written]] = {}
        """The last write of each message, by its owner; a message is in one of them at most."""
        self._homes: dict[_Key, str] = {}
        self._flushes: dict[tuple[_Gate, int], dict[int, _Written]] = {}
        """What was written before each flush that has not arrived."""
        self._behind: dict[_Gate, dict[int, tuple[_Written, Event]]] = {}
        """What was written before the last flush that arrived, and its arrival."""
        self._refusing: dict[_Gate, Event] = {}
        self._links: dict[tuple[str, str], str] = {}

    def on_taken(self, event: Event) -> None:
        """A frame: on a new link nothing was returned yet."""
        pair = (event.fields["inc"], event.fields["peer"])
        link = event.fields["link"]
        if self._links.get(pair, link) != link:
            for gate in [gate for gate in self._refusing if gate[:2] == pair]:
                del self._refusing[gate]
        self._links[pair] = link

    def on_write(self, event: Event) -> None:
        fields = event.fields
        sender, owner, n = fields["inc"], fields["to"], fields["n"]
        shard = (fields["role"], fields["shard"])
        key = (sender, *shard, n)
        last = self._written.get((self._homes.get(key, ""), sender, *shard), {}).pop(n, None)
        self._homes[key] = owner
        self._written.setdefault((owner, sender, *shard), {})[n] = _Written(event)
        if (
            last is not None
            and last.returned is not None
            and not last.is_flushed
            and (last.event.fields["to"], last.event.fields["epoch"]) == (owner, fields["epoch"])
        ):
            message = (
                f"{Message(*key)} came back from {self._reading.name(owner)} and was written "
                "there again without a flush (H4)"
            )
            self.found.add(event.at, message, last.event, last.returned, event)

    def on_flush(self, event: Event) -> None:
        fields = event.fields
        gate = (fields["to"], fields["inc"], fields["role"], fields["shard"])
        written = self._written.get(gate, {})
        for one in written.values():
            one.is_flushed = True
        self._flushes[gate, fields["id"]] = dict(written)

    def on_flushed(self, event: Event) -> None:
        fields = event.fields
        gate = (fields["inc"], fields["sender"], fields["role"], fields["shard"])
        self._refusing.pop(gate, None)
        before = self._flushes.pop((gate, fields["id"]), {})
        self._behind[gate] = {n: (written, event) for n, written in before.items()}

    def on_accept(self, event: Event) -> None:
        gate, n = self._arrived(event, "accepted")
        returned = self._refusing.get(gate)
        if returned is not None and gate[1]:
            message = (
                f"{self._reading.name(gate[0])} accepted {Message(*gate[1:], n)} on a link of "
                f"which it had returned message {returned.fields['n']}, before a flush (H7)"
            )
            self.found.add(event.at, message, returned, event)

    def on_return(self, event: Event) -> None:
        gate, n = self._arrived(event, "returned")
        self._refusing.setdefault(gate, event)
        written = self._written.get(gate, {}).get(n)
        if written is not None:
            written.returned = event

    def _arrived(self, event: Event, what: str) -> tuple[_Gate, int]:
        fields = event.fields
        gate = (fields["inc"], fields["sender"], fields["role"], fields["shard"])
        n = fields["n"]
        left = self._behind.get(gate, {}).get(n)
        # A message that was written again since arrives as such.
        if left is not None and self._written.get(gate, {}).get(n) is left[0]:
            message = (
                f"{self._reading.name(gate[0])} {what} {Message(*gate[1:], n)} after it had "
                "answered a flush that was sent behind it (H8)"
            )
            self.found.add(event.at, message, left[0].event, left[1], event)
        return gate, n
