"""The two ends of a link as pure machines: numbers, acknowledgements, sessions, resumption.

A link is FIFO in both directions and exactly once across connections. The dialling end is an
`OutgoingLink`. The accepting process keeps one `Acceptor` per dialling incarnation, which holds the
current `IncomingLink`. Called by `domicile.links.layer` and its sessions, which own connections and
timers. Nothing here may do I/O, read a clock, or draw random numbers.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import cast, get_args

from domicile.core.ids import Incarnation
from domicile.core.wire import (
    Flush,
    Frame,
    Hello,
    Message,
    Refused,
    Reply,
    Request,
    ToOwner,
    ToSender,
    Welcome,
    weight_bytes,
)

PROTOCOLS = (1, 1)
"""The oldest and newest protocol of this version. A version has its own and the one before (DX-19);
the first published version has only one."""

SINCE: dict[object, int] = {}
"""Messages that older protocols do not have, with the first protocol that has them."""

HELD_MESSAGES = 64
"""How many of these messages may wait for the welcome, which names the protocol of a new link."""

CONTROL_RESERVE = 64
"""Frames beyond the window that only control messages may use."""

FRAME_MESSAGES = 1_024
FRAME_BYTES = 1024 * 1024
"""A frame takes no further message once it has this many, or bodies of this size."""

MOST_ANSWERS = 1 << 19
MOST_ANSWER_BYTES = 256 * 1024 * 1024
"""I6: answers, and their bytes, that may wait for a peer that reads none; beyond that its link is
dropped."""

RETAINED_BYTES = 64 * 1024 * 1024
"""I6: bytes that may be written and not acknowledged; beyond that the queue waits."""

LONG_IDS_BYTES = 4_096
"""Ids that may exceed this are measured exactly; for shorter ones four bytes per character are
counted."""

_TO_OWNER: dict[object, int] = {kind: SINCE.get(kind, 0) for kind in get_args(ToOwner)}
_TO_SENDER: dict[object, int] = {kind: SINCE.get(kind, 0) for kind in get_args(ToSender)}


class LinkBroken(Exception):
    """The peer broke the protocol: close this connection. The link itself may be resumed."""


class LinkVoid(Exception):
    """The peer's state of this link does not fit ours: the link cannot be resumed, it is lost."""


