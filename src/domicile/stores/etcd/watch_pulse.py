"""When a watch of etcd that hears nothing must ask its server for a sign of life. Pure.

Idle processes renew leases, and each renewal ends with a read by a majority, whose answer carries
the store's newest revision. While that is a revision up to which the watch has heard everything,
silence is right, and asking would only cost messages (I8). A watch asks if there is a newer
revision, or if nobody has read the store of late.

An old etcd may answer such a question before it sends what happened earlier. So a revision counts
as heard only once a server that knew it answered twice, with a silence in between.
"""

from __future__ import annotations


class WatchPulse:
    """What one stream knows of its server. Times are seconds of one clock."""

    def __init__(self, silence_s: float, now: float) -> None:
        self._silence_s = silence_s
        self._heard_at = now
        self._asked = 0
        """The newest revision that was known when the last question was sent."""
        self._answered = 0
        """The revision of the last question that a server answered which knew it."""
        self._settled = 0
        """Everything up to this revision was heard."""
        self._lacked = 0
        """A revision that the server did not know when it answered last; 0: it knew all."""

    def wait_s(self, now: float) -> float:
        """Seconds to wait for an answer before the next look at `must_ask`."""
        return max(self._heard_at + self._silence_s - now, self._silence_s / 2)

    def heard(self, now: float) -> None:
        """The server has sent something."""
        self._heard_at = now

    def must_ask(self, now: float, newest: int, read_at: float) -> bool:
        """Whether to ask now. `newest` is the newest revision that a majority told, and `read_at`
        the time at which the last such question was sent."""
        if now < self._heard_at + self._silence_s:
            return False
        return newest > self._settled or read_at < now - self._silence_s

    def asks(self, newest: int) -> None:
        """The server is asked now."""
        self._asked = newest

    def told(self, revision: int) -> bool:
        """An answer without changes: the server's revision. False: it has lagged behind for the
        whole silence, so another server must be asked."""
        if revision < self._lacked:
            return False
        if revision < self._asked:
            self._lacked = self._asked
        else:
            self._lacked = 0
            self._settled, self._answered = self._answered, self._asked
        return True