class _End:
    """What both ends of a link keep across its connections."""

    __slots__ = (
        "_acked",
        "_control",
        "_last",
        "_limit",
        "_owed_bytes",
        "_queue",
        "_queue_bytes",
        "_retained",
        "_retained_bytes",
        "_told",
        "link",
        "protocol",
        "received",
        "session",
        "up",
    )

    def __init__(self, link: str, limit: int) -> None:
        self.link = link
        self.protocol = 0
        """The protocol of both ends; 0 until it is known."""
        self.session = 0
        self.up = False
        self.received = 0
        self._limit = limit
        self._last = 0
        self._acked = 0
        self._told = 0
        self._owed_bytes = 0
        self._queue_bytes = 0
        """Bytes of the answers in the queue; senders bound their requests themselves."""
        self._retained: deque[tuple[int, tuple[Message, ...], int]] = deque()
        self._retained_bytes = 0
        self._control: deque[Message] = deque()
        self._queue: deque[Message] = deque()

    @property
    def owed(self) -> int:
        """How many frames were received and not acknowledged yet; large ones count for more.

        So the peer gets an acknowledgement before it retains too many bytes to go on.
        """
        return self.received - self._told + self._owed_bytes // FRAME_BYTES

    def weigh(self, size_bytes: int) -> None:
        """A packet of that size was received."""
        self._owed_bytes += size_bytes

    @property
    def unacknowledged(self) -> bool:
        """Whether a numbered frame may not have arrived."""
        return bool(self._retained)

    @property
    def progress(self) -> tuple[int, int]:
        """The last frame acknowledged, and the last frame received."""
        return self._acked, self.received

    @property
    def pending(self) -> bool:
        """Whether anything queued or numbered may not have arrived."""
        return bool(self._retained or self._queue or self._control)

    @property
    def ready(self) -> bool:
        """Whether `pump` would have something to write now."""
        room = self._limit - len(self._retained)
        return self.up and (
            (bool(self._queue) and room > 0 and self._retained_bytes < RETAINED_BYTES)
            or (bool(self._control) and room + CONTROL_RESERVE > 0)
        )

    def down(self) -> None:
        """The connection is gone. Numbers and retained frames stay."""
        self.up = False

    def end(self) -> None:
        """The link's state is dropped: no connection belongs to it any more."""
        self.up = False
        self.session = 0
        self._retained.clear()
        self._retained_bytes = self._queue_bytes = 0
        self._queue.clear()
        self._control.clear()

    def bare_ack(self) -> Frame:
        """An acknowledgement alone; it has no number and is itself not acknowledged."""
        return self._written(0, ())

    def pump(self) -> list[Frame]:
        """Number what may be numbered now; returns the frames to write, none without a connection.

        Control is numbered at once. The queue waits for a connection and for room in the window. So
        control may pass queued messages; the queue itself keeps its order.
        """
        frames: list[Frame] = []
        while True:
            room = self._limit - len(self._retained)
            batch: list[Message] = []
            size_bytes = 0
            if self._control and room + CONTROL_RESERVE > 0:
                size_bytes = _fill(batch, self._control, 0)
            if self.up and self._queue and room > 0 and self._retained_bytes < RETAINED_BYTES:
                control_bytes = size_bytes
                size_bytes = _fill(batch, self._queue, size_bytes)
                self._queue_bytes -= size_bytes - control_bytes
            if not batch:
                return frames
            self._last += 1
            messages = tuple(batch)
            self._retained.append((self._last, messages, size_bytes))
            self._retained_bytes += size_bytes
            if self.up:
                frames.append(self._written(self._last, messages))

    def _written(self, no: int, messages: tuple[Message, ...]) -> Frame:
        self._told = self.received
        self._owed_bytes = 0
        return Frame(no, self.received, messages)

    def _resend(self) -> list[Frame]:
        return [self._written(no, messages) for no, messages, _ in self._retained]

    def _knows(self, received: int) -> bool:
        """Whether a peer that received everything up to `received` fits this link's state."""
        return self._acked <= received <= self._last

    def _acknowledge(self, ack: int) -> None:
        if ack > self._last:
            raise LinkBroken(f"frame {ack} is acknowledged, the last one sent was {self._last}")
        while self._retained and self._retained[0][0] <= ack:
            self._retained_bytes -= self._retained.popleft()[2]
        self._acked = max(self._acked, ack)

    def _take(self, session: int, frame: Frame, kinds: dict[object, int]) -> tuple[Message, ...]:
        """The messages of a frame, if it is the next one; nothing for a duplicate or a bare ack.

        A frame from an older session's connection is ignored: its sender was told what is missing
        here and sends it again.
        """
        if session != self.session:
            return ()
        if not self.up:
            raise LinkBroken(f"frame {frame.no} came before the welcome")
        if bool(frame.no) != bool(frame.messages):
            raise LinkBroken(f"frame {frame.no} has {len(frame.messages)} messages")
        protocol = self.protocol
        for kind in dict.fromkeys(map(type, frame.messages)):
            since = kinds.get(kind)
            if since is None:
                raise LinkBroken(f"{kind.__name__} travels the other way")
            if since > protocol:
                raise LinkBroken(
                    f"{kind.__name__} is not in protocol {protocol}, which this link speaks"
                )
        self._acknowledge(frame.ack)
        if frame.no <= self.received:
            return ()
        if frame.no != self.received + 1:
            raise LinkBroken(f"frame {frame.no} came after {self.received}: there is a gap")
        self.received = frame.no
        return frame.messages


def protocols_of(hello: Hello) -> tuple[int, int]:
    """The range of protocols that a dialler has."""
    return hello.protocol, max(hello.newest, hello.protocol)


def _fill(batch: list[Message], queue: deque[Message], size_bytes: int) -> int:
    while queue and len(batch) < FRAME_MESSAGES and size_bytes < FRAME_BYTES:
        message = queue.popleft()
        batch.append(message)
        if type(message) is Request:
            ids_bytes = 4 * (len(message.id) + len(message.key))
            if ids_bytes > LONG_IDS_BYTES:
                ids_bytes = weight_bytes(b"", message.id, message.key)
            size_bytes += len(message.body) + ids_bytes
            if message.chain:
                size_bytes += weight_bytes(b"", *[caller.id for caller in message.chain])
        elif type(message) is Reply:
            size_bytes += len(message.body)
    return size_bytes


class OutgoingLink(_End):
    """The end that dials: requests out, answers in."""

    __slots__ = (
        "_held", "_recalled", "_welcomed", "address", "cluster", "protocols", "receiver", "sender",
    )  # fmt: skip

    def __init__(
        self,
        link: str,
        limit: int,
        *,
        cluster: str,
        sender: Incarnation,
        receiver: Incarnation,
        address: str,
        protocols: tuple[int, int] = PROTOCOLS,
    ) -> None:
        super().__init__(link, limit)
        self.protocols = protocols
        self._held: list[tuple[ToOwner, bool]] = []
        self._recalled: dict[tuple[str, int, int], None] = {}
        self.cluster = cluster
        self.sender = sender
        self.receiver = receiver
        self.address = address
        self._welcomed = False

    @property
    def resumes(self) -> bool:
        """Whether the peer has welcomed this link before: then it can only be resumed.

        Before the first welcome no frame was written, so a hello that says "new" twice cannot make
        anything run twice.
        """
        return self._welcomed

    @property
    def unsent(self) -> tuple[ToOwner, ...]:
        """Requests that no connection ever carried: the peer cannot have seen them."""
        return tuple(self._queue)  # type: ignore[arg-type]

    def post(self, message: Request | Flush) -> int:
        """Queue a message that every protocol has, behind all others. Returns how many wait."""
        self._queue.append(message)
        return len(self._queue)

    def send(self, message: ToOwner, *, control: bool = False) -> bool:
        """Queue a message; False if this link's protocol does not have it (DX-19).

        A message that only newer protocols have waits until the first welcome names the protocol.
        """
        since = SINCE.get(type(message), 0)
        if since > self.protocol:
            waits = not self.protocol and since <= self.protocols[1]
            if not waits or len(self._held) >= HELD_MESSAGES:
                return False
            self._held.append((message, control))
            return True
        (self._control if control else self._queue).append(message)
        return True

    def recall(self, role: str, shard: int, n: int) -> bool:
        """Take a queued request back; False if a connection may have carried it.

        Before the first welcome no connection has carried anything, so the peer never sees it.
        """
        if self._welcomed:
            return False
        self._recalled[role, shard, n] = None
        if 2 * len(self._recalled) > len(self._queue):
            self._drop_recalled()
        return True

    def _drop_recalled(self) -> None:
        """Recalled requests leave the queue together, so that each costs little."""
        recalled, self._recalled = self._recalled, {}
        kept = [
            message
            for message in self._queue
            if type(message) is not Request
            or (message.role, message.shard, message.n) not in recalled
        ]
        self._queue.clear()
        self._queue.extend(kept)

    def dial(self, session: int) -> None:
        """A new connection is being made; packets of an older one are ignored from now on."""
        if session <= self.session:
            raise ValueError(f"session {session} does not follow {self.session}")
        self.session = session
        self.up = False

    def hello(self) -> Hello:
        """The first packet on the connection of the current session."""
        self._told = self.received
        return Hello(
            cluster=self.cluster,
            sender=self.sender,
            receiver=self.receiver,
            address=self.address,
            link=self.link,
            session=self.session,
            resume=self._welcomed,
            received=self.received,
            protocol=self.protocols[0],
            newest=self.protocols[1],
        )

    def welcome(self, session: int, welcome: Welcome) -> list[Frame]:
        """The peer accepted the link: returns the frames it misses, then those that waited, in
        order."""
        if session != self.session:
            return []
        if self.up:
            raise LinkBroken("a second welcome came on one connection")
        oldest, newest = self.protocols
        if not oldest <= welcome.protocol <= newest:
            raise LinkBroken(
                f"protocol {welcome.protocol} was chosen, only {oldest} to {newest} are spoken here"
            )
        if not self._knows(welcome.received):
            raise LinkVoid(
                f"the peer claims frames up to {welcome.received}, it has acknowledged "
                f"{self._acked} of {self._last}"
            )
        self._acknowledge(welcome.received)
        if self._recalled:
            self._drop_recalled()
        self.up = True
        self._welcomed = True
        self.protocol = welcome.protocol
        return self._resend() + self.pump()

    def release_held(self) -> int:
        """Queue what waited for the first welcome. Returns how many messages the protocol does not
        have."""
        held, self._held = self._held, []
        return sum(not self.send(message, control=control) for message, control in held)

    def take(self, session: int, frame: Frame) -> tuple[ToSender, ...]:
        """The answers of a frame, in order; raises `LinkBroken`."""
        return cast("tuple[ToSender, ...]", self._take(session, frame, _TO_SENDER))


class IncomingLink(_End):
    """The end that was dialled: requests in, answers out, in one queue."""

    __slots__ = ()

    def answer(self, message: ToSender) -> int:
        """Queue a message back to the sender. Returns how many wait; -1 if those are too many."""
        self._queue.append(message)
        if type(message) is Reply:
            self._queue_bytes += len(message.body)
            if self._queue_bytes > MOST_ANSWER_BYTES:
                return -1
        waiting = len(self._queue)
        return waiting if waiting <= MOST_ANSWERS else -1

    def take(self, session: int, frame: Frame) -> tuple[ToOwner, ...]:
        """The requests of a frame, in order; raises `LinkBroken`."""
        return cast("tuple[ToOwner, ...]", self._take(session, frame, _TO_OWNER))

    def resume(self, session: int, received: int) -> list[Frame] | None:
        """Go on with a new connection: the frames that the peer misses. None if its state does not
        fit."""
        if not self._knows(received):
            return None
        self._acknowledge(received)
        self.session = session
        self.up = True
        self._told = self.received
        return self._resend() + self.pump()


@dataclass(frozen=True, slots=True)
class HelloAnswer:
    """What follows from a hello. The caller first closes the connections of `gone`, then answers.

    No answer: the hello of an older connection arrived late. The caller closes it without a
    refusal, because the dialler would believe one.
    """

    answer: Welcome | Refused | None
    link: IncomingLink | None = None
    gone: IncomingLink | None = None
    frames: tuple[Frame, ...] = ()


class Acceptor:
    """All that is kept of the links that one incarnation dials. It has at most one at a time.

    The newest session number is kept after a link is dropped, so that its late hellos stay late.
    """

    __slots__ = ("_limit", "link", "newest")

    def __init__(self, limit: int) -> None:
        self.newest = 0
        self.link: IncomingLink | None = None
        self._limit = limit

    def hello(self, hello: Hello, protocol: int = PROTOCOLS[0]) -> HelloAnswer:
        """Resume the link that the hello names, start it, or refuse to resume an unknown one.

        `protocol` is the common one of both ends, as `common_protocol` finds it.
        """
        if hello.session <= self.newest:
            return HelloAnswer(None)
        self.newest = hello.session
        if self.link is not None and self.link.link == hello.link:
            frames = self.link.resume(hello.session, hello.received)
            if frames is not None:
                answer = Welcome(self.link.received, self.link.protocol)
                return HelloAnswer(answer, self.link, None, tuple(frames))
            return HelloAnswer(Refused("this link's past is not the same here"), None, self.drop())
        gone = self.drop()
        if hello.resume or hello.received:
            return HelloAnswer(Refused("this link is not known here: start a new one"), None, gone)
        self.link = IncomingLink(hello.link, self._limit)
        self.link.protocol = protocol
        self.link.resume(hello.session, 0)
        return HelloAnswer(Welcome(0, protocol), self.link, gone)

    def drop(self) -> IncomingLink | None:
        """Forget the link, if there is one; no connection belongs to it from now on."""
        link, self.link = self.link, None
        if link is not None:
            link.end()
        return link
